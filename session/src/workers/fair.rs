//! Fairness between the users of a mount: blocked calls of one user hold only so many threads that
//! calls of other users continue.
//!
//! The session cannot predict whether a call will block: an open waits for the holder of a lease on
//! the file, a FIFO for its other end, a read for a disk. So nothing is counted while threads are
//! free or make progress. If all allowed threads are stuck while requests wait, the session
//! *stretches*: it may have further threads, and from then on each call of a user other than root
//! is counted. A user may hold three times as many threads as remain free, which is three quarters
//! of all for a single user. Further calls of that user wait here, and the thread that has received
//! them takes another request. A while after the threads are free again, the session returns to its
//! usual number.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::bulkhead::may_enter;
use super::inflight::WorkerSlots;
use super::set_aside::QueuedRequest;

/// Maximum number of waiting requests, and of waiting requests of one user.
const MOST: usize = 16_384;
const MOST_OF_USER: usize = 4096;
/// Maximum number of bytes of waiting requests.
const BYTES_MOST: usize = 64 << 20;

/// Calls of users that hold their part of the threads.
#[derive(Default)]
pub(crate) struct FairQueue {
    /// The number of requests that wait. Most checks find none.
    waiting: AtomicUsize,
    state: Mutex<FairQueueState>,
}

#[derive(Default)]
struct FairQueueState {
    users: HashMap<u32, VecDeque<QueuedRequest>>,
    waiting: usize,
    bytes: usize,
    is_closed: bool,
}

/// The threads of a session now.
#[derive(Clone, Copy)]
pub(crate) struct ThreadBudget<'a> {
    pub(crate) slots: &'a WorkerSlots,
    /// The maximum number of threads.
    pub(crate) most: usize,
}

impl ThreadBudget<'_> {
    /// True if one more call of the user may be handled.
    pub(crate) fn may_hold_one_more(&self, uid: u32) -> bool {
        let (own, all) = self.slots.count_held(uid);
        uid == 0 || may_enter(own, self.most.saturating_sub(all))
    }
}

impl FairQueue {
    /// True where requests wait. Costs a load.
    pub(crate) fn is_waiting(&self) -> bool {
        self.count_waiting() > 0
    }

    /// The number of requests that wait.
    pub(crate) fn count_waiting(&self) -> usize {
        self.waiting.load(Ordering::SeqCst)
    }

    /// A request of the user waits. It is returned if there are too many.
    pub(crate) fn wait(&self, uid: u32, request: QueuedRequest) -> Option<QueuedRequest> {
        let mut state = self.lock();
        let own = state.users.get(&uid).map_or(0, VecDeque::len);
        let has_room = state.waiting < MOST && state.bytes + request.bytes.len() <= BYTES_MOST;
        if state.is_closed || !has_room || own >= MOST_OF_USER {
            return Some(request);
        }
        state.waiting += 1;
        state.bytes += request.bytes.len();
        state.users.entry(uid).or_default().push_back(request);
        assert!(state.waiting <= MOST && state.users.len() <= state.waiting, "too many wait");
        self.waiting.store(state.waiting, Ordering::SeqCst);
        None
    }

    /// Returns a request that need not wait any longer, by the state of `threads`.
    pub(crate) fn next(&self, threads: ThreadBudget<'_>) -> Option<QueuedRequest> {
        if !self.is_waiting() {
            return None;
        }
        let mut state = self.lock();
        let users = state.users.keys().copied();
        let uid = users.filter(|&uid| threads.may_hold_one_more(uid)).min_by_key(|&uid| {
            let (own, _) = threads.slots.count_held(uid);
            own
        })?;
        self.take_first(&mut state, uid, |_| true)
    }

    /// Removes and returns the request `unique`, whose caller was interrupted.
    pub(crate) fn take(&self, unique: u64) -> Option<QueuedRequest> {
        if !self.is_waiting() {
            return None;
        }
        let mut state = self.lock();
        let is_it = |request: &QueuedRequest| request.unique == unique;
        let uid = state.users.iter().find(|(_, own)| own.iter().any(is_it)).map(|(&uid, _)| uid)?;
        self.take_first(&mut state, uid, is_it)
    }

