//! The data of one regular file.
//!
//! *Invariant*: the bytes of a page past the end of the file are zero. Growing a file therefore
//! needs no clearing; shrinking and failed writes must clear.

use std::sync::Arc;

use defuse_fs::{Errno, Fallocate, ReadBuf, Result, Whence, WriteBuf};

use crate::pages::{PAGE, PageMap, PagePool};

/// The largest offset plus one, as offsets are signed 64-bit numbers.
pub(crate) const MAX_SIZE: u64 = i64::MAX as u64;

const PAGE_U64: u64 = PAGE as u64;

/// Pages that one step of fallocate(2) allocates at most: 16 MiB.
const STEP: u64 = 4096;

/// The pages of a file, and its size. Dropping it returns the pages to the pool.
pub(crate) struct PagedData {
    pool: Arc<PagePool>,
    pages: PageMap,
    size: u64,
}

/// A range within one page: the index of the page, and the bytes in it.
struct PagePiece {
    index: u64,
    start: usize,
    len: usize,
}

/// The range that begins at `offset`, ends at the end of the page, and has at most `len` bytes.
fn piece(offset: u64, len: u64) -> PagePiece {
    let start = (offset % PAGE_U64) as usize;
    let len = len.min((PAGE - start) as u64) as usize;
    PagePiece { index: offset / PAGE_U64, start, len }
}

impl PagedData {
    pub fn new(pool: Arc<PagePool>) -> Self {
        PagedData { pool, pages: PageMap::default(), size: 0 }
    }

    /// File size in bytes.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Number of pages in use.
    pub fn page_count(&self) -> u64 {
        self.pages.len()
    }

    /// Copies the data from `offset` on into `out`, directly from the pages.
    pub fn read(&self, offset: u64, out: &mut ReadBuf<'_>) -> Result<()> {
        let mut at = offset;
        while out.remaining() > 0 && at < self.size {
            let piece = piece(at, self.size - at);
            let put = match self.pages.get(piece.index) {
                Some(page) => out.put(&page[piece.start..piece.start + piece.len])?,
                None => {
                    let next = self.pages.next_present(piece.index).map(|index| index * PAGE_U64);
                    let hole = next.unwrap_or(MAX_SIZE).min(self.size) - at;
                    out.put_zeros(usize::try_from(hole).unwrap_or(usize::MAX))?
                }
            };
            at += put as u64;
        }
        Ok(())
    }

    /// Writes `data` at `offset` and returns the number of bytes written. Fails with `EFBIG`, and
    /// with `ENOSPC` or `ENOMEM` if not a single byte could be written.
    pub fn write(&mut self, offset: u64, data: &mut WriteBuf<'_>) -> Result<usize> {
        if offset >= MAX_SIZE && data.remaining() > 0 {
            return Err(Errno::EFBIG);
        }
        let mut done = 0;
        while data.remaining() > 0 {
            let at = offset + done as u64;
            let piece = piece(at, (MAX_SIZE - at).min(data.remaining() as u64));
            if piece.len == 0 {
                break;
            }
            match self.write_piece(&piece, data) {
                Ok(0) => break,
                Ok(count) => done += count,
                Err(errno) if done == 0 => return Err(errno),
                Err(_) => break,
            }
            self.size = self.size.max(offset + done as u64);
        }
        Ok(done)
    }

    fn write_piece(&mut self, piece: &PagePiece, data: &mut WriteBuf<'_>) -> Result<usize> {
        let range = piece.start..piece.start + piece.len;
        if let Some(page) = self.pages.get_mut(piece.index) {
            let taken = data.take(&mut page[range.clone()]);
            let count = *taken.as_ref().unwrap_or(&0);
            if count < piece.len {
                // A failed source may have left bytes in the page. The bytes past the end must be
                // zero.
                let end = self.size.saturating_sub(piece.index * PAGE_U64).min(PAGE_U64) as usize;
                let from = end.max(piece.start + count);
                if from < range.end {
                    page[from..range.end].fill(0);
                }
            }
            return taken;
        }
        self.pool.reserve(1)?;
        let mut page = self.pool.page(piece.len < PAGE)?;
        match data.take(&mut page[range]) {
            Ok(count) if count > 0 => {
                if count < piece.len {
                    page[piece.start + count..].fill(0);
                }
                self.pages.insert(piece.index, page);
                Ok(count)
            }
            nothing => {
                self.pool.give_back(page);
                nothing
            }
        }
    }

