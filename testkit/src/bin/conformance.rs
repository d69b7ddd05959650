//! Runs suites on mounts of the program and on native ext4, and prints a table.
//!
//! `conformance [--quick] [--clients N] [--suite NAME]... [--configs NAME,NAME*...]`. With several
//! clients, each runs the suites at once with the others, in a directory of its own of one server.
//! Exits with 0 if all failures also occur on native ext4 or are in the table of exclusions, 1
//! otherwise, and 2 for a wrong command line or if mounting is not possible.

use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use defuse_testkit::suites::{
    CONFIGS, ConformanceSuite, HEAD, RUNS, SERVED, StageConfig, SuiteRow, VOLUMES, exercise,
    posix_cases, run_by_clients,
};
use defuse_testkit::{gluster, mounted};

const USAGE: &str = "usage: conformance [--quick] [--clients N] [--suite pjdfstest|fsx|posix|programs|file|tree]... \
                     [--configs NAME,NAME*...]";

struct SuiteSelection {
    quick: bool,
    clients: usize,
    suites: Vec<ConformanceSuite>,
    configs: Vec<&'static StageConfig>,
}

fn main() -> ExitCode {
    let arguments: Vec<_> = std::env::args().collect();
    if let [_, option, dir, config] = arguments.as_slice()
        && option == "--cases"
    {
        posix_cases(Path::new(dir), config);
        return ExitCode::SUCCESS;
    }
    if let [_, option, words @ ..] = arguments.as_slice()
        && option == "--exercise"
    {
        return match exercise::run_inside(words) {
            Ok(said) => {
                print!("{said}");
                ExitCode::SUCCESS
            }
            Err(error) => {
                eprintln!("{error:#}");
                ExitCode::FAILURE
            }
        };
    }
    let wanted = match parse(std::env::args().skip(1)) {
        Ok(wanted) => wanted,
        Err(error) => {
            eprintln!("conformance: {error}\n{USAGE}");
            return ExitCode::from(2);
        }
    };
    if let Some(reason) = mounted::unavailable_reason() {
        eprintln!("conformance: {reason}");
        return ExitCode::from(2);
    }
    match run_all(&wanted) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("conformance: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn parse(mut args: impl Iterator<Item = String>) -> Result<SuiteSelection> {
    let (mut quick, mut clients, mut suites, mut patterns) = (false, 1, Vec::new(), Vec::new());
    while let Some(arg) = args.next() {
        let mut value = || args.next().with_context(|| format!("{arg} needs a value"));
        match arg.as_str() {
            "--quick" => quick = true,
            "--clients" => {
                clients = value()?
                    .parse()
                    .ok()
                    .filter(|&clients| clients > 0)
                    .context("--clients needs a number from 1 on")?;
            }
            "--suite" => {
                let name = value()?;
                let found = ConformanceSuite::ALL.iter().find(|(known, _)| *known == name);
                suites.push(found.with_context(|| format!("there is no suite {name}"))?.1);
            }
            "--configs" => patterns.extend(value()?.split(',').map(str::to_owned)),
            _ => bail!("there is no option {arg}"),
        }
    }
    if suites.is_empty() {
        suites.extend(ConformanceSuite::ALL.map(|(_, suite)| suite));
    }
    let configs = configs(&patterns)?;
    let alone = configs.iter().find(|config| clients > 1 && !config.is_shared());
    if let Some(config) = alone {
        bail!("{} has one client: name configurations that are shared", config.name);
    }
    Ok(SuiteSelection { quick, clients, suites, configs })
}

fn configs(patterns: &[String]) -> Result<Vec<&'static StageConfig>> {
    let fits = |config: &StageConfig, pattern: &str| match pattern.strip_suffix('*') {
        Some(start) => config.name.starts_with(start),
        None => config.name == pattern,
    };
    let known = |pattern: &String| pattern == "native" || iter_all().any(|c| fits(c, pattern));
    if let Some(pattern) = patterns.iter().find(|pattern| !known(pattern)) {
        let names: Vec<&str> = iter_all().map(|config| config.name).collect();
        bail!("there is no configuration {pattern}, but {}", names.join(", "));
    }
    // Without GlusterFS, its configurations run only if they are named, and report what is missing.
    let by_default =
        |config: &StageConfig| !config.needs_servers() || gluster::unavailable_reason().is_none();
    let is_named = |config: &StageConfig| patterns.iter().any(|pattern| fits(config, pattern));
    let wanted = |config: &&StageConfig| {
        if patterns.is_empty() { by_default(config) } else { is_named(config) }
    };
    Ok(iter_all().filter(wanted).collect())
}

fn iter_all() -> impl Iterator<Item = &'static StageConfig> {
    CONFIGS.iter().chain(RUNS).chain(std::iter::once(&SERVED)).chain(VOLUMES)
}

fn run_all(wanted: &SuiteSelection) -> Result<bool> {
    let mut table = Vec::new();
    for suite in &wanted.suites {
        suite.install()?;
        let fits = |config: &&&StageConfig| suite.runs_on(config);
        let configs: Vec<_> = wanted.configs.iter().filter(fits).copied().collect();
        table.extend(run_by_clients(
            *suite,
            &configs,
            (wanted.clients, wanted.quick),
            &mut report,
        )?);
    }
    println!("\n{HEAD}");
    for row in &table {
        println!("{row}");
    }
    Ok(table.iter().all(|row| row.unexpected.is_empty()))
}

fn report(row: &SuiteRow) {
    println!("{HEAD}\n{row}");
    for (case, how) in &row.tally.failed {
        let new = row.unexpected.iter().any(|(name, _)| name == case);
        let word = if new { "FAILED" } else { "known " };
        println!("    {word} {case}: {how}");
    }
}
