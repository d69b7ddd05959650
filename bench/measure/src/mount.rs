//! A mount by the commands of defuse, for as long as something is measured on it.

use std::ffi::OsStr;
use std::path::Path;

use anyhow::Result;

use crate::command;

/// Calls `work` while `source` is mounted at `at` by `program`.
///
/// # Errors
///
/// Fails with the errors of `work`, and otherwise with errors of the commands. The source is
/// unmounted in any case.
pub fn with_mount<T>(
    program: &Path,
    source: &OsStr,
    at: &Path,
    work: impl FnOnce() -> Result<T>,
) -> Result<T> {
    let program = program.to_string_lossy();
    command::output(&program, &["mount".as_ref(), source, at.as_os_str()])?;
    let done = work();
    let unmounted = command::output(&program, &["umount".as_ref(), at.as_os_str()]);
    let done = done?;
    unmounted?;
    Ok(done)
}