    /// Sets the file size. Fails with `EFBIG`.
    pub fn set_size(&mut self, size: u64) -> Result<()> {
        if size > MAX_SIZE {
            return Err(Errno::EFBIG);
        }
        if size < self.size {
            self.clear(size, self.size);
            self.drop_pages(size.div_ceil(PAGE_U64), u64::MAX / PAGE_U64);
        }
        self.size = size;
        Ok(())
    }

    /// Zeroes `start..end` in existing pages. No page is removed.
    fn clear(&mut self, start: u64, end: u64) {
        let mut at = start;
        while at < end {
            let piece = piece(at, end - at);
            if let Some(page) = self.pages.get_mut(piece.index) {
                page[piece.start..piece.start + piece.len].fill(0);
                at += piece.len as u64;
            } else {
                let Some(next) = self.pages.next_present(piece.index) else { return };
                at = next * PAGE_U64;
            }
        }
    }

    fn drop_pages(&mut self, first: u64, end: u64) {
        if first < end {
            self.pages.remove(first, end, |_, page| self.pool.give_back(page));
        }
    }

    /// Performs a step of fallocate(2). Returns true when the whole range is done; until then the
    /// caller calls again with the same arguments, and may let others use the file meanwhile. Fails
    /// with `EOPNOTSUPP` for an unknown mode, `EINVAL` for a range that the mode does not allow,
    /// `EFBIG`, `ENOSPC` (nothing has changed then, unless others changed the file between two
    /// steps), and with `ENOMEM` (some pages may be allocated then).
    pub fn fallocate(
        &mut self,
        range: Fallocate,
        allocation: &mut FallocateProgress,
    ) -> Result<bool> {
        const KEEP: u32 = Fallocate::KEEP_SIZE;
        const PUNCH_KEEP: u32 = Fallocate::PUNCH_HOLE | KEEP;
        let end = range.offset.checked_add(range.length).ok_or(Errno::EFBIG)?;
        if end > MAX_SIZE {
            return Err(Errno::EFBIG);
        }
        match range.mode & !Fallocate::UNSHARE_RANGE {
            PUNCH_KEEP if range.mode == PUNCH_KEEP => self.punch(range.offset, end),
            Fallocate::COLLAPSE_RANGE if range.mode == Fallocate::COLLAPSE_RANGE => {
                self.collapse(range.offset, end)?;
            }
            Fallocate::INSERT_RANGE if range.mode == Fallocate::INSERT_RANGE => {
                self.insert(range.offset, range.length)?;
            }
            mode if mode & !(KEEP | Fallocate::ZERO_RANGE) == 0 => {
                let zero = mode & Fallocate::ZERO_RANGE != 0;
                if zero && range.mode & Fallocate::UNSHARE_RANGE != 0 {
                    return Err(Errno::EOPNOTSUPP);
                }
                let done = self.allocate(range.offset, end, allocation)?;
                if !done {
                    return Ok(false);
                }
                if zero {
                    self.clear(range.offset, end);
                }
                if mode & KEEP == 0 {
                    self.size = self.size.max(end);
                }
            }
            _ => return Err(Errno::EOPNOTSUPP),
        }
        Ok(true)
    }

    fn punch(&mut self, start: u64, end: u64) {
        let (first, last) = (start.div_ceil(PAGE_U64), end / PAGE_U64);
        if first > last {
            self.clear(start, end);
            return;
        }
        self.clear(start, first * PAGE_U64);
        self.drop_pages(first, last);
        self.clear(last * PAGE_U64, end);
    }

    /// Gives pages to some of the holes in `start..end`. True when no hole is left.
    fn allocate(
        &mut self,
        start: u64,
        end: u64,
        allocation: &mut FallocateProgress,
    ) -> Result<bool> {
        let last = end.div_ceil(PAGE_U64);
        let mut index = allocation.next.max(start / PAGE_U64);
        let mut missing = self.pages.holes(index, last);
        allocation.promise(&self.pool, missing)?;
        for _ in 0..STEP.min(missing) {
            index = self.pages.next_absent(index);
            missing -= 1;
            allocation.promised -= 1;
            // Gives the promise of this page back if it fails.
            self.pages.insert(index, self.pool.page(true)?);
        }
        allocation.next = index;
        Ok(missing == 0)
    }

