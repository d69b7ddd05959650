//! One connection to a server: sends requests, and receives the replies for all waiting threads.
//!
//! It has no thread of its own. A waiting thread that finds no other receiving becomes the
//! *leader*: it receives, passes replies on to other threads, and after its own reply lets another
//! thread lead. A single caller thus makes one send and one receive, and wakes no other thread.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, TryLockError};
use std::time::{Duration, Instant};

use defuse_fs::{Context, Errno, Result};
use defuse_probe::clock;
use defuse_ring::ClientLane;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendFlags, Shutdown,
    sockopt,
};
use rustix::time::{ClockId, clock_gettime};
use zerocopy::{FromBytes, IntoBytes};

use super::lanes::{ClientLanes, LaneGuard, PendingOffer, write_number};
use super::slots::{ReplyCallback, RequestSlots, SlotClaim, WaitOutcome};
use crate::reply_log::LOG;
use crate::sys::{errno, has_several_processors};
use defuse_wire::abi::{self, InHeader, Opcode, OutHeader};
use defuse_wire::reply::HEADER_LEN;
use defuse_wire::vendor;

/// The maximum length of a message from a server.
pub(super) const MESSAGE_MAX: usize = (1 << 20) + (64 << 10);
/// The interval at which a waiting thread checks for an interrupt. A signal is noticed at once: a
/// receive with a timeout is never restarted, signal(7).
pub(super) const TICK: Duration = Duration::from_millis(25);

/// The time for which a thread polls for a reply before it sleeps, in nanoseconds.
pub(super) const SPIN_NS: u64 = 50_000;
/// After this many late replies in sequence, threads no longer poll.
pub(super) const HOPE: u32 = 8;

/// A received message, as seen by the thread that waits for `Mine`.
pub(super) enum ReceiveEvent {
    /// The reply to the leader's own request: the length of the body, or the error.
    Mine(Result<usize>),
    /// A notification: its code, and the length of the body.
    Notification(i32, usize),
    /// A reply for another thread, or an unexpected one.
    Other,
    /// No message within the timeout, or a signal.
    Nothing,
}

/// The receive buffer. The thread that holds it is the leader.
pub(super) struct ReceiveBuffer {
    message: Vec<u8>,
}

impl ReceiveBuffer {
    /// The first `len` bytes after the header.
    pub(super) fn body(&self, len: usize) -> &[u8] {
        &self.message[HEADER_LEN..HEADER_LEN + len]
    }
}

/// Receives notifications: the code and the body.
pub(super) type NotificationHandler = Box<dyn Fn(i32, &[u8]) + Send + Sync>;

/// A connected socket with its requests.
pub(super) struct ClientConnection {
    socket: OwnedFd,
    slots: RequestSlots,
    incoming: Mutex<ReceiveBuffer>,
    dead: AtomicBool,
    /// The tick of the kernel's clock of the last look at the socket.
    looked: AtomicU64,
    /// The process that may use the connection: two processes cannot share its request numbers.
    process: AtomicU32,
    /// The time for a reply, after which the server counts as dead.
    timeout: Option<Duration>,
    on_notification: NotificationHandler,
    no_interrupt: AtomicBool,
    /// Descriptors received with replies, by request number.
    passed: Mutex<Vec<(u64, OwnedFd)>>,
    /// True if the server can run while a thread polls for its reply.
    may_spin: bool,
    /// Lanes in shared memory, if the server has offered them and they are used.
    lanes: OnceLock<ClientLanes>,
    offered: PendingOffer,
    /// Requests without a waiting thread since the socket was last looked at for a thread in a
    /// lane.
    unheard: AtomicU32,
    /// The number of further late replies after which threads no longer poll.
    hope: AtomicU32,
}

/// The number of replies without a waiting thread that may stay in the socket: a server waits with
/// a full one.
const UNHEARD: u32 = 32;

/// Messages that are received in a row without a look at anything else: more than a socket holds.
const MOST_DRAINED: usize = 4096;

/// Maximum number of received descriptors that wait for their requests. Others are closed.
const MOST_PASSED: usize = 64;

