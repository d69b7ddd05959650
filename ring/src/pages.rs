//! Cached pages of one file: the server alone writes them, and clients read them by loads alone.
//!
//! A frame holds at most one page of the file, page n in frame n modulo the number of frames. The
//! memory never changes its length, so that an access never fails; a frame gets another page under
//! its own version. Memory is given back in groups of frames, which then read as zeros and hold no
//! page.

use std::collections::HashMap;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering;

use rustix::io::{Errno, Result};

use crate::MappedMemory;
use crate::published::{PublishedMemory, ReadableMemory, WritableMemory};

/// Bytes of a page.
pub const PAGE: usize = 4096;
/// Frames of a group: memory is hidden and given back in groups.
pub const GROUP: u64 = 16;
/// Bytes of the frames of a group.
pub const GROUP_BYTES: u64 = GROUP * PAGE as u64;
/// The first word of the memory: "defuseP1".
const MAGIC: u64 = u64::from_le_bytes(*b"defuseP1");
/// The maximum number of frames of a file: 16 MiB.
pub const MOST_FRAMES: u32 = 4096;

/// `u32`: number of frames, a power of two.
const AT_FRAMES: usize = 8;
/// `u64`: version of the file; odd while nothing may be read.
const AT_STATE: usize = 64;
/// `u64`: length of the file in bytes.
const AT_SIZE: usize = 72;
/// Heads of frames, 16 bytes each: version (`u64`, odd while the frame changes), page number + 1
/// (`u64`, 0 for none).
const AT_HEADS: usize = PAGE;
const HEAD: usize = 16;

/// The server's side. It has no length at first: nothing may be read.
pub struct PageWriter<M: WritableMemory = PublishedMemory> {
    memory: M,
    frames: u32,
    /// The page numbers + 1 of groups that are hidden.
    hidden: HashMap<u64, [u64; GROUP as usize]>,
}

/// A client's side.
pub struct PageReader<M = MappedMemory> {
    memory: M,
    frames: u32,
}

/// Bytes of the memory for so many frames.
pub const fn bytes_of(frames: u32) -> usize {
    first_frame(frames) + frames as usize * PAGE
}

const fn first_frame(frames: u32) -> usize {
    AT_HEADS + (frames as usize * HEAD).next_multiple_of(PAGE)
}

const fn head_at(page: u64, frames: u32) -> usize {
    AT_HEADS + (page % frames as u64) as usize * HEAD
}

const fn frame_at(page: u64, frames: u32) -> usize {
    first_frame(frames) + (page % frames as u64) as usize * PAGE
}

impl PageWriter {
    /// Memory for the pages of a file of `size` bytes.
    ///
    /// # Errors
    ///
    /// The errors of memfd_create(2), ftruncate(2) and mmap(2).
    pub fn new(size: u64) -> Result<PageWriter> {
        let wanted = size.div_ceil(PAGE as u64).clamp(16, MOST_FRAMES.into()) as u32;
        let frames = wanted.next_power_of_two();
        let memory = PublishedMemory::new(bytes_of(frames), MAGIC)?;
        memory.store32(AT_FRAMES, frames);
        Ok(PageWriter::from_memory(memory, frames))
    }

    /// A descriptor to read the memory, for [`PageReader::from_fd`].
    ///
    /// # Errors
    ///
    /// The errors of open(2) in /proc.
    pub fn reader(&self) -> Result<OwnedFd> {
        self.memory.reader()
    }

    /// Bytes of memory that are in use now, by the kernel's count.
    ///
    /// # Errors
    ///
    /// The errors of fstat(2).
    pub fn bytes_in_use(&self) -> Result<u64> {
        self.memory.bytes_in_use()
    }
}

impl<M: WritableMemory> PageWriter<M> {
    /// Pages in this memory of [`bytes_of`] so many frames, a power of two.
    pub fn from_memory(memory: M, frames: u32) -> PageWriter<M> {
        memory.store64(AT_STATE, 1);
        PageWriter { memory, frames, hidden: HashMap::new() }
    }

    /// Bytes of the memory.
    pub fn bytes(&self) -> u64 {
        bytes_of(self.frames) as u64
    }

    /// Bytes of the memory without its frames, which are in use for as long as it is there.
    pub fn bytes_of_heads(&self) -> u64 {
        first_frame(self.frames) as u64
    }

    /// The number of groups.
    pub fn groups(&self) -> u64 {
        u64::from(self.frames) / GROUP
    }

    /// The group in which a page is.
    pub fn group_of(&self, page: u64) -> u64 {
        page % u64::from(self.frames) / GROUP
    }

