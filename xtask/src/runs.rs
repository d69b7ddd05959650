//! The POSIX suites and the exercisers on programs without a mount (`defuse run`), and by several
//! clients at once.

use std::process::{Command, Stdio};

use anyhow::{Result, ensure};

use crate::command;
use crate::parts::RunRecord;

/// The suites of every configuration. `fsx` takes as long as all of them on those without a
/// network.
const SUITES: &[&str] = &["posix", "pjdfstest", "file", "tree"];

/// Runs them, but not those that need servers of GlusterFS. Two at a time, because pjdfstest sleeps
/// most of its time.
pub fn test(parts: &mut RunRecord) -> Result<()> {
    run(parts, &["run-passthrough*,run-memory", "run-uhs,run-shared-*"], (1, SUITES))
}

/// Runs them on volumes of GlusterFS.
pub fn gluster(parts: &mut RunRecord) -> Result<()> {
    run(parts, &["run-gluster-*"], (1, &[SUITES, &["fsx"]].concat()))
}

/// Runs the suites of others by two and by eight clients of one server at once, on mounts and
/// within runs.
pub fn clients(parts: &mut RunRecord) -> Result<()> {
    for clients in [2, 8] {
        run(parts, &["shared-*,run-shared-*"], (clients, &["posix", "pjdfstest", "fsx"]))?;
    }
    Ok(())
}

/// Runs them on each group of configurations at the same time. The runner is an optimised build,
/// because the numbers of its system calls can be read only then. The program under test is the
/// same as in the other tests.
fn run(parts: &mut RunRecord, groups: &[&str], (clients, suites): (usize, &[&str])) -> Result<()> {
    if !command::is_root() {
        parts.skip("only root can create the ext4 below, and change users");
        return Ok(());
    }
    // With a test of its package, the program has the features that it has in step `test`, whose
    // build is taken then. The library of runs lies beside the program.
    let program = ["build", "--workspace", "--lib", "--bin", "defuse", "--test", "messages"];
    command::run(command::cargo().args(program))?;
    let program = command::program_under_test()?;
    let runner = "build --profile runner --package defuse-testkit --bin conformance";
    command::run(command::cargo().args(runner.split(' ')))?;
    let runner = command::target_dir()?.join("runner/conformance");
    let failed = command::run_in_lanes(groups, groups.len(), |configs| {
        let mut run = Command::new(&runner);
        run.args(["--quick", "--clients", &clients.to_string()]);
        run.args(suites.iter().flat_map(|suite| ["--suite", suite])).args(["--configs", configs]);
        run.current_dir(command::root()).env("DEFUSE_PROGRAM", &program).stdin(Stdio::null());
        // A single one shows how far it is.
        if groups.len() == 1 {
            command::run(&mut run)
        } else {
            command::run_aside(configs, &mut run)
        }
    });
    ensure!(failed.is_empty(), "{}", failed.join("; "));
    Ok(())
}
