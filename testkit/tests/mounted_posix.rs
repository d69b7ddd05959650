//! The POSIX cases on mounts of the program, in every configuration: one suite through the kernel
//! against every backend, with the server in another process.

use defuse_testkit::mounted;
use defuse_testkit::suites::{CONFIGS, ConformanceSuite, StageConfig, run};

/// One test, because the suite must be alone in its process.
#[test]
fn every_configuration_keeps_the_promises() {
    if let Some(reason) = mounted::unavailable_reason() {
        println!("skipped: {reason}");
        return;
    }
    let all: Vec<&StageConfig> = CONFIGS.iter().collect();
    let rows = run(ConformanceSuite::Posix, &all, true, &mut |row| println!("{row}")).unwrap();
    for row in rows {
        assert!(row.unexpected.is_empty(), "{row}\n{:#?}", row.unexpected);
        let enough = row.tally.passed + row.tally.skipped.len() >= 150;
        assert!(enough, "only {} cases in {}", row.tally.cases(), row.config);
    }
}
