//! The threads of a session with rings; see [`crate::transport::uring`].
//!
//! Every queue has a worker from the start. If all workers of a queue are busy, another one is
//! added: by a worker if requests arrive without a pause, and by the watchdog if all workers sleep
//! in handlers. User space cannot see whether requests wait in a queue. Therefore one worker more
//! than the sleeping ones is kept, and one at a time is added. Workers stay until the end, because
//! the kernel does not return an entry, and an idle entry costs nothing.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use defuse_fs::{Caps, Errno, Ino, Result};
use defuse_probe::clock::{self, ClockMoment};
use defuse_probe::{Op, ThreadCells};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

use super::inflight::WorkerSlot;
use super::pool::{PoolGrowth, WakeReason};
use super::serve::{BACKLOG_NS, BACKLOG_ROW, REST, SLEPT_NS, handle, handle_at_once, refuse};
use super::signal;
use crate::session::SessionShared;
use crate::transport::dev::PortChannel;
use crate::transport::uring::{FinishedAnswers, UringChannel, UringEntry, UringExchange};
use crate::transport::{ReceiveOutcome, WorkerChannel};
use defuse_wire::op::op_of;
use defuse_wire::request::{DecodeOptions, RequestBody};

/// Maximum number of workers of a queue that a backlog adds.
const PARALLEL: usize = 2;
/// Number of consecutive messages of the device that count as a storm of FORGETs. The thread then
/// pauses after each message, since every message would wake a thread that sleeps in read(2). It
/// does not pause earlier, because FORGET may free the space of a removed file.
const STORM: u32 = 64;
/// Maximum time between two consecutive messages, in nanoseconds.
const STORM_GAP_NS: u64 = 5_000_000;
/// Duration of the pause.
const DEVICE_REST: Duration = Duration::from_millis(1);

/// Number of checks by the watchdog after which it nudges a queue with sleeping handlers.
const NUDGE_TICKS: u64 = 50;

/// The queues of a session.
pub(crate) struct SessionRings {
    device: Arc<OwnedFd>,
    queues: Box<[UringQueue]>,
    /// Size of the payload of an entry in bytes.
    payload: usize,
    /// Maximum number of threads with rings. The others serve the entries of deferred replies.
    most: usize,
    answers: Arc<FinishedAnswers>,
    /// The file of the last OPEN, READ or WRITE, 0 before the first, for [`nudge`].
    file: AtomicU64,
    /// Requests that the thread of deferred replies received.
    handed: Mutex<VecDeque<UringEntry>>,
}

/// The workers of one queue.
#[derive(Default)]
#[repr(align(64))]
struct UringQueue {
    threads: AtomicUsize,
    /// A thread was added and has not begun to wait.
    is_growing: AtomicBool,
    /// The threads that wait for a request.
    idle: AtomicUsize,
    served: AtomicU64,
    /// The value of `served` at the watchdog's last check.
    seen: AtomicU64,
    /// Number of consecutive checks that found it unchanged.
    still: AtomicU64,
}

impl SessionRings {
    pub(crate) fn new(
        (device, queues): (&Arc<OwnedFd>, usize),
        payload: usize,
        max_workers: usize,
        caps: &Caps,
        defers: bool,
    ) -> Result<Self> {
        // With deferred replies, a quarter of the workers serves their entries.
        let helpers = if defers { (max_workers / 4).max(1) } else { 0 };
        Ok(SessionRings {
            device: Arc::clone(device),
            queues: (0..queues).map(|_| UringQueue::default()).collect(),
            payload,
            most: (max_workers - helpers).max(queues),
            answers: Arc::new(FinishedAnswers::new(caps.submits)?),
            file: AtomicU64::new(0),
            handed: Mutex::default(),
        })
    }

    fn lock_handed(&self) -> MutexGuard<'_, VecDeque<UringEntry>> {
        self.handed.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Drops the requests that no thread will handle.
    pub(crate) fn close(&self) {
        self.answers.close();
        self.lock_handed().clear();
    }
}

