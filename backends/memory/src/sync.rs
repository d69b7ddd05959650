//! Locks that ignore poisoning, and the counter behind every limit.
//!
//! A frontend catches a panic and answers `EIO` to that one call, so the file must stay usable.
//! Every critical section in this crate therefore leaves its data valid between any two statements.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

pub(crate) fn read<T>(lock: &RwLock<T>) -> RwLockReadGuard<'_, T> {
    lock.read().unwrap_or_else(PoisonError::into_inner)
}

pub(crate) fn write<T>(lock: &RwLock<T>) -> RwLockWriteGuard<'_, T> {
    lock.write().unwrap_or_else(PoisonError::into_inner)
}

/// Counts use against a limit, which is never exceeded, not even for a moment.
#[derive(Debug)]
pub(crate) struct SpaceQuota {
    limit: u64,
    used: AtomicU64,
}

impl SpaceQuota {
    pub fn new(limit: Option<u64>) -> Self {
        SpaceQuota { limit: limit.unwrap_or(u64::MAX), used: AtomicU64::new(0) }
    }

    /// Takes `count`, all or nothing. Returns false if the limit would be exceeded.
    pub fn take(&self, count: u64) -> bool {
        let more = |used: u64| used.checked_add(count).filter(|&sum| sum <= self.limit);
        self.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).is_ok()
    }

    pub fn give_back(&self, count: u64) {
        let before = self.used.fetch_sub(count, Ordering::Relaxed);
        debug_assert!(before >= count, "more was given back than taken");
    }

    pub fn used_count(&self) -> u64 {
        self.used.load(Ordering::Relaxed)
    }

    pub fn limit(&self) -> Option<u64> {
        (self.limit != u64::MAX).then_some(self.limit)
    }
}
