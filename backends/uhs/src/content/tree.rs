//! The records of a file with many extents, in leaves. A change writes only the leaves that it
//! concerns.
//!
//! A leaf has the extents that begin in a range of pages. It is written to another block when one
//! of them has changed, in two or more when it is full, and together with a neighbour when both
//! have few. Blocks of pointers are written if one of their pointers has changed. So the number of
//! blocks that a group writes depends on the number of changes, and hardly on the number of
//! extents.
//!
//! There are blocks for a whole dense copy, as for all records ([`records`](super::records)). If
//! the next change then needs more than a copy, and space is short, all leaves are written anew and
//! dense.

use std::collections::{BTreeMap, BTreeSet};

use defuse_fs::{Errno, Result};

use super::{BlockPool, FileContent};
use crate::format::BLOCK;
use crate::format::inode::{
    BlockPointer, EXTENT_BYTES, EXTENTS_OF_BLOCK, HEAD, InodeData, POINTERS, POINTERS_OF_BLOCK,
    block_of_extents, pointer_block,
};
use crate::format::slot::BODY;

/// Extents of the leaves into which a full leaf is divided at most: later extents will come between
/// them.
const FILLED: usize = EXTENTS_OF_BLOCK / 4 * 3;

/// Extents of two neighbouring leaves that become one.
const FEW: usize = EXTENTS_OF_BLOCK / 2;

/// Extents that leave no room for a name in a slot.
pub(super) const MANY: usize = (BODY - HEAD - 64) / EXTENT_BYTES;

/// A leaf.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct ExtentLeaf {
    /// The leaf's block and checksum, if the leaf is on the device.
    pointer: Option<BlockPointer>,
    /// The leaf differs from the device.
    pub(super) changed: bool,
}

/// All that is not in leaves.
#[derive(Default)]
pub(super) struct ExtentTree {
    /// The records before the extents, and their blocks.
    others: Vec<u8>,
    blocks: Vec<BlockPointer>,
    /// Blocks of pointers, with the pointers that they hold.
    inner: Vec<(Vec<BlockPointer>, BlockPointer)>,
}

/// The path to the records, as stored in the body of an inode.
pub(crate) struct RecordPath {
    pub(crate) levels: u8,
    pub(crate) bytes: u64,
    pub(crate) pointers: Vec<BlockPointer>,
}

/// Everything that a group writes of the records.
#[derive(Default)]
struct CopyPlan {
    /// The first pages of leaves.
    leaves: Vec<u64>,
    /// The records before the extents change.
    others: bool,
    /// Blocks that are written.
    count: usize,
    /// Blocks of the copy before that are not used any more.
    freed: Vec<u64>,
}

/// Blocks to be written, each with its content.
type NewBlocks = Vec<(u64, [u8; BLOCK])>;

impl FileContent {
    /// True where the extents lie in leaves, if the format of the file system has them.
    pub(crate) fn has_tree(&self, pool: &BlockPool) -> bool {
        pool.has_trees() && self.is_tree()
    }

    fn is_tree(&self) -> bool {
        matches!(self.data, InodeData::Extents(_)) && self.extents.count() > MANY
    }

    /// Makes the next group write all records to other blocks.
    pub(crate) fn forget_tree(&mut self) {
        self.extents.leaves_mut().clear();
        self.tree = ExtentTree::default();
    }

    /// Adds the changed records to `out`, with new blocks: the records of extents, and `others`,
    /// which come before them. `others_bytes` are the bytes of all names but the first, and of
    /// attributes.
    ///
    /// # Errors
    ///
    /// `EIO` if the space was not promised, `EFBIG` if a body cannot point to so many records.
    pub(crate) fn write_tree(
        &mut self,
        pool: &BlockPool,
        (others, others_bytes): (&[u8], usize),
        out: &mut NewBlocks,
    ) -> Result<RecordPath> {
        self.begin_copy();
        let mut plan = self.plan(others);
        if !self.has_room(pool, &plan, others_bytes) {
            self.forget_tree();
            plan = self.plan(others);
        }
        let mut writer = BlockWriter { pool, near: None, out, taken: Vec::new() };
        let written = self.write_planned(others, &plan, &mut writer);
        let taken = writer.taken;
        self.exchange_records(pool, &plan.freed, taken, others_bytes);
        written
    }

