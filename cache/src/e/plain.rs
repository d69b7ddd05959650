//! E as in the paper: computed for all extents, which are sorted.

use std::collections::{HashMap, VecDeque};

use super::{ActiveProcesses, bit};
use crate::policy::{ExtentKey, ExtentUse, ReplacementPolicy, TRIES};

/// The periods of T.
const PERIODS: usize = 8;
/// The fewest uses of a period; it has as many as there are extents.
const FEWEST_USES: u64 = 16;
/// A sorted order is good for this part of all extents (Top N).
const TOP: usize = 16;
const BETA: f64 = 1.0;
const GAMMA: f64 = 0.01;

/// Evicts the extents with the largest E, exactly. α is 1, β 1 and γ 0.01.
#[derive(Debug)]
pub struct PlainE {
    capacity: u64,
    bytes: u64,
    now: u64,
    period: u64,
    /// When the period ends.
    ends: u64,
    active: ActiveProcesses,
    extents: HashMap<ExtentKey, ExtentRecord>,
    /// Extents with the largest E when it was computed last, the largest at the end.
    worst: Vec<(ExtentKey, u64)>,
}

#[derive(Debug)]
struct ExtentRecord {
    size: u64,
    last: u64,
    /// Processes of the current period.
    users: u64,
    /// The time without use, and R, at the end of each earlier period.
    history: VecDeque<(u64, f64)>,
}

impl ExtentRecord {
    fn e(&self, now: u64, processes: f64) -> f64 {
        let current = (now - self.last, f64::from(self.users.count_ones()) / processes);
        let terms = self.history.iter().chain([&current]);
        let sum: f64 = terms.map(|(unused, r)| *unused as f64 / (BETA * r + GAMMA)).sum();
        self.size as f64 * sum
    }
}

impl PlainE {
    /// An empty cache of so many bytes.
    pub fn new(capacity: u64) -> PlainE {
        PlainE {
            capacity,
            bytes: 0,
            now: 0,
            period: 0,
            ends: FEWEST_USES,
            active: ActiveProcesses::default(),
            extents: HashMap::new(),
            worst: Vec::new(),
        }
    }

    fn end_period(&mut self) {
        let processes = f64::from(self.active.count());
        for used in self.extents.values_mut() {
            if used.history.len() + 1 == PERIODS {
                used.history.pop_front();
            }
            let r = f64::from(used.users.count_ones()) / processes;
            used.history.push_back((self.now - used.last, r));
            used.users = 0;
        }
        self.period += 1;
        self.ends = self.now + FEWEST_USES.max(self.extents.len() as u64);
    }

    fn sort(&mut self) {
        let (now, processes) = (self.now, f64::from(self.active.count()));
        let e =
            |(key, used): (&ExtentKey, &ExtentRecord)| (used.e(now, processes), *key, used.last);
        let mut all: Vec<_> = self.extents.iter().map(e).collect();
        all.sort_by(|one, other| one.0.total_cmp(&other.0).then(one.1.cmp(&other.1)));
        let top = all.len().div_ceil(TOP);
        self.worst = all.split_off(all.len() - top).into_iter().map(|(_, k, l)| (k, l)).collect();
    }
}

impl ReplacementPolicy for PlainE {
    fn access(&mut self, extent: ExtentUse, evicted: &mut Vec<ExtentKey>) -> bool {
        self.now += 1;
        if self.now >= self.ends {
            self.end_period();
        }
        self.active.record_use(extent.user, self.period);
        if let Some(used) = self.extents.get_mut(&extent.key) {
            used.last = self.now;
            used.users |= bit(extent.user);
            return true;
        }
        if !extent.fits(self.capacity) {
            return false;
        }
        while self.bytes + extent.size > self.capacity {
            let Some(gone) = self.evict(&|_| true) else { break };
            evicted.push(gone);
        }
        let (size, last, users) = (extent.size, self.now, bit(extent.user));
        self.extents
            .insert(extent.key, ExtentRecord { size, last, users, history: VecDeque::new() });
        self.bytes += size;
        false
    }

    fn evict(&mut self, may_leave: &dyn Fn(ExtentKey) -> bool) -> Option<ExtentKey> {
        let mut tries = 0;
        while tries < TRIES && !self.extents.is_empty() {
            let Some((key, last)) = self.worst.pop() else {
                self.sort();
                continue;
            };
            // It was not used, nor removed, since the order was computed.
            if self.extents.get(&key).is_some_and(|used| used.last == last) {
                if may_leave(key) {
                    self.remove(key);
                    return Some(key);
                }
                tries += 1;
            }
        }
        None
    }

    fn remove(&mut self, key: ExtentKey) -> bool {
        let Some(gone) = self.extents.remove(&key) else { return false };
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
