//! The server's side: takes submissions, and answers them.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::layout::{
    AT_NOTICES, AT_SLEEPERS, AT_USED, ClientCounter, ENTRIES, ENTRY, LANES, LANES_OF_BLOCK,
    SHORTEST, arena_of, is_full, lane, lane_at,
};
use crate::{MappedMemory, PeerMemory, ProtocolViolation};

/// The server's end of all lanes of a connection. Any thread may use it at any time.
pub struct LaneServer<M> {
    memory: M,
    lanes: Box<[ServerLane]>,
    /// The number of lanes that have memory.
    offered: AtomicU32,
    /// The lane to check first, which changes so that no lane is always first.
    turn: AtomicU32,
}

/// Counts of the server's end, see [`LaneServer::snapshot_counts`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LaneServerCounts {
    /// The number of lanes with at least one message.
    pub lanes: u32,
    /// Messages taken.
    pub taken: u64,
    /// Requests that are not answered.
    pub open: u64,
}

/// A request that was copied out of a lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ArrivedRequest {
    /// The lane.
    pub lane: usize,
    /// Bytes of the message.
    pub len: usize,
    /// The first bytes, which were copied. The others are there until the request is answered.
    pub copied: usize,
}

/// Different threads use different lanes, whose states share no cache line.
#[derive(Default)]
#[repr(align(64))]
struct ServerLane {
    /// The submissions taken: the server's own number, never read back from the memory.
    taken: AtomicU32,
    state: Mutex<ServerLaneState>,
}

#[derive(Default)]
struct ServerLaneState {
    completed: u32,
    /// The number of completions that the client has taken, when this was last read.
    seen: u32,
    /// All messages taken; `ServerLane::taken` wraps.
    taken: u64,
    /// Requests that are not answered.
    open: Vec<UnansweredRequest>,
}

#[derive(Clone, Copy)]
struct UnansweredRequest {
    number: u64,
    /// The position of the reply.
    at: usize,
    room: usize,
    /// The position of the bytes of the request that were not copied.
    left_at: usize,
    left: usize,
}

impl LaneServer<MappedMemory> {
    /// Adds a block of lanes, and returns the descriptor for the client.
    ///
    /// # Errors
    ///
    /// The errors of [`MappedMemory::add_new`].
    pub fn add_block(&self) -> rustix::io::Result<OwnedFd> {
        let fd = self.memory.add_new()?;
        // Another thread may have added a block, too.
        let lanes = self.memory.blocks() * LANES_OF_BLOCK;
        self.offered.fetch_max(lanes as u32, Ordering::AcqRel);
        Ok(fd)
    }

    /// Returns a counter of the client, which may be wrong.
    pub fn read_client_counter(&self, which: ClientCounter) -> u64 {
        self.memory.tally(which).load(Ordering::Relaxed)
    }
}

impl<M: PeerMemory> LaneServer<M> {
    /// The server's end of `memory`, which is new and has one block.
    pub fn new(memory: M) -> Self {
        let lanes = (0..LANES).map(|_| ServerLane::default()).collect();
        let offered = (LANES_OF_BLOCK as u32).into();
        LaneServer { memory, lanes, offered, turn: AtomicU32::new(0) }
    }

    /// Returns the number of lanes that the client claims to use, at most the number that exists.
    fn count_claimed_lanes(&self) -> usize {
        self.memory.load(AT_USED).min(self.offered.load(Ordering::Acquire)) as usize
    }

    /// Copies the next submitted message into `room`; `None` if there is none. `number` reads the
    /// number of the request in the copy. `copied` gets the first [`SHORTEST`] bytes of a message
    /// and its length, and returns how many bytes are copied. They may be fewer for a request that
    /// has a reply: [`copy_left`](LaneServer::copy_left) copies the rest.
    ///
    /// # Errors
    ///
    /// A [`ProtocolViolation`] of the client: counters that jump, ranges outside of the arena, a
    /// message longer than `room`, a number of another lane or of a request that is not answered,
    /// more requests than entries.
    pub fn take(
        &self,
        room: &mut [u8],
        number: impl Fn(&[u8]) -> u64,
        copied: impl Fn(&[u8], usize) -> usize,
    ) -> Result<Option<ArrivedRequest>, ProtocolViolation> {
        let used = self.count_claimed_lanes();
        let first = self.turn.load(Ordering::Relaxed) as usize;
        for step in 0..used {
            let index = (first + step) % used;
            if self.has_submission(index)
                && let Some(arrived) = self.take_from(index, room, (&number, &copied))?
            {
                self.turn.store(index as u32 + 1, Ordering::Relaxed);
                return Ok(Some(arrived));
            }
        }
        Ok(None)
    }

