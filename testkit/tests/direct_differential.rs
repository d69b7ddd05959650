//! Makes random calls through the in-process client on file systems of every kind, and through the
//! kernel on tmpfs. All results and the final trees must be equal.
//!
//! `PROPTEST_CASES` sets the number of sequences, which then differ in every run.

#[path = "direct/kernel.rs"]
mod kernel;
mod offers;
#[path = "direct/ops.rs"]
mod ops;
#[path = "direct/ours.rs"]
mod ours;
#[allow(dead_code, unused_imports)] // Not all of it is used here.
mod served;

use std::os::unix::fs::{PermissionsExt, chown, symlink};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use defuse_direct::TaskCredentials;
use defuse_fs::FileSystem;
use defuse_memory::MemoryFileSystem;
use defuse_passthrough::{Passthrough, PassthroughOptions};
use ops::{DirectOp, EXTRA, GROUP, ITEMS, ItemKind, USER, sequence};
use ours::TestedMount;
use proptest::test_runner::{Config, RngAlgorithm, TestCaseError, TestRng, TestRunner};
use rustix::mount::{MountFlags, UnmountFlags};

fn is_root() -> bool {
    let root = rustix::process::geteuid().is_root();
    if !root {
        eprintln!("skipped: only root can prepare files of several users");
    }
    root
}

/// Creates the initial tree of both sides.
fn prepare(root: &Path) {
    for item in ITEMS {
        let path = root.join(item.path);
        match item.what {
            ItemKind::Dir if item.path.is_empty() => {}
            ItemKind::Dir => std::fs::create_dir(&path).unwrap(),
            ItemKind::File => std::fs::write(&path, item.content()).unwrap(),
            ItemKind::Link(to) => {
                symlink(to, &path).unwrap();
                continue;
            }
        }
        chown(&path, Some(item.uid), Some(item.gid)).unwrap();
        std::fs::set_permissions(&path, PermissionsExt::from_mode(item.mode)).unwrap();
    }
}

/// The file system under test.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TestedBackend {
    Passthrough,
    Memory,
    /// A directory of the first is a mount of the second; natively a tmpfs.
    Both,
    /// Memory, by shared memory.
    Shared,
}

impl TestedBackend {
    fn has_passthrough(self) -> bool {
        matches!(self, TestedBackend::Passthrough | TestedBackend::Both)
    }
}

/// A tmpfs of the kernel, unmounted when dropped.
struct KernelTmpfs(PathBuf);

impl KernelTmpfs {
    fn new(at: PathBuf) -> Self {
        std::fs::create_dir_all(&at).unwrap();
        let options = Some(c"mode=0777");
        rustix::mount::mount("tmpfs", &at, "tmpfs", MountFlags::empty(), options).unwrap();
        KernelTmpfs(at)
    }
}

impl Drop for KernelTmpfs {
    fn drop(&mut self) {
        let _ = rustix::mount::unmount(&self.0, UnmountFlags::DETACH);
    }
}

/// Runs `ops` on both sides as `who`, in directories below `base`.
fn compare(
    base: &Path,
    served: TestedBackend,
    who: &TaskCredentials,
    ops: &[DirectOp],
) -> Result<(), String> {
    let (real, source) = (tempfile::tempdir_in(base).unwrap(), tempfile::tempdir_in(base).unwrap());
    let is_passthrough = served.has_passthrough();
    // Links of the tree may lead to the parent directory, so there must be one.
    for above in [real.path(), source.path()] {
        std::fs::set_permissions(above, PermissionsExt::from_mode(0o755)).unwrap();
    }
    let real_root = real.path().join("r");
    std::fs::create_dir(&real_root).unwrap();
    prepare(&real_root);
    let mount = (served == TestedBackend::Both).then(|| KernelTmpfs::new(real_root.join("m")));
    let mut mounts = Vec::new();
    if is_passthrough {
        let root = source.path().join("r");
        std::fs::create_dir(&root).unwrap();
        prepare(&root);
        let credentials = defuse_passthrough::CredentialsPolicy::Restore;
        let fs = Passthrough::new(
            source.path(),
            PassthroughOptions { credentials, ..PassthroughOptions::default() },
        );
        mounts.push(TestedMount { target: "t:", fs: Arc::new(fs.unwrap()), is_empty: false });
        if mount.is_some() {
            std::fs::create_dir(root.join("m")).unwrap();
            let options = defuse_memory::MemoryOptions { root_perm: 0o777, ..Default::default() };
            let fs = Arc::new(MemoryFileSystem::new(options));
            mounts.push(TestedMount { target: "t:/r/m", fs, is_empty: false });
        }
    } else {
        let options = defuse_memory::MemoryOptions { root_perm: 0o755, ..Default::default() };
        let fs: Arc<dyn FileSystem> = Arc::new(MemoryFileSystem::new(options));
        let fs = match served {
            TestedBackend::Shared => Arc::new(offers::serve(fs).with_client()),
            _ => fs,
        };
        mounts.push(TestedMount { target: "t:", fs, is_empty: true });
    }
    let ops: Vec<_> = ops.iter().map(|op| comparable(op, served, who)).collect();
    let theirs = kernel::run(&real_root, who, &ops);
    let (ours, tree) = ours::run(&mounts, who, &ops);
    for (number, (ours, theirs)) in ours.iter().zip(&theirs).enumerate() {
        if ours != theirs {
            return Err(format!(
                "step {number}, {:?}:\n ours   {ours}\n theirs {theirs}",
                ops[number]
            ));
        }
    }
    let left = kernel::tree(real.path());
    if left != tree {
        return Err(format!("trees differ:\n{tree}\n---\n{left}"));
    }
    // The client's view must match the directory below.
    let below = kernel::tree(source.path());
    if served == TestedBackend::Passthrough && left != below {
        return Err(format!("trees differ:\n{below}\n---\n{left}"));
    }
    Ok(())
}

