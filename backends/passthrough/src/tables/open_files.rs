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

use crate::lower::OrErrno;
use crate::proc_path::ProcPath;
use crate::tables::dir_stream::DirStream;
use crate::tables::slab::{GenerationSlab, SHARDS, SlabIndex};

/// Flags that fcntl(2) can change on an open file and that matter to the lower file.
const SETTABLE: u32 = OpenFlags::APPEND | OpenFlags::DIRECT;

/// An open file or directory.
pub(crate) struct LowerOpenFile {
    pub(crate) fd: Arc<OwnedFd>,
    /// State of the listing; for directories only.
    pub(crate) dir: Option<Mutex<DirStream>>,
    /// close(2) reports no errors.
    pub(crate) local: bool,
    /// Opened with `O_RDONLY` and no other flag.
    only_reads: bool,
    /// The flags of `SETTABLE` that `fd` has. They change only where the file cannot be opened once
    /// more.
    set: AtomicU32,
    /// The flags of `SETTABLE` that no request gets.
    ignored: u32,
    /// The flags of `O_SYNC` that `fd` has.
    syncs: u32,
    /// This file with other flags of `SETTABLE`: the descriptors of requests that are handled at
    /// the same time must not change.
    others: [OnceLock<OwnedFd>; 4],
}

/// The place in [`LowerOpenFile::others`].
fn place_of(flags: u32) -> usize {
    usize::from(flags & OpenFlags::APPEND != 0) | usize::from(flags & OpenFlags::DIRECT != 0) << 1
}

impl LowerOpenFile {
    /// A regular file that was opened with `flags`. The caller's flags in `ignored` were left out
    /// on purpose.
    pub(crate) fn file(fd: Arc<OwnedFd>, flags: OFlags, ignored: u32, local: bool) -> Self {
        LowerOpenFile {
            local,
            only_reads: flags == OFlags::RDONLY,
            set: AtomicU32::new(flags.bits() & SETTABLE & !ignored),
            ignored,
            syncs: flags.bits() & OpenFlags::SYNC,
            ..LowerOpenFile::new(fd)
        }
    }

    fn new(fd: Arc<OwnedFd>) -> Self {
        LowerOpenFile {
            fd,
            dir: None,
            local: true,
            only_reads: false,
            set: AtomicU32::new(0),
            ignored: SETTABLE,
            syncs: 0,
            others: Default::default(),
        }
    }

    /// True if the descriptor is like one just opened with `O_RDONLY`.
    pub(crate) fn only_reads(&self) -> bool {
        self.only_reads && self.set.load(Ordering::Relaxed) == 0
    }

    pub(crate) fn directory(fd: Arc<OwnedFd>) -> Self {
        LowerOpenFile { dir: Some(Mutex::new(DirStream::new())), ..LowerOpenFile::new(fd) }
    }

    /// The descriptor, with `O_APPEND` and `O_DIRECT` set as in `flags`: the caller's process may
    /// have changed them since it opened the file.
    pub(crate) fn fd_as(&self, flags: OpenFlags) -> BorrowedFd<'_> {
        let wanted = flags.0 & SETTABLE & !self.ignored;
        if wanted == self.set.load(Ordering::Relaxed) {
            return self.fd.as_fd();
        }
        self.open_variant(wanted).unwrap_or_else(|_| {
            self.change_flags(wanted);
            self.fd.as_fd()
        })
    }

    /// Opens the file once more, with these flags of `SETTABLE`.
    #[cold]
    fn open_variant(&self, wanted: u32) -> Result<BorrowedFd<'_>> {
        let place = &self.others[place_of(wanted)];
        if let Some(other) = place.get() {
            return Ok(other.as_fd());
        }
        let own = rustix::fs::fcntl_getfl(&self.fd).or_errno()?;
        let settable = OFlags::from_bits_retain(SETTABLE);
        let flags = (own - settable) | OFlags::from_bits_retain(wanted);
        let path = ProcPath::new(self.fd.as_fd());
        let flags = flags | OFlags::CLOEXEC;
        let fd = rustix::fs::open(path.as_c_str(), flags, Mode::empty()).or_errno()?;
        Ok(place.get_or_init(|| fd).as_fd())
    }

    /// Changes the flags of the descriptor: the file cannot be opened once more, because its mode
    /// denies it to the daemon, or for lack of descriptors.
    #[cold]
    fn change_flags(&self, wanted: u32) {
        let Ok(now) = rustix::fs::fcntl_getfl(&self.fd) else { return };
        let settable = OFlags::from_bits_retain(SETTABLE);
        let flags = (now - settable) | OFlags::from_bits_retain(wanted);
        // If the file system refuses O_DIRECT, cached I/O gives the same data.
        let _ = rustix::fs::fcntl_setfl(&self.fd, flags);
        self.set.store(wanted, Ordering::Relaxed);
    }

    /// A descriptor for pages of a cache, which are written at their offsets and in any length: it
    /// has neither `O_APPEND` nor `O_DIRECT`, with which a program may have opened the file.
    pub(crate) fn fd_for_pages(&self) -> BorrowedFd<'_> {
        self.fd_as(OpenFlags(0))
    }

    /// Makes a write durable that was done by `fd` and has these flags. The kernel sends `O_DSYNC`
    /// for `RWF_DSYNC` and on mounts with `sync` (`fuse_write_flags()`).
    pub(crate) fn sync_written(&self, fd: BorrowedFd<'_>, flags: OpenFlags) -> Result<()> {
        const ATTRIBUTES: u32 = OpenFlags::SYNC & !OpenFlags::DSYNC;
        match flags.0 & OpenFlags::SYNC & !self.syncs {
            0 => Ok(()),
            missing if missing & ATTRIBUTES != 0 => rustix::fs::fsync(fd).or_errno(),
            _ => rustix::fs::fdatasync(fd).or_errno(),
        }
    }
}

/// All open files.
pub(crate) struct OpenFiles {
    shards: Box<[RwLock<GenerationSlab<LowerOpenFile>>]>,
    turn: AtomicUsize,
}

impl OpenFiles {
    pub(crate) fn new() -> Self {
        let shards = (0..SHARDS).map(|_| RwLock::new(GenerationSlab::new())).collect();
        OpenFiles { shards, turn: AtomicUsize::new(0) }
    }

    pub(crate) fn insert(&self, file: LowerOpenFile) -> Result<Fh> {
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
    pub(crate) fn get(&self, fh: Fh) -> Result<Arc<LowerOpenFile>> {
        let place = SlabIndex::from_number(fh.0);
        let shard = self.shards[place.shard].read().unwrap_or_else(PoisonError::into_inner);
        shard.get(place).cloned().ok_or(Errno::EBADF)
    }

    pub(crate) fn remove(&self, fh: Fh) -> Result<Arc<LowerOpenFile>> {
        let place = SlabIndex::from_number(fh.0);
        let mut shard = self.shards[place.shard].write().unwrap_or_else(PoisonError::into_inner);
        shard.remove(place).ok_or(Errno::EBADF)
    }

    pub(crate) fn len(&self) -> usize {
        let len = |shard: &RwLock<GenerationSlab<LowerOpenFile>>| {
            shard.read().unwrap_or_else(PoisonError::into_inner).len()
        };
        self.shards.iter().map(len).sum()
    }
}
