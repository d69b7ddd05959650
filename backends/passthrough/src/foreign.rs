//! Operations on file systems that are mounted below the source: where their roots are found again,
//! and which cache has the descriptors of their inodes (`tables/foreign_mounts.rs`).

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use defuse_fs::{Errno, Result};
use rustix::fs::{Mode, OFlags};

use crate::lower::{MountId, OrErrno, StatxResult};
use crate::passthrough::Passthrough;
use crate::tables::fd_cache::FdCache;
use crate::tables::foreign_mounts::{FoundRoot, MountPlace};
use crate::tables::inode::LowerInode;
use crate::tables::mounts::{LowerMount, MountRef};

/// The root of a mount, for open_by_handle_at(2).
pub(crate) enum RootFd<'a> {
    Lasting(BorrowedFd<'a>),
    Shared(Arc<OwnedFd>),
}

impl AsFd for RootFd<'_> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            RootFd::Lasting(fd) => *fd,
            RootFd::Shared(fd) => fd.as_fd(),
        }
    }
}

impl Passthrough {
    /// Records that the directory `dir` has no `name`, which a frontend may remember.
    pub(crate) fn note_absent(&self, dir: &Arc<LowerInode>, name: &[u8]) {
        if dir.key.mount != 0 && dir.is_pinned() && self.is_foreign(dir.key.mount) {
            self.foreign.add_absent(dir, name);
        }
    }

    /// True if descriptors on the mount with this index must not last.
    pub(crate) fn is_foreign(&self, mount: u32) -> bool {
        mount != 0 && self.mounts.get(mount).is_ok_and(|mount| mount.is_foreign)
    }

    /// True if `inode`, which was found in `dir`, is on another mount. Several devices may be on
    /// one mount (btrfs, overlayfs).
    pub(crate) fn is_mount_root(&self, inode: &LowerInode, dir: &LowerInode) -> bool {
        let mount =
            |inode: &LowerInode| self.mounts.get(inode.key.mount).map(|mount| mount.id.mount);
        mount(inode) != mount(dir)
    }

    /// The cache for the descriptor of an inode.
    pub(crate) fn cache_of(&self, inode: &LowerInode) -> &FdCache {
        if self.is_foreign(inode.key.mount) { self.foreign.cache() } else { &self.cache }
    }

    /// Caches `fd` for `inode`. If `hot` is set, it survives longer unused.
    pub(crate) fn cache_fd(&self, inode: &LowerInode, fd: &Arc<OwnedFd>, hot: bool) {
        if self.is_foreign(inode.key.mount) {
            self.foreign.cache().put(inode, fd, hot);
            self.foreign.close_later();
        } else {
            self.cache.put(inode, fd, hot);
        }
    }

    /// Keeps `fd`, the root of a foreign mount, for a while.
    pub(crate) fn keep_root(&self, mount: u32, fd: OwnedFd) {
        self.foreign.set_root(mount, Arc::new(self.place_descriptor(fd)));
    }

    /// The root of a mount, open for reading. Fails with `ESTALE` if the mount is no longer where
    /// it was found.
    pub(crate) fn root_fd(&self, index: u32) -> Result<RootFd<'_>> {
        let mount = self.mounts.get(index)?;
        match &mount {
            MountRef::First(LowerMount { fd: Some(fd), .. }) => {
                return Ok(RootFd::Lasting(fd.as_fd()));
            }
            other if let Some(fd) = &other.fd => return Ok(RootFd::Shared(Arc::clone(fd))),
            _ => {}
        }
        let place = match self.foreign.find_root(index)? {
            FoundRoot::Open(fd) => return Ok(RootFd::Shared(fd)),
            FoundRoot::Closed(place) => place,
        };
        let fd = Arc::new(self.place_descriptor(self.open_root(&place, mount.id)?));
        self.foreign.set_root(index, Arc::clone(&fd));
        Ok(RootFd::Shared(fd))
    }

    /// Opens the root of the mount `id` where it was found. Fails with `ESTALE` if it is no longer
    /// there.
    fn open_root(&self, place: &MountPlace, id: MountId) -> Result<OwnedFd> {
        let dir = self.fd(&*place.dir().ok_or(Errno::ESTALE)?)?;
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let open = || rustix::fs::openat(&dir, &*place.name, flags, Mode::empty()).or_errno();
        let fd = self.with_spare_fds(open)?;
        match StatxResult::read(fd.as_fd())?.mount_id() == id {
            true => Ok(fd),
            false => Err(Errno::ESTALE),
        }
    }

    /// True if a mount is no longer where it was found. Its root may be open.
    pub(crate) fn has_ended(&self, index: u32) -> bool {
        let Some(place) = self.foreign.place(index) else { return true };
        let Ok(mount) = self.mounts.get(index) else { return true };
        let opened = self.open_root(&place, mount.id);
        matches!(opened, Err(Errno::ESTALE | Errno::ENOENT | Errno::ENOTDIR))
    }
}
