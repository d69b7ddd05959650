//! The client's side: one lane, for one thread at a time.

use std::time::Duration;

use crate::layout::{
    ARENA, AT_NOTICES, AT_SLEEPERS, AT_USED, ENTRIES, ENTRY, LANES, LARGE, PAGE, SHORTEST,
    arena_of, is_full, is_large, lane, lane_at, number_in,
};
use crate::{PeerMemory, ProtocolViolation};

/// The positions of requests in the first half of the arena, and of replies in the second.
const HALF: usize = ARENA / 2;
/// The maximum number of requests of a lane without a waiting thread.
pub const LATER: usize = 8;
/// Bytes for each such request, and for its reply, at the ends of both halves.
const LATER_ROOM: usize = 256;
/// Bytes for the request with a waiting thread, and for its reply.
const ROOM: usize = HALF - LATER * LATER_ROOM;
/// Behind both halves: a long request, or the room for a long reply.
const LONG: ArenaRange = ArenaRange { at: 2 * HALF, room: LARGE };

/// A header and 1 MiB, which begins on a page.
const LONGEST_REPLY: usize = LARGE - PAGE + SHORTEST.1;

// Both halves end with the messages without a waiting thread, and a long reply fits with the page
// that it begins on.
const _: () = assert!(ROOM + LATER * LATER_ROOM == HALF && LONG.at + LONG.room == ARENA + LARGE);
const _: () = assert!(PAGE - SHORTEST.1 + LONGEST_REPLY <= LONG.room);
const _: () = assert!(LATER < ENTRIES as usize && LATER_ROOM >= SHORTEST.0);

/// A part of the arena.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct ArenaRange {
    at: usize,
    room: usize,
}

impl ArenaRange {
    const fn tail(self, bytes: usize) -> ArenaRange {
        assert!(bytes <= self.room);
        ArenaRange { at: self.at + bytes, room: self.room - bytes }
    }
}

/// The client's end of a lane. A thread waits for one request at a time, whose message always lies
/// in the same place: the bytes that both processes touch stay in their caches. Only long messages
/// lie elsewhere.
pub struct ClientLane {
    index: usize,
    count: u64,
    submitted: u32,
    /// The number of submissions that the server has taken, when this was last read.
    taken: u32,
    seen: u32,
    waits_for: u64,
    /// Where the reply to that request will be.
    reply: ArenaRange,
    /// The numbers of requests without a waiting thread; 0 for none.
    later: [u64; LATER],
}

/// A completion: the reply lies in the lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LaneReply {
    /// The number of the request.
    pub number: u64,
    /// Bytes of the message.
    pub len: usize,
    /// Where it lies in the arena.
    at: usize,
}

impl ClientLane {
    /// The lane `index`, which was never used.
    ///
    /// # Panics
    ///
    /// If there is no such lane.
    pub fn new(index: usize) -> Self {
        assert!(index < LANES, "lane {index} of {LANES}");
        let reply = ArenaRange { at: HALF, room: ROOM };
        let (count, waits_for, later) = (0, 0, [0; LATER]);
        ClientLane { index, count, submitted: 0, taken: 0, seen: 0, waits_for, reply, later }
    }

    /// The number for the next request.
    pub fn next_number(&mut self) -> u64 {
        self.count += 1;
        // Odd numbers belong to interrupts.
        number_in(self.index, self.count << 1)
    }

    /// Returns the maximum length of a request and of a reply, in bytes, in any lane.
    pub const fn longest() -> usize {
        ROOM
    }

    /// True if this lane takes a request of `request` bytes whose reply has `reply` bytes at most.
    /// One of both may be longer than [`longest`](ClientLane::longest) in [some
    /// lanes](crate::layout::is_large).
    pub const fn takes(index: usize, request: usize, reply: usize) -> bool {
        let is_short = request <= ROOM && reply <= ROOM;
        let is_long =
            request <= LARGE && reply <= ROOM || request <= ROOM && reply <= LONGEST_REPLY;
        is_short || is_large(index) && is_long
    }

    /// Submits the request `number`, the concatenation of `parts`, whose reply has `reply` bytes at
    /// most. Returns true if the server sleeps, and needs a bell.
    ///
    /// # Errors
    ///
    /// A [`ProtocolViolation`] of the server: it has not taken what it has answered. Also for a
    /// message that this lane does not [take](ClientLane::takes).
    pub fn submit(
        &mut self,
        memory: &impl PeerMemory,
        number: u64,
        parts: &[&[u8]],
        reply: usize,
    ) -> Result<bool, ProtocolViolation> {
        let request = length(parts);
        if !ClientLane::takes(self.index, request, reply) {
            return Err(ProtocolViolation("a request is too long"));
        }
        // Data begins on a page, for direct I/O.
        let lead = |head: usize| PAGE - head.min(PAGE);
        let head = parts.first().map_or(0, |head| head.len());
        let at = if request > ROOM { LONG.at + lead(head).min(LARGE - request) } else { 0 };
        let reply = match reply > ROOM {
            true => LONG.tail(lead(SHORTEST.1)),
            false => ArenaRange { at: HALF, room: ROOM },
        };
        let sleeps = self.push(memory, at, parts, reply)?;
        (self.waits_for, self.reply) = (number, reply);
        Ok(sleeps)
    }

