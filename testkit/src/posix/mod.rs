//! POSIX conformance by plain system calls on any directory.
//!
//! Each [`PosixCase`] runs in a new empty [`CaseDir`] and checks one statement of the manual pages.
//! The suite itself is validated on tmpfs and ext4 (see `tests/posix_native.rs`), so a failure on
//! another file system is that file system's error.
//!
//! All cases run on one thread with the umask 0. Do not run them while other threads of the process
//! create files.

mod attributes;
mod data;
mod dir;
mod dirs;
mod links;
mod locks;
mod names;
mod permissions;
mod rename;
mod special;
pub(crate) mod sys;
mod xattrs;

pub use dir::{CaseDir, SkipReason};
pub(crate) use sys::{ForkedChild, TestMapping};

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::fs::Mode;

/// Runs `run` in a child of this process, and waits for its end. Returns what it returned, and 255
/// after a panic.
///
/// # Errors
///
/// Fails with the errors of fork(2), and with an error if a signal ended the child.
pub fn run_in_child(run: impl FnOnce() -> u8) -> std::io::Result<u8> {
    ForkedChild::start(run)?.wait()
}

/// One statement and its check.
#[derive(Clone, Copy, Debug)]
pub struct PosixCase {
    /// `group::what`, unique.
    pub name: &'static str,
    /// Only root can run it (it changes users, or creates devices).
    pub needs_root: bool,
    /// The check. A [`SkipReason`] as its error means that it cannot run here.
    pub run: fn(&CaseDir) -> anyhow::Result<()>,
}

/// A table of cases: `group; name, root name, ...`, each the name of a function.
macro_rules! case_table {
    ($group:literal; $($first:ident $($second:ident)?),* $(,)?) => {
        pub(super) const CASES: &[$crate::posix::PosixCase] =
            &[$($crate::posix::case_table!(@one $group $first $($second)?)),*];
    };
    (@one $group:literal root $name:ident) => {
        $crate::posix::PosixCase {
            name: concat!($group, "::", stringify!($name)), needs_root: true, run: $name,
        }
    };
    (@one $group:literal $name:ident) => {
        $crate::posix::PosixCase {
            name: concat!($group, "::", stringify!($name)), needs_root: false, run: $name,
        }
    };
}
use case_table;

/// All cases, in order.
pub fn cases() -> impl Iterator<Item = &'static PosixCase> {
    [
        names::CASES,
        attributes::CASES,
        data::CASES,
        links::CASES,
        rename::CASES,
        dirs::CASES,
        locks::CASES,
        xattrs::CASES,
        special::CASES,
        permissions::CASES,
    ]
    .into_iter()
    .flatten()
}

/// The result of a case.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CaseOutcome {
    /// The statement holds.
    Passed,
    /// It does not hold, with details.
    Failed(String),
    /// It could not be checked, with the reason.
    Skipped(String),
}

/// The results of all cases.
#[derive(Clone, Debug, Default)]
pub struct CaseReport {
    /// Name, outcome and duration, in the order of the table.
    pub outcomes: Vec<(&'static str, CaseOutcome, Duration)>,
}

impl CaseReport {
    /// The names of the failed cases.
    pub fn failed_cases(&self) -> Vec<&'static str> {
        let failed = self.outcomes.iter().filter(|one| matches!(one.1, CaseOutcome::Failed(_)));
        failed.map(|one| one.0).collect()
    }

    /// The numbers of passed, failed and skipped cases.
    pub fn counts(&self) -> (usize, usize, usize) {
        let count = |wanted: fn(&CaseOutcome) -> bool| {
            self.outcomes.iter().filter(|one| wanted(&one.1)).count()
        };
        (
            count(|outcome| *outcome == CaseOutcome::Passed),
            count(|outcome| matches!(outcome, CaseOutcome::Failed(_))),
            count(|outcome| matches!(outcome, CaseOutcome::Skipped(_))),
        )
    }
}

impl fmt::Display for CaseReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (name, outcome, _) in &self.outcomes {
            match outcome {
                CaseOutcome::Passed => {}
                CaseOutcome::Failed(how) => writeln!(f, "FAIL {name}: {how}")?,
                CaseOutcome::Skipped(why) => writeln!(f, "skip {name}: {why}")?,
            }
        }
        let (passed, failed, skipped) = self.counts();
        write!(f, "{passed} passed, {failed} failed, {skipped} skipped")
    }
}

/// Runs every case whose name contains `filter` in a new directory below `dir`, and prints each
/// result at once, so that a hanging case is visible.
pub fn run(dir: &Path, filter: &str) -> CaseReport {
    run_except(dir, filter, &|_| None)
}

/// Runs the cases like [`run`], without the cases for which `excluded` returns a reason. Some of
/// them would wait for ever.
pub fn run_except(
    dir: &Path,
    filter: &str,
    excluded: &dyn Fn(&str) -> Option<&'static str>,
) -> CaseReport {
    let umask = rustix::process::umask(Mode::empty());
    let mut report = CaseReport::default();
    for (number, case) in cases().enumerate().filter(|(_, case)| case.name.contains(filter)) {
        let start = Instant::now();
        let outcome = match excluded(case.name) {
            Some(reason) => CaseOutcome::Skipped(reason.into()),
            None => run_case(&dir.join(format!("case{number}")), case),
        };
        let took = start.elapsed();
        match &outcome {
            CaseOutcome::Passed => println!("pass {} ({took:.1?})", case.name),
            CaseOutcome::Failed(how) => println!("FAIL {}: {how}", case.name),
            CaseOutcome::Skipped(why) => println!("skip {}: {why}", case.name),
        }
        report.outcomes.push((case.name, outcome, took));
    }
    rustix::process::umask(umask);
    report
}

fn run_case(path: &Path, case: &PosixCase) -> CaseOutcome {
    if case.needs_root && !rustix::process::geteuid().is_root() {
        return CaseOutcome::Skipped("only root can run it".into());
    }
    let run = || {
        let dir = CaseDir::new(path)?;
        (case.run)(&dir)
    };
    let outcome = match catch_unwind(AssertUnwindSafe(run)) {
        Ok(Ok(())) => CaseOutcome::Passed,
        Ok(Err(error)) => match error.downcast_ref::<SkipReason>() {
            Some(SkipReason(why)) => CaseOutcome::Skipped(why.clone()),
            None => CaseOutcome::Failed(format!("{error:#}")),
        },
        Err(_) => CaseOutcome::Failed("panicked".into()),
    };
    // Everything must be removable, too.
    match std::fs::remove_dir_all(path) {
        Err(error) if outcome == CaseOutcome::Passed => {
            CaseOutcome::Failed(format!("what it left cannot be removed: {error}"))
        }
        _ => outcome,
    }
}