impl ClientConnection {
    /// Sets a socket up for [`new`](Self::new).
    pub(super) fn prepare(socket: &OwnedFd) -> Result<()> {
        sockopt::set_socket_timeout(socket, sockopt::Timeout::Recv, Some(TICK)).map_err(errno)
    }

    /// A connection over a [prepared](Self::prepare) socket.
    pub(super) fn new(
        socket: OwnedFd,
        timeout: Option<Duration>,
        on_notification: NotificationHandler,
    ) -> Self {
        let may_spin = has_several_processors();
        defuse_process::keep_id();
        ClientConnection {
            socket,
            slots: RequestSlots::new(),
            // The kernel allocates no memory for untouched pages.
            incoming: Mutex::new(ReceiveBuffer { message: vec![0; MESSAGE_MAX] }),
            dead: AtomicBool::new(false),
            looked: AtomicU64::new(0),
            process: AtomicU32::new(defuse_process::id()),
            timeout,
            on_notification,
            no_interrupt: AtomicBool::new(false),
            passed: Mutex::default(),
            may_spin,
            lanes: OnceLock::new(),
            offered: PendingOffer::default(),
            unheard: AtomicU32::new(0),
            hope: AtomicU32::new(if may_spin { HOPE } else { 0 }),
        }
    }

    pub(super) fn is_dead(&self) -> bool {
        self.dead.load(Ordering::SeqCst)
    }

    /// True if this process may use the connection. A child process may neither send requests nor
    /// read data that only the connection keeps current.
    pub(super) fn is_usable(&self) -> bool {
        self.is_own() && !self.has_ended()
    }

    /// Like [`is_dead`](Self::is_dead), before an answer from shared memory, for which nothing is
    /// sent: checks the socket once in each tick of the kernel's clock. Another server, and its
    /// replies, appear later than that.
    pub(super) fn has_ended(&self) -> bool {
        let now = clock_gettime(ClockId::MonotonicCoarse);
        let tick = (now.tv_sec as u64).wrapping_mul(1_000_000_000).wrapping_add(now.tv_nsec as u64);
        if self.looked.load(Ordering::Relaxed) != tick {
            self.looked.store(tick, Ordering::Relaxed);
            self.check_for_end();
        }
        self.is_dead()
    }

    /// From now on only the process `pid` may use the connection.
    pub(super) fn set_owner(&self, pid: u32) {
        defuse_process::keep_id();
        self.process.store(pid, Ordering::Relaxed);
    }

    pub(super) fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// True in the process that the connection belongs to, false in its child processes.
    pub(super) fn is_own(&self) -> bool {
        self.process.load(Ordering::Relaxed) == defuse_process::id()
    }

    /// Sends a request and waits for its reply. `decode` reads the body in the receive buffer.
    /// `head` has space for the number in its header, and `data` follows it.
    pub(super) fn request<T>(
        &self,
        cx: &Context<'_>,
        head: &mut [u8],
        data: &[u8],
        decode: impl FnOnce(&[u8]) -> Result<T>,
    ) -> Result<T> {
        match self.take_lane(head.len() + data.len(), ClientLane::longest())? {
            Some(lane) => self.exchange(lane, cx, head, data, decode),
            None => self.request_by_message(cx, head, data, decode),
        }
    }

