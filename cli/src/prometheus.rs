//! Statistics in the text format of Prometheus (exposition format 0.0.4).

use std::collections::BTreeMap;
use std::fmt::Write as _;

use defuse_probe::{BUCKETS, FigureStats, FigureUnit, LatencyHistogram, OpStats, StatsSnapshot};
use defuse_trace::FuseConnection;

use crate::served::{ClientRow, DeviceFigures, ServerMeasurements};

const SECONDS: &str = "defuse_request_seconds";
const ERRORS: &str = "defuse_request_errors_total";
const BYTES: &str = "defuse_request_bytes_total";

/// A whole snapshot. The bounds of buckets are in seconds.
pub fn text(connection: &FuseConnection, snapshot: &StatsSnapshot) -> String {
    let mount = connection.mounts.first().map(|mount| mount.mount_point.display().to_string());
    let common = format!(
        "connection=\"{}\",mount=\"{}\"",
        connection.id,
        escape_label(&mount.unwrap_or_default())
    );
    let mut text = requests(&common, snapshot);
    figures(&mut text, &[(common.clone(), &snapshot.figures)]);
    notes(&mut text, &[(common, &snapshot.notes)]);
    text
}

/// The statistics of the server at `socket`.
pub fn render_server(socket: &str, served: &ServerMeasurements) -> String {
    let common = format!("socket=\"{}\"", escape_label(socket));
    let mut text = requests(&common, &served.snapshot);
    let mut all = vec![(common.clone(), &*served.snapshot.figures)];
    let mut all_notes = vec![(common.clone(), &*served.snapshot.notes)];
    for DeviceFigures { device, figures, notes, .. } in &served.devices {
        let labels = format!("{common},device=\"{}\"", escape_label(&device.path));
        all.push((labels.clone(), figures));
        all_notes.push((labels, notes));
    }
    figures(&mut text, &all);
    notes(&mut text, &all_notes);
    for (name, kind, help, value) in OF_CLIENTS {
        let name = format!("defuse_client_{name}");
        head(&mut text, &name, kind, help);
        for client in &served.clients {
            let ClientRow { client: number, uid, .. } = client;
            let pid = client.pid.map(|pid| pid.to_string()).unwrap_or_default();
            let labels = format!("{common},client=\"{number}\",uid=\"{uid}\",pid=\"{pid}\"");
            let _ = writeln!(text, "{name}{{{labels}}} {}", value(client));
        }
    }
    let name = "defuse_clients_left_out";
    head(&mut text, name, "gauge", "Clients that are not shown, with no more requests than these.");
    let _ = writeln!(text, "{name}{{{common}}} {}", served.clients_left_out);
    text
}

