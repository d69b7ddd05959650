//! The handles of the running group: a sharded lock that many threads hold at a time. Each thread
//! uses a shard of its own, so that their processors share no cache line.

use std::sync::PoisonError;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::sync::{Mutex, MutexGuard, RwLock, RwLockReadGuard, RwLockWriteGuard, number_of_thread};

/// The number of shards. If there are more threads, several use one shard.
const SHARDS: usize = 16;

/// Inodes for which memory is kept.
const KEPT: usize = 4096;

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
    /// New inodes, changed inodes, and inodes with pages to write. None is listed twice.
    pub(crate) changed: Vec<u64>,
    /// Inodes that lost their last name.
    pub(crate) gone: Vec<u64>,
    /// The sum of the weights of the changed inodes.
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

/// The group lock, which protects the running group.
pub(crate) struct GroupLock {
    shards: [GroupLockShard; SHARDS],
    /// The number of inodes of a shard from which on the group is full.
    full: AtomicUsize,
    /// Memory for the changes of the next group.
    spare: Mutex<ChangedInodes>,
}

/// A handle of the running group: the group does not close while a handle exists. A thread with a
/// handle takes no second one, and does not wait for a device.
pub(crate) struct GroupReadGuard<'a> {
    shard: &'a GroupLockShard,
    full: usize,
    _lock: RwLockReadGuard<'a, ()>,
}

/// The exclusive right to the running group: no thread has a handle.
pub(crate) struct GroupWriteGuard<'a> {
    gate: &'a GroupLock,
    _locks: [RwLockWriteGuard<'a, ()>; SHARDS],
}

impl GroupLock {
    /// Makes a lock for groups that are full when a shard has `full` inodes.
    pub(crate) fn new(full: usize) -> Self {
        GroupLock {
            shards: Default::default(),
            full: AtomicUsize::new(full),
            spare: Mutex::default(),
        }
    }

    /// Makes groups full, from now on, when a shard has `full` inodes.
    pub(crate) fn set_full(&self, full: usize) {
        self.full.store(full, Ordering::Relaxed);
    }

    /// The number of inodes of a shard from which on the group is full.
    pub(crate) fn full(&self) -> usize {
        self.full.load(Ordering::Relaxed)
    }

    /// Takes a handle. Waits while a group is being closed.
    pub(crate) fn enter(&self) -> GroupReadGuard<'_> {
        let shard = &self.shards[number_of_thread() % SHARDS];
        GroupReadGuard {
            shard,
            full: self.full(),
            _lock: shard.lock.read().unwrap_or_else(PoisonError::into_inner),
        }
    }

    /// Waits until all handles are dropped, and prevents new ones.
    pub(crate) fn close(&self) -> GroupWriteGuard<'_> {
        let locks = self.shards.each_ref();
        let locks = locks.map(|shard| shard.lock.write().unwrap_or_else(PoisonError::into_inner));
        GroupWriteGuard { gate: self, _locks: locks }
    }

    /// True where the running group has something to write.
    pub(crate) fn has_changes(&self) -> bool {
        self.shards.iter().any(|shard| !lock(&shard.changes).is_empty())
    }

    /// True where the running group should be closed.
    pub(crate) fn is_full(&self) -> bool {
        self.shards.iter().any(|shard| lock(&shard.changes).is_full(self.full()))
    }
}

impl GroupReadGuard<'_> {
    /// Adds a changed inode to the group, with its `weight` in inodes. The caller must list each
    /// inode only once.
    pub(crate) fn add_changed(&self, ino: u64, weight: usize) {
        let mut changes = lock(&self.shard.changes);
        changes.changed.push(ino);
        changes.weight += weight;
    }

    /// Adds a removed inode to the group.
    pub(crate) fn add_removed(&self, ino: u64) {
        lock(&self.shard.changes).gone.push(ino);
    }

    /// True where the group should be closed.
    pub(crate) fn is_full(&self) -> bool {
        lock(&self.shard.changes).is_full(self.full)
    }
}

impl GroupWriteGuard<'_> {
    /// Adds a changed inode, with its `weight` in inodes, to the group that begins next.
    pub(crate) fn put_back(&self, ino: u64, weight: usize) {
        let mut changes = lock(&self.gate.shards[0].changes);
        changes.changed.push(ino);
        changes.weight += weight;
    }

    /// Adds all changes to the group that begins next, in the place of those that
    /// [`take`](GroupWriteGuard::take) has returned.
    pub(crate) fn put_all_back(&self, mut all: ChangedInodes) {
        let mut changes = lock(&self.gate.shards[0].changes);
        changes.changed.append(&mut all.changed);
        changes.gone.append(&mut all.gone);
        changes.weight += all.weight;
    }

    /// The changes of the group, by inode number.
    pub(crate) fn take(&self) -> ChangedInodes {
        let mut all = std::mem::take(&mut *lock(&self.gate.spare));
        for shard in &self.gate.shards {
            let mut changes = lock(&shard.changes);
            all.changed.append(&mut changes.changed);
            all.gone.append(&mut changes.gone);
            all.weight += std::mem::take(&mut changes.weight);
        }
        all.changed.sort_unstable();
        all.gone.sort_unstable();
        all.gone.dedup();
        all
    }

    /// Keeps the memory of changes for a later group.
    pub(crate) fn keep(&self, mut changes: ChangedInodes) {
        if changes.changed.capacity().max(changes.gone.capacity()) <= KEPT {
            changes.changed.clear();
            changes.gone.clear();
            changes.weight = 0;
            *lock(&self.gate.spare) = changes;
        }
    }
}

fn lock(changes: &Mutex<ChangedInodes>) -> MutexGuard<'_, ChangedInodes> {
    changes.lock().unwrap_or_else(PoisonError::into_inner)
}
