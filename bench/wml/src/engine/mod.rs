//! Runs a plan: creates the file sets, then runs threads that repeat their flowops.
//!
//! Processes of the language are groups of threads of this one process. Nothing in the language
//! depends on separate address spaces or descriptor tables, because descriptors belong to threads
//! there, too.

mod control;
mod events;
mod failure;
mod flowops;
mod run;
mod synchronization;
mod worker;

use std::process::Command;
use std::time::Duration;

use crate::driver::WorkloadDriver;
use crate::files::{self, RunFileset};
use crate::plan::{WorkloadAction, WorkloadPlan};
use crate::report::RunReport;

pub use failure::RunFailure;

/// Settings of a run.
#[derive(Clone, Copy, Debug, Default)]
pub struct RunSettings {
    /// Time limit of a run, as if the workload file had specified it.
    pub timeout: Option<Duration>,
    /// An equal plan has already created the files, perhaps in another process or through another
    /// mount: `create files` then makes nothing, which keeps the caches cold.
    pub adopt: bool,
}

/// Receives progress events. By default, every method does nothing.
pub trait RunObserver: Sync {
    /// Progress of creating the files of a set. Called by several threads.
    fn report_files(&self, fileset: &str, done: u64, total: u64) {
        let _ = (fileset, done, total);
    }
    /// Progress of a run: seconds since its start, and operations so far. Called ten times a
    /// second.
    fn report_run(&self, seconds: f64, operations: u64) {
        let _ = (seconds, operations);
    }
    /// A period of `psrun` has ended.
    fn interval(&self, report: &RunReport) {
        let _ = report;
    }
    /// An `echo` statement.
    fn echo(&self, text: &str) {
        let _ = text;
    }
    /// The measured part of a run is about to begin, and the files exist. It ends after `limit` at
    /// the latest, if there is one.
    fn begin(&self, limit: Option<Duration>) {
        let _ = limit;
    }
}

/// An observer that does nothing.
impl RunObserver for () {}

/// Executes `plan` through `driver`. Returns one report for every run.
///
/// # Errors
///
/// The first failure: a file that could not be created, a flowop that failed, or, with `quit
/// timeout`, a flowop that found no file.
pub fn execute<D: WorkloadDriver>(
    plan: &WorkloadPlan,
    driver: &D,
    settings: RunSettings,
    observer: &dyn RunObserver,
) -> Result<Vec<RunReport>, RunFailure> {
    let number = |(number, set)| RunFileset::new(set, plan.seed, number);
    let sets: Vec<RunFileset> = plan.filesets.iter().enumerate().map(number).collect();
    let mut made = vec![false; sets.len()];
    let mut reports = Vec::new();
    for action in &plan.actions {
        match action {
            WorkloadAction::CreateFiles => {
                let missing: Vec<&RunFileset> = sets
                    .iter()
                    .zip(&made)
                    .filter(|(_, made)| !**made)
                    .map(|(set, _)| set)
                    .collect();
                if !settings.adopt {
                    files::check_room(driver, &missing)?;
                }
                for (set, made) in sets.iter().zip(&mut made).filter(|(_, made)| !**made) {
                    let progress = |done, total| observer.report_files(&set.plan.name, done, total);
                    files::create(driver, set, plan.seed, settings.adopt, &progress)?;
                    *made = true;
                }
            }
            WorkloadAction::RemoveFiles => {
                for set in &sets {
                    files::remove(driver, set)?;
                }
                made.fill(false);
            }
            WorkloadAction::Echo(text) => observer.echo(text),
            WorkloadAction::System(line) => shell(line)?,
            WorkloadAction::Sleep(seconds) => std::thread::sleep(Duration::from_secs(*seconds)),
            WorkloadAction::Run(run) => {
                observer.begin(run::limit_of(run, settings));
                reports.push(run::run(plan, run, &sets, driver, settings, observer)?);
            }
        }
    }
    Ok(reports)
}

fn shell(line: &str) -> Result<(), RunFailure> {
    let status = Command::new("/bin/sh").arg("-c").arg(line).status();
    match status {
        Ok(status) if status.success() => Ok(()),
        Ok(status) => Err(RunFailure::command(line, &status.to_string())),
        Err(error) => Err(RunFailure::command(line, &error.to_string())),
    }
}
