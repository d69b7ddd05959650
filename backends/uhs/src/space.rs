//! The blocks of the device, in memory only. A scan of the inodes claims the blocks in use.
//!
//! A unit of 2 MiB is free, holds slots, is in use as a whole, or holds small blocks: then it has a
//! bit for each block. Sets of free units and of units with room lead to a block without a walk
//! over all units.

mod bits;
mod preallocation;
mod set;
#[cfg(test)]
mod tests;

use std::cmp::Reverse;
use std::collections::BTreeSet;
use std::ops::Range;

use bits::{BLOCKS, BlockBitmap};
use preallocation::AheadRuns;
use set::NumberSet;

use crate::format::UNIT_BLOCKS;
use crate::format::inode::DiskExtent;
use crate::format::superblock::COPIES;

/// A unit that nothing uses.
const FREE: u32 = u32::MAX;
/// A unit of inodes.
const SLOTS: u32 = u32::MAX - 1;
/// A unit with all blocks in use.
const FULL: u32 = u32::MAX - 2;

/// The number of free blocks from which on a unit of small blocks is in each set of units with
/// room.
const ROOMS: [u32; 3] = [1, 8, 64];

/// A run of blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BlockRun {
    pub(crate) block: u64,
    pub(crate) count: u32,
}

impl BlockRun {
    pub(crate) fn end(&self) -> u64 {
        self.block.saturating_add(u64::from(self.count))
    }

    /// The parts of the run in each unit: the unit, the first block in it, and the one after the
    /// last.
    fn parts(&self) -> impl Iterator<Item = (usize, u32, u32)> + use<> {
        let (start, end) = (self.block, self.end());
        (start / UNIT_BLOCKS..end.div_ceil(UNIT_BLOCKS)).map(move |unit| {
            let first = unit * UNIT_BLOCKS;
            let (from, to) = (start.max(first) - first, (end - first).min(UNIT_BLOCKS));
            (unit as usize, from as u32, to as u32)
        })
    }
}

impl From<DiskExtent> for BlockRun {
    fn from(extent: DiskExtent) -> Self {
        BlockRun { block: extent.block, count: extent.count }
    }
}

/// Bytes of [`BlockSpace`] for a unit without small blocks, and a part of the bytes for a unit with
/// some.
pub(crate) const UNIT_MEMORY: u64 = 8;

/// The blocks in use.
#[derive(Clone, Debug)]
pub(crate) struct BlockSpace {
    /// For each unit one of the constants above, or its place in `bits`.
    units: Vec<u32>,
    /// Free blocks of each unit.
    room: Vec<u16>,
    /// The blocks of units of small blocks.
    bits: Vec<BlockBitmap>,
    /// Places in `bits` that no unit has.
    spare: Vec<u32>,
    /// Units that nothing uses.
    free: NumberSet,
    /// Units of small blocks by the greatest of [`ROOMS`] that they have.
    roomy: [NumberSet; ROOMS.len()],
    free_blocks: u64,
    free_units: u32,
    slot_units: u32,
    full_units: u32,
    /// Units of small blocks that are being emptied: blocks there are taken only if there are no
    /// others.
    closed: BTreeSet<usize>,
    /// The unit from which the last small block without a neighbour was taken.
    cursor: usize,
    ahead: AheadRuns,
}

/// Units by their class, and free blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct UnitCounts {
    pub(crate) free: u64,
    pub(crate) slots: u64,
    pub(crate) full: u64,
    /// Units with blocks in use and free blocks.
    pub(crate) small: u64,
    pub(crate) free_blocks: u64,
    /// Free blocks of these units.
    pub(crate) small_free_blocks: u64,
}

