//! Connections that are no clients, at the same socket.

use std::fmt::Debug;
use std::os::fd::OwnedFd;

/// The process at the other end of a connection, as the kernel vouches for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeerProcess {
    /// The process; 0 where it is in another PID namespace.
    pub pid: i32,
    /// The user.
    pub uid: u32,
}

/// Takes connections that begin with another message than INIT. They count among those of their user.
pub trait OtherProtocol: Send + Sync + Debug {
    /// True if the first message of a connection is for this, by its beginning.
    fn knows(&self, first: &[u8]) -> bool;

    /// Talks to an admitted process, on a thread of its own, and returns when the connection has ended. The first message is
    /// still in the socket, which is shut down for reading when the server ends: `is_ending` says so then.
    fn serve(&self, socket: &OwnedFd, who: PeerProcess, is_ending: &(dyn Fn() -> bool + Sync));
}
