//! The work of a worker.

use std::sync::Arc;
use std::time::Duration;

use defuse_fs::{FailureDomain, Result};
use defuse_probe::clock::{self, ClockMoment};
use defuse_probe::{Op, ThreadCells};

use super::inflight::WorkerSlot;
use super::pool::WakeReason;
use super::{set_aside, signal};
use crate::dispatch::data::copy_whole;
use crate::session::SessionShared;
use crate::transport::dev::PortChannel;
use crate::transport::{ReceiveOutcome, RequestMessage, RequestReply, WorkerChannel};
use defuse_probe::WarningLimiter;
use defuse_wire::op::op_of;
use defuse_wire::request::{DecodeError, DecodeOptions, DecodedRequest, RequestBody};

/// A request that arrived within this time, in nanoseconds, had been waiting: no caller sends a
/// request so soon after the reply to another.
pub(super) const BACKLOG_NS: u64 = 1_500;
/// So many waiting requests in a row are a backlog and not chance.
pub(super) const BACKLOG_ROW: u32 = 4;
/// A worker that has found others idle for so long, in nanoseconds, is not needed.
const SURPLUS_NS: u64 = 50_000_000;
/// A request that takes longer, in nanoseconds, has slept: then more workers do more.
pub(super) const SLEPT_NS: u64 = 40_000;
/// How long a worker rests before its thread ends.
pub(super) const REST: Duration = Duration::from_secs(10);

/// A worker's thread, until it retires or the session ends.
pub(crate) fn run(shared: &Arc<SessionShared>, channel: PortChannel) {
    let Some(slot) = shared.slots.claim(signal::own_thread_id()) else {
        // The pool counts no more workers than there are places.
        log::error!("a worker without a place");
        shared.pool.record_spawn_failure();
        return;
    };
    let cells = shared.dispatcher.recorder.cells();
    let mut worker = PortWorker {
        shared,
        channel,
        slot,
        cells,
        options: shared.dispatcher.negotiated.decode_options(),
        last: clock::now(),
        backlog: 0,
        surplus_since: None,
        slept: false,
    };
    shared.stuck.enter(slot.thread(), worker.channel.reply_port());
    shared.pool.arrive();
    worker.run();
    shared.stuck.leave(slot.thread());
    slot.release();
}

struct PortWorker<'a> {
    shared: &'a Arc<SessionShared>,
    channel: PortChannel,
    slot: &'a WorkerSlot,
    cells: ThreadCells,
    options: DecodeOptions,
    /// The time of this worker's last work.
    last: ClockMoment,
    /// Number of consecutive requests that had been waiting.
    backlog: u32,
    surplus_since: Option<ClockMoment>,
    /// The last request took so long that its handler must have slept.
    slept: bool,
}

