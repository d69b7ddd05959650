//! Clients with `reconnect` while a server ends and another one begins at the same path.

#[path = "served/files.rs"]
mod files;

use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::mpsc::Receiver;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use defuse_fs::{
    Context, Errno, Fh, File, FileKind, FileSystem, Ino, InterruptToken, Lock, LockKind, LockOwner,
    LockRequest, LockType, LockWait, NewNode, OpenArgs, OpenFlags, ReleaseArgs, RenameFlags,
    Result,
};
use defuse_memory::{MemoryFileSystem, MemoryOptions};
use defuse_remote::{LaneUse, ReconnectingClient, RemoteOptions};
use defuse_shared::LaneOffers;
use defuse_socket::{ServerOptions, SocketServer};
use files::{context, create, name, read, write};
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, Shutdown, SocketAddrUnix, SocketFlags, SocketType, accept,
    bind, connect, listen, recv, send, shutdown, socket_with,
};
use tempfile::TempDir;

/// Longer than any test takes.
const LONG: Duration = Duration::from_secs(120);

/// A server that can end.
struct EndableServer {
    server: Arc<SocketServer>,
    thread: JoinHandle<bool>,
}

impl EndableServer {
    fn start(path: &Path, fs: Arc<dyn FileSystem>) -> EndableServer {
        let lanes = Some(Arc::new(LaneOffers::default()) as _);
        let options = ServerOptions { lanes, ..ServerOptions::default() };
        let server = Arc::new(SocketServer::bind(path, fs, options).unwrap());
        let running = Arc::clone(&server);
        EndableServer { server, thread: std::thread::spawn(move || running.run()) }
    }

    fn end(self) {
        self.server.shut_down();
        self.thread.join().unwrap();
    }
}

fn memory() -> Arc<MemoryFileSystem> {
    Arc::new(MemoryFileSystem::new(MemoryOptions::default()))
}

/// Runs `test` on clients by messages and by shared memory, with the first server and a function
/// that begins another one, on the same files or on those that it is given.
fn run_on_each(
    limit: Duration,
    test: impl Fn(&Path, ReconnectingClient, EndableServer, Arc<MemoryFileSystem>),
) {
    for lanes in [LaneUse::Never, LaneUse::Required] {
        let dir = TempDir::with_prefix("defuse-reconnect-").unwrap();
        let path = dir.path().join("socket");
        let fs = memory();
        let server = EndableServer::start(&path, fs.clone());
        let options = RemoteOptions { lanes, ..RemoteOptions::default() };
        let client = ReconnectingClient::connect(&path, options, limit).unwrap();
        test(&path, client, server, fs);
    }
}

fn fsync(client: &ReconnectingClient, file: File) -> Result<()> {
    client.fsync(&context(), file, false)
}

fn setlk(client: &ReconnectingClient, file: File, typ: LockType) -> Result<()> {
    let lock = Lock { typ, start: 0, end: u64::MAX, pid: 1 };
    let owner = LockOwner(1);
    let request = LockRequest { kind: LockKind::Flock, owner, lock, wait: false };
    client.setlk(&context(), file, &request)
}

fn mkdir(client: &ReconnectingClient, parent: Ino, text: &str) -> Result<Ino> {
    let cx = context();
    let node = NewNode::new(FileKind::Directory, 0o755, cx.caller);
    client.mkdir(&cx, parent, name(text), &node).map(|entry| entry.ino)
}

fn lookup(client: &ReconnectingClient, parent: Ino, text: &str) -> Result<Ino> {
    client.lookup(&context(), parent, name(text)).map(|entry| entry.ino)
}

#[test]
fn open_files_and_directories_are_found_again_by_their_paths() {
    run_on_each(LONG, |path, client, first, fs| {
        let cx = context();
        let outer = mkdir(&client, Ino::ROOT, "outer").unwrap();
        let inner = mkdir(&client, outer, "inner").unwrap();
        let (entry, file) = create(&client, "file");
        write(&client, file, 0, b"before").unwrap();
        fsync(&client, file).unwrap();
        let to = (inner, name("moved"));
        client.rename(&cx, (Ino::ROOT, name("file")), to, RenameFlags(0)).unwrap();

        first.end();
        let second = EndableServer::start(path, fs);
        assert_eq!(read(&client, file, 0, 100), Ok(b"before".to_vec()));
        assert_eq!(write(&client, file, 6, b" and after"), Ok(10));
        assert_eq!(read(&client, file, 0, 100), Ok(b"before and after".to_vec()));
        // Numbers stay, whichever name is looked up first.
        assert_eq!(lookup(&client, inner, "moved"), Ok(entry.ino));
        assert_eq!(lookup(&client, Ino::ROOT, "outer"), Ok(outer));
        assert_eq!(client.getattr(&cx, inner, None).unwrap().kind, FileKind::Directory);
        assert_eq!(mkdir(&client, inner, "new").map(drop), Ok(()));
        assert_eq!(fsync(&client, file), Ok(()));
        client.release(&cx, file, ReleaseArgs::default()).unwrap();
        assert_eq!(read(&client, file, 0, 1), Err(Errno::EBADF));
        assert_eq!(client.reconnect_count(), 1);
        drop(client);
        second.end();
    });
}

