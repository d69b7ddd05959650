//! The synchronization of the group lock. `tests/schedules.rs` replaces it by the synchronization
//! of the shuttle checker.

use std::sync::atomic::{AtomicUsize, Ordering};
pub(super) use std::sync::{Mutex, MutexGuard, RwLock, RwLockReadGuard, RwLockWriteGuard};

/// A number that few threads share.
pub(crate) fn number_of_thread() -> usize {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    thread_local!(static NUMBER: usize = NEXT.fetch_add(1, Ordering::Relaxed));
    NUMBER.with(|number| *number)
}
