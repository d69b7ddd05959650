//! Derives statements from cells: medians, changes against native, classes.

use crate::options::StudyScale;
use crate::results::{CellMeasurement, NOT_OPTIMISED, StudyResults};
use crate::rows::{ChangeClass, PublishedRow};

/// Name of the reference configuration.
pub const NATIVE: &str = "native";

/// One row in one configuration, over all of its runs.
#[derive(Debug, Clone, PartialEq)]
pub struct RowFigure {
    /// Median throughput, in operations per second.
    pub ops_per_s: f64,
    /// Half the difference of the best and the worst run, in per cent of the median; `None` for a
    /// single run.
    pub spread_pct: Option<f64>,
    /// The change against native in per cent; `None` for native, and without a measurement of
    /// native.
    pub change_pct: Option<f64>,
    /// The runs overlap with the runs of native, so that several runs have not shown a difference.
    /// Never set for single runs, which cannot show it.
    pub noise: bool,
}

impl RowFigure {
    /// The figure of one row and configuration; `None` without a measurement.
    pub fn find(results: &StudyResults, row: u8, config: &str) -> Option<RowFigure> {
        let rates = rates(results, row, config);
        let ops_per_s = median(&rates)?;
        let (least, most) =
            rates.iter().fold((f64::MAX, f64::MIN), |(a, b), &x| (a.min(x), b.max(x)));
        let native = rates_unless_same(results, row, config);
        let several = rates.len() > 1 && native.len() > 1;
        let noise = several
            && native.iter().any(|&rate| rate >= least)
            && native.iter().any(|&rate| rate <= most);
        let native = median(&native);
        Some(RowFigure {
            ops_per_s,
            spread_pct: (rates.len() > 1).then(|| 50.0 * (most - least) / ops_per_s.max(1e-9)),
            change_pct: native.map(|native| 100.0 * (ops_per_s / native.max(1e-9) - 1.0)),
            noise,
        })
    }

    /// The paper's class of the change.
    pub fn class(&self) -> Option<ChangeClass> {
        self.change_pct.map(ChangeClass::classify)
    }
}

fn rates(results: &StudyResults, row: u8, config: &str) -> Vec<f64> {
    results.measurements_of(row, config).iter().map(|measured| measured.ops_per_s()).collect()
}

fn rates_unless_same(results: &StudyResults, row: u8, config: &str) -> Vec<f64> {
    if config == NATIVE { Vec::new() } else { rates(results, row, NATIVE) }
}

/// The reasons to doubt the throughput, if any.
pub fn list_doubts(results: &StudyResults) -> Option<String> {
    let mut reasons = Vec::new();
    if results.scale == StudyScale::Tiny {
        reasons.push("cells of scale tiny last a moment");
    }
    if results.program.contains(NOT_OPTIMISED) {
        reasons.push("the program was built without optimisation");
    }
    (!reasons.is_empty()).then(|| {
        format!("{}: throughput is meaningless, request counts are valid.", reasons.join(", and "))
    })
}

/// The median; `None` for no values.
pub fn median(values: &[f64]) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    match sorted.len() {
        0 => None,
        len if len % 2 == 1 => Some(sorted[middle]),
        _ => Some((sorted[middle - 1] + sorted[middle]) / 2.0),
    }
}

/// The run with the median throughput, whose details are shown.
pub fn median_cell<'a>(
    results: &'a StudyResults,
    row: u8,
    config: &str,
) -> Option<&'a CellMeasurement> {
    let mut measured = results.measurements_of(row, config);
    measured.sort_by(|a, b| a.ops_per_s().total_cmp(&b.ops_per_s()));
    measured.get(measured.len().saturating_sub(1) / 2).copied()
}

/// Number of rows in each class, in the order of [`ChangeClass::ALL`].
pub fn class_counts(changes: impl Iterator<Item = f64>) -> [usize; 4] {
    let mut counts = [0; 4];
    for change in changes {
        let class = ChangeClass::classify(change);
        counts[ChangeClass::ALL.iter().position(|known| *known == class).unwrap_or(0)] += 1;
    }
    counts
}

/// The numbers of runs: the rows are named that have more than others.
pub fn describe_runs(results: &StudyResults) -> String {
    let runs_of =
        |row: u8| results.cells.iter().filter(|cell| cell.row == row).map(|cell| cell.run).max();
    let most = results.runs;
    let several: Vec<String> =
        results.rows.iter().filter(|row| runs_of(**row) >= Some(most)).map(u8::to_string).collect();
    match most {
        1 => "1 run".to_owned(),
        _ if several.len() == results.rows.len() || several.is_empty() => format!("{most} runs"),
        _ => format!("{most} runs of rows {}, 1 run of others", several.join(", ")),
    }
}

/// The known rows of a study, in order.
pub fn rows(results: &StudyResults) -> Vec<&'static PublishedRow> {
    results.rows.iter().filter_map(|&number| PublishedRow::get(number)).collect()
}

/// The configurations that are compared with native.
pub fn compared_configs(results: &StudyResults) -> Vec<&str> {
    results
        .configs
        .iter()
        .map(|config| config.name.as_str())
        .filter(|name| *name != NATIVE)
        .collect()
}

/// The changes of a configuration against native, by row.
pub fn changes<'a>(
    results: &'a StudyResults,
    config: &'a str,
) -> impl Iterator<Item = (u8, f64)> + 'a {
    results
        .rows
        .iter()
        .filter_map(move |&row| Some((row, RowFigure::find(results, row, config)?.change_pct?)))
}
