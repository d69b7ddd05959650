//! The blocks of the device: a bit for each, in memory only. A scan of the inodes sets them.

use crate::format::UNIT_BLOCKS;
use crate::format::inode::Extent;

/// Words of the bits of a unit.
const WORDS: usize = UNIT_BLOCKS as usize / 64;

/// A unit of 2 MiB.
#[derive(Clone, Debug)]
enum Unit {
    Free,
    /// Inodes, or a copy of the superblock with nothing else in use.
    Slots,
    /// Blocks of files; a bit that is set is in use.
    Blocks(Box<[u64; WORDS]>),
}

/// A run of blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Run {
    pub(crate) block: u64,
    pub(crate) count: u32,
}

impl From<Extent> for Run {
    fn from(extent: Extent) -> Self {
        Run { block: extent.block, count: extent.count }
    }
}

/// The blocks in use.
#[derive(Clone, Debug)]
pub(crate) struct Space {
    units: Vec<Unit>,
    free_blocks: u64,
    free_units: u32,
    /// Where the search for a unit with room goes on.
    cursor: usize,
}

impl Space {
    /// `units` units without anything in them.
    pub(crate) fn new(units: u32) -> Self {
        Space {
            units: vec![Unit::Free; units as usize],
            free_blocks: u64::from(units) * UNIT_BLOCKS,
            free_units: units,
            cursor: 0,
        }
    }

    /// Blocks that nothing uses.
    pub(crate) fn free_blocks(&self) -> u64 {
        self.free_blocks
    }

    /// All blocks.
    pub(crate) fn blocks(&self) -> u64 {
        self.units.len() as u64 * UNIT_BLOCKS
    }

    /// Units that nothing uses.
    pub(crate) fn free_units(&self) -> u32 {
        self.free_units
    }

    /// Marks `count` units from `first` on as those of slots.
    ///
    /// # Panics
    ///
    /// When one of them is in use.
    pub(crate) fn reserve(&mut self, first: u32, count: u32) {
        for unit in &mut self.units[first as usize..][..count as usize] {
            assert!(matches!(unit, Unit::Free), "a unit of slots is in use");
            *unit = Unit::Slots;
        }
        self.free_units -= count;
        self.free_blocks -= u64::from(count) * UNIT_BLOCKS;
    }

    /// The first free unit and how many follow it, at most `wanted`.
    pub(crate) fn find_units(&self, wanted: u32) -> Option<(u32, u32)> {
        let is_free = |unit: &Unit| matches!(unit, Unit::Free);
        let first = self.units.iter().position(is_free)?;
        let count = self.units[first..].iter().take(wanted as usize).take_while(|u| is_free(u));
        Some((first as u32, count.count() as u32))
    }

    /// Marks blocks as used. False, with nothing changed, where one is in use already or does not exist.
    pub(crate) fn claim(&mut self, run: Run) -> bool {
        let blocks = || run.block..run.block.saturating_add(u64::from(run.count));
        if blocks().end > self.units.len() as u64 * UNIT_BLOCKS
            || blocks().any(|block| self.is_used(block))
        {
            return false;
        }
        blocks().for_each(|block| self.set(block, true));
        true
    }

    /// Gives blocks back.
    pub(crate) fn free(&mut self, run: Run) {
        for block in run.block..run.block + u64::from(run.count) {
            debug_assert!(self.is_used(block), "block {block} is given back twice");
            self.set(block, false);
        }
    }

    /// Takes up to `count` neighbouring blocks, right after `near` if they are free there. At least
    /// `keep` units stay free. `None` where nothing is left.
    pub(crate) fn take(&mut self, count: u32, near: Option<u64>, keep: u32) -> Option<Run> {
        let count = count.min(UNIT_BLOCKS as u32);
        let after = near.map(|block| block + 1).filter(|block| self.has_room(*block));
        let block = after
            .or_else(|| (u64::from(count) == UNIT_BLOCKS).then(|| self.fresh(keep)).flatten())
            .or_else(|| self.find())
            .or_else(|| self.fresh(keep))?;
        let mut run = Run { block, count: 0 };
        let end = (block / UNIT_BLOCKS + 1) * UNIT_BLOCKS;
        while run.count < count && block + u64::from(run.count) < end {
            let next = block + u64::from(run.count);
            if self.is_used(next) {
                break;
            }
            self.set(next, true);
            run.count += 1;
        }
        Some(run)
    }