    /// Submits a request without a waiting thread. [`poll`](ClientLane::poll) finds the reply among
    /// others. `None` if the request is too long, or if too many were not answered.
    ///
    /// # Errors
    ///
    /// The errors of [`submit`](ClientLane::submit).
    pub fn submit_later(
        &mut self,
        memory: &impl PeerMemory,
        number: u64,
        parts: &[&[u8]],
    ) -> Result<Option<bool>, ProtocolViolation> {
        let free = self.later.iter().position(|number| *number == 0);
        let Some(place) = free.filter(|_| length(parts) <= LATER_ROOM) else { return Ok(None) };
        let sleeps = self.push(memory, deferred_position(place), parts, reply_later(place))?;
        self.later[place] = number;
        Ok(Some(sleeps))
    }

    fn push(
        &mut self,
        memory: &impl PeerMemory,
        place: usize,
        parts: &[&[u8]],
        reply: ArenaRange,
    ) -> Result<bool, ProtocolViolation> {
        let at = lane_at(self.index);
        if is_full(self.submitted, &mut self.taken, || memory.load(at + lane::TAKEN)) {
            return Err(ProtocolViolation("submissions are not taken"));
        }
        let arena = arena_of(self.index);
        assert!(place + length(parts) <= arena, "a request leaves its lane");
        assert!(reply.at + reply.room <= arena, "a reply has no room in its lane");
        let mut to = at + lane::ARENA + place;
        for part in parts {
            memory.write(to, part);
            to += part.len();
        }
        let mut entry = [0; ENTRY];
        let words = [place, length(parts), reply.at, reply.room];
        for (word, value) in entry.chunks_mut(4).zip(words) {
            word.copy_from_slice(&(value as u32).to_ne_bytes());
        }
        let slot = (self.submitted % ENTRIES) as usize;
        memory.write(at + lane::SUBMISSIONS + slot * ENTRY, &entry);
        self.submitted = self.submitted.wrapping_add(1);
        if (memory.load(AT_USED) as usize) <= self.index {
            memory.raise(AT_USED, self.index as u32 + 1);
        }
        memory.store(at + lane::SUBMITTED, self.submitted);
        // The server announces that it sleeps, and then looks; the client works in the opposite
        // order.
        memory.fence_write_read();
        Ok(memory.load(AT_SLEEPERS) != 0)
    }

    /// The reply to a request that was submitted, if one is there.
    ///
    /// # Errors
    ///
    /// A [`ProtocolViolation`] of the server: its counter jumps, or it answers another request or
    /// more than fits.
    pub fn poll(
        &mut self,
        memory: &impl PeerMemory,
    ) -> Result<Option<LaneReply>, ProtocolViolation> {
        let at = lane_at(self.index);
        let new = memory.load(at + lane::COMPLETED).wrapping_sub(self.seen);
        if new == 0 {
            return Ok(None);
        }
        if new > self.submitted.wrapping_sub(self.seen) {
            return Err(ProtocolViolation("completions without requests"));
        }
        let entry = at + lane::COMPLETIONS + (self.seen % ENTRIES) as usize * ENTRY;
        let (mut number, mut len) = ([0; 8], [0; 4]);
        memory.read(entry, &mut number);
        memory.read(entry + 8, &mut len);
        let (number, len) = (u64::from_ne_bytes(number), u32::from_ne_bytes(len) as usize);
        let Some(place) = self.take_reply(number).filter(|place| len <= place.room) else {
            return Err(ProtocolViolation("a completion of another request"));
        };
        self.seen = self.seen.wrapping_add(1);
        memory.store(at + lane::SEEN, self.seen);
        Ok(Some(LaneReply { number, len, at: place.at }))
    }

    /// Returns the position of the reply to a request that was not answered before.
    fn take_reply(&mut self, number: u64) -> Option<ArenaRange> {
        if number == 0 {
            return None;
        }
        if self.waits_for == number {
            self.waits_for = 0;
            return Some(self.reply);
        }
        let place = self.later.iter().position(|later| *later == number)?;
        self.later[place] = 0;
        Some(reply_later(place))
    }

    /// Copies a reply out of the lane, starting at its byte `from`. A later request overwrites it.
    pub fn copy(&self, memory: &impl PeerMemory, answer: LaneReply, from: usize, out: &mut [u8]) {
        assert!(from + out.len() <= answer.len, "a reply has {} bytes", answer.len);
        memory.read(lane_at(self.index) + lane::ARENA + answer.at + from, out);
    }

    /// Sleeps until there is a completion, at most for `patience`.
    pub fn sleep(&self, memory: &impl PeerMemory, patience: Duration) {
        let at = lane_at(self.index);
        memory.store(at + lane::WAITS, 1);
        memory.fence_write_read();
        if memory.load(at + lane::COMPLETED) == self.seen {
            memory.wait(at + lane::WAITS, 1, patience);
        }
        memory.store(at + lane::WAITS, 0);
    }

    /// The number of notifications that the server has sent, modulo 2^32.
    pub fn notices(memory: &impl PeerMemory) -> u32 {
        memory.load(AT_NOTICES)
    }
}

/// The position of a request without a waiting thread.
const fn deferred_position(place: usize) -> usize {
    ROOM + place * LATER_ROOM
}

const fn reply_later(place: usize) -> ArenaRange {
    assert!(place < LATER);
    ArenaRange { at: HALF + deferred_position(place), room: LATER_ROOM }
}

fn length(parts: &[&[u8]]) -> usize {
    parts.iter().map(|part| part.len()).sum()
}
