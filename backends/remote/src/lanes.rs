//! Requests through lanes in shared memory, beside the socket of a connection.
//!
//! A thread takes a free lane, writes its request, and polls for the reply before it sleeps. While
//! the server also polls, there is no system call. Without a free lane the request goes through the
//! socket, and the client requests more lanes.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError, TryLockError};
use std::time::Duration;

use defuse_fs::{Context, Errno, ReadBuf, Result};
use defuse_probe::clock;
use defuse_ring::layout::{BELL, ClientCounter, LANES_OF_BLOCK, LARGE_LANES, MORE, MOST_BLOCKS};
use defuse_ring::{ClientLane, LaneReply, MappedMemory, ProtocolViolation};
use defuse_wire::abi::{InHeader, Opcode, OutHeader};
use defuse_wire::reply::HEADER_LEN;
use zerocopy::FromBytes;

use super::connection::{ClientConnection, HOPE, ReplyWait, SPIN_NS, TICK};
use super::slots::ReplyCallback;
use crate::reply_log::log_decode_error;
use crate::sys::{errno, has_several_processors};

/// Bytes of a reply that are copied at a time where the caller has no memory for them.
const PIECE: usize = 64 * 1024;
/// The number of polls for a reply between two reads of the clock.
const LOOKS: u32 = 16;

/// The lanes of a connection.
pub(super) struct ClientLanes {
    memory: MappedMemory,
    /// The lanes of a block are created when one of them is used first.
    lane_slots: [OnceLock<Box<[Mutex<BufferedLane>]>>; MOST_BLOCKS],
    /// True if a further block was requested and has not arrived; it never arrives if the server
    /// has refused it.
    requested: AtomicBool,
    /// Number of requests without a waiting thread that are not known to be answered.
    later: AtomicU32,
    /// Like the value of the socket: the number of replies that may be late before threads no
    /// longer poll.
    hope: AtomicU32,
    may_spin: bool,
    /// Notifications of the server that were received.
    noticed: AtomicU32,
    requests: AtomicU64,
    posted: AtomicU64,
}

/// A lane with the memory for its replies.
pub(super) struct BufferedLane {
    lane: ClientLane,
    reply: Vec<u8>,
    /// The requests without a waiting thread.
    later: Vec<(u64, ReplyCallback)>,
    /// A reply stays here until it is taken, and no other thread uses the lane.
    is_kept: bool,
}

/// A lane that a thread has for itself.
pub(super) type LaneGuard<'a> = (&'a ClientLanes, MutexGuard<'a, BufferedLane>);

/// A request whose reply is taken later.
pub(super) struct LaneRequest {
    lane: usize,
    number: u64,
}

impl BufferedLane {
    /// Returns the reply to the request `number`, if it is there. Passes on all available replies
    /// to requests without a waiting thread.
    fn poll(
        &mut self,
        lanes: &ClientLanes,
        number: u64,
    ) -> std::result::Result<Option<LaneReply>, ProtocolViolation> {
        while let Some(answer) = self.lane.poll(&lanes.memory)? {
            if answer.number == number {
                return Ok(Some(answer));
            }
            let place = self.later.iter().position(|(later, _)| *later == answer.number);
            let Some(place) = place else { continue };
            let (_, done) = self.later.swap_remove(place);
            lanes.later.fetch_sub(1, Ordering::Relaxed);
            let mut reply = [0; HEADER_LEN];
            let len = answer.len.min(HEADER_LEN);
            self.lane.copy(&lanes.memory, answer, 0, &mut reply[..len]);
            match OutHeader::read_from_bytes(&reply) {
                Ok(header) if header.unique == answer.number => {
                    // These replies have no body.
                    done(ClientConnection::outcome(&header, 0).map(|_| &[][..]));
                }
                _ => return Err(ProtocolViolation("a reply that is not a FUSE message")),
            }
        }
        Ok(None)
    }
}

