//! Calls of one user that wait for something leave threads for other users: on a kernel mount, and
//! for a client that acts for all users.

use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, mpsc};
use std::time::{Duration, Instant};

use defuse_fs::{
    Caller, Caps, Context, Errno, FileKind, FileSystem, Ino, Name, NewNode, OpenArgs, OpenReply,
    Result, delegate,
};
use defuse_fuse::mount::{self, MountOptions};
use defuse_fuse::{IoUring, Session, SessionOptions};
use defuse_memory::{MemoryFileSystem, MemoryOptions};
use defuse_remote::{RemoteClient, RemoteOptions};
use defuse_socket::{ServerOptions, SocketServer};

const USER: u32 = 4321;
const OTHER: u32 = 4322;
const CALLS: usize = 100;
const PATIENCE: Duration = Duration::from_secs(60);

/// Files in memory. An open of the file "waits" waits until the gate is open, like an open of a
/// file with a lease.
struct LeasedMemory {
    inner: MemoryFileSystem,
    waits: Ino,
    opening: AtomicUsize,
    is_open: Mutex<bool>,
    opened: Condvar,
    blocking: bool,
}

impl LeasedMemory {
    fn new(blocking: bool) -> Arc<LeasedMemory> {
        let inner =
            MemoryFileSystem::new(MemoryOptions { root_perm: 0o777, ..MemoryOptions::default() });
        let cx = context(0);
        let node = NewNode::new(FileKind::Regular, 0o666, cx.caller);
        let [waits, _] = ["waits", "free"]
            .map(|text| inner.mknod(&cx, Ino::ROOT, name(text), &node).unwrap().ino);
        let (opening, is_open, opened) = (AtomicUsize::new(0), Mutex::default(), Condvar::new());
        Arc::new(LeasedMemory { inner, waits, opening, is_open, opened, blocking })
    }

    fn release_all(&self) {
        *self.is_open.lock().unwrap() = true;
        self.opened.notify_all();
    }

    /// Waits until no further open begins to wait, and returns how many do.
    fn opening(&self) -> usize {
        let (mut last, mut since) = (0, Instant::now());
        while since.elapsed() < Duration::from_millis(500) {
            std::thread::sleep(Duration::from_millis(10));
            let now = self.opening.load(Ordering::SeqCst);
            if now != last {
                (last, since) = (now, Instant::now());
            }
        }
        last
    }
}

impl FileSystem for LeasedMemory {
    delegate!(to inner, except caps, open);

    fn caps(&self) -> Caps {
        Caps { blocking: self.blocking, ..self.inner.caps() }
    }

    fn open(&self, cx: &Context<'_>, ino: Ino, args: OpenArgs) -> Result<OpenReply> {
        if ino == self.waits {
            self.opening.fetch_add(1, Ordering::SeqCst);
            let mut is_open = self.is_open.lock().unwrap();
            while !*is_open && !cx.is_interrupted() {
                is_open = self.opened.wait_timeout(is_open, Duration::from_millis(5)).unwrap().0;
            }
            self.opening.fetch_sub(1, Ordering::SeqCst);
            if !*is_open {
                return Err(Errno::EINTR);
            }
        }
        self.inner.open(cx, ino, args)
    }
}

fn name(text: &str) -> Name<'_> {
    Name::new(text.as_bytes()).unwrap()
}

fn context(uid: u32) -> Context<'static> {
    Context::new(Caller { uid, gid: uid, pid: 1 })
}

/// Runs `call` on a thread, and fails if it does not return.
fn run_within_limit<T: Send + 'static>(what: &str, call: impl FnOnce() -> T + Send + 'static) -> T {
    let (send, answer) = mpsc::channel();
    std::thread::spawn(move || send.send(call()));
    answer.recv_timeout(PATIENCE).unwrap_or_else(|_| panic!("{what} gets no answer"))
}

fn become_user(uid: u32) {
    let (user, group) = (rustix::process::Uid::from_raw(uid), rustix::process::Gid::from_raw(uid));
    rustix::thread::set_thread_groups(&[]).unwrap();
    rustix::thread::set_thread_res_gid(group, group, group).unwrap();
    rustix::thread::set_thread_res_uid(user, user, user).unwrap();
}

fn is_root() -> bool {
    let root = rustix::process::geteuid().is_root();
    if !root {
        println!("skipped: only root acts for other users");
    }
    root
}

