//! Directory listings.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, PoisonError};

use defuse_fs::{
    CacheMode, DirBuf, DirItem, Errno, File, FileKind, Ino, OpenReply, PushOutcome, Result,
};
use rustix::fs::{OFlags, SeekFrom};

use crate::inode::LowerInode;
use crate::lower::{OrErrno, StatxResult, distinct_ino};
use crate::open_files::LowerOpenFile;
use crate::passthrough::Passthrough;
use crate::positions::Positions;
use crate::sys;

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
    lower: u64,
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
    fn go_to(&mut self, of: &Listed<'_>, from: u64) -> Result<()> {
        if from == self.next && (from != 0 || !self.begun) {
            return Ok(());
        }
        let lower = match from {
            0 => 0,
            _ => of.served.positions.lower(self.positions(of)?, of.inode.ino(), from)?,
        };
        rustix::fs::seek(of.fd, SeekFrom::Start(lower)).or_errno()?;
        (self.at, self.end, self.begun) = (0, 0, false);
        (self.next, self.lower) = (from, lower);
        Ok(())
    }

    /// The kind of positions, for which the beginning may have to be read: a frontend can go on where another open directory was.
    fn positions(&mut self, of: &Listed<'_>) -> Result<Positions> {
        if self.positions.is_none() {
            self.go_to(of, 0)?;
            self.peek(of)?;
        }
        Ok(self.positions.unwrap_or(Positions::Plain))
    }

    /// The next entry, without taking it, and the kind of positions; `None` at the end.
    fn peek(&mut self, of: &Listed<'_>) -> Result<Option<(Positions, Dirent<'_>)>> {
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
    fn is_drained(&self) -> bool {
        self.at == self.end
    }

    /// Goes on after an entry of `len` bytes, to the position `next`, which is `lower` in the lower file system.
    fn advance(&mut self, len: usize, next: u64, lower: u64) {
        self.at += len;
        (self.next, self.lower) = (next, lower);
    }
}

/// The directory of a listing.
struct Listed<'a> {
    served: &'a Passthrough,
    inode: &'a Arc<LowerInode>,
    fd: BorrowedFd<'a>,
}

impl Listed<'_> {
    /// The kind of positions of a directory that begins with these entries.
    fn kind_of_positions(&self, beginning: &[u8]) -> Result<Positions> {
        // A program in a run gives this descriptor to others, with its position.
        if self.served.is_inherited() {
            return Ok(Positions::Plain);
        }
        let f_type = self.served.mounts.get(self.inode.key.mount)?.f_type;
        let first = Dirent::parse(beginning).ok_or(Errno::EIO)?;
        let second = || Dirent::parse(beginning.get(first.len..)?);
        Positions::detect(f_type, first.next, |position| match second() {
            Some(second) => self.is_at(position, second.name),
            None => Ok(false),
        })
    }

    /// True if the listing from `position` begins with `name`. The position of the descriptor stays.
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
struct Dirent<'a> {
    ino: u64,
    next: u64,
    len: usize,
    d_type: u8,
    name: &'a [u8],
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
    fn kind(&self) -> Option<FileKind> {
        FileKind::from_mode(u32::from(self.d_type) << 12)
    }

    fn is_dot(&self) -> bool {
        self.name == b"." || self.name == b".."
    }
}

impl Passthrough {
    pub(crate) fn opendir(&self, ino: Ino) -> Result<OpenReply> {
        let inode = self.inodes.get(ino)?;
        if inode.kind != FileKind::Directory {
            return Err(Errno::ENOTDIR);
        }
        let fd = self.open_without_atime(&inode, OFlags::DIRECTORY | self.extra_flags())?;
        let fd = Arc::new(self.place_descriptor(fd));
        // It also serves what comes next: the attributes of the directory, and its names.
        if !inode.is_pinned() {
            self.cache_of(&inode).lend(&inode, &fd);
        }
        let lower = self.is_inherited().then(|| Arc::clone(&fd));
        let fh = self.files.insert(LowerOpenFile::directory(fd))?;
        // A cached listing is validated by the ctime of the directory, so it is trusted no longer
        // than attributes are.
        let cache_dir = self.options.cache != CacheMode::Direct;
        let cache = if cache_dir { CacheMode::Keep } else { CacheMode::Direct };
        Ok(OpenReply { cache_dir, cache, lower, ..OpenReply::new(fh) })
    }

    pub(crate) fn dir_file(&self, dir: File) -> Result<Arc<LowerOpenFile>> {
        let open = self.files.get(dir.fh)?;
        if open.dir.is_some() { Ok(open) } else { Err(Errno::ENOTDIR) }
    }

    pub(crate) fn readdir(&self, dir: File, from: u64, out: &mut DirBuf<'_>) -> Result<()> {
        let open = self.dir_file(dir)?;
        let inode = self.inodes.get(dir.ino)?;
        let of = Listed { served: self, inode: &inode, fd: open.fd.as_fd() };
        let stream = open.dir.as_ref().ok_or(Errno::ENOTDIR)?;
        let mut stream = stream.lock().unwrap_or_else(PoisonError::into_inner);
        stream.go_to(&of, from)?;
        let mut listed = false;
        loop {
            let before = stream.lower;
            let Some((positions, mut entry)) = stream.peek(&of)? else { break };
            let (len, lower) = (entry.len, entry.next);
            let next = self.positions.tell(positions, dir.ino, before, lower);
            entry.next = next;
            match self.push_entry(&inode, of.fd, &entry, out) {
                Some(PushOutcome::Full) => break,
                Some(PushOutcome::Added) => listed = true,
                None => {}
            }
            stream.advance(len, next, lower);
            // The next call would most often find the end, and the one after it once more.
            if listed && stream.is_drained() {
                break;
            }
        }
        Ok(())
    }

    /// `None` for an entry that is gone meanwhile, so that it need not be listed.
    fn push_entry(
        &self,
        inode: &Arc<LowerInode>,
        dir: BorrowedFd<'_>,
        entry: &Dirent<'_>,
        out: &mut DirBuf<'_>,
    ) -> Option<PushOutcome> {
        let kind = match entry.kind() {
            Some(kind) => kind,
            None if entry.is_dot() => FileKind::Directory,
            None => StatxResult::read_at(dir, entry.name).and_then(|stat| stat.kind()).ok()?,
        };
        let ino = distinct_ino(entry.ino, inode.key.mount);
        let item = DirItem { ino, next: entry.next, kind, name: entry.name };
        let pushed = out.push_with(item, || {
            if entry.is_dot() { None } else { self.lookup_in(inode, dir, entry.name).ok() }
        });
        Some(pushed)
    }
}
