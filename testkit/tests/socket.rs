//! File systems through a socket: the client takes the role of the kernel, in front of the server.

#[allow(dead_code)] // Not all of it is used here.
mod served;

use std::sync::Arc;
use std::time::{Duration, Instant};

use defuse_fs::{
    Caller, Caps, Context, Entry, Errno, Fh, File, FileKind, FileSystem, Ino, InterruptToken,
    IoctlArgs, Lock, LockKind, LockOwner, LockRequest, LockSupport, LockType, Name, NewNode,
    OpenArgs, OpenFlags, ReadArgs, ReadBuf, ReleaseArgs, RenameFlags, Result, SetAttr, SliceSink,
    SliceSource, WriteArgs, WriteBuf, delegate,
};
use defuse_memory::{MemoryFileSystem, MemoryOptions};
use defuse_remote::{InodeHandover, OpenFileHandover, RemoteClient, RemoteError, RemoteOptions};
use defuse_socket::{AdmissionPolicy, ServeError, ServerOptions, SocketServer};
use defuse_testkit::model::{MissingPolicy, check};
use served::{TestServer, context, create, name, read, write};

/// A server of files in memory.
fn memory() -> TestServer {
    serve(Arc::new(MemoryFileSystem::new(MemoryOptions::default())))
}

fn serve(fs: Arc<dyn FileSystem>) -> TestServer {
    TestServer::new(fs, ServerOptions::default(), RemoteOptions::default())
}

#[test]
fn memory_through_a_socket_does_what_the_model_does() {
    check(MissingPolicy::Refused, || Arc::new(memory().with_client()));
}

#[test]
fn one_client_reads_what_another_one_writes() {
    let served = memory();
    let (one, other) = (served.client(), served.client());
    let (_, file) = create(&one, "shared");
    // Longer than one message.
    let bytes: Vec<u8> = (0..1_000_000_u32).map(|at| (at / 7) as u8).collect();
    assert_eq!(write(&one, file, 3, &bytes), Ok(bytes.len()));
    let cx = context();
    let entry = other.lookup(&cx, Ino::ROOT, name("shared")).unwrap();
    assert_eq!(entry.attr.size, bytes.len() as u64 + 3);
    let opened = other.open(&cx, entry.ino, OpenArgs::default()).unwrap();
    let seen = read(&other, File { ino: entry.ino, fh: opened.fh }, 3, bytes.len() + 50).unwrap();
    assert!(seen == bytes, "{} bytes differ", seen.len());
}

/// sync(2) and syncfs(2) left what programs had stored through mappings in the memory of the
/// server.
#[test]
fn a_sync_of_the_file_system_has_what_was_stored_through_mappings() {
    let fs = Arc::new(MemoryFileSystem::new(MemoryOptions::default()));
    let served = serve(Arc::clone(&fs) as Arc<dyn FileSystem>);
    let client = served.client();
    let (entry, file) = create(&client, "mapped");
    assert_eq!(write(&client, file, 0, &[1; 100]), Ok(100));
    let memory = std::fs::File::from(client.map(&context(), file, 0..4096, true).unwrap());
    std::os::unix::fs::FileExt::write_all_at(&memory, b"stored", 50).unwrap();
    let below = || read(&*fs, File { ino: entry.ino, fh: Fh(0) }, 50, 6).unwrap();
    assert_eq!(below(), [1; 6]);
    client.syncfs(&context()).unwrap();
    assert_eq!(below(), b"stored");
    client.unmap(&context(), entry.ino).unwrap();
}

/// A file system that takes no byte, and reports this.
struct FullFileSystem {
    inner: MemoryFileSystem,
}

impl FileSystem for FullFileSystem {
    delegate!(to inner, except write);

    fn write(&self, _: &Context<'_>, _: File, _: WriteArgs, _: &mut WriteBuf<'_>) -> Result<usize> {
        Ok(0)
    }
}

