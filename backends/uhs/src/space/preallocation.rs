//! Blocks that are reserved ahead of files that grow, so that the blocks of files that grow in turn
//! do not alternate.
//!
//! They are available for every file that finds no others: the file for which they were reserved
//! takes others then. So they need no promise, and [`BlockSpace::free_blocks`] counts them.

use std::collections::BTreeMap;

use super::{BlockRun, BlockSpace};
use crate::format::UNIT_BLOCKS;

/// The runs ahead of files.
#[derive(Clone, Debug, Default)]
pub(super) struct AheadRuns {
    /// The run of each file, by the number that the file gets with its first run.
    runs: BTreeMap<u64, BlockRun>,
    blocks: u64,
    last_owner: u64,
}

impl AheadRuns {
    pub(super) fn blocks(&self) -> u64 {
        self.blocks
    }
}

impl BlockSpace {
    /// A number for a file that begins to grow.
    pub(crate) fn new_owner(&mut self) -> u64 {
        self.ahead.last_owner += 1;
        self.ahead.last_owner
    }

    /// True if a file has blocks ahead.
    pub(crate) fn has_ahead(&self) -> bool {
        !self.ahead.runs.is_empty()
    }

    /// Takes up to `count` blocks from the run ahead of a file, if the run begins at `block`.
    pub(crate) fn take_ahead(&mut self, owner: u64, block: u64, count: u32) -> Option<BlockRun> {
        let run = self.ahead.runs.get_mut(&owner).filter(|run| run.block == block)?;
        let count = count.min(run.count);
        let taken = BlockRun { block, count };
        (run.block, run.count) = (run.block + u64::from(count), run.count - count);
        if run.count == 0 {
            self.ahead.runs.remove(&owner);
        }
        self.ahead.blocks -= u64::from(count);
        Some(taken)
    }

    /// Reserves up to `count` blocks ahead of a file, as [`take`](BlockSpace::take) finds them, in
    /// the place of its present ones. Returns the first block.
    pub(crate) fn keep_ahead(
        &mut self,
        owner: u64,
        count: u32,
        near: Option<u64>,
        keep: u32,
    ) -> Option<u64> {
        self.give_back_ahead(owner);
        let run = self.take(count, near, keep)?;
        Some(self.add_preallocated(owner, run))
    }

    /// Reserves up to `units` neighbouring free units ahead of a file, in the place of its present
    /// blocks. Returns the first block.
    pub(crate) fn keep_units_ahead(
        &mut self,
        owner: u64,
        units: u32,
        near: Option<u64>,
        keep: u32,
    ) -> Option<u64> {
        self.give_back_ahead(owner);
        let after = near.map_or(0, |block| (block / UNIT_BLOCKS) as usize);
        let first = self.find_unused(after, keep)?;
        let most = units.min(self.free_units - keep) as usize;
        let count = (first..first + most).take_while(|unit| self.free.contains(*unit)).count();
        let blocks = UNIT_BLOCKS as u32;
        (first..first + count).for_each(|unit| self.set((unit, 0, blocks), true));
        let run = BlockRun { block: first as u64 * UNIT_BLOCKS, count: count as u32 * blocks };
        Some(self.add_preallocated(owner, run))
    }

    fn add_preallocated(&mut self, owner: u64, run: BlockRun) -> u64 {
        self.ahead.blocks += u64::from(run.count);
        self.ahead.runs.insert(owner, run);
        run.block
    }

    /// Gives back the blocks ahead of a file.
    pub(crate) fn give_back_ahead(&mut self, owner: u64) {
        if let Some(run) = self.ahead.runs.remove(&owner) {
            self.ahead.blocks -= u64::from(run.count);
            self.free(run);
        }
    }

    /// Gives back the blocks ahead of all files. False if there are none.
    pub(crate) fn give_back_all_ahead(&mut self) -> bool {
        let runs = std::mem::take(&mut self.ahead.runs);
        self.ahead.blocks = 0;
        runs.values().for_each(|run| self.free(*run));
        !runs.is_empty()
    }
}
