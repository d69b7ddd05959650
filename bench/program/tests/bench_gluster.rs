//! `defuse bench gluster` at a small scale: the shape of its results, and its end by signals.

#[path = "../../../cli/tests/common/mod.rs"]
mod common;

use std::collections::BTreeSet;
use std::fs;
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};

use common::{PROGRAM, TestPlace, eventually};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

/// A place for the benchmark; prints the reason and returns `None` if there can be none.
fn place() -> Option<TestPlace> {
    let place = TestPlace::new_to_mount()?;
    let path = std::env::var("PATH").unwrap_or_default();
    let is_there = |program: &&str| {
        let mut dirs = path.split(':').chain(["/usr/sbin", "/sbin"]);
        dirs.any(|dir| std::path::Path::new(dir).join(program).is_file())
    };
    for program in ["glusterd", "gluster", "glusterfs", "fio", "ip", "nsenter"] {
        if !is_there(&program) {
            println!("skipped: {program} is not installed");
            return None;
        }
    }
    Some(place)
}

fn bench(arguments: &[&str]) -> Command {
    let mut command = Command::new(PROGRAM);
    command.args(["bench", "gluster", "--time", "50", "--file-size", "1", "--files", "40"]);
    command.args(arguments);
    command
}

/// The processes in the network of the servers of a benchmark.
fn processes(network: &str) -> BTreeSet<String> {
    let entries = fs::read_dir("/proc").unwrap().flatten();
    let of_network = entries.filter(|entry| {
        let link = fs::read_link(entry.path().join("ns/net"));
        link.is_ok_and(|link| link.to_string_lossy() == network)
    });
    of_network.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
}

/// A benchmark at work, and the network of its servers.
fn start_benchmark() -> (Child, String) {
    let only = ["--only", "randread-4k-sync-1", "--volumes", "dist", "--rounds", "1000000"];
    let mut command = bench(&[&only[..], &["--targets", "native-1,adaptive"]].concat());
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
    let found = lines.any(|line| line.unwrap().contains("round 1"));
    assert!(found, "it ended before its first round");
    // Nothing may wait for a reader.
    std::thread::spawn(move || lines.for_each(drop));
    let children = fs::read_to_string(format!("/proc/{0}/task/{0}/children", child.id())).unwrap();
    let first = children.split(' ').next().unwrap();
    let network = fs::read_link(format!("/proc/{first}/ns/net")).unwrap();
    let network = network.to_string_lossy().into_owned();
    assert!(processes(&network).len() > 5, "{:?}", processes(&network));
    (child, network)
}

#[test]
fn clients_are_measured_on_servers_of_their_own() {
    let Some(place) = place() else { return };
    let targets =
        ["--targets", "native-2,adaptive,run", "--rounds", "2", "--volumes", "repl", "--json"];
    let only = ["--only", "randwrite-4k-sync-2,randread-4k-libaio-2x4,create,list,stat,delete"];
    let load = ["--jobs", "2", "--depths", "4", "--out"];
    let mut command = bench(&[&targets[..], &only, &load].concat());
    let output = command.arg(place.path("out")).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    let results: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(results["schema"], "defuse-bench-gluster/1");
    let left_out = results["left_out"].as_array().unwrap();
    assert!(left_out.len() == 1 && left_out[0].as_str().unwrap().contains("libaio"), "{said}");
    let cells = results["cells"].as_array().unwrap();
    assert_eq!(cells.len(), (6 * 3 - 1) * 2, "{said}");
    for cell in cells {
        assert_eq!(cell["error"], Value::Null, "{cell}");
        // Cached answers cost neither client nor servers anything.
        let is_cached = cell["case"]["work"]["names"] == "stat";
        let figures = ["operations", "ns", "client_ns", "servers_ns"];
        for figure in &figures[..if is_cached { 2 } else { 4 }] {
            assert!(cell[figure].as_u64().unwrap() > 0, "{figure} of {cell}");
        }
        let threads = cell["threads"].as_array().unwrap();
        let has =
            |reader| threads.iter().any(|it| it["name"].as_str().unwrap().starts_with(reader));
        match cell["target"].as_str().unwrap() {
            _ if is_cached => {}
            "native-2" => assert!(has("glfs_fuseproc"), "{cell}"),
            "adaptive" => assert!(has("defuse-worker"), "{cell}"),
            _ => assert!(!has("glfs_fuseproc"), "{cell}"),
        }
    }
    let goals = results["goals"].as_array().unwrap();
    assert!(goals.iter().any(|goal| goal["what"].as_str().unwrap().contains("create")));
    let written = fs::read(place.path("out").join("gluster.json")).unwrap();
    let written: Value = serde_json::from_slice(&written).unwrap();
    assert_eq!(written["cells"], results["cells"]);
    let report = fs::read_to_string(place.path("out").join("gluster.html")).unwrap();
    assert!(report.contains("</html>") && report.contains("randwrite-4k-sync"));
}

/// The volume has no servers, so that its bricks cost the client time, and the servers none.
#[test]
fn a_volume_within_the_client_is_measured_with_every_policy() {
    let Some(_place) = place() else { return };
    let targets =
        ["--targets", "native-1,one,paper,merged,adaptive,run", "--rounds", "1", "--json"];
    let only = ["--only", "randread-4k-sync", "--jobs", "4", "--volumes", "graph"];
    let output = bench(&[&targets[..], &only].concat()).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    if said.contains("libglusterfs-dev") {
        println!("skipped: libglusterfs-dev is not installed");
        return;
    }
    let results: Value = serde_json::from_slice(&output.stdout).unwrap();
    let cells = results["cells"].as_array().unwrap();
    assert_eq!(cells.len(), 6, "{said}");
    for cell in cells {
        assert!(cell["operations"].as_u64().unwrap() > 0, "{cell}");
        assert_eq!(cell["servers_ns"], 0, "{cell}");
    }
}

#[test]
fn a_signal_ends_it_with_the_measured_cases_and_kill_leaves_nothing() {
    let Some(_place) = place() else { return };
    let (mut child, network) = start_benchmark();
    kill_process(Pid::from_child(&child), Signal::INT).unwrap();
    let mut text = String::new();
    std::io::Read::read_to_string(&mut child.stdout.take().unwrap(), &mut text).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(1));
    assert!(text.contains("Interrupted") && text.contains("randread-4k-sync-1"), "{text}");
    eventually("the servers are gone", || processes(&network).is_empty());

    let (mut child, network) = start_benchmark();
    child.kill().unwrap();
    child.wait().unwrap();
    eventually("the servers are gone", || processes(&network).is_empty());
}

#[test]
fn errors_are_reported_before_anything_starts() {
    for (arguments, expected) in [
        (&["--targets", "native-0"][..], "native-1, native-2"),
        (&["--volumes", "other"], "write dist"),
        (&["--variant", "x"], "NAME=OPTIONS"),
        (&["--only", "nothing"], "--only"),
        (&["--rounds", "0"], "--rounds"),
        (&["--file-size", "60000"], "--file-size"),
        (&["--out", "/proc/none"], "--out"),
    ] {
        let output =
            Command::new(PROGRAM).args(["bench", "gluster"]).args(arguments).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success(), "{arguments:?}: {said}");
        assert!(said.contains(expected) || said.contains("install the packages"), "{said}");
    }
}
