//! Reading and writing in memory: inline, or pages of 4 KiB.

use std::ops::Range;

use defuse_block::{FRAME, FrameRun};
use defuse_fs::{Errno, ReadBuf, Result};

use super::frames::{FrameDemand, FrameSupply, PageFrame};
use super::{BlockPool, FileContent};
use crate::format::BLOCK;
use crate::format::inode::{DiskExtent, INLINE, InodeData};

/// The largest size of a file: 2^63 - 1, the largest off_t.
pub(super) const SIZE_MAX: u64 = i64::MAX as u64;

pub(super) const PAGE: u64 = BLOCK as u64;

/// A page. Its bytes past the end of the file are zeros.
pub(super) struct CachedPage {
    pub(super) frame: PageFrame,
    /// The page was used since the clock last examined it.
    used: bool,
    /// The batch that wrote it: the page stays until the batch is on the device.
    pub(super) batch: u64,
    /// The entry of the clock that may drop the page.
    pub(super) entry: u64,
}

impl CachedPage {
    pub(super) fn new(frame: PageFrame) -> Self {
        CachedPage { frame, used: true, batch: 0, entry: 0 }
    }
}

/// Everything that a change needs before it can be made.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct ChangeDemand {
    /// Pages that are on the device and not in memory, each with its block.
    pub(crate) missing: Vec<(u64, u64)>,
    pub(crate) wanted: FrameDemand,
}

/// The pages that a range of bytes touches.
fn touched_pages(offset: u64, end: u64) -> Range<u64> {
    offset / PAGE..end.div_ceil(PAGE)
}

impl FileContent {
    /// The pages of a range of bytes that are on the device and not in memory, each with its block.
    pub(crate) fn find_missing(&self, offset: u64, len: u64) -> Vec<(u64, u64)> {
        let end = offset.saturating_add(len).min(self.size);
        if offset >= end || self.extents.is_empty() {
            return Vec::new();
        }
        let pages = touched_pages(offset, end);
        let mut cached = self.pages.range(pages.clone()).map(|(page, _)| page).peekable();
        let mut missing = Vec::new();
        // Unwritten blocks that a device is overwriting count as missing, since a reader must wait
        // for the write.
        let has_data = |extent: &DiskExtent| !extent.unwritten || self.is_overwriting();
        for extent in self.extents.iter_range(pages).filter(has_data) {
            for (page, block) in (extent.page..extent.end()).zip(extent.block..) {
                if extent.unwritten && !self.is_overwritten(page) {
                    continue;
                }
                while cached.next_if(|cached| *cached < page).is_some() {}
                if cached.peek() != Some(&page) {
                    missing.push((page, block));
                }
            }
        }
        missing
    }

    /// The need of a change of the pages at the edges of a range.
    pub(super) fn need_edges(&self, offset: u64, end: u64) -> ChangeDemand {
        let mut need = ChangeDemand::default();
        let edge = |at: u64| (offset < end && !at.is_multiple_of(PAGE)).then_some(at / PAGE);
        let first = edge(offset);
        for page in first.into_iter().chain(edge(end).filter(|last| Some(*last) != first)) {
            need.missing.extend(self.find_missing(page * PAGE, PAGE));
            need.wanted.single += usize::from(!self.can_change(page));
        }
        need
    }

    /// True if the page is in memory, and its frame is not shared.
    fn can_change(&self, page: u64) -> bool {
        self.pages.get(page).is_some_and(|page| page.frame.is_alone())
    }

    /// The need of a write of `len` bytes at `offset`.
    pub(crate) fn need_write(&self, offset: u64, len: u64) -> ChangeDemand {
        let end = offset.saturating_add(len);
        if self.is_inline() && end <= INLINE as u64 {
            return ChangeDemand::default();
        }
        let mut need = self.need_edges(offset, end);
        need.wanted.whole = (end / PAGE).saturating_sub(offset.div_ceil(PAGE)) as usize;
        need.wanted.single += usize::from(self.is_inline());
        need
    }

    /// The need of a change of the size to `size` bytes.
    pub(crate) fn need_size(&self, size: u64) -> ChangeDemand {
        let mut need = ChangeDemand::default();
        if size < self.size && !size.is_multiple_of(PAGE) {
            need.missing = self.find_missing(size - 1, 1);
        }
        need.wanted.single = 1;
        need
    }

    /// A number that changes when bytes that are being read from the device may be old.
    pub(crate) fn version(&self) -> u64 {
        self.version
    }