/// Starts the threads of a session with rings. Returns when every queue has an entry in the kernel.
pub(crate) fn start(shared: &Arc<SessionShared>, rings: &SessionRings) -> Result<()> {
    let (ready, reports) = channel();
    for qid in 0..rings.queues.len() {
        if shared.pool.grow_new() != PoolGrowth::Spawn {
            return Err(Errno::EAGAIN);
        }
        spawn(shared, qid, Some(ready.clone()))?;
    }
    drop(ready);
    for _ in 0..rings.queues.len() {
        reports.recv().unwrap_or(Err(Errno::EIO))?;
    }
    let own = Arc::clone(shared);
    shared.spawn("defuse-device", move || read_device(&own))?;
    let own = Arc::clone(shared);
    let (answers, device) = (Arc::clone(&rings.answers), Arc::clone(&rings.device));
    shared.spawn("defuse-answers", move || {
        if let Err(errno) = answers.run(&device, |entry| hand(&own, entry)) {
            log::error!("io_uring: {errno}; the session ends");
            own.finish();
        }
    })
}

fn spawn(shared: &Arc<SessionShared>, qid: usize, ready: Option<Sender<Result<()>>>) -> Result<()> {
    let own = Arc::clone(shared);
    let started = shared.spawn("defuse-ring", move || run(&own, qid, ready));
    if started.is_err() {
        shared.pool.record_spawn_failure();
    }
    started
}

/// Adds a worker to the queue `qid`, within the limits.
fn add_worker(shared: &Arc<SessionShared>, rings: &SessionRings, qid: usize) {
    let queue = &rings.queues[qid];
    // The thread needs the queue's processor, which may take long. Those added meanwhile would stay
    // idle, and leave too few for the other queues.
    if queue.is_growing.swap(true, Ordering::SeqCst) {
        return;
    }
    if !spawn_within_limits(shared, rings, qid) {
        queue.is_growing.store(false, Ordering::SeqCst);
    }
}

/// False if there is no further worker.
fn spawn_within_limits(shared: &Arc<SessionShared>, rings: &SessionRings, qid: usize) -> bool {
    let waiting: usize = rings.queues.iter().map(|q| q.threads.load(Ordering::Relaxed)).sum();
    if waiting >= rings.most || shared.pool.grow_new() != PoolGrowth::Spawn {
        return false;
    }
    rings.queues[qid].threads.fetch_add(1, Ordering::SeqCst);
    let started = spawn(shared, qid, None);
    if let Err(errno) = &started {
        rings.queues[qid].threads.fetch_sub(1, Ordering::SeqCst);
        log::warn!("no further worker: {errno}");
    }
    started.is_ok()
}

/// The watchdog's check of the queues.
pub(crate) fn tick(shared: &Arc<SessionShared>, rings: &SessionRings) {
    for (qid, queue) in rings.queues.iter().enumerate() {
        let served = queue.served.load(Ordering::Relaxed);
        if queue.seen.swap(served, Ordering::Relaxed) != served {
            queue.still.store(0, Ordering::Relaxed);
            continue;
        }
        let still = queue.still.fetch_add(1, Ordering::Relaxed) + 1;
        let idle = queue.idle.load(Ordering::SeqCst);
        if idle == 0 {
            add_worker(shared, rings, qid);
        } else if still.is_multiple_of(NUDGE_TICKS) && idle < queue.threads.load(Ordering::SeqCst) {
            nudge(shared, rings, qid);
        }
    }
    if !rings.lock_handed().is_empty() {
        shared.add_worker();
    }
}

/// The thread of a worker. Returns at the end of the session.
fn run(shared: &Arc<SessionShared>, qid: usize, ready: Option<Sender<Result<()>>>) {
    let Some(rings) = &shared.rings else { return };
    bind(qid);
    let queue = &rings.queues[qid];
    let first = ready.is_some();
    let own = Arc::clone(shared);
    let nudge = Box::new(move || {
        if let Some(rings) = &own.rings {
            nudge(&own, rings, qid);
        }
    });
    let answers = Arc::clone(&rings.answers);
    let made = UringChannel::new(&rings.device, qid as u16, rings.payload, answers, nudge);
    let (channel, slot) = match (made, shared.slots.claim(signal::own_thread_id())) {
        (Ok(channel), Some(slot)) => (channel, slot),
        (made, _) => {
            let errno = made.err().unwrap_or(Errno::EAGAIN);
            shared.pool.record_spawn_failure();
            match ready {
                Some(ready) => drop(ready.send(Err(errno))),
                None => {
                    queue.threads.fetch_sub(1, Ordering::SeqCst);
                    queue.is_growing.store(false, Ordering::SeqCst);
                    log::warn!("no further ring: {errno}");
                }
            }
            return;
        }
    };
    shared.pool.arrive();
    if first {
        queue.threads.fetch_add(1, Ordering::SeqCst);
    }
    queue.idle.fetch_add(1, Ordering::SeqCst);
    match ready {
        Some(ready) => drop(ready.send(Ok(()))),
        None => queue.is_growing.store(false, Ordering::SeqCst),
    }
    let mut worker = UringWorker {
        shared,
        rings,
        qid,
        queue,
        channel,
        slot,
        cells: shared.dispatcher.recorder.cells(),
        options: shared.dispatcher.negotiated.decode_options(),
        last: clock::now(),
        backlog: 0,
        slept: false,
    };
    worker.run();
    slot.release();
}