/// The call, changed so that the file systems have no reason for different results.
fn comparable(op: &DirectOp, served: TestedBackend, who: &TaskCredentials) -> DirectOp {
    match *op {
        // A passthrough that restores credentials (`Credentials::Restore`) creates files without
        // the supplementary groups of a user other than the process. A new file with set-group-id
        // in a directory of such a group would lose the bit.
        DirectOp::Open { path, flags, mode } if who.uid != 0 && served.has_passthrough() => {
            DirectOp::Open { path, flags, mode: mode & !0o2000 }
        }
        DirectOp::OpenIn { dir, path, flags, mode } if who.uid != 0 && served.has_passthrough() => {
            DirectOp::OpenIn { dir, path, flags, mode: mode & !0o2000 }
        }
        DirectOp::Mknod { path, mode } if who.uid != 0 && served.has_passthrough() => {
            DirectOp::Mknod { path, mode: mode & !0o2000 }
        }
        // Memory supports operations on holes that tmpfs lacks.
        DirectOp::Fallocate { file, mode, offset, length }
            if served != TestedBackend::Passthrough =>
        {
            DirectOp::Fallocate { file, mode: mode & 1, offset, length }
        }
        op => op,
    }
}

fn check(served: TestedBackend, who: &TaskCredentials) {
    if !is_root() {
        return;
    }
    // Every run that decides about a change uses equal sequences. If PROPTEST_CASES sets a number
    // of cases, they differ.
    let requested = std::env::var("PROPTEST_CASES").ok().and_then(|n| n.parse().ok());
    let cases = requested.unwrap_or(200);
    let config = Config { failure_persistence: None, cases, ..Config::default() };
    let mut runner = match requested {
        Some(_) => TestRunner::new(config),
        None => TestRunner::new_with_rng(config, TestRng::deterministic_rng(RngAlgorithm::ChaCha)),
    };
    let base = Path::new("/dev/shm");
    let run = |ops: Vec<DirectOp>| compare(base, served, who, &ops).map_err(TestCaseError::fail);
    if let Err(error) = runner.run(&sequence(), run) {
        panic!("{error}");
    }
}

fn root() -> TaskCredentials {
    TaskCredentials::user(0, 0, &[])
}

fn user() -> TaskCredentials {
    TaskCredentials::user(USER, GROUP, &[EXTRA])
}

#[test]
fn root_gets_the_answers_of_the_kernel() {
    check(TestedBackend::Passthrough, &root());
}

#[test]
fn a_user_gets_the_answers_of_the_kernel() {
    check(TestedBackend::Passthrough, &user());
}

#[test]
fn root_gets_the_answers_of_tmpfs_from_memory() {
    check(TestedBackend::Memory, &root());
}

#[test]
fn a_user_gets_the_answers_of_tmpfs_from_memory() {
    check(TestedBackend::Memory, &user());
}

#[test]
fn root_gets_the_answers_of_the_kernel_across_mounts() {
    check(TestedBackend::Both, &root());
}

#[test]
fn a_user_gets_the_answers_of_the_kernel_across_mounts() {
    check(TestedBackend::Both, &user());
}

#[test]
fn root_gets_the_answers_of_tmpfs_from_memory_by_shared_memory() {
    check(TestedBackend::Shared, &root());
}

#[test]
fn a_user_gets_the_answers_of_tmpfs_from_memory_by_shared_memory() {
    check(TestedBackend::Shared, &user());
}
