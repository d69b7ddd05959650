//! A connected `SOCK_SEQPACKET` socket as the source of a session's requests.

use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use defuse_fs::{Errno, Result};
use defuse_session::{
    IoUring, ReplyPort, RequestPort, RequestSource, SessionOptions, SpliceLimits, UserShare,
};
use defuse_wire::vendor::{SHARED_IO_MAX, SOCKET_IO_MAX};
use rustix::net::{RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags};

use crate::unsent::{UnsentMessages, send_beside};

/// The socket of a client.
pub(crate) struct MessageSource {
    socket: Arc<OwnedFd>,
    unsent: Arc<UnsentMessages>,
}

impl MessageSource {
    /// The client shares `share` with others of its user, if there is one.
    pub(crate) fn new(socket: Arc<OwnedFd>, share: Option<Arc<UserShare>>) -> Self {
        MessageSource { unsent: UnsentMessages::new(Arc::clone(&socket), share), socket }
    }

    fn port(&self, flags: RecvFlags) -> Arc<dyn RequestPort> {
        let (socket, unsent) = (Arc::clone(&self.socket), Arc::clone(&self.unsent));
        Arc::new(MessagePort { socket, unsent, flags })
    }
}

impl RequestSource for MessageSource {
    /// All workers share the socket.
    fn port(&self, _own: bool) -> Arc<dyn RequestPort> {
        MessageSource::port(self, RecvFlags::TRUNC)
    }

    fn port_without_waiting(&self) -> Result<Arc<dyn RequestPort>> {
        Ok(MessageSource::port(self, RecvFlags::TRUNC | RecvFlags::DONTWAIT))
    }
}

struct MessagePort {
    socket: Arc<OwnedFd>,
    unsent: Arc<UnsentMessages>,
    flags: RecvFlags,
}

impl ReplyPort for MessagePort {
    fn send(&self, parts: &[IoSlice<'_>]) -> Result<()> {
        self.unsent.send(parts)
    }
}

impl RequestPort for MessagePort {
    fn receive(&self, room: &mut [u8]) -> Result<usize> {
        let most = room.len();
        match rustix::net::recv(&self.socket, room, self.flags).map_err(errno) {
            // The client has ended the connection.
            Ok((_, 0)) | Err(Errno::ECONNRESET) => Err(Errno::ENODEV),
            // The rest of the message is lost: the client ignores the agreement.
            Ok((_, len)) if len > most => Err(Errno::EOVERFLOW),
            other => other.map(|(_, len)| len),
        }
    }

    fn send_whole(&self, message: &[u8]) -> Result<()> {
        let nothing = &mut SendAncillaryBuffer::default();
        send_beside(&self.socket, &[IoSlice::new(message)], nothing, SendFlags::empty())
    }

    fn send_with(&self, message: &[u8], fd: BorrowedFd<'_>) -> Result<()> {
        self.unsent.pass()?;
        let mut room = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut beside = SendAncillaryBuffer::new(&mut room);
        let fds = [fd];
        beside.push(SendAncillaryMessage::ScmRights(&fds));
        send_beside(&self.socket, &[IoSlice::new(message)], &mut beside, SendFlags::empty())
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// The options of a session over a socket, beside which there may be shared memory: nothing that
/// needs a device, and messages that fit. The server keeps the locks, because its clients do not
/// know each other.
pub(crate) fn options(requested: &SessionOptions, has_memory: bool) -> SessionOptions {
    let most = if has_memory { SHARED_IO_MAX } else { SOCKET_IO_MAX };
    SessionOptions {
        max_write: requested.max_write.min(most),
        writeback: false,
        clone_fd: false,
        splice: SpliceLimits::NEVER,
        passthrough: false,
        io_uring: IoUring::Off,
        atomic_o_trunc: true,
        forward_locks: true,
        answers_parents: true,
        ..requested.clone()
    }
}

/// The error of a system call in the contract's type.
pub(crate) fn errno(error: rustix::io::Errno) -> Errno {
    Errno::from_raw(error.raw_os_error())
}
