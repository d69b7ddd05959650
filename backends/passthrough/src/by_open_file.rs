//! Inodes of files that a program has open, and that need no file handle.
//!
//! name_to_handle_at(2) takes as long as open(2), and most programs close a file before another
//! lookup finds it. Where the program itself opens files by their names, the descriptor of the open
//! file is the pin of its inode. When another lookup finds the inode, or the file is closed and the
//! inode stays, a descriptor of its own takes that place, so that closing the file ends its locks.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use defuse_fs::native::LastRelease;
use defuse_fs::{File, FileKind, Ino};

use crate::lower::StatxResult;
use crate::passthrough::Passthrough;
use crate::tables::inode::InodeKey;
use crate::tables::mounts::LowerMount;

impl Passthrough {
    /// True if the inode of an open file on this mount needs no handle. It needs one where
    /// frontends keep names, and with them inodes, for longer than files are open.
    pub(crate) fn finds_by_open_files(&self, mount: &LowerMount) -> bool {
        mount.handles
            && mount.birth_is_constant()
            && self.gives_descriptors()
            && self.options.entry_valid_for.is_zero()
            && !self.keeps_descriptors()
    }

    /// The identity of an open file with this status, and the index of its mount, if its inode
    /// needs no handle.
    pub(crate) fn key_of_open_file(
        &self,
        likely: u32,
        stat: &StatxResult,
    ) -> Option<(u32, InodeKey)> {
        let index = self.mounts.find(stat.mount_id(), likely)?;
        let mount = self.mounts.get(index).ok()?;
        let has_name = stat.kind() == Ok(FileKind::Regular) && stat.nlink() > 0;
        if !has_name || !self.finds_by_open_files(&mount) {
            return None;
        }
        Some((index, mount.key(index, stat, None)?))
    }

    /// Counts a lookup of the inode with this identity, if it is known.
    pub(crate) fn acquire(&self, key: &InodeKey) -> Option<Ino> {
        let ino = self.inodes.acquire(key)?;
        self.give_own_descriptor(ino);
        Some(ino)
    }

    /// The inode that was added, or one that was known.
    pub(crate) fn keep_added(&self, (ino, is_new): (Ino, bool)) -> Ino {
        if !is_new {
            self.give_own_descriptor(ino);
        }
        ino
    }

    /// Before `file` is closed.
    pub(crate) fn prepare_close(&self, file: File, last: Option<LastRelease>) {
        if last.is_none() {
            self.give_own_descriptor(file.ino);
        }
    }

    /// Gives an inode a descriptor of its own, if it has only the descriptor of an open file.
    fn give_own_descriptor(&self, ino: Ino) {
        if !self.gives_descriptors() {
            return;
        }
        let Ok(inode) = self.inodes.get(ino) else { return };
        if !inode.has_borrowed_pin.load(Ordering::Relaxed) {
            return;
        }
        // Without a free descriptor, the file stays open as long as the inode.
        let Some(fd) = inode.pin.load_full() else { return };
        let Ok(path) = self.path_of(fd.as_fd()) else { return };
        if inode.has_borrowed_pin.swap(false, Ordering::Relaxed) {
            inode.change_pin(fd, Arc::new(self.place_descriptor(path)));
        }
    }
}
