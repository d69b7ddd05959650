//! `defuse bench` at a small scale: the shape of its results, machine-independent values, and
//! cleanup.

#[path = "../../../cli/tests/common/mod.rs"]
mod common;

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use common::{PROGRAM, TestPlace};
use serde_json::Value;

/// A place for a benchmark; prints the reason and returns `None` if there can be none.
fn place() -> Option<TestPlace> {
    let place = TestPlace::new_to_mount()?;
    let mut find = Command::new("sh");
    find.args(["-c", "command -v mkfs.ext4 && command -v losetup"]).stdout(Stdio::null());
    if !find.status().unwrap().success() {
        println!("skipped: mkfs.ext4 and losetup are not both installed");
        return None;
    }
    if !Path::new("/dev/loop-control").exists() {
        println!("not here: there are no loop devices");
        return None;
    }
    Some(place)
}

fn bench(place: &TestPlace, arguments: &[&str]) -> Command {
    let mut command = Command::new(PROGRAM);
    command.args(["bench", "direct", "--scale", "tiny", "--json", "--work"]);
    command.arg(place.path("src")).args(arguments);
    command
}

/// The cells of a table for a target.
fn cells<'a>(results: &'a Value, table: &str, target: &str) -> Vec<&'a Value> {
    let cells = results["cells"].as_array().unwrap().iter();
    cells.filter(|cell| cell["table"] == table && cell["target"] == target).collect()
}

fn number(cell: &Value, path: &str) -> u64 {
    cell.pointer(path).and_then(Value::as_u64).unwrap_or_else(|| panic!("{path} in {cell}"))
}

#[test]
fn every_table_is_measured_and_direct_calls_do_not_wait() {
    let Some(place) = place() else { return };
    let out = place.path("out");
    let output = bench(&place, &["--rounds", "2", "--out"]).arg(&out).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let results: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(
        (&results["schema"], &results["rounds"]),
        (&"defuse-bench-direct/1".into(), &2.into())
    );

    // Two blocks and two rounds each; three operations on two file systems.
    for target in ["native", "mount", "direct", "served"] {
        assert_eq!(cells(&results, "writes", target).len(), 4, "{target}");
        assert_eq!(cells(&results, "sequential", target).len(), 24, "{target}");
    }
    for (table, target) in
        [("memory", "native"), ("memory", "memory"), ("share", "client"), ("share", "dummy")]
    {
        assert_eq!(cells(&results, table, target).len(), 4, "{table} {target}");
    }
    for cell in results["cells"].as_array().unwrap() {
        let (calls, block) = (number(cell, "/calls"), number(cell, "/block"));
        assert!(number(cell, "/ns") > 0 && calls > 0, "{cell}");
        assert_eq!(number(cell, "/bytes"), calls * block, "{cell}");
    }

    let waits = |cell: &&Value| number(cell, "/app/voluntary") + number(cell, "/server/voluntary");
    for target in ["direct", "served"] {
        // A page fault may cause one wait. Calls served by another process wait every time.
        let mut switches: Vec<u64> = cells(&results, "writes", target).iter().map(waits).collect();
        switches.sort_unstable();
        assert_eq!(switches[0], 0, "{target}: {switches:?}");
        assert!(switches[3] < 10, "{target}: {switches:?}");
    }
    for cell in cells(&results, "writes", "mount") {
        assert!(
            number(cell, "/requests") >= number(cell, "/calls"),
            "the daemon was passed by: {cell}"
        );
    }
    let ns = |table, target| -> u64 {
        cells(&results, table, target).into_iter().map(|cell| number(cell, "/ns")).sum()
    };
    assert!(ns("sequential", "direct") < ns("sequential", "mount"));
    assert!(ns("share", "dummy") < ns("share", "client"));

    let goals = results["goals"].as_array().unwrap();
    for part in [
        "against the mount",
        "against native",
        "voluntary",
        "memory:",
        "the client's share",
        "a start",
    ] {
        let what = |goal: &&Value| goal["what"].as_str().unwrap().contains(part);
        let goal = goals.iter().find(what).unwrap_or_else(|| panic!("{part}: {goals:?}"));
        assert!(goal["figure"]["median"].is_number() && goal["outcome"].is_string(), "{goal}");
    }
    let written: Value =
        serde_json::from_slice(&fs::read(out.join("direct.json")).unwrap()).unwrap();
    assert_eq!(written["cells"], results["cells"]);
    assert!(fs::read_to_string(out.join("direct.html")).unwrap().contains("</html>"));
    assert_eq!(list_left(&place), Vec::<String>::new());
}

/// The visible resources that the benchmark creates.
fn list_left(place: &TestPlace) -> Vec<String> {
    let work = place.path("src").display().to_string();
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
    let mut left: Vec<String> =
        mounts.lines().filter(|line| line.contains(&work)).map(str::to_owned).collect();
    for entry in fs::read_dir("/sys/block").unwrap().flatten() {
        let backing =
            fs::read_to_string(entry.path().join("loop/backing_file")).unwrap_or_default();
        left.extend(backing.contains(&work).then_some(backing));
    }
    let files = fs::read_dir(&work).unwrap().flatten();
    left.extend(files.map(|entry| entry.path().display().to_string()));
    left
}

#[test]
fn a_signal_ends_it_cleanly() {
    let Some(place) = place() else { return };
    let mut child = bench(&place, &["--rounds", "1000000"])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    common::eventually("at work", || {
        list_left(&place).iter().any(|line| line.contains("mount-ext4"))
    });
    let pid = rustix::process::Pid::from_child(&child);
    rustix::process::kill_process(pid, rustix::process::Signal::INT).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(1));
    assert_eq!(list_left(&place), Vec::<String>::new());
}

