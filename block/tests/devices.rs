//! Every device keeps the promises of the traits, by the same cases.

use std::fs::File as Plain;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use defuse_block::{
    BlockDevice, BlockOp, BlockOpKind, BlockingQueue, DeviceAccess, DeviceOpenError, Errno,
    FileDevice, OpenDeviceFile, RamDevice, SeparatedDevice, SeparationOptions, SimDevice,
    WorkerDevice,
};

#[path = "cases/mod.rs"]
mod cases;

use cases::BLOCKS;

device_cases!(run_on_each);

/// Runs `case` on each device that this machine can have.
fn run_on_each(case: impl Fn(&str, &dyn BlockDevice)) {
    case("memory", &RamDevice::new(4096, BLOCKS));
    case("simulation", &SimDevice::new(BLOCKS, 1));
    run_separated(&case, "separated memory", Arc::new(RamDevice::new(4096, BLOCKS)));
    run_separated(&case, "separated simulation", Arc::new(SimDevice::new(BLOCKS, 1)));
    let dir = tempfile::tempdir().unwrap();
    let threads = || {
        let open = OpenDeviceFile::open(&image(dir.path()), DeviceAccess::ReadWrite).unwrap();
        open.device_of_threads().unwrap()
    };
    case("file by threads", &threads());
    case("worker of a file by threads", &WorkerDevice::start_for(Arc::new(threads())).unwrap());
    run_separated(&case, "separated file by threads", Arc::new(threads()));
    case("worker", &WorkerDevice::start_for(Arc::new(RamDevice::new(4096, BLOCKS))).unwrap());
    case("file", &FileDevice::open(&image(dir.path()), DeviceAccess::ReadWrite).unwrap());
    let file = FileDevice::open(&image(dir.path()), DeviceAccess::ReadWrite).unwrap();
    case("worker of a file", &WorkerDevice::start_for(Arc::new(file)).unwrap());
    let file = FileDevice::open(&image(dir.path()), DeviceAccess::ReadWrite).unwrap();
    run_separated(&case, "separated file", Arc::new(file));
    match LoopFixture::new(&image(dir.path())) {
        Ok(disk) => {
            case("loop device", &FileDevice::open(&disk.path, DeviceAccess::ReadWrite).unwrap());
            let open = OpenDeviceFile::open(&disk.path, DeviceAccess::ReadWrite).unwrap();
            case("loop device by threads", &open.device_of_threads().unwrap());
        }
        Err(_) if !Path::new("/dev/loop-control").exists() => {
            println!("not here: loop devices");
        }
        Err(reason) => println!("skipped: no loop device: {reason}"),
    }
}

/// Runs `case` on the device with few queues that its users share.
fn run_separated(case: &impl Fn(&str, &dyn BlockDevice), name: &str, device: Arc<dyn BlockDevice>) {
    case(name, &SeparatedDevice::new(device, &SeparationOptions::new_divided(3, 8)).unwrap());
}

fn image(dir: &Path) -> PathBuf {
    let path = dir.join("image");
    Plain::create(&path).unwrap().set_len(BLOCKS * 4096).unwrap();
    path
}

/// A loop device, which is detached when the value is dropped.
struct LoopFixture {
    path: PathBuf,
}

impl LoopFixture {
    fn new(image: &Path) -> Result<LoopFixture, String> {
        let mut losetup = Command::new("losetup");
        losetup.args(["--find", "--show", "--sector-size", "4096"]).arg(image);
        let output = losetup.output().map_err(|error| error.to_string())?;
        match output.status.success() {
            true => Ok(LoopFixture { path: String::from_utf8_lossy(&output.stdout).trim().into() }),
            false => Err(String::from_utf8_lossy(&output.stderr).trim().to_owned()),
        }
    }
}

impl Drop for LoopFixture {
    fn drop(&mut self) {
        let _ = Command::new("losetup").arg("--detach").arg(&self.path).status();
    }
}

