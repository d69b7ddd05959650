//! Cached pages of one file: the server alone writes them, and clients read them by loads alone.
//!
//! A frame holds at most one page of the file, page n in frame n modulo the number of frames. The memory never
//! changes its length and gives no frame back, so that an access never fails; a frame gets another page under
//! its own version.

use std::ops::Range;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::{Ordering, fence};

use rustix::fs::{FallocateFlags, Mode, OFlags};
use rustix::io::{Errno, Result};

use crate::{Memory, Shared};

/// Bytes of a page.
pub const PAGE: usize = 4096;
/// The first word of the memory: "defuseP1".
const MAGIC: u64 = u64::from_le_bytes(*b"defuseP1");
/// The most frames of a file: 16 MiB.
pub const MOST_FRAMES: u32 = 4096;

/// `u32`: number of frames, a power of two.
const AT_FRAMES: usize = 8;
/// `u64`: version of the file; odd while nothing may be read.
const AT_STATE: usize = 64;
/// `u64`: length of the file in bytes.
const AT_SIZE: usize = 72;
/// Heads of frames, 16 bytes each: version (`u64`, odd while the frame changes), page number + 1 (`u64`, 0 for
/// none).
const AT_HEADS: usize = PAGE;
const HEAD: usize = 16;

/// The server's side. Its memory is at first closed: nothing may be read.
pub struct Pages {
    memory: Memory,
    fd: OwnedFd,
    frames: u32,
}

/// A client's side.
pub struct PageReader {
    memory: Memory,
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

impl Pages {
    /// Memory for the pages of a file of `size` bytes.
    ///
    /// # Errors
    ///
    /// Those of memfd_create(2), ftruncate(2) and mmap(2).
    pub fn new(size: u64) -> Result<Pages> {
        let wanted = size.div_ceil(PAGE as u64).clamp(16, MOST_FRAMES.into()) as u32;
        let frames = wanted.next_power_of_two();
        let (memory, fd) = Memory::sealed(bytes_of(frames))?;
        // No other user can open it again for writing, through /proc.
        rustix::fs::fchmod(&fd, Mode::RUSR)?;
        memory.write(AT_FRAMES, &frames.to_ne_bytes());
        memory.write(0, &MAGIC.to_ne_bytes());
        memory.store64(AT_STATE, 1);
        Ok(Pages { memory, fd, frames })
    }

    /// A descriptor to read the memory, for [`PageReader::of`].
    ///
    /// # Errors
    ///
    /// Those of open(2) in /proc.
    pub fn reader(&self) -> Result<OwnedFd> {
        let path = format!("/proc/self/fd/{}", self.fd.as_raw_fd());
        rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())
    }

    /// Bytes of the memory.
    pub fn bytes(&self) -> u64 {
        bytes_of(self.frames) as u64
    }

    /// The length of the file when it was opened last, in bytes.
    pub fn size(&self) -> u64 {
        self.memory.load64(AT_SIZE)
    }

    /// True while nothing may be read.
    pub fn is_closed(&self) -> bool {
        self.memory.load64(AT_STATE) % 2 == 1
    }

    /// From now on nothing may be read: the length of the file is about to change.
    pub fn close(&mut self) {
        let state = self.memory.load64(AT_STATE);
        if state.is_multiple_of(2) {
            self.memory.store64(AT_STATE, state + 1);
            fence(Ordering::SeqCst);
        }
    }

    /// From now on pages may be read; the file has `size` bytes.
    pub fn open(&mut self, size: u64) {
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

    /// Drops the pages of these bytes of the file.
    pub fn forget(&mut self, range: Range<u64>) {
        let (first, end) = (range.start / PAGE as u64, range.end.div_ceil(PAGE as u64));
        if end - first.min(end) >= u64::from(self.frames) {
            (0..u64::from(self.frames)).for_each(|frame| self.change(frame, |_, _| 0));
        } else {
            for page in (first..end).filter(|&page| self.has(page)).collect::<Vec<_>>() {
                self.change(page, |_, _| 0);
            }
        }
        fence(Ordering::SeqCst);
    }

    /// Puts a page into its frame, in place of the one that is there.
    pub fn put(&mut self, page: u64, bytes: &[u8; PAGE]) {
        self.change(page, |memory, frame| {
            memory.write(frame, bytes);
            page + 1
        });
    }

    /// Changes the frame of `page` under its version. `change` returns the new page number + 1.
    fn change(&mut self, page: u64, change: impl FnOnce(&Memory, usize) -> u64) {
        let head = head_at(page, self.frames);
        let version = self.memory.load64(head);
        self.memory.store64(head, version + 1);
        // The odd version is there before anything of the change is.
        fence(Ordering::SeqCst);
        let held = change(&self.memory, frame_at(page, self.frames));
        self.memory.store64(head + 8, held);
        self.memory.store64(head, version + 2);
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // A client may keep the memory for as long as it lives: nothing is there from now on.
        self.close();
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        let (from, len) = (AT_HEADS as u64, self.bytes() - AT_HEADS as u64);
        if let Err(error) = rustix::fs::fallocate(&self.fd, flags, from, len) {
            log::warn!("shared memory is not given back: {error}");
        }
    }
}

impl PageReader {
    /// The pages in the memory of a server.
    ///
    /// # Errors
    ///
    /// `EINVAL` where it has another format, or could be made shorter.
    pub fn of(fd: OwnedFd) -> Result<PageReader> {
        let memory = Memory::to_read(fd, bytes_of(MOST_FRAMES))?;
        let mut head = [0; 12];
        memory.read(0, &mut head);
        let frames = u32::from_ne_bytes([head[8], head[9], head[10], head[11]]);
        let is_known = head[..8] == MAGIC.to_ne_bytes() && frames.is_power_of_two();
        if !is_known || frames > MOST_FRAMES || memory.len() != bytes_of(frames) {
            return Err(Errno::INVAL);
        }
        Ok(PageReader { memory, frames })
    }

