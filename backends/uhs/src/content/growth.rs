//! Blocks ahead of a file that grows: reserved blocks that the file takes next, and no other file
//! takes meanwhile.
//!
//! The more a file has grown since it was opened, the more is reserved: as many blocks again, then
//! whole units. So a file that is appended to with a sync each has few extents, however many such
//! files there are. When the file is closed, or space is short, the reserved blocks are given back
//! ([`BlockSpace`]).

use std::ops::Range;

use super::pages::PAGE;
use super::{BlockPool, FileContent};
use crate::format::UNIT_BLOCKS;
use crate::space::{BlockRun, BlockSpace};

/// Blocks that are kept at first.
const FEWEST: u64 = 16;

/// Units that are kept at most: 64 MiB.
const MOST_UNITS: u64 = 32;

/// Runs of a unit of pages up to which no data moves: a file that grows with blocks ahead has
/// fewer.
const SCATTERED: usize = 16;

/// The growth of a file.
#[derive(Default)]
pub(super) struct FileGrowth {
    /// The number of the file among the files that have blocks ahead; 0 for none.
    owner: u64,
    /// Pages that were added since the file was opened.
    pages: u64,
}

impl FileContent {
    /// True if the pages that take blocks now continue the file at its end, behind pages that have
    /// blocks.
    pub(super) fn continues_growth(&mut self, pages: &Range<u64>) -> bool {
        let before =
            self.extents.last_before(pages.start).is_some_and(|extent| extent.end() == pages.start);
        let grows = before
            && pages.end >= self.size.div_ceil(PAGE)
            && self.extents.iter_range(pages.end..u64::MAX).next().is_none();
        if grows {
            self.growth.pages += pages.end - pages.start;
        }
        grows
    }

    /// Takes up to `count` blocks ahead of the file for the pages from `page` on. If there are
    /// none, others are reserved first.
    pub(super) fn take_ahead(
        &mut self,
        pool: &BlockPool,
        space: &mut BlockSpace,
        (page, count): (u64, u32),
        near: Option<u64>,
    ) -> Option<BlockRun> {
        if self.growth.owner == 0 {
            self.growth.owner = space.new_owner();
        }
        let owner = self.growth.owner;
        let taken = near.and_then(|near| space.take_ahead(owner, near + 1, count));
        taken.or_else(|| {
            let first = self.keep_ahead(pool, space, (page, count), near)?;
            pool.note_ahead(space);
            space.take_ahead(owner, first, count)
        })
    }

    fn keep_ahead(
        &self,
        pool: &BlockPool,
        space: &mut BlockSpace,
        (page, count): (u64, u32),
        near: Option<u64>,
    ) -> Option<u64> {
        let (owner, keep) = (self.growth.owner, pool.reserved_units(space));
        let wanted = self.growth.pages.next_power_of_two().max(u64::from(count));
        let units = (wanted / UNIT_BLOCKS).clamp(1, MOST_UNITS);
        if page >= UNIT_BLOCKS && page.is_multiple_of(UNIT_BLOCKS) {
            let has_plenty = pool.has_plenty_of_units(space, units as u32);
            return has_plenty.then(|| space.keep_units_ahead(owner, units as u32, near, keep))?;
        }
        // The next unit of pages begins with a unit.
        let wanted = wanted.max(FEWEST).min(UNIT_BLOCKS - page % UNIT_BLOCKS) as u32;
        pool.has_plenty(space, wanted).then(|| space.keep_ahead(owner, wanted, near, keep + 1))?
    }

    /// The units of pages that are [scattered](FileContent::is_scattered), and of which the last
    /// group wrote pages for the first time.
    pub(crate) fn list_scattered(&self) -> Vec<u64> {
        if self.extents.count() <= SCATTERED {
            return Vec::new();
        }
        let units = |pages: &Range<u64>| pages.start / UNIT_BLOCKS..pages.end.div_ceil(UNIT_BLOCKS);
        let mut units: Vec<u64> = self.placed.iter().flat_map(units).collect();
        units.dedup();
        units.retain(|unit| self.is_scattered(*unit));
        units
    }

    /// True if all pages of a unit of pages have data, in so many runs that one unit of blocks is
    /// better.
    pub(crate) fn is_scattered(&self, unit: u64) -> bool {
        let pages = unit * UNIT_BLOCKS..(unit + 1) * UNIT_BLOCKS;
        let has_data = |page: u64| self.extents.find(page).is_some_and(|extent| !extent.unwritten);
        // The ends first: most units are not full.
        if self.size < pages.end * PAGE || !has_data(pages.start) || !has_data(pages.end - 1) {
            return false;
        }
        let (mut runs, mut blocks) = (0, 0);
        for extent in self.extents.iter_range(pages).filter(|extent| !extent.unwritten) {
            runs += 1;
            blocks += u64::from(extent.count);
        }
        runs > SCATTERED && blocks == UNIT_BLOCKS
    }

    /// The number of extents.
    #[cfg(test)]
    pub(crate) fn extents(&self) -> usize {
        self.extents.count()
    }

    /// Ends the growth when the file is closed: other files may take its blocks ahead.
    pub(crate) fn stop_growing(&mut self, pool: &BlockPool) {
        let FileGrowth { owner, .. } = std::mem::take(&mut self.growth);
        if owner != 0 {
            let mut space = pool.space();
            space.give_back_ahead(owner);
            pool.note_ahead(&space);
        }
    }
}
