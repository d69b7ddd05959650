//! Batches of pages that are written to the device. Each group has a batch, and so has each run
//! that is written before its group closes.

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
    /// Early batches of files that have given up blocks since the last group.
    of_lost_blocks: BTreeSet<u64>,
    /// An early batch has begun, or something else was written, since the last group began.
    has_early: bool,
}

impl BatchState {
    fn begin(&mut self) -> u64 {
        self.newest += 1;
        self.newest
    }

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

    /// The number of the batch of a group that begins, and true if something was written before the
    /// group.
    pub(super) fn begin(&self) -> (u64, bool) {
        let mut state = self.lock();
        let number = state.begin();
        state.groups.insert(number);
        (number, std::mem::take(&mut state.has_early))
    }

    /// The number of a batch of data in place, and true if something else was written before the
    /// group that begins next, which has to flush, too.
    pub(super) fn begin_in_place(&self) -> (u64, bool) {
        let mut state = self.lock();
        let number = state.begin();
        state.groups.insert(number);
        (number, state.has_early)
    }

    /// The number of a batch that begins before its group.
    pub(super) fn begin_early(&self) -> u64 {
        let mut state = self.lock();
        let number = state.begin();
        state.early.insert(number);
        state.has_early = true;
        number
    }

    /// Records that something else was written before the group that begins next.
    pub(super) fn precede(&self) {
        self.lock().has_early = true;
    }

    /// Makes the group that begins next wait for early batches: their file has given up blocks.
    pub(super) fn await_early(&self, early: &BTreeSet<u64>) {
        let mut state = self.lock();
        let BatchState { early: open, of_lost_blocks, .. } = &mut *state;
        of_lost_blocks.extend(early.iter().filter(|number| open.contains(number)));
    }

    /// The early batches of files that have given up blocks since the last call.
    pub(super) fn take_awaited(&self) -> BTreeSet<u64> {
        std::mem::take(&mut self.lock().of_lost_blocks)
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

    /// Records that these batches of a group are on the device: its own, and the early ones for
    /// which it has waited.
    pub(super) fn record_group_write(&self, numbers: impl IntoIterator<Item = u64>) {
        let mut state = self.lock();
        for number in numbers {
            state.groups.remove(&number);
            state.early.remove(&number);
        }
        self.written.store(state.newest_written(), Ordering::Release);
    }

    /// True while one of these early batches may be in flight.
    pub(super) fn has_early(&self, numbers: &BTreeSet<u64>) -> bool {
        let state = self.lock();
        numbers.iter().any(|number| state.early.contains(number))
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
        assert!(batches.has_early(&BTreeSet::from([first, second])));
        batches.record_early_write(first);
        assert_eq!(batches.newest_written(), second);
        assert!(!batches.has_early(&BTreeSet::from([first, second])));
        assert!(batches.has_early(&BTreeSet::from([later])));
        batches.record_early_write(later);
        assert_eq!(batches.newest_written(), second, "the group is in flight");
        batches.record_group_write([group]);
        assert_eq!(batches.newest_written(), later);
    }

    #[test]
    fn a_group_that_is_overtaken_stays_open() {
        let batches = BatchTracker::default();
        let (slow, early) = (batches.begin().0, batches.begin_early());
        let (fast, _) = batches.begin();
        batches.record_group_write([fast]);
        assert_eq!(batches.newest_written(), 0);
        batches.record_group_write([slow]);
        assert_eq!(batches.newest_written(), slow);
        batches.record_early_write(early);
        assert_eq!(batches.newest_written(), fast);
    }

    // A batch that the device refused stays until the group has found another place for its pages.
    #[test]
    fn a_group_ends_its_early_batches() {
        let batches = BatchTracker::default();
        let (refused, written) = (batches.begin_early(), batches.begin_early());
        let ((first, has_early), (again, has_more)) = (batches.begin(), batches.begin());
        assert!(has_early && !has_more);
        let all = BTreeSet::from([refused, written]);
        batches.defer_to_group(refused);
        assert!(batches.has_early(&all), "the other one is in flight");
        batches.record_early_write(written);
        assert!(!batches.has_early(&all) && batches.newest_written() < refused);
        batches.record_group_write([refused, first, again]);
        assert_eq!(batches.newest_written(), again);
    }

    #[test]
    fn the_next_group_waits_for_early_batches_of_blocks_that_were_given_up() {
        let batches = BatchTracker::default();
        let (written, early) = (batches.begin_early(), batches.begin_early());
        batches.record_early_write(written);
        batches.await_early(&BTreeSet::from([written, early]));
        assert_eq!(batches.take_awaited(), BTreeSet::from([early]));
        assert!(batches.take_awaited().is_empty());
    }
}
