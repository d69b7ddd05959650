//! A table of descriptor numbers, for embedders that do not use the kernel's.
//!
//! Reading takes no lock: a slot is an atomic pointer. Changes take a lock, which guarantees that
//! the lowest free number is chosen.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use arc_swap::{ArcSwapOption, Guard};
use defuse_fs::Errno;

use crate::description::Description;
use crate::node::lock;

const CHUNK: usize = 1024;
const CHUNKS: usize = 1024;

/// Flags of a descriptor, as opposed to those of the open file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FdFlags {
    /// `FD_CLOEXEC`.
    pub cloexec: bool,
}

#[derive(Default)]
struct Slot {
    file: ArcSwapOption<Description>,
    cloexec: AtomicBool,
}

/// Free numbers: those in `below`, and all from `next` on.
#[derive(Default)]
struct Free {
    below: BTreeSet<usize>,
    next: usize,
}

/// The descriptors of one process: numbers from 0 to a limit, each referring to an open file.
pub struct Descriptors {
    chunks: Box<[OnceLock<Box<[Slot]>>]>,
    free: Mutex<Free>,
    limit: usize,
}

impl Descriptors {
    /// Creates an empty table of at most `limit` descriptors (1,048,576 at most).
    pub fn new(limit: usize) -> Self {
        let chunks = (0..CHUNKS).map(|_| OnceLock::new()).collect();
        Descriptors { chunks, free: Mutex::default(), limit: limit.min(CHUNK * CHUNKS) }
    }

    fn slot(&self, fd: usize) -> Option<&Slot> {
        self.chunks.get(fd / CHUNK)?.get()?.get(fd % CHUNK)
    }

    fn make_slot(&self, fd: usize) -> Result<&Slot, Errno> {
        let chunk = self.chunks.get(fd / CHUNK).ok_or(Errno::EMFILE)?;
        let make = || (0..CHUNK).map(|_| Slot::default()).collect();
        Ok(&chunk.get_or_init(make)[fd % CHUNK])
    }

    /// The open file of a descriptor, without counting a reference. Fails with `EBADF`.
    #[inline]
    pub fn get(&self, fd: i32) -> Result<Opened, Errno> {
        let slot = usize::try_from(fd).ok().and_then(|fd| self.slot(fd)).ok_or(Errno::EBADF)?;
        let guard = slot.file.load();
        if guard.is_some() { Ok(Opened(guard)) } else { Err(Errno::EBADF) }
    }

    /// Assigns the lowest free number, not below `from`, to `file`. Fails with `EMFILE`.
    pub fn insert(&self, file: Arc<Description>, from: i32, flags: FdFlags) -> Result<i32, Errno> {
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
    /// which the caller must [close](Description::close). Fails with `EBADF` if the number is out
    /// of range.
    pub fn replace(
        &self,
        fd: i32,
        file: Arc<Description>,
        flags: FdFlags,
    ) -> Result<Option<Arc<Description>>, Errno> {
        let number = usize::try_from(fd).ok().filter(|&fd| fd < self.limit).ok_or(Errno::EBADF)?;
        let mut free = lock(&self.free);
        let slot = self.make_slot(number).map_err(|_| Errno::EBADF)?;
        free.take(number);
        slot.cloexec.store(flags.cloexec, Ordering::Relaxed);
        Ok(slot.file.swap(Some(file)))
    }

    /// Frees a number. Returns its open file, which the caller must [close](Description::close).
    /// Fails with `EBADF`.
    pub fn remove(&self, fd: i32) -> Result<Arc<Description>, Errno> {
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

impl Free {
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

impl std::fmt::Debug for Descriptors {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Descriptors").field("numbers", &self.numbers()).finish()
    }
}

/// The open file of a descriptor. It stays open while this value exists, even if the descriptor is
/// closed meanwhile.
pub struct Opened(Guard<Option<Arc<Description>>>);

impl Opened {
    /// A counted reference to the open file, to keep.
    pub fn to_arc(&self) -> Arc<Description> {
        Arc::clone(self)
    }
}

impl std::ops::Deref for Opened {
    type Target = Arc<Description>;

    #[inline]
    fn deref(&self) -> &Arc<Description> {
        self.0.as_ref().expect("checked when it was made")
    }
}
