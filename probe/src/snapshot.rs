//! Readings of a recorder, for users and for programs.

use std::collections::BTreeMap;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};

use defuse_fs::{Figure, FileSystem, MeasureUnit};
use serde::{Deserialize, Serialize};

use crate::{LatencyHistogram, Op, RequestStage};

/// The measurements of a session up to one moment, or between two. It serializes to JSON and prints
/// as a table.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StatsSnapshot {
    /// Start of the measurement, in milliseconds since 1970 UTC.
    pub started_unix_ms: u64,
    /// Duration of the measurement in nanoseconds.
    pub span_ns: u64,
    /// The operations that occurred, by stage and then in the order of [`Op::ALL`].
    pub ops: Vec<OpStats>,
    /// Gauges of the frontend, such as its workers: current, idle, started, retired, max.
    #[serde(default)]
    pub gauges: BTreeMap<String, u64>,
    /// Figures of the file system about itself, in its order.
    #[serde(default)]
    pub figures: Vec<FigureStats>,
    /// Sentences of the file system about what it does not do, and limitations of the measurement.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<String>,
}

/// The most notes of a file system, and the most characters of each.
const NOTES: (usize, usize) = (16, 400);

/// A figure of a file system; see [`defuse_fs::Figure`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FigureStats {
    /// The name.
    pub name: String,
    /// The value, in `unit`.
    pub value: u64,
    /// The unit.
    pub unit: FigureUnit,
    /// The number only grows.
    pub total: bool,
}

/// The unit of a [`FigureStats`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum FigureUnit {
    /// How many.
    Count,
    /// Bytes.
    Bytes,
    /// Nanoseconds.
    Nanoseconds,
}

impl From<Figure> for FigureStats {
    fn from(Figure { name, value, unit, total }: Figure) -> Self {
        let unit = match unit {
            MeasureUnit::Count => FigureUnit::Count,
            MeasureUnit::Bytes => FigureUnit::Bytes,
            MeasureUnit::Nanoseconds => FigureUnit::Nanoseconds,
        };
        FigureStats { name: name.to_owned(), value, unit, total }
    }
}

impl FigureStats {
    /// The figures `now`, with totals since `earlier`, and states as they are.
    pub fn delta_since(now: &[FigureStats], earlier: &[FigureStats]) -> Vec<FigureStats> {
        let since = |figure: &FigureStats| {
            let before = earlier.iter().find(|before| before.name == figure.name && figure.total);
            let value = figure.value.saturating_sub(before.map_or(0, |before| before.value));
            FigureStats { value, ..figure.clone() }
        };
        now.iter().map(since).collect()
    }
}

impl fmt::Display for FigureStats {
    /// Prints a row of the table.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let FigureStats { name, value, unit, .. } = self;
        let shown = match unit {
            FigureUnit::Count => value.to_string(),
            FigureUnit::Bytes => BytesText(*value).to_string(),
            FigureUnit::Nanoseconds => DurationText(*value).to_string(),
        };
        write!(f, "{name:<30} {shown:>12}")
    }
}

/// The measurements of one operation in one stage.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct OpStats {
    /// The operation.
    pub op: Op,
    /// The stage.
    pub stage: RequestStage,
    /// Bytes transferred: read and written.
    pub bytes: u64,
    /// The latencies.
    #[serde(flatten)]
    pub latency: LatencyHistogram,
}

impl StatsSnapshot {
    /// Adds the figures and the notes of a file system; none after a panic.
    #[must_use]
    pub fn with_figures(mut self, fs: &dyn FileSystem) -> Self {
        let ask = AssertUnwindSafe(|| (fs.figures(), fs.notes()));
        let (figures, notes) = catch_unwind(ask).unwrap_or_default();
        self.figures.extend(figures.into_iter().map(FigureStats::from));
        let bounded = |note: String| note.chars().take(NOTES.1).collect();
        self.notes.extend(notes.into_iter().take(NOTES.0).map(bounded));
        self
    }

