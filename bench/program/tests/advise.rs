//! `defuse advise`: its text has the numbers, and the directory is not changed.

#[path = "../../../cli/tests/common/mod.rs"]
mod common;

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use common::{PROGRAM, TestPlace};
use serde_json::Value;

fn tree(place: &TestPlace) {
    for directory in 0..4 {
        let directory = place.path("src").join(format!("d{directory}"));
        fs::create_dir(&directory).unwrap();
        for file in 0..25 {
            let path = directory.join(format!("f{file}"));
            fs::write(&path, format!("words of {}\n", path.display()).repeat(100)).unwrap();
        }
    }
}

fn advise(place: &TestPlace, options: &[&str], command: &[&str]) -> (Option<i32>, String, String) {
    let mut advise = Command::new(PROGRAM);
    advise.arg("advise").arg(place.path("src")).args(options).arg("--work").arg(place.path("mnt"));
    let output = advise.arg("--").args(command).stdin(Stdio::null()).output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (output.status.code(), text(&output.stdout), text(&output.stderr))
}

fn json(place: &TestPlace, options: &[&str], command: &[&str]) -> Value {
    let (code, out, err) = advise(place, &[options, &["--json"]].concat(), command);
    assert_eq!(code, Some(0), "{err}");
    serde_json::from_str(&out).unwrap()
}

fn requests(series: &Value, op: &str) -> u64 {
    let ops = series["runs"][0]["daemon"]["ops"].as_array().unwrap();
    ops.iter().find(|stats| stats["op"] == op).map_or(0, |stats| stats["count"].as_u64().unwrap())
}

fn is_there(program: &str) -> bool {
    let there = Command::new(program).arg("--version").stdout(Stdio::null()).status().is_ok();
    if !there {
        println!("skipped: there is no {program}");
    }
    there
}

#[test]
fn grep_opens_every_file_and_changes_none() {
    let Some(place) = TestPlace::new_to_mount() else { return };
    tree(&place);
    let advice = json(&place, &["--runs", "1", "--no-try"], &["grep", "-r", "no such words", "{}"]);
    assert_eq!(requests(&advice["mounted"], "OPEN"), 100);
    assert_eq!((&advice["exit_code"], &advice["changes_files"]), (&1.into(), &false.into()));
    assert_eq!(advice["native"]["runs"].as_array().unwrap().len(), 1);
    assert_eq!(fs::read_dir(place.path("mnt")).unwrap().count(), 0, "nothing is left behind");
}

#[test]
fn a_command_that_writes_gets_a_fresh_copy_and_write_back_is_tried() {
    let Some(place) = TestPlace::new_to_mount() else { return };
    if !is_there("tar") {
        return;
    }
    tree(&place);
    // One page per write, on a mount where the daemon handles every byte.
    let command = ["sh", "-c", "tar c d0 d1 d2 d3 | dd of=a.tar bs=4k iflag=fullblock status=none"];
    let (code, out, err) =
        advise(&place, &["--runs", "2", "--config", "slow=-o no_passthrough,spin=0"], &command);
    assert_eq!(code, Some(0), "{err}");
    assert!(out.contains("The command changes files: every run had a fresh copy"), "{out}");
    assert!(out.contains("natively ") && out.contains(", on slow "), "{out}");
    assert!(out.contains("WRITE") && out.contains("requests took"), "{out}");
    assert!(!place.path("src/a.tar").exists(), "the directory itself is only read");
    if let Some(line) = out.lines().find(|line| line.contains("-o writeback:")) {
        let count = |before: &str, after: &str| -> u64 {
            line.split_once(before).unwrap().1.split_once(after).unwrap().0.trim().parse().unwrap()
        };
        let (before, after) = (count("s, ", " requests"), count("became ", ")"));
        assert!(after < before, "{line}");
    }
}

#[test]
fn git_works_on_the_mount_as_natively() {
    let Some(place) = TestPlace::new_to_mount() else { return };
    if !is_there("git") {
        return;
    }
    tree(&place);
    let script = "git init -q . && git add . && git -c user.name=n -c user.email=e commit -qm m && git status --short";
    let advice = json(&place, &["--runs", "1", "--no-try"], &["sh", "-c", script]);
    assert_eq!((&advice["exit_code"], &advice["changes_files"]), (&0.into(), &true.into()));
    assert!(requests(&advice["mounted"], "CREATE") >= 100);
    assert!(!Path::new(&place.path("src/.git")).exists());
}

#[test]
fn incomparable_runs_are_refused() {
    let Some(place) = TestPlace::new_to_mount() else { return };
    tree(&place);
    let failed = |options: &[&str], command: &[&str]| {
        let (code, out, err) = advise(&place, options, command);
        assert_ne!(code, Some(0), "{out}");
        err
    };
    assert!(failed(&[], &["/no/such/program"]).contains("/no/such/program"));
    assert!(failed(&["--config", "native"], &["true"]).contains("another --config"));
    assert!(failed(&["--copy-limit", "1K"], &["true"]).contains("--copy-limit"));
    assert!(failed(&["--runs", "0"], &["true"]).contains("--runs"));
    // The command succeeds only without a FUSE mount.
    let differs = failed(&["--runs", "1"], &["sh", "-c", "test \"$(stat -f -c %T .)\" != fuseblk"]);
    assert!(differs.contains("ended with 1 here and with 0 natively"), "{differs}");
    assert_eq!(fs::read_dir(place.path("mnt")).unwrap().count(), 0);
}
