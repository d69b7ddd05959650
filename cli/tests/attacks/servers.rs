//! Malicious clients of `defuse serve`.

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::net::{RecvFlags, SendFlags, recv, send};
use rustix::process::{Pid, Signal, kill_process};

use crate::common::PROGRAM;

/// The client of the tests of the server itself.
#[path = "../../../testkit/tests/raw/mod.rs"]
mod raw;

const GETATTR: u32 = 3;

/// A client sent requests and read no replies. After SIGTERM the server waited more than a minute
/// for it, and for the memory of its file system to be freed.
#[test]
fn a_server_ends_although_a_client_reads_no_replies() {
    let place = tempfile::tempdir().unwrap();
    let path = place.path().join("socket");
    let mut server = Command::new(PROGRAM);
    server.args(["serve", "-f", "memory:"]).arg(&path).stderr(Stdio::null());
    let mut server = server.spawn().unwrap();
    while !path.exists() {
        std::thread::sleep(Duration::from_millis(10));
    }
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
