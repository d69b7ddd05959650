//! Requests through lanes in shared memory, beside the socket of a connection.
//!
//! A thread takes a free lane, writes its request, and looks for the reply before it sleeps. While the server
//! looks, too, there is no system call. Without a free lane the request goes through the socket.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::Duration;

use defuse_fs::{Context, Errno, Result};
use defuse_probe::clock;
use defuse_ring::layout::{BYTES, LANES};
use defuse_ring::{Lane, Memory, Violation};
use defuse_wire::abi::{InHeader, OutHeader};
use defuse_wire::reply::HEADER_LEN;
use zerocopy::FromBytes;

use super::connection::{ClientConnection, HOPE, SPIN_NS, TICK, Waiting};
use crate::sys::errno;

/// Looks for a reply between two looks at the clock.
const LOOKS: u32 = 16;

/// The lanes of a connection.
pub(super) struct Lanes {
    memory: Memory,
    seats: Box<[Mutex<Seat>]>,
    /// As that of the socket: how many replies may be late before threads no longer look.
    hope: AtomicU32,
    may_spin: bool,
    /// Notifications of the server that were received.
    noticed: AtomicU32,
    pub(super) counts: Counts,
}

/// Numbers of operations, to see which needed a system call.
#[derive(Default)]
pub(super) struct Counts {
    pub(super) requests: AtomicU64,
    pub(super) bells: AtomicU64,
    pub(super) sleeps: AtomicU64,
}

/// A lane with the memory for its replies.
pub(super) struct Seat {
    lane: Lane,
    reply: Vec<u8>,
}

impl Lanes {
    /// The lanes in the memory that a server has passed.
    pub(super) fn of(fd: OwnedFd) -> Result<Lanes> {
        let memory = Memory::of(fd, BYTES).map_err(errno)?;
        let seat = |index| Mutex::new(Seat { lane: Lane::new(index), reply: Vec::new() });
        let may_spin = defuse_probe::processors() > 1;
        Ok(Lanes {
            memory,
            seats: (0..LANES).map(seat).collect(),
            hope: AtomicU32::new(if may_spin { HOPE } else { 0 }),
            may_spin,
            noticed: AtomicU32::new(0),
            counts: Counts::default(),
        })
    }

    /// A free lane for a message of `len` bytes, preferably the one that the thread had before.
    pub(super) fn seat(&self, len: usize) -> Option<MutexGuard<'_, Seat>> {
        if len > Lane::longest() {
            return None;
        }
        let first = hint();
        (0..LANES).map(|step| (first + step) % LANES).find_map(|index| {
            let seat = match self.seats[index].try_lock() {
                Ok(seat) => seat,
                // A closure that decoded a reply has panicked; the lane was done by then.
                Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
                Err(TryLockError::WouldBlock) => return None,
            };
            HINT.set(Some(index));
            Some(seat)
        })
    }

    /// Notes that a reply came late, or early enough to be looked for; there was `hope` before.
    fn note(&self, hope: u32, late: bool) {
        let now = if late { hope.saturating_sub(1) } else { HOPE };
        if self.may_spin && now != hope {
            self.hope.store(now, Ordering::Relaxed);
        }
    }

    fn has_news(&self) -> bool {
        let sent = Lane::notices(&self.memory);
        self.noticed.swap(sent, Ordering::Relaxed) != sent
    }
}

