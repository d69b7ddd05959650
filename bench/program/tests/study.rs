//! `defuse study`: the request counts of the paper, cleanup, and early errors.

#[path = "../../../cli/tests/common/mod.rs"]
mod common;

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use common::{PROGRAM, TestPlace};
use serde_json::Value;

/// A place for a study; prints the reason and returns `None` if there can be none.
fn place() -> Option<TestPlace> {
    let place = TestPlace::new_to_mount()?;
    for (program, what) in
        [("mkfs.ext4", "ext4 can be made"), ("losetup", "loop devices can be made")]
    {
        if !Command::new("sh")
            .args(["-c", &format!("command -v {program}")])
            .stdout(Stdio::null())
            .status()
            .unwrap()
            .success()
        {
            println!("skipped: without {program} no {what}");
            return None;
        }
    }
    if !Path::new("/dev/loop-control").exists() {
        println!("not here: there are no loop devices");
        return None;
    }
    Some(place)
}

fn study(place: &TestPlace, arguments: &[&str]) -> Command {
    let mut command = Command::new(PROGRAM);
    let fixed =
        ["study", "--scale", "tiny", "--device", "none", "--no-kernel-stages", "--json", "--work"];
    command.args(fixed).arg(place.path("src")).arg("--out").arg(place.path("out")).args(arguments);
    command
}

/// Runs a study that must succeed.
fn results(place: &TestPlace, arguments: &[&str]) -> Value {
    let output = study(place, arguments).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

/// Requests of a cell by type.
fn requests(results: &Value, row: u64, config: &str) -> BTreeMap<String, u64> {
    let ops = find_cell(results, row, config)["daemon"]["ops"].as_array().unwrap();
    ops.iter()
        .map(|op| (op["op"].as_str().unwrap().to_owned(), op["count"].as_u64().unwrap()))
        .collect()
}

fn find_cell<'a>(results: &'a Value, row: u64, config: &str) -> &'a Value {
    let cells = results["cells"].as_array().unwrap();
    let cell = cells.iter().find(|cell| cell["row"] == row && cell["config"] == config).unwrap();
    assert!(cell["error"].is_null(), "{}", cell["error"]);
    &cell["measured"]
}

/// The number of operations of one kind in the workload.
fn flowop(results: &Value, row: u64, config: &str, kind: &str) -> u64 {
    let flowops = find_cell(results, row, config)["flowops"].as_array().unwrap();
    let of_kind = flowops.iter().filter(|flowop| flowop["kind"] == kind);
    of_kind.map(|flowop| flowop["count"].as_u64().unwrap()).sum()
}

fn bytes(results: &Value, row: u64, config: &str, field: &str) -> u64 {
    find_cell(results, row, config)[field].as_u64().unwrap()
}

#[test]
fn writes_are_one_request_for_4_kib_with_base_and_32_times_fewer_with_opt() {
    let Some(place) = place() else { return };
    let results = results(&place, &["--rows", "21,24", "--configs", "native,base,opt"]);
    for row in [21, 24] {
        let written = bytes(&results, row, "native", "written_bytes");
        assert!(written >= 1 << 20 && written.is_multiple_of(128 << 10), "{written}");
        for config in ["base", "opt"] {
            assert_eq!(bytes(&results, row, config, "written_bytes"), written);
        }
        assert_eq!(requests(&results, row, "base")["WRITE"], written / 4096, "row {row}");
        assert_eq!(requests(&results, row, "opt")["WRITE"], written / (128 << 10), "row {row}");
        for config in ["base", "opt"] {
            let requests = requests(&results, row, config);
            assert_eq!((requests["CREATE"], requests["FLUSH"], requests["RELEASE"]), (1, 1, 1));
            assert!(requests.get("GETXATTR").copied().unwrap_or(0) <= 1, "{requests:?}");
        }
    }
    assert_eq!(find_cell(&results, 21, "native")["daemon"], Value::Null);
}