    /// The figure with this name.
    pub fn figure(&self, name: &str) -> Option<&FigureStats> {
        self.figures.iter().find(|figure| figure.name == name)
    }

    /// The operation `op` as seen in user space; `None` if it did not occur.
    pub fn get(&self, op: Op) -> Option<&OpStats> {
        self.get_stage(RequestStage::User, op)
    }

    /// The operation `op` in `stage`; `None` if it did not occur.
    pub fn get_stage(&self, stage: RequestStage, op: Op) -> Option<&OpStats> {
        self.ops.iter().find(|stats| stats.stage == stage && stats.op == op)
    }

    /// The measurements since `earlier`, a snapshot of the same recorder. Gauges, and figures that
    /// are no totals, have their current values.
    pub fn delta_since(&self, earlier: &StatsSnapshot) -> StatsSnapshot {
        let ops = self.ops.iter().filter_map(|stats| {
            let Some(before) = earlier.get_stage(stats.stage, stats.op) else {
                return Some(stats.clone());
            };
            let latency = stats.latency.delta_since(&before.latency);
            let bytes = stats.bytes.saturating_sub(before.bytes);
            let nothing = latency.count == 0 && bytes == 0;
            (!nothing).then_some(OpStats { latency, bytes, ..stats.clone() })
        });
        StatsSnapshot {
            started_unix_ms: self.started_unix_ms + earlier.span_ns / 1_000_000,
            span_ns: self.span_ns.saturating_sub(earlier.span_ns),
            ops: ops.collect(),
            gauges: self.gauges.clone(),
            figures: FigureStats::delta_since(&self.figures, &earlier.figures),
            notes: self.notes.clone(),
        }
    }

    /// Adds the measurements of another session. Gauges and figures are added, the duration is the
    /// longer one, and each note is there once.
    pub fn merge(&mut self, other: &StatsSnapshot) {
        self.started_unix_ms = match self.started_unix_ms {
            0 => other.started_unix_ms,
            begun => begun.min(other.started_unix_ms),
        };
        self.span_ns = self.span_ns.max(other.span_ns);
        for stats in &other.ops {
            let same = |own: &&mut OpStats| own.stage == stats.stage && own.op == stats.op;
            match self.ops.iter_mut().find(same) {
                Some(own) => {
                    own.latency.merge(&stats.latency);
                    own.bytes = own.bytes.saturating_add(stats.bytes);
                }
                None => self.ops.push(stats.clone()),
            }
        }
        for (name, value) in &other.gauges {
            *self.gauges.entry(name.clone()).or_default() += value;
        }
        for figure in &other.figures {
            match self.figures.iter_mut().find(|own| own.name == figure.name) {
                Some(own) => own.value = own.value.saturating_add(figure.value),
                None => self.figures.push(figure.clone()),
            }
        }
        for note in &other.notes {
            if !self.notes.contains(note) {
                self.notes.push(note.clone());
            }
        }
    }

    /// The total time of all operations of `stage`, in nanoseconds.
    pub fn total_ns(&self, stage: RequestStage) -> u64 {
        let of_stage = self.ops.iter().filter(|stats| stats.stage == stage);
        of_stage.fold(0, |sum, stats| sum.saturating_add(stats.latency.sum_ns))
    }
}

impl fmt::Display for StatsSnapshot {
    /// Prints a table for each stage, sorted by total time. `share` is an operation's part of the
    /// time of all operations.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{} measured", DurationText(self.span_ns))?;
        for stage in RequestStage::ALL {
            let mut ops: Vec<_> = self.ops.iter().filter(|stats| stats.stage == stage).collect();
            if ops.is_empty() {
                continue;
            }
            ops.sort_by_key(|stats| std::cmp::Reverse(stats.latency.sum_ns));
            writeln!(
                f,
                "\n{:<18} {:>10} {:>8} {:>9} {:>9} {:>9} {:>9} {:>7} {:>10}",
                stage, "count", "errors", "mean", "p50", "p99", "max", "share", "bytes"
            )?;
            let total_ns = self.total_ns(stage);
            for stats in ops {
                write_row(f, stats, total_ns)?;
            }
        }
        if !self.gauges.is_empty() {
            writeln!(f)?;
        }
        for (name, value) in &self.gauges {
            writeln!(f, "{name:<18} {value:>10}")?;
        }
        if !self.figures.is_empty() {
            writeln!(f)?;
        }
        self.figures.iter().try_for_each(|figure| writeln!(f, "{figure}"))?;
        self.notes.iter().try_for_each(|note| writeln!(f, "\nnote: {}", make_one_line(note)))
    }
}

