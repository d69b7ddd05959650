//! The wheel for Python: built by maturin, installed into an environment of its own, and tested
//! there.
//!
//! The environment, `python/venv` in cargo's target directory, has the packages of
//! `python/requirements.txt` and nothing else.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};

use crate::command;
use crate::packages::RequiredTool;
use crate::parts::RunRecord;

/// Tools of the step.
pub const TOOLS: &[RequiredTool] = &[
    RequiredTool::package("python3", "python3"),
    // Without it, an environment has no pip.
    RequiredTool::package("python3-venv", "/usr/lib/python3*/ensurepip/__init__.py"),
    RequiredTool::package_for("glusterfs-server", "glusterd", "volumes of GlusterFS from Python"),
    RequiredTool::package_for(
        "libgfapi0",
        "/usr/lib/*/libgfapi.so.0",
        "volumes of GlusterFS from Python",
    ),
    RequiredTool::package_for("iproute2", "ip", "volumes of GlusterFS from Python"),
];

/// The versions of Python 3 for which the wheel must work.
const VERSIONS: std::ops::RangeInclusive<u32> = 9..=14;

/// Builds the wheel, and runs the tests of the package with the packages that it meets, and with
/// every Python of this machine.
pub fn test(parts: &mut RunRecord) -> Result<()> {
    let base = command::target_dir()?.join("python");
    let python = environment(&base)?;
    let wheel = build(&python, &base)?;
    install(&python, &wheel, None)?;
    // With a test of its package, the program has the features that it has in step `test`.
    let program = "build --workspace --lib --bin defuse --bin gluster_volumes --test messages";
    command::run(command::cargo().args(program.split(' ')))?;
    let mut tests = Command::new(&python);
    find_skip_reasons(&run_and_show(pytest(&mut tests, &base)?)?)
        .iter()
        .for_each(|why| parts.skip(why));
    test_volume(&python, &base)?;
    let plain = base.join("plain");
    if plain.exists() {
        fs::remove_dir_all(&plain)?;
    }
    install(&python, &wheel, Some(&plain))?;
    let mut missing = Vec::new();
    for version in VERSIONS {
        match interpreter(version) {
            Some(python) => {
                let mut tests = Command::new(python);
                run_and_show(tests.arg("python/tests/plain.py").env("PYTHONPATH", &plain))?;
            }
            None => missing.push(format!("3.{version}")),
        }
    }
    if !missing.is_empty() {
        parts.record_missing_part(&format!("there is no Python {}", missing.join(", ")));
    }
    Ok(())
}

/// Adds the arguments of the tests.
fn pytest<'a>(python: &'a mut Command, base: &Path) -> Result<&'a mut Command> {
    python.args(["-m", "pytest", "-q", "-rs", "--tb=short", "-p", "no:cacheprovider"]);
    python.arg("--basetemp").arg(base.join("files")).arg("python/tests");
    Ok(python.env("DEFUSE_PROGRAM", command::program_under_test()?))
}

/// Runs the tests that a volume of GlusterFS can have, with one. The preparation of the step names
/// the tools that are missing.
fn test_volume(python: &Path, base: &Path) -> Result<()> {
    if !command::is_root() || !TOOLS.iter().all(RequiredTool::is_there) {
        return Ok(());
    }
    let mut run = Command::new(command::program_under_test()?.with_file_name("gluster_volumes"));
    run.arg("run").arg(python).env("DEFUSE_VOLUME", "gluster://127.1.1.1/dist");
    run_and_show(pytest(&mut run, base)?.args(["-k", "gluster"])).map(drop)
}

/// Runs a program in the root of the project, shows what it says, and returns it.
fn run_and_show(program: &mut Command) -> Result<String> {
    program.current_dir(command::root()).env("PYTHONDONTWRITEBYTECODE", "1");
    let output = program.stdin(Stdio::null()).stderr(Stdio::inherit()).output();
    let output = output.with_context(|| format!("cannot start {}", command::line(program)))?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    print!("{text}");
    ensure!(output.status.success(), "`{}` ended with {}", command::line(program), output.status);
    Ok(text)
}

