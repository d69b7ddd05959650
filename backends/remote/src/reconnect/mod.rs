//! A file system of a server that may end and come back: [`Reconnecting`].
//!
//! docs/socket.md says what calls do meanwhile. Everything that the server gave ends with it. So the frontend gets
//! numbers of a [`table`], and an inode or an open file is found again by its path when a call needs it.

mod attempt;
mod fs;
mod link;
mod table;
mod unsynced;

use std::fmt;
use std::path::Path;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use defuse_fs::{Caps, Context, Errno, FileSystem, Result};

use super::{RemoteError, RemoteOptions, lock};
use attempt::Attempt;
use link::{Connected, Link, Wait};
use table::Table;

/// A file system on a socket, whose calls wait for another server if the first one ends.
///
/// Any number of threads may call it at once. A child process must not use that of its parent (`ENOTCONN`).
pub struct Reconnecting {
    link: Link,
    caps: Caps,
    table: Arc<Mutex<Table>>,
    /// A lock was requested: flush may have to end it.
    has_locked: AtomicBool,
}

/// The fate of a call whose answer is lost with the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Repeat {
    /// It is made again: twice is as once.
    Again,
    /// It makes a name, and is made again unless the name is there: then nobody knows who made it.
    IfMissing,
    /// It fails with `EIO`, because nobody knows if it was done.
    Never,
}

impl Reconnecting {
    /// Connects to the server that listens at `path`, as [`Remote::connect`](crate::Remote::connect) does. If a server ends, calls wait up to
    /// `limit` for another one of the same user.
    pub fn connect(
        path: &Path,
        options: RemoteOptions,
        limit: Duration,
    ) -> std::result::Result<Reconnecting, RemoteError> {
        let table = Arc::new(Mutex::new(Table::new()));
        let link = Link::connect(path, options, limit, Arc::clone(&table))?;
        // A server without locks leaves them to the frontend, which does not lose them.
        let caps = link.present().remote.caps();
        Ok(Reconnecting { link, caps, table, has_locked: AtomicBool::new(false) })
    }

    /// The number of servers that were found again.
    pub fn reconnected(&self) -> u64 {
        self.link.present().epoch - 1
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        lock(&self.table)
    }

    /// Makes a call, on further connections as long as its answers are lost.
    fn call<T>(
        &self,
        cx: &Context<'_>,
        repeat: Repeat,
        mut act: impl FnMut(&Attempt<'_>) -> Result<T>,
    ) -> Result<T> {
        let (mut wait, mut unsure) = (Wait::default(), false);
        loop {
            let connected = match self.link.connected(cx, &mut wait) {
                Err(_) if unsure => return Err(nobody_knows()),
                found => found?,
            };
            let attempt = Attempt::new(self, cx, connected, (repeat, unsure));
            match act(&attempt) {
                Err(Errno::ENOTCONN) if attempt.is_lost() => match repeat {
                    Repeat::Never if attempt.was_sent() => return Err(nobody_knows()),
                    Repeat::IfMissing => unsure |= attempt.was_sent(),
                    Repeat::Never | Repeat::Again => {}
                },
                outcome => return outcome,
            }
        }
    }

    /// Returns lookups to the server that counts them.
    fn give_back(&self, returned: &[table::Returned]) {
        let present = self.link.present();
        if present.remote.is_dead() {
            return;
        }
        for one in returned.iter().filter(|one| one.epoch == present.epoch && one.lookups > 0) {
            present.remote.forget(one.ino, one.lookups);
        }
    }
}

impl fmt::Debug for Reconnecting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (inodes, files) = self.table().sizes();
        f.debug_struct("Reconnecting").field("inodes", &inodes).field("files", &files).finish()
    }
}

/// The error of a call that may or may not have been done.
fn nobody_knows() -> Errno {
    log::warn!("a server has ended before it answered a request: EIO");
    Errno::EIO
}

/// The connection of an attempt.
type Present = Arc<Connected>;