    /// Finds the blocks to write. If there is no tree, it makes one with dense leaves.
    fn plan(&mut self, others: &[u8]) -> CopyPlan {
        let mut plan = CopyPlan::default();
        let is_new = self.extents.leaves_mut().is_empty();
        if is_new {
            plan.freed = self.record_blocks().collect();
            self.tree = ExtentTree::default();
            self.extents.leaves_mut().insert(0, ExtentLeaf { pointer: None, changed: true });
        }
        let mut freed = self.balance();
        plan.leaves = changed_leaves(self.extents.leaves_mut()).collect();
        plan.others = is_new || self.tree.others != others;
        if plan.others {
            freed.extend(self.tree.blocks.iter().map(|pointer| pointer.block));
        }
        let blocks = if plan.others { others.len().div_ceil(BLOCK) } else { 0 };
        let mut kept: BTreeSet<u64> = BTreeSet::new();
        let mut inner = 0;
        let all = self.pointers(if plan.others { Some(blocks) } else { None });
        if all.len() > POINTERS {
            for (nth, chunk) in all.chunks(POINTERS_OF_BLOCK).enumerate() {
                match self.is_same(nth, chunk) {
                    Some(pointer) => {
                        kept.insert(pointer.block);
                    }
                    None => inner += 1,
                }
            }
        }
        let old = self.tree.inner.iter().map(|(_, pointer)| pointer.block);
        freed.extend(old.filter(|block| !kept.contains(block)));
        plan.count = plan.leaves.len() + blocks + inner;
        plan.freed.extend(freed);
        plan
    }

    /// Divides leaves that have too many extents, and joins neighbours that have few. Returns the
    /// blocks of the changed leaves.
    fn balance(&mut self) -> Vec<u64> {
        let mut freed = Vec::new();
        let touched: Vec<u64> = changed_leaves(self.extents.leaves_mut()).collect();
        for page in touched {
            // The leaf may have been joined with the leaf before it.
            if !self.extents.leaves_mut().contains_key(&page) {
                continue;
            }
            let (first, end, count) = self.join_few(page, &mut freed);
            let leaf = ExtentLeaf { pointer: None, changed: true };
            if let Some(old) = self.extents.leaves_mut().insert(first, leaf) {
                freed.extend(old.pointer.map(|pointer| pointer.block));
            }
            if count > EXTENTS_OF_BLOCK {
                // At the end nothing comes between them.
                let each = match end {
                    u64::MAX => EXTENTS_OF_BLOCK,
                    _ => count.div_ceil(count.div_ceil(FILLED)),
                };
                let begins: Vec<u64> =
                    self.extents.begin_in(first..end).map(|extent| extent.page).collect();
                let begins = begins.into_iter().step_by(each).skip(1);
                self.extents.leaves_mut().extend(begins.map(|page| (page, leaf)));
            }
        }
        freed
    }

    /// Joins the leaf of `page` with its neighbours while they have few extents. Returns its first
    /// page, its end, and the number of its extents.
    fn join_few(&mut self, page: u64, freed: &mut Vec<u64>) -> (u64, u64, usize) {
        let (mut first, mut end) = (page, self.end_of(page));
        let mut count = self.extents.count_in(first..end);
        loop {
            let before =
                self.extents.leaves_mut().range(..first).next_back().map(|(page, _)| *page);
            let (left, right) = (before, (end < u64::MAX).then_some(end));
            let others = left.map(|left| (left, left..first));
            let others =
                others.into_iter().chain(right.map(|right| (right, right..self.end_of(right))));
            let joins: Vec<(u64, std::ops::Range<u64>)> = others.collect();
            let fits =
                |pages: &std::ops::Range<u64>| count + self.extents.count_in(pages.clone()) <= FEW;
            let Some((_, pages)) = joins.into_iter().find(|(_, pages)| fits(pages)) else {
                return (first, end, count);
            };
            count += self.extents.count_in(pages.clone());
            let gone = if pages.start < first { first } else { pages.start };
            let gone = self.extents.leaves_mut().remove(&gone).and_then(|leaf| leaf.pointer);
            freed.extend(gone.map(|pointer| pointer.block));
            (first, end) = (first.min(pages.start), end.max(pages.end));
        }
    }

    /// The end of the range of the leaf that begins with `page`.
    fn end_of(&mut self, page: u64) -> u64 {
        self.extents.leaves_mut().range(page + 1..).next().map_or(u64::MAX, |(page, _)| *page)
    }

