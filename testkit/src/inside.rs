//! Third-party suites in programs under `defuse run`, with their working directory in a mount, and
//! natively for comparison: failures that also occur natively are ignored.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};

use anyhow::{Context, Result, ensure};

use crate::mounted::program;

/// The mounts, with the names that [`EXCLUSIONS`] use.
pub const MOUNTS: [(&str, &str); 3] = [
    ("passthrough", "passthrough:SRC"),
    // Without backing descriptors, every call is served in the process.
    ("placeholders", "passthrough:SRC,backing=off"),
    ("memory", "memory:"),
];

/// Python's tests about files, the fastest first.
pub const PYTHON: [&str; 11] = [
    "test_fileio",
    "test_fcntl",
    "test_mmap",
    "test_shutil",
    "test_sqlite3",
    "test_pathlib",
    "test_tempfile",
    "test_os",
    "test_zipfile",
    "test_io",
    "test_tarfile",
];

/// A case that cannot pass in a program under `defuse run`. docs/conformance.md repeats it, and a
/// test compares them.
#[derive(Debug)]
pub struct InsideExclusion {
    /// The case as unittest names it, without the part in parentheses.
    pub case: &'static str,
    /// The [`MOUNTS`] that it applies to.
    pub mounts: &'static [&'static str],
    /// The reason.
    pub reason: &'static str,
}

const ALL: &[&str] = &["passthrough", "placeholders", "memory"];

/// All exclusions.
pub const EXCLUSIONS: &[InsideExclusion] = &[InsideExclusion {
    case: "test_fcntl_64_bit",
    mounts: ALL,
    reason: "The test requests signals on changes of a directory (F_NOTIFY), which only the \
                 kernel could send. The request fails with EINVAL, as on a file system without \
                 support for it.",
}];

/// The reason why `case` cannot pass on the mount of this name.
pub fn reason(mount: &str, case: &str) -> Option<&'static str> {
    let name = case.split(' ').next().unwrap_or(case);
    let fits =
        |exclusion: &&InsideExclusion| exclusion.case == name && exclusion.mounts.contains(&mount);
    EXCLUSIONS.iter().find(fits).map(|exclusion| exclusion.reason)
}

/// The place of a program's files.
#[derive(Clone, Copy, Debug)]
pub enum ProgramPlace<'a> {
    /// In a directory of the machine.
    Native,
    /// In one of [`MOUNTS`], given by its source.
    Mount(&'a str),
}

/// The path of the mount.
const TARGET: &str = "/defuse-inside";

/// Runs a program to its end in an empty directory, which is its working directory and the
/// directory of its temporary files. It is killed after `seconds`.
///
/// # Errors
///
/// Fails if the program cannot be started.
pub fn run(at: ProgramPlace<'_>, seconds: u32, command: &[&str]) -> Result<Output> {
    let directory = tempfile::tempdir()?;
    let place = directory.path().canonicalize()?;
    let mut limited = Command::new("timeout");
    limited.args(["-s", "KILL", &seconds.to_string()]);
    let temporary: PathBuf = match at {
        ProgramPlace::Native => {
            limited.current_dir(&place);
            place.clone()
        }
        ProgramPlace::Mount(source) => {
            let source = source.replace("SRC", &place.display().to_string());
            let mount = format!("{TARGET}={source}");
            limited.arg(program()?).args(["run", "-C", TARGET, "--mount", &mount, "--"]);
            TARGET.into()
        }
    };
    limited.args(command).env("TMPDIR", temporary).env("LC_ALL", "C.UTF-8");
    limited.stdin(Stdio::null()).output().context("timeout")
}

/// A Python interpreter with its own tests: the binary, not a script that starts it.
pub fn python() -> Option<String> {
    let script = "import sys, test.test_os, test.test_pathlib; print(sys.executable)";
    ["python3", "/usr/bin/python3"].into_iter().find_map(|python| {
        let output = Command::new(python).args(["-c", script]).output().ok()?;
        let text = String::from_utf8(output.stdout).ok()?;
        // Importing a test may print something first.
        output.status.success().then(|| text.lines().last().unwrap_or("").to_owned())
    })
}

/// The result of a module of Python's tests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModuleResult {
    /// Number of tests run.
    pub ran: usize,
    /// The names of the failed tests.
    pub failed: BTreeSet<String>,
}

