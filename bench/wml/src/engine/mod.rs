//! Runs a plan: file sets first, then threads that do their flowops over and over.
//!
//! Processes of the language are groups of threads of this one process: nothing in the language
//! depends on separate address spaces or descriptor tables, because descriptors belong to threads
//! there, too.

mod control;
mod events;
mod failure;
mod flowops;
mod meeting;
mod run;
mod worker;

use std::process::Command;
use std::time::Duration;

use crate::driver::Driver;
use crate::files::{self, Fileset};
use crate::plan::{Action, Plan};
use crate::report::RunReport;

pub use failure::Failure;

/// How a plan is run.
#[derive(Clone, Copy, Debug, Default)]
pub struct Settings {
    /// A run that takes longer ends, as if the file had asked for that time.
    pub timeout: Option<Duration>,
    /// `create files` makes nothing, because the same plan has made them before, perhaps in another
    /// process or by another way to the same directory: nothing of them gets into caches.
    pub adopt: bool,
}

/// Who is told what happens. Every method does nothing unless it is written.
pub trait Observer: Sync {
    /// So much of the files of a set is made. Called by several threads.
    fn making(&self, fileset: &str, done: u64, total: u64) {
        let _ = (fileset, done, total);
    }
    /// A run goes on: seconds since it began, and operations so far. Called ten times a second.
    fn running(&self, seconds: f64, operations: u64) {
        let _ = (seconds, operations);
    }
    /// A period of `psrun` is over.
    fn interval(&self, report: &RunReport) {
        let _ = report;
    }
    /// The file says `echo`.
    fn echo(&self, text: &str) {
        let _ = text;
    }
    /// The measured part of a run is about to begin; the files are made. It ends after `limit` at
    /// the latest, where it has one.
    fn begin(&self, limit: Option<Duration>) {
        let _ = limit;
    }
}

/// The observer that does nothing.
impl Observer for () {}

/// Does everything that `plan` says, through `driver`. One report for every run.
///
/// # Errors
///
/// The first failure: a file that could not be made, a flowop that failed, or, with `quit timeout`,
/// one that found no file.
pub fn execute<D: Driver>(
    plan: &Plan,
    driver: &D,
    settings: Settings,
    observer: &dyn Observer,
) -> Result<Vec<RunReport>, Failure> {
    let number = |(number, set)| Fileset::new(set, plan.seed, number);
    let sets: Vec<Fileset> = plan.filesets.iter().enumerate().map(number).collect();
    let mut made = vec![false; sets.len()];
    let mut reports = Vec::new();
    for action in &plan.actions {
        match action {
            Action::CreateFiles => {
                let missing: Vec<&Fileset> = sets
                    .iter()
                    .zip(&made)
                    .filter(|(_, made)| !**made)
                    .map(|(set, _)| set)
                    .collect();
                if !settings.adopt {
                    files::check_room(driver, &missing)?;
                }
                for (set, made) in sets.iter().zip(&mut made).filter(|(_, made)| !**made) {
                    let progress = |done, total| observer.making(&set.plan.name, done, total);
                    files::create(driver, set, plan.seed, settings.adopt, &progress)?;
                    *made = true;
                }
            }
            Action::RemoveFiles => {
                for set in &sets {
                    files::remove(driver, set)?;
                }
                made.fill(false);
            }
            Action::Echo(text) => observer.echo(text),
            Action::System(line) => shell(line)?,
            Action::Sleep(seconds) => std::thread::sleep(Duration::from_secs(*seconds)),
            Action::Run(run) => {
                observer.begin(run::limit_of(run, settings));
                reports.push(run::run(plan, run, &sets, driver, settings, observer)?);
            }
        }
    }
    Ok(reports)
}

fn shell(line: &str) -> Result<(), Failure> {
    let status = Command::new("/bin/sh").arg("-c").arg(line).status();
    match status {
        Ok(status) if status.success() => Ok(()),
        Ok(status) => Err(Failure::command(line, &status.to_string())),
        Err(error) => Err(Failure::command(line, &error.to_string())),
    }
}
