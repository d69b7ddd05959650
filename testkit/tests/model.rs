//! The reference model against the backends.

use std::sync::Arc;

use defuse_block::{BlockDevice, DeviceAccess, OpenDeviceFile, RamDevice};
use defuse_example::Example;
use defuse_memory::{MemoryFileSystem, MemoryOptions};
use defuse_testkit::model::{MissingPolicy, ModelOp, check, replay};
use defuse_uhs::Uhs;

#[test]
fn memory_does_what_the_model_does() {
    check(MissingPolicy::Refused, || Arc::new(MemoryFileSystem::new(MemoryOptions::default())));
}

/// A copy within one file moved the end of the file that it read from, and so copied more bytes
/// than there had been.
#[test]
fn a_copy_that_lengthens_its_own_source_stops_at_the_old_end() {
    let ops = [
        ModelOp::Create { dir: 0, name: 0, perm: 0o600, truncate: false },
        ModelOp::Write { handle: 0, offset: 0, length: 8193, byte: 1, append: false },
        ModelOp::Copy { from: 0, to: 0, src: 8191, dst: 8193, length: 100 },
        ModelOp::Copy { from: 0, to: 0, src: 8191, dst: 12287, length: 300 },
    ];
    replay(MissingPolicy::Refused, &MemoryFileSystem::new(MemoryOptions::default()), &ops).unwrap();
}

/// The backend that the documentation explains has few operations, and these do as the model does.
#[test]
fn the_example_does_what_the_model_does() {
    check(MissingPolicy::Allowed, || Arc::new(Example::new(1024)));
}

/// Its caches are so small that most data is read from the device again, and most writes wait for
/// it.
#[test]
fn uhs_does_what_the_model_does() {
    check(MissingPolicy::Allowed, || Arc::new(uhs_on(Arc::new(RamDevice::new(4096, 4096)))));
}

/// Where io_uring is refused.
#[test]
fn uhs_on_a_file_of_threads_does_what_the_model_does() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("image");
    check(MissingPolicy::Allowed, || {
        std::fs::File::create(&path).unwrap().set_len(16 << 20).unwrap();
        let file = OpenDeviceFile::open(&path, DeviceAccess::ReadWrite).unwrap();
        let device = file.device_of_threads().unwrap();
        assert!(!device.has_rings());
        Arc::new(uhs_on(Arc::new(device)))
    });
}

fn uhs_on(device: Arc<dyn BlockDevice>) -> Uhs {
    let options = defuse_uhs::UhsOptions {
        commit: None,
        cache_pages: 64,
        dirty_pages: 16,
        ..Default::default()
    };
    let mut random = fastrand::Rng::with_seed(1);
    Uhs::make(Arc::clone(&device), (0o1777, 0, 0), &mut random).unwrap();
    let (fs, problems) = Uhs::open(device, options, random).unwrap();
    assert_eq!(problems, []);
    fs
}
