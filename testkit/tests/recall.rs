//! Recalls: a file system requests everything back that a frontend caches of a file, and is
//! notified when nothing is left.

use std::fs;
use std::path::Path;
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

use defuse_direct::{
    ClientMountArgs, ClientTask, DirectClient, OpenHow, TaskCredentials, WalkStart, WorkDir,
};
use defuse_fs::layer::{FaultAction, FaultLayer, FaultRule, FaultTrigger, Method, SubdirLayer};
use defuse_fs::{
    Caller, Context, Errno, File, FileSystem, Ino, Name, NoNotify, Notify, Origin, ReadArgs,
    ReadBuf, Result, SliceSink, delegate,
};
use defuse_fuse::mount::{self, MountOptions};
use defuse_fuse::{Session, SessionOptions};
use defuse_memory::{MemoryFileSystem, MemoryOptions};
use defuse_remote::{RemoteClient, RemoteOptions};
use defuse_socket::{ServerOptions, SocketServer};

const LONG: Duration = Duration::from_secs(20);

/// A file system that keeps the notifier of its frontend.
struct RecallingMemory {
    inner: FaultLayer<MemoryFileSystem>,
    notify: Mutex<Option<Arc<dyn Notify>>>,
}

impl FileSystem for RecallingMemory {
    delegate!(to inner, except attach);

    fn attach(&self, _: Origin, notify: Arc<dyn Notify>) {
        *self.notify.lock().unwrap() = Some(notify);
    }
}

impl RecallingMemory {
    fn new() -> Arc<Self> {
        let inner = FaultLayer::new(MemoryFileSystem::new(MemoryOptions::default()), 1);
        Arc::new(RecallingMemory { inner, notify: Mutex::default() })
    }

    fn recall(&self, ino: Ino, limit: Duration) -> Result<()> {
        let notify = self.notify.lock().unwrap().clone().unwrap();
        recall(&*notify, ino, limit)
    }

    /// The number of `/file`, and its bytes as the file system has them.
    fn file(&self) -> (Ino, Vec<u8>) {
        let memory = self.inner.inner();
        let cx = Context::new(Caller::default());
        let entry = memory.lookup(&cx, Ino::ROOT, Name::new(b"file").unwrap()).unwrap();
        memory.forget(entry.ino, 1);
        let file = File { ino: entry.ino, fh: defuse_fs::Fh(0) };
        let mut bytes = vec![0; entry.attr.size as usize];
        let mut sink = SliceSink::new(&mut bytes);
        let mut out = ReadBuf::new(&mut sink, entry.attr.size as usize);
        memory.read(&cx, file, ReadArgs::default(), &mut out).unwrap();
        (entry.ino, bytes)
    }
}

fn recall(notify: &dyn Notify, ino: Ino, limit: Duration) -> Result<()> {
    let (send, answer) = mpsc::channel();
    notify.recall(ino, limit, Box::new(move |recalled| send.send(recalled).unwrap()));
    answer.recv_timeout(LONG * 2).expect("a recall is always answered")
}

