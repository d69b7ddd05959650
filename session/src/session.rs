//! A session: the requests of one frontend, a mount or a client, from INIT to the end.

use std::os::fd::OwnedFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use defuse_fs::{Caps, Errno, FileSystem, Notify, Origin, Result};
use defuse_probe::StatsSnapshot;
use defuse_probe::clock::{self, ClockMoment};
use zerocopy::IntoBytes;

use crate::SpliceLimits;
use crate::dispatch::{ClientHooks, Dispatcher, SessionPeer};
use crate::init::{InitError, MAX_IO, NegotiatedInit, WORKERS_MOST, negotiate};
use crate::inode_bound::PRUNE_MINOR;
use crate::notify::KernelNotify;
use crate::options::{IoUring, SessionOptions, ThreadPolicy};
use crate::transport::dev::{ChannelLimits, DeviceSource, PortChannel};
use crate::transport::uring;
use crate::transport::{
    ReceiveOutcome, ReplyPort, RequestMessage, RequestPort, RequestSource, WorkerChannel,
};
use crate::user_share::CountGuard;
use crate::workers::bulkhead::Bulkhead;
use crate::workers::fair::{FairQueue, ThreadBudget};
use crate::workers::inflight::WorkerSlots;
use crate::workers::pool::{PoolGrowth, PoolLimits, WorkerPool};
use crate::workers::ring::SessionRings;
use crate::workers::set_aside::{self, RequestBacklog};
use crate::workers::stuck::StuckWorkers;
use crate::workers::watchdog::{SharedWatchdog, WatchdogWaker};
use crate::workers::{policy, ring, serve, signal, watchdog};
use defuse_probe::WarningLimiter;
use defuse_wire::abi::{self, InitIn, Opcode};
use defuse_wire::request::{DecodeOptions, DecodedRequest, RequestBody};
use defuse_wire::vendor::SOCKET_IO_MAX;

/// Time between two interrupts of threads that shall end: the first may come before their system
/// call.
const INTERRUPT_EVERY: Duration = Duration::from_millis(1);

/// The fewest threads beyond the maximum while all are stuck.
const FURTHER: usize = 16;

/// Limits warnings about workers that are stuck.
static STUCK: WarningLimiter = WarningLimiter::new();

/// A session could not be started.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// INIT failed.
    #[error(transparent)]
    Init(#[from] InitError),
    /// The device failed before INIT: most often, it was unmounted at once.
    #[error("/dev/fuse: {0} while waiting for the kernel's INIT")]
    Device(Errno),
    /// The first message of the device was not INIT.
    #[error("/dev/fuse: {0} where INIT was expected; does another process serve the mount?")]
    NotInit(String),
    /// Rings were required.
    #[error("io_uring cannot be used: {0}; or mount without the option io_uring")]
    Rings(&'static str),
    /// A bound on the kernel's inodes was required.
    #[error(
        "max_inodes needs Linux 6.18, whose protocol is 7.{PRUNE_MINOR}; this kernel has 7.{0}: mount without it"
    )]
    NoBound(u32),
    /// No thread could be started.
    #[error("no worker thread could be started: {0}; raise the limit of processes")]
    Thread(Errno),
}

/// A mount or a client that is being served. Dropping it does not end it: unmount, then
/// [`wait`](Session::wait).
pub struct Session {
    shared: Arc<SessionShared>,
}

impl Session {
    /// Answers INIT on `device`, an open /dev/fuse that has just been mounted, and starts to serve
    /// `fs`. When this returns, the mount is ready.
    pub fn start(
        device: OwnedFd,
        fs: Arc<dyn FileSystem>,
        options: &SessionOptions,
    ) -> std::result::Result<Session, StartError> {
        signal::install().map_err(StartError::Device)?;
        let device = Arc::new(device);
        let line: Arc<dyn RequestSource> = Arc::new(DeviceSource::new(Arc::clone(&device)));
        let agreed = handshake(&line, Some(&device), &mut |_| (fs.caps(), options.clone()))?;
        // A kernel's mount lives long enough for it; a connection may not.
        clock::calibrate();
        Session::begin(&line, SessionPeer::Kernel(device), fs, agreed, options)
    }

    /// Answers INIT like [`start`](Session::start), and serves the file system that `choose`
    /// returns for the kernel's INIT: for file systems whose properties depend on the kernel's.
    /// `choose` is called at most once.
    ///
    /// # Errors
    ///
    /// The errors of [`start`](Session::start).
    pub fn start_chosen(
        device: OwnedFd,
        choose: impl FnOnce(&InitIn) -> (Arc<dyn FileSystem>, SessionOptions),
    ) -> std::result::Result<Session, StartError> {
        let device = Arc::new(device);
        let line: Arc<dyn RequestSource> = Arc::new(DeviceSource::new(Arc::clone(&device)));
        Session::begin_chosen(&line, SessionPeer::Kernel(device), choose)
    }

