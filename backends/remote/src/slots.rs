//! The requests in flight, and the threads that wait for their answers.
//!
//! Every request has a slot while it waits, and its number names the slot, so that an answer finds
//! its caller without a table that all callers share. The number also counts how often the slot was
//! used: an answer that comes twice, or too late, matches nobody.

use std::cell::Cell;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard};
use std::time::Duration;

use defuse_fs::{Errno, Result};

/// Most requests that wait for an answer at once.
pub(super) const SLOTS: usize = 1024;
/// Bits of a request's number that name its slot. The lowest bit tells an INTERRUPT.
const SLOT_BITS: u32 = SLOTS.trailing_zeros();
/// A slot that somebody has, but whose request has no number yet.
const CLAIMED: u64 = 1;

/// Receives an answer that no thread waits for.
pub(super) type Done = Box<dyn FnOnce(Result<&[u8]>) + Send>;

/// A place for one request.
#[derive(Default)]
struct Slot {
    /// The number of the request; 0 where the slot is free.
    unique: AtomicU64,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// How often the slot was used.
    uses: u64,
    answer: Option<Result<Vec<u8>>>,
    /// Nobody receives any more: whoever waits here should.
    lead: bool,
    done: Option<Done>,
}

/// The outcome of a wait for an answer.
pub(super) enum Waited {
    /// It is there.
    Answered(Result<Vec<u8>>),
    /// Somebody has to receive.
    Lead,
    /// Nothing yet.
    Nothing,
}

/// A slot that belongs to one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Claim {
    pub(super) unique: u64,
    index: usize,
}

/// The slots of a connection.
pub(super) struct Slots {
    slots: Box<[Slot]>,
    /// One bit for every slot whose thread waits while another one receives.
    followers: [AtomicU64; SLOTS / 64],
}

impl Slots {
    pub(super) fn new() -> Self {
        Slots {
            slots: (0..SLOTS).map(|_| Slot::default()).collect(),
            followers: std::array::from_fn(|_| AtomicU64::new(0)),
        }
    }

    /// A free slot; `None` where all are taken. With `done`, which is taken then, nobody waits: it
    /// runs with the answer, on the thread that receives it.
    pub(super) fn claim(&self, done: &mut Option<Done>) -> Option<Claim> {
        let first = hint();
        let index = (0..SLOTS).map(|step| (first + step) % SLOTS).find(|&index| {
            let unique = &self.slots[index].unique;
            unique.load(Ordering::Relaxed) == 0
                && unique.compare_exchange(0, CLAIMED, Ordering::AcqRel, Ordering::Relaxed).is_ok()
        })?;
        remember(index);
        let slot = &self.slots[index];
        let mut state = lock(&slot.state);
        *state = State { uses: state.uses + 1, done: done.take(), ..State::default() };
        let unique = ((state.uses << SLOT_BITS) | index as u64) << 1;
        slot.unique.store(unique, Ordering::SeqCst);
        Some(Claim { unique, index })
    }

