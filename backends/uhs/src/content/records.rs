//! Space for the records of an inode that do not fit into its slot.
//!
//! Every change of such an inode writes all records anew, while the old ones are in use. So there
//! is a promise of blocks for the next copy as long as the inode exists. It is made when the
//! records grow: the operation that grows them fails with ENOSPC, and a commit never does. Let a
//! copy need n blocks, and let the copy that was written last have w. The next group takes n
//! blocks, and gives w up. To leave a promise of n blocks again, it needs 2n - w.

use std::collections::BTreeSet;

use defuse_fs::{Errno, Result};

use super::tree::MANY;
use super::{BlockPool, FileContent};
use crate::format::BLOCK;
use crate::format::inode::{
    EXTENT_BYTES, EXTENTS_OF_BLOCK, HEAD, InodeData, NAME_BYTES, POINTERS, POINTERS_OF_BLOCK,
    RECORD_BYTES,
};
use crate::format::slot::BODY;
use crate::space::BlockRun;

/// Extents of a file at most. Each change of the file writes all of their records.
const MOST_EXTENTS: usize = 1 << 20;

/// The records of an inode outside of its slot.
#[derive(Default)]
pub(super) struct OverflowRecords {
    /// Blocks with the copy that was written last.
    blocks: BTreeSet<u64>,
    /// Blocks that are set aside.
    aside: u64,
    /// Bytes of records for which the blocks suffice.
    enough: usize,
    /// Bytes of all names but the first, and of extended attributes.
    others: usize,
    /// Extents that may be added by pages that wait for the next group.
    splits: usize,
}

impl OverflowRecords {
    fn blocks_in_use(&self) -> u64 {
        self.blocks.len() as u64
    }

    /// Blocks to be set aside for records of so many bytes.
    fn blocks_for(&self, bytes: usize) -> u64 {
        let copy = copy_blocks(bytes);
        copy.max((2 * copy).saturating_sub(self.blocks_in_use()))
    }

    /// Blocks that the next copy takes at most.
    pub(super) fn copy_blocks(&self) -> u64 {
        self.blocks_in_use().max(self.aside)
    }

    /// Memory that a closed file still occupies.
    fn memory(&self) -> u64 {
        memory_of(self.enough).max(self.others as u64)
    }

    /// True if the records have blocks, or blocks are set aside for them: the content must stay in
    /// memory.
    pub(super) fn is_used(&self) -> bool {
        !self.blocks.is_empty() || self.aside > 0
    }
}

/// Memory that records of so many bytes take, if the slot has no room for them.
fn memory_of(bytes: usize) -> u64 {
    copy_blocks(bytes) * BLOCK as u64
}

/// Blocks of one copy of records of so many bytes, with the blocks of pointers; 0 if the records
/// fit into the slot.
fn copy_blocks(bytes: usize) -> u64 {
    if HEAD + bytes <= BODY {
        return 0;
    }
    let leaves = bytes.div_ceil(BLOCK);
    let pointers = if leaves > POINTERS { leaves.div_ceil(POINTERS_OF_BLOCK) } else { 0 };
    (leaves + pointers) as u64
}

impl FileContent {
    /// Bytes of the records with data of so many bytes. The first name may become the longest that
    /// there is.
    fn bytes_with(&self, data: usize) -> usize {
        NAME_BYTES + self.outside.others + RECORD_BYTES + data
    }

    /// Bytes of the records when so many extents more are there.
    fn record_bytes(&self, more: usize) -> usize {
        self.bytes_with(match &self.data {
            InodeData::Nothing => 0,
            InodeData::Inline(bytes) | InodeData::Target(bytes) => bytes.len(),
            InodeData::Extents(_) => {
                return self.bytes_with_extents(self.extents.count() + self.outside.splits + more);
            }
        })
    }

    /// Bytes of the records with so many extents. Many of them lie apart from the others.
    fn bytes_with_extents(&self, extents: usize) -> usize {
        let bytes = self.bytes_with(EXTENT_BYTES * extents);
        if extents <= MANY {
            return bytes;
        }
        let blocks = self.bytes_with(0).div_ceil(BLOCK) + extents.div_ceil(EXTENTS_OF_BLOCK);
        blocks * BLOCK
    }

    /// Sets blocks aside for records of so many bytes. False where there are none.
    fn cover(&mut self, pool: &BlockPool, bytes: usize, sure: bool) -> bool {
        if bytes <= self.outside.enough {
            return true;
        }
        // More than needed now, so that not every page needs another promise.
        let ample = if copy_blocks(bytes) > 0 { bytes + bytes / 8 } else { bytes };
        let before = self.outside.memory();
        for bytes in [ample, bytes] {
            let missing = self.outside.blocks_for(bytes).saturating_sub(self.outside.aside);
            let more = memory_of(bytes).saturating_sub(before);
            let has_memory = more == 0 || sure || pool.has_index_for(more);
            if has_memory && pool.promise(missing, sure) {
                self.outside.aside += missing;
                self.outside.enough = bytes;
                pool.records_take(before, self.outside.memory());
                return true;
            }
        }
        false
    }

    /// Makes sure that there is space for the records of so many more extents. `sure` also takes
    /// reserved space. `ENOSPC`.
    pub(super) fn promise_extents(
        &mut self,
        pool: &BlockPool,
        more: usize,
        sure: bool,
    ) -> Result<()> {
        let bytes = self.record_bytes(more);
        let few = self.extents.count() + self.outside.splits + more < MOST_EXTENTS;
        if few && self.cover(pool, bytes, sure) { Ok(()) } else { Err(Errno::ENOSPC) }
    }

