//! Mounts of a server that lives and does not answer. In a program of their own: the processes that
//! they start would have files of other tests open for a moment.

mod common;

use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use common::{TestPlace, eventually};
use rustix::mount::{UnmountFlags, unmount};
use rustix::process::{Pid, Signal, kill_process};

/// A place with a mount of a server that is stopped, and the server.
fn with_stopped_server() -> Option<(TestPlace, Child)> {
    let place = TestPlace::new_to_mount()?;
    let mut server = place.command(&["serve", "--foreground", "memory:", "sock"]);
    let server = server.stderr(Stdio::null()).spawn().unwrap();
    eventually("served", || place.path("sock").exists());
    place.expect_success(&["mount", "socket:sock", "mnt", "-o", "attr_timeout=0,entry_timeout=0"]);
    fs::write(place.path("mnt/file"), "text").unwrap();
    kill_process(Pid::from_child(&server), Signal::STOP).unwrap();
    Some((place, server))
}

/// True if the process with this number waits for the file system.
fn is_waiting(process: u32) -> bool {
    let at = fs::read_to_string(format!("/proc/{process}/wchan"));
    at.is_ok_and(|at| at.contains("fuse") || at.contains("request_wait"))
}

/// The server lives and does not answer. Callers stayed in the kernel, with SIGKILL pending too,
/// and the mount in use.
#[test]
fn callers_of_a_server_that_stands_still_can_be_killed_and_the_mount_be_removed() {
    let Some((place, mut server)) = with_stopped_server() else { return };
    let path = place.path("mnt/file").display().to_string();
    for (signal, ends) in [(Signal::KILL, 9), (Signal::INT, 2), (Signal::TERM, 15)] {
        for command in [vec!["stat", &path], vec!["cat", &path], vec!["touch", &path]] {
            let mut caller = Command::new(command[0]).arg(command[1]).spawn().unwrap();
            let pid = Pid::from_child(&caller);
            eventually("it waits", || is_waiting(caller.id()));
            kill_process(pid, signal).unwrap();
            let mut ended = None;
            eventually("it has ended", || {
                ended = caller.try_wait().unwrap();
                ended.is_some()
            });
            assert_eq!(ended.unwrap().signal(), Some(ends), "{command:?}");
        }
    }
    let mountpoint = place.path("mnt");
    unmount(&mountpoint, UnmountFlags::DETACH).unwrap();
    kill_process(Pid::from_child(&server), Signal::CONT).unwrap();
    kill_process(Pid::from_child(&server), Signal::TERM).unwrap();
    server.wait().unwrap();
}

/// A call that a signal only interrupts goes on, as on other file systems.
#[test]
fn a_handled_signal_ends_no_call_of_a_server_that_is_slow() {
    let Some((place, mut server)) = with_stopped_server() else { return };
    let script = "import os, signal, sys; signal.signal(signal.SIGUSR1, lambda *_: None); \
                  signal.siginterrupt(signal.SIGUSR1, True); os.stat('mnt/file')";
    let mut caller = place.command_of(Path::new("python3"), &["-c", script]);
    let mut caller = caller.spawn().unwrap();
    eventually("it waits", || is_waiting(caller.id()));
    for _ in 0..20 {
        kill_process(Pid::from_child(&caller), Signal::USR1).unwrap();
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    assert!(is_waiting(caller.id()) && caller.try_wait().unwrap().is_none());
    kill_process(Pid::from_child(&server), Signal::CONT).unwrap();
    assert!(caller.wait().unwrap().success());
    place.expect_success(&["umount", "mnt"]);
    kill_process(Pid::from_child(&server), Signal::TERM).unwrap();
    server.wait().unwrap();
}