/// The reasons in the lines `SKIPPED [1] file: skipped: reason` of pytest.
fn find_skip_reasons(said: &str) -> Vec<String> {
    let lines = said.lines().filter(|line| line.starts_with("SKIPPED"));
    lines.map(|line| line.rsplit("skipped: ").next().unwrap_or(line).to_owned()).collect()
}

/// Makes the environment, unless there is one with the same packages, and returns its interpreter.
fn environment(base: &Path) -> Result<PathBuf> {
    let list = command::root().join("python/requirements.txt");
    let (venv, wanted) = (base.join("venv"), fs::read_to_string(&list)?);
    let (python, installed) = (venv.join("bin/python"), venv.join("requirements.txt"));
    if fs::read_to_string(&installed).is_ok_and(|list| list == wanted) {
        return Ok(python);
    }
    command::run(Command::new("python3").args(["-m", "venv", "--clear"]).arg(&venv))?;
    let mut pip = Command::new(&python);
    pip.args(["-m", "pip", "install", "--quiet", "--no-compile", "--only-binary=:all:"]);
    command::run(pip.args(["--require-hashes", "-r"]).arg(&list))?;
    fs::write(installed, wanted)?;
    Ok(python)
}

/// Builds the wheel of this checkout.
fn build(python: &Path, base: &Path) -> Result<PathBuf> {
    let wheels = base.join("wheels");
    if wheels.exists() {
        fs::remove_dir_all(&wheels)?;
    }
    let mut maturin = Command::new(python.with_file_name("maturin"));
    maturin
        .args(["build", "--quiet", "--manifest-path", "python/Cargo.toml", "--out"])
        .arg(&wheels);
    command::run(maturin.current_dir(command::root()))?;
    let found: Vec<PathBuf> =
        fs::read_dir(&wheels)?.map(|entry| Ok(entry?.path())).collect::<Result<_>>()?;
    match found.as_slice() {
        [wheel] if wheel.to_string_lossy().contains("-cp39-abi3-") => Ok(wheel.clone()),
        other => bail!("one wheel for all versions was expected: {other:?}"),
    }
}

/// Installs the wheel into the environment, or into a directory.
fn install(python: &Path, wheel: &Path, target: Option<&Path>) -> Result<()> {
    let mut pip = Command::new(python);
    pip.args(["-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-compile"]);
    match target {
        Some(target) => pip.arg("--target").arg(target),
        None => pip.arg("--force-reinstall"),
    };
    command::run(pip.arg(wheel))
}

/// An interpreter of this version that works: that of the system, or one of pyenv.
fn interpreter(version: u32) -> Option<PathBuf> {
    let name = format!("python3.{version}");
    let works = |program: &PathBuf| {
        let mut probe = Command::new(program);
        probe.args(["-c", ""]).stdout(Stdio::null()).stderr(Stdio::null());
        probe.status().is_ok_and(|status| status.success())
    };
    if let Some(found) = command::find(&name).filter(works) {
        return Some(found);
    }
    let versions = PathBuf::from(std::env::var_os("HOME")?).join(".pyenv/versions");
    let entries = fs::read_dir(versions).ok()?;
    entries.filter_map(|entry| Some(entry.ok()?.path().join("bin").join(&name))).find(works)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_reasons_of_pytest_are_found() {
        let said = "..s\nSKIPPED [2] python/tests/a.py:7: skipped: only root mounts\n1 passed\n";
        assert_eq!(find_skip_reasons(said), ["only root mounts"]);
        assert_eq!(find_skip_reasons("SKIPPED [1] a.py:3: other"), ["SKIPPED [1] a.py:3: other"]);
    }
}
