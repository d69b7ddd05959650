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
use stage::Backend;
pub use stage::{CONFIGS, Config, NATIVE, RUNS, SERVED, Stage, VOLUMES};

/// A suite.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Suite {
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

impl Suite {
    /// All suites, with their names on the command line.
    pub const ALL: [(&'static str, Suite); 6] = [
        ("pjdfstest", Suite::Pjdfstest),
        ("fsx", Suite::Fsx),
        ("posix", Suite::Posix),
        ("programs", Suite::Programs),
        ("file", Suite::File),
        ("tree", Suite::Tree),
    ];

    /// Its name.
    pub fn name(self) -> &'static str {
        Suite::ALL.iter().find(|(_, suite)| *suite == self).map_or("", |(name, _)| name)
    }

    /// True if it also runs on configurations without a mount.
    pub fn runs_in_process(self) -> bool {
        self != Suite::Programs
    }

    /// True if it runs on `config`.
    pub fn runs_on(self, config: &Config) -> bool {
        match config.backend {
            Backend::Run(_) if *config == SERVED => matches!(self, Suite::File | Suite::Tree),
            Backend::Run(_) => self.runs_in_process(),
            // It is beside ours for the cases of POSIX.
            Backend::NativeGluster(_) => self != Suite::Programs,
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
            Suite::Pjdfstest => tools::install("pjdfstest", "0.2.2").map(drop),
            Suite::Fsx => tools::install("fsx", "0.3.2").map(drop),
            Suite::Posix | Suite::File | Suite::Tree => Ok(()),
            Suite::Programs => tools::packages(programs::PACKAGES),
        }
    }

    fn run_on(self, stage: &mut Stage, quick: bool) -> Result<Tally> {
        match self {
            Suite::Pjdfstest => pjdfstest::run(stage),
            Suite::Fsx => fsx::run(stage, quick),
            Suite::Posix if stage.is_in_process() || stage.is_one_of_many() => posix_apart(stage),
            Suite::Posix => Ok(posix(stage)),
            Suite::Programs => programs::run(stage, quick),
            Suite::File => exercise::files(stage, quick),
            Suite::Tree => exercise::trees(stage, quick),
        }
    }
}

/// The results of a suite.
#[derive(Clone, Debug, Default)]
pub struct Tally {
    /// Number of passed cases.
    pub passed: usize,
    /// The skipped cases, with their reasons.
    pub skipped: Vec<(String, String)>,
    /// The failed cases, with details.
    pub failed: Vec<(String, String)>,
}

impl Tally {
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
pub struct Row {
    /// The configuration.
    pub config: &'static str,
    /// The suite.
    pub suite: Suite,
    /// Number of clients that ran it at once.
    pub clients: usize,
    /// The results.
    pub tally: Tally,
    /// The failures that occur neither on native ext4 nor in the table of exclusions.
    pub unexpected: Vec<(String, String)>,
    /// Duration.
    pub took: Duration,
}

impl Row {
    /// The excluded cases that did not fail, so that their reasons are [`outdated`](exclusions::outdated).
    pub fn outdated(&self) -> Vec<&'static str> {
        let failed: Vec<&str> = self.tally.failed.iter().map(|(case, _)| case.as_str()).collect();
        exclusions::outdated(self.suite, self.config, &failed)
    }
}

impl fmt::Display for Row {
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

/// The heading of the table of [`Row`]s. `known` counts failures that also occur on native ext4 or
/// are in the table of exclusions.
pub const HEAD: &str = "suite      configuration              passed failed skipped  known    time";

/// Runs `suite` on native ext4 and on `configs`. Calls `seen` for each row when it is complete.
///
/// # Errors
///
/// Fails if a suite could not run at all.
pub fn run(
    suite: Suite,
    configs: &[&'static Config],
    quick: bool,
    seen: &mut dyn FnMut(&Row),
) -> Result<Vec<Row>> {
    run_by_clients(suite, configs, (1, quick), seen)
}

/// Like [`run`], by `clients` clients of one server at once, each in a directory of its own. Native ext4 has one.
///
/// # Errors
///
/// Fails like [`run`], and for several clients of a configuration without a server.
pub fn run_by_clients(
    suite: Suite,
    configs: &[&'static Config],
    (clients, quick): (usize, bool),
    seen: &mut dyn FnMut(&Row),
) -> Result<Vec<Row>> {
    let mut rows: Vec<Row> = Vec::new();
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
            1 => vec![Stage::new(config)?],
            clients => Stage::crowd(config, clients)?,
        };
        let mut tally = run_on_each(suite, &mut stages, quick)?;
        stages.drain(..clients - 1);
        if let Some(checked) = stages[0].check_image() {
            tally.add("fsck of the image", checked);
        }
        let native = rows.first().map(|row| &row.tally);
        let unexpected = unexpected(suite, config, &tally, native);
        drop(stages);
        let (config, took) = (config.name, begun.elapsed());
        let row = Row { config, suite, clients, tally, unexpected, took };
        seen(&row);
        rows.push(row);
    }
    Ok(rows)
}

/// Runs `suite` on all stages at once. Returns the cases of all.
fn run_on_each(suite: Suite, stages: &mut [Stage], quick: bool) -> Result<Tally> {
    std::thread::scope(|scope| {
        let run = |stage| scope.spawn(move || suite.run_on(stage, quick));
        let running: Vec<_> = stages.iter_mut().map(run).collect();
        let mut all = Tally::default();
        for of_one in running {
            let of_one = of_one.join().map_err(|_| anyhow!("a thread of {suite:?} panicked"))??;
            all.passed += of_one.passed;
            all.skipped.extend(of_one.skipped);
            all.failed.extend(of_one.failed);
        }
        Ok(all)
    })
}

fn unexpected(
    suite: Suite,
    config: &Config,
    tally: &Tally,
    native: Option<&Tally>,
) -> Vec<(String, String)> {
    let is_new = |(case, _): &&(String, String)| match native {
        Some(native) => {
            !native.has_failed(case) && exclusions::reason(suite, config.name, case).is_none()
        }
        // Native ext4 is correct by definition, except for our own exercisers, which it validates.
        None => matches!(suite, Suite::File | Suite::Tree),
    };
    tally.failed.iter().filter(is_new).cloned().collect()
}

/// Runs the POSIX cases in `dir`, a directory of the configuration `config`, for a separate process
/// (`conformance --cases`) that alone has the files.
pub fn posix_cases(dir: &Path, config: &str) {
    crate::posix::run_except(dir, "", &|case| exclusions::hangs(Suite::Posix, config, case));
}

/// Runs them in such a process. For a run it must be this program in a release build: in a debug build of
/// `rustix`, the numbers of system calls cannot be read, so that none is served.
fn posix_apart(stage: &Stage) -> Result<Tally> {
    let mut command = stage.command(&std::env::current_exe()?)?;
    command.arg("--cases").arg(stage.path()).arg(stage.config().name);
    let output = command.output()?;
    let mut tally = Tally::default();
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

fn posix(stage: &Stage) -> Tally {
    let hangs = |case: &str| exclusions::hangs(Suite::Posix, stage.config().name, case);
    let report = crate::posix::run_except(stage.path(), "", &hangs);
    let mut tally = Tally::default();
    for (case, outcome, _) in report.outcomes {
        match outcome {
            crate::posix::Outcome::Passed => tally.passed += 1,
            crate::posix::Outcome::Failed(how) => tally.failed.push((case.to_owned(), how)),
            crate::posix::Outcome::Skipped(why) => tally.skipped.push((case.to_owned(), why)),
        }
    }
    tally
}