#[test]
fn a_file_that_is_another_one_or_has_no_name_any_more_is_stale() {
    run_on_each(LONG, |path, client, first, _| {
        let cx = context();
        let (entry, file) = create(&client, "same name");
        let (_, unlinked) = create(&client, "unlinked");
        client.unlink(&cx, Ino::ROOT, name("unlinked")).unwrap();
        write(&client, unlinked, 0, b"data").unwrap();
        fsync(&client, unlinked).unwrap();
        fsync(&client, file).unwrap();

        first.end();
        // The other file has the same name and number, but was made later.
        let other = memory();
        create(&*other, "same name");
        let second = EndableServer::start(path, other);
        assert_eq!(read(&client, file, 0, 1), Err(Errno::ESTALE));
        assert_eq!(write(&client, file, 0, b"never"), Err(Errno::ESTALE));
        assert_eq!(read(&client, unlinked, 0, 4), Err(Errno::ESTALE));
        let found = lookup(&client, Ino::ROOT, "same name").unwrap();
        assert_ne!(found, entry.ino);
        assert_eq!(client.getattr(&cx, found, None).unwrap().size, 0);
        drop(client);
        second.end();
    });
}

/// The second server has no data that the first one had acknowledged and not made durable.
#[test]
fn fsync_fails_once_after_changes_that_no_fsync_has_made_durable() {
    run_on_each(LONG, |path, client, first, fs| {
        let cx = context();
        let (_, durable) = create(&client, "durable");
        let (_, lost) = create(&client, "lost");
        for file in [durable, lost] {
            write(&client, file, 0, b"data").unwrap();
            fsync(&client, file).unwrap();
        }
        write(&client, lost, 4, b"more").unwrap();
        first.end();
        // close(2) waits for no server, and reports the errors that it knows.
        assert_eq!(client.flush(&cx, durable, LockOwner(1)), Ok(()));
        assert_eq!(client.flush(&cx, lost, LockOwner(1)), Err(Errno::EIO));
        let second = EndableServer::start(path, fs);
        assert_eq!(fsync(&client, durable), Ok(()));
        assert_eq!(fsync(&client, lost), Err(Errno::EIO));
        assert_eq!(fsync(&client, lost), Ok(()));
        write(&client, lost, 8, b"again").unwrap();
        assert_eq!(client.flush(&cx, lost, LockOwner(1)), Ok(()));
        assert_eq!(fsync(&client, lost), Ok(()));
        drop(client);
        second.end();
    });
}

#[test]
fn lost_locks_fail_the_next_call_on_their_open_file_once() {
    run_on_each(LONG, |path, client, first, fs| {
        let (entry, locked) = create(&client, "locked");
        let args = OpenArgs { flags: OpenFlags(OpenFlags::RDWR), ..OpenArgs::default() };
        let fh = client.open(&context(), entry.ino, args).unwrap().fh;
        let other = File { ino: entry.ino, fh };
        fsync(&client, locked).unwrap();
        setlk(&client, locked, LockType::Write).unwrap();
        first.end();
        let second = EndableServer::start(path, fs.clone());
        // An open file without locks has lost none.
        assert_eq!(read(&client, other, 0, 1), Ok(Vec::new()));
        assert_eq!(setlk(&client, locked, LockType::Write), Err(Errno::ENOLCK));
        assert_eq!(setlk(&client, locked, LockType::Write), Ok(()));
        second.end();
        let third = EndableServer::start(path, fs);
        assert_eq!(read(&client, locked, 0, 1), Err(Errno::EIO));
        assert_eq!(read(&client, locked, 0, 1), Ok(Vec::new()));
        drop(client);
        third.end();
    });
}

