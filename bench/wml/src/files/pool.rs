//! The choice of entries of a file set: in rotation, and one thread at a time for each entry.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::bits::SummaryBitmap;

/// The state of an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum EntryState {
    Exists,
    Absent,
}

/// The way in which an entry is chosen.
#[derive(Clone, Copy, Debug)]
pub(crate) enum EntryChoice {
    /// The next one. A thread that rotates through descriptors has its own rotation.
    Next(Option<usize>),
    /// The entry with this index, or the next after it.
    At(u32),
}

/// Interval at which a waiting thread checks whether the run has ended.
const LOOK_AROUND: Duration = Duration::from_millis(20);

/// The entries of a file set: files, or empty directories.
///
/// The lock is held only for the choice, never during a system call.
pub(crate) struct EntryPool {
    inner: Mutex<EntryPoolState>,
    changed: Condvar,
}

struct EntryPoolState {
    exist: SummaryBitmap,
    absent: SummaryBitmap,
    busy: SummaryBitmap,
    open: Vec<u32>,
    next_existing: u32,
    next_absent: u32,
    /// Rotations of single threads.
    own: Vec<u32>,
    idle: u64,
    waiting: u32,
}

impl EntryPool {
    /// Creates a pool of `entries`, all absent.
    pub fn new(entries: u32) -> Self {
        let mut absent = SummaryBitmap::new(entries);
        (0..entries).for_each(|entry| absent.insert(entry));
        let inner = EntryPoolState {
            exist: SummaryBitmap::new(entries),
            absent,
            busy: SummaryBitmap::new(entries),
            open: vec![0; entries as usize],
            next_existing: 0,
            next_absent: 0,
            own: Vec::new(),
            idle: u64::from(entries),
            waiting: 0,
        };
        EntryPool { inner: Mutex::new(inner), changed: Condvar::new() }
    }

    fn lock(&self) -> MutexGuard<'_, EntryPoolState> {
        // A thread that panicked leaves the bits valid.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for a change, for a limited time.
    fn wait<'a>(
        &self,
        mut inner: MutexGuard<'a, EntryPoolState>,
    ) -> MutexGuard<'a, EntryPoolState> {
        inner.waiting += 1;
        let waited = self.changed.wait_timeout(inner, LOOK_AROUND);
        let (mut inner, _) = waited.unwrap_or_else(PoisonError::into_inner);
        inner.waiting -= 1;
        inner
    }

    /// Number of entries in `state`.
    #[cfg(test)]
    pub fn count(&self, state: EntryState) -> u64 {
        let inner = self.lock();
        if state == EntryState::Exists { inner.exist.len() } else { inner.absent.len() }
    }

    /// Sets the state of an entry.
    pub fn set_state(&self, entry: u32, state: EntryState) {
        self.lock().set_state(entry, state);
    }

    /// Takes an entry in `state` that no thread uses. It is busy until [`EntryPool::release`].
    ///
    /// Returns `None` if no entry has that state, or all of them are busy. If all entries of the
    /// set are busy, it waits until `stopped`.
    pub fn pick(
        &self,
        state: EntryState,
        how: EntryChoice,
        stopped: &dyn Fn() -> bool,
    ) -> Option<u32> {
        let mut inner = self.lock();
        if inner.open.is_empty() {
            return None;
        }
        while inner.idle == 0 {
            if stopped() {
                return None;
            }
            inner = self.wait(inner);
        }
        let entry = inner.choose(state, how)?;
        inner.busy.insert(entry);
        inner.idle -= 1;
        Some(entry)
    }

    /// Takes one entry, after its current user. Returns false if the run ended before.
    pub fn take(&self, entry: u32, stopped: &dyn Fn() -> bool) -> bool {
        let mut inner = self.lock();
        while inner.busy.has(entry) {
            if stopped() {
                return false;
            }
            inner = self.wait(inner);
        }
        inner.busy.insert(entry);
        inner.idle -= 1;
        true
    }

    /// Number of descriptors that have the entry open.
    pub fn open_count(&self, entry: u32) -> u32 {
        self.lock().open[entry as usize]
    }

    /// Releases an entry, with its new state and the change of its number of descriptors.
    pub fn release(&self, entry: u32, state: Option<EntryState>, opens: i32) {
        let mut inner = self.lock();
        if let Some(state) = state {
            inner.set_state(entry, state);
        }
        let open = &mut inner.open[entry as usize];
        *open = open.saturating_add_signed(opens);
        if inner.busy.has(entry) {
            inner.busy.remove(entry);
            inner.idle += 1;
        }
        let someone_waits = inner.waiting > 0;
        drop(inner);
        if someone_waits {
            self.changed.notify_all();
        }
    }
}

