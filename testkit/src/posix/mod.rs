//! POSIX conformance through plain system calls, on any directory.
//!
//! Each [`Case`] runs in a new empty [`Dir`] and proves one promise of the manual pages. The suite
//! is proven itself on tmpfs and ext4 (see `tests/posix_native.rs`), so a failure on another file
//! system is that file system's.
//!
//! Everything runs in one thread, and the umask of the process is 0 meanwhile; do not run it beside
//! other work in the same process that makes files.

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
mod sys;
mod xattrs;

pub use dir::{Dir, Skip};
pub(crate) use sys::{Child, Map};

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::fs::Mode;

/// One promise and its proof.
#[derive(Clone, Copy, Debug)]
pub struct Case {
    /// `group::what`, unique.
    pub name: &'static str,
    /// Only root can run it (it takes other users' identities, or makes devices).
    pub needs_root: bool,
    /// The proof. A [`Skip`] as its error means that it cannot run here.
    pub run: fn(&Dir) -> anyhow::Result<()>,
}

/// A table of cases: `group; name, root name, ...`, each the name of a function.
macro_rules! case_table {
    ($group:literal; $($first:ident $($second:ident)?),* $(,)?) => {
        pub(super) const CASES: &[$crate::posix::Case] =
            &[$($crate::posix::case_table!(@one $group $first $($second)?)),*];
    };
    (@one $group:literal root $name:ident) => {
        $crate::posix::Case {
            name: concat!($group, "::", stringify!($name)), needs_root: true, run: $name,
        }
    };
    (@one $group:literal $name:ident) => {
        $crate::posix::Case {
            name: concat!($group, "::", stringify!($name)), needs_root: false, run: $name,
        }
    };
}
use case_table;

/// All cases, in order.
pub fn cases() -> impl Iterator<Item = &'static Case> {
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

/// How a case went.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The promise holds.
    Passed,
    /// It does not; how.
    Failed(String),
    /// It could not be tried; why.
    Skipped(String),
}

/// How all cases went.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// Name, outcome and duration, in the order of the table.
    pub outcomes: Vec<(&'static str, Outcome, Duration)>,
}

impl Report {
    /// The names of the cases that failed.
    pub fn failed(&self) -> Vec<&'static str> {
        let failed = self.outcomes.iter().filter(|one| matches!(one.1, Outcome::Failed(_)));
        failed.map(|one| one.0).collect()
    }

    /// How many passed, failed and were skipped.
    pub fn counts(&self) -> (usize, usize, usize) {
        let count = |wanted: fn(&Outcome) -> bool| {
            self.outcomes.iter().filter(|one| wanted(&one.1)).count()
        };
        (
            count(|outcome| *outcome == Outcome::Passed),
            count(|outcome| matches!(outcome, Outcome::Failed(_))),
            count(|outcome| matches!(outcome, Outcome::Skipped(_))),
        )
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (name, outcome, _) in &self.outcomes {
            match outcome {
                Outcome::Passed => {}
                Outcome::Failed(how) => writeln!(f, "FAIL {name}: {how}")?,
                Outcome::Skipped(why) => writeln!(f, "skip {name}: {why}")?,
            }
        }
        let (passed, failed, skipped) = self.counts();
        write!(f, "{passed} passed, {failed} failed, {skipped} skipped")
    }
}

/// Runs every case whose name contains `filter` in a new directory below `dir`, and prints how each
/// one went as soon as it is known (so that one that hangs can be seen).
pub fn run(dir: &Path, filter: &str) -> Report {
    run_except(dir, filter, &|_| None)
}

/// As [`run`], without the cases for which `excluded` has a reason: some would wait for ever where
/// the promise does not hold.
pub fn run_except(
    dir: &Path,
    filter: &str,
    excluded: &dyn Fn(&str) -> Option<&'static str>,
) -> Report {
    let umask = rustix::process::umask(Mode::empty());
    let mut report = Report::default();
    for (number, case) in cases().enumerate().filter(|(_, case)| case.name.contains(filter)) {
        let start = Instant::now();
        let outcome = match excluded(case.name) {
            Some(reason) => Outcome::Skipped(reason.into()),
            None => run_case(&dir.join(format!("case{number}")), case),
        };
        let took = start.elapsed();
        match &outcome {
            Outcome::Passed => println!("pass {} ({took:.1?})", case.name),
            Outcome::Failed(how) => println!("FAIL {}: {how}", case.name),
            Outcome::Skipped(why) => println!("skip {}: {why}", case.name),
        }
        report.outcomes.push((case.name, outcome, took));
    }
    rustix::process::umask(umask);
    report
}

fn run_case(path: &Path, case: &Case) -> Outcome {
    if case.needs_root && !rustix::process::geteuid().is_root() {
        return Outcome::Skipped("only root can run it".into());
    }
    let run = || {
        let dir = Dir::new(path)?;
        (case.run)(&dir)
    };
    let outcome = match catch_unwind(AssertUnwindSafe(run)) {
        Ok(Ok(())) => Outcome::Passed,
        Ok(Err(error)) => match error.downcast_ref::<Skip>() {
            Some(Skip(why)) => Outcome::Skipped(why.clone()),
            None => Outcome::Failed(format!("{error:#}")),
        },
        Err(_) => Outcome::Failed("panicked".into()),
    };
    // That everything can be removed is a promise too.
    match std::fs::remove_dir_all(path) {
        Err(error) if outcome == Outcome::Passed => {
            Outcome::Failed(format!("what it left cannot be removed: {error}"))
        }
        _ => outcome,
    }
}
