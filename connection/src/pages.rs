//! Memory that clients read: pages of files, versions, and names.

use std::fmt::Debug;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use defuse_fs::{
    Attr, Context, Errno, File, FileKind, FileSystem, Ino, Name, OpenFlags, ReadArgs, ReadBuf,
    Result, SliceSink, Timestamp,
};

use crate::connection::PeerConnection;
use crate::credentials::PeerCredentials;

/// The pages of the files of a served file system. It knows no clients: a server calls it after it has checked that
/// the client may read the file ([`PeerConnection::may_read`]).
pub trait PageSource: Send + Sync + Debug {
    /// A descriptor of the pages of an open file, for a client of the user `uid`.
    ///
    /// # Errors
    ///
    /// `ESTALE` if the file is not open, `EBUSY` if it is mapped, `ENOMEM` beyond the limits; the errors of the file
    /// system.
    fn pages(&self, ino: Ino, uid: u32) -> Result<OwnedFd>;

    /// A client has mapped the file, and may change it unseen: from now on it has no pages.
    fn stop(&self, ino: Ino);
}

/// The versions of names and attributes of a served file system. They reveal when something has changed, and nothing
/// else, so that every client may have them.
pub trait VersionSource: Send + Sync + Debug {
    /// A descriptor of the versions, to read only.
    ///
    /// # Errors
    ///
    /// The errors of open(2).
    fn versions(&self) -> Result<OwnedFd>;

    /// True if each change of the file shows in the versions, unless a client has mapped it.
    fn covers(&self, ino: Ino) -> bool;

    /// The version of the attributes of the inode. `None` while they change, and where [`covers`](Self::covers) is
    /// false.
    fn attributes(&self, ino: Ino) -> Option<u64>;

    /// A client has mapped the file, and may change it unseen: cached bytes of the file are no longer valid.
    fn record_mapping(&self, ino: Ino);

    /// The names for clients with these rights; `None` where they have none.
    fn names(&self, who: &PeerCredentials) -> Option<Arc<dyn NameSource>>;
}

/// The names that were reported to clients with the same rights, with their versions, in memory that all of them
/// read. A client that finds a name there needs no request, and may name its inode.
pub trait NameSource: Send + Sync + Debug {
    /// A descriptor of the memory, to read only.
    ///
    /// # Errors
    ///
    /// The errors of open(2).
    fn memory(&self) -> Result<OwnedFd>;

    /// Returns the versions before a lookup of a name in a directory. `None` while the name changes, or the rights to
    /// the directory.
    fn versions_before(&self, place: (Ino, Name<'_>)) -> Option<LookupVersions>;

    /// Publishes a name in a directory: its inode with the attributes, or that there is none. Every user may search
    /// the directory if it is `open_to_all`. If anything has changed since `before`, the attributes are read again
    /// from the file system.
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

    /// True if one of the names leads to the inode, and a client could find the name now: neither the name nor the
    /// rights to its directory have changed since the name was published, and the same holds for the directory, up to
    /// the root directory or to a directory that the client `holds`. A client that may not search one of them any
    /// more finds nothing below it.
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

/// All bytes of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WholeBytes {
    /// The bytes.
    pub bytes: Vec<u8>,
    /// True if reading changes the access time, which has not happened.
    pub read_is_due: bool,
}

impl<F: FileSystem> PeerConnection<F> {
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

    /// Returns all bytes of an open file that has at most `most`. `None` if it has more, is not a regular file or is
    /// mapped, and after any error.
    pub fn read_whole(&self, cx: &Context<'_>, file: File, most: usize) -> Option<WholeBytes> {
        let attr = self.getattr(cx, file.ino, Some(file.fh)).ok()?;
        let size = usize::try_from(attr.size).ok().filter(|size| *size <= most)?;
        if attr.kind != FileKind::Regular || self.is_mapped(file.ino) {
            return None;
        }
        let mut bytes = vec![0; size];
        let args = ReadArgs { flags: OpenFlags(OpenFlags::NOATIME), ..ReadArgs::default() };
        let mut sink = SliceSink::new(&mut bytes);
        let mut out = ReadBuf::new(&mut sink, size);
        if size > 0 {
            self.read(cx, file, args, &mut out).ok()?;
        }
        let is_whole = out.filled_len() == size;
        let read_is_due = attr.read_is_due(Timestamp::now());
        is_whole.then_some(WholeBytes { bytes, read_is_due })
    }
}