/// write(2) in a run returned 0, which a program takes for a success or tries again for ever. The
/// kernel makes it `EIO`.
#[test]
fn a_write_that_the_server_answers_with_no_byte_is_an_error() {
    let served =
        serve(Arc::new(FullFileSystem { inner: MemoryFileSystem::new(MemoryOptions::default()) }));
    let client = served.client();
    let (_, file) = create(&client, "file");
    assert_eq!(write(&client, file, 0, b"bytes"), Err(Errno::EIO));
    assert_eq!(write(&client, file, 0, b""), Ok(0));
}

/// Returned lookups are sent in batches. The lookups of a file without a name hold its space.
#[test]
fn the_space_of_a_file_that_was_closed_before_it_was_removed_is_given_back() {
    let served = memory();
    let client = served.client();
    let free = || client.statfs(&context(), Ino::ROOT).unwrap().files_free;
    let before = free();
    let (_, file) = create(&client, "closed");
    client.release(&context(), file, ReleaseArgs::default()).unwrap();
    // Its answer is awaited with the next one.
    assert_eq!(free(), before - 1);
    client.forget(file.ino, 1);
    client.unlink(&context(), Ino::ROOT, name("closed")).unwrap();
    let begun = Instant::now();
    while free() < before {
        assert!(begun.elapsed() < Duration::from_secs(30), "a file without a name is in use");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn a_child_shares_the_files_of_its_parent_and_others_have_no_access() {
    let served = memory();
    let parent = served.client();
    let (entry, file) = create(&parent, "kept");
    assert_eq!(write(&parent, file, 0, b"kept"), Ok(4));
    let child = parent.hand_over().unwrap().begin();
    let stranger = served.client();
    assert_eq!(stranger.getattr(&context(), entry.ino, None), Err(Errno::ESTALE));
    assert_eq!(read(&stranger, file, 0, 4), Err(Errno::ESTALE));
    stranger.forget(entry.ino, 1000);
    parent.unlink(&context(), Ino::ROOT, name("kept")).unwrap();
    drop(parent);
    assert_eq!(read(&child, file, 0, 10), Ok(b"kept".to_vec()));
}

/// Formerly, whatever parent or child released was gone for the other, or remained for both as long
/// as one of them lived.
#[test]
fn parent_and_child_release_their_files_independently() {
    let served = memory();
    let (cx, free) = (context(), || served.client().statfs(&context(), Ino::ROOT).unwrap().files);
    let parent = served.client();
    let (entry, file) = create(&parent, "both");
    let child = parent.hand_over().unwrap().begin();
    let close =
        |client: &RemoteClient| client.release(&cx, file, ReleaseArgs::from_flags(OpenFlags(0)));
    // The child closes the file for itself; the parent's stays open.
    assert_eq!(write(&child, file, 0, b"x"), Ok(1));
    close(&child).unwrap();
    assert_eq!(write(&child, file, 0, b"x"), Err(Errno::EBADF));
    assert_eq!(write(&parent, file, 0, b"y"), Ok(1));
    // Files opened after the fork belong to one of them.
    let (other, own) = create(&parent, "own");
    assert_eq!(read(&child, own, 0, 1), Err(Errno::ESTALE));
    // An unnamed inode is freed when both have released it.
    for (entry, name) in [(entry, "both"), (other, "own")] {
        parent.unlink(&cx, Ino::ROOT, Name::new(name.as_bytes()).unwrap()).unwrap();
        assert!(parent.getattr(&cx, entry.ino, None).is_ok());
    }
    close(&parent).unwrap();
    let before = free();
    drop(parent);
    wait_until(|| free() > before || served.server.connections() <= 2);
    assert!(child.getattr(&cx, entry.ino, None).is_ok(), "the child has it still");
    assert_eq!(child.getattr(&cx, other.ino, None), Err(Errno::ESTALE));
}

/// Waits until the server has handled the end of a connection.
fn wait_until(done: impl Fn() -> bool) {
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(30);
    while !done() && std::time::Instant::now() < deadline {
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
}

#[test]
fn locks_of_an_open_file_outlive_the_parent_and_those_of_a_process_do_not() {
    let served = memory();
    let (parent, other, cx) = (served.client(), served.client(), context());
    let (entry, file) = create(&parent, "locked");
    let opened = other
        .open(&cx, other.lookup(&cx, Ino::ROOT, name("locked")).unwrap().ino, OpenArgs::default())
        .unwrap();
    let others = File { ino: entry.ino, fh: opened.fh };
    let request = |kind, owner, range: (u64, u64)| LockRequest {
        kind,
        owner,
        lock: Lock { typ: LockType::Write, start: range.0, end: range.1, pid: 1 },
        wait: false,
    };
    let (open_file, process) = (LockOwner(7), LockOwner::for_process(1));
    parent.setlk(&cx, file, &request(LockKind::Flock, open_file, (0, u64::MAX))).unwrap();
    parent.setlk(&cx, file, &request(LockKind::Posix, open_file, (0, 9))).unwrap();
    parent.setlk(&cx, file, &request(LockKind::Posix, process, (20, 29))).unwrap();
    let child = parent.hand_over().unwrap().begin();
    // The calls at exit: the parent closes the file.
    for owner in [process, open_file] {
        parent.flush(&cx, file, owner).unwrap();
    }
    let release = ReleaseArgs { flock_owner: Some(open_file), ..ReleaseArgs::default() };
    parent.release(&cx, file, release).unwrap();
    let stranger = LockOwner(99);
    let take = |kind, range| other.setlk(&cx, others, &request(kind, stranger, range));
    assert_eq!(take(LockKind::Posix, (20, 29)), Ok(()), "the parent's own");
    assert_eq!(take(LockKind::Posix, (0, 9)), Err(Errno::EAGAIN), "the open file's");
    assert_eq!(take(LockKind::Flock, (0, u64::MAX)), Err(Errno::EAGAIN), "the open file's");
    // Without a message: the connection ends like the connection of a killed process.
    drop(child);
    wait_until(|| take(LockKind::Posix, (0, 9)).is_ok());
    assert_eq!(take(LockKind::Posix, (0, 9)), Ok(()));
    assert_eq!(take(LockKind::Flock, (0, u64::MAX)), Ok(()));
}

/// A lock that a child took on an open file of its parent was released when the child ended,
/// although the parent still had the open file: `exec 9>l; flock 9` of a shell excluded no process.
#[test]
fn a_lock_that_a_child_takes_on_an_open_file_stays_with_its_parent() {
    let served = memory();
    let (parent, other, cx) = (served.client(), served.client(), context());
    let (entry, file) = create(&parent, "locked");
    let found = other.lookup(&cx, Ino::ROOT, name("locked")).unwrap();
    let opened = other.open(&cx, found.ino, OpenArgs::default()).unwrap();
    let others = File { ino: entry.ino, fh: opened.fh };
    let owner = LockOwner(7);
    let request = |kind, owner| LockRequest {
        kind,
        owner,
        lock: Lock { typ: LockType::Write, start: 0, end: u64::MAX >> 1, pid: 1 },
        wait: false,
    };
    // One child reports that it closes the file; the other one is killed.
    for (kind, says) in [(LockKind::Flock, true), (LockKind::Posix, true), (LockKind::Flock, false)]
    {
        let before = served.server.connections();
        let child = parent.hand_over().unwrap().begin();
        child.setlk(&cx, file, &request(kind, owner)).unwrap();
        if says {
            child.flush(&cx, file, owner).unwrap();
            let args = ReleaseArgs { flock_owner: Some(owner), ..ReleaseArgs::default() };
            child.release(&cx, file, args).unwrap();
        }
        drop(child);
        wait_until(|| served.server.connections() == before);
        let taken = other.setlk(&cx, others, &request(kind, LockOwner(99)));
        assert_eq!(taken, Err(Errno::EAGAIN), "{kind:?} {says}");
        let unlock = Lock { typ: LockType::Unlock, ..request(kind, owner).lock };
        parent.setlk(&cx, file, &LockRequest { lock: unlock, ..request(kind, owner) }).unwrap();
        assert_eq!(other.setlk(&cx, others, &request(kind, LockOwner(99))), Ok(()));
        let theirs = LockRequest { lock: unlock, ..request(kind, LockOwner(99)) };
        other.setlk(&cx, others, &theirs).unwrap();
    }
}

/// Files in memory of a file system without locks, such as a FUSE program without them.
struct LocklessMemory {
    memory: MemoryFileSystem,
}

impl FileSystem for LocklessMemory {
    delegate!(to memory, except caps, getlk, setlk);

    fn caps(&self) -> Caps {
        Caps { locks: LockSupport::Frontend, ..self.memory.caps() }
    }
}

// Each client kept its own locks if the file system had none: two processes of a run both had the
// same exclusive lock.
#[test]
fn clients_of_a_file_system_without_locks_exclude_each_other() {
    let memory = MemoryFileSystem::new(MemoryOptions::default());
    let served = serve(Arc::new(LocklessMemory { memory }));
    let (one, other, cx) = (served.client(), served.client(), context());
    let (ino, mine) = create(&one, "locked");
    let name = name("locked");
    assert_eq!(other.lookup(&cx, Ino::ROOT, name).unwrap().ino, ino.ino);
    let fh = other.open(
        &cx,
        ino.ino,
        OpenArgs { flags: OpenFlags(OpenFlags::RDWR), ..OpenArgs::default() },
    );
    let theirs = File { ino: ino.ino, fh: fh.unwrap().fh };
    for kind in [LockKind::Flock, LockKind::Posix] {
        let set = |client: &RemoteClient, file, owner, typ| {
            let lock = Lock { typ, start: 0, end: u64::MAX, pid: 1 };
            let owner = LockOwner(owner);
            client.setlk(&cx, file, &LockRequest { kind, owner, lock, wait: false })
        };
        assert_eq!(set(&one, mine, 1, LockType::Write), Ok(()));
        assert_eq!(set(&other, theirs, 2, LockType::Write), Err(Errno::EAGAIN));
        assert_eq!(set(&one, mine, 1, LockType::Unlock), Ok(()));
        assert_eq!(set(&other, theirs, 2, LockType::Write), Ok(()));
        assert_eq!(set(&other, theirs, 2, LockType::Unlock), Ok(()));
    }
    let lock = Lock { typ: LockType::Write, start: 0, end: u64::MAX, pid: 1 };
    let request =
        |owner| LockRequest { kind: LockKind::Flock, owner: LockOwner(owner), lock, wait: false };
    assert_eq!(one.setlk(&cx, mine, &request(1)), Ok(()));
    drop(one);
    assert_eq!(other.setlk(&cx, theirs, &request(2)), Ok(()));
}

/// The locks of a killed process lasted longer than natively, until the server noticed the end of
/// its connection. A non-blocking request in between failed.
#[test]
fn locks_of_a_client_that_is_gone_do_not_block_others() {
    let served = memory();
    let (other, cx) = (served.client(), context());
    create(&other, "locked");
    let name = || name("locked");
    let lock = |client: &RemoteClient, owner| {
        let ino = client.lookup(&cx, Ino::ROOT, name()).unwrap().ino;
        let fh = client.open(&cx, ino, OpenArgs::default()).unwrap().fh;
        let lock = Lock { typ: LockType::Write, start: 0, end: u64::MAX, pid: 1 };
        let request = LockRequest { kind: LockKind::Flock, owner, lock, wait: false };
        let taken = client.setlk(&cx, File { ino, fh }, &request);
        let args = ReleaseArgs { flock_owner: Some(owner), ..ReleaseArgs::default() };
        let close = move |client: &RemoteClient| {
            client.flush(&context(), File { ino, fh }, owner).unwrap();
            client.release(&context(), File { ino, fh }, args).unwrap();
        };
        (taken, close)
    };
    for round in 0..200 {
        let gone = served.client();
        assert_eq!(lock(&gone, LockOwner(1)).0, Ok(()), "{round}");
        drop(gone);
        let (taken, release) = lock(&other, LockOwner(2));
        assert_eq!(taken, Ok(()), "{round}");
        release(&other);
    }
}

#[test]
fn a_thousand_clients_are_served_at_once() {
    let served = memory();
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile);
    let raised = rustix::process::Rlimit { current: limit.maximum, ..limit };
    let _ = rustix::process::setrlimit(rustix::process::Resource::Nofile, raised);
    // Each client needs a few descriptors of this process, at both ends.
    let most = raised.current.unwrap_or(u64::MAX).min(1 << 20) / 8;
    let clients: Vec<_> = (0..most.min(1000)).map(|_| served.client()).collect();
    for (number, client) in clients.iter().enumerate() {
        let (_, file) = create(client, &format!("file{number}"));
        assert_eq!(write(client, file, 0, &[number as u8]), Ok(1));
    }
    assert_eq!(served.server.connections(), clients.len());
}

/// Waiting and later calls get an error when the server is gone.
#[test]
fn a_server_that_dies_leaves_no_caller_waiting() {
    let served = memory();
    let client = served.client();
    let (_, file) = create(&client, "file");
    let asking = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..8)
            .map(|_| scope.spawn(|| (0..).find_map(|_| write(&client, file, 0, b"x").err())))
            .collect();
        served.server.shut_down();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect::<Vec<_>>()
    });
    assert_eq!(asking, [Some(Errno::ENOTCONN); 8]);
    assert_eq!(write(&client, file, 0, b"x"), Err(Errno::ENOTCONN));
    assert!(client.is_dead() && client.hand_over().is_err());
}

