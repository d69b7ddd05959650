//! The data of files in memory: inline, or pages of 4 KiB.

use std::collections::BTreeMap;

use defuse_fs::{Errno, ReadBuf, Result, Timestamp};

use super::{KEEP_UNITS, Tree};
use crate::format::inode::{Data, Extent, INLINE};
use crate::format::{BLOCK, UNIT_BLOCKS};
use crate::space::Run;

/// The largest size of a file: 2^63 - 1, as off_t has it.
const SIZE_MAX: u64 = i64::MAX as u64;

/// Blocks that the records of inodes may need beside the data.
const KEEP_BLOCKS: u64 = 128;

const PAGE: u64 = BLOCK as u64;

/// A page. Its bytes past the end of the file are zeros.
pub(super) struct Page {
    pub(super) bytes: Box<[u8]>,
    pub(super) dirty: bool,
    /// It takes a new block when it is written, which is set aside for it.
    pub(super) promised: bool,
}

/// The block that holds `page`.
pub(super) fn block_of(extents: &[Extent], page: u64) -> Option<u64> {
    let after = extents.partition_point(|extent| extent.page <= page);
    let extent = &extents[after.checked_sub(1)?];
    let at = page - extent.page;
    (at < u64::from(extent.count)).then(|| extent.block + at)
}

/// Takes the pages from `first` to before `end` out of the list. Returns their blocks.
pub(super) fn cut(extents: &mut Vec<Extent>, first: u64, end: u64) -> Vec<Run> {
    let mut freed = Vec::new();
    let mut kept = Vec::with_capacity(extents.len() + 1);
    for extent in extents.drain(..) {
        let (start, stop) = (extent.page, extent.page + u64::from(extent.count));
        let (from, to) = (start.max(first), stop.min(end));
        if from >= to {
            kept.push(extent);
            continue;
        }
        let part = |from: u64, to: u64| Extent {
            page: from,
            block: extent.block + (from - start),
            count: (to - from) as u32,
        };
        kept.extend((start < from).then(|| part(start, from)));
        freed.push(part(from, to).into());
        kept.extend((to < stop).then(|| part(to, stop)));
    }
    *extents = kept;
    freed
}

/// Adds an extent for pages that have none.
pub(super) fn add(extents: &mut Vec<Extent>, new: Extent) {
    let at = extents.partition_point(|extent| extent.page < new.page);
    let follows = |a: &Extent, b: &Extent| {
        a.page + u64::from(a.count) == b.page
            && a.block + u64::from(a.count) == b.block
            && a.count.checked_add(b.count).is_some()
    };
    extents.insert(at, new);
    if extents.get(at + 1).is_some_and(|next| follows(&extents[at], next)) {
        extents[at].count += extents.remove(at + 1).count;
    }
    if at > 0 && follows(&extents[at - 1], &extents[at]) {
        extents[at - 1].count += extents.remove(at).count;
    }
}

impl Tree {
    pub(crate) fn size(&self, ino: u64) -> Result<u64> {
        self.check_data(ino)?;
        Ok(self.node(ino)?.inode.size)
    }

    /// The pages in a range of bytes that are on the device and not in memory, each with its block.
    pub(crate) fn missing(&self, ino: u64, offset: u64, len: u64) -> Result<Vec<(u64, u64)>> {
        let node = self.node(ino)?;
        let Data::Extents(extents) = &node.inode.data else { return Ok(Vec::new()) };
        let end = offset.saturating_add(len).min(node.inode.size).div_ceil(PAGE);
        let pages = (offset / PAGE..end).filter(|page| !node.pages.contains_key(page));
        Ok(pages.filter_map(|page| Some((page, block_of(extents, page)?))).collect())
    }

    /// Those that a write of the range needs: it changes only a part of them.
    pub(crate) fn missing_edges(&self, ino: u64, offset: u64, len: u64) -> Result<Vec<(u64, u64)>> {
        let end = offset.saturating_add(len);
        let mut missing = Vec::new();
        if len > 0 && !offset.is_multiple_of(PAGE) {
            missing = self.missing(ino, offset, 1)?;
        }
        if len > 0 && !end.is_multiple_of(PAGE) {
            missing.extend(self.missing(ino, end - 1, 1)?);
        }
        missing.dedup();
        Ok(missing)
    }

    /// The page that stays in part when the file gets `size` bytes.
    pub(crate) fn page_to_cut(&self, ino: u64, size: u64) -> Result<Vec<(u64, u64)>> {
        match size.is_multiple_of(PAGE) {
            true => Ok(Vec::new()),
            false => self.missing(ino, size - 1, 1),
        }
    }