#[test]
fn reads_are_128_kib_whatever_the_application_reads() {
    let Some(place) = place() else { return };
    let results = results(&place, &["--rows", "1-4", "--configs", "base,opt"]);
    for row in 1..=4 {
        for config in ["base", "opt"] {
            let (read, requests) =
                (bytes(&results, row, config, "read_bytes"), requests(&results, row, config));
            let whole = read / (128 << 10);
            // Readahead begins with less than a full request, and again if a reader was faster.
            // Requests of the application's size would be 32 times as many in row 1.
            let reads = requests["READ"];
            assert!((whole..=2 * whole).contains(&reads), "row {row} {config}: {reads} for {read}");
            assert_eq!((requests["OPEN"], requests["RELEASE"], requests["FLUSH"]), (1, 1, 1));
        }
    }
}

#[test]
fn small_files_cause_the_requests_of_the_paper() {
    let Some(place) = place() else { return };
    let results = results(&place, &["--rows", "37,39,41", "--configs", "base,opt"]);
    for config in ["base", "opt"] {
        let files = flowop(&results, 37, config, "createfile");
        let creates = requests(&results, 37, config);
        assert!(files > 100);
        for op in ["CREATE", "WRITE", "FLUSH", "RELEASE"] {
            assert_eq!(creates[op], files, "{config} {op}: {creates:?}");
        }
        // GETATTR of the directory, which every file changes. The first may be cached, and the
        // cache expires after a second.
        assert!(creates["GETATTR"].abs_diff(files) <= 8, "{config}: {creates:?}");
        // The directories of the set are looked up, created, and looked up again after a second.
        assert!((files..=files + 32).contains(&creates["LOOKUP"]), "{config}: {creates:?}");
        assert!(creates.get("GETXATTR").copied().unwrap_or(0) <= 1, "{creates:?}");

        let opened = flowop(&results, 39, config, "openfile");
        let reads = requests(&results, 39, config);
        for op in ["OPEN", "FLUSH", "RELEASE"] {
            assert_eq!(reads[op], opened, "{config} {op}: {reads:?}");
        }

        let deleted = flowop(&results, 41, config, "deletefile");
        let deletes = requests(&results, 41, config);
        assert_eq!(deletes["UNLINK"], deleted, "{config}: {deletes:?}");
        assert!((deleted..=deleted + 32).contains(&deletes["LOOKUP"]), "{config}: {deletes:?}");
    }
}

#[test]
fn any_command_that_mounts_can_be_studied() {
    let Some(place) = place() else { return };
    let program = Path::new(PROGRAM).with_file_name("defuse");
    let program = program.display();
    let command = format!(
        "mine={program} mount --foreground passthrough:{{source}} {{mountpoint}} -o no_passthrough"
    );
    let results = results(&place, &["--rows", "21", "--configs", "native", "--config", &command]);
    let mine = find_cell(&results, 21, "mine");
    assert!(
        mine["operations"].as_u64().unwrap() > 0 && mine["cpu"]["daemon_ns"].as_u64().unwrap() > 0
    );
}

/// The visible resources that a study creates.
fn list_left(place: &TestPlace) -> Vec<String> {
    let work = place.path("src").display().to_string();
    let mut left = Vec::new();
    for file in ["/proc/self/mountinfo", "/proc/swaps"] {
        let text = fs::read_to_string(file).unwrap();
        left.extend(text.lines().filter(|line| line.contains(&work)).map(str::to_owned));
    }
    for entry in fs::read_dir("/sys/block").unwrap().flatten() {
        let backing =
            fs::read_to_string(entry.path().join("loop/backing_file")).unwrap_or_default();
        left.extend(backing.contains(&work).then_some(backing));
    }
    left.extend(
        fs::read_dir(&work).unwrap().flatten().map(|entry| entry.path().display().to_string()),
    );
    left
}