    /// True if a submission waits.
    pub fn is_waiting(&self) -> bool {
        let used = self.count_claimed_lanes();
        (0..used).any(|index| self.has_submission(index))
    }

    /// True if the client uses a lane.
    pub fn is_used(&self) -> bool {
        self.memory.load(AT_USED) > 0
    }

    /// Counts so far. They are the server's own: nothing is read from the memory.
    pub fn snapshot_counts(&self) -> LaneServerCounts {
        let mut counts = LaneServerCounts::default();
        for lane in &self.lanes {
            let state = lock(&lane.state);
            counts.lanes += u32::from(state.taken > 0);
            counts.taken += state.taken;
            counts.open += state.open.len() as u64;
        }
        counts
    }

    /// Records that the calling thread is about to sleep. A submission from now on comes with a
    /// bell; an earlier submission is there to [`take`](LaneServer::take).
    pub fn fall_asleep(&self) {
        self.memory.add(AT_SLEEPERS, 1);
        self.memory.fence_write_read();
    }

    /// Ends [`fall_asleep`](LaneServer::fall_asleep).
    pub fn wake_up(&self) {
        self.memory.add(AT_SLEEPERS, u32::MAX);
    }

    /// Publishes that a notification has been sent.
    pub fn publish_notification(&self) {
        self.memory.add(AT_NOTICES, 1);
    }

    /// The request that waits for an answer.
    fn open(&self, lane: usize, number: u64) -> Option<UnansweredRequest> {
        let state = lock(&self.lanes.get(lane)?.state);
        state.open.iter().find(|open| open.number == number).copied()
    }

    /// The bytes of the request `number` of `lane` that were not copied.
    pub fn remaining(&self, lane: usize, number: u64) -> usize {
        self.open(lane, number).map_or(0, |open| open.left)
    }

    /// Copies bytes of a request that were [left](LaneServer::remaining), starting at the byte
    /// `from` of the rest. The client may change them at any time. Returns false, and copies
    /// nothing, if there are fewer.
    pub fn copy_left(&self, lane: usize, number: u64, from: usize, out: &mut [u8]) -> bool {
        let at = self.locate_remaining(lane, number, from, out.len());
        at.inspect(|&at| self.memory.read(at, out)).is_some()
    }