    /// Takes in a page that was read from `block`, if it still lies there and nobody was faster.
    pub(crate) fn fill(&mut self, ino: u64, (page, block): (u64, u64), bytes: Box<[u8]>) {
        let Some(node) = self.nodes.get_mut(&ino) else { return };
        let Data::Extents(extents) = &node.inode.data else { return };
        if block_of(extents, page) == Some(block) && !node.pages.contains_key(&page) {
            node.pages.insert(page, Page { bytes, dirty: false, promised: false });
            self.cached += 1;
        }
    }

    /// Reads; all pages of the range must be in memory, or have no block.
    pub(crate) fn read(&mut self, ino: u64, offset: u64, out: &mut ReadBuf<'_>) -> Result<()> {
        self.check_data(ino)?;
        let node = self.node(ino)?;
        let end = node.inode.size.min(offset.saturating_add(out.remaining() as u64));
        if let Data::Inline(bytes) = &node.inode.data {
            let from = (offset.min(end)) as usize;
            let (kept, zeros) = (bytes.len().min(end as usize), end as usize);
            out.put(bytes.get(from..kept).unwrap_or_default())?;
            out.put_zeros(zeros.saturating_sub(from.max(kept)))?;
        } else {
            let mut at = offset;
            while at < end {
                let (page, from) = (at / PAGE, (at % PAGE) as usize);
                let len = (PAGE - from as u64).min(end - at) as usize;
                match node.pages.get(&page) {
                    Some(page) => out.put(&page.bytes[from..from + len])?,
                    None => out.put_zeros(len)?,
                };
                at += len as u64;
            }
        }
        self.accessed(ino);
        Ok(())
    }

    /// Writes at `offset`; the edges must be in memory. Returns how many bytes were taken: fewer where
    /// space has run out.
    pub(crate) fn write(
        &mut self,
        ino: u64,
        offset: u64,
        data: &[u8],
        kill_suidgid: bool,
    ) -> Result<usize> {
        self.check_data(ino)?;
        let end = offset.checked_add(data.len() as u64).filter(|end| *end <= SIZE_MAX);
        let end = end.ok_or(Errno::EFBIG)?;
        if data.is_empty() {
            return Ok(0);
        }
        self.leave_inline(ino, end)?;
        let node = self.node_mut(ino)?;
        let taken = match &mut node.inode.data {
            Data::Inline(bytes) => {
                if bytes.len() < end as usize {
                    bytes.resize(end as usize, 0);
                }
                bytes[offset as usize..end as usize].copy_from_slice(data);
                data.len()
            }
            _ => self.write_pages(ino, offset, data)?,
        };
        let node = self.node_mut(ino)?;
        node.inode.size = node.inode.size.max(offset + taken as u64);
        node.modified(Timestamp::now());
        if kill_suidgid {
            node.kill_suidgid();
        }
        self.touch(ino);
        Ok(taken)
    }

