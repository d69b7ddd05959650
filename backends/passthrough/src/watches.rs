//! Inodes whose number or device changes, and hard links that are none.
//!
//! An overlay without `nfs_export` has no file handles, and copies a file of a lower layer when it changes. The number and the device of the
//! file are others from then on, unless the layers have file handles. The names of a lower file with several hard
//! links have one number, and are different files as soon as one changes, unless the overlay has an index. So numbers
//! neither find an inode again there nor tell inodes apart; its descriptor is all that is sure.
//!
//! inotify(7) tells which inode a descriptor leads to: adding a watch to the inode of another watch of the same instance returns that watch.
//! Inodes have a watch while an operation may change their numbers, after it has, and while they have several names. Nobody reads the
//! events. All other inodes are found by their numbers.

use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use defuse_fs::{FileKind, Ino, Name, Result};
use rustix::fs::inotify::{self, CreateFlags, WatchFlags};

use crate::handle::fs_type::{FUSE, OVERLAY};
use crate::inode::{FoundInode, LowerInode};
use crate::lower::{ProcPath, StatxResult, move_above};
use crate::mounts::LowerMount;
use crate::passthrough::Passthrough;

/// Number of inodes with a watch: half of what Linux allows a user on the smallest machines (`fs.inotify.max_user_watches`). Beyond it, an
/// inode with several names is another one at each lookup.
const MOST: usize = 4096;

/// The inodes with a watch, by watch and by number.
pub(crate) struct IdentityWatches {
    table: Mutex<WatchTable>,
    /// Numbers that take the place of birth times in keys that no lookup must find.
    next: AtomicU64,
}

#[derive(Default)]
struct WatchTable {
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
    /// The watch of the inode of `fd`, which is added if there is none; `None` without the permission to read it, or beyond a limit of
    /// the kernel.
    fn watch(&mut self, fd: BorrowedFd<'_>) -> Option<i32> {
        if self.inotify.is_none() {
            let made = inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK).ok();
            self.inotify = made.map(|fd| move_above(fd, self.descriptors_from));
        }
        let path = ProcPath::new(fd);
        let inotify = self.inotify.as_ref()?;
        inotify::add_watch(inotify, path.as_c_str(), WatchFlags::DELETE_SELF).ok()
    }

    /// Removes a watch that no inode in the table has.
    fn unwatch(&mut self, watch: i32) {
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
    fn add(&mut self, watch: i32, ino: Ino) -> bool {
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

    fn lock(&self) -> MutexGuard<'_, WatchTable> {
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

    /// Begins an operation that may change the numbers of `inode`, whose descriptor is `fd`. Returns false if it has no watch.
    fn hold(&self, inode: &LowerInode, fd: BorrowedFd<'_>) -> bool {
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
    fn release(&self, ino: Ino, is_needed: bool) {
        let mut table = self.lock();
        let Some(known) = table.find_watched(ino) else { return };
        known.changes = known.changes.saturating_sub(1);
        if known.changes == 0 && !is_needed {
            table.remove(ino);
        }
    }

    /// Drops the watch of an inode that no frontend knows any more.
    pub(crate) fn forget(&self, ino: Ino) {
        self.lock().remove(ino);
    }
}

impl LowerMount {
    /// True if numbers of inodes may change, or be those of several: on an overlay without file handles, and on a FUSE file system, which
    /// may be an overlay of its own (fuse-overlayfs).
    pub(crate) fn changes_numbers(&self) -> bool {
        !self.handles && [OVERLAY, FUSE].contains(&self.f_type)
    }
}

impl Passthrough {
    /// True if the numbers of inodes on the mount with this index may change.
    pub(crate) fn changes_numbers(&self, mount: u32) -> bool {
        self.mounts.has_changing_numbers()
            && self.mounts.get(mount).is_ok_and(|mount| mount.changes_numbers())
    }

    /// True if a file with this status, on the mount with this index, is told from others by its descriptor alone: each of its names may
    /// be a file of its own.
    pub(crate) fn needs_descriptor(&self, mount: u32, stat: &StatxResult) -> bool {
        stat.nlink() > 1 && stat.kind() != Ok(FileKind::Directory) && self.changes_numbers(mount)
    }

    /// Adds an inode with a descriptor, on a mount where numbers may change, or counts one more lookup of it. True if it is new.
    pub(crate) fn insert_by_descriptor(
        &self,
        mut new: FoundInode,
        has_names: bool,
    ) -> Result<(Ino, bool)> {
        let mut table = self.watches.lock();
        if !has_names && table.inodes.is_empty() {
            drop(table);
            return self.inodes.insert(new);
        }
        let watch = new.pin.as_ref().and_then(|fd| table.watch(fd.as_fd()));
        let number = watch.and_then(|watch| table.inodes.get(&watch)).map(|known| known.ino);
        if let Some(ino) = number.and_then(|ino| self.inodes.acquire_number(ino)) {
            return Ok((ino, false));
        }
        let known = self.inodes.peek(&new.key);
        let is_known = known.as_ref().is_some_and(|known| is_same(&mut table, known, watch));
        if !is_known && (has_names || known.is_some()) {
            new.key.birth = self.watches.next.fetch_add(1, Ordering::Relaxed) + 1;
        }
        let added = self.inodes.insert(new)?;
        match watch {
            Some(watch) if has_names => drop(table.add(watch, added.0)),
            Some(watch) => table.unwatch(watch),
            None => {}
        }
        Ok(added)
    }

    /// Lets `fd`, by the name that link(2) has just given to `inode`, lead to that inode. An overlay on a lower layer without file handles
    /// has two inodes of one file then, which share its data: the former has the lower number as long as it is known.
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
        if own == linked || table.inodes.contains_key(&linked) || !table.add(own, inode.ino()) {
            return table.unwatch(linked);
        }
        table.add(linked, inode.ino());
    }

    /// Runs `change`, which may change the numbers of these inodes, and finds them by the new ones afterwards. If `is_final` is set and it
    /// succeeds, the numbers do not change again: the inodes are in the upper layer of the overlay.
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

    /// The inodes of these names in directories whose numbers may change, as far as a frontend knows them.
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

/// True if the known inode is that with this watch.
fn is_same(table: &mut WatchTable, known: &LowerInode, watch: Option<i32>) -> bool {
    let Some(pin) = known.pin.load_full() else { return false };
    let Some(watch) = watch else { return false };
    match table.watch(pin.as_fd()) {
        Some(found) if found == watch => true,
        Some(found) => {
            table.unwatch(found);
            false
        }
        None => false,
    }
}
