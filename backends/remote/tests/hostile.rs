//! Servers that do anything to hold up their client.

use std::mem::size_of;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use defuse_fs::{
    Caller, Context, Errno, Fh, File, FileSystem, Ino, SliceSource, WriteArgs, WriteBuf,
};
use defuse_remote::{RemoteClient, RemoteOptions};
use defuse_wire::abi::{InHeader, InitOut, OutHeader};
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, recv, send, socketpair,
};
use zerocopy::{FromBytes, IntoBytes};

const LIMIT: Duration = Duration::from_millis(300);

fn header(unique: u64, error: i32, body: &[u8]) -> Vec<u8> {
    let len = (size_of::<OutHeader>() + body.len()) as u32;
    [OutHeader { len, error, unique }.as_bytes(), body].concat()
}

/// Answers INIT.
fn begin(socket: &OwnedFd) {
    let mut room = [0; 256];
    let (len, _) = recv(socket, &mut room[..], RecvFlags::empty()).unwrap();
    let (requested, _) = InHeader::read_from_prefix(&room[..len]).unwrap();
    let out = InitOut { major: 7, minor: 31, max_write: 4096, ..InitOut::default() };
    send(socket, &header(requested.unique, 0, out.as_bytes()), SendFlags::NOSIGNAL).unwrap();
}

/// Ends the server, also if the test fails.
struct ServerStop<'a>(&'a AtomicBool);

impl Drop for ServerStop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// A client of a server that runs `act` after INIT until the end.
fn with(act: impl Fn(&OwnedFd) + Send, test: impl FnOnce(&RemoteClient)) {
    let pair = || {
        socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap()
    };
    let ((own, other), ends) = (pair(), AtomicBool::new(false));
    std::thread::scope(|scope| {
        let ends = &ends;
        scope.spawn(move || {
            begin(&other);
            while !ends.load(Ordering::Relaxed) {
                act(&other);
            }
        });
        let options = RemoteOptions { timeout: Some(LIMIT), ..RemoteOptions::default() };
        let _until = ServerStop(ends);
        let remote = RemoteClient::from_socket(own, options).unwrap();
        test(&remote);
    });
}

/// The call fails when its time is over, and not much later.
fn fails_in_time(call: impl FnOnce() -> Option<Errno>) {
    let begun = Instant::now();
    assert_eq!(call(), Some(Errno::ENOTCONN));
    let time = begun.elapsed();
    assert!(time < 20 * LIMIT, "{time:?}");
}

fn getattr(remote: &RemoteClient) -> Option<Errno> {
    remote.getattr(&Context::new(Caller::default()), Ino::ROOT, None).err()
}

/// The caller received one message after the other, and never looked at its time.
#[test]
fn messages_without_end_do_not_hold_up_the_end_of_a_call() {
    // Unexpected replies, and notifications without a meaning.
    for message in [header(1 << 20, 0, b"none"), header(0, 99, b"nothing")] {
        let flood = |socket: &OwnedFd| {
            // It fails after the end.
            let _ = send(socket, &message, SendFlags::NOSIGNAL);
        };
        with(flood, |remote| fails_in_time(|| getattr(remote)));
    }
}

/// A request that does not fit into the socket waited for as long as the server lived.
#[test]
fn a_server_that_receives_nothing_holds_up_no_call_for_longer() {
    let nothing = |_: &OwnedFd| std::thread::sleep(Duration::from_millis(1));
    with(nothing, |remote| {
        std::thread::scope(|scope| {
            // Together they fill the socket, so that some wait for room.
            for _ in 0..100 {
                scope.spawn(|| {
                    let (bytes, cx) = ([7; 4096], Context::new(Caller::default()));
                    let mut source = SliceSource::new(&bytes);
                    let (file, args) = (File { ino: Ino::ROOT, fh: Fh(1) }, WriteArgs::default());
                    let mut data = WriteBuf::new(&mut source);
                    fails_in_time(|| remote.write(&cx, file, args, &mut data).err());
                });
            }
        });
    });
}
