//! Blocks that a compaction empties.

use std::ops::Range;

use defuse_fs::{Errno, Result};

use super::pages::{ChangeDemand, PAGE};
use super::{BlockPool, FileContent};
use crate::format::UNIT_BLOCKS;
use crate::format::inode::DiskExtent;

impl FileContent {
    /// True where a block of the file, or one with its records, is one of these. All blocks of a
    /// unit are, or none.
    pub(crate) fn has_blocks_at(&self, is: &dyn Fn(u64) -> bool) -> bool {
        self.has_records_at(is) || self.next_at(0, 1, is).is_some()
    }

    /// The first pages from `page` on whose blocks are among these: up to `most` of one extent. All
    /// blocks of a unit are, or none.
    pub(crate) fn next_at(
        &self,
        page: u64,
        most: u64,
        is: &dyn Fn(u64) -> bool,
    ) -> Option<Range<u64>> {
        self.extents.iter_range(page..u64::MAX).find_map(
            |DiskExtent { page, block, count, .. }| {
                let end = block + u64::from(count);
                let mut at = block;
                while at < end {
                    let next = (at / UNIT_BLOCKS + 1) * UNIT_BLOCKS;
                    if is(at) {
                        let first = page + (at - block);
                        return Some(first..first + most.min(next.min(end) - at));
                    }
                    at = next;
                }
                None
            },
        )
    }

    /// The need of [`relocate_pages`](FileContent::relocate_pages): their bytes.
    pub(crate) fn need_move(&self, pages: &Range<u64>) -> ChangeDemand {
        // A forged extent may lie behind the last page of a file.
        let bytes = |pages: u64| pages.saturating_mul(PAGE);
        let missing = self.find_missing(bytes(pages.start), bytes(pages.end - pages.start));
        ChangeDemand { missing, ..ChangeDemand::default() }
    }

    /// Lets the next group write these pages to other blocks, as far as theirs are among these.
    /// Returns how many move.
    ///
    /// # Errors
    ///
    /// `ENOSPC`.
    pub(crate) fn relocate_pages(
        &mut self,
        pool: &BlockPool,
        pages: &Range<u64>,
        is: &dyn Fn(u64) -> bool,
    ) -> Result<u64> {
        let extents: Vec<DiskExtent> = self.extents.iter_range(pages.clone()).collect();
        let mut moved = 0;
        for extent in extents {
            if extent.unwritten {
                moved += self.move_unwritten(pool, extent, is)?;
                continue;
            }
            for (page, block) in (extent.page..extent.end()).zip(extent.block..) {
                // Pages past the end, and stuck pages, stay.
                if is(block) && self.pages.contains(page) && !self.stuck.contains(page) {
                    self.promise(pool, page, true)?;
                    self.set_dirty(pool, page);
                    moved += 1;
                }
            }
        }
        Ok(moved)
    }

    /// Gives pages without bytes other blocks at once.
    fn move_unwritten(
        &mut self,
        pool: &BlockPool,
        extent: DiskExtent,
        is: &dyn Fn(u64) -> bool,
    ) -> Result<u64> {
        let (pages, count) = (extent.page..extent.end(), u64::from(extent.count));
        // The blocks of dirty pages are about to be written.
        if !is(extent.block) || self.dirty.count(pages.clone()) > 0 {
            return Ok(0);
        }
        self.promise_extents(pool, extent.count as usize + 1, false)?;
        if !pool.promise(count, false) {
            return Err(Errno::ENOSPC);
        }
        let taken = self.find_blocks(pool, pages.clone()).map_err(|_| {
            pool.unpromise(count);
            Errno::ENOSPC
        })?;
        let abandoned = self.extents.cut(pages.clone());
        self.give_up(pool, abandoned);
        taken.into_iter().for_each(|new| self.extents.add(DiskExtent { unwritten: true, ..new }));
        // The inode that is durable has other blocks there.
        self.record_shift(pages.start);
        Ok(count)
    }
}
