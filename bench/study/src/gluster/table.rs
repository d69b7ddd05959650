//! The results as tables for the terminal.

use std::fmt::Write as _;

use super::cases::{CaseWork, GlusterCase, VolumeKind};
use super::goals::{self, ratio_to_native};
use super::results::{GlusterCell, GlusterResults};
use crate::direct::ratio;

/// Bytes of a request from which a rate is shown in bytes.
const LARGE: u64 = 64 << 10;

/// All tables.
pub fn table(results: &GlusterResults) -> String {
    let mut text = String::new();
    let build = if results.optimised { "" } else { " (not optimised: its times are meaningless)" };
    let _ = writeln!(
        text,
        "defuse {}{build} beside {}; {}; load {:.1}; medians of {} rounds of {} ms",
        results.program,
        results.glusterfs,
        results.fio,
        results.load,
        results.rounds,
        results.time_ms
    );
    for place in VolumeKind::ALL {
        let cases = results.cases(place);
        if cases.is_empty() {
            continue;
        }
        let _ = writeln!(text, "\n{}: {}", place.name(), place.title());
        let targets = results.targets_on(place);
        rates(&mut text, results, &cases, &targets);
        add_costs(&mut text, results, &cases, &targets);
    }
    failures(&mut text, results);
    let goals = goals::judge_all(results);
    if !goals.is_empty() {
        text.push('\n');
    }
    for goal in goals {
        let figure = ratio(Some(goal.figure));
        let _ = writeln!(
            text,
            "{:12} {figure:>11} {} ({})  {}",
            goal.outcome.word(),
            goal.unit,
            goal.required,
            goal.what
        );
    }
    for left_out in &results.left_out {
        let _ = writeln!(text, "left out: {left_out}");
    }
    text
}

fn head(text: &mut String, title: &str, targets: &[&str]) {
    let _ = write!(text, "{title:28}");
    targets.iter().for_each(|target| {
        let _ = write!(text, " {target:>12}");
    });
    text.push('\n');
}

/// Rates, with the ratio to the best native client below each.
fn rates(text: &mut String, results: &GlusterResults, cases: &[GlusterCase], targets: &[&str]) {
    head(text, "operations a second, or MB/s", targets);
    for &case in cases {
        let _ = write!(text, "{:28}", case.name());
        for target in targets {
            let rate = results.summary(case, target, GlusterCell::rate);
            let rate = rate.map_or("-".to_owned(), |rate| {
                format!("{}~{:.0}%", rate_of(case, rate.median), 100.0 * rate.spread())
            });
            let _ = write!(text, " {rate:>12}");
        }
        text.push('\n');
        if results.best_native(case).is_some() {
            let _ = write!(text, "{:28}", "  of the best native");
            for target in targets {
                let figure = ratio_to_native(results, case, target, GlusterCell::rate);
                let figure =
                    figure.map_or("-".to_owned(), |figure| format!("{:.2}x", figure.median));
                let _ = write!(text, " {figure:>12}");
            }
            text.push('\n');
        }
    }
}

/// A rate: operations a second, or megabytes for large requests.
pub fn rate_of(case: GlusterCase, operations: f64) -> String {
    match case.work {
        CaseWork::Io { block, .. } if block >= LARGE => {
            format!("{:.0}", operations * block as f64 / 1e6)
        }
        _ => format!("{operations:.0}"),
    }
}

/// The unit of [`rate_of`].
pub fn unit_of(case: GlusterCase) -> &'static str {
    match case.work {
        CaseWork::Io { block, .. } if block >= LARGE => "MB/s",
        _ => "/s",
    }
}

/// CPU time of an operation, and the load of the busiest thread that receives requests.
fn add_costs(text: &mut String, results: &GlusterResults, cases: &[GlusterCase], targets: &[&str]) {
    head(text, "µs of CPU, % of a reader", targets);
    for &case in cases {
        let _ = write!(text, "{:28}", case.name());
        for target in targets {
            let of = |figure| results.summary(case, target, figure).map(|figure| figure.median);
            let cost = of(GlusterCell::cpu_ns).zip(of(GlusterCell::reader_pct));
            let cost =
                cost.map_or("-".to_owned(), |(ns, reader)| format!("{:.0} {reader:.0}%", ns / 1e3));
            let _ = write!(text, " {cost:>12}");
        }
        text.push('\n');
    }
}

fn failures(text: &mut String, results: &GlusterResults) {
    for cell in &results.cells {
        if let Some(error) = &cell.error {
            let (place, case) = (cell.case.place.name(), cell.case.name());
            let _ = writeln!(
                text,
                "{place} {case} {} round {} failed: {error}",
                cell.target, cell.round
            );
        }
    }
    if results.interrupted {
        text.push_str("Interrupted: not all rounds were measured.\n");
    }
}
