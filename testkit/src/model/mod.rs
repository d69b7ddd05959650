//! Compares random operations on a reference model and on a real file system, step by step.
//!
//! The driver calls the contract directly, so no kernel is needed. It tracks lookup counts and open
//! handles like a frontend, releases all of them at the end, and then compares the whole tree:
//! names, attributes, contents and extended attributes.

mod driver;
mod op;
mod reference;

pub use op::{ModelOp, SpecialKind};

use std::sync::Arc;

use defuse_fs::FileSystem;
use proptest::test_runner::{Config, TestCaseError, TestRunner};

/// The treatment of missing operations in [`check`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MissingPolicy {
    /// `ENOSYS` and `EOPNOTSUPP` are accepted, and the step is skipped in the model.
    Allowed,
    /// They are failures, for a file system that claims to be complete.
    Refused,
}

/// Runs sequences of random operations on the file systems that `make` creates, each empty.
/// `PROPTEST_CASES` sets the number of sequences, 300 by default.
///
/// # Panics
///
/// Panics if the file system and the model differ, with the smallest sequence that shows the
/// difference.
pub fn check(missing: MissingPolicy, make: impl Fn() -> Arc<dyn FileSystem>) {
    check_some(missing, 300, make);
}

/// Checks like [`check`], with `sequences` sequences by default.
///
/// # Panics
///
/// Panics in the cases of [`check`].
pub fn check_some(missing: MissingPolicy, sequences: u32, make: impl Fn() -> Arc<dyn FileSystem>) {
    let mut config = Config { failure_persistence: None, ..Config::default() };
    if std::env::var_os("PROPTEST_CASES").is_none() {
        config.cases = sequences;
    }
    let run = |ops: Vec<ModelOp>| {
        driver::run(&*make(), &ops, missing)
            .map_err(|error| TestCaseError::fail(format!("{error:#}")))
    };
    if let Err(error) = TestRunner::new(config).run(&op::sequence(), run) {
        panic!("{error}");
    }
}

/// Runs one sequence, such as one found by [`check`], for regression tests. The error describes the
/// step that differs.
pub fn replay(missing: MissingPolicy, fs: &dyn FileSystem, ops: &[ModelOp]) -> anyhow::Result<()> {
    driver::run(fs, ops, missing)
}
