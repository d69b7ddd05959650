//! Random operations on a reference model and on a real file system, compared step by step.
//!
//! The driver speaks the contract directly, so no kernel is needed. It keeps the books of lookups
//! and open handles as a frontend would, gives all of them back at the end, and then compares the
//! whole tree: names, attributes, contents and extended attributes.

mod driver;
mod op;
mod reference;

pub use op::{Op, SpecialKind};

use std::sync::Arc;

use defuse_fs::FileSystem;
use proptest::test_runner::{Config, TestCaseError, TestRunner};

/// How [`check`] treats what the file system does not have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Missing {
    /// `ENOSYS` and `EOPNOTSUPP` are taken for an answer, and the step is left out of the model.
    Allowed,
    /// They are failures like any other: for a file system that claims to have everything.
    Refused,
}

/// Runs sequences of random operations on file systems that `make` makes, empty each time, and
/// panics with the smallest sequence that shows a difference.
///
/// `PROPTEST_CASES` sets the number of sequences; 300 where it is not set.
///
/// # Panics
///
/// Where the file system and the model differ, with the shrunk sequence.
pub fn check(missing: Missing, make: impl Fn() -> Arc<dyn FileSystem>) {
    let mut config = Config { failure_persistence: None, ..Config::default() };
    if std::env::var_os("PROPTEST_CASES").is_none() {
        config.cases = 300;
    }
    let run = |ops: Vec<Op>| {
        driver::run(&*make(), &ops, missing)
            .map_err(|error| TestCaseError::fail(format!("{error:#}")))
    };
    if let Err(error) = TestRunner::new(config).run(&op::sequence(), run) {
        panic!("{error}");
    }
}

/// Runs one sequence, such as one that [`check`] found: for regression tests. The error says which
/// step differs and how.
pub fn replay(missing: Missing, fs: &dyn FileSystem, ops: &[Op]) -> anyhow::Result<()> {
    driver::run(fs, ops, missing)
}
