//! The requests that the workers handle. An INTERRUPT finds its request here, and no request takes
//! a lock for that.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicI32, AtomicU32, AtomicU64, AtomicUsize, Ordering};

use defuse_fs::InterruptCheck;

use crate::init::WORKERS_MOST;

/// The slot of one worker. It has a cache line of its own: it is written at every request.
#[repr(align(64))]
#[derive(Debug, Default)]
pub(crate) struct WorkerSlot {
    /// The request in hand; 0 for none.
    unique: AtomicU64,
    /// The request that has been interrupted; equal to `unique` where that one is.
    interrupted: AtomicU64,
    /// Kernel id of the thread, for signals; 0 where the place is free.
    thread: AtomicI32,
    /// The user of the request in hand.
    user: AtomicU32,
    /// The thread that waits for it, as the kernel names it; 0 if it names none.
    caller: AtomicU32,
    /// The request that was answered in place of the worker, which is stuck with it.
    answered: AtomicU64,
    /// Number of requests begun; it distinguishes a worker that is stuck from a worker that is
    /// busy.
    served: AtomicU64,
}

impl WorkerSlot {
    fn begin(&self, unique: u64, (uid, caller): (u32, u32)) {
        self.user.store(uid, Ordering::Relaxed);
        self.caller.store(caller, Ordering::Relaxed);
        // Sequentially consistent: see `WorkerSlots::begin`.
        self.unique.store(unique, Ordering::SeqCst);
        // Only this worker writes it, so no atomic addition is needed.
        self.served.store(self.served.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
    }

    /// The worker has nothing in hand.
    pub(crate) fn end(&self) {
        self.unique.store(0, Ordering::Release);
    }

    pub(crate) fn thread(&self) -> i32 {
        self.thread.load(Ordering::Acquire)
    }

    /// True where the worker has no request in hand.
    pub(crate) fn is_idle(&self) -> bool {
        self.unique.load(Ordering::Acquire) == 0
    }

    pub(crate) fn release(&self) {
        self.unique.store(0, Ordering::Release);
        self.thread.store(0, Ordering::Release);
    }

    /// True where the request in hand was interrupted and the worker has not finished it.
    pub(crate) fn has_interrupt(&self) -> bool {
        let unique = self.unique.load(Ordering::Acquire);
        unique != 0 && self.interrupted.load(Ordering::Acquire) == unique
    }
}

impl WorkerSlot {
    /// The interrupted request in hand that has no answer yet, and the thread that waits for it.
    pub(crate) fn waiting_caller(&self) -> Option<(u64, u32)> {
        let unique = self.unique.load(Ordering::Acquire);
        let waits = self.has_interrupt() && self.answered.load(Ordering::Relaxed) != unique;
        let caller = self.caller.load(Ordering::Relaxed);
        (waits && caller != 0).then_some((unique, caller))
    }

    /// Records that the request has a reply.
    pub(crate) fn record_answer(&self, unique: u64) {
        self.answered.store(unique, Ordering::Relaxed);
    }
}

impl InterruptCheck for WorkerSlot {
    fn is_interrupted(&self) -> bool {
        self.has_interrupt()
    }
}

/// The slots of all workers that there may be.
#[derive(Debug)]
pub(crate) struct WorkerSlots {
    slots: Box<[WorkerSlot]>,
    /// Slots for the workers that a larger maximum has allowed since.
    more: OnceLock<Box<[WorkerSlot]>>,
    /// Interrupts that arrived before the worker had begun with the request, the latest ones. Most
    /// are for requests that had just ended, whose numbers are not used again.
    early: [AtomicU64; EARLY],
    early_count: AtomicUsize,
}

/// The maximum number of interrupts that can arrive in the moment between two steps of a worker.
const EARLY: usize = 32;

impl WorkerSlots {
    pub(crate) fn new(count: usize) -> Self {
        WorkerSlots {
            slots: places(count),
            more: OnceLock::new(),
            early: std::array::from_fn(|_| AtomicU64::new(0)),
            early_count: AtomicUsize::new(0),
        }
    }

    /// Makes room for `count` workers, at most [`WORKERS_MOST`].
    pub(crate) fn make_room(&self, count: usize) {
        if count > self.slots.len() {
            // All at once: the slots have to stay where they are.
            self.more.get_or_init(|| places(WORKERS_MOST.saturating_sub(self.slots.len())));
        }
    }