#[test]
fn discarded_space_goes_back_to_the_file_system_below() {
    let dir = tempfile::tempdir().unwrap();
    let path = image(dir.path());
    let file = FileDevice::open(&path, DeviceAccess::ReadWrite).unwrap();
    let mut line = BlockingQueue::new(&file).unwrap();
    line.write(0, &vec![7; 4 << 20]).unwrap();
    line.flush().unwrap();
    let used = path.metadata().unwrap().blocks();
    line.run(BlockOpKind::Discard { block: 0, blocks: 512 }).unwrap();
    let left = path.metadata().unwrap().blocks();
    assert!(left < used, "{left} of {used} sectors");
    assert_eq!(path.metadata().unwrap().len(), BLOCKS * 4096, "the length stays");
}

#[test]
fn a_device_has_one_user_and_its_name_is_in_the_error() {
    let dir = tempfile::tempdir().unwrap();
    let path = image(dir.path());
    let first = FileDevice::open(&path, DeviceAccess::ReadWrite).unwrap();
    for access in [DeviceAccess::ReadWrite, DeviceAccess::Read] {
        let error = FileDevice::open(&path, access).unwrap_err();
        assert!(matches!(error, DeviceOpenError::Busy { .. }), "{error:?}");
        let text = error.to_string();
        let pid = format!("process {}", std::process::id());
        assert!(text.contains(&pid) && text.contains("image"), "{text}");
    }
    drop(first);
    let readers = [DeviceAccess::Read; 2].map(|access| FileDevice::open(&path, access).unwrap());
    let mut line = BlockingQueue::new(&readers[0]).unwrap();
    assert_eq!(line.write(0, &[1; 4096]), Err(Errno::BADF));
    assert_eq!(line.read(0, &mut [0; 4096]), Ok(()));
}

// Two writers of one image: the kernel locks neither way for the other.
#[test]
fn a_file_and_the_loop_device_that_has_it_are_not_both_opened() {
    let dir = tempfile::tempdir().unwrap();
    let path = image(dir.path());
    let (linked, symbolic) = (dir.path().join("linked"), dir.path().join("symbolic"));
    std::fs::hard_link(&path, &linked).unwrap();
    std::os::unix::fs::symlink("image", &symbolic).unwrap();
    let disk = match LoopFixture::new(&path) {
        Ok(disk) => disk,
        Err(_) if !Path::new("/dev/loop-control").exists() => {
            return println!("not here: loop devices");
        }
        Err(reason) => return println!("skipped: no loop device: {reason}"),
    };
    for (name, access) in [&path, &linked, &symbolic]
        .into_iter()
        .flat_map(|name| [DeviceAccess::ReadWrite, DeviceAccess::Read].map(|access| (name, access)))
    {
        let error = OpenDeviceFile::open(name, access).unwrap_err();
        let says = format!("is the backing file of {}", disk.path.display());
        assert!(error.to_string().ends_with(&says), "{name:?} {access:?}: {error}");
    }
    // The file may have got another name, and a new one its old name.
    std::fs::remove_file(&linked).unwrap();
    std::fs::rename(&path, &linked).unwrap();
    assert!(OpenDeviceFile::open(&image(dir.path()), DeviceAccess::ReadWrite).is_ok());
    assert!(matches!(
        OpenDeviceFile::open(&linked, DeviceAccess::Read),
        Err(DeviceOpenError::OfLoopDevice { .. })
    ));

    // Conversely, a process that has the file has the device.
    drop(disk);
    let detached = (0..1000).any(|_| {
        std::thread::sleep(std::time::Duration::from_millis(10));
        OpenDeviceFile::open(&linked, DeviceAccess::Read).is_ok()
    });
    assert!(detached, "the loop device keeps the file");
    let open = OpenDeviceFile::open(&linked, DeviceAccess::ReadWrite).unwrap();
    let disk = LoopFixture::new(&linked).unwrap();
    let error = OpenDeviceFile::open(&disk.path, DeviceAccess::ReadWrite).unwrap_err();
    let pid = format!("is in use by process {}", std::process::id());
    assert!(error.to_string().ends_with(&pid), "{error}");
    drop(open);
    assert!(OpenDeviceFile::open(&disk.path, DeviceAccess::ReadWrite).is_ok());
}

