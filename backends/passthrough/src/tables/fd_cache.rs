//! A bounded cache of `O_PATH` descriptors of inodes that have file handles.
//!
//! Each inode remembers its last slot, and each slot knows its inode. A hit therefore takes one
//! uncontended lock, and an eviction need not find the evicted inode. The victim is chosen by the
//! clock algorithm: the hand skips slots that were used since its last visit.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use crate::tables::inode::LowerInode;

pub(crate) struct FdCache {
    slots: Box<[Mutex<FdCacheSlot>]>,
    hand: AtomicUsize,
    held: AtomicUsize,
    misses: AtomicUsize,
}

/// A descriptor, of the cache or only known to it.
enum CachedFd {
    Own(Arc<OwnedFd>),
    /// It is closed by others: with an open file, the locks of which end then.
    Lent(Weak<OwnedFd>),
}

impl CachedFd {
    fn fd(&self) -> Option<Arc<OwnedFd>> {
        match self {
            CachedFd::Own(fd) => Some(Arc::clone(fd)),
            CachedFd::Lent(fd) => fd.upgrade(),
        }
    }
}

#[derive(Default)]
struct FdCacheSlot {
    kept: Option<(u64, CachedFd)>,
    used: bool,
    /// A counter per slot: a global one would be written by every processor.
    hits: u64,
}

impl FdCache {
    pub(crate) fn new(capacity: usize) -> Self {
        FdCache {
            slots: (0..capacity.max(1)).map(|_| Mutex::default()).collect(),
            hand: AtomicUsize::new(0),
            held: AtomicUsize::new(0),
            misses: AtomicUsize::new(0),
        }
    }

    /// The cached descriptor of `inode`.
    pub(crate) fn get(&self, inode: &LowerInode) -> Option<Arc<OwnedFd>> {
        let hint = inode.cache_slot.load(Ordering::Relaxed) as usize;
        if let Some(slot) = self.slots.get(hint) {
            let mut slot = lock(slot);
            if let Some((number, kept)) = &slot.kept
                && *number == inode.number
            {
                if let Some(fd) = kept.fd() {
                    slot.used = true;
                    slot.hits += 1;
                    return Some(fd);
                }
                slot.kept = None;
                self.held.fetch_sub(1, Ordering::Relaxed);
            }
        }
        self.misses.fetch_add(1, Ordering::Relaxed);
        None
    }

    /// Caches `fd` for `inode`. If `hot` is set, it survives one round of the clock unused.
    pub(crate) fn put(&self, inode: &LowerInode, fd: &Arc<OwnedFd>, hot: bool) {
        self.keep(inode, CachedFd::Own(Arc::clone(fd)), hot);
    }

    /// Lets others use `fd` for `inode` while it is open, unless they have a descriptor. It closes
    /// as without the cache.
    pub(crate) fn lend(&self, inode: &LowerInode, fd: &Arc<OwnedFd>) {
        if self.get(inode).is_none() {
            self.keep(inode, CachedFd::Lent(Arc::downgrade(fd)), true);
        }
    }

    fn keep(&self, inode: &LowerInode, kept: CachedFd, hot: bool) {
        // Two rounds clear every mark, so a third finds a victim unless all slots are locked.
        for _ in 0..self.slots.len() * 2 + 1 {
            let index = self.hand.fetch_add(1, Ordering::Relaxed) % self.slots.len();
            let Ok(mut slot) = self.slots[index].try_lock() else { continue };
            if std::mem::take(&mut slot.used) {
                continue;
            }
            let victim = slot.kept.replace((inode.number, kept));
            slot.used = hot;
            inode.cache_slot.store(index as u32, Ordering::Relaxed);
            drop(slot);
            if victim.is_none() {
                self.held.fetch_add(1, Ordering::Relaxed);
            }
            return;
        }
    }

    /// Removes the entry of `inode`, which is about to be forgotten.
    pub(crate) fn remove(&self, inode: &LowerInode) {
        let hint = inode.cache_slot.load(Ordering::Relaxed) as usize;
        let Some(slot) = self.slots.get(hint) else { return };
        let kept = lock(slot).kept.take_if(|(number, _)| *number == inode.number);
        if kept.is_some() {
            self.held.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Closes the descriptors that were not used since the last call.
    pub(crate) fn sweep(&self) {
        for slot in &self.slots {
            let mut slot = lock(slot);
            if std::mem::take(&mut slot.used) {
                continue;
            }
            let unused = slot.kept.take();
            drop(slot);
            if unused.is_some() {
                self.held.fetch_sub(1, Ordering::Relaxed);
            }
        }
    }

    /// Closes up to `count` descriptors, because the process has too many.
    pub(crate) fn shrink(&self, count: usize) {
        let mut left = count;
        for slot in &self.slots {
            if left == 0 {
                return;
            }
            if lock(slot).kept.take().is_some() {
                self.held.fetch_sub(1, Ordering::Relaxed);
                left -= 1;
            }
        }
    }

    /// Number of cached descriptors, hits and misses.
    pub(crate) fn counts(&self) -> (usize, u64, u64) {
        let hits = self.slots.iter().map(|slot| lock(slot).hits).sum();
        let misses = self.misses.load(Ordering::Relaxed) as u64;
        (self.held.load(Ordering::Relaxed), hits, misses)
    }
}

fn lock(slot: &Mutex<FdCacheSlot>) -> MutexGuard<'_, FdCacheSlot> {
    slot.lock().unwrap_or_else(PoisonError::into_inner)
}
