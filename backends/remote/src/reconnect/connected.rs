//! A connection to a server, or a file system of this process in its place.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

use defuse_fs::{AbsentFileSystem, Errno, FileSystem};

use super::table::ConnectionEpoch;
use crate::{RemoteClient, RemoteShared};

/// The server that answers calls.
pub(super) enum CallServer {
    Remote(Box<RemoteClient>),
    /// A file system of this process.
    Own(Arc<dyn FileSystem>),
    /// No server: calls wait.
    Absent,
}

/// A connection.
pub(super) struct ServerConnection {
    pub(super) epoch: ConnectionEpoch,
    server: CallServer,
    life: Arc<ConnectionLife>,
}

/// The end of a connection, visible to a waiting caller without keeping the connection.
pub(super) struct ConnectionLife {
    /// No call begins any more.
    parting: AtomicBool,
    gone: AtomicBool,
    /// The client's part of the connection, which answers all calls when the server has ended,
    /// before they reach this value.
    client: Weak<RemoteShared>,
}

impl ConnectionLife {
    /// True if the connection ends or has ended.
    pub(super) fn is_over(&self) -> bool {
        let is_dead = || self.client.upgrade().is_some_and(|client| client.connection.is_dead());
        self.parting.load(Ordering::SeqCst) || self.gone.load(Ordering::SeqCst) || is_dead()
    }
}

impl ServerConnection {
    pub(super) fn new(epoch: ConnectionEpoch, server: CallServer) -> ServerConnection {
        let client = match &server {
            CallServer::Remote(remote) => Arc::downgrade(&remote.shared),
            CallServer::Own(_) | CallServer::Absent => Weak::new(),
        };
        let (parting, gone) = (AtomicBool::new(false), AtomicBool::new(false));
        ServerConnection { epoch, server, life: Arc::new(ConnectionLife { parting, gone, client }) }
    }

    pub(super) fn fs(&self) -> &dyn FileSystem {
        match &self.server {
            CallServer::Remote(remote) => &**remote,
            CallServer::Own(fs) => &**fs,
            CallServer::Absent => &AbsentFileSystem(Errno::ENOTCONN),
        }
    }

    /// The server at the other end of a socket.
    pub(super) fn remote(&self) -> Option<&RemoteClient> {
        match &self.server {
            CallServer::Remote(remote) => Some(remote),
            CallServer::Own(_) | CallServer::Absent => None,
        }
    }

    /// The file system of this process.
    pub(super) fn local_file_system(&self) -> Option<&dyn FileSystem> {
        match &self.server {
            CallServer::Own(fs) => Some(&**fs),
            CallServer::Remote(_) | CallServer::Absent => None,
        }
    }

    /// True if no call begins any more: the server has ended, or is being parted from.
    pub(super) fn is_dead(&self) -> bool {
        self.has_ended() || self.life.parting.load(Ordering::SeqCst)
    }

    /// True if the durability of changes can no longer be determined.
    pub(super) fn has_ended(&self) -> bool {
        let ended = match &self.server {
            CallServer::Remote(remote) => remote.is_dead(),
            CallServer::Own(_) => false,
            CallServer::Absent => true,
        };
        if ended {
            self.life.gone.store(true, Ordering::SeqCst);
        }
        ended
    }

    /// Ends the connection if the server has closed it.
    pub(super) fn check_for_end(&self) {
        if let Some(remote) = self.remote() {
            remote.shared.connection.check_for_end();
        }
    }

    pub(super) fn connection_life(&self) -> Arc<ConnectionLife> {
        Arc::clone(&self.life)
    }

    pub(super) fn part(&self, parting: bool) {
        self.life.parting.store(parting, Ordering::SeqCst);
    }
}

impl Drop for ServerConnection {
    fn drop(&mut self) {
        self.life.gone.store(true, Ordering::SeqCst);
    }
}
