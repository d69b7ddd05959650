//! Blocks for the pages that a group writes.

use std::sync::Arc;

use defuse_fs::{Errno, Result};

use super::extents::{add, block_of, cut};
use super::pages::Bytes;
use super::{Content, Pool};
use crate::format::inode::{Data, Extent};
use crate::space::Run;

impl Content {
    /// Gives blocks to the pages that need some, and adds all dirty pages to `data`, which is written
    /// before the inode. True where the inode changed.
    ///
    /// # Errors
    ///
    /// `EIO`: a promise cannot be kept.
    pub(crate) fn place(&mut self, pool: &Pool, data: &mut Vec<(u64, Arc<Bytes>)>) -> Result<bool> {
        let Data::Extents(extents) = &mut self.data else { return Ok(false) };
        let wanting: Vec<u64> =
            self.pages.iter().filter(|(_, page)| page.promised).map(|(at, _)| *at).collect();
        for run in wanting.chunk_by(|a, b| a + 1 == *b) {
            let (mut page, end) = (run[0], run[0] + run.len() as u64);
            pool.give_up(cut(extents, page, end));
            while page < end {
                let near = page.checked_sub(1).and_then(|before| block_of(extents, before));
                let count = (end - page).min(u64::from(u32::MAX)) as u32;
                let taken = pool.space().take(count, near, 0).ok_or(Errno::EIO)?;
                let Run { block, count } = taken;
                add(extents, Extent { page, block, count });
                page += u64::from(count);
            }
        }
        for (at, page) in self.pages.iter_mut().filter(|(_, page)| page.dirty) {
            let block = block_of(extents, *at).ok_or(Errno::EIO)?;
            data.push((block, Arc::clone(&page.bytes)));
            pool.page_is_placed(page.promised);
            (page.dirty, page.promised) = (false, false);
        }
        (self.dirty, self.promised) = (0, 0);
        Ok(!wanting.is_empty())
    }
}
