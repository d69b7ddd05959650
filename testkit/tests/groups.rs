//! The supplementary groups of callers, as a file system learns them from every frontend.

use std::path::Path;
use std::sync::{Arc, Mutex};

use defuse_direct::{At, Client, Credentials, How, MountArgs, Task, WorkDir};
use defuse_fs::{Context, Entry, Errno, FileSystem, Ino, Name, Result, delegate};
use defuse_fuse::mount::{self, MountOptions};
use defuse_fuse::{Session, SessionOptions};
use defuse_memory::{Memory, Options};
use defuse_remote::{Remote, RemoteOptions};
use defuse_socket::{Admission, Server, ServerOptions};

/// A user that exists nowhere else.
const USER: u32 = 54_321;

/// A file system that asks for the groups of the caller of a lookup.
struct Asks {
    inner: Memory,
    told: Mutex<Option<Result<Vec<u32>>>>,
}

impl Asks {
    fn new() -> Arc<Self> {
        let inner = Memory::new(Options { root_perm: 0o777, ..Options::default() });
        Arc::new(Asks { inner, told: Mutex::default() })
    }

    fn take(&self) -> Option<Result<Vec<u32>>> {
        self.told.lock().unwrap().take()
    }
}

impl FileSystem for Asks {
    delegate!(to inner, except lookup);

    fn lookup(&self, cx: &Context<'_>, parent: Ino, name: Name<'_>) -> Result<Entry> {
        *self.told.lock().unwrap() = Some(cx.supplementary_groups());
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

fn look_up(fs: Arc<dyn FileSystem>, who: Credentials) {
    let client = Client::new(defuse_direct::Options::default());
    client.mount(b"a:", fs, &MountArgs::default()).unwrap();
    let task = Task::new(who, WorkDir::Outside(b"/".to_vec()));
    assert!(client.open(&task, At::Cwd, b"a:/none", How::default()).is_err());
}

#[test]
fn the_in_process_client_tells_the_groups_of_its_task() {
    let fs = Asks::new();
    look_up(fs.clone(), Credentials::user(USER, USER, &[7, 8]));
    assert_eq!(fs.take(), Some(Ok(vec![7, 8])));
}

#[test]
fn a_kernel_mount_finds_the_groups_of_the_thread_that_calls() {
    if !is_root() || !Path::new("/dev/fuse").exists() {
        return;
    }
    let (fs, dir) = (Asks::new(), tempfile::tempdir().unwrap());
    let mounted = mount::mount(dir.path(), &MountOptions::default()).unwrap();
    let session = Session::start(mounted.device, fs.clone(), &SessionOptions::default()).unwrap();
    let found = with_groups(0, &[11, 12], || dir.path().join("none").exists());
    mount::abort(dir.path()).unwrap();
    assert!(session.wait().clean && !found);
    assert_eq!(fs.take(), Some(Ok(vec![11, 12])));
}

#[test]
fn a_socket_tells_the_groups_of_the_user_that_connected_and_no_others() {
    if !is_root() {
        return;
    }
    let fs = Asks::new();
    let path = format!("@defuse-groups-{}", std::process::id());
    let options =
        ServerOptions { admission: Admission::Users(vec![USER]), ..ServerOptions::default() };
    let server = Server::bind(path.as_ref(), fs.clone(), options).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| server.run());
        let connect = || Remote::connect(path.as_ref(), RemoteOptions::default()).unwrap();
        // The credentials in the request are the client's claim; the groups are the kernel's.
        let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let own = with_groups(USER, &[13, 14], connect);
            look_up(Arc::new(own), Credentials::user(USER, USER, &[99]));
            assert_eq!(fs.take(), Some(Ok(vec![13, 14])));
            look_up(Arc::new(connect()), Credentials::user(USER, USER, &[99]));
            assert_eq!(fs.take(), Some(Err(Errno::ENOSYS)), "root acts for others");
        }));
        server.shut_down();
        done.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    });
}
