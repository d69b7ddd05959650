//! Shared flushes: a thread that needs a flush waits for the next one that begins, and one of the
//! waiting threads performs it.

use std::sync::{Condvar, Mutex, PoisonError};

/// The flushes of one store.
#[derive(Debug, Default)]
pub(super) struct DeviceFlushes {
    state: Mutex<FlushState>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct FlushState {
    /// Flushes that began.
    begun: u64,
    /// Flushes that are over.
    over: u64,
    running: bool,
}

impl DeviceFlushes {
    /// Returns when a flush that began after the call is over: a flush of another thread, or one by
    /// `run`.
    pub(super) fn join(&self, run: impl FnOnce()) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let wanted = state.begun + 1;
        while state.running && state.over < wanted {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        if state.over >= wanted {
            return;
        }
        state.running = true;
        state.begun += 1;
        drop(state);
        let mut running = RunningFlush { flushes: self, whole: false };
        run();
        running.whole = true;
    }
}

/// Ends a flush. After a panic the flush is not over, so that a waiting thread performs another
/// one.
struct RunningFlush<'a> {
    flushes: &'a DeviceFlushes,
    whole: bool,
}

impl Drop for RunningFlush<'_> {
    fn drop(&mut self) {
        let mut state = self.flushes.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.running = false;
        if self.whole {
            state.over = state.begun;
        }
        drop(state);
        self.flushes.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
    use std::sync::atomic::{AtomicU64, Ordering};
    use std::sync::{Arc, Barrier};
    use std::time::Duration;

    use super::*;

    /// A flush covers only writes that were complete before it began, so a flush that runs already
    /// is of no use.
    #[test]
    fn threads_that_come_during_a_flush_share_the_next_one() {
        const THREADS: u64 = 8;
        let flushes = Arc::new(DeviceFlushes::default());
        let (count, begun) = (Arc::new(AtomicU64::new(0)), Arc::new(Barrier::new(2)));
        let first = {
            let (flushes, count, begun) = (flushes.clone(), count.clone(), begun.clone());
            std::thread::spawn(move || {
                flushes.join(|| {
                    begun.wait();
                    begun.wait();
                    count.fetch_add(1, Ordering::Relaxed);
                });
            })
        };
        begun.wait();
        let threads: Vec<_> = (0..THREADS)
            .map(|_| {
                let (flushes, count) = (flushes.clone(), count.clone());
                std::thread::spawn(move || {
                    flushes.join(|| {
                        count.fetch_add(1, Ordering::Relaxed);
                    });
                    assert!(count.load(Ordering::Relaxed) >= 2, "none began after the call");
                })
            })
            .collect();
        std::thread::sleep(Duration::from_millis(50));
        begun.wait();
        first.join().unwrap();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        assert_eq!(count.load(Ordering::Relaxed), 2);
    }

    /// A thread that needed a flush after a panic in another one waited for ever.
    #[test]
    fn a_flush_that_panics_is_carried_out_by_another_thread() {
        let flushes = Arc::new(DeviceFlushes::default());
        let begun = Arc::new(Barrier::new(2));
        let first = {
            let (flushes, begun) = (flushes.clone(), begun.clone());
            std::thread::spawn(move || {
                let bug = || {
                    begun.wait();
                    begun.wait();
                    resume_unwind(Box::new("a bug"));
                };
                catch_unwind(AssertUnwindSafe(|| flushes.join(bug))).unwrap_err();
            })
        };
        begun.wait();
        let count = Arc::new(AtomicU64::new(0));
        let waiter = {
            let (flushes, count) = (flushes.clone(), count.clone());
            std::thread::spawn(move || {
                flushes.join(|| {
                    count.fetch_add(1, Ordering::Relaxed);
                });
            })
        };
        std::thread::sleep(Duration::from_millis(20));
        begun.wait();
        first.join().unwrap();
        waiter.join().unwrap();
        assert_eq!(count.load(Ordering::Relaxed), 1);
    }
}
