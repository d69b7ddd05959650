//! Reading and writing in memory: inline, or pages of 4 KiB.

use std::sync::Arc;

use defuse_fs::{Errno, ReadBuf, Result};

use super::extents::{block_of, cut};
use super::{Content, Pool};
use crate::format::BLOCK;
use crate::format::inode::{Data, INLINE};

/// The largest size of a file: 2^63 - 1, as off_t has it.
const SIZE_MAX: u64 = i64::MAX as u64;

const PAGE: u64 = BLOCK as u64;

/// The bytes of a page.
pub(crate) type Bytes = [u8; BLOCK];

/// A page. Its bytes past the end of the file are zeros.
pub(super) struct Page {
    /// Shared with a group that writes them.
    pub(super) bytes: Arc<Bytes>,
    pub(super) dirty: bool,
    /// It takes a new block when it is written, which is set aside for it.
    pub(super) promised: bool,
}

impl Content {
    /// The pages in a range of bytes that are on the device and not in memory, each with its block.
    pub(crate) fn missing(&self, offset: u64, len: u64) -> Vec<(u64, u64)> {
        let Data::Extents(extents) = &self.data else { return Vec::new() };
        let end = offset.saturating_add(len).min(self.size).div_ceil(PAGE);
        let pages = (offset / PAGE..end).filter(|page| !self.pages.contains_key(page));
        pages.filter_map(|page| Some((page, block_of(extents, page)?))).collect()
    }

    /// Those that a write of the range needs: it changes only a part of them.
    pub(crate) fn missing_edges(&self, offset: u64, len: u64) -> Vec<(u64, u64)> {
        let end = offset.saturating_add(len);
        let mut missing = Vec::new();
        if len > 0 && !offset.is_multiple_of(PAGE) {
            missing = self.missing(offset, 1);
        }
        if len > 0 && !end.is_multiple_of(PAGE) {
            missing.extend(self.missing(end - 1, 1));
        }
        missing.dedup();
        missing
    }

    /// The page that stays in part when the file gets `size` bytes.
    pub(crate) fn page_to_cut(&self, size: u64) -> Vec<(u64, u64)> {
        match size.is_multiple_of(PAGE) {
            true => Vec::new(),
            false => self.missing(size - 1, 1),
        }
    }

    /// Takes in a page that was read from `block`, if it still lies there and nobody was faster.
    pub(crate) fn fill(&mut self, pool: &Pool, (page, block): (u64, u64), bytes: Arc<Bytes>) {
        let Data::Extents(extents) = &self.data else { return };
        if block_of(extents, page) == Some(block) && !self.pages.contains_key(&page) {
            self.pages.insert(page, Page { bytes, dirty: false, promised: false });
            pool.page_is_new();
        }
    }

    /// Reads; all pages of the range must be in memory, or have no block.
    ///
    /// # Errors
    ///
    /// Those of `out`.
    pub(crate) fn read(&self, offset: u64, out: &mut ReadBuf<'_>) -> Result<()> {
        let end = self.size.min(offset.saturating_add(out.remaining() as u64));
        if let Data::Inline(bytes) = &self.data {
            let from = (offset.min(end)) as usize;
            let (kept, zeros) = (bytes.len().min(end as usize), end as usize);
            out.put(bytes.get(from..kept).unwrap_or_default())?;
            out.put_zeros(zeros.saturating_sub(from.max(kept)))?;
            return Ok(());
        }
        let mut at = offset;
        while at < end {
            let (page, from) = (at / PAGE, (at % PAGE) as usize);
            let len = (PAGE - from as u64).min(end - at) as usize;
            match self.pages.get(&page) {
                Some(page) => out.put(&page.bytes[from..from + len])?,
                None => out.put_zeros(len)?,
            };
            at += len as u64;
        }
        Ok(())
    }

    /// Writes at `offset`; the edges must be in memory. Returns how many bytes were taken: fewer where
    /// space has run out.
    ///
    /// # Errors
    ///
    /// `EFBIG`, `ENOSPC`, `ESTALE`.
    pub(crate) fn write(&mut self, pool: &Pool, offset: u64, data: &[u8]) -> Result<usize> {
        self.check()?;
        let end = offset.checked_add(data.len() as u64).filter(|end| *end <= SIZE_MAX);
        let end = end.ok_or(Errno::EFBIG)?;
        if data.is_empty() {
            return Ok(0);
        }
        self.leave_inline(pool, end)?;
        let taken = match &mut self.data {
            Data::Inline(bytes) => {
                if bytes.len() < end as usize {
                    bytes.resize(end as usize, 0);
                }
                bytes[offset as usize..end as usize].copy_from_slice(data);
                data.len()
            }
            _ => self.write_pages(pool, offset, data)?,
        };
        self.size = self.size.max(offset + taken as u64);
        Ok(taken)
    }