    /// Hides the pages of a group from readers, until it is [shown](PageWriter::show).
    pub fn hide(&mut self, group: u64) {
        let mut held = [0; GROUP as usize];
        for (frame, held) in (group * GROUP..).zip(&mut held) {
            *held = self.memory.load64(head_at(frame, self.frames) + 8);
            self.change(frame, |_, _| 0);
        }
        self.hidden.entry(group).or_insert(held);
    }

    /// Shows the pages of a hidden group to readers again, except pages that were forgotten.
    pub fn show(&mut self, group: u64) {
        let held = self.hidden.remove(&group).unwrap_or_default();
        for (frame, held) in (group * GROUP..).zip(held).filter(|(_, held)| *held != 0) {
            self.change(frame, |_, _| held);
        }
    }

    /// Drops the pages of a group, and returns their memory to the kernel.
    pub fn give_back(&mut self, group: u64) {
        self.hidden.remove(&group);
        (group * GROUP..).take(GROUP as usize).for_each(|frame| self.change(frame, |_, _| 0));
        // A reader that copies now finds other versions at its end.
        self.memory.fence(Ordering::SeqCst);
        self.memory.give_back(frame_at(group * GROUP, self.frames), GROUP_BYTES as usize);
    }

    /// The length of the file that was published last, in bytes.
    pub fn size(&self) -> u64 {
        self.memory.load64(AT_SIZE)
    }

    /// True if readers see a length, and may read.
    pub fn has_length(&self) -> bool {
        self.memory.load64(AT_STATE).is_multiple_of(2)
    }

    /// From now on nothing may be read: the length of the file is about to change.
    pub fn withdraw_length(&mut self) {
        let state = self.memory.load64(AT_STATE);
        if state.is_multiple_of(2) {
            self.memory.store64(AT_STATE, state + 1);
            self.memory.fence(Ordering::SeqCst);
        }
    }

    /// From now on pages may be read; the file has `size` bytes.
    pub fn publish_length(&mut self, size: u64) {
        let state = self.memory.load64(AT_STATE);
        if !state.is_multiple_of(2) {
            self.memory.store64(AT_SIZE, size);
            self.memory.store64(AT_STATE, state + 1);
        }
    }

    /// True if the page can be read.
    pub fn has(&self, page: u64) -> bool {
        self.memory.load64(head_at(page, self.frames) + 8) == page + 1
    }

    /// Copies bytes of a page that [is there](PageWriter::has), from `within` on.
    pub fn get(&self, page: u64, within: usize, out: &mut [u8]) {
        assert!(within + out.len() <= PAGE, "the bytes are those of one page");
        self.memory.copy(frame_at(page, self.frames) + within, out);
    }

    /// Drops the pages of these bytes of the file.
    pub fn forget(&mut self, range: Range<u64>) {
        let (first, end) = (range.start / PAGE as u64, range.end.div_ceil(PAGE as u64));
        if end - first.min(end) >= u64::from(self.frames) {
            (0..u64::from(self.frames)).for_each(|frame| self.change(frame, |_, _| 0));
            self.hidden.values_mut().for_each(|held| *held = [0; GROUP as usize]);
        } else {
            self.forget_hidden(first..end);
            for page in (first..end).filter(|&page| self.has(page)).collect::<Vec<_>>() {
                self.change(page, |_, _| 0);
            }
        }
        self.memory.fence(Ordering::SeqCst);
    }

    fn forget_hidden(&mut self, pages: Range<u64>) {
        let held = self.hidden.values_mut().flatten();
        held.filter(|held| **held != 0 && pages.contains(&(**held - 1))).for_each(|held| *held = 0);
    }

    /// Puts a page into its frame, in place of the page that is there. Its group is not hidden.
    pub fn write_page(&mut self, page: u64, bytes: &[u8; PAGE]) {
        self.change(page, |memory, frame| {
            memory.put(frame, bytes);
            page + 1
        });
    }

    /// Changes the frame of `page` under its version. `change` returns the new page number + 1.
    fn change(&mut self, page: u64, change: impl FnOnce(&M, usize) -> u64) {
        let head = head_at(page, self.frames);
        let version = self.memory.load64(head);
        self.memory.store64(head, version + 1);
        // The odd version is visible before any part of the change.
        self.memory.fence(Ordering::SeqCst);
        let held = change(&self.memory, frame_at(page, self.frames));
        self.memory.store64(head + 8, held);
        self.memory.store64(head, version + 2);
    }
}

impl<M: WritableMemory> Drop for PageWriter<M> {
    fn drop(&mut self) {
        // A client may keep the memory for as long as it lives: no page is readable from now on.
        self.withdraw_length();
        self.memory.give_back(AT_HEADS, bytes_of(self.frames) - AT_HEADS);
    }
}

