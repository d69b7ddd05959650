//! `cargo xtask test --quick`: the checks to run after each change of a crate, in about three
//! minutes.
//!
//! Formatting, structure and warnings of the whole workspace come first. Then the tests of the
//! changed crates run, and after them test programs of the crates that depend on those, the
//! shortest first, as long as there is time.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use super::times::RecordedTimes;
use crate::command;
use crate::parts::RunRecord;
use crate::workspace::{CargoPackage, packages};

/// The steps before the tests.
pub const CHECKS: &[&str] = &["fmt", "structure", "clippy"];

/// Time for the whole.
const BUDGET: Duration = Duration::from_secs(180);

/// The time that is assumed for a program without a record.
const UNKNOWN: Duration = Duration::from_secs(10);

/// Runs the tests of the changed crates, then the tests of their dependents until the time is over.
pub fn test(parts: &mut RunRecord) -> Result<()> {
    let deadline = Instant::now() + BUDGET.saturating_sub(parts.elapsed());
    let packages = packages()?;
    let changed = owners(&packages, &find_changed_files()?);
    if changed.is_empty() {
        println!("no crate differs from the last commit");
        return Ok(());
    }
    println!("changed crates: {}", names(&changed).join(", "));
    let times = RecordedTimes::load()?;
    let time_of = |program: &&str| times.time_of(program).unwrap_or(UNKNOWN);
    let left = || deadline.saturating_duration_since(Instant::now());

    let (mut own, mut left_out) = (Vec::new(), Vec::new());
    let mut reserved = Duration::ZERO;
    for program in shortest_first(&changed, time_of) {
        reserved += time_of(&program);
        if reserved <= left() { own.push(program) } else { left_out.push(program) }
    }
    let built = build_program(&packages)?;
    let mut cargo = command::cargo();
    cargo.env("DEFUSE_PROGRAM", &built).args(["test", "--no-fail-fast", "--bins"]);
    if changed.iter().any(|package| package.has_library) {
        cargo.arg("--lib");
    }
    cargo.args(names(&changed).iter().flat_map(|name| ["--package", name]));
    cargo.args(own.iter().flat_map(|program| ["--test", program]));
    let mut result = parts.run_tests_if_any(&mut cargo);

    for program in shortest_first(&dependents(&packages, &changed), time_of) {
        if result.is_err() || time_of(&program) > left() {
            left_out.push(program);
            continue;
        }
        // All of the workspace, so that dependencies have the features that they have in step
        // `test`.
        let mut cargo = command::cargo();
        cargo.env("DEFUSE_PROGRAM", &built);
        result = parts.run_tests(cargo.args(["test", "--workspace", "--test", program]));
    }
    if !left_out.is_empty() {
        println!("left to `cargo xtask test`: {}", left_out.join(", "));
    }
    result
}

/// Builds the program that tests start, as step `test` does. Tests of other packages would each
/// build another one.
fn build_program(packages: &[CargoPackage]) -> Result<PathBuf> {
    let program = packages.iter().find(|package| package.name == "defuse");
    let test =
        program.and_then(|package| package.tests.first()).context("a test of the program")?;
    command::run(command::cargo().args(["test", "--workspace", "--no-run", "--test", test]))?;
    command::program_under_test()
}

fn names<'a>(packages: &[&'a CargoPackage]) -> Vec<&'a str> {
    packages.iter().map(|package| &*package.name).collect()
}

/// The test programs of packages, each name once.
fn shortest_first<'a>(
    packages: &[&'a CargoPackage],
    time_of: impl Fn(&&str) -> Duration,
) -> Vec<&'a str> {
    let programs = packages.iter().flat_map(|package| &package.tests);
    let programs: BTreeSet<&str> = programs.map(String::as_str).collect();
    let mut programs: Vec<&str> = programs.into_iter().collect();
    programs.sort_by_key(time_of);
    programs
}

