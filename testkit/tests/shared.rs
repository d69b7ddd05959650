//! One file system in memory behind several frontends at once.

use std::fs;
use std::path::Path;
use std::sync::Arc;

use defuse_direct::{
    ClientMountArgs, ClientTask, DirectClient, OpenHow, TaskCredentials, WalkStart, WorkDir,
};
use defuse_fs::FileSystem;
use defuse_fuse::mount::{self, MountOptions};
use defuse_fuse::{Session, SessionOptions};
use defuse_memory::{MemoryFileSystem, MemoryOptions};

const CREATE: OpenHow =
    OpenHow { flags: 0o102, mode: 0o644, resolve: defuse_direct::ResolveFlags(0) };

fn client(fs: Arc<dyn FileSystem>) -> (DirectClient, ClientTask) {
    let client = DirectClient::new(defuse_direct::ClientOptions::default());
    client.mount(b"a:", fs, &ClientMountArgs::default()).unwrap();
    (client, ClientTask::new(TaskCredentials::user(0, 0, &[]), WorkDir::Outside(b"/".to_vec())))
}

/// The kernel was requested to remember for a day that a name does not exist, whatever other
/// frontend used the file system.
#[test]
fn a_kernel_mount_finds_a_name_that_another_frontend_made_after_the_kernel_missed_it() {
    if !rustix::process::geteuid().is_root() || !Path::new("/dev/fuse").exists() {
        println!("skipped: needs root and /dev/fuse");
        return;
    }
    let (memory, dir) =
        (Arc::new(MemoryFileSystem::new(MemoryOptions::default())), tempfile::tempdir().unwrap());
    let mounted = mount::mount(dir.path(), &MountOptions::default()).unwrap();
    let session =
        Session::start(mounted.device, memory.clone(), &SessionOptions::default()).unwrap();
    let (client, task) = client(memory);
    let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        let path = dir.path().join("file");
        assert!(!path.exists());
        client.open(&task, WalkStart::Cwd, b"a:/file", CREATE).unwrap();
        assert!(path.exists());
        fs::remove_file(&path).unwrap();
        assert!(client.stat(&task, WalkStart::Cwd, b"a:/file", true).is_err());
    }));
    mount::abort(dir.path()).unwrap();
    assert!(session.wait().clean);
    done.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
}

/// Answers to the only frontend are valid for a day, and the second one could change everything.
#[test]
fn what_the_first_frontend_has_cached_ends_with_the_arrival_of_the_second() {
    let memory = Arc::new(MemoryFileSystem::new(MemoryOptions::default()));
    let (first, task) = client(memory.clone());
    let file = first.open(&task, WalkStart::Cwd, b"a:/file", CREATE).unwrap();
    assert_eq!(first.fstat(&task, &file).unwrap().attr.perm, 0o644);
    let (second, other) = client(memory);
    second.chmod(&other, WalkStart::Cwd, b"a:/file", 0o600, true).unwrap();
    assert_eq!(first.fstat(&task, &file).unwrap().attr.perm, 0o600);
}
