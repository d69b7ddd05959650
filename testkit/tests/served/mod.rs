//! A server with clients in this process, and operations on its files.

use std::path::PathBuf;
use std::sync::Arc;
use std::thread::JoinHandle;

use defuse_fs::{
    Caller, Context, Entry, File, FileKind, FileSystem, Ino, Name, NewNode, OpenArgs, OpenFlags,
    ReadArgs, ReadBuf, Result, SliceSink, SliceSource, WriteArgs, WriteBuf, delegate,
};
use defuse_remote::{Remote, RemoteOptions};
use defuse_socket::{Server, ServerOptions};
use tempfile::TempDir;

/// A server on a new socket, stopped when dropped.
pub struct Served {
    pub server: Arc<Server>,
    pub path: PathBuf,
    clients: RemoteOptions,
    thread: Option<JoinHandle<bool>>,
    _dir: TempDir,
}

impl Served {
    /// Serves `fs` to clients with the options `clients`.
    pub fn new(fs: Arc<dyn FileSystem>, options: ServerOptions, clients: RemoteOptions) -> Served {
        let dir = TempDir::with_prefix("defuse-served-").unwrap();
        let path = dir.path().join("socket");
        let server = Arc::new(Server::bind(&path, fs, options).unwrap());
        let running = Arc::clone(&server);
        let thread = Some(std::thread::spawn(move || running.run()));
        Served { server, path, clients, thread, _dir: dir }
    }

    pub fn client(&self) -> Remote {
        Remote::connect(&self.path, self.clients).unwrap()
    }

    /// A new client that keeps the server.
    pub fn with_client(self) -> Both {
        Both { client: self.client(), _served: self }
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        self.server.shut_down();
        let clean = self.thread.take().unwrap().join().unwrap();
        assert!(clean || std::thread::panicking(), "connections did not end");
    }
}

/// A client and its server.
pub struct Both {
    client: Remote,
    _served: Served,
}

impl FileSystem for Both {
    delegate!(to client);
}

pub fn context() -> Context<'static> {
    Context::new(Caller { uid: 0, gid: 0, pid: 1 })
}

pub fn name(text: &str) -> Name<'_> {
    Name::new(text.as_bytes()).unwrap()
}

/// Makes a file in the root, open for reading and writing.
pub fn create(fs: &dyn FileSystem, text: &str) -> (Entry, File) {
    let cx = context();
    let node = NewNode::new(FileKind::Regular, 0o644, cx.caller);
    let args =
        OpenArgs { flags: OpenFlags(OpenFlags::RDWR | OpenFlags::CREAT), kill_suidgid: false };
    let (entry, opened) = fs.create(&cx, Ino::ROOT, name(text), &node, args).unwrap();
    (entry, File { ino: entry.ino, fh: opened.fh })
}

pub fn write(fs: &dyn FileSystem, file: File, offset: u64, bytes: &[u8]) -> Result<usize> {
    let mut source = SliceSource::new(bytes);
    let args = WriteArgs { offset, flags: OpenFlags(OpenFlags::RDWR), ..WriteArgs::default() };
    fs.write(&context(), file, args, &mut WriteBuf::new(&mut source))
}

pub fn read(fs: &dyn FileSystem, file: File, offset: u64, len: usize) -> Result<Vec<u8>> {
    let mut bytes = vec![0; len];
    let mut sink = SliceSink::new(&mut bytes);
    let mut out = ReadBuf::new(&mut sink, len);
    let args = ReadArgs { offset, flags: OpenFlags(OpenFlags::RDWR), ..ReadArgs::default() };
    fs.read(&context(), file, args, &mut out)?;
    let filled = out.filled();
    bytes.truncate(filled);
    Ok(bytes)
}
