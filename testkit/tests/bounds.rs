//! One user takes from a server all that it may, by many connections. Other users are served as
//! before.
//!
//! The server runs as root in this process, whose threads are counted. The clients are threads with
//! the credentials of other users.

#[allow(dead_code, unused_imports)] // Not all of it is used here.
mod raw;
mod users;

use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use defuse_fs::{
    Caller, Caps, Context, Entry, FileKind, FileSystem, Ino, Io, Name, NewNode, Result, StatFs,
    delegate,
};
use defuse_memory::{MemoryFileSystem, MemoryOptions};
use defuse_remote::{RemoteClient, RemoteError, RemoteOptions};

use defuse_socket::{AdmissionPolicy, ServerOptions, ShareLimits, SocketServer};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{RecvFlags, SendFlags};

use users::as_user;

const USER: u32 = 4321;
const OTHER: u32 = 4322;
const STATFS: u32 = 17;
const SYNCFS: u32 = 50;
const PATIENCE: Duration = Duration::from_secs(60);

/// Tests count the threads of this process.
static ONE: Mutex<()> = Mutex::new(());
/// The number of the next server.
static NEXT: AtomicU32 = AtomicU32::new(0);

/// Files in memory. STATFS waits until the gate is open. Operations that may be submitted are, and
/// are finished at once.
struct GatedMemory {
    inner: MemoryFileSystem,
    submits: bool,
    is_open: Mutex<bool>,
    opened: Condvar,
}

impl GatedMemory {
    fn new(submits: bool) -> Arc<GatedMemory> {
        let inner =
            MemoryFileSystem::new(MemoryOptions { root_perm: 0o777, ..MemoryOptions::default() });
        Arc::new(GatedMemory { inner, submits, is_open: Mutex::default(), opened: Condvar::new() })
    }

    fn release_all(&self) {
        *self.is_open.lock().unwrap() = true;
        self.opened.notify_all();
    }
}

impl FileSystem for GatedMemory {
    delegate!(to inner, except caps, statfs, submit);

    fn caps(&self) -> Caps {
        Caps { blocking: true, submits: self.submits, ..self.inner.caps() }
    }

    fn submit(&self, io: Io) {
        io.finish(Ok(0));
    }

    fn statfs(&self, cx: &Context<'_>, ino: Ino) -> Result<StatFs> {
        let closed = self.is_open.lock().unwrap();
        drop(self.opened.wait_while(closed, |is_open| !*is_open).unwrap());
        self.inner.statfs(cx, ino)
    }
}

fn is_root() -> bool {
    let root = rustix::process::geteuid().is_root();
    if !root {
        println!("skipped: only root can become another user");
    }
    root
}

/// A server that admits two users, on which `run` carries out an attack.
fn with_server(
    fs: &Arc<GatedMemory>,
    options: ServerOptions,
    run: impl FnOnce(&SocketServer, &Path),
) {
    let _one = ONE.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let path = format!("@defuse-bounds-{}-{number}", std::process::id());
    let admission = AdmissionPolicy::Users(vec![USER, OTHER]);
    let served = Arc::clone(fs) as Arc<dyn FileSystem>;
    let options = ServerOptions { admission, ..options };
    let server = SocketServer::bind(path.as_ref(), served, options).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| server.run());
        let attack = || run(&server, path.as_ref());
        let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(attack));
        fs.release_all();
        server.shut_down();
        if let Err(panic) = done {
            std::panic::resume_unwind(panic);
        }
    });
}

fn connect(path: &Path, uid: u32) -> std::result::Result<RemoteClient, RemoteError> {
    as_user(uid, || RemoteClient::connect(path, RemoteOptions::default()))
}

/// A connection on which INIT was sent and answered.
fn connect_answered(path: &Path, uid: u32) -> OwnedFd {
    let socket = raw::connect_and_init(path, uid);
    let (len, _) = rustix::net::recv(&socket, &mut [0; 256][..], RecvFlags::empty()).unwrap();
    assert!(len > 16, "INIT was not answered");
    socket
}