    /// [`start_chosen`](Session::start_chosen) on `line`, at whose other end is a client in the
    /// kernel's place.
    ///
    /// # Errors
    ///
    /// The errors of [`start`](Session::start).
    pub fn start_chosen_on(
        line: &Arc<dyn RequestSource>,
        client: ClientHooks,
        choose: impl FnOnce(&InitIn) -> (Arc<dyn FileSystem>, SessionOptions),
    ) -> std::result::Result<Session, StartError> {
        Session::begin_chosen(line, SessionPeer::Client(client), choose)
    }

    fn begin_chosen(
        line: &Arc<dyn RequestSource>,
        peer: SessionPeer,
        choose: impl FnOnce(&InitIn) -> (Arc<dyn FileSystem>, SessionOptions),
    ) -> std::result::Result<Session, StartError> {
        signal::install().map_err(StartError::Device)?;
        let device = match &peer {
            SessionPeer::Kernel(device) => Some(Arc::clone(device)),
            SessionPeer::Client(_) => None,
        };
        let (mut choose, mut chosen) = (Some(choose), None);
        let agreed = handshake(line, device.as_ref(), &mut |init| {
            if let Some(choose) = choose.take() {
                chosen = Some(choose(init));
            }
            let of = |(fs, options): &(Arc<dyn FileSystem>, SessionOptions)| {
                (fs.caps(), options.clone())
            };
            chosen.as_ref().map_or_else(Default::default, of)
        })?;
        let (fs, options) = chosen.ok_or(StartError::Device(Errno::EPROTO))?;
        if device.is_some() {
            clock::calibrate();
        }
        Session::begin(line, peer, fs, agreed, &options)
    }

    /// Answers INIT on `line`, at whose other end is a client in the kernel's place, and starts to
    /// serve `fs`.
    ///
    /// # Errors
    ///
    /// The errors of [`start`](Session::start).
    pub fn start_on(
        line: Arc<dyn RequestSource>,
        fs: Arc<dyn FileSystem>,
        options: &SessionOptions,
        client: ClientHooks,
    ) -> std::result::Result<Session, StartError> {
        signal::install().map_err(StartError::Device)?;
        let agreed = handshake(&line, None, &mut |_| (fs.caps(), options.clone()))?;
        Session::begin(&line, SessionPeer::Client(client), fs, agreed, options)
    }

    fn begin(
        line: &Arc<dyn RequestSource>,
        peer: SessionPeer,
        fs: Arc<dyn FileSystem>,
        agreed: HandshakeOutcome,
        options: &SessionOptions,
    ) -> std::result::Result<Session, StartError> {
        let HandshakeOutcome { mut negotiated, port, mut plan } = agreed;
        let reply_port = Arc::clone(&port) as Arc<dyn ReplyPort>;
        let is_kernel = matches!(peer, SessionPeer::Kernel(_));
        let notify = Arc::new(KernelNotify::new(&reply_port, negotiated.minor, is_kernel));
        let origin = Origin::new();
        fs.attach(origin, Arc::clone(&notify) as Arc<dyn Notify>);
        loop {
            let dispatcher = Dispatcher::new(
                (Arc::clone(&fs), origin),
                Arc::clone(&notify),
                negotiated.clone(),
                options,
                peer.clone(),
            );
            let queues = match (&plan, &peer) {
                (Some(plan), SessionPeer::Kernel(device)) => Some((plan.queues, device)),
                _ => None,
            };
            let shared = SessionShared::new(dispatcher, options, line, &port, queues);
            let shared = Arc::new(shared.map_err(StartError::Thread)?);
            *lock(&shared.view.0) = ViewState::Running(Arc::downgrade(&shared));
            let watchdog = match &peer {
                SessionPeer::Client(client) => client.watchdog.as_ref(),
                SessionPeer::Kernel(_) => None,
            };
            let failed = match shared.start(watchdog) {
                Ok(()) => return Ok(Session { shared }),
                Err(errno) => errno,
            };
            shared.finish();
            drop(lock(&shared.caller_end).take());
            shared.join(Duration::from_secs(2));
            let Some(mut refused) = plan.take() else { return Err(StartError::Thread(failed)) };
            // Requests wait until the kernel knows that there will be no rings.
            refused.probe.refuse();
            if options.io_uring == IoUring::Required {
                return Err(StartError::Rings(uring::refusal(failed)));
            }
            negotiated.refuse_rings(uring::refusal(failed));
        }
    }

    /// The agreement with the kernel.
    pub fn negotiated_init(&self) -> &NegotiatedInit {
        &self.shared.dispatcher.negotiated
    }

    /// Returns the notifier for the kernel's caches.
    pub fn notifier(&self) -> Arc<dyn Notify> {
        Arc::clone(&self.shared.dispatcher.notify) as Arc<dyn Notify>
    }

