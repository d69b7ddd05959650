//! Descriptors of inodes that lose their last name.
//!
//! The contract keeps an inode number valid until it is forgotten, but no handle finds a file
//! without names. Before an operation that may remove the last name, a known inode is therefore
//! given a descriptor (a *pin*). The pin is released if the operation failed or another name is
//! left. Otherwise `rm -r` of hard links would hold a descriptor for each until the kernel forgets
//! them.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use defuse_fs::{FileKind, Ino};
use rustix::fs::{Mode, OFlags};

use crate::lower::{OrErrno, StatxResult};
use crate::options::CredentialsPolicy;
use crate::passthrough::Passthrough;
use crate::sys::name_to_handle;
use crate::tables::inode::LowerInode;

/// An inode that is pinned, and may not need the pin.
pub(crate) struct UnpinCandidate {
    inode: Arc<LowerInode>,
    fd: Arc<OwnedFd>,
    /// The removed name was the last one.
    is_last: bool,
}

impl Passthrough {
    /// Pins the inode of `name` in `dir`, if a frontend knows it and this may be its last name. It
    /// may be a directory if `is_dir` is set. This is a precaution: errors are ignored, since the
    /// operation itself will report them.
    pub(crate) fn pin_victim(
        &self,
        (parent, dir): (&LowerInode, BorrowedFd<'_>),
        name: &[u8],
        is_dir: bool,
    ) -> Option<UnpinCandidate> {
        let likely = parent.key.mount;
        if self.is_own_mount(parent, name) {
            return None;
        }
        // An application removes most files by their names alone.
        if self.options.credentials != CredentialsPolicy::Sticky
            && !self.may_know(likely, dir, name, is_dir)
        {
            return None;
        }
        // One open shows the identity and is the pin: an open by handle of a known inode takes two
        // system calls more. O_PATH opens no device, and waits for no FIFO.
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let open = || rustix::fs::openat(dir, name, flags, Mode::empty()).or_errno();
        let found = self.with_spare_fds(open).ok()?;
        let stat = StatxResult::read(found.as_fd()).ok()?;
        let index = self.mounts.find(stat.mount_id(), likely)?;
        let mount = self.mounts.get(index).ok()?;
        // With three or more names, others remain in spite of concurrent removals.
        let many = mount.handles && stat.nlink() > 2 && stat.kind() != Ok(FileKind::Directory);
        if many || !mount.handles && !mount.reopens() {
            return None;
        }
        let is_dir = stat.kind() == Ok(FileKind::Directory);
        let is_last = is_dir || stat.nlink() == 1;
        let key = mount
            .key(index, &stat, None)
            .or_else(|| mount.key(index, &stat, Some(&name_to_handle(found.as_fd(), c"").ok()?)));
        let inode = self.inodes.peek(&key?)?;
        let stays = inode.ino() == Ino::ROOT || self.keeps_descriptors();
        if stays || !self.is_same(&inode, found.as_fd()) {
            return None;
        }
        // Holds the descriptor to the end, because another removal may release the pin.
        if let Some(fd) = inode.pin.load_full() {
            return Some(UnpinCandidate { inode, fd, is_last });
        }
        let fd = match inode.handle {
            Some(_) => Arc::new(self.place_descriptor(found)),
            None => self.fd(&inode).ok()?,
        };
        self.inodes.pin(&inode, Arc::clone(&fd));
        self.cache_of(&inode).remove(&inode);
        drop(self.recent.take(inode.number));
        Some(UnpinCandidate { inode, fd, is_last })
    }

    /// False if no frontend knows the inode of `name` in `dir`, which may be a directory if
    /// `is_dir` is set.
    fn may_know(&self, likely: u32, dir: BorrowedFd<'_>, name: &[u8], is_dir: bool) -> bool {
        if !is_dir && !self.inodes.has_files() {
            return false;
        }
        let Ok(stat) = StatxResult::read_at(dir, name) else { return true };
        let Some(index) = self.mounts.find(stat.mount_id(), likely) else { return true };
        let key = self.mounts.get(index).ok().and_then(|mount| mount.key(index, &stat, None));
        key.is_none_or(|key| self.inodes.peek(&key).is_some())
    }

    /// Returns `None` if the inode has no pin, or keeps its pin in any case.
    pub(crate) fn victim(&self, inode: Arc<LowerInode>) -> Option<UnpinCandidate> {
        let mount = self.mounts.get(inode.key.mount).ok()?;
        let found = inode.handle.is_some() || mount.reopens();
        let stays = !found || inode.ino() == Ino::ROOT || self.keeps_descriptors();
        let fd = inode.pin.load_full().filter(|_| !stays)?;
        Some(UnpinCandidate { inode, fd, is_last: false })
    }

    /// Does the work of [`settle`](Self::settle) after a successful removal, but skips the check if
    /// the name was the last one. If another name was created meanwhile, an unneeded pin remains
    /// until the inode is forgotten.
    pub(crate) fn settle_removed(&self, victim: Option<UnpinCandidate>) {
        match victim {
            Some(UnpinCandidate { inode, fd, is_last: true }) if inode.handle.is_some() => {
                let _lock = self.removals.lock(inode.number);
                // A concurrent removal that saw an earlier name may have released the pin.
                self.inodes.pin(&inode, fd);
            }
            victim => self.settle(victim),
        }
    }

    /// Releases the pin of an inode without a handle that has a name left. Returns the descriptor.
    pub(crate) fn unpin_named(&self, inode: &Arc<LowerInode>) -> Option<Arc<OwnedFd>> {
        let UnpinCandidate { fd, .. } = self.victim(Arc::clone(inode))?;
        let _lock = self.removals.lock(inode.number);
        if StatxResult::read(fd.as_fd()).is_ok_and(|stat| self.is_reopened(&stat)) {
            self.inodes.unpin(inode);
        }
        Some(fd)
    }

    /// Keeps the pin if the inode has no name left; otherwise releases it.
    pub(crate) fn settle(&self, victim: Option<UnpinCandidate>) {
        let Some(UnpinCandidate { inode, fd, .. }) = victim else { return };
        let _lock = self.removals.lock(inode.number);
        let is_found = match (StatxResult::read(fd.as_fd()), &inode.handle) {
            (Ok(stat), Some(_)) => stat.nlink() > 0 && !self.keeps_descriptors(),
            (Ok(stat), None) => {
                inode.key_stays_unique() && self.is_reopened(&stat) && self.reopen(&inode).is_ok()
            }
            (Err(_), _) => false,
        };
        if is_found {
            self.inodes.unpin(&inode);
        } else {
            // A concurrent removal that saw the name before it went may have released the pin.
            self.inodes.pin(&inode, fd);
        }
    }
}
