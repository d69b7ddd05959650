//! Random calls by the in-process client on a passthrough, and the same by the kernel on another
//! directory: every answer has to be the same, and the trees at the end.

#[path = "direct/kernel.rs"]
mod kernel;
#[path = "direct/ops.rs"]
mod ops;
#[path = "direct/ours.rs"]
mod ours;

use std::os::unix::fs::{PermissionsExt, chown};
use std::path::Path;
use std::sync::Arc;

use defuse_direct::Credentials;
use defuse_passthrough::{Options, Passthrough};
use ops::{Op, sequence};
use proptest::test_runner::{Config, RngAlgorithm, TestCaseError, TestRng, TestRunner};

const USER: u32 = 5000;
const GROUP: u32 = 6000;
const EXTRA: u32 = 6001;

fn is_root() -> bool {
    let root = rustix::process::geteuid().is_root();
    if !root {
        eprintln!("skipped: only root can prepare files of several users");
    }
    root
}

/// The tree that both sides begin with.
fn prepare(root: &Path) {
    let file = |name: &str, mode: u32, uid: u32, gid: u32| {
        let path = root.join(name);
        std::fs::write(&path, name.repeat(100)).unwrap();
        chown(&path, Some(uid), Some(gid)).unwrap();
        std::fs::set_permissions(&path, PermissionsExt::from_mode(mode)).unwrap();
    };
    let dir = |name: &str, mode: u32, uid: u32, gid: u32| {
        let path = root.join(name);
        std::fs::create_dir(&path).unwrap();
        chown(&path, Some(uid), Some(gid)).unwrap();
        std::fs::set_permissions(&path, PermissionsExt::from_mode(mode)).unwrap();
    };
    std::fs::set_permissions(root, PermissionsExt::from_mode(0o777)).unwrap();
    dir("d", 0o777, 0, 0);
    dir("s", 0o1777, 0, 0);
    dir("g", 0o2775, USER, EXTRA);
    dir("x", 0o711, 0, 0);
    dir("n", 0o700, 0, 0);
    file("a", 0o644, 0, 0);
    file("s/a", 0o666, 0, 0);
    file("x/a", 0o640, 0, EXTRA);
    file("n/a", 0o666, 0, 0);
    file("d/a", 0o6755, USER, GROUP);
    file("g/a", 0o604, 0, GROUP);
    std::os::unix::fs::symlink("d", root.join("l")).unwrap();
    std::os::unix::fs::symlink("../a", root.join("d/l")).unwrap();
    std::os::unix::fs::symlink("o", root.join("o")).unwrap();
}

/// Runs `ops` on both sides as `who`, in directories below `base`.
fn compare(base: &Path, who: &Credentials, ops: &[Op]) -> Result<(), String> {
    let (real, served) = (tempfile::tempdir_in(base).unwrap(), tempfile::tempdir_in(base).unwrap());
    // Links of the tree may lead to the directory above it, so there has to be one.
    let (real_root, served_root) = (real.path().join("r"), served.path().join("r"));
    for (above, root) in [(real.path(), &real_root), (served.path(), &served_root)] {
        std::fs::set_permissions(above, PermissionsExt::from_mode(0o755)).unwrap();
        std::fs::create_dir(root).unwrap();
        prepare(root);
    }
    let ops = &without_set_group_id(ops, who);
    let theirs = kernel::run(&real_root, who, ops);
    let options =
        Options { credentials: defuse_passthrough::Credentials::Restore, ..Options::default() };
    let fs = Passthrough::new(served.path(), options).unwrap();
    let ours = ours::run(Arc::new(fs), who, ops);
    for (number, (ours, theirs)) in ours.iter().zip(&theirs).enumerate() {
        if ours != theirs {
            return Err(format!(
                "step {number}, {:?}:\n ours   {ours}\n theirs {theirs}",
                ops[number]
            ));
        }
    }
    let (left, right) = (kernel::tree(real.path()), kernel::tree(served.path()));
    if left == right { Ok(()) } else { Err(format!("trees differ:\n{right}\n---\n{left}")) }
}

/// A passthrough that puts credentials back (`Credentials::Restore`) makes files without the
/// supplementary groups of a user that is not the process, so a file that asks for set-group-id in
/// a directory of such a group would not keep it.
fn without_set_group_id(ops: &[Op], who: &Credentials) -> Vec<Op> {
    let stripped = |op: &Op| match *op {
        Op::Open { path, flags, mode } => Op::Open { path, flags, mode: mode & !0o2000 },
        Op::Mknod { path, mode } => Op::Mknod { path, mode: mode & !0o2000 },
        op => op,
    };
    let change = |op: &Op| if who.uid == 0 { *op } else { stripped(op) };
    ops.iter().map(change).collect()
}

fn check(who: &Credentials) {
    if !is_root() {
        return;
    }
    // The same sequences at every run, which decides whether a change lands; others where a number of
    // cases is asked for.
    let asked = std::env::var("PROPTEST_CASES").ok().and_then(|n| n.parse().ok());
    let cases = asked.unwrap_or(200);
    let config = Config { failure_persistence: None, cases, ..Config::default() };
    let mut runner = match asked {
        Some(_) => TestRunner::new(config),
        None => TestRunner::new_with_rng(config, TestRng::deterministic_rng(RngAlgorithm::ChaCha)),
    };
    let base = Path::new("/dev/shm");
    let run = |ops: Vec<Op>| compare(base, who, &ops).map_err(TestCaseError::fail);
    if let Err(error) = runner.run(&sequence(), run) {
        panic!("{error}");
    }
}

#[test]
fn root_gets_the_answers_of_the_kernel() {
    check(&Credentials::user(0, 0, &[]));
}

#[test]
fn a_user_gets_the_answers_of_the_kernel() {
    check(&Credentials::user(USER, GROUP, &[EXTRA]));
}
