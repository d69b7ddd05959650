//! The verdict on each family of workloads, as text. Every clause is based on a figure.

use std::fmt::Write as _;

use super::analysis::{self, NATIVE};
use super::table::media;
use crate::options::{ConfigKind, StudyConfig};
use crate::results::{CellMeasurement, StudyResults};
use crate::rows::{ChangeClass, StackfsConfig, WorkloadFamily};

/// A family and its verdict.
#[derive(Debug, Clone, PartialEq)]
pub struct FamilyVerdict {
    /// The family.
    pub family: WorkloadFamily,
    /// The sentences.
    pub text: String,
}

/// The verdicts of all measured families.
pub fn judge_all(results: &StudyResults) -> Vec<FamilyVerdict> {
    let verdicts = WorkloadFamily::ALL.into_iter().filter_map(|family| {
        let sentences: Vec<String> = analysis::compared_configs(results)
            .into_iter()
            .filter_map(|config| judge_config(results, family, config))
            .collect();
        (!sentences.is_empty()).then(|| FamilyVerdict { family, text: sentences.join(" ") })
    });
    verdicts.collect()
}

fn judge_config(results: &StudyResults, family: WorkloadFamily, config: &str) -> Option<String> {
    let mut changes: Vec<(u8, f64)> = analysis::changes(results, config)
        .filter(|(row, _)| WorkloadFamily::from_row(*row) == family)
        .collect();
    changes.sort_by(|a, b| a.1.total_cmp(&b.1));
    let (&(worst, worst_pct), &(_, best_pct)) = (changes.first()?, changes.last()?);
    let mut text = format!("{config}: {}", cost(changes.len(), worst, worst_pct, best_pct));
    let noisy = |(row, _): &&(u8, f64)| {
        analysis::RowFigure::find(results, *row, config).is_some_and(|figure| figure.noise)
    };
    match changes.iter().filter(noisy).count() {
        0 => {}
        all if all == changes.len() => text.push_str(", but runs overlap with native ones: noise"),
        some => {
            let _ = write!(text, ", of which {some} of {} rows may be noise", changes.len());
        }
    }
    if let Some(why) = explanation(results, worst, config) {
        let _ = write!(text, "; in row {worst}, {why}");
    }
    if let Some(stackfs) = StackfsConfig::from_name(config) {
        let apart = describe_difference(results, stackfs, &changes);
        if let Some(apart) = apart {
            let _ = write!(text, "; {apart}");
        }
    }
    text.push('.');
    Some(text)
}

fn cost(rows: usize, worst: u8, worst_pct: f64, best_pct: f64) -> String {
    let range = if rows == 1 {
        format!("{worst_pct:+.0} %")
    } else {
        format!("from {worst_pct:+.0} % (row {worst}) to {best_pct:+.0} %")
    };
    let word = match (ChangeClass::classify(worst_pct), ChangeClass::classify(best_pct)) {
        (ChangeClass::Green, _) => "no significant cost",
        (ChangeClass::Yellow, _) => "a moderate cost",
        (ChangeClass::Orange | ChangeClass::Red, ChangeClass::Green) => {
            "from no cost to a high one, by the kind of access"
        }
        (ChangeClass::Orange, _) => "a high cost",
        (ChangeClass::Red, _) => "a very high cost",
    };
    format!("{word}, {range}")
}

/// The likely reason, from the figures of the worst row.
fn explanation(results: &StudyResults, row: u8, config: &str) -> Option<String> {
    let native = analysis::median_cell(results, row, NATIVE)?;
    let ours = analysis::median_cell(results, row, config)?;
    let mut clauses = vec![requests_clause(ours)].into_iter().flatten().collect::<Vec<_>>();
    if let Some(limits) = results.device.limits {
        let share = |measured: &CellMeasurement| {
            let bytes = measured.device.read_bytes as f64 / limits.read_bps as f64
                + measured.device.write_bytes as f64 / limits.write_bps as f64;
            let requests = measured.device.read_requests as f64 / limits.read_iops as f64
                + measured.device.write_requests as f64 / limits.write_iops as f64;
            100.0 * bytes.max(requests) / measured.seconds.max(1e-9)
        };
        clauses.push(device_clause(share(native), share(ours)));
    }
    let definition = results.configs.iter().find(|known| known.name == config);
    clauses.extend(traffic_clause(native, ours));
    clauses.extend(daemon_clause(ours, results.machine.cpus, definition));
    let (before, after) = (
        native.microseconds_per_op(native.cpu.system_ns),
        ours.microseconds_per_op(ours.cpu.system_ns),
    );
    if before > 0.05 && (after / before > 1.2 || after / before < 0.8) {
        clauses.push(format!(
            "the system spends {:.1} times the CPU time of native on an operation",
            after / before
        ));
    }
    (!clauses.is_empty()).then(|| clauses.join(", "))
}

