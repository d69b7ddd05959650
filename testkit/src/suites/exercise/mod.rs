//! Exercisers: random operations, and checks between and after them.
//!
//! They have the design of two programs of xfstests, without any of their code. [`file`] works like
//! fsx: it performs all operations on one file, and compares it with a copy in memory. `tree` works
//! like fsstress: several processes change a tree at once, and the result is checked in several
//! ways.
//!
//! Everything depends on a seed, which each failure prints. `DEFUSE_SEED` sets another one.

mod file;
mod listing;
mod operations;
mod tree;

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};

use super::{ConfigBackend, MountedStage, SuiteTally};

/// The seeds of a run, and its length.
fn plan(quick: bool) -> (std::ops::RangeInclusive<u64>, u32) {
    let named = std::env::var("DEFUSE_SEED").ok().and_then(|text| text.parse().ok());
    match named {
        Some(seed) => (seed..=seed, if quick { 1 } else { 5 }),
        None if quick => (1..=1, 1),
        None => (1..=10, 5),
    }
}

/// Every seed is a case of the suite `file`.
pub(super) fn files(stage: &MountedStage, quick: bool) -> Result<SuiteTally> {
    let (seeds, factor) = plan(quick);
    let mut tally = SuiteTally::default();
    for seed in seeds {
        let count = 1500 * factor;
        let done =
            run_one(stage, "file", seed, count, || file::exercise(stage.path(), seed, count));
        let result = done.and_then(|text| complete(stage, &text));
        tally.add(&format!("file, seed {seed}"), result);
    }
    Ok(tally)
}

/// Every seed is a case of the suite `tree`; so are the state below, and the state after
/// unmounting.
pub(super) fn trees(stage: &mut MountedStage, quick: bool) -> Result<SuiteTally> {
    let (seeds, factor) = plan(quick);
    let mut tally = SuiteTally::default();
    let mut last = None;
    for seed in seeds {
        let count = 1000 * factor;
        let done =
            run_one(stage, "tree", seed, count, || tree::exercise(stage.path(), seed, count));
        last = done.as_ref().ok().cloned();
        tally.add(&format!("tree, seed {seed}"), done.map(drop));
    }
    let Some(seen) = last else { return Ok(tally) };
    let below = |source: &Path| -> Result<()> {
        let below = listing::TreeListing::list(source)?;
        ensure!(below.to_string() == seen, "{}", first_difference(&below.to_string(), &seen));
        Ok(())
    };
    if stage.is_durable() {
        // Data written back late is below after the unmount.
        let source = stage.source();
        stage.unmount()?;
        if let Some(source) = source {
            tally.add("tree: the directory below has it", below(&source));
        }
        stage.mount_again()?;
        let again = run_one(stage, "list", 0, 0, || {
            Ok(listing::TreeListing::list(stage.path())?.to_string())
        });
        let same = again.and_then(|again| {
            ensure!(again == seen, "{}", first_difference(&again, &seen));
            Ok(())
        });
        tally.add("tree: a new mount shows it", same);
    }
    Ok(tally)
}

/// Runs an exercise in this process, or in one that has the files. Returns its output.
fn run_one(
    stage: &MountedStage,
    what: &str,
    seed: u64,
    count: u32,
    here: impl FnOnce() -> Result<String>,
) -> Result<String> {
    if !stage.is_in_process() {
        return here();
    }
    let mut command: Command = stage.command(&std::env::current_exe()?)?;
    command.arg("--exercise").args([what, &seed.to_string(), &count.to_string()]);
    let output = command.arg(stage.path()).output()?;
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    ensure!(output.status.success(), "{}: {}", output.status, tail(&output.stderr));
    Ok(said)
}

/// The work of such a process: `WHAT SEED COUNT DIRECTORY`.
///
/// # Errors
///
/// The error describes the check that failed.
pub fn run_inside(words: &[String]) -> Result<String> {
    let [what, seed, count, dir] = words else { anyhow::bail!("four words") };
    let (seed, count, dir) = (seed.parse()?, count.parse()?, Path::new(dir));
    match what.as_str() {
        "file" => file::exercise(dir, seed, count),
        "tree" => tree::exercise(dir, seed, count),
        "list" => Ok(listing::TreeListing::list(dir)?.to_string()),
        _ => anyhow::bail!("there is no exercise {what}"),
    }
}

/// An exercise in which every operation was refused proves nothing. On ext4, and where no kernel is
/// between, ranges must have been collapsed and inserted. GlusterFS has no zeroing beyond the end.
fn complete(stage: &MountedStage, said: &str) -> Result<()> {
    let config = stage.config();
    let is_complete = matches!(config.backend, ConfigBackend::Native | ConfigBackend::Run(_));
    let refused: &[&str] = match is_complete {
        _ if config.needs_servers() => &["clone", "collapse", "insert", "zerokeepingsize"],
        true => &["clone"],
        false => &["clone", "collapse", "insert"],
    };
    for kind in said.lines() {
        let (name, count) = kind.split_once(": ").context("a line of the exerciser")?;
        ensure!(count != "0" || refused.contains(&name), "{name} was never done");
    }
    Ok(())
}

fn first_difference(left: &str, right: &str) -> String {
    let pairs = left.lines().zip(right.lines());
    let different = pairs.into_iter().find(|(left, right)| left != right);
    let counts = (left.lines().count(), right.lines().count());
    format!("{} and {} lines; {different:?}", counts.0, counts.1)
}

fn tail(said: &[u8]) -> String {
    let text = String::from_utf8_lossy(said);
    let lines: Vec<&str> = text.lines().rev().take(40).collect();
    lines.into_iter().rev().collect::<Vec<_>>().join("\n")
}
