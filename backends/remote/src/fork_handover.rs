//! Copies of connections for child processes.
//!
//! Few children use one: most execute a program, which begins with a connection of its own. So the
//! server makes the copy before the fork, and creates a session for it when the child connects. For
//! a child whose parent waits until it executes a program (vfork(2)), the server makes no copy
//! before the child requests it: meanwhile the parent's connection does not change.

use std::io::IoSlice;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use defuse_fs::{Caps, Errno, Result, Versions};
use defuse_wire::abi::{InHeader, OutHeader};
use defuse_wire::vendor::{COPY, ConnectionCopy, ConnectionNumber, ConnectionNumbers};
use rustix::net::{RecvFlags, SendAncillaryBuffer, SendFlags};
use zerocopy::{FromBytes, IntoBytes};

use crate::connection::ClientConnection;
use crate::init::ServerAgreement;
use crate::paths::SharedNames;
use crate::sys::{errno, peer_user};
use crate::{
    HandoverClient, INIT_PATIENCE, InodeHandover, LaneUse, RemoteClient, RemoteError,
    RemoteOptions, connect_socket, introduce, new_number,
};

/// A copy of another connection to the same server, with everything that the other connection had
/// when this was made: inodes and open files are valid through both, and the file system gets them
/// back when both have returned them. It acts for the user who made the first connection, even if
/// the process has become another user.
///
/// The child [uses](ConnectionHandover::begin) it, if it needs one at all. Dropping it closes the
/// socket: the server releases everything when neither process has the socket open.
pub struct ConnectionHandover {
    /// The socket of the copy, or this process's descriptor of the parent's.
    socket: OwnedFd,
    /// The number of the copy, or the number of the parent's connection.
    own: ConnectionNumber,
    is_copied: bool,
    agreement: ServerAgreement,
    missing: u64,
    versions: Option<Arc<dyn Versions>>,
    name_memory: Option<SharedNames>,
    options: RemoteOptions,
    path: PathBuf,
}

impl ConnectionHandover {
    pub(crate) fn copy_connection(
        client: &RemoteClient,
    ) -> std::result::Result<ConnectionHandover, RemoteError> {
        let shared = &client.shared;
        let path = shared.path.as_deref().ok_or(RemoteError::NoPath)?;
        let copy = fetch_copy((client.as_fd(), shared.names.own), path, shared.options)?;
        ConnectionHandover::with(client, copy, true)
    }

    pub(crate) fn copy_when_used(
        client: &RemoteClient,
        socket: OwnedFd,
    ) -> std::result::Result<ConnectionHandover, RemoteError> {
        ConnectionHandover::with(client, (socket, client.shared.names.own), false)
    }

    fn with(
        client: &RemoteClient,
        (socket, own): (OwnedFd, ConnectionNumber),
        is_copied: bool,
    ) -> std::result::Result<ConnectionHandover, RemoteError> {
        let shared = &client.shared;
        Ok(ConnectionHandover {
            socket,
            own,
            is_copied,
            agreement: shared.agreement,
            missing: shared.missing.load(Ordering::Relaxed),
            versions: shared.paths.versions.get().cloned(),
            name_memory: shared.paths.shared.get().cloned(),
            options: shared.options,
            path: shared.path.clone().ok_or(RemoteError::NoPath)?,
        })
    }

    /// Copies the connection for a child of the child, like [`RemoteClient::hand_over`].
    ///
    /// # Errors
    ///
    /// The errors of [`RemoteClient::hand_over`].
    pub fn hand_over(&self) -> std::result::Result<ConnectionHandover, RemoteError> {
        let copy = fetch_copy((self.socket.as_fd(), self.own), &self.path, self.options)?;
        Ok(self.with_socket(copy, true))
    }

    /// Like [`RemoteClient::hand_over_when_used`], for a connection that the parent has not begun
    /// to use.
    pub fn hand_over_when_used(&self, socket: OwnedFd) -> ConnectionHandover {
        self.with_socket((socket, self.own), false)
    }

    fn with_socket(
        &self,
        (socket, own): (OwnedFd, ConnectionNumber),
        is_copied: bool,
    ) -> ConnectionHandover {
        let (versions, name_memory) = (self.versions.clone(), self.name_memory.clone());
        let (agreement, missing, options) = (self.agreement, self.missing, self.options);
        let path = self.path.clone();
        ConnectionHandover {
            socket,
            own,
            is_copied,
            agreement,
            missing,
            versions,
            name_memory,
            options,
            path,
        }
    }

