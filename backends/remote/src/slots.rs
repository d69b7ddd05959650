//! The requests in flight, and the threads that wait for their replies.
//!
//! Every request has a slot while it waits, and its number identifies the slot, so that a reply
//! finds its caller without a shared table. The number also counts the uses of the slot, so that a
//! duplicate or late reply matches no request.

use std::cell::Cell;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, OnceLock};
use std::time::Duration;

use defuse_fs::{Errno, Result};

/// Maximum number of requests that wait for a reply.
pub(super) const SLOTS: usize = 1024;
/// Bits of a request's number that identify its slot. The lowest bit marks an INTERRUPT.
const SLOT_BITS: u32 = SLOTS.trailing_zeros();
/// A slot that is taken, but whose request has no number yet.
const CLAIMED: u64 = 1;

/// Receives a reply that no thread waits for.
pub(super) type ReplyCallback = Box<dyn FnOnce(Result<&[u8]>) + Send>;

/// The slot of one request.
#[derive(Default)]
struct RequestSlot {
    /// The number of the request; 0 if the slot is free.
    unique: AtomicU64,
    state: Mutex<RequestSlotState>,
    changed: Condvar,
}

#[derive(Default)]
struct RequestSlotState {
    /// Number of uses of the slot.
    uses: u64,
    answer: Option<Result<Vec<u8>>>,
    /// True if no thread receives, so that the thread waiting here must.
    lead: bool,
    done: Option<ReplyCallback>,
}

/// The outcome of a wait for a reply.
pub(super) enum WaitOutcome {
    /// The reply has arrived.
    Answered(Result<Vec<u8>>),
    /// The thread must receive.
    Lead,
    /// No reply yet.
    Nothing,
}

/// A slot taken by one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SlotClaim {
    pub(super) unique: u64,
    index: usize,
}

/// Slots that are created together, when one of them is used first: a process that makes few
/// requests touches little memory.
const GROUP: usize = 64;

/// The slots of a connection.
pub(super) struct RequestSlots {
    groups: [OnceLock<Box<[RequestSlot]>>; SLOTS / GROUP],
    /// One bit for every slot whose thread waits while another thread receives.
    followers: [AtomicU64; SLOTS / 64],
}

impl RequestSlots {
    pub(super) fn new() -> Self {
        RequestSlots {
            groups: std::array::from_fn(|_| OnceLock::new()),
            followers: std::array::from_fn(|_| AtomicU64::new(0)),
        }
    }

    fn slot(&self, index: usize) -> &RequestSlot {
        let make = || (0..GROUP).map(|_| RequestSlot::default()).collect();
        &self.groups[index / GROUP].get_or_init(make)[index % GROUP]
    }

    /// The slots that were made.
    fn iter_made(&self) -> impl Iterator<Item = &RequestSlot> {
        self.groups.iter().filter_map(OnceLock::get).flatten()
    }

    /// Takes a free slot; `None` if there is none. With `done`, which is then moved out, no thread
    /// waits: the receiving thread calls it with the reply.
    pub(super) fn claim(&self, done: &mut Option<ReplyCallback>) -> Option<SlotClaim> {
        let first = hint();
        let index = (0..SLOTS).map(|step| (first + step) % SLOTS).find(|&index| {
            let unique = &self.slot(index).unique;
            unique.load(Ordering::Relaxed) == 0
                && unique.compare_exchange(0, CLAIMED, Ordering::AcqRel, Ordering::Relaxed).is_ok()
        })?;
        remember(index);
        let slot = self.slot(index);
        let mut state = lock(&slot.state);
        *state = RequestSlotState {
            uses: state.uses + 1,
            done: done.take(),
            ..RequestSlotState::default()
        };
        let unique = ((state.uses << SLOT_BITS) | index as u64) << 1;
        slot.unique.store(unique, Ordering::SeqCst);
        Some(SlotClaim { unique, index })
    }

    /// Frees the slot, unless the reply has freed it.
    pub(super) fn free(&self, claim: SlotClaim) {
        let slot = self.slot(claim.index);
        let mut state = lock(&slot.state);
        if slot.unique.load(Ordering::Acquire) != claim.unique {
            return;
        }
        let done = state.done.take();
        state.answer = None;
        slot.unique.store(0, Ordering::Release);
        drop(state);
        drop(done);
    }

    /// Passes the reply of the request `unique` on to its waiter. Returns false if there is none.
    pub(super) fn answer(&self, unique: u64, result: Result<&[u8]>) -> bool {
        let index = (unique >> 1) as usize % SLOTS;
        let group = self.groups[index / GROUP].get();
        let Some(slot) = group.map(|group| &group[index % GROUP]) else { return false };
        if unique <= CLAIMED || slot.unique.load(Ordering::Acquire) != unique {
            return false;
        }
        let mut state = lock(&slot.state);
        // It may have been freed or answered meanwhile.
        if slot.unique.load(Ordering::Acquire) != unique || state.answer.is_some() {
            return false;
        }
        if let Some(done) = state.done.take() {
            slot.unique.store(0, Ordering::Release);
            drop(state);
            done(result);
        } else {
            state.answer = Some(result.map(<[u8]>::to_vec));
            slot.changed.notify_one();
        }
        true
    }

