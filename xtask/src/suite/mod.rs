//! `cargo xtask test`: the steps that decide whether a change lands.

mod limit;
mod steps;

use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::Result;

use crate::command;
use crate::packages::{self, Tool};
use steps::{Run, STEPS, Step, When};

/// Check everything that decides whether a change lands
#[derive(clap::Args)]
pub struct TestArgs {
    /// Only these steps
    steps: Vec<String>,
    /// Long steps too
    #[arg(long, conflicts_with = "steps")]
    full: bool,
    /// List the steps, and leave
    #[arg(long)]
    list: bool,
}

/// What a step of every run may take. The longest takes a third of it on a loaded machine.
const PATIENCE: Duration = Duration::from_secs(25 * 60);

/// What became of a step.
enum Outcome {
    Passed,
    Failed(String),
    Skipped(String),
}

struct Report {
    step: &'static Step,
    outcome: Outcome,
    took: Duration,
}

/// Runs the steps that are asked for, all of them even where one fails.
pub fn run(args: &TestArgs) -> Result<ExitCode> {
    if args.list {
        list();
        return Ok(ExitCode::SUCCESS);
    }
    let chosen = choose(args)?;
    prepare(&chosen);
    let reports: Vec<Report> = chosen.into_iter().map(perform).collect();
    summarize(&reports);
    let failed = reports.iter().any(|report| matches!(report.outcome, Outcome::Failed(_)));
    Ok(if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

fn list() {
    for step in STEPS {
        let when = if step.when == When::Full { " (with --full)" } else { "" };
        println!("{:<12} {}{when}", step.name, step.what);
    }
}

fn choose(args: &TestArgs) -> Result<Vec<&'static Step>> {
    if args.steps.is_empty() {
        return Ok(STEPS.iter().filter(|step| args.full || step.when == When::Always).collect());
    }
    let find = |name: &String| {
        let step = STEPS.iter().find(|step| step.name == name);
        step.ok_or_else(|| anyhow::anyhow!("there is no step {name}: see cargo xtask test --list"))
    };
    args.steps.iter().map(find).collect()
}

/// Installs what the steps need, and says what will be left out.
fn prepare(steps: &[&Step]) {
    let mut tools: Vec<Tool> = Vec::new();
    for tool in steps.iter().flat_map(|step| step.tools) {
        if !tools.contains(tool) {
            tools.push(*tool);
        }
    }
    packages::provide(&tools);
    for tool in tools.iter().filter(|tool| !tool.is_there()) {
        if let Some(part) = tool.part {
            println!("left out without {}: {part}", tool.name);
        }
    }
    if !command::is_root() {
        println!("left out without root: every test that mounts");
    } else if !std::path::Path::new("/dev/fuse").exists() {
        println!("left out without /dev/fuse (modprobe fuse): every test that mounts FUSE");
    }
}

fn perform(step: &'static Step) -> Report {
    println!("\n==== {}: {}", step.name, step.what);
    let begun = Instant::now();
    let limit = (step.when == When::Always).then(|| limit::Limit::new(step.name, PATIENCE));
    let outcome = attempt(step);
    drop(limit);
    let took = begun.elapsed();
    println!("---- {}: {} ({:.1} s)", step.name, word(&outcome), took.as_secs_f64());
    Report { step, outcome, took }
}

fn attempt(step: &Step) -> Outcome {
    let missing = step.tools.iter().find(|tool| tool.part.is_none() && !tool.is_there());
    if let Some(tool) = missing {
        return Outcome::Skipped(format!("{} is missing: {}", tool.name, tool.by_hand()));
    }
    let outcome = match step.run {
        Run::Cargo(arguments) => {
            command::run(command::cargo().args(arguments).envs(step.env.iter().copied()))
        }
        Run::Call(call) => call(),
    };
    match outcome {
        Ok(()) => Outcome::Passed,
        Err(error) => Outcome::Failed(format!("{error:#}")),
    }
}

fn word(outcome: &Outcome) -> String {
    match outcome {
        Outcome::Passed => "passed".to_owned(),
        Outcome::Failed(why) => format!("FAILED: {why}"),
        Outcome::Skipped(why) => format!("skipped: {why}"),
    }
}

fn summarize(reports: &[Report]) {
    println!("\n==== summary");
    for Report { step, outcome, took } in reports {
        println!("{:<12} {:>7.1} s  {}", step.name, took.as_secs_f64(), word(outcome));
    }
    let count = |is: fn(&Outcome) -> bool| reports.iter().filter(|r| is(&r.outcome)).count();
    let skipped = count(|outcome| matches!(outcome, Outcome::Skipped(_)));
    if skipped > 0 {
        println!("{skipped} skipped");
    }
    let failed = reports.iter().filter(|report| matches!(report.outcome, Outcome::Failed(_)));
    let failed: Vec<_> = failed.map(|report| report.step.name).collect();
    if !failed.is_empty() {
        println!("run what failed again with `cargo xtask test {}`", failed.join(" "));
    }
    let passed = count(|outcome| matches!(outcome, Outcome::Passed));
    println!("{passed} passed, {} failed", failed.len());
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args(steps: &[&str], full: bool) -> TestArgs {
        TestArgs { steps: steps.iter().map(|&step| step.into()).collect(), full, list: false }
    }

    #[test]
    fn every_step_has_a_name_of_its_own() {
        for (place, step) in STEPS.iter().enumerate() {
            assert!(!STEPS[..place].iter().any(|other| other.name == step.name), "{}", step.name);
        }
    }

    #[test]
    fn long_steps_run_when_asked_for() {
        let usual = choose(&args(&[], false)).unwrap();
        assert!(usual.iter().all(|step| step.when == When::Always) && !usual.is_empty());
        assert_eq!(choose(&args(&[], true)).unwrap().len(), STEPS.len());
        assert_eq!(choose(&args(&["demo", "fmt"], false)).unwrap()[0].name, "demo");
        assert!(choose(&args(&["no-such-step"], false)).is_err());
    }
}
