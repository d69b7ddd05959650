//! S3-FIFO: three queues, in the order of arrival (Yang and others, SOSP 2023).

use crate::lists::{ExtentLists, ListPosition};
use crate::policy::{ExtentKey, ExtentUse, ReplacementPolicy, TRIES};

const SMALL: usize = 0;
const MAIN: usize = 1;
/// Keys that left from the small queue.
const GHOST: usize = 2;
/// Uses are counted to this number.
const MOST_USES: u8 = 3;

/// New extents are in a queue of a tenth of the memory. Those used more than once there go on to
/// the main queue, where each use is worth another round.
#[derive(Debug)]
pub struct S3FifoPolicy {
    capacity: u64,
    /// Uses since the extent came to its queue.
    lists: ExtentLists<u8, 3>,
}

impl S3FifoPolicy {
    /// An empty cache of so many bytes.
    pub fn new(capacity: u64) -> S3FifoPolicy {
        S3FifoPolicy { capacity, lists: ExtentLists::new() }
    }

    /// The extent whose turn it is.
    fn next(&self) -> Option<ListPosition> {
        let is_small = self.lists.bytes(SMALL) * 10 >= self.bytes();
        let back = if is_small { self.lists.back(SMALL) } else { self.lists.back(MAIN) };
        back.or(self.lists.back(SMALL)).or(self.lists.back(MAIN))
    }

    fn pass_small(&mut self, at: ListPosition) -> Option<ExtentKey> {
        let is_used = *self.lists.value(at) > 1;
        *self.lists.value(at) = 0;
        self.lists.move_to(at, if is_used { MAIN } else { GHOST });
        let gone = (!is_used).then(|| self.lists.key(at));
        while self.lists.len(GHOST) > self.lists.len(SMALL) + self.lists.len(MAIN) {
            let Some(oldest) = self.lists.back(GHOST) else { break };
            self.lists.remove(oldest);
        }
        gone
    }

    fn pass_main(&mut self, at: ListPosition) -> Option<ExtentKey> {
        let uses = self.lists.value(at);
        if *uses > 0 {
            *uses -= 1;
            self.lists.move_to(at, MAIN);
            return None;
        }
        let key = self.lists.key(at);
        self.lists.remove(at);
        Some(key)
    }
}

impl ReplacementPolicy for S3FifoPolicy {
    fn access(&mut self, extent: ExtentUse, evicted: &mut Vec<ExtentKey>) -> bool {
        let found = self.lists.find(extent.key);
        let ghost = found.filter(|&at| self.lists.list(at) == GHOST);
        if let (Some(at), None) = (found, ghost) {
            let uses = self.lists.value(at);
            *uses = (*uses + 1).min(MOST_USES);
            return true;
        }
        if !extent.fits(self.capacity) {
            return false;
        }
        if let Some(at) = ghost {
            self.lists.remove(at);
        }
        while self.bytes() + extent.size > self.capacity {
            let Some(gone) = self.evict(&|_| true) else { break };
            evicted.push(gone);
        }
        let list = if ghost.is_some() { MAIN } else { SMALL };
        self.lists.push(list, extent.key, extent.size, 0);
        false
    }

    fn evict(&mut self, may_leave: &dyn Fn(ExtentKey) -> bool) -> Option<ExtentKey> {
        let mut tries = 0;
        while tries < TRIES {
            let at = self.next()?;
            let list = self.lists.list(at);
            let gone = if !may_leave(self.lists.key(at)) {
                tries += 1;
                self.lists.move_to(at, list);
                None
            } else if list == SMALL {
                self.pass_small(at)
            } else {
                self.pass_main(at)
            };
            if gone.is_some() {
                return gone;
            }
        }
        None
    }

    fn remove(&mut self, key: ExtentKey) -> bool {
        let Some(at) = self.lists.find(key) else { return false };
        let was_there = self.lists.list(at) != GHOST;
        self.lists.remove(at);
        was_there
    }

    fn contains(&self, key: ExtentKey) -> bool {
        self.lists.find(key).is_some_and(|at| self.lists.list(at) != GHOST)
    }

    fn bytes(&self) -> u64 {
        self.lists.bytes(SMALL) + self.lists.bytes(MAIN)
    }

    fn capacity(&self) -> u64 {
        self.capacity
    }

    fn tracked_extents(&self) -> usize {
        self.lists.total()
    }
}
