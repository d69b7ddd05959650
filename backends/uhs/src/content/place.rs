//! Blocks for the pages that a group writes, and for the records that locate them.

use std::collections::BTreeSet;
use std::ops::Range;

use defuse_fs::{Errno, Result};

use super::frames::PageFrame;
use super::page_set::PageSet;
use super::pages::PAGE;
use super::{BlockPool, FileContent};
use crate::format::UNIT_BLOCKS;
use crate::format::inode::DiskExtent;
use crate::space::BlockRun;

/// The number of blocks from which on a large file begins another unit.
const BEGINNING: u32 = 64;

/// The number of a batch that has not begun.
const RUNNING: u64 = u64::MAX;

impl FileContent {
    /// Gives blocks to the pages that need some, and adds all dirty pages to `data`, which is
    /// written before the inode. `batch` is the number of the group among the groups that write
    /// data. With `skip_stuck`, stuck pages wait for the next group. True if the inode changed.
    ///
    /// # Errors
    ///
    /// `EIO`: a promise cannot be kept.
    pub(crate) fn allocate_blocks(
        &mut self,
        pool: &BlockPool,
        batch: u64,
        data: &mut Vec<(u64, PageFrame)>,
        skip_stuck: bool,
    ) -> Result<bool> {
        if let Some((_, when @ RUNNING)) = &mut self.shifted {
            *when = batch;
        }
        self.placed.clear();
        std::mem::swap(&mut self.placed, &mut self.early);
        if self.dirty.is_empty() {
            self.lost_blocks = false;
            self.recorded = (self.size, self.extents.changes());
            return Ok(!self.placed.is_empty());
        }
        let (wanting, dirty) = self.take_waiting(skip_stuck);
        let changed = self.allocate_for_pages(pool, batch, (&wanting, &dirty), data)?;
        // The group that writes the inode without these blocks frees them.
        self.lost_blocks = false;
        self.recorded = (self.size, self.extents.changes());
        // The blocks of these pages have replaced the promises.
        pool.forget_pages(dirty.len(), 0);
        Ok(changed)
    }

    /// The pages that a write of `len` bytes at `offset` made ready to be written before their
    /// group: whole runs of `run` pages, all of which wait for a block.
    pub(crate) fn take_ready(
        &mut self,
        pool: &BlockPool,
        offset: u64,
        len: u64,
        run: u64,
    ) -> Option<Range<u64>> {
        let pages = offset / PAGE / run * run..(offset + len) / PAGE / run * run;
        let all = (pages.end - pages.start) as usize;
        let whole = |set: &PageSet| set.count(pages.clone()) == all;
        let is_ready = all > 0
            && whole(&self.promised)
            && whole(&self.dirty)
            && self.stuck.is_empty()
            && !self.is_shifted(pool, pages.end - 1);
        is_ready.then_some(pages)
    }

    /// Gives blocks to pages that are [`take_ready`](FileContent::take_ready), and returns the
    /// pages to be written at once, with the number of their batch. The next group records these
    /// blocks in the inode, once they are written.
    ///
    /// # Errors
    ///
    /// `EIO`: a promise cannot be kept.
    pub(crate) fn allocate_early(
        &mut self,
        pool: &BlockPool,
        pages: Range<u64>,
    ) -> Result<(u64, Vec<(u64, PageFrame)>)> {
        let batch = pool.next_early_batch();
        let (mut data, before) = (Vec::new(), self.placed.len());
        let all: Vec<u64> = pages.clone().collect();
        if let Err(errno) = self.allocate_for_pages(pool, batch, (&all, &all), &mut data) {
            // The pages wait for the group as before. The group gives up their blocks.
            if self.placed.len() > before {
                pool.exchange(0, all.len() as u64);
            }
            pool.record_early_write(batch);
            return Err(errno);
        }
        self.early.extend(self.placed.drain(before..));
        self.early_batches.insert(batch);
        self.promised.take_out(pages.clone());
        self.dirty.take_out(pages);
        self.record_placed(all.len());
        pool.forget_pages(all.len(), 0);
        Ok((batch, data))
    }

    /// Takes the dirty pages of a content that [is as recorded](FileContent::is_as_recorded), each
    /// with its block, to be written as this batch.
    ///
    /// # Errors
    ///
    /// `EIO`: a page has no block.
    pub(crate) fn take_in_place(
        &mut self,
        pool: &BlockPool,
        batch: u64,
    ) -> Result<Vec<(u64, PageFrame)>> {
        // The group that placed pages has written them.
        self.placed.clear();
        let (mut data, dirty) = (Vec::new(), self.dirty.take_all_but(&PageSet::default()));
        self.allocate_for_pages(pool, batch, (&[], &dirty), &mut data)?;
        pool.forget_pages(dirty.len(), 0);
        Ok(data)
    }

    /// The early batches of pages that the closing group records.
    pub(crate) fn take_early_batches(&mut self) -> BTreeSet<u64> {
        std::mem::take(&mut self.early_batches)
    }