    /// A handle to read statistics from another thread.
    pub fn statistics(&self) -> SessionStatistics {
        SessionStatistics { view: Arc::clone(&self.shared.view) }
    }

    /// A handle to change the number of threads from another thread.
    pub fn workers(&self) -> WorkerControl {
        WorkerControl { view: Arc::clone(&self.shared.view) }
    }

    /// The worker for the calling thread. `None` without
    /// [`caller_serves`](SessionOptions::caller_serves), over io_uring, and after the first call.
    pub fn caller_worker(&self) -> Option<CallerWorker> {
        let end = lock(&self.shared.caller_end).take()?;
        Some(CallerWorker { shared: Arc::clone(&self.shared), end })
    }

    /// Waits for the end of the connection, and makes nothing durable; [`wait`](Session::wait)
    /// does.
    pub fn wait_for_end(&self) {
        self.shared.wait_for_end();
    }

    /// A handle that ends the session from another thread.
    pub fn stopper(&self) -> SessionStopper {
        SessionStopper { view: Arc::clone(&self.shared.view) }
    }

    /// Waits until the kernel ends the session (unmount or abort), ends the workers, and lets the
    /// file system make everything durable. Workers that are stuck in a handler are left behind
    /// after two seconds. Otherwise nothing of the session keeps the file system any more, neither
    /// [`SessionStatistics`] nor [`WorkerControl`], so that it ends with its last owner.
    pub fn wait(self) -> SessionEnd {
        self.shared.wait_for_end();
        self.shared.dispatcher.interrupt_all_deferred();
        self.shared.dispatcher.notify.close();
        let clean = self.shared.join(Duration::from_secs(2));
        if !clean {
            log::warn!("some handlers have not returned after the end of the session");
        }
        let Dispatcher { fs, origin, .. } = &*self.shared.dispatcher;
        let detached = catch_unwind(AssertUnwindSafe(|| fs.detach(*origin)));
        self.shared.view.end();
        SessionEnd { clean, durable: detached.unwrap_or(Err(Errno::EIO)) }
    }
}

/// The work of a session's first worker, for the thread that has it.
pub struct CallerWorker {
    shared: Arc<SessionShared>,
    end: ThreadEndGuard,
}

impl CallerWorker {
    /// Receives and handles requests, and returns when the session ends: the client ends it, or
    /// [`Session::wait`] on another thread after [`SessionStopper::stop`].
    pub fn run(self) {
        serve::run(&self.shared, self.shared.worker_channel());
        drop(self.end);
        // There may be other workers by now, and fewer than before.
        self.shared.wait_for_end();
    }
}

/// The end of a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub struct SessionEnd {
    /// All handlers have returned.
    pub clean: bool,
    /// The result of [`FileSystem::detach`]: an error means that acknowledged data could not be
    /// made durable. `EIO` after a panic.
    pub durable: Result<()>,
}

/// The session as handles on other threads see it. They do not keep the file system alive, because
/// dropping it may do more than end its last session.
struct SessionView(Mutex<ViewState>);

enum ViewState {
    /// Until the end of the session.
    Running(Weak<SessionShared>),
    /// The statistics at the end.
    Ended(Box<StatsSnapshot>),
}

impl SessionView {
    /// Calls `look` while the session cannot end. After the end, fails with the statistics of that
    /// time.
    fn look<T>(
        &self,
        look: impl FnOnce(&SessionShared) -> T,
    ) -> std::result::Result<T, StatsSnapshot> {
        match &*lock(&self.0) {
            ViewState::Running(shared) => {
                shared.upgrade().map(|shared| look(&shared)).ok_or_else(StatsSnapshot::default)
            }
            ViewState::Ended(last) => Err(last.as_ref().clone()),
        }
    }

    /// Drops the reference to the session.
    fn end(&self) {
        let last = self.look(SessionShared::snapshot).unwrap_or_else(|ended| ended);
        *lock(&self.0) = ViewState::Ended(Box::new(last));
    }
}

/// Reads the statistics of a session, also after its end.
#[derive(Clone)]
pub struct SessionStatistics {
    view: Arc<SessionView>,
}

impl SessionStatistics {
    /// Returns the statistics so far, with the numbers of workers as gauges and the figures of the
    /// file system. After the end of the session, returns the final statistics.
    pub fn snapshot(&self) -> StatsSnapshot {
        self.view.look(SessionShared::snapshot).unwrap_or_else(|ended| ended)
    }
}

/// Ends a session that the kernel has not ended.
#[derive(Clone)]
pub struct SessionStopper {
    view: Arc<SessionView>,
}

impl SessionStopper {
    /// Lets [`Session::wait`] return as if the kernel had ended the session. Its threads receive no
    /// further request; the mount stays, and its requests fail once the last descriptor of the
    /// device is closed.
    pub fn stop(&self) {
        let _ = self.view.look(SessionShared::finish);
    }
}

