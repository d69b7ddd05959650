//! ARC: the adaptive replacement cache (Megiddo and Modha, FAST 2003), with bytes in place of
//! pages.

use crate::lists::{ExtentLists, ListPosition};
use crate::policy::{ExtentKey, ExtentUse, ReplacementPolicy, TRIES};

/// Used once, and used more often; then the keys that left from each.
const ONCE: usize = 0;
const MORE: usize = 1;
const GHOST_ONCE: usize = 2;
const GHOST_MORE: usize = 3;

/// Two LRU lists, for extents used once and for the others. A use of an extent that has left one of
/// them makes that list longer.
#[derive(Debug)]
pub struct ArcPolicy {
    capacity: u64,
    /// The bytes that extents used once should have.
    target: u64,
    lists: ExtentLists<(), 4>,
}

impl ArcPolicy {
    /// An empty cache of so many bytes.
    pub fn new(capacity: u64) -> ArcPolicy {
        ArcPolicy { capacity, target: 0, lists: ExtentLists::new() }
    }

    /// Moves one extent to the keys that have left.
    fn replace(
        &mut self,
        for_ghost_more: bool,
        may_leave: &dyn Fn(ExtentKey) -> bool,
    ) -> Option<ExtentKey> {
        let once = self.lists.bytes(ONCE);
        let takes_once =
            once > 0 && (once > self.target || (for_ghost_more && once == self.target));
        let list = if takes_once || self.lists.len(MORE) == 0 { ONCE } else { MORE };
        let oldest = |list| self.lists.oldest(list).take(TRIES);
        let all = oldest(list).chain(oldest(MORE - list));
        let at = all.into_iter().find(|&at| may_leave(self.lists.key(at)))?;
        self.lists.move_to(at, self.lists.list(at) + 2);
        Some(self.lists.key(at))
    }

    fn make_room(&mut self, size: u64, for_ghost_more: bool, evicted: &mut Vec<ExtentKey>) {
        while self.bytes() + size > self.capacity {
            let Some(gone) = self.replace(for_ghost_more, &|_| true) else { break };
            evicted.push(gone);
        }
    }

    /// A use of an extent that has left.
    fn return_of(&mut self, at: ListPosition, evicted: &mut Vec<ExtentKey>) {
        let (size, list) = (self.lists.size(at), self.lists.list(at));
        let (once, more) = (self.lists.bytes(GHOST_ONCE), self.lists.bytes(GHOST_MORE));
        if list == GHOST_ONCE {
            let step = size * (more / once.max(1)).max(1);
            self.target = (self.target + step).min(self.capacity);
        } else {
            self.target = self.target.saturating_sub(size * (once / more.max(1)).max(1));
        }
        self.make_room(size, list == GHOST_MORE, evicted);
        self.lists.move_to(at, MORE);
    }

    /// A use of an extent that is not remembered.
    fn record_first_use(&mut self, size: u64, evicted: &mut Vec<ExtentKey>) {
        let whole = |arc: &ArcPolicy| (0..4).map(|list| arc.lists.bytes(list)).sum::<u64>();
        let first = |arc: &ArcPolicy| arc.lists.bytes(ONCE) + arc.lists.bytes(GHOST_ONCE);
        while first(self) + size > self.capacity && self.lists.len(GHOST_ONCE) > 0 {
            self.forget(GHOST_ONCE);
        }
        // All memory is in use for extents used once: they leave without a trace.
        while first(self) + size > self.capacity {
            let Some(at) = self.lists.back(ONCE) else { break };
            evicted.push(self.lists.key(at));
            self.lists.remove(at);
        }
        self.make_room(size, false, evicted);
        while whole(self) + size > 2 * self.capacity && self.lists.len(GHOST_MORE) > 0 {
            self.forget(GHOST_MORE);
        }
    }

    fn forget(&mut self, list: usize) {
        if let Some(at) = self.lists.back(list) {
            self.lists.remove(at);
        }
    }
}

impl ReplacementPolicy for ArcPolicy {
    fn access(&mut self, extent: ExtentUse, evicted: &mut Vec<ExtentKey>) -> bool {
        if let Some(at) = self.lists.find(extent.key) {
            if self.lists.list(at) < GHOST_ONCE {
                self.lists.move_to(at, MORE);
                return true;
            }
            self.return_of(at, evicted);
        } else if extent.fits(self.capacity) {
            self.record_first_use(extent.size, evicted);
            self.lists.push(ONCE, extent.key, extent.size, ());
        }
        false
    }

    fn evict(&mut self, may_leave: &dyn Fn(ExtentKey) -> bool) -> Option<ExtentKey> {
        self.replace(false, may_leave)
    }

    fn remove(&mut self, key: ExtentKey) -> bool {
        let Some(at) = self.lists.find(key) else { return false };
        let was_there = self.lists.list(at) < GHOST_ONCE;
        self.lists.remove(at);
        was_there
    }

    fn contains(&self, key: ExtentKey) -> bool {
        self.lists.find(key).is_some_and(|at| self.lists.list(at) < GHOST_ONCE)
    }

    fn bytes(&self) -> u64 {
        self.lists.bytes(ONCE) + self.lists.bytes(MORE)
    }

    fn capacity(&self) -> u64 {
        self.capacity
    }

    fn tracked_extents(&self) -> usize {
        self.lists.total()
    }
}
