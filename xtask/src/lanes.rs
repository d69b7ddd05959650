//! The tests of all crates, in two lanes side by side: programs that mostly wait, and the others.
//! A test program runs its own tests one after the other if they share mounts or processors.

use std::time::Instant;

use anyhow::{Result, ensure};

use crate::parts::RunRecord;
use crate::{command, workspace};

/// Test programs that wait for mounts, servers and other programs more than they compute. Each
/// works in directories of its own, and expects no absolute time.
const WAITING: &[&str] = &[
    "attacks",
    "bench_gluster",
    "conformance",
    "direct_differential",
    "direct_document",
    "direct_faults",
    "exercises",
    "gluster",
    "gluster_clients",
    "gluster_faults",
    "gluster_frontends",
    "gluster_report",
    "gluster_requests",
    "mounted_posix",
    "permissions",
    "several_clients",
];

/// Runs them, and then the examples of the documentation.
pub fn test(parts: &mut RunRecord) -> Result<()> {
    let all = ["test", "--workspace", "--no-fail-fast"];
    // At first the build, for which one lane would wait for the other.
    let begun = Instant::now();
    command::run(command::cargo().args(all).arg("--no-run"))?;
    parts.note_time("the build of all test programs", begun.elapsed());
    let programs = programs()?;
    let unknown = WAITING.iter().find(|name| !programs.iter().any(|program| program == *name));
    ensure!(unknown.is_none(), "there is no test program {}", unknown.unwrap_or(&""));
    let (waiting, others): (Vec<_>, Vec<_>) =
        programs.iter().partition(|program| WAITING.contains(&program.as_str()));
    let program = command::program_under_test()?;
    let lane = |programs: &[&String]| {
        let mut cargo = command::cargo();
        cargo.env("DEFUSE_PROGRAM", &program);
        cargo.args(all).args(programs.iter().flat_map(|program| ["--test", program]));
        cargo
    };
    let mut busy = lane(&others);
    busy.args(["--lib", "--bins"]);
    parts.run_side_by_side(&mut [busy, lane(&waiting)])?;
    parts.run_tests(command::cargo().args(all).arg("--doc"))
}

/// The names of all test programs that need no feature which is off by default.
fn programs() -> Result<Vec<String>> {
    let packages = workspace::packages()?;
    let (names, left_out): (Vec<_>, Vec<_>) =
        packages.into_iter().map(|package| (package.tests, package.tests_with_features)).unzip();
    let mut names = names.concat();
    names.sort_unstable();
    names.dedup();
    // Cargo takes a name for all programs that have it, and refuses it if one of them needs a
    // feature.
    let shared = left_out.concat().into_iter().find(|name| names.contains(name));
    ensure!(shared.is_none(), "two test programs are called {}", shared.unwrap_or_default());
    Ok(names)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_test_program_is_in_one_lane() {
        let programs = programs().unwrap();
        assert!(WAITING.iter().all(|name| programs.iter().any(|program| program == name)));
        assert!(programs.iter().any(|program| program == "session"));
        // It needs a feature: cargo would refuse it.
        assert!(!programs.iter().any(|program| program == "shuttle"));
    }
}