    /// Gives the slot back, if the answer has not done so.
    pub(super) fn free(&self, claim: Claim) {
        let slot = &self.slots[claim.index];
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

    /// Gives the answer to the request `unique` to whoever waits for it. False where nobody does.
    pub(super) fn answer(&self, unique: u64, result: Result<&[u8]>) -> bool {
        let index = (unique >> 1) as usize % SLOTS;
        let slot = &self.slots[index];
        if unique <= CLAIMED || slot.unique.load(Ordering::Acquire) != unique {
            return false;
        }
        let mut state = lock(&slot.state);
        // It may have been given back, or answered, in between.
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

    /// Answers every request that waits with `errno`.
    pub(super) fn answer_all(&self, errno: Errno) {
        for slot in &self.slots {
            let unique = slot.unique.load(Ordering::SeqCst);
            self.answer(unique, Err(errno));
        }
    }

    /// The answer of `claim`, if another thread has received it.
    pub(super) fn take(&self, claim: Claim) -> Option<Result<Vec<u8>>> {
        lock(&self.slots[claim.index].state).answer.take()
    }

    /// Waits for the answer of `claim`, for `patience` at most, while another thread receives.
    pub(super) fn wait(&self, claim: Claim, patience: Duration) -> Waited {
        let slot = &self.slots[claim.index];
        let mut state = lock(&slot.state);
        if state.answer.is_none() && !state.lead {
            state = match slot.changed.wait_timeout(state, patience) {
                Ok((state, _)) => state,
                Err(poisoned) => poisoned.into_inner().0,
            };
        }
        let lead = std::mem::take(&mut state.lead);
        match state.answer.take() {
            Some(answer) => Waited::Answered(answer),
            None if lead => Waited::Lead,
            None => Waited::Nothing,
        }
    }

    /// Says whether the thread of `claim` waits while another one receives.
    pub(super) fn follow(&self, claim: Claim, follows: bool) {
        let (word, bit) = (&self.followers[claim.index / 64], 1 << (claim.index % 64));
        if follows {
            word.fetch_or(bit, Ordering::SeqCst);
        } else if word.load(Ordering::Relaxed) & bit != 0 {
            word.fetch_and(!bit, Ordering::SeqCst);
        }
    }

    /// Makes one of the threads that wait receive.
    pub(super) fn pass_on(&self) {
        for (at, word) in self.followers.iter().enumerate() {
            let bits = word.load(Ordering::SeqCst);
            if bits != 0 {
                let slot = &self.slots[at * 64 + bits.trailing_zeros() as usize];
                lock(&slot.state).lead = true;
                slot.changed.notify_one();
                return;
            }
        }
    }

    /// How many requests wait for an answer.
    pub(super) fn in_flight(&self) -> usize {
        self.slots.iter().filter(|slot| slot.unique.load(Ordering::Relaxed) != 0).count()
    }
}

thread_local! {
    /// The slot that this thread had last: most likely it is free again, and nobody else's.
    static LAST: Cell<Option<usize>> = const { Cell::new(None) };
}

fn hint() -> usize {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    // Threads begin far from each other.
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
    fn an_answer_reaches_its_own_request_once() {
        let slots = Slots::new();
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
    fn all_slots_can_be_taken_and_no_more() {
        let slots = Slots::new();
        let claims: Vec<_> = (0..SLOTS).map(|_| slots.claim(&mut None).unwrap()).collect();
        assert!(slots.claim(&mut None).is_none());
        assert_eq!(slots.in_flight(), SLOTS);
        slots.free(claims[5]);
        let again = slots.claim(&mut None).unwrap();
        assert!(again.index == claims[5].index && again.unique != claims[5].unique);
    }

    #[test]
    fn whoever_waits_is_made_to_receive() {
        let slots = Slots::new();
        let claim = slots.claim(&mut None).unwrap();
        slots.pass_on();
        assert!(matches!(slots.wait(claim, Duration::ZERO), Waited::Nothing));
        slots.follow(claim, true);
        slots.pass_on();
        assert!(matches!(slots.wait(claim, Duration::from_secs(60)), Waited::Lead));
        slots.follow(claim, false);
        slots.free(claim);
        assert!(slots.followers.iter().all(|word| word.load(Ordering::Relaxed) == 0));
    }

    #[test]
    fn an_answer_that_nobody_waits_for_is_handed_on_and_frees_its_slot() {
        let slots = Slots::new();
        let (said, heard) = std::sync::mpsc::channel();
        let done: Done = Box::new(move |result| said.send(result.map(<[u8]>::to_vec)).unwrap());
        let claim = slots.claim(&mut Some(done)).unwrap();
        assert!(slots.answer(claim.unique, Ok(b"later")));
        assert_eq!(heard.recv().unwrap(), Ok(b"later".to_vec()));
        assert_eq!(slots.in_flight(), 0);
    }
}