    fn take_first(
        &self,
        state: &mut FairQueueState,
        uid: u32,
        is_it: impl FnMut(&QueuedRequest) -> bool,
    ) -> Option<QueuedRequest> {
        let own = state.users.get_mut(&uid)?;
        let place = own.iter().position(is_it)?;
        let taken = own.remove(place)?;
        if own.is_empty() {
            state.users.remove(&uid);
        }
        assert!(
            state.waiting > 0 && state.bytes >= taken.bytes.len(),
            "an uncounted request waited"
        );
        state.waiting -= 1;
        state.bytes -= taken.bytes.len();
        assert_eq!(state.waiting == 0, state.users.is_empty(), "requests of no user wait");
        self.waiting.store(state.waiting, Ordering::SeqCst);
        Some(taken)
    }

    /// Drops all waiting requests: the session has ended, and no caller waits for a reply.
    pub(crate) fn close(&self) {
        let mut state = self.lock();
        *state = FairQueueState { is_closed: true, ..FairQueueState::default() };
        self.waiting.store(0, Ordering::SeqCst);
    }

    fn lock(&self) -> MutexGuard<'_, FairQueueState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::super::set_aside::tests::request;
    use super::*;

    /// Returns slots, of which each user holds a number.
    fn make_held(most: usize, users: &[(u32, usize)]) -> WorkerSlots {
        let slots = WorkerSlots::new(most);
        let all = users.iter().flat_map(|&(uid, count)| std::iter::repeat_n(uid, count));
        for (unique, uid) in (1..).zip(all) {
            let slot = slots.claim(unique as i32).unwrap();
            slots.begin(slot, unique, (uid, 0));
        }
        slots
    }

    #[test]
    fn one_user_leaves_a_quarter_of_the_threads_and_root_may_hold_all() {
        let may = |users: &[(u32, usize)], uid| {
            let slots = make_held(32, users);
            ThreadBudget { slots: &slots, most: 32 }.may_hold_one_more(uid)
        };
        assert!(may(&[(7, 16)], 7) && may(&[(7, 23)], 7) && !may(&[(7, 24)], 7));
        assert!(may(&[(7, 24)], 8) && may(&[(7, 24), (8, 5)], 8) && !may(&[(7, 24), (8, 6)], 8));
        assert!(may(&[(7, 24), (8, 6)], 9), "each has one thread");
        assert!(may(&[(0, 31)], 0));
    }

    #[test]
    fn waiting_calls_go_on_in_their_order_while_their_user_has_room() {
        let fair = FairQueue::default();
        for (uid, unique) in [(7, 10), (7, 12), (8, 14)] {
            assert!(fair.wait(uid, request(unique, 8)).is_none());
        }
        let slots = make_held(8, &[(7, 6)]);
        let next = |slots: &WorkerSlots| {
            fair.next(ThreadBudget { slots, most: 8 }).map(|request| request.unique)
        };
        assert_eq!((next(&slots), next(&slots)), (Some(14), None));
        let free = make_held(8, &[]);
        assert_eq!((next(&free), next(&free), next(&free)), (Some(10), Some(12), None));
        let state = fair.lock();
        assert_eq!((fair.count_waiting(), state.bytes, state.users.len()), (0, 0, 0));
    }

    #[test]
    fn an_interrupted_call_is_taken_out_once() {
        let fair = FairQueue::default();
        for unique in [10, 12] {
            assert!(fair.wait(7, request(unique, 8)).is_none());
        }
        assert_eq!(fair.take(12).map(|request| request.unique), Some(12));
        assert!(fair.take(12).is_none() && fair.take(99).is_none() && fair.count_waiting() == 1);
    }

    #[test]
    fn waiting_calls_are_bounded_in_number_for_all_and_for_a_user_and_in_bytes() {
        let fair = FairQueue::default();
        let count =
            |uid, len| (0..).take_while(|&n| fair.wait(uid, request(n, len)).is_none()).count();
        assert_eq!(count(7, 8), MOST_OF_USER);
        assert_eq!(count(8, 8), MOST_OF_USER);
        assert_eq!(count(9, 1 << 20), 63);
        fair.close();
        assert!(fair.wait(7, request(1, 8)).is_some() && !fair.is_waiting());
    }
}
