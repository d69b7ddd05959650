//! Each policy does what a naive implementation of its definition does.

use std::collections::BTreeSet;

use defuse_cache::{
    ArcPolicy, ExtentKey, ExtentUse, LfuPolicy, LruPolicy, PlainE, ReplacementPolicy, S3FifoPolicy,
};
use proptest::prelude::*;

const CAPACITY: u64 = 12;

/// Uses of few keys by few processes.
fn make_uses() -> impl Strategy<Value = Vec<(u64, u32)>> {
    proptest::collection::vec((0..40_u64, 0..5_u32), 1..300)
}

/// Gives both the same uses. The naive one returns the keys in the cache after each use.
fn compare(
    policy: &mut dyn ReplacementPolicy,
    uses: &[(u64, u32)],
    mut naive: impl FnMut(u64, u32) -> BTreeSet<u64>,
) {
    let mut evicted = Vec::new();
    for (number, &(key, user)) in uses.iter().enumerate() {
        policy.access(ExtentUse { key: ExtentKey::new(0, key), size: 1, user }, &mut evicted);
        let expected = naive(key, user);
        let there = (0..40).filter(|&key| policy.contains(ExtentKey::new(0, key))).collect();
        assert_eq!(expected, there, "after use {number}, of {key}");
    }
}

fn set<'a>(lists: impl IntoIterator<Item = &'a Vec<u64>>) -> BTreeSet<u64> {
    lists.into_iter().flatten().copied().collect()
}

fn take(list: &mut Vec<u64>, key: u64) -> bool {
    let found = list.iter().position(|&other| other == key);
    found.map(|at| list.remove(at)).is_some()
}

proptest! {
    #[test]
    fn lru_evicts_the_key_that_was_unused_for_the_longest_time(uses in make_uses()) {
        let mut order = Vec::new();
        compare(&mut LruPolicy::new(CAPACITY), &uses, |key, _| {
            if !take(&mut order, key) && order.len() as u64 == CAPACITY {
                order.remove(0);
            }
            order.push(key);
            set([&order])
        });
    }

    #[test]
    fn lfu_evicts_the_key_with_the_fewest_uses_and_of_those_the_oldest(uses in make_uses()) {
        // Key, uses, last use.
        let (mut all, mut now) = (Vec::<(u64, u64, u64)>::new(), 0);
        compare(&mut LfuPolicy::new(CAPACITY), &uses, |key, _| {
            now += 1;
            if let Some(found) = all.iter_mut().find(|one| one.0 == key) {
                (found.1, found.2) = (found.1 + 1, now);
            } else {
                if all.len() as u64 == CAPACITY {
                    all.sort_by_key(|one| (one.1, one.2));
                    all.remove(0);
                }
                all.push((key, 1, now));
            }
            all.iter().map(|one| one.0).collect()
        });
    }

    /// Figure 4 of the paper by Megiddo and Modha. Lists begin with their oldest key.
    #[test]
    fn arc_keeps_the_lists_of_its_paper(uses in make_uses()) {
        let c = CAPACITY as usize;
        let (mut p, mut t1, mut t2) = (0_usize, Vec::new(), Vec::new());
        let (mut b1, mut b2) = (Vec::new(), Vec::new());
        fn replace(p: usize, in_b2: bool, [t1, t2, b1, b2]: [&mut Vec<u64>; 4]) {
            if !t1.is_empty() && (t1.len() > p || (in_b2 && t1.len() == p)) || t2.is_empty() {
                b1.push(t1.remove(0));
            } else {
                b2.push(t2.remove(0));
            }
        }
        compare(&mut ArcPolicy::new(CAPACITY), &uses, |key, _| {
            if take(&mut t1, key) || take(&mut t2, key) {
                t2.push(key);
            } else if b1.contains(&key) || b2.contains(&key) {
                let (one, two) = (b1.len().max(1), b2.len().max(1));
                let in_b2 = b2.contains(&key);
                p = match in_b2 {
                    false => (p + (b2.len() / one).max(1)).min(c),
                    true => p.saturating_sub((b1.len() / two).max(1)),
                };
                if t1.len() + t2.len() == c {
                    replace(p, in_b2, [&mut t1, &mut t2, &mut b1, &mut b2]);
                }
                let _ = take(&mut b1, key) || take(&mut b2, key);
                t2.push(key);
            } else {
                let all = t1.len() + t2.len() + b1.len() + b2.len();
                if t1.len() + b1.len() == c {
                    if t1.len() < c {
                        b1.remove(0);
                        replace(p, false, [&mut t1, &mut t2, &mut b1, &mut b2]);
                    } else {
                        t1.remove(0);
                    }
                } else if all >= c {
                    if all == 2 * c {
                        b2.remove(0);
                    }
                    if t1.len() + t2.len() == c {
                        replace(p, false, [&mut t1, &mut t2, &mut b1, &mut b2]);
                    }
                }
                t1.push(key);
            }
            set([&t1, &t2])
        });
    }

    /// Algorithm 1 of the paper by Yang and others. Queues begin with their oldest key.
    #[test]
    fn s3_fifo_keeps_the_queues_of_its_paper(uses in make_uses()) {
        let (mut small, mut main) = (Vec::<u64>::new(), Vec::<u64>::new());
        let (mut ghost, mut freq) = (Vec::<u64>::new(), [0_u8; 40]);
        compare(&mut S3FifoPolicy::new(CAPACITY), &uses, |key, _| {
            let at = key as usize;
            if small.contains(&key) || main.contains(&key) {
                freq[at] = (freq[at] + 1).min(3);
                return set([&small, &main]);
            }
            let was_ghost = take(&mut ghost, key);
            while (small.len() + main.len()) as u64 == CAPACITY {
                let total = small.len() + main.len();
                if !small.is_empty() && (small.len() * 10 >= total || main.is_empty()) {
                    let old = small.remove(0);
                    if freq[old as usize] > 1 {
                        main.push(old);
                    } else {
                        ghost.push(old);
                        while ghost.len() > small.len() + main.len() {
                            ghost.remove(0);
                        }
                    }
                    freq[old as usize] = 0;
                } else {
                    let old = main.remove(0);
                    if freq[old as usize] > 0 {
                        freq[old as usize] -= 1;
                        main.push(old);
                    }
                }
            }
            freq[at] = 0;
            if was_ghost { main.push(key) } else { small.push(key) }
            set([&small, &main])
        });
    }

    /// E from the list of all uses, by its definition. An order is good for a sixteenth of the
    /// keys.
    #[test]
    fn plain_e_evicts_the_keys_of_the_largest_sum_of_the_paper(uses in make_uses()) {
        let mut naive = NaiveE::default();
        compare(&mut PlainE::new(CAPACITY), &uses, |key, user| naive.access(key, user));
    }
}

