//! `cargo xtask demo`: real programs on a native directory, on its mounts, and on the directory within their own
//! process, side by side.
//!
//! One directory is mounted with every profile of `defuse mount passthrough:`. All targets thus use
//! the same files of the same lower file system, whose cache is warm. Every round makes new mounts,
//! so the kernel's cache of a mount is cold at first and fills from program to program, as in
//! normal use. Targets take turns for each program.

mod dir;
mod programs;
mod report;
mod statistics;
mod tree;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};

use crate::children::ChildPrograms;
use crate::command;
use crate::packages::{self, RequiredTool};
use dir::DemoDir;
use programs::{DemoJob, PROGRAMS};
use report::{DemoMeasurement, DemoReport};

/// Tools that the demo needs.
pub const TOOLS: &[RequiredTool] = &[
    RequiredTool::package("git", "git"),
    RequiredTool::package("grep", "grep"),
    RequiredTool::package("sqlite3", "sqlite3"),
    RequiredTool::package("tar", "tar"),
];

/// The targets of the programs: native, mounts with these profiles, and `defuse run`.
pub const TARGETS: [&str; 5] = [NATIVE, "default", "base", "opt", DIRECT];

/// The directory itself.
const NATIVE: &str = "native";

/// `defuse run`: the same programs without a mount.
const DIRECT: &str = "direct";

/// The targets that are mounts.
fn profiles() -> impl Iterator<Item = &'static str> {
    TARGETS.into_iter().filter(|&target| is_mount(target))
}

/// True if a daemon serves the target.
fn is_mount(target: &str) -> bool {
    target != NATIVE && target != DIRECT
}

/// No further round begins after this time in programs.
const ENOUGH: Duration = Duration::from_secs(55);

/// Run tar, grep, git and sqlite3 on a directory, on mounts of it, and under `defuse run`
#[derive(clap::Args)]
pub struct DemoArgs {
    /// Maximum number of rounds; no round begins after about a minute
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=100))]
    rounds: u32,
    /// Maximum size of the tree, in MB
    #[arg(long, default_value_t = 100, value_name = "MB", value_parser = clap::value_parser!(u64).range(1..=10_000))]
    size: u64,
    /// Directory for the files during the demo [default: the directory of temporary files]
    #[arg(long)]
    dir: Option<PathBuf>,
    /// Write the results to this file, too
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// The demo as a test step.
pub fn check() -> Result<()> {
    run(&DemoArgs { rounds: 1, size: 100, dir: None, json: None })
}

/// Runs the demo.
pub fn run(args: &DemoArgs) -> Result<()> {
    if !command::is_root() {
        bail!("only root may mount without fuse3's help: run it as root");
    }
    packages::provide(TOOLS);
    if let Some(tool) = TOOLS.iter().find(|tool| !tool.is_there()) {
        bail!("{} is missing: {}", tool.name, tool.install_command());
    }
    // This also builds the library that `defuse run` loads into programs.
    command::run(command::cargo().args(["build", "--release", "--package", "defuse"]))?;
    let program = command::target_dir()?.join("release/defuse");
    let begun = Instant::now();
    let children = ChildPrograms::watch_signals()?;
    let dir = args.dir.clone().unwrap_or_else(std::env::temp_dir);
    let mut place = DemoDir::new(&dir, program)?;
    let tree = tree::copy(&children, &place, args.size * 1_000_000)?;
    println!("{tree}");
    let mut report = DemoReport::default();
    for round in 0..args.rounds {
        if round > 0 && begun.elapsed() > ENOUGH {
            break;
        }
        run_round(round as usize, &children, &mut place, &mut report)?;
    }
    println!("\n{report}");
    if let Some(file) = &args.json {
        std::fs::write(file, serde_json::to_string_pretty(&report.json())? + "\n")?;
    }
    place.close()?;
    println!("done in {:.0} s; everything is unmounted and removed", begun.elapsed().as_secs_f64());
    report.check()
}

/// Mounts all targets, runs every program once on every target, and unmounts.
fn run_round(
    round: usize,
    children: &ChildPrograms,
    place: &mut DemoDir,
    report: &mut DemoReport,
) -> Result<()> {
    for profile in profiles() {
        children.check()?;
        place.mount(profile)?;
    }
    println!("round {}:", round + 1);
    for (number, program) in PROGRAMS.iter().enumerate() {
        for turn in 0..TARGETS.len() {
            // Another target begins each time, so that the order does not favour one.
            let target = (turn + number + round) % TARGETS.len();
            let name = TARGETS[target];
            let mut job = DemoJob::new(children, place, name)?;
            let before = place.statistics(name)?;
            let mut said = (program.run)(&mut job)?;
            let requests = place.statistics(name)?.changes_since(&before);
            if let Some(finish) = program.finish {
                said += &finish(&job)?;
            }
            let seconds = job.elapsed.as_secs_f64();
            report.add(number, target, DemoMeasurement { seconds, said, requests });
        }
        println!("  {}", program.name);
    }
    place.end_round()
}