/// Threads of a server or a mount that have a request in hand: all that there may be at first were
/// held by one user.
#[test]
fn waiting_opens_of_one_user_leave_threads_of_a_connection_for_others() {
    if !is_root() {
        return;
    }
    for blocking in [false, true] {
        let fs = LeasedMemory::new(blocking);
        let path = format!("@defuse-fairness-{}-{blocking}", std::process::id());
        let served = Arc::clone(&fs) as Arc<dyn FileSystem>;
        let server =
            Arc::new(SocketServer::bind(path.as_ref(), served, ServerOptions::default()).unwrap());
        let running = Arc::clone(&server);
        let thread = std::thread::spawn(move || running.run());
        let client =
            Arc::new(RemoteClient::connect(path.as_ref(), RemoteOptions::default()).unwrap());
        let ino = client.lookup(&context(0), Ino::ROOT, name("waits")).unwrap().ino;
        let waiting: Vec<_> = (0..CALLS)
            .map(|_| {
                let client = Arc::clone(&client);
                std::thread::spawn(move || {
                    client.open(&context(USER), ino, OpenArgs::default()).map(drop)
                })
            })
            .collect();
        let held = fs.opening();
        assert!(held < CALLS, "{held} calls hold a thread");
        for uid in [OTHER, 0, OTHER] {
            let other = Arc::clone(&client);
            let found = run_within_limit("another user", move || {
                other.lookup(&context(uid), Ino::ROOT, name("free")).map(|entry| entry.attr.kind)
            });
            assert_eq!(found, Ok(FileKind::Regular));
        }
        // Calls of another user that wait have threads, too.
        let other = Arc::clone(&client);
        let waits = std::thread::spawn(move || {
            other.open(&context(OTHER), ino, OpenArgs::default()).map(drop)
        });
        let begun = Instant::now();
        while fs.opening.load(Ordering::SeqCst) == held && begun.elapsed() < PATIENCE {
            std::thread::sleep(Duration::from_millis(5));
        }
        assert_eq!(fs.opening(), held + 1);
        fs.release_all();
        let answers = waiting.into_iter().chain([waits]).map(|call| call.join().unwrap());
        assert!(answers.into_iter().all(|answer| answer == Ok(())));
        drop(client);
        server.shut_down();
        thread.join().unwrap();
    }
}

/// A user with files on the source of a mount held leases on them, and opened them on the mount
/// until all threads waited. With `workers=N`, a mount then stood still for all.
#[test]
fn waiting_opens_of_one_user_leave_threads_of_a_mount_for_others() {
    if !is_root() {
        return;
    }
    if !Path::new("/dev/fuse").exists() {
        return println!("skipped: needs /dev/fuse");
    }
    for workers in [None, Some(2), Some(4)] {
        others_go_on_while_one_user_waits(workers);
    }
}

fn others_go_on_while_one_user_waits(workers: Option<usize>) {
    let (fs, dir) = (LeasedMemory::new(true), tempfile::tempdir().unwrap());
    let options = MountOptions { allow_other: true, ..MountOptions::default() };
    let mounted = mount::mount(dir.path(), &options).unwrap();
    let options = SessionOptions {
        entry_timeout: Some(Duration::ZERO),
        attr_timeout: Some(Duration::ZERO),
        io_uring: IoUring::Off,
        workers,
        default_permissions: true,
        ..SessionOptions::default()
    };
    let served = Arc::clone(&fs) as Arc<dyn FileSystem>;
    let session = Session::start(mounted.device, served, &options).unwrap();
    let statistics = session.statistics();
    let gauge = |name: &str| statistics.snapshot().gauges.get(name).copied().unwrap();
    let at = |text: &str| dir.path().join(text);
    let attack = || {
        let waiting: Vec<_> = (0..CALLS)
            .map(|_| {
                let path = at("waits");
                std::thread::spawn(move || {
                    become_user(USER);
                    std::fs::File::open(path).map(drop)
                })
            })
            .collect();
        let held = fs.opening();
        assert!(held < CALLS, "{held} calls hold a thread");
        for uid in [OTHER, 0] {
            let path = at("free");
            let found = run_within_limit("another user", move || {
                become_user(uid);
                std::fs::read(path)
            });
            assert_eq!(found.unwrap(), []);
        }
        assert!(gauge("requests_held_back") > 0);
        fs.release_all();
        assert!(waiting.into_iter().all(|call| call.join().unwrap().is_ok()));
    };
    let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(attack));
    fs.release_all();
    let ended = std::thread::spawn(move || session.wait());
    mount::unmount(dir.path(), false).unwrap();
    assert!(ended.join().unwrap().clean);
    if let Err(panic) = done {
        std::panic::resume_unwind(panic);
    }
}
