//! Rights of a child of fork(2) on the file systems that its parent has in its process: as in C and
//! Python (`capi/tests/library.rs`), for programs in Rust.

use std::path::Path;
use std::sync::Arc;

use defuse_block::{
    BlockDevice, DeviceAccess, FileDevice, OpenDeviceFile, RamDevice, WorkerDevice,
};
use defuse_direct::{
    CallError, ClientMountArgs, ClientOptions, ClientTask, DirectClient, JobQueue, OpenHow,
    QueueOptions, TaskCredentials, WalkStart, WorkDir,
};
use defuse_fs::{Errno, FileSystem};
use defuse_memory::MemoryFileSystem;
use defuse_testkit::posix::run_in_child;
use defuse_uhs::Uhs;

const CREATE: u32 = (libc::O_RDWR | libc::O_CREAT) as u32;

struct ForkSide {
    client: DirectClient,
    task: ClientTask,
}

impl ForkSide {
    fn new(fs: Arc<dyn FileSystem>) -> ForkSide {
        let client = DirectClient::new(ClientOptions::default());
        client.mount(b"m:", fs, &ClientMountArgs::default()).unwrap();
        let place = WorkDir::Outside(b"/".to_vec());
        ForkSide { client, task: ClientTask::new(TaskCredentials::user(0, 0, &[]), place) }
    }

    /// Makes a file with `text`, and syncs it.
    fn put(&self, path: &str, text: &str) -> Result<(), CallError> {
        let how = OpenHow { flags: CREATE, mode: 0o644, ..OpenHow::default() };
        let file = self.client.open(&self.task, WalkStart::Cwd, path.as_bytes(), how)?;
        assert_eq!(self.client.write(&self.task, &file, text.as_bytes())?, text.len());
        self.client.fsync(&self.task, &file, false)
    }

    fn size(&self, path: &str) -> Result<u64, CallError> {
        Ok(self.client.stat(&self.task, WalkStart::Cwd, path.as_bytes(), true)?.attr.size)
    }
}

fn uhs(device: Arc<dyn BlockDevice>) -> Arc<dyn FileSystem> {
    let mut random = fastrand::Rng::with_seed(1);
    Uhs::make(Arc::clone(&device), (0o755, 0, 0), &mut random).unwrap();
    let options = defuse_uhs::UhsOptions::default();
    Arc::new(Uhs::open(device, options, random).unwrap().0)
}

fn image(path: &Path) -> OpenDeviceFile {
    std::fs::File::create(path).unwrap().set_len(32 << 20).unwrap();
    OpenDeviceFile::open(path, DeviceAccess::ReadWrite).unwrap()
}

#[test]
fn a_child_is_refused_by_a_file_system_on_a_device_and_its_parent_goes_on() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    let of_threads = image(&path("threads")).device_of_threads().unwrap();
    let file: FileDevice = image(&path("worker")).device().unwrap();
    let devices: [(&str, Arc<dyn BlockDevice>); 4] = [
        ("memory", Arc::new(RamDevice::new(4096, 8192))),
        ("rings", Arc::new(image(&path("rings")).device().unwrap())),
        ("threads", Arc::new(of_threads)),
        ("worker", Arc::new(WorkerDevice::start_for(Arc::new(file)).unwrap())),
    ];
    for (name, device) in devices {
        let side = ForkSide::new(uhs(device));
        side.put("m:/kept", "kept").unwrap();
        assert_eq!(side.size("m:/kept"), Ok(4), "{name}");
        let refused = CallError::Errno(Errno::ENOTCONN);
        let status = run_in_child(|| {
            assert_eq!(side.put("m:/new", "new"), Err(refused.clone()));
            // It was cached.
            assert_eq!(side.size("m:/kept"), Err(refused.clone()));
            // A file system that it mounts itself is its own.
            let own = ForkSide::new(uhs(Arc::new(RamDevice::new(4096, 8192))));
            own.put("m:/own", "own").unwrap();
            assert_eq!(side.client.unmount(b"m:", false), Ok(()));
            0
        });
        assert_eq!(status.unwrap(), 0, "{name}");
        side.put("m:/kept", "kept on").unwrap();
        assert_eq!(side.size("m:/kept"), Ok(7), "{name}");
        assert_eq!(side.client.unmount(b"m:", false), Ok(()), "{name}");
    }
}

#[test]
fn a_child_has_a_copy_of_files_in_memory() {
    let side =
        ForkSide::new(Arc::new(MemoryFileSystem::new(defuse_memory::MemoryOptions::default())));
    side.put("m:/kept", "kept").unwrap();
    let status = run_in_child(|| {
        side.put("m:/kept", "changed").unwrap();
        u8::from(side.size("m:/kept") != Ok(7))
    });
    assert_eq!((status.unwrap(), side.size("m:/kept")), (0, Ok(4)));
}

/// A job of a child was never carried out, and its end waited for threads of the parent.
#[test]
fn a_child_has_no_queue_of_its_parent() {
    let queue = JobQueue::<u8>::new(QueueOptions::default()).unwrap();
    queue.submit(1, Box::new(|| 1), None).unwrap();
    assert_eq!(queue.collect(1, 1, None).map(|all| all.len()), Ok(1));
    let status = run_in_child(|| {
        let refused = [
            queue.submit(2, Box::new(|| 2), None),
            queue.collect(1, 1, None).map(drop),
            queue.cancel(2),
            queue.end(),
        ];
        u8::from(refused != [Err(Errno::EINVAL); 4])
    });
    assert_eq!(status.unwrap(), 0);
    queue.end().unwrap();
}
