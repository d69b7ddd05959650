//! The results as tables for the terminal.

use std::fmt::Write as _;

use defuse_measure::stats::QuartileSummary;

use super::goals::{self, DirectGoal, size};
use super::places::{CLIENT, DIRECT, DUMMY, LIBFUSE, MEMORY, MOUNT, NATIVE};
use super::results::{DirectCase, DirectCell, DirectResults, DirectTable, LowerFileSystem};
use super::worker::WorkerOp;

/// All tables. The goals come last, where readers look for them.
pub fn table(results: &DirectResults) -> String {
    let mut text = String::new();
    let machine = &results.machine;
    let _ = writeln!(
        text,
        "{} x {}, Linux {}, load {:.1}; {} rounds",
        machine.cpus, machine.cpu, machine.kernel, results.load, results.rounds
    );
    for target in &results.targets {
        let _ = writeln!(text, "  {:<8} {}", target.name, target.how);
    }
    for left_out in &results.left_out {
        let _ = writeln!(text, "  left out: {left_out}");
    }
    add_write_rows(&mut text, results);
    for lower in [LowerFileSystem::Tmpfs, LowerFileSystem::Ext4] {
        for op in [WorkerOp::Write, WorkerOp::Rewrite, WorkerOp::Read] {
            sequential(&mut text, results, lower, op);
        }
    }
    memory(&mut text, results);
    share(&mut text, results);
    start(&mut text, results);
    add_goals(&mut text, results);
    if !results.optimised {
        text.push_str(
            "\nThis build is not optimised, so its times are meaningless: build with --release.\n",
        );
    }
    if results.interrupted {
        text.push_str("\nIt was interrupted; the results are from the complete rounds.\n");
    }
    text
}

fn heading(text: &mut String, heading: &str) {
    let _ = writeln!(text, "\n{heading}");
}

/// Bandwidth and context switches.
fn add_write_rows(text: &mut String, results: &DirectResults) {
    heading(
        text,
        &format!("{} writes of a new file on tmpfs: MB/s, and context switches", results.writes),
    );
    let _ = writeln!(
        text,
        "{:>6} {:<8} {:>8} {:>17} {:>17} {:>9}",
        "block", "", "MB/s", "app vol/invol", "server vol/invol", "requests"
    );
    for case in results.cases(DirectTable::Writes) {
        for target in results.targets_of(case) {
            let figure = |figure| middle(results, case, target, figure);
            let app = (
                figure(|cell| cell.app.voluntary as f64),
                figure(|cell| cell.app.involuntary as f64),
            );
            let server = (
                figure(|cell| cell.server.voluntary as f64),
                figure(|cell| cell.server.involuntary as f64),
            );
            let requests = requests(results, case, target);
            let _ = writeln!(
                text,
                "{:>6} {target:<8} {:>8.0} {:>9.0} / {:<5.0} {:>9.0} / {:<5.0} {:>9}",
                size(case.block),
                figure(DirectCell::bytes_per_s) / 1e6,
                app.0,
                app.1,
                server.0,
                server.1,
                requests.map_or("-".into(), |count| format!("{count:.0}")),
            );
        }
    }
}

/// The median of the counted requests.
pub fn requests(results: &DirectResults, case: DirectCase, target: &str) -> Option<f64> {
    let is = |cell: &&DirectCell| cell.case == case && cell.target == target;
    let counts = results.cells.iter().filter(is).filter_map(|cell| cell.requests);
    QuartileSummary::from_values(&counts.map(|count| count as f64).collect::<Vec<_>>())
        .map(|summary| summary.median)
}

/// A median; NaN if nothing was measured.
fn middle(
    results: &DirectResults,
    case: DirectCase,
    target: &str,
    figure: fn(&DirectCell) -> f64,
) -> f64 {
    results.summary(case, target, figure).map_or(f64::NAN, |summary| summary.median)
}

fn sequential(text: &mut String, results: &DirectResults, lower: LowerFileSystem, op: WorkerOp) {
    let mut cases = results.cases(DirectTable::Sequential);
    cases.retain(|case| (case.lower, case.op) == (lower, op));
    let Some(first) = cases.first() else { return };
    let targets = results.targets_of(*first);
    let file = size(results.file_bytes);
    heading(
        text,
        &format!(
            "sequential {} on {}, a file of {file}, fastest pass: MB/s",
            op.name(),
            lower.name()
        ),
    );
    let _ = write!(text, "{:>6}", "block");
    for target in &targets {
        let _ = write!(text, " {target:>8}");
    }
    let bases = [NATIVE, MOUNT, LIBFUSE].into_iter().filter(|base| targets.contains(base));
    for base in bases.clone() {
        let _ = write!(text, " {:>16}", format!("direct / {base}"));
    }
    text.push('\n');
    for case in cases {
        let _ = write!(text, "{:>6}", size(case.block));
        for target in &targets {
            let rate = middle(results, case, target, DirectCell::bytes_per_s) / 1e6;
            let _ = write!(text, " {rate:>8.0}");
        }
        for base in bases.clone() {
            let _ = write!(text, " {:>16}", ratio(results.speed(case, DIRECT, base)));
        }
        text.push('\n');
    }
}

/// A ratio with its spread: half the interquartile range.
pub fn ratio(ratio: Option<QuartileSummary>) -> String {
    ratio.map_or("-".into(), |ratio| {
        format!("{:.2} ~{:.2}", ratio.median, (ratio.high - ratio.low) / 2.0)
    })
}

fn memory(text: &mut String, results: &DirectResults) {
    heading(text, "4K calls of memory: in the program, beside tmpfs");
    for case in results.cases(DirectTable::Memory) {
        let ns = |target| middle(results, case, target, DirectCell::ns_per_call);
        let _ = writeln!(
            text,
            "{:>8}  tmpfs {:>6.0} ns  memory: {:>6.0} ns  {:>12} times as fast",
            case.op.name(),
            ns(NATIVE),
            ns(MEMORY),
            ratio(results.speed(case, MEMORY, NATIVE))
        );
    }
}

fn share(text: &mut String, results: &DirectResults) {
    heading(text, "the client's share of a call on passthrough over tmpfs");
    for case in results.cases(DirectTable::Share) {
        let ns = |target| middle(results, case, target, DirectCell::ns_per_call);
        let _ = writeln!(
            text,
            "{:>6} {:>8}  dummy {:>5.0} ns  complete {:>7.0} ns  {:>12} %",
            size(case.block),
            case.op.name(),
            ns(DUMMY),
            ns(CLIENT),
            ratio(goals::share_pct(results, case))
        );
    }
}

fn start(text: &mut String, results: &DirectResults) {
    heading(text, "`true`, from start to end");
    let ms = |ns: fn(&super::results::StartTimes) -> u64| {
        let values: Vec<f64> = results.starts.iter().map(|start| ns(start) as f64 / 1e6).collect();
        QuartileSummary::from_values(&values).map_or(f64::NAN, |summary| summary.median)
    };
    let _ = writeln!(
        text,
        "plain {:.2} ms, within a run {:.2} ms, more {} ms",
        ms(|start| start.plain_ns),
        ms(|start| start.run_ns),
        ratio(results.start_more_ms())
    );
}

fn add_goals(text: &mut String, results: &DirectResults) {
    heading(text, "goals");
    for DirectGoal { what, required, figure, unit, outcome } in goals::judge_all(results) {
        let figure = ratio(Some(figure));
        let _ = writeln!(
            text,
            "{:<13} {what}: {figure}{}{unit} ({required})",
            outcome.word(),
            if unit.is_empty() { "" } else { " " }
        );
    }
}
