//! A file system of a server that may end and come back: [`ReconnectingClient`].
//!
//! docs/socket.md describes the behaviour of calls meanwhile. All numbers that a server assigned
//! end with it. So the frontend gets numbers of a [`table`], and an inode or an open file is found
//! again by its path when a call needs it.

mod attempt;
mod connected;
mod fs;
mod last_reply;
mod link;
mod moving;
mod table;
mod unsynced;

use std::fmt;
use std::path::Path;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use defuse_fs::{Attr, CacheMode, Caps, Context, Entry, Errno, OpenReply, Result};

use super::{RemoteError, RemoteOptions, lock};
use attempt::CallAttempt;
use connected::ServerConnection;
use link::{CallPatience, ServerLink};
pub use moving::MovingClient;
use table::ReconnectTable;

/// A file system on a socket, whose calls wait for another server if the first one ends.
///
/// Any number of threads may call it at once. A child process must not use its parent's client
/// (`ENOTCONN`).
pub struct ReconnectingClient {
    link: ServerLink,
    caps: Caps,
    table: Arc<Mutex<ReconnectTable>>,
    /// A lock was requested: flush may have to end it.
    has_locked: AtomicBool,
    /// It is one file system, regardless of the process that serves it: numbers of inodes stay. A
    /// frontend may cache nothing, because the next server may have changed anything unseen.
    moves: bool,
}

/// The handling of a call whose reply is lost with the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RepeatRule {
    /// The call is repeated: carrying it out twice has the same effect as once.
    Again,
    /// The operation makes a name, and is repeated unless the name exists: then its maker is
    /// unknown.
    IfMissing,
    /// The operation fails with `EIO`, because its outcome is unknown.
    Never,
}

impl ReconnectingClient {
    /// Connects to the server that listens at `path`, like
    /// [`RemoteClient::connect`](crate::RemoteClient::connect). If a server ends, calls wait up to
    /// `limit` for another one of the same user.
    pub fn connect(
        path: &Path,
        options: RemoteOptions,
        limit: Duration,
    ) -> std::result::Result<ReconnectingClient, RemoteError> {
        let table = Arc::new(Mutex::new(ReconnectTable::new()));
        let link = ServerLink::connect(path, options, limit, Arc::clone(&table))?;
        // A server without locks leaves them to the frontend, which does not lose them.
        let caps = link.present().fs().caps();
        let has_locked = AtomicBool::new(false);
        Ok(ReconnectingClient { link, caps, table, has_locked, moves: false })
    }

    /// The number of servers that were found again.
    pub fn reconnect_count(&self) -> u64 {
        self.link.present().epoch - 1
    }

    fn table(&self) -> MutexGuard<'_, ReconnectTable> {
        lock(&self.table)
    }

    /// Makes a call, on further connections as long as its answers are lost.
    fn call<T>(
        &self,
        cx: &Context<'_>,
        repeat: RepeatRule,
        mut act: impl FnMut(&CallAttempt<'_>) -> Result<T>,
    ) -> Result<T> {
        let (mut wait, mut unsure) = (CallPatience::default(), false);
        loop {
            let connected = match self.link.await_connection(cx, &mut wait) {
                Err(_) if unsure => return Err(unknown_outcome_error()),
                found => found?,
            };
            let attempt = CallAttempt::new(self, cx, connected, (repeat, unsure));
            match act(&attempt) {
                Err(Errno::ENOTCONN) if attempt.is_lost() => match repeat {
                    RepeatRule::Never if attempt.mark_sent() => return Err(unknown_outcome_error()),
                    RepeatRule::IfMissing => unsure |= attempt.mark_sent(),
                    RepeatRule::Never | RepeatRule::Again => {}
                },
                outcome => return outcome,
            }
        }
    }

    /// Returns lookups to the server that counts them.
    fn give_back(&self, returned: &[table::ReturnedLookups]) {
        let present = self.link.present();
        if present.is_dead() {
            return;
        }
        for one in returned.iter().filter(|one| one.epoch == present.epoch && one.lookups > 0) {
            present.fs().forget(one.ino, one.lookups);
        }
    }

    /// Returns the entry for the frontend.
    fn map_entry(&self, entry: Entry) -> Entry {
        if !self.moves {
            return entry;
        }
        Entry { valid_for: Duration::ZERO, attr: self.map_attr(entry.attr), ..entry }
    }

    fn map_attr(&self, attr: Attr) -> Attr {
        if self.moves { Attr { valid_for: Duration::ZERO, ..attr } } else { attr }
    }

    fn map_open(&self, opened: OpenReply) -> OpenReply {
        if self.moves { OpenReply { cache: CacheMode::Direct, ..opened } } else { opened }
    }
}

impl fmt::Debug for ReconnectingClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (inodes, files) = self.table().sizes();
        f.debug_struct("Reconnecting").field("inodes", &inodes).field("files", &files).finish()
    }
}

/// Returns the error of a call that may or may not have been carried out.
fn unknown_outcome_error() -> Errno {
    log::warn!("a server has ended before it answered a request: EIO");
    Errno::EIO
}

/// The connection of an attempt.
type CurrentConnection = Arc<ServerConnection>;