/// Has `client` wait for a lock that it has itself. Returns the open file with the lock, and the
/// way of the answer.
fn wait_for_lock(client: &ReconnectingClient) -> (File, Receiver<Result<()>>) {
    let cx = context();
    let (entry, held) = create(client, "file");
    fsync(client, held).unwrap();
    setlk(client, held, LockType::Write).unwrap();
    let args = OpenArgs { flags: OpenFlags(OpenFlags::RDWR), kill_suidgid: false };
    let other = File { ino: entry.ino, fh: client.open(&cx, entry.ino, args).unwrap().fh };
    let lock = Lock { typ: LockType::Write, start: 0, end: u64::MAX, pid: 1 };
    let request = LockRequest { kind: LockKind::Flock, owner: LockOwner(2), lock, wait: true };
    let (send, receive) = std::sync::mpsc::channel();
    let answer = Box::new(move |answer| send.send(answer).unwrap());
    let interrupt = Arc::new(InterruptToken::default());
    client.setlkw(LockWait::new((other, request), cx.caller, 1, interrupt, answer));
    // The server has the wait once it answers what came after it.
    assert_eq!(read(client, held, 0, 1), Ok(Vec::new()));
    (held, receive)
}

/// It ended with `ENOTCONN`, because the client answers its waits when it notices the end of a
/// killed server, before a call has recorded that; and with `EINTR` if the server ended in order.
#[test]
fn a_wait_for_a_lock_ends_with_enolck_when_its_server_ends() {
    run_on_each(LONG, |path, client, first, fs| {
        let (held, answer) = wait_for_lock(&client);
        first.end();
        assert_eq!(answer.recv_timeout(LONG).unwrap(), Err(Errno::ENOLCK));
        let _second = EndableServer::start(path, fs);
        assert_eq!(setlk(&client, held, LockType::Write), Err(Errno::ENOLCK));
    });
    let (_dir, between, client, _server, _) = make_losing();
    let (_, answer) = wait_for_lock(&client);
    between.lose(LostPart::Request(MKDIR));
    assert!(mkdir(&client, Ino::ROOT, "dir").is_ok());
    assert_eq!(answer.recv_timeout(LONG).unwrap(), Err(Errno::ENOLCK));
}

#[test]
fn without_a_server_calls_end_at_the_limit_and_the_next_server_is_found() {
    let limit = Duration::from_millis(300);
    run_on_each(limit, |path, client, first, fs| {
        let (_, file) = create(&client, "file");
        fsync(&client, file).unwrap();
        first.end();
        let begun = Instant::now();
        assert_eq!(read(&client, file, 0, 1), Err(Errno::ENOTCONN));
        assert!(begun.elapsed() >= limit);
        // The others do not wait again.
        for _ in 0..10 {
            assert_eq!(read(&client, file, 0, 1), Err(Errno::ENOTCONN));
        }
        let second = EndableServer::start(path, fs);
        let found = || read(&client, file, 0, 1) == Ok(Vec::new());
        assert!((0..1000).any(|_| {
            std::thread::sleep(Duration::from_millis(5));
            found()
        }));
        drop(client);
        second.end();
    });
}

#[test]
fn a_waiting_call_ends_with_an_interrupt() {
    run_on_each(LONG, |_, client, first, _| {
        let (_, file) = create(&client, "file");
        first.end();
        let token = InterruptToken::default();
        let cx = Context::with_interrupt(context().caller, 1, &token);
        std::thread::scope(|scope| {
            let call = scope.spawn(|| client.getattr(&cx, file.ino, Some(file.fh)));
            std::thread::sleep(Duration::from_millis(50));
            token.trip();
            assert_eq!(call.join().unwrap().err(), Some(Errno::EINTR));
        });
    });
}

#[test]
fn forgotten_inodes_and_closed_files_leave_nothing_behind() {
    run_on_each(LONG, |path, client, first, fs| {
        let cx = context();
        let known = || format!("{client:?}");
        let before = known();
        let mut made = Vec::new();
        let dir = mkdir(&client, Ino::ROOT, "dir").unwrap();
        for number in 0..100 {
            let (entry, file) = create(&client, &format!("file {number}"));
            let to = (dir, name("target"));
            client
                .rename(&cx, (Ino::ROOT, name(&format!("file {number}"))), to, RenameFlags(0))
                .unwrap();
            made.push((entry, file));
        }
        // The directory is forgotten before what lies in it.
        client.forget(dir, 1);
        first.end();
        let second = EndableServer::start(path, fs);
        assert!(read(&client, made[99].1, 0, 1).is_ok());
        for (entry, file) in made {
            client.release(&cx, file, ReleaseArgs::default()).unwrap();
            client.forget(entry.ino, 1);
        }
        assert_eq!(known(), before);
        assert_eq!(
            client.release(&cx, File { ino: dir, fh: Fh(1) }, ReleaseArgs::default()),
            Err(Errno::EBADF)
        );
        drop(client);
        second.end();
    });
}

