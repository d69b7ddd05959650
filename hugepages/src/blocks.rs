//! Blocks of 2 MiB that are divided into pages of 4 KiB.

use std::collections::{BTreeMap, BTreeSet};
use std::ptr::NonNull;

use crate::mapping::AnonymousMapping;
use crate::{HUGE, PAGE};

/// Pages of a block.
const PAGES: usize = HUGE / PAGE;

/// The number of pages that are requested from the kernel together: 64 KiB. A page fault for each
/// page takes twice as long. Large pages would take even less time, but the caller that gets the
/// first page of a block would wait until the kernel has cleared 2 MiB; a guest whose host takes
/// free memory back (free page reporting) needs milliseconds for it.
pub(crate) const TOGETHER: usize = 16;

const BITS: usize = u64::BITS as usize;

/// The blocks, with their free pages.
#[derive(Debug, Default)]
pub(crate) struct PageBlocks {
    /// By the address of their first byte.
    blocks: BTreeMap<usize, PageBlock>,
    /// The addresses of those with a free page.
    open: BTreeSet<usize>,
    /// A block of which all pages are free. There is one at most.
    spare: Option<usize>,
}

#[derive(Debug)]
struct PageBlock {
    memory: AnonymousMapping,
    /// A bit for each page, set if it is free.
    free: [u64; PAGES / BITS],
    /// The number of those bits.
    count: usize,
    /// Pages from this one on were never taken: the kernel's zeros are in them.
    fresh: usize,
}

/// A page that was taken.
pub(crate) struct AllocatedPage {
    pub start: NonNull<u8>,
    /// True if it was not written to since it was obtained from the kernel.
    pub is_fresh: bool,
    /// True if this page and the following ones of its block, [`TOGETHER`] in all, are the next
    /// pages that the kernel has to supply.
    pub is_first: bool,
}

impl PageBlocks {
    pub(crate) const fn new() -> PageBlocks {
        PageBlocks { blocks: BTreeMap::new(), open: BTreeSet::new(), spare: None }
    }

    /// Takes a page. `None` if the kernel has no memory.
    pub(crate) fn take(&mut self) -> Option<AllocatedPage> {
        // The lowest address, so that other blocks become free.
        let at = match self.open.first() {
            Some(at) => *at,
            None => self.add()?,
        };
        let block = self.blocks.get_mut(&at)?;
        let page = block.take()?;
        if block.count == 0 {
            self.open.remove(&at);
        }
        if self.spare == Some(at) {
            self.spare = None;
        }
        // With the provenance of its mapping.
        let start = block.memory.start().map_addr(|start| start.saturating_add(page * PAGE));
        let is_fresh = page >= block.fresh;
        block.fresh = block.fresh.max(page + 1);
        Some(AllocatedPage { start, is_fresh, is_first: is_fresh && page.is_multiple_of(TOGETHER) })
    }

    /// Takes a page back that [`take`](PageBlocks::take) gave. Returns memory for the kernel, which
    /// the caller drops without a lock.
    #[must_use]
    pub(crate) fn give(&mut self, start: NonNull<u8>) -> Option<AnonymousMapping> {
        let page = start.addr().get();
        let (&at, block) = self.blocks.range_mut(..=page).next_back()?;
        block.give((page - at) / PAGE);
        self.open.insert(at);
        if block.count < PAGES {
            return None;
        }
        // One free block, the lowest one, is enough for later allocations.
        let goes = match self.spare.replace(at) {
            Some(spare) => {
                self.spare = Some(spare.min(at));
                spare.max(at)
            }
            None => return None,
        };
        self.open.remove(&goes);
        self.blocks.remove(&goes).map(|block| block.memory)
    }

    /// The bytes that the kernel gave.
    #[cfg(test)]
    pub(crate) fn bytes(&self) -> usize {
        self.blocks.len() * HUGE
    }

    fn add(&mut self) -> Option<usize> {
        let memory = AnonymousMapping::new(HUGE, false)?;
        let at = memory.start().addr().get();
        let block = PageBlock { memory, free: [u64::MAX; PAGES / BITS], count: PAGES, fresh: 0 };
        self.blocks.insert(at, block);
        self.open.insert(at);
        Some(at)
    }
}

impl PageBlock {
    /// Takes the lowest free page.
    fn take(&mut self) -> Option<usize> {
        let place = self.free.iter().position(|word| *word != 0)?;
        let bit = self.free[place].trailing_zeros() as usize;
        self.free[place] &= !(1 << bit);
        self.count -= 1;
        Some(place * BITS + bit)
    }

    fn give(&mut self, page: usize) {
        let (word, bit) = (&mut self.free[page / BITS], 1 << (page % BITS));
        assert!(*word & bit == 0, "a page was free before");
        *word |= bit;
        self.count += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_do_not_overlap_and_blocks_that_are_free_go_back() {
        let mut random = fastrand::Rng::with_seed(4);
        let (mut blocks, mut taken) = (PageBlocks::new(), BTreeMap::new());
        let mut ever = BTreeSet::new();
        for round in 0..60_000 {
            if random.u8(..10) < if round < 30_000 { 6 } else { 4 } {
                let AllocatedPage { start, is_fresh, is_first } = blocks.take().unwrap();
                let at = start.addr().get();
                assert!(at.is_multiple_of(PAGE) && taken.insert(at, start).is_none());
                assert!(
                    !is_fresh || ever.insert(at),
                    "a page with bytes of before is no fresh one"
                );
                assert!(!is_first || is_fresh && at % HUGE + TOGETHER * PAGE <= HUGE);
                ever.insert(at);
            } else if let Some(at) = random.choice(taken.keys().copied().collect::<Vec<_>>())
                && let Some(memory) = blocks.give(taken.remove(&at).unwrap())
            {
                let gone = memory.start().addr().get();
                assert!(taken.range(gone..gone + HUGE).next().is_none(), "in use");
                ever.retain(|page| !(gone..gone + HUGE).contains(page));
            }
        }
        assert!(blocks.bytes() <= taken.len() * PAGE * 8 + 2 * HUGE, "the lowest pages are used");
        for start in taken.into_values() {
            drop(blocks.give(start));
        }
        assert_eq!(blocks.bytes(), HUGE, "one free block stays");
    }
}
