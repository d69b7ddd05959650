//! The slots of all chunks: the content of each slot, and the time from which it may be
//! overwritten.

use std::collections::BTreeMap;

use smallvec::SmallVec;

use crate::format::UNIT_BLOCKS;
use crate::format::superblock::SlotChunk;

/// No inode.
pub(super) const NOBODY: u64 = 0;

/// Slots of a unit.
const UNIT_SLOTS: usize = UNIT_BLOCKS as usize;

/// Neighbouring free slots that are preferred to shorter runs.
const LONG: usize = 64;

/// Blocks of slots.
pub(super) type SlotBlocks = SmallVec<[u64; 4]>;

/// A slot. It is used again when it is neither live nor being written, and the group that freed it
/// is known to be durable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct InodeSlot {
    /// The inode whose copy lies here, current or stale, or is being written.
    pub(crate) owner: u64,
    /// The content of the slot counts.
    pub(crate) live: bool,
    /// A write to it is not durable yet.
    pub(crate) writing: bool,
}

impl InodeSlot {
    /// The inode whose copy lies in this slot.
    pub(crate) fn owner(&self) -> Option<u64> {
        (self.owner != NOBODY).then_some(self.owner)
    }

    fn is_idle(&self) -> bool {
        !self.live && !self.writing
    }

    /// Packs the slot into a word. Numbers of inodes leave two bits for the flags.
    fn pack(self) -> u64 {
        self.owner << 2 | u64::from(self.live) << 1 | u64::from(self.writing)
    }

    fn unpack(word: u64) -> Self {
        InodeSlot { owner: word >> 2, live: word & 2 != 0, writing: word & 1 != 0 }
    }
}

/// All slots, by block: 8 bytes and a bit for each.
#[derive(Debug, Default)]
pub(crate) struct SlotTable {
    chunks: Vec<SlotRange>,
    /// The place where the search for free slots continues: a chunk and a slot in the chunk.
    cursor: (usize, usize),
    /// Slots that may be used, counted from the first of each chunk.
    usable: usize,
    /// Slots with their bit set.
    free: usize,
    /// Slots that were freed, by the group that freed them, until that group is known to be
    /// durable.
    freed: BTreeMap<u64, SlotBlocks>,
    /// Units that are to become empty, and whose slots are not taken. The bits mark the slots that
    /// may be overwritten.
    closed: BTreeMap<u32, SlotBitmap>,
}

/// A bit for each slot of a unit.
type SlotBitmap = [u64; UNIT_SLOTS / 64];

#[derive(Debug)]
struct SlotRange {
    first: u64,
    slots: Vec<u64>,
    /// A bit for each slot that may be overwritten.
    free: Vec<u64>,
}

impl SlotTable {
    /// The slots of `chunks`, all empty. The first `usable` slots of each chunk may be used.
    pub(crate) fn new(chunks: &[SlotChunk], usable: usize) -> Self {
        let mut slots = SlotTable { usable, ..SlotTable::default() };
        chunks.iter().for_each(|chunk| slots.add(chunk));
        slots
    }

    /// Adds an empty chunk.
    pub(crate) fn add(&mut self, chunk: &SlotChunk) {
        let first = u64::from(chunk.first_unit) * UNIT_BLOCKS;
        let count = (u64::from(chunk.units) * UNIT_BLOCKS) as usize;
        // A unit has a whole number of words.
        let mut run = SlotRange { first, slots: vec![0; count], free: vec![0; count / 64] };
        (0..count.min(self.usable)).for_each(|at| run.set_free(at, true));
        self.free += count.min(self.usable);
        let at = self.chunks.partition_point(|other| other.first < first);
        self.chunks.insert(at, run);
        self.cursor = (at, 0);
    }

    /// The slot at `block`.
    ///
    /// # Panics
    ///
    /// When no chunk has this block.
    pub(crate) fn get(&self, block: u64) -> InodeSlot {
        let (chunk, at) = self.find_place(block);
        InodeSlot::unpack(self.chunks[chunk].slots[at])
    }

