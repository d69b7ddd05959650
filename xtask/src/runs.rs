//! The suites of others on programs without a mount (`defuse run`).

use anyhow::Result;

use crate::command;
use crate::parts::Parts;

/// Runs them. The runner is built for speed, because only then its system calls tell their numbers;
/// the program under test is that of the other tests.
pub fn test(parts: &mut Parts) -> Result<()> {
    if !command::is_root() {
        parts.skip("only root can make the ext4 below, and become other users");
        return Ok(());
    }
    command::run(command::cargo().args(["build", "--package", "defuse"]))?;
    let program = command::target_dir()?.join("debug/defuse");
    let runner = ["run", "--release", "--package", "defuse-testkit", "--bin", "conformance", "--"];
    let wanted = ["--suite", "posix", "--suite", "pjdfstest", "--configs", "run-*"];
    command::run(command::cargo().args(runner).args(wanted).env("DEFUSE_PROGRAM", program))
}