impl BlockSpace {
    /// Makes the space of `units` empty units.
    pub(crate) fn new(units: u32) -> Self {
        let count = units as usize;
        let mut free = NumberSet::new(count);
        (0..count).for_each(|unit| free.insert(unit));
        BlockSpace {
            units: vec![FREE; count],
            room: vec![BLOCKS as u16; count],
            bits: Vec::new(),
            spare: Vec::new(),
            free,
            roomy: std::array::from_fn(|_| NumberSet::new(count)),
            free_blocks: u64::from(units) * UNIT_BLOCKS,
            free_units: units,
            slot_units: 0,
            full_units: 0,
            closed: BTreeSet::new(),
            cursor: 0,
            ahead: AheadRuns::default(),
        }
    }

    /// Unused blocks, including the blocks ahead of files.
    pub(crate) fn free_blocks(&self) -> u64 {
        self.free_blocks + self.ahead.blocks()
    }

    /// All blocks.
    pub(crate) fn blocks(&self) -> u64 {
        self.units.len() as u64 * UNIT_BLOCKS
    }

    /// Units that nothing uses.
    pub(crate) fn free_units(&self) -> u32 {
        self.free_units
    }

    /// The units of each class.
    pub(crate) fn units(&self) -> UnitCounts {
        let [free, slots, full] =
            [self.free_units, self.slot_units, self.full_units].map(u64::from);
        let small = self.units.len() as u64 - free - slots - full;
        let free_blocks = self.free_blocks();
        let small_free_blocks = self.free_blocks - free * UNIT_BLOCKS;
        UnitCounts { free, slots, full, small, free_blocks, small_free_blocks }
    }

