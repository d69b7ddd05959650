//! The slots in which the copies of each inode lie.

use std::collections::BTreeSet;

use defuse_hugepages::HugePages;
use hashbrown::hash_map::Entry;
use hashbrown::{DefaultHashBuilder, HashMap};

type HugeHashMap<T> = HashMap<u64, T, DefaultHashBuilder, HugePages>;

/// The copies of inodes: the current copy of each inode, and the stale copies that are on the
/// device or are being written.
#[derive(Debug)]
pub(super) struct InodeCopies {
    live: HugeHashMap<u64>,
    stale: HugeHashMap<StaleSlots>,
}

/// The slots of an inode's stale copies, at least one. Most inodes have only one; a forged image
/// may assign all slots to one inode.
#[derive(Clone, Debug, PartialEq, Eq)]
enum StaleSlots {
    One(u64),
    More(BTreeSet<u64>),
}

impl StaleSlots {
    fn blocks(&self) -> Vec<u64> {
        match self {
            StaleSlots::One(block) => vec![*block],
            StaleSlots::More(blocks) => blocks.iter().copied().collect(),
        }
    }

    fn add(&mut self, block: u64) {
        match self {
            // The slot held an older copy already, and is in the set once.
            StaleSlots::One(first) if *first == block => {}
            StaleSlots::One(first) => *self = StaleSlots::More(BTreeSet::from([*first, block])),
            StaleSlots::More(blocks) => {
                blocks.insert(block);
            }
        }
    }

    /// Removes a slot. True where none is left.
    fn remove(&mut self, block: u64) -> bool {
        match self {
            StaleSlots::One(only) => *only == block,
            StaleSlots::More(blocks) => {
                blocks.remove(&block);
                blocks.is_empty()
            }
        }
    }
}

impl InodeCopies {
    pub(super) fn new() -> Self {
        let memory = HugePages::default();
        InodeCopies {
            live: HugeHashMap::new_in(memory.clone()),
            stale: HugeHashMap::new_in(memory),
        }
    }

    /// The slot of an inode's current copy.
    pub(super) fn live(&self, ino: u64) -> Option<u64> {
        self.live.get(&ino).copied()
    }

    /// The number of inodes with a current copy.
    pub(super) fn count(&self) -> usize {
        self.live.len()
    }

    /// Sets the slot of the current copy, and returns the former one.
    pub(super) fn set_live(&mut self, ino: u64, block: u64) -> Option<u64> {
        self.live.insert(ino, block)
    }

    /// Removes the current copy of the inode. Returns its former slot.
    pub(super) fn remove_live(&mut self, ino: u64) -> Option<u64> {
        self.live.remove(&ino)
    }

    pub(super) fn has_stale(&self, ino: u64) -> bool {
        self.stale.contains_key(&ino)
    }

    pub(super) fn has_any(&self, ino: u64) -> bool {
        self.live.contains_key(&ino) || self.has_stale(ino)
    }

    /// Records that a stale copy lies at `block`.
    pub(super) fn add_stale(&mut self, ino: u64, block: u64) {
        match self.stale.entry(ino) {
            Entry::Vacant(entry) => drop(entry.insert(StaleSlots::One(block))),
            Entry::Occupied(mut entry) => entry.get_mut().add(block),
        }
    }

    /// Records that no copy of the inode lies at `block`. True if its last stale copy lay there.
    pub(super) fn remove_stale(&mut self, ino: u64, block: u64) -> bool {
        let Entry::Occupied(mut entry) = self.stale.entry(ino) else { return false };
        let is_last = entry.get_mut().remove(block);
        if is_last {
            entry.remove();
        }
        is_last
    }

    /// All stale copies, each as inode and slot, sorted: the order of a hash table differs from run
    /// to run.
    pub(super) fn list_stale(&self) -> Vec<(u64, u64)> {
        let slots = |(ino, stale): (&u64, &StaleSlots)| {
            let ino = *ino;
            stale.blocks().into_iter().map(move |block| (ino, block))
        };
        let mut all: Vec<(u64, u64)> = self.stale.iter().flat_map(slots).collect();
        all.sort_unstable();
        all
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;

    // Each copy was compared with all others of its inode.
    #[test]
    fn any_number_of_copies_of_one_inode_takes_no_longer_each() {
        let time = |count: u64| {
            let begun = Instant::now();
            let mut copies = InodeCopies::new();
            (0..count).for_each(|block| copies.add_stale(7, block));
            (0..count).for_each(|block| {
                copies.remove_stale(7, block);
            });
            assert!(!copies.has_any(7));
            begun.elapsed() / count as u32
        };
        // The shortest of several runs, since other programs use the processor too.
        let best = |count| (0..5).map(|_| time(count)).min().unwrap_or(Duration::MAX);
        let (few, many) = (best(500), best(16_000));
        // It would be 32 times as long if each copy were compared with all others.
        assert!(many < 10 * few, "{few:?} each of 500, {many:?} of 16,000");
    }

    #[test]
    fn stale_copies_are_a_set_of_slots_for_each_inode() {
        let mut random = fastrand::Rng::with_seed(1);
        let (mut copies, mut model) = (InodeCopies::new(), BTreeSet::new());
        for _ in 0..20_000 {
            let (ino, block) = (random.u64(1..5), random.u64(..6));
            if random.bool() {
                copies.add_stale(ino, block);
                model.insert((ino, block));
            } else {
                let was_there = model.remove(&(ino, block));
                let has_others = model.iter().any(|(other, _)| *other == ino);
                assert_eq!(copies.remove_stale(ino, block), was_there && !has_others);
            }
            assert_eq!(copies.has_stale(ino), model.iter().any(|(other, _)| *other == ino));
            assert_eq!(copies.list_stale(), model.iter().copied().collect::<Vec<_>>());
        }
    }
}