/// The packages with changed files.
fn owners<'a>(packages: &'a [CargoPackage], files: &[PathBuf]) -> Vec<&'a CargoPackage> {
    let owner = |file: &PathBuf| {
        let holders = packages.iter().filter(|package| file.starts_with(&package.dir));
        holders.max_by_key(|package| package.dir.components().count())
    };
    let owners: BTreeMap<&Path, &CargoPackage> =
        files.iter().filter_map(owner).map(|package| (&*package.dir, package)).collect();
    owners.into_values().collect()
}

/// The packages that depend on others, directly or not, without these.
fn dependents<'a>(packages: &'a [CargoPackage], on: &[&CargoPackage]) -> Vec<&'a CargoPackage> {
    let mut reached: BTreeSet<&Path> = on.iter().map(|package| &*package.dir).collect();
    let mut found = Vec::new();
    loop {
        let next = packages.iter().find(|package| {
            !reached.contains(&*package.dir)
                && package.needs.iter().any(|need| reached.contains(&**need))
        });
        let Some(next) = next else { return found };
        reached.insert(&next.dir);
        found.push(next);
    }
}

/// Files that differ from the last commit, with new ones, relative to the root of the project. The
/// files of the last commit if none differs.
fn find_changed_files() -> Result<Vec<PathBuf>> {
    let git = |arguments: &[&str]| {
        command::output(Command::new("git").current_dir(command::root()).args(arguments))
    };
    let mut said = git(&["diff", "--name-only", "--relative", "HEAD"])?;
    said += &git(&["ls-files", "--others", "--exclude-standard"])?;
    if said.is_empty() {
        said = git(&["diff", "--name-only", "--relative", "HEAD~1", "HEAD"])?;
    }
    Ok(said.lines().map(PathBuf::from).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn example() -> Vec<CargoPackage> {
        let package = |dir: &str, needs: &[&str], tests: &[&str]| CargoPackage {
            name: dir.replace('/', "-"),
            dir: dir.into(),
            needs: needs.iter().map(PathBuf::from).collect(),
            has_library: true,
            tests_with_features: Vec::new(),
            tests: tests.iter().map(|&test| test.to_owned()).collect(),
        };
        vec![
            package("fs", &[], &["model"]),
            package("session", &["fs"], &["session", "pool"]),
            package("cli", &["session"], &["run"]),
            package("cli/command", &[], &["pages"]),
        ]
    }

    #[test]
    fn a_file_belongs_to_the_innermost_crate() {
        let packages = example();
        let changed = |files: &[&str]| {
            let files: Vec<PathBuf> = files.iter().map(PathBuf::from).collect();
            names(&owners(&packages, &files)).join(" ")
        };
        assert_eq!(changed(&["cli/command/src/lib.rs", "docs/semantics.md"]), "cli-command");
        assert_eq!(changed(&["fs/src/lib.rs", "fs/tests/model.rs", "cli/src/main.rs"]), "cli fs");
        assert_eq!(changed(&["README.md"]), "");
    }

    #[test]
    fn dependents_are_found_through_others() {
        let packages = example();
        assert_eq!(names(&dependents(&packages, &[&packages[0]])), ["session", "cli"]);
        assert_eq!(names(&dependents(&packages, &[&packages[3]])), [] as [&str; 0]);
    }

    #[test]
    fn the_shortest_programs_come_first() {
        let packages = example();
        let all: Vec<&CargoPackage> = packages.iter().collect();
        let by_length = shortest_first(&all, |name| Duration::from_secs(name.len() as u64));
        assert_eq!(by_length, ["run", "pool", "model", "pages", "session"]);
    }

    #[test]
    fn this_workspace_is_read() {
        let packages = packages().unwrap();
        let of = |name: &str| packages.iter().find(|package| package.name == name).unwrap();
        assert!(of("xtask").tests.contains(&"structure".to_owned()) && !of("xtask").has_library);
        assert!(of("defuse-preload").has_library);
        assert!(names(&dependents(&packages, &[of("defuse-fs")])).contains(&"defuse"));
        find_changed_files().unwrap();
    }
}
