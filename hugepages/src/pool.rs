//! Blocks of 2 MiB that are divided into runs of units, by buddies.

use std::collections::{BTreeMap, BTreeSet};
use std::ptr::NonNull;

use crate::mapping::AnonymousMapping;
use crate::{HUGE, LEAST};

/// Units of a block.
const UNITS: usize = HUGE / LEAST;

/// Sizes of free pieces: 1, 2, 4 units, up to a whole block.
const ORDERS: usize = UNITS.ilog2() as usize + 1;

/// Blocks that get small pages, so that a file system with few files takes no more memory than it
/// needs.
const SMALL: usize = 2;

/// The blocks, with their free pieces.
#[derive(Debug, Default)]
pub(crate) struct HugePagePool {
    /// By the address of their first byte.
    blocks: BTreeMap<usize, AnonymousMapping>,
    /// The addresses of free pieces, by the logarithm of their units. Each is aligned to its size.
    free: [BTreeSet<usize>; ORDERS],
}

impl HugePagePool {
    /// Takes a run of `units` units, at most a block. `None` if the kernel has no memory.
    pub(crate) fn take(&mut self, units: usize) -> Option<NonNull<u8>> {
        assert!((1..=UNITS).contains(&units), "{units} units are no part of a block");
        let least = units.next_power_of_two().ilog2() as usize;
        // The lowest address of the smallest piece: free memory stays together.
        let found = (least..ORDERS).find_map(|order| Some((order, self.free[order].pop_first()?)));
        let (order, at) = match found {
            Some(found) => found,
            None => (ORDERS - 1, self.add()?),
        };
        self.free_range(at + units * LEAST, at + (LEAST << order));
        let (first, block) = self.blocks.range(..=at).next_back()?;
        // With the provenance of its mapping.
        Some(block.start().map_addr(|start| start.saturating_add(at - first)))
    }

    /// Takes a run back that [`take`](HugePagePool::take) gave.
    pub(crate) fn give(&mut self, start: NonNull<u8>, units: usize) {
        let at = start.addr().get();
        self.free_range(at, at + units * LEAST);
    }

    /// The bytes that the kernel gave.
    #[cfg(test)]
    pub(crate) fn bytes(&self) -> usize {
        self.blocks.len() * HUGE
    }

    /// Returns the number of free bytes.
    #[cfg(test)]
    pub(crate) fn free_bytes(&self) -> usize {
        (0..ORDERS).map(|order| self.free[order].len() * (LEAST << order)).sum()
    }

    fn add(&mut self) -> Option<usize> {
        let block = AnonymousMapping::new(HUGE, self.blocks.len() >= SMALL)?;
        let at = block.start().addr().get();
        self.blocks.insert(at, block);
        Some(at)
    }

    /// Frees a range of one block, in pieces as large as its ends permit.
    fn free_range(&mut self, mut from: usize, to: usize) {
        while from < to {
            let units = ((to - from) / LEAST).ilog2();
            let order = (from / LEAST).trailing_zeros().min(units) as usize;
            self.free_piece(from, order);
            from += LEAST << order;
        }
    }

    fn free_piece(&mut self, mut at: usize, mut order: usize) {
        while order < ORDERS - 1 && self.free[order].remove(&(at ^ LEAST << order)) {
            at &= !(LEAST << order);
            order += 1;
        }
        let is_spare = order < ORDERS - 1 || self.free[order].is_empty();
        match is_spare {
            true => drop(self.free[order].insert(at)),
            // One free block is enough for later allocations.
            false => drop(self.blocks.remove(&at)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_do_not_overlap_and_blocks_that_are_free_go_back() {
        let mut random = fastrand::Rng::with_seed(3);
        let (mut pool, mut runs) = (HugePagePool::default(), BTreeMap::new());
        for round in 0..20_000 {
            if random.u8(..10) < if round < 10_000 { 6 } else { 4 } {
                let units = random.usize(1..=if round % 3 == 0 { UNITS } else { 4 });
                let start = pool.take(units).unwrap();
                let at = start.addr().get();
                let before = runs.range(..at).next_back();
                assert!(before.is_none_or(|(at_before, (_, n))| at_before + n * LEAST <= at));
                let after = runs.range(at..).next();
                assert!(after.is_none_or(|(after, _)| at + units * LEAST <= *after));
                assert_eq!(at / HUGE, (at + units * LEAST - 1) / HUGE, "in one block");
                runs.insert(at, (start, units));
            } else if let Some(at) = random.choice(runs.keys().copied().collect::<Vec<_>>()) {
                let (start, units) = runs.remove(&at).unwrap();
                pool.give(start, units);
            }
            let used: usize = runs.values().map(|(_, units)| units * LEAST).sum();
            assert_eq!(pool.bytes(), used + pool.free_bytes(), "round {round}");
        }
        runs.into_values().for_each(|(start, units)| pool.give(start, units));
        assert_eq!(pool.bytes(), HUGE, "one free block stays");
    }
}