impl ClientConnection {
    /// Sends a request through a lane, and waits for its reply.
    pub(super) fn exchange<T>(
        &self,
        (lanes, mut seat): (&Lanes, MutexGuard<'_, Seat>),
        cx: &Context<'_>,
        head: &mut [u8],
        data: &[u8],
        decode: impl FnOnce(&[u8]) -> Result<T>,
    ) -> Result<T> {
        let seat = &mut *seat;
        let number = seat.lane.next_number();
        let at = std::mem::offset_of!(InHeader, unique);
        head[at..at + 8].copy_from_slice(&number.to_ne_bytes());
        lanes.counts.requests.fetch_add(1, Ordering::Relaxed);
        let sleeps = seat.lane.submit(&lanes.memory, number, &[head, data]);
        if sleeps.map_err(|why| self.break_off(why))? {
            self.ring_bell(lanes);
        }
        let len = self.await_reply(lanes, &mut seat.lane, number, cx)?;
        if seat.reply.len() < len {
            seat.reply.resize(len, 0);
        }
        seat.lane.copy(&lanes.memory, 0, &mut seat.reply[..len]);
        if lanes.has_news() || self.has_unheard() {
            self.drain();
        }
        let reply = &seat.reply[..len];
        let header = match OutHeader::read_from_prefix(reply) {
            Ok((header, _)) if header.len as usize == len && header.unique == number => header,
            _ => return Err(self.break_off(Violation("a reply that is not a FUSE message"))),
        };
        let body = &reply[HEADER_LEN..];
        Self::outcome(&header, body.len()).and_then(|_| decode(body))
    }

    fn await_reply(
        &self,
        lanes: &Lanes,
        lane: &mut Lane,
        number: u64,
        cx: &Context<'_>,
    ) -> Result<usize> {
        let mut waiting = None;
        loop {
            if let Some(len) = self.look_for_reply(lanes, lane)? {
                return Ok(len);
            }
            let waiting = waiting.get_or_insert_with(|| Waiting::of(self.timeout()));
            let slept = clock::now();
            lanes.counts.sleeps.fetch_add(1, Ordering::Relaxed);
            lane.sleep(&lanes.memory, TICK);
            let answer = lane.poll(&lanes.memory).map_err(|why| self.break_off(why))?;
            if let Some(answer) = answer {
                let hope = lanes.hope.load(Ordering::Relaxed);
                lanes.note(hope, hope > 0 || slept.elapsed_ns() >= SPIN_NS);
                return Ok(answer.len);
            }
            self.look_around(number, cx, waiting);
            // A notification, for which the server may wait, or its end.
            self.drain();
            if self.is_dead() {
                return Err(Errno::ENOTCONN);
            }
        }
    }

    /// Looks for a reply as long as that is promising.
    fn look_for_reply(&self, lanes: &Lanes, lane: &mut Lane) -> Result<Option<usize>> {
        let hope = lanes.hope.load(Ordering::Relaxed);
        let limit_ns = if hope > 0 { SPIN_NS } else { 0 };
        let begun = clock::now();
        let mut yielded = false;
        loop {
            for _ in 0..LOOKS {
                let answer = lane.poll(&lanes.memory).map_err(|why| self.break_off(why))?;
                if let Some(answer) = answer {
                    // Where processors are short, others have run meanwhile, and for longer than a wake-up takes.
                    lanes.note(hope, yielded && begun.elapsed_ns() >= SPIN_NS);
                    return Ok(Some(answer.len));
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
    fn ring_bell(&self, lanes: &Lanes) {
        lanes.counts.bells.fetch_add(1, Ordering::Relaxed);
        let _ = self.try_tell(&[0], &[]);
    }

    fn break_off(&self, why: Violation) -> Errno {
        self.end(&why.to_string());
        Errno::ENOTCONN
    }
}

impl Waiting {
    fn of(timeout: Option<Duration>) -> Waiting {
        let now = std::time::Instant::now();
        let deadline = timeout.and_then(|timeout| now.checked_add(timeout));
        Waiting { deadline, interrupted: false }
    }
}

/// The counts of a client's requests through shared memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LaneCounts {
    /// Requests through lanes.
    pub requests: u64,
    /// Messages that woke the server, one system call each.
    pub bells: u64,
    /// Reads from cached pages, without a request.
    pub page_reads: u64,
    /// Sleeps of a thread that waited for a reply, one system call each.
    pub sleeps: u64,
}

impl Counts {
    pub(super) fn now(&self) -> LaneCounts {
        let of = |count: &AtomicU64| count.load(Ordering::Relaxed);
        LaneCounts {
            requests: of(&self.requests),
            bells: of(&self.bells),
            sleeps: of(&self.sleeps),
            page_reads: 0,
        }
    }
}

thread_local! {
    /// The lane that this thread had before.
    static HINT: std::cell::Cell<Option<usize>> = const { std::cell::Cell::new(None) };
}

fn hint() -> usize {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    HINT.get().unwrap_or_else(|| NEXT.fetch_add(1, Ordering::Relaxed) as usize % LANES)
}

/// The offer of a server, until it is looked at.
#[derive(Default)]
pub(super) struct Offered(Mutex<Option<Option<OwnedFd>>>);

impl Offered {
    pub(super) fn put(&self, fd: Option<OwnedFd>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(fd);
    }

    /// The descriptor, if there was an offer and it came with one.
    pub(super) fn take(&self) -> Option<Option<OwnedFd>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}