    fn write_pages(&mut self, ino: u64, offset: u64, data: &[u8]) -> Result<usize> {
        let mut taken = 0;
        while taken < data.len() {
            let at = offset + taken as u64;
            let (page, from) = (at / PAGE, (at % PAGE) as usize);
            let len = (BLOCK - from).min(data.len() - taken);
            match self.change_page(ino, page, false) {
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
    fn change_page(&mut self, ino: u64, page: u64, moves: bool) -> Result<&mut [u8]> {
        let has_space = moves || self.free_blocks() > 0;
        let node = self.nodes.get_mut(&ino).ok_or(Errno::ESTALE)?;
        let block = match &node.inode.data {
            Data::Extents(extents) => block_of(extents, page),
            _ => None,
        };
        let promised = node.pages.get(&page).is_some_and(|page| page.promised);
        let promises = !promised && (moves || block.is_none());
        if promises && !has_space {
            return Err(Errno::ENOSPC);
        }
        let cached = &mut self.cached;
        let page = node.pages.entry(page).or_insert_with(|| {
            *cached += 1;
            Page { bytes: vec![0; BLOCK].into(), dirty: false, promised: false }
        });
        self.promised += u64::from(promises);
        self.dirty += usize::from(!page.dirty);
        page.promised |= promises;
        page.dirty = true;
        self.written.insert(ino);
        Ok(&mut page.bytes)
    }

    /// Moves inline data to a page where the file gets too large for it.
    fn leave_inline(&mut self, ino: u64, end: u64) -> Result<()> {
        let node = self.node_mut(ino)?;
        let Data::Inline(bytes) = &node.inode.data else { return Ok(()) };
        if end <= INLINE as u64 {
            return Ok(());
        }
        let bytes = bytes.clone();
        node.inode.data = Data::Extents(Vec::new());
        if !bytes.is_empty() {
            let page = self.change_page(ino, 0, false);
            match page {
                Ok(page) => page[..bytes.len()].copy_from_slice(&bytes),
                Err(errno) => {
                    self.node_mut(ino)?.inode.data = Data::Inline(bytes);
                    return Err(errno);
                }
            }
        }
        Ok(())
    }

    pub(super) fn set_size(&mut self, ino: u64, size: u64) -> Result<()> {
        self.check_data(ino)?;
        if size > SIZE_MAX {
            return Err(Errno::EFBIG);
        }
        self.leave_inline(ino, size)?;
        let node = self.node_mut(ino)?;
        let old = std::mem::replace(&mut node.inode.size, size);
        if let Data::Inline(bytes) = &mut node.inode.data {
            bytes.resize(size as usize, 0);
        } else if size < old {
            self.cut_pages(ino, size)?;
        }
        self.touch(ino);
        Ok(())
    }

    fn cut_pages(&mut self, ino: u64, size: u64) -> Result<()> {
        let first = size.div_ceil(PAGE);
        let node = self.node_mut(ino)?;
        let gone = node.pages.split_off(&first);
        if let Data::Extents(extents) = &mut node.inode.data {
            let freed = cut(extents, first, u64::MAX);
            self.freed.extend(freed);
        }
        gone.values().for_each(|page| self.forget_page(page));
        let node = self.node_mut(ino)?;
        if size == 0 {
            node.inode.data = Data::Inline(Vec::new());
            self.written.remove(&ino);
            return Ok(());
        }
        // The end of the last page becomes zeros, in another block: the old size may come back.
        let last = (size - 1) / PAGE;
        let in_use = node.pages.contains_key(&last) && !size.is_multiple_of(PAGE);
        if in_use {
            let moves = self.tails_move;
            self.change_page(ino, last, moves)?[(size % PAGE) as usize..].fill(0);
        }
        Ok(())
    }

    pub(super) fn forget_page(&mut self, page: &Page) {
        self.cached -= 1;
        self.dirty -= usize::from(page.dirty);
        self.promised -= u64::from(page.promised);
    }

    /// Blocks that files can still take.
    pub(crate) fn free_blocks(&self) -> u64 {
        let kept = u64::from(KEEP_UNITS) * UNIT_BLOCKS + KEEP_BLOCKS + self.promised;
        self.space.free_blocks().saturating_sub(kept)
    }

    /// Pages in memory, and those of them that differ from the device.
    pub(crate) fn pages(&self) -> (usize, usize) {
        (self.cached, self.dirty)
    }

    /// Drops pages that are on the device.
    pub(crate) fn drop_clean(&mut self) {
        for node in self.nodes.values_mut() {
            let before = node.pages.len();
            let pages: BTreeMap<u64, Page> = std::mem::take(&mut node.pages)
                .into_iter()
                .filter(|(_, page)| page.dirty)
                .collect();
            self.cached -= before - pages.len();
            node.pages = pages;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn extents_are_like_a_table_of_blocks() {
        let mut random = fastrand::Rng::with_seed(8);
        let mut extents = Vec::new();
        let mut table: BTreeMap<u64, u64> = BTreeMap::new();
        let mut next = 1;
        for _ in 0..3000 {
            let (page, count) = (random.u64(..200), random.u64(1..20));
            let freed = cut(&mut extents, page, page + count);
            let mut blocks: Vec<u64> =
                freed.iter().flat_map(|run| run.block..run.block + u64::from(run.count)).collect();
            let mut expected: Vec<u64> =
                (page..page + count).filter_map(|page| table.remove(&page)).collect();
            blocks.sort_unstable();
            expected.sort_unstable();
            assert_eq!(blocks, expected);
            if random.bool() {
                add(&mut extents, Extent { page, block: next, count: count as u32 });
                table.extend((0..count).map(|at| (page + at, next + at)));
                next += count + random.u64(..2);
            }
            assert!((0..230).all(|page| block_of(&extents, page) == table.get(&page).copied()));
            let sorted = extents
                .windows(2)
                .all(|pair| pair[0].page + u64::from(pair[0].count) <= pair[1].page);
            assert!(sorted);
        }
    }
}
