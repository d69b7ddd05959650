//! The mount by which this file system is served, where that is below its own source.
//!
//! The mount point shows what it showed before, as with a bind mount. A daemon that entered its own mount would wait for itself, and its
//! descriptors would keep the mount busy.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use defuse_fs::{Entry, Result};
use rustix::fs::{Mode, OFlags};

use crate::inode::LowerInode;
use crate::lower::{MountId, OrErrno, StatxResult, is_below, open_parent};
use crate::passthrough::Passthrough;

/// A directory that a mount is about to cover, and its name.
pub(crate) struct OwnMount {
    covered: OwnedFd,
    parent: (MountId, u64),
    name: Vec<u8>,
}

impl OwnMount {
    /// The mount point, before anything is mounted there, if it is below `source`: a descriptor outside of the source would lead out of the
    /// sandbox of a daemon. `None` if it cannot be opened, too: mounting reports the reason.
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
}

impl Passthrough {
    /// The directory below the own mount, if that is `name` in `dir`.
    fn find_covered(&self, dir: &LowerInode, name: &[u8]) -> Option<BorrowedFd<'_>> {
        let own = self.own_mount.as_ref()?;
        let is_it = dir.key.ino == own.parent.1
            && *name == *own.name
            && self.mounts.get(dir.key.mount).is_ok_and(|mount| mount.id == own.parent.0);
        is_it.then(|| own.covered.as_fd())
    }

    /// True if the own mount is `name` in `dir`. A system call with that name would call this file system.
    pub(crate) fn is_own_mount(&self, dir: &LowerInode, name: &[u8]) -> bool {
        self.find_covered(dir, name).is_some()
    }

    /// Looks up the directory below the own mount, if that is `name` in `dir`. Counts a lookup.
    pub(crate) fn lookup_covered(&self, dir: &LowerInode, name: &[u8]) -> Option<Result<Entry>> {
        let covered = self.find_covered(dir, name)?;
        let copy = self.with_spare_fds(|| rustix::io::fcntl_dupfd_cloexec(covered, 0).or_errno());
        Some(copy.and_then(|fd| self.enter_path_fd(dir.key.mount, fd, false)))
    }
}