    /// Adds pages that were read from the device while the [`version`](FileContent::version) stayed
    /// unchanged.
    pub(crate) fn fill(&mut self, pool: &BlockPool, first: u64, frames: &[PageFrame]) {
        let mut new = false;
        for (page, frame) in (first..).zip(frames) {
            if !self.pages.contains(page) {
                new = true;
                self.pages.insert(page, CachedPage::new(frame.clone()));
            }
        }
        if new {
            self.remember(pool, first, frames.len() as u64);
        }
    }

    /// Reads; all pages of the range must be in memory, or have no data.
    ///
    /// # Errors
    ///
    /// Fails with the errors of `out`.
    pub(crate) fn read(&mut self, offset: u64, out: &mut ReadBuf<'_>) -> Result<()> {
        let end = self.size.min(offset.saturating_add(out.remaining() as u64));
        if offset >= end {
            return Ok(());
        }
        if let InodeData::Inline(bytes) = &self.data {
            out.put(&bytes[offset as usize..end as usize])?;
            return Ok(());
        }
        let mut at = offset;
        for (page, cached) in self.pages.range_mut(touched_pages(offset, end)) {
            let start = page * PAGE;
            append_zeros(out, start.saturating_sub(at))?;
            at = at.max(start);
            let (from, to) = ((at - start) as usize, (end - start).min(PAGE) as usize);
            out.put(&cached.frame.bytes()[from..to])?;
            cached.used = true;
            at = start + to as u64;
        }
        append_zeros(out, end.saturating_sub(at))
    }

    /// Writes at `offset`, with the frames that [`need_write`](FileContent::need_write) demands.
    /// Returns the number of bytes written, which is smaller if space has run out.
    ///
    /// # Errors
    ///
    /// `EFBIG`, `ENOSPC`.
    pub(crate) fn write(
        &mut self,
        pool: &BlockPool,
        offset: u64,
        data: &[u8],
        supply: &mut FrameSupply,
    ) -> Result<usize> {
        let end = offset.checked_add(data.len() as u64).filter(|end| *end <= SIZE_MAX);
        let end = end.ok_or(Errno::EFBIG)?;
        if data.is_empty() {
            return Ok(0);
        }
        if end > INLINE as u64 {
            self.move_inline_to_page(pool, supply)?;
        }
        if self.is_inline() {
            self.promise_inline(pool, self.size.max(end) as usize)?;
        }
        let taken = match &mut self.data {
            InodeData::Inline(bytes) => {
                if bytes.len() < end as usize {
                    bytes.resize(end as usize, 0);
                }
                bytes[offset as usize..end as usize].copy_from_slice(data);
                data.len()
            }
            _ => self.write_pages(pool, offset, data, supply)?,
        };
        self.size = self.size.max(offset + taken as u64);
        Ok(taken)
    }

    fn write_pages(
        &mut self,
        pool: &BlockPool,
        offset: u64,
        data: &[u8],
        supply: &mut FrameSupply,
    ) -> Result<usize> {
        let mut taken = 0;
        while taken < data.len() {
            let (at, rest) = (offset + taken as u64, &data[taken..]);
            let (page, from) = (at / PAGE, (at % PAGE) as usize);
            let whole = if from == 0 { rest.len() / BLOCK } else { 0 };
            let done = match whole {
                0 => {
                    let len = (BLOCK - from).min(rest.len());
                    let bytes = self.change_page(pool, page, false, supply);
                    bytes
                        .map(|bytes| bytes[from..from + len].copy_from_slice(&rest[..len]))
                        .map(|()| len)
                }
                whole => {
                    // After a run that found less space than pages, none is left.
                    let run = supply.next_whole(whole as u64).ok_or(Errno::ENOSPC);
                    run.and_then(|run| self.replace_pages(pool, page, run, rest))
                }
            };
            match done {
                Ok(done) if done > 0 => taken += done,
                Ok(_) | Err(_) if taken > 0 => break,
                Ok(_) => return Err(Errno::ENOSPC),
                Err(errno) => return Err(errno),
            }
        }
        Ok(taken)
    }

    /// Writes whole pages from `first` on: as many as the run has, or as there is space for.
    fn replace_pages(
        &mut self,
        pool: &BlockPool,
        first: u64,
        mut run: FrameRun,
        data: &[u8],
    ) -> Result<usize> {
        let pages = first..first + u64::from(run.count());
        let mut end = pages.end;
        let promised = self.promise_new(pool, &pages);
        for page in pages.clone().filter(|_| !promised) {
            if let Err(errno) = self.promise(pool, page, false) {
                if page == first {
                    return Err(errno);
                }
                end = page;
                break;
            }
        }
        let bytes = (end - first) as usize * FRAME;
        run[..bytes].copy_from_slice(&data[..bytes]);
        let mut new = false;
        for (page, frame) in (first..end).zip(PageFrame::split_run(run)) {
            new |= self.replace_page(pool, page, frame);
        }
        if new {
            self.remember(pool, first, end - first);
        }
        Ok(bytes)
    }