/// Changes the number of threads of a session.
#[derive(Clone)]
pub struct WorkerControl {
    view: Arc<SessionView>,
}

/// The number of threads was not changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ResizeError {
    /// A number outside of the permitted range.
    #[error("there are no {0} workers: write a number from 1 to {WORKERS_MOST}")]
    OutOfRange(usize),
    /// Each queue keeps its threads until the end.
    #[error(
        "its requests come over io_uring, where threads belong to processors: mount it again with workers=N, or with no_io_uring"
    )]
    OverRings,
    /// The session has ended.
    #[error("the session has ended")]
    Ended,
}

impl WorkerControl {
    /// Changes the maximum number of threads to `max`. Those beyond it end after their request.
    /// `max_background` stays as it is.
    pub fn resize(&self, max: usize) -> std::result::Result<(), ResizeError> {
        if !(1..=WORKERS_MOST).contains(&max) {
            return Err(ResizeError::OutOfRange(max));
        }
        let resized = self.view.look(|shared| shared.resize(max));
        resized.unwrap_or(Err(ResizeError::Ended))
    }
}

/// The state that all threads of a session share.
pub(crate) struct SessionShared {
    pub(crate) dispatcher: Arc<Dispatcher>,
    pub(crate) pool: WorkerPool,
    pub(crate) slots: WorkerSlots,
    pub(crate) watchdog_waker: WatchdogWaker,
    pub(crate) set_aside: RequestBacklog,
    pub(crate) stuck: StuckWorkers,
    pub(crate) bulkhead: Bulkhead,
    pub(crate) fair: FairQueue,
    /// Threads beyond the maximum that there may be while all are stuck; 0 where all requests are
    /// of one user.
    further: usize,
    /// The workers' source of requests.
    line: Arc<dyn RequestSource>,
    /// The rings, if requests arrive over rings and not over the device.
    pub(crate) rings: Option<SessionRings>,
    limits: ChannelLimits,
    clone_fd: bool,
    /// An interrupted request ends the system call of its handler.
    pub(crate) signals: bool,
    policy: ThreadPolicy,
    /// A file in the format of `/proc/pressure/memory`.
    pub(crate) memory_pressure: PathBuf,
    /// The time for which a worker polls for a request before it sleeps, in nanoseconds.
    spin_ns: u64,
    /// The start of the session, and the nanoseconds from then to the last backlog.
    begun: ClockMoment,
    backlog_ns: AtomicU64,
    /// The notifier's way to the client, also to see whether requests wait.
    port: Arc<dyn RequestPort>,
    /// The watchdog's own channel, used when all workers are stuck.
    emergency: Mutex<Option<PortChannel>>,
    threads: Mutex<Vec<SessionThread>>,
    thread_ends: Arc<ThreadEndCount>,
    caller_serves: bool,
    /// The end of the worker on the caller's thread, until that thread takes it.
    caller_end: Mutex<Option<ThreadEndGuard>>,
    end: Mutex<bool>,
    ended: Condvar,
    view: Arc<SessionView>,
}

impl SessionShared {
    fn new(
        dispatcher: Dispatcher,
        options: &SessionOptions,
        line: &Arc<dyn RequestSource>,
        port: &Arc<dyn RequestPort>,
        queues: Option<(usize, &Arc<OwnedFd>)>,
    ) -> Result<Self> {
        let negotiated = &dispatcher.negotiated;
        let max = negotiated.max_workers;
        let processors = defuse_probe::processors();
        // On a single processor the caller could not run meanwhile.
        let spins = processors > 1 && options.policy.owns_descriptors();
        let spin_ns = if spins { options.spin.as_nanos() as u64 } else { 0 };
        let payload = negotiated.max_write.max(negotiated.max_read);
        let payload = payload.max(abi::FUSE_MIN_READ_BUFFER);
        let stuck = StuckWorkers::new(dispatcher.is_of_kernel());
        let rings = queues.map(|(queues, device)| {
            let caps = dispatcher.fs.caps();
            let defers = caps.submits || negotiated.uses(abi::FUSE_POSIX_LOCKS);
            SessionRings::new((device, queues), payload, max, &caps, defers)
        });
        // The number of a policy is kept. One worker is also kept, because it means that requests
        // are handled one at a time. Any other requested number may be exceeded if several users
        // share the mount, so that it keeps serving.
        let is_kept = match options.workers {
            _ if options.policy.hands_over() || rings.is_some() => true,
            Some(workers) => workers == 1 || !options.default_permissions,
            None => false,
        };
        let is_fair = dispatcher.serves_many() && !is_kept;
        let further = if is_fair { max.max(FURTHER).min(WORKERS_MOST - max) } else { 0 };
        Ok(SessionShared {
            pool: WorkerPool::new(PoolLimits { max, parallel: 2 * processors }),
            // One more slot for the thread that reads the device beside the rings.
            slots: WorkerSlots::new(max + further + usize::from(rings.is_some())),
            watchdog_waker: WatchdogWaker::default(),
            set_aside: RequestBacklog::default(),
            stuck,
            bulkhead: Bulkhead::default(),
            fair: FairQueue::default(),
            further,
            rings: rings.transpose()?,
            limits: ChannelLimits {
                // Longer data is not received with its message.
                max_write: match port.places() {
                    Some(_) => negotiated.max_write.min(SOCKET_IO_MAX),
                    None => negotiated.max_write,
                },
                max_read: negotiated.max_read,
                splice: options.splice,
            },
            clone_fd: options.clone_fd && options.policy.owns_descriptors(),
            signals: options.signals,
            policy: options.policy,
            begun: clock::now(),
            backlog_ns: AtomicU64::new(0),
            spin_ns,
            line: Arc::clone(line),
            port: Arc::clone(port),
            emergency: Mutex::default(),
            threads: Mutex::default(),
            thread_ends: Arc::default(),
            caller_serves: options.caller_serves,
            caller_end: Mutex::default(),
            end: Mutex::default(),
            ended: Condvar::new(),
            view: Arc::new(SessionView(Mutex::new(ViewState::Running(Weak::new())))),
            memory_pressure: options.memory_pressure.clone(),
            dispatcher: Arc::new(dispatcher),
        })
    }