    /// The classes of units: name, units, free blocks in them.
    pub(crate) fn classes(&self) -> [(&'static str, u64, u64); 4] {
        let units = self.units();
        [
            ("free", units.free, units.free * UNIT_BLOCKS),
            ("slots", units.slots, 0),
            ("full", units.full, 0),
            ("small blocks", units.small, units.small_free_blocks),
        ]
    }

    /// Marks `count` units from `first` on as units of slots.
    ///
    /// # Panics
    ///
    /// When one of them is in use.
    pub(crate) fn reserve(&mut self, first: u32, count: u32) {
        for unit in first as usize..(first + count) as usize {
            assert!(self.units[unit] == FREE, "a unit of slots is in use");
            self.units[unit] = SLOTS;
            self.free.remove(unit);
        }
        self.free_units -= count;
        self.slot_units += count;
        self.free_blocks -= u64::from(count) * UNIT_BLOCKS;
    }

    /// Marks a unit of slots as free.
    ///
    /// # Panics
    ///
    /// When it holds anything else.
    pub(crate) fn give_back(&mut self, unit: u32) {
        let at = unit as usize;
        assert!(self.units[at] == SLOTS, "only a unit of slots is given back");
        self.units[at] = FREE;
        self.free.insert(at);
        self.slot_units -= 1;
        self.free_units += 1;
        self.free_blocks += UNIT_BLOCKS;
    }

    /// The first `wanted` neighbouring free units, or else the longest free run: the first unit and
    /// their number.
    pub(crate) fn find_units(&self, wanted: u32) -> Option<(u32, u32)> {
        let mut longest: Option<(u32, u32)> = None;
        let mut at = 0;
        while let Some(first) = self.free.next(at) {
            let run = first..first + wanted as usize;
            let count = run.take_while(|unit| self.free.contains(*unit)).count();
            if longest.is_none_or(|(_, longest)| count > longest as usize) {
                longest = Some((first as u32, count as u32));
            }
            if count == wanted as usize {
                break;
            }
            at = first + count.max(1);
        }
        longest
    }

    /// The units of the longest runs of free units, of which there are at most `runs`.
    pub(crate) fn longest_runs(&self, runs: usize) -> u64 {
        let mut lengths = Vec::new();
        let mut at = 0;
        while let Some(first) = self.free.next(at) {
            let length = (first..self.units.len()).take_while(|unit| self.free.contains(*unit));
            let length = length.count();
            lengths.push(length as u64);
            at = first + length;
        }
        lengths.sort_unstable_by_key(|length| Reverse(*length));
        lengths.iter().take(runs).sum()
    }

    /// Marks blocks as used. False, with nothing changed, where one is in use already or does not
    /// exist.
    pub(crate) fn claim(&mut self, run: BlockRun) -> bool {
        let is_free = |(unit, from, end): (usize, u32, u32)| match self.units[unit] {
            FREE => true,
            SLOTS | FULL => false,
            place => self.bits[place as usize].are_free(from, end),
        };
        if run.end() > self.blocks() || !run.parts().all(is_free) {
            return false;
        }
        run.parts().for_each(|part| self.set(part, true));
        true
    }

    /// Marks blocks as used, up to the first that is in use already or does not exist. False where
    /// there is one. Claims that fail take no longer than the units that they mark, however many of
    /// them there are.
    pub(crate) fn claim_until_used(&mut self, run: BlockRun) -> bool {
        if run.end() > self.blocks() {
            return false;
        }
        run.parts().all(|(unit, from, end)| {
            let unit = unit as u64 * UNIT_BLOCKS;
            self.claim(BlockRun { block: unit + u64::from(from), count: end - from })
        })
    }

    /// Frees blocks.
    pub(crate) fn free(&mut self, run: BlockRun) {
        run.parts().for_each(|part| self.set(part, false));
    }

    /// Takes up to `count` neighbouring blocks: the blocks after `near` if they are free, else in a
    /// unit of small blocks that has room for all of them, if possible the unit of `near`. 512
    /// blocks are a whole unit if one is free. At least `keep` units stay free. Blocks ahead of
    /// files are taken before scraps. `None` if nothing is left.
    pub(crate) fn take(&mut self, count: u32, near: Option<u64>, keep: u32) -> Option<BlockRun> {
        let count = count.clamp(1, BLOCKS);
        let again = |space: &mut BlockSpace| {
            space.give_back_all_ahead().then(|| space.find(count, near, keep))
        };
        let (unit, from, len) = self
            .find(count, near, keep)
            .or_else(|| again(self).flatten())
            .or_else(|| self.find_in_any_unit(count))
            .or_else(|| self.find_in_closed_unit(count))?;
        let count = count.min(len);
        self.set((unit, from, from + count), true);
        Some(BlockRun { block: unit as u64 * UNIT_BLOCKS + u64::from(from), count })
    }

    fn find(&mut self, count: u32, near: Option<u64>, keep: u32) -> Option<(usize, u32, u32)> {
        let after = near.map_or(0, |block| block + 1);
        let unit = (after / UNIT_BLOCKS) as usize;
        let fresh =
            |space: &BlockSpace| space.find_unused(unit, keep).map(|unit| (unit, 0, BLOCKS));
        (count == BLOCKS)
            .then(|| fresh(self))
            .flatten()
            .or_else(|| near.and_then(|_| self.find_beside(after, count)))
            .or_else(|| self.find_roomy(count))
            .or_else(|| fresh(self))
    }

    /// Takes `count` blocks at the begin of a unit that nothing uses, if possible the next after
    /// `near`.
    pub(crate) fn take_fresh(
        &mut self,
        count: u32,
        near: Option<u64>,
        keep: u32,
    ) -> Option<BlockRun> {
        let count = count.clamp(1, BLOCKS);
        let unit =
            self.find_unused(near.map_or(0, |block| (block / UNIT_BLOCKS) as usize), keep)?;
        self.set((unit, 0, count), true);
        Some(BlockRun { block: unit as u64 * UNIT_BLOCKS, count })
    }

    /// Free blocks right at `block`, or else as many as wanted elsewhere in its unit of small
    /// blocks.
    fn find_beside(&self, block: u64, count: u32) -> Option<(usize, u32, u32)> {
        let (unit, at) = ((block / UNIT_BLOCKS) as usize, (block % UNIT_BLOCKS) as u32);
        let bits = match *self.units.get(unit)? {
            FREE | SLOTS | FULL => return None,
            _ if self.closed.contains(&unit) => return None,
            place => &self.bits[place as usize],
        };
        let here = bits.run_at(at);
        let (from, len) = if here > 0 { (at, here) } else { bits.fit(count, at)? };
        (here > 0 || len >= count).then_some((unit, from, len))
    }

    /// Free blocks of a unit of small blocks: the unit of the last search, or one with much room.
    fn find_roomy(&mut self, count: u32) -> Option<(usize, u32, u32)> {
        let enough = count.min(ROOMS[ROOMS.len() - 1]);
        let is_small = |unit: &u32| !matches!(*unit, FREE | SLOTS | FULL);
        let last = self.units.get(self.cursor).filter(|unit| is_small(unit));
        let last = last.filter(|_| !self.closed.contains(&self.cursor));
        let last = last.filter(|_| u32::from(self.room[self.cursor]) >= enough);
        let least = ROOMS.partition_point(|room| *room < enough);
        let unit = last.map(|_| self.cursor).or_else(|| self.next_of(least..ROOMS.len()))?;
        self.fit(unit, count)
    }

    /// Free blocks of any unit of small blocks.
    fn find_in_any_unit(&mut self, count: u32) -> Option<(usize, u32, u32)> {
        let unit = self.next_of(0..ROOMS.len())?;
        self.fit(unit, count)
    }

    /// Free blocks of a unit that is being emptied: promised blocks must be available.
    fn find_in_closed_unit(&self, count: u32) -> Option<(usize, u32, u32)> {
        let unit = *self.closed.iter().find(|unit| self.room[**unit] > 0)?;
        let (from, len) = self.bits[self.units[unit] as usize].fit(count, 0)?;
        Some((unit, from, len))
    }

    /// Up to `count` units of small blocks with the most free blocks, in order. Each has at least
    /// `least` free blocks. Their used blocks together are at most `most`, and fit well into all
    /// other units. The units in `without` are excluded.
    pub(crate) fn find_emptiest(
        &self,
        count: usize,
        (least, most): (u32, u64),
        without: &BTreeSet<usize>,
    ) -> Vec<usize> {
        let kept = |unit: &usize| COPIES.iter().any(|copy| copy / UNIT_BLOCKS == *unit as u64);
        let is_small = |unit: &usize| !matches!(self.units[*unit], FREE | SLOTS | FULL);
        let all = (0..self.units.len()).filter(|unit| u32::from(self.room[*unit]) >= least);
        let all = all.filter(|unit| is_small(unit) && !kept(unit) && !without.contains(unit));
        let mut all: Vec<usize> = all.filter(|unit| !self.closed.contains(unit)).collect();
        all.sort_unstable_by_key(|unit| (Reverse(self.room[*unit]), *unit));
        let (mut held, mut room) = (0, self.units().small_free_blocks);
        let fits = |unit: &usize| {
            let free = u64::from(self.room[*unit]);
            held += UNIT_BLOCKS - free;
            room = room.saturating_sub(free);
            held <= most && held <= room / 4 * 3
        };
        let mut chosen: Vec<usize> = all.into_iter().take(count).take_while(fits).collect();
        chosen.sort_unstable();
        chosen
    }

    /// All units of small blocks, in order.
    #[cfg(test)]
    pub(crate) fn small_units(&self) -> Vec<usize> {
        let is_small = |unit: &usize| !matches!(self.units[*unit], FREE | SLOTS | FULL);
        (0..self.units.len()).filter(is_small).collect()
    }

    /// Closes these units of small blocks: blocks there are taken only if there are no others.
    pub(crate) fn close(&mut self, units: &[usize]) {
        for unit in units.iter().copied() {
            self.roomy.iter_mut().for_each(|set| set.remove(unit));
            self.closed.insert(unit);
        }
    }

    /// Reopens closed units. Returns the units that did not become free.
    pub(crate) fn reopen(&mut self, units: &[usize]) -> Vec<usize> {
        let left = units.iter().copied().filter(|unit| self.closed.remove(unit));
        let left: Vec<usize> = left.collect();
        for unit in left.iter().copied() {
            // The unit is listed like a unit that was full until now.
            self.list(unit, 0, u32::from(self.room[unit]));
        }
        left
    }

    /// A unit of the last of these sets that is not empty.
    fn next_of(&self, sets: Range<usize>) -> Option<usize> {
        self.roomy[sets].iter().rev().find_map(|set| set.next_around(self.cursor))
    }

    fn fit(&mut self, unit: usize, count: u32) -> Option<(usize, u32, u32)> {
        self.cursor = unit;
        let (from, len) = self.bits[self.units[unit] as usize].fit(count, 0)?;
        Some((unit, from, len))
    }

    /// A unit that nothing uses, the first from `unit` on.
    fn find_unused(&self, unit: usize, keep: u32) -> Option<usize> {
        (self.free_units > keep).then(|| self.free.next_around(unit)).flatten()
    }

    /// Marks blocks of a unit as used or free.
    fn set(&mut self, (unit, from, end): (usize, u32, u32), used: bool) {
        let (old, count) = (self.units[unit], end - from);
        let mut bits = match old {
            FREE => BlockBitmap::FREE,
            FULL => BlockBitmap::FULL,
            SLOTS => return,
            place => self.bits[place as usize],
        };
        debug_assert!(
            if used { bits.are_free(from, end) } else { bits.are_used(from, end) },
            "blocks {from} to {end} of unit {unit} are taken or given back twice"
        );
        bits.set(from, end, used);
        let room = u32::from(self.room[unit]);
        let left = if used { room - count } else { room + count };
        self.room[unit] = left as u16;
        self.free_blocks = self.free_blocks + u64::from(left) - u64::from(room);
        let new = self.store_bitmap(old, left, bits);
        self.units[unit] = new;
        self.full_units = self.full_units + u32::from(new == FULL) - u32::from(old == FULL);
        self.list(unit, room, left);
    }

    /// Keeps the bits of a unit with `left` free blocks, if it needs some.
    fn store_bitmap(&mut self, old: u32, left: u32, bits: BlockBitmap) -> u32 {
        let had = !matches!(old, FREE | FULL);
        let place = match left {
            0 => FULL,
            BLOCKS => FREE,
            _ if had => old,
            _ => self.spare.pop().unwrap_or_else(|| {
                self.bits.push(BlockBitmap::FREE);
                self.bits.len() as u32 - 1
            }),
        };
        match place {
            FULL | FREE if had => self.spare.push(old),
            FULL | FREE => {}
            place => self.bits[place as usize] = bits,
        }
        place
    }

    /// Moves a unit from the set for `room` free blocks to the set for `left`.
    fn list(&mut self, unit: usize, room: u32, left: u32) {
        if left == BLOCKS {
            self.closed.remove(&unit);
        }
        if (room == BLOCKS) != (left == BLOCKS) {
            match left {
                BLOCKS => self.free.insert(unit),
                _ => self.free.remove(unit),
            }
            self.free_units =
                self.free_units + u32::from(left == BLOCKS) - u32::from(room == BLOCKS);
        }
        let set =
            |room: u32| (room < BLOCKS).then(|| ROOMS.iter().rposition(|least| room >= *least));
        let (old, new) = (set(room).flatten(), set(left).flatten());
        if old != new {
            old.into_iter().for_each(|set| self.roomy[set].remove(unit));
            let open = new.filter(|_| !self.closed.contains(&unit));
            open.into_iter().for_each(|set| self.roomy[set].insert(unit));
        }
    }
}