    /// Makes sure that there will be blocks for pages that have none, all at once. False, with
    /// nothing changed, where each page must be looked at.
    fn promise_new(&mut self, pool: &BlockPool, pages: &Range<u64>) -> bool {
        let count = (pages.end - pages.start) as usize;
        let known = self.promised.count(pages.clone()) > 0
            || self.extents.iter_range(pages.clone()).next().is_some();
        if known || self.is_shifted(pool, pages.end - 1) {
            return false;
        }
        // The blocks may not be contiguous.
        let extents = self.promise_extents(pool, count, false);
        if extents.is_err() || !pool.promise(count as u64, false) {
            return false;
        }
        if self.promise_splits(pool, count, false).is_err() {
            pool.unpromise(count as u64);
            return false;
        }
        self.promised.insert_all(pages.clone());
        true
    }

    /// Makes sure that there will be a block for a page that is about to change. With `moves`, its
    /// present block must not be overwritten, because a durable inode uses it. `ENOSPC`.
    pub(super) fn promise(&mut self, pool: &BlockPool, page: u64, moves: bool) -> Result<()> {
        let promised = self.promised.contains(page);
        let moves = moves || self.is_shifted(pool, page) || self.is_overwritten(page);
        let extent = self.extents.find(page);
        if promised || !moves && extent.is_some_and(|extent| !extent.unwritten) {
            return Ok(());
        }
        if !moves && extent.is_some() {
            // Allocated blocks can be written on a full device, too.
            let splits = if self.is_beside_dirty(page) { 0 } else { 2 };
            return self.promise_splits(pool, splits, true);
        }
        let splits = if extent.is_some() { 2 } else { 1 };
        self.promise_extents(pool, splits, moves)?;
        if !pool.promise(1, moves) {
            return Err(Errno::ENOSPC);
        }
        self.promise_splits(pool, splits, moves)?;
        self.promised.insert(page);
        Ok(())
    }

    /// True if the page or a neighbour in the same extent is dirty, so that both are one extent
    /// when they are written.
    fn is_beside_dirty(&self, page: u64) -> bool {
        let goes_on = |page: u64| self.extents.find(page).is_some_and(|extent| extent.count > 1);
        let dirty = |page: u64| self.dirty.contains(page);
        let before = || page.checked_sub(1).is_some_and(|before| dirty(before) && goes_on(before));
        dirty(page) || before() || dirty(page + 1) && goes_on(page)
    }

    /// Gives a page other bytes. It is dirty then. True where it was not in memory.
    fn replace_page(&mut self, pool: &BlockPool, page: u64, frame: PageFrame) -> bool {
        self.set_dirty(pool, page);
        let entry = self.pages.get(page).map(|old| old.entry);
        let new = CachedPage { entry: entry.unwrap_or_default(), ..CachedPage::new(frame) };
        self.pages.insert(page, new);
        entry.is_none()
    }

    pub(super) fn set_dirty(&mut self, pool: &BlockPool, page: u64) {
        if self.dirty.insert(page) {
            pool.page_is_dirty();
        }
    }

    /// The bytes of a page that is about to change, and is in memory or has no data.
    ///
    /// # Errors
    ///
    /// `ENOSPC`.
    pub(super) fn change_page(
        &mut self,
        pool: &BlockPool,
        page: u64,
        moves: bool,
        supply: &mut FrameSupply,
    ) -> Result<&mut [u8]> {
        let fresh = match self.can_change(page) {
            true => None,
            false => Some(supply.single().ok_or(Errno::ENOMEM)?),
        };
        self.promise(pool, page, moves)?;
        if let Some(mut fresh) = fresh {
            match self.pages.get(page) {
                Some(old) => fresh.copy_from_slice(old.frame.bytes()),
                None => fresh.fill(0),
            }
            for frame in PageFrame::split_run(fresh) {
                if self.replace_page(pool, page, frame) {
                    self.remember(pool, page, 1);
                }
            }
        }
        self.set_dirty(pool, page);
        let cached = self.pages.get_mut(page).ok_or(Errno::EIO)?;
        cached.used = true;
        cached.frame.bytes_mut().ok_or(Errno::EIO)
    }

