//! Suites that run on a mounted file system, on every configuration and on native ext4.
//!
//! A case that fails but passes on native ext4 is a bug, unless [`exclusions`] has a reason.

pub mod exclusions;
pub mod exercise;
mod fsx;
mod pjdfstest;
mod programs;
pub mod stage;
mod tools;

use std::fmt;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow};

use crate::mounted::has_rings;
use stage::ConfigBackend;
pub use stage::{CONFIGS, MountedStage, NATIVE, RUNS, SERVED, StageConfig, VOLUMES};

/// A suite.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConformanceSuite {
    /// The crate `pjdfstest`: POSIX as specified, as root and as other users.
    Pjdfstest,
    /// The crate `fsx`: random operations on one file.
    Fsx,
    /// The cases of [`posix`](crate::posix).
    Posix,
    /// git, sqlite3, make, tar, rsync and Python's own tests.
    Programs,
    /// Random operations on one file; see [`exercise`].
    File,
    /// Random operations of several processes on a tree; see [`exercise`].
    Tree,
}

impl ConformanceSuite {
    /// All suites, with their names on the command line.
    pub const ALL: [(&'static str, ConformanceSuite); 6] = [
        ("pjdfstest", ConformanceSuite::Pjdfstest),
        ("fsx", ConformanceSuite::Fsx),
        ("posix", ConformanceSuite::Posix),
        ("programs", ConformanceSuite::Programs),
        ("file", ConformanceSuite::File),
        ("tree", ConformanceSuite::Tree),
    ];

    /// Its name.
    pub fn name(self) -> &'static str {
        ConformanceSuite::ALL.iter().find(|(_, suite)| *suite == self).map_or("", |(name, _)| name)
    }

    /// True if it also runs on configurations without a mount.
    pub fn runs_in_process(self) -> bool {
        self != ConformanceSuite::Programs
    }

    /// True if it runs on `config`.
    pub fn runs_on(self, config: &StageConfig) -> bool {
        match config.backend {
            ConfigBackend::Run(_) if *config == SERVED => {
                matches!(self, ConformanceSuite::File | ConformanceSuite::Tree)
            }
            ConfigBackend::Run(_) => self.runs_in_process(),
            // It is beside ours for the cases of POSIX.
            ConfigBackend::NativeGluster(_) => self != ConformanceSuite::Programs,
            _ => true,
        }
    }

    /// Installs the requirements of the suite.
    ///
    /// # Errors
    ///
    /// Fails if a requirement is not available, most likely because there is no network.
    pub fn install(self) -> Result<()> {
        match self {
            ConformanceSuite::Pjdfstest => tools::install("pjdfstest", "0.2.2").map(drop),
            ConformanceSuite::Fsx => tools::install("fsx", "0.3.2").map(drop),
            ConformanceSuite::Posix | ConformanceSuite::File | ConformanceSuite::Tree => Ok(()),
            ConformanceSuite::Programs => tools::packages(programs::PACKAGES),
        }
    }

    fn run_on(self, stage: &mut MountedStage, quick: bool) -> Result<SuiteTally> {
        match self {
            ConformanceSuite::Pjdfstest => pjdfstest::run(stage),
            ConformanceSuite::Fsx => fsx::run(stage, quick),
            ConformanceSuite::Posix if stage.is_in_process() || stage.is_one_of_many() => {
                posix_apart(stage)
            }
            ConformanceSuite::Posix => Ok(posix(stage)),
            ConformanceSuite::Programs => programs::run(stage, quick),
            ConformanceSuite::File => exercise::files(stage, quick),
            ConformanceSuite::Tree => exercise::trees(stage, quick),
        }
    }
}

/// The results of a suite.
#[derive(Clone, Debug, Default)]
pub struct SuiteTally {
    /// Number of passed cases.
    pub passed: usize,
    /// The skipped cases, with their reasons.
    pub skipped: Vec<(String, String)>,
    /// The failed cases, with details.
    pub failed: Vec<(String, String)>,
}

