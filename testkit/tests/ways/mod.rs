//! One file of a file system, opened through each frontend.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

use defuse_direct::{
    ClientMountArgs, ClientTask, DirectClient, FileDescription, OpenHow, TaskCredentials,
    WalkStart, WorkDir,
};
use defuse_fs::FileSystem;
use defuse_fuse::mount::{self, MountOptions};
use defuse_fuse::{IoUring, Session, SessionOptions};
use defuse_remote::{LaneUse, RemoteClient, RemoteOptions};
use defuse_shared::LaneOffers;
use defuse_socket::{ServerOptions, SocketServer};

const RDWR: u32 = libc::O_RDWR as u32;

/// An open file; its last clone closes it.
#[derive(Clone)]
pub enum TestedFile {
    Kernel(Arc<File>),
    Direct(Arc<DirectClient>, Arc<ClientTask>, Arc<CloseOnDrop>),
}

/// Closes an open file of the in-process client when dropped.
pub struct CloseOnDrop(Arc<FileDescription>, Arc<ClientTask>);

impl Drop for CloseOnDrop {
    fn drop(&mut self) {
        self.0.close(&self.1).unwrap();
    }
}

impl TestedFile {
    pub fn pread(&self, room: &mut [u8], offset: u64) -> usize {
        match self {
            TestedFile::Kernel(file) => file.read_at(room, offset).unwrap(),
            TestedFile::Direct(client, task, file) => {
                client.pread(task, &file.0, room, offset).unwrap()
            }
        }
    }

    pub fn pwrite(&self, bytes: &[u8], offset: u64) -> usize {
        match self {
            TestedFile::Kernel(file) => file.write_at(bytes, offset).unwrap(),
            TestedFile::Direct(client, task, file) => {
                client.pwrite(task, &file.0, bytes, offset).unwrap()
            }
        }
    }
}

/// Runs `test` on `/file` of a file system that `make` makes, through each frontend: the in-process
/// client, the socket and the lanes with that client in front of them, and the kernel mount over
/// both transports.
pub fn run_on_each<F: FileSystem + 'static>(
    make: impl Fn() -> Arc<F>,
    test: impl Fn(&str, &Arc<F>, &dyn Fn() -> TestedFile),
) {
    let fs = make();
    run_in_process(fs.clone(), |open| test("direct", &fs, open));
    let fs = make();
    run_over_socket(fs.clone(), LaneUse::Never, |open| test("socket", &fs, open));
    let fs = make();
    run_over_socket(fs.clone(), LaneUse::Required, |open| test("shared", &fs, open));
    for transport in [IoUring::Off, IoUring::Auto] {
        let fs = make();
        run_mounted(fs.clone(), transport, |open| test("kernel", &fs, open));
    }
}

fn run_in_process(fs: Arc<dyn FileSystem>, test: impl FnOnce(&dyn Fn() -> TestedFile)) {
    let client = Arc::new(DirectClient::new(defuse_direct::ClientOptions::default()));
    client.mount(b"a:", fs, &ClientMountArgs::default()).unwrap();
    let outside = WorkDir::Outside(b"/".to_vec());
    let task = Arc::new(ClientTask::new(TaskCredentials::user(0, 0, &[]), outside));
    test(&|| {
        let how = OpenHow { flags: RDWR | libc::O_CREAT as u32, mode: 0o600, ..OpenHow::default() };
        let file = client.open(&task, WalkStart::Cwd, b"a:/file", how).unwrap();
        TestedFile::Direct(client.clone(), task.clone(), Arc::new(CloseOnDrop(file, task.clone())))
    });
    client.unmount(b"a:", false).unwrap();
}

fn run_over_socket(
    fs: Arc<dyn FileSystem>,
    lanes: LaneUse,
    test: impl FnOnce(&dyn Fn() -> TestedFile),
) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("socket");
    let offers = Some(Arc::new(LaneOffers::default()) as _);
    let options = ServerOptions { lanes: offers, ..ServerOptions::default() };
    let server = SocketServer::bind(&path, fs, options).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| server.run());
        let remote =
            RemoteClient::connect(&path, RemoteOptions { lanes, ..RemoteOptions::default() })
                .unwrap();
        let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            run_in_process(Arc::new(remote), test);
        }));
        server.shut_down();
        done.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    });
}

fn run_mounted(
    fs: Arc<dyn FileSystem>,
    io_uring: IoUring,
    test: impl FnOnce(&dyn Fn() -> TestedFile),
) {
    if !rustix::process::geteuid().is_root() || !Path::new("/dev/fuse").exists() {
        println!("skipped: needs root and /dev/fuse");
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let mounted = mount::mount(dir.path(), &MountOptions::default()).unwrap();
    let workers = Some(16);
    let options =
        SessionOptions { workers, direct_io: true, io_uring, ..SessionOptions::default() };
    let session = Session::start(mounted.device, fs, &options).unwrap();
    let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        test(&|| {
            let mut how = File::options();
            let how = how.read(true).write(true).create(true).truncate(false);
            TestedFile::Kernel(Arc::new(how.open(dir.path().join("file")).unwrap()))
        });
    }));
    mount::abort(dir.path()).unwrap();
    assert!(session.wait().clean);
    done.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
}