impl EntryPoolState {
    fn set_state(&mut self, entry: u32, state: EntryState) {
        let (into, from) = match state {
            EntryState::Exists => (&mut self.exist, &mut self.absent),
            EntryState::Absent => (&mut self.absent, &mut self.exist),
        };
        from.remove(entry);
        into.insert(entry);
    }

    fn choose(&mut self, state: EntryState, how: EntryChoice) -> Option<u32> {
        let from = match how {
            EntryChoice::At(index) => index,
            EntryChoice::Next(Some(thread)) if state == EntryState::Exists => {
                if self.own.len() <= thread {
                    self.own.resize(thread + 1, 0);
                }
                self.own[thread]
            }
            EntryChoice::Next(_) if state == EntryState::Exists => self.next_existing,
            EntryChoice::Next(_) => self.next_absent,
        };
        let among = if state == EntryState::Exists { &self.exist } else { &self.absent };
        let first = among.next_around(from)?;
        // The rotation continues after the first candidate, even if that is busy.
        match how {
            EntryChoice::At(_) => {}
            EntryChoice::Next(Some(thread)) if state == EntryState::Exists => {
                self.own[thread] = first + 1
            }
            EntryChoice::Next(_) if state == EntryState::Exists => self.next_existing = first + 1,
            EntryChoice::Next(_) => self.next_absent = first + 1,
        }
        let mut entry = first;
        while self.busy.has(entry) {
            entry = among.next_around(entry + 1)?;
            if entry == first {
                return None;
            }
        }
        Some(entry)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pool(entries: u32, existing: u32) -> EntryPool {
        let pool = EntryPool::new(entries);
        (0..existing).for_each(|entry| pool.set_state(entry, EntryState::Exists));
        pool
    }

    fn pick(pool: &EntryPool, state: EntryState) -> Option<u32> {
        pool.pick(state, EntryChoice::Next(None), &|| true)
    }

    #[test]
    fn files_are_picked_in_rotation_and_busy_ones_are_skipped() {
        let pool = pool(4, 3);
        let [a, b] = [pick(&pool, EntryState::Exists), pick(&pool, EntryState::Exists)];
        assert_eq!((a, b), (Some(0), Some(1)));
        pool.release(1, None, 0);
        assert_eq!(pick(&pool, EntryState::Exists), Some(2));
        pool.release(2, None, 0);
        // 0 is busy, so the next is 1.
        assert_eq!(pick(&pool, EntryState::Exists), Some(1));
        assert_eq!(pick(&pool, EntryState::Exists), Some(2));
        // All existing entries are busy, although an absent one is idle.
        assert_eq!(pick(&pool, EntryState::Exists), None);
        assert_eq!(pick(&pool, EntryState::Absent), Some(3));
        assert_eq!(pick(&pool, EntryState::Absent), None);
    }

    #[test]
    fn created_files_exist_and_deleted_files_do_not() {
        let pool = pool(2, 0);
        assert_eq!(pick(&pool, EntryState::Exists), None);
        assert_eq!(pick(&pool, EntryState::Absent), Some(0));
        pool.release(0, Some(EntryState::Exists), 1);
        assert_eq!((pool.count(EntryState::Exists), pool.open_count(0)), (1, 1));
        assert_eq!(pick(&pool, EntryState::Exists), Some(0));
        pool.release(0, Some(EntryState::Absent), -1);
        assert_eq!((pool.count(EntryState::Absent), pool.open_count(0)), (2, 0));
    }

    #[test]
    fn an_index_picks_that_file_or_the_next_after_it() {
        let pool = pool(10, 10);
        pool.set_state(5, EntryState::Absent);
        assert_eq!(pool.pick(EntryState::Exists, EntryChoice::At(5), &|| true), Some(6));
        assert_eq!(pool.pick(EntryState::Exists, EntryChoice::At(6), &|| true), Some(7));
    }

    #[test]
    fn a_thread_waits_while_others_work_on_everything() {
        let pool = pool(1, 1);
        assert_eq!(pick(&pool, EntryState::Exists), Some(0));
        std::thread::scope(|scope| {
            let waiting =
                scope.spawn(|| pool.pick(EntryState::Exists, EntryChoice::Next(None), &|| false));
            std::thread::sleep(Duration::from_millis(30));
            assert!(!waiting.is_finished());
            pool.release(0, None, 1);
            assert_eq!(waiting.join().unwrap(), Some(0));
        });
        assert!(!pool.take(0, &|| true));
    }
}
