//! The count of workers: pure bookkeeping, checked under every interleaving by `tests/shuttle.rs`.

use std::time::Duration;

use crate::sync::{AtomicBool, AtomicUsize, Condvar, Mutex, MutexGuard, Ordering};

/// The limits on the number of workers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PoolLimits {
    /// Workers at most, at least 1.
    pub max: usize,
    /// Workers that a mere backlog may call for: twice the processors, since handlers wait for
    /// locks now and then.
    pub parallel: usize,
}

/// The outcome of [`WorkerPool::grow`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PoolGrowth {
    /// The caller starts a thread, or calls [`WorkerPool::record_spawn_failure`].
    Spawn,
    /// A parked worker has been called back.
    Unparked,
    /// There are as many as there may be, or as are wanted.
    AtLimit,
}

/// The threads at one moment, from which a rule decides on another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PoolLoad {
    /// Threads that wait for a request, or have just been started and will.
    pub free: usize,
    /// All threads.
    pub threads: usize,
    /// The maximum number of threads.
    pub max: usize,
}

/// Why [`WorkerPool::park`] returned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WakeReason {
    /// There is work: receive again.
    Work,
    /// There was none for long: end the thread. It is no longer counted.
    Retire,
    /// The session ends: end the thread.
    Exit,
}

#[derive(Debug, Default)]
struct PoolState {
    /// Workers that wait.
    waiting: usize,
    /// Of these, how many have been called back and not yet woken.
    called: usize,
    /// Threads that exist: receiving, handling or parked.
    live: usize,
    /// Of these, started and not yet waiting for their first request.
    starting: usize,
    started: u64,
    retired: u64,
    peak: usize,
}

impl PoolState {
    /// Checks what holds whenever the lock is free.
    fn check(&self) {
        assert!(self.called <= self.waiting, "{self:?}: more calls than parked workers");
        assert!(self.waiting <= self.live, "{self:?}: more parked workers than threads");
        assert!(self.starting <= self.live, "{self:?}: more starting workers than threads");
        assert!(self.live <= self.peak, "{self:?}: more threads than ever");
    }

    fn is_over(&self, max: usize) -> bool {
        self.live > max
    }
}

/// The counts of a session's workers. `begin` and `end` bracket every request with one atomic
/// operation each; everything else happens when the number of workers changes.
#[derive(Debug)]
pub struct WorkerPool {
    /// The maximum number of threads, which a live session may change.
    max: AtomicUsize,
    /// Threads beyond it that there may be now, because all were stuck.
    stretch: AtomicUsize,
    /// The value of [`PoolLimits::parallel`].
    parallel: usize,
    /// Workers that wait for a request.
    idle: AtomicUsize,
    /// Workers that wait for a request or handle one.
    active: AtomicUsize,
    exiting: AtomicBool,
    parked: Mutex<PoolState>,
    call: Condvar,
}

/// Numbers for statistics.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PoolCounts {
    /// Threads that exist.
    pub live: usize,
    /// Of these, waiting for a request.
    pub idle: usize,
    /// Of these, parked.
    pub parked: usize,
    /// Threads started so far.
    pub started: u64,
    /// Threads ended for lack of work so far.
    pub retired: u64,
    /// Most threads at one time.
    pub peak: usize,
}

impl WorkerPool {
    /// A pool without workers; [`grow`](WorkerPool::grow) adds the first one.
    pub fn new(limits: PoolLimits) -> Self {
        WorkerPool {
            max: AtomicUsize::new(limits.max.max(1)),
            stretch: AtomicUsize::new(0),
            parallel: limits.parallel.max(1),
            idle: AtomicUsize::new(0),
            active: AtomicUsize::new(0),
            exiting: AtomicBool::new(false),
            parked: Mutex::new(PoolState::default()),
            call: Condvar::new(),
        }
    }

    /// The maximum number of threads.
    pub fn max(&self) -> usize {
        self.max.load(Ordering::SeqCst)
    }

    /// The number of threads that there may be now.
    pub fn most(&self) -> usize {
        self.max() + self.stretch.load(Ordering::SeqCst)
    }

    /// True while there may be more threads than the maximum. Costs a load.
    pub fn has_extra(&self) -> bool {
        self.stretch.load(Ordering::Relaxed) > 0
    }

    /// Lets there be `further` threads beyond the maximum. With 0, those beyond it end as after
    /// [`resize`](WorkerPool::resize).
    pub fn set_extra(&self, further: usize) {
        let _parked = self.lock();
        self.stretch.store(further, Ordering::SeqCst);
        self.call.notify_all();
    }

