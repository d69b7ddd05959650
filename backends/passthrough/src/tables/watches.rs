//! Inodes whose number or device changes, and hard links that are none.
//!
//! An overlay without `nfs_export` has no file handles, and copies a file of a lower layer when it
//! changes. The number and the device of the file are others from then on, unless the layers have
//! file handles. The names of a lower file with several hard links have one number, and are
//! different files as soon as one changes, unless the overlay has an index. So numbers neither find
//! an inode again there nor tell inodes apart; its descriptor is all that is sure.
//!
//! inotify(7) tells which inode a descriptor leads to: adding a watch to the inode of another watch
//! of the same instance returns that watch. Inodes have a watch while an operation may change their
//! numbers, after it has, and while they have several names. Nobody reads the events. All other
//! inodes are found by their numbers.

use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use defuse_fs::Ino;
use rustix::fs::inotify::{self, CreateFlags, WatchFlags};

use crate::lower::move_above;
use crate::proc_path::ProcPath;
use crate::tables::inode::LowerInode;

/// Number of inodes with a watch: half of what Linux allows a user on the smallest machines
/// (`fs.inotify.max_user_watches`). Beyond it, an inode with several names is another one at each
/// lookup.
const MOST: usize = 4096;

/// The inodes with a watch, by watch and by number.
pub(crate) struct IdentityWatches {
    table: Mutex<WatchTable>,
    /// Numbers that take the place of birth times in keys that no lookup must find.
    next: AtomicU64,
}

#[derive(Default)]
pub(crate) struct WatchTable {
    inotify: Option<OwnedFd>,
    /// The lowest number for it.
    descriptors_from: u32,
    inodes: HashMap<i32, WatchedInode>,
    /// The own watch first, then those of names that link(2) made (`link_known`).
    watches: HashMap<Ino, Vec<i32>>,
    /// Number of removals since the events were dropped.
    removals: usize,
}

struct WatchedInode {
    ino: Ino,
    /// Number of operations in progress that may change its numbers.
    changes: u32,
}

impl WatchTable {
    /// The watch of the inode of `fd`, which is added if there is none; `None` without the
    /// permission to read it, or beyond a limit of the kernel.
    pub(crate) fn watch(&mut self, fd: BorrowedFd<'_>) -> Option<i32> {
        if self.inotify.is_none() {
            let made = inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK).ok();
            self.inotify = made.map(|fd| move_above(fd, self.descriptors_from));
        }
        let path = ProcPath::new(fd);
        let inotify = self.inotify.as_ref()?;
        inotify::add_watch(inotify, path.as_c_str(), WatchFlags::DELETE_SELF).ok()
    }

    /// Removes a watch that no inode in the table has.
    pub(crate) fn unwatch(&mut self, watch: i32) {
        /// Fewer than the kernel keeps events.
        const MOST_EVENTS: usize = 256;
        if self.inodes.contains_key(&watch) {
            return;
        }
        let Some(inotify) = &self.inotify else { return };
        let _ = inotify::remove_watch(inotify, watch);
        self.removals += 1;
        if self.removals >= MOST_EVENTS {
            self.removals = 0;
            let mut events = [0; 64 << 6];
            for _ in 0..MOST_EVENTS {
                if rustix::io::read(inotify, &mut events).is_err() {
                    break;
                }
            }
        }
    }

    /// Records that the inode `ino` has `watch`, if there is room.
    pub(crate) fn add(&mut self, watch: i32, ino: Ino) -> bool {
        if self.inodes.len() >= MOST && !self.inodes.contains_key(&watch) {
            self.unwatch(watch);
            return false;
        }
        if self.inodes.get(&watch).is_none_or(|known| known.ino != ino) {
            self.inodes.insert(watch, WatchedInode { ino, changes: 0 });
            self.watches.entry(ino).or_default().push(watch);
        }
        true
    }

    fn remove(&mut self, ino: Ino) {
        for watch in self.watches.remove(&ino).unwrap_or_default() {
            if self.inodes.get(&watch).is_some_and(|known| known.ino == ino) {
                self.inodes.remove(&watch);
                self.unwatch(watch);
            }
        }
    }

    /// True if the known inode is that with this watch.
    pub(crate) fn is_same(&mut self, known: &LowerInode, watch: Option<i32>) -> bool {
        let Some(pin) = known.pin.load_full() else { return false };
        let Some(watch) = watch else { return false };
        match self.watch(pin.as_fd()) {
            Some(found) if found == watch => true,
            Some(found) => {
                self.unwatch(found);
                false
            }
            None => false,
        }
    }

    /// True if no inode has a watch.
    pub(crate) fn is_empty(&self) -> bool {
        self.inodes.is_empty()
    }

    /// The inode with this watch.
    pub(crate) fn inode(&self, watch: i32) -> Option<Ino> {
        self.inodes.get(&watch).map(|known| known.ino)
    }

    /// The inode `ino` by its own watch.
    fn find_watched(&mut self, ino: Ino) -> Option<&mut WatchedInode> {
        let watch = self.watches.get(&ino)?.first()?;
        self.inodes.get_mut(watch)
    }
}

impl IdentityWatches {
    /// Its descriptor has a number from `descriptors_from` on.
    pub(crate) fn new(descriptors_from: u32) -> Self {
        let table = WatchTable { descriptors_from, ..WatchTable::default() };
        IdentityWatches { table: Mutex::new(table), next: AtomicU64::new(0) }
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, WatchTable> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Number of descriptors.
    pub(crate) fn descriptors(&self) -> usize {
        usize::from(self.lock().inotify.is_some())
    }

    /// Number of inodes with a watch.
    pub(crate) fn len(&self) -> usize {
        self.lock().inodes.len()
    }

    /// Begins an operation that may change the numbers of `inode`, whose descriptor is `fd`.
    /// Returns false if it has no watch.
    pub(crate) fn hold(&self, inode: &LowerInode, fd: BorrowedFd<'_>) -> bool {
        let mut table = self.lock();
        let ino = inode.ino();
        if !table.watches.contains_key(&ino) {
            let Some(watch) = table.watch(fd) else { return false };
            if table.inodes.contains_key(&watch) || !table.add(watch, ino) {
                return false;
            }
        }
        table.find_watched(ino).map(|known| known.changes += 1).is_some()
    }

    /// Ends the operation. The watch stays if `is_needed`, or if there is another such operation.
    pub(crate) fn release(&self, ino: Ino, is_needed: bool) {
        let mut table = self.lock();
        let Some(known) = table.find_watched(ino) else { return };
        known.changes = known.changes.saturating_sub(1);
        if known.changes == 0 && !is_needed {
            table.remove(ino);
        }
    }

    /// A number in the place of a birth time that no other key has.
    pub(crate) fn next_number(&self) -> u64 {
        self.next.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// Drops the watch of an inode that no frontend knows any more.
    pub(crate) fn forget(&self, ino: Ino) {
        self.lock().remove(ino);
    }
}
