//! The text of the table, for the terminal and for Markdown.

use super::{BenchmarkCell, BenchmarkResults, TargetSeries};
use crate::stats::QuartileSummary;

/// A heading and one row for each cell.
///
/// The column of a target has its ops/s relative to native and, after the slash, its CPU time per
/// operation relative to native. Without native the figures are absolute: ops/s and microseconds.
pub fn make_rows(results: &BenchmarkResults) -> Vec<Vec<String>> {
    let Some(first) = results.cells.first() else { return Vec::new() };
    let mut heading = vec!["workload".to_owned(), "threads".to_owned()];
    if first.native().is_some() {
        heading.extend(["native ops/s".to_owned(), "native CPU us".to_owned()]);
    }
    heading.extend(other_targets(first).map(|series| series.target.clone()));
    heading.extend(
        [
            "better peer",
            "ours/peer",
            "quartiles",
            "CPU ours/peer",
            "system CPU",
            "required",
            "verdict",
        ]
        .map(str::to_owned),
    );
    let mut rows = vec![heading];
    rows.extend(results.cells.iter().map(row));
    rows
}

fn other_targets(cell: &BenchmarkCell) -> impl Iterator<Item = &TargetSeries> {
    let native = cell.native().map(|native| native.target.clone());
    cell.series.iter().filter(move |series| Some(&series.target) != native.as_ref())
}

fn row(cell: &BenchmarkCell) -> Vec<String> {
    let mut row = vec![cell.workload.clone(), cell.threads.to_string()];
    if let Some(native) = cell.native() {
        row.push(native.rate().map_or(dash(), |rate| {
            format!("{} ±{:.0}%", thousands(rate.median), 100.0 * rate.spread())
        }));
        row.push(native.cpu_us().map_or(dash(), |cpu| format!("{:.1}", cpu.median)));
    }
    row.extend(other_targets(cell).map(|series| ratio_to_native(cell, series)));
    row.extend(verdict(cell));
    row
}

fn ratio_to_native(cell: &BenchmarkCell, series: &TargetSeries) -> String {
    let pair = match cell.native() {
        Some(native) => series
            .rate_over(native)
            .zip(series.cpu_over(native))
            .map(|(rate, cpu)| format!("{} / {}", ratio(rate.median), ratio(cpu.median))),
        None => series.rate().zip(series.cpu_us()).map(|(rate, cpu)| {
            let spread = 100.0 * rate.spread();
            format!("{} ±{spread:.0}% / {:.1}", thousands(rate.median), cpu.median)
        }),
    };
    match (pair, &series.failure) {
        (Some(text), None) => text,
        (Some(text), Some(_)) => format!("{text} (failed once)"),
        (None, Some(_)) => "failed".to_owned(),
        (None, None) => dash(),
    }
}

fn verdict(cell: &BenchmarkCell) -> [String; 7] {
    let required = format!("{}x", cell.required);
    match cell.comparison() {
        Some(found) => {
            let QuartileSummary { median, low, high } = found.rate;
            let quartiles = format!("{}-{}", ratio(low), ratio(high));
            let cpu = |of: Option<QuartileSummary>| of.map_or(dash(), |cpu| ratio(cpu.median));
            let (cpu, system) = (cpu(found.cpu), cpu(found.system));
            let verdict = found.verdict.word().to_owned();
            [found.peer, ratio(median), quartiles, cpu, system, required, verdict]
        }
        None => {
            let peer = cell.best_peer().map_or(dash(), |peer| peer.target.clone());
            [peer, dash(), dash(), dash(), dash(), required, dash()]
        }
    }
}

fn dash() -> String {
    "-".to_owned()
}

/// Formats a ratio with three digits.
fn ratio(value: f64) -> String {
    match value {
        value if value >= 100.0 => format!("{value:.0}"),
        value if value >= 10.0 => format!("{value:.1}"),
        value => format!("{value:.2}"),
    }
}

fn thousands(value: f64) -> String {
    match value {
        value if value >= 10_000.0 => format!("{:.0}k", value / 1e3),
        value if value >= 1_000.0 => format!("{:.1}k", value / 1e3),
        value => format!("{value:.0}"),
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::results;
    use super::*;

    #[test]
    fn rows_match_the_heading() {
        let rows = make_rows(&results());
        assert_eq!(rows[0].len(), rows[1].len());
        let at = |name: &str| {
            let column = rows[0].iter().position(|heading| heading == name).unwrap();
            rows[1][column].clone()
        };
        assert_eq!(at("libfuse"), "0.10 / 10.0");
        assert_eq!(at("better peer"), "fuser-1");
        assert_eq!(at("ours/peer"), "1.75");
        assert_eq!(at("verdict"), "met");
    }

    #[test]
    fn figures_are_short() {
        assert_eq!(ratio(0.123), "0.12");
        assert_eq!(ratio(12.34), "12.3");
        assert_eq!(thousands(1_234_567.0), "1235k");
        assert_eq!(thousands(999.4), "999");
    }
}