impl PageReader {
    /// The pages in the memory of a server.
    ///
    /// # Errors
    ///
    /// `EINVAL` where it has another format, or could be made shorter.
    pub fn from_fd(fd: OwnedFd) -> Result<PageReader> {
        let memory = MappedMemory::map_to_read(fd, bytes_of(MOST_FRAMES))?;
        let mut head = [0; 12];
        memory.copy(0, &mut head);
        let frames = u32::from_ne_bytes([head[8], head[9], head[10], head[11]]);
        let is_known = head[..8] == MAGIC.to_ne_bytes() && frames.is_power_of_two();
        if !is_known || frames > MOST_FRAMES || memory.len() != bytes_of(frames) {
            return Err(Errno::INVAL);
        }
        Ok(PageReader::from_memory(memory, frames))
    }
}

impl<M: ReadableMemory> PageReader<M> {
    /// The pages in this memory of so many frames.
    pub fn from_memory(memory: M, frames: u32) -> PageReader<M> {
        PageReader { memory, frames }
    }

    /// Copies bytes of the file from `offset` on into `out`, up to the end of the file, and returns
    /// how many. `None` if not all of them are there, or something changed meanwhile. `out` then
    /// holds anything.
    pub fn read(&self, offset: u64, out: &mut [u8]) -> Option<usize> {
        let state = self.memory.load64(AT_STATE);
        if state % 2 == 1 {
            return None;
        }
        let size = self.memory.load64(AT_SIZE);
        let len = size.saturating_sub(offset).min(out.len() as u64) as usize;
        let mut done = 0;
        while done < len {
            let at = offset + done as u64;
            let (page, within) = (at / PAGE as u64, (at % PAGE as u64) as usize);
            let end = len.min(done + PAGE - within);
            self.copy(page, within, &mut out[done..end])?;
            done = end;
        }
        self.memory.fence(Ordering::Acquire);
        (self.memory.load64(AT_STATE) == state).then_some(len)
    }

    /// Reads a byte of every frame, with a page or without, like a client that tries to take
    /// memory.
    pub fn touch(&self) {
        for frame in 0..u64::from(self.frames) {
            self.memory.copy(frame_at(frame, self.frames), &mut [0]);
        }
    }

