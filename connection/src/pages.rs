//! Memory that clients read: pages of files, and versions.

use std::fmt::Debug;
use std::os::fd::OwnedFd;

use defuse_fs::{Context, Errno, File, FileSystem, Ino, Result};

use crate::connection::Connection;

/// The pages of the files of a served file system. It knows no clients: a server asks it after it has checked
/// that the client may read the file ([`Connection::may_read`]).
pub trait PageSource: Send + Sync + Debug {
    /// A descriptor of the pages of an open file, for a client of the user `uid`.
    ///
    /// # Errors
    ///
    /// `ESTALE` where the file is not open, `EBUSY` where it is mapped, `ENOMEM` beyond the limits; those of the
    /// file system.
    fn pages(&self, ino: Ino, uid: u32) -> Result<OwnedFd>;

    /// A client has mapped the file, and may change it unseen: from now on it has no pages.
    fn stop(&self, ino: Ino);
}

/// The versions of names and attributes of a served file system. They say when something has changed, and nothing else, so
/// that every client may have them.
pub trait VersionSource: Send + Sync + Debug {
    /// A descriptor of the versions, to read only.
    ///
    /// # Errors
    ///
    /// Those of open(2).
    fn versions(&self) -> Result<OwnedFd>;
}

impl<F: FileSystem> Connection<F> {
    /// Checks that the client has the file open for reading.
    ///
    /// # Errors
    ///
    /// `EPERM` and `ESTALE` as for every call; `EBADF` for an open file of others; `EACCES` where it is not open
    /// for reading.
    pub fn may_read(&self, cx: &Context<'_>, file: File) -> Result<()> {
        self.check(cx, &[file.ino])?;
        let modes = self.ledger.modes(file).ok_or(Errno::EBADF)?;
        if modes.reads { Ok(()) } else { Err(Errno::EACCES) }
    }
}