    /// Sets the slot at `block`. A slot that holds something, or is being written, is not free.
    ///
    /// # Panics
    ///
    /// When no chunk has this block.
    pub(crate) fn set(&mut self, block: u64, slot: InodeSlot) {
        let (chunk, at) = self.find_place(block);
        let run = &mut self.chunks[chunk];
        run.slots[at] = slot.pack();
        if !slot.is_idle() && run.is_free(at) {
            run.set_free(at, false);
            self.free -= 1;
        }
    }

    /// Records that the content of the slot does not count from `group` on.
    pub(crate) fn release(&mut self, block: u64, group: u64) {
        self.set(block, InodeSlot { live: false, ..self.get(block) });
        if self.find_place(block).1 < self.usable {
            self.freed.entry(group).or_default().push(block);
        }
    }

    /// Replaces the slot at `block` by the slot at `other`. The slot at `block` is not used again.
    pub(crate) fn replace(&mut self, block: u64, other: u64) {
        let slot = self.get(block);
        self.set(other, InodeSlot { writing: true, ..slot });
        self.set(block, InodeSlot { live: false, writing: true, ..slot });
        let freed = self.freed.values_mut().flatten();
        freed.filter(|freed| **freed == block).for_each(|freed| *freed = other);
    }

    /// Takes `count` slots that may be overwritten when `durable` is the newest group that the
    /// device states to be durable. `None` if there are fewer. Long runs come first: their slots
    /// are written together.
    pub(crate) fn take(&mut self, count: usize, durable: u64) -> Option<SlotBlocks> {
        self.settle(durable);
        if self.free < count {
            return None;
        }
        let mut found = SlotBlocks::with_capacity(count);
        for least in [count.min(LONG), 1] {
            self.take_runs(least, count, &mut found);
        }
        debug_assert_eq!(found.len(), count, "as many as are counted");
        Some(found)
    }

    /// Takes `count` slots as [`take`](SlotTable::take) does, in ascending order, and only such for
    /// which `fits` is true.
    pub(crate) fn take_where(
        &mut self,
        count: usize,
        durable: u64,
        fits: &dyn Fn(&u64) -> bool,
    ) -> Option<Vec<u64>> {
        self.settle(durable);
        let free = self.chunks.iter().flat_map(|run| {
            let slots = (0..run.slots.len()).filter(|at| run.is_free(*at));
            slots.map(|at| run.first + at as u64)
        });
        let found: Vec<u64> = free.filter(fits).take(count).collect();
        if found.len() < count {
            return None;
        }
        for block in &found {
            let (chunk, at) = self.find_place(*block);
            self.chunks[chunk].set_free(at, false);
        }
        self.free -= count;
        Some(found)
    }

    /// All slots.
    pub(crate) fn count(&self) -> usize {
        self.chunks.iter().map(|run| run.slots.len()).sum()
    }

    /// True if `count` slots, when they are many, would lie in short runs: each run is a write of
    /// its own on the device.
    pub(crate) fn is_scattered(&mut self, count: usize, durable: u64) -> bool {
        if count < LONG || self.usable < usize::MAX {
            return false;
        }
        self.settle(durable);
        let mut long = 0;
        // Neighbouring free slots lie behind the cursor: slots before the cursor have been taken.
        let (from, _) = self.cursor;
        for run in self.chunks[from..].iter().chain(&self.chunks[..from]) {
            let mut at = 0;
            while let Some((start, len)) = run.next_free(at) {
                long += if len >= LONG { len } else { 0 };
                if long >= count {
                    return false;
                }
                at = start + len;
            }
        }
        true
    }

    /// Slots that may be overwritten, as far as that was looked up.
    pub(crate) fn free(&self) -> usize {
        self.free
    }

    /// True if [`take`](SlotTable::take) finds so many slots with this `durable` group.
    pub(crate) fn has(&self, count: usize, durable: u64) -> bool {
        let freed = self.freed.range(..=durable).flat_map(|(_, blocks)| blocks);
        let freed = freed.filter(|block| !self.closed.contains_key(&unit_of(**block)));
        self.free + freed.filter(|block| self.get(**block).is_idle()).count() >= count
    }

