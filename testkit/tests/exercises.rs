//! Random operations on every mount and on native ext4: those on one file against a copy in memory, those
//! of several processes on a tree against a second look, the directory below, and a new mount. Programs
//! without a mount are exercised by `cargo xtask test run`, whose runner is built for speed.

use std::sync::Mutex;

use defuse_testkit::mounted;
use defuse_testkit::suites::{CONFIGS, Config, Suite, run};

/// One at a time, because both share two processors and start processes.
static ALONE: Mutex<()> = Mutex::new(());

fn exercise(suite: Suite) {
    let _alone = ALONE.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    if let Some(reason) = mounted::why_not() {
        println!("skipped: {reason}");
        return;
    }
    let all: Vec<&Config> = CONFIGS.iter().collect();
    let rows = run(suite, &all, true, &mut |row| println!("{row}")).unwrap();
    for row in rows {
        assert!(row.tally.failed.is_empty(), "{row}\n{}", told(&row.tally.failed));
    }
}

fn told(failed: &[(String, String)]) -> String {
    failed.iter().map(|(case, how)| format!("{case}: {how}\n")).collect()
}

#[test]
fn random_operations_on_a_file_leave_what_a_copy_in_memory_has() {
    exercise(Suite::File);
}

#[test]
fn a_tree_that_processes_change_at_random_is_the_same_however_it_is_looked_at() {
    exercise(Suite::Tree);
}
