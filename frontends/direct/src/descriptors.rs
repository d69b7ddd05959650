//! A table of descriptor numbers, for embedders that do not use the kernel's.
//!
//! Reading takes no lock: a slot is an atomic pointer. Changes take a lock, which guarantees that
//! the lowest free number is chosen.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use arc_swap::{ArcSwapOption, Guard};
use defuse_fs::Errno;

use crate::description::FileDescription;
use crate::node::lock;

const CHUNK: usize = 1024;
const CHUNKS: usize = 1024;

/// Flags of a descriptor, as opposed to flags of the open file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FdFlags {
    /// `FD_CLOEXEC`.
    pub cloexec: bool,
}

#[derive(Default)]
struct DescriptorSlot {
    file: ArcSwapOption<FileDescription>,
    cloexec: AtomicBool,
}

/// Free numbers: those in `below`, and all from `next` on.
#[derive(Default)]
struct FreeNumbers {
    below: BTreeSet<usize>,
    next: usize,
}

/// The descriptors of one process: numbers from 0 to a limit, each referring to an open file.
pub struct DescriptorTable {
    chunks: Box<[OnceLock<Box<[DescriptorSlot]>>]>,
    free: Mutex<FreeNumbers>,
    limit: usize,
}

impl DescriptorTable {
    /// Creates an empty table of at most `limit` descriptors (1,048,576 at most).
    pub fn new(limit: usize) -> Self {
        let chunks = (0..CHUNKS).map(|_| OnceLock::new()).collect();
        DescriptorTable { chunks, free: Mutex::default(), limit: limit.min(CHUNK * CHUNKS) }
    }

    fn slot(&self, fd: usize) -> Option<&DescriptorSlot> {
        self.chunks.get(fd / CHUNK)?.get()?.get(fd % CHUNK)
    }

    fn make_slot(&self, fd: usize) -> Result<&DescriptorSlot, Errno> {
        let chunk = self.chunks.get(fd / CHUNK).ok_or(Errno::EMFILE)?;
        let make = || (0..CHUNK).map(|_| DescriptorSlot::default()).collect();
        Ok(&chunk.get_or_init(make)[fd % CHUNK])
    }

    /// The open file of a descriptor, without counting a reference. Fails with `EBADF`.
    #[inline]
    pub fn get(&self, fd: i32) -> Result<DescriptorFile, Errno> {
        let slot = usize::try_from(fd).ok().and_then(|fd| self.slot(fd)).ok_or(Errno::EBADF)?;
        let guard = slot.file.load();
        if guard.is_some() { Ok(DescriptorFile(guard)) } else { Err(Errno::EBADF) }
    }

    /// Assigns the lowest free number, not below `from`, to `file`. Fails with `EMFILE`.
    pub fn insert(
        &self,
        file: Arc<FileDescription>,
        from: i32,
        flags: FdFlags,
    ) -> Result<i32, Errno> {
        let from = usize::try_from(from).map_err(|_| Errno::EINVAL)?;
        if from >= self.limit {
            return Err(Errno::EINVAL);
        }
        let mut free = lock(&self.free);
        let fd = match free.below.range(from..).next() {
            Some(&fd) => fd,
            None => free.next.max(from),
        };
        if fd >= self.limit {
            return Err(Errno::EMFILE);
        }
        let slot = self.make_slot(fd)?;
        free.take(fd);
        slot.cloexec.store(flags.cloexec, Ordering::Relaxed);
        slot.file.store(Some(file));
        Ok(fd as i32)
    }

    /// Assigns the number `fd` to `file`, like dup2(2). Returns the open file that had the number,
    /// which the caller must [close](FileDescription::close). Fails with `EBADF` if the number is
    /// out of range.
    pub fn replace(
        &self,
        fd: i32,
        file: Arc<FileDescription>,
        flags: FdFlags,
    ) -> Result<Option<Arc<FileDescription>>, Errno> {
        let number = usize::try_from(fd).ok().filter(|&fd| fd < self.limit).ok_or(Errno::EBADF)?;
        let mut free = lock(&self.free);
        let slot = self.make_slot(number).map_err(|_| Errno::EBADF)?;
        free.take(number);
        slot.cloexec.store(flags.cloexec, Ordering::Relaxed);
        Ok(slot.file.swap(Some(file)))
    }

    /// Frees a number. Returns its open file, which the caller must
    /// [close](FileDescription::close). Fails with `EBADF`.
    pub fn remove(&self, fd: i32) -> Result<Arc<FileDescription>, Errno> {
        let number = usize::try_from(fd).map_err(|_| Errno::EBADF)?;
        let mut free = lock(&self.free);
        let slot = self.slot(number).ok_or(Errno::EBADF)?;
        let file = slot.file.swap(None).ok_or(Errno::EBADF)?;
        free.give_back(number);
        Ok(file)
    }

    /// The flags of a descriptor. Fails with `EBADF`.
    pub fn flags(&self, fd: i32) -> Result<FdFlags, Errno> {
        self.get(fd)?;
        let slot = self.slot(fd as usize).ok_or(Errno::EBADF)?;
        Ok(FdFlags { cloexec: slot.cloexec.load(Ordering::Relaxed) })
    }

    /// Sets the flags of a descriptor. Fails with `EBADF`.
    pub fn set_flags(&self, fd: i32, flags: FdFlags) -> Result<(), Errno> {
        self.get(fd)?;
        let slot = self.slot(fd as usize).ok_or(Errno::EBADF)?;
        slot.cloexec.store(flags.cloexec, Ordering::Relaxed);
        Ok(())
    }

    /// The numbers in use, in ascending order.
    pub fn numbers(&self) -> Vec<i32> {
        let next = lock(&self.free).next;
        (0..next as i32).filter(|&fd| self.get(fd).is_ok()).collect()
    }
}

impl FreeNumbers {
    fn take(&mut self, fd: usize) {
        if fd < self.next {
            self.below.remove(&fd);
        } else {
            self.below.extend(self.next..fd);
            self.next = fd + 1;
        }
    }

    fn give_back(&mut self, fd: usize) {
        self.below.insert(fd);
        // Keeps the set as small as the number of gaps.
        while self.next > 0 && self.below.remove(&(self.next - 1)) {
            self.next -= 1;
        }
    }
}

impl std::fmt::Debug for DescriptorTable {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Descriptors").field("numbers", &self.numbers()).finish()
    }
}

/// The open file of a descriptor. It stays open while this value exists, even if the descriptor is
/// closed meanwhile.
pub struct DescriptorFile(Guard<Option<Arc<FileDescription>>>);

impl DescriptorFile {
    /// A counted reference to the open file, to keep.
    pub fn to_arc(&self) -> Arc<FileDescription> {
        Arc::clone(self)
    }
}

impl std::ops::Deref for DescriptorFile {
    type Target = Arc<FileDescription>;

    #[inline]
    fn deref(&self) -> &Arc<FileDescription> {
        self.0.as_ref().expect("checked when it was made")
    }
}