    fn copy(&self, page: u64, within: usize, out: &mut [u8]) -> Option<()> {
        let head = head_at(page, self.frames);
        let version = self.memory.load64(head);
        if version % 2 == 1 || self.memory.load64(head + 8) != page + 1 {
            return None;
        }
        self.memory.copy(frame_at(page, self.frames) + within, out);
        // The copy is complete before the version is read again.
        self.memory.fence(Ordering::Acquire);
        (self.memory.load64(head) == version).then_some(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::WRITABLE;

    fn make_both(size: u64) -> (PageWriter, PageReader) {
        let mut pages = PageWriter::new(size).unwrap();
        pages.publish_length(size);
        let reader = PageReader::from_fd(pages.reader().unwrap()).unwrap();
        (pages, reader)
    }

    #[test]
    fn a_reader_sees_what_was_put_until_it_is_forgotten_or_the_length_is_withdrawn() {
        let (mut pages, reader) = make_both(6000);
        let mut out = [9; 8000];
        assert_eq!(reader.read(0, &mut out), None);
        pages.write_page(0, &[1; PAGE]);
        assert_eq!((reader.read(100, &mut out[..50]), out[0], out[50]), (Some(50), 1, 9));
        assert_eq!(reader.read(4000, &mut out), None, "the second page is not there");
        pages.write_page(1, &[2; PAGE]);
        assert_eq!((reader.read(4000, &mut out), out[95], out[96]), (Some(2000), 1, 2));
        assert_eq!(
            (reader.read(6000, &mut out), reader.read(u64::MAX, &mut out)),
            (Some(0), Some(0))
        );
        pages.withdraw_length();
        assert_eq!(reader.read(0, &mut out), None);
        pages.publish_length(100);
        assert_eq!(reader.read(0, &mut out), Some(100));
        pages.forget(0..1);
        assert_eq!(reader.read(0, &mut out), None);
        assert!(pages.has(1));
        pages.forget(0..u64::MAX);
        assert!(!pages.has(1));
    }

    #[test]
    fn a_page_in_the_frame_of_another_one_takes_its_place() {
        let (mut pages, reader) = make_both(1 << 40);
        let other = 5 + u64::from(MOST_FRAMES);
        pages.write_page(5, &[5; PAGE]);
        pages.write_page(other, &[6; PAGE]);
        let mut out = [0; 10];
        assert_eq!(reader.read(5 * PAGE as u64, &mut out), None);
        assert_eq!((reader.read(other * PAGE as u64, &mut out), out), (Some(10), [6; 10]));
    }

    #[test]
    fn a_hidden_group_is_shown_again_without_the_pages_that_were_forgotten() {
        let (mut pages, reader) = make_both(1 << 20);
        (0..20).for_each(|page| pages.write_page(page, &[page as u8; PAGE]));
        let read = |page: u64| {
            let mut out = [99; 4];
            reader.read(page * PAGE as u64, &mut out).map(|_| out[0])
        };
        pages.hide(0);
        assert_eq!((read(0), read(15), read(16)), (None, None, Some(16)));
        pages.forget(PAGE as u64..2 * PAGE as u64);
        pages.show(0);
        assert_eq!((read(0), read(1), read(15)), (Some(0), None, Some(15)));
        pages.hide(0);
        pages.hide(0);
        pages.show(0);
        assert_eq!(read(15), Some(15), "hidden twice, it still knows its pages");
        pages.hide(0);
        pages.forget(0..u64::MAX);
        pages.show(0);
        assert_eq!((read(0), read(16)), (None, None));
    }

    #[test]
    fn a_group_that_is_given_back_takes_no_memory_and_holds_no_pages() {
        let (mut pages, reader) = make_both(1 << 20);
        (0..64).for_each(|page| pages.write_page(page, &[1; PAGE]));
        let before = pages.bytes_in_use().unwrap();
        pages.hide(1);
        pages.give_back(1);
        pages.give_back(2);
        assert_eq!(pages.bytes_in_use().unwrap(), before - 2 * GROUP_BYTES);
        pages.show(1);
        let read = |page: u64| reader.read(page * PAGE as u64, &mut [0; 4]).is_some();
        assert_eq!([15, 16, 47, 48].map(read), [true, false, false, true]);
        pages.write_page(16, &[2; PAGE]);
        assert!(read(16) && !read(17));
    }

    /// A client that could write would change what all other clients read.
    #[test]
    fn a_client_can_neither_write_nor_shorten_the_pages_of_a_file() {
        let (pages, _) = make_both(4096);
        let fd = pages.reader().unwrap();
        assert_eq!(rustix::io::pwrite(&fd, &[1], 0), Err(Errno::BADF));
        assert!(rustix::fs::ftruncate(&fd, 0).is_err());
        let punch = rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE;
        assert_eq!(rustix::fs::fallocate(&fd, punch, 0, 4096), Err(Errno::BADF));
        assert_eq!(rustix::fs::fstat(&fd).unwrap().st_mode & 0o777, 0o400);
        assert!(MappedMemory::map(&fd, bytes_of(16), WRITABLE).is_err(), "a mapping for writing");
    }

    /// A client that keeps the descriptor would otherwise keep the memory of all files that it ever
    /// read.
    #[test]
    fn the_memory_of_pages_is_given_back_although_a_client_keeps_it() {
        let (mut pages, reader) = make_both(1 << 20);
        (0..256).for_each(|page| pages.write_page(page, &[1; PAGE]));
        let fd = pages.reader().unwrap();
        let blocks = || rustix::fs::fstat(&fd).unwrap().st_blocks;
        assert!(blocks() >= 2048);
        drop(pages);
        assert_eq!(blocks(), 8, "the page with the length");
        assert_eq!(reader.read(0, &mut [0; 10]), None);
    }

    /// A page has one value in all bytes, or is not read.
    #[test]
    fn a_reader_never_sees_a_page_half_changed() {
        let (mut pages, reader) = make_both(4096);
        let over = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            let (over, pages) = (&over, &mut pages);
            scope.spawn(move || {
                for round in 0..20_000_u32 {
                    pages.write_page(0, &[round as u8; PAGE]);
                    match round % 64 {
                        0 | 16 | 32 => pages.forget(0..1),
                        48 => pages.give_back(0),
                        50 => {
                            pages.hide(0);
                            pages.show(0);
                        }
                        _ => {}
                    }
                }
                pages.write_page(0, &[77; PAGE]);
                over.store(true, Ordering::SeqCst);
            });
            let mut out = [0; PAGE];
            loop {
                let last = over.load(Ordering::SeqCst);
                if reader.read(0, &mut out).is_some() {
                    assert!(out.iter().all(|&byte| byte == out[0]));
                }
                if last {
                    break;
                }
            }
            assert_eq!((reader.read(0, &mut out), out[0]), (Some(PAGE), 77));
        });
    }
}
