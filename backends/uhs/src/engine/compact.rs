//! Compaction of units: small blocks leave the units that have few of them, so that these units are
//! free for inodes and for large files.
//!
//! Blocks move as every change does: their pages are written to new blocks, the inode points to
//! these in a group, and the old ones are free when the group is durable. Only an operation that
//! would find no space otherwise waits for a compaction.
//!
//! Units of slots without content are given back, too (`vacate.rs`).

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, TryLockError};

use defuse_block::QueuePurpose;
use defuse_fs::{Errno, Result};

use super::commit::SyncScope;
use super::figures::StripedCounter;
use super::vacate::{BEFORE, FEW, FEW_NOW, NOW, PLENTY};
use super::{EngineSlots, UhsEngine};
use crate::content::{FileContent, FrameSupply};
use crate::format::UNIT_BLOCKS;
use crate::group::GroupReadGuard;
use crate::locks::lock;
use crate::space::{BlockRun, BlockSpace};

/// Units that a round empties at most.
const UNITS: usize = 8;

/// Pages that move with one handle of the running group.
const PAGES: u64 = 64;

/// Units that are free without a compaction: the share of all units, and at least so many more than
/// the units that are kept for inodes.
const SHARE: u64 = 64;
const LEAST: u64 = 4;
pub(super) const MOST: u64 = 256;

/// Free blocks that a unit must have to be emptied: while no operation waits, and otherwise.
const WORTH_IT: u32 = 192;
const NEEDED: u32 = 16;

/// The compaction of one file system: at most one round runs at a time.
#[derive(Default)]
pub(super) struct Compaction {
    state: Mutex<CompactionState>,
    /// Groups since the mount, when no unit of slots could be emptied.
    pub(super) vacated_in_vain: Mutex<Option<u64>>,
    pub(super) slots_moved: StripedCounter,
    pub(super) rounds: StripedCounter,
    pub(super) units: StripedCounter,
    pub(super) pages: StripedCounter,
    pub(super) slot_units: StripedCounter,
}

#[derive(Default)]
struct CompactionState {
    /// Units that did not become free: something holds their blocks.
    stubborn: BTreeSet<usize>,
    /// The number of blocks that had been given back since the mount when a round found nothing to
    /// gain.
    futile_at: Option<u64>,
}

impl Compaction {
    /// A test makes every round worth a try.
    #[cfg(test)]
    pub(crate) fn forget(&self) {
        *lock(&self.state) = CompactionState::default();
    }
}

impl UhsEngine {
    /// Makes units free if they are short, for an operation that waits for space. True if some
    /// became free.
    pub(super) fn compact_now(&self) -> Result<bool> {
        let mut slots = self.give_back_slots(NOW, true)?;
        if slots == 0 {
            slots = self.vacate_slots(NOW, FEW_NOW)?;
        }
        if !self.lacks_units(NEEDED) {
            return Ok(slots > 0);
        }
        let compacted = self.compact(&mut lock(&self.compaction.state), NEEDED)?;
        Ok(compacted || slots > 0)
    }

    /// Makes units free if they are short, unless a compaction runs, and gives back units of slots
    /// if there are many.
    pub(super) fn compact_before_need(&self) {
        let kept = if self.pool.has_spare_units(0) { PLENTY } else { BEFORE };
        if self.slots_free() > 2 * self.slots_to_keep(kept) {
            let returned = self.give_back_slots(kept, false);
            if returned == Ok(0) && self.lacks_free_units() {
                let _ = self.vacate_slots(BEFORE, FEW);
            }
        }
        if !self.lacks_units(WORTH_IT) {
            return;
        }
        let mut state = match self.compaction.state.try_lock() {
            Ok(state) => state,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return,
        };
        if let Err(errno) = self.compact(&mut state, WORTH_IT) {
            log::debug!("uhs: small blocks stay where they are: {errno}");
        }
    }

    /// Empties units although there is no need.
    #[cfg(test)]
    pub(crate) fn compact_anyway(&self) -> Result<bool> {
        self.compaction.forget();
        self.compact(&mut lock(&self.compaction.state), 1)
    }

    /// Moves all small blocks to other units.
    #[cfg(test)]
    pub(crate) fn move_everything(&self) -> Result<()> {
        let _state = lock(&self.compaction.state);
        self.empty(BlockSpace::small_units).2
    }

    /// True if few units are free, and the others together have so many free blocks that a
    /// compaction may be worth its cost.
    fn lacks_units(&self, least: u32) -> bool {
        let small = self.pool.space().units().small_free_blocks;
        small >= UNIT_BLOCKS + u64::from(least) && self.lacks_free_units()
    }

    fn lacks_free_units(&self) -> bool {
        let space = self.pool.space();
        let kept = u64::from(self.pool.reserved_units(&space));
        let enough = kept + (space.blocks() / UNIT_BLOCKS / SHARE).clamp(LEAST, MOST);
        space.units().free < enough
    }

