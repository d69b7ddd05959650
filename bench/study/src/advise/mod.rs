//! What a mount costs for the user's own command, and why.
//!
//! The command runs on the directory itself and on a mount of it, in turns, each time in the same state: on a copy that is
//! thrown away, made anew whenever the command changed something. Then the mount is compared by its requests, and what
//! could help is tried, so that advice is never more than was seen.

mod candidates;
mod copy;
mod explain;

use std::ffi::OsString;
use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use defuse_measure::{caches, cpu, limits};
use defuse_probe::Snapshot;
use serde::Serialize;

use crate::check::Work;
use crate::interrupt::Interrupt;
use crate::kernel::{KernelStages, Watch};
use crate::mount::{Mount, Place};
use crate::options::{Config, Kind};
use crate::process::{Process, Start};
use crate::report::median;

pub use candidates::Candidate;
pub use explain::{Cost, explain};

/// Names the directory in the environment of the command.
pub const VARIABLE: &str = "DEFUSE_DIR";

/// What is asked for.
#[derive(Debug, Clone)]
pub struct Options {
    /// The directory.
    pub dir: PathBuf,
    /// The command; `{}` stands for the directory, which is also where it works.
    pub command: Vec<OsString>,
    /// How the mount is made; native is always measured.
    pub config: Config,
    /// How often each is run.
    pub runs: u32,
    /// Whether the kernel's caches are dropped before each run.
    pub cold: bool,
    /// Whether what could help is tried.
    pub try_options: bool,
    /// Where copies are made.
    pub work: PathBuf,
    /// The most bytes that are copied.
    pub copy_limit_bytes: u64,
    /// This program.
    pub program: PathBuf,
}

/// One run of the command.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Run {
    /// Wall-clock time.
    pub seconds: f64,
    /// CPU time of the command and what it started, in nanoseconds.
    pub app_ns: u64,
    /// CPU time of the daemon, in nanoseconds.
    pub daemon_ns: u64,
    /// What the daemon measured.
    pub daemon: Option<Snapshot>,
    /// What the kernel measured in its queues.
    pub kernel: Option<Snapshot>,
}

/// All runs of one configuration.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Series {
    /// Its name.
    pub name: String,
    /// In their order.
    pub runs: Vec<Run>,
}

/// What was found out.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Advice {
    /// On the directory itself.
    pub native: Series,
    /// On the mount.
    pub mounted: Series,
    /// What was tried.
    pub tried: Vec<Tried>,
    /// Exit code of the command.
    pub exit_code: i32,
    /// Whether the command changed files.
    pub changes_files: bool,
    /// How the kernel's queues were measured, or why not.
    pub kernel_stages: String,
}

impl Series {
    /// The run of median time.
    pub fn typical(&self) -> Option<&Run> {
        let mut runs: Vec<&Run> = self.runs.iter().collect();
        runs.sort_by(|a, b| a.seconds.total_cmp(&b.seconds));
        runs.get(runs.len().saturating_sub(1) / 2).copied()
    }

    /// Median time, in seconds.
    pub fn seconds(&self) -> f64 {
        let seconds: Vec<f64> = self.runs.iter().map(|run| run.seconds).collect();
        median(&seconds).unwrap_or(0.0)
    }
}

/// An option that was tried, in turns with the mount without it.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Tried {
    /// The option.
    pub candidate: Candidate,
    /// With it.
    pub with: Series,
    /// Without it.
    pub without: Series,
}

struct Stand<'a> {
    options: &'a Options,
    work: Work,
    kernel: KernelStages,
    interrupt: Interrupt,
    exit_code: Option<i32>,
    changes: bool,
    pristine: Option<copy::Fingerprint>,
}

