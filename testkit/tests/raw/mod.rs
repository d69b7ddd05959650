//! A client made by hand, which sends arbitrary requests.

use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use rustix::net::{AddressFamily, SendFlags, SocketAddrUnix, SocketFlags, SocketType};

const INIT: u32 = 26;

/// A request of FUSE by a process of the user `uid`.
pub fn request(opcode: u32, number: u64, ino: u64, uid: u32, body: &[u8]) -> Vec<u8> {
    let mut message = Vec::new();
    message.extend((40 + body.len() as u32).to_ne_bytes());
    message.extend(opcode.to_ne_bytes());
    message.extend(number.to_ne_bytes());
    message.extend(ino.to_ne_bytes());
    message.extend([uid, uid, 1, 0].map(u32::to_ne_bytes).concat());
    message.extend(body);
    message
}

/// A connection on which INIT was sent, and nothing received.
pub fn connect_and_init(path: &Path, uid: u32) -> OwnedFd {
    connect_and_init_with(path, uid, 0)
}

/// Begins a session like [`begun`], with the upper half of the flags of INIT.
pub fn connect_and_init_with(path: &Path, uid: u32, flags2: u32) -> OwnedFd {
    let socket = connect(path);
    rustix::net::send(&socket, &init(uid, flags2, [0; 44]), SendFlags::empty()).unwrap();
    socket
}

/// A connection on which nothing was sent. A path that begins with `@` is abstract.
pub fn connect(path: &Path) -> OwnedFd {
    let flags = SocketFlags::CLOEXEC;
    let seqpacket = SocketType::SEQPACKET;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, seqpacket, flags, None).unwrap();
    let address = match path.as_os_str().as_bytes().strip_prefix(b"@") {
        Some(name) => SocketAddrUnix::new_abstract_name(name),
        None => SocketAddrUnix::new(path),
    };
    rustix::net::connect(&socket, &address.unwrap()).unwrap();
    socket
}

/// An INIT with the upper half of its flags, and what the kernel leaves zero.
pub fn init(uid: u32, flags2: u32, unused: [u8; 44]) -> Vec<u8> {
    let numbers = [7u32, 45, 0, u32::MAX, flags2].map(u32::to_ne_bytes).concat();
    request(INIT, 2, 0, uid, &[&numbers[..], &unused].concat())
}