impl ModuleResult {
    fn from_output(output: &Output) -> Result<ModuleResult> {
        let said = String::from_utf8_lossy(&output.stderr);
        let ran = said.lines().find_map(|line| line.strip_prefix("Ran "));
        let ran = ran.and_then(|rest| rest.split(' ').next()?.parse().ok());
        let end: Vec<&str> = said.lines().rev().take(5).collect();
        let ran = ran.with_context(|| format!("it did not end: {}: {end:?}", output.status))?;
        let named = |line: &str| {
            let rest = line.strip_prefix("FAIL: ").or_else(|| line.strip_prefix("ERROR: "))?;
            Some(rest.to_owned())
        };
        Ok(ModuleResult { ran, failed: said.lines().filter_map(named).collect() })
    }
}

/// Runs a module of Python's tests.
///
/// # Errors
///
/// Fails if it does not run to its end.
pub fn python_tests(python: &str, module: &str, at: ProgramPlace<'_>) -> Result<ModuleResult> {
    let module = format!("test.{module}");
    // The slowest takes a minute on an idle machine.
    ModuleResult::from_output(&run(at, 900, &[python, "-m", "unittest", &module])?)
        .with_context(|| module.clone())
}

/// The tests of `module` that fail on a mount, but neither natively nor for a known reason. A
/// module with failures is repeated, and only tests that fail twice count, because some depend on
/// timing.
///
/// # Errors
///
/// Fails if the module does not run to its end, or runs fewer tests than natively.
pub fn python_failures(
    python: &str,
    module: &str,
    native: &ModuleResult,
    (name, source): (&str, &str),
) -> Result<BTreeSet<String>> {
    let once = || -> Result<BTreeSet<String>> {
        let seen = python_tests(python, module, ProgramPlace::Mount(source))?;
        ensure!(seen.ran == native.ran, "{} tests instead of {}", seen.ran, native.ran);
        let new = seen.failed.difference(&native.failed);
        Ok(new.filter(|case| reason(name, case).is_none()).cloned().collect())
    };
    let first = once().with_context(|| format!("{module} on {name}"))?;
    if first.is_empty() {
        return Ok(first);
    }
    let second = once().with_context(|| format!("{module} on {name}"))?;
    Ok(first.intersection(&second).cloned().collect())
}

/// Runs fio with one engine: random reads and writes of a file of `size`, with a digest in each
/// block that is verified on reading. Returns its error output; `None` on success.
///
/// # Errors
///
/// Fails if fio cannot be started.
pub fn fio(at: ProgramPlace<'_>, engine: &str, size: &str) -> Result<Option<String>> {
    let (engine, size) = (format!("--ioengine={engine}"), format!("--size={size}"));
    let command = [
        "fio",
        "--name=job",
        "--directory=.",
        "--filename=file",
        "--bs=4k",
        "--rw=randrw",
        "--iodepth=8",
        "--verify=crc32c",
        "--do_verify=1",
        "--verify_fatal=1",
        "--minimal",
        &engine,
        &size,
    ];
    let output = run(at, 300, &command)?;
    if output.status.success() {
        return Ok(None);
    }
    let text = [output.stdout, output.stderr].concat();
    let text = String::from_utf8_lossy(&text);
    let said: Vec<&str> = text.lines().filter(|line| !line.starts_with("3;")).take(4).collect();
    Ok(Some(format!("{}: {}", output.status, said.join(" / "))))
}

/// True if a program is in PATH.
pub fn has(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|dir| dir.join(program).is_file())
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt;

    use super::*;

    #[test]
    fn the_output_of_unittest_is_parsed() {
        let said =
            "..F\nFAIL: test_a (test.test_os.A)\n----\nERROR: test_b (x)\nRan 7 tests in 1s\n";
        let status = std::process::ExitStatus::from_raw(256);
        let output = Output { status, stdout: Vec::new(), stderr: said.into() };
        let tests = ModuleResult::from_output(&output).unwrap();
        let failed = ["test_a (test.test_os.A)", "test_b (x)"].map(str::to_owned);
        assert_eq!(tests, ModuleResult { ran: 7, failed: failed.into() });
        let status = std::process::ExitStatus::from_raw(11);
        let output = Output { status, stdout: Vec::new(), stderr: "test_a ... ".into() };
        let error = format!("{:#}", ModuleResult::from_output(&output).unwrap_err());
        assert!(error.contains("signal: 11") && error.contains("test_a"), "{error}");
    }

    #[test]
    fn exclusions_are_of_a_case_and_a_mount() {
        assert!(reason("memory", "test_fcntl_64_bit (test.test_fcntl.TestFcntl)").is_some());
        assert!(reason("native", "test_fcntl_64_bit (x)").is_none());
        assert!(reason("memory", "test_fcntl (x)").is_none());
    }
}