    /// Starts the first threads, among them a watchdog if there is none.
    fn start(self: &Arc<Self>, watchdog: Option<&SharedWatchdog>) -> Result<()> {
        if let Some(watchdog) = watchdog {
            watchdog.take(self)?;
        }
        match &self.rings {
            Some(rings) => ring::start(self, rings)?,
            None if self.caller_serves => self.await_caller(),
            None if self.add_worker() => {}
            None => return Err(Errno::EAGAIN),
        }
        if watchdog.is_some() {
            return Ok(());
        }
        let watched = Arc::clone(self);
        self.spawn("defuse-watchdog", move || watchdog::run(&watched))
    }

    /// Counts the worker that runs on the caller's thread, whose end [`join`](Self::join) waits
    /// for.
    fn await_caller(&self) {
        self.pool.grow();
        let has_ended = Arc::<AtomicBool>::default();
        let end = ThreadEndGuard(Arc::clone(&has_ended), Arc::clone(&self.thread_ends));
        *lock(&self.caller_end) = Some(end);
        lock(&self.threads).push(SessionThread { handle: None, has_ended });
    }

    /// Starts a worker or calls a parked one back. False where there are as many as there may be.
    pub(crate) fn add_worker(self: &Arc<Self>) -> bool {
        match self.pool.grow() {
            PoolGrowth::AtLimit => false,
            PoolGrowth::Unparked => true,
            PoolGrowth::Spawn => self.start_worker(),
        }
    }

    fn start_worker(self: &Arc<Self>) -> bool {
        // The first worker belongs to the session itself.
        let is_further = self.pool.counts().live > 1;
        let Some(taken) = self.take_thread(is_further) else {
            self.pool.record_spawn_failure();
            return false;
        };
        let shared = Arc::clone(self);
        let started = self.spawn("defuse-worker", move || {
            let _taken = taken;
            match &shared.rings {
                Some(_) => ring::run_helper(&shared),
                None => serve::run(&shared, shared.worker_channel()),
            }
        });
        if let Err(errno) = started {
            log::warn!("no further worker: {errno}");
            self.pool.record_spawn_failure();
        }
        started.is_ok()
    }

    /// Counts a thread for the user of the client, if it is a further one. `None` beyond the limit.
    pub(crate) fn take_thread(&self, is_further: bool) -> Option<Option<CountGuard>> {
        match &self.dispatcher.share {
            Some(share) if is_further => share.workers.take(1).map(Some),
            _ => Some(None),
        }
    }

    /// True if the policy adds threads only after a request was received.
    pub(crate) fn hands_over(&self) -> bool {
        self.policy.hands_over()
    }

    /// Starts a thread that receives in place of a thread that has a request `opcode` in hand, if
    /// the policy requires it.
    pub(crate) fn start_receiver(self: &Arc<Self>, opcode: Opcode) {
        let grown = self.pool.grow_if(|standing| policy::starts_another(opcode, standing));
        if grown == PoolGrowth::Spawn {
            self.start_worker();
        }
    }

    pub(crate) fn spawn(&self, name: &str, run: impl FnOnce() + Send + 'static) -> Result<()> {
        let has_ended = Arc::<AtomicBool>::default();
        let end = ThreadEndGuard(Arc::clone(&has_ended), Arc::clone(&self.thread_ends));
        let body = move || {
            let _end = end;
            run();
        };
        let handle = std::thread::Builder::new().name(name.to_string()).spawn(body)?;
        let mut threads = lock(&self.threads);
        threads.retain(|thread| !thread.has_ended());
        threads.push(SessionThread { handle: Some(handle), has_ended });
        Ok(())
    }

