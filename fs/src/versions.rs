//! Versions of names and attributes, by which a frontend knows without a call that they have not
//! changed.

use std::time::Duration;

use crate::Ino;

/// Attributes whose version stays hold no longer than this if a read would change the access time,
/// because only the first read of a file after a change has a version, and no read of a directory
/// or a link. A file system with versions changes access times by the rule of `relatime`
/// ([`Attr::read_is_due`](crate::Attr::read_is_due)): a client knows which of its own reads do.
pub const ATTRIBUTES_HOLD: Duration = Duration::from_secs(1);

/// Versions that change with what they are versions of. A file system gives them to its frontend by
/// [`Notify::versions`](crate::Notify::versions), where the changes of all clients show in them
/// before they are answered.
///
/// An answer of the file system holds as long as its version stays. The frontend cannot know the
/// version of a thing at the time of the answer if the answer names the thing. So it looks at the
/// version of everything before the call, and after it has got the versions of the things in the
/// answer: if that has stayed, nothing has changed in between.
///
/// Of access times, only the times of files that were read first after a change have a version: see
/// [`ATTRIBUTES_HOLD`].
pub trait Versions: Send + Sync {
    /// The version of everything. `None` while a change runs, and if changes are no longer
    /// reported.
    fn all(&self) -> Option<u64>;

    /// The version of everything after exactly one change since `all`.
    fn successor_of(&self, all: u64) -> u64;

    /// The version of the attributes of an inode. `None` as for [`all`](Versions::all).
    fn attributes(&self, ino: Ino) -> Option<u64>;

    /// The version of mode, owner, group and access list of an inode. `None` as for
    /// [`all`](Versions::all).
    fn rights(&self, ino: Ino) -> Option<u64>;

    /// The version of a name in a directory: that it exists, and where it leads. `None` as for
    /// [`all`](Versions::all).
    fn name(&self, dir: Ino, name: &[u8]) -> Option<u64>;
}
