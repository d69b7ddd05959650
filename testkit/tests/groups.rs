//! The supplementary groups of callers, as a file system learns them from every frontend.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::{Arc, Mutex};

use defuse_direct::{
    ClientMountArgs, ClientTask, DirectClient, OpenHow, TaskCredentials, WalkStart, WorkDir,
};
use defuse_fs::{Caps, Context, Entry, Errno, FileSystem, Ino, Io, IoOp, Name, Result, delegate};
use defuse_fuse::mount::{self, MountOptions};
use defuse_fuse::{Session, SessionOptions};
use defuse_memory::{MemoryFileSystem, MemoryOptions};
use defuse_remote::{RemoteClient, RemoteOptions};
use defuse_socket::{AdmissionPolicy, ServerOptions, SocketServer};

/// A user that exists nowhere else.
const USER: u32 = 54_321;

/// A file system that reads the groups of the caller of a lookup, and announces this if `is_known`
/// is set.
struct GroupQuery {
    inner: MemoryFileSystem,
    is_known: bool,
    seen: Mutex<Option<Result<Vec<u32>>>>,
}

impl GroupQuery {
    fn new(is_known: bool) -> Arc<Self> {
        let inner =
            MemoryFileSystem::new(MemoryOptions { root_perm: 0o777, ..MemoryOptions::default() });
        Arc::new(GroupQuery { inner, is_known, seen: Mutex::default() })
    }

    fn take(&self) -> Option<Result<Vec<u32>>> {
        self.seen.lock().unwrap().take()
    }
}

impl FileSystem for GroupQuery {
    delegate!(to inner, except caps, lookup, submit);

    fn caps(&self) -> Caps {
        Caps { asks_for_groups: self.is_known, submits: true, ..self.inner.caps() }
    }

    fn submit(&self, io: Io) {
        if let IoOp::Fsync { .. } = io.op() {
            *self.seen.lock().unwrap() = Some(io.with_context(|cx| cx.supplementary_groups()));
        }
        FileSystem::submit(&self.inner, io);
    }

    fn lookup(&self, cx: &Context<'_>, parent: Ino, name: Name<'_>) -> Result<Entry> {
        *self.seen.lock().unwrap() = Some(cx.supplementary_groups());
        FileSystem::lookup(&self.inner, cx, parent, name)
    }
}

fn is_root() -> bool {
    let root = rustix::process::geteuid().is_root();
    if !root {
        println!("skipped: needs root");
    }
    root
}

/// Runs `run` on a thread with these groups, as `uid`.
fn with_groups<T: Send>(uid: u32, groups: &[u32], run: impl FnOnce() -> T + Send) -> T {
    let groups: Vec<_> = groups.iter().map(|&gid| rustix::fs::Gid::from_raw(gid)).collect();
    let become_user = || {
        rustix::thread::set_thread_groups(&groups).unwrap();
        let (user, group) =
            (rustix::process::Uid::from_raw(uid), rustix::process::Gid::from_raw(uid));
        rustix::thread::set_thread_res_gid(group, group, group).unwrap();
        rustix::thread::set_thread_res_uid(user, user, user).unwrap();
        run()
    };
    std::thread::scope(|scope| scope.spawn(become_user).join().unwrap())
}

fn look_up(fs: Arc<dyn FileSystem>, who: TaskCredentials) {
    let client = DirectClient::new(defuse_direct::ClientOptions::default());
    client.mount(b"a:", fs, &ClientMountArgs::default()).unwrap();
    let task = ClientTask::new(who, WorkDir::Outside(b"/".to_vec()));
    assert!(client.open(&task, WalkStart::Cwd, b"a:/none", OpenHow::default()).is_err());
}

#[test]
fn the_in_process_client_tells_the_groups_of_its_task() {
    let fs = GroupQuery::new(true);
    look_up(fs.clone(), TaskCredentials::user(USER, USER, &[7, 8]));
    assert_eq!(fs.take(), Some(Ok(vec![7, 8])));
}

#[test]
fn a_kernel_mount_finds_the_groups_of_the_thread_that_calls() {
    if !is_root() || !Path::new("/dev/fuse").exists() {
        return;
    }
    let (fs, dir) = (GroupQuery::new(true), tempfile::tempdir().unwrap());
    let mounted = mount::mount(dir.path(), &MountOptions::default()).unwrap();
    let session = Session::start(mounted.device, fs.clone(), &SessionOptions::default()).unwrap();
    let found = with_groups(0, &[11, 12], || dir.path().join("none").exists());
    mount::abort(dir.path()).unwrap();
    assert!(session.wait().clean && !found);
    assert_eq!(fs.take(), Some(Ok(vec![11, 12])));
}

/// Makes a file durable.
fn sync(fs: Arc<dyn FileSystem>, who: TaskCredentials) {
    let client = DirectClient::new(defuse_direct::ClientOptions::default());
    client.mount(b"a:", fs, &ClientMountArgs::default()).unwrap();
    let task = ClientTask::new(who, WorkDir::Outside(b"/".to_vec()));
    let flags = (libc::O_RDWR | libc::O_CREAT) as u32;
    let how = OpenHow { flags, mode: 0o600, ..OpenHow::default() };
    let file = client.open(&task, WalkStart::Cwd, b"a:/file", how).unwrap();
    client.fsync(&task, &file, false).unwrap();
    file.close(&task).unwrap();
}

/// The groups that a file system learns of in `call` from a client of a socket with the user and
/// groups [13, 14], and from one of root that acts for that user with the groups [98, 99].
fn run_over_socket(
    is_known: bool,
    call: fn(Arc<dyn FileSystem>, TaskCredentials),
) -> [Option<Result<Vec<u32>>>; 2] {
    let fs = GroupQuery::new(is_known);
    let dir = tempfile::tempdir().unwrap();
    std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
    let path = dir.path().join("socket");
    let options =
        ServerOptions { admission: AdmissionPolicy::Users(vec![USER]), ..ServerOptions::default() };
    let server = SocketServer::bind(&path, fs.clone(), options).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| server.run());
        let connect = || RemoteClient::connect(&path, RemoteOptions::default()).unwrap();
        let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let who = || TaskCredentials::user(USER, USER, &[98, 99]);
            call(Arc::new(with_groups(USER, &[13, 14], connect)), who());
            let of_user = fs.take();
            call(Arc::new(connect()), who());
            [of_user, fs.take()]
        }));
        server.shut_down();
        done.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

/// The credentials in a request are the client's claim; the groups of a user are the kernel's.
#[test]
fn a_socket_tells_the_groups_of_the_user_that_connected_and_those_that_root_tells() {
    if !is_root() {
        return;
    }
    let of_user = Some(Ok(vec![13, 14]));
    assert_eq!(run_over_socket(true, look_up), [of_user.clone(), Some(Ok(vec![98, 99]))]);
    // It is submitted, and finished when the request is gone.
    assert_eq!(run_over_socket(true, sync), [of_user.clone(), Some(Ok(vec![98, 99]))]);
    // No frontend passes groups to a file system that does not need them.
    assert_eq!(run_over_socket(false, look_up), [of_user, Some(Err(Errno::ENOSYS))]);
}
