//! Unmodified programs on many small files: `git status`, `find` and `cat`, Python, `make`, `tar`
//! and `rm` on tmpfs, within `defuse run`, and on a mount of the kernel.
//!
//! Each round makes a tree of files on every target and runs the programs there, target after
//! target ([`run()`]). A ratio is taken within a round, so that it is valid on a busy machine. The
//! processor time is the time of the whole machine, because servers and daemons work for the
//! programs. If `strace` is installed, one more round counts the system calls of each program,
//! which no load changes.

mod script;
mod table;
mod tree;

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};
use defuse_measure::mount::with_mount;
use serde::Serialize;

use crate::interrupt::InterruptFlag;
pub use table::table;

/// The size of the tree.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProgramsScale {
    /// Number of small files, in directories of fifty.
    pub files: usize,
    /// Number of Python modules.
    pub modules: usize,
    /// Number of C files to compile.
    pub sources: usize,
}

impl ProgramsScale {
    /// The size by name: full, quick or tiny.
    ///
    /// # Errors
    ///
    /// A message for the user if there is no such size.
    pub fn from_name(name: &str) -> Result<ProgramsScale, String> {
        let (files, modules, sources) = match name {
            "full" => (20_000, 500, 40),
            "quick" => (4_000, 100, 8),
            "tiny" => (100, 5, 1),
            _ => return Err(format!("there is no scale {name:?}: write full, quick or tiny")),
        };
        Ok(ProgramsScale { files, modules, sources })
    }
}

/// Options of the measurement.
#[derive(Debug, Clone)]
pub struct ProgramsOptions {
    /// The size of the tree.
    pub scale: ProgramsScale,
    /// Number of rounds, at least 1.
    pub rounds: u32,
    /// A directory on tmpfs for the trees.
    pub work: PathBuf,
    /// The path of this program.
    pub program: PathBuf,
    /// Another build of this program, whose runs are measured in the same rounds.
    pub before: Option<PathBuf>,
    /// Measure mounts of the kernel, too, which only root and members of its group may make.
    pub mounts: bool,
}

/// The results.
#[derive(Debug, Clone, Serialize)]
pub struct ProgramsResults {
    /// The schema of this structure, `defuse-bench-run/2`.
    pub schema: &'static str,
    /// Number of small files.
    pub files: usize,
    /// Number of complete rounds.
    pub rounds: u32,
    /// The targets, the native one first.
    pub targets: Vec<&'static str>,
    /// The duration of each program.
    pub cells: Vec<ProgramsCell>,
    /// The system calls that the kernel executed for each program, by target; empty without strace.
    pub system_calls: BTreeMap<String, BTreeMap<String, u64>>,
    /// True if a signal ended the measurement.
    pub interrupted: bool,
}

/// One program on one target in one round.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ProgramsCell {
    /// The program.
    pub program: String,
    /// The target.
    pub target: &'static str,
    /// The round, from 0.
    pub round: u32,
    /// The duration in nanoseconds.
    pub ns: u64,
    /// The processor time of the whole machine in nanoseconds, in steps of 10 ms.
    pub cpu_ns: u64,
}

/// The name of the target that all others are compared with.
pub const NATIVE: &str = "native";

/// A place for the tree, and the way to it.
struct TreeTarget<'a> {
    name: &'static str,
    way: TreeAccess<'a>,
}

/// The way from the programs to the tree.
#[derive(Clone, Copy)]
enum TreeAccess<'a> {
    /// The directory itself.
    Native,
    /// A run of this build, on this source.
    Run(&'a Path, &'static str),
    /// A mount of the kernel by this build, of this source.
    Mount(&'a Path, &'static str),
}