impl PortWorker<'_> {
    fn run(&mut self) {
        loop {
            if self.shared.pool.is_exiting() {
                return self.shared.pool.exit();
            }
            if self.shared.pool.leave_if_over() {
                return;
            }
            if let Some(request) =
                self.shared.set_aside.pop().or_else(|| self.shared.next_of_users())
            {
                self.handle_set_aside(request);
                continue;
            }
            // The kernel wakes sleeping workers in any case: polling would only race with them.
            let spin = self.shared.pool.idle_workers() == 1;
            match self.channel.receive(spin) {
                Ok(ReceiveOutcome::Request) => self.handle_received(),
                Ok(ReceiveOutcome::Nothing) => self.record_spurious_wake(),
                Ok(ReceiveOutcome::Unmounted) => self.shared.finish(),
                Err(errno) => {
                    log::error!("reading /dev/fuse: {errno}; the session ends");
                    self.shared.finish();
                }
            }
            if self.is_surplus() {
                match self.shared.pool.park(REST) {
                    WakeReason::Work => {}
                    WakeReason::Retire | WakeReason::Exit => return,
                }
                self.surplus_since = None;
                self.last = clock::now();
            }
        }
    }

    /// Woken by a signal, or by a request that another worker has taken.
    fn record_spurious_wake(&mut self) {
        self.last = clock::now();
        if self.shared.pool.idle_workers() < 2 {
            self.surplus_since = None;
        } else {
            self.surplus_since.get_or_insert(self.last);
        }
    }

    fn handle_received(&mut self) {
        let started = clock::now();
        let waited_ns = self.last.ns_until(started);
        let options =
            DecodeOptions { payload_in_pipe: self.channel.payload_in_pipe(), ..self.options };
        let more = self.channel.has_more();
        let (message, reply) = self.channel.exchange();
        let request = match message.parse(&options) {
            Ok(request) => request,
            Err(error) => {
                refuse(&error, reply);
                self.cells.record(Op::UNKNOWN, started.elapsed_ns(), false);
                return;
            }
        };
        let hands_over = self.shared.hands_over();
        if hands_over && self.shared.pool.begin() {
            self.shared.watchdog_waker.ring();
            self.shared.start_receiver(request.opcode);
        }
        if handle_at_once(self.shared, &request, reply) {
            let ended = clock::now();
            self.cells.record(op_of(request.opcode), started.ns_until(ended), true);
            self.last = ended;
            if hands_over {
                self.shared.pool.end();
            }
            return;
        }
        if !hands_over {
            let had_waited = more.unwrap_or(waited_ns < BACKLOG_NS);
            begin_adaptive(self.shared, had_waited, &mut self.backlog, started);
        }
        // The watchdog closes a released file's backing descriptor after about a second.
        if matches!(request.body, RequestBody::Release(_)) {
            self.shared.watchdog_waker.ring();
        }
        if self.shared.has_to_wait(&request) {
            let (uid, unique) = (request.uid, request.unique);
            let bytes = copy_request(message, &request, reply);
            return self.wait_for_others(uid, unique, bytes);
        }
        let domain = self.shared.dispatcher.failure_domain(&request);
        if let Some(domain) = domain
            && !self.shared.bulkhead.enter(domain, self.shared.pool.max())
        {
            let (unique, bytes) = (request.unique, copy_request(message, &request, reply));
            return self.hold_back(domain, unique, bytes);
        }
        self.last = handle(self.shared, &request, reply, self.slot, &self.cells, started);
        self.slept = started.ns_until(self.last) > SLEPT_NS;
        if matches!(request.body, RequestBody::Ioctl { .. }) {
            self.shared.dispatcher.finish_ioctl();
        }
        self.leave(domain);
        self.go_on();
        self.finish_request();
    }

    /// The request `unique` of a user, of which `bytes` is a copy, waits until its user holds fewer
    /// threads.
    fn wait_for_others(&mut self, uid: u32, unique: u64, bytes: Result<Vec<u8>>) {
        let port = self.channel.reply_port();
        match bytes {
            Err(errno) => drop(self.channel.reply_through(&port, unique).send_errno(errno.raw())),
            Ok(bytes) => {
                self.shared.wait_for_others(uid, self.shared.set_aside(unique, bytes, port))
            }
        }
        // Another call of the user may have ended meanwhile.
        self.go_on();
        self.last = clock::now();
        self.finish_request();
    }

    /// Handles requests that waited because their users held many threads.
    fn go_on(&mut self) {
        while let Some(request) = self.shared.next_of_users() {
            self.handle_aside(request);
        }
    }

    /// The request `unique`, of which `bytes` is a copy, waits until its part of the storage holds
    /// fewer threads.
    fn hold_back(&mut self, domain: FailureDomain, unique: u64, bytes: Result<Vec<u8>>) {
        let port = self.channel.reply_port();
        match bytes {
            Err(errno) => drop(self.channel.reply_through(&port, unique).send_errno(errno.raw())),
            Ok(bytes) => {
                self.enter_or_wait(domain, self.shared.set_aside(unique, bytes, port));
            }
        }
        self.last = clock::now();
        self.finish_request();
    }

    fn enter_or_wait(&mut self, domain: FailureDomain, request: set_aside::QueuedRequest) {
        let (shared, unique) = (self.shared, request.unique);
        match shared.bulkhead.enter_or_wait(domain, shared.pool.max(), request) {
            Some(request) => {
                self.handle_copy(&request);
                self.leave(Some(domain));
            }
            // Either this sees the interrupt, or `SessionShared::interrupt` sees the request that
            // waits.
            None if shared.slots.is_early(unique) => drop(shared.interrupt_held_back(unique)),
            None => {}
        }
    }

    /// A request that needed `domain` was handled. Handles those that may enter now.
    fn leave(&mut self, mut domain: Option<FailureDomain>) {
        while let Some(left) = domain {
            let next = self.shared.bulkhead.leave(left, self.shared.pool.max());
            let Some((entered, request)) = next else { return };
            self.handle_copy(&request);
            domain = Some(entered);
        }
    }

    fn handle_copy(&mut self, request: &set_aside::QueuedRequest) {
        let started = clock::now();
        let reply = self.channel.reply_through(&request.port, request.unique);
        match DecodedRequest::parse(&request.bytes, &self.options) {
            Ok(parsed) => {
                self.last = handle(self.shared, &parsed, reply, self.slot, &self.cells, started);
            }
            Err(error) => refuse(&error, reply),
        }
    }

    /// Handles a request that the watchdog received while every worker was stuck.
    fn handle_set_aside(&mut self, request: set_aside::QueuedRequest) {
        if self.shared.pool.begin() && self.shared.hands_over() {
            self.shared.add_for_set_aside();
        }
        self.handle_aside(request);
        self.go_on();
        self.last = clock::now();
        self.finish_request();
    }

    /// Handles a request of which there is a copy.
    fn handle_aside(&mut self, request: set_aside::QueuedRequest) {
        let parsed = DecodedRequest::parse(&request.bytes, &self.options);
        let domain = parsed.ok().and_then(|parsed| self.shared.dispatcher.failure_domain(&parsed));
        match domain {
            _ if request.interrupted => request.refuse_interrupted(),
            Some(domain) => self.enter_or_wait(domain, request),
            None => self.handle_copy(&request),
        }
    }

    fn finish_request(&mut self) {
        let others_idle = self.shared.pool.end();
        if others_idle == 0 || self.backlog > 0 {
            self.surplus_since = None;
        } else if self.surplus_since.is_none() {
            self.surplus_since = Some(self.last);
        }
    }

    fn is_surplus(&self) -> bool {
        if self.shared.hands_over() {
            return false;
        }
        // With one caller at a time, a worker that polls for requests is enough, and every other
        // sleeping worker would be woken for nothing.
        let one_is_enough = self.channel.should_poll()
            && !self.slept
            && self.shared.since_backlog_ns(self.last) > SURPLUS_NS;
        let patience = if one_is_enough { 0 } else { SURPLUS_NS };
        self.surplus_since.is_some_and(|since| since.ns_until(self.last) >= patience)
    }
}

