//! Reads and writes between a device and the memory of a caller (open(2), `O_DIRECT`), without
//! pages.
//!
//! A file may be used with and without `O_DIRECT` at the same time. Each direct operation looks for
//! pages that differ from the device. If there are some, it uses them, like all other operations. A
//! direct write drops the other pages of its range, so that no page is older than the device.
//!
//! A write to pages that have blocks *overwrites* these blocks from the caller's memory. Until the
//! device is done:
//!
//! - No page is filled from these blocks: the result of such a read is undefined.
//! - A page that is written meanwhile goes to another block.
//! - The blocks are not given up: they would be free, and the caller's bytes would be written to
//!   another file.
//!
//! All three rules apply to blocks and not to pages, since pages may move meanwhile
//! ([`ranges`](super::ranges)).
//!
//! A write to a hole takes new blocks. Only this write knows them until the device has written
//! them. The group that closes next flushes, and then records the blocks in the file: data is
//! first.

use std::collections::VecDeque;
use std::ops::Range;

use defuse_fs::{Errno, Result};

use super::pages::{PAGE, SIZE_MAX};
use super::{BlockPool, FileContent};
use crate::format::inode::{DiskExtent, InodeData};
use crate::space::BlockRun;

/// Overwritten runs that are remembered. A page that was read before more of them ended is read
/// again.
const REMEMBERED: usize = 256;

/// Direct writes of one file.
#[derive(Default)]
pub(super) struct DirectWrites {
    /// Blocks that a device overwrites now.
    flights: Vec<BlockRun>,
    /// Blocks in `flights` that the file has given up.
    kept: Vec<BlockRun>,
    /// Blocks that were overwritten, oldest first.
    over: VecDeque<BlockRun>,
    /// The number of runs that were ever overwritten.
    count: u64,
}

/// The place of bytes that are read directly.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DirectSource {
    pub(crate) run: BlockRun,
    /// Bytes of the file among them, from the beginning on.
    pub(crate) bytes: usize,
    /// The blocks belong to the file as long as the file has this version.
    pub(crate) version: u64,
}

/// The blocks of a direct write.
#[derive(Debug)]
pub(crate) struct DirectTarget {
    pages: Range<u64>,
    /// In the order of the pages.
    pub(crate) runs: Vec<BlockRun>,
    /// The blocks do not belong to the file yet.
    new: bool,
}

fn overlap(a: &BlockRun, b: &BlockRun) -> bool {
    a.block < b.end() && b.block < a.end()
}

/// The pages of a range of whole pages. `None` for another range.
pub(crate) fn whole_pages(offset: u64, len: u64) -> Option<Range<u64>> {
    let end = offset.checked_add(len).filter(|end| *end <= SIZE_MAX)?;
    let is_whole = len > 0 && offset.is_multiple_of(PAGE) && len.is_multiple_of(PAGE);
    is_whole.then_some(offset / PAGE..end / PAGE)
}

impl FileContent {
    /// The place of `len` bytes from `offset` on. `None` if they are not contiguous, or not all on
    /// the device.
    pub(crate) fn direct_source(
        &self,
        pool: &BlockPool,
        offset: u64,
        len: u64,
    ) -> Option<DirectSource> {
        let pages = whole_pages(offset, len)?;
        let bytes = self.size.checked_sub(offset).filter(|bytes| *bytes > 0)?.min(len);
        let count = bytes.div_ceil(PAGE);
        let pages = pages.start..pages.start + count;
        let extent = self.extents.find(pages.start).filter(|extent| !extent.unwritten)?;
        let is_one = u64::from(extent.count) >= count;
        if !is_one || self.differs(pool, &pages) {
            return None;
        }
        let run = BlockRun { block: extent.block, count: count as u32 };
        Some(DirectSource { run, bytes: bytes as usize, version: self.version })
    }

    /// True if pages are not on the device yet.
    fn differs(&self, pool: &BlockPool, pages: &Range<u64>) -> bool {
        if self.pages.is_empty() {
            return false;
        }
        let written = pool.newest_written();
        self.dirty.count(pages.clone()) > 0
            || self.pages.range(pages.clone()).any(|(_, page)| page.batch > written)
    }

