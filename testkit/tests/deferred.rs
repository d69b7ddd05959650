//! Reads, writes and fsyncs that the file system completes later, from other threads, through the
//! kernel mount.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use defuse_direct::{At, Client, Credentials, How, MountArgs, Task, WorkDir};
use defuse_fs::{Caps, FileSystem, Io, IoOp, delegate};
use defuse_fuse::mount::{self, MountOptions};
use defuse_fuse::{Session, SessionOptions};
use defuse_memory::{Memory, Options};

/// A memory file system whose data operations take time on separate threads.
#[derive(Clone)]
struct Later {
    inner: Arc<Memory>,
    /// How often fsyncdir and syncfs were submitted.
    dirs: Arc<AtomicUsize>,
    all: Arc<AtomicUsize>,
}

impl Later {
    fn new() -> Self {
        let inner = Arc::new(Memory::new(Options::default()));
        Later { inner, dirs: Arc::default(), all: Arc::default() }
    }
}

impl FileSystem for Later {
    delegate!(to inner, except caps, submit);

    fn caps(&self) -> Caps {
        Caps { submits: true, ..self.inner.caps() }
    }

    fn submit(&self, io: Io) {
        match io.op() {
            IoOp::Fsyncdir { .. } => self.dirs.fetch_add(1, Ordering::SeqCst),
            IoOp::Syncfs => self.all.fetch_add(1, Ordering::SeqCst),
            _ => 0,
        };
        let inner = Arc::clone(&self.inner);
        std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(2));
            inner.submit(io);
        });
    }
}

const BLOCK: usize = 16 * 1024;
const BLOCKS: usize = 16;

fn content(file: usize, block: usize) -> Vec<u8> {
    (0..BLOCK).map(|at| (file * 31 + block * 7 + at) as u8).collect()
}

fn write_and_read(dir: &Path, number: usize) {
    let path = dir.join(format!("file{number}"));
    let file = File::options().read(true).write(true).create_new(true).open(&path).unwrap();
    for block in 0..BLOCKS {
        file.write_all_at(&content(number, block), (block * BLOCK) as u64).unwrap();
    }
    file.sync_all().unwrap();
    File::open(dir).unwrap().sync_all().unwrap();
    for block in (0..BLOCKS).rev() {
        let mut bytes = vec![0; BLOCK];
        file.read_exact_at(&mut bytes, (block * BLOCK) as u64).unwrap();
        assert_eq!(bytes, content(number, block), "file {number}, block {block}");
    }
    let mut beyond = [0; 8];
    assert_eq!(file.read_at(&mut beyond, (BLOCKS * BLOCK) as u64).unwrap(), 0);
}

/// One worker serves all callers at once, because no data operation blocks it.
#[test]
fn data_operations_may_complete_later_without_blocking_a_worker() {
    if !rustix::process::geteuid().is_root() || !Path::new("/dev/fuse").exists() {
        println!("skipped: needs root and /dev/fuse");
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let fs = Arc::new(Later::new());
    let dirs = Arc::clone(&fs.dirs);
    let mounted = mount::mount(dir.path(), &MountOptions::default()).unwrap();
    let options = SessionOptions { workers: Some(1), direct_io: true, ..SessionOptions::default() };
    let session = Session::start(mounted.device, fs, &options).unwrap();
    let statistics = session.statistics();
    let result = std::panic::catch_unwind(|| {
        std::thread::scope(|scope| {
            for number in 0..8 {
                let dir = dir.path();
                scope.spawn(move || write_and_read(dir, number));
            }
        });
    });
    mount::abort(dir.path()).unwrap();
    session.wait().durable.unwrap();
    result.unwrap();
    assert_eq!(dirs.load(Ordering::SeqCst), 8);
    let snapshot = statistics.snapshot();
    for name in ["READ", "WRITE", "FSYNC", "FSYNCDIR"] {
        let counted = snapshot.ops.iter().find(|stats| stats.op.name() == name);
        let counted = counted.unwrap_or_else(|| panic!("{name} was not counted"));
        assert!(counted.latency.count >= 8, "{name}: {}", counted.latency.count);
    }
}

#[test]
fn the_in_process_client_submits_what_makes_changes_durable() {
    let fs = Later::new();
    let client = Client::new(defuse_direct::Options::default());
    client.mount(b"a:", Arc::new(fs.clone()), &MountArgs::default()).unwrap();
    let outside = WorkDir::Outside(b"/".to_vec());
    let task = Task::new(Credentials::user(0, 0, &[]), outside);
    let flags = libc::O_DIRECTORY as u32;
    let how = How { flags, mode: 0, ..How::default() };
    let dir = client.open(&task, At::Cwd, b"a:/", how).unwrap();
    client.fsync(&task, &dir, false).unwrap();
    client.start_fsync(&task, &dir, true, None).unwrap().wait().0.unwrap();
    client.syncfs(&task, &dir).unwrap();
    client.start_syncfs(&task, &dir, None).unwrap().wait().0.unwrap();
    let submitted = [&fs.dirs, &fs.all].map(|count| count.load(Ordering::SeqCst));
    assert_eq!(submitted, [2, 2]);
    dir.close(&task).unwrap();
}
