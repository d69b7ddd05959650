//! The handles of the running group: a lock that many hold at a time, each at a door of his own, so that
//! their processors share no cache line.

use std::sync::PoisonError;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::sync::{Mutex, MutexGuard, RwLock, RwLockReadGuard, RwLockWriteGuard, number_of_thread};

/// Doors. More threads share them.
const DOORS: usize = 16;

/// Removed inodes that count as one: some hundred share a slot.
const REMOVED: usize = 16;

#[derive(Default)]
#[repr(align(128))]
struct GroupLockShard {
    lock: RwLock<()>,
    changes: Mutex<ChangedInodes>,
}

/// The inodes that a group writes.
#[derive(Debug, Default)]
pub(crate) struct ChangedInodes {
    /// New ones, changed ones, and those with pages to write. None is listed twice.
    pub(crate) changed: Vec<u64>,
    /// Those that lost their last name.
    pub(crate) gone: Vec<u64>,
    /// The changed ones, each by its weight.
    weight: usize,
}

impl ChangedInodes {
    fn is_empty(&self) -> bool {
        self.changed.is_empty() && self.gone.is_empty()
    }

    fn is_full(&self, full: usize) -> bool {
        self.weight + self.gone.len() / REMOVED >= full
    }
}

/// The gate to the running group.
pub(crate) struct GroupLock {
    doors: [GroupLockShard; DOORS],
    /// Inodes of a door from which on the group is full.
    full: AtomicUsize,
}

/// A share in the running group: it does not close meanwhile. Whoever has one takes no second one, and
/// does not wait for a device.
pub(crate) struct GroupReadGuard<'a> {
    door: &'a GroupLockShard,
    full: usize,
    _lock: RwLockReadGuard<'a, ()>,
}

/// A proof that nobody has a handle.
pub(crate) struct GroupWriteGuard<'a> {
    gate: &'a GroupLock,
    _locks: [RwLockWriteGuard<'a, ()>; DOORS],
}

impl GroupLock {
    /// A gate to groups that are full when a door has `full` inodes.
    pub(crate) fn new(full: usize) -> Self {
        GroupLock { doors: Default::default(), full: AtomicUsize::new(full) }
    }

    /// From now on groups are full when a door has `full` inodes.
    pub(crate) fn set_full(&self, full: usize) {
        self.full.store(full, Ordering::Relaxed);
    }

    /// Inodes of a door from which on the group is full.
    pub(crate) fn full(&self) -> usize {
        self.full.load(Ordering::Relaxed)
    }

    /// Waits while a group is being closed.
    pub(crate) fn enter(&self) -> GroupReadGuard<'_> {
        let door = &self.doors[number_of_thread() % DOORS];
        GroupReadGuard {
            door,
            full: self.full(),
            _lock: door.lock.read().unwrap_or_else(PoisonError::into_inner),
        }
    }

    /// Waits for all handles, and lets nobody get one.
    pub(crate) fn close(&self) -> GroupWriteGuard<'_> {
        let locks = self.doors.each_ref();
        let locks = locks.map(|door| door.lock.write().unwrap_or_else(PoisonError::into_inner));
        GroupWriteGuard { gate: self, _locks: locks }
    }

    /// True where the running group has something to write.
    pub(crate) fn has_changes(&self) -> bool {
        self.doors.iter().any(|door| !lock(&door.changes).is_empty())
    }

    /// True where the running group should be closed.
    pub(crate) fn is_full(&self) -> bool {
        self.doors.iter().any(|door| lock(&door.changes).is_full(self.full()))
    }
}

impl GroupReadGuard<'_> {
    /// The group writes an inode, which counts as `weight` of them. The caller sees to it that it is listed
    /// once.
    pub(crate) fn changed(&self, ino: u64, weight: usize) {
        let mut changes = lock(&self.door.changes);
        changes.changed.push(ino);
        changes.weight += weight;
    }

    /// The group removes an inode.
    pub(crate) fn gone(&self, ino: u64) {
        lock(&self.door.changes).gone.push(ino);
    }

    /// True where the group should be closed.
    pub(crate) fn is_full(&self) -> bool {
        lock(&self.door.changes).is_full(self.full)
    }
}

impl GroupWriteGuard<'_> {
    /// The changes of the group, by inode number.
    pub(crate) fn take(&self) -> ChangedInodes {
        let mut all = ChangedInodes::default();
        for door in &self.gate.doors {
            let mut changes = lock(&door.changes);
            all.changed.append(&mut changes.changed);
            all.gone.append(&mut changes.gone);
            changes.weight = 0;
        }
        all.changed.sort_unstable();
        all.gone.sort_unstable();
        all.gone.dedup();
        all
    }
}

fn lock(changes: &Mutex<ChangedInodes>) -> MutexGuard<'_, ChangedInodes> {
    changes.lock().unwrap_or_else(PoisonError::into_inner)
}