    /// True for a free block of a unit that holds blocks of files already.
    fn has_room(&self, block: u64) -> bool {
        let unit = self.units.get((block / UNIT_BLOCKS) as usize);
        matches!(unit, Some(Unit::Blocks(_))) && !self.is_used(block)
    }

    /// The first block of a unit that nothing uses.
    fn fresh(&self, keep: u32) -> Option<u64> {
        let (unit, _) = (self.free_units > keep).then(|| self.find_units(1)).flatten()?;
        Some(u64::from(unit) * UNIT_BLOCKS)
    }

    /// A free block in a unit that holds blocks of files.
    fn find(&mut self) -> Option<u64> {
        for _ in 0..self.units.len() {
            let at = self.cursor % self.units.len();
            if let Unit::Blocks(words) = &self.units[at]
                && let Some(word) = words.iter().position(|word| *word != u64::MAX)
            {
                let bit = words[word].trailing_ones();
                return Some(at as u64 * UNIT_BLOCKS + word as u64 * 64 + u64::from(bit));
            }
            self.cursor = at + 1;
        }
        None
    }

    fn is_used(&self, block: u64) -> bool {
        let at = (block % UNIT_BLOCKS) as usize;
        match &self.units[(block / UNIT_BLOCKS) as usize] {
            Unit::Free => false,
            Unit::Slots => true,
            Unit::Blocks(words) => words[at / 64] & (1 << (at % 64)) != 0,
        }
    }

    fn set(&mut self, block: u64, used: bool) {
        let at = (block % UNIT_BLOCKS) as usize;
        let unit = &mut self.units[(block / UNIT_BLOCKS) as usize];
        if let Unit::Free = unit {
            *unit = Unit::Blocks(Box::new([0; WORDS]));
            self.free_units -= 1;
        }
        let Unit::Blocks(words) = unit else { return };
        if used {
            words[at / 64] |= 1 << (at % 64);
            self.free_blocks -= 1;
            return;
        }
        words[at / 64] &= !(1 << (at % 64));
        self.free_blocks += 1;
        if words.iter().all(|word| *word == 0) {
            *unit = Unit::Free;
            self.free_units += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_never_overlap_and_empty_units_are_free_again() {
        let mut space = Space::new(20);
        space.reserve(3, 2);
        let mut random = fastrand::Rng::with_seed(4);
        let mut held: Vec<Run> = Vec::new();
        let mut used = std::collections::BTreeSet::new();
        for _ in 0..3000 {
            if random.u8(..5) < 3 {
                let near = random.choice(&held).map(|run| run.block + u64::from(run.count) - 1);
                if let Some(run) = space.take(random.u32(1..700), near, 1) {
                    for block in run.block..run.block + u64::from(run.count) {
                        assert!(used.insert(block) && !(3..5).contains(&(block / UNIT_BLOCKS)));
                    }
                    held.push(run);
                }
            } else if !held.is_empty() {
                let run = held.swap_remove(random.usize(..held.len()));
                space.free(run);
                used.retain(|block| !(run.block..run.block + u64::from(run.count)).contains(block));
            }
            assert_eq!(space.free_blocks(), 18 * UNIT_BLOCKS - used.len() as u64);
            assert!(space.free_units() >= 1);
        }
        held.into_iter().for_each(|run| space.free(run));
        assert_eq!((space.free_blocks(), space.free_units()), (18 * UNIT_BLOCKS, 18));
    }

    #[test]
    fn a_block_has_one_owner() {
        let mut space = Space::new(8);
        space.reserve(0, 1);
        assert!(space.claim(Run { block: 600, count: 10 }));
        for run in [(605, 1), (590, 20), (0, 1), (8 * 512, 1), (u64::MAX, 2)] {
            let before = space.free_blocks();
            assert!(!space.claim(Run { block: run.0, count: run.1 }), "{run:?}");
            assert_eq!(space.free_blocks(), before);
        }
    }
}