    fn collapse(&mut self, start: u64, end: u64) -> Result<()> {
        if !start.is_multiple_of(PAGE_U64) || !end.is_multiple_of(PAGE_U64) || end >= self.size {
            return Err(Errno::EINVAL);
        }
        self.drop_pages(start / PAGE_U64, end / PAGE_U64);
        let by = (end - start) / PAGE_U64;
        self.shift(end / PAGE_U64, |index| index - by);
        self.size -= end - start;
        Ok(())
    }

    fn insert(&mut self, start: u64, length: u64) -> Result<()> {
        if !start.is_multiple_of(PAGE_U64) || !length.is_multiple_of(PAGE_U64) || start >= self.size
        {
            return Err(Errno::EINVAL);
        }
        if length > MAX_SIZE - self.size {
            return Err(Errno::EFBIG);
        }
        // Pages past the end hold no data, and would move beyond the largest offset.
        self.drop_pages(self.size.div_ceil(PAGE_U64), u64::MAX / PAGE_U64);
        self.shift(start / PAGE_U64, |index| index + length / PAGE_U64);
        self.size += length;
        Ok(())
    }

    /// Moves every page from index `first` on.
    fn shift(&mut self, first: u64, to: impl Fn(u64) -> u64) {
        let mut moved = Vec::new();
        self.pages.remove(first, u64::MAX / PAGE_U64, |index, page| moved.push((index, page)));
        for (index, page) in moved {
            self.pages.insert(to(index), page);
        }
    }

    /// lseek(2) for `SEEK_DATA` and `SEEK_HOLE`. Fails with `ENXIO` at or past the end, or if no
    /// data follows.
    pub fn seek(&self, offset: u64, whence: Whence) -> Result<u64> {
        if offset >= self.size {
            return Err(Errno::ENXIO);
        }
        let index = offset / PAGE_U64;
        match whence {
            Whence::Data => {
                let next = self.pages.next_present(index).ok_or(Errno::ENXIO)?;
                let at = (next * PAGE_U64).max(offset);
                if at < self.size { Ok(at) } else { Err(Errno::ENXIO) }
            }
            Whence::Hole => {
                Ok((self.pages.next_absent(index) * PAGE_U64).max(offset).min(self.size))
            }
        }
    }

    /// Copies at most one page, or one hole of any length, from `src_offset` of `src` to
    /// `dst_offset`. A hole that covers whole pages stays a hole. Returns the number of bytes
    /// copied, 0 at the end of `src`.
    pub fn copy_from(&mut self, src: &PagedData, at: CopyStep) -> Result<u64> {
        let len = at.len.min(src.size.saturating_sub(at.src));
        let from = piece(at.src, len);
        match src.pages.get(from.index) {
            Some(page) => self.put_piece(at.dst, &page[from.start..from.start + from.len]),
            None => self.put_hole(at.dst, src.hole_at(at.src).min(len)),
        }
    }

    /// Copies as [`PagedData::copy_from`] does, within one file.
    pub fn copy_within(&mut self, at: CopyStep) -> Result<u64> {
        let len = at.len.min(self.size.saturating_sub(at.src));
        let from = piece(at.src, len);
        // Copies the page to the stack, because source and target are in the same map.
        match self.pages.get(from.index).copied() {
            Some(page) => self.put_piece(at.dst, &page[from.start..from.start + from.len]),
            None => self.put_hole(at.dst, self.hole_at(at.src).min(len)),
        }
    }

    /// The number of bytes from `offset`, which lies in a hole, to the next page.
    fn hole_at(&self, offset: u64) -> u64 {
        let next = self.pages.next_present(offset / PAGE_U64).map(|index| index * PAGE_U64);
        next.unwrap_or(MAX_SIZE).saturating_sub(offset)
    }

    /// Writes `bytes` at `offset`, up to the end of its page.
    fn put_piece(&mut self, offset: u64, bytes: &[u8]) -> Result<u64> {
        let to = piece(offset, bytes.len() as u64);
        if to.len == 0 {
            return Ok(0);
        }
        let end = offset.checked_add(to.len as u64).filter(|&end| end <= MAX_SIZE);
        let end = end.ok_or(Errno::EFBIG)?;
        let mut source = defuse_fs::SliceSource::new(&bytes[..to.len]);
        self.write_piece(&to, &mut WriteBuf::new(&mut source))?;
        self.size = self.size.max(end);
        Ok(to.len as u64)
    }

