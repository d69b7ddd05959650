//! Reads, writes and fsyncs that the file system completes later, from other threads, through the
//! kernel mount.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use defuse_fs::{Caps, FileSystem, Io, IoOp, delegate};
use defuse_fuse::mount::{self, MountOptions};
use defuse_fuse::{Session, SessionOptions};
use defuse_memory::{Memory, Options};

/// A memory file system whose data operations take time on separate threads.
struct Later {
    inner: Arc<Memory>,
}

impl FileSystem for Later {
    delegate!(to inner, except caps, submit);

    fn caps(&self) -> Caps {
        Caps { submits: true, ..self.inner.caps() }
    }

    fn submit(&self, io: Io) {
        if matches!(io.op(), IoOp::Lock { .. }) {
            return self.inner.submit(io);
        }
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
    let fs = Arc::new(Later { inner: Arc::new(Memory::new(Options::default())) });
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
    session.wait();
    result.unwrap();
    let snapshot = statistics.snapshot();
    for name in ["READ", "WRITE", "FSYNC"] {
        let counted = snapshot.ops.iter().find(|stats| stats.op.name() == name);
        let counted = counted.unwrap_or_else(|| panic!("{name} was not counted"));
        assert!(counted.latency.count >= 8, "{name}: {}", counted.latency.count);
    }
}
