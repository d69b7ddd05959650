//! The present connection, and the search for the next one.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, PoisonError, RwLock};
use std::time::{Duration, Instant};

use defuse_fs::{Context, Errno, Notify, Origin, RenumberedNotify, Result};

use super::CurrentConnection;
use super::connected::{CallServer, ServerConnection};
use super::table::{ConnectionEpoch, ReconnectTable};
use crate::sys::peer_user;
use crate::{RemoteClient, RemoteError, RemoteOptions, lock};

/// The pause between two attempts to connect.
const PAUSE: Duration = Duration::from_millis(20);
/// The pause between two checks for calls that have not ended.
pub(super) const PART_PAUSE: Duration = Duration::from_micros(200);
/// The longest time for one attempt after the limit has passed.
const LATE: Duration = Duration::from_secs(1);

/// The way to the next server.
enum NextServer {
    /// The server that listens at a path.
    AtPath {
        path: PathBuf,
        options: RemoteOptions,
        /// The user of the first server. No other user's server is trusted with the first server's
        /// data.
        uid: u32,
    },
    /// The server is passed to [`ServerLink::give`]. Without a server in time, calls fail with
    /// `EIO`.
    Given {
        /// The file system, for messages.
        name: String,
    },
}

pub(super) struct ServerLink {
    next: NextServer,
    limit: Duration,
    present: RwLock<CurrentConnection>,
    outage: Mutex<Outage>,
    over: Condvar,
    table: Arc<Mutex<ReconnectTable>>,
    listeners: Mutex<Vec<FrontendListener>>,
}

/// A frontend, and its notifier.
type FrontendListener = (Origin, Arc<dyn Notify>);

/// The time without a server.
#[derive(Default)]
struct Outage {
    since: Option<Instant>,
    tried: Option<Instant>,
    /// A thread connects.
    connecting: bool,
    /// True if the log has the message that there is no server in time.
    is_abandoned: bool,
}

/// The patience of one call, over all connections.
#[derive(Default)]
pub(super) struct CallPatience {
    since: Option<Instant>,
    has_tried: bool,
}

/// The next step of a call without a server.
enum OutageStep {
    Connect { patience: Duration },
    Sleep,
    Fail(Errno),
}

impl ServerLink {
    pub(super) fn connect(
        path: &Path,
        options: RemoteOptions,
        limit: Duration,
        table: Arc<Mutex<ReconnectTable>>,
    ) -> std::result::Result<ServerLink, RemoteError> {
        let remote = RemoteClient::connect(path, options)?;
        let uid = peer_user(remote.shared.connection.as_fd()).map_err(RemoteError::Socket)?;
        let next = NextServer::AtPath { path: path.to_path_buf(), options, uid };
        Ok(ServerLink::with(next, limit, table, CallServer::Remote(Box::new(remote))))
    }

    /// Creates a link without a server, to which servers are passed by [`ServerLink::give`].
    pub(super) fn new_unconnected(
        name: String,
        limit: Duration,
        table: Arc<Mutex<ReconnectTable>>,
    ) -> ServerLink {
        ServerLink::with(NextServer::Given { name }, limit, table, CallServer::Absent)
    }

    fn with(
        next: NextServer,
        limit: Duration,
        table: Arc<Mutex<ReconnectTable>>,
        server: CallServer,
    ) -> ServerLink {
        ServerLink {
            next,
            limit,
            present: RwLock::new(Arc::new(ServerConnection::new(1, server))),
            outage: Mutex::default(),
            over: Condvar::new(),
            table,
            listeners: Mutex::default(),
        }
    }

    /// The last connection, whether its server runs or not.
    pub(super) fn present(&self) -> CurrentConnection {
        Arc::clone(&self.present.read().unwrap_or_else(PoisonError::into_inner))
    }

    pub(super) fn attach(&self, origin: Origin, notify: Arc<dyn Notify>) {
        lock(&self.listeners).push((origin, Arc::clone(&notify)));
        self.attach_to(&self.present(), (origin, notify));
    }

    pub(super) fn detach(&self, origin: Origin) {
        let mut listeners = lock(&self.listeners);
        if let Some(at) = listeners.iter().rposition(|(own, _)| *own == origin) {
            listeners.remove(at);
        }
    }

    fn attach_to(&self, connected: &ServerConnection, (origin, notify): FrontendListener) {
        let (table, epoch) = (Arc::clone(&self.table), connected.epoch);
        let map = move |ino| lock(&table).outer_in(ino, epoch);
        connected.fs().attach(origin, Arc::new(RenumberedNotify::new(notify, map)));
    }

    /// A connection to a server that was alive a moment ago. Waits for one, but not beyond the
    /// limits of the outage and of the call; then fails with `ENOTCONN`.
    pub(super) fn await_connection(
        &self,
        cx: &Context<'_>,
        wait: &mut CallPatience,
    ) -> Result<CurrentConnection> {
        loop {
            let present = self.present();
            if !present.is_dead() {
                return Ok(present);
            }
            let epoch = present.epoch;
            // The thread that parts from the server waits until no call uses it.
            drop(present);
            match self.next_step(cx, wait) {
                OutageStep::Connect { patience } => {
                    let next = self.try_once(epoch + 1, patience);
                    self.end_of_attempt(next);
                }
                OutageStep::Sleep => {
                    let outage = lock(&self.outage);
                    drop(self.over.wait_timeout(outage, PAUSE));
                }
                OutageStep::Fail(errno) => return Err(errno),
            }
        }
    }