impl ClientLanes {
    /// Counts an event in the memory of the lanes, where the server reads it.
    pub(super) fn count(&self, which: ClientCounter) {
        self.memory.tally(which).fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn read_counts(&self) -> ClientLaneCounts {
        let of = |which| self.memory.tally(which).load(Ordering::Relaxed);
        ClientLaneCounts {
            requests: self.requests.load(Ordering::Relaxed),
            posted: self.posted.load(Ordering::Relaxed),
            bells: of(ClientCounter::Bells),
            page_reads: of(ClientCounter::PageReads),
            sleeps: of(ClientCounter::Sleeps),
        }
    }

    /// The lanes in the memory that a server has passed.
    pub(super) fn map(fd: OwnedFd) -> Result<ClientLanes> {
        let memory = MappedMemory::from_fd(fd).map_err(errno)?;
        let may_spin = has_several_processors();
        Ok(ClientLanes {
            memory,
            lane_slots: std::array::from_fn(|_| OnceLock::new()),
            requested: AtomicBool::new(false),
            later: AtomicU32::new(0),
            hope: AtomicU32::new(if may_spin { HOPE } else { 0 }),
            may_spin,
            noticed: AtomicU32::new(0),
            requests: AtomicU64::new(0),
            posted: AtomicU64::new(0),
        })
    }

    /// Returns a free lane for a request and a reply of these lengths, preferably the lane that the
    /// thread had before.
    pub(super) fn take_lane(&self, request: usize, reply: usize) -> Option<LaneGuard<'_>> {
        if !ClientLane::takes(0, request, reply) {
            return None;
        }
        let first = hint();
        let is_long = request.max(reply) > ClientLane::longest();
        // Threads with long messages share the lanes that take them.
        let first = if is_long { first % LARGE_LANES } else { first };
        let (index, buffered) = self.free(first, (request, reply), |_| true)?;
        HINT.set(Some(index));
        Some((self, buffered))
    }

    /// A free lane for such messages that `fits`, from the lane `first` on.
    fn free(
        &self,
        first: usize,
        (request, reply): (usize, usize),
        fits: impl Fn(&BufferedLane) -> bool,
    ) -> Option<(usize, MutexGuard<'_, BufferedLane>)> {
        let lanes = self.memory.blocks() * LANES_OF_BLOCK;
        (0..lanes).map(|step| (first + step) % lanes).find_map(|index| {
            let buffered = ClientLane::takes(index, request, reply)
                .then(|| try_lock_lane(self.lane_slot(index)))??;
            (!buffered.is_kept && fits(&buffered)).then_some((index, buffered))
        })
    }

    fn lane_slot(&self, lane: usize) -> &Mutex<BufferedLane> {
        let block = lane / LANES_OF_BLOCK;
        let buffered = |lane| {
            let (lane, reply, later) = (ClientLane::new(lane), Vec::new(), Vec::new());
            Mutex::new(BufferedLane { lane, reply, later, is_kept: false })
        };
        let make = || (block * LANES_OF_BLOCK..).take(LANES_OF_BLOCK).map(buffered).collect();
        &self.lane_slots[block].get_or_init(make)[lane % LANES_OF_BLOCK]
    }

    /// Takes the replies to requests without a waiting thread.
    pub(super) fn take_later(&self) -> std::result::Result<(), ProtocolViolation> {
        if self.later.load(Ordering::Relaxed) > 0 {
            for mut buffered in
                self.lane_slots.iter().filter_map(OnceLock::get).flatten().filter_map(try_lock_lane)
            {
                if !buffered.later.is_empty() && !buffered.is_kept {
                    buffered.poll(self, 0)?;
                }
            }
        }
        Ok(())
    }

    /// Adds a block that the server offers; `None` if it has none.
    pub(super) fn add(&self, block: Option<OwnedFd>) {
        let Some(fd) = block else { return };
        match self.memory.add_block(fd) {
            Ok(()) => self.requested.store(false, Ordering::Release),
            Err(error) => log::debug!("further lanes cannot be used: {error}"),
        }
    }

    /// Records that a reply was late, or early enough to poll for; `hope` is the former value.
    fn note(&self, hope: u32, late: bool) {
        let now = if late { hope.saturating_sub(1) } else { HOPE };
        if self.may_spin && now != hope {
            self.hope.store(now, Ordering::Relaxed);
        }
    }

    fn has_news(&self) -> bool {
        let sent = ClientLane::notices(&self.memory);
        self.noticed.swap(sent, Ordering::Relaxed) != sent
    }
}

