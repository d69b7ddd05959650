//! Directory listings.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, PoisonError};

use defuse_fs::{CacheMode, DirBuf, DirItem, Errno, File, FileKind, Ino, Opened, Push, Result};
use rustix::fs::{OFlags, SeekFrom};

use crate::inode::Inode;
use crate::lower::{OrErrno, Stat, distinct_ino};
use crate::open_files::OpenFile;
use crate::passthrough::Passthrough;
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
    /// Entries were read since the position was 0.
    begun: bool,
}

impl DirStream {
    pub(crate) fn new() -> Self {
        DirStream { buf: Vec::new(), at: 0, end: 0, next: 0, begun: false }
    }

    /// Sets the position to `from`. Seeks only if that is not the current position. The start is
    /// always read again, as rewinddir(3) requires.
    fn go_to(&mut self, fd: BorrowedFd<'_>, from: u64) -> Result<()> {
        if from == self.next && (from != 0 || !self.begun) {
            return Ok(());
        }
        rustix::fs::seek(fd, SeekFrom::Start(from)).or_errno()?;
        (self.at, self.end, self.next, self.begun) = (0, 0, from, false);
        Ok(())
    }

    /// The next entry, without taking it; `None` at the end.
    fn peek(&mut self, fd: BorrowedFd<'_>) -> Result<Option<Dirent<'_>>> {
        if self.is_drained() {
            if self.buf.is_empty() {
                self.buf.resize(BUFFER_BYTES, 0);
            }
            self.end = sys::getdents(fd, &mut self.buf)?;
            (self.at, self.begun) = (0, true);
            if self.end == 0 {
                return Ok(None);
            }
        }
        Dirent::parse(&self.buf[self.at..self.end]).map(Some).ok_or(Errno::EIO)
    }

    /// True if all entries were taken that were read.
    fn is_drained(&self) -> bool {
        self.at == self.end
    }

    fn advance(&mut self, len: usize, next: u64) {
        self.at += len;
        self.next = next;
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
    pub(crate) fn opendir(&self, ino: Ino) -> Result<Opened> {
        let inode = self.inodes.get(ino)?;
        if inode.kind != FileKind::Directory {
            return Err(Errno::ENOTDIR);
        }
        let fd = self.open_without_atime(&inode, OFlags::DIRECTORY | self.added_flags())?;
        let fd = Arc::new(self.placed(fd));
        // It also serves what comes next: the attributes of the directory, and its names.
        if !inode.is_pinned() {
            self.cache_of(&inode).lend(&inode, &fd);
        }
        let lower = self.is_inherited().then(|| Arc::clone(&fd));
        let fh = self.files.insert(OpenFile::directory(fd))?;
        // A cached listing is validated by the ctime of the directory, so it is trusted no longer
        // than attributes are.
        let cache_dir = self.options.cache != CacheMode::Direct;
        let cache = if cache_dir { CacheMode::Keep } else { CacheMode::Direct };
        Ok(Opened { cache_dir, cache, lower, ..Opened::new(fh) })
    }

    pub(crate) fn dir_file(&self, dir: File) -> Result<Arc<OpenFile>> {
        let open = self.files.get(dir.fh)?;
        if open.dir.is_some() { Ok(open) } else { Err(Errno::ENOTDIR) }
    }

    pub(crate) fn readdir(&self, dir: File, from: u64, out: &mut DirBuf<'_>) -> Result<()> {
        let open = self.dir_file(dir)?;
        let inode = self.inodes.get(dir.ino)?;
        let fd = open.fd.as_fd();
        let stream = open.dir.as_ref().ok_or(Errno::ENOTDIR)?;
        let mut stream = stream.lock().unwrap_or_else(PoisonError::into_inner);
        stream.go_to(fd, from)?;
        let mut listed = false;
        while let Some(entry) = stream.peek(fd)? {
            let (len, next) = (entry.len, entry.next);
            match self.push_entry(&inode, fd, &entry, out) {
                Some(Push::Full) => break,
                Some(Push::Added) => listed = true,
                None => {}
            }
            stream.advance(len, next);
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
        inode: &Arc<Inode>,
        dir: BorrowedFd<'_>,
        entry: &Dirent<'_>,
        out: &mut DirBuf<'_>,
    ) -> Option<Push> {
        let kind = match entry.kind() {
            Some(kind) => kind,
            None if entry.is_dot() => FileKind::Directory,
            None => Stat::at(dir, entry.name).and_then(|stat| stat.kind()).ok()?,
        };
        let ino = distinct_ino(entry.ino, inode.key.mount);
        let item = DirItem { ino, next: entry.next, kind, name: entry.name };
        let pushed = out.push_with(item, || {
            if entry.is_dot() { None } else { self.lookup_in(inode, dir, entry.name).ok() }
        });
        Some(pushed)
    }
}