    /// Returns a free lane for a request and a reply of these lengths. Requests more lanes if none
    /// is free.
    pub(super) fn take_lane(&self, request: usize, reply: usize) -> Result<Option<LaneGuard<'_>>> {
        let Some(lanes) = self.lanes.get() else { return Ok(None) };
        self.check_usable()?;
        let lane = lanes.take_lane(request, reply);
        if lane.is_none() && request.max(reply) <= ClientLane::longest() {
            self.request_lanes(lanes);
        }
        Ok(lane)
    }

    /// Like [`request`](Self::request), through the socket.
    pub(super) fn request_by_message<T>(
        &self,
        cx: &Context<'_>,
        head: &mut [u8],
        data: &[u8],
        decode: impl FnOnce(&[u8]) -> Result<T>,
    ) -> Result<T> {
        let claim = self.claim(None)?;
        self.send_claimed(claim, head, data)?;
        self.wait(claim, cx, self.timeout, decode)
    }

    /// Uses the lanes that the server has offered, from now on. Returns false if it has offered
    /// none.
    ///
    /// # Errors
    ///
    /// `EINVAL` if the memory is not as agreed, and the errors of mmap(2).
    pub(super) fn use_lanes(&self) -> Result<bool> {
        let Some(offer) = self.offered.take() else { return Ok(false) };
        // Without a descriptor, all lanes of the server are taken: messages have the same effect.
        if let Some(fd) = offer {
            self.use_these_lanes(fd)?;
        }
        Ok(true)
    }

    /// Uses lanes that no process has used.
    ///
    /// # Errors
    ///
    /// The errors of [`use_lanes`](ClientConnection::use_lanes).
    pub(super) fn use_these_lanes(&self, fd: OwnedFd) -> Result<()> {
        let _ = self.lanes.set(ClientLanes::map(fd)?);
        Ok(())
    }

    /// The lanes that the server has offered, which are not used here.
    pub(super) fn take_offered(&self) -> Option<OwnedFd> {
        self.offered.take().flatten()
    }

    pub(super) fn lanes(&self) -> Option<&ClientLanes> {
        self.lanes.get()
    }

    /// True if many replies without a waiting thread may be in the socket, so that they have to be
    /// received.
    pub(super) fn has_unheard(&self) -> bool {
        let many = self.unheard.load(Ordering::Relaxed) >= UNHEARD;
        many && self.unheard.swap(0, Ordering::Relaxed) > 0
    }

    pub(super) fn timeout(&self) -> Option<Duration> {
        self.timeout
    }

    /// Like [`request`](ClientConnection::request), for a request without data whose reply has a
    /// descriptor.
    pub(super) fn request_descriptor(&self, cx: &Context<'_>, head: &mut [u8]) -> Result<OwnedFd> {
        let claim = self.claim(None)?;
        self.send_claimed(claim, head, &[])?;
        let answered = self.wait(claim, cx, self.timeout, |_| Ok(()));
        let mut passed = self.passed.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let place = passed.iter().position(|(unique, _)| *unique == claim.unique);
        let fd = place.map(|place| passed.swap_remove(place).1);
        answered?;
        fd.ok_or(Errno::EIO)
    }

    /// Like [`request`](ClientConnection::request), for a request without data, with a timeout.
    pub(super) fn request_with_timeout<T>(
        &self,
        patience: Duration,
        cx: &Context<'_>,
        head: &mut [u8],
        decode: impl FnOnce(&[u8]) -> Result<T>,
    ) -> Result<T> {
        let claim = self.claim(None)?;
        self.send_claimed(claim, head, &[])?;
        self.wait(claim, cx, Some(patience), decode)
    }

    /// Sends two requests, of which the second has `data`, and waits for both replies.
    pub(super) fn request_pair<A, B>(
        &self,
        patience: Duration,
        cx: &Context<'_>,
        (first, decode_first): (&mut [u8], impl FnOnce(&[u8]) -> Result<A>),
        (second, data, decode_second): (&mut [u8], &[u8], impl FnOnce(&[u8]) -> Result<B>),
    ) -> Result<(A, Result<B>)> {
        let earlier = self.claim(None)?;
        self.send_claimed(earlier, first, &[])?;
        let later = self.claim(None).and_then(|later| {
            self.send_claimed(later, second, data)?;
            Ok(later)
        });
        let first = self.wait(earlier, cx, Some(patience), decode_first);
        let second = later.and_then(|later| self.wait(later, cx, Some(patience), decode_second));
        Ok((first?, second))
    }

    fn wait<T>(
        &self,
        claim: SlotClaim,
        cx: &Context<'_>,
        timeout: Option<Duration>,
        decode: impl FnOnce(&[u8]) -> Result<T>,
    ) -> Result<T> {
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        let mut waiting = ReplyWait { deadline, interrupted: false };
        loop {
            match self.incoming.try_lock() {
                Ok(mut incoming) => {
                    if let Some(result) = self.lead(&mut incoming, claim, cx, &mut waiting) {
                        let result = match result {
                            LeaderOutcome::Mine(len) => {
                                len.and_then(|len| decode(incoming.body(len)))
                            }
                            LeaderOutcome::Taken(body) => body.and_then(|body| decode(&body)),
                            LeaderOutcome::Notification(code, body) => {
                                drop(incoming);
                                self.slots.pass_on();
                                (self.on_notification)(code, &body);
                                self.handle_wait_tick(claim.unique, cx, &mut waiting);
                                continue;
                            }
                        };
                        drop(incoming);
                        self.finish(claim);
                        return result;
                    }
                }
                Err(TryLockError::Poisoned(poisoned)) => {
                    // `decode` panicked. The buffer itself is valid.
                    drop(poisoned);
                    self.incoming.clear_poison();
                }
                Err(TryLockError::WouldBlock) => {
                    if let Some(body) = self.follow(claim) {
                        self.finish(claim);
                        return body.and_then(|body| decode(&body));
                    }
                    self.handle_wait_tick(claim.unique, cx, &mut waiting);
                }
            }
        }
    }

    /// Sends a request. The thread that receives the reply, if one arrives, calls `done`.
    pub(super) fn request_deferred(
        &self,
        head: &mut [u8],
        data: &[u8],
        done: ReplyCallback,
    ) -> Result<u64> {
        let claim = self.claim(Some(done))?;
        self.send_claimed(claim, head, data)?;
        self.unheard.fetch_add(1, Ordering::Relaxed);
        Ok(claim.unique)
    }

    /// Sends a request whose reply has no body, and comes soon. The thread that finds the reply
    /// calls `done`.
    pub(super) fn request_in_background(
        &self,
        head: &mut [u8],
        mut done: ReplyCallback,
    ) -> Result<()> {
        if let Some(lanes) = self.lanes.get() {
            self.check_usable()?;
            if let Some(lane) = lanes.take_lane(head.len(), ClientLane::longest()) {
                match self.post(lane, head, done)? {
                    Some(again) => done = again,
                    None => return Ok(()),
                }
            }
        }
        self.request_deferred(head, &[], done).map(drop)
    }

    /// Sends a message without a reply.
    pub(super) fn send_oneway(&self, head: &[u8], data: &[u8]) -> Result<()> {
        self.check_usable()?;
        self.send(&[IoSlice::new(head), IoSlice::new(data)])
    }

    /// Sends a message without a reply. Fails with `EAGAIN` instead of waiting.
    pub(super) fn try_tell(&self, head: &[u8], data: &[u8]) -> Result<()> {
        self.check_usable()?;
        self.send_now(&[IoSlice::new(head), IoSlice::new(data)])
    }

    /// Notifies the server that the request `unique` was interrupted. Its reply still arrives.
    pub(super) fn interrupt(&self, unique: u64) {
        if self.no_interrupt.load(Ordering::Relaxed) || self.is_dead() {
            return;
        }
        let args = abi::InterruptIn { unique };
        let header = InHeader {
            len: (size_of::<InHeader>() + size_of::<abi::InterruptIn>()) as u32,
            opcode: Opcode::Interrupt as u32,
            // The number of the message itself names no lane.
            unique: unique << 16 >> 16 | 1,
            ..InHeader::default()
        };
        let _ = self.try_tell(header.as_bytes(), args.as_bytes());
    }

    /// Receives the available messages without waiting: replies to requests without a waiting
    /// thread, and notifications. Does nothing if another thread receives.
    pub(super) fn drain(&self) {
        for _ in 0..MOST_DRAINED {
            let Ok(mut incoming) = self.incoming.try_lock() else { break };
            let event = self.receive(&mut incoming, None, RecvFlags::DONTWAIT);
            match event {
                ReceiveEvent::Nothing => break,
                ReceiveEvent::Notification(code, len) => {
                    let body = incoming.body(len).to_vec();
                    drop(incoming);
                    (self.on_notification)(code, &body);
                }
                ReceiveEvent::Mine(_) | ReceiveEvent::Other => {}
            }
            if self.is_dead() {
                break;
            }
        }
        self.slots.pass_on();
        if let Some(Err(why)) = self.lanes.get().map(ClientLanes::take_later) {
            self.break_off(why);
        }
    }

    /// Waits for a short time until a message arrives.
    pub(super) fn wait_readable(&self) {
        let mut fds = [PollFd::new(&self.socket, PollFlags::IN)];
        let _ = poll(&mut fds, Some(&timespec(TICK)));
    }

    /// Ends the connection if the server has closed it.
    pub(super) fn check_for_end(&self) {
        let mut fds = [PollFd::new(&self.socket, PollFlags::empty())];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        if poll(&mut fds, Some(&now)).is_ok() && fds[0].revents().intersects(PollFlags::HUP) {
            self.end("the server has closed it");
        }
    }

    /// The number of requests that wait for a reply.
    pub(super) fn in_flight(&self) -> usize {
        self.slots.in_flight()
    }

    /// Ends the connection: present and future requests fail with `ENOTCONN`.
    pub(super) fn end(&self, reason: &str) {
        if !self.is_dead() {
            self.give_up(reason);
            let _ = rustix::net::shutdown(&self.socket, Shutdown::Both);
        }
    }

    /// Like [`end`](Self::end), while another process continues to use the socket.
    pub(super) fn give_up(&self, reason: &str) {
        if self.dead.swap(true, Ordering::SeqCst) {
            return;
        }
        if !reason.is_empty() {
            log::error!("the connection to a FUSE server has ended: {reason}");
        }
        self.slots.answer_all(Errno::ENOTCONN);
    }

    pub(super) fn check_usable(&self) -> Result<()> {
        if self.is_dead() || !self.is_own() { Err(Errno::ENOTCONN) } else { Ok(()) }
    }

    fn claim(&self, mut done: Option<ReplyCallback>) -> Result<SlotClaim> {
        self.check_usable()?;
        for patience in 0..1000 {
            if let Some(claim) = self.slots.claim(&mut done) {
                return Ok(claim);
            }
            if patience > 0 {
                std::thread::sleep(Duration::from_millis(1));
            }
            self.drain();
            self.check_usable()?;
        }
        Err(Errno::EAGAIN)
    }

    fn send_claimed(&self, claim: SlotClaim, head: &mut [u8], data: &[u8]) -> Result<()> {
        write_number(head, claim.unique);
        let sent = self.send(&[IoSlice::new(head), IoSlice::new(data)]);
        // If the connection ended after the slot was claimed, it has not failed this request.
        let sent = sent.and_then(|()| if self.is_dead() { Err(Errno::ENOTCONN) } else { Ok(()) });
        sent.inspect_err(|_| self.finish(claim))
    }

    fn send(&self, parts: &[IoSlice<'_>]) -> Result<()> {
        let mut since = None;
        loop {
            match self.send_now(parts) {
                Err(Errno::EAGAIN) => self.make_room(),
                other => return other,
            }
            let begun = *since.get_or_insert_with(Instant::now);
            if self.timeout.is_some_and(|timeout| begun.elapsed() > timeout) {
                self.end("the server does not receive a request in time");
            }
        }
    }

    fn send_now(&self, parts: &[IoSlice<'_>]) -> Result<()> {
        loop {
            let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
            let mut nothing = SendAncillaryBuffer::default();
            match rustix::net::sendmsg(&self.socket, parts, &mut nothing, flags) {
                Ok(_) => return Ok(()),
                Err(rustix::io::Errno::INTR) => {}
                Err(rustix::io::Errno::AGAIN) => return Err(Errno::EAGAIN),
                Err(rustix::io::Errno::MSGSIZE) => return Err(Errno::E2BIG),
                Err(rustix::io::Errno::NOBUFS) => return Err(Errno::ENOMEM),
                Err(error) => {
                    self.end(&format!("sending: {error}"));
                    return Err(Errno::ENOTCONN);
                }
            }
        }
    }

    /// Waits until the server has received a message. The server may itself wait until this process
    /// receives.
    fn make_room(&self) {
        let mut fds = [PollFd::new(&self.socket, PollFlags::IN | PollFlags::OUT)];
        let _ = poll(&mut fds, Some(&timespec(TICK)));
        if fds[0].revents().intersects(PollFlags::IN | PollFlags::HUP) {
            self.drain();
            if !fds[0].revents().contains(PollFlags::OUT) {
                // Another thread receives, and needs the processor.
                std::thread::yield_now();
            }
        }
    }

    /// Frees a slot, and makes another thread receive if one waits.
    fn finish(&self, claim: SlotClaim) {
        self.slots.free(claim);
        self.slots.pass_on();
    }

    /// Receives until there is something to do for the caller. On `None` the caller checks for
    /// interrupts and calls again.
    fn lead(
        &self,
        incoming: &mut MutexGuard<'_, ReceiveBuffer>,
        claim: SlotClaim,
        cx: &Context<'_>,
        waiting: &mut ReplyWait,
    ) -> Option<LeaderOutcome> {
        // The previous leader may have received the reply.
        if let Some(body) = self.slots.take(claim) {
            return Some(LeaderOutcome::Taken(body));
        }
        loop {
            match self.receive_soon(incoming, claim) {
                ReceiveEvent::Mine(result) => return Some(LeaderOutcome::Mine(result)),
                ReceiveEvent::Notification(code, len) => {
                    return Some(LeaderOutcome::Notification(code, incoming.body(len).to_vec()));
                }
                // A server that sends more and more does not hold up the end of the wait.
                ReceiveEvent::Other | ReceiveEvent::Nothing => {
                    self.handle_wait_tick(claim.unique, cx, waiting)
                }
            }
            if self.is_dead() {
                let body = self.slots.take(claim).unwrap_or(Err(Errno::ENOTCONN));
                return Some(LeaderOutcome::Taken(body));
            }
        }
    }

    /// Receives for the request of `claim`, and polls for its reply before sleeping, because a
    /// wake-up takes longer than most replies. After several late replies, threads no longer poll,
    /// until a reply is available at once.
    fn receive_soon(&self, incoming: &mut ReceiveBuffer, claim: SlotClaim) -> ReceiveEvent {
        let hope = self.hope.load(Ordering::Relaxed);
        let begun = clock::now();
        if hope > 0 {
            while begun.elapsed_ns() < SPIN_NS {
                match self.receive(incoming, Some(claim), RecvFlags::DONTWAIT) {
                    // Other threads run first, perhaps the server.
                    ReceiveEvent::Nothing if !self.is_dead() => std::thread::yield_now(),
                    event => {
                        self.hope.store(HOPE, Ordering::Relaxed);
                        return event;
                    }
                }
            }
        }
        let event = self.receive(incoming, Some(claim), RecvFlags::empty());
        if self.may_spin {
            let early = begun.elapsed_ns() < SPIN_NS;
            let now = if early { HOPE } else { hope.saturating_sub(1) };
            self.hope.store(now, Ordering::Relaxed);
        }
        event
    }

    /// Waits while another thread receives.
    fn follow(&self, claim: SlotClaim) -> Option<Result<Vec<u8>>> {
        self.slots.follow(claim, true);
        // The leader may have finished before it could see that this thread waits.
        if self.incoming.try_lock().is_ok() {
            self.slots.follow(claim, false);
            return None;
        }
        let waited = self.slots.wait(claim, TICK);
        self.slots.follow(claim, false);
        match waited {
            WaitOutcome::Answered(body) => Some(body),
            WaitOutcome::Lead | WaitOutcome::Nothing => None,
        }
    }

    /// Sends an interrupt to the server, and ends the connection after a timeout.
    pub(super) fn handle_wait_tick(&self, unique: u64, cx: &Context<'_>, waiting: &mut ReplyWait) {
        if !waiting.interrupted && cx.is_interrupted() {
            waiting.interrupted = true;
            self.interrupt(unique);
        }
        if waiting.deadline.is_some_and(|deadline| Instant::now() > deadline) {
            self.end("a request was not answered in time");
        }
    }

    /// Receives one message, and passes it on if it belongs to another request than `claim`.
    fn receive(
        &self,
        incoming: &mut ReceiveBuffer,
        claim: Option<SlotClaim>,
        flags: RecvFlags,
    ) -> ReceiveEvent {
        let flags = flags | RecvFlags::TRUNC;
        let mut room = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut beside = RecvAncillaryBuffer::new(&mut room);
        let mut message = [IoSliceMut::new(&mut incoming.message[..])];
        let flags = flags | RecvFlags::CMSG_CLOEXEC;
        let received = rustix::net::recvmsg(&self.socket, &mut message, &mut beside, flags);
        let fds = beside.drain().filter_map(|message| match message {
            RecvAncillaryMessage::ScmRights(fds) => Some(fds),
            _ => None,
        });
        let fd = fds.flatten().last();
        let len = match received.map(|received| received.bytes) {
            Ok(0) => {
                self.end("the server has closed it");
                return ReceiveEvent::Nothing;
            }
            Ok(len) => len,
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => {
                return ReceiveEvent::Nothing;
            }
            Err(error) => {
                self.end(&format!("receiving: {error}"));
                return ReceiveEvent::Nothing;
            }
        };
        let header = match OutHeader::read_from_prefix(&incoming.message) {
            Ok((header, _)) if len >= HEADER_LEN && header.len as usize == len => header,
            _ => {
                self.end(&format!("a message of {len} bytes is not a FUSE message"));
                return ReceiveEvent::Nothing;
            }
        };
        if len > incoming.message.len() {
            self.end(&format!("a message of {len} bytes exceeds the maximum"));
            return ReceiveEvent::Nothing;
        }
        if header.unique == 0 && header.error == vendor::OFFER {
            match self.lanes.get() {
                Some(lanes) => lanes.add(fd),
                None => self.offered.store(fd),
            }
            return ReceiveEvent::Other;
        }
        if let Some(fd) = fd.filter(|_| header.unique != 0) {
            let mut passed = self.passed.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
            passed.truncate(MOST_PASSED - 1);
            passed.push((header.unique, fd));
        }
        self.sort(incoming, &header, claim)
    }

    fn sort(
        &self,
        incoming: &ReceiveBuffer,
        header: &OutHeader,
        claim: Option<SlotClaim>,
    ) -> ReceiveEvent {
        let body = header.len as usize - HEADER_LEN;
        if header.unique == 0 {
            return ReceiveEvent::Notification(header.error, body);
        }
        if header.unique & 1 == 1 {
            // The reply to an INTERRUPT. EAGAIN (unknown request) needs no action: the request is
            // on its way, and the next check sends the INTERRUPT again.
            if header.error == -Errno::ENOSYS.raw() {
                self.no_interrupt.store(true, Ordering::Relaxed);
            }
            return ReceiveEvent::Other;
        }
        let result = Self::outcome(header, body);
        if claim.is_some_and(|claim| claim.unique == header.unique) {
            return ReceiveEvent::Mine(result);
        }
        if !self.slots.answer(header.unique, result.map(|len| incoming.body(len))) {
            log::debug!("an unexpected reply to request {}", header.unique);
        }
        ReceiveEvent::Other
    }

    /// Returns the result of a reply with `body` bytes.
    pub(super) fn outcome(header: &OutHeader, body: usize) -> Result<usize> {
        match header.error {
            0 => Ok(body),
            // The range that the kernel accepts (fuse_dev_do_write). An error has no body.
            error @ -511..=-1 if body == 0 => Err(Errno::from_raw(-error)),
            error => {
                LOG.warn(|| {
                    format!("a reply with the error {error} and {body} bytes is treated as EIO")
                });
                Err(Errno::EIO)
            }
        }
    }
}

/// The outcome of receiving as the leader.
enum LeaderOutcome {
    /// The reply is in the receive buffer.
    Mine(Result<usize>),
    /// Another thread has received the reply.
    Taken(Result<Vec<u8>>),
    /// A notification to deliver after releasing the receive buffer.
    Notification(i32, Vec<u8>),
}

pub(super) struct ReplyWait {
    pub(super) deadline: Option<Instant>,
    pub(super) interrupted: bool,
}

fn timespec(duration: Duration) -> Timespec {
    Timespec { tv_sec: duration.as_secs() as i64, tv_nsec: i64::from(duration.subsec_nanos()) }
}
