//! The mount by which this file system is served, where that is below its own source.
//!
//! The mount point shows what it showed before, as with a bind mount. A daemon that entered its own
//! mount would wait for itself, and its descriptors would keep the mount busy.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use rustix::fs::{Mode, OFlags};

use crate::lower::{MountId, StatxResult, is_below, open_parent};

/// A directory that a mount is about to cover, and its name.
pub(crate) struct OwnMount {
    covered: OwnedFd,
    parent: (MountId, u64),
    name: Vec<u8>,
}

impl OwnMount {
    /// The mount point, before anything is mounted there, if it is below `source`: a descriptor
    /// outside of the source would lead out of the sandbox of a daemon. `None` if it cannot be
    /// opened, too: mounting reports the reason.
    pub(crate) fn find(mountpoint: &Path, source: BorrowedFd<'_>) -> Option<OwnMount> {
        use std::os::unix::ffi::OsStrExt;
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let covered = rustix::fs::open(mountpoint, flags, Mode::empty()).ok()?;
        let parent = open_parent(covered.as_fd()).ok()?;
        let stat = StatxResult::read(parent.as_fd()).ok()?;
        if !is_below(parent.as_fd(), &StatxResult::read(source).ok()?, open_parent).ok()? {
            return None;
        }
        let name = mountpoint.file_name()?.as_bytes().to_vec();
        Some(OwnMount { covered, parent: (stat.mount_id(), stat.ino()), name })
    }

    /// True if it is `name` in the directory with this number on this mount.
    pub(crate) fn is_at(&self, mount: MountId, dir: u64, name: &[u8]) -> bool {
        (mount, dir) == self.parent && *name == *self.name
    }

    /// The directory that the mount covers.
    pub(crate) fn covered_dir(&self) -> BorrowedFd<'_> {
        self.covered.as_fd()
    }
}
