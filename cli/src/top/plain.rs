//! `defuse top` for scripts.

use std::fmt::Write as _;

use serde_json::json;

use super::model::{Model, Row};
use crate::error::{Failure, Result};
use crate::terminal;

/// A table of connections, each followed by its operations.
pub fn text(model: &Model) -> String {
    let mut text = format!(
        "{:>5} {:>9} {:>9} {:>9} {:>5} {:>5} {:>5} {:>5} {:>7} {:>4} {:>6}  MOUNT\n",
        "CONN", "OPS/S", "P50", "P99", "BACKG", "PEND", "PROC", "WAIT", "MAX/CG", "THR", "CPU%"
    );
    for row in &model.rows {
        let _ = writeln!(text, "{}  {}", cells(row).join(" "), terminal::foreign(&row.mount));
        for op in &row.ops {
            let (name, rate) = (op.op.name(), op.per_second);
            let (p50, p99) = (time(op.p50_ns), time(op.p99_ns));
            let _ = writeln!(text, "      {rate:>9.1} {p50:>9} {p99:>9}  {name}");
        }
    }
    for note in &model.notes {
        let _ = writeln!(text, "note: {note}");
    }
    text + "\n"
}

/// One line of JSON.
pub fn json(model: &Model) -> Result<String> {
    let value = json!({"connections": model.rows, "notes": model.notes});
    Ok(serde_json::to_string(&value).map_err(Failure::failed)? + "\n")
}

/// The columns of a connection except its name, padded to the width of the columns.
pub fn cells(row: &Row) -> [String; 11] {
    let knobs = row.knobs.map_or_else(
        || "-".to_owned(),
        |knobs| format!("{}/{}", knobs.max_background, knobs.congestion_threshold),
    );
    [
        format!("{:>5}", row.connection),
        format!("{:>9.1}", row.per_second),
        format!("{:>9}", time(row.p50_ns)),
        format!("{:>9}", time(row.p99_ns)),
        format!("{:>5}", row.in_background),
        format!("{:>5}", row.in_pending),
        format!("{:>5}", row.in_processing),
        format!("{:>4}{}", row.waiting(), if row.congested { '!' } else { ' ' }),
        format!("{knobs:>7}"),
        format!("{:>4}", row.threads),
        format!("{:>6.1}", row.cpu_percent),
    ]
}

/// Nanoseconds with a unit; `-` for none.
pub fn time(ns: u64) -> String {
    let value = ns as f64;
    match ns {
        0 => "-".to_owned(),
        1..1_000 => format!("{ns} ns"),
        1_000..1_000_000 => format!("{:.1} us", value / 1e3),
        1_000_000..1_000_000_000 => format!("{:.1} ms", value / 1e6),
        _ => format!("{:.2} s", value / 1e9),
    }
}