    /// Marks the slots that groups up to `durable` freed as free to be overwritten.
    fn settle(&mut self, durable: u64) {
        let due: SmallVec<[u64; 8]> =
            self.freed.range(..=durable).map(|(group, _)| *group).collect();
        due.into_iter().for_each(|group| self.settle_group(group));
    }

    fn settle_group(&mut self, group: u64) {
        let mut waiting = SlotBlocks::new();
        for block in self.freed.remove(&group).unwrap_or_default() {
            let (chunk, at) = self.find_place(block);
            let run = &mut self.chunks[chunk];
            let slot = InodeSlot::unpack(run.slots[at]);
            if let Some(words) = self.closed.get_mut(&unit_of(block)).filter(|_| slot.is_idle()) {
                let at = at % UNIT_SLOTS;
                words[at / 64] |= 1 << (at % 64);
            } else if slot.is_idle() && !run.is_free(at) {
                run.set_free(at, true);
                self.free += 1;
            } else if slot.writing && !slot.live {
                waiting.push(block);
            }
        }
        if !waiting.is_empty() {
            self.freed.insert(group, waiting);
        }
    }

    /// Takes runs of `least` free slots or more until there are `count`, once around from the
    /// cursor.
    fn take_runs(&mut self, least: usize, count: usize, found: &mut SlotBlocks) {
        let (begin, mut at) = self.cursor;
        let chunks = self.chunks.len();
        // The first chunk is searched again, for the slots before the cursor.
        for step in 0..=chunks {
            let chunk = (begin + step) % chunks;
            let run = &mut self.chunks[chunk];
            while found.len() < count
                && let Some((start, len)) = run.next_free(at)
            {
                at = start + len;
                if len >= least.min(count - found.len()) {
                    let len = len.min(count - found.len());
                    at = start + len;
                    (start..at).for_each(|at| run.set_free(at, false));
                    self.free -= len;
                    found.extend((run.first + start as u64..).take(len));
                    self.cursor = (chunk, at);
                }
            }
            if found.len() == count {
                return;
            }
            at = 0;
        }
    }

    /// Closes up to `most` units with the fewest current copies, at most `live` in each. No slot of
    /// a closed unit is taken before [`reopen`](SlotTable::reopen). With `by_chunk`, units of small
    /// chunks come first. Returns the units, and the inodes whose slots lie there. Units with
    /// removal blocks, or with slots that are being written, are left out.
    pub(crate) fn close_units(
        &mut self,
        (most, live): (usize, usize),
        by_chunk: bool,
        durable: u64,
    ) -> (Vec<u32>, Vec<u64>) {
        self.settle(durable);
        let mut units = Vec::new();
        for run in self.chunks.iter().filter(|_| self.usable == usize::MAX) {
            let chunk = if by_chunk { run.slots.len() } else { 0 };
            for (nth, slots) in run.slots.chunks(UNIT_SLOTS).enumerate() {
                let unit = unit_of(run.first) + nth as u32;
                let count = live_inodes(slots).filter(|count| (1..=live).contains(count));
                units.extend(count.map(|count| (chunk, count, unit)));
            }
        }
        units.retain(|(.., unit)| !self.closed.contains_key(unit));
        units.sort_unstable();
        units.truncate(most);
        let mut inos = Vec::new();
        for (.., unit) in &units {
            let (chunk, at) = self.find_place(u64::from(*unit) * UNIT_BLOCKS);
            let run = &mut self.chunks[chunk];
            let mut words = SlotBitmap::default();
            words.swap_with_slice(&mut run.free[at / 64..][..UNIT_SLOTS / 64]);
            self.free -= words.iter().map(|word| word.count_ones() as usize).sum::<usize>();
            self.closed.insert(*unit, words);
            let slots = run.slots[at..][..UNIT_SLOTS].iter().map(|word| InodeSlot::unpack(*word));
            inos.extend(slots.filter(|slot| slot.live).filter_map(|slot| slot.owner()));
        }
        (units.into_iter().map(|(.., unit)| unit).collect(), inos)
    }