    /// Begins a write of whole pages. `None` if the write involves pages in memory, or if only some
    /// of the pages have blocks. The caller must pass each target to
    /// [`end_direct`](FileContent::end_direct).
    ///
    /// # Errors
    ///
    /// `ENOSPC`.
    pub(crate) fn begin_direct(
        &mut self,
        pool: &BlockPool,
        offset: u64,
        len: u64,
    ) -> Result<Option<DirectTarget>> {
        let Some(pages) = whole_pages(offset, len) else { return Ok(None) };
        if self.ended || self.has_inline_bytes() || self.differs(pool, &pages) {
            return Ok(None);
        }
        let count = pages.end - pages.start;
        let here: Vec<DiskExtent> = self.extents.iter_range(pages.clone()).collect();
        let has: u64 = here.iter().map(|extent| u64::from(extent.count)).sum();
        let shifted = self.is_shifted(pool, pages.end - 1);
        let target = match has {
            has if has == count && !shifted => {
                let runs: Vec<BlockRun> = here.into_iter().map(BlockRun::from).collect();
                self.direct.flights.extend(&runs);
                DirectTarget { pages: pages.clone(), runs, new: false }
            }
            0 => {
                if !pool.promise(count, false) {
                    return Err(Errno::ENOSPC);
                }
                let found = self.find_blocks(pool, pages.clone()).map_err(|_| {
                    pool.unpromise(count);
                    Errno::ENOSPC
                })?;
                let runs = found.into_iter().map(BlockRun::from).collect();
                DirectTarget { pages: pages.clone(), runs, new: true }
            }
            _ => return Ok(None),
        };
        // None of the remaining pages is newer than the device.
        self.pages.take_out(pages, |_, page| drop(page));
        Ok(Some(target))
    }

    /// Ends a write. The device has all bytes unless `written` is an error; the error is `EIO` if
    /// the device refused some of them. The caller has a handle of the running group.
    ///
    /// # Errors
    ///
    /// `ENOSPC` if there is no room for the records of its blocks.
    pub(crate) fn end_direct(
        &mut self,
        pool: &BlockPool,
        target: DirectTarget,
        written: Result<()>,
    ) -> Result<()> {
        let DirectTarget { pages, runs, new } = target;
        if !new {
            self.end_flights(pool, &runs);
        }
        if written.is_err() || self.ended {
            if new {
                // Other errors than `EIO` mean that memory was short and the device received
                // nothing.
                give_back(pool, runs, written != Err(Errno::EIO));
            }
            return Ok(());
        }
        match new {
            true => self.add_new(pool, &pages, runs)?,
            false => self.has_overwritten(pool, &pages, &runs)?,
        }
        pool.record_direct_write();
        Ok(())
    }

    fn end_flights(&mut self, pool: &BlockPool, runs: &[BlockRun]) {
        let direct = &mut self.direct;
        for run in runs {
            let at = direct.flights.iter().position(|flight| flight == run);
            at.map(|at| direct.flights.swap_remove(at));
            direct.over.push_back(*run);
            direct.count += 1;
        }
        let old = direct.over.len().saturating_sub(REMEMBERED);
        direct.over.drain(..old);
        if direct.flights.is_empty() && !direct.kept.is_empty() {
            pool.give_up(std::mem::take(&mut direct.kept));
        }
    }

    /// Adds new blocks to the file. Writes of other threads to these pages count as earlier.
    fn add_new(&mut self, pool: &BlockPool, pages: &Range<u64>, runs: Vec<BlockRun>) -> Result<()> {
        let promised = self.promise_extents(pool, runs.len() + 2, false);
        if promised.is_err() || self.has_inline_bytes() {
            give_back(pool, runs, true);
            // Inline bytes were written meanwhile.
            return promised.and(Err(Errno::EBUSY));
        }
        if self.is_inline() {
            self.data = InodeData::Extents(Vec::new());
        }
        self.drop_pages(pool, pages.clone());
        let mut page = pages.start;
        for BlockRun { block, count } in runs {
            self.extents.add(DiskExtent { page, block, count, unwritten: false });
            page += u64::from(count);
        }
        self.early.push(pages.clone());
        self.size = self.size.max(pages.end * PAGE);
        Ok(())
    }

