//! The blocks and the memory that all contents share. Its locks are leaves.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use super::frames::Memory;
use crate::commit::Rules;
use crate::format::UNIT_BLOCKS;
use crate::space::{Run, Space};

/// Units that data leaves to inodes.
pub(crate) const KEEP_UNITS: u32 = 2;

/// Blocks that the records of inodes may need beside the data.
const KEEP_BLOCKS: u64 = 128;

/// Blocks in use, promises, and counts of pages.
pub(crate) struct Pool {
    space: Mutex<Space>,
    /// Blocks that nothing uses once the running group is durable.
    given_up: Mutex<Vec<Run>>,
    /// Blocks that pages without one will take, and records.
    promised: AtomicU64,
    /// Pages that differ from the device.
    dirty: AtomicUsize,
    /// The newest batch, and the newest that is durable.
    batch: AtomicU64,
    durable: AtomicU64,
    memory: OnceLock<Memory>,
    rules: OnceLock<Rules>,
}

impl Pool {
    /// The blocks of `space`, without memory for pages.
    pub(crate) fn new(space: Space) -> Self {
        Pool {
            space: Mutex::new(space),
            given_up: Mutex::default(),
            promised: AtomicU64::new(0),
            dirty: AtomicUsize::new(0),
            batch: AtomicU64::new(0),
            durable: AtomicU64::new(0),
            memory: OnceLock::new(),
            rules: OnceLock::new(),
        }
    }

    /// Adds memory for `cache` pages, and for `dirty` pages more that differ from the device.
    ///
    /// # Errors
    ///
    /// Those of [`Region::new`](defuse_block::Region::new).
    pub(crate) fn add_memory(&self, cache: usize, dirty: usize) -> defuse_block::Result<()> {
        let memory = Memory::new(cache, dirty)?;
        let _ = self.memory.set(memory);
        Ok(())
    }

    /// The memory of pages; none in a file system that is only looked at.
    pub(super) fn memory(&self) -> Option<&Memory> {
        self.memory.get()
    }

    /// The blocks in use.
    pub(crate) fn space(&self) -> MutexGuard<'_, Space> {
        self.space.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sets the rules that tests switch off.
    pub(crate) fn set_rules(&self, rules: Rules) {
        let _ = self.rules.set(rules);
    }

    pub(super) fn rules(&self) -> Rules {
        *self.rules.get().unwrap_or(&Rules::ALL)
    }

    /// All blocks, and those that files can still take.
    pub(crate) fn counts(&self) -> (u64, u64) {
        let space = self.space();
        (space.blocks(), self.free_of(&space))
    }

    fn free_of(&self, space: &Space) -> u64 {
        let kept = u64::from(KEEP_UNITS) * UNIT_BLOCKS + KEEP_BLOCKS;
        let kept = kept + self.promised.load(Ordering::Relaxed);
        space.free_blocks().saturating_sub(kept)
    }

    /// Sets blocks aside. `sure` takes them from those that are kept. False where too few are left.
    pub(crate) fn promise(&self, count: u64, sure: bool) -> bool {
        if sure {
            // Whoever loads inodes has the space.
            self.promised.fetch_add(count, Ordering::Relaxed);
            return true;
        }
        let space = self.space();
        let has_space = self.free_of(&space) >= count;
        self.promised.fetch_add(if has_space { count } else { 0 }, Ordering::Relaxed);
        has_space
    }

    /// Blocks that were set aside are taken, or are not needed.
    pub(crate) fn unpromise(&self, count: u64) {
        self.promised.fetch_sub(count, Ordering::Relaxed);
    }

    pub(super) fn page_is_dirty(&self) {
        self.dirty.fetch_add(1, Ordering::Relaxed);
    }

    /// Pages are gone, or go to the device: so many that are dirty, and so many that have a promise.
    pub(super) fn forget_pages(&self, dirty: usize, promised: usize) {
        self.dirty.fetch_sub(dirty, Ordering::Relaxed);
        self.unpromise(promised as u64);
    }

    /// Pages that differ from the device.
    pub(crate) fn dirty(&self) -> usize {
        self.dirty.load(Ordering::Relaxed)
    }

    /// The number of the batch that begins.
    pub(crate) fn next_batch(&self) -> u64 {
        self.batch.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// The inodes of all batches up to this one are durable.
    pub(crate) fn durable(&self, batch: u64) {
        self.durable.fetch_max(batch, Ordering::Release);
    }

    pub(super) fn is_durable(&self, batch: u64) -> bool {
        batch <= self.durable.load(Ordering::Acquire)
    }

    /// Nothing uses these blocks once the running group is durable.
    pub(crate) fn give_up(&self, runs: impl IntoIterator<Item = Run>) {
        let mut given_up = self.given_up.lock().unwrap_or_else(PoisonError::into_inner);
        given_up.extend(runs);
    }

    /// The blocks that the closing group gives up.
    pub(crate) fn take_given_up(&self) -> Vec<Run> {
        std::mem::take(&mut self.given_up.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Gives blocks back whose inodes are durable without them.
    pub(crate) fn release(&self, freed: &[Run]) {
        let mut space = self.space();
        freed.iter().for_each(|run| space.free(*run));
    }
}