#[test]
fn a_signal_ends_it_cleanly_and_it_can_be_resumed() {
    let Some(place) = place() else { return };
    let arguments = ["--rows", "21,37,41", "--configs", "native,base"];
    let mut child =
        study(&place, &arguments).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let file = place.path("out").join("results.json");
    let end = Instant::now() + Duration::from_secs(60);
    while !file.exists() && Instant::now() < end {
        sleep(Duration::from_millis(5));
    }
    let pid = rustix::process::Pid::from_child(&child);
    rustix::process::kill_process(pid, rustix::process::Signal::INT).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(1));
    assert_eq!(list_left(&place), Vec::<String>::new());
    let before: Value = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
    assert_eq!(before["interrupted"], true);
    let measured_before = before["cells"].as_array().unwrap().len();
    assert!((1..6).contains(&measured_before), "{measured_before}");
    assert!(place.path("out").join("report.html").exists());

    let results = results(&place, &[&arguments[..], &["--resume"]].concat());
    let cells = results["cells"].as_array().unwrap();
    assert_eq!(cells.len(), 6);
    assert_eq!(cells[..measured_before], before["cells"].as_array().unwrap()[..]);
    assert_eq!(list_left(&place), Vec::<String>::new());
}

#[test]
fn errors_are_reported_before_anything_starts() {
    let place = TestPlace::new();
    let said = |arguments: &[&str]| {
        let output = study(&place, arguments).output().unwrap();
        assert!(!output.status.success(), "{arguments:?}");
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    for (arguments, expected) in [
        (["--rows", "46"], "from 1 to 45"),
        (["--configs", "fast"], "--config fast=COMMAND"),
        (["--config", "x=true"], "{source}"),
        (["--configs", "base,base"], "named twice"),
    ] {
        let said = said(&arguments);
        assert!(said.contains(expected), "{said}");
    }
    let missing = said(&["--report", "/no/such/results"]);
    assert!(missing.contains("/no/such/results") && missing.contains("--out"), "{missing}");
    if rustix::process::geteuid().is_root() {
        assert!(
            said(&["--config", "x=no-such-program {source} {mountpoint}"])
                .contains("no-such-program is missing")
        );
        assert!(said(&["--runs", "0"]).contains("--runs"));
    }
    assert!(!place.path("out").exists(), "nothing was begun");
}

/// The emulated device in the results is the device of the block layer's throttle. With several
/// runs, the results have their spread.
#[test]
fn an_emulated_disk_is_called_emulated_and_several_runs_show_their_spread() {
    let Some(place) = place() else { return };
    let out = place.path("out");
    let mut command = Command::new(PROGRAM);
    command.args(["study", "--scale", "tiny", "--rows", "5,20", "--configs", "native,opt"]);
    command.args(["--device", "hdd", "--runs", "2", "--no-kernel-stages", "--json", "--work"]);
    let output = command.arg(place.path("src")).arg("--out").arg(&out).output().unwrap();
    let report = String::from_utf8_lossy(&output.stderr).into_owned();
    if !output.status.success() && (report.contains("throttle") || report.contains("cgroup")) {
        println!("not here: no device can be throttled here: {report}");
        return;
    }
    assert!(output.status.success(), "{report}");
    assert!(!report.contains("-0 s left"), "{report}");
    let results: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(results["device"]["emulated"], "hdd");
    assert_eq!(results["device"]["limits"]["read_iops"], 1200);
    let cells = results["cells"].as_array().unwrap();
    let runs = |row: u64, config: &str| {
        let of = |cell: &&Value| cell["row"] == row && cell["config"] == config;
        cells.iter().filter(of).map(|cell| cell["run"].as_u64().unwrap()).collect::<Vec<_>>()
    };
    for row in [5, 20] {
        for config in ["native", "opt"] {
            let mut found = runs(row, config);
            found.sort();
            assert_eq!(found, [1, 2], "row {row} {config}");
        }
    }
    let page = fs::read_to_string(out.join("report.html")).unwrap();
    assert!(page.contains("emulated HDD") && page.contains("Medians (2 runs)"));
    assert!(page.contains("throughput is meaningless"), "tiny cells are no measure of speed");
    let table = Command::new(PROGRAM).args(["study", "--report"]).arg(&out).output().unwrap();
    let table = String::from_utf8_lossy(&table.stdout).into_owned();
    assert!(table.contains("emulated HDD") && table.contains("2 runs: median"), "{table}");
    let row = table.lines().find(|line| line.contains("rnd-rd-1MB-32th-1f")).unwrap();
    assert!(row.matches('~').count() == 2, "{row}");
}
