//! Large units for files that grew in small blocks: when all pages of 2 MiB have data and lie in
//! many runs, they move to one unit.
//!
//! Pages move as in a compaction: their pages are written to new blocks, the inode points to these
//! in a group, and the old ones are free when the group is durable. It happens in the background,
//! and only while many units are free.

use std::collections::BTreeSet;
use std::sync::Mutex;

use defuse_block::QueuePurpose;
use defuse_fs::Result;

use super::commit::SyncScope;
use super::figures::StripedCounter;
use super::{EngineSlots, UhsEngine};
use crate::content::{FileContent, FrameSupply};
use crate::format::UNIT_BLOCKS;
use crate::group::GroupReadGuard;
use crate::locks::lock;

/// Units of pages that wait at most. Others are found again when they change.
const MOST: usize = 4096;

/// Units that stay free beside the spare ones.
const LEFT: u32 = 2;

/// The units of pages that wait to be moved: an inode, and the number of the unit in the file.
#[derive(Default)]
pub(super) struct ScatteredUnits {
    units: Mutex<BTreeSet<(u64, u64)>>,
    pub(super) merged: StripedCounter,
}

impl ScatteredUnits {
    /// Lets these wait.
    pub(super) fn add(&self, found: &[(u64, u64)]) {
        if !found.is_empty() {
            let mut units = lock(&self.units);
            let room = MOST.saturating_sub(units.len());
            units.extend(found.iter().take(room));
        }
    }
}

impl UhsEngine {
    /// Moves data that lies in many runs to whole units, as long as there is space.
    pub(crate) fn merge_scattered(&self) {
        // All pages of a unit are in memory at a time.
        let has_memory = self.options.dirty_pages as u64 >= 2 * UNIT_BLOCKS;
        let writes = !self.is_read_only() && matches!(self.store, EngineSlots::Store(_));
        loop {
            let next = lock(&self.scattered.units).pop_first();
            let Some((ino, unit)) = next else { return };
            if !has_memory || !writes || !self.pool.has_spare_units(LEFT) {
                continue;
            }
            // The inode may be gone.
            match self.merge(ino, unit) {
                Ok(()) => {}
                Err(errno) => log::debug!("uhs: inode {ino} stays in small blocks: {errno}"),
            }
        }
    }

    fn merge(&self, ino: u64, unit: u64) -> Result<()> {
        let content = self.content(ino)?;
        let pages = unit * UNIT_BLOCKS..(unit + 1) * UNIT_BLOCKS;
        let need = |held: &FileContent| held.need_move(&pages);
        let change =
            &mut |held: &mut FileContent, handle: &GroupReadGuard<'_>, _: &mut FrameSupply| {
                if !held.is_scattered(unit) {
                    return Ok(0);
                }
                let moved = held.relocate_pages(&self.pool, &pages, &|_| true);
                self.names.settle(handle, ino, held.summarize())?;
                moved
            };
        let moved = self.try_change_content(QueuePurpose::Reclaim, &content, &need, change)?;
        drop(content);
        self.is_idle(ino);
        if moved > 0 {
            self.commit_for(QueuePurpose::Reclaim, SyncScope::Changes)?;
            self.scattered.merged.add(1);
        }
        Ok(())
    }
}