/// Binds the calling thread to the processor of its queue. Switching to it there costs a fraction
/// of waking another processor. Keeps to the processors that the program was started on.
fn bind(qid: usize) {
    let Ok(allowed) = sched_getaffinity(None) else { return };
    if qid < CpuSet::MAX_CPU && allowed.is_set(qid) {
        let mut one = CpuSet::new();
        one.set(qid);
        let _ = sched_setaffinity(None, &one);
    }
}

/// Makes the kernel send a request to the queue `qid`, so that it also sends the waiting ones: it
/// assigns them to an entry whose reply it takes, never to a new one. The request is the reply to a
/// RETRIEVE, for a regular file that the kernel knows.
fn nudge(shared: &SessionShared, rings: &SessionRings, qid: usize) {
    let file = rings.file.load(Ordering::Relaxed);
    if file == 0 {
        return;
    }
    let before = sched_getaffinity(None);
    bind(qid);
    if let Err(errno) = shared.dispatcher.notify.nudge(Ino(file)) {
        log::debug!("queue {qid} could not be nudged: {errno}");
    }
    if let Ok(before) = before {
        let _ = sched_setaffinity(None, &before);
    }
}

struct UringWorker<'a> {
    shared: &'a Arc<SessionShared>,
    rings: &'a SessionRings,
    qid: usize,
    queue: &'a UringQueue,
    channel: UringChannel,
    slot: &'a WorkerSlot,
    cells: ThreadCells,
    options: DecodeOptions,
    /// Time of this worker's last request.
    last: ClockMoment,
    /// Number of consecutive requests that had been waiting.
    backlog: u32,
    /// The last request took so long that its handler probably slept.
    slept: bool,
}

impl UringWorker<'_> {
    fn run(&mut self) {
        loop {
            if self.shared.pool.is_exiting() {
                return self.shared.pool.exit();
            }
            // Polling has no benefit, because the caller runs on the same processor.
            match self.channel.receive(false) {
                Ok(ReceiveOutcome::Request) => self.handle_received(),
                Ok(ReceiveOutcome::Nothing) => {}
                Ok(ReceiveOutcome::Unmounted) => self.shared.finish(),
                Err(errno) => {
                    log::error!("io_uring: {errno}; the session ends");
                    self.shared.finish();
                }
            }
        }
    }

    fn handle_received(&mut self) {
        let started = clock::now();
        let waited_ns = self.last.ns_until(started);
        let (message, reply) = self.channel.exchange();
        let request = match message.parse(&self.options) {
            Ok(request) => request,
            Err(error) => {
                refuse(&error, reply);
                self.cells.record(Op::UNKNOWN, started.elapsed_ns(), false);
                return;
            }
        };
        if handle_at_once(self.shared, &request, reply) {
            self.last = clock::now();
            self.cells.record(op_of(request.opcode), started.ns_until(self.last), true);
            return;
        }
        if let RequestBody::Open(_)
        | RequestBody::Read(_)
        | RequestBody::Write { .. }
        | RequestBody::Setlkw(_) = request.body
        {
            self.rings.file.store(request.nodeid, Ordering::Relaxed);
        }
        self.shared.pool.begin();
        self.queue.served.fetch_add(1, Ordering::Relaxed);
        if self.queue.idle.fetch_sub(1, Ordering::SeqCst) == 1 {
            self.shared.watchdog_waker.ring();
            self.backlog = if waited_ns < BACKLOG_NS { self.backlog + 1 } else { 0 };
            if self.backlog >= BACKLOG_ROW {
                self.backlog = 0;
                // Beyond a few, more workers help only if handlers sleep.
                if self.slept || self.queue.threads.load(Ordering::Relaxed) < PARALLEL {
                    add_worker(self.shared, self.rings, self.qid);
                }
            }
        } else {
            self.backlog = 0;
        }
        self.last = handle(self.shared, &request, reply, self.slot, &self.cells, started);
        self.slept = started.ns_until(self.last) > SLEPT_NS;
        self.queue.idle.fetch_add(1, Ordering::SeqCst);
        self.shared.pool.end();
    }
}

