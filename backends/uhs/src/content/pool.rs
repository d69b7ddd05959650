//! The blocks and the memory that all contents share. Its locks are leaves.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::pages::Page;
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
    /// Blocks that pages without one will take.
    promised: AtomicU64,
    /// How often blocks were given back.
    releases: AtomicU64,
    /// Pages in memory.
    cached: AtomicUsize,
    /// Pages that differ from the device.
    dirty: AtomicUsize,
    /// See [`Rules`](crate::commit::Rules).
    tails_move: AtomicBool,
}

impl Pool {
    pub(crate) fn new(space: Space) -> Self {
        Pool {
            space: Mutex::new(space),
            given_up: Mutex::default(),
            promised: AtomicU64::new(0),
            releases: AtomicU64::new(0),
            cached: AtomicUsize::new(0),
            dirty: AtomicUsize::new(0),
            tails_move: AtomicBool::new(true),
        }
    }

    /// The blocks in use.
    pub(crate) fn space(&self) -> MutexGuard<'_, Space> {
        self.space.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sets a rule that tests switch off.
    pub(crate) fn set_tails_move(&self, tails_move: bool) {
        self.tails_move.store(tails_move, Ordering::Relaxed);
    }

    pub(super) fn tails_move(&self) -> bool {
        self.tails_move.load(Ordering::Relaxed)
    }

    /// Blocks that files can still take.
    pub(crate) fn free_blocks(&self) -> u64 {
        let kept = u64::from(KEEP_UNITS) * UNIT_BLOCKS + KEEP_BLOCKS;
        let kept = kept + self.promised.load(Ordering::Relaxed);
        self.space().free_blocks().saturating_sub(kept)
    }

    /// Sets a block aside. `sure` takes it from those that are kept. False where none is left.
    pub(super) fn promise(&self, sure: bool) -> bool {
        // Two threads may count the same block as free: what is kept is enough for all of them.
        let has_space = sure || self.free_blocks() > 0;
        self.promised.fetch_add(u64::from(has_space), Ordering::Relaxed);
        has_space
    }

    /// Sets blocks for records aside. `sure` takes them from those that are kept. False where too few are
    /// left.
    pub(crate) fn set_aside(&self, count: u64, sure: bool) -> bool {
        let has_space = sure || self.free_blocks() >= count;
        self.promised.fetch_add(if has_space { count } else { 0 }, Ordering::Relaxed);
        has_space
    }

    /// Gives blocks back that were set aside.
    pub(crate) fn give_back(&self, count: u64) {
        self.promised.fetch_sub(count, Ordering::Relaxed);
    }

    pub(super) fn page_is_new(&self) {
        self.cached.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn page_is_dirty(&self) {
        self.dirty.fetch_add(1, Ordering::Relaxed);
    }

    /// A page goes to the device, with a block of its own where one was promised.
    pub(super) fn page_is_placed(&self, promised: bool) {
        self.dirty.fetch_sub(1, Ordering::Relaxed);
        self.promised.fetch_sub(u64::from(promised), Ordering::Relaxed);
    }

    pub(super) fn forget_page(&self, page: &Page) {
        self.cached.fetch_sub(1, Ordering::Relaxed);
        self.dirty.fetch_sub(usize::from(page.dirty), Ordering::Relaxed);
        self.promised.fetch_sub(u64::from(page.promised), Ordering::Relaxed);
    }

    /// Pages in memory, and those of them that differ from the device.
    pub(crate) fn pages(&self) -> (usize, usize) {
        (self.cached.load(Ordering::Relaxed), self.dirty.load(Ordering::Relaxed))
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
        self.releases.fetch_add(u64::from(!freed.is_empty()), Ordering::Release);
        freed.iter().for_each(|run| space.free(*run));
    }

    /// How often blocks were given back. Bytes that were read from a block are those of its file as long
    /// as this stays.
    pub(crate) fn releases(&self) -> u64 {
        self.releases.load(Ordering::Acquire)
    }
}
