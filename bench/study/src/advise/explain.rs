//! The explanation as text. Every sentence is based on a figure.

use std::fmt::Write as _;

use defuse_probe::{Op, RequestStage, StatsSnapshot};

use super::{AdviceResults, CommandRun, candidates};

/// The cost of requests of one type.
#[derive(Debug, Clone, PartialEq)]
pub struct RequestCost {
    /// The type.
    pub op: Op,
    /// Number of requests.
    pub count: u64,
    /// Total time in the daemon, in nanoseconds; in kernel and daemon if the kernel was traced.
    pub sum_ns: u64,
}

/// The request types of a run, the most expensive first.
pub fn list_costs(run: &CommandRun) -> Vec<RequestCost> {
    let (snapshot, stage) = match (&run.kernel, &run.daemon) {
        (Some(kernel), _) if has_stage(kernel, RequestStage::Total) => {
            (kernel, RequestStage::Total)
        }
        (_, Some(daemon)) => (daemon, RequestStage::User),
        _ => return Vec::new(),
    };
    let of_stage =
        snapshot.ops.iter().filter(|stats| stats.stage == stage && stats.latency.count > 0);
    let mut costs: Vec<RequestCost> = of_stage
        .map(|stats| RequestCost {
            op: stats.op,
            count: stats.latency.count,
            sum_ns: stats.latency.sum_ns,
        })
        .collect();
    costs.sort_by_key(|cost| std::cmp::Reverse(cost.sum_ns));
    costs
}

fn has_stage(snapshot: &StatsSnapshot, stage: RequestStage) -> bool {
    snapshot.ops.iter().any(|stats| stats.stage == stage)
}

/// The advice as text.
pub fn explain(advice: &AdviceResults) -> String {
    let mut text = String::new();
    times(&mut text, advice);
    if let Some(run) = advice.mounted.median_run() {
        requests(&mut text, run);
        cpu(&mut text, advice, run);
    }
    write_tried_options(&mut text, advice);
    if advice.exit_code != 0 {
        let _ =
            writeln!(text, "The command ended with {} each time, natively too.", advice.exit_code);
    }
    let state = if advice.changes_files {
        "The command changes files: every run had a fresh copy of the directory."
    } else {
        "The command changes no files: all runs shared one copy of the directory."
    };
    let _ = writeln!(text, "{state}");
    text
}

fn times(text: &mut String, advice: &AdviceResults) {
    let (native, mounted) = (advice.native.seconds(), advice.mounted.seconds());
    let change = 100.0 * (mounted / native.max(1e-9) - 1.0);
    let noise = spread(&advice.native.runs).max(spread(&advice.mounted.runs));
    let verdict = if advice.mounted.is_slower_than(&advice.native) {
        format!("{change:.0} % longer")
    } else if advice.native.is_slower_than(&advice.mounted) {
        format!("{:.0} % shorter", -change)
    } else {
        "no difference above the noise".to_owned()
    };
    let name = &advice.mounted.name;
    let _ = writeln!(
        text,
        "natively {}, on {name} {}: {verdict} (median of {} runs, spread {noise:.0} %).",
        seconds(native),
        seconds(mounted),
        advice.mounted.runs.len()
    );
}

/// Half the difference of the slowest and the fastest run, in per cent of the median.
fn spread(runs: &[CommandRun]) -> f64 {
    let seconds: Vec<f64> = runs.iter().map(|run| run.seconds).collect();
    let (least, most) =
        seconds.iter().fold((f64::MAX, f64::MIN), |(a, b), &x| (a.min(x), b.max(x)));
    crate::report::median(&seconds).map_or(0.0, |median| 50.0 * (most - least) / median.max(1e-9))
}

fn requests(text: &mut String, run: &CommandRun) {
    let costs = list_costs(run);
    let count: u64 = costs.iter().map(|cost| cost.count).sum();
    if count == 0 {
        let why = if run.daemon.is_none() && run.kernel.is_none() {
            "Requests were not counted: the mount belongs to another program, and only root may trace the kernel."
        } else {
            "The mount got no request: the kernel answered everything from its caches."
        };
        let _ = writeln!(text, "{why}");
        return;
    }
    let sum_ns: u64 = costs.iter().map(|cost| cost.sum_ns).sum();
    let whole = run.kernel.as_ref().is_some_and(|kernel| has_stage(kernel, RequestStage::Total));
    let place = if whole { "from creation to reply" } else { "in the daemon" };
    let _ = writeln!(text, "{count} requests took {} {place}:", seconds(sum_ns as f64 / 1e9));
    for cost in costs.iter().filter(|cost| cost.sum_ns * 50 >= sum_ns).take(8) {
        let _ = writeln!(
            text,
            "  {:<12} {:>8} x {:>7.1} us = {:>9}, {:>3.0} %{}",
            cost.op.to_string(),
            cost.count,
            cost.sum_ns as f64 / 1e3 / cost.count as f64,
            seconds(cost.sum_ns as f64 / 1e9),
            100.0 * cost.sum_ns as f64 / sum_ns.max(1) as f64,
            stages(run, cost)
        );
    }
}

/// The stages in which a type of request spent its time, if the kernel was traced.
fn stages(run: &CommandRun, cost: &RequestCost) -> String {
    let Some(kernel) = &run.kernel else { return String::new() };
    let sum = |snapshot: &StatsSnapshot, stage| {
        snapshot.get_stage(stage, cost.op).map_or(0, |stats| stats.latency.sum_ns)
    };
    let queued = sum(kernel, RequestStage::Background) + sum(kernel, RequestStage::Pending);
    let processing = sum(kernel, RequestStage::Processing);
    if queued + processing == 0 {
        return String::new();
    }
    let user = run.daemon.as_ref().map_or(0, |daemon| sum(daemon, RequestStage::User));
    let share = |ns: u64| 100.0 * ns as f64 / (queued + processing) as f64;
    match user {
        0 => {
            format!(" ({:.0} % waiting, {:.0} % with the daemon)", share(queued), share(processing))
        }
        _ => format!(
            " ({:.0} % waiting, {:.0} % in the file system)",
            share(queued),
            share(user.min(processing))
        ),
    }
}