    /// Gives blocks to `wanting` pages, and adds the `dirty` ones to `data`. True where the inode
    /// changed.
    fn allocate_for_pages(
        &mut self,
        pool: &BlockPool,
        batch: u64,
        (wanting, dirty): (&[u64], &[u64]),
        data: &mut Vec<(u64, PageFrame)>,
    ) -> Result<bool> {
        for run in wanting.chunk_by(|a, b| a + 1 == *b) {
            let pages = run[0]..run[0] + run.len() as u64;
            self.take_blocks(pool, pages.clone())?;
            self.placed.push(pages);
        }
        let mut changed = !wanting.is_empty();
        for run in dirty.chunk_by(|a, b| a + 1 == *b) {
            let pages = run[0]..run[0] + run.len() as u64;
            let unwritten =
                self.extents.iter_range(pages.clone()).filter(|extent| extent.unwritten);
            let before = self.placed.len();
            self.placed.extend(unwritten.map(|extent| extent.page..extent.end()));
            changed |= self.placed.len() > before;
            self.extents.mark_written(pages.clone());
            let extents = self.extents.iter_range(pages.clone());
            let mut blocks =
                extents.flat_map(|extent| (extent.page..extent.end()).zip(extent.block..));
            for (page, cached) in self.pages.range_mut(pages) {
                let (_, block) = blocks.next().filter(|(at, _)| *at == page).ok_or(Errno::EIO)?;
                cached.batch = batch;
                data.push((block, cached.frame.clone()));
            }
        }
        self.version += 1;
        Ok(changed)
    }

    /// Gives new blocks to pages. The blocks were promised.
    fn take_blocks(&mut self, pool: &BlockPool, pages: Range<u64>) -> Result<()> {
        let abandoned = self.extents.cut(pages.clone());
        self.give_up(pool, abandoned);
        let taken = self.find_blocks(pool, pages)?;
        taken.into_iter().for_each(|extent| self.extents.add(extent));
        Ok(())
    }

    /// Takes blocks for pages that have none, in the place of a promise of so many: whole units for
    /// whole units of pages, else blocks behind the blocks of the pages before. A file that grows
    /// takes its blocks ahead. `EIO` if the space was not promised; the promise is unchanged then.
    pub(super) fn find_blocks(
        &mut self,
        pool: &BlockPool,
        pages: Range<u64>,
    ) -> Result<Vec<DiskExtent>> {
        let grows = self.continues_growth(&pages);
        let mut taken: Vec<DiskExtent> = Vec::new();
        let mut page = pages.start;
        while page < pages.end {
            let in_unit = UNIT_BLOCKS - page % UNIT_BLOCKS;
            let count = in_unit.min(pages.end - page) as u32;
            let before = taken.last().copied().or_else(|| self.extents.last_before(page));
            // Pages behind a hole are not placed where the pages of the hole would continue, but
            // beside others that are written now.
            let before = before.filter(|extent| extent.end() == page);
            let near = before.map(|extent| extent.block + u64::from(extent.count) - 1);
            let mut space = pool.space();
            let keep = pool.reserved_units(&space);
            let ahead =
                if grows { self.take_ahead(pool, &mut space, (page, count), near) } else { None };
            // A large file continues in a unit of its own.
            let begins = page >= UNIT_BLOCKS && in_unit == UNIT_BLOCKS && count >= BEGINNING;
            let run =
                ahead.or_else(|| begins.then(|| space.take_fresh(count, near, keep)).flatten());
            let run = run.or_else(|| space.take(count, near, keep));
            let Some(run) = run.or_else(|| space.take(count, near, 0)) else {
                for extent in taken {
                    space.free(extent.into());
                    pool.exchange(0, extent.count.into());
                }
                return Err(Errno::EIO);
            };
            let BlockRun { block, count } = run;
            // Under the lock of the space, so that no block counts twice.
            pool.unpromise(count.into());
            drop(space);
            taken.push(DiskExtent { page, block, count, unwritten: false });
            page += u64::from(count);
        }
        Ok(taken)
    }

    /// From `page` on, blocks are at other places than in the inode that is durable.
    pub(super) fn record_shift(&mut self, page: u64) {
        let first = self.shifted.map_or(page, |(first, _)| first.min(page));
        self.shifted = Some((first, RUNNING));
        self.version += 1;
    }

    /// True if the next group has to know that blocks have moved.
    pub(super) fn is_shifting(&self) -> bool {
        matches!(self.shifted, Some((_, RUNNING)))
    }

    /// True if the durable inode may have the block of this page at another page.
    pub(super) fn is_shifted(&mut self, pool: &BlockPool, page: u64) -> bool {
        match self.shifted {
            Some((_, batch)) if pool.is_durable(batch) => {
                self.shifted = None;
                false
            }
            Some((first, _)) => page >= first && pool.commit_rules().shifted_blocks_move,
            None => false,
        }
    }
}