/// A worker has taken a request. It adds another worker if several requests in a row had waited,
/// the `backlog`, and no other worker waits for them.
fn begin_adaptive(
    shared: &Arc<SessionShared>,
    had_waited: bool,
    backlog: &mut u32,
    started: ClockMoment,
) {
    if !shared.pool.begin() {
        *backlog = 0;
        return;
    }
    shared.watchdog_waker.ring();
    *backlog = if had_waited { *backlog + 1 } else { 0 };
    if *backlog >= BACKLOG_ROW {
        *backlog = 0;
        shared.record_backlog(started);
        if shared.pool.backlog_may_grow() {
            shared.add_worker();
        }
    }
}

/// Handles and counts one request. Returns when it was done.
pub(super) fn handle(
    shared: &SessionShared,
    request: &DecodedRequest<'_>,
    reply: &mut dyn RequestReply,
    slot: &WorkerSlot,
    cells: &ThreadCells,
    started: ClockMoment,
) -> ClockMoment {
    shared.slots.begin(slot, request.unique, (request.uid, request.pid));
    let outcome = shared.dispatcher.handle(request, reply, slot, started);
    slot.end();
    let ended = clock::now();
    if !outcome.deferred {
        let op = op_of(request.opcode);
        cells.record(op, started.ns_until(ended), outcome.ok);
        if outcome.bytes > 0 {
            cells.add_bytes(op, outcome.bytes);
        }
    }
    ended
}

/// Answers a request that could not be decoded, if the kernel waits for an answer.
pub(super) fn refuse(error: &DecodeError, reply: &mut dyn RequestReply) {
    static LOG: WarningLimiter = WarningLimiter::new();
    LOG.warn(|| error.to_string());
    if let Some((_, errno)) = error.reply() {
        let _ = reply.send_errno(errno.raw_os_error());
    }
}

/// Handles FORGET, BATCH_FORGET, INTERRUPT and NOTIFY_REPLY. They are short and never wait, and no
/// caller waits for them, so they are no reason for another worker.
pub(super) fn handle_at_once(
    shared: &SessionShared,
    request: &DecodedRequest<'_>,
    reply: &mut dyn RequestReply,
) -> bool {
    match &request.body {
        RequestBody::Forget(_) | RequestBody::BatchForget(_) => shared.dispatcher.forget(request),
        // No reply: EAGAIN would make the kernel send the INTERRUPT again, but only through the
        // device that the request itself came from.
        RequestBody::Interrupt(args) => shared.interrupt(args.unique),
        RequestBody::NotifyReply { data, .. } => {
            if let Err(errno) = shared.dispatcher.notify_reply(request.unique, data, reply) {
                log::warn!("the answer to a RETRIEVE is lost: {errno}");
            }
        }
        _ => return false,
    }
    true
}

/// The work of the watchdog for a request that it has received in `channel`.
pub(crate) fn set_aside_or_handle(shared: &SessionShared, channel: &mut PortChannel) {
    let options = shared.dispatcher.negotiated.decode_options();
    let options = DecodeOptions { payload_in_pipe: channel.payload_in_pipe(), ..options };
    let (message, reply) = channel.exchange();
    let request = match message.parse(&options) {
        Ok(request) => request,
        Err(error) => return refuse(&error, reply),
    };
    if handle_at_once(shared, &request, reply) {
        return;
    }
    match copy_request(message, &request, reply) {
        Ok(bytes) => {
            let (uid, has_to_wait) = (request.uid, shared.has_to_wait(&request));
            let aside = shared.set_aside(request.unique, bytes, channel.reply_port());
            match has_to_wait {
                true => shared.wait_for_others(uid, aside),
                false => shared.set_aside.push(aside),
            }
        }
        Err(errno) => drop(reply.send_errno(errno.raw())),
    }
}

/// A copy of a request with its data, wherever that is.
fn copy_request(
    message: RequestMessage<'_>,
    request: &DecodedRequest<'_>,
    reply: &mut dyn RequestReply,
) -> Result<Vec<u8>> {
    let RequestMessage::Whole(bytes) = message else { unreachable!("the device gives whole ones") };
    copy_whole(bytes, &request.body, reply)
}
