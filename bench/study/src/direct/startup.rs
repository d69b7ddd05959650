//! Measures the cost of starting a program within a run.

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{Context, Result, ensure};

use super::DirectOptions;
use super::results::StartTimes;

/// A program that does nothing.
const TRUE: &str = "true";

/// Starts `true` alone and within a run of this program, alternately. The mount is of a directory,
/// so that nothing is served.
pub fn measure(options: &DirectOptions, source: &Path, round: u32) -> Result<StartTimes> {
    let mut mount = std::ffi::OsString::from("direct:=passthrough:");
    mount.push(source);
    let mut fastest = StartTimes { round, plain_ns: u64::MAX, run_ns: u64::MAX };
    for _ in 0..options.scale.starts {
        fastest.plain_ns = fastest.plain_ns.min(time(&mut Command::new(TRUE))?);
        let mut run = Command::new(&options.program);
        run.args(["run", "--mount"]).arg(&mount).args(["--", TRUE]);
        fastest.run_ns = fastest.run_ns.min(time(&mut run)?);
    }
    Ok(fastest)
}

/// Time from before the start until the end is known, in nanoseconds.
fn time(command: &mut Command) -> Result<u64> {
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let start = Instant::now();
    let status = command.status();
    let ns = start.elapsed().as_nanos();
    let name = command.get_program().display();
    let status = status.with_context(|| format!("{name} could not be started"))?;
    ensure!(status.success(), "{name} ended with {status}, though it only had to run `{TRUE}`");
    Ok(u64::try_from(ns).unwrap_or(u64::MAX))
}
