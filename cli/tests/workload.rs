//! `defuse workload`, as a user sees it.

use std::process::{Command, Output};

fn defuse(words: &[&str]) -> Output {
    let program = env!("CARGO_BIN_EXE_defuse");
    Command::new(program).arg("workload").args(words).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn a_row_runs_at_a_small_scale_and_tells_what_it_did() {
    let dir = tempfile::tempdir().unwrap();
    // A path with characters that the language has uses for.
    let dir = dir.path().join("a \"b\" $c\\d");
    let dir = dir.to_str().unwrap();
    let row = ["files-cr-32th", "--dir", dir, "--scale", "0.0001"];
    let ran = defuse(&[&row[..], &["--json"]].concat());
    assert!(ran.status.success(), "{}", text(&ran.stderr));
    let reports: serde_json::Value = serde_json::from_slice(&ran.stdout).unwrap();
    assert_eq!(reports[0]["total"]["operations"], 1200);
    assert_eq!(reports[0]["threads"], 32);
    let ran = defuse(&row);
    let shown = text(&ran.stdout);
    assert!(shown.contains("400 files instead of 4000000"), "{shown}");
    assert!(shown.contains("IO Summary: 1200 ops"), "{shown}");
    assert!(ran.stderr.is_empty(), "no progress where nobody looks: {}", text(&ran.stderr));
}

#[test]
fn a_mistake_ends_with_2_and_a_failure_with_1() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("w.f");
    let name = file.to_str().unwrap();
    std::fs::write(&file, "set $dir=/tmp\nrum 60\n").unwrap();
    let ran = defuse(&[name]);
    assert_eq!(ran.status.code(), Some(2));
    let wanted = format!("defuse: {name}:2:1: found `rum`; expected a command (did you mean run?)");
    assert_eq!(text(&ran.stderr).trim(), wanted);
    let nowhere = defuse(&["files-cr-1th", "--dir", "/proc/nowhere", "--scale", "0.0001"]);
    assert_eq!(nowhere.status.code(), Some(1));
    assert!(text(&nowhere.stderr).contains("/proc/nowhere"), "{}", text(&nowhere.stderr));
    assert_eq!(defuse(&["no-such-workload"]).status.code(), Some(2));
    assert_eq!(defuse(&[]).status.code(), Some(2));
}

#[test]
fn every_workload_and_row_is_listed() {
    let listed = text(&defuse(&["--list"]).stdout);
    for name in ["varmail", "webproxy", "seq-rd-4KB-1th-1f", "web-server"] {
        assert!(listed.contains(name), "{name}");
    }
    let json: serde_json::Value =
        serde_json::from_slice(&defuse(&["--list", "--json"]).stdout).unwrap();
    assert_eq!(json["rows"].as_array().unwrap().len(), 45);
}
