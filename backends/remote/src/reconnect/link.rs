//! The present connection, and the search for the next one.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, PoisonError, RwLock};
use std::time::{Duration, Instant};

use defuse_fs::{Context, Errno, FileSystem, Notify, Origin, Renumbered, Result};

use super::Present;
use super::table::{Epoch, Table};
use crate::sys::peer_user;
use crate::{Remote, RemoteError, RemoteOptions, lock};

/// The pause between two attempts to connect.
const PAUSE: Duration = Duration::from_millis(20);
/// The longest time for one attempt after the limit has passed.
const LATE: Duration = Duration::from_secs(1);

/// A connection.
pub(super) struct Connected {
    pub(super) epoch: Epoch,
    pub(super) remote: Remote,
}

pub(super) struct Link {
    path: PathBuf,
    options: RemoteOptions,
    limit: Duration,
    /// The user of the first server. No other user is trusted with what the first one was.
    uid: u32,
    present: RwLock<Present>,
    outage: Mutex<Outage>,
    over: Condvar,
    table: Arc<Mutex<Table>>,
    listeners: Mutex<Vec<Listener>>,
}

/// A frontend, and its notifier.
type Listener = (Origin, Arc<dyn Notify>);

/// The time without a server.
#[derive(Default)]
struct Outage {
    since: Option<Instant>,
    tried: Option<Instant>,
    /// A thread connects.
    connecting: bool,
    /// The log says that there is no server in time.
    given_up: bool,
}

/// The patience of one call, over all connections.
#[derive(Default)]
pub(super) struct Wait {
    since: Option<Instant>,
    has_tried: bool,
}

/// The next step of a call without a server.
enum Step {
    Connect { patience: Duration },
    Sleep,
    Fail(Errno),
}

impl Link {
    pub(super) fn connect(
        path: &Path,
        options: RemoteOptions,
        limit: Duration,
        table: Arc<Mutex<Table>>,
    ) -> std::result::Result<Link, RemoteError> {
        let remote = Remote::connect(path, options)?;
        let uid = peer_user(remote.shared.connection.as_fd()).map_err(RemoteError::Socket)?;
        Ok(Link {
            path: path.to_path_buf(),
            options,
            limit,
            uid,
            present: RwLock::new(Arc::new(Connected { epoch: 1, remote })),
            outage: Mutex::default(),
            over: Condvar::new(),
            table,
            listeners: Mutex::default(),
        })
    }

    /// The last connection, whether its server runs or not.
    pub(super) fn present(&self) -> Present {
        Arc::clone(&self.present.read().unwrap_or_else(PoisonError::into_inner))
    }

    pub(super) fn attach(&self, origin: Origin, notify: Arc<dyn Notify>) {
        lock(&self.listeners).push((origin, Arc::clone(&notify)));
        self.attach_to(&self.present(), (origin, notify));
    }

    fn attach_to(&self, connected: &Connected, (origin, notify): Listener) {
        let (table, epoch) = (Arc::clone(&self.table), connected.epoch);
        let map = move |ino| lock(&table).outer_in(ino, epoch);
        connected.remote.attached(origin, Arc::new(Renumbered::new(notify, map)));
    }

    /// A connection to a server that was alive a moment ago. Waits for one, but not beyond the limits of the
    /// outage and of the call; then fails with `ENOTCONN`.
    pub(super) fn connected(&self, cx: &Context<'_>, wait: &mut Wait) -> Result<Present> {
        loop {
            let present = self.present();
            if !present.remote.is_dead() {
                return Ok(present);
            }
            match self.next_step(cx, wait) {
                Step::Connect { patience } => {
                    let next = self.try_once(present.epoch + 1, patience);
                    self.end_of_attempt(next);
                }
                Step::Sleep => {
                    let outage = lock(&self.outage);
                    drop(self.over.wait_timeout(outage, PAUSE));
                }
                Step::Fail(errno) => return Err(errno),
            }
        }
    }

    fn next_step(&self, cx: &Context<'_>, wait: &mut Wait) -> Step {
        let now = Instant::now();
        let mut outage = lock(&self.outage);
        if !self.present().remote.is_dead() {
            return Step::Sleep;
        }
        if outage.since.is_none() {
            outage.since = Some(now);
            let (path, limit) = (self.path.display(), self.limit);
            log::warn!("no server at {path}: calls wait for one, up to {limit:?}");
        }
        let since = outage.since.unwrap_or(now);
        let begun = *wait.since.get_or_insert(now);
        // The time of the outage bounds the first wait of a call, and that of the call all its waits together.
        let left = (since.min(begun) + self.limit).saturating_duration_since(now);
        let is_time = outage.tried.is_none_or(|tried| now - tried >= PAUSE);
        if left.is_zero() && (wait.has_tried || outage.connecting || !is_time) {
            if !outage.given_up {
                outage.given_up = true;
                log::error!("no server at {} within {:?}", self.path.display(), self.limit);
            }
            return Step::Fail(Errno::ENOTCONN);
        }
        if cx.interrupted() {
            return Step::Fail(Errno::EINTR);
        }
        if outage.connecting || !is_time {
            return Step::Sleep;
        }
        wait.has_tried = true;
        (outage.connecting, outage.tried) = (true, Some(now));
        Step::Connect { patience: if left.is_zero() { LATE.min(self.limit) } else { left } }
    }

    fn try_once(&self, epoch: Epoch, patience: Duration) -> Option<Connected> {
        let (path, own) = (&self.path, self.uid);
        let remote =
            Remote::connect_within(path, self.options, (0, false), Some(patience), |uid| {
                uid == own
            });
        match remote {
            Ok(remote) => Some(Connected { epoch, remote }),
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

    fn end_of_attempt(&self, next: Option<Connected>) {
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
        let (path, after) = (self.path.display(), taken.unwrap_or_default());
        log::warn!("a server at {path} answers after {after:.1?}: calls continue with it");
        let listeners = lock(&self.listeners).clone();
        for (origin, notify) in listeners {
            self.attach_to(&next, (origin, Arc::clone(&notify)));
            // Names and attributes may differ. An error means that the frontend keeps none.
            let _ = notify.increment_epoch();
            for ino in lock(&self.table).all() {
                let _ = notify.invalidate_inode(ino, None);
            }
            for handle in &pollers {
                let _ = notify.poll_wake(*handle);
            }
        }
    }
}