    /// Copies bytes of the file from `offset` on into `out`, up to the end of the file, and returns how many.
    /// `None` if not all of them are there, or something changed meanwhile. `out` then holds anything.
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
        fence(Ordering::Acquire);
        (self.memory.load64(AT_STATE) == state).then_some(len)
    }

    fn copy(&self, page: u64, within: usize, out: &mut [u8]) -> Option<()> {
        let head = head_at(page, self.frames);
        let version = self.memory.load64(head);
        if version % 2 == 1 || self.memory.load64(head + 8) != page + 1 {
            return None;
        }
        self.memory.read(frame_at(page, self.frames) + within, out);
        // The copy is there before the version is looked at again.
        fence(Ordering::Acquire);
        (self.memory.load64(head) == version).then_some(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn both(size: u64) -> (Pages, PageReader) {
        let mut pages = Pages::new(size).unwrap();
        pages.open(size);
        let reader = PageReader::of(pages.reader().unwrap()).unwrap();
        (pages, reader)
    }

    #[test]
    fn a_reader_sees_what_was_put_until_it_is_forgotten_or_the_file_is_closed() {
        let (mut pages, reader) = both(6000);
        let mut out = [9; 8000];
        assert_eq!(reader.read(0, &mut out), None);
        pages.put(0, &[1; PAGE]);
        assert_eq!((reader.read(100, &mut out[..50]), out[0], out[50]), (Some(50), 1, 9));
        assert_eq!(reader.read(4000, &mut out), None, "the second page is not there");
        pages.put(1, &[2; PAGE]);
        assert_eq!((reader.read(4000, &mut out), out[95], out[96]), (Some(2000), 1, 2));
        assert_eq!(
            (reader.read(6000, &mut out), reader.read(u64::MAX, &mut out)),
            (Some(0), Some(0))
        );
        pages.close();
        assert_eq!(reader.read(0, &mut out), None);
        pages.open(100);
        assert_eq!(reader.read(0, &mut out), Some(100));
        pages.forget(0..1);
        assert_eq!(reader.read(0, &mut out), None);
        assert!(pages.has(1));
        pages.forget(0..u64::MAX);
        assert!(!pages.has(1));
    }

    #[test]
    fn a_page_in_the_frame_of_another_one_takes_its_place() {
        let (mut pages, reader) = both(1 << 40);
        let other = 5 + u64::from(MOST_FRAMES);
        pages.put(5, &[5; PAGE]);
        pages.put(other, &[6; PAGE]);
        let mut out = [0; 10];
        assert_eq!(reader.read(5 * PAGE as u64, &mut out), None);
        assert_eq!((reader.read(other * PAGE as u64, &mut out), out), (Some(10), [6; 10]));
    }

    /// Whoever could write would change what all other clients read.
    #[test]
    fn a_client_can_neither_write_nor_shorten_the_pages_of_a_file() {
        let (pages, _) = both(4096);
        let fd = pages.reader().unwrap();
        assert_eq!(rustix::io::pwrite(&fd, &[1], 0), Err(Errno::BADF));
        assert!(rustix::fs::ftruncate(&fd, 0).is_err());
        let punch = rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE;
        assert_eq!(rustix::fs::fallocate(&fd, punch, 0, 4096), Err(Errno::BADF));
        assert_eq!(rustix::fs::fstat(&fd).unwrap().st_mode & 0o777, 0o400);
        assert!(Memory::of(fd, bytes_of(16)).is_err(), "a mapping for writing");
    }

    /// A client that keeps the descriptor would otherwise keep the memory of all files that it ever read.
    #[test]
    fn the_memory_of_pages_is_given_back_although_a_client_keeps_it() {
        let (mut pages, reader) = both(1 << 20);
        (0..256).for_each(|page| pages.put(page, &[1; PAGE]));
        let fd = pages.reader().unwrap();
        let blocks = || rustix::fs::fstat(&fd).unwrap().st_blocks;
        assert!(blocks() >= 2048);
        drop(pages);
        assert_eq!(blocks(), 8, "the page that says that the file is closed");
        assert_eq!(reader.read(0, &mut [0; 10]), None);
    }

    /// A page has one value in all bytes, or is not read.
    #[test]
    fn a_reader_never_sees_a_page_half_changed() {
        let (mut pages, reader) = both(4096);
        let over = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            let (over, pages) = (&over, &mut pages);
            scope.spawn(move || {
                for round in 0..20_000_u32 {
                    pages.put(0, &[round as u8; PAGE]);
                    if round % 16 == 0 {
                        pages.forget(0..1);
                    }
                }
                pages.put(0, &[77; PAGE]);
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
