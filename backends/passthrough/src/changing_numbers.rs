//! Operations on inodes whose number or device changes, which are known by their descriptors
//! (`tables/watches.rs`).

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use defuse_fs::{FileKind, Ino, Name, Result};

use crate::lower::StatxResult;
use crate::passthrough::Passthrough;
use crate::tables::inode::{FoundInode, LowerInode};

impl Passthrough {
    /// True if the numbers of inodes on the mount with this index may change.
    pub(crate) fn changes_numbers(&self, mount: u32) -> bool {
        self.mounts.has_changing_numbers()
            && self.mounts.get(mount).is_ok_and(|mount| mount.changes_numbers())
    }

    /// True if a file with this status, on the mount with this index, is told from others by its
    /// descriptor alone: each of its names may be a file of its own.
    pub(crate) fn needs_descriptor(&self, mount: u32, stat: &StatxResult) -> bool {
        stat.nlink() > 1 && stat.kind() != Ok(FileKind::Directory) && self.changes_numbers(mount)
    }

    /// Adds an inode with a descriptor, on a mount where numbers may change, or counts one more
    /// lookup of it. True if it is new.
    pub(crate) fn insert_by_descriptor(
        &self,
        mut new: FoundInode,
        has_names: bool,
    ) -> Result<(Ino, bool)> {
        let mut table = self.watches.lock();
        if !has_names && table.is_empty() {
            drop(table);
            return self.inodes.insert(new);
        }
        let watch = new.pin.as_ref().and_then(|fd| table.watch(fd.as_fd()));
        let number = watch.and_then(|watch| table.inode(watch));
        if let Some(ino) = number.and_then(|ino| self.inodes.acquire_number(ino)) {
            return Ok((ino, false));
        }
        let known = self.inodes.peek(&new.key);
        let is_known = known.as_ref().is_some_and(|known| table.is_same(known, watch));
        if !is_known && (has_names || known.is_some()) {
            new.key.birth = self.watches.next_number();
        }
        let added = self.inodes.insert(new)?;
        match watch {
            Some(watch) if has_names => drop(table.add(watch, added.0)),
            Some(watch) => table.unwatch(watch),
            None => {}
        }
        Ok(added)
    }

    /// Lets `fd`, by the name that link(2) has just given to `inode`, lead to that inode. An
    /// overlay on a lower layer without file handles has two inodes of one file then, which share
    /// its data: the former has the lower number as long as it is known.
    pub(crate) fn link_known(&self, inode: &LowerInode, fd: BorrowedFd<'_>) {
        if !self.changes_numbers(inode.key.mount) {
            return;
        }
        let Some(pin) = inode.pin.load_full() else { return };
        let (Ok(own), Ok(linked)) = (StatxResult::read(pin.as_fd()), StatxResult::read(fd)) else {
            return;
        };
        // The source may have put another file there, which stays an inode of its own.
        if !own.describes_same_file(&linked) {
            return;
        }
        let mut table = self.watches.lock();
        let watches = (table.watch(pin.as_fd()), table.watch(fd));
        let (Some(own), Some(linked)) = watches else { return };
        if own == linked || table.inode(linked).is_some() || !table.add(own, inode.ino()) {
            return table.unwatch(linked);
        }
        table.add(linked, inode.ino());
    }

    /// Runs `change`, which may change the numbers of these inodes, and finds them by the new ones
    /// afterwards. If `is_final` is set and it succeeds, the numbers do not change again: the
    /// inodes are in the upper layer of the overlay.
    pub(crate) fn with_numbers_of<T>(
        &self,
        (inodes, is_final): (&[Ino], bool),
        change: impl FnOnce() -> Result<T>,
    ) -> Result<T> {
        if !self.mounts.has_changing_numbers() {
            return change();
        }
        let held: Vec<_> = inodes.iter().filter_map(|ino| self.hold_numbers(*ino)).collect();
        let changed = change();
        for (inode, fd) in held {
            if is_final && changed.is_ok() {
                inode.has_final_numbers.store(true, Ordering::Relaxed);
            }
            self.release_numbers(&inode, fd.as_fd());
        }
        changed
    }

    /// The inodes of these names in directories whose numbers may change, as far as a frontend
    /// knows them.
    pub(crate) fn find_known(&self, names: [(Ino, Name<'_>); 2]) -> [Option<Ino>; 2] {
        names.map(|(parent, name)| {
            if !self.mounts.has_changing_numbers() {
                return None;
            }
            let dir = self.inodes.get(parent).ok()?;
            if !self.changes_numbers(dir.key.mount) || self.is_own_mount(&dir, name.as_bytes()) {
                return None;
            }
            let stat = StatxResult::read_at(self.fd(&dir).ok()?.as_fd(), name.as_bytes()).ok()?;
            let index = self.mounts.find(stat.mount_id(), dir.key.mount)?;
            let key = self.mounts.get(index).ok()?.key(index, &stat, None)?;
            self.inodes.peek(&key).map(|inode| inode.ino())
        })
    }

    fn hold_numbers(&self, ino: Ino) -> Option<(Arc<LowerInode>, Arc<OwnedFd>)> {
        let inode = self.inodes.get(ino).ok()?;
        if inode.has_final_numbers.load(Ordering::Relaxed) || !self.changes_numbers(inode.key.mount)
        {
            return None;
        }
        let fd = inode.pin.load_full()?;
        self.watches.hold(&inode, fd.as_fd()).then_some((inode, fd))
    }

    fn release_numbers(&self, inode: &LowerInode, fd: BorrowedFd<'_>) {
        let Ok(stat) = StatxResult::read(fd) else {
            return self.watches.release(inode.ino(), true);
        };
        let mount = self.mounts.get(inode.key.mount).map(|mount| mount.id);
        let is_changed = mount != Ok(stat.mount_id()) || stat.ino() != inode.key.ino;
        if is_changed {
            // Its numbers may be those of another inode, which was a hard link.
            self.inodes.unhash(inode);
            // The attributes need the new device.
            let _ = self.identify(inode.key.mount, fd, &stat);
        }
        let is_needed = is_changed || self.needs_descriptor(inode.key.mount, &stat);
        self.watches.release(inode.ino(), is_needed);
        // It was forgotten meanwhile.
        if self.inodes.get(inode.ino()).is_err() {
            self.watches.forget(inode.ino());
        }
    }
}