    /// Makes `len` zeros at `offset`, as far as a file can be long.
    fn put_hole(&mut self, offset: u64, len: u64) -> Result<u64> {
        let done = len.min(MAX_SIZE.saturating_sub(offset));
        if done == 0 && len > 0 {
            return Err(Errno::EFBIG);
        }
        self.punch(offset, offset + done);
        self.size = self.size.max(offset + done);
        Ok(done)
    }
}

/// The progress of a fallocate(2) that takes several steps, and the pages that are set aside for
/// the rest.
pub(crate) struct FallocateProgress {
    pool: Arc<PagePool>,
    /// Pages before this one are done.
    next: u64,
    promised: u64,
}

impl FallocateProgress {
    /// An allocation in a file whose pages come from `pool`, of which nothing is done.
    pub fn new(pool: &Arc<PagePool>) -> Self {
        FallocateProgress { pool: Arc::clone(pool), next: 0, promised: 0 }
    }

    /// Sets `missing` pages aside in place of those before. Fails with `ENOSPC`.
    fn promise(&mut self, pool: &PagePool, missing: u64) -> Result<()> {
        match missing.checked_sub(self.promised) {
            Some(more) => pool.reserve(more)?,
            None => pool.quota.give_back(self.promised - missing),
        }
        self.promised = missing;
        Ok(())
    }
}

impl Drop for FallocateProgress {
    fn drop(&mut self) {
        self.pool.quota.give_back(self.promised);
    }
}

/// Offsets and maximum length of one step of a copy, in bytes.
#[derive(Clone, Copy)]
pub(crate) struct CopyStep {
    pub src: u64,
    pub dst: u64,
    pub len: u64,
}