/// Makes a file and finds it.
fn check_works(client: &RemoteClient, uid: u32, text: &str) -> Entry {
    let cx = Context::new(Caller { uid, gid: uid, pid: 1 });
    let name = Name::new(text.as_bytes()).unwrap();
    let node = NewNode::new(FileKind::Regular, 0o600, cx.caller);
    client.mknod(&cx, Ino::ROOT, name, &node).unwrap();
    client.lookup(&cx, Ino::ROOT, name).unwrap()
}

/// The threads of this process that serve connections.
fn count_serving_threads() -> usize {
    const NAMES: [&str; 4] = ["defuse-worker", "defuse-peer", "defuse-helper", "defuse-unsent"];
    let tasks = std::fs::read_dir("/proc/self/task").unwrap().flatten();
    let names = tasks.filter_map(|task| std::fs::read_to_string(task.path().join("comm")).ok());
    names.filter(|name| NAMES.contains(&name.trim_end())).count()
}

/// The number when it has not changed for a while.
fn await_settled(count: impl Fn() -> usize) -> usize {
    let (mut last, mut since) = (count(), Instant::now());
    let until = Instant::now() + PATIENCE;
    while since.elapsed() < Duration::from_millis(500) && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(20));
        let now = count();
        if now != last {
            (last, since) = (now, Instant::now());
        }
    }
    last
}

fn is_gone(socket: &OwnedFd) -> bool {
    let mut fds = [PollFd::new(socket, PollFlags::empty())];
    poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).is_ok_and(|gone| gone > 0)
}

fn send(socket: &OwnedFd, opcode: u32, number: u64, body: &[u8]) -> bool {
    let message = raw::request(opcode, number, 1, USER, body);
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    rustix::net::send(socket, &message, flags).is_ok()
}

/// Each connection got as many threads as one that is alone: 4,096 connections of a user would have
/// had 70,000.
#[test]
fn the_threads_of_one_user_are_few_however_many_connections_wait() {
    const CONNECTIONS: usize = 60;
    const FURTHER: usize = 20;
    if !is_root() {
        return;
    }
    let fs = GatedMemory::new(false);
    let shares = ShareLimits { workers: FURTHER, senders: 10, ..ShareLimits::default() };
    let options =
        ServerOptions { shares, max_connections_of_user: CONNECTIONS, ..ServerOptions::default() };
    with_server(&fs, options, |server, path| {
        let sockets: Vec<OwnedFd> =
            as_user(USER, || (0..CONNECTIONS).map(|_| raw::connect_and_init(path, USER)).collect());
        for number in 0..20 {
            assert!(sockets.iter().all(|socket| send(socket, STATFS, 4 + 2 * number, &[])));
        }
        let begun = Instant::now();
        while server.connections() < CONNECTIONS && begun.elapsed() < PATIENCE {
            std::thread::sleep(Duration::from_millis(5));
        }
        // Two threads for each connection: its worker, and the thread that waits for its end.
        let threads = await_settled(count_serving_threads);
        assert!(
            (CONNECTIONS..=2 * CONNECTIONS + FURTHER + 10).contains(&threads),
            "{threads} threads"
        );
        // Another user has threads of its own.
        let other = connect(path, OTHER).unwrap();
        assert_eq!(check_works(&other, OTHER, "works").attr.uid, OTHER);
        let full = connect(path, USER).err();
        assert!(matches!(full, Some(RemoteError::UserIsFull)), "{full:?}");
    });
}