/// Locks the lane, if no other thread uses it.
fn try_lock_lane(buffered: &Mutex<BufferedLane>) -> Option<MutexGuard<'_, BufferedLane>> {
    match buffered.try_lock() {
        Ok(buffered) => Some(buffered),
        // A closure that decoded a reply has panicked; the lane was done by then.
        Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
        Err(TryLockError::WouldBlock) => None,
    }
}

impl ClientConnection {
    /// Sends a request through a lane, and does not wait for its reply, which has no body. Returns
    /// `done` if it must go through the socket.
    pub(super) fn post(
        &self,
        (lanes, mut buffered): LaneGuard<'_>,
        head: &mut [u8],
        done: ReplyCallback,
    ) -> Result<Option<ReplyCallback>> {
        let buffered = &mut *buffered;
        if !buffered.later.is_empty() {
            buffered.poll(lanes, 0).map_err(|why| self.break_off(why))?;
        }
        let number = buffered.lane.next_number();
        write_number(head, number);
        let sleeps = buffered.lane.submit_later(&lanes.memory, number, &[head]);
        let Some(sleeps) = sleeps.map_err(|why| self.break_off(why))? else {
            return Ok(Some(done));
        };
        buffered.later.push((number, done));
        lanes.later.fetch_add(1, Ordering::Relaxed);
        lanes.requests.fetch_add(1, Ordering::Relaxed);
        lanes.posted.fetch_add(1, Ordering::Relaxed);
        if sleeps {
            self.ring_doorbell(lanes);
        }
        Ok(None)
    }

    /// Sends a request through a lane, and waits for its reply.
    pub(super) fn exchange<T>(
        &self,
        (lanes, mut buffered): LaneGuard<'_>,
        cx: &Context<'_>,
        head: &mut [u8],
        data: &[u8],
        decode: impl FnOnce(&[u8]) -> Result<T>,
    ) -> Result<T> {
        let buffered = &mut *buffered;
        let number = self.submit((lanes, buffered), (head, data), ClientLane::longest())?;
        let answer = self.await_reply(lanes, buffered, number, cx)?;
        self.take_reply((lanes, buffered), answer, decode)
    }

    /// Sends a request through a lane of which the thread has no other use, and leaves its reply
    /// there until it is [taken](ClientConnection::take_begun). `None` if no lane is free.
    pub(super) fn begin(&self, head: &mut [u8], data: &[u8]) -> Result<Option<LaneRequest>> {
        let Some(lanes) = self.lanes() else { return Ok(None) };
        self.check_usable()?;
        let sizes = (head.len() + data.len(), ClientLane::longest());
        // In a lane with such requests, no thread would take their replies meanwhile.
        let free = lanes.free(hint() + 1, sizes, |buffered| buffered.later.is_empty());
        let Some((lane, mut buffered)) = free else { return Ok(None) };
        let number = self.submit((lanes, &mut *buffered), (head, data), ClientLane::longest())?;
        buffered.is_kept = true;
        Ok(Some(LaneRequest { lane, number }))
    }

    /// Waits for the reply to a request that was begun.
    pub(super) fn take_begun<T>(
        &self,
        LaneRequest { lane, number }: LaneRequest,
        cx: &Context<'_>,
        decode: impl FnOnce(&[u8]) -> Result<T>,
    ) -> Result<T> {
        let lanes = self.lanes().ok_or(Errno::ENOTCONN)?;
        let mut buffered = lanes.lane_slot(lane).lock().unwrap_or_else(PoisonError::into_inner);
        let buffered = &mut *buffered;
        buffered.is_kept = false;
        let answer = self.await_reply(lanes, buffered, number, cx)?;
        self.take_reply((lanes, buffered), answer, decode)
    }

    /// Copies a reply out of its lane, and decodes it.
    fn take_reply<T>(
        &self,
        (lanes, buffered): (&ClientLanes, &mut BufferedLane),
        answer: LaneReply,
        decode: impl FnOnce(&[u8]) -> Result<T>,
    ) -> Result<T> {
        let len = answer.len;
        if buffered.reply.len() < len {
            buffered.reply.resize(len, 0);
        }
        buffered.lane.copy(&lanes.memory, answer, 0, &mut buffered.reply[..len]);
        self.receive_messages(lanes);
        let reply = &buffered.reply[..len];
        self.outcome_of(answer, reply)?;
        decode(&reply[HEADER_LEN..])
    }

