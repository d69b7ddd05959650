//! Attacks on paths that the program names more than once, and on directories from the environment
//! of another user (su(1), `sudo -E`).

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, symlink};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use rustix::process::{Pid, Signal, kill_process};

use super::users::NOBODY;
use crate::common::{PROGRAM, TestPlace, eventually, from_output};

fn is_root() -> bool {
    let is_root = rustix::process::geteuid().is_root();
    if !is_root {
        println!("skipped: only root gives directories to another user");
    }
    is_root
}

/// A directory of another user, below directories that it may search.
fn make_foreign(place: &TestPlace, name: &str) -> PathBuf {
    fs::set_permissions(place.path(""), fs::Permissions::from_mode(0o755)).unwrap();
    let path = place.path(name);
    fs::create_dir(&path).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o700)).unwrap();
    chown(&path, Some(NOBODY), Some(NOBODY)).unwrap();
    path
}

/// Number of entries, and the time of the last change of them.
fn state(dir: &Path) -> (usize, i64, i64) {
    let meta = fs::metadata(dir).unwrap();
    (fs::read_dir(dir).unwrap().count(), meta.mtime(), meta.mtime_nsec())
}

/// Calls that change the mode or the owner of a file that they name, for strace(1), which need not
/// know the one with `?`.
const BY_PATH: &str = "chmod,fchmodat,?fchmodat2,chown,lchown,fchownat";

/// Runs the program under strace(1) and returns its trace; `None` if that cannot trace here.
fn trace(place: &TestPlace, arguments: &[&str], until: Option<&Path>) -> Option<String> {
    let file = place.path("trace");
    let mut strace = Command::new("strace");
    strace.args(["-f", "-qq", "-o"]).arg(&file).args(["-e", &format!("trace=bind,{BY_PATH}")]);
    strace.arg(PROGRAM).args(arguments).current_dir(place.path("")).stderr(Stdio::null());
    strace.env("DEFUSE_RUNTIME_DIR", place.path("run")).stdin(Stdio::null());
    let Ok(mut child) = strace.spawn() else {
        println!("skipped: strace is not installed");
        return None;
    };
    if let Some(socket) = until {
        let registered = || {
            let servers = place.expect_success(&["list", "--json"]);
            let servers: serde_json::Value = serde_json::from_str(&servers).unwrap();
            let is_it = |row: &&serde_json::Value| row["socket"].as_str() == socket.to_str();
            let row = servers.as_array().unwrap().iter().find(is_it)?["pid"].as_i64()?;
            Pid::from_raw(row as i32)
        };
        // strace(1) passes no signal on, so that the server itself gets it.
        eventually("registered", || registered().is_some() || child.try_wait().unwrap().is_some());
        registered().map(|pid| kill_process(pid, Signal::TERM));
    }
    child.wait().unwrap();
    let text = fs::read_to_string(&file).unwrap_or_default();
    if !text.contains("bind(") {
        println!("skipped: strace cannot trace here");
        return None;
    }
    Some(text)
}

/// bind(2) was followed by chmod(2) of the same path: between the two the owner of the directory
/// exchanged it for a link, and a file of root became writable for all.
#[test]
fn no_path_is_named_again_after_a_socket_is_bound_to_it() {
    let place = TestPlace::new();
    fs::create_dir(place.path("dir")).unwrap();
    let socket = place.path("dir/s");
    let traces = [
        trace(&place, &["serve", "-f", "memory:", "dir/s", "--admit", "54321"], Some(&socket)),
        trace(&place, &["run", "--mount", "m:=memory:", "--", "true"], None),
    ];
    for text in traces.iter().flatten() {
        let (_, after) = text.split_once("bind(").unwrap();
        let calls: Vec<_> = BY_PATH.split(',').map(|call| call.trim_start_matches('?')).collect();
        let by_path = |line: &&str| calls.iter().any(|call| line.contains(&format!(" {call}(")));
        assert_eq!(after.lines().find(by_path), None, "{text}");
    }
}

