//! `cargo xtask demo`: real programs on a native directory, on its mounts, and on the directory
//! within their own process, side by side.
//!
//! One directory is mounted with every profile of `defuse mount passthrough:`. All targets thus use
//! the same files of the same lower file system, whose cache is warm. Every round makes new mounts,
//! so the kernel's cache of a mount is cold at first and fills from program to program, as in
//! normal use. Targets take turns for each program.

mod dir;
mod picture;
mod programs;
mod report;
mod statistics;
mod tree;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

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
    /// Directory of the results, demo.json and demo.svg [default: `demo` in cargo's target
    /// directory]
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
}

/// The demo as a test step.
pub fn check() -> Result<()> {
    run(&DemoArgs { rounds: 1, size: 100, dir: None, out: None })
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
    place.close()?;
    println!("done in {:.0} s; everything is unmounted and removed", begun.elapsed().as_secs_f64());
    write(&report, args.out.clone())?;
    report.check()
}

/// Writes the results and their picture, and prints where they are.
fn write(report: &DemoReport, out: Option<PathBuf>) -> Result<()> {
    let out = match out {
        Some(out) => out,
        None => command::target_dir()?.join("demo"),
    };
    std::fs::create_dir_all(&out).with_context(|| out.display().to_string())?;
    let (results, drawn) = (out.join("demo.json"), out.join("demo.svg"));
    std::fs::write(&results, serde_json::to_string_pretty(&report.json())? + "\n")?;
    std::fs::write(&drawn, picture::draw(report))?;
    println!("the results are {}, and their picture is {}", results.display(), drawn.display());
    Ok(())
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