impl SuiteTally {
    /// Counts one case.
    pub(crate) fn add(&mut self, case: &str, result: Result<()>) {
        match result {
            Ok(()) => self.passed += 1,
            Err(error) => self.failed.push((case.to_owned(), format!("{error:#}"))),
        }
    }

    /// Number of cases.
    pub fn cases(&self) -> usize {
        self.passed + self.skipped.len() + self.failed.len()
    }

    fn has_failed(&self, case: &str) -> bool {
        self.failed.iter().any(|(name, _)| name == case)
    }
}

/// One suite on one configuration: a row of the table.
#[derive(Clone, Debug)]
pub struct SuiteRow {
    /// The configuration.
    pub config: &'static str,
    /// The suite.
    pub suite: ConformanceSuite,
    /// Number of clients that ran it at once.
    pub clients: usize,
    /// The results.
    pub tally: SuiteTally,
    /// The failures that occur neither on native ext4 nor in the table of exclusions.
    pub unexpected: Vec<(String, String)>,
    /// Duration.
    pub took: Duration,
}

impl SuiteRow {
    /// The excluded cases that did not fail, so that their reasons are
    /// [`outdated`](exclusions::list_outdated).
    pub fn list_outdated(&self) -> Vec<&'static str> {
        let failed: Vec<&str> = self.tally.failed.iter().map(|(case, _)| case.as_str()).collect();
        exclusions::list_outdated(self.suite, self.config, &failed)
    }
}

impl fmt::Display for SuiteRow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (suite, tally) = (self.suite.name(), &self.tally);
        let config = match self.clients {
            1 => self.config.to_owned(),
            clients => format!("{} x {clients}", self.config),
        };
        let known = tally.failed.len() - self.unexpected.len();
        write!(
            f,
            "{suite:10} {config:26} {:>6} {:>6} {:>7} {known:>6} {:>6.1}s",
            tally.passed,
            self.unexpected.len(),
            tally.skipped.len(),
            self.took.as_secs_f64()
        )
    }
}

/// The heading of the table of [`SuiteRow`]s. `known` counts failures that also occur on native
/// ext4 or are in the table of exclusions.
pub const HEAD: &str = "suite      configuration              passed failed skipped  known    time";