    /// A round. True where units became free.
    fn compact(&self, state: &mut CompactionState, least: u32) -> Result<bool> {
        let released = self.pool.count_released();
        let futile = state.futile_at.is_some_and(|then| released < then + UNIT_BLOCKS);
        if self.is_read_only() || matches!(self.store, EngineSlots::Frozen(_)) || futile {
            return Ok(false);
        }
        let most = (self.options.dirty_pages as u64).max(UNIT_BLOCKS);
        let choose =
            |space: &BlockSpace| space.find_emptiest(UNITS, (least, most), &state.stubborn);
        let (gained, left, moved) = self.empty(choose);
        state.futile_at = (gained == 0).then_some(released);
        match gained {
            // The contents that held these units may be gone now.
            0 => state.stubborn.clear(),
            _ => state.stubborn.extend(left),
        }
        moved.map(|()| gained > 0)
    }

    /// Empties units. Returns the number of units that became free, the units that did not, and the
    /// outcome.
    fn empty(
        &self,
        choose: impl FnOnce(&BlockSpace) -> Vec<usize>,
    ) -> (usize, Vec<usize>, Result<()>) {
        let leaving = {
            let mut space = self.pool.space();
            // Blocks ahead of a file belong to no content, so that a unit with them could not be
            // emptied.
            space.give_back_all_ahead();
            let leaving = choose(&space);
            space.close(&leaving);
            leaving
        };
        self.compaction.rounds.add(1);
        let moved = if leaving.is_empty() { Ok(()) } else { self.move_all(&leaving) };
        // The units are reopened even if the move failed half-way.
        let left = self.pool.space().reopen(&leaving);
        let gained = leaving.len() - left.len();
        self.compaction.units.add(gained as u64);
        (gained, left, moved)
    }

    /// Moves everything out of these units, as far as there is space, and makes that durable.
    fn move_all(&self, units: &[usize]) -> Result<()> {
        let leaves = |block: u64| units.binary_search(&((block / UNIT_BLOCKS) as usize)).is_ok();
        let meets = |run: BlockRun| {
            let ends =
                (run.block / UNIT_BLOCKS, (run.block + u64::from(run.count) - 1) / UNIT_BLOCKS);
            (ends.0..=ends.1).any(|unit| leaves(unit * UNIT_BLOCKS))
        };
        for (ino, content) in self.names.owners(&meets) {
            // A content in memory may have blocks there, or not.
            if content.is_some_and(|content| !lock(&content).has_blocks_at(&leaves)) {
                continue;
            }
            match self.move_one(ino, &leaves) {
                Err(Errno::ENOSPC | Errno::ENOMEM) => break,
                Err(Errno::EROFS) => return Err(Errno::EROFS),
                // The inode is gone, or cannot be read; others can.
                Ok(()) | Err(_) => {}
            }
            if self.pool.dirty() > self.options.dirty_pages / 2 {
                self.commit_for(QueuePurpose::Reclaim, SyncScope::Changes)?;
            }
        }
        self.commit_for(QueuePurpose::Reclaim, SyncScope::Changes)
    }

    /// Moves the blocks of an inode.
    fn move_one(&self, ino: u64, leaves: &dyn Fn(u64) -> bool) -> Result<()> {
        let content = self.content(ino)?;
        self.move_records(ino, &content, leaves)?;
        let most = (self.options.dirty_pages as u64 / 4).clamp(1, PAGES);
        let mut page = 0;
        loop {
            let next = lock(&content).next_at(page, most, leaves);
            let Some(pages) = next else { break };
            page = pages.end;
            let need = |held: &FileContent| held.need_move(&pages);
            let change =
                &mut |held: &mut FileContent, handle: &GroupReadGuard<'_>, _: &mut FrameSupply| {
                    let moved = held.relocate_pages(&self.pool, &pages, leaves);
                    self.names.settle(handle, ino, held.summarize())?;
                    moved
                };
            let moved = self.try_change_content(QueuePurpose::Reclaim, &content, &need, change)?;
            self.compaction.pages.add(moved);
            if self.pool.dirty() > self.options.dirty_pages / 2 {
                self.commit_for(QueuePurpose::Reclaim, SyncScope::Changes)?;
            }
        }
        drop(content);
        self.is_idle(ino);
        Ok(())
    }

    /// Moves the blocks with records: a group that writes the inode writes all of them anew.
    fn move_records(
        &self,
        ino: u64,
        content: &Arc<Mutex<FileContent>>,
        leaves: &dyn Fn(u64) -> bool,
    ) -> Result<()> {
        let handle = self.enter()?;
        let mut held = lock(content);
        if held.has_records_at(leaves) {
            held.forget_tree();
            self.names.write_again(&handle, ino, held.summarize())?;
        }
        drop(held);
        self.end_change(handle);
        Ok(())
    }
}
