//! `cargo xtask test`: the steps that decide whether a change lands.

mod limit;
mod quick;
mod space;
pub mod steps;
mod times;

use std::process::{Child, ExitCode};
use std::time::{Duration, Instant};

use anyhow::Result;

use crate::command;
use crate::packages::{self, RequiredTool};
use crate::parts::{OmittedPart, RunRecord, TestFailure};
pub use steps::list_packages;
use steps::{STEPS, StepAction, StepSchedule, TestStep};
use times::RecordedTimes;

/// Check everything that decides whether a change lands
#[derive(clap::Args)]
pub struct TestArgs {
    /// Only these steps
    steps: Vec<String>,
    /// Include long steps
    #[arg(long, conflicts_with = "steps")]
    full: bool,
    /// Only the quick checks and the tests of the changed crates, in about three minutes
    #[arg(long, conflicts_with_all = ["steps", "full"])]
    quick: bool,
    /// List the steps, and exit
    #[arg(long)]
    list: bool,
}

/// Time limit of a regular step. The longest builds and runs all tests.
const PATIENCE: Duration = Duration::from_secs(40 * 60);

/// The step before which nothing is built ahead: it leaves no time of the processors.
const BUSIEST: &str = "test";

/// The result of a step.
enum StepOutcome {
    Passed,
    Failed(String),
    Skipped(String),
}

struct StepReport {
    step: &'static TestStep,
    outcome: StepOutcome,
    took: Duration,
}