fn cpu(text: &mut String, advice: &AdviceResults, run: &CommandRun) {
    let Some(native) = advice.native.median_run() else { return };
    let ms = |ns: u64| format!("{:.0} ms", ns as f64 / 1e6);
    let _ = writeln!(
        text,
        "CPU time of the command: natively {}, on the mount {}; of the daemon: {}.",
        ms(native.app_ns),
        ms(run.app_ns),
        ms(run.daemon_ns)
    );
}

fn write_tried_options(text: &mut String, advice: &AdviceResults) {
    if advice.tried.is_empty() {
        let none = if advice.mounted.seconds() <= advice.native.seconds() {
            "Nothing was tried, because the mount is not slower."
        } else {
            "No further option could reduce these requests."
        };
        let _ = writeln!(text, "{none}");
        return;
    }
    let _ = writeln!(text, "Tried, because of these requests:");
    for tried in &advice.tried {
        let change = 100.0 * (tried.with.seconds() / tried.without.seconds().max(1e-9) - 1.0);
        let (before, after) = (count(&tried.without.runs), count(&tried.with.runs));
        let outcome = if tried.without.is_slower_than(&tried.with) && after < before {
            format!("helps: {:.0} % shorter", -change)
        } else if tried.with.is_slower_than(&tried.without) {
            format!("makes it worse: {change:.0} % longer")
        } else if after >= before {
            "does not help: there are as many requests".into()
        } else {
            "saves no time above the noise".into()
        };
        let _ = writeln!(
            text,
            "  -o {}: {outcome} ({}, {before} requests became {after}). {}; needs: {}.",
            tried.candidate.option,
            seconds(tried.with.seconds()),
            tried.candidate.because,
            tried.candidate.needs
        );
    }
}

/// Number of requests of the first run, as counts hardly differ between runs.
fn count(runs: &[CommandRun]) -> u64 {
    runs.first()
        .map_or(0, |run| Op::ALL.iter().map(|&op| candidates::count_requests(run, op).0).sum())
}

fn seconds(seconds: f64) -> String {
    if seconds < 1.0 { format!("{:.1} ms", seconds * 1e3) } else { format!("{seconds:.2} s") }
}

#[cfg(test)]
mod tests {
    use super::super::{CandidateOption, OptionTrial, RunSeries};
    use super::*;
    use defuse_probe::Recorder;

    fn run(seconds: f64, ops: &[(Op, u64, u64)]) -> CommandRun {
        let recorder = Recorder::new();
        let cells = recorder.cells();
        for &(op, count, ns) in ops {
            (0..count).for_each(|_| cells.record(op, ns, true));
        }
        CommandRun {
            seconds,
            daemon: Some(recorder.snapshot()),
            app_ns: 5_000_000,
            daemon_ns: 7_000_000,
            ..CommandRun::default()
        }
    }

    fn series(name: &str, runs: Vec<CommandRun>) -> RunSeries {
        RunSeries { name: name.into(), runs }
    }

    fn advice(mounted: Vec<CommandRun>, tried: Vec<OptionTrial>) -> AdviceResults {
        AdviceResults {
            native: series("native", vec![run(1.0, &[]), run(1.0, &[])]),
            mounted: series("default", mounted),
            tried,
            exit_code: 0,
            changes_files: false,
            kernel_stages: String::new(),
        }
    }

    #[test]
    fn the_text_matches_the_figures() {
        let slow = run(1.5, &[(Op::LOOKUP, 300, 10_000), (Op::READ, 10, 100_000)]);
        let candidate = CandidateOption {
            option: "timeout=60".into(),
            because: "300 ask".into(),
            needs: "care".into(),
        };
        let with = series("default+", vec![run(1.2, &[(Op::READ, 10, 100_000)])]);
        let without = series("default", vec![slow.clone()]);
        let tried = OptionTrial { candidate, with, without };
        let text = explain(&advice(vec![slow.clone(), slow], vec![tried]));
        for fact in [
            "natively 1.00 s, on default 1.50 s: 50 % longer",
            "310 requests took 4.0 ms in the daemon",
            "LOOKUP            300 x    10.0 us",
            "75 %",
            "of the daemon: 7 ms",
            "-o timeout=60: helps: 20 % shorter (1.20 s, 310 requests became 10). 300 ask; needs: care.",
            "shared one copy",
        ] {
            assert!(text.contains(fact), "{fact:?} is not in:\n{text}");
        }
    }

    #[test]
    fn an_option_that_saves_no_request_did_not_help() {
        let ops = [(Op::LOOKUP, 300, 10_000)];
        let candidate =
            CandidateOption { option: "x".into(), because: "y".into(), needs: "z".into() };
        let (with, without) =
            (series("a", vec![run(0.5, &ops)]), series("b", vec![run(1.5, &ops)]));
        let text =
            explain(&advice(vec![run(1.5, &ops)], vec![OptionTrial { candidate, with, without }]));
        assert!(text.contains("-o x: does not help: there are as many requests"), "{text}");
    }

    #[test]
    fn differences_within_the_spread_are_called_noise() {
        let text = explain(&advice(vec![run(0.9, &[]), run(1.05, &[]), run(1.3, &[])], Vec::new()));
        assert!(text.contains("no difference above the noise"), "{text}");
        assert!(text.contains("The mount got no request"), "{text}");
    }
}
