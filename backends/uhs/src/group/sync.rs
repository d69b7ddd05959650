//! The synchronization that the gate is made of. Under the `shuttle` feature these are the checker's own.

#[cfg(not(feature = "shuttle"))]
pub(super) use std::sync::{Mutex, MutexGuard, RwLock, RwLockReadGuard, RwLockWriteGuard};

#[cfg(feature = "shuttle")]
pub(super) use shuttle::sync::{Mutex, MutexGuard, RwLock, RwLockReadGuard, RwLockWriteGuard};

/// A number that few threads share.
#[cfg(not(feature = "shuttle"))]
pub(crate) fn number_of_thread() -> usize {
    use std::sync::atomic::{AtomicUsize, Ordering};
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    thread_local!(static NUMBER: usize = NEXT.fetch_add(1, Ordering::Relaxed));
    NUMBER.with(|number| *number)
}

#[cfg(feature = "shuttle")]
pub(crate) fn number_of_thread() -> usize {
    shuttle::current::me().into()
}
