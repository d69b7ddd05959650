//! `defuse top` for scripts.

use std::fmt::Write as _;

use serde_json::json;

use super::model::{ConnectionRow, OpRow, TopModel};
use super::servers::ServerRow;
use crate::error::{CommandFailure, Result};
use crate::{served, terminal};

/// A table of connections, each followed by its operations, and one of servers, each followed by
/// its operations and its clients.
pub fn text(model: &TopModel) -> String {
    let mut text = format!(
        "{:>5} {:>9} {:>9} {:>9} {:>5} {:>5} {:>5} {:>5} {:>7} {:>4} {:>6}  MOUNT\n",
        "CONN", "OPS/S", "P50", "P99", "BACKG", "PEND", "PROC", "WAIT", "MAX/CG", "THR", "CPU%"
    );
    for row in &model.rows {
        let _ =
            writeln!(text, "{}  {}", cells(row).join(" "), terminal::escape_controls(&row.mount));
        row.ops.iter().for_each(|op| text.push_str(&operation(op)));
    }
    if !model.servers.is_empty() {
        text.push('\n');
        text.push_str(&servers(&model.servers));
    }
    for note in &model.notes {
        let _ = writeln!(text, "note: {note}");
    }
    text + "\n"
}

fn operation(op: &OpRow) -> String {
    let (name, rate) = (op.op.name(), op.per_second);
    let (p50, p99) = (time(op.p50_ns), time(op.p99_ns));
    format!("      {rate:>9.1} {p50:>9} {p99:>9}  {name}\n")
}

fn servers(rows: &[ServerRow]) -> String {
    let mut text = SERVER_HEADS.join(" ") + "\n";
    for row in rows {
        let _ = writeln!(text, "{} {}", server_cells(row).join(" "), server_name(row));
        row.ops.iter().for_each(|op| text.push_str(&operation(op)));
        for line in served::clients(&row.clients, row.clients_left_out).lines() {
            let _ = writeln!(text, "        {line}");
        }
    }
    text
}

/// The heads of [`server_cells`], and the head of the name.
pub const SERVER_HEADS: [&str; 11] = [
    "    PID",
    "    OPS/S",
    "      P50",
    "      P99",
    "   KIB/S",
    " BUSY",
    " WAIT",
    "CLIENTS",
    " THR",
    "  CPU%",
    "SOCKET",
];

/// The columns of a server except its name, padded to the width of the columns.
pub fn server_cells(row: &ServerRow) -> [String; 10] {
    let clients = row.clients.len() as u64 + row.clients_left_out;
    [
        format!("{:>7}", row.pid),
        format!("{:>9.1}", row.per_second),
        format!("{:>9}", time(row.p50_ns)),
        format!("{:>9}", time(row.p99_ns)),
        format!("{:>8.1}", row.bytes_per_second / 1024.0),
        format!("{:>5}", row.busy),
        format!("{:>5}", row.waiting),
        format!("{clients:>7}"),
        format!("{:>4}", row.threads),
        format!("{:>6.1}", row.cpu_percent),
    ]
}

/// The socket of a server, and its source.
pub fn server_name(row: &ServerRow) -> String {
    format!(
        "{} ({})",
        terminal::escape_controls(&row.socket),
        terminal::escape_controls(&row.source)
    )
}

/// One line of JSON.
pub fn json(model: &TopModel) -> Result<String> {
    let value = json!({"connections": model.rows, "servers": model.servers, "notes": model.notes});
    Ok(serde_json::to_string(&value).map_err(CommandFailure::from_error)? + "\n")
}

/// The columns of a connection except its name, padded to the width of the columns.
pub fn cells(row: &ConnectionRow) -> [String; 11] {
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
        format!("{:>4}{}", row.count_waiting(), if row.congested { '!' } else { ' ' }),
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
