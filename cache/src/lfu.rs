//! Least frequently used.

use std::collections::{BTreeSet, HashMap};

use crate::policy::{ExtentKey, ExtentUse, ReplacementPolicy, TRIES};

/// Evicts the extent with the fewest uses since it was inserted; among several, the extent that was
/// unused for the longest time.
#[derive(Debug)]
pub struct LfuPolicy {
    capacity: u64,
    bytes: u64,
    /// The number of uses of all extents.
    now: u64,
    order: BTreeSet<(u64, u64, ExtentKey)>,
    extents: HashMap<ExtentKey, ExtentCount>,
}

#[derive(Clone, Copy, Debug)]
struct ExtentCount {
    uses: u64,
    last: u64,
    size: u64,
}

impl LfuPolicy {
    /// An empty cache of so many bytes.
    pub fn new(capacity: u64) -> LfuPolicy {
        LfuPolicy { capacity, bytes: 0, now: 0, order: BTreeSet::new(), extents: HashMap::new() }
    }
}

impl ReplacementPolicy for LfuPolicy {
    fn access(&mut self, extent: ExtentUse, evicted: &mut Vec<ExtentKey>) -> bool {
        let ExtentUse { key, size, .. } = extent;
        self.now += 1;
        if let Some(known) = self.extents.get_mut(&key) {
            self.order.remove(&(known.uses, known.last, key));
            (known.uses, known.last) = (known.uses + 1, self.now);
            self.order.insert((known.uses, known.last, key));
            return true;
        }
        if !extent.fits(self.capacity) {
            return false;
        }
        while self.bytes + size > self.capacity {
            let Some(gone) = self.evict(&|_| true) else { break };
            evicted.push(gone);
        }
        self.order.insert((1, self.now, key));
        self.extents.insert(key, ExtentCount { uses: 1, last: self.now, size });
        self.bytes += size;
        false
    }

    fn evict(&mut self, may_leave: &dyn Fn(ExtentKey) -> bool) -> Option<ExtentKey> {
        let mut least = self.order.iter().take(TRIES).map(|(_, _, key)| *key);
        let key = least.find(|&key| may_leave(key))?;
        self.remove(key).then_some(key)
    }

    fn remove(&mut self, key: ExtentKey) -> bool {
        let Some(gone) = self.extents.remove(&key) else { return false };
        self.order.remove(&(gone.uses, gone.last, key));
        self.bytes -= gone.size;
        true
    }

    fn contains(&self, key: ExtentKey) -> bool {
        self.extents.contains_key(&key)
    }

    fn bytes(&self) -> u64 {
        self.bytes
    }

    fn capacity(&self) -> u64 {
        self.capacity
    }

    fn tracked_extents(&self) -> usize {
        self.extents.len()
    }
}