    /// Sends a READ of `size` bytes through a lane, and copies the reply from there into `out`.
    /// Returns the bytes read.
    pub(super) fn exchange_data(
        &self,
        (lanes, mut buffered): LaneGuard<'_>,
        cx: &Context<'_>,
        head: &mut [u8],
        size: usize,
        out: &mut ReadBuf<'_>,
    ) -> Result<usize> {
        let buffered = &mut *buffered;
        let number = self.submit((lanes, buffered), (head, &[]), HEADER_LEN + size)?;
        let answer = self.await_reply(lanes, buffered, number, cx)?;
        let mut header = [0; HEADER_LEN];
        let len = answer.len.min(HEADER_LEN);
        buffered.lane.copy(&lanes.memory, answer, 0, &mut header[..len]);
        self.receive_messages(lanes);
        self.outcome_of(answer, &header[..len])?;
        if answer.len > HEADER_LEN + size {
            return log_decode_error(Opcode::Read, answer.len - HEADER_LEN, Err(Errno::EIO));
        }
        let mut at = HEADER_LEN;
        while at < answer.len {
            let rest = answer.len - at;
            let count = match out.lend() {
                Some(room) => {
                    let count = room.len().min(rest);
                    buffered.lane.copy(&lanes.memory, answer, at, &mut room[..count]);
                    out.advance(count)?;
                    count
                }
                None => {
                    let count = rest.min(PIECE);
                    if buffered.reply.len() < count {
                        buffered.reply.resize(count, 0);
                    }
                    buffered.lane.copy(&lanes.memory, answer, at, &mut buffered.reply[..count]);
                    out.put(&buffered.reply[..count])?;
                    count
                }
            };
            at += count;
        }
        Ok(answer.len - HEADER_LEN)
    }

    /// Submits a request of a head and data, whose reply has `most` bytes at most. Returns its
    /// number.
    fn submit(
        &self,
        (lanes, buffered): (&ClientLanes, &mut BufferedLane),
        (head, data): (&mut [u8], &[u8]),
        most: usize,
    ) -> Result<u64> {
        let number = buffered.lane.next_number();
        write_number(head, number);
        lanes.requests.fetch_add(1, Ordering::Relaxed);
        let sleeps = buffered.lane.submit(&lanes.memory, number, &[head, data], most);
        if sleeps.map_err(|why| self.break_off(why))? {
            self.ring_doorbell(lanes);
        }
        Ok(number)
    }

    /// Receives the messages that the server has sent beside the lanes.
    fn receive_messages(&self, lanes: &ClientLanes) {
        if lanes.has_news() || self.has_unheard() {
            self.drain();
        }
    }

    /// Returns the outcome in the header of a reply.
    fn outcome_of(&self, answer: LaneReply, reply: &[u8]) -> Result<()> {
        let header = match OutHeader::read_from_prefix(reply) {
            Ok((header, _))
                if header.len as usize == answer.len && header.unique == answer.number =>
            {
                header
            }
            _ => {
                return Err(self.break_off(ProtocolViolation("a reply that is not a FUSE message")));
            }
        };
        Self::outcome(&header, answer.len - HEADER_LEN).map(drop)
    }

    fn await_reply(
        &self,
        lanes: &ClientLanes,
        buffered: &mut BufferedLane,
        number: u64,
        cx: &Context<'_>,
    ) -> Result<LaneReply> {
        let mut waiting = None;
        loop {
            if let Some(answer) = self.poll_reply(lanes, buffered, number)? {
                return Ok(answer);
            }
            let waiting = waiting.get_or_insert_with(|| ReplyWait::with_timeout(self.timeout()));
            let slept = clock::now();
            lanes.count(ClientCounter::Sleeps);
            buffered.lane.sleep(&lanes.memory, TICK);
            let answer = buffered.poll(lanes, number).map_err(|why| self.break_off(why))?;
            if let Some(answer) = answer {
                let hope = lanes.hope.load(Ordering::Relaxed);
                lanes.note(hope, hope > 0 || slept.elapsed_ns() >= SPIN_NS);
                return Ok(answer);
            }
            self.handle_wait_tick(number, cx, waiting);
            // A notification, for which the server may wait, or its end.
            self.drain();
            if self.is_dead() {
                return Err(Errno::ENOTCONN);
            }
        }
    }