    /// A free place for the thread `thread`. `None` where there is none, which the pool's limit
    /// rules out.
    pub(crate) fn claim(&self, thread: i32) -> Option<&WorkerSlot> {
        assert!(thread > 0, "0 is a free place");
        self.iter().find(|slot| {
            slot.thread.compare_exchange(0, thread, Ordering::AcqRel, Ordering::Relaxed).is_ok()
        })
    }

    /// The worker of `slot` has the request `unique` in hand, of a user and of one of its threads.
    pub(crate) fn begin(&self, slot: &WorkerSlot, unique: u64, who: (u32, u32)) {
        assert_ne!(slot.thread(), 0, "a worker without a place begins a request");
        slot.begin(unique, who);
        // Either this sees the early interrupt, or `interrupt` sees the request.
        if self.is_early(unique) {
            slot.interrupted.store(unique, Ordering::Release);
        }
    }

    /// Marks the request `unique` as interrupted. Returns the thread that handles it.
    pub(crate) fn interrupt(&self, unique: u64) -> Option<i32> {
        if let Some(thread) = self.mark(unique) {
            return Some(thread);
        }
        let place = self.early_count.fetch_add(1, Ordering::SeqCst) % EARLY;
        self.early[place].store(unique, Ordering::SeqCst);
        self.mark(unique)
    }

    /// True if the request `unique` was interrupted while no worker had it, and only then.
    pub(crate) fn is_early(&self, unique: u64) -> bool {
        self.early_count.load(Ordering::SeqCst) > 0
            && self.early.iter().any(|early| early.load(Ordering::SeqCst) == unique)
    }

    fn mark(&self, unique: u64) -> Option<i32> {
        let slot = self.iter().find(|slot| slot.unique.load(Ordering::SeqCst) == unique)?;
        slot.interrupted.store(unique, Ordering::Release);
        Some(slot.thread())
    }

    /// Marks all requests in hand as interrupted: the session is over.
    pub(crate) fn interrupt_all(&self) {
        for slot in self.iter() {
            slot.interrupted.store(slot.unique.load(Ordering::Acquire), Ordering::Release);
        }
    }

    /// Returns the number of requests of a user that workers have in hand, and the number of all
    /// requests in hand.
    pub(crate) fn count_held(&self, uid: u32) -> (usize, usize) {
        let busy = self.iter().filter(|slot| !slot.is_idle());
        busy.fold((0, 0), |(own, all), slot| {
            let is_own = slot.user.load(Ordering::Relaxed) == uid;
            (own + usize::from(is_own), all + 1)
        })
    }

    /// All places.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &WorkerSlot> {
        self.slots.iter().chain(self.more.get().into_iter().flatten())
    }

    /// Requests begun by all workers so far.
    pub(crate) fn count_served(&self) -> u64 {
        self.iter().map(|slot| slot.served.load(Ordering::Relaxed)).sum()
    }
}

fn places(count: usize) -> Box<[WorkerSlot]> {
    (0..count).map(|_| WorkerSlot::default()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_larger_maximum_has_places_for_all() {
        let slots = WorkerSlots::new(1);
        let first = slots.claim(11).unwrap();
        assert!(slots.claim(12).is_none());
        slots.make_room(1);
        assert!(slots.claim(12).is_none());
        slots.make_room(3);
        let second = slots.claim(12).unwrap();
        slots.begin(first, 100, (7, 0));
        slots.begin(second, 200, (7, 0));
        assert_eq!((slots.interrupt(100), slots.interrupt(200)), (Some(11), Some(12)));
        assert_eq!(slots.count_served(), 2);
        assert_eq!(slots.iter().count(), WORKERS_MOST);
    }

    #[test]
    fn an_interrupt_reaches_the_request_it_names_and_no_other() {
        let slots = WorkerSlots::new(2);
        let first = slots.claim(11).unwrap();
        let second = slots.claim(12).unwrap();
        assert!(slots.claim(13).is_none());
        slots.begin(first, 100, (7, 0));
        slots.begin(second, 200, (7, 0));
        assert_eq!(slots.interrupt(300), None);
        assert_eq!(slots.interrupt(200), Some(12));
        assert!(second.is_interrupted() && !first.is_interrupted());
        second.end();
        slots.begin(second, 201, (7, 0));
        assert!(!second.is_interrupted());
        // An interrupt that arrived too early is remembered.
        second.end();
        slots.begin(second, 300, (7, 0));
        assert!(second.is_interrupted());
        second.release();
        assert!(slots.claim(13).is_some());
    }
}