/// Runs `suite` on native ext4 and on `configs`. Calls `seen` for each row when it is complete.
///
/// # Errors
///
/// Fails if a suite could not run at all.
pub fn run(
    suite: ConformanceSuite,
    configs: &[&'static StageConfig],
    quick: bool,
    seen: &mut dyn FnMut(&SuiteRow),
) -> Result<Vec<SuiteRow>> {
    run_by_clients(suite, configs, (1, quick), seen)
}

/// Runs the suite like [`run`], by `clients` clients of one server at once, each in a directory of
/// its own. Native ext4 has one.
///
/// # Errors
///
/// Fails like [`run`], and for several clients of a configuration without a server.
pub fn run_by_clients(
    suite: ConformanceSuite,
    configs: &[&'static StageConfig],
    (clients, quick): (usize, bool),
    seen: &mut dyn FnMut(&SuiteRow),
) -> Result<Vec<SuiteRow>> {
    let mut rows: Vec<SuiteRow> = Vec::new();
    let others = configs.iter().filter(|config| config.name != NATIVE.name);
    for config in std::iter::once(&&NATIVE).chain(others) {
        let needs_rings = config.args.iter().any(|arg| arg.starts_with("io_uring"));
        if needs_rings && !has_rings() {
            println!("not here: {}: fuse's parameter enable_uring is off", config.name);
            continue;
        }
        let begun = Instant::now();
        let clients = if config.name == NATIVE.name { 1 } else { clients };
        let mut stages = match clients {
            1 => vec![MountedStage::new(config)?],
            clients => MountedStage::crowd(config, clients)?,
        };
        let mut tally = run_on_each(suite, &mut stages, quick)?;
        stages.drain(..clients - 1);
        if let Some(checked) = stages[0].check_image() {
            tally.add("fsck of the image", checked);
        }
        let native = rows.first().map(|row| &row.tally);
        let unexpected = list_unexpected(suite, config, &tally, native);
        drop(stages);
        let (config, took) = (config.name, begun.elapsed());
        let row = SuiteRow { config, suite, clients, tally, unexpected, took };
        seen(&row);
        rows.push(row);
    }
    Ok(rows)
}

/// Runs `suite` on all stages at once. Returns the cases of all.
fn run_on_each(
    suite: ConformanceSuite,
    stages: &mut [MountedStage],
    quick: bool,
) -> Result<SuiteTally> {
    std::thread::scope(|scope| {
        let run = |stage| scope.spawn(move || suite.run_on(stage, quick));
        let running: Vec<_> = stages.iter_mut().map(run).collect();
        let mut all = SuiteTally::default();
        for of_one in running {
            let of_one = of_one.join().map_err(|_| anyhow!("a thread of {suite:?} panicked"))??;
            all.passed += of_one.passed;
            all.skipped.extend(of_one.skipped);
            all.failed.extend(of_one.failed);
        }
        Ok(all)
    })
}

fn list_unexpected(
    suite: ConformanceSuite,
    config: &StageConfig,
    tally: &SuiteTally,
    native: Option<&SuiteTally>,
) -> Vec<(String, String)> {
    let is_new = |(case, _): &&(String, String)| match native {
        Some(native) => {
            !native.has_failed(case) && exclusions::reason(suite, config.name, case).is_none()
        }
        // Native ext4 is correct by definition, except for our own exercisers, which it validates.
        None => matches!(suite, ConformanceSuite::File | ConformanceSuite::Tree),
    };
    tally.failed.iter().filter(is_new).cloned().collect()
}

/// Runs the POSIX cases in `dir`, a directory of the configuration `config`, for a separate process
/// (`conformance --cases`) that alone has the files.
pub fn posix_cases(dir: &Path, config: &str) {
    crate::posix::run_except(dir, "", &|case| {
        exclusions::hang_reason(ConformanceSuite::Posix, config, case)
    });
}

/// Runs them in such a process. For a run it must be this program in a release build: in a debug
/// build of `rustix`, the numbers of system calls cannot be read, so that none is served.
fn posix_apart(stage: &MountedStage) -> Result<SuiteTally> {
    let mut command = stage.command(&std::env::current_exe()?)?;
    command.arg("--cases").arg(stage.path()).arg(stage.config().name);
    let output = command.output()?;
    let mut tally = SuiteTally::default();
    for line in String::from_utf8_lossy(&output.stdout).lines() {
        let Some((word, rest)) = line.split_once(' ') else { continue };
        let (case, how) = rest.split_once(": ").unwrap_or((rest, ""));
        let case = case.split(' ').next().unwrap_or_default().to_owned();
        match word {
            "pass" => tally.passed += 1,
            "FAIL" => tally.failed.push((case, how.to_owned())),
            "skip" => tally.skipped.push((case, how.to_owned())),
            _ => {}
        }
    }
    let all = crate::posix::cases().count();
    if tally.cases() < all {
        let how = format!("{} of {all} cases were run: {}", tally.cases(), output.status);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        tally.failed.push(("the suite".to_owned(), format!("{how} {said}")));
    }
    Ok(tally)
}

fn posix(stage: &MountedStage) -> SuiteTally {
    let hangs =
        |case: &str| exclusions::hang_reason(ConformanceSuite::Posix, stage.config().name, case);
    let report = crate::posix::run_except(stage.path(), "", &hangs);
    let mut tally = SuiteTally::default();
    for (case, outcome, _) in report.outcomes {
        match outcome {
            crate::posix::CaseOutcome::Passed => tally.passed += 1,
            crate::posix::CaseOutcome::Failed(how) => tally.failed.push((case.to_owned(), how)),
            crate::posix::CaseOutcome::Skipped(why) => tally.skipped.push((case.to_owned(), why)),
        }
    }
    tally
}