    /// Changes the maximum number of threads to `max`, at least 1. Threads beyond it end: parked
    /// ones now, the others when they call [`leave_if_over`](WorkerPool::leave_if_over).
    pub fn resize(&self, max: usize) {
        let _parked = self.lock();
        self.max.store(max.max(1), Ordering::SeqCst);
        self.call.notify_all();
    }

    /// True while there are more threads than there may be.
    pub fn is_over(&self) -> bool {
        self.lock().is_over(self.most())
    }

    /// Ends the calling worker, which is idle, if there are more threads than there may be. It is
    /// no longer counted then.
    pub fn leave_if_over(&self) -> bool {
        // Threads without a call of `resize` never exceed the maximum.
        if self.active_workers() <= self.most() {
            return false;
        }
        let mut parked = self.lock();
        let over = parked.is_over(self.most());
        if over {
            parked.retired += 1;
            self.leave(&mut parked);
        }
        over
    }

    /// A thread that was started will wait for its first request.
    pub fn arrive(&self) {
        let mut parked = self.lock();
        parked.starting = parked.starting.saturating_sub(1);
        parked.check();
        self.end();
    }

    /// A worker has taken a request. True where no other waits for the next one.
    pub fn begin(&self) -> bool {
        // Sequentially consistent, because the watchdog's "no worker is busy" and a worker's "the
        // watchdog is awake" must not both be stale.
        let idle = self.idle.fetch_sub(1, Ordering::SeqCst);
        assert!(idle > 0, "a worker that was not idle has begun a request");
        idle == 1
    }

    /// A worker is done with its request and will wait for the next one. Returns the number of
    /// other workers that wait.
    pub fn end(&self) -> usize {
        self.idle.fetch_add(1, Ordering::SeqCst)
    }

    /// Workers that wait for a request.
    pub fn idle_workers(&self) -> usize {
        self.idle.load(Ordering::SeqCst)
    }

    /// Workers that wait for a request or handle one.
    pub fn active_workers(&self) -> usize {
        self.active.load(Ordering::SeqCst)
    }

    /// True where a backlog still justifies one more.
    pub fn backlog_may_grow(&self) -> bool {
        self.active_workers() < self.parallel.min(self.max())
    }

    /// Makes one more worker active, if there may be one.
    pub fn grow(&self) -> PoolGrowth {
        let mut parked = self.lock();
        if self.is_exiting() {
            return PoolGrowth::AtLimit;
        }
        if parked.called < parked.waiting {
            parked.called += 1;
            parked.check();
            self.active.fetch_add(1, Ordering::SeqCst);
            self.call.notify_one();
            PoolGrowth::Unparked
        } else {
            self.spawn(&mut parked)
        }
    }

    /// Like [`grow`](WorkerPool::grow), but never wakes a parked worker, which could not do the
    /// work of the new one.
    pub fn grow_new(&self) -> PoolGrowth {
        let mut parked = self.lock();
        if self.is_exiting() { PoolGrowth::AtLimit } else { self.spawn(&mut parked) }
    }

    /// Starts a thread if there may be one and `is_wanted` returns true. The decision is atomic: of
    /// several callers, each sees the thread that another one has just started.
    pub fn grow_if(&self, is_wanted: impl FnOnce(PoolLoad) -> bool) -> PoolGrowth {
        if self.active_workers() >= self.max() {
            return PoolGrowth::AtLimit;
        }
        let mut parked = self.lock();
        let free = self.idle_workers() + parked.starting;
        let standing = PoolLoad { free, threads: parked.live, max: self.max() };
        if self.is_exiting() || !is_wanted(standing) {
            return PoolGrowth::AtLimit;
        }
        self.spawn(&mut parked)
    }

    fn spawn(&self, parked: &mut PoolState) -> PoolGrowth {
        if parked.live >= self.most() {
            return PoolGrowth::AtLimit;
        }
        parked.live += 1;
        parked.starting += 1;
        parked.started += 1;
        parked.peak = parked.peak.max(parked.live);
        parked.check();
        self.active.fetch_add(1, Ordering::SeqCst);
        PoolGrowth::Spawn
    }

    /// The thread that [`PoolGrowth::Spawn`] required could not be started.
    pub fn record_spawn_failure(&self) {
        let mut parked = self.lock();
        assert!(parked.live > 0 && parked.started > 0, "no thread was to be started");
        parked.live -= 1;
        parked.starting = parked.starting.saturating_sub(1);
        parked.started -= 1;
        self.active.fetch_sub(1, Ordering::SeqCst);
    }

