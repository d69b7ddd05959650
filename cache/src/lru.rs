//! Least recently used.

use crate::lists::ExtentLists;
use crate::policy::{ExtentKey, ExtentUse, ReplacementPolicy, TRIES};

/// Evicts the extent that was unused for the longest time.
#[derive(Debug)]
pub struct LruPolicy {
    capacity: u64,
    lists: ExtentLists<(), 1>,
}

impl LruPolicy {
    /// An empty cache of so many bytes.
    pub fn new(capacity: u64) -> LruPolicy {
        LruPolicy { capacity, lists: ExtentLists::new() }
    }
}

impl ReplacementPolicy for LruPolicy {
    fn access(&mut self, extent: ExtentUse, evicted: &mut Vec<ExtentKey>) -> bool {
        if let Some(at) = self.lists.find(extent.key) {
            self.lists.move_to(at, 0);
            return true;
        }
        if !extent.fits(self.capacity) {
            return false;
        }
        while self.lists.bytes(0) + extent.size > self.capacity {
            let Some(gone) = self.evict(&|_| true) else { break };
            evicted.push(gone);
        }
        self.lists.push(0, extent.key, extent.size, ());
        false
    }

    fn evict(&mut self, may_leave: &dyn Fn(ExtentKey) -> bool) -> Option<ExtentKey> {
        let at = self.lists.oldest(0).take(TRIES).find(|&at| may_leave(self.lists.key(at)))?;
        let key = self.lists.key(at);
        self.lists.remove(at);
        Some(key)
    }

    fn remove(&mut self, key: ExtentKey) -> bool {
        let found = self.lists.find(key);
        found.inspect(|&at| self.lists.remove(at)).is_some()
    }

    fn contains(&self, key: ExtentKey) -> bool {
        self.lists.find(key).is_some()
    }

    fn bytes(&self) -> u64 {
        self.lists.bytes(0)
    }

    fn capacity(&self) -> u64 {
        self.capacity
    }

    fn tracked_extents(&self) -> usize {
        self.lists.total()
    }
}