    /// Promises space for so many extents more after the next group. `ENOSPC`.
    pub(super) fn promise_splits(
        &mut self,
        pool: &BlockPool,
        more: usize,
        sure: bool,
    ) -> Result<()> {
        self.promise_extents(pool, more, sure)?;
        self.outside.splits += more;
        Ok(())
    }

    /// Records that so many pages with a promised extent have one.
    pub(super) fn record_placed(&mut self, pages: usize) {
        self.outside.splits = self.outside.splits.saturating_sub(pages);
    }

    /// Makes sure that there is space for the records with inline data of so many bytes. `ENOSPC`.
    pub(super) fn promise_inline(&mut self, pool: &BlockPool, len: usize) -> Result<()> {
        let bytes = self.bytes_with(len);
        if self.cover(pool, bytes, false) { Ok(()) } else { Err(Errno::ENOSPC) }
    }

    /// Makes sure that there is space for the records when all names but the first, and attributes,
    /// have so many bytes. `ENOSPC`.
    pub(crate) fn promise_others(&mut self, pool: &BlockPool, others: usize) -> Result<()> {
        let bytes = self.record_bytes(0) - self.outside.others + others;
        let more = others.saturating_sub(self.outside.others) as u64;
        if more > 0 && !pool.has_index_for(more) || !self.cover(pool, bytes, false) {
            return Err(Errno::ENOSPC);
        }
        let before = self.outside.memory();
        self.outside.others = others;
        pool.records_take(before, self.outside.memory());
        Ok(())
    }

    /// The blocks with records that the device has.
    pub(crate) fn record_runs(&self) -> Vec<BlockRun> {
        self.record_blocks().map(|block| BlockRun { block, count: 1 }).collect()
    }

    /// True where the device has blocks with records.
    pub(crate) fn has_records(&self) -> bool {
        !self.outside.blocks.is_empty()
    }

    pub(super) fn record_blocks(&self) -> impl Iterator<Item = u64> {
        self.outside.blocks.iter().copied()
    }

    /// Bytes of all names but the first, and of attributes, for which space is promised.
    pub(crate) fn bytes_of_other_records(&self) -> usize {
        self.outside.others
    }

    /// Replaces the blocks with records by the blocks that a group writes. The old ones are free
    /// when the group is durable. `others` are the bytes of all names but the first, and of
    /// attributes.
    pub(crate) fn replace_records(&mut self, pool: &BlockPool, runs: Vec<BlockRun>, others: usize) {
        self.forget_tree();
        let old: Vec<u64> = self.record_blocks().collect();
        self.begin_copy();
        self.exchange_records(pool, &old, runs.iter().map(|run| run.block).collect(), others);
    }

    /// The group that closes writes all extents.
    pub(super) fn begin_copy(&mut self) {
        self.outside.splits = 0;
    }

    /// Removes the blocks `old` from the copy, which are free when the group is durable, and adds
    /// the blocks `new`.
    pub(super) fn exchange_records(
        &mut self,
        pool: &BlockPool,
        old: &[u64],
        new: Vec<u64>,
        others: usize,
    ) {
        for block in old {
            self.outside.blocks.remove(block);
        }
        pool.give_up(old.iter().map(|block| BlockRun { block: *block, count: 1 }));
        self.outside.blocks.extend(new);
        self.set_aside(pool, others);
    }

    /// Blocks that are set aside.
    pub(super) fn reserved_blocks(&self) -> u64 {
        self.outside.aside
    }

    /// Records that so many blocks more are set aside.
    pub(super) fn add_aside(&mut self, blocks: u64) {
        self.outside.aside += blocks;
    }

    /// Blocks of a copy, with `others`.
    pub(super) fn blocks_of_copy(&self, others: usize) -> u64 {
        let longer = others.saturating_sub(self.outside.others);
        copy_blocks(self.record_bytes(0) + longer.next_multiple_of(BLOCK))
    }

    /// True where a block with records is one of these.
    pub(crate) fn has_records_at(&self, is: impl Fn(u64) -> bool) -> bool {
        self.record_blocks().any(is)
    }

    /// Records the blocks with records on the device.
    pub(crate) fn load_records(&mut self, pool: &BlockPool, runs: Vec<BlockRun>, others: usize) {
        self.outside.blocks = runs.iter().flat_map(|run| run.block..run.end()).collect();
        self.set_aside(pool, others);
    }

    /// Sets aside as many blocks as the records need with `others`. There is space for them, as the
    /// documentation of this module explains.
    fn set_aside(&mut self, pool: &BlockPool, others: usize) {
        let before = self.outside.memory();
        self.outside.others = others;
        let enough = self.record_bytes(0);
        let wanted = self.outside.blocks_for(enough);
        pool.exchange(self.outside.aside, wanted);
        (self.outside.aside, self.outside.enough) = (wanted, enough);
        pool.records_take(before, self.outside.memory());
    }

    /// Gives up all blocks with records, and the promise.
    pub(super) fn end_records(&mut self, pool: &BlockPool) {
        self.forget_tree();
        let old = std::mem::take(&mut self.outside);
        pool.records_take(old.memory(), 0);
        pool.give_up(old.blocks.into_iter().map(|block| BlockRun { block, count: 1 }));
        pool.unpromise(old.aside);
    }
}