    /// Like [`RemoteClient::prepare_exec`].
    ///
    /// # Errors
    ///
    /// The errors of [`RemoteClient::prepare_exec`].
    pub fn prepare_exec(
        &self,
        handovers: &[InodeHandover],
    ) -> std::result::Result<HandoverClient, RemoteError> {
        HandoverClient::connect((self.as_fd(), self.own), &self.path, self.options, handovers)
    }

    /// The properties of the file system.
    pub fn caps(&self) -> Caps {
        self.agreement.caps()
    }

    /// Begins to use the connection, in the calling process. If the server is gone, or refuses, a
    /// message is logged and every call fails with `ENOTCONN`.
    pub fn begin(self) -> RemoteClient {
        let ConnectionHandover {
            socket,
            own,
            is_copied,
            mut agreement,
            missing,
            options,
            path,
            ..
        } = self;
        let copy = (!is_copied).then(|| fetch_copy((socket.as_fd(), own), &path, options));
        let (socket, own, refused) = match copy {
            None => (socket, own, None),
            Some(Ok((socket, own))) => (socket, own, None),
            Some(Err(error)) => (socket, own, Some(error)),
        };
        let (connection, notices) = RemoteClient::connection(socket, options);
        let names = ConnectionNumbers { own, ..ConnectionNumbers::default() };
        match refused {
            // This is the parent's socket, which stays open.
            Some(error) => connection.give_up(&error.to_string()),
            None => match introduce(&connection, names, options.init_patience()) {
                Ok(agreed) => agreement = agreed,
                Err(error) => connection.end(&error.to_string()),
            },
        }
        if options.lanes != LaneUse::Never
            && let Err(errno) = connection.use_lanes()
        {
            log::debug!("requests are messages: the lanes cannot be used: {errno}");
        }
        let client =
            RemoteClient::with((connection, notices), agreement, options, Some(&path), names);
        client.shared.missing.store(missing, Ordering::Relaxed);
        if let Some(versions) = self.versions {
            let _ = client.shared.paths.versions.set(versions);
        }
        if let Some(name_memory) = self.name_memory {
            let _ = client.shared.paths.shared.set(name_memory);
        }
        client
    }
}

/// The socket of the copy, or the process's own descriptor of its parent's.
impl AsFd for ConnectionHandover {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// A socket at the server of `socket`, with a copy of its connection `copy_of`, and the number of
/// the copy.
fn fetch_copy(
    (socket, copy_of): (BorrowedFd<'_>, ConnectionNumber),
    path: &Path,
    options: RemoteOptions,
) -> std::result::Result<(OwnedFd, ConnectionNumber), RemoteError> {
    let server = peer_user(socket).map_err(RemoteError::Socket)?;
    let own = new_number().map_err(RemoteError::Socket)?;
    let socket = connect_socket(path, options.descriptors_from, None, |uid| uid == server)?;
    ClientConnection::prepare(&socket).map_err(RemoteError::Socket)?;
    request_copy(&socket, ConnectionCopy::new(copy_of, own)).map_err(RemoteError::Copy)?;
    Ok((socket, own))
}

/// Sends [`COPY`], and waits for its answer.
fn request_copy(socket: &OwnedFd, names: ConnectionCopy) -> Result<()> {
    let unique = 1;
    let len = (size_of::<InHeader>() + size_of::<ConnectionCopy>()) as u32;
    let header = InHeader { len, opcode: COPY, unique, ..InHeader::default() };
    let parts = [IoSlice::new(header.as_bytes()), IoSlice::new(names.as_bytes())];
    let beside = &mut SendAncillaryBuffer::default();
    rustix::net::sendmsg(socket, &parts, beside, SendFlags::NOSIGNAL).map_err(errno)?;
    let mut answer = [0; size_of::<OutHeader>()];
    let begun = Instant::now();
    // The socket has a time limit, so that a signal is noticed.
    let len = loop {
        match rustix::net::recv(socket, &mut answer[..], RecvFlags::TRUNC) {
            Ok((_, len)) => break len,
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR)
                if begun.elapsed() < INIT_PATIENCE => {}
            Err(rustix::io::Errno::AGAIN) => return Err(Errno::ETIMEDOUT),
            Err(error) => return Err(errno(error)),
        }
    };
    match OutHeader::read_from_bytes(&answer) {
        Ok(header) if len == answer.len() && header.unique == unique => {
            ClientConnection::outcome(&header, 0).map(drop)
        }
        _ if len == 0 => Err(Errno::ECONNRESET),
        _ => Err(Errno::EPROTO),
    }
}