/// A part of an exchange that is lost, with the connection: as if the server was killed at this
/// moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum LostPart {
    /// The server does not get the request of this opcode.
    Request(u32),
    /// The server has handled the request of this opcode.
    Answer(u32),
}

const MKDIR: u32 = 9;
const CREATE: u32 = 35;
const FLUSH: u32 = 25;

/// Passes messages between clients at one path and the server at another, until one is to be lost.
#[derive(Default)]
struct MessageProxy {
    lost: Mutex<Option<LostPart>>,
    /// The opcodes of all requests.
    requests: Mutex<Vec<u32>>,
}

impl MessageProxy {
    fn start(path: &Path, server: &Path) -> Arc<MessageProxy> {
        let between = Arc::new(MessageProxy::default());
        let listener = MessageProxy::socket();
        bind(&listener, &SocketAddrUnix::new(path).unwrap()).unwrap();
        listen(&listener, 16).unwrap();
        let (own, server) = (Arc::clone(&between), server.to_path_buf());
        std::thread::spawn(move || {
            while let Ok(client) = accept(&listener) {
                let upstream = MessageProxy::socket();
                connect(&upstream, &SocketAddrUnix::new(&server).unwrap()).unwrap();
                own.pass(client, upstream);
            }
        });
        between
    }

    fn socket() -> OwnedFd {
        let flags = SocketFlags::CLOEXEC;
        socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap()
    }

    fn lose(&self, lost: LostPart) {
        *self.lost.lock().unwrap() = Some(lost);
    }

    fn is_lost(&self) -> bool {
        self.lost.lock().unwrap().is_none()
    }

    /// Passes the messages of a connection, both ways.
    fn pass(self: &Arc<Self>, client: OwnedFd, server: OwnedFd) {
        let ends = Arc::new((client, server));
        // The number of the request whose answer is to be lost.
        let awaited = Arc::new(Mutex::new(None));
        for is_request in [true, false] {
            let (between, ends, awaited) =
                (Arc::clone(self), Arc::clone(&ends), Arc::clone(&awaited));
            std::thread::spawn(move || {
                let (from, to) = if is_request { (&ends.0, &ends.1) } else { (&ends.1, &ends.0) };
                let mut room = vec![0; 256 << 10];
                while let Ok((len, _)) = recv(from, &mut room[..], RecvFlags::empty()) {
                    let message = &room[..len];
                    if len == 0 || between.should_lose(is_request, message, &awaited) {
                        break;
                    }
                    if send(to, message, SendFlags::NOSIGNAL).is_err() {
                        break;
                    }
                }
                let _ = shutdown(&ends.0, Shutdown::Both);
                let _ = shutdown(&ends.1, Shutdown::Both);
            });
        }
    }

    fn should_lose(&self, is_request: bool, message: &[u8], awaited: &Mutex<Option<u64>>) -> bool {
        let Some(head) = message.get(..16) else { return false };
        let number = u64::from_ne_bytes(head[8..16].try_into().unwrap());
        let (mut lost, mut awaited) = (self.lost.lock().unwrap(), awaited.lock().unwrap());
        if !is_request {
            let is_it = *awaited == Some(number);
            if is_it {
                *lost = None;
            }
            return is_it;
        }
        let opcode = u32::from_ne_bytes(head[4..8].try_into().unwrap());
        self.requests.lock().unwrap().push(opcode);
        match *lost {
            Some(LostPart::Request(wanted)) if wanted == opcode => {
                *lost = None;
                true
            }
            Some(LostPart::Answer(wanted)) if wanted == opcode => {
                *awaited = Some(number);
                false
            }
            _ => false,
        }
    }
}

/// A client by messages that loses one of them at a time, and the files of its server.
fn make_losing()
-> (TempDir, Arc<MessageProxy>, ReconnectingClient, EndableServer, Arc<MemoryFileSystem>) {
    let dir = TempDir::with_prefix("defuse-reconnect-").unwrap();
    let (path, behind) = (dir.path().join("socket"), dir.path().join("server"));
    let fs = memory();
    let server = EndableServer::start(&behind, fs.clone());
    let between = MessageProxy::start(&path, &behind);
    let client = ReconnectingClient::connect(&path, RemoteOptions::default(), LONG).unwrap();
    (dir, between, client, server, fs)
}

