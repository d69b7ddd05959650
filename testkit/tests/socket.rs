//! File systems through a socket: the client in the kernel's place, and the server behind it.

use std::path::PathBuf;
use std::sync::Arc;
use std::thread::JoinHandle;

use defuse_fs::{
    Caller, Context, Entry, Errno, File, FileKind, FileSystem, Ino, Name, NewNode, OpenArgs,
    OpenFlags, ReadArgs, ReadBuf, Result, SetAttr, SliceSink, SliceSource, WriteArgs, WriteBuf,
    delegate,
};
use defuse_fuse::client::{Client, ClientOptions};
use defuse_fuse::{Admission, Server, ServerOptions};
use defuse_memory::{Memory, Options};
use defuse_testkit::model::{Missing, check};
use tempfile::TempDir;

/// A server on a socket of its own, until it is dropped.
struct Served {
    server: Arc<Server>,
    path: PathBuf,
    thread: Option<JoinHandle<bool>>,
    _dir: TempDir,
}

impl Served {
    fn new(fs: Arc<dyn FileSystem>) -> Served {
        let dir = TempDir::with_prefix("defuse-socket-").unwrap();
        let path = dir.path().join("socket");
        let server = Arc::new(Server::bind(&path, fs, ServerOptions::default()).unwrap());
        let running = Arc::clone(&server);
        let thread = Some(std::thread::spawn(move || running.run()));
        Served { server, path, thread, _dir: dir }
    }

    fn memory() -> Served {
        Served::new(Arc::new(Memory::new(Options::default())))
    }

    fn client(&self) -> Client {
        Client::connect(&self.path, ClientOptions::default()).unwrap()
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        self.server.shut_down();
        let clean = self.thread.take().unwrap().join().unwrap();
        assert!(clean || std::thread::panicking(), "connections did not end");
    }
}

/// A client together with its server.
struct Both {
    client: Client,
    _served: Served,
}

impl FileSystem for Both {
    delegate!(to client);
}

fn context() -> Context<'static> {
    Context::new(Caller { uid: 0, gid: 0, pid: 1 })
}

fn create(fs: &dyn FileSystem, name: &str) -> (Entry, File) {
    let cx = context();
    let node = NewNode::new(FileKind::Regular, 0o644, cx.caller);
    let args =
        OpenArgs { flags: OpenFlags(OpenFlags::RDWR | OpenFlags::CREAT), kill_suidgid: false };
    let name = Name::new(name.as_bytes()).unwrap();
    let (entry, opened) = fs.create(&cx, Ino::ROOT, name, &node, args).unwrap();
    (entry, File { ino: entry.ino, fh: opened.fh })
}

fn write(fs: &dyn FileSystem, file: File, offset: u64, bytes: &[u8]) -> Result<usize> {
    let mut source = SliceSource::new(bytes);
    let args = WriteArgs { offset, flags: OpenFlags(OpenFlags::RDWR), ..WriteArgs::default() };
    fs.write(&context(), file, args, &mut WriteBuf::new(&mut source))
}

fn read(fs: &dyn FileSystem, file: File, offset: u64, len: usize) -> Result<Vec<u8>> {
    let mut bytes = vec![0; len];
    let mut sink = SliceSink::new(&mut bytes);
    let mut out = ReadBuf::new(&mut sink, len);
    let args = ReadArgs { offset, flags: OpenFlags(OpenFlags::RDWR), ..ReadArgs::default() };
    fs.read(&context(), file, args, &mut out)?;
    let filled = out.filled();
    bytes.truncate(filled);
    Ok(bytes)
}

#[test]
fn memory_through_a_socket_does_what_the_model_does() {
    check(Missing::Refused, || {
        let served = Served::memory();
        Arc::new(Both { client: served.client(), _served: served })
    });
}

#[test]
fn what_one_client_writes_another_one_reads() {
    let served = Served::memory();
    let (one, other) = (served.client(), served.client());
    let (_, file) = create(&one, "shared");
    // Longer than one message.
    let bytes: Vec<u8> = (0..1_000_000_u32).map(|at| (at / 7) as u8).collect();
    assert_eq!(write(&one, file, 3, &bytes), Ok(bytes.len()));
    let cx = context();
    let entry = other.lookup(&cx, Ino::ROOT, Name::new(b"shared").unwrap()).unwrap();
    assert_eq!(entry.attr.size, bytes.len() as u64 + 3);
    let opened = other.open(&cx, entry.ino, OpenArgs::default()).unwrap();
    let seen = read(&other, File { ino: entry.ino, fh: opened.fh }, 3, bytes.len() + 50).unwrap();
    assert!(seen == bytes, "{} bytes differ", seen.len());
}

#[test]
fn a_family_keeps_its_files_until_its_last_connection_ends_and_others_never_see_them() {
    let served = Served::memory();
    let parent = served.client();
    let (entry, file) = create(&parent, "kept");
    assert_eq!(write(&parent, file, 0, b"kept"), Ok(4));
    let child = parent.sibling().unwrap();
    let stranger = served.client();
    assert_eq!(stranger.getattr(&context(), entry.ino, None), Err(Errno::ESTALE));
    assert_eq!(read(&stranger, file, 0, 4), Err(Errno::ESTALE));
    stranger.forget(entry.ino, 1000);
    parent.unlink(&context(), Ino::ROOT, Name::new(b"kept").unwrap()).unwrap();
    drop(parent);
    assert_eq!(read(&child, file, 0, 10), Ok(b"kept".to_vec()));
}

#[test]
fn two_hundred_clients_are_served_at_once() {
    let served = Served::memory();
    let clients: Vec<_> = (0..200).map(|_| served.client()).collect();
    for (number, client) in clients.iter().enumerate() {
        let (_, file) = create(client, &format!("file{number}"));
        assert_eq!(write(client, file, 0, &[number as u8]), Ok(1));
    }
    assert_eq!(served.server.connections(), clients.len());
}

/// The credentials of a thread are its own, so that one thread can be another user's client.
#[test]
fn who_is_not_root_acts_for_nobody_else() {
    if !rustix::process::geteuid().is_root() {
        println!("skipped: only root can become another user");
        return;
    }
    let name = format!("@defuse-test-{}", std::process::id());
    let options =
        ServerOptions { admission: Admission::Users(vec![4321]), ..ServerOptions::default() };
    let memory = Options { root_perm: 0o777, ..Options::default() };
    let server = Server::bind(name.as_ref(), Arc::new(Memory::new(memory)), options).unwrap();
    let connect = |uid: u32| {
        let name = name.clone();
        let thread = std::thread::spawn(move || {
            let uid = rustix::process::Uid::from_raw(uid);
            rustix::thread::set_thread_res_uid(uid, uid, uid).unwrap();
            Client::connect(name.as_ref(), ClientOptions::default())
        });
        thread.join().unwrap()
    };
    std::thread::scope(|scope| {
        scope.spawn(|| server.run());
        assert!(connect(4322).is_err(), "a user who is not admitted");
        let client = connect(4321).unwrap();
        let as_uid = |uid| Context::new(Caller { uid, gid: 0, pid: 1 });
        assert!(client.getattr(&as_uid(4321), Ino::ROOT, None).is_ok());
        assert_eq!(client.getattr(&as_uid(0), Ino::ROOT, None), Err(Errno::EPERM));
        let give = SetAttr { uid: Some(0), ..SetAttr::default() };
        assert_eq!(client.setattr(&as_uid(4321), Ino::ROOT, None, &give), Err(Errno::EPERM));
        drop(client);
        server.shut_down();
    });
}
