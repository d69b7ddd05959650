//! The thread that watches over workers which cannot watch over themselves.
//!
//! While requests are handled it looks around every [`TICK`]; when nothing has been handled for a
//! while it sleeps until a worker wakes it, so that an idle mount costs nothing. It
//!
//! - adds a worker when all are busy and the device has something to read, unless the policy is one of the
//!   paper's, by which only receivers do so;
//! - gives up what was kept for a moment and not wanted again;
//! - repeats the signal to workers whose request was interrupted, because a signal that comes just
//!   before a system call does not end it;
//! - reads the device itself when all workers that there may be are stuck: INTERRUPT and FORGET are
//!   done at once, and requests are set aside for the next worker that is free. So an interrupt
//!   arrives even where a single worker sits in a handler that never ends.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::Thread;
use std::time::Duration;

use super::{pressure, ring, signal};
use crate::session::Shared;

/// How often the sentinel looks. A worker that blocks holds up requests for at most so long.
const TICK: Duration = Duration::from_millis(2);
/// Looks without any work before it sleeps.
const QUIET_TICKS: u32 = 50;
/// Looks after which what is kept for a moment is trimmed: about a second.
const TRIM_TICKS: u32 = 500;
/// Looks without any progress before workers count as stuck.
const STUCK_TICKS: u32 = 10;

/// How workers wake the sentinel.
#[derive(Default)]
pub(crate) struct Bell {
    awake: AtomicBool,
    thread: std::sync::OnceLock<Thread>,
}

impl Bell {
    /// Called by a worker that leaves nobody to wait for requests. Costs a load when the sentinel
    /// is awake.
    pub(crate) fn ring(&self) {
        if !self.awake.load(Ordering::SeqCst) && !self.awake.swap(true, Ordering::SeqCst) {
            self.unpark();
        }
    }

    /// Wakes the sentinel whatever it does.
    pub(crate) fn unpark(&self) {
        if let Some(thread) = self.thread.get() {
            thread.unpark();
        }
    }
}

/// The sentinel's thread, until the session ends.
pub(crate) fn run(shared: &Arc<Shared>) {
    let bell = &shared.bell;
    let _ = bell.thread.set(std::thread::current());
    let mut watch = Watch::default();
    while !shared.pool.exiting() {
        if !bell.awake.load(Ordering::SeqCst) {
            std::thread::park();
            continue;
        }
        // The end of the session does not wait for the time. A bell that rang just before makes one look early.
        std::thread::park_timeout(TICK);
        watch.tick(shared);
        if watch.quiet > QUIET_TICKS {
            watch = Watch::default();
            bell.awake.store(false, Ordering::SeqCst);
            // A worker that became busy just before saw the bell as rung already.
            if busy(shared) {
                bell.awake.store(true, Ordering::SeqCst);
            }
            // Twice, because the first only marks what was used since the time before. Whoever
            // releases a file from here on rings, and is trimmed after.
            shared.dispatcher.trim();
            shared.dispatcher.trim();
        }
    }
}

#[derive(Default)]
struct Watch {
    served: u64,
    quiet: u32,
    stuck: u32,
    untrimmed: u32,
}

impl Watch {
    fn tick(&mut self, shared: &Arc<Shared>) {
        let served = shared.slots.served();
        let progress = served != self.served;
        self.served = served;
        let busy = busy(shared);
        self.quiet = if busy || progress { 0 } else { self.quiet + 1 };
        self.untrimmed += 1;
        if self.untrimmed >= TRIM_TICKS {
            self.untrimmed = 0;
            shared.dispatcher.trim();
            if pressure::is_high(&shared.memory_pressure) {
                shared.dispatcher.memory_pressure();
            }
        }
        for slot in shared.slots.iter().filter(|slot| slot.is_interrupted()) {
            signal::wake(slot.thread());
        }
        if shared.pool.is_over() {
            shared.call_idle_worker();
        }
        if let Some(rings) = &shared.rings {
            return ring::tick(shared, rings);
        }
        if shared.set_aside.is_waiting() {
            match shared.pool.idle() {
                0 => shared.add_for_set_aside(),
                _ => shared.call_idle_worker(),
            }
        }
        if shared.pool.idle() > 0 {
            self.stuck = 0;
            return;
        }
        if !shared.is_readable() {
            return;
        }
        if !shared.hands_over() && shared.add_worker() {
            self.stuck = 0;
            return;
        }
        self.stuck = if progress { 0 } else { self.stuck + 1 };
        if self.stuck > STUCK_TICKS {
            shared.receive_for_stuck_workers();
        }
    }
}

fn busy(shared: &Shared) -> bool {
    let pool = &shared.pool;
    pool.idle() < pool.active() || shared.set_aside.is_waiting() || pool.is_over()
}