/// Runs the command natively and on the mount, and tries what could help.
///
/// # Errors
///
/// A directory that cannot be copied or mounted, a command that cannot be started, or that ends otherwise on the mount
/// than natively.
pub fn advise(options: &Options, tell: &mut dyn FnMut(&str)) -> Result<Advice> {
    ensure!(options.runs > 0, "--runs 0 measures nothing: write 1 or more");
    ensure!(
        options.dir.is_dir(),
        "{} is no directory: name the one that the command works on",
        options.dir.display()
    );
    ensure!(
        options.config.kind != Kind::Native,
        "native is compared with a mount: name another --config"
    );
    if options.cold {
        ensure!(
            rustix::process::geteuid().is_root(),
            "--cold drops the kernel's caches, which needs root: leave it out or use sudo"
        );
    }
    let size = copy::size_of(&options.dir)?;
    ensure!(
        size <= options.copy_limit_bytes,
        "{} has {} MiB, and runs work on a copy: allow it with --copy-limit, or name a smaller directory",
        options.dir.display(),
        size >> 20
    );
    let interrupt = Interrupt::catch()?;
    let kernel = KernelStages::probe(rustix::process::geteuid().is_root());
    limits::raise_file_limit();
    let work = Work::create(&options.work)?;
    let mut stand =
        Stand { options, work, kernel, interrupt, exit_code: None, changes: false, pristine: None };
    stand.fresh_copy()?;
    let native = Config::native();
    // Programs and libraries come into memory, and natively also the files.
    stand.run(&native)?;
    let (mut of_native, mut of_mount) = (Series::new("native"), Series::new(&options.config.name));
    for run in 1..=options.runs {
        for (config, series) in [(&native, &mut of_native), (&options.config, &mut of_mount)] {
            let done = stand.run(config)?;
            tell(&format!(
                "run {run} of {} on {:<10} {:.3} s",
                options.runs, config.name, done.seconds
            ));
            series.runs.push(done);
        }
    }
    let tried = stand.try_candidates(&of_native, &of_mount, tell)?;
    Ok(Advice {
        native: of_native,
        mounted: of_mount,
        tried,
        exit_code: stand.exit_code.unwrap_or(0),
        changes_files: stand.changes,
        kernel_stages: stand.kernel.describe(),
    })
}

impl Series {
    /// Whether every run took longer than every one of `other`.
    pub fn is_slower_than(&self, other: &Series) -> bool {
        let seconds =
            |series: &Series| series.runs.iter().map(|run| run.seconds).collect::<Vec<_>>();
        let (ours, theirs) = (seconds(self), seconds(other));
        ours.iter().all(|a| theirs.iter().all(|b| a > b))
    }

    fn new(name: &str) -> Series {
        Series { name: name.to_owned(), runs: Vec::new() }
    }
}