    /// A request was received in place of workers, which all have something in hand. There may be
    /// more workers by now, for it or for the next one.
    pub(crate) fn add_for_set_aside(self: &Arc<Self>) {
        if !self.hands_over() {
            self.add_worker();
        } else if self.pool.grow_if(|standing| standing.free == 0) == PoolGrowth::Spawn {
            self.start_worker();
        }
    }

    /// Records a backlog at `now`: more requests arrived at once than a worker could handle.
    pub(crate) fn record_backlog(&self, now: ClockMoment) {
        self.backlog_ns.store(self.begun.ns_until(now), Ordering::Relaxed);
    }

    /// Nanoseconds from the last backlog to `now`.
    pub(crate) fn since_backlog_ns(&self, now: ClockMoment) -> u64 {
        self.begun.ns_until(now).saturating_sub(self.backlog_ns.load(Ordering::Relaxed))
    }

    pub(crate) fn worker_channel(&self) -> PortChannel {
        // The only worker needs no descriptor of its own.
        let own = self.clone_fd && self.pool.max() > 1;
        let mut channel = PortChannel::new(self.line.port(own), self.limits);
        if self.spin_ns > 0 {
            match self.line.port_without_waiting() {
                Ok(port) => channel.spin_through(port, self.spin_ns),
                Err(errno) => log::debug!("no port that never waits ({errno}): no spinning"),
            }
        }
        channel
    }

    /// True where a request waits to be received.
    pub(crate) fn is_readable(&self) -> bool {
        self.port.is_readable()
    }

    /// Handles an INTERRUPT of the request `unique`. No worker has the request if it has just
    /// ended, or if its worker has not yet begun; the worker then finds the interrupt when it
    /// begins.
    pub(crate) fn interrupt(&self, unique: u64) {
        if self.dispatcher.interrupt_deferred(unique) || self.set_aside.interrupt(unique) {
            return;
        }
        if self.interrupt_held_back(unique) {
            return;
        }
        if let Some(thread) = self.slots.interrupt(unique) {
            if self.signals {
                signal::wake(thread);
            }
            // The signal may arrive before the system call that it is to end: the watchdog repeats
            // it, and looks after callers that are being killed.
            self.watchdog_waker.ring();
            return;
        }
        // It may have begun to wait meanwhile.
        self.interrupt_held_back(unique);
    }

    /// Answers a request that waits at the bulkhead or for others of its user. False where it does
    /// not.
    pub(crate) fn interrupt_held_back(&self, unique: u64) -> bool {
        let request = self.bulkhead.take(unique).or_else(|| self.fair.take(unique));
        request.map(set_aside::QueuedRequest::refuse_interrupted).is_some()
    }

    /// True if the user of the client may have more requests that hold no thread.
    fn has_room_aside(&self) -> bool {
        self.dispatcher.share.as_ref().is_none_or(|share| share.queued_bytes.has_room())
    }

    /// Allows more workers, because all are stuck while requests wait. True if this has changed the
    /// limit.
    pub(crate) fn raise_limit(&self) -> bool {
        let stretches = self.further > 0 && !self.pool.has_extra();
        if stretches {
            STUCK.warn(|| {
                let most = self.pool.max() + self.further;
                format!("all workers wait: there may be {most}, and calls of one user hold a part")
            });
            self.pool.set_extra(self.further);
        }
        stretches
    }

    /// True if the user of the request holds its part of the threads.
    pub(crate) fn has_to_wait(&self, request: &DecodedRequest<'_>) -> bool {
        // Requests that end something are not held back, and do not wait for others.
        let ends = matches!(
            request.body,
            RequestBody::Release(_) | RequestBody::Releasedir(_) | RequestBody::Destroy
        );
        self.pool.has_extra() && !ends && !self.threads_now().may_hold_one_more(request.uid)
    }

    /// A request waits for others of its user. Beyond the limit it is refused.
    pub(crate) fn wait_for_others(&self, uid: u32, request: set_aside::QueuedRequest) {
        let unique = request.unique;
        if let Some(request) = self.fair.wait(uid, request) {
            STUCK.warn(|| format!("user {uid} has too many calls that wait: EAGAIN"));
            return request.refuse(Errno::EAGAIN);
        }
        // Either this sees the interrupt, or `interrupt` sees the request that waits.
        if self.slots.is_early(unique) {
            self.interrupt_held_back(unique);
        }
    }

    /// A request that need not wait for others of its user any more.
    pub(crate) fn next_of_users(&self) -> Option<set_aside::QueuedRequest> {
        self.fair.next(self.threads_now())
    }