/// Answers of each connection waited for its client, up to 16 MiB, however many connections a user
/// had.
#[test]
fn a_user_that_reads_no_answers_takes_little_memory_by_all_its_connections() {
    const CONNECTIONS: usize = 12;
    if !is_root() {
        return;
    }
    let fs = GatedMemory::new(true);
    let shares = ShareLimits { unsent_bytes: 256 << 10, senders: 6, ..ShareLimits::default() };
    with_server(&fs, ServerOptions { shares, ..ServerOptions::default() }, |_, path| {
        let sockets: Vec<OwnedFd> =
            as_user(USER, || (0..CONNECTIONS).map(|_| raw::connect_and_init(path, USER)).collect());
        // All of them would have room for this: 20,000 answers of 80 bytes each are less than 16
        // MiB.
        for number in 0..20_000 {
            for socket in &sockets {
                let _ = send(socket, SYNCFS, 4 + 2 * number, &[0; 8]);
            }
        }
        let gone = await_settled(|| sockets.iter().filter(|socket| is_gone(socket)).count());
        assert!(gone >= CONNECTIONS - 6, "{gone} connections have ended");
        let other = connect(path, OTHER).unwrap();
        check_works(&other, OTHER, "works");
        // The user itself is served again, when it reads.
        check_works(&connect(path, USER).unwrap(), USER, "reads");
    });
}

/// A connection beyond a limit was closed without a word.
#[test]
fn a_connection_beyond_a_limit_is_told_of_it_and_root_has_only_that_of_all() {
    if !is_root() {
        return;
    }
    let fs = GatedMemory::new(false);
    let options = ServerOptions {
        max_connections: 5,
        max_connections_of_user: 2,
        ..ServerOptions::default()
    };
    with_server(&fs, options, |_, path| {
        let root = || RemoteClient::connect(path, RemoteOptions::default());
        let _held = [connect(path, USER).unwrap(), connect(path, USER).unwrap()];
        let refused = connect(path, USER).err().unwrap();
        assert!(matches!(refused, RemoteError::UserIsFull), "{refused:?}");
        assert!(refused.to_string().contains("--max-connections-of-user"));
        let _others = [connect(path, OTHER).unwrap(), root().unwrap(), root().unwrap()];
        for refused in [root().err().unwrap(), connect(path, OTHER).err().unwrap()] {
            assert!(matches!(refused, RemoteError::ServerIsFull), "{refused:?}");
            assert!(refused.to_string().contains("--max-connections"));
        }
    });
}

/// A copy of a connection for a child takes as long as the connection has inodes, and was made by
/// the thread that accepts, under the lock that all connections need.
#[test]
fn copies_of_a_large_connection_hold_up_no_new_ones() {
    const FILES: u64 = 20_000;
    const COPIES: usize = 40;
    const ASKERS: usize = 4;
    if !is_root() {
        return;
    }
    let fs = GatedMemory::new(false);
    let cx = Context::new(Caller { uid: 0, gid: 0, pid: 1 });
    let node = NewNode::new(FileKind::Regular, 0o644, cx.caller);
    for number in 0..FILES {
        let text = number.to_string();
        fs.mknod(&cx, Ino::ROOT, Name::new(text.as_bytes()).unwrap(), &node).unwrap();
    }
    with_server(&fs, ServerOptions::default(), |_, path| {
        let large = connect(path, USER).unwrap();
        let cx = Context::new(Caller { uid: USER, gid: USER, pid: 1 });
        for number in 0..FILES {
            let text = number.to_string();
            large.lookup(&cx, Ino::ROOT, Name::new(text.as_bytes()).unwrap()).unwrap();
        }
        let ask = || (0..COPIES / ASKERS).for_each(|_| drop(large.hand_over().unwrap()));
        let connections = std::thread::scope(|scope| {
            let copies: Vec<_> = (0..ASKERS).map(|_| scope.spawn(|| as_user(USER, ask))).collect();
            let others = || as_user(OTHER, || drop(connect_answered(path, OTHER)));
            std::iter::repeat_with(others)
                .take_while(|()| !copies.iter().all(|asker| asker.is_finished()))
                .count()
        });
        assert!(connections > COPIES, "{connections} connections during {COPIES} copies");
    });
}