    fn check(&self) -> Result<()> {
        if self.ended { Err(Errno::ESTALE) } else { Ok(()) }
    }

    fn write_pages(&mut self, pool: &Pool, offset: u64, data: &[u8]) -> Result<usize> {
        let mut taken = 0;
        while taken < data.len() {
            let at = offset + taken as u64;
            let (page, from) = (at / PAGE, (at % PAGE) as usize);
            let len = (BLOCK - from).min(data.len() - taken);
            match self.change_page(pool, page, false) {
                Ok(bytes) => bytes[from..from + len].copy_from_slice(&data[taken..taken + len]),
                Err(_) if taken > 0 => return Ok(taken),
                Err(errno) => return Err(errno),
            }
            taken += len;
        }
        Ok(taken)
    }

    /// The bytes of a page that is about to change. `moves` says that the block must not be overwritten,
    /// because a durable inode uses it. `ENOSPC`.
    fn change_page(&mut self, pool: &Pool, page: u64, moves: bool) -> Result<&mut Bytes> {
        let block = match &self.data {
            Data::Extents(extents) => block_of(extents, page),
            _ => None,
        };
        let promised = self.pages.get(&page).is_some_and(|page| page.promised);
        let promises = !promised && (moves || block.is_none());
        if promises && !pool.promise(moves) {
            return Err(Errno::ENOSPC);
        }
        let page = self.pages.entry(page).or_insert_with(|| {
            pool.page_is_new();
            Page { bytes: Arc::new([0; BLOCK]), dirty: false, promised: false }
        });
        if !page.dirty {
            pool.page_is_dirty();
        }
        self.dirty += u64::from(!page.dirty);
        self.promised += u64::from(promises);
        page.promised |= promises;
        page.dirty = true;
        Ok(Arc::make_mut(&mut page.bytes))
    }

    /// Moves inline data to a page where the file gets too large for it.
    fn leave_inline(&mut self, pool: &Pool, end: u64) -> Result<()> {
        let Data::Inline(bytes) = &self.data else { return Ok(()) };
        if end <= INLINE as u64 {
            return Ok(());
        }
        let bytes = bytes.clone();
        self.data = Data::Extents(Vec::new());
        if !bytes.is_empty() {
            match self.change_page(pool, 0, false) {
                Ok(page) => page[..bytes.len()].copy_from_slice(&bytes),
                Err(errno) => {
                    self.data = Data::Inline(bytes);
                    return Err(errno);
                }
            }
        }
        Ok(())
    }

    /// Makes the file longer or shorter. The last page that stays must be in memory
    /// ([`page_to_cut`](Content::page_to_cut)).
    ///
    /// # Errors
    ///
    /// `EFBIG`, `ENOSPC`, `ESTALE`.
    pub(crate) fn set_size(&mut self, pool: &Pool, size: u64) -> Result<()> {
        self.check()?;
        if size > SIZE_MAX {
            return Err(Errno::EFBIG);
        }
        self.leave_inline(pool, size)?;
        let old = std::mem::replace(&mut self.size, size);
        if let Data::Inline(bytes) = &mut self.data {
            bytes.resize(size as usize, 0);
        } else if size < old {
            self.cut_pages(pool, size)?;
        }
        Ok(())
    }

    fn cut_pages(&mut self, pool: &Pool, size: u64) -> Result<()> {
        let first = size.div_ceil(PAGE);
        for page in self.pages.split_off(&first).into_values() {
            self.forget_page(pool, &page);
        }
        if let Data::Extents(extents) = &mut self.data {
            pool.give_up(cut(extents, first, u64::MAX));
        }
        if size == 0 {
            self.data = Data::Inline(Vec::new());
            return Ok(());
        }
        // The end of the last page becomes zeros, in another block: the old size may come back.
        let last = (size - 1) / PAGE;
        if self.pages.contains_key(&last) && !size.is_multiple_of(PAGE) {
            let moves = pool.tails_move();
            self.change_page(pool, last, moves)?[(size % PAGE) as usize..].fill(0);
        }
        Ok(())
    }

    /// Drops pages that are on the device.
    pub(crate) fn drop_clean(&mut self, pool: &Pool) {
        self.pages.retain(|_, page| {
            if !page.dirty {
                pool.forget_page(page);
            }
            page.dirty
        });
    }
}