impl Stand<'_> {
    fn copy(&self) -> PathBuf {
        self.work.path().join("copy")
    }

    fn fresh_copy(&mut self) -> Result<()> {
        copy::make(&self.options.dir, &self.copy())?;
        self.pristine = Some(copy::Fingerprint::of(&self.copy())?);
        Ok(())
    }

    /// One run, in the state that every run finds.
    fn run(&mut self, config: &Config) -> Result<Run> {
        ensure!(!self.interrupt.is_set(), "interrupted: nothing is left behind");
        if self.options.cold {
            caches::sync(&self.copy())?;
            fs::write("/proc/sys/vm/drop_caches", "3").context("caches could not be dropped")?;
        }
        let run = self.measured(config).with_context(|| format!("on {}", config.name))?;
        let after = copy::Fingerprint::of(&self.copy())?;
        if self.pristine.as_ref() != Some(&after) {
            self.changes = true;
            self.fresh_copy()?;
        }
        Ok(run)
    }

    fn measured(&mut self, config: &Config) -> Result<Run> {
        let source = self.copy();
        let mountpoint = self.work.path().join("mnt");
        let place = Place {
            source: &source,
            mountpoint: &mountpoint,
            program: &self.options.program,
            work: self.work.path(),
            groups: &[],
        };
        let mount = Mount::start(config, &place)?;
        let root = if mount.is_some() { &mountpoint } else { &source };
        let watch = match mount.as_ref().and_then(Mount::connection) {
            Some(connection) => self.kernel.watch(connection)?,
            None => Watch::default(),
        };
        let before = mount.as_ref().map(Mount::snapshot).transpose()?.flatten();
        let daemon_before = mount.as_ref().map(|mount| cpu::Threads::of(mount.pid()));
        let mut run = self.command(root)?;
        let after = mount.as_ref().map(Mount::snapshot).transpose()?.flatten();
        if let (Some(mount), Some(before)) = (&mount, daemon_before) {
            run.daemon_ns = cpu::Threads::of(mount.pid()).since(&before);
        }
        run.kernel = watch.end()?.snapshot;
        run.daemon = after.zip(before).map(|(after, before)| after.since(&before));
        mount.map_or(Ok(()), Mount::end)?;
        Ok(run)
    }

    /// Runs the command with `root` for its directory.
    fn command(&mut self, root: &Path) -> Result<Run> {
        let words: Vec<OsString> =
            self.options.command.iter().map(|word| fill_in(word, root)).collect();
        let log = self.work.path().join("command.log");
        let start = Start {
            name: "the command",
            words: &words,
            groups: &[],
            log: &log,
            output: Some(Path::new("/dev/null")),
            env: &[(VARIABLE, root.into())],
            dir: Some(root),
        };
        let before = children_cpu_ns();
        let began = Instant::now();
        let mut process = Process::start(&start)?;
        let status = process.wait(Duration::from_secs(24 * 3600), &self.interrupt)?;
        let seconds = began.elapsed().as_secs_f64();
        let code = match status.code() {
            Some(code @ (126 | 127)) => {
                bail!("the command cannot be run (exit code {code}); it said: {}", process.said())
            }
            Some(code) => code,
            None => bail!("the command was ended by signal {}", status.signal().unwrap_or(0)),
        };
        match *self.exit_code.get_or_insert(code) {
            first if first == code => {}
            first => bail!(
                "the command ended with {code} here and with {first} natively, so that times cannot be compared; it said: {}",
                process.said()
            ),
        }
        let app_ns = children_cpu_ns().saturating_sub(before);
        Ok(Run { seconds, app_ns, ..Run::default() })
    }

    /// Runs what could help, in turns with the mount as it was.
    fn try_candidates(
        &mut self,
        native: &Series,
        mounted: &Series,
        tell: &mut dyn FnMut(&str),
    ) -> Result<Vec<Tried>> {
        let mut tried = Vec::new();
        if !self.options.try_options {
            return Ok(tried);
        }
        let base = &self.options.config;
        for candidate in candidates::for_run(native, mounted, base) {
            let config = candidate.config(base);
            let (mut with, mut without) = (Series::new(&config.name), Series::new(&base.name));
            for _ in 0..self.options.runs {
                without.runs.push(self.run(base)?);
                with.runs.push(self.run(&config)?);
            }
            tell(&format!("tried -o {}: {:.3} s", candidate.option, with.seconds()));
            tried.push(Tried { candidate, with, without });
        }
        Ok(tried)
    }
}

/// CPU time of all children that have ended, with theirs; in steps of 10 ms.
fn children_cpu_ns() -> u64 {
    let stat = fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let fields = stat.rsplit_once(')').map_or("", |(_, fields)| fields).split_whitespace();
    // cutime and cstime of proc_pid_stat(5), counted from the field after the name.
    fields.skip(13).take(2).filter_map(|ticks| ticks.parse::<u64>().ok()).sum::<u64>() * 10_000_000
}

/// `{}` anywhere in a word is the directory.
fn fill_in(word: &OsString, root: &Path) -> OsString {
    match word.to_str() {
        Some(text) if text.contains("{}") => text.replace("{}", &root.to_string_lossy()).into(),
        _ => word.clone(),
    }
}
