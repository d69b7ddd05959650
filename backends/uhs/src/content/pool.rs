//! The blocks and the memory that all contents share. No other lock is taken under its locks.

use std::collections::{BTreeSet, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use defuse_block::MemoryRegion;

use super::batches::BatchTracker;
use super::frames::FrameCache;
use crate::commit::CommitRules;
use crate::format::UNIT_BLOCKS;
use crate::format::chunks::table_blocks;
use crate::space::{BlockRun, BlockSpace};

/// Units that data leaves to inodes.
pub(crate) const KEEP_UNITS: u32 = 2;

/// Blocks that the records of inodes may need beside the data.
const KEEP_BLOCKS: u64 = 128;

/// The most blocks that could not be written and are withheld. With more, the device is broken, and
/// the oldest are given up.
const BAD: usize = 512;

/// The number of free units below which no file reserves blocks ahead while inodes are made.
const SHORT: u64 = 8;

/// The share of all blocks that stays free beside the blocks ahead of files.
const PLENTY: u64 = 16;

/// The part of the free blocks that may wait for groups to be durable.
const WAITING: u64 = 8;

/// Memory of an inode without extended attributes, further names, and extents outside of its slot:
/// its record, a name of the usual length, and its places in three tables.
pub(crate) const INODE_MEMORY: u64 = 256;

/// Blocks in use, promises, and counts of pages.
pub(crate) struct BlockPool {
    space: Mutex<BlockSpace>,
    /// Blocks that nothing uses once the running group is durable.
    abandoned: Mutex<Vec<BlockRun>>,
    /// Blocks that could not be written, and that are not allocated again.
    bad: Mutex<VecDeque<BlockRun>>,
    /// Blocks that pages without one will take, and records.
    promised: AtomicU64,
    /// Blocks that are free once groups are durable.
    waiting: AtomicU64,
    /// Blocks that groups gave back.
    released: AtomicU64,
    /// Inodes, slots, and chunks of slots that there can still be.
    inodes: AtomicU64,
    slots: AtomicU64,
    chunks: AtomicU64,
    /// Memory of names but the first, attributes and extents, and the memory that the index may
    /// take.
    records: AtomicU64,
    index_limit: AtomicU64,
    /// Pages that differ from the device.
    dirty: AtomicUsize,
    batches: BatchTracker,
    /// The newest batch whose inodes are durable.
    durable: AtomicU64,
    /// Records of many extents lie in leaves.
    has_trees: AtomicBool,
    /// Files may have blocks ahead. Changes under the lock of the space.
    has_ahead: AtomicBool,
    memory: OnceLock<FrameCache>,
    /// Memory for records that groups write, once they have written some.
    pub(super) records_memory: Mutex<Option<Arc<MemoryRegion>>>,
    rules: OnceLock<CommitRules>,
    /// Promises that are kept before all are refused.
    #[cfg(test)]
    refused_after: AtomicU64,
}

impl BlockPool {
    /// The blocks of `space`, without memory for pages.
    pub(crate) fn new(space: BlockSpace) -> Self {
        BlockPool {
            space: Mutex::new(space),
            abandoned: Mutex::default(),
            bad: Mutex::default(),
            promised: AtomicU64::new(0),
            waiting: AtomicU64::new(0),
            released: AtomicU64::new(0),
            inodes: AtomicU64::new(0),
            slots: AtomicU64::new(0),
            chunks: AtomicU64::new(0),
            records: AtomicU64::new(0),
            index_limit: AtomicU64::new(u64::MAX),
            dirty: AtomicUsize::new(0),
            batches: BatchTracker::default(),
            durable: AtomicU64::new(0),
            has_trees: AtomicBool::new(false),
            has_ahead: AtomicBool::new(false),
            memory: OnceLock::new(),
            records_memory: Mutex::default(),
            rules: OnceLock::new(),
            #[cfg(test)]
            refused_after: AtomicU64::new(u64::MAX),
        }
    }

    /// Adds memory for `cache` pages, and for `dirty` pages more that differ from the device.
    ///
    /// # Errors
    ///
    /// Fails with the errors of [`MemoryRegion::new`](defuse_block::MemoryRegion::new).
    pub(crate) fn add_memory(&self, cache: usize, dirty: usize) -> defuse_block::Result<()> {
        let memory = FrameCache::new(cache, dirty)?;
        let _ = self.memory.set(memory);
        Ok(())
    }

    /// The memory of pages; none in a file system that is only looked at.
    pub(super) fn memory(&self) -> Option<&FrameCache> {
        self.memory.get()
    }

    /// The blocks in use.
    pub(crate) fn space(&self) -> MutexGuard<'_, BlockSpace> {
        self.space.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sets the rules that tests switch off.
    pub(crate) fn set_rules(&self, rules: CommitRules) {
        let _ = self.rules.set(rules);
    }

    pub(crate) fn commit_rules(&self) -> CommitRules {
        *self.rules.get().unwrap_or(&CommitRules::ALL)
    }

    /// The number of all blocks, and of the blocks that files can still take. Some of these become
    /// free only after a commit, for which an operation without space waits.
    pub(crate) fn count_blocks(&self) -> (u64, u64) {
        let space = self.space();
        let free = space.free_blocks() + self.waiting.load(Ordering::Relaxed);
        (space.blocks(), free.saturating_sub(self.reserved_blocks(&space)))
    }

    fn free_of(&self, space: &BlockSpace) -> u64 {
        space.free_blocks().saturating_sub(self.reserved_blocks(space))
    }

    /// Blocks that are kept for slots and for promises.
    fn reserved_blocks(&self, space: &BlockSpace) -> u64 {
        let units = u64::from(self.reserved_units(space));
        units * UNIT_BLOCKS + KEEP_BLOCKS + self.promised.load(Ordering::Relaxed)
    }

    /// Units that data leaves to slots: units for inodes that have no slot yet, and some more.
    pub(crate) fn reserved_units(&self, _: &BlockSpace) -> u32 {
        let slots = self.slots.load(Ordering::Relaxed);
        let missing = self.inodes.load(Ordering::Relaxed).saturating_sub(slots);
        KEEP_UNITS + u32::try_from(missing.div_ceil(UNIT_BLOCKS)).unwrap_or(u32::MAX / 2)
    }

    /// Free blocks without the units of slots.
    fn free_for_blocks(&self, space: &BlockSpace) -> u64 {
        let units = self.reserved_units(space).min(space.free_units());
        space.free_blocks() - u64::from(units) * UNIT_BLOCKS
    }

    /// Sets blocks aside. `sure` also takes blocks that are kept for operations that must succeed
    /// on a full device. False if too few are left.
    pub(crate) fn promise(&self, count: u64, sure: bool) -> bool {
        if count == 0 {
            return true;
        }
        #[cfg(test)]
        if self.is_refused() {
            return false;
        }
        let space = self.space();
        let promised = self.promised.load(Ordering::Relaxed);
        let free = match sure {
            true => self.free_for_blocks(&space).saturating_sub(promised),
            false => self.free_of(&space),
        };
        let has_space = free >= count;
        self.promised.fetch_add(if has_space { count } else { 0 }, Ordering::Relaxed);
        has_space
    }

    /// After so many promises that are kept all are refused.
    #[cfg(test)]
    pub(crate) fn refuse_after(&self, promises: u64) {
        self.refused_after.store(promises, Ordering::Relaxed);
    }

    /// Promises that are still kept then.
    #[cfg(test)]
    pub(crate) fn remaining_promises(&self) -> Option<u64> {
        Some(self.refused_after.load(Ordering::Relaxed)).filter(|left| *left < u64::MAX)
    }

    #[cfg(test)]
    fn is_refused(&self) -> bool {
        let less = |left: u64| if left == u64::MAX { Some(left) } else { left.checked_sub(1) };
        let update = self.refused_after.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less);
        update.is_err()
    }

    /// Sets `new` blocks aside in the place of `old` ones. The caller knows that they are there.
    pub(super) fn exchange(&self, old: u64, new: u64) {
        self.promised.fetch_add(new, Ordering::Relaxed);
        self.unpromise(old);
    }

    /// True if promised blocks are only free after a group becomes durable, or if so many blocks
    /// wait for groups that new data would spread over more units.
    pub(crate) fn needs_durable(&self) -> bool {
        let space = self.space();
        let waiting = self.waiting.load(Ordering::Relaxed);
        self.free_for_blocks(&space) < self.promised.load(Ordering::Relaxed)
            || waiting > space.free_blocks() / WAITING
    }

    /// True where a commit may make space.
    pub(crate) fn has_waiting(&self) -> bool {
        self.waiting.load(Ordering::Relaxed) > 0 || self.dirty() > 0
    }

    /// The number of inodes.
    pub(crate) fn inodes(&self) -> &AtomicU64 {
        &self.inodes
    }

    /// Sets the memory that the index may take.
    pub(crate) fn limit_index(&self, bytes: u64) {
        self.index_limit.store(bytes, Ordering::Relaxed);
    }

    /// The memory of the index in bytes, and its limit. DESIGN.md lists what counts.
    pub(crate) fn index_bytes(&self) -> (u64, u64) {
        let inodes = self.inodes.load(Ordering::Relaxed) * INODE_MEMORY;
        let bytes = inodes + self.records.load(Ordering::Relaxed);
        (bytes, self.index_limit.load(Ordering::Relaxed))
    }

    /// True where the index may grow by so many bytes.
    pub(crate) fn has_index_for(&self, more: u64) -> bool {
        let (bytes, limit) = self.index_bytes();
        bytes.saturating_add(more) <= limit
    }

    /// The records of an inode take so many bytes of memory, and took `before`.
    pub(super) fn records_take(&self, before: u64, now: u64) {
        if before != now {
            self.records.fetch_add(now.wrapping_sub(before), Ordering::Relaxed);
        }
    }

    /// Sets the number of slots, and of further chunks of slots that there can be.
    pub(crate) fn set_slots(&self, slots: u64, chunks: u64) {
        self.slots.store(slots, Ordering::Relaxed);
        self.chunks.store(chunks, Ordering::Relaxed);
    }

    /// Slots that inodes do not have, as far as slots and free units go. With `surely`, a chunk may
    /// have no more than a unit.
    pub(crate) fn free_slots(&self, surely: bool) -> u64 {
        let mut space = self.space();
        if u64::from(space.free_units()) < SHORT && space.give_back_all_ahead() {
            self.note_ahead(&space);
        }
        let blocks = space.free_blocks().saturating_sub(self.promised.load(Ordering::Relaxed));
        let units = u64::from(space.free_units()).min(blocks / UNIT_BLOCKS);
        let units = units.saturating_sub(KEEP_UNITS.into());
        let chunks = self.chunks.load(Ordering::Relaxed);
        let most = match surely {
            true => chunks,
            // Where there can be few chunks, each is a long run of units that is left, or a part of
            // it.
            false if chunks < units => space.longest_runs((chunks - chunks.div_ceil(8)) as usize),
            false => units,
        };
        // Each unit may be a chunk of the table.
        let listed = if surely { 0 } else { table_blocks(units as usize) };
        let all = self.slots.load(Ordering::Relaxed) + units.min(most) * UNIT_BLOCKS;
        all.saturating_sub(self.inodes.load(Ordering::Relaxed) + listed as u64)
    }

    /// Takes up to `wanted` units for slots, but no promised ones. Returns the first unit and the
    /// number of units.
    pub(crate) fn take_units(&self, wanted: u32) -> Option<(u32, u32)> {
        let mut space = self.space();
        let most = self.unpromised_units(&space).max(self.reserved_units(&space));
        take_units(&mut space, wanted.min(most))
    }

    /// Takes units, as [`take_units`](BlockPool::take_units), but none of those that are kept.
    pub(crate) fn take_more_units(&self, wanted: u32) -> Option<(u32, u32)> {
        let mut space = self.space();
        let most = self.unpromised_units(&space).saturating_sub(self.reserved_units(&space));
        if most == 0 { None } else { take_units(&mut space, wanted.min(most)) }
    }

    /// Free units that may be taken although the blocks that were promised are needed.
    fn unpromised_units(&self, space: &BlockSpace) -> u32 {
        let promised = self.promised.load(Ordering::Relaxed) + KEEP_BLOCKS;
        let units = space.free_blocks().saturating_sub(promised) / UNIT_BLOCKS;
        u32::try_from(units).unwrap_or(u32::MAX)
    }

    /// Records of many extents lie in leaves from now on, if the format has them.
    pub(crate) fn set_trees(&self, has_trees: bool) {
        self.has_trees.store(has_trees, Ordering::Relaxed);
    }

    pub(super) fn has_trees(&self) -> bool {
        self.has_trees.load(Ordering::Relaxed)
    }

    /// True if files may have blocks ahead.
    pub(crate) fn has_ahead(&self) -> bool {
        self.has_ahead.load(Ordering::Relaxed)
    }

    /// Records if files have blocks ahead.
    pub(super) fn note_ahead(&self, space: &BlockSpace) {
        self.has_ahead.store(space.has_ahead(), Ordering::Relaxed);
    }

    /// True if a file that grows may keep so many blocks ahead: a share of all stays free beside
    /// them.
    pub(super) fn has_plenty(&self, space: &BlockSpace, count: u32) -> bool {
        self.free_of(space) >= space.blocks() / PLENTY + u64::from(count)
    }

    /// True if a file that grows may reserve so many whole units ahead.
    pub(super) fn has_plenty_of_units(&self, space: &BlockSpace, count: u32) -> bool {
        let kept = u64::from(self.reserved_units(space)) + SHORT;
        u64::from(space.free_units()) >= kept + u64::from(count)
            && self.has_plenty(space, count * UNIT_BLOCKS as u32)
    }

    /// Takes units, as [`take_units`](BlockPool::take_units), for slots that only make writes
    /// faster: a quarter of all units stays free.
    pub(crate) fn take_spare_units(&self, wanted: u32) -> Option<(u32, u32)> {
        self.has_spare_units(wanted).then(|| self.take_units(wanted)).flatten()
    }

    /// True if a quarter of all units is free beside so many.
    pub(crate) fn has_spare_units(&self, wanted: u32) -> bool {
        let units = self.space().units();
        let all = units.free + units.slots + units.full + units.small;
        units.free >= all / 4 + u64::from(wanted)
    }

    /// The number of promised blocks, and of blocks that become free once groups are durable.
    pub(crate) fn set_aside(&self) -> (u64, u64) {
        (self.promised.load(Ordering::Relaxed), self.waiting.load(Ordering::Relaxed))
    }

    /// Slots, and further chunks of them that there can be.
    pub(crate) fn slots(&self) -> (u64, u64) {
        (self.slots.load(Ordering::Relaxed), self.chunks.load(Ordering::Relaxed))
    }

    /// Blocks that were set aside are taken, or are not needed.
    pub(crate) fn unpromise(&self, count: u64) {
        self.promised.fetch_sub(count, Ordering::Relaxed);
    }

    pub(super) fn page_is_dirty(&self) {
        self.dirty.fetch_add(1, Ordering::Relaxed);
    }

    /// Pages are gone, or go to the device: so many that are dirty, and so many that have a
    /// promise.
    pub(super) fn forget_pages(&self, dirty: usize, promised: usize) {
        self.dirty.fetch_sub(dirty, Ordering::Relaxed);
        self.unpromise(promised as u64);
    }

    /// Pages that differ from the device.
    pub(crate) fn dirty(&self) -> usize {
        self.dirty.load(Ordering::Relaxed)
    }

    /// The number of the batch of a group that begins, and true where something was written before
    /// it.
    pub(crate) fn next_batch(&self) -> (u64, bool) {
        self.batches.begin()
    }

    /// The number of a batch of data that is written in place, without a group, and true if
    /// something else was written before.
    pub(crate) fn next_batch_in_place(&self) -> (u64, bool) {
        self.batches.begin_in_place()
    }

    /// The number of a batch that is written before its group.
    pub(super) fn next_early_batch(&self) -> u64 {
        self.batches.begin_early()
    }

    /// A caller's own bytes are on the device: the group that closes next is written after a flush.
    pub(crate) fn record_direct_write(&self) {
        self.batches.precede();
    }

    /// The pages of a batch that was written before its group are on the device.
    pub(crate) fn record_early_write(&self, batch: u64) {
        self.batches.record_early_write(batch);
    }

    /// Records that the device has refused pages of a batch. The group of the batch writes them.
    pub(crate) fn defer_to_group(&self, batch: u64) {
        self.batches.defer_to_group(batch);
    }

    /// Records that the pages of these batches of a group are on the device.
    pub(crate) fn record_group_write(&self, batches: impl IntoIterator<Item = u64>) {
        self.batches.record_group_write(batches);
    }

    /// True while one of these batches, which were begun early, may be in flight.
    pub(crate) fn has_early(&self, batches: &BTreeSet<u64>) -> bool {
        self.batches.has_early(batches)
    }

    /// Makes the closing group wait for early batches of a file that gives up blocks.
    pub(super) fn await_early(&self, batches: &BTreeSet<u64>) {
        if !batches.is_empty() && self.commit_rules().lost_blocks_wait_for_early {
            self.batches.await_early(batches);
        }
    }

    /// The early batches for which the closing group waits, beside those of its own files.
    pub(crate) fn take_awaited(&self) -> BTreeSet<u64> {
        self.batches.take_awaited()
    }

    /// The newest batch for which its pages, and the pages of all earlier batches, are on the
    /// device.
    pub(super) fn newest_written(&self) -> u64 {
        self.batches.newest_written()
    }

    /// Records that the inodes of all batches up to this one are durable.
    pub(crate) fn durable(&self, batch: u64) {
        self.durable.fetch_max(batch, Ordering::Release);
    }

    pub(super) fn is_durable(&self, batch: u64) -> bool {
        batch <= self.durable.load(Ordering::Acquire)
    }

    /// Gives up blocks, which are unused once the running group is durable.
    pub(crate) fn give_up(&self, runs: impl IntoIterator<Item = BlockRun>) {
        let mut abandoned = self.abandoned.lock().unwrap_or_else(PoisonError::into_inner);
        let before = abandoned.len();
        abandoned.extend(runs);
        let blocks = abandoned[before..].iter().map(|run| u64::from(run.count)).sum();
        self.waiting.fetch_add(blocks, Ordering::Relaxed);
    }

    /// Withholds these blocks, which could not be written, until there are many others.
    pub(super) fn quarantine(&self, runs: Vec<BlockRun>) {
        let mut bad = self.bad.lock().unwrap_or_else(PoisonError::into_inner);
        bad.extend(runs);
        let old = bad.len().saturating_sub(BAD);
        self.give_up(bad.drain(..old));
    }

    /// The blocks that the closing group gives up.
    pub(crate) fn take_abandoned(&self) -> Vec<BlockRun> {
        std::mem::take(&mut self.abandoned.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Frees blocks that no durable inode mentions.
    pub(crate) fn release(&self, freed: &[BlockRun]) {
        let mut space = self.space();
        freed.iter().for_each(|run| space.free(*run));
        let blocks = freed.iter().map(|run| u64::from(run.count)).sum();
        self.waiting.fetch_sub(blocks, Ordering::Relaxed);
        self.released.fetch_add(blocks, Ordering::Relaxed);
    }

    /// The number of blocks that were released since the mount.
    pub(crate) fn count_released(&self) -> u64 {
        self.released.load(Ordering::Relaxed)
    }
}

/// Takes up to `wanted` neighbouring units that nothing uses.
fn take_units(space: &mut BlockSpace, wanted: u32) -> Option<(u32, u32)> {
    let found = space.find_units(wanted).or_else(|| {
        space.give_back_all_ahead();
        space.find_units(wanted)
    });
    let (first, count) = found?;
    space.reserve(first, count);
    Some((first, count))
}
