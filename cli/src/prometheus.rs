//! Statistics in the text format of Prometheus (exposition format 0.0.4).

use std::fmt::Write as _;

use defuse_probe::{BUCKETS, FigureStats, FigureUnit, Histogram, OpStats, Snapshot};
use defuse_trace::FuseConnection;

const SECONDS: &str = "defuse_request_seconds";
const ERRORS: &str = "defuse_request_errors_total";
const BYTES: &str = "defuse_request_bytes_total";

/// A whole snapshot. The bounds of buckets are in seconds.
pub fn text(connection: &FuseConnection, snapshot: &Snapshot) -> String {
    let mount = connection.mounts.first().map(|mount| mount.mount_point.display().to_string());
    let common = format!(
        "connection=\"{}\",mount=\"{}\"",
        connection.id,
        escaped(&mount.unwrap_or_default())
    );
    let labels =
        |stats: &OpStats| format!("{common},op=\"{}\",stage=\"{}\"", stats.op, stats.stage);
    let mut text = String::new();
    head(&mut text, SECONDS, "histogram", "Time that requests spent in a stage, by operation.");
    for stats in &snapshot.ops {
        histogram(&mut text, &labels(stats), &stats.latency);
    }
    head(&mut text, ERRORS, "counter", "Requests that were answered with an error.");
    for stats in &snapshot.ops {
        let _ = writeln!(text, "{ERRORS}{{{}}} {}", labels(stats), stats.latency.errors);
    }
    head(&mut text, BYTES, "counter", "Bytes that READ and WRITE moved.");
    for stats in snapshot.ops.iter().filter(|stats| stats.bytes > 0) {
        let _ = writeln!(text, "{BYTES}{{{}}} {}", labels(stats), stats.bytes);
    }
    for (name, value) in &snapshot.gauges {
        let name = format!("defuse_{name}");
        head(&mut text, &name, "gauge", "A number of the daemon; see docs/statistics.md.");
        let _ = writeln!(text, "{name}{{{common}}} {value}");
    }
    for figure in &snapshot.figures {
        figure_line(&mut text, &common, figure);
    }
    text
}

/// A figure of the file system. As Prometheus has it, names say the base unit, and that of counters `total`.
fn figure_line(text: &mut String, common: &str, figure: &FigureStats) {
    let FigureStats { name, value, unit, total } = figure;
    let (suffix, value) = match unit {
        FigureUnit::Count => ("", value.to_string()),
        FigureUnit::Bytes => ("_bytes", value.to_string()),
        FigureUnit::Nanoseconds => ("_seconds", seconds(*value)),
    };
    let (end, kind) = if *total { ("_total", "counter") } else { ("", "gauge") };
    let name = format!("defuse_fs_{name}{suffix}{end}");
    head(text, &name, kind, "A figure of the file system; see docs/statistics.md.");
    let _ = writeln!(text, "{name}{{{common}}} {value}");
}

fn head(text: &mut String, name: &str, kind: &str, help: &str) {
    let _ = writeln!(text, "# HELP {name} {help}\n# TYPE {name} {kind}");
}

/// A bucket of Prometheus counts everything up to its bound, `le`. A bucket of a snapshot ends before its
/// bound, in whole nanoseconds, so `le` is its last nanosecond.
fn histogram(text: &mut String, labels: &str, latency: &Histogram) {
    let mut below = 0;
    for (bucket, count) in latency.buckets.iter().enumerate().take(BUCKETS - 1) {
        below += count;
        let bound = seconds(Histogram::upper_ns(bucket) - 1);
        let _ = writeln!(text, "{SECONDS}_bucket{{{labels},le=\"{bound}\"}} {below}");
    }
    let _ = writeln!(text, "{SECONDS}_bucket{{{labels},le=\"+Inf\"}} {}", latency.count);
    let _ = writeln!(text, "{SECONDS}_sum{{{labels}}} {}", seconds(latency.sum_ns));
    let _ = writeln!(text, "{SECONDS}_count{{{labels}}} {}", latency.count);
}

/// Nanoseconds as seconds, exact.
fn seconds(ns: u64) -> String {
    let text = format!("{}.{:09}", ns / 1_000_000_000, ns % 1_000_000_000);
    let text = text.trim_end_matches('0').trim_end_matches('.');
    text.to_owned()
}