    /// Reopens closed units: their slots may be taken again.
    pub(crate) fn reopen(&mut self, units: &[u32]) {
        for unit in units {
            let Some(words) = self.closed.remove(unit) else { continue };
            let (chunk, at) = self.find_place(u64::from(*unit) * UNIT_BLOCKS);
            self.chunks[chunk].free[at / 64..][..UNIT_SLOTS / 64].copy_from_slice(&words);
            self.free += words.iter().map(|word| word.count_ones() as usize).sum::<usize>();
        }
    }

    /// Units that are closed.
    pub(crate) fn count_closed_units(&self) -> usize {
        self.closed.len()
    }

    /// Units all of whose slots may be overwritten when `durable` is the newest group that the
    /// device states to be durable: closed units, and others from the last on, but only so many
    /// that `keep` such slots remain.
    pub(crate) fn empty_units(&mut self, keep: usize, durable: u64) -> Vec<u32> {
        self.settle(durable);
        let spare = self.free.saturating_sub(keep) / UNIT_SLOTS;
        let empty = self.chunks.iter().rev().flat_map(|run| {
            let units = run.free.chunks(UNIT_SLOTS / 64).enumerate().rev();
            let empty = units.filter(|(_, words)| words.iter().all(|word| *word == u64::MAX));
            empty.map(|(nth, _)| (run.first / UNIT_BLOCKS) as u32 + nth as u32)
        });
        let is_empty = |words: &SlotBitmap| words.iter().all(|word| *word == u64::MAX);
        let closed = self.closed.iter().filter(|(_, words)| is_empty(words)).map(|(unit, _)| *unit);
        closed.chain(empty.take(spare)).collect()
    }

    /// Removes a unit, all of whose slots may be overwritten. Returns its slots that hold a copy of
    /// an inode, each with its owner.
    pub(crate) fn remove_unit(&mut self, unit: u32) -> Vec<(u64, u64)> {
        let first = u64::from(unit) * UNIT_BLOCKS;
        let (chunk, at) = self.find_place(first);
        let SlotRange { first: begin, mut slots, mut free } = self.chunks.remove(chunk);
        let (after, gone) = (slots.split_off(at + UNIT_SLOTS), slots.split_off(at));
        let (free_after, _) = (free.split_off((at + UNIT_SLOTS) / 64), free.split_off(at / 64));
        let rest = SlotRange { first: first + UNIT_BLOCKS, slots: after, free: free_after };
        let parts = [SlotRange { first: begin, slots, free }, rest];
        let parts = parts.into_iter().filter(|run| !run.slots.is_empty());
        self.chunks.splice(chunk..chunk, parts);
        if self.closed.remove(&unit).is_none() {
            self.free -= UNIT_SLOTS;
        }
        self.cursor = (0, 0);
        let is_gone = |block: &u64| (first..first + UNIT_BLOCKS).contains(block);
        self.freed.values_mut().for_each(|blocks| blocks.retain(|block| !is_gone(block)));
        let owned = (first..).zip(gone).map(|(block, word)| (block, InodeSlot::unpack(word).owner));
        owned.filter(|(_, owner)| *owner != NOBODY).collect()
    }

    /// The chunk of a block, and its place there.
    fn find_place(&self, block: u64) -> (usize, usize) {
        let after = self.chunks.partition_point(|run| run.first <= block);
        let chunk = after.checked_sub(1);
        let place = chunk.map(|chunk| (chunk, (block - self.chunks[chunk].first) as usize));
        let place = place.filter(|(chunk, at)| *at < self.chunks[*chunk].slots.len());
        place.unwrap_or_else(|| panic!("block {block} is no slot"))
    }
}

fn unit_of(block: u64) -> u32 {
    (block / UNIT_BLOCKS) as u32
}

