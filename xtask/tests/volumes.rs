//! Volumes of GlusterFS by `cargo xtask gluster`: nothing of them outlasts the command.

use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Time for volumes to start and to end.
const PATIENCE: Duration = Duration::from_secs(120);

/// The command, its first line of output, and the rest.
fn start(words: &[&str]) -> (Child, String, BufReader<std::process::ChildStdout>) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_xtask"));
    command.arg("gluster").args(words).stdin(Stdio::null()).stdout(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let mut output = BufReader::new(child.stdout.take().unwrap());
    let mut line = String::new();
    output.read_line(&mut line).unwrap();
    (child, line, output)
}

/// The processes whose name space of this kind is `space`.
fn processes(kind: &str, space: &Path) -> Vec<PathBuf> {
    let all = std::fs::read_dir("/proc").unwrap().map(|entry| entry.unwrap().path());
    let of_space = |process: &PathBuf| {
        std::fs::read_link(process.join("ns").join(kind)).is_ok_and(|link| link == space)
    };
    all.filter(of_space).collect()
}

/// Kills the command by a signal that no process can catch, and waits for the end of all processes
/// in a network.
fn expect_end(mut command: Child, network: &Path) {
    let servers = processes("net", network).len();
    // glusterd, four bricks, and their parents.
    assert!(servers > 5, "{servers} processes");
    command.kill().unwrap();
    command.wait().unwrap();
    let begun = Instant::now();
    while !processes("net", network).is_empty() {
        assert!(begun.elapsed() < PATIENCE, "{:?}", processes("net", network));
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// True if servers can run here. The output of the command contains the reason if they cannot.
fn can_run() -> bool {
    let is_root = rustix::process::geteuid().is_root();
    let has = |program: &str| {
        let mut requested = Command::new(program);
        requested.arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status().is_ok()
    };
    let can = is_root && ["glusterd", "gluster", "ip", "nsenter"].into_iter().all(has);
    if !can {
        println!("skipped: only root can run servers of GlusterFS, if they are installed");
    }
    can
}

#[test]
fn volumes_and_the_program_of_a_run_end_with_the_killed_command() {
    if !can_run() {
        return;
    }
    let script = "readlink /proc/self/ns/net; exec sleep 1000";
    let (command, network, mut rest) = start(&["run", "sh", "-c", script]);
    let network = PathBuf::from(network.trim());
    assert_ne!(network, std::fs::read_link("/proc/self/ns/net").unwrap());
    expect_end(command, &network);
    // No process has the output open any more.
    rest.read_to_end(&mut Vec::new()).unwrap();
}

#[test]
fn volumes_that_are_up_end_with_the_killed_command() {
    if !can_run() {
        return;
    }
    let (command, line, _rest) = start(&["up"]);
    // The first line shows how to enter the network.
    let Some(of_process) = line.split_whitespace().find_map(|word| word.strip_prefix("--net="))
    else {
        println!("skipped: volumes of somebody else are up");
        return;
    };
    let network = std::fs::read_link(of_process).unwrap();
    expect_end(command, &network);
    // Nothing is in the way of the next ones.
    let (next, line, _rest) = start(&["up"]);
    assert!(line.contains("--net="), "{line}");
    let of_process = line.split_whitespace().find_map(|word| word.strip_prefix("--net=")).unwrap();
    expect_end(next, &std::fs::read_link(of_process).unwrap());
}
