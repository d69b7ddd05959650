//! Ranges of a file: fallocate(2), and the data and holes of lseek(2).

use std::ops::Range;

use defuse_fs::{Errno, Fallocate, Result, Whence};

use super::frames::FrameSupply;
use super::pages::{ChangeDemand, PAGE, SIZE_MAX};
use super::{BlockPool, FileContent};
use crate::format::inode::DiskExtent;

/// The modes of fallocate(2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FallocateMode {
    Allocate,
    Zero,
    Punch,
    Collapse,
    Insert,
}

/// Reads the mode. `EOPNOTSUPP`.
fn mode(range: &Fallocate) -> Result<FallocateMode> {
    const KEEP: u32 = Fallocate::KEEP_SIZE;
    const PUNCH: u32 = Fallocate::PUNCH_HOLE | KEEP;
    match range.mode {
        PUNCH => Ok(FallocateMode::Punch),
        Fallocate::COLLAPSE_RANGE => Ok(FallocateMode::Collapse),
        Fallocate::INSERT_RANGE => Ok(FallocateMode::Insert),
        // No block has two owners, so that nothing is left to unshare.
        mode if mode & !(KEEP | Fallocate::UNSHARE_RANGE) == 0 => Ok(FallocateMode::Allocate),
        mode if mode & !KEEP == Fallocate::ZERO_RANGE => Ok(FallocateMode::Zero),
        _ => Err(Errno::EOPNOTSUPP),
    }
}

impl FileContent {
    /// The need of a [`fallocate`](FileContent::fallocate).
    pub(crate) fn need_fallocate(&self, range: &Fallocate) -> ChangeDemand {
        let end = range.offset.saturating_add(range.length);
        let mut need = match mode(range) {
            Ok(FallocateMode::Punch | FallocateMode::Zero) => self.need_edges(range.offset, end),
            _ => ChangeDemand::default(),
        };
        need.wanted.single += 1;
        need
    }

    /// Changes the blocks of a range, with the frames that
    /// [`need_fallocate`](FileContent::need_fallocate) demands.
    ///
    /// # Errors
    ///
    /// `EOPNOTSUPP` for a mode that does not exist, `EINVAL` for a range that the mode does not
    /// allow, `EFBIG`, `ENOSPC`.
    pub(crate) fn fallocate(
        &mut self,
        pool: &BlockPool,
        range: &Fallocate,
        supply: &mut FrameSupply,
    ) -> Result<()> {
        let mode = mode(range)?;
        let end = range.offset.checked_add(range.length).filter(|end| *end <= SIZE_MAX);
        let bytes = range.offset..end.ok_or(Errno::EFBIG)?;
        match mode {
            FallocateMode::Punch => self.punch(pool, bytes.clone(), supply)?,
            FallocateMode::Collapse => return self.collapse(pool, bytes),
            FallocateMode::Insert => return self.insert(pool, bytes, supply),
            FallocateMode::Zero => {
                self.move_inline_to_page(pool, supply)?;
                self.punch(pool, bytes.clone(), supply)?;
                self.allocate(pool, &bytes)?;
            }
            FallocateMode::Allocate => {
                self.move_inline_to_page(pool, supply)?;
                self.allocate(pool, &bytes)?;
            }
        }
        if matches!(mode, FallocateMode::Allocate | FallocateMode::Zero)
            && range.mode & Fallocate::KEEP_SIZE == 0
        {
            self.size = self.size.max(bytes.end);
        }
        Ok(())
    }

    /// Makes a hole: whole pages lose their blocks, and the edges become zeros.
    fn punch(
        &mut self,
        pool: &BlockPool,
        bytes: Range<u64>,
        supply: &mut FrameSupply,
    ) -> Result<()> {
        let size = self.size;
        let inside = |at: u64| at.min(size) as usize;
        if let crate::format::inode::InodeData::Inline(data) = &mut self.data {
            data[inside(bytes.start)..inside(bytes.end)].fill(0);
            return Ok(());
        }
        // An extent that loses its middle becomes two.
        self.promise_extents(pool, 1, true)?;
        let (first, last) = (bytes.start.div_ceil(PAGE), bytes.end / PAGE);
        if first > last {
            return self.zero_part(pool, bytes, supply);
        }
        self.zero_part(pool, bytes.start..first * PAGE, supply)?;
        self.zero_part(pool, last * PAGE..bytes.end, supply)?;
        self.drop_pages(pool, first..last);
        Ok(())
    }