/// Following the path a second time could find another file in its place.
#[test]
fn an_open_file_stays_the_same_when_another_one_takes_its_name() {
    let dir = tempfile::tempdir().unwrap();
    let (path, away) = (image(dir.path()), dir.path().join("away"));
    let open = OpenDeviceFile::open(&path, DeviceAccess::ReadWrite).unwrap();
    assert!(open.is_in_place() && open.is_regular());
    std::fs::rename(&path, &away).unwrap();
    std::fs::write(&path, "mine").unwrap();
    assert!(!open.is_in_place());
    open.resize(8192).unwrap();
    open.allocate(0..BLOCKS * 4096).unwrap();
    let device = open.device().unwrap();
    assert_eq!((device.properties().blocks, open.bytes()), (BLOCKS, Ok(BLOCKS * 4096)));
    BlockingQueue::new(&device).unwrap().write(1, &[5; 4096]).unwrap();
    assert_eq!(std::fs::read(&path).unwrap(), b"mine");
    assert_eq!(std::fs::read(&away).unwrap()[4096], 5);
    // A device keeps the lock.
    drop(open);
    assert!(matches!(
        OpenDeviceFile::open(&away, DeviceAccess::Read),
        Err(DeviceOpenError::Busy { .. })
    ));
    drop(device);
    assert!(OpenDeviceFile::open(&away, DeviceAccess::Read).is_ok());
    let exists = OpenDeviceFile::create(&away).unwrap_err();
    assert!(matches!(exists, DeviceOpenError::System { errno: Errno::EXIST, .. }), "{exists:?}");
}

#[test]
fn what_is_no_device_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let open = |path: &Path| FileDevice::open(path, DeviceAccess::ReadWrite).unwrap_err();
    assert!(matches!(open(&dir.path().join("none")), DeviceOpenError::System { .. }));
    assert!(matches!(open(Path::new("/dev/null")), DeviceOpenError::WrongKind { .. }));
    let small = dir.path().join("small");
    std::fs::write(&small, [0; 100]).unwrap();
    assert!(matches!(open(&small), DeviceOpenError::TooSmall { bytes: 100, .. }));
    let fifo = dir.path().join("fifo");
    assert!(Command::new("mkfifo").arg(&fifo).status().unwrap().success());
    assert!(matches!(
        open(&fifo),
        DeviceOpenError::WrongKind { .. } | DeviceOpenError::System { .. }
    ));
}

/// A thread that performed the last operation still had the device open when the user had its
/// answer and dropped the rest.
#[test]
fn a_device_of_threads_is_free_as_soon_as_its_last_user_has_gone() {
    let dir = tempfile::tempdir().unwrap();
    let path = image(dir.path());
    for round in 0..200 {
        let device = OpenDeviceFile::open(&path, DeviceAccess::ReadWrite)
            .unwrap()
            .device_of_threads()
            .unwrap();
        let mut queue = device.queue(8).unwrap();
        drop(device);
        for tag in 0..8 {
            queue.push(BlockOp { tag, kind: BlockOpKind::Zero { block: tag, blocks: 1 } }).unwrap();
        }
        queue.kick();
        let mut done = Vec::new();
        while queue.in_flight() > 0 {
            queue.wait(None);
            queue.reap(&mut done);
        }
        assert!(done.iter().all(|done| done.result == Ok(())), "{done:?}");
        drop(queue);
        // This process holds the lock itself, so that the open does not wait.
        OpenDeviceFile::open(&path, DeviceAccess::ReadWrite)
            .unwrap_or_else(|error| panic!("{round}: {error}"));
    }
}

#[test]
fn a_device_without_rings_says_so_in_one_line() {
    let dir = tempfile::tempdir().unwrap();
    let open = OpenDeviceFile::open(&image(dir.path()), DeviceAccess::Read).unwrap();
    let device: Arc<dyn BlockDevice> = Arc::new(open.device_of_threads().unwrap());
    let note = device.note().unwrap();
    assert!(
        note.contains("image: io_uring is refused here") && note.lines().count() == 1,
        "{note}"
    );
    assert_eq!(WorkerDevice::start_for(Arc::clone(&device)).unwrap().note(), Some(note.clone()));
    let shared =
        SeparatedDevice::new(Arc::clone(&device), &SeparationOptions::new_divided(2, 8)).unwrap();
    assert_eq!((shared.note(), RamDevice::new(4096, 8).note()), (Some(note), None));
    let line = &mut BlockingQueue::new(&*device).unwrap();
    assert_eq!(line.write(0, &[1; 4096]), Err(Errno::BADF), "it was opened for reads");
}
