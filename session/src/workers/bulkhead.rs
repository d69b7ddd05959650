//! A bulkhead: the requests that need one part of the storage behind a file system hold only so
//! many threads of a session that requests for other parts continue.
//!
//! A file system names the part that an inode needs
//! ([`FileSystem::failure_domain`](defuse_fs::FileSystem::failure_domain)). While a part does not
//! answer, each request that needs it holds a thread. Beyond its share of the threads, further ones
//! wait here, and the thread that received them takes another request.
//!
//! The share depends on the free threads: a part may hold three times as many threads as would
//! remain free. A single part gets three quarters, so that each of several has a thread.

use std::collections::{HashMap, VecDeque};
use std::sync::{Mutex, MutexGuard, PoisonError};

use defuse_fs::FailureDomain;

use super::set_aside::QueuedRequest;

/// Maximum number of requests that wait. Beyond it a request holds its thread.
const MOST: usize = 1024;
/// Maximum number of bytes of waiting requests.
const BYTES_MOST: usize = 64 << 20;

/// Threads that a part may hold for each one that stays free.
const SHARE: usize = 3;

/// Threads and waiting requests, by the part that they need.
#[derive(Default)]
pub(crate) struct Bulkhead {
    state: Mutex<BulkheadState>,
}

#[derive(Default)]
struct BulkheadState {
    /// Parts that hold threads, or for which requests wait.
    lanes: HashMap<FailureDomain, DomainQueue>,
    /// Threads that all parts hold.
    held: usize,
    /// Requests that wait, and their bytes.
    waiting: usize,
    bytes: usize,
    closed: bool,
}

#[derive(Default)]
struct DomainQueue {
    held: usize,
    waiting: VecDeque<QueuedRequest>,
}

/// True if a part that holds `held` threads may hold one more, of `free` threads that no part
/// holds.
pub(super) fn may_enter(held: usize, free: usize) -> bool {
    held == 0 || held < SHARE * free.saturating_sub(1)
}

impl Bulkhead {
    /// The calling thread, one of `max`, is about to handle a request that needs `domain`. False if
    /// the request has to wait: it is copied, and passed to [`enter_or_wait`](Self::enter_or_wait).
    pub(crate) fn enter(&self, domain: FailureDomain, max: usize) -> bool {
        self.lock().enter(domain, max)
    }

    /// Like [`enter`](Self::enter) with a request, which waits here if it has to. Otherwise the
    /// request is returned.
    pub(crate) fn enter_or_wait(
        &self,
        domain: FailureDomain,
        max: usize,
        request: QueuedRequest,
    ) -> Option<QueuedRequest> {
        let mut state = self.lock();
        let has_room = request.has_room && state.bytes + request.bytes.len() <= BYTES_MOST;
        let is_full = state.waiting >= MOST || !has_room || state.closed;
        if state.enter(domain, max) {
            return Some(request);
        }
        if is_full {
            state.hold(domain);
            return Some(request);
        }
        state.waiting += 1;
        state.bytes += request.bytes.len();
        state.lanes.entry(domain).or_default().waiting.push_back(request);
        None
    }

    /// The calling thread has handled a request that needs `domain`. Returns a request that need
    /// not wait any longer, for which it has entered.
    pub(crate) fn leave(
        &self,
        domain: FailureDomain,
        max: usize,
    ) -> Option<(FailureDomain, QueuedRequest)> {
        let mut state = self.lock();
        state.release(domain);
        if state.waiting == 0 {
            return None;
        }
        let free = max.saturating_sub(state.held);
        let waiting = state.lanes.iter().filter(|(_, lane)| !lane.waiting.is_empty());
        let (&next, lane) = waiting.min_by_key(|(_, lane)| lane.held)?;
        if !may_enter(lane.held, free) {
            return None;
        }
        let request = state.lanes.get_mut(&next)?.waiting.pop_front()?;
        state.count_taken(&request);
        state.hold(next);
        Some((next, request))
    }

    /// Removes and returns the request `unique`, whose caller was interrupted.
    pub(crate) fn take(&self, unique: u64) -> Option<QueuedRequest> {
        let mut state = self.lock();
        if state.waiting == 0 {
            return None;
        }
        let taken = state.lanes.values_mut().find_map(|lane| {
            let place = lane.waiting.iter().position(|request| request.unique == unique)?;
            lane.waiting.remove(place)
        })?;
        state.count_taken(&taken);
        state.lanes.retain(|_, lane| lane.held > 0 || !lane.waiting.is_empty());
        Some(taken)
    }

    /// Number of requests that wait.
    pub(crate) fn count_waiting(&self) -> usize {
        self.lock().waiting
    }

    /// Drops all waiting requests: the session has ended, and no caller waits for a reply.
    pub(crate) fn close(&self) {
        let mut state = self.lock();
        (state.waiting, state.bytes, state.closed) = (0, 0, true);
        for lane in state.lanes.values_mut() {
            lane.waiting.clear();
        }
    }