    /// Writes `len` bytes of the rest into a file, by [`PeerMemory::write_file`]. `None` if there
    /// are fewer.
    pub fn write_left(
        &self,
        (lane, number): (usize, u64),
        (from, len): (usize, usize),
        (fd, offset): (BorrowedFd<'_>, u64),
    ) -> Option<rustix::io::Result<usize>> {
        let at = self.locate_remaining(lane, number, from, len)?;
        Some(self.memory.write_file(at, len, fd, offset))
    }

    /// Returns the address of the rest, starting at its byte `from`. It is valid until the request
    /// is answered.
    pub fn address_of_left(&self, lane: usize, number: u64, from: usize) -> Option<NonNull<u8>> {
        let len = self.remaining(lane, number).checked_sub(from)?;
        self.memory.address(self.locate_remaining(lane, number, from, len)?, len)
    }

    /// Returns the position of `len` bytes of the rest, starting at its byte `from`.
    fn locate_remaining(&self, lane: usize, number: u64, from: usize, len: usize) -> Option<usize> {
        let open = self.open(lane, number)?;
        let fits = from <= open.left && len <= open.left - from;
        fits.then(|| lane_at(lane) + lane::ARENA + open.left_at + from)
    }

    /// Bytes of room for the reply to the request `number` of `lane`.
    pub fn reply_capacity(&self, lane: usize, number: u64) -> usize {
        self.open(lane, number).map_or(0, |open| open.room)
    }

    /// Writes bytes at the byte `from` of a reply, before it is sent. Returns false, and writes
    /// nothing, if there is no room for them.
    pub fn write_reply(&self, lane: usize, number: u64, from: usize, bytes: &[u8]) -> bool {
        let at = self.reply_position(lane, number, from, bytes.len());
        at.inspect(|&at| self.memory.write(at, bytes)).is_some()
    }

    /// Like [`write_reply`](LaneServer::write_reply) with `len` bytes of a file, by
    /// [`PeerMemory::read_file`]. `None` if there is no room for them.
    pub fn write_reply_from_file(
        &self,
        (lane, number): (usize, u64),
        (from, len): (usize, usize),
        (fd, offset): (BorrowedFd<'_>, u64),
    ) -> Option<rustix::io::Result<usize>> {
        let at = self.reply_position(lane, number, from, len)?;
        Some(self.memory.read_file(at, len, fd, offset))
    }

    /// The address of room for `len` bytes of a reply from its byte `from` on, until it is sent.
    pub fn address_of_room(
        &self,
        (lane, number): (usize, u64),
        (from, len): (usize, usize),
    ) -> Option<NonNull<u8>> {
        self.memory.address(self.reply_position(lane, number, from, len)?, len)
    }

    /// Returns the position of room for `len` bytes of a reply, starting at its byte `from`.
    fn reply_position(&self, lane: usize, number: u64, from: usize, len: usize) -> Option<usize> {
        let open = self.open(lane, number)?;
        let fits = from <= open.room && len <= open.room - from;
        fits.then(|| lane_at(lane) + lane::ARENA + open.at + from)
    }

    /// Answers the request `number` of `lane` by the concatenation of `parts`. Returns false if the
    /// reply was too long, and the client gets `refusal` instead (of [`SHORTEST`] length); also if
    /// the request is not open.
    ///
    /// # Errors
    ///
    /// A [`ProtocolViolation`] of the client: it takes no completions, or its counter jumps.
    pub fn answer(
        &self,
        lane: usize,
        number: u64,
        parts: &[&[u8]],
        refusal: &[u8],
    ) -> Result<bool, ProtocolViolation> {
        self.answer_placed((lane, number), parts, 0, refusal)
    }

    /// Like [`answer`](LaneServer::answer), with `placed` bytes behind the bytes of `parts`, which
    /// were [placed](LaneServer::write_reply).
    ///
    /// # Errors
    ///
    /// The errors of [`answer`](LaneServer::answer).
    pub fn answer_placed(
        &self,
        (lane, number): (usize, u64),
        parts: &[&[u8]],
        placed: usize,
        refusal: &[u8],
    ) -> Result<bool, ProtocolViolation> {
        let at = lane_at(lane);
        let mut state = lock(&self.lanes[lane].state);
        let Some(place) = state.open.iter().position(|open| open.number == number) else {
            return Ok(false);
        };
        let completed = state.completed;
        if is_full(completed, &mut state.seen, || self.memory.load(at + lane::SEEN)) {
            return Err(ProtocolViolation("completions are not taken"));
        }
        let open = state.open.swap_remove(place);
        assert!(open.at + open.room <= arena_of(lane), "a reply leaves its lane");
        let len = parts.iter().map(|part| part.len()).sum::<usize>() + placed;
        let fits = len <= open.room;
        let (parts, len) = if fits { (parts, len) } else { (&[refusal][..], refusal.len()) };
        assert!(len <= open.room, "a refusal of {len} bytes has no room");
        let mut to = at + lane::ARENA + open.at;
        for part in parts {
            self.memory.write(to, part);
            to += part.len();
        }
        let mut entry = [0; ENTRY];
        entry[..8].copy_from_slice(&number.to_ne_bytes());
        entry[8..12].copy_from_slice(&(len as u32).to_ne_bytes());
        let slot = (state.completed % ENTRIES) as usize;
        self.memory.write(at + lane::COMPLETIONS + slot * ENTRY, &entry);
        state.completed = state.completed.wrapping_add(1);
        self.memory.store(at + lane::COMPLETED, state.completed);
        drop(state);
        // The client announces that it sleeps, and then looks; the server works in the opposite
        // order.
        self.memory.fence_write_read();
        if self.memory.load(at + lane::WAITS) != 0 {
            self.memory.store(at + lane::WAITS, 0);
            self.memory.wake(at + lane::WAITS);
        }
        Ok(fits)
    }

    fn has_submission(&self, index: usize) -> bool {
        let taken = self.lanes[index].taken.load(Ordering::Relaxed);
        self.memory.load(lane_at(index) + lane::SUBMITTED) != taken
    }

    fn take_from(
        &self,
        index: usize,
        room: &mut [u8],
        (number, copied): (impl Fn(&[u8]) -> u64, impl Fn(&[u8], usize) -> usize),
    ) -> Result<Option<ArrivedRequest>, ProtocolViolation> {
        let (at, lane) = (lane_at(index), &self.lanes[index]);
        let mut state = lock(&lane.state);
        let taken = lane.taken.load(Ordering::Relaxed);
        let waiting = self.memory.load(at + lane::SUBMITTED).wrapping_sub(taken);
        if waiting == 0 {
            return Ok(None);
        }
        if waiting > ENTRIES || state.open.len() >= ENTRIES as usize {
            return Err(ProtocolViolation("more submissions than entries"));
        }
        let too_long = ProtocolViolation("a message has an impossible length");
        let Some((head, rest)) = room.split_at_mut_checked(SHORTEST.0) else {
            return Err(too_long);
        };
        // Most messages begin at this position: the processor fetches both lines at once.
        self.memory.read(at + lane::ARENA, head);
        let mut entry = [0; ENTRY];
        let slot = (taken % ENTRIES) as usize;
        self.memory.read(at + lane::SUBMISSIONS + slot * ENTRY, &mut entry);
        let submission = CheckedSubmission::check_entry(&entry, arena_of(index))?;
        let begin = at + lane::ARENA + submission.at;
        if submission.at != 0 {
            self.memory.read(begin, head);
        }
        let all = submission.len - head.len();
        let copied = match submission.room {
            0 => all,
            _ => copied(head, submission.len).saturating_sub(head.len()).min(all),
        };
        let rest = rest.get_mut(..copied).ok_or(too_long)?;
        self.memory.read(begin + head.len(), rest);
        let number = number(head);
        let copied = head.len() + copied;
        if crate::layout::lane_of(number) != Some(index) {
            return Err(ProtocolViolation("a request has the number of another lane"));
        }
        if submission.room > 0 {
            if state.open.iter().any(|open| open.number == number) {
                return Err(ProtocolViolation("two requests have one number"));
            }
            let CheckedSubmission { at, len, reply_at, room } = submission;
            let (left_at, left) = (at + copied, len - copied);
            assert!(left_at + left <= arena_of(index), "a request leaves its lane");
            state.open.push(UnansweredRequest { number, at: reply_at, room, left_at, left });
        }
        state.taken += 1;
        lane.taken.store(taken.wrapping_add(1), Ordering::Relaxed);
        self.memory.store(at + lane::TAKEN, taken.wrapping_add(1));
        Ok(Some(ArrivedRequest { lane: index, len: submission.len, copied }))
    }
}

/// A submission after all checks.
struct CheckedSubmission {
    at: usize,
    len: usize,
    reply_at: usize,
    room: usize,
}

impl CheckedSubmission {
    fn check_entry(
        entry: &[u8; ENTRY],
        arena: usize,
    ) -> Result<CheckedSubmission, ProtocolViolation> {
        let word = |at: usize| {
            let bytes = [entry[at], entry[at + 1], entry[at + 2], entry[at + 3]];
            u32::from_ne_bytes(bytes) as usize
        };
        let (at, len, reply_at, room) = (word(0), word(4), word(8), word(12));
        let fits = |at: usize, len: usize| at <= arena && len <= arena - at;
        if !fits(at, len) || !fits(reply_at, room) {
            return Err(ProtocolViolation("a submission leaves its arena"));
        }
        if len < SHORTEST.0 {
            return Err(ProtocolViolation("a message has an impossible length"));
        }
        if room > 0 && room < SHORTEST.1 {
            return Err(ProtocolViolation("there is no room for a reply"));
        }
        Ok(CheckedSubmission { at, len, reply_at, room })
    }
}

fn lock(mutex: &Mutex<ServerLaneState>) -> MutexGuard<'_, ServerLaneState> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
