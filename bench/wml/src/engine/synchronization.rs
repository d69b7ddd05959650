//! Flowops that wait for each other: block and wakeup, semblock and sempost.

use std::collections::BTreeMap;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Interval at which a waiting thread checks whether the run has ended.
const LOOK_AROUND: Duration = Duration::from_millis(20);

/// The semaphore of one semblock in one thread.
#[derive(Clone, Copy, Default)]
struct ThreadSemaphore {
    /// Units posted and not taken.
    posted: u64,
    /// Units that posters may still add without waiting.
    room: u64,
}

#[derive(Default)]
struct RowSynchronization {
    /// Number of wakeups so far.
    wakeups: u64,
    /// Number of wakeups that each thread blocking here has seen.
    seen: BTreeMap<usize, u64>,
    semaphores: Vec<(usize, ThreadSemaphore)>,
}

/// The synchronization of a run, by row of the statistics.
pub(super) struct RunSynchronization {
    rows: Mutex<Vec<RowSynchronization>>,
    changed: Condvar,
}

impl RunSynchronization {
    pub fn new(rows: usize) -> Self {
        let rows = (0..rows).map(|_| RowSynchronization::default()).collect();
        RunSynchronization { rows: Mutex::new(rows), changed: Condvar::new() }
    }

    fn lock(&self) -> MutexGuard<'_, Vec<RowSynchronization>> {
        self.rows.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until `ready` succeeds or the run ends. Returns true if it succeeded.
    fn wait_until(
        &self,
        stopped: &dyn Fn() -> bool,
        mut ready: impl FnMut(&mut Vec<RowSynchronization>) -> bool,
    ) -> bool {
        let mut rows = self.lock();
        loop {
            if ready(&mut rows) {
                self.changed.notify_all();
                return true;
            }
            if stopped() {
                return false;
            }
            let waited = self.changed.wait_timeout(rows, LOOK_AROUND);
            rows = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Makes all waiting threads check whether the run has ended.
    pub fn wake_all(&self) {
        self.changed.notify_all();
    }

    /// Registers the semblock `row` of a thread. Call it before the threads start.
    pub fn announce(&self, row: usize, thread: usize, room: u64) {
        let semaphore = ThreadSemaphore { posted: 0, room };
        let known = &mut self.lock()[row].semaphores;
        if !known.iter().any(|(other, _)| *other == thread) {
            known.push((thread, semaphore));
        }
    }

    /// Waits for a wakeup of `row` that this thread has not seen yet.
    ///
    /// A wakeup just before the thread blocks is not lost. Otherwise two threads that hand work to
    /// each other could both block for ever if one of them was slow for a moment.
    pub fn block(&self, row: usize, thread: usize, stopped: &dyn Fn() -> bool) {
        self.wait_until(stopped, |rows| {
            let RowSynchronization { wakeups, seen, .. } = &mut rows[row];
            let before = seen.entry(thread).or_default();
            std::mem::replace(before, *wakeups) < *wakeups
        });
    }

    pub fn wakeup(&self, row: usize) {
        self.lock()[row].wakeups += 1;
        self.changed.notify_all();
    }

    /// Takes `amount` of the units posted to the semblock `row` of a thread.
    pub fn take(&self, row: usize, thread: usize, amount: u64, stopped: &dyn Fn() -> bool) {
        let find = |rows: &mut Vec<RowSynchronization>| {
            rows[row].semaphores.iter().position(|(other, _)| *other == thread)
        };
        let Some(place) = find(&mut self.lock()) else { return };
        self.lock()[row].semaphores[place].1.room += amount;
        self.changed.notify_all();
        self.wait_until(stopped, |rows| {
            let semaphore = &mut rows[row].semaphores[place].1;
            let enough = semaphore.posted >= amount;
            semaphore.posted -= if enough { amount } else { 0 };
            enough
        });
    }

    /// Posts `amount` to every semblock `row`. If `blocking` is set, waits for room.
    pub fn post(&self, row: usize, amount: u64, blocking: bool, stopped: &dyn Fn() -> bool) {
        let targets = self.lock()[row].semaphores.len();
        for target in 0..targets {
            self.wait_until(stopped, |rows| {
                let semaphore = &mut rows[row].semaphores[target].1;
                if blocking && semaphore.room < amount {
                    return false;
                }
                semaphore.room -= if blocking { amount } else { 0 };
                semaphore.posted += amount;
                true
            });
        }
    }
}