/// A run of root put a directory with the socket of its server into the runtime directory of the
/// user from whose environment it came, and changed the mode of the socket by path.
#[test]
fn a_run_of_root_uses_no_runtime_directory_of_another_user() {
    if !is_root() {
        return;
    }
    let place = TestPlace::new();
    let (theirs, own) = (make_foreign(&place, "theirs"), place.path("own"));
    fs::create_dir(&own).unwrap();
    let inner = theirs.join("inner");
    fs::create_dir(&inner).unwrap();
    let link = place.path("link");
    symlink(&inner, &link).unwrap();
    let before = [&theirs, &inner].map(|dir| state(dir));
    let run = |runtime: &Path| {
        let mut run = place.command(&[
            "run",
            "--mount",
            "m:=memory:",
            "--",
            "sh",
            "-c",
            "echo x > m:/f; cat m:/f",
        ]);
        let result = from_output(run.env("XDG_RUNTIME_DIR", runtime).output().unwrap());
        assert_eq!((result.code, result.out.as_str()), (Some(0), "x\n"), "{}", result.err);
        result.err
    };
    for runtime in [&theirs, &inner, &link] {
        let result = run(runtime);
        assert!(result.contains("XDG_RUNTIME_DIR is not used"), "{result}");
        assert!(result.contains(theirs.to_str().unwrap()), "{result}");
    }
    assert_eq!([&theirs, &inner].map(|dir| state(dir)), before, "something was made there");
    assert_eq!(run(&own), "", "a directory of its own is used");
}

/// Root registered a server in the directory of another user, and removed files there, by paths.
#[test]
fn a_daemon_of_root_registers_in_no_directory_of_another_user() {
    if !is_root() {
        return;
    }
    let place = TestPlace::new();
    let theirs = make_foreign(&place, "theirs");
    fs::write(theirs.join("serve-1.sock"), "").unwrap();
    let before = state(&theirs);
    for registry in [theirs.clone(), theirs.join("below")] {
        let command = |arguments: &[&str]| {
            let mut command = place.command(arguments);
            from_output(command.env("DEFUSE_RUNTIME_DIR", &registry).output().unwrap())
        };
        assert_eq!(command(&["serve", "memory:", "socket", "--log-file", "log"]).code, Some(0));
        let log = fs::read_to_string(place.path("log")).unwrap();
        let pid = fs::read_dir("/proc").unwrap().flatten().find_map(|entry| {
            let line = fs::read(entry.path().join("cmdline")).ok()?;
            let line = String::from_utf8_lossy(&line).into_owned();
            let is_it = line.contains(place.path("socket").to_str()?);
            entry.file_name().to_str()?.parse().ok().filter(|_| is_it)
        });
        kill_process(Pid::from_raw(pid.unwrap()).unwrap(), Signal::TERM).unwrap();
        eventually("the end of the server", || !place.path("socket").exists());
        assert!(log.contains("DEFUSE_RUNTIME_DIR names"), "{log}");
        assert_eq!(command(&["list"]).code, Some(0));
        fs::remove_file(place.path("log")).unwrap();
    }
    assert_eq!(state(&theirs), before, "something was made or removed there");
}

/// The socket was removed by its path at the end: a link in place of the directory led to a socket
/// of another server.
#[test]
fn the_end_of_a_server_removes_no_socket_of_another_one() {
    if !is_root() {
        return;
    }
    for arguments in [&[][..], &["-o", "sandbox=privileges"]] {
        let place = TestPlace::new();
        for dir in ["dir", "other"] {
            fs::create_dir(place.path(dir)).unwrap();
        }
        let other = UnixListener::bind(place.path("other/s")).unwrap();
        let start = [&["serve", "memory:", "dir/s"][..], arguments].concat();
        place.expect_success(&start);
        let answer: serde_json::Value =
            serde_json::from_str(&place.expect_success(&["stat", "dir/s", "--json"])).unwrap();
        let pid = Pid::from_raw(answer["pid"].as_i64().unwrap() as i32).unwrap();
        fs::rename(place.path("dir"), place.path("moved")).unwrap();
        symlink("other", place.path("dir")).unwrap();
        kill_process(pid, Signal::TERM).unwrap();
        eventually("the end of the server", || !place.path("moved/s").exists());
        eventually("the end of the process", || {
            !Path::new(&format!("/proc/{}", pid.as_raw_nonzero())).exists()
        });
        assert!(place.path("other/s").exists(), "{arguments:?}");
        drop(other);
    }
}
