//! The watchdog: the thread that watches over workers which cannot watch over themselves.
//!
//! While requests are handled it checks the session every [`TICK`]; when nothing has been handled
//! for a while it sleeps until a worker wakes it, so that an idle mount costs nothing. It
//!
//! - adds a worker when all are busy and the device has something to read, unless the policy is one
//!   of the paper's, by which only receivers do so;
//! - drops backing files that were kept for reuse and were not used;
//! - repeats the signal to workers whose request was interrupted, because a signal that comes just
//!   before a system call does not end it;
//! - answers requests whose callers are being killed, if their workers do not (see `stuck`);
//! - lets there be more workers than the maximum when all are stuck and others wait (see `fair`),
//!   and takes them back later;
//! - reads the device itself when all workers that there may be are stuck: INTERRUPT and FORGET are
//!   done at once, and requests are set aside for the next worker that is free. So an interrupt
//!   arrives even where a single worker sits in a handler that never ends.
//!
//! The sessions of a server share one watchdog ([`SharedWatchdog`]). It never waits for anything
//! that requests of a session wait for.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, TryLockError, Weak};
use std::thread::Thread;
use std::time::{Duration, Instant};

use defuse_fs::Result;

use super::{pressure, ring, signal};
use crate::session::SessionShared;

/// The interval of the watchdog's checks. A worker that blocks holds up requests for at most so
/// long.
const TICK: Duration = Duration::from_millis(2);
/// Number of checks without any work before the watchdog sleeps.
const QUIET_TICKS: u32 = 50;
/// Number of checks after which kept backing files are trimmed: about a second.
const TRIM_TICKS: u32 = 500;
/// Number of checks without any progress before workers count as stuck.
const STUCK_TICKS: u32 = 10;
/// Number of checks with enough free threads before a session returns to its usual number of
/// threads: about a second.
const CALM_TICKS: u32 = 500;

/// The means by which workers wake the watchdog of their session.
#[derive(Default)]
pub(crate) struct WatchdogWaker {
    /// The session is watched.
    awake: AtomicBool,
    who: OnceLock<WatchdogThread>,
    /// Held while the session is checked.
    look: Mutex<()>,
    /// A thread receives for workers that are stuck.
    is_helped: AtomicBool,
}

/// The watchdog of a session.
enum WatchdogThread {
    /// The session's own watchdog.
    Own(Thread),
    /// A watchdog that also watches other sessions.
    Common(SharedWatchdog, Weak<SessionShared>),
}

impl WatchdogWaker {
    /// Called by a worker that leaves no other worker to wait for requests. Costs a load while the
    /// session is watched.
    pub(crate) fn ring(&self) {
        if !self.awake.load(Ordering::SeqCst) && !self.awake.swap(true, Ordering::SeqCst) {
            match self.who.get() {
                Some(WatchdogThread::Own(thread)) => thread.unpark(),
                Some(WatchdogThread::Common(watchdog, session)) => watchdog.watch(session),
                // The watchdog reads `awake` when it begins.
                None => {}
            }
        }
    }

    /// Wakes a session's own watchdog in any state.
    pub(crate) fn unpark(&self) {
        if let Some(WatchdogThread::Own(thread)) = self.who.get() {
            thread.unpark();
        }
    }

    /// Waits until a watchdog of several sessions no longer checks this session. False after
    /// `deadline`.
    pub(crate) fn is_left_alone(&self, deadline: Instant) -> bool {
        while matches!(self.look.try_lock(), Err(TryLockError::WouldBlock)) {
            if Instant::now() > deadline {
                return false;
            }
            std::thread::sleep(TICK / 4);
        }
        true
    }

    /// Ends the watch of a quiet session. False if it must go on.
    fn sleep(&self, shared: &SessionShared) -> bool {
        self.awake.store(false, Ordering::SeqCst);
        // A worker that became busy just before found `awake` set already. A worker that rings now
        // has begun another watch.
        !busy(shared) || self.awake.swap(true, Ordering::SeqCst)
    }
}