fn make_file(client: &ReconnectingClient, text: &str) -> Result<File> {
    let cx = context();
    let flags = OpenFlags(OpenFlags::CREAT | OpenFlags::EXCL | 2);
    let args = OpenArgs { flags, ..OpenArgs::default() };
    let node = NewNode::new(FileKind::Regular, 0o644, cx.caller);
    let made = client.create(&cx, Ino::ROOT, name(text), &node, args);
    made.map(|(entry, opened)| File { ino: entry.ino, fh: opened.fh })
}

/// If a name is there, it is unknown if the lost call made it, or another client: neither success
/// nor `EEXIST` would be true in both cases.
#[test]
fn a_creation_that_was_done_and_not_answered_fails_once_with_eio() {
    let (_dir, between, client, server, fs) = make_losing();
    between.lose(LostPart::Answer(MKDIR));
    assert_eq!(mkdir(&client, Ino::ROOT, "dir"), Err(Errno::EIO));
    assert!(between.is_lost() && fs.lookup(&context(), Ino::ROOT, name("dir")).is_ok());
    // From now on everything is known.
    assert_eq!(mkdir(&client, Ino::ROOT, "dir"), Err(Errno::EEXIST));
    let dir = lookup(&client, Ino::ROOT, "dir").unwrap();
    assert!(mkdir(&client, dir, "inner").is_ok());
    between.lose(LostPart::Answer(CREATE));
    assert_eq!(make_file(&client, "file"), Err(Errno::EIO));
    assert!(between.is_lost());
    assert_eq!(make_file(&client, "file"), Err(Errno::EEXIST));
    assert!(lookup(&client, Ino::ROOT, "file").is_ok());
    assert_eq!(client.reconnect_count(), 2);
    drop(client);
    server.end();
}

/// It failed with `EIO`, although the name is missing: whatever became of the call, it can be made
/// again.
#[test]
fn a_creation_that_was_not_done_is_made_by_the_next_server() {
    let (_dir, between, client, server, fs) = make_losing();
    between.lose(LostPart::Request(MKDIR));
    let dir = mkdir(&client, Ino::ROOT, "dir").unwrap();
    assert!(between.is_lost() && mkdir(&client, dir, "inner").is_ok());
    between.lose(LostPart::Request(CREATE));
    let file = make_file(&client, "file").unwrap();
    assert_eq!(write(&client, file, 0, b"data"), Ok(4));
    assert!(fs.lookup(&context(), Ino::ROOT, name("file")).is_ok());
    // Neither the lost call nor another client made a name that was there before: the client cannot
    // distinguish this case.
    between.lose(LostPart::Request(MKDIR));
    assert_eq!(mkdir(&client, Ino::ROOT, "dir"), Err(Errno::EIO));
    assert_eq!(mkdir(&client, Ino::ROOT, "dir"), Err(Errno::EEXIST));
    assert_eq!(client.reconnect_count(), 3);
    drop(client);
    server.end();
}

/// Each close(2) was a request.
#[test]
fn a_close_asks_the_server_only_after_changes_and_locks() {
    let (_dir, between, client, server, _) = make_losing();
    let flushes = || between.requests.lock().unwrap().iter().filter(|one| **one == FLUSH).count();
    let flush = |file| client.flush(&context(), file, LockOwner(1));
    let file = make_file(&client, "file").unwrap();
    write(&client, file, 0, b"data").unwrap();
    fsync(&client, file).unwrap();
    assert_eq!(
        (read(&client, file, 0, 4), flush(file), flushes()),
        (Ok(b"data".to_vec()), Ok(()), 0)
    );
    // A change that is not durable may be lost with the server. So the client checks that it is
    // there.
    write(&client, file, 4, b"more").unwrap();
    assert_eq!((flush(file), flushes()), (Ok(()), 1));
    fsync(&client, file).unwrap();
    // Record locks end when any open file of their process is closed.
    let (_, other) = create(&client, "other");
    fsync(&client, other).unwrap();
    assert_eq!((flush(other), flushes()), (Ok(()), 1));
    setlk(&client, file, LockType::Write).unwrap();
    assert_eq!((flush(other), flushes()), (Ok(()), 2));
    drop(client);
    server.end();
}
