//! Units of slots are given back if they hold nothing, and inodes leave units that have few of
//! them.
//!
//! An inode moves as it does with every change: a group writes it to another slot. Meanwhile, no
//! slot of the unit is taken. When that group is durable, and the device states so, the unit is
//! empty.

use std::sync::atomic::Ordering;

use defuse_block::QueuePurpose;
use defuse_fs::{Errno, Result};

use super::commit::SyncScope;
use super::compact::MOST;
use super::{EngineSlots, UhsEngine};
use crate::format::UNIT_BLOCKS;
use crate::locks::lock;
use crate::store::InodeStore;
#[cfg(test)]
use crate::store::UnitUse;

/// Slots that may be overwritten and that stay, plus one for each so many inodes: while an
/// operation waits for space, before that, and while there is much space.
pub(super) const NOW: (u64, u64) = (1024, 16);
pub(super) const BEFORE: (u64, u64) = (2048, 4);
pub(super) const PLENTY: (u64, u64) = (2048, 1);

/// Units that are emptied at a time, and inodes that one of them may have: while an operation
/// waits, and before that.
pub(super) const FEW_NOW: (usize, usize) = (8, 448);
pub(super) const FEW: (usize, usize) = (4, 256);

/// Groups after which units are examined again, if none could be emptied.
const LATER: u64 = 64;

impl UhsEngine {
    pub(super) fn slots_free(&self) -> u64 {
        match &self.store {
            EngineSlots::Store(store) => store.progress().slots_free,
            EngineSlots::Frozen(_) => 0,
        }
    }

    /// The number of free slots that stay when others are given back: `least`, and one for each
    /// `share` inodes.
    pub(super) fn slots_to_keep(&self, (least, share): (u64, u64)) -> u64 {
        least + self.pool.inodes().load(Ordering::Relaxed) / share
    }

    /// Gives back units of slots without content, and keeps some slots
    /// ([`slots_to_keep`](UhsEngine::slots_to_keep)). Returns the number of units. With `now`, an
    /// operation waits for them.
    pub(crate) fn give_back_slots(&self, kept: (u64, u64), now: bool) -> Result<u64> {
        let keep = self.slots_to_keep(kept);
        // On a full device every operation calls this, and nothing must be written in vain.
        match self.slots_of_nobody() < keep + UNIT_BLOCKS {
            true => Ok(0),
            false => self.give_back_units(keep, now),
        }
    }

    fn slots_of_nobody(&self) -> u64 {
        self.pool.slots().0.saturating_sub(self.pool.inodes().load(Ordering::Relaxed))
    }

    fn give_back_units(&self, keep: u64, now: bool) -> Result<u64> {
        let EngineSlots::Store(store) = &self.store else { return Ok(0) };
        // Groups set the number of slots, too.
        let _turn = self.take_write_turn();
        if self.is_read_only() {
            return Ok(0);
        }
        let units = store
            .give_back(keep as usize, MOST as usize, now)
            .map_err(|error| self.fail(&error))?;
        let mut space = self.pool.space();
        units.iter().for_each(|unit| space.give_back(*unit));
        drop(space);
        let (slots, chunks) = store.slots();
        self.pool.set_slots(slots, chunks);
        self.compaction.slot_units.add(units.len() as u64);
        Ok(units.len() as u64)
    }

    /// Empties units of slots that have few inodes, and gives them back; some slots are kept
    /// ([`slots_to_keep`](UhsEngine::slots_to_keep)). Returns the number of units.
    pub(crate) fn vacate_slots(&self, kept: (u64, u64), few: (usize, usize)) -> Result<u64> {
        let EngineSlots::Store(store) = &self.store else { return Ok(0) };
        let mut in_vain = lock(&self.compaction.vacated_in_vain);
        let groups = store.progress().groups;
        let keep = self.slots_to_keep(kept);
        let spare = self.slots_of_nobody().saturating_sub(keep) / UNIT_BLOCKS;
        let futile = in_vain.is_some_and(|then| groups < then + LATER);
        if spare == 0 || futile || self.is_read_only() {
            return Ok(0);
        }
        let (units, inos) = {
            let _turn = self.take_write_turn();
            let closed = store.close_units((few.0.min(spare as usize), few.1));
            self.note_slots(store);
            closed
        };
        let returned = match units.is_empty() {
            true => Ok(0),
            false => self.write_again(&inos).and_then(|()| self.give_back_units(keep, true)),
        };
        {
            let _turn = self.take_write_turn();
            store.reopen(&units);
            self.note_slots(store);
        }
        *in_vain = (returned == Ok(0)).then_some(groups);
        returned
    }

    /// Writes inodes as they are, to other slots, and makes that durable.
    fn write_again(&self, inos: &[u64]) -> Result<()> {
        for ino in inos {
            let handle = self.enter()?;
            match self.names.rewrite(&handle, *ino) {
                // The inode is gone, and so is its slot.
                Ok(()) | Err(Errno::ENOENT | Errno::ESTALE) => self.end_change(handle),
                Err(errno) => return Err(errno),
            }
        }
        self.compaction.slots_moved.add(inos.len() as u64);
        self.commit_for(QueuePurpose::Reclaim, SyncScope::Changes)
    }

    /// Adds slots although there is no need.
    #[cfg(test)]
    pub(crate) fn add_slots_anyway(&self) {
        let EngineSlots::Store(store) = &self.store else { return };
        let units = &mut |wanted, need| match need {
            UnitUse::Slots => self.pool.take_units(wanted),
            UnitUse::MoreSlots | UnitUse::Runs => None,
        };
        store.add_slots(units).unwrap();
        self.note_slots(store);
    }

    fn note_slots(&self, store: &InodeStore) {
        let (slots, chunks) = store.slots();
        self.pool.set_slots(slots, chunks);
    }
}
