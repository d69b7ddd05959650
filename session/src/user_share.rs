//! Limits of one user over all its sessions with a server.
//!
//! Each session has limits of its own. Without common limits, a user with many connections would
//! have each limit many times.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Upper limits for all sessions of one user together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ShareLimits {
    /// Threads beyond the first worker of each session. A session without further ones serves with
    /// its present threads.
    pub workers: usize,
    /// Connections whose answers wait because the client does not read. A further one ends.
    pub senders: usize,
    /// Bytes of replies that wait because clients do not read. The connection of a further reply
    /// ends.
    pub unsent_bytes: usize,
    /// Bytes of requests that hold no thread: operations that were submitted, and requests set
    /// aside. Further ones hold the workers of their sessions.
    pub queued_bytes: usize,
    /// Descriptors that were sent and perhaps not received. The connection of a further one ends.
    pub descriptors: usize,
}

impl Default for ShareLimits {
    fn default() -> Self {
        ShareLimits {
            workers: 256,
            senders: 256,
            unsent_bytes: 64 << 20,
            queued_bytes: 256 << 20,
            descriptors: 4096,
        }
    }
}

/// The counters that the sessions of one user share.
#[derive(Debug)]
pub struct UserShare {
    /// Counts for [`ShareLimits::workers`].
    pub workers: Arc<LimitedCount>,
    /// Counts for [`ShareLimits::senders`].
    pub senders: Arc<LimitedCount>,
    /// Counts for [`ShareLimits::unsent_bytes`].
    pub unsent_bytes: Arc<LimitedCount>,
    /// Counts for [`ShareLimits::queued_bytes`].
    pub queued_bytes: Arc<LimitedCount>,
    /// Counts for [`ShareLimits::descriptors`].
    pub descriptors: Arc<LimitedCount>,
}

impl UserShare {
    /// Returns the share of a user without sessions.
    pub fn new(limits: ShareLimits) -> UserShare {
        UserShare {
            workers: LimitedCount::with_limit(limits.workers),
            senders: LimitedCount::with_limit(limits.senders),
            unsent_bytes: LimitedCount::with_limit(limits.unsent_bytes),
            queued_bytes: LimitedCount::with_limit(limits.queued_bytes),
            descriptors: LimitedCount::with_limit(limits.descriptors),
        }
    }
}

/// A count with its limit.
#[derive(Debug)]
pub struct LimitedCount {
    now: AtomicUsize,
    most: usize,
}

impl LimitedCount {
    fn with_limit(most: usize) -> Arc<LimitedCount> {
        Arc::new(LimitedCount { now: AtomicUsize::new(0), most })
    }

    /// Counts `count` more until the result is dropped; `None` beyond the limit.
    pub fn take(self: &Arc<LimitedCount>, count: usize) -> Option<CountGuard> {
        let fits = |now: usize| now.checked_add(count).filter(|sum| *sum <= self.most);
        self.now.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fits).ok()?;
        Some(CountGuard { of: Arc::clone(self), count })
    }

    /// Counts `count` more, regardless of the limit, until the result is dropped.
    pub fn add(self: &Arc<LimitedCount>, count: usize) -> CountGuard {
        self.now.fetch_add(count, Ordering::Relaxed);
        CountGuard { of: Arc::clone(self), count }
    }

    /// True below the limit.
    pub fn has_room(&self) -> bool {
        self.now() < self.most
    }

    /// The present number.
    pub fn now(&self) -> usize {
        self.now.load(Ordering::Relaxed)
    }
}

/// A part of a count, which is subtracted when this is dropped.
#[derive(Debug)]
pub struct CountGuard {
    of: Arc<LimitedCount>,
    count: usize,
}

impl Drop for CountGuard {
    fn drop(&mut self) {
        self.of.now.fetch_sub(self.count, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nobody_takes_more_than_the_limit_and_everything_comes_back() {
        let count = LimitedCount::with_limit(3);
        let (first, second) = (count.take(2), count.take(1));
        assert!(first.is_some() && second.is_some() && count.take(1).is_none());
        assert!(!count.has_room() && count.take(usize::MAX).is_none());
        let beyond = count.add(5);
        drop(first);
        assert!(count.take(1).is_none() && count.now() == 6);
        drop((beyond, second));
        assert!(count.has_room() && count.take(3).is_some() && count.now() == 0);
    }
}
