//! Open files and directories, by handle.
//!
//! The table is sharded, and each thread opens files in the shards in turn. A read takes the shared
//! lock of one of 64 shards while it counts a reference. The lock is not held during the system
//! call.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, RwLock};

use defuse_fs::{Errno, Fh, OpenFlags, Result};
use rustix::fs::{Mode, OFlags};

use crate::directory::DirStream;
use crate::lower::{OrErrno, ProcPath};
use crate::slab::{SHARDS, Slab, SlabIndex};

/// Flags that fcntl(2) can change on an open file and that matter to the lower file.
const SETTABLE: u32 = OpenFlags::APPEND | OpenFlags::DIRECT;

/// An open file or directory.
pub(crate) struct OpenFile {
    pub(crate) fd: Arc<OwnedFd>,
    /// State of the listing; for directories only.
    pub(crate) dir: Option<Mutex<DirStream>>,
    /// close(2) reports no errors.
    pub(crate) local: bool,
    /// Opened with `O_RDONLY` and no other flag.
    only_reads: bool,
    /// The flags of `SETTABLE` that `fd` has.
    set: AtomicU32,
    /// Flags that `fd` never gets.
    ignored: u32,
    /// The same file without `O_APPEND`, for writes from a cache.
    plain: OnceLock<OwnedFd>,
}

impl OpenFile {
    /// A regular file that was opened with `flags`. The caller's flags in `ignored` were left out
    /// on purpose.
    pub(crate) fn file(fd: Arc<OwnedFd>, flags: OFlags, ignored: u32, local: bool) -> Self {
        let set = AtomicU32::new(flags.bits() & SETTABLE & !ignored);
        let only_reads = flags == OFlags::RDONLY;
        OpenFile { fd, dir: None, local, only_reads, set, ignored, plain: OnceLock::new() }
    }

    /// True if the descriptor is like one just opened with `O_RDONLY`.
    pub(crate) fn only_reads(&self) -> bool {
        self.only_reads && self.set.load(Ordering::Relaxed) == 0
    }

    pub(crate) fn directory(fd: Arc<OwnedFd>) -> Self {
        OpenFile {
            fd,
            dir: Some(Mutex::new(DirStream::new())),
            local: true,
            only_reads: false,
            set: AtomicU32::new(0),
            ignored: SETTABLE,
            plain: OnceLock::new(),
        }
    }

    /// The descriptor, with `O_APPEND` and `O_DIRECT` set as in `flags`: the caller's process may
    /// have changed them since it opened the file.
    pub(crate) fn fd_as(&self, flags: OpenFlags) -> BorrowedFd<'_> {
        let wanted = flags.0 & SETTABLE & !self.ignored;
        if wanted != self.set.load(Ordering::Relaxed) {
            self.change_flags(wanted);
        }
        self.fd.as_fd()
    }

    #[cold]
    fn change_flags(&self, wanted: u32) {
        let Ok(now) = rustix::fs::fcntl_getfl(&self.fd) else { return };
        let settable = OFlags::from_bits_retain(SETTABLE);
        let flags = (now - settable) | OFlags::from_bits_retain(wanted);
        // If the file system refuses O_DIRECT, cached I/O gives the same data.
        let _ = rustix::fs::fcntl_setfl(&self.fd, flags);
        self.set.store(wanted, Ordering::Relaxed);
    }

    /// A descriptor that writes at the given offset, regardless of `O_APPEND`.
    pub(crate) fn fd_at_offset(&self) -> Result<BorrowedFd<'_>> {
        if self.set.load(Ordering::Relaxed) & OpenFlags::APPEND == 0 {
            return Ok(self.fd.as_fd());
        }
        if let Some(plain) = self.plain.get() {
            return Ok(plain.as_fd());
        }
        let path = ProcPath::new(self.fd.as_fd());
        let flags = OFlags::WRONLY | OFlags::CLOEXEC;
        let fd = rustix::fs::open(path.as_c_str(), flags, Mode::empty()).or_errno()?;
        Ok(self.plain.get_or_init(|| fd).as_fd())
    }
}

/// All open files.
pub(crate) struct OpenFiles {
    shards: Box<[RwLock<Slab<OpenFile>>]>,
    turn: AtomicUsize,
}

impl OpenFiles {
    pub(crate) fn new() -> Self {
        let shards = (0..SHARDS).map(|_| RwLock::new(Slab::new())).collect();
        OpenFiles { shards, turn: AtomicUsize::new(0) }
    }

    pub(crate) fn insert(&self, file: OpenFile) -> Result<Fh> {
        let index = self.turn.fetch_add(1, Ordering::Relaxed) % SHARDS;
        let mut shard = self.shards[index].write().unwrap_or_else(PoisonError::into_inner);
        let mut fh = Fh(0);
        let inserted = shard.insert(index, |number| {
            fh = Fh(number);
            Arc::new(file)
        });
        inserted.map(|_| fh).ok_or(Errno::ENFILE)
    }

    /// The open file of a handle. Fails with `EBADF` if it was released, or never existed.
    pub(crate) fn get(&self, fh: Fh) -> Result<Arc<OpenFile>> {
        let place = SlabIndex::of(fh.0);
        let shard = self.shards[place.shard].read().unwrap_or_else(PoisonError::into_inner);
        shard.get(place).cloned().ok_or(Errno::EBADF)
    }

    pub(crate) fn remove(&self, fh: Fh) -> Result<Arc<OpenFile>> {
        let place = SlabIndex::of(fh.0);
        let mut shard = self.shards[place.shard].write().unwrap_or_else(PoisonError::into_inner);
        shard.remove(place).ok_or(Errno::EBADF)
    }

    pub(crate) fn len(&self) -> usize {
        let len = |shard: &RwLock<Slab<OpenFile>>| {
            shard.read().unwrap_or_else(PoisonError::into_inner).len()
        };
        self.shards.iter().map(len).sum()
    }
}