    /// Moves inline data to a page. `ENOSPC`.
    pub(super) fn move_inline_to_page(
        &mut self,
        pool: &BlockPool,
        supply: &mut FrameSupply,
    ) -> Result<()> {
        let InodeData::Inline(bytes) = &mut self.data else { return Ok(()) };
        let bytes = std::mem::take(bytes);
        self.data = InodeData::Extents(Vec::new());
        if bytes.is_empty() {
            return Ok(());
        }
        match self.change_page(pool, 0, false, supply) {
            Ok(page) => page[..bytes.len()].copy_from_slice(&bytes),
            Err(errno) => {
                self.data = InodeData::Inline(bytes);
                return Err(errno);
            }
        }
        Ok(())
    }

    /// Changes the size of the file, with the frames that [`need_size`](FileContent::need_size)
    /// demands.
    ///
    /// # Errors
    ///
    /// `EFBIG`, `ENOSPC`.
    pub(crate) fn set_size(
        &mut self,
        pool: &BlockPool,
        size: u64,
        supply: &mut FrameSupply,
    ) -> Result<()> {
        if size > SIZE_MAX {
            return Err(Errno::EFBIG);
        }
        if size > INLINE as u64 {
            self.move_inline_to_page(pool, supply)?;
        }
        if self.is_inline() && size > self.size {
            self.promise_inline(pool, size as usize)?;
        }
        if let InodeData::Inline(bytes) = &mut self.data {
            bytes.resize(size as usize, 0);
        } else if size < self.size {
            self.cut_pages(pool, size, supply)?;
        }
        self.size = size;
        Ok(())
    }

    fn cut_pages(&mut self, pool: &BlockPool, size: u64, supply: &mut FrameSupply) -> Result<()> {
        // The end of the last page becomes zeros, in another block: the old size may come back.
        let last = size / PAGE;
        if !size.is_multiple_of(PAGE) && self.has_data(last) {
            let moves = pool.commit_rules().tails_move;
            self.change_page(pool, last, moves, supply)?[(size % PAGE) as usize..].fill(0);
        }
        self.drop_pages(pool, size.div_ceil(PAGE)..u64::MAX);
        if size == 0 {
            self.data = InodeData::Inline(Vec::new());
        }
        Ok(())
    }

    /// True if the page is in memory or has data on the device.
    pub(super) fn has_data(&self, page: u64) -> bool {
        self.pages.contains(page) || self.extents.find(page).is_some_and(|extent| !extent.unwritten)
    }

    /// Takes pages and their blocks away.
    pub(super) fn drop_pages(&mut self, pool: &BlockPool, pages: Range<u64>) {
        self.forget_pages(pool, pages.clone());
        let abandoned = self.extents.cut(pages);
        self.give_up(pool, abandoned);
        self.version += 1;
    }

    /// Takes pages out of memory, whatever they hold.
    pub(super) fn forget_pages(&mut self, pool: &BlockPool, pages: Range<u64>) {
        self.pages.take_out(pages.clone(), |_, cached| drop(cached));
        self.stuck.take_out(pages.clone());
        self.waits.take_out(pages.clone());
        let dirty = self.dirty.take_out(pages.clone());
        let promised = self.promised.take_out(pages);
        pool.forget_pages(dirty, promised);
    }

    /// Drops the pages of a clock entry, which came into memory together, if all of them are on the
    /// device and none was used since the last call: the memory of a run is free when its last page
    /// is. Returns the number of dropped pages, and true if the entry stays.
    pub(super) fn evict(
        &mut self,
        pool: &BlockPool,
        entry: u64,
        (first, count): (u64, u64),
    ) -> (usize, bool) {
        let written = pool.newest_written();
        let pages = first..first.saturating_add(count);
        let (mut kept, mut all, mut its) = (false, 0, Vec::new());
        for (page, cached) in self.pages.range_mut(pages.clone()) {
            all += 1;
            if cached.entry == entry {
                its.push(page);
                let busy = cached.batch > written || self.dirty.contains(page);
                kept |= std::mem::take(&mut cached.used) || busy;
            }
        }
        if kept {
            return (0, true);
        }
        match its.len() == all {
            true => self.pages.take_out(pages, |_, cached| drop(cached)),
            false => its.iter().for_each(|page| {
                self.pages.take_out(*page..page + 1, |_, cached| drop(cached));
            }),
        }
        (its.len(), false)
    }

    /// True if pages of an entry of the clock are in memory.
    pub(super) fn has_pages_of(&self, entry: u64, first: u64, count: u64) -> bool {
        let mut pages = self.pages.range(first..first.saturating_add(count));
        pages.any(|(_, page)| page.entry == entry)
    }
}

/// Appends zeros, as many as fit.
fn append_zeros(out: &mut ReadBuf<'_>, len: u64) -> Result<()> {
    out.put_zeros(usize::try_from(len).unwrap_or(usize::MAX)).map(drop)
}