/// The number of slots with current copies of inodes. `None` if some slots cannot move: removal
/// blocks, and slots that are being written.
fn live_inodes(slots: &[u64]) -> Option<usize> {
    let mut count = 0;
    for slot in slots.iter().map(|word| InodeSlot::unpack(*word)) {
        if slot.writing || slot.live && slot.owner == NOBODY {
            return None;
        }
        count += usize::from(slot.live);
    }
    Some(count)
}

impl SlotRange {
    fn is_free(&self, at: usize) -> bool {
        self.free[at / 64] >> (at % 64) & 1 != 0
    }

    fn set_free(&mut self, at: usize, free: bool) {
        let bit = 1 << (at % 64);
        match free {
            true => self.free[at / 64] |= bit,
            false => self.free[at / 64] &= !bit,
        }
    }

    /// The first run of free slots from `at` on.
    fn next_free(&self, at: usize) -> Option<(usize, usize)> {
        let start = self.next(at, 0).filter(|start| *start < self.slots.len())?;
        let end = self.next(start, u64::MAX).unwrap_or(self.slots.len());
        Some((start, end - start))
    }

    /// The first slot from `at` on whose bit, after the exclusive or with `mask`, is set.
    fn next(&self, at: usize, mask: u64) -> Option<usize> {
        let first = (self.free.get(at / 64)? ^ mask) & u64::MAX << (at % 64);
        let rest = self.free[at / 64 + 1..].iter().map(|word| word ^ mask);
        let mut words = std::iter::once(first).chain(rest).enumerate();
        let (word, bits) = words.find(|(_, bits)| *bits != 0)?;
        Some((at / 64 + word) * 64 + bits.trailing_zeros() as usize)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slots(usable: usize) -> SlotTable {
        let chunk = |first_unit, units| SlotChunk { first_unit, units, key: 1 };
        SlotTable::new(&[chunk(9, 1), chunk(1, 2)], usable)
    }

    fn live(slots: &mut SlotTable, blocks: &[u64]) {
        let slot = InodeSlot { owner: 7, live: true, writing: false };
        blocks.iter().for_each(|block| slots.set(*block, slot));
    }

    #[test]
    fn every_free_slot_is_found_once_and_long_runs_come_first() {
        let mut slots = slots(usize::MAX);
        let all = slots.take(3 * 512, 0).unwrap();
        live(&mut slots, &all);
        assert_eq!(slots.take(1, u64::MAX - 1), None);
        // Scattered slots, and a long run.
        let scattered: Vec<u64> = (512..1024).step_by(2).collect();
        let run: Vec<u64> = (9 * 512 + 100..9 * 512 + 300).collect();
        scattered.iter().chain(&run).for_each(|block| slots.release(*block, 5));
        assert!(!slots.has(1, 4) && slots.has(456, 5) && !slots.has(457, 5));
        assert_eq!(slots.take(1, 4), None);
        assert_eq!(slots.take(200, 5).unwrap().to_vec(), run);
        let mut rest = slots.take(256, 5).unwrap();
        rest.sort_unstable();
        assert_eq!(rest.to_vec(), scattered);
        assert_eq!(slots.take(1, 5), None);
    }

    #[test]
    fn many_slots_are_scattered_if_long_runs_are_too_few() {
        let mut slots = slots(usize::MAX);
        let all = slots.take(3 * 512, 0).unwrap();
        live(&mut slots, &all);
        (512..1024).step_by(2).for_each(|block| slots.release(block, 5));
        assert!(slots.is_scattered(LONG, 5) && !slots.is_scattered(LONG - 1, 5));
        // A run that takes all of them.
        (9 * 512..9 * 512 + 100).for_each(|block| slots.release(block, 6));
        assert!(!slots.is_scattered(100, 6) && slots.is_scattered(101, 6));
    }

    #[test]
    fn a_unit_goes_when_all_its_slots_may_be_overwritten() {
        let mut slots = slots(usize::MAX);
        assert_eq!(slots.empty_units(0, 0), [9, 2, 1]);
        assert_eq!((slots.empty_units(512, 0), slots.empty_units(1025, 0)), (vec![9, 2], vec![]));
        live(&mut slots, &[9 * 512, 512, 1023]);
        assert_eq!(slots.empty_units(0, 0), [2]);
        slots.release(9 * 512, 4);
        assert_eq!((slots.empty_units(0, 3), slots.empty_units(0, 4)), (vec![2], vec![9, 2]));
        assert_eq!(slots.remove_unit(9), [(9 * 512, 7)]);
        assert_eq!(slots.remove_unit(2), []);
        // The remaining slots are found, and no others.
        slots.release(1023, 5);
        let mut left = slots.take(511, 5).unwrap();
        left.sort_unstable();
        assert_eq!(left.to_vec(), (513..1024).collect::<Vec<u64>>());
        assert_eq!(slots.take(1, 9), None);
    }

    #[test]
    fn nobody_takes_slots_of_a_closed_unit_and_it_goes_when_it_is_empty() {
        let mut slots = slots(usize::MAX);
        live(&mut slots, &[9 * 512, 9 * 512 + 1, 512]);
        // A removal block cannot move, and neither can a slot that is being written.
        slots.set(2 * 512, InodeSlot { owner: NOBODY, live: true, writing: false });
        assert_eq!(slots.close_units((8, 1), false, 0), (vec![1], vec![7]));
        assert_eq!(slots.close_units((8, 8), false, 0), (vec![9], vec![7, 7]));
        assert_eq!((slots.count_closed_units(), slots.free()), (2, 511));
        let taken = slots.take(511, 0).unwrap();
        assert!(taken.iter().all(|block| unit_of(*block) == 2));
        assert_eq!(slots.take(1, 9), None);
        slots.release(512, 3);
        slots.release(9 * 512, 3);
        // Slots that are freed in a closed unit cannot be taken.
        assert!(!slots.has(1, 3));
        assert_eq!(slots.empty_units(0, 3), [1]);
        slots.remove_unit(1);
        slots.reopen(&[9, 1]);
        assert_eq!((slots.count_closed_units(), slots.free()), (0, 511));
        assert_eq!(slots.take(511, 3).unwrap().len(), 511);
    }

    #[test]
    fn units_of_small_chunks_leave_first_where_chunks_are_many() {
        let mut slots = slots(usize::MAX);
        live(&mut slots, &[9 * 512, 9 * 512 + 1, 512, 1024]);
        assert_eq!(slots.close_units((1, 8), true, 0).0, [9]);
        assert_eq!(slots.close_units((1, 8), false, 0).0, [1]);
    }

    #[test]
    fn the_middle_of_a_chunk_goes() {
        let mut slots =
            SlotTable::new(&[SlotChunk { first_unit: 4, units: 3, key: 1 }], usize::MAX);
        slots.remove_unit(5);
        let mut left = slots.take(1024, 0).unwrap();
        left.sort_unstable();
        assert_eq!(left.to_vec(), (4 * 512..5 * 512).chain(6 * 512..7 * 512).collect::<Vec<u64>>());
        assert_eq!(slots.get(6 * 512).owner(), None);
    }

    #[test]
    fn a_slot_that_is_being_written_waits_and_one_that_was_replaced_is_gone() {
        let mut slots = slots(2);
        let all = slots.take(4, 0).unwrap();
        assert_eq!(slots.take(1, 0), None);
        let writing = InodeSlot { owner: 7, live: true, writing: true };
        all.iter().for_each(|block| slots.set(*block, writing));
        slots.release(all[0], 3);
        assert!(!slots.has(1, 3));
        assert_eq!(slots.take(1, 3), None);
        slots.set(all[0], InodeSlot { writing: false, ..slots.get(all[0]) });
        assert!(slots.has(1, 3));
        let other = slots.take(1, 3).unwrap()[0];
        assert_eq!(other, all[0]);
        slots.release(all[1], 4);
        slots.replace(all[1], other);
        slots.set(other, InodeSlot { writing: false, ..slots.get(other) });
        assert_eq!((slots.take(1, 4), slots.take(1, 4)), (Some(smallvec::smallvec![other]), None));
    }
}
