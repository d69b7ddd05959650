//! Batches of pages that are written to the device. Each group has a batch, and so has each run that is written before
//! its group closes.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The batches that have begun.
#[derive(Debug, Default)]
pub(super) struct BatchTracker {
    state: Mutex<BatchState>,
    /// All batches up to this one are on the device.
    written: AtomicU64,
}

#[derive(Debug, Default)]
struct BatchState {
    newest: u64,
    /// Open batches of groups, and early batches that the device refused.
    groups: BTreeSet<u64>,
    early: BTreeSet<u64>,
    /// An early batch has begun, or something else was written, since the last group began.
    has_early: bool,
}

impl BatchState {
    /// The newest batch that is on the device together with all earlier batches.
    fn newest_written(&self) -> u64 {
        let open = self.groups.first().into_iter().chain(self.early.first()).min();
        open.map_or(self.newest, |oldest| oldest - 1)
    }
}

impl BatchTracker {
    fn lock(&self) -> MutexGuard<'_, BatchState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The number of the batch of a group that begins, and true if early batches belong to that group.
    pub(super) fn begin(&self) -> (u64, bool) {
        let mut state = self.lock();
        state.newest += 1;
        let number = state.newest;
        state.groups.insert(number);
        (number, std::mem::take(&mut state.has_early))
    }

    /// The number of a batch that begins before its group.
    pub(super) fn begin_early(&self) -> u64 {
        let mut state = self.lock();
        state.newest += 1;
        let number = state.newest;
        state.early.insert(number);
        state.has_early = true;
        number
    }

    /// Records that something else was written before the group that begins next.
    pub(super) fn precede(&self) {
        self.lock().has_early = true;
    }

    /// Records that the device has refused an early batch: its group writes the pages.
    pub(super) fn defer_to_group(&self, number: u64) {
        let mut state = self.lock();
        state.early.remove(&number);
        state.groups.insert(number);
    }

    /// Records that an early batch is on the device.
    pub(super) fn record_early_write(&self, number: u64) {
        let mut state = self.lock();
        state.early.remove(&number);
        self.written.store(state.newest_written(), Ordering::Release);
    }

    /// Records that the batch of a group is on the device, and all batches before it: the group has waited for early
    /// batches.
    pub(super) fn record_group_write(&self, number: u64) {
        let mut state = self.lock();
        state.groups = state.groups.split_off(&(number + 1));
        state.early = state.early.split_off(&(number + 1));
        self.written.store(state.newest_written(), Ordering::Release);
    }

    /// True while an early batch before `number` may be in flight.
    pub(super) fn has_early(&self, number: u64) -> bool {
        self.lock().early.first().is_some_and(|first| *first < number)
    }

    /// The newest batch that is on the device together with all earlier batches.
    pub(super) fn newest_written(&self) -> u64 {
        self.written.load(Ordering::Acquire)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_batch_counts_as_written_when_those_before_it_are() {
        let batches = BatchTracker::default();
        let (first, second) = (batches.begin_early(), batches.begin_early());
        let (group, has_early) = batches.begin();
        assert!(has_early);
        let later = batches.begin_early();
        batches.record_early_write(second);
        assert_eq!(batches.newest_written(), 0);
        assert!(batches.has_early(group));
        batches.record_early_write(first);
        assert_eq!(batches.newest_written(), second);
        assert!(!batches.has_early(group) && batches.has_early(later + 1));
        batches.record_early_write(later);
        assert_eq!(batches.newest_written(), second, "the group is in flight");
        batches.record_group_write(group);
        assert_eq!(batches.newest_written(), later);
    }

    // A batch that the device refused stays until the group has found another place for its pages.
    #[test]
    fn a_group_ends_what_was_left_before_it() {
        let batches = BatchTracker::default();
        let (refused, written) = (batches.begin_early(), batches.begin_early());
        let ((first, has_early), (again, has_more)) = (batches.begin(), batches.begin());
        assert!(has_early && !has_more);
        batches.defer_to_group(refused);
        assert!(batches.has_early(first), "the other one is in flight");
        batches.record_early_write(written);
        assert!(!batches.has_early(first) && batches.newest_written() < refused);
        batches.record_group_write(again);
        assert_eq!(batches.newest_written(), again);
    }
}