/// A name that no process can bind before this test.
fn abstract_name() -> String {
    let number = std::fs::read_to_string("/proc/sys/kernel/random/uuid").unwrap();
    format!("@defuse-test-{}", number.trim())
}

/// Another user could bind an abstract name before its server did, or after a crash. All clients
/// then used that server, because no client checked who answers.
#[test]
fn an_abstract_name_that_another_user_has_bound_is_not_connected_to() {
    if !rustix::process::geteuid().is_root() {
        println!("skipped: only root can become another user");
        return;
    }
    let name = abstract_name();
    let start = |uid: Option<u32>| {
        let name = name.clone();
        let thread = std::thread::spawn(move || {
            if let Some(uid) = uid.map(rustix::process::Uid::from_raw) {
                rustix::thread::set_thread_res_uid(uid, uid, uid).unwrap();
            }
            let memory = Arc::new(MemoryFileSystem::new(MemoryOptions::default()));
            loop {
                // Threads of the previous server may hold the name a little longer.
                match SocketServer::bind(name.as_ref(), memory.clone(), ServerOptions::default()) {
                    Err(ServeError::InUse(_)) => std::thread::sleep(Duration::from_millis(5)),
                    server => break server.unwrap(),
                }
            }
        });
        thread.join().unwrap()
    };
    let connect = || RemoteClient::connect(name.as_ref(), RemoteOptions::default());
    std::thread::scope(|scope| {
        let own = Arc::new(start(None));
        let served = Arc::clone(&own);
        let serving = scope.spawn(move || served.run());
        let client = connect().unwrap();
        assert!(client.hand_over().is_ok());
        own.shut_down();
        drop(own);
        serving.join().unwrap();
        let others = Arc::new(start(Some(4322)));
        let served = Arc::clone(&others);
        scope.spawn(move || served.run());
        assert!(matches!(connect(), Err(RemoteError::Stranger { uid: 4322, .. })));
        assert!(matches!(client.hand_over(), Err(RemoteError::Stranger { uid: 4322, .. })));
        others.shut_down();
    });
}

