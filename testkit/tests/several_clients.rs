//! The POSIX cases by eight clients of one server at once. Each is a mount by a process of its own,
//! and has a directory of the same file system.

use std::process::Command;

use defuse_testkit::mounted;

const CLIENTS: usize = 8;

#[test]
fn clients_at_once_keep_the_promises() {
    if let Some(reason) = mounted::unavailable_reason() {
        println!("skipped: {reason}");
        return;
    }
    let mut command = Command::new(env!("CARGO_BIN_EXE_conformance"));
    command.args([
        "--clients",
        &CLIENTS.to_string(),
        "--suite",
        "posix",
        "--configs",
        "shared-memory",
    ]);
    let output = command.output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    let why = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}\n{why}");
    let of = format!(" x {CLIENTS} ");
    let rows: Vec<usize> =
        said.lines().filter_map(|line| parse_passed(line.split_once(&of)?.1)).collect();
    // The row is printed twice: at its end, and in the table.
    assert_eq!(rows.len(), 2, "{said}");
    assert!(rows.iter().all(|passed| *passed >= CLIENTS * 150), "too few cases: {said}");
}

/// The number of passed cases in the rest of a row.
fn parse_passed(row: &str) -> Option<usize> {
    row.split_whitespace().next()?.parse().ok()
}
