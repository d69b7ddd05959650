//! Malicious clients of `defuse serve`.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::net::{RecvFlags, SendFlags, recv, send};
use rustix::process::{Pid, Signal, kill_process};

use super::users::{NOBODY, as_user};
use crate::common::{PROGRAM, TestPlace, eventually, from_output};

/// The client of the tests of the server itself.
#[path = "../../../testkit/tests/raw/mod.rs"]
mod raw;

const GETATTR: u32 = 3;

/// Starts a server of `memory:` in the foreground, and waits for its socket.
fn start(socket: &Path, arguments: &[&str], log: Stdio) -> Child {
    let mut server = Command::new(PROGRAM);
    server.args(["serve", "-f", "memory:"]).arg(socket).args(arguments).stderr(log);
    let server = server.spawn().unwrap();
    eventually("listening", || socket.exists());
    server
}

/// A client sent requests and read no replies. After SIGTERM the server waited more than a minute
/// for it, and for the memory of its file system to be freed.
#[test]
fn a_server_ends_although_a_client_reads_no_replies() {
    let place = tempfile::tempdir().unwrap();
    let path = place.path().join("socket");
    let mut server = start(&path, &[], Stdio::null());
    let stuck = raw::connect_and_init(&path, 0);
    let (len, _) = recv(&stuck, &mut [0; 4096][..], RecvFlags::empty()).unwrap();
    assert!(len > 16, "INIT was not answered");
    let until = Instant::now() + Duration::from_secs(1);
    for unique in (4..).step_by(2) {
        let getattr = raw::request(GETATTR, unique, 1, 0, &[0; 16]);
        if send(&stuck, &getattr, SendFlags::DONTWAIT).is_err() {
            std::thread::sleep(Duration::from_millis(10));
        }
        if Instant::now() > until {
            break;
        }
    }
    let began = Instant::now();
    kill_process(Pid::from_child(&server), Signal::TERM).unwrap();
    let limit = Duration::from_secs(60);
    while server.try_wait().unwrap().is_none() {
        if began.elapsed() > limit {
            let _ = server.kill();
            panic!("the server is there after {limit:?}");
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    assert!(!path.exists(), "the socket is left behind");
}

/// Strangers who connected over and over wrote 16 MB into the log of a server in six seconds.
#[test]
fn strangers_who_connect_over_and_over_do_not_fill_the_log_of_a_server() {
    if !rustix::process::geteuid().is_root() {
        println!("skipped: only root becomes another user");
        return;
    }
    let place = tempfile::tempdir().unwrap();
    fs::set_permissions(place.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let (path, log) = (place.path().join("socket"), place.path().join("log"));
    // Another user is admitted, so that the socket is open to all.
    let mut server = start(&path, &["--admit", "54321"], File::create(&log).unwrap().into());
    let attempts = 2000_usize;
    let refused = as_user(NOBODY, &[], || {
        let is_refused = |_: &usize| {
            let client = raw::connect_and_init(&path, NOBODY);
            // The server closes the connection, or it answers.
            recv(&client, &mut [0; 64][..], RecvFlags::empty()).map_or(true, |(len, _)| len == 0)
        };
        (0..attempts).filter(is_refused).count()
    });
    let written = fs::read_to_string(&log).unwrap().matches("is not admitted").count();
    let serves = raw::connect_and_init(&path, 0);
    let (len, _) = recv(&serves, &mut [0; 4096][..], RecvFlags::empty()).unwrap();
    kill_process(Pid::from_child(&server), Signal::TERM).unwrap();
    assert!(server.wait().unwrap().success());
    assert_eq!(refused, attempts);
    assert!(len > 16, "root is served meanwhile");
    // 20 warnings a minute; a slow machine may need more than one.
    assert!((20..200).contains(&written), "{written} warnings of {attempts} refused connections");
}

/// Starts a server in the background. Returns its process and its control socket.
fn start_in_background(place: &TestPlace) -> (Pid, PathBuf) {
    place.expect_success(&["serve", "memory:", "socket"]);
    let answer = place.expect_success(&["stat", "socket", "--json"]);
    let answer: serde_json::Value = serde_json::from_str(&answer).unwrap();
    let pid = answer["pid"].as_u64().unwrap();
    (Pid::from_raw(pid as i32).unwrap(), place.path(&format!("run/serve-{pid}.sock")))
}

/// Its answers show what other users do.
#[test]
fn other_users_get_no_statistics_of_a_server() {
    if !rustix::process::geteuid().is_root() {
        println!("skipped: only root becomes another user");
        return;
    }
    let place = TestPlace::new();
    let program = place.install_for_all_users();
    let (pid, control) = start_in_background(&place);
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!((mode(&control), mode(&place.path("run"))), (0o600, 0o700));
    let stat = || {
        let mut command = place.command_of(&program, &["stat", "socket"]);
        let result = from_output(command.uid(NOBODY).gid(NOBODY).output().unwrap());
        assert_eq!((result.code, result.out.as_str()), (Some(1), ""), "{}", result.err);
        result.err
    };
    // They see neither the entry nor the control socket.
    fs::set_permissions(place.path(""), fs::Permissions::from_mode(0o755)).unwrap();
    let result = stat();
    assert!(result.contains("ask as its user or as root"), "{result}");
    // Even if they can reach the socket.
    fs::set_permissions(place.path("run"), fs::Permissions::from_mode(0o755)).unwrap();
    let result = stat();
    assert!(
        result.contains("the server of") && result.contains("as its owner or as root"),
        "{result}"
    );
    fs::set_permissions(&control, fs::Permissions::from_mode(0o666)).unwrap();
    let result = stat();
    assert!(result.contains("as its owner or as root"), "{result}");
    let answer = as_user(NOBODY, &[], || {
        let mut stream = UnixStream::connect(&control).unwrap();
        // The server may have ended the connection already.
        let _ = stream.write_all(b"stat\n");
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer);
        answer
    });
    assert!(answer.is_empty(), "{}", String::from_utf8_lossy(&answer));
    assert!(place.expect_success(&["stat", "socket"]).contains("measured"), "root gets an answer");
    kill_process(pid, Signal::TERM).unwrap();
    eventually("the end of the server", || !control.exists());
}

/// One thread answers all: an asker that goes on without end must not keep it.
#[test]
fn askers_that_say_nothing_or_never_end_hold_up_nobody_for_long() {
    let place = TestPlace::new();
    let (pid, control) = start_in_background(&place);
    let answers = || assert!(place.expect_success(&["stat", "socket"]).contains("measured"));
    let connect = || UnixStream::connect(&control).unwrap();

    let silent = connect();
    answers();
    drop(silent);
    // Far more than a question, and no end of the line. The server reads no more than a question.
    let mut endless = connect();
    let _ = endless.write_all(&vec![b'x'; 1 << 20]);
    answers();
    // Byte by byte, so that something always arrives in time.
    let mut slow = connect();
    let dripping = std::thread::spawn(move || {
        let mut written = 0;
        while written < 600 && slow.write_all(b"x").is_ok() {
            written += 1;
            std::thread::sleep(Duration::from_millis(300));
        }
        written
    });
    answers();
    assert!(dripping.join().unwrap() < 64, "the server waited for a whole question");
    // Unknown questions, and questions for mounts, have no answer and do no harm.
    for question in [&b"negotiated\n"[..], b"workers=1\n", b"read-only\n", b"\xff\xfe\n", b"\n"] {
        let mut stream = connect();
        stream.write_all(question).unwrap();
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer);
        assert!(answer.is_empty(), "{question:?}");
    }
    // Many at once that do not take their answers.
    let idle: Vec<UnixStream> = (0..100).map(|_| connect()).collect();
    idle.iter().for_each(|mut stream| stream.write_all(b"stat\n").unwrap());
    answers();
    let threads = fs::read_dir(format!("/proc/{}/task", pid.as_raw_nonzero())).unwrap().count();
    assert!(threads < 50, "{threads} threads");
    drop(idle);
    kill_process(pid, Signal::TERM).unwrap();
    eventually("the end of the server", || !control.exists());
}
