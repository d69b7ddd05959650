//! E in the queues of S3-FIFO, with weights that the caller chooses.

use super::history::{PERIODS_OF_A_ROUND, UseHistory};
use crate::lists::{ExtentLists, ListPosition};
use crate::policy::{ExtentKey, ExtentUse, ReplacementPolicy, TRIES};

/// The fewest uses of a period.
const FEWEST_USES: u64 = 4;
/// Extents that the hand reaches for each eviction.
const REACHED: usize = 4;
/// Extents that stay within reach: the extents with the larger E.
const WITHIN_REACH: usize = 12;
/// Keys that have left, for each extent in the cache.
const GHOSTS: usize = 4;

/// Extents that are new: a tenth of the memory.
const SMALL: usize = 0;
const MAIN: usize = 1;
/// Extents of the main queue that the hand has reached.
const REACH: usize = 2;
/// Keys that have left, with their history.
const GHOST: usize = 3;

/// The parameters of E.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PolicyWeights {
    /// α, the exponent of the time without use.
    pub alpha: f64,
    /// β, the weight of each process.
    pub beta: f64,
    /// The weight of further uses by the same process.
    pub again: f64,
    /// γ, the divisor of an extent that was unused for long.
    pub gamma: f64,
    /// The half-life of a use, in periods.
    pub half_life: f64,
}

/// Evicts extents of large E.
#[derive(Debug)]
pub(super) struct EvictionQueues {
    capacity: u64,
    pub(super) weights: PolicyWeights,
    now: u64,
    period: u64,
    ends: u64,
    lists: ExtentLists<UseHistory, 4>,
}

impl EvictionQueues {
    pub(super) fn new(capacity: u64, weights: PolicyWeights) -> EvictionQueues {
        let lists = ExtentLists::new();
        EvictionQueues { capacity, weights, now: 0, period: 0, ends: FEWEST_USES, lists }
    }

    /// Extents in the cache.
    pub(super) fn len(&self) -> usize {
        self.lists.total() - self.lists.len(GHOST)
    }

    /// The logarithm of E.
    fn e(&self, at: ListPosition) -> f64 {
        let history = self.lists.peek(at);
        let unused = (self.now - history.last()).max(1) as f64;
        let divisor = history.share(&self.weights, self.period) + self.weights.gamma;
        (self.lists.size(at) as f64).ln() + self.weights.alpha * unused.ln() - divisor.ln()
    }

    /// Moves the hand. Returns the extent of the largest E within reach that may leave.
    fn reach(&mut self, may_leave: &dyn Fn(ExtentKey) -> bool) -> Option<(ListPosition, f64)> {
        for _ in 0..REACHED {
            let Some(at) = self.lists.back(MAIN) else { break };
            self.lists.move_to(at, REACH);
        }
        let mut all: Vec<_> = self.lists.oldest(REACH).map(|at| (at, self.e(at))).collect();
        while all.len() > WITHIN_REACH {
            let e = |&at: &usize| all[at].1;
            let least = (0..all.len()).min_by(|one, other| e(one).total_cmp(&e(other)))?;
            self.lists.move_to(all.swap_remove(least).0, MAIN);
        }
        all.retain(|(at, _)| may_leave(self.lists.key(*at)));
        all.into_iter().max_by(|one, other| one.1.total_cmp(&other.1))
    }

    /// Keeps four times as many keys that have left as there are extents.
    fn forget(&mut self) {
        while self.lists.len(GHOST) > GHOSTS * self.len() {
            let Some(oldest) = self.lists.back(GHOST) else { break };
            self.lists.remove(oldest);
        }
    }
}

impl ReplacementPolicy for EvictionQueues {
    fn access(&mut self, extent: ExtentUse, evicted: &mut Vec<ExtentKey>) -> bool {
        let ExtentUse { key, size, user } = extent;
        self.now += 1;
        if self.now >= self.ends {
            self.period += 1;
            self.ends = self.now + FEWEST_USES.max(self.len() as u64 / PERIODS_OF_A_ROUND);
        }
        let (now, period, half_life) = (self.now, self.period, self.weights.half_life);
        let mut history = UseHistory::default();
        if let Some(at) = self.lists.find(key) {
            self.lists.value(at).record_use(user, now, period, half_life);
            if self.lists.list(at) != GHOST {
                return true;
            }
            history = *self.lists.peek(at);
            self.lists.remove(at);
        } else {
            history.record_use(user, now, period, half_life);
        }
        if !extent.fits(self.capacity) {
            return false;
        }
        let before = evicted.len();
        while self.bytes() + size > self.capacity {
            let Some(gone) = self.evict(&|_| true) else { break };
            evicted.push(gone);
        }
        // While there is room, the oldest new ones need not compete.
        if evicted.len() == before {
            while self.lists.bytes(SMALL) * 10 > self.capacity {
                let Some(at) = self.lists.back(SMALL) else { break };
                self.lists.move_to(at, MAIN);
            }
        }
        self.lists.push(SMALL, key, size, history);
        false
    }

    fn evict(&mut self, may_leave: &dyn Fn(ExtentKey) -> bool) -> Option<ExtentKey> {
        let may = |at: &ListPosition| may_leave(self.lists.key(*at));
        let is_small = self.lists.bytes(SMALL) * 10 > self.bytes();
        let new = self.lists.oldest(SMALL).take(TRIES).find(may);
        let at = match (new, self.reach(may_leave)) {
            // A new extent that is worth more than an old one joins the old ones.
            (Some(new), Some((worst, e))) if is_small && self.e(new) < e => {
                self.lists.move_to(new, MAIN);
                worst
            }
            (Some(new), _) if is_small => new,
            (_, Some((worst, _))) => worst,
            (new, None) => new?,
        };
        let key = self.lists.key(at);
        self.lists.move_to(at, GHOST);
        self.forget();
        Some(key)
    }

    fn remove(&mut self, key: ExtentKey) -> bool {
        let Some(at) = self.lists.find(key) else { return false };
        let was_there = self.lists.list(at) != GHOST;
        self.lists.remove(at);
        self.forget();
        was_there
    }

    fn contains(&self, key: ExtentKey) -> bool {
        self.lists.find(key).is_some_and(|at| self.lists.list(at) != GHOST)
    }

    fn bytes(&self) -> u64 {
        [SMALL, MAIN, REACH].iter().map(|&list| self.lists.bytes(list)).sum()
    }

    fn capacity(&self) -> u64 {
        self.capacity
    }

    fn tracked_extents(&self) -> usize {
        self.lists.total()
    }
}