    fn threads_now(&self) -> ThreadBudget<'_> {
        ThreadBudget { slots: &self.slots, most: self.pool.most() }
    }

    /// A request that waits without a thread, of these bytes.
    pub(crate) fn set_aside(
        &self,
        unique: u64,
        bytes: Vec<u8>,
        port: Arc<dyn RequestPort>,
    ) -> set_aside::QueuedRequest {
        let (has_room, _queued) =
            (self.has_room_aside(), self.dispatcher.count_queued(bytes.len()));
        set_aside::QueuedRequest { unique, bytes, port, interrupted: false, has_room, _queued }
    }

    /// Makes a worker that waits for requests check for other work.
    pub(crate) fn call_idle_worker(&self) {
        let idle = self.slots.iter().find(|slot| slot.thread() != 0 && slot.is_idle());
        if let Some(slot) = idle {
            signal::wake(slot.thread());
        }
    }

    /// Receives in place of the workers; [`watchdog`] describes the conditions.
    pub(crate) fn receive_for_stuck_workers(&self) {
        let mut emergency = lock(&self.emergency);
        if emergency.is_none() {
            let port = match self.line.port_without_waiting() {
                Ok(port) => port,
                Err(errno) => {
                    STUCK.warn(|| format!("no thread receives for stuck workers: {errno}"));
                    return;
                }
            };
            let limits = ChannelLimits { splice: SpliceLimits::NEVER, ..self.limits };
            *emergency = Some(PortChannel::new(port, limits));
        }
        let Some(channel) = emergency.as_mut() else { return };
        let is_full = || self.set_aside.is_full() || !self.has_room_aside();
        for _ in 0..64 {
            if is_full() || !matches!(channel.receive(false), Ok(ReceiveOutcome::Request)) {
                return;
            }
            serve::set_aside_or_handle(self, channel);
        }
    }

    /// Ends the session: the connection has ended, or a thread stops it.
    pub(crate) fn finish(&self) {
        self.pool.shut_down();
        self.bulkhead.close();
        self.fair.close();
        if let Some(rings) = &self.rings {
            rings.close();
        }
        self.watchdog_waker.unpark();
        *lock(&self.end) = true;
        self.ended.notify_all();
    }

    /// The statistics so far.
    fn snapshot(&self) -> StatsSnapshot {
        let mut snapshot = self.dispatcher.recorder.snapshot();
        let counts = self.pool.counts();
        let held_back = self.bulkhead.count_waiting() + self.fair.count_waiting();
        let gauges = [
            ("workers", counts.live as u64),
            ("workers_idle", counts.idle as u64),
            ("workers_parked", counts.parked as u64),
            ("workers_max", self.pool.max() as u64),
            ("workers_peak", counts.peak as u64),
            ("workers_started", counts.started),
            ("workers_retired", counts.retired),
            ("requests_held_back", held_back as u64),
        ];
        if let Some((known, most)) = self.dispatcher.inodes.as_ref().map(|bound| bound.figures()) {
            let gauges = [("inodes_known", known), ("inodes_most", most)];
            snapshot.gauges.extend(gauges.map(|(name, value)| (name.to_string(), value as u64)));
        }
        snapshot.gauges.extend(gauges.map(|(name, value)| (name.to_string(), value)));
        snapshot.with_figures(&*self.dispatcher.fs)
    }

    /// Changes the maximum number of threads.
    fn resize(&self, max: usize) -> std::result::Result<(), ResizeError> {
        if self.rings.is_some() {
            return Err(ResizeError::OverRings);
        }
        self.slots.make_room(max + self.further);
        self.pool.resize(max);
        // Threads that wait for a request do not notice the change.
        self.watchdog_waker.ring();
        Ok(())
    }

    fn wait_for_end(&self) {
        let mut end = lock(&self.end);
        while !*end {
            end = self.ended.wait(end).unwrap_or_else(|poisoned| poisoned.into_inner());
        }
    }

    /// Joins all threads. Threads in a system call are interrupted, because its result is not used.
    fn join(&self, patience: Duration) -> bool {
        let deadline = Instant::now() + patience;
        loop {
            self.watchdog_waker.unpark();
            let ends = *lock(&self.thread_ends.count);
            let mut threads = lock(&self.threads);
            for thread in threads.extract_if(.., |thread| thread.has_ended()) {
                let _ = thread.handle.map(JoinHandle::join);
            }
            if threads.is_empty() {
                return self.watchdog_waker.is_left_alone(deadline);
            }
            drop(threads);
            if Instant::now() > deadline {
                return false;
            }
            self.slots.interrupt_all();
            for slot in self.slots.iter().filter(|slot| slot.thread() != 0) {
                signal::wake(slot.thread());
            }
            self.thread_ends.wait(ends, INTERRUPT_EVERY);
        }
    }
}

