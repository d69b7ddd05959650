//! Runs other programs. A failure becomes an error with the command line.

use std::fmt::Write as _;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use anyhow::{Context, Result, bail};

/// The root of the project.
pub fn root() -> &'static Path {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    here.parent().unwrap_or(here)
}

/// The cargo that runs this program, to be started in the root of the project.
pub fn cargo() -> Command {
    let program = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(program);
    command.current_dir(root());
    command
}

/// Runs a program to its end and shows its output.
pub fn run(command: &mut Command) -> Result<()> {
    let status = command.status().with_context(|| format!("cannot start {}", line(command)))?;
    if !status.success() {
        bail!("`{}` ended with {status}", line(command));
    }
    Ok(())
}

/// Runs a program to its end, and shows its output then, after `name`: by one call, so that the
/// words of two programs do not mix.
pub fn run_aside(name: &str, command: &mut Command) -> Result<()> {
    let output = command.output().with_context(|| format!("cannot start {}", line(command)))?;
    let said = [output.stdout, output.stderr].concat();
    print!("{name}:\n{}", String::from_utf8_lossy(&said));
    if !output.status.success() {
        bail!("`{}` ended with {}", line(command), output.status);
    }
    Ok(())
}

/// Calls `work` for all names, `lanes` at a time. Returns the errors, each with its name.
pub fn run_in_lanes(
    names: &[impl AsRef<str> + Sync],
    lanes: usize,
    work: impl Fn(&str) -> Result<()> + Sync,
) -> Vec<String> {
    let (next, failed) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    std::thread::scope(|scope| {
        for _ in 0..lanes.min(names.len()) {
            scope.spawn(|| {
                while let Some(name) = names.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let name = name.as_ref();
                    if let Err(error) = work(name) {
                        let mut failed = failed.lock().unwrap_or_else(PoisonError::into_inner);
                        failed.push(format!("{name}: {error:#}"));
                    }
                }
            });
        }
    });
    failed.into_inner().unwrap_or_else(PoisonError::into_inner)
}

/// Runs a program to its end and returns its output.
pub fn output(command: &mut Command) -> Result<String> {
    command.stdin(Stdio::null()).stderr(Stdio::piped());
    let output = command.output().with_context(|| format!("cannot start {}", line(command)))?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        bail!("`{}` ended with {}: {}", line(command), output.status, said.trim());
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// The command line, for messages.
pub fn line(command: &Command) -> String {
    let program = Path::new(command.get_program());
    let mut text = program.file_name().unwrap_or(program.as_os_str()).display().to_string();
    for argument in command.get_args() {
        let _ = write!(text, " {}", argument.display());
    }
    text
}

/// Cargo's description of the project and its packages.
pub fn metadata() -> Result<serde_json::Value> {
    let arguments = ["metadata", "--no-deps", "--format-version=1", "--offline"];
    Ok(serde_json::from_str(&output(cargo().args(arguments))?)?)
}

/// The directory of cargo's build results.
pub fn target_dir() -> Result<PathBuf> {
    let metadata = metadata()?;
    let dir = metadata["target_directory"].as_str().context("cargo names no target directory")?;
    Ok(dir.into())
}

/// The program that the build of all tests makes. A test without it builds one with other features,
/// which takes minutes and replaces the library of runs that other tests use at that moment.
pub fn program_under_test() -> Result<PathBuf> {
    Ok(target_dir()?.join("debug/defuse"))
}

/// The path of a program in `PATH`.
pub fn find(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    // The administrator's programs are not in the path of every user.
    let more = ["/usr/sbin", "/sbin"].map(PathBuf::from);
    let mut places = std::env::split_paths(&path).chain(more).map(|dir| dir.join(program));
    places.find(|file| file.is_file())
}

/// True if this process is root, by the owner of its directory in /proc.
pub fn is_root() -> bool {
    Path::new("/proc/self").metadata().is_ok_and(|data| data.uid() == 0)
}

#[cfg(test)]
mod tests {
    use anyhow::ensure;

    use super::*;

    /// The barrier opens only for two at a time.
    #[test]
    fn work_in_lanes_runs_side_by_side_and_all_of_it_although_some_fails() {
        let names = ["a", "b", "c", "d"];
        let both = std::sync::Barrier::new(2);
        let done = Mutex::new(Vec::new());
        let mut failed = run_in_lanes(&names, 2, |name| {
            both.wait();
            done.lock().unwrap().push(name.to_owned());
            ensure!(!["a", "d"].contains(&name), "no");
            Ok(())
        });
        failed.sort();
        assert_eq!(failed, ["a: no", "d: no"]);
        assert_eq!(done.into_inner().unwrap().len(), names.len());
    }
}