#[test]
fn errors_are_reported_before_anything_starts() {
    let place = TestPlace::new();
    for (arguments, expected) in [
        (&["--libfuse", "/no/such/passthrough_hp"][..], "/no/such/passthrough_hp"),
        (&["--rounds", "0"], "--rounds"),
        (&["--work", "/no/such/place"], "/no/such/place"),
        (&["--scale", "huge"], "full or tiny"),
        (&["--out", "/proc/none"], "--out"),
    ] {
        let output =
            Command::new(PROGRAM).args(["bench", "direct"]).args(arguments).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success(), "{arguments:?}: {said}");
        let is_root = rustix::process::geteuid().is_root();
        assert!(said.contains(expected) || !is_root && said.contains("root is needed"), "{said}");
    }
    drop(place);
}

/// Every program is measured on every target: natively, within a run, and on a mount.
#[test]
fn programs_are_measured_on_tmpfs_within_a_run_and_on_mounts() {
    let Some(_place) = TestPlace::new_to_mount() else { return };
    let work = tempfile::tempdir().unwrap();
    let mut command = Command::new(PROGRAM);
    command.args(["bench", "run", "--scale", "tiny", "--rounds", "1", "--json", "--work"]);
    let output = command.arg(work.path()).output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    if text.contains("is not installed") {
        return println!("skipped: {text}");
    }
    assert!(output.status.success(), "{text}");
    let results: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(results["schema"], "defuse-bench-run/2");
    for target in ["native", "memory", "passthrough", "memory-mount", "passthrough-mount"] {
        let cells = results["cells"].as_array().unwrap();
        let of_target: Vec<_> = cells.iter().filter(|cell| cell["target"] == target).collect();
        assert_eq!(of_target.len(), 6, "{target}");
        assert!(of_target.iter().all(|cell| number(cell, "/ns") > 0), "{target}");
    }
    assert_eq!(fs::read_dir(work.path()).unwrap().count(), 0, "nothing is left");
}

#[test]
fn several_processes_are_measured_by_every_way_and_a_shared_file_is_read_once() {
    let Some(place) = place() else { return };
    let mut command = Command::new(PROGRAM);
    command
        .args(["bench", "uhs", "--only", "clients", "--scale", "tiny", "--rounds", "1", "--json"]);
    let output = command.arg("--work").arg(place.path("src")).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let results: Value = serde_json::from_slice(&output.stdout).unwrap();
    let rows = results["rows"].as_array().unwrap();
    let row = |name: &str, unit: &str| {
        let found = rows.iter().find(|row| row["name"] == name && row["unit"] == unit);
        &found.unwrap_or_else(|| panic!("{name} {unit} in {results}"))["figures"]
    };
    let once = row("one file read by 4 processes", "times read");
    let times = |target: &str| once[target][0].as_f64().unwrap();
    assert!((0.99..1.2).contains(&times("shared")), "{once}");
    assert!(times("ext4, O_DIRECT") > 2.0, "{once}");
    let many = row("4K reads of own cached files, processes: 8", "1/s");
    assert_eq!(many.as_object().unwrap().len(), 5, "{many}");
    assert_eq!(row("varmail, processes: 1", "1/s").as_object().unwrap().len(), 6);
    assert_eq!(row("look for a new name", "ns").as_object().unwrap().len(), 3);
    assert_eq!(fs::read_dir(place.path("src")).unwrap().count(), 0, "nothing is left");
}

/// The policies of `defuse bench eviction`.
const POLICIES: [&str; 6] = ["lru", "lfu", "arc", "s3-fifo", "plain-e", "e"];

#[test]
fn policies_are_measured_on_servers_and_a_cache_of_everything_reads_each_extent_once() {
    let work = tempfile::tempdir().unwrap();
    let mut command = Command::new(PROGRAM);
    command.args(["bench", "eviction", "--live", "--json", "--uses", "1000", "--sizes", "25,400"]);
    command.args(["--only", "Zipf 1.0,and scans,50 % in common", "--work"]);
    let output = command.arg(work.path()).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let results: Value = serde_json::from_slice(&output.stdout).unwrap();
    let cells = results["cells"].as_array().unwrap();
    assert_eq!(cells.len(), 3 * 2 * POLICIES.len());
    for (at, cell) in cells.iter().enumerate() {
        assert_eq!(cell["policy"], POLICIES[at % POLICIES.len()], "{cell}");
        let figure = |name: &str| number(cell, &format!("/live/{name}"));
        let (uses, reads) = (figure("uses"), figure("reads"));
        assert!(reads <= uses && figure("all_uses") >= 1000, "{cell}");
        assert_eq!(uses, number(cell, "/simulated/uses"), "{cell}");
        assert!(figure("all_reads") >= figure("extents"), "{cell}");
        if cell["thousandths"] == 4000 {
            assert_eq!(figure("all_reads"), figure("extents"), "{cell}");
            // Scans do not fit into the memory of a simulation, which closes no files.
            assert!(uses - reads >= number(cell, "/simulated/hits"), "{cell}");
        }
    }
    assert_eq!(results["goals"].as_array().unwrap().len(), 3);
    assert_eq!(fs::read_dir(work.path()).unwrap().count(), 0, "nothing is left");
}

#[test]
fn a_trace_that_does_not_exist_is_an_error_that_names_it() {
    let work = tempfile::tempdir().unwrap();
    let mut command = Command::new(PROGRAM);
    command.args(["bench", "eviction", "--live", "--only", "no such trace", "--work"]);
    let output = command.arg(work.path()).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && said.contains("no such trace"), "{said}");
    assert_eq!(fs::read_dir(work.path()).unwrap().count(), 0, "nothing is left");
}
