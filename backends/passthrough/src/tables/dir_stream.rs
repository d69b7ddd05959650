//! The listing of an open directory, and its entries.

use std::os::fd::BorrowedFd;

use defuse_fs::{Errno, FileKind, Ino, Result};
use rustix::fs::SeekFrom;

use crate::lower::OrErrno;
use crate::sys;
use crate::tables::positions::{PositionTables, Positions};

/// Buffer size of getdents64(2) in bytes: about a thousand names of ordinary length.
const BUFFER_BYTES: usize = 32 << 10;

/// The state of the listing of an open directory: the entries that the kernel returned and the
/// frontend has not taken yet.
pub(crate) struct DirStream {
    buf: Vec<u8>,
    at: usize,
    end: usize,
    /// The position of the entry at `at`, as frontends name it.
    next: u64,
    /// The position in the lower file system.
    pub(crate) lower: u64,
    /// Known when the beginning was read.
    positions: Option<Positions>,
    /// Entries were read since the position was 0.
    begun: bool,
}

impl DirStream {
    pub(crate) fn new() -> Self {
        DirStream {
            buf: Vec::new(),
            at: 0,
            end: 0,
            next: 0,
            lower: 0,
            positions: None,
            begun: false,
        }
    }

    /// Sets the position to `from`. Seeks only if that is not the current position. The start is
    /// always read again, as rewinddir(3) requires.
    pub(crate) fn go_to(&mut self, of: &ListedDir<'_>, from: u64) -> Result<()> {
        if from == self.next && (from != 0 || !self.begun) {
            return Ok(());
        }
        let lower = match from {
            0 => 0,
            _ => of.tables.lower(self.positions(of)?, of.ino, from)?,
        };
        rustix::fs::seek(of.fd, SeekFrom::Start(lower)).or_errno()?;
        (self.at, self.end, self.begun) = (0, 0, false);
        (self.next, self.lower) = (from, lower);
        Ok(())
    }

    /// The kind of positions, for which the beginning may have to be read: a frontend can go on
    /// where another open directory was.
    fn positions(&mut self, of: &ListedDir<'_>) -> Result<Positions> {
        if self.positions.is_none() {
            self.go_to(of, 0)?;
            self.peek(of)?;
        }
        Ok(self.positions.unwrap_or(Positions::Plain))
    }

    /// The next entry, without taking it, and the kind of positions; `None` at the end.
    pub(crate) fn peek(&mut self, of: &ListedDir<'_>) -> Result<Option<(Positions, Dirent<'_>)>> {
        if self.is_drained() {
            if self.buf.is_empty() {
                self.buf.resize(BUFFER_BYTES, 0);
            }
            self.end = sys::getdents(of.fd, &mut self.buf)?;
            (self.at, self.begun) = (0, true);
            if self.end == 0 {
                return Ok(None);
            }
            if self.positions.is_none() {
                self.positions = Some(of.kind_of_positions(&self.buf[..self.end])?);
            }
        }
        let positions = self.positions.unwrap_or(Positions::Plain);
        let entry = Dirent::parse(&self.buf[self.at..self.end]).ok_or(Errno::EIO)?;
        Ok(Some((positions, entry)))
    }

    /// True if all entries were taken that were read.
    pub(crate) fn is_drained(&self) -> bool {
        self.at == self.end
    }

    /// Goes on after an entry of `len` bytes, to the position `next`, which is `lower` in the lower
    /// file system.
    pub(crate) fn advance(&mut self, len: usize, next: u64, lower: u64) {
        self.at += len;
        (self.next, self.lower) = (next, lower);
    }
}

/// The directory of a listing.
pub(crate) struct ListedDir<'a> {
    pub(crate) fd: BorrowedFd<'a>,
    pub(crate) ino: Ino,
    /// The type of its file system, or the reason why that is not known.
    pub(crate) f_type: Result<u64>,
    pub(crate) tables: &'a PositionTables,
    /// Other processes use the descriptor, with its position.
    pub(crate) is_inherited: bool,
}

impl ListedDir<'_> {
    /// The kind of positions of a directory that begins with these entries.
    fn kind_of_positions(&self, beginning: &[u8]) -> Result<Positions> {
        // A program in a run gives this descriptor to others, with its position.
        if self.is_inherited {
            return Ok(Positions::Plain);
        }
        let first = Dirent::parse(beginning).ok_or(Errno::EIO)?;
        let second = || Dirent::parse(beginning.get(first.len..)?);
        Positions::detect(self.f_type?, first.next, |position| match second() {
            Some(second) => self.is_at(position, second.name),
            None => Ok(false),
        })
    }

    /// True if the listing from `position` begins with `name`. The position of the descriptor
    /// stays.
    fn is_at(&self, position: u64, name: &[u8]) -> Result<bool> {
        /// Room for an entry with the longest name.
        const ONE_ENTRY: usize = 1024;
        let before = rustix::fs::seek(self.fd, SeekFrom::Current(0)).or_errno()?;
        let mut buf = [0; ONE_ENTRY];
        let found = rustix::fs::seek(self.fd, SeekFrom::Start(position))
            .or_errno()
            .and_then(|_| sys::getdents(self.fd, &mut buf));
        rustix::fs::seek(self.fd, SeekFrom::Start(before)).or_errno()?;
        let found = found.map(|len| Dirent::parse(&buf[..len]).is_some_and(|it| it.name == name));
        Ok(found.unwrap_or(false))
    }
}

/// A `struct linux_dirent64`, getdents64(2).
pub(crate) struct Dirent<'a> {
    pub(crate) ino: u64,
    pub(crate) next: u64,
    pub(crate) len: usize,
    d_type: u8,
    pub(crate) name: &'a [u8],
}

impl<'a> Dirent<'a> {
    fn parse(record: &'a [u8]) -> Option<Self> {
        const NAME_AT: usize = 19;
        let word = |at: usize| Some(u64::from_ne_bytes(record.get(at..at + 8)?.try_into().ok()?));
        let len = usize::from(u16::from_ne_bytes(record.get(16..18)?.try_into().ok()?));
        let name = record.get(NAME_AT..len)?;
        let name = &name[..name.iter().position(|byte| *byte == 0)?];
        Some(Dirent { ino: word(0)?, next: word(8)?, len, d_type: record[18], name })
    }

    /// `None` if the file system does not report types.
    pub(crate) fn kind(&self) -> Option<FileKind> {
        FileKind::from_mode(u32::from(self.d_type) << 12)
    }

    pub(crate) fn is_dot(&self) -> bool {
        self.name == b"." || self.name == b".."
    }
}