impl Drop for PagedData {
    fn drop(&mut self) {
        self.drop_pages(0, u64::MAX / PAGE_U64);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use defuse_fs::{SliceSink, SliceSource};

    fn put(data: &mut PagedData, offset: u64, bytes: &[u8]) -> Result<usize> {
        data.write(offset, &mut WriteBuf::new(&mut SliceSource::new(bytes)))
    }

    fn get(data: &PagedData, offset: u64, len: usize) -> Vec<u8> {
        let mut memory = vec![0xee; len];
        let mut sink = SliceSink::new(&mut memory);
        let mut out = ReadBuf::new(&mut sink, len);
        data.read(offset, &mut out).unwrap();
        let filled = out.filled_len();
        memory.truncate(filled);
        memory
    }

    fn data(limit: Option<u64>) -> PagedData {
        PagedData::new(Arc::new(PagePool::new(limit, 64)))
    }

    #[test]
    fn holes_read_as_zeros_and_use_no_space() {
        let mut file = data(None);
        assert_eq!(put(&mut file, 1 << 40, b"end"), Ok(3));
        assert_eq!((file.size(), file.page_count()), ((1 << 40) + 3, 1));
        assert_eq!(get(&file, (1 << 40) - 2, 100), b"\0\0end");
        assert_eq!(file.seek(0, Whence::Data), Ok(1 << 40));
        assert_eq!(file.seek(1 << 40, Whence::Hole), Ok((1 << 40) + 3));
        assert_eq!(file.seek((1 << 40) + 3, Whence::Hole), Err(Errno::ENXIO));
    }

    #[test]
    fn truncated_bytes_read_as_zeros_when_the_file_grows_again() {
        let mut file = data(None);
        put(&mut file, 0, &[1; 10000]).unwrap();
        file.set_size(5000).unwrap();
        assert_eq!(file.page_count(), 2);
        file.set_size(10000).unwrap();
        let bytes = get(&file, 0, 20000);
        assert_eq!(bytes.len(), 10000);
        assert!(bytes[..5000].iter().all(|&b| b == 1) && bytes[5000..].iter().all(|&b| b == 0));
        assert_eq!(file.set_size(MAX_SIZE + 1), Err(Errno::EFBIG));
    }

    #[test]
    fn a_full_file_system_gives_a_short_write_then_enospc() {
        let mut file = data(Some(2));
        assert_eq!(put(&mut file, 0, &[1; 10000]), Ok(8192));
        assert_eq!(put(&mut file, 8192, b"x"), Err(Errno::ENOSPC));
        assert_eq!(put(&mut file, 0, &[2; 8192]), Ok(8192));
        assert_eq!(file.size(), 8192);
        file.set_size(0).unwrap();
        assert_eq!(put(&mut file, 1 << 30, b"x"), Ok(1));
    }

    #[test]
    fn fallocate_modes_do_what_the_manual_says() {
        let mut file = data(Some(8));
        let run = |file: &mut PagedData, mode, offset, length| {
            let mut allocation = FallocateProgress::new(&file.pool);
            file.fallocate(Fallocate { mode, offset, length }, &mut allocation)
                .map(|done| assert!(done))
        };
        put(&mut file, 0, &[1; 3 * PAGE]).unwrap();
        run(&mut file, Fallocate::PUNCH_HOLE | Fallocate::KEEP_SIZE, 100, 2 * PAGE_U64).unwrap();
        assert_eq!((file.page_count(), file.size()), (2, 3 * PAGE_U64));
        assert_eq!(file.seek(0, Whence::Hole), Ok(PAGE_U64));
        assert!(get(&file, 100, 2 * PAGE).iter().all(|&byte| byte == 0));
        run(&mut file, Fallocate::COLLAPSE_RANGE, PAGE_U64, PAGE_U64).unwrap();
        assert_eq!(file.size(), 2 * PAGE_U64);
        assert_eq!(get(&file, PAGE_U64 + 100, 1), [1]);
        run(&mut file, Fallocate::INSERT_RANGE, PAGE_U64, PAGE_U64).unwrap();
        assert_eq!(get(&file, 2 * PAGE_U64 + 100, 1), [1]);
        run(&mut file, Fallocate::ZERO_RANGE, 0, 50).unwrap();
        assert_eq!(get(&file, 49, 2), [0, 1]);
        run(&mut file, Fallocate::KEEP_SIZE, 0, 8 * PAGE_U64).unwrap();
        assert_eq!((file.page_count(), file.size()), (8, 3 * PAGE_U64));
        assert_eq!(run(&mut file, 0, 0, 9 * PAGE_U64), Err(Errno::ENOSPC));
        assert_eq!(run(&mut file, Fallocate::PUNCH_HOLE, 0, 1), Err(Errno::EOPNOTSUPP));
        assert_eq!(run(&mut file, Fallocate::COLLAPSE_RANGE, 0, 12288), Err(Errno::EINVAL));
        assert_eq!(run(&mut file, 0, u64::MAX, 2), Err(Errno::EFBIG));
    }

    #[test]
    fn space_comes_back_when_the_data_is_dropped() {
        let pool = Arc::new(PagePool::new(Some(4), 64));
        let mut file = PagedData::new(Arc::clone(&pool));
        put(&mut file, 0, &[1; 4 * PAGE]).unwrap();
        assert_eq!(pool.quota.used_count(), 4);
        drop(file);
        assert_eq!(pool.quota.used_count(), 0);
    }

    #[test]
    fn an_allocation_goes_in_steps_between_which_others_use_the_file() {
        let mut file = data(Some(3 * STEP));
        let range = Fallocate { mode: 0, offset: 0, length: 2 * STEP * PAGE_U64 + 1 };
        let mut allocation = FallocateProgress::new(&file.pool);
        assert_eq!(file.fallocate(range, &mut allocation), Ok(false));
        assert_eq!((file.page_count(), file.size()), (STEP, 0));
        assert_eq!(put(&mut file, 0, b"x"), Ok(1));
        assert_eq!(file.fallocate(range, &mut allocation), Ok(false));
        // Pages that others write are not missing any more, and those that they take away are not
        // ours to give.
        assert_eq!(put(&mut file, 2 * STEP * PAGE_U64, b"x"), Ok(1));
        assert_eq!(file.fallocate(range, &mut allocation), Ok(true));
        drop(allocation);
        let used = file.pool.quota.used_count();
        assert_eq!(
            (file.page_count(), used, file.size()),
            (2 * STEP + 1, 2 * STEP + 1, range.length)
        );
    }
}
