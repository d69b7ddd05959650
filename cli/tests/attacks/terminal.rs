//! Names that manipulate the terminal of a user who lists them.

use std::fs;
use std::process::Command;

use super::common::{TestPlace, eventually, from_output};

/// Clears the screen and starts a new line.
const NAME: &str = "m\u{1b}[2J\r\nroot";

fn is_harmless(text: &str) -> bool {
    !text.chars().any(|c| c.is_control() && c != '\n')
}

// The mounting user chooses the name of a mount point, and `defuse list` printed it unescaped.
#[test]
fn names_of_mount_points_and_sources_reach_no_terminal_unescaped() {
    let Some(place) = TestPlace::new_to_mount() else { return };
    fs::create_dir(place.path(NAME)).unwrap();
    place.expect_success(&["mount", "memory:", NAME, "-o", &format!("fsname={NAME}")]);
    let list = place.expect_success(&["list"]);
    let lines = list.lines().filter(|line| line.contains(r"m\u001b[2J\r\nroot")).count();
    let top = place.run(&["top", "--once"]);
    let stat = place.run(&["stat", NAME]);
    let twice = place.run(&["mount", "passthrough:missing\u{1b}[2J", NAME]);
    let missing = place.run(&["umount", "\u{1b}[31mnothing"]);
    place.expect_success(&["umount", NAME]);
    assert_eq!(lines, 1, "{list}");
    assert!(is_harmless(&list), "{list:?}");
    for said in [top, stat, twice, missing] {
        assert!(is_harmless(&said.out) && is_harmless(&said.err), "{:?} {:?}", said.out, said.err);
    }
}

// A process chooses its own name, and `defuse trace` printed it unescaped.
#[test]
fn names_of_processes_reach_no_terminal_unescaped() {
    let Some(place) = TestPlace::new_to_mount() else { return };
    place.expect_success(&["mount", "memory:", "mnt"]);
    let program = place.path("p\u{1b}[2J");
    // Not copied by this process, which another test may fork meanwhile (ETXTBSY).
    assert!(Command::new("cp").arg("/bin/ls").arg(&program).status().unwrap().success());
    let mut trace = place.command(&["trace", "mnt", "--for", "2", "--op", "opendir"]);
    let trace = trace.stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::piped());
    let trace = trace.spawn().unwrap();
    let mnt = place.path("mnt");
    for _ in 0..20 {
        assert!(Command::new(&program).arg(&mnt).status().unwrap().success());
        std::thread::sleep(std::time::Duration::from_millis(100));
    }
    let result = from_output(trace.wait_with_output().unwrap());
    place.expect_success(&["umount", "mnt"]);
    eventually("unmounted", || !place.is_mounted());
    if result.code != Some(0) {
        println!("not here: nothing can be traced here: {}", result.err);
        return;
    }
    assert!(result.out.contains(r"p\u001b[2J"), "{}", result.out);
    assert!(is_harmless(&result.out), "{:?}", result.out);
}