/// Name, kind, help and value.
type ClientMetric = (&'static str, &'static str, &'static str, fn(&ClientRow) -> String);

/// The metrics of a client.
const OF_CLIENTS: &[ClientMetric] = &[
    ("age_seconds", "gauge", "Time since it connected.", |client| {
        seconds(client.age_ms.saturating_mul(1_000_000))
    }),
    ("requests_total", "counter", "Requests that were answered.", |client| {
        client.requests.to_string()
    }),
    ("request_errors_total", "counter", "Requests that failed.", |client| {
        client.errors.to_string()
    }),
    ("request_bytes_total", "counter", "Bytes that READ and WRITE moved.", |client| {
        client.bytes.to_string()
    }),
    ("lanes", "gauge", "Lanes in shared memory in use.", |client| client.lanes.to_string()),
    ("lane_requests_total", "counter", "Requests that came by lanes.", |client| {
        client.lane_requests.to_string()
    }),
    ("lane_requests_unanswered", "gauge", "Those without an answer.", |client| {
        client.lane_requests_unanswered.to_string()
    }),
    ("lane_bells_total", "counter", "Messages by which it woke the server.", |client| {
        client.lane_bells.to_string()
    }),
    ("lane_sleeps_total", "counter", "Sleeps of its threads.", |client| {
        client.lane_sleeps.to_string()
    }),
    ("page_reads_total", "counter", "Reads from cached pages, without a request.", |client| {
        client.page_reads.to_string()
    }),
    ("workers_busy", "gauge", "Threads that work on its requests.", |client| {
        client.workers_busy.to_string()
    }),
    ("requests_held_back", "gauge", "Requests that wait for a part of the storage.", |client| {
        client.requests_held_back.to_string()
    }),
    ("inodes", "gauge", "Inodes that it knows.", |client| client.inodes.to_string()),
    ("open_files", "gauge", "Open files and directories.", |client| client.open_files.to_string()),
    ("locks", "gauge", "Locked ranges.", |client| client.locks.to_string()),
    ("lock_waits", "gauge", "Locks that it waits for.", |client| client.lock_waits.to_string()),
    ("mapped_bytes", "gauge", "Memory for mapped files.", |client| client.mapped_bytes.to_string()),
    ("locks_lost_total", "counter", "Locks that it lost while it was stopped.", |client| {
        client.locks_lost.to_string()
    }),
];

/// The requests and gauges of a snapshot.
fn requests(common: &str, snapshot: &StatsSnapshot) -> String {
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
    text
}

/// Figures of file systems, each with its labels. All samples of a metric are together, as
/// Prometheus requires.
fn figures(text: &mut String, all: &[(String, &[FigureStats])]) {
    let mut lines: BTreeMap<String, (&str, String)> = BTreeMap::new();
    for (labels, figures) in all {
        for figure in *figures {
            let (name, kind, value) = sample(figure);
            let (_, lines) = lines.entry(name.clone()).or_insert_with(|| (kind, String::new()));
            let _ = writeln!(lines, "{name}{{{labels}}} {value}");
        }
    }
    for (name, (kind, lines)) in lines {
        head(text, &name, kind, "A figure of the file system; see docs/statistics.md.");
        text.push_str(&lines);
    }
}

/// Notes of file systems: 1 for each that is there, with its text as a label.
fn notes(text: &mut String, all: &[(String, &[String])]) {
    if all.iter().all(|(_, notes)| notes.is_empty()) {
        return;
    }
    let name = "defuse_fs_note_info";
    head(text, name, "gauge", "A note about the file system; see docs/statistics.md.");
    for (labels, notes) in all {
        for note in *notes {
            let _ = writeln!(text, "{name}{{{labels},note=\"{}\"}} 1", escape_label(note));
        }
    }
}

/// Name, kind and value of a figure. Prometheus requires that a name includes the base unit, and
/// the name of a counter `total`.
fn sample(figure: &FigureStats) -> (String, &'static str, String) {
    let FigureStats { name, value, unit, total } = figure;
    let (suffix, value) = match unit {
        FigureUnit::Count => ("", value.to_string()),
        FigureUnit::Bytes => ("_bytes", value.to_string()),
        FigureUnit::Nanoseconds => ("_seconds", seconds(*value)),
    };
    let (end, kind) = if *total { ("_total", "counter") } else { ("", "gauge") };
    (format!("defuse_fs_{name}{suffix}{end}"), kind, value)
}

fn head(text: &mut String, name: &str, kind: &str, help: &str) {
    let _ = writeln!(text, "# HELP {name} {help}\n# TYPE {name} {kind}");
}

/// A bucket of Prometheus counts everything up to its bound, `le`. A bucket of a snapshot ends
/// before its bound, in whole nanoseconds, so `le` is its last nanosecond.
fn histogram(text: &mut String, labels: &str, latency: &LatencyHistogram) {
    let mut below = 0;
    for (bucket, count) in latency.buckets.iter().enumerate().take(BUCKETS - 1) {
        below += count;
        let bound = seconds(LatencyHistogram::upper_ns(bucket) - 1);
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
fn escape_label(value: &str) -> String {
    value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    use defuse_fs::Figure;
    use defuse_probe::{Op, Recorder, RequestStage};
    use defuse_trace::FuseMount;

    use crate::served;

    fn example() -> String {
        let recorder = Recorder::new();
        let cells = recorder.cells();
        for ns in [3, 1_023, 1_024, 5_000_000_000, 20_000_000_000] {
            cells.record_stage(RequestStage::Total, Op::READ, ns, ns > 5);
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
        snapshot.notes.push("a \\ \"b\"".to_owned());
        let mount = FuseMount {
            connection: 43,
            mount_point: "/mnt/a \"b\\\nc".into(),
            fstype: "fuse".into(),
            source: "x".into(),
        };
        text(&FuseConnection { id: 43, mounts: vec![mount], processes: Vec::new() }, &snapshot)
    }

    /// A line: name, labels, value. Checks the grammar on the way.
    fn parse_line(line: &str) -> (String, BTreeMap<String, String>, f64) {
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
        assert_eq!(histograms(&example()), 2);
        assert_eq!(histograms(&render_server("/run/a \"b\"", &served::tests::example())), 1);
    }

    /// Checks the format, and returns the number of histograms.
    fn histograms(text: &str) -> usize {
        assert!(text.ends_with('\n'));
        let mut last = String::new();
        let (mut kinds, mut seen) = (BTreeMap::new(), BTreeSet::new());
        let mut buckets: BTreeMap<String, Vec<(f64, f64)>> = BTreeMap::new();
        let mut counts = BTreeMap::new();
        for line in text.lines() {
            if let Some(rest) = line.strip_prefix("# TYPE ") {
                let (name, kind) = rest.split_once(' ').unwrap();
                last = name.to_owned();
                assert!(kinds.insert(name.to_owned(), kind.to_owned()).is_none(), "{name} twice");
                continue;
            }
            if line.starts_with("# HELP ") {
                continue;
            }
            let (name, mut labels, value) = parse_line(line);
            assert!(seen.insert((name.clone(), labels.clone())), "{line} twice");
            let family = ["_bucket", "_sum", "_count"].iter().find_map(|e| name.strip_suffix(e));
            let family = family.filter(|f| kinds.contains_key(*f)).unwrap_or(&name);
            assert_eq!(family, last, "the samples of a metric follow its type");
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
        for (labels, buckets) in &buckets {
            assert!(buckets.is_sorted_by(|a, b| a.0 < b.0 && a.1 <= b.1), "{buckets:?}");
            assert_eq!(buckets.last(), Some(&(f64::INFINITY, counts[labels])));
        }
        buckets.len()
    }

    #[test]
    fn clients_and_devices_are_told_apart_by_labels() {
        let text = render_server("/run/s", &served::tests::example());
        for line in [
            r#"defuse_fs_groups_total{socket="/run/s",device="/fast"} 12"#,
            r#"defuse_fs_groups_total{socket="/run/s",device="/a \"b\""} 3"#,
            r#"defuse_fs_pages_limit_bytes{socket="/run/s"} 1048576"#,
            r#"defuse_fs_note_info{socket="/run/s",device="/a \"b\"",note="nobody tells:\n\"why\""} 1"#,
            r#"defuse_client_requests_total{socket="/run/s",client="7",uid="1000",pid="4711"} 5"#,
            r#"defuse_client_age_seconds{socket="/run/s",client="7",uid="1000",pid="4711"} 65"#,
            r#"defuse_client_lanes{socket="/run/s",client="8",uid="0",pid=""} 0"#,
            r#"defuse_clients_left_out{socket="/run/s"} 2"#,
            "# TYPE defuse_client_locks_lost_total counter",
        ] {
            assert!(text.lines().any(|other| other == line), "{line} is not in {text}");
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