    /// Takes the calling worker, which has called [`end`](WorkerPool::end), out of the active ones,
    /// if another one still waits for requests then. Returns at once with [`WakeReason::Work`]
    /// otherwise. It rests for at most `rest`. After [`WakeReason::Work`] the worker is active and
    /// idle again.
    pub fn park(&self, rest: Duration) -> WakeReason {
        let mut parked = self.lock();
        if self.is_exiting() {
            return self.leave(&mut parked);
        }
        // Decided under the lock, so that two workers cannot each count on the other.
        if self.idle.load(Ordering::SeqCst) < 2 {
            return WakeReason::Work;
        }
        self.wait_for_call(parked, rest)
    }

    /// Like [`park`](WorkerPool::park), but regardless of other waiting workers: for workers that
    /// do not receive requests.
    pub fn rest(&self, rest: Duration) -> WakeReason {
        let mut parked = self.lock();
        if self.is_exiting() {
            return self.leave(&mut parked);
        }
        self.wait_for_call(parked, rest)
    }

    fn wait_for_call(&self, mut parked: MutexGuard<'_, PoolState>, rest: Duration) -> WakeReason {
        self.leave_active();
        parked.waiting += 1;
        let mut timed_out = false;
        while parked.called == 0 && !self.is_exiting() && !timed_out && !parked.is_over(self.most())
        {
            (parked, timed_out) = self.wait(parked, rest);
        }
        assert!(parked.waiting > 0, "{parked:?}: a worker that did not wait was woken");
        parked.waiting -= 1;
        if parked.called > 0 {
            // The caller has already counted this worker as active.
            parked.called -= 1;
            parked.check();
            self.idle.fetch_add(1, Ordering::SeqCst);
            return if self.is_exiting() { self.leave(&mut parked) } else { WakeReason::Work };
        }
        parked.live -= 1;
        parked.check();
        if self.is_exiting() {
            return WakeReason::Exit;
        }
        parked.retired += 1;
        WakeReason::Retire
    }

    /// The calling worker, idle, ends because the session does.
    pub fn exit(&self) {
        self.leave(&mut self.lock());
    }

    fn leave(&self, parked: &mut PoolState) -> WakeReason {
        self.leave_active();
        assert!(parked.live > 0, "a worker ends that was not counted");
        parked.live -= 1;
        WakeReason::Exit
    }

    /// The calling worker, idle, is no longer active.
    fn leave_active(&self) {
        let idle = self.idle.fetch_sub(1, Ordering::SeqCst);
        let active = self.active.fetch_sub(1, Ordering::SeqCst);
        assert!(idle > 0 && active > 0, "a worker leaves that was not idle ({idle} of {active})");
    }

    /// Ends the session: parked workers end, and no worker is started.
    pub fn shut_down(&self) {
        let _parked = self.lock();
        self.exiting.store(true, Ordering::SeqCst);
        self.call.notify_all();
    }

    /// True after [`shut_down`](WorkerPool::shut_down).
    pub fn is_exiting(&self) -> bool {
        self.exiting.load(Ordering::SeqCst)
    }

    /// The numbers as they are now.
    pub fn counts(&self) -> PoolCounts {
        let parked = self.lock();
        PoolCounts {
            live: parked.live,
            idle: self.idle_workers(),
            parked: parked.waiting,
            started: parked.started,
            retired: parked.retired,
            peak: parked.peak,
        }
    }