    /// Records that blocks of the file have other bytes; some of these blocks may have been
    /// unwritten.
    fn has_overwritten(
        &mut self,
        pool: &BlockPool,
        pages: &Range<u64>,
        runs: &[BlockRun],
    ) -> Result<()> {
        // If the file was truncated meanwhile, the truncation counts as later than the write.
        let last = self.extents.find(pages.end - 1).map(|extent| extent.block);
        if last == runs.last().map(|run| run.end() - 1) {
            self.size = self.size.max(pages.end * PAGE);
        }
        let mut unwritten = self.find_unwritten(pages.clone(), runs);
        if unwritten.is_empty() && self.shifted.is_some() {
            unwritten = self.find_unwritten(0..u64::MAX, runs);
        }
        if unwritten.is_empty() {
            return Ok(());
        }
        self.promise_extents(pool, 2 * unwritten.len(), true)?;
        for pages in unwritten {
            self.extents.mark_written(pages.clone());
            self.early.push(pages);
        }
        self.version += 1;
        Ok(())
    }

    /// The parts of `pages` whose blocks are among `runs` and are still unwritten.
    fn find_unwritten(&self, pages: Range<u64>, runs: &[BlockRun]) -> Vec<Range<u64>> {
        let unwritten = self.extents.iter_range(pages).filter(|extent| extent.unwritten);
        let parts = unwritten.flat_map(|extent| {
            let all = BlockRun::from(extent);
            runs.iter().filter(move |run| overlap(run, &all)).map(move |run| {
                let first = extent.page + (run.block.max(all.block) - all.block);
                let end = extent.page + (run.end().min(all.end()) - all.block);
                first..end
            })
        });
        parts.collect()
    }

    fn has_inline_bytes(&self) -> bool {
        matches!(&self.data, InodeData::Inline(bytes) if !bytes.is_empty())
    }

    /// Gives up blocks that the file no longer has, once no device overwrites them.
    pub(super) fn give_up(&mut self, pool: &BlockPool, runs: Vec<BlockRun>) {
        if runs.is_empty() {
            return;
        }
        self.lost_blocks = true;
        // Others may take the blocks when the group is durable, so that no write may be in flight
        // then.
        pool.await_early(&self.early_batches);
        let flights = &self.direct.flights;
        if flights.is_empty() {
            return pool.give_up(runs);
        }
        let busy = |run: &BlockRun| flights.iter().any(|flight| overlap(flight, run));
        let (kept, free): (Vec<BlockRun>, Vec<BlockRun>) = runs.into_iter().partition(busy);
        pool.give_up(free);
        self.direct.kept.extend(kept);
    }

    /// True while a device overwrites blocks of the file.
    pub(super) fn is_overwriting(&self) -> bool {
        !self.direct.flights.is_empty()
    }

    /// True while a device overwrites the block of this page.
    pub(super) fn is_overwritten(&self, page: u64) -> bool {
        if !self.is_overwriting() {
            return false;
        }
        let run = self.extents.find(page).map(|extent| BlockRun { block: extent.block, count: 1 });
        run.is_some_and(|run| self.direct.flights.iter().any(|flight| overlap(flight, &run)))
    }

    /// A number for [`is_stale`](FileContent::is_stale), taken before blocks are read.
    pub(crate) fn overwrite_count(&self) -> u64 {
        self.direct.count
    }

    /// True if blocks that were read after `before` may have been overwritten meanwhile.
    pub(crate) fn is_stale(&self, run: BlockRun, before: u64) -> bool {
        let direct = &self.direct;
        let since = (direct.count - before) as usize;
        let recent = direct.over.iter().rev().take(since);
        since > direct.over.len()
            || recent.chain(&direct.flights).any(|overwritten| overlap(overwritten, &run))
    }
}

/// Gives back blocks that no inode has mentioned. Blocks that the device refused are not used for a
/// while.
fn give_back(pool: &BlockPool, runs: Vec<BlockRun>, are_good: bool) {
    match are_good {
        true => {
            let mut space = pool.space();
            runs.into_iter().for_each(|run| space.free(run));
        }
        false => pool.quarantine(runs),
    }
}