/// Runs the watchdog's thread of one session, until the session ends.
pub(crate) fn run(shared: &Arc<SessionShared>) {
    let watchdog_waker = &shared.watchdog_waker;
    let _ = watchdog_waker.who.set(WatchdogThread::Own(std::thread::current()));
    let mut watch = SessionWatch::default();
    let mut untrimmed = 0;
    while !shared.pool.is_exiting() {
        if !watchdog_waker.awake.load(Ordering::SeqCst) {
            std::thread::park();
            continue;
        }
        // The end of the session does not wait for the interval. A ring just before makes one check
        // early.
        std::thread::park_timeout(TICK);
        if watch.tick(shared) {
            shared.receive_for_stuck_workers();
        }
        trim_now_and_then(shared, &mut untrimmed);
        if watch.quiet > QUIET_TICKS {
            watch = SessionWatch::default();
            untrimmed = 0;
            watchdog_waker.sleep(shared);
            trim_all(shared);
        }
    }
}

/// One watchdog for the sessions of one file system, as in a server. A server pays for one thread
/// and its checks, and not for one per session. The thread ends when all handles are dropped.
#[derive(Clone, Default)]
pub struct SharedWatchdog(Arc<WatchdogHandle>);

#[derive(Default)]
struct WatchdogHandle(Arc<WatchdogCore>);

#[derive(Default)]
struct WatchdogCore {
    state: Mutex<WatchdogState>,
    changed: Condvar,
}

#[derive(Default)]
struct WatchdogState {
    runs: bool,
    is_over: bool,
    /// Sessions to be watched from now on.
    rung: Vec<Arc<SessionShared>>,
}

impl WatchdogCore {
    fn lock(&self) -> MutexGuard<'_, WatchdogState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for WatchdogHandle {
    fn drop(&mut self) {
        self.0.lock().is_over = true;
        self.0.changed.notify_all();
    }
}

impl SharedWatchdog {
    /// Becomes the watchdog of a session, whose threads are started afterwards.
    ///
    /// # Errors
    ///
    /// The errors of starting a thread.
    pub(crate) fn take(&self, session: &Arc<SessionShared>) -> Result<()> {
        let common = &self.0.0;
        {
            let mut state = common.lock();
            if !state.runs {
                let common = Arc::clone(common);
                let thread = std::thread::Builder::new().name("defuse-watchdog".to_owned());
                thread.spawn(move || watch_all(&common))?;
                state.runs = true;
            }
        }
        let _ = session
            .watchdog_waker
            .who
            .set(WatchdogThread::Common(self.clone(), Arc::downgrade(session)));
        Ok(())
    }

    fn watch(&self, session: &Weak<SessionShared>) {
        if let Some(session) = session.upgrade() {
            self.0.0.lock().rung.push(session);
            self.0.0.changed.notify_one();
        }
    }
}

/// The thread of a [`SharedWatchdog`].
fn watch_all(common: &WatchdogCore) {
    let mut watched: Vec<(Arc<SessionShared>, SessionWatch)> = Vec::new();
    let mut untrimmed = 0;
    loop {
        {
            let mut state = common.lock();
            while watched.is_empty() && state.rung.is_empty() && !state.is_over {
                state = common.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
            }
            if state.is_over {
                return;
            }
            watched.extend(state.rung.drain(..).map(|session| (session, SessionWatch::default())));
        }
        std::thread::sleep(TICK);
        // All sessions have the same file system.
        let Some(any) = watched.first().map(|(session, _)| Arc::clone(session)) else { continue };
        watched.retain_mut(|(session, watch)| watch.look(session));
        if watched.is_empty() {
            untrimmed = 0;
            trim_all(&any);
        } else {
            trim_now_and_then(&any, &mut untrimmed);
        }
    }
}

/// Trims kept backing files about once a second.
fn trim_now_and_then(shared: &SessionShared, untrimmed: &mut u32) {
    *untrimmed += 1;
    if *untrimmed >= TRIM_TICKS {
        *untrimmed = 0;
        shared.dispatcher.trim();
        if pressure::is_high(&shared.memory_pressure) {
            shared.dispatcher.memory_pressure();
        }
    }
}

/// Trims twice, because the first call only marks the entries used since the previous one. A worker
/// that releases a file from here on rings, and a later watch trims the file.
fn trim_all(shared: &SessionShared) {
    shared.dispatcher.trim();
    shared.dispatcher.trim();
}