/// Each thread has its own credentials, so that one thread can be the client of another user.
#[test]
fn only_root_acts_for_other_users() {
    if !rustix::process::geteuid().is_root() {
        println!("skipped: only root can become another user");
        return;
    }
    let name = abstract_name();
    let options =
        ServerOptions { admission: AdmissionPolicy::Users(vec![4321]), ..ServerOptions::default() };
    let memory = MemoryOptions { root_perm: 0o777, ..MemoryOptions::default() };
    let server =
        SocketServer::bind(name.as_ref(), Arc::new(MemoryFileSystem::new(memory)), options)
            .unwrap();
    let connect = |uid: u32| {
        let name = name.clone();
        let thread = std::thread::spawn(move || {
            let uid = rustix::process::Uid::from_raw(uid);
            rustix::thread::set_thread_res_uid(uid, uid, uid).unwrap();
            RemoteClient::connect(name.as_ref(), RemoteOptions::default())
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
        // A process that has become another user since: its child acts for the original user.
        let child = std::thread::scope(|scope| {
            let become_another = || {
                let uid = rustix::process::Uid::from_raw(4322);
                rustix::thread::set_thread_res_uid(uid, uid, uid).unwrap();
                client.hand_over().unwrap().begin()
            };
            scope.spawn(become_another).join().unwrap()
        });
        assert!(child.getattr(&as_uid(4321), Ino::ROOT, None).is_ok());
        assert_eq!(child.getattr(&as_uid(4322), Ino::ROOT, None), Err(Errno::EPERM));
        drop(child);
        drop(client);
        server.shut_down();
    });
}

/// The right to take over has ended with the beginning of the connection.
fn take_over_later(successor: &RemoteClient, ino: Ino, fh: Fh) -> Result<()> {
    // `TAKE_OVER` of the wire, with an open file.
    let cmd = u32::from(b'D') << 8 | 1;
    let what = [ino.0, fh.0, 0, 0, 1].map(u64::to_ne_bytes).concat();
    let args = IoctlArgs {
        cmd,
        arg: 0,
        input: &what,
        output_len: size_of::<i32>(),
        dir: false,
        compat32: false,
    };
    let reply = successor.ioctl(&context(), File { ino: Ino::ROOT, fh: Fh(0) }, &args)?;
    match i32::from_ne_bytes(reply.output.try_into().unwrap()) {
        0 => Ok(()),
        error => Err(Errno::from_raw(error)),
    }
}

/// A program of root becomes another user, and executes a program of that user. The connection gets
/// the files that are handed over, and otherwise only the rights of that user.
#[test]
fn an_heir_of_another_user_has_the_files_handed_over_and_the_rights_of_that_user() {
    if !rustix::process::geteuid().is_root() {
        println!("skipped: only root can become another user");
        return;
    }
    let path = abstract_name();
    let memory = MemoryOptions { root_perm: 0o777, ..MemoryOptions::default() };
    let options = ServerOptions::default();
    let server =
        SocketServer::bind(path.as_ref(), Arc::new(MemoryFileSystem::new(memory)), options)
            .unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| server.run());
        let root = RemoteClient::connect(path.as_ref(), RemoteOptions::default()).unwrap();
        let mode = |entry: &Entry, perm| {
            let set = SetAttr { perm: Some(perm), ..SetAttr::default() };
            root.setattr(&context(), entry.ino, None, &set).unwrap();
        };
        let (secret, secret_file) = create(&root, "secret");
        let (given, passed_file) = create(&root, "given");
        let (shown, _) = create(&root, "shown");
        mode(&secret, 0o600);
        mode(&given, 0o600);
        assert_eq!(write(&root, passed_file, 0, b"given"), Ok(5));
        let open = |file: File| {
            let (flags, owner) = (OpenFlags(0), LockOwner(1));
            let open = OpenFileHandover { fh: file.fh, flags, owner, process_locks: false };
            InodeHandover { ino: file.ino, open: Some(open) }
        };
        let unknown = InodeHandover { ino: Ino(u64::MAX), open: None };
        // More than one message has room for.
        let mut handovers = vec![unknown; 3000];
        handovers.push(open(passed_file));
        let successor = std::thread::scope(|scope| {
            let become_another = || {
                let uid = rustix::process::Uid::from_raw(4322);
                rustix::thread::set_thread_res_uid(uid, uid, uid).unwrap();
                root.prepare_exec(&handovers).unwrap()
            };
            scope.spawn(become_another).join().unwrap()
        });
        let (passed_over, unknown) = successor.taken.split_last().unwrap();
        assert_eq!((passed_over, unknown.len()), (&Ok(()), 3000));
        assert!(unknown.iter().all(|taken| *taken == Err(Errno::ESTALE)));
        let successor = successor.client;
        assert_eq!(take_over_later(&successor, secret.ino, secret_file.fh), Err(Errno::EPERM));
        let cx = Context::new(Caller { uid: 4322, gid: 0, pid: 1 });
        // Open files stay open.
        let mut bytes = [0; 5];
        let read = |file: File, bytes: &mut [u8]| {
            let len = bytes.len();
            let mut sink = SliceSink::new(bytes);
            successor.read(&cx, file, ReadArgs::default(), &mut ReadBuf::new(&mut sink, len))
        };
        assert_eq!((read(passed_file, &mut bytes), &bytes), (Ok(()), b"given"));
        assert_eq!(read(secret_file, &mut bytes), Err(Errno::ESTALE));
        let mut source = SliceSource::new(b"x");
        let mut data = WriteBuf::new(&mut source);
        let written = successor.write(&cx, passed_file, WriteArgs::default(), &mut data);
        assert_eq!(written, Err(Errno::EBADF), "it was handed over for reading");
        // Not for other users, and only what the user may do, although its program does not check.
        assert_eq!(successor.getattr(&context(), Ino::ROOT, None), Err(Errno::EPERM));
        let name = |name: &'static str| Name::new(name.as_bytes()).unwrap();
        let found = |text| successor.lookup(&cx, Ino::ROOT, name(text)).unwrap().ino;
        let open = |ino, flags| {
            let args = OpenArgs { flags: OpenFlags(flags), kill_suidgid: false };
            successor.open(&cx, ino, args).map(|opened| File { ino, fh: opened.fh })
        };
        assert_eq!(open(found("secret"), 0), Err(Errno::EACCES));
        assert_eq!(open(found("given"), 0), Err(Errno::EACCES));
        let file = open(found("shown"), 0).unwrap();
        assert_eq!(open(shown.ino, OpenFlags::RDWR), Err(Errno::EACCES));
        assert_eq!(open(shown.ino, OpenFlags::TRUNC), Err(Errno::EACCES));
        let mut source = SliceSource::new(b"x");
        let written =
            successor.write(&cx, file, WriteArgs::default(), &mut WriteBuf::new(&mut source));
        assert_eq!(written, Err(Errno::EBADF));
        assert_eq!(successor.map(&cx, file, 0..4096, true).err(), Some(Errno::EACCES));
        let map = std::fs::File::from(successor.map(&cx, file, 0..4096, false).unwrap());
        assert!(std::io::Write::write(&mut &map, b"x").is_err());
        let set = |set: SetAttr| successor.setattr(&cx, shown.ino, None, &set).map(drop);
        assert_eq!(set(SetAttr { perm: Some(0o777), ..SetAttr::default() }), Err(Errno::EPERM));
        assert_eq!(set(SetAttr { size: Some(9), ..SetAttr::default() }), Err(Errno::EACCES));
        // In a sticky directory that is writable for all users.
        let set = SetAttr { perm: Some(0o1777), ..SetAttr::default() };
        root.setattr(&context(), Ino::ROOT, None, &set).unwrap();
        assert_eq!(successor.unlink(&cx, Ino::ROOT, name("shown")), Err(Errno::EPERM));
        let both = ((Ino::ROOT, name("shown")), (Ino::ROOT, name("other")));
        let renamed = successor.rename(&cx, both.0, both.1, RenameFlags(0));
        assert_eq!(renamed, Err(Errno::EPERM));
        let node = NewNode::new(FileKind::Regular, 0o644, cx.caller);
        successor.mknod(&cx, Ino::ROOT, name("own"), &node).unwrap();
        assert_eq!(successor.unlink(&cx, Ino::ROOT, name("own")), Ok(()));
        let node = NewNode::new(FileKind::Regular, 0o644, context().caller);
        assert!(successor.mknod(&cx, Ino::ROOT, name("roots"), &node).is_err());
        // Its children have no more rights, and a process without the connection gets nothing.
        let (child, stranger) = std::thread::scope(|scope| {
            let become_another = || {
                let uid = rustix::process::Uid::from_raw(4322);
                rustix::thread::set_thread_res_uid(uid, uid, uid).unwrap();
                let stranger = RemoteClient::connect(path.as_ref(), RemoteOptions::default());
                (successor.hand_over().unwrap().begin(), stranger)
            };
            scope.spawn(become_another).join().unwrap()
        });
        assert!(stranger.is_err());
        let args = OpenArgs::default();
        assert_eq!(child.open(&cx, secret.ino, args).err(), Some(Errno::EACCES));
        assert!(child.open(&cx, shown.ino, args).is_ok());
        drop(child);
        drop(successor);
        drop(root);
        server.shut_down();
    });
}

