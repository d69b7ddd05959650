//! Malicious clients of `defuse serve`.

use std::os::fd::OwnedFd;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType, connect, recv,
    send, socket_with,
};

use crate::common::PROGRAM;

/// A request of FUSE from root on the root directory.
fn request(opcode: u32, unique: u64, body: &[u8]) -> Vec<u8> {
    let mut message = Vec::new();
    message.extend((40 + body.len() as u32).to_ne_bytes());
    message.extend(opcode.to_ne_bytes());
    message.extend(unique.to_ne_bytes());
    message.extend(1u64.to_ne_bytes());
    message.extend([0; 16]);
    message.extend(body);
    message
}

/// A connection after INIT.
fn introduced(path: &std::path::Path) -> OwnedFd {
    let flags = SocketFlags::CLOEXEC;
    let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
    connect(&socket, &SocketAddrUnix::new(path).unwrap()).unwrap();
    let numbers = [7u32, 45, 0, u32::MAX].map(u32::to_ne_bytes).concat();
    let init = request(26, 2, &[numbers, vec![0; 48]].concat());
    send(&socket, &init, SendFlags::empty()).unwrap();
    let (len, _) = recv(&socket, &mut [0; 4096][..], RecvFlags::empty()).unwrap();
    assert!(len > 16, "INIT was not answered");
    socket
}

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
    let stuck = introduced(&path);
    let until = Instant::now() + Duration::from_secs(1);
    for unique in (4..).step_by(2) {
        let getattr = request(3, unique, &[0; 16]);
        if send(&stuck, &getattr, SendFlags::DONTWAIT).is_err() {
            std::thread::sleep(Duration::from_millis(10));
        }
        if Instant::now() > until {
            break;
        }
    }
    let began = Instant::now();
    let process = rustix::process::Pid::from_child(&server);
    rustix::process::kill_process(process, rustix::process::Signal::TERM).unwrap();
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
