//! Memory that clients read: pages of files, versions, and names.

use std::fmt::Debug;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use defuse_fs::{Attr, Context, FileSystem, Ino, Name, Result};

use crate::credentials::PeerCredentials;

/// The pages of the files of a served file system. It knows no clients: a server calls it after it
/// has checked that the client may read the file
/// ([`PeerConnection::may_read`](crate::PeerConnection::may_read)).
pub trait PageSource: Send + Sync + Debug {
    /// A descriptor of the pages of an open file, for a client of the user `uid`.
    ///
    /// # Errors
    ///
    /// `ESTALE` if the file is not open, `EBUSY` if it is mapped, `ENOMEM` beyond the limits; the
    /// errors of the file system.
    fn pages(&self, ino: Ino, uid: u32) -> Result<OwnedFd>;

    /// A client has mapped the file, and may change it unseen: from now on it has no pages.
    fn stop(&self, ino: Ino);
}

/// The versions of names and attributes of a served file system. They reveal when something has
/// changed, and nothing else, so that every client may have them.
pub trait VersionSource: Send + Sync + Debug {
    /// A descriptor of the versions, to read only.
    ///
    /// # Errors
    ///
    /// The errors of open(2).
    fn versions(&self) -> Result<OwnedFd>;

    /// True if each change of the file shows in the versions, unless a client has mapped it.
    fn covers(&self, ino: Ino) -> bool;

    /// The version of the attributes of the inode. `None` while they change, and where
    /// [`covers`](Self::covers) is false.
    fn attributes(&self, ino: Ino) -> Option<u64>;

    /// A client has mapped the file, and may change it unseen: cached bytes of the file are no
    /// longer valid.
    fn record_mapping(&self, ino: Ino);

    /// The names for clients with these rights; `None` where they have none.
    fn names(&self, who: &PeerCredentials) -> Option<Arc<dyn NameSource>>;
}

/// The names that were reported to clients with the same rights, with their versions, in memory
/// that all of them read. A client that finds a name there needs no request, and may name its
/// inode.
pub trait NameSource: Send + Sync + Debug {
    /// A descriptor of the memory, to read only.
    ///
    /// # Errors
    ///
    /// The errors of open(2).
    fn memory(&self) -> Result<OwnedFd>;

    /// Returns the versions before a lookup of a name in a directory. `None` while the name
    /// changes, or the rights to the directory.
    fn versions_before(&self, place: (Ino, Name<'_>)) -> Option<LookupVersions>;

    /// Publishes a name in a directory: its inode with the attributes, or that there is none. Every
    /// user may search the directory if it is `open_to_all`. If anything has changed since
    /// `before`, the attributes are read again from the file system.
    fn publish(
        &self,
        before: LookupVersions,
        place: (Ino, Name<'_>),
        inode: Option<(Ino, &Attr)>,
        open_to_all: bool,
        fs: (&dyn FileSystem, &Context<'_>),
    );

    /// The version of the rights to a directory. `None` while they change.
    fn rights(&self, dir: Ino) -> Option<u64>;

    /// True if one of the names leads to the inode, and a client could find the name now: neither
    /// the name nor the rights to its directory have changed since the name was published, and the
    /// same holds for the directory, up to the root directory or to a directory that the client
    /// `holds`. A client that may not search one of them any more finds nothing below it.
    fn lead_to(&self, ino: Ino, holds: &dyn Fn(Ino) -> bool) -> bool;
}

/// The versions before a lookup of a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LookupVersions {
    /// The version of everything; `None` while anything changed.
    pub all: Option<u64>,
    /// The version of the name.
    pub name: u64,
    /// The version of the rights to the directory.
    pub rights: u64,
}