/// Measures. `progress` takes one line of text for each round.
///
/// # Errors
///
/// If a program is missing, or fails on one of the targets.
pub fn run(options: &ProgramsOptions, progress: &mut dyn FnMut(&str)) -> Result<ProgramsResults> {
    ensure!(options.rounds > 0, "there is nothing to measure in 0 rounds: write --rounds 1");
    script::check_programs()?;
    let interrupt = InterruptFlag::catch()?;
    let place = tree::ProgramsDirectory::new(&options.work)?;
    tree::prepare(&place, &options.scale)?;
    let targets = targets(options);
    let mut results = ProgramsResults {
        schema: "defuse-bench-run/2",
        files: options.scale.files,
        rounds: 0,
        targets: targets.iter().map(|target| target.name).collect(),
        cells: Vec::new(),
        system_calls: BTreeMap::new(),
        interrupted: false,
    };
    for round in 0..options.rounds {
        progress(&format!("round {} of {}", round + 1, options.rounds));
        let mut cells = Vec::new();
        for step in 0..targets.len() {
            let target = &targets[(round as usize + step) % targets.len()];
            if interrupt.is_set() {
                results.interrupted = true;
                return Ok(results);
            }
            let of_round = |script::ProgramTimes { program, ns, cpu_ns }| {
                let target = target.name;
                ProgramsCell { program, target, round, ns, cpu_ns }
            };
            cells.extend(run_once(target, &place, None)?.into_iter().map(of_round));
        }
        results.cells.append(&mut cells);
        results.rounds = round + 1;
    }
    if script::has_strace() {
        progress("counting system calls");
        for target in &targets {
            run_once(target, &place, Some(&place.counts_path()))?;
            let counted = script::read_counts(&place.counts_path())?;
            results.system_calls.insert(target.name.to_owned(), counted);
        }
    }
    Ok(results)
}

fn targets(options: &ProgramsOptions) -> Vec<TreeTarget<'_>> {
    const MEMORY: &str = "memory:";
    const PASSTHROUGH: &str = "passthrough:";
    let own = options.program.as_path();
    let mut all = vec![
        TreeTarget { name: NATIVE, way: TreeAccess::Native },
        TreeTarget { name: "memory", way: TreeAccess::Run(own, MEMORY) },
        TreeTarget { name: "passthrough", way: TreeAccess::Run(own, PASSTHROUGH) },
    ];
    if let Some(before) = &options.before {
        all.push(TreeTarget { name: "memory-before", way: TreeAccess::Run(before, MEMORY) });
        all.push(TreeTarget {
            name: "passthrough-before",
            way: TreeAccess::Run(before, PASSTHROUGH),
        });
    }
    if options.mounts {
        all.push(TreeTarget { name: "memory-mount", way: TreeAccess::Mount(own, MEMORY) });
        all.push(TreeTarget {
            name: "passthrough-mount",
            way: TreeAccess::Mount(own, PASSTHROUGH),
        });
    }
    all
}

/// Runs all programs once on a new tree.
fn run_once(
    target: &TreeTarget<'_>,
    place: &tree::ProgramsDirectory,
    counts: Option<&Path>,
) -> Result<Vec<script::ProgramTimes>> {
    let (lower, mounted) = (place.make_empty()?, place.mountpoint());
    let source = |kind: &'static str| {
        let mut source = OsString::from(kind);
        if kind == "passthrough:" {
            source.push(&lower);
        }
        source
    };
    let run = |command, dir: &Path| perform(command, (target.name, dir), place, counts);
    match target.way {
        TreeAccess::Native => run(Command::new("bash"), &lower),
        TreeAccess::Run(program, kind) => {
            let mut mount = mounted.clone().into_os_string();
            mount.push("=");
            mount.push(source(kind));
            let mut command = Command::new(program);
            command.args(["run", "--mount"]).arg(mount).args(["--", "bash"]);
            run(command, &mounted)
        }
        TreeAccess::Mount(program, kind) => {
            with_mount(program, &source(kind), &mounted, || run(Command::new("bash"), &mounted))
                .context("on a mount of the kernel, which --no-mounts leaves out")
        }
    }
}

/// Has `command`, a shell, run the programs in `dir`.
fn perform(
    mut command: Command,
    (target, dir): (&str, &Path),
    place: &tree::ProgramsDirectory,
    counts: Option<&Path>,
) -> Result<Vec<script::ProgramTimes>> {
    command.arg(place.script()).arg(dir).arg(place.archive());
    if let Some(counts) = counts {
        command.arg(counts);
    }
    let output = command.stdin(Stdio::null()).output();
    let output =
        output.with_context(|| format!("{}: not started", command.get_program().display()))?;
    if !output.status.success() {
        let text = String::from_utf8_lossy(&output.stderr);
        let end: Vec<&str> = text.lines().rev().take(5).collect();
        let end: Vec<&str> = end.into_iter().rev().collect();
        bail!("the programs failed on {target}: {}: {}", output.status, end.join("; "));
    }
    script::durations(&String::from_utf8_lossy(&output.stdout))
}
