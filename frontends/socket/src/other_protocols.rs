//! Connections of other protocols, at the same socket.

use std::fmt::Debug;
use std::os::fd::OwnedFd;

/// The process at the other end of a connection, as the kernel reports it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeerProcess {
    /// The process; 0 where it is in another PID namespace.
    pub pid: i32,
    /// The user.
    pub uid: u32,
}

/// Takes connections whose first message is not INIT. They count as connections of their user.
pub trait OtherProtocol: Send + Sync + Debug {
    /// True if the first message of a connection belongs to this protocol, by its beginning.
    fn knows(&self, first: &[u8]) -> bool;

    /// Serves an admitted process, on a thread of its own, and returns when the connection has
    /// ended. The first message is still in the socket, which is shut down for reading when the
    /// server ends: `is_ending` returns true then.
    fn serve(&self, socket: &OwnedFd, who: PeerProcess, is_ending: &(dyn Fn() -> bool + Sync));
}