/// Escapes backslash, quotation mark and newline in the value of a label.
fn escaped(value: &str) -> String {
    value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::{BTreeMap, BTreeSet};

    use defuse_fs::Figure;
    use defuse_probe::{Op, Recorder, Stage};
    use defuse_trace::FuseMount;

    fn example() -> String {
        let recorder = Recorder::new();
        let cells = recorder.cells();
        for ns in [3, 1_023, 1_024, 5_000_000_000, 20_000_000_000] {
            cells.record_stage(Stage::Total, Op::READ, ns, ns > 5);
        }
        cells.record(Op::WRITE, 700, true);
        cells.add_bytes(Op::WRITE, 4096);
        let mut snapshot = recorder.snapshot();
        snapshot.gauges.insert("workers".into(), 2);
        snapshot.figures = [
            Figure::count("groups", 12).since_start(),
            Figure::bytes("dirty", 4096),
            Figure::nanoseconds("waited", 1_500_000_000).since_start(),
        ]
        .map(FigureStats::from)
        .into();
        let mount = FuseMount {
            connection: 43,
            mount_point: "/mnt/a \"b\\\nc".into(),
            fstype: "fuse".into(),
            source: "x".into(),
        };
        text(&FuseConnection { id: 43, mounts: vec![mount], processes: Vec::new() }, &snapshot)
    }

    /// A sample: name, labels, value. Checks the grammar on the way.
    fn sample(line: &str) -> (String, BTreeMap<String, String>, f64) {
        let (name, rest) = line.split_once('{').unwrap();
        let is_name = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == ':';
        assert!(name.chars().all(is_name) && !name.starts_with(|c: char| c.is_ascii_digit()));
        let mut labels = BTreeMap::new();
        let mut rest = rest;
        loop {
            let (label, after) = rest.split_once("=\"").unwrap();
            let mut value = String::new();
            let mut chars = after.char_indices();
            let end = loop {
                match chars.next().unwrap() {
                    (place, '"') => break place,
                    (_, '\\') => {
                        let (_, escaped) = chars.next().unwrap();
                        assert!(matches!(escaped, '\\' | '"' | 'n'), "{line}");
                        value.push(escaped);
                    }
                    (_, c) => value.push(c),
                }
            };
            assert!(labels.insert(label.to_owned(), value).is_none(), "{label} twice");
            rest = &after[end + 1..];
            match rest.strip_prefix(',') {
                Some(more) => rest = more,
                None => break,
            }
        }
        let value = rest.strip_prefix("} ").unwrap();
        (name.to_owned(), labels, value.parse().unwrap())
    }

    #[test]
    fn the_text_follows_the_exposition_format() {
        let text = example();
        assert!(text.ends_with('\n'));
        let (mut kinds, mut seen) = (BTreeMap::new(), BTreeSet::new());
        let mut buckets: BTreeMap<String, Vec<(f64, f64)>> = BTreeMap::new();
        let mut counts = BTreeMap::new();
        for line in text.lines() {
            if let Some(rest) = line.strip_prefix("# TYPE ") {
                let (name, kind) = rest.split_once(' ').unwrap();
                assert!(kinds.insert(name.to_owned(), kind.to_owned()).is_none(), "{name} twice");
                continue;
            }
            if line.starts_with("# HELP ") {
                continue;
            }
            let (name, mut labels, value) = sample(line);
            assert!(seen.insert((name.clone(), labels.clone())), "{line} twice");
            let family = ["_bucket", "_sum", "_count"].iter().find_map(|e| name.strip_suffix(e));
            let family = family.filter(|f| kinds.contains_key(*f)).unwrap_or(&name);
            match kinds[family].as_str() {
                "counter" => assert!(name.ends_with("_total") && value >= 0.0),
                "histogram" if name.ends_with("_bucket") => {
                    let le = labels.remove("le").unwrap();
                    let le = if le == "+Inf" { f64::INFINITY } else { le.parse().unwrap() };
                    buckets.entry(format!("{labels:?}")).or_default().push((le, value));
                }
                "histogram" if name.ends_with("_count") => {
                    counts.insert(format!("{labels:?}"), value);
                }
                _ => {}
            }
        }
        assert_eq!(buckets.len(), 2);
        for (labels, buckets) in &buckets {
            assert!(buckets.is_sorted_by(|a, b| a.0 < b.0 && a.1 <= b.1), "{buckets:?}");
            assert_eq!(buckets.last(), Some(&(f64::INFINITY, counts[labels])));
        }
    }

    #[test]
    fn bounds_are_in_seconds_and_inclusive() {
        let text = example();
        let count = |le: &str| {
            let wanted = format!("op=\"READ\",stage=\"total\",le=\"{le}\"}} ");
            let line = text.lines().find(|line| line.contains(&wanted)).unwrap();
            line.rsplit(' ').next().unwrap().to_owned()
        };
        assert_eq!((count("0.000000003").as_str(), count("0.000001023").as_str()), ("1", "2"));
        assert_eq!((count("0.000002047").as_str(), count("+Inf").as_str()), ("3", "5"));
        assert_eq!((seconds(0), seconds(1_500_000_000)), ("0".into(), "1.5".into()));
        assert!(text.contains("defuse_workers{connection=\"43\""));
        for (name, value) in [("groups_total", "12"), ("dirty_bytes", "4096")] {
            let begin = format!("defuse_fs_{name}{{connection=\"43\",");
            let line = text.lines().find(|line| line.starts_with(&begin)).unwrap();
            assert!(line.ends_with(&format!("}} {value}")), "{line}");
        }
        assert!(text.contains("# TYPE defuse_fs_dirty_bytes gauge"));
        assert!(text.contains("# TYPE defuse_fs_waited_seconds_total counter"));
    }
}
