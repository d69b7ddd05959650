//! Running other programs: their failure becomes an error that says which program, and what it said.

use std::ffi::OsStr;
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

/// Runs a program to its end and returns what it printed.
pub fn output<S: AsRef<OsStr>>(program: &str, args: &[S]) -> Result<String> {
    output_in(Path::new("."), program, args)
}

/// The same with `dir` as the working directory.
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
