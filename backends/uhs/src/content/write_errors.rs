//! Pages that the device did not take.
//!
//! A block that cannot be written is not used again soon, and its page gets another one. When
//! others fail, too, the page is *stuck*: it stays in memory, the inode on the device has the block
//! from before or a hole, and every commit tries again. Until then each sync of the file fails.

use super::page_set::{PageNumbers, PageSet};
use super::{BlockPool, FileContent};
use crate::format::inode::DiskExtent;
use crate::space::BlockRun;

impl FileContent {
    /// Records the blocks that could not be written, in order. Their pages get other blocks, if
    /// there is space; with `stuck`, not in the group that is being written. True if the inode has
    /// one of these blocks.
    pub(crate) fn lose_blocks(&mut self, pool: &BlockPool, lost: &[u64], stuck: bool) -> bool {
        let is_lost = |block: u64| lost.binary_search(&block).is_ok();
        let mut concerned = self.has_records_at(is_lost);
        if concerned {
            self.forget_tree();
        }
        let extents: Vec<_> = self.extents.iter().collect();
        for extent in extents {
            let first = lost.partition_point(|block| *block < extent.block);
            let inside = lost[first..].iter().map(|block| block - extent.block);
            for nth in inside.take_while(|nth| *nth < u64::from(extent.count)) {
                concerned = true;
                self.lose_page(pool, (extent.page + nth, extent.block + nth), stuck);
            }
        }
        concerned
    }

    fn lose_page(&mut self, pool: &BlockPool, (page, block): (u64, u64), stuck: bool) {
        let in_place = !self.placed.iter().any(|pages| pages.contains(&page));
        if !stuck && in_place {
            self.replaced.insert(page, block);
        }
        if !(stuck && in_place) {
            let cut = self.extents.cut(page..page + 1);
            if !in_place {
                pool.quarantine(cut);
            }
        }
        self.waits.remove(page);
        if stuck {
            let old = self.replaced.remove(&page).filter(|_| !in_place);
            old.into_iter().for_each(|block| self.extents.add(one_page_extent(page, block)));
            self.stuck.insert(page);
            self.waits.insert(page);
        }
        self.version += 1;
        let has_block = self.extents.find(page).is_some() || self.promised.contains(page);
        let promised =
            has_block || self.promise_splits(pool, 2, true).is_ok() && pool.promise(1, true);
        // Without space for another one, or without the page, there is nothing to write.
        if !promised || !self.pages.contains(page) {
            pool.unpromise(u64::from(promised && !has_block));
            self.forget_pages(pool, page..page + 1);
            self.has_failed_write = true;
            return;
        }
        if !has_block {
            self.promised.insert(page);
        }
        if self.dirty.insert(page) {
            pool.page_is_dirty();
        }
    }

    /// All that was lost is written, or stuck.
    pub(crate) fn end_loss(&mut self, pool: &BlockPool) {
        let replaced = std::mem::take(&mut self.replaced).into_values();
        pool.quarantine(replaced.map(|block| BlockRun { block, count: 1 }).collect());
    }

    /// True if bytes of the file are only in memory, because the device does not take them. Also
    /// true, once, after such bytes were given up.
    pub(crate) fn has_failed(&mut self) -> bool {
        std::mem::take(&mut self.has_failed_write) || !self.stuck.is_empty()
    }

    /// Records that the pages of a group are on the device. True if other pages are stuck.
    pub(crate) fn is_stuck(&mut self) -> bool {
        self.stuck.keep_those_of(&self.dirty);
        self.waits.keep_those_of(&self.dirty);
        !self.stuck.is_empty()
    }

    /// Gives up the stuck pages: the data that was written to them is lost.
    pub(crate) fn give_up_stuck(&mut self, pool: &BlockPool) {
        for page in std::mem::take(&mut self.stuck).iter() {
            self.forget_pages(pool, page..page + 1);
            self.has_failed_write = true;
        }
    }

    /// The pages that take a block in the next group, and the pages that it writes: all, or all
    /// that are not stuck.
    pub(super) fn take_waiting(&mut self, skip_stuck: bool) -> (PageNumbers, PageNumbers) {
        let none = PageSet::default();
        let waits = if skip_stuck { &self.waits } else { &none };
        (self.promised.take_all_but(waits), self.dirty.take_all_but(waits))
    }
}

/// An extent of one page.
fn one_page_extent(page: u64, block: u64) -> DiskExtent {
    DiskExtent { page, block, count: 1, unwritten: false }
}
