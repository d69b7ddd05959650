//! Runs other programs. The error of a failure contains the program and its output.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

/// Runs a program to its end and returns its output.
pub fn output<S: AsRef<OsStr>>(program: &str, args: &[S]) -> Result<String> {
    output_in(Path::new("."), program, args)
}

/// Runs a command like [`output`], in the working directory `dir`.
pub fn output_in<S: AsRef<OsStr>>(dir: &Path, program: &str, args: &[S]) -> Result<String> {
    let output = Command::new(program)
        .args(args)
        .current_dir(dir)
        .stdin(Stdio::null())
        .output()
        .with_context(|| format!("{program} could not be started; is it installed?"))?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        bail!("{program} failed ({}): {}", output.status, said.trim());
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// The program that this process runs. Its hidden commands are the workers of measurements.
///
/// # Errors
///
/// Where /proc does not show it.
pub fn find_own_program() -> Result<PathBuf> {
    std::env::current_exe().context("cannot find this program")
}
