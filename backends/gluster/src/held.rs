//! References to the inodes that were used last.
//!
//! libgfapi forgets an inode when its last object is closed. At the next use, before the operation
//! itself, it looks the inode up on its brick, or a directory on all bricks. A reference costs more
//! than a kilobyte of memory, so that their number depends on the memory of the machine.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use crate::volume::Gfid;

/// Memory of a reference with its inode in libgfapi (measured: 1.2 KB).
const BYTES: u64 = 1300;

/// The part of the memory that references may take.
const SHARE: u64 = 32;

/// The smallest and the largest number of references.
const NUMBERS: (u64, u64) = (1 << 12, 1 << 20);

/// Parts of the table, each with a lock.
const SHARDS: usize = 16;

/// The number of inodes for which references may be kept.
pub fn limit() -> usize {
    static LIMIT: OnceLock<usize> = OnceLock::new();
    *LIMIT.get_or_init(|| limit_for(defuse_hugepages::memory_limit()))
}

fn limit_for(memory: u64) -> usize {
    (memory / SHARE / BYTES).clamp(NUMBERS.0, NUMBERS.1) as usize
}

/// References by the identity of their inodes.
pub struct HeldInodes<T> {
    shards: [Mutex<HeldShard<T>>; SHARDS],
    limit: usize,
}

struct HeldShard<T> {
    held: HashMap<Gfid, HeldReference<T>>,
    /// The order in which references are considered for removal. May contain identities without a
    /// reference.
    order: VecDeque<Gfid>,
}

struct HeldReference<T> {
    object: Arc<T>,
    /// Used since it was considered for removal.
    is_used: bool,
}

impl<T> HeldInodes<T> {
    /// An empty table for at most `limit` references.
    pub fn new(limit: usize) -> HeldInodes<T> {
        let shard = || Mutex::new(HeldShard { held: HashMap::new(), order: VecDeque::new() });
        HeldInodes { shards: std::array::from_fn(|_| shard()), limit: limit.div_ceil(SHARDS) }
    }

    /// The reference to an inode.
    pub fn get(&self, gfid: Gfid) -> Option<Arc<T>> {
        let mut shard = self.shard(gfid);
        let held = shard.held.get_mut(&gfid)?;
        held.is_used = true;
        Some(Arc::clone(&held.object))
    }

    /// Keeps a reference, and returns it, or the one that is kept already.
    pub fn keep(&self, gfid: Gfid, object: T) -> Arc<T> {
        let mut shard = self.shard(gfid);
        if let Some(held) = shard.held.get(&gfid) {
            let kept = Arc::clone(&held.object);
            drop(shard);
            // References are dropped outside of the lock, because they call libgfapi.
            drop(object);
            return kept;
        }
        let object = Arc::new(object);
        let reference = HeldReference { object: Arc::clone(&object), is_used: false };
        shard.held.insert(gfid, reference);
        shard.order.push_back(gfid);
        let removed = shard.shrink(self.limit);
        drop(shard);
        drop(removed);
        object
    }

    /// Ends a reference: nobody knows the inode any more, or an operation found it to be gone.
    pub fn remove(&self, gfid: Gfid) {
        let removed = self.shard(gfid).held.remove(&gfid);
        drop(removed);
    }

    /// Ends all references.
    pub fn clear(&self) {
        for shard in &self.shards {
            let mut shard = shard.lock().unwrap_or_else(PoisonError::into_inner);
            let removed = std::mem::take(&mut shard.held);
            shard.order.clear();
            drop(shard);
            drop(removed);
        }
    }

    fn shard(&self, gfid: Gfid) -> MutexGuard<'_, HeldShard<T>> {
        let shard = &self.shards[usize::from(gfid[15]) % SHARDS];
        shard.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T> HeldShard<T> {
    /// Removes references that were not used lately, until there are at most `limit`. Returns them.
    fn shrink(&mut self, limit: usize) -> Vec<HeldReference<T>> {
        let mut removed = Vec::new();
        // Each identity is considered at most twice. Identities without a reference are not kept
        // for long.
        let mut steps = 2 * self.order.len();
        while steps > 0 && (self.held.len() > limit || self.order.len() > 2 * limit) {
            steps -= 1;
            let Some(gfid) = self.order.pop_front() else { break };
            let is_full = self.held.len() > limit;
            match self.held.get_mut(&gfid) {
                Some(held) if held.is_used => {
                    held.is_used = false;
                    self.order.push_back(gfid);
                }
                Some(_) if is_full => removed.extend(self.held.remove(&gfid)),
                Some(_) => self.order.push_back(gfid),
                None => {}
            }
        }
        removed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gfid(number: u64) -> Gfid {
        let mut gfid = [0; 16];
        gfid[..8].copy_from_slice(&number.to_ne_bytes());
        gfid
    }

    #[test]
    fn the_number_of_references_follows_from_the_memory() {
        assert_eq!(limit_for(0), 1 << 12);
        assert_eq!(limit_for(u64::MAX), 1 << 20);
        let of_four_gigabytes = limit_for(4 << 30);
        assert!(of_four_gigabytes > 90_000 && of_four_gigabytes < 110_000, "{of_four_gigabytes}");
    }

    #[test]
    fn a_reference_that_is_used_outlives_others_and_their_number_is_bounded() {
        let held = HeldInodes::new(SHARDS * 10);
        assert_eq!(*held.keep(gfid(0), 0), 0);
        assert_eq!(*held.keep(gfid(0), 7), 0, "the first one is kept");
        for number in 1..500 {
            held.keep(gfid(number), number);
            assert_eq!(held.get(gfid(0)).as_deref(), Some(&0), "after {number}");
        }
        let count = (0..500).filter(|&number| held.get(gfid(number)).is_some()).count();
        assert_eq!(count, 10);
        held.remove(gfid(0));
        assert!(held.get(gfid(0)).is_none());
    }

    #[test]
    fn identities_of_ended_references_are_not_kept() {
        let held = HeldInodes::new(SHARDS * 10);
        for number in 0..5000 {
            held.keep(gfid(number), ());
            held.remove(gfid(number));
        }
        assert!(held.shard(gfid(0)).order.len() <= 21);
        held.keep(gfid(1), ());
        held.clear();
        assert!(held.get(gfid(1)).is_none());
    }
}
