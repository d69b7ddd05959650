//! The connection that takes the place of a mount: a socket to the process that has started the
//! program (`fuse:COMMAND`).
//!
//! A variable names its descriptor and its inode. So a program that inherits the variable, and has
//! another file under this number, mounts as usual.

use std::os::fd::{BorrowedFd, FromRawFd, OwnedFd, RawFd};

use rustix::fs::{FileType, fstat};
use rustix::io::{FdFlags, fcntl_getfd, fcntl_setfd};

/// The variable: the number of the descriptor, a colon, and the number of the inode.
const VARIABLE: &str = "DEFUSE_FUSE_CONNECTION";

/// Takes the connection, if this process has one that it has not taken before.
pub fn take() -> Option<OwnedFd> {
    let (fd, ino) = parse(&std::env::var(VARIABLE).ok()?)?;
    is_connection(fd, ino).then(|| {
        // SAFETY: the descriptor is open, and is the one that the parent has handed over for this
        // purpose under this number. It has no other owner: the first use marks it (`FD_CLOEXEC`),
        // and another call does not take it.
        unsafe { OwnedFd::from_raw_fd(fd) }
    })
}

/// True if this process was started with a connection, which it may have taken.
pub fn is_given() -> bool {
    std::env::var(VARIABLE).is_ok_and(|text| parse(&text).is_some())
}

fn parse(text: &str) -> Option<(RawFd, u64)> {
    let (fd, ino) = text.split_once(':')?;
    let fd: RawFd = fd.parse().ok().filter(|fd| *fd > 2)?;
    Some((fd, ino.parse().ok()?))
}

/// True if the descriptor is the socket with this inode, and was not taken before. Marks it as
/// taken.
fn is_connection(fd: RawFd, ino: u64) -> bool {
    // SAFETY: the call reads the flags of a number, which may be no descriptor.
    if unsafe { libc::fcntl(fd, libc::F_GETFD) } < 0 {
        return false;
    }
    // SAFETY: the number is an open descriptor, as just seen, and nothing that this process has
    // started closes it during the call.
    let fd = unsafe { BorrowedFd::borrow_raw(fd) };
    let is_same = fstat(fd).is_ok_and(|stat| {
        stat.st_ino == ino && FileType::from_raw_mode(stat.st_mode) == FileType::Socket
    });
    let is_new = fcntl_getfd(fd).is_ok_and(|flags| !flags.contains(FdFlags::CLOEXEC));
    is_same && is_new && fcntl_setfd(fd, FdFlags::CLOEXEC).is_ok()
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;

    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

    use super::*;

    #[test]
    fn only_the_socket_that_the_variable_names_is_taken_and_only_once() {
        assert_eq!(parse("7:1234"), Some((7, 1234)));
        for wrong in ["", "7", "7:", ":7", "2:9", "-1:9", "7:x"] {
            assert_eq!(parse(wrong), None, "{wrong}");
        }
        let flags = SocketFlags::empty();
        let (one, _other) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
        let ino = fstat(&one).unwrap().st_ino;
        assert!(!is_connection(one.as_raw_fd(), ino + 1));
        assert!(is_connection(one.as_raw_fd(), ino));
        assert!(!is_connection(one.as_raw_fd(), ino));
        let (pipe, _end) = rustix::pipe::pipe().unwrap();
        assert!(!is_connection(pipe.as_raw_fd(), fstat(&pipe).unwrap().st_ino));
        assert!(!is_connection(1_000_000, ino));
    }
}