    fn next_step(&self, cx: &Context<'_>, wait: &mut CallPatience) -> OutageStep {
        let now = Instant::now();
        let mut outage = lock(&self.outage);
        if !self.present().is_dead() {
            return OutageStep::Sleep;
        }
        if outage.since.is_none() {
            outage.since = Some(now);
            if let NextServer::AtPath { path, .. } = &self.next {
                let (path, limit) = (path.display(), self.limit);
                log::warn!("no server at {path}: calls wait for one, up to {limit:?}");
            }
        }
        let since = outage.since.unwrap_or(now);
        let begun = *wait.since.get_or_insert(now);
        // The time of the outage bounds the first wait of a call, and the time of the call bounds
        // all its waits together.
        let left = (since.min(begun) + self.limit).saturating_duration_since(now);
        let is_time = outage.tried.is_none_or(|tried| now - tried >= PAUSE);
        let is_passed = matches!(self.next, NextServer::Given { .. });
        if left.is_zero() && (is_passed || wait.has_tried || outage.connecting || !is_time) {
            let errno = self.report_outage(outage.is_abandoned);
            outage.is_abandoned = true;
            return OutageStep::Fail(errno);
        }
        if cx.is_interrupted() {
            return OutageStep::Fail(Errno::EINTR);
        }
        if is_passed || outage.connecting || !is_time {
            return OutageStep::Sleep;
        }
        wait.has_tried = true;
        (outage.connecting, outage.tried) = (true, Some(now));
        OutageStep::Connect { patience: if left.is_zero() { LATE.min(self.limit) } else { left } }
    }

    /// Returns the error of calls without a server. Logs it once in each outage.
    fn report_outage(&self, reported: bool) -> Errno {
        let limit = self.limit;
        match &self.next {
            NextServer::AtPath { path, .. } => {
                if !reported {
                    log::error!("no server at {} within {limit:?}", path.display());
                }
                Errno::ENOTCONN
            }
            NextServer::Given { name } => {
                if !reported {
                    log::error!(
                        "{name}: no process has served it for {limit:?}: calls fail with EIO"
                    );
                }
                Errno::EIO
            }
        }
    }

    fn try_once(&self, epoch: ConnectionEpoch, patience: Duration) -> Option<ServerConnection> {
        let NextServer::AtPath { path, options, uid: own } = &self.next else { return None };
        let remote =
            RemoteClient::connect_within(path, *options, Some(patience), |uid| uid == *own);
        match remote {
            Ok(remote) => Some(ServerConnection::new(epoch, CallServer::Remote(Box::new(remote)))),
            Err(error @ RemoteError::Stranger { .. }) => {
                log::error!("{error}; it is not used");
                None
            }
            Err(error) => {
                log::debug!("connecting again: {error}");
                None
            }
        }
    }

    fn end_of_attempt(&self, next: Option<ServerConnection>) {
        let Some(next) = next else {
            lock(&self.outage).connecting = false;
            return self.over.notify_all();
        };
        let next = Arc::new(next);
        let pollers = lock(&self.table).begin(next.epoch);
        let taken = {
            let mut outage = lock(&self.outage);
            *self.present.write().unwrap_or_else(PoisonError::into_inner) = Arc::clone(&next);
            std::mem::take(&mut *outage).since.map(|since| since.elapsed())
        };
        self.over.notify_all();
        if let NextServer::AtPath { path, .. } = &self.next {
            let (path, after) = (path.display(), taken.unwrap_or_default());
            log::warn!("a server at {path} answers after {after:.1?}: calls continue with it");
        }
        let listeners = lock(&self.listeners).clone();
        for (origin, notify) in listeners {
            self.attach_to(&next, (origin, Arc::clone(&notify)));
            // Names and attributes may differ. An error means that the frontend keeps none.
            let _ = notify.increment_epoch();
            for ino in lock(&self.table).list_inodes() {
                let _ = notify.invalidate_inode(ino, None);
            }
            for handle in &pollers {
                let _ = notify.poll_wake(*handle);
            }
        }
    }

    /// Continues with `server`, if the present one has ended.
    pub(super) fn give(&self, server: CallServer) {
        let epoch = self.present().epoch + 1;
        self.end_of_attempt(Some(ServerConnection::new(epoch, server)));
    }

    /// Begins no more calls with the present server, and waits up to `patience` for the end of the
    /// calls in progress. Returns false, and continues with the server, if some have not ended.
    pub(super) fn part(&self, patience: Duration) -> bool {
        let present = self.present();
        present.part(true);
        let deadline = Instant::now() + patience;
        // This thread and the link each hold a reference.
        while Arc::strong_count(&present) > 2 {
            if Instant::now() > deadline {
                self.stay();
                return false;
            }
            std::thread::sleep(PART_PAUSE);
        }
        true
    }

    /// Continues with the present server, from which it has [parted](ServerLink::part).
    pub(super) fn stay(&self) {
        self.present().part(false);
        // The outage is over, regardless of the thread that found the server.
        *lock(&self.outage) = Outage::default();
        self.over.notify_all();
    }

    /// Removes the present server, which has ended or [was parted from](ServerLink::part).
    pub(super) fn take(&self) {
        let mut present = self.present.write().unwrap_or_else(PoisonError::into_inner);
        let epoch = present.epoch;
        let before = std::mem::replace(
            &mut *present,
            Arc::new(ServerConnection::new(epoch, CallServer::Absent)),
        );
        drop(present);
        // A frontend that begins or ends may use it at this moment.
        let deadline = Instant::now() + LATE;
        while Arc::strong_count(&before) > 1 && Instant::now() < deadline {
            std::thread::sleep(PART_PAUSE);
        }
        // It may take long to end.
        drop(before);
    }
}