/// A note may come from another process, and must not look like several lines.
fn make_one_line(note: &str) -> String {
    note.chars().map(|c| if c.is_control() { char::REPLACEMENT_CHARACTER } else { c }).collect()
}

fn write_row(f: &mut fmt::Formatter<'_>, stats: &OpStats, total_ns: u64) -> fmt::Result {
    let latency = &stats.latency;
    let share = 100.0 * latency.sum_ns as f64 / total_ns.max(1) as f64;
    let times = [
        latency.mean_ns(),
        latency.percentile_ns(0.5),
        latency.percentile_ns(0.99),
        latency.max_ns,
    ];
    write!(f, "{:<18} {:>10} {:>8}", stats.op, latency.count, latency.errors)?;
    for time in times {
        write!(f, " {:>9}", DurationText(time).to_string())?;
    }
    writeln!(f, " {share:>6.1}% {:>10}", BytesText(stats.bytes).to_string())
}

/// Nanoseconds with a unit, in three or four digits.
struct DurationText(u64);

impl fmt::Display for DurationText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ns = self.0 as f64;
        match self.0 {
            0..1_000 => write!(f, "{} ns", self.0),
            1_000..1_000_000 => write!(f, "{:.1} us", ns / 1e3),
            1_000_000..1_000_000_000 => write!(f, "{:.1} ms", ns / 1e6),
            _ => write!(f, "{:.2} s", ns / 1e9),
        }
    }
}

/// Bytes with a unit; `-` for none.
pub struct BytesText(pub u64);

