//! A lock of our own, made of nothing but a word and futex(2).
//!
//! A child has to be able to use what fork(2) copied, even if the program forked in a way of its
//! own while other threads held locks. So a child may take this lock by force
//! ([`FutexLock::reset`]).

use std::cell::UnsafeCell;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicU32, Ordering};

use crate::machine::sys;

const WAIT: u64 = (libc::FUTEX_WAIT | libc::FUTEX_PRIVATE_FLAG) as u64;
const WAKE: u64 = (libc::FUTEX_WAKE | libc::FUTEX_PRIVATE_FLAG) as u64;

/// Waits while `word` is `value`, until another thread wakes it.
pub fn wait(word: &AtomicU32, value: u32) {
    let _ = sys::plain(libc::SYS_futex, word.as_ptr() as u64, WAIT, u64::from(value));
}

/// Wakes `count` threads that wait.
pub fn wake(word: &AtomicU32, count: i32) {
    let _ = sys::plain(libc::SYS_futex, word.as_ptr() as u64, WAKE, count as u64);
}

const FREE: u32 = 0;
const HELD: u32 = 1;
/// Held, and other threads may wait.
const AWAITED: u32 = 2;

/// The number of looks of a thread before it sleeps: the work under these locks takes a moment.
const LOOKS: u32 = 100;

/// A value for one thread at a time.
pub struct FutexLock<T> {
    state: AtomicU32,
    value: UnsafeCell<T>,
}

// SAFETY: only the holder of the lock uses the value, one thread at a time.
unsafe impl<T: Send> Sync for FutexLock<T> {}

impl<T> FutexLock<T> {
    pub const fn new(value: T) -> Self {
        FutexLock { state: AtomicU32::new(FREE), value: UnsafeCell::new(value) }
    }

    #[inline]
    pub fn lock(&self) -> FutexGuard<'_, T> {
        if self.state.compare_exchange(FREE, HELD, Ordering::Acquire, Ordering::Relaxed).is_err() {
            self.lock_slowly();
        }
        FutexGuard { lock: self }
    }

    #[cold]
    fn lock_slowly(&self) {
        for _ in 0..LOOKS {
            let state = self.state.load(Ordering::Relaxed);
            let free = state == FREE;
            if free
                && self
                    .state
                    .compare_exchange(FREE, HELD, Ordering::Acquire, Ordering::Relaxed)
                    .is_ok()
            {
                return;
            }
            if state == AWAITED {
                break;
            }
            std::hint::spin_loop();
        }
        while self.state.swap(AWAITED, Ordering::Acquire) != FREE {
            wait(&self.state, AWAITED);
        }
    }

    #[inline]
    fn unlock(&self) {
        if self.state.swap(FREE, Ordering::Release) == AWAITED {
            wake(&self.state, 1);
        }
    }

    /// Frees the lock whatever thread held it: for a child that has one thread, after a fork(2)
    /// during which this thread held the lock, or no thread did.
    pub fn reset(&self) {
        self.state.store(FREE, Ordering::Release);
    }
}

/// The lock is held.
pub struct FutexGuard<'a, T> {
    lock: &'a FutexLock<T>,
}

impl<T> FutexGuard<'_, T> {
    /// Keeps the lock until [`FutexGuard::release_of`].
    pub fn keep(self) {
        std::mem::forget(self);
    }

    /// Frees a lock that this thread kept.
    pub fn release_of(lock: &FutexLock<T>) {
        lock.unlock();
    }
}

impl<T> Deref for FutexGuard<'_, T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: this thread holds the lock.
        unsafe { &*self.lock.value.get() }
    }
}

impl<T> DerefMut for FutexGuard<'_, T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: this thread holds the lock, and `self` is borrowed by the caller alone.
        unsafe { &mut *self.lock.value.get() }
    }
}

impl<T> Drop for FutexGuard<'_, T> {
    #[inline]
    fn drop(&mut self) {
        self.lock.unlock();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_thread_at_a_time() {
        static SUM: FutexLock<(u64, u64)> = FutexLock::new((0, 0));
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    for _ in 0..20_000 {
                        let mut sum = SUM.lock();
                        sum.0 += 1;
                        sum.1 += 1;
                        assert_eq!(sum.0, sum.1);
                    }
                });
            }
        });
        assert_eq!(*SUM.lock(), (160_000, 160_000));
    }
}