/// A file system whose files are never read: a reader waits until it is interrupted.
struct StuckReads {
    inner: MemoryFileSystem,
}

impl FileSystem for StuckReads {
    delegate!(to inner, except read);
    fn read(&self, cx: &Context<'_>, _: File, _: ReadArgs, _: &mut ReadBuf<'_>) -> Result<()> {
        let begun = Instant::now();
        while !cx.is_interrupted() {
            assert!(begun.elapsed() < Duration::from_secs(20), "the interrupt has not arrived");
            std::thread::sleep(Duration::from_millis(1));
        }
        Err(Errno::EINTR)
    }
}

/// With every worker in a handler, the watchdog lets a thread receive in their place. It cloned the
/// descriptor of the session for that, as one of /dev/fuse can be, which failed on a socket without
/// a word: INTERRUPT stayed there unread.
#[test]
fn an_interrupt_reaches_a_session_whose_workers_are_all_stuck() {
    let mut options = ServerOptions::default();
    options.session.workers = Some(2);
    let served = TestServer::new(
        Arc::new(StuckReads { inner: MemoryFileSystem::new(MemoryOptions::default()) }),
        options,
        RemoteOptions::default(),
    );
    let client = served.client();
    let (_, file) = create(&client, "file");
    let tokens: [InterruptToken; 2] = Default::default();
    let read = |token: &InterruptToken| {
        let mut bytes = [0; 8];
        let mut sink = SliceSink::new(&mut bytes);
        let cx = Context::with_interrupt(context().caller, 0, token);
        client.read(&cx, file, ReadArgs::default(), &mut ReadBuf::new(&mut sink, 8))
    };
    std::thread::scope(|scope| {
        let readers = tokens.each_ref().map(|token| scope.spawn(|| read(token)));
        // Time for both to be in their handlers.
        std::thread::sleep(Duration::from_millis(200));
        let begun = Instant::now();
        tokens.iter().for_each(InterruptToken::trip);
        for reader in readers {
            assert_eq!(reader.join().unwrap(), Err(Errno::EINTR));
        }
        assert!(begun.elapsed() < Duration::from_secs(20), "{:?}", begun.elapsed());
    });
}

