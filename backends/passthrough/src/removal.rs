//! Descriptors of inodes that lose their last name.
//!
//! The contract keeps the number of an inode valid until it is forgotten, but no handle leads to a file
//! without names. So an inode that a frontend knows keeps a descriptor (a *pin*) from before an
//! operation that may take its last name away, and gives it up again where the operation failed or
//! another name is left. Otherwise an `rm -r` of hard links would hold a descriptor for each until the
//! kernel forgets them.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};

use defuse_fs::{FileKind, Ino};
use rustix::fs::OFlags;

use crate::inode::Inode;
use crate::lookup::handle_of;
use crate::lower::Stat;
use crate::passthrough::Passthrough;

const SHARDS: usize = 16;

/// Locks under which the names of an inode are counted and its pin is given up. Without them, one who
/// has counted a name could give up the pin after another one has removed that name and settled.
#[derive(Default)]
pub(crate) struct Removals([Mutex<()>; SHARDS]);

/// An inode that is pinned and may or may not need it.
pub(crate) struct Victim {
    inode: Arc<Inode>,
    fd: Arc<OwnedFd>,
    /// The name was its last one.
    is_last: bool,
}

impl Passthrough {
    /// Pins what `name` in `dir` leads to, if a frontend knows it and this may be its last name. Not
    /// more than a precaution, so that errors are ignored: the operation itself will show them.
    pub(crate) fn pin_victim(
        &self,
        likely: u32,
        dir: BorrowedFd<'_>,
        name: &[u8],
    ) -> Option<Victim> {
        let stat = Stat::at(dir, name).ok()?;
        let index = self.mounts.find(stat.mount_id(), likely)?;
        let mount = self.mounts.get(index).ok()?;
        // With three names and more, others remain whatever happens at the same time.
        let many = mount.handles && stat.nlink() > 2 && stat.kind() != Ok(FileKind::Directory);
        if many || !mount.handles && !mount.reopens() {
            return None;
        }
        let is_dir = stat.kind() == Ok(FileKind::Directory);
        let is_last = is_dir || stat.nlink() == 1;
        let key = mount
            .key(index, &stat, None)
            .or_else(|| mount.key(index, &stat, Some(&handle_of(dir, name).ok()?)));
        let inode = self.inodes.peek(&key?)?;
        if inode.ino() == Ino::ROOT || self.keeps_descriptors() {
            return None;
        }
        // The descriptor itself is held until the end: another removal may take the pin.
        if let Some(fd) = inode.pin.load_full() {
            return Some(Victim { inode, fd, is_last });
        }
        let fd = match inode.handle {
            Some(_) => Arc::new(self.placed(self.open_inode(&inode, OFlags::PATH).ok()?)),
            None => self.fd(&inode).ok()?,
        };
        self.inodes.pin(&inode, Arc::clone(&fd));
        self.cache.remove(&inode);
        drop(self.recent.take(inode.number));
        Some(Victim { inode, fd, is_last })
    }

    /// `None` for an inode without a pin, and where the pin stays whatever happens.
    pub(crate) fn victim(&self, inode: Arc<Inode>) -> Option<Victim> {
        let mount = self.mounts.get(inode.key.mount).ok()?;
        let found = inode.handle.is_some() || mount.reopens();
        let stays = !found || inode.ino() == Ino::ROOT || self.keeps_descriptors();
        let fd = inode.pin.load_full().filter(|_| !stays)?;
        Some(Victim { inode, fd, is_last: false })
    }

    /// As [`settle`](Self::settle) after a removal that succeeded, without looking again where the name
    /// was the last one. A name that was made meanwhile leaves a pin that is not needed, until the inode
    /// is forgotten.
    pub(crate) fn settle_removed(&self, victim: Option<Victim>) {
        match victim {
            Some(Victim { inode, fd, is_last: true }) if inode.handle.is_some() => {
                let lock = &self.removals.0[inode.number as usize % SHARDS];
                let _lock = lock.lock().unwrap_or_else(PoisonError::into_inner);
                // Another one, who saw a name before that one, may have taken the pin.
                self.inodes.pin(&inode, fd);
            }
            victim => self.settle(victim),
        }
    }

    /// Leaves the pin to an inode that has no name any more, and takes it from one that has.
    pub(crate) fn settle(&self, victim: Option<Victim>) {
        let Some(Victim { inode, fd, .. }) = victim else { return };
        let lock = &self.removals.0[inode.number as usize % SHARDS];
        let _lock = lock.lock().unwrap_or_else(PoisonError::into_inner);
        let is_found = match (Stat::of(fd.as_fd()), &inode.handle) {
            (Ok(stat), Some(_)) => stat.nlink() > 0 && !self.keeps_descriptors(),
            (Ok(stat), None) => self.is_reopened(&stat) && self.reopen(&inode).is_ok(),
            (Err(_), _) => false,
        };
        if is_found {
            self.inodes.unpin(&inode);
        } else {
            // Another one, who saw the name that is gone now, may have taken the pin.
            self.inodes.pin(&inode, fd);
        }
    }
}
