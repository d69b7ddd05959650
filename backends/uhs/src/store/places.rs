//! The places of slots.

use std::collections::HashMap;

use super::{InodeStore, SlotSurvey, StoreState};
use crate::format::UNIT_BLOCKS;
use crate::format::slot::SlotIdentity;
use crate::format::superblock::{SlotChunk, Superblock};

/// The places of slots, by block.
pub(super) struct SlotPlaces {
    uuid: [u8; 16],
    /// By first unit.
    chunks: Vec<SlotChunk>,
}

impl SlotPlaces {
    pub(super) fn from_superblock(superblock: &Superblock) -> SlotPlaces {
        let mut chunks = superblock.chunks.clone();
        chunks.sort_unstable_by_key(|chunk| chunk.first_unit);
        SlotPlaces { uuid: superblock.uuid, chunks }
    }

    /// # Panics
    ///
    /// When no chunk has this block.
    pub(super) fn identity_at(&self, block: u64) -> SlotIdentity {
        self.get(block).unwrap_or_else(|| panic!("block {block} is no slot"))
    }

    /// The place of the slot at `block`; `None` if no chunk contains the block.
    pub(super) fn get(&self, block: u64) -> Option<SlotIdentity> {
        let unit = block / UNIT_BLOCKS;
        let after = self.chunks.partition_point(|chunk| u64::from(chunk.first_unit) <= unit);
        let chunk = &self.chunks[after.checked_sub(1)?];
        let place = SlotIdentity { uuid: self.uuid, key: chunk.key, block };
        chunk.holds(unit).then_some(place)
    }
}

impl InodeStore {
    /// The places of the slots of these inodes' current copies, which have been written. The slots
    /// are unchanged as long as a later call returns the same places.
    pub(crate) fn locate_slots(&self, inos: &[u64]) -> Vec<Option<SlotIdentity>> {
        let mut state = self.lock();
        let live = |state: &StoreState| -> Vec<Option<u64>> {
            inos.iter().map(|ino| state.groups.live(*ino)).collect()
        };
        let blocks = loop {
            // Later groups may be in flight at any time.
            let (blocks, newest) = (live(&state), state.groups.newest_group());
            state = self.wait_for_writes(state, newest, 0);
            if self.check().is_err() || live(&state) == blocks {
                break blocks;
            }
        };
        blocks.into_iter().map(|block| block.map(|block| state.places.identity_at(block))).collect()
    }
}

/// The slots of a read-only file system.
pub(crate) struct FrozenSlots {
    places: SlotPlaces,
    blocks: HashMap<u64, u64>,
}

impl FrozenSlots {
    pub(crate) fn from_survey(survey: &SlotSurvey) -> FrozenSlots {
        let live = survey.found.live.iter();
        let blocks = live.map(|(ino, version)| (*ino, version.block)).collect();
        FrozenSlots { places: SlotPlaces::from_superblock(&survey.superblock), blocks }
    }

    /// The places of the slots of these inodes.
    pub(crate) fn locate_slots(&self, inos: &[u64]) -> Vec<Option<SlotIdentity>> {
        inos.iter()
            .map(|ino| self.blocks.get(ino).map(|block| self.places.identity_at(*block)))
            .collect()
    }
}
