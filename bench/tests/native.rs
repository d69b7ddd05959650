//! Every workload runs on a plain directory: no root, no mount, no daemon.

use std::time::Duration;

use defuse_bench::measure::measure;
use defuse_bench::workloads::{Case, Fileset, Place};

#[test]
fn workloads_run_on_a_plain_directory() {
    let dir = tempfile::tempdir().unwrap();
    let data = dir.path().join("data");
    std::fs::create_dir_all(data.join("own")).unwrap();
    let threads = 2;
    let fileset = Fileset::tiny(threads);
    fileset.create(&data).unwrap();
    // Cold caches need root, and direct I/O a file system that has it: neither is what this test is about.
    let plain = Case::ALL.iter().filter(|case| {
        !["-cold", "-direct", "-shared"].iter().any(|part| case.name.ends_with(part))
            && !["readdir", "ls-l"].contains(&case.name)
    });
    let mut batches = 0;
    for case in plain {
        let place = || {
            batches += 1;
            Place {
                root: data.clone(),
                below: data.clone(),
                own: format!("own/batch-{batches}"),
                threads,
                fileset,
                daemons: Vec::new(),
            }
        };
        let measured = measure(case, None, Duration::from_millis(2), place).unwrap();
        assert!(measured.operations > 0 && measured.seconds > 0.0, "{}", case.name);
        assert!(measured.app_ns > 0 && measured.daemon_ns == 0, "{}", case.name);
    }
    assert_eq!(std::fs::read_dir(data.join("own")).unwrap().count(), 0, "batches clean up");
}
