//! Suites of others in programs under `defuse run`, with their working directory in a mount, and
//! natively beside it: what fails natively is nobody's fault here.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};

use anyhow::{Context, Result, ensure};

use crate::mounted::program;

/// What is mounted, with the name that [`EXCLUSIONS`] have for it.
pub const MOUNTS: [(&str, &str); 3] = [
    ("passthrough", "passthrough:SRC"),
    // Without descriptors of the bytes every call is served in the process.
    ("placeholders", "passthrough:SRC,backing=off"),
    ("memory", "memory:"),
];

/// The tests of Python that are about files: those of seconds first.
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

/// A case that cannot hold in a program under `defuse run`. docs/conformance.md repeats it, and a test
/// compares.
#[derive(Debug)]
pub struct Exclusion {
    /// The case, as unittest names it, without what is in parentheses.
    pub case: &'static str,
    /// On which of [`MOUNTS`].
    pub mounts: &'static [&'static str],
    /// Why.
    pub reason: &'static str,
}

const ALL: &[&str] = &["passthrough", "placeholders", "memory"];

/// All of them.
pub const EXCLUSIONS: &[Exclusion] = &[Exclusion {
    case: "test_fcntl_64_bit",
    mounts: ALL,
    reason: "It asks for signals on changes of a directory (F_NOTIFY), which the kernel would have \
                 to see; they are refused with EINVAL, as by a file system that has none.",
}];

/// Why `case` cannot hold on the mount of this name.
pub fn reason(mount: &str, case: &str) -> Option<&'static str> {
    let name = case.split(' ').next().unwrap_or(case);
    let fits = |exclusion: &&Exclusion| exclusion.case == name && exclusion.mounts.contains(&mount);
    EXCLUSIONS.iter().find(fits).map(|exclusion| exclusion.reason)
}

/// Where a program has its files.
#[derive(Clone, Copy, Debug)]
pub enum Where<'a> {
    /// In a directory of the machine.
    Native,
    /// In one of [`MOUNTS`], by its source.
    Mount(&'a str),
}

/// The path of the mount.
const TARGET: &str = "/defuse-inside";

/// Runs a program to its end in an empty directory, which is its working directory and that of its
/// temporary files. One that hangs is killed after `seconds`.
///
/// # Errors
///
/// Where it cannot be started.
pub fn run(at: Where<'_>, seconds: u32, command: &[&str]) -> Result<Output> {
    let directory = tempfile::tempdir()?;
    let place = directory.path().canonicalize()?;
    let mut limited = Command::new("timeout");
    limited.args(["-s", "KILL", &seconds.to_string()]);
    let temporary: PathBuf = match at {
        Where::Native => {
            limited.current_dir(&place);
            place.clone()
        }
        Where::Mount(source) => {
            let source = source.replace("SRC", &place.display().to_string());
            let mount = format!("{TARGET}={source}");
            limited.arg(program()?).args(["run", "-C", TARGET, "--mount", &mount, "--"]);
            TARGET.into()
        }
    };
    limited.args(command).env("TMPDIR", temporary).env("LC_ALL", "C.UTF-8");
    limited.stdin(Stdio::null()).output().context("timeout")
}

/// An interpreter that has its own tests: itself, not a script that starts it.
pub fn python() -> Option<String> {
    let script = "import sys, test.test_os, test.test_pathlib; print(sys.executable)";
    ["python3", "/usr/bin/python3"].into_iter().find_map(|python| {
        let output = Command::new(python).args(["-c", script]).output().ok()?;
        let text = String::from_utf8(output.stdout).ok()?;
        // Importing a test may print something before.
        output.status.success().then(|| text.lines().last().unwrap_or("").to_owned())
    })
}

/// How a module of Python's tests went.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tests {
    /// How many were run.
    pub ran: usize,
    /// Those that failed, by name.
    pub failed: BTreeSet<String>,
}

impl Tests {
    fn of(output: &Output) -> Result<Tests> {
        let said = String::from_utf8_lossy(&output.stderr);
        let ran = said.lines().find_map(|line| line.strip_prefix("Ran "));
        let ran = ran.and_then(|rest| rest.split(' ').next()?.parse().ok());
        let end: Vec<&str> = said.lines().rev().take(5).collect();
        let ran = ran.with_context(|| format!("it did not end: {}: {end:?}", output.status))?;
        let named = |line: &str| {
            let rest = line.strip_prefix("FAIL: ").or_else(|| line.strip_prefix("ERROR: "))?;
            Some(rest.to_owned())
        };
        Ok(Tests { ran, failed: said.lines().filter_map(named).collect() })
    }
}

/// Runs a module of Python's tests.
///
/// # Errors
///
/// Where it does not come to its end.
pub fn python_tests(python: &str, module: &str, at: Where<'_>) -> Result<Tests> {
    let module = format!("test.{module}");
    // The slowest takes a minute on an idle machine.
    Tests::of(&run(at, 900, &[python, "-m", "unittest", &module])?).with_context(|| module.clone())
}

/// The tests of `module` that fail on a mount and neither natively nor for a known reason. A module
/// with failures is run again, and only what fails twice counts: some of its tests are about time.
///
/// # Errors
///
/// Where the module does not come to its end, or fewer tests are run than natively.
pub fn python_failures(
    python: &str,
    module: &str,
    native: &Tests,
    (name, source): (&str, &str),
) -> Result<BTreeSet<String>> {
    let once = || -> Result<BTreeSet<String>> {
        let seen = python_tests(python, module, Where::Mount(source))?;
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

/// fio with one engine: random reads and writes of a file of `size`, each block with a digest that is
/// compared when it is read. Returns what it complains about; `None` where all is well.
///
/// # Errors
///
/// Where it cannot be started.
pub fn fio(at: Where<'_>, engine: &str, size: &str) -> Result<Option<String>> {
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

/// Whether a program is in PATH.
pub fn has(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|dir| dir.join(program).is_file())
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt;

    use super::*;

    #[test]
    fn what_unittest_prints_is_understood() {
        let said =
            "..F\nFAIL: test_a (test.test_os.A)\n----\nERROR: test_b (x)\nRan 7 tests in 1s\n";
        let status = std::process::ExitStatus::from_raw(256);
        let output = Output { status, stdout: Vec::new(), stderr: said.into() };
        let tests = Tests::of(&output).unwrap();
        let failed = ["test_a (test.test_os.A)", "test_b (x)"].map(str::to_owned);
        assert_eq!(tests, Tests { ran: 7, failed: failed.into() });
        let status = std::process::ExitStatus::from_raw(11);
        let output = Output { status, stdout: Vec::new(), stderr: "test_a ... ".into() };
        let error = format!("{:#}", Tests::of(&output).unwrap_err());
        assert!(error.contains("signal: 11") && error.contains("test_a"), "{error}");
    }

    #[test]
    fn exclusions_are_of_a_case_and_a_mount() {
        assert!(reason("memory", "test_fcntl_64_bit (test.test_fcntl.TestFcntl)").is_some());
        assert!(reason("native", "test_fcntl_64_bit (x)").is_none());
        assert!(reason("memory", "test_fcntl (x)").is_none());
    }
}
