//! Descriptors do not run out where each inode that a frontend knows needs one.

mod common;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use common::*;
use defuse_fs::*;
use defuse_passthrough::{FileHandles, Passthrough, PassthroughOptions};

/// A frontend that remembers which inodes it received to forget.
#[derive(Default)]
struct RecordingFrontend {
    /// It forgets only by name, like a kernel before Linux 6.18.
    by_name: bool,
    requested: Mutex<Vec<Ino>>,
    names: Mutex<Vec<(Ino, Vec<u8>)>>,
}

impl Notify for RecordingFrontend {
    fn invalidate_inode(&self, _: Ino, _: Option<(u64, u64)>) -> Result<()> {
        Ok(())
    }
    fn invalidate_entry(&self, parent: Ino, name: Name<'_>, _: bool) -> Result<()> {
        self.names.lock().unwrap().push((parent, name.as_bytes().to_vec()));
        Ok(())
    }
    fn notify_delete(&self, _: Ino, _: Ino, _: Name<'_>) -> Result<()> {
        Ok(())
    }
    fn store(&self, _: Ino, _: u64, _: &[u8]) -> Result<()> {
        Ok(())
    }
    fn retrieve(
        &self,
        _: Ino,
        _: u64,
        _: u32,
        _: Box<dyn FnOnce(Result<Vec<u8>>) + Send>,
    ) -> Result<()> {
        Err(Errno::ENOSYS)
    }
    fn poll_wake(&self, _: PollHandle) -> Result<()> {
        Ok(())
    }
    fn increment_epoch(&self) -> Result<()> {
        Err(Errno::ENOSYS)
    }
    fn prune(&self, inodes: &[Ino]) -> Result<()> {
        if self.by_name {
            return Err(Errno::ENOSYS);
        }
        self.requested.lock().unwrap().extend(inodes);
        Ok(())
    }
}

const BASE: &str = "DEFUSE_TEST_PRUNED";
const FILES: usize = 1500;

/// The work of the next test, in a process with few descriptors.
#[test]
fn pruned_child() {
    let Ok(base) = std::env::var(BASE) else { return };
    let base = PathBuf::from(base);
    (0..FILES).for_each(|n| fs::write(base.join(n.to_string()), n.to_string()).unwrap());
    for by_name in [false, true] {
        let options =
            PassthroughOptions { file_handles: FileHandles::Off, ..PassthroughOptions::default() };
        let fs = Arc::new(Passthrough::new(&base, options).unwrap());
        let kernel = Arc::new(RecordingFrontend { by_name, ..RecordingFrontend::default() });
        fs.attach(Origin::NONE, Arc::clone(&kernel) as Arc<dyn Notify>);
        let (ends, forgotten) = (AtomicBool::new(false), AtomicUsize::new(0));
        let numbers = Mutex::new(std::collections::HashMap::new());
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !ends.load(Ordering::Relaxed) {
                    let mut requested = std::mem::take(&mut *kernel.requested.lock().unwrap());
                    let names = std::mem::take(&mut *kernel.names.lock().unwrap());
                    let numbers: std::sync::MutexGuard<
                        '_,
                        std::collections::HashMap<Vec<u8>, Ino>,
                    > = numbers.lock().unwrap();
                    requested.extend(names.iter().filter_map(|(_, name)| numbers.get(name)));
                    for ino in requested {
                        fs.forget(ino, 1);
                        forgotten.fetch_add(1, Ordering::Relaxed);
                    }
                    drop(numbers);
                    std::thread::sleep(std::time::Duration::from_millis(1));
                }
            });
            let read_all = || {
                for number in 0..FILES {
                    let text = number.to_string();
                    let entry = fs.lookup(&own_context(), Ino::ROOT, name(&text)).unwrap();
                    numbers.lock().unwrap().insert(text.into_bytes(), entry.ino);
                }
            };
            let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(read_all));
            ends.store(true, Ordering::Relaxed);
            outcome.unwrap();
        });
        let stats = fs.stats();
        assert!(forgotten.into_inner() > FILES / 2 && stats.open_fds < 128, "{stats:?}");
        fs.detach(Origin::NONE).unwrap();
    }
}

/// With an overlay as its source, the root of each container, a mount answered EMFILE to everything
/// after as many files as it may have descriptors, for as long as the kernel remembered them.
#[test]
fn inodes_without_handles_and_birth_times_are_forgotten_before_descriptors_run_out() {
    if !is_root() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    // ramfs has no birth times.
    let flags = rustix::mount::MountFlags::empty();
    if rustix::mount::mount("none", dir.path(), "ramfs", flags, None).is_err() {
        return eprintln!("skipped: no permission to mount");
    }
    let script = "ulimit -Sn 128 && ulimit -Hn 128 && exec \"$0\" --exact pruned_child --nocapture";
    let output = Command::new("sh")
        .args(["-c", script])
        .arg(std::env::current_exe().unwrap())
        .env(BASE, dir.path() as &Path)
        .output()
        .unwrap();
    rustix::mount::unmount(dir.path(), rustix::mount::UnmountFlags::DETACH).unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}
