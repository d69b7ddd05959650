//! Random operations on every mount and on native ext4. Operations on one file are compared with a
//! copy in memory. Operations of several processes on a tree are compared with a second listing,
//! the directory below, and a new mount. `cargo xtask test run` exercises programs without a mount,
//! because its runner is an optimised build.

use std::sync::Mutex;

use defuse_testkit::mounted;
use defuse_testkit::suites::{CONFIGS, ConformanceSuite, StageConfig, run};

/// One at a time, because both share two processors and start processes.
static ALONE: Mutex<()> = Mutex::new(());

fn exercise(suite: ConformanceSuite) {
    let _alone = ALONE.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    if let Some(reason) = mounted::unavailable_reason() {
        println!("skipped: {reason}");
        return;
    }
    let all: Vec<&StageConfig> = CONFIGS.iter().filter(|config| suite.runs_on(config)).collect();
    let rows = run(suite, &all, true, &mut |row| println!("{row}")).unwrap();
    for row in rows {
        assert!(row.tally.failed.is_empty(), "{row}\n{}", format_failures(&row.tally.failed));
    }
}

fn format_failures(failed: &[(String, String)]) -> String {
    failed.iter().map(|(case, how)| format!("{case}: {how}\n")).collect()
}

#[test]
fn random_operations_on_a_file_match_a_copy_in_memory() {
    exercise(ConformanceSuite::File);
}

#[test]
fn a_tree_changed_at_random_by_processes_has_one_consistent_state() {
    exercise(ConformanceSuite::Tree);
}