/// Passes a request that the thread of deferred replies received to another worker.
fn hand(shared: &Arc<SessionShared>, entry: UringEntry) {
    let Some(rings) = &shared.rings else { return };
    rings.lock_handed().push_back(entry);
    shared.add_worker();
    // At the maximum number of workers, a worker that is about to park has missed the entry.
    shared.watchdog_waker.ring();
}

/// A worker without a ring, which handles the requests that other threads pass to it.
pub(crate) fn run_helper(shared: &Arc<SessionShared>) {
    let (Some(rings), Some(slot)) = (&shared.rings, shared.slots.claim(signal::own_thread_id()))
    else {
        return shared.pool.record_spawn_failure();
    };
    let cells = shared.dispatcher.recorder.cells();
    let options = shared.dispatcher.negotiated.decode_options();
    let mut exchange = UringExchange::new(Arc::clone(&rings.answers));
    shared.pool.arrive();
    loop {
        let next = rings.lock_handed().pop_front();
        let Some(entry) = next else {
            match shared.pool.rest(REST) {
                WakeReason::Work => continue,
                WakeReason::Retire | WakeReason::Exit => break,
            }
        };
        shared.pool.begin();
        let started = clock::now();
        exchange.begin(entry);
        let (message, reply) = exchange.parts();
        match message.parse(&options) {
            Ok(request) if handle_at_once(shared, &request, reply) => {}
            Ok(request) => drop(handle(shared, &request, reply, slot, &cells, started)),
            Err(error) => refuse(&error, reply),
        }
        if let Some(entry) = exchange.finish() {
            let _ = rings.answers.hand_over(entry);
        }
        shared.pool.end();
    }
    slot.release();
}

/// Reads the requests that do not come over rings, FORGET and INTERRUPT, until the session ends.
fn read_device(shared: &Arc<SessionShared>) {
    let Some(slot) = shared.slots.claim(signal::own_thread_id()) else { return };
    let cells = shared.dispatcher.recorder.cells();
    let mut channel = shared.worker_channel();
    let (mut last, mut row) = (clock::now(), 0_u32);
    let options = shared.dispatcher.negotiated.decode_options();
    while !shared.pool.is_exiting() {
        match channel.receive(false) {
            Ok(ReceiveOutcome::Request) => {
                serve_device(shared, &mut channel, &options, slot, &cells)
            }
            Ok(ReceiveOutcome::Nothing) => continue,
            Ok(ReceiveOutcome::Unmounted) => shared.finish(),
            Err(errno) => {
                log::error!("reading /dev/fuse: {errno}; the session ends");
                shared.finish();
            }
        }
        row = if last.elapsed_ns() < STORM_GAP_NS { row + 1 } else { 0 };
        last = clock::now();
        if row > STORM {
            std::thread::sleep(DEVICE_REST);
        }
    }
    slot.release();
}

fn serve_device(
    shared: &SessionShared,
    channel: &mut PortChannel,
    options: &DecodeOptions,
    slot: &WorkerSlot,
    cells: &ThreadCells,
) {
    let started = clock::now();
    let (message, reply) = channel.exchange();
    match message.parse(options) {
        Ok(request) if handle_at_once(shared, &request, reply) => {
            cells.record(op_of(request.opcode), started.elapsed_ns(), true);
        }
        // When the queues are ready, the kernel sends no other requests here.
        Ok(request) => drop(handle(shared, &request, reply, slot, cells, started)),
        Err(error) => refuse(&error, reply),
    }
}
