//! Blocks for the pages that a group writes, and for the records that say where they are.

use std::ops::Range;

use defuse_fs::{Errno, Result};

use super::frames::Frame;
use super::pool::KEEP_UNITS;
use super::{Content, Pool};
use crate::format::inode::{EXTENT_BYTES, Extent};
use crate::format::{BLOCK, UNIT_BLOCKS};
use crate::space::Run;

/// Extents of a file at most. Each change of it writes all of their records.
const MOST_EXTENTS: usize = 1 << 20;

/// Bytes of extents that find room in the slot beside other records, or in the blocks that are kept.
const SMALL_RECORDS: usize = 2048;

/// Blocks for which a large file begins another unit.
const BEGINNING: u32 = 64;

/// A batch that has not begun.
const RUNNING: u64 = u64::MAX;

impl Content {
    /// Gives blocks to the pages that need some, and adds all dirty pages to `data`, which is written
    /// before the inode. `batch` is the number of the group among those that write data. True where the
    /// inode changed.
    ///
    /// # Errors
    ///
    /// `EIO`: a promise cannot be kept.
    pub(crate) fn place(
        &mut self,
        pool: &Pool,
        batch: u64,
        data: &mut Vec<(u64, Frame)>,
    ) -> Result<bool> {
        if let Some((_, when @ RUNNING)) = &mut self.shifted {
            *when = batch;
        }
        if self.dirty.is_empty() {
            return Ok(false);
        }
        let wanting: Vec<u64> = std::mem::take(&mut self.promised).into_iter().collect();
        for run in wanting.chunk_by(|a, b| a + 1 == *b) {
            self.take_blocks(pool, run[0]..run[0] + run.len() as u64, false)?;
        }
        let dirty: Vec<u64> = std::mem::take(&mut self.dirty).into_iter().collect();
        let mut changed = !wanting.is_empty();
        for run in dirty.chunk_by(|a, b| a + 1 == *b) {
            let pages = run[0]..run[0] + run.len() as u64;
            changed |= self.extents.within(pages.clone()).any(|extent| extent.unwritten);
            self.extents.written(pages.clone());
            let extents = self.extents.within(pages.clone());
            let mut blocks =
                extents.flat_map(|extent| (extent.page..extent.end()).zip(extent.block..));
            for (page, cached) in self.pages.range_mut(pages) {
                let (_, block) = blocks.next().filter(|(at, _)| at == page).ok_or(Errno::EIO)?;
                cached.batch = batch;
                data.push((block, cached.frame.clone()));
            }
        }
        self.version += 1;
        pool.forget_pages(dirty.len(), wanting.len());
        Ok(changed)
    }

    /// Gives new blocks to pages: whole units where whole units of pages are asked for, else blocks behind
    /// those of the pages before.
    pub(super) fn take_blocks(
        &mut self,
        pool: &Pool,
        pages: Range<u64>,
        unwritten: bool,
    ) -> Result<()> {
        pool.give_up(self.extents.cut(pages.clone()));
        let mut page = pages.start;
        while page < pages.end {
            let in_unit = UNIT_BLOCKS - page % UNIT_BLOCKS;
            let count = in_unit.min(pages.end - page) as u32;
            let near =
                self.extents.before(page).map(|extent| extent.block + u64::from(extent.count) - 1);
            let mut space = pool.space();
            // A large file goes on in a unit of its own.
            let begins = page >= UNIT_BLOCKS && in_unit == UNIT_BLOCKS && count >= BEGINNING;
            let run = begins.then(|| space.take_fresh(count, near, KEEP_UNITS)).flatten();
            let run = run.or_else(|| space.take(count, near, KEEP_UNITS));
            let run = run.or_else(|| space.take(count, near, 0)).ok_or(Errno::EIO)?;
            drop(space);
            let Run { block, count } = run;
            self.extents.add(Extent { page, block, count, unwritten });
            page += u64::from(count);
        }
        Ok(())
    }

    /// Makes sure that there will be blocks for the records of so many more extents. False where there are
    /// none.
    pub(super) fn promise_records(&mut self, pool: &Pool, more: usize) -> bool {
        let extents = self.extents.count() + self.promised.len() + more + 1;
        let bytes = extents * EXTENT_BYTES;
        let wanted = bytes.div_ceil(BLOCK) as u64;
        if bytes <= SMALL_RECORDS || wanted < self.records_promised {
            return true;
        }
        // More than now, so that not every page asks, with the blocks of pointers.
        let wanted = wanted + wanted / 8 + 4;
        let missing = wanted - self.records_promised;
        let has_space = extents < MOST_EXTENTS && pool.promise(missing, false);
        self.records_promised += if has_space { missing } else { 0 };
        has_space
    }

    /// From `page` on, blocks are at other places than in the inode that is durable.
    pub(super) fn has_shifted(&mut self, page: u64) {
        let first = self.shifted.map_or(page, |(first, _)| first.min(page));
        self.shifted = Some((first, RUNNING));
        self.version += 1;
    }

    /// True if the next group has to know that blocks have moved.
    pub(super) fn is_shifting(&self) -> bool {
        matches!(self.shifted, Some((_, RUNNING)))
    }

    /// True if the durable inode may have the block of this page at another page.
    pub(super) fn is_shifted(&mut self, pool: &Pool, page: u64) -> bool {
        match self.shifted {
            Some((_, batch)) if pool.is_durable(batch) => {
                self.shifted = None;
                false
            }
            Some((first, _)) => page >= first && pool.rules().shifted_blocks_move,
            None => false,
        }
    }
}