/// The threads of this process with a name.
fn threads(name: &str) -> usize {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    let names = tasks.flatten().map(|task| std::fs::read_to_string(task.path().join("comm")));
    names.flatten().filter(|found| found.trim_end() == name).count()
}

/// A watchdog for each connection woke up 500 times a second for each.
#[test]
fn the_sessions_of_a_server_have_one_sentinel_also_while_the_workers_of_some_are_stuck() {
    let mut options = ServerOptions::default();
    options.session.workers = Some(1);
    let stuck = Arc::new(StuckReads { inner: MemoryFileSystem::new(MemoryOptions::default()) });
    let before = threads("defuse-watchdog");
    let served = TestServer::new(stuck, options, RemoteOptions::default());
    let clients: Vec<_> = (0..40).map(|_| served.client()).collect();
    let files: Vec<_> = (0..40).map(|at| create(&clients[at], &format!("file{at}")).1).collect();
    let token = InterruptToken::default();
    std::thread::scope(|scope| {
        let readers: Vec<_> = (0..4)
            .map(|at| {
                let (client, file, token) = (&clients[at], files[at], &token);
                scope.spawn(move || {
                    let mut bytes = [0; 8];
                    let mut sink = SliceSink::new(&mut bytes);
                    let cx = Context::with_interrupt(context().caller, 0, token);
                    client.read(&cx, file, ReadArgs::default(), &mut ReadBuf::new(&mut sink, 8))
                })
            })
            .collect();
        let begun = Instant::now();
        while begun.elapsed() < Duration::from_millis(300) {
            for at in 4..8 {
                assert_eq!(write(&clients[at], files[at], 0, b"x"), Ok(1));
            }
        }
        // Other tests of this process have servers, too, but fewer.
        let watchdogs = threads("defuse-watchdog").saturating_sub(before);
        assert!(watchdogs < 40, "{watchdogs} watchdogs");
        token.trip();
        for reader in readers {
            assert_eq!(reader.join().unwrap(), Err(Errno::EINTR));
        }
    });
}