/// The formula with α = 1, β = 1, γ = 0.01, over 8 periods.
#[derive(Default)]
struct NaiveE {
    now: u64,
    /// Key, process, time and period of all uses since the key came.
    uses: Vec<(u64, u32, u64, usize)>,
    /// Time and number of processes at the end of each period.
    ends: Vec<(u64, f64)>,
    active: Vec<BTreeSet<u32>>,
    keys: Vec<u64>,
    order: Vec<(u64, u64)>,
    next: u64,
}

impl NaiveE {
    fn access(&mut self, key: u64, user: u32) -> BTreeSet<u64> {
        if self.now == 0 {
            (self.next, self.active) = (16, vec![BTreeSet::new()]);
        }
        self.now += 1;
        if self.now >= self.next {
            self.ends.push((self.now, self.processes()));
            self.active.push(BTreeSet::new());
            self.next = self.now + 16.max(self.keys.len() as u64);
        }
        self.active.last_mut().unwrap().insert(user);
        if !self.keys.contains(&key) {
            while self.keys.len() as u64 == CAPACITY {
                self.evict();
            }
            self.keys.push(key);
        }
        self.uses.push((key, user, self.now, self.ends.len()));
        self.keys.iter().copied().collect()
    }

    /// Processes of this period and the one before.
    fn processes(&self) -> f64 {
        let recent = self.active.iter().rev().take(2);
        recent.flatten().collect::<BTreeSet<_>>().len().max(1) as f64
    }

    fn last(&self, key: u64) -> u64 {
        self.uses.iter().rfind(|one| one.0 == key).unwrap().2
    }

    fn e(&self, key: u64) -> f64 {
        let own: Vec<_> = self.uses.iter().filter(|one| one.0 == key).collect();
        let now = (self.now, self.processes());
        let ends = self.ends.iter().chain([&now]).enumerate();
        let since = (self.ends.len() + 1).saturating_sub(8);
        let term = |(period, &(end, processes)): (usize, &(u64, f64))| {
            let users: BTreeSet<u32> =
                own.iter().filter(|one| one.3 == period).map(|one| one.1).collect();
            let last = own.iter().rfind(|one| one.3 <= period).unwrap().2;
            (end - last) as f64 / (users.len() as f64 / processes + 0.01)
        };
        ends.filter(|(period, _)| *period >= since.max(own[0].3)).map(term).sum()
    }

    fn evict(&mut self) {
        loop {
            let Some((key, last)) = self.order.pop() else {
                let mut all = self.keys.clone();
                all.sort_by(|&a, &b| self.e(a).total_cmp(&self.e(b)).then(a.cmp(&b)));
                let top = all.split_off(all.len() - all.len().div_ceil(16));
                self.order = top.iter().map(|&key| (key, self.last(key))).collect();
                continue;
            };
            if self.keys.contains(&key) && self.last(key) == last {
                self.keys.retain(|&other| other != key);
                self.uses.retain(|one| one.0 != key);
                return;
            }
        }
    }
}