impl fmt::Display for BytesText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNITS: [&str; 6] = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
        match self.0 {
            0 => f.write_str("-"),
            1..1024 => write!(f, "{} B", self.0),
            _ => {
                let power = (self.0.ilog2() / 10).min(6);
                let value = self.0 as f64 / (1u64 << (10 * power)) as f64;
                write!(f, "{value:.1} {}", UNITS[power as usize - 1])
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use defuse_fs::{Attr, Context, DirBuf, Entry, Errno, Fh, File, Ino, Name, Result};

    use super::*;
    use crate::Recorder;

    #[test]
    fn a_snapshot_survives_a_round_trip_through_json() {
        let recorder = Recorder::new();
        let cells = recorder.cells();
        cells.record(Op::WRITE, 5_000, true);
        cells.add_bytes(Op::WRITE, 4096);
        cells.record(Op::LOOKUP, 900, false);
        let mut snapshot = recorder.snapshot();
        snapshot.gauges.insert("workers".into(), 2);
        snapshot.figures.push(Figure::bytes("dirty", 4096).into());
        snapshot.figures.push(Figure::nanoseconds("waited", 7).since_start().into());
        let json = serde_json::to_string(&snapshot).unwrap();
        assert!(json.contains(r#"{"name":"dirty","value":4096,"unit":"bytes","total":false}"#));
        assert_eq!(serde_json::from_str::<StatsSnapshot>(&json).unwrap(), snapshot);
        assert!(json.contains(r#""op":"WRITE","stage":"user","bytes":4096"#), "{json}");
    }

    #[test]
    fn a_difference_contains_only_new_operations() {
        let recorder = Recorder::new();
        let cells = recorder.cells();
        cells.record(Op::WRITE, 5_000, true);
        cells.record(Op::LOOKUP, 900, true);
        let before = recorder.snapshot();
        cells.record(Op::WRITE, 6_000, false);
        cells.record(Op::OPEN, 100, true);
        let span = recorder.snapshot().delta_since(&before);
        assert_eq!(
            span.ops.iter().map(|stats| stats.op).collect::<Vec<_>>(),
            [Op::OPEN, Op::WRITE]
        );
        let writes = &span.get(Op::WRITE).unwrap().latency;
        assert_eq!((writes.count, writes.errors, writes.sum_ns), (1, 1, 6_000));
        assert!(recorder.snapshot().delta_since(&recorder.snapshot()).ops.is_empty());
    }

    #[test]
    fn totals_of_a_period_are_differences_and_states_are_those_of_its_end() {
        let of = |total, state| {
            let total = Figure::count("groups", total).since_start();
            let figures = [total, Figure::bytes("dirty", state)].map(FigureStats::from);
            StatsSnapshot { figures: figures.into(), ..StatsSnapshot::default() }
        };
        assert_eq!(of(9, 100).delta_since(&of(7, 300)).figures, of(2, 100).figures);
        assert_eq!(of(9, 100).delta_since(&StatsSnapshot::default()).figures, of(9, 100).figures);
        let mut both = of(9, 100);
        both.merge(&of(1, 1));
        both.merge(&StatsSnapshot::default());
        assert_eq!(both.figures, of(10, 101).figures);
    }

    #[test]
    fn notes_of_a_file_system_are_bounded_and_each_is_shown_once() {
        struct TalkativeFileSystem;
        impl FileSystem for TalkativeFileSystem {
            fn notes(&self) -> Vec<String> {
                (0..100).map(|number| format!("{number} {}", "x".repeat(1000))).collect()
            }
            fn lookup(&self, _: &Context<'_>, _: Ino, _: Name<'_>) -> Result<Entry> {
                Err(Errno::ENOENT)
            }
            fn getattr(&self, _: &Context<'_>, _: Ino, _: Option<Fh>) -> Result<Attr> {
                Err(Errno::ENOENT)
            }
            fn readdir(&self, _: &Context<'_>, _: File, _: u64, _: &mut DirBuf<'_>) -> Result<()> {
                Ok(())
            }
        }
        let noted = StatsSnapshot::default().with_figures(&TalkativeFileSystem);
        assert_eq!(noted.notes.len(), NOTES.0);
        assert!(noted.notes.iter().all(|note| note.chars().count() == NOTES.1));
        assert_eq!(noted.delta_since(&StatsSnapshot::default()).notes, noted.notes);
        let mut both = noted.clone();
        both.merge(&noted);
        assert_eq!(both.notes, noted.notes);
        let json = serde_json::to_string(&StatsSnapshot::default()).unwrap();
        assert!(!json.contains("notes"), "{json}");
    }

    #[test]
    fn the_table_has_the_expected_text() {
        let mut snapshot = StatsSnapshot { span_ns: 12_340_000_000, ..StatsSnapshot::default() };
        let mut latency = LatencyHistogram::default();
        for _ in 0..3 {
            latency.record(1_500, true);
        }
        snapshot.ops.push(OpStats {
            op: Op::READ,
            stage: RequestStage::User,
            bytes: 12288,
            latency,
        });
        snapshot.gauges.insert("workers".into(), 2);
        snapshot.figures.push(Figure::count("groups", 12).since_start().into());
        snapshot.figures.push(Figure::bytes("dirty", 0).into());
        snapshot.figures.push(Figure::bytes("device_written", 8192).since_start().into());
        snapshot.notes.push("no messages:\n\u{1b}[2Jwhy".to_owned());
        let expected = "\
12.34 s measured

user                    count   errors      mean       p50       p99       max   share      bytes
READ                        3        0    1.5 us    1.5 us    1.5 us    1.5 us  100.0%   12.0 KiB

workers                     2

groups                                   12
dirty                                     -
device_written                      8.0 KiB

note: no messages:\u{fffd}\u{fffd}[2Jwhy
";
        assert_eq!(snapshot.to_string(), expected);
    }
}