/// Receives for the workers of a session until one of them is free. It runs on a thread of the
/// session, because other sessions must not wait for what this session's requests wait for.
fn help(shared: &Arc<SessionShared>) {
    if shared.watchdog_waker.is_helped.swap(true, Ordering::SeqCst) {
        return;
    }
    let Some(taken) = shared.take_thread(true) else {
        // The user of the client has all threads that it may have.
        return shared.watchdog_waker.is_helped.store(false, Ordering::SeqCst);
    };
    let session = Arc::clone(shared);
    let started = shared.spawn("defuse-helper", move || {
        let _taken = taken;
        while session.pool.idle_workers() == 0 && !session.pool.is_exiting() {
            session.receive_for_stuck_workers();
            std::thread::sleep(TICK);
        }
        session.watchdog_waker.is_helped.store(false, Ordering::SeqCst);
    });
    if started.is_err() {
        shared.watchdog_waker.is_helped.store(false, Ordering::SeqCst);
    }
}

#[derive(Default)]
struct SessionWatch {
    served: u64,
    quiet: u32,
    stuck: u32,
    calm: u32,
    looks: u32,
}

impl SessionWatch {
    /// Checks one of several sessions. False if it need not be watched any more.
    fn look(&mut self, shared: &Arc<SessionShared>) -> bool {
        let _look = shared.watchdog_waker.look.lock().unwrap_or_else(PoisonError::into_inner);
        if shared.pool.is_exiting() {
            return false;
        }
        if self.tick(shared) {
            help(shared);
        }
        if self.quiet <= QUIET_TICKS {
            return true;
        }
        *self = SessionWatch::default();
        !shared.watchdog_waker.sleep(shared)
    }

    /// Checks a session. True if requests wait, and all workers that there may be are stuck.
    fn tick(&mut self, shared: &Arc<SessionShared>) -> bool {
        let served = shared.slots.count_served();
        let progress = served != self.served;
        self.served = served;
        let busy = busy(shared);
        self.quiet = if busy || progress { 0 } else { self.quiet + 1 };
        let signals = shared.signals;
        for slot in shared.slots.iter().filter(|slot| signals && slot.has_interrupt()) {
            signal::wake(slot.thread());
        }
        self.looks = self.looks.wrapping_add(1);
        if self.looks.is_multiple_of(STUCK_TICKS) {
            shared.stuck.refuse_killed(&shared.slots);
        }
        self.end_stretch(shared);
        if shared.pool.is_over() {
            shared.call_idle_worker();
        }
        if let Some(rings) = &shared.rings {
            ring::tick(shared, rings);
            return false;
        }
        if shared.set_aside.is_waiting() || shared.fair.is_waiting() {
            match shared.pool.idle_workers() {
                0 => shared.add_for_set_aside(),
                _ => shared.call_idle_worker(),
            }
        }
        if shared.pool.idle_workers() > 0 {
            self.stuck = 0;
            return false;
        }
        if !shared.is_readable() {
            return false;
        }
        if !shared.hands_over() && shared.add_worker() {
            self.stuck = 0;
            return false;
        }
        self.stuck = if progress { 0 } else { self.stuck + 1 };
        let is_stuck = self.stuck > STUCK_TICKS;
        if is_stuck && shared.raise_limit() {
            self.stuck = 0;
            return false;
        }
        is_stuck
    }

    /// Removes the threads that a session has beyond its maximum, after a while in which it needed
    /// none of them.
    fn end_stretch(&mut self, shared: &SessionShared) {
        let pool = &shared.pool;
        if !pool.has_extra() {
            return;
        }
        let handling = pool.active_workers().saturating_sub(pool.idle_workers());
        let is_calm = handling < pool.max() && !shared.fair.is_waiting();
        self.calm = if is_calm { self.calm + 1 } else { 0 };
        if self.calm > CALM_TICKS || self.quiet + 1 >= QUIET_TICKS {
            self.calm = 0;
            pool.set_extra(0);
        }
    }
}

fn busy(shared: &SessionShared) -> bool {
    let pool = &shared.pool;
    let is_waiting = shared.set_aside.is_waiting() || shared.fair.is_waiting();
    pool.idle_workers() < pool.active_workers() || is_waiting || pool.is_over()
}