    fn lock(&self) -> MutexGuard<'_, BulkheadState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl BulkheadState {
    fn enter(&mut self, domain: FailureDomain, max: usize) -> bool {
        let held = self.lanes.get(&domain).map_or(0, |lane| lane.held);
        let may = may_enter(held, max.saturating_sub(self.held));
        if may {
            self.hold(domain);
        }
        may
    }

    fn hold(&mut self, domain: FailureDomain) {
        self.held += 1;
        let lane = self.lanes.entry(domain).or_default();
        lane.held += 1;
        assert!(lane.held <= self.held, "a part holds more threads than all parts");
    }

    fn release(&mut self, domain: FailureDomain) {
        let lane = self.lanes.get_mut(&domain);
        let lane = lane.expect("the part of a request in hand is known");
        assert!(lane.held > 0 && lane.held <= self.held, "a part releases a thread that it lacks");
        lane.held -= 1;
        self.held -= 1;
        if lane.held == 0 && lane.waiting.is_empty() {
            self.lanes.remove(&domain);
        }
    }

    /// A request waits no longer.
    fn count_taken(&mut self, request: &QueuedRequest) {
        assert!(self.waiting > 0, "an uncounted request waited");
        assert!(self.bytes >= request.bytes.len(), "uncounted bytes waited");
        self.waiting -= 1;
        self.bytes -= request.bytes.len();
    }
}

#[cfg(test)]
mod tests {
    use super::super::set_aside::tests::request;
    use super::*;

    const FIRST: FailureDomain = FailureDomain(1);
    const SECOND: FailureDomain = FailureDomain(2);

    fn fill(bulkhead: &Bulkhead, domain: FailureDomain, max: usize) -> usize {
        (0..).take_while(|_| bulkhead.enter(domain, max)).count()
    }

    #[test]
    fn one_part_leaves_a_quarter_of_the_threads_and_others_share_it() {
        for (max, shares) in [(2, [1, 1, 1]), (4, [3, 1, 1]), (16, [12, 3, 1]), (64, [48, 12, 3])] {
            let bulkhead = Bulkhead::default();
            let held = [1, 2, 3].map(|domain| fill(&bulkhead, FailureDomain(domain), max));
            assert_eq!(held, shares, "of {max}");
        }
    }

    #[test]
    fn a_single_thread_serves_all_parts() {
        let bulkhead = Bulkhead::default();
        for domain in [FIRST, SECOND] {
            assert!(bulkhead.enter(domain, 1));
            assert!(bulkhead.leave(domain, 1).is_none());
        }
    }

    #[test]
    fn requests_beyond_the_share_wait_and_go_on_in_their_order() {
        let bulkhead = Bulkhead::default();
        assert_eq!(fill(&bulkhead, FIRST, 4), 3);
        for unique in [10, 12] {
            assert!(bulkhead.enter_or_wait(FIRST, 4, request(unique, 8)).is_none());
        }
        assert!(bulkhead.enter(SECOND, 4), "another part goes on");
        assert!(bulkhead.leave(SECOND, 4).is_none(), "and does not let the first one in");
        for unique in [10, 12] {
            let (domain, next) = bulkhead.leave(FIRST, 4).unwrap();
            assert_eq!((domain, next.unique), (FIRST, unique));
        }
        (0..3).for_each(|_| assert!(bulkhead.leave(FIRST, 4).is_none()));
        let state = bulkhead.lock();
        assert_eq!((state.lanes.len(), state.held, state.waiting, state.bytes), (0, 0, 0, 0));
    }

    #[test]
    fn an_interrupted_request_is_taken_out_once() {
        let bulkhead = Bulkhead::default();
        fill(&bulkhead, FIRST, 4);
        assert!(bulkhead.enter_or_wait(FIRST, 4, request(10, 8)).is_none());
        assert!(bulkhead.take(12).is_none());
        assert_eq!(bulkhead.take(10).map(|request| request.unique), Some(10));
        assert!(bulkhead.take(10).is_none() && bulkhead.count_waiting() == 0);
        assert!(bulkhead.leave(FIRST, 4).is_none());
    }

    #[test]
    fn requests_that_wait_are_bounded_in_number_and_bytes() {
        let bulkhead = Bulkhead::default();
        fill(&bulkhead, FIRST, 4);
        for unique in 0..64 {
            assert!(bulkhead.enter_or_wait(FIRST, 4, request(unique, 1 << 20)).is_none());
        }
        assert!(bulkhead.enter_or_wait(FIRST, 4, request(99, 1)).is_some(), "it holds its thread");
        assert_eq!(bulkhead.count_waiting(), 64);
        bulkhead.close();
        assert_eq!(bulkhead.count_waiting(), 0);
        assert!(bulkhead.enter_or_wait(FIRST, 4, request(1, 1)).is_some());
        let bulkhead = Bulkhead::default();
        fill(&bulkhead, FIRST, 4);
        let waits = |unique| bulkhead.enter_or_wait(FIRST, 4, request(unique, 1)).is_none();
        assert_eq!((0..2000).filter(|&unique| waits(unique)).count(), MOST);
    }
}
