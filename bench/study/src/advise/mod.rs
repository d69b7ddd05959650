//! Measures the cost of a mount for the user's own command, and explains it.
//!
//! The command runs alternately on the directory itself and on its mount. Each run starts from the
//! same state: a temporary copy, which is recreated if the command changed it. Then the requests of
//! the mount are analysed, and options that could help are tried, so that all advice is measured.

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
use defuse_probe::StatsSnapshot;
use serde::Serialize;

use crate::check::StudyDirectory;
use crate::interrupt::InterruptFlag;
use crate::kernel::{CellTrace, KernelStages};
use crate::mount::{MountPaths, StudyMount};
use crate::options::{ConfigKind, StudyConfig};
use crate::process::{ChildProcess, ProcessStart};
use crate::report::median;

pub use candidates::CandidateOption;
pub use explain::{RequestCost, explain};

/// The environment variable that contains the directory during the command.
pub const VARIABLE: &str = "DEFUSE_DIR";

/// Options of the advice.
#[derive(Debug, Clone)]
pub struct AdviseOptions {
    /// The directory.
    pub dir: PathBuf,
    /// The command. `{}` is replaced by the directory, which is also the working directory.
    pub command: Vec<OsString>,
    /// The mount configuration. Native is always measured.
    pub config: StudyConfig,
    /// Number of runs of each.
    pub runs: u32,
    /// Drop the kernel's caches before each run.
    pub cold: bool,
    /// Try options that could help.
    pub try_options: bool,
    /// Directory for copies.
    pub work: PathBuf,
    /// Maximum size of a copy in bytes.
    pub copy_limit_bytes: u64,
    /// This program.
    pub program: PathBuf,
}

/// One run of the command.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct CommandRun {
    /// Wall-clock time in seconds.
    pub seconds: f64,
    /// CPU time of the command and its children, in nanoseconds.
    pub app_ns: u64,
    /// CPU time of the daemon, in nanoseconds.
    pub daemon_ns: u64,
    /// Statistics of the daemon.
    pub daemon: Option<StatsSnapshot>,
    /// Statistics of the kernel's queues.
    pub kernel: Option<StatsSnapshot>,
}

/// All runs of one configuration.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct RunSeries {
    /// Name of the configuration.
    pub name: String,
    /// The runs, in order.
    pub runs: Vec<CommandRun>,
}

/// The results.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct AdviceResults {
    /// The runs on the directory itself.
    pub native: RunSeries,
    /// The runs on the mount.
    pub mounted: RunSeries,
    /// The options that were tried.
    pub tried: Vec<OptionTrial>,
    /// Exit code of the command.
    pub exit_code: i32,
    /// The command changed files.
    pub changes_files: bool,
    /// The method of measuring the kernel's queues, or the reason why they were not measured.
    pub kernel_stages: String,
}

impl RunSeries {
    /// The run with the median time.
    pub fn median_run(&self) -> Option<&CommandRun> {
        let mut runs: Vec<&CommandRun> = self.runs.iter().collect();
        runs.sort_by(|a, b| a.seconds.total_cmp(&b.seconds));
        runs.get(runs.len().saturating_sub(1) / 2).copied()
    }

    /// Median time, in seconds.
    pub fn seconds(&self) -> f64 {
        let seconds: Vec<f64> = self.runs.iter().map(|run| run.seconds).collect();
        median(&seconds).unwrap_or(0.0)
    }
}

/// An option that was tried, alternating with the mount without it.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct OptionTrial {
    /// The option.
    pub candidate: CandidateOption,
    /// The runs with the option.
    pub with: RunSeries,
    /// The runs without the option.
    pub without: RunSeries,
}

struct AdviceRunner<'a> {
    options: &'a AdviseOptions,
    work: StudyDirectory,
    kernel: KernelStages,
    interrupt: InterruptFlag,
    exit_code: Option<i32>,
    changes: bool,
    pristine: Option<copy::TreeFingerprint>,
}