#[test]
fn a_kernel_mount_writes_back_what_it_holds_before_it_answers_a_recall() {
    if !rustix::process::geteuid().is_root() || !Path::new("/dev/fuse").exists() {
        println!("skipped: needs root and /dev/fuse");
        return;
    }
    let (fs, dir) = (RecallingMemory::new(), tempfile::tempdir().unwrap());
    let mounted = mount::mount(dir.path(), &MountOptions::default()).unwrap();
    let options = SessionOptions { writeback: true, ..SessionOptions::default() };
    let session = Session::start(mounted.device, fs.clone(), &options).unwrap();
    let path = dir.path().join("file");
    let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        fs::write(&path, "synced").unwrap();
        fs::File::open(&path).unwrap().sync_all().unwrap();
        // It stays open, because a close writes back, too.
        let file = fs::File::options().write(true).open(&path).unwrap();
        std::os::unix::fs::FileExt::write_all_at(&file, b"cached", 0).unwrap();
        let (ino, before) = fs.file();
        assert_eq!(before, b"synced", "the kernel holds the new bytes");
        assert_eq!(fs.recall(ino, LONG), Ok(()));
        assert_eq!(fs.file().1, b"cached");

        // The file system does not answer the write in time, and the frontend still holds data.
        std::os::unix::fs::FileExt::write_all_at(&file, b"slowly", 0).unwrap();
        let slow = FaultAction::Delay(Duration::from_secs(2));
        let rule =
            FaultRule { method: Some(Method::Write), when: FaultTrigger::Always, action: slow };
        fs.inner.set_rules(&[rule]);
        assert_eq!(fs.recall(ino, Duration::from_millis(100)), Err(Errno::ETIMEDOUT));
        fs.inner.set_rules(&[]);
        file.sync_all().unwrap();
        assert_eq!(fs.file().1, b"slowly");
    }));
    mount::abort(dir.path()).unwrap();
    assert!(session.wait().clean);
    done.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    assert_eq!(fs.recall(fs.file().0, LONG), Err(Errno::ENOTCONN), "the mount is gone");
}

/// Mounts `fs` in the in-process client and looks `a:/file` up while `run` runs.
fn run_in_process(fs: Arc<dyn FileSystem>, run: impl FnOnce(&dyn Fn() -> u32)) {
    let client = DirectClient::new(defuse_direct::ClientOptions::default());
    client.mount(b"a:", fs, &ClientMountArgs::default()).unwrap();
    let task = ClientTask::new(TaskCredentials::user(0, 0, &[]), WorkDir::Outside(b"/".to_vec()));
    let flags = (libc::O_RDWR | libc::O_CREAT) as u32;
    let how = OpenHow { flags, mode: 0o600, ..OpenHow::default() };
    let file = client.open(&task, WalkStart::Cwd, b"a:/file", how).unwrap();
    run(&|| client.fstat(&task, &file).unwrap().attr.perm);
    file.close(&task).unwrap();
}

#[test]
fn the_in_process_client_drops_attributes_when_they_are_recalled() {
    let fs = RecallingMemory::new();
    run_in_process(fs.clone(), |perm| {
        assert_eq!(perm(), 0o600);
        // Changed without a word to the client.
        let (ino, _) = fs.file();
        let set = defuse_fs::SetAttr { perm: Some(0o640), ..Default::default() };
        fs.inner.inner().setattr(&Context::new(Caller::default()), ino, None, &set).unwrap();
        assert_eq!(perm(), 0o600, "the client relies on what it was told");
        assert_eq!(fs.recall(ino, LONG), Ok(()));
        assert_eq!(perm(), 0o640);
        assert_eq!(fs.recall(Ino(999), LONG), Err(Errno::ENOENT));
    });
}

#[test]
fn a_socket_refuses_a_recall_that_it_could_not_acknowledge() {
    let (fs, dir) = (RecallingMemory::new(), tempfile::tempdir().unwrap());
    let path = dir.path().join("socket");
    let server = SocketServer::bind(&path, fs.clone(), ServerOptions::default()).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| server.run());
        let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let remote = RemoteClient::connect(&path, RemoteOptions::default()).unwrap();
            run_in_process(Arc::new(remote), |perm| {
                assert_eq!(perm(), 0o600);
                assert_eq!(fs.recall(fs.file().0, LONG), Err(Errno::ENOSYS));
            });
        }));
        server.shut_down();
        done.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    });
}

#[test]
fn a_recall_passes_a_view_and_ends_at_a_frontend_without_a_cache() {
    assert_eq!(recall(&NoNotify, Ino(7), LONG), Ok(()));
    let fs = RecallingMemory::new();
    let view = SubdirLayer::new(fs.clone(), Caller::default(), []).unwrap();
    view.attach(defuse_fs::Origin::new(), Arc::new(NoNotify));
    assert_eq!(fs.recall(Ino(7), LONG), Ok(()));
    assert_eq!(fs.recall(Ino::ROOT, LONG), Ok(()));
}