    /// All pointers, in order; `None` for blocks that are to be written. `others` is the number of
    /// blocks before the leaves, if these are to be written.
    fn pointers(&mut self, others: Option<usize>) -> Vec<Option<BlockPointer>> {
        let mut all: Vec<Option<BlockPointer>> = match others {
            Some(count) => vec![None; count],
            None => self.tree.blocks.iter().copied().map(Some).collect(),
        };
        all.extend(
            self.extents.leaves_mut().values().map(|leaf| leaf.pointer.filter(|_| !leaf.changed)),
        );
        all
    }

    /// The block of pointers that the device has, if it holds these.
    fn is_same(&self, nth: usize, chunk: &[Option<BlockPointer>]) -> Option<BlockPointer> {
        let (held, pointer) = self.tree.inner.get(nth)?;
        let same = held.len() == chunk.len() && held.iter().zip(chunk).all(|(a, b)| Some(*a) == *b);
        same.then_some(*pointer)
    }

    /// True where the plan needs no more blocks than are set aside, and leaves enough for a whole
    /// copy.
    fn has_room(&mut self, pool: &BlockPool, plan: &CopyPlan, others: usize) -> bool {
        let (aside, copy) = (self.reserved_blocks(), self.blocks_of_copy(others));
        let missing = plan.count.saturating_sub(aside as usize) as u64;
        let left = (aside + plan.freed.len() as u64).saturating_sub(plan.count as u64);
        let missing = missing.max(copy.saturating_sub(left));
        if missing > 0 && !pool.promise(missing, false) {
            return false;
        }
        self.add_aside(missing);
        true
    }

    fn write_planned(
        &mut self,
        others: &[u8],
        plan: &CopyPlan,
        writer: &mut BlockWriter<'_>,
    ) -> Result<RecordPath> {
        if plan.others {
            let blocks = others.chunks(BLOCK).map(|part| writer.write(part));
            self.tree.blocks = blocks.collect::<Result<_>>()?;
            self.tree.others = others.to_vec();
        }
        for page in &plan.leaves {
            let end = self.end_of(*page);
            let bytes = block_of_extents(self.extents.begin_in(*page..end));
            let pointer = Some(writer.write(&bytes)?);
            self.extents.leaves_mut().insert(*page, ExtentLeaf { pointer, changed: false });
        }
        let pointers: Vec<BlockPointer> = self.pointers(None).into_iter().flatten().collect();
        let bytes = (pointers.len() * BLOCK) as u64;
        if pointers.len() <= POINTERS {
            self.tree.inner.clear();
            return Ok(RecordPath { levels: 1, bytes, pointers });
        }
        let mut inner = Vec::new();
        for (nth, chunk) in pointers.chunks(POINTERS_OF_BLOCK).enumerate() {
            let same = self.tree.inner.get(nth).filter(|(held, _)| held == chunk);
            let pointer = match same {
                Some((_, pointer)) => *pointer,
                None => writer.write(&pointer_block(chunk))?,
            };
            inner.push((chunk.to_vec(), pointer));
        }
        self.tree.inner = inner;
        let pointers: Vec<BlockPointer> =
            self.tree.inner.iter().map(|(_, pointer)| *pointer).collect();
        if pointers.len() > POINTERS {
            return Err(Errno::EFBIG);
        }
        Ok(RecordPath { levels: 2, bytes, pointers })
    }
}

/// The first pages of leaves that are not as the device has them.
fn changed_leaves(leaves: &BTreeMap<u64, ExtentLeaf>) -> impl Iterator<Item = u64> {
    leaves.iter().filter(|(_, leaf)| leaf.changed).map(|(page, _)| *page)
}

/// Takes blocks for records, one after the other.
struct BlockWriter<'a> {
    pool: &'a BlockPool,
    near: Option<u64>,
    out: &'a mut NewBlocks,
    taken: Vec<u64>,
}

impl BlockWriter<'_> {
    fn write(&mut self, content: &[u8]) -> Result<BlockPointer> {
        let mut bytes = [0; BLOCK];
        bytes[..content.len()].copy_from_slice(content);
        let run = self.pool.space().take(1, self.near, 0).ok_or(Errno::EIO)?;
        self.near = Some(run.block);
        self.taken.push(run.block);
        self.out.push((run.block, bytes));
        Ok(BlockPointer { block: run.block, crc: crc32c::crc32c(&bytes) })
    }
}