/// A thread of the session.
struct SessionThread {
    /// `None` for the caller's thread.
    handle: Option<JoinHandle<()>>,
    has_ended: Arc<AtomicBool>,
}

impl SessionThread {
    /// True if the thread has ended: joining it takes no time.
    fn has_ended(&self) -> bool {
        self.has_ended.load(Ordering::Acquire)
    }
}

/// Counts the threads that have ended, for threads that wait for this.
#[derive(Default)]
struct ThreadEndCount {
    count: Mutex<usize>,
    changed: Condvar,
}

impl ThreadEndCount {
    /// Waits until the count differs from `seen`, at most for `patience`.
    fn wait(&self, seen: usize, patience: Duration) {
        let is_same = |count: &mut usize| *count == seen;
        drop(self.changed.wait_timeout_while(lock(&self.count), patience, is_same));
    }
}

/// Reports the end of a thread when dropped, also after a panic.
struct ThreadEndGuard(Arc<AtomicBool>, Arc<ThreadEndCount>);

impl Drop for ThreadEndGuard {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
        *lock(&self.1.count) += 1;
        self.1.changed.notify_all();
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// The outcome of INIT.
struct HandshakeOutcome {
    negotiated: NegotiatedInit,
    port: Arc<dyn RequestPort>,
    /// The plan for rings, unless requests arrive over the device.
    plan: Option<uring::RingPlan>,
}

/// Answers INIT.
fn handshake(
    line: &Arc<dyn RequestSource>,
    device: Option<&Arc<OwnedFd>>,
    choose: &mut dyn FnMut(&InitIn) -> (Caps, SessionOptions),
) -> std::result::Result<HandshakeOutcome, StartError> {
    let port = line.port(false);
    // Until INIT is answered, the kernel requires room for the largest default request. A client
    // sends INIT alone.
    let max_write = if device.is_some() { MAX_IO } else { 0 };
    let limits = ChannelLimits { max_write, max_read: 4096, splice: SpliceLimits::NEVER };
    let mut channel = PortChannel::new(Arc::clone(&port), limits);
    loop {
        match channel.receive(false) {
            Ok(ReceiveOutcome::Request) => {}
            Ok(ReceiveOutcome::Nothing) => continue,
            Ok(ReceiveOutcome::Unmounted) => return Err(StartError::Device(Errno::ENODEV)),
            Err(errno) => return Err(StartError::Device(errno)),
        }
        let (message, reply) = channel.exchange();
        let kernel = init_of(&message)?;
        // An INIT of a later version is repeated.
        let (caps, options) = match kernel.major > abi::FUSE_KERNEL_VERSION {
            true => Default::default(),
            false => choose(&kernel),
        };
        let (options, plan) = match device {
            Some(device) => uring::plan(device, &kernel, &caps, &options),
            None => (options, Ok(None)),
        };
        match negotiate(&kernel, &caps, &options) {
            Ok((out, mut negotiated)) => {
                let plan = plan.map_err(|reason| negotiated.refuse_rings(reason)).ok().flatten();
                if let Some(reason) = negotiated.ring_refusal()
                    && options.io_uring == IoUring::Required
                {
                    let _ = reply.send_errno(Errno::EPROTO.raw());
                    return Err(StartError::Rings(reason));
                }
                if device.is_some() && !can_bound_inodes(negotiated.minor, &options) {
                    let _ = reply.send_errno(Errno::EPROTO.raw());
                    return Err(StartError::NoBound(negotiated.minor));
                }
                reply.send(&[out.as_bytes()]).map_err(StartError::Device)?;
                return Ok(HandshakeOutcome { negotiated, port, plan });
            }
            // The kernel learns our major version and sends INIT again.
            Err(InitError::LaterMajor(_)) => {
                let ours = abi::InitOut {
                    major: abi::FUSE_KERNEL_VERSION,
                    minor: abi::FUSE_KERNEL_MINOR_VERSION,
                    ..abi::InitOut::default()
                };
                reply.send(&[ours.as_bytes()]).map_err(StartError::Device)?;
            }
            Err(error) => {
                let _ = reply.send_errno(Errno::EPROTO.raw());
                return Err(error.into());
            }
        }
    }
}

/// True unless the options have a bound on the kernel's inodes, and the kernel cannot be requested
/// to forget some.
fn can_bound_inodes(minor: u32, options: &SessionOptions) -> bool {
    options.max_inodes.is_none() || minor >= PRUNE_MINOR
}

fn init_of(message: &RequestMessage<'_>) -> std::result::Result<InitIn, StartError> {
    match message.parse(&DecodeOptions::default()) {
        Ok(DecodedRequest { body: RequestBody::Init(init), .. }) => Ok(init),
        Ok(other) => Err(StartError::NotInit(other.opcode.name().to_string())),
        Err(error) => Err(StartError::NotInit(error.to_string())),
    }
}
