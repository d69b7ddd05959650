//! The client's side: one lane, for one thread at a time.

use std::time::Duration;

use crate::layout::{
    ARENA, AT_NOTICES, AT_SLEEPERS, AT_USED, ENTRIES, ENTRY, lane, lane_at, number_in,
};
use crate::{Shared, Violation};

/// Where requests lie in the arena, and where replies.
const HALF: usize = ARENA / 2;

/// The client's end of a lane. It has one request at a time, whose message always lies in the same place:
/// what both processes touch stays in their caches.
pub struct Lane {
    index: usize,
    count: u64,
    submitted: u32,
    seen: u32,
    waits_for: u64,
}

/// A completion: the reply lies in the lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Answer {
    /// Bytes of the message.
    pub len: usize,
}

impl Lane {
    /// The lane `index`, which was never used.
    pub fn new(index: usize) -> Self {
        Lane { index, count: 0, submitted: 0, seen: 0, waits_for: 0 }
    }

    /// The number for the next request.
    pub fn next_number(&mut self) -> u64 {
        self.count += 1;
        // Odd numbers are those of interrupts.
        number_in(self.index, self.count << 1)
    }

    /// The longest request and the longest reply, in bytes.
    pub const fn longest() -> usize {
        HALF
    }

    /// Submits the request `number`, the concatenation of `parts`. Returns true if the server sleeps, and
    /// needs a bell.
    ///
    /// # Errors
    ///
    /// A [`Violation`] of the server: it has not taken what it has answered. Also for a message that is too
    /// long.
    pub fn submit(
        &mut self,
        memory: &impl Shared,
        number: u64,
        parts: &[&[u8]],
    ) -> Result<bool, Violation> {
        let at = lane_at(self.index);
        if self.submitted.wrapping_sub(memory.load(at + lane::TAKEN)) >= ENTRIES {
            return Err(Violation("submissions are not taken"));
        }
        let len: usize = parts.iter().map(|part| part.len()).sum();
        if len > HALF {
            return Err(Violation("a request is too long"));
        }
        let mut to = at + lane::ARENA;
        for part in parts {
            memory.write(to, part);
            to += part.len();
        }
        let mut entry = [0; ENTRY];
        for (word, value) in entry.chunks_mut(4).zip([0, len, HALF, HALF]) {
            word.copy_from_slice(&(value as u32).to_ne_bytes());
        }
        let slot = (self.submitted % ENTRIES) as usize;
        memory.write(at + lane::SUBMISSIONS + slot * ENTRY, &entry);
        self.waits_for = number;
        self.submitted = self.submitted.wrapping_add(1);
        if (memory.load(AT_USED) as usize) <= self.index {
            memory.raise(AT_USED, self.index as u32 + 1);
        }
        memory.store(at + lane::SUBMITTED, self.submitted);
        // The server says that it sleeps, and then looks; here it is the other way round.
        memory.fence();
        Ok(memory.load(AT_SLEEPERS) != 0)
    }

    /// The reply to the submitted request, if it is there.
    ///
    /// # Errors
    ///
    /// A [`Violation`] of the server: its counter jumps, or it answers another request or more than fits.
    pub fn poll(&mut self, memory: &impl Shared) -> Result<Option<Answer>, Violation> {
        let at = lane_at(self.index);
        match memory.load(at + lane::COMPLETED).wrapping_sub(self.seen) {
            0 => return Ok(None),
            1 => {}
            _ => return Err(Violation("completions without requests")),
        }
        let mut entry = [0; ENTRY];
        let slot = (self.seen % ENTRIES) as usize;
        memory.read(at + lane::COMPLETIONS + slot * ENTRY, &mut entry);
        let (number, rest) = entry.split_at(8);
        let len = u32::from_ne_bytes([rest[0], rest[1], rest[2], rest[3]]) as usize;
        if number != self.waits_for.to_ne_bytes() || len > HALF {
            return Err(Violation("a completion of another request"));
        }
        self.seen = self.seen.wrapping_add(1);
        memory.store(at + lane::SEEN, self.seen);
        Ok(Some(Answer { len }))
    }

    /// Copies the reply out of the lane, from its byte `from` on.
    pub fn copy(&self, memory: &impl Shared, from: usize, out: &mut [u8]) {
        memory.read(lane_at(self.index) + lane::ARENA + HALF + from, out);
    }

    /// Sleeps until there is a completion, at most for `patience`.
    pub fn sleep(&self, memory: &impl Shared, patience: Duration) {
        let at = lane_at(self.index);
        memory.store(at + lane::WAITS, 1);
        memory.fence();
        if memory.load(at + lane::COMPLETED) == self.seen {
            memory.wait(at + lane::WAITS, 1, patience);
        }
        memory.store(at + lane::WAITS, 0);
    }

    /// The number of notifications that the server has sent, modulo 2^32.
    pub fn notices(memory: &impl Shared) -> u32 {
        memory.load(AT_NOTICES)
    }
}
