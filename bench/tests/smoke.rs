//! Every workload runs: on a plain directory, which takes no privilege, and through the fuser peer
//! where one may mount.

use std::fs;
use std::path::Path;
use std::time::Duration;

use defuse_bench::measure::{RoundMeasurement, measure};
use defuse_bench::target::{BenchmarkTarget, MOUNT, SOURCE, TargetRole, TargetSpec};
use defuse_bench::workloads::{BatchDirs, BenchmarkCase, FilesetSizes};

const THREADS: usize = 2;

/// Runs the workloads that need neither root, for cold caches, nor a file system with direct I/O.
fn run_plain(
    root: &Path,
    below: &Path,
    daemon: Option<u32>,
) -> Vec<(&'static str, RoundMeasurement)> {
    let special = |case: &&BenchmarkCase| {
        ["-cold", "-direct", "-shared"].iter().any(|part| case.name.ends_with(part))
            || ["readdir", "ls-l"].contains(&case.name)
    };
    let mut batches = 0;
    let mut place = || {
        batches += 1;
        BatchDirs {
            root: root.to_owned(),
            below: below.to_owned(),
            own: format!("own/batch-{batches}"),
            threads: THREADS,
            fileset: FilesetSizes::tiny(THREADS),
            daemons: daemon.into_iter().collect(),
        }
    };
    let plain = BenchmarkCase::ALL.iter().filter(|case| !special(case));
    plain
        .map(|case| {
            let measured = measure(case, daemon, Duration::from_millis(2), &mut place);
            (case.name, measured.unwrap_or_else(|error| panic!("{}: {error:#}", case.name)))
        })
        .collect()
}

fn serve_directory(dir: &Path) -> std::path::PathBuf {
    let data = dir.join("data");
    fs::create_dir_all(data.join("own")).unwrap();
    FilesetSizes::tiny(THREADS).create(&data).unwrap();
    data
}

#[test]
fn workloads_run_on_a_plain_directory() {
    let dir = tempfile::tempdir().unwrap();
    let data = serve_directory(dir.path());
    for (name, measured) in run_plain(&data, &data, None) {
        assert!(measured.operations > 0 && measured.seconds > 0.0, "{name}");
        assert!(measured.app_ns > 0 && measured.daemon_ns == 0, "{name}");
    }
    assert_eq!(fs::read_dir(data.join("own")).unwrap().count(), 0, "batches clean up");
}

#[test]
fn workloads_run_through_the_fuser_peer() {
    if !rustix::process::geteuid().is_root() || !Path::new("/dev/fuse").exists() {
        eprintln!("skipped: mounting takes root and /dev/fuse");
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let data = serve_directory(dir.path());
    let program = env!("CARGO_BIN_EXE_fuser_passthrough");
    let spec = TargetSpec {
        name: "fuser".into(),
        role: TargetRole::Peer,
        command: Some([program, "--threads=2", SOURCE, MOUNT].map(Into::into).to_vec()),
        version: String::new(),
    };
    let target = BenchmarkTarget::start(spec, &data, dir.path()).unwrap();
    let measured = run_plain(&target.root, &data, target.pid());
    assert!(measured.iter().map(|(_, measured)| measured.daemon_ns).sum::<u64>() > 0);
    assert_eq!(fs::read_dir(data.join("own")).unwrap().count(), 0, "batches clean up");
    let mount = target.root.clone();
    drop(target);
    assert_eq!(fs::read_dir(mount).unwrap().count(), 0, "nothing stays mounted");
}