    /// Polls for a reply as long as that is promising.
    fn poll_reply(
        &self,
        lanes: &ClientLanes,
        buffered: &mut BufferedLane,
        number: u64,
    ) -> Result<Option<LaneReply>> {
        let hope = lanes.hope.load(Ordering::Relaxed);
        let limit_ns = if hope > 0 { SPIN_NS } else { 0 };
        let begun = clock::now();
        let mut yielded = false;
        loop {
            for _ in 0..LOOKS {
                let answer = buffered.poll(lanes, number).map_err(|why| self.break_off(why))?;
                if let Some(answer) = answer {
                    // If processors are short, other threads have run meanwhile, and for longer
                    // than a wake-up takes.
                    lanes.note(hope, yielded && begun.elapsed_ns() >= SPIN_NS);
                    return Ok(Some(answer));
                }
                if limit_ns > 0 {
                    std::hint::spin_loop();
                }
            }
            if begun.elapsed_ns() >= limit_ns {
                return Ok(None);
            }
            // Other threads run first, perhaps the server.
            std::thread::yield_now();
            yielded = true;
        }
    }

    /// Wakes the server. If its socket is full, it has not yet slept.
    fn ring_doorbell(&self, lanes: &ClientLanes) {
        lanes.count(ClientCounter::Bells);
        let _ = self.try_tell(&[0; BELL], &[]);
    }

    /// Requests more lanes, because all are in use, unless that was done. The reply arrives with
    /// others.
    pub(super) fn request_lanes(&self, lanes: &ClientLanes) {
        let are_all = lanes.memory.blocks() == MOST_BLOCKS;
        if !are_all
            && !lanes.requested.swap(true, Ordering::AcqRel)
            && self.try_tell(&[0; MORE], &[]).is_err()
        {
            lanes.requested.store(false, Ordering::Release);
        }
    }

    pub(super) fn break_off(&self, why: ProtocolViolation) -> Errno {
        self.end(&why.to_string());
        Errno::ENOTCONN
    }
}

/// Writes the number of a request into its header.
pub(super) fn write_number(head: &mut [u8], number: u64) {
    let at = std::mem::offset_of!(InHeader, unique);
    head[at..at + 8].copy_from_slice(&number.to_ne_bytes());
}

impl ReplyWait {
    fn with_timeout(timeout: Option<Duration>) -> ReplyWait {
        let now = std::time::Instant::now();
        let deadline = timeout.and_then(|timeout| now.checked_add(timeout));
        ReplyWait { deadline, interrupted: false }
    }
}

/// The counts of a client's requests through shared memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ClientLaneCounts {
    /// Requests through lanes.
    pub requests: u64,
    /// Requests among them without a thread that waits for the reply.
    pub posted: u64,
    /// Messages that woke the server, one system call each.
    pub bells: u64,
    /// Reads from cached pages, without a request.
    pub page_reads: u64,
    /// Sleeps of a thread that waited for a reply, one system call each.
    pub sleeps: u64,
}

thread_local! {
    /// The lane that this thread had before.
    static HINT: std::cell::Cell<Option<usize>> = const { std::cell::Cell::new(None) };
}

fn hint() -> usize {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    HINT.get().unwrap_or_else(|| NEXT.fetch_add(1, Ordering::Relaxed) as usize % LANES_OF_BLOCK)
}

/// The offer of a server, until it is taken.
#[derive(Default)]
pub(super) struct PendingOffer(Mutex<Option<Option<OwnedFd>>>);

impl PendingOffer {
    pub(super) fn store(&self, fd: Option<OwnedFd>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(fd);
    }

    /// Takes the descriptor, if there was an offer with one.
    pub(super) fn take(&self) -> Option<Option<OwnedFd>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}