/// The requests per operation, by the types that matter.
fn requests_clause(ours: &CellMeasurement) -> Option<String> {
    let mut requests: Vec<_> =
        ours.requests().into_iter().filter(|(op, _)| !op.contains("FORGET")).collect();
    let all: u64 = requests.iter().map(|(_, count)| count).sum();
    if ours.daemon.is_none() && ours.kernel.is_none() {
        return None;
    }
    if all == 0 {
        return Some("the daemon gets no request at all".into());
    }
    requests.sort_by_key(|(_, count)| std::cmp::Reverse(*count));
    let main: Vec<String> = requests
        .iter()
        .filter(|(_, count)| *count * 20 > all)
        .map(|(op, count)| format!("{:.0} % {op}", 100.0 * *count as f64 / all as f64))
        .collect();
    let per_op = all as f64 / ours.operations.max(1) as f64;
    Some(format!("an operation takes {} requests ({})", format_two_digits(per_op), main.join(", ")))
}

fn device_clause(native_pct: f64, ours_pct: f64) -> String {
    let both = format!("{native_pct:.0} % natively and {ours_pct:.0} % here");
    match (native_pct >= 85.0, ours_pct >= 85.0) {
        (true, true) => format!("the device is the limit either way (busy {both})"),
        (true, false) => format!("the device is no longer kept busy ({both})"),
        (false, true) => format!("the device is the limit here only (busy {both})"),
        (false, false) => format!("the device is not the limit (busy {both})"),
    }
}

/// A clause if the device transfers more bytes for the same work, as when two caches share one
/// memory.
fn traffic_clause(native: &CellMeasurement, ours: &CellMeasurement) -> Option<String> {
    let bytes = |measured: &CellMeasurement| {
        (measured.device_synced.read_bytes + measured.device_synced.write_bytes) as f64
            / measured.operations.max(1) as f64
    };
    let ratio = bytes(ours) / bytes(native).max(1e-9);
    let much = ours.device_synced.read_bytes + ours.device_synced.write_bytes > 8 << 20;
    (much && ratio > 1.25).then(|| format!("which moves {ratio:.1} times the bytes of native"))
}

/// A clause if the daemon uses all available CPU time.
fn daemon_clause(
    ours: &CellMeasurement,
    cpus: u64,
    config: Option<&StudyConfig>,
) -> Option<String> {
    let busy = ours.cpu.daemon_ns? as f64 / 1e9 / ours.seconds.max(1e-9);
    let single = matches!(config.map(|config| &config.kind),
        Some(ConfigKind::Defuse(words)) if words.iter().any(|word| word == "base"));
    if single && busy > 0.8 {
        return Some(format!("the daemon's only thread is busy {:.0} % of the time", 100.0 * busy));
    }
    let used = busy + ours.cpu.app_ns as f64 / 1e9 / ours.seconds.max(1e-9);
    if used > 0.85 * cpus as f64 {
        return Some(format!("application and daemon use {used:.1} of {cpus} processors"));
    }
    (busy > 0.1).then(|| format!("the daemon uses {:.0} % of a processor", 100.0 * busy))
}

/// The difference of the family from the published results.
fn describe_difference(
    results: &StudyResults,
    stackfs: StackfsConfig,
    changes: &[(u8, f64)],
) -> Option<String> {
    let media = media(results);
    let published = |row: u8| {
        Some(crate::rows::PublishedRow::get(row)?.published_results(media).change_pct(stackfs))
    };
    let same = changes.iter().filter(|(row, ours)| {
        published(*row).is_some_and(|p| ChangeClass::classify(p) == ChangeClass::classify(*ours))
    });
    let differences: Vec<f64> =
        changes.iter().filter_map(|(row, ours)| Some(ours - published(*row)?)).collect();
    let middle = analysis::median(&differences)?;
    Some(format!(
        "{} of {} rows are in the published class, the median differs by {middle:+.0} points",
        same.count(),
        changes.len()
    ))
}

/// Formats a value with two significant digits.
pub fn format_two_digits(value: f64) -> String {
    match value {
        v if v >= 10.0 => format!("{v:.0}"),
        v if v >= 0.995 => format!("{v:.1}"),
        v if v >= 0.0995 => format!("{v:.2}"),
        v if v >= 0.001 => format!("{v:.4}"),
        v if v > 0.0 => "under 0.001".into(),
        _ => "0".into(),
    }
}