/// Runs the command natively and on the mount, and tries options that could help.
///
/// # Errors
///
/// Fails if the directory cannot be copied or mounted, if the command cannot be started, or if its
/// exit status differs between native and mount.
pub fn advise(options: &AdviseOptions, tell: &mut dyn FnMut(&str)) -> Result<AdviceResults> {
    ensure!(options.runs > 0, "--runs 0 measures nothing: write 1 or more");
    ensure!(
        options.dir.is_dir(),
        "{} is no directory: name the directory that the command uses",
        options.dir.display()
    );
    ensure!(
        options.config.kind != ConfigKind::Native,
        "native is the reference: name another --config"
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
    let interrupt = InterruptFlag::catch()?;
    let kernel = KernelStages::probe(rustix::process::geteuid().is_root());
    limits::raise_file_limit();
    let work = StudyDirectory::create(&options.work)?;
    let mut stand = AdviceRunner {
        options,
        work,
        kernel,
        interrupt,
        exit_code: None,
        changes: false,
        pristine: None,
    };
    stand.make_fresh_copy()?;
    let native = StudyConfig::native();
    // A first run, which loads programs and libraries into memory, and natively the files, too.
    stand.run(&native)?;
    let (mut of_native, mut of_mount) =
        (RunSeries::new("native"), RunSeries::new(&options.config.name));
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
    Ok(AdviceResults {
        native: of_native,
        mounted: of_mount,
        tried,
        exit_code: stand.exit_code.unwrap_or(0),
        changes_files: stand.changes,
        kernel_stages: stand.kernel.describe(),
    })
}

impl RunSeries {
    /// True if every run took longer than every run of `other`.
    pub fn is_slower_than(&self, other: &RunSeries) -> bool {
        let seconds =
            |series: &RunSeries| series.runs.iter().map(|run| run.seconds).collect::<Vec<_>>();
        let (ours, theirs) = (seconds(self), seconds(other));
        ours.iter().all(|a| theirs.iter().all(|b| a > b))
    }

    fn new(name: &str) -> RunSeries {
        RunSeries { name: name.to_owned(), runs: Vec::new() }
    }
}

impl AdviceRunner<'_> {
    fn copy(&self) -> PathBuf {
        self.work.path().join("copy")
    }

    fn make_fresh_copy(&mut self) -> Result<()> {
        copy::make(&self.options.dir, &self.copy())?;
        self.pristine = Some(copy::TreeFingerprint::from_tree(&self.copy())?);
        Ok(())
    }

    /// One run, from the initial state.
    fn run(&mut self, config: &StudyConfig) -> Result<CommandRun> {
        ensure!(!self.interrupt.is_set(), "interrupted: everything is removed");
        if self.options.cold {
            caches::sync(&self.copy())?;
            fs::write("/proc/sys/vm/drop_caches", "3").context("caches could not be dropped")?;
        }
        let run = self.measure(config).with_context(|| format!("on {}", config.name))?;
        let after = copy::TreeFingerprint::from_tree(&self.copy())?;
        if self.pristine.as_ref() != Some(&after) {
            self.changes = true;
            self.make_fresh_copy()?;
        }
        Ok(run)
    }

    fn measure(&mut self, config: &StudyConfig) -> Result<CommandRun> {
        let source = self.copy();
        let mountpoint = self.work.path().join("mnt");
        let place = MountPaths {
            source: &source,
            mountpoint: &mountpoint,
            program: &self.options.program,
            work: self.work.path(),
            groups: &[],
        };
        let mount = StudyMount::start(config, &place)?;
        let root = if mount.is_some() { &mountpoint } else { &source };
        let watch = match mount.as_ref().and_then(StudyMount::connection) {
            Some(connection) => self.kernel.watch(connection)?,
            None => CellTrace::default(),
        };
        let before = mount.as_ref().map(StudyMount::snapshot).transpose()?.flatten();
        let daemon_before = mount.as_ref().map(|mount| cpu::ProcessCpuTime::read(mount.pid()));
        let mut run = self.command(root)?;
        let after = mount.as_ref().map(StudyMount::snapshot).transpose()?.flatten();
        if let (Some(mount), Some(before)) = (&mount, daemon_before) {
            run.daemon_ns = cpu::ProcessCpuTime::read(mount.pid()).usage_since(&before);
        }
        run.kernel = watch.end()?.snapshot;
        run.daemon = after.zip(before).map(|(after, before)| after.delta_since(&before));
        mount.map_or(Ok(()), StudyMount::end)?;
        Ok(run)
    }

    /// Runs the command with `root` as its directory.
    fn command(&mut self, root: &Path) -> Result<CommandRun> {
        let words: Vec<OsString> =
            self.options.command.iter().map(|word| fill_in(word, root)).collect();
        let log = self.work.path().join("command.log");
        let start = ProcessStart {
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
        let mut process = ChildProcess::start(&start)?;
        let status = process.wait(Duration::from_secs(24 * 3600), &self.interrupt)?;
        let seconds = began.elapsed().as_secs_f64();
        let code = match status.code() {
            Some(code @ (126 | 127)) => {
                bail!(
                    "the command cannot be run (exit code {code}); its output: {}",
                    process.log_tail()
                )
            }
            Some(code) => code,
            None => bail!("the command was killed by signal {}", status.signal().unwrap_or(0)),
        };
        match *self.exit_code.get_or_insert(code) {
            first if first == code => {}
            first => bail!(
                "the command ended with {code} here and with {first} natively, so that times cannot be compared; its output: {}",
                process.log_tail()
            ),
        }
        let app_ns = children_cpu_ns().saturating_sub(before);
        Ok(CommandRun { seconds, app_ns, ..CommandRun::default() })
    }

    /// Tries the candidates, alternating with the unchanged mount.
    fn try_candidates(
        &mut self,
        native: &RunSeries,
        mounted: &RunSeries,
        tell: &mut dyn FnMut(&str),
    ) -> Result<Vec<OptionTrial>> {
        let mut tried = Vec::new();
        if !self.options.try_options {
            return Ok(tried);
        }
        let base = &self.options.config;
        for candidate in candidates::select_for_run(native, mounted, base) {
            let config = candidate.config(base);
            let (mut with, mut without) =
                (RunSeries::new(&config.name), RunSeries::new(&base.name));
            for _ in 0..self.options.runs {
                without.runs.push(self.run(base)?);
                with.runs.push(self.run(&config)?);
            }
            tell(&format!("tried -o {}: {:.3} s", candidate.option, with.seconds()));
            tried.push(OptionTrial { candidate, with, without });
        }
        Ok(tried)
    }
}

/// CPU time of all children that have ended, including their descendants; in steps of 10 ms.
fn children_cpu_ns() -> u64 {
    let stat = fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let fields = stat.rsplit_once(')').map_or("", |(_, fields)| fields).split_whitespace();
    // cutime and cstime of proc_pid_stat(5), counted from the field after the name.
    fields.skip(13).take(2).filter_map(|ticks| ticks.parse::<u64>().ok()).sum::<u64>() * 10_000_000
}

/// Replaces `{}` anywhere in a word by the directory.
fn fill_in(word: &OsString, root: &Path) -> OsString {
    match word.to_str() {
        Some(text) if text.contains("{}") => text.replace("{}", &root.to_string_lossy()).into(),
        _ => word.clone(),
    }
}
