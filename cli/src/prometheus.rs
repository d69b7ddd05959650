//! Statistics in the text format of Prometheus (exposition format 0.0.4).

use std::fmt::Write as _;

use defuse_probe::{BUCKETS, Histogram, OpStats, Snapshot};
use defuse_trace::Connection;

const SECONDS: &str = "defuse_request_seconds";
const ERRORS: &str = "defuse_request_errors_total";
const BYTES: &str = "defuse_request_bytes_total";

/// All of a snapshot. The bounds of buckets are in seconds.
pub fn text(connection: &Connection, snapshot: &Snapshot) -> String {
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
    text
}

fn head(text: &mut String, name: &str, kind: &str, help: &str) {
    let _ = writeln!(text, "# HELP {name} {help}\n# TYPE {name} {kind}");
}

/// Buckets here count everything up to their bound, `le`. Ours end just before the bound, in whole
/// nanoseconds, so that the bound is the last nanosecond that belongs to them.
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

/// A label's value: backslash, quotation mark and newline are escaped.
fn escaped(value: &str) -> String {
    value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}