    /// Zeroes a part of a page.
    fn zero_part(
        &mut self,
        pool: &BlockPool,
        bytes: Range<u64>,
        supply: &mut FrameSupply,
    ) -> Result<()> {
        let page = bytes.start / PAGE;
        if bytes.is_empty() || !self.has_data(page) {
            return Ok(());
        }
        let (from, to) = ((bytes.start - page * PAGE) as usize, (bytes.end - page * PAGE) as usize);
        self.change_page(pool, page, false, supply)?[from..to].fill(0);
        Ok(())
    }

    /// Gives blocks to all pages of the range. Nothing has changed after `ENOSPC`.
    fn allocate(&mut self, pool: &BlockPool, bytes: &Range<u64>) -> Result<()> {
        let pages = bytes.start / PAGE..bytes.end.div_ceil(PAGE);
        let holes = self.extents.holes(pages);
        let blocks = holes.iter().map(|hole| hole.end - hole.start).sum();
        if !pool.promise(blocks, false) {
            return Err(Errno::ENOSPC);
        }
        for extent in self.find_all_blocks(pool, &holes)? {
            self.extents.add(DiskExtent { unwritten: true, ..extent });
        }
        // Pages that wait for a block have one now.
        let promised = holes.into_iter().map(|hole| self.promised.take_out(hole) as u64);
        pool.unpromise(promised.sum());
        Ok(())
    }

    /// Takes blocks for all holes, in the place of promises, if there is space for the records that
    /// they need. `ENOSPC`, with the promises gone.
    fn find_all_blocks(
        &mut self,
        pool: &BlockPool,
        holes: &[Range<u64>],
    ) -> Result<Vec<DiskExtent>> {
        let mut taken = Vec::new();
        let mut found = Ok(());
        for hole in holes {
            match self.find_blocks(pool, hole.clone()) {
                Ok(mut more) => taken.append(&mut more),
                Err(errno) => {
                    pool.unpromise(hole.end - hole.start);
                    found = Err(errno);
                }
            }
        }
        // Pages that wait for a block split unwritten extents.
        let waiting = |hole: &Range<u64>| self.promised.count(hole.clone());
        let splits: usize = holes.iter().map(waiting).sum();
        let found = found.and_then(|()| self.promise_extents(pool, taken.len() + splits, false));
        let found = found.and_then(|()| self.promise_splits(pool, splits, false));
        if let Err(errno) = found {
            let mut space = pool.space();
            taken.into_iter().for_each(|extent| space.free(extent.into()));
            return Err(errno);
        }
        Ok(taken)
    }

    /// Takes a range out.
    fn collapse(&mut self, pool: &BlockPool, bytes: Range<u64>) -> Result<()> {
        let whole = bytes.start.is_multiple_of(PAGE) && bytes.end.is_multiple_of(PAGE);
        if !whole || bytes.end >= self.size {
            return Err(Errno::EINVAL);
        }
        let pages = bytes.start / PAGE..bytes.end / PAGE;
        let by = pages.end - pages.start;
        self.promise_extents(pool, 2, true)?;
        self.forget_pages(pool, pages.clone());
        let abandoned = self.extents.collapse(pages.clone());
        self.give_up(pool, abandoned);
        self.move_pages(pool, pages.end, |page| page - by);
        self.record_shift(pages.start);
        self.size -= bytes.end - bytes.start;
        Ok(())
    }