/// Runs the requested steps, all of them even if one fails.
pub fn run(args: &TestArgs) -> Result<ExitCode> {
    if args.list {
        list();
        return Ok(ExitCode::SUCCESS);
    }
    let chosen = choose(args)?;
    let mut parts = RunRecord::default();
    space::warn(space::RUN);
    prepare(&chosen, &mut parts);
    let mut ahead = Vec::new();
    let mut reports = Vec::new();
    for (place, step) in chosen.iter().enumerate() {
        reports.push(perform(step, &mut parts));
        if step.name == BUSIEST {
            ahead = begin(&chosen[place + 1..]);
        }
    }
    end(ahead);
    say_failures(parts.failures());
    times::print_longest(parts.times());
    if let Err(error) = RecordedTimes::load().and_then(|mut times| times.add(parts.times())) {
        println!("the times of the test programs are not recorded: {error:#}");
    }
    summarize(&reports);
    let strict = is_strict(std::env::var("CI").ok().as_deref());
    say_left_out(&parts, strict);
    let passes = passes(reports.iter().map(|report| &report.outcome), &parts, strict);
    if !passes {
        space::warn(space::REST);
    }
    Ok(if passes { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// True if no step failed and, in a strict run, nothing was left out that this machine could do.
fn passes<'a>(
    mut outcomes: impl Iterator<Item = &'a StepOutcome>,
    parts: &RunRecord,
    strict: bool,
) -> bool {
    let failed = outcomes.any(|outcome| matches!(outcome, StepOutcome::Failed(_)));
    let incomplete = strict && !parts.omitted_parts(true).is_empty();
    !failed && !incomplete
}

/// True if `CI` is set to a true value. Then only parts that this kernel cannot do may be left out.
fn is_strict(ci: Option<&str>) -> bool {
    ci.is_some_and(|value| !["", "0", "false"].contains(&value))
}

fn list() {
    for step in STEPS {
        let when = match step.when {
            StepSchedule::Always => "",
            StepSchedule::Full => " (with --full)",
            StepSchedule::Quick => " (with --quick)",
        };
        println!("{:<12} {}{when}", step.name, step.what);
    }
}

fn choose(args: &TestArgs) -> Result<Vec<&'static TestStep>> {
    let all =
        |chosen: fn(&TestStep) -> bool| Ok(STEPS.iter().filter(|step| chosen(step)).collect());
    match (args.quick, args.full) {
        (true, _) => {
            return all(|step| {
                step.when == StepSchedule::Quick || quick::CHECKS.contains(&step.name)
            });
        }
        (_, true) => return all(|step| step.when != StepSchedule::Quick),
        _ if args.steps.is_empty() => return all(|step| step.when == StepSchedule::Always),
        _ => {}
    }
    let find = |name: &String| {
        let step = STEPS.iter().find(|step| step.name == name);
        step.ok_or_else(|| anyhow::anyhow!("there is no step {name}: see cargo xtask test --list"))
    };
    args.steps.iter().map(find).collect()
}

/// Installs the tools that the steps need, and prints what will be left out.
fn prepare(steps: &[&TestStep], parts: &mut RunRecord) {
    let mut tools: Vec<RequiredTool> = Vec::new();
    for tool in steps.iter().flat_map(|step| step.tools) {
        if !tools.contains(tool) {
            tools.push(*tool);
        }
    }
    packages::provide(&tools);
    parts.begin("preparation");
    for tool in tools.iter().filter(|tool| !tool.is_there()) {
        if let Some(part) = tool.part {
            parts.skip(&format!("{part}: {} is missing ({})", tool.name, tool.install_command()));
        }
    }
    if tools.is_empty() {
        return;
    }
    if !command::is_root() {
        parts.skip("every test that mounts: only root may");
    } else if !std::path::Path::new("/dev/fuse").exists() {
        parts.skip("every test that mounts FUSE: there is no /dev/fuse (modprobe fuse)");
    }
}

/// Begins the builds of steps that come later.
fn begin(steps: &[&TestStep]) -> Vec<Child> {
    let builds = steps.iter().filter_map(|step| Some((step.name, step.ahead?)));
    let begun = builds.filter_map(|(name, build)| {
        build().inspect_err(|error| println!("{name} is not built ahead: {error:#}")).ok()
    });
    begun.collect()
}

/// Ends builds that no step has waited for.
fn end(builds: Vec<Child>) {
    for mut build in builds {
        let _ = build.kill();
        let _ = build.wait();
    }
}

fn perform(step: &'static TestStep, parts: &mut RunRecord) -> StepReport {
    println!("\n==== {}: {}", step.name, step.what);
    let begun = Instant::now();
    let limit =
        (step.when == StepSchedule::Always).then(|| limit::StepTimeLimit::new(step.name, PATIENCE));
    parts.begin(step.name);
    let outcome = attempt(step, parts);
    drop(limit);
    let took = begun.elapsed();
    println!("---- {}: {} ({:.1} s)", step.name, word(&outcome), took.as_secs_f64());
    StepReport { step, outcome, took }
}

fn attempt(step: &TestStep, parts: &mut RunRecord) -> StepOutcome {
    let missing = step.tools.iter().find(|tool| tool.part.is_none() && !tool.is_there());
    if let Some(tool) = missing {
        let why = format!("{} is missing: {}", tool.name, tool.install_command());
        parts.skip(&why);
        return StepOutcome::Skipped(why);
    }
    let outcome = match step.run {
        StepAction::Cargo(arguments) => {
            let mut cargo = command::cargo();
            cargo.args(arguments).envs(step.env.iter().copied());
            if arguments[0] == "test" {
                parts.run_tests(&mut cargo)
            } else {
                command::run(&mut cargo)
            }
        }
        StepAction::Call(call) => call(parts),
    };
    match outcome {
        Ok(()) => StepOutcome::Passed,
        Err(error) => StepOutcome::Failed(format!("{error:#}")),
    }
}

fn word(outcome: &StepOutcome) -> String {
    match outcome {
        StepOutcome::Passed => "passed".to_owned(),
        StepOutcome::Failed(why) => format!("FAILED: {why}"),
        StepOutcome::Skipped(why) => format!("skipped: {why}"),
    }
}

/// Prints the tests that failed, with their last words. They come late, because a reader of a long
/// run begins at its end.
fn say_failures(failures: &[TestFailure]) {
    for TestFailure { step, test, passed_later } in failures {
        let later = if *passed_later { ", and passed at the second attempt" } else { "" };
        println!("\n==== failed: {step}: {}{later}", test.name);
        test.said.iter().for_each(|line| println!("{line}"));
    }
}

fn summarize(reports: &[StepReport]) {
    println!("\n==== summary");
    for StepReport { step, outcome, took } in reports {
        println!("{:<12} {:>7.1} s  {}", step.name, took.as_secs_f64(), word(outcome));
    }
    let count = |is: fn(&StepOutcome) -> bool| reports.iter().filter(|r| is(&r.outcome)).count();
    let skipped = count(|outcome| matches!(outcome, StepOutcome::Skipped(_)));
    if skipped > 0 {
        println!("{skipped} skipped");
    }
    let failed = reports.iter().filter(|report| matches!(report.outcome, StepOutcome::Failed(_)));
    let failed: Vec<_> = failed.map(|report| report.step.name).collect();
    if !failed.is_empty() {
        println!("run what failed again with `cargo xtask test {}`", failed.join(" "));
    }
    let passed = count(|outcome| matches!(outcome, StepOutcome::Passed));
    println!("{passed} passed, {} failed", failed.len());
}

/// Prints the last lines: the parts that were left out, and the consequence.
fn say_left_out(parts: &RunRecord, strict: bool) {
    let not_here = parts.omitted_parts(false);
    if !not_here.is_empty() {
        println!("{} parts cannot run on this machine, whatever is installed:", not_here.len());
        say_each(&not_here);
    }
    let left_out = parts.omitted_parts(true);
    let meaning = match (left_out.is_empty(), strict) {
        (true, _) => "",
        (false, true) => ", which fails the run because CI is set:",
        (false, false) => " (with CI set, that fails the run):",
    };
    println!("{} parts left out{meaning}", left_out.len());
    say_each(&left_out);
}

fn say_each(parts: &[&OmittedPart]) {
    for part in parts {
        println!("  {}: {}", part.place, part.why);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args(steps: &[&str], full: bool) -> TestArgs {
        let steps = steps.iter().map(|&step| step.into()).collect();
        TestArgs { steps, full, quick: false, list: false }
    }

    #[test]
    fn every_step_has_a_unique_name() {
        for (place, step) in STEPS.iter().enumerate() {
            assert!(!STEPS[..place].iter().any(|other| other.name == step.name), "{}", step.name);
        }
    }

    #[test]
    fn what_is_built_ahead_comes_after_the_step_that_leaves_no_time() {
        let busiest = STEPS.iter().position(|step| step.name == BUSIEST).unwrap();
        let ahead = STEPS.iter().rposition(|step| step.ahead.is_some()).unwrap();
        assert!(STEPS[..=busiest].iter().all(|step| step.ahead.is_none()) && ahead > busiest);
    }

    #[test]
    fn packages_and_toolchain_components_are_distinguished() {
        let names = steps::list_packages();
        assert!(names.contains(&"libpython3.*-testsuite") && names.contains(&"git"), "{names:?}");
        assert!(!names.contains(&"rustfmt"), "{names:?}");
    }

    /// A run in which one unknown package name had left out a third of the tests was green.
    #[test]
    fn left_out_parts_fail_the_run_if_ci_is_set() {
        assert!(is_strict(Some("true")) && is_strict(Some("1")));
        assert!(!is_strict(None) && !is_strict(Some("")) && !is_strict(Some("false")));
        let verdict = |outcome: &StepOutcome, parts: &RunRecord| {
            [false, true].map(|strict| passes(std::iter::once(outcome), parts, strict))
        };
        let mut parts = RunRecord::silent();
        parts.begin("test");
        let (passed, failed) = (StepOutcome::Passed, StepOutcome::Failed("no".to_owned()));
        assert_eq!(verdict(&passed, &parts), [true, true]);
        assert_eq!(verdict(&failed, &parts), [false, false]);
        parts.record_missing_part("this kernel has none");
        assert_eq!(verdict(&passed, &parts), [true, true]);
        parts.skip("bindfs is missing");
        assert_eq!(verdict(&passed, &parts), [true, false]);
    }

    #[test]
    fn long_steps_run_when_asked_for() {
        let usual = choose(&args(&[], false)).unwrap();
        assert!(usual.iter().all(|step| step.when == StepSchedule::Always) && !usual.is_empty());
        assert_eq!(choose(&args(&[], true)).unwrap().len(), STEPS.len() - 1);
        let quick = choose(&TestArgs { quick: true, ..args(&[], false) }).unwrap();
        let names: Vec<_> = quick.iter().map(|step| step.name).collect();
        assert_eq!(names, ["fmt", "structure", "clippy", "quick"]);
        assert_eq!(choose(&args(&["demo", "fmt"], false)).unwrap()[0].name, "demo");
        assert!(choose(&args(&["no-such-step"], false)).is_err());
    }
}
