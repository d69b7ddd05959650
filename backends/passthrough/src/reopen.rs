//! Inodes without file handles, which are found again by name.
//!
//! Without `CAP_DAC_READ_SEARCH` there are no file handles, and one descriptor per inode would soon
//! exceed the limit. Each inode therefore records its names and their directories, and its
//! descriptor is in the cache. After an eviction, the inode is opened by name again, starting from
//! the nearest ancestor that is still open. Mount, number and birth time identify the inode; if
//! they differ (the file was moved on the source), it is stale. An inode keeps its own descriptor
//! if the file system has no birth times, or if no name is known, and until the clock has passed
//! its birth time (`identity.rs`).

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use defuse_fs::{Errno, Ino, Result};
use rustix::fs::{Mode, OFlags};

use crate::lower::{OrErrno, StatxResult};
use crate::passthrough::{InodeFd, Passthrough};
use crate::tables::inode::LowerInode;

impl Passthrough {
    /// True if an inode with this status needs no descriptor of its own once a name is known.
    pub(crate) fn is_reopened(&self, stat: &StatxResult) -> bool {
        let mount = self.mounts.find(stat.mount_id(), 0).and_then(|at| self.mounts.get(at).ok());
        let reopens = mount.is_some_and(|mount| mount.reopens());
        reopens && stat.birth().is_some() && stat.nlink() > 0 && !self.keeps_descriptors()
    }

    /// Records that the inode `ino` was found as `name` in `dir`, if names are needed.
    pub(crate) fn note_place(&self, ino: Ino, dir: &Arc<LowerInode>, name: &[u8]) {
        // With handles, no name is needed. Where inodes are not found again by name, requests to
        // forget name them.
        let has_handles = self.mounts.get(dir.key.mount).is_ok_and(|mount| mount.handles);
        if ino == Ino::ROOT || has_handles && !self.mounts.has_several() {
            return;
        }
        let Ok(inode) = self.inodes.get(ino) else { return };
        if inode.key.mount != dir.key.mount && self.is_mount_root(&inode, dir) {
            self.foreign.note_place(inode.key.mount, dir, name);
        }
        if let Some(places) = &inode.places {
            places.add(dir, name);
        }
    }

    /// Records the new name of a renamed inode.
    pub(crate) fn note_moved(&self, dir: &Arc<LowerInode>, fd: BorrowedFd<'_>, name: &[u8]) {
        if !self.mounts.get(dir.key.mount).is_ok_and(|mount| mount.reopens()) {
            return;
        }
        if let Ok(stat) = StatxResult::read_at(fd, name)
            && let Some(index) = self.mounts.find(stat.mount_id(), dir.key.mount)
            && let Ok(mount) = self.mounts.get(index)
            && let Some(key) = mount.key(index, &stat, None)
            && let Some(inode) = self.inodes.peek(&key)
        {
            self.note_place(inode.ino(), dir, name);
        }
    }

    /// An `O_PATH` descriptor of an inode without a handle. Fails with `ESTALE` if no name leads to
    /// it.
    pub(crate) fn reopen(&self, inode: &LowerInode) -> Result<OwnedFd> {
        let places = inode.places.as_ref().map(|places| places.all_names()).unwrap_or_default();
        for place in places.iter().rev() {
            let dir = self.directory(&place.dir);
            if let Ok(fd) = dir.and_then(|dir| self.open_checked(dir.as_fd(), &place.name, inode)) {
                return Ok(fd);
            }
        }
        Err(Errno::ESTALE)
    }

    /// Opens a directory, starting from the nearest open ancestor.
    fn directory(&self, dir: &Arc<LowerInode>) -> Result<InodeFd> {
        const MAX_DEPTH: usize = 1 << 16;
        let (mut at, mut below) = (Arc::clone(dir), Vec::new());
        let mut fd = loop {
            if let Some(fd) = at.pin.load_full().or_else(|| self.cache_of(&at).get(&at)) {
                break fd;
            }
            // A directory has one name; the latest is the best guess.
            let place = at.places.as_ref().and_then(|places| places.all_names().pop());
            let place = place.filter(|_| below.len() < MAX_DEPTH).ok_or(Errno::ESTALE)?;
            below.push((at, place.name));
            at = place.dir;
        };
        while let Some((inode, name)) = below.pop() {
            let opened = self.open_checked(fd.as_fd(), &name, &inode)?;
            fd = Arc::new(self.place_descriptor(opened));
            // A forgotten inode must not be cached, because nothing would remove it from the cache.
            if self.inodes.get(inode.ino()).is_ok() {
                self.cache_fd(&inode, &fd, true);
            }
        }
        Ok(fd)
    }

    /// Opens `name` in `dir` if it leads to `inode`.
    fn open_checked(
        &self,
        dir: BorrowedFd<'_>,
        name: &[u8],
        inode: &LowerInode,
    ) -> Result<OwnedFd> {
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let open = || rustix::fs::openat(dir, name, flags, Mode::empty()).or_errno();
        let fd = self.with_spare_fds(open)?;
        let stat = StatxResult::read(fd.as_fd())?;
        let index = self.mounts.find(stat.mount_id(), inode.key.mount).ok_or(Errno::ESTALE)?;
        let key = self.mounts.get(index)?.key(index, &stat, None);
        if key == Some(inode.key) { Ok(fd) } else { Err(Errno::ESTALE) }
    }
}