    /// Answers every waiting request with `errno`.
    pub(super) fn answer_all(&self, errno: Errno) {
        for slot in self.iter_made() {
            let unique = slot.unique.load(Ordering::SeqCst);
            self.answer(unique, Err(errno));
        }
    }

    /// Takes the reply of `claim`, if another thread has received it.
    pub(super) fn take(&self, claim: SlotClaim) -> Option<Result<Vec<u8>>> {
        lock(&self.slot(claim.index).state).answer.take()
    }

    /// Waits for the reply of `claim`, at most for `patience`, while another thread receives.
    pub(super) fn wait(&self, claim: SlotClaim, patience: Duration) -> WaitOutcome {
        let slot = self.slot(claim.index);
        let mut state = lock(&slot.state);
        if state.answer.is_none() && !state.lead {
            state = match slot.changed.wait_timeout(state, patience) {
                Ok((state, _)) => state,
                Err(poisoned) => poisoned.into_inner().0,
            };
        }
        let lead = std::mem::take(&mut state.lead);
        match state.answer.take() {
            Some(answer) => WaitOutcome::Answered(answer),
            None if lead => WaitOutcome::Lead,
            None => WaitOutcome::Nothing,
        }
    }

    /// Records that the thread of `claim` waits, or no longer waits, while another one receives.
    pub(super) fn follow(&self, claim: SlotClaim, follows: bool) {
        let (word, bit) = (&self.followers[claim.index / 64], 1 << (claim.index % 64));
        if follows {
            word.fetch_or(bit, Ordering::SeqCst);
        } else if word.load(Ordering::Relaxed) & bit != 0 {
            word.fetch_and(!bit, Ordering::SeqCst);
        }
    }

    /// Makes one of the waiting threads receive.
    pub(super) fn pass_on(&self) {
        for (at, word) in self.followers.iter().enumerate() {
            let bits = word.load(Ordering::SeqCst);
            if bits != 0 {
                let slot = self.slot(at * 64 + bits.trailing_zeros() as usize);
                lock(&slot.state).lead = true;
                slot.changed.notify_one();
                return;
            }
        }
    }

    /// The number of requests that wait for a reply.
    pub(super) fn in_flight(&self) -> usize {
        self.iter_made().filter(|slot| slot.unique.load(Ordering::Relaxed) != 0).count()
    }
}

thread_local! {
    /// The slot that this thread used last, which is probably free.
    static LAST: Cell<Option<usize>> = const { Cell::new(None) };
}

fn hint() -> usize {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    // Threads begin at distant slots.
    LAST.get().unwrap_or_else(|| NEXT.fetch_add(1, Ordering::Relaxed).wrapping_mul(37) % SLOTS)
}

fn remember(index: usize) {
    LAST.set(Some(index));
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reply_reaches_its_own_request_once() {
        let slots = RequestSlots::new();
        let first = slots.claim(&mut None).unwrap();
        let second = slots.claim(&mut None).unwrap();
        assert!(slots.answer(first.unique, Ok(b"one")));
        assert!(!slots.answer(first.unique, Ok(b"twice")));
        assert!(!slots.answer(second.unique + (2 << SLOT_BITS), Ok(b"from another time")));
        assert!(!slots.answer(0, Ok(b"nobody")) && !slots.answer(CLAIMED, Ok(b"nobody")));
        assert_eq!(slots.take(first), Some(Ok(b"one".to_vec())));
        assert_eq!(slots.take(second), None);
        slots.free(first);
        assert!(!slots.answer(first.unique, Ok(b"too late")));
        slots.answer_all(Errno::ENOTCONN);
        assert_eq!(slots.take(second), Some(Err(Errno::ENOTCONN)));
    }

    #[test]
    fn all_slots_can_be_used_and_no_more() {
        let slots = RequestSlots::new();
        let claims: Vec<_> = (0..SLOTS).map(|_| slots.claim(&mut None).unwrap()).collect();
        assert!(slots.claim(&mut None).is_none());
        assert_eq!(slots.in_flight(), SLOTS);
        slots.free(claims[5]);
        let again = slots.claim(&mut None).unwrap();
        assert!(again.index == claims[5].index && again.unique != claims[5].unique);
    }

    #[test]
    fn a_waiting_thread_is_made_to_receive() {
        let slots = RequestSlots::new();
        let claim = slots.claim(&mut None).unwrap();
        slots.pass_on();
        assert!(matches!(slots.wait(claim, Duration::ZERO), WaitOutcome::Nothing));
        slots.follow(claim, true);
        slots.pass_on();
        assert!(matches!(slots.wait(claim, Duration::from_secs(60)), WaitOutcome::Lead));
        slots.follow(claim, false);
        slots.free(claim);
        assert!(slots.followers.iter().all(|word| word.load(Ordering::Relaxed) == 0));
    }

    #[test]
    fn a_reply_without_a_waiting_thread_is_passed_on_and_frees_its_slot() {
        let slots = RequestSlots::new();
        let (said, heard) = std::sync::mpsc::channel();
        let done: ReplyCallback =
            Box::new(move |result| said.send(result.map(<[u8]>::to_vec)).unwrap());
        let claim = slots.claim(&mut Some(done)).unwrap();
        assert!(slots.answer(claim.unique, Ok(b"later")));
        assert_eq!(heard.recv().unwrap(), Ok(b"later".to_vec()));
        assert_eq!(slots.in_flight(), 0);
    }
}