    /// Makes room for a hole.
    fn insert(
        &mut self,
        pool: &BlockPool,
        bytes: Range<u64>,
        supply: &mut FrameSupply,
    ) -> Result<()> {
        let length = bytes.end - bytes.start;
        let whole = bytes.start.is_multiple_of(PAGE) && length.is_multiple_of(PAGE);
        if !whole || bytes.start >= self.size {
            return Err(Errno::EINVAL);
        }
        if length > SIZE_MAX - self.size {
            return Err(Errno::EFBIG);
        }
        self.move_inline_to_page(pool, supply)?;
        self.promise_extents(pool, 1, false)?;
        // Blocks past the end hold no data, and would move beyond the largest offset.
        self.drop_pages(pool, self.size.div_ceil(PAGE)..u64::MAX);
        let (first, by) = (bytes.start / PAGE, length / PAGE);
        self.extents.insert(first, by);
        self.move_pages(pool, first, |page| page + by);
        self.record_shift(first);
        self.size += length;
        Ok(())
    }

    /// Moves the pages in memory from `first` on.
    fn move_pages(&mut self, pool: &BlockPool, first: u64, to: impl Fn(u64) -> u64) {
        let mut moved = Vec::new();
        self.pages.take_out(first..u64::MAX, |page, cached| moved.push((page, cached)));
        let pages: Vec<u64> = moved.iter().map(|(page, _)| to(*page)).collect();
        for (page, cached) in moved {
            self.pages.insert(to(page), cached);
        }
        // The number of calls depends on the number of pages, and not on their distances.
        for run in pages.chunk_by(|a, b| a + 1 == *b) {
            self.remember(pool, run[0], run.len() as u64);
        }
        let sets = [&mut self.dirty, &mut self.promised, &mut self.stuck, &mut self.waits];
        for set in sets {
            let moved = set.split_off(first);
            set.extend(moved.into_iter().map(&to));
        }
        move_ranges(&mut self.placed, first, &to);
        move_ranges(&mut self.early, first, &to);
    }

    /// lseek(2) for `SEEK_DATA` and `SEEK_HOLE`.
    ///
    /// # Errors
    ///
    /// `ENXIO` at or past the end, or where no data follows.
    pub(crate) fn seek(&self, offset: u64, whence: Whence) -> Result<u64> {
        if offset >= self.size {
            return Err(Errno::ENXIO);
        }
        if self.is_inline() {
            return Ok(if whence == Whence::Data { offset } else { self.size });
        }
        let page = offset / PAGE;
        match whence {
            Whence::Data => {
                let dirty = self.dirty.next(page);
                let next = self.extents.next_data(page).into_iter().chain(dirty).min();
                let at = next.ok_or(Errno::ENXIO)?.saturating_mul(PAGE).max(offset);
                if at < self.size { Ok(at) } else { Err(Errno::ENXIO) }
            }
            Whence::Hole => {
                let mut at = page;
                loop {
                    at = self.extents.next_hole(at);
                    if !self.dirty.contains(at) {
                        return Ok(at.saturating_mul(PAGE).max(offset).min(self.size));
                    }
                    at += 1;
                }
            }
        }
    }
}

/// Moves ranges of pages as pages from `first` on move. Where they move down, others make way.
fn move_ranges(ranges: &mut Vec<Range<u64>>, first: u64, to: impl Fn(u64) -> u64) {
    let stays = first.min(to(first));
    let below = |range: &Range<u64>| range.start..range.end.min(stays);
    let above = |range: &Range<u64>| {
        let start = range.start.max(first);
        (start < range.end).then(|| to(start)..to(range.end - 1) + 1)
    };
    let moved = ranges.iter().flat_map(|range| [Some(below(range)), above(range)]).flatten();
    *ranges = moved.filter(|range| !range.is_empty()).collect();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_move_with_their_pages() {
        let moved = |first, to: &dyn Fn(u64) -> u64| {
            let mut ranges = vec![0..4, 6..9, 12..13];
            move_ranges(&mut ranges, first, to);
            ranges
        };
        assert_eq!(moved(7, &|page| page + 10), [0..4, 6..7, 17..19, 22..23]);
        // Pages 2 to 7 go.
        assert_eq!(moved(8, &|page| page - 6), [0..2, 2..3, 6..7]);
        assert_eq!(moved(20, &|page| page - 3), [0..4, 6..9, 12..13]);
    }
}
