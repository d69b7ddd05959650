//! Malicious clients of `defuse serve`.

use std::fs::{self, File};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::net::{RecvFlags, SendFlags, recv, send};
use rustix::process::{Pid, Signal, kill_process};

use super::users::{NOBODY, as_user};
use crate::common::{PROGRAM, eventually};

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
    let stuck = raw::begun(&path, 0);
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
            let client = raw::begun(&path, NOBODY);
            // The server closes the connection, or it answers.
            recv(&client, &mut [0; 64][..], RecvFlags::empty()).map_or(true, |(len, _)| len == 0)
        };
        (0..attempts).filter(is_refused).count()
    });
    let written = fs::read_to_string(&log).unwrap().matches("is not admitted").count();
    let serves = raw::begun(&path, 0);
    let (len, _) = recv(&serves, &mut [0; 4096][..], RecvFlags::empty()).unwrap();
    kill_process(Pid::from_child(&server), Signal::TERM).unwrap();
    assert!(server.wait().unwrap().success());
    assert_eq!(refused, attempts);
    assert!(len > 16, "root is served meanwhile");
    // 20 warnings a minute; a slow machine may need more than one.
    assert!((20..200).contains(&written), "{written} warnings of {attempts} refused connections");
}