    fn lock(&self) -> MutexGuard<'_, PoolState> {
        self.parked.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    fn wait<'a>(
        &self,
        parked: MutexGuard<'a, PoolState>,
        rest: Duration,
    ) -> (MutexGuard<'a, PoolState>, bool) {
        match self.call.wait_timeout(parked, rest) {
            Ok((parked, timeout)) => (parked, timeout.timed_out()),
            Err(poisoned) => {
                let (parked, timeout) = poisoned.into_inner();
                (parked, timeout.timed_out())
            }
        }
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;

    fn pool(max: usize, parallel: usize) -> WorkerPool {
        WorkerPool::new(PoolLimits { max, parallel })
    }

    fn start(pool: &WorkerPool) {
        assert_eq!(pool.grow(), PoolGrowth::Spawn);
        pool.arrive();
    }

    #[test]
    fn the_last_idle_worker_says_that_nobody_waits() {
        let pool = pool(4, 2);
        start(&pool);
        start(&pool);
        assert!(!pool.begin());
        assert!(pool.begin());
        assert_eq!(pool.end(), 0);
        assert_eq!(pool.end(), 1);
    }

    #[test]
    fn there_are_never_more_than_the_maximum() {
        let pool = pool(2, 8);
        start(&pool);
        assert!(pool.backlog_may_grow());
        start(&pool);
        assert!(!pool.backlog_may_grow());
        assert_eq!(pool.grow(), PoolGrowth::AtLimit);
        assert_eq!(pool.counts().peak, 2);
    }

    #[test]
    fn a_backlog_stops_at_the_processors_but_blocking_does_not() {
        let pool = pool(8, 2);
        start(&pool);
        start(&pool);
        assert!(!pool.backlog_may_grow());
        assert_eq!(pool.grow(), PoolGrowth::Spawn);
    }

    #[test]
    fn the_only_idle_worker_does_not_park() {
        let pool = pool(4, 2);
        start(&pool);
        assert_eq!(pool.park(Duration::from_secs(60)), WakeReason::Work);
    }

    #[test]
    fn a_parked_worker_retires_after_its_rest() {
        let pool = pool(4, 2);
        start(&pool);
        start(&pool);
        assert_eq!(pool.park(Duration::from_millis(1)), WakeReason::Retire);
        let counts = pool.counts();
        assert_eq!((counts.live, counts.idle, counts.retired), (1, 1, 1));
    }

    #[test]
    fn a_thread_that_was_started_is_free_before_it_arrives() {
        let pool = pool(4, 2);
        start(&pool);
        pool.begin();
        let seen = std::cell::Cell::new(None);
        let look = |wanted: bool| {
            pool.grow_if(|standing| {
                seen.set(Some(standing));
                wanted
            })
        };
        assert_eq!(look(true), PoolGrowth::Spawn);
        assert_eq!(seen.get(), Some(PoolLoad { free: 0, threads: 1, max: 4 }));
        assert_eq!(look(false), PoolGrowth::AtLimit);
        assert_eq!(seen.get(), Some(PoolLoad { free: 1, threads: 2, max: 4 }));
        pool.arrive();
        pool.begin();
        look(false);
        assert_eq!(seen.get(), Some(PoolLoad { free: 0, threads: 2, max: 4 }));
    }

    #[test]
    fn a_smaller_maximum_ends_threads_and_a_larger_one_allows_more() {
        let pool = std::sync::Arc::new(pool(3, 2));
        (0..3).for_each(|_| start(&pool));
        assert!(!pool.leave_if_over());
        let parking = std::sync::Arc::clone(&pool);
        let parked = std::thread::spawn(move || parking.park(Duration::from_secs(3600)));
        while pool.counts().parked == 0 {
            std::thread::yield_now();
        }
        pool.resize(1);
        assert_eq!(parked.join().unwrap(), WakeReason::Retire);
        assert!(pool.is_over() && pool.leave_if_over());
        assert!(!pool.is_over() && !pool.leave_if_over(), "one remains");
        let counts = pool.counts();
        assert_eq!((counts.live, counts.idle, counts.retired), (1, 1, 2));
        assert_eq!(pool.grow(), PoolGrowth::AtLimit);
        pool.resize(2);
        assert_eq!(pool.grow(), PoolGrowth::Spawn);
    }

    #[test]
    fn a_stretched_pool_has_further_threads_which_end_afterwards() {
        let pool = pool(2, 2);
        (0..2).for_each(|_| start(&pool));
        assert!(pool.grow() == PoolGrowth::AtLimit && !pool.has_extra());
        pool.set_extra(2);
        (0..2).for_each(|_| start(&pool));
        assert!(pool.grow() == PoolGrowth::AtLimit && pool.has_extra() && !pool.is_over());
        assert_eq!((pool.max(), pool.most(), pool.leave_if_over()), (2, 4, false));
        pool.set_extra(0);
        assert!(pool.is_over() && pool.leave_if_over() && pool.leave_if_over());
        assert!(!pool.is_over() && !pool.leave_if_over() && pool.counts().live == 2);
    }

    #[test]
    fn a_thread_that_could_not_be_started_is_not_counted() {
        let pool = pool(2, 2);
        start(&pool);
        assert_eq!(pool.grow(), PoolGrowth::Spawn);
        pool.record_spawn_failure();
        assert_eq!(pool.counts().live, 1);
        assert_eq!(pool.grow(), PoolGrowth::Spawn);
    }
}
