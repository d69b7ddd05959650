//! The listening socket, the admission of clients, and the connections from beginning to end.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, Weak};
use std::time::{Duration, Instant};

use defuse_connection::{
    ConnectionLimits, PageSource, PeerCredentials, ServiceQuotas, ServiceState, VersionSource,
};
use defuse_fs::layer::LockingLayer;
use defuse_fs::{Errno, FileSystem, LockSupport};
use defuse_probe::{StatsSnapshot, WarningLimiter};
use defuse_session::{
    ClientHooks, RequestSource, Session, SessionOptions, ShareLimits, SharedMemory, SharedWatchdog,
    TransportUpgrade, UserShare,
};
use defuse_wire::vendor::ConnectionNumber;
use rustix::net::{AddressFamily, Shutdown, SocketAddrUnix, SocketFlags, SocketType};

use crate::clients::{self, ConnectionStart, ServedClient, ServerStatistics};
use crate::messages::{self, MessageSource, errno};
use crate::name::{self, SocketInode, SocketName};
use crate::other_protocols::OtherProtocol;
use crate::peer::FusePeer;
use crate::processes;
use crate::threads::ServerThreads;
use crate::waiting::{ConnectionStage, EndedClients, SocketWaitSet};

/// The error if a socket cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// Another server uses the socket.
    #[error("{0} is served by another process: end that one, or choose another path")]
    InUse(PathBuf),
    /// The socket cannot be created.
    #[error("cannot listen at {path}: {errno}{}", next_step(*errno))]
    Listen {
        /// The socket.
        path: PathBuf,
        /// The reason.
        errno: Errno,
    },
}

/// The next step after an error, if the limit is known that the process has met.
pub(crate) fn next_step(errno: Errno) -> &'static str {
    match errno {
        Errno::EAGAIN => {
            "; no thread can be started: raise the limit of processes (`ulimit -u`, or pids.max of the \
             control group)"
        }
        _ => "",
    }
}

/// The users that may connect. Root acts for all users, like a kernel with a mount. Every other
/// user acts for itself, and the server checks its rights.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum AdmissionPolicy {
    /// The user of the server, and root.
    #[default]
    SameUser,
    /// Also these users.
    Users(Vec<u32>),
}

/// Settings of a server.
#[derive(Clone, Debug)]
pub struct ServerOptions {
    /// Options of each session.
    pub session: SessionOptions,
    /// The users that may connect.
    pub admission: AdmissionPolicy,
    /// Maximum number of connections. INIT of a further one is answered with `ENFILE`.
    pub max_connections: usize,
    /// Maximum number of connections of a user other than root and the user of the server. A
    /// process that forks needs one for its child.
    pub max_connections_of_user: usize,
    /// Limits of each connection.
    pub limits: ConnectionLimits,
    /// Limits of each user, over all its connections.
    pub user_limits: ConnectionLimits,
    /// Maximum memory for mapped files of all users, in bytes.
    pub mapped_bytes: u64,
    /// A transport beside messages, if the server offers one to clients.
    pub lanes: Option<Arc<dyn TransportUpgrade>>,
    /// The pages of files that clients may read by memory, if there are any.
    pub pages: Option<Arc<dyn PageSource>>,
    /// The versions of names and attributes, by which clients find out what has not changed, if
    /// there are any.
    pub versions: Option<Arc<dyn VersionSource>>,
    /// A lock is released if others have waited for it for this long, while its process was
    /// stopped. `None`: never.
    pub dead_after: Option<Duration>,
    /// Limits of each user for threads, answers and requests, over all its connections.
    pub shares: ShareLimits,
    /// Takes connections of other protocols, if there are any.
    pub others: Option<Arc<dyn OtherProtocol>>,
}

impl AdmissionPolicy {
    /// True for a user that the policy names, beside the user of the server and root.
    pub(crate) fn names(&self, uid: u32) -> bool {
        match self {
            AdmissionPolicy::SameUser => false,
            AdmissionPolicy::Users(users) => users.contains(&uid),
        }
    }
}

impl Default for ServerOptions {
    fn default() -> Self {
        let (session, admission) = (SessionOptions::default(), AdmissionPolicy::default());
        let ServiceQuotas { connection, user, mapped_bytes } = ServiceQuotas::default();
        ServerOptions {
            session,
            admission,
            max_connections: 8192,
            max_connections_of_user: 1024,
            limits: connection,
            user_limits: user,
            mapped_bytes,
            lanes: None,
            pages: None,
            versions: None,
            dead_after: None,
            shares: ShareLimits::default(),
            others: None,
        }
    }
}

/// The time for connections to end after the server begins to shut down.
const END_PATIENCE: Duration = Duration::from_secs(5);

/// The additional time after replies are no longer delivered.
const LAST_PATIENCE: Duration = Duration::from_secs(3);
/// Limits the warnings about refused clients, since every user may connect at any rate.
pub(crate) static LOG: WarningLimiter = WarningLimiter::new();
/// The time that a request for a lock waits for connections whose clients have ended.
const TAKE_BACK_PATIENCE: Duration = Duration::from_secs(1);

/// A listening socket and the file system behind it. Dropping it ends all connections.
pub struct SocketServer {
    shared: Arc<ServerShared>,
}

pub(crate) struct ServerShared {
    pub(crate) listener: OwnedFd,
    pub(crate) waiting: SocketWaitSet,
    pub(crate) ends: EndedClients,
    /// The name of the socket, which is removed at the end.
    name: Mutex<Option<SocketName>>,
    pub(crate) fs: Arc<dyn FileSystem>,
    pub(crate) options: ServerOptions,
    ending: AtomicBool,
    next: AtomicU64,
    pub(crate) clients: Mutex<ClientTable>,
    changed: Condvar,
    pub(crate) threads: Arc<ServerThreads>,
    pub(crate) service: Arc<ServiceState>,
    watchdog: SharedWatchdog,
    /// The shares of users with connections.
    shares: Mutex<HashMap<u32, Weak<UserShare>>>,
    /// Some connections did not end in time.
    left: AtomicBool,
}

pub(crate) struct AcceptedConnection {
    pub(crate) socket: Arc<OwnedFd>,
    pub(crate) uid: u32,
    pub(crate) begun: ConnectionStart,
    pub(crate) stage: ConnectionStage,
    /// True if the connection is refused: it gets an error as reply, and counts for no user.
    pub(crate) is_refused: bool,
}

#[derive(Default)]
pub(crate) struct ClientTable {
    /// Connections by number.
    pub(crate) connections: HashMap<u64, AcceptedConnection>,
    /// The user and the resources of each client, by the number that it chose.
    pub(crate) named: HashMap<ConnectionNumber, Arc<FusePeer>>,
    /// Number of connected clients that are not admitted and have sent nothing.
    pub(crate) strangers: usize,
    /// Number of connections that are answered with an error.
    pub(crate) refused: usize,
    /// Number of the other connections, by user.
    pub(crate) of_users: HashMap<u32, usize>,
    /// The statistics of ended connections.
    past: Option<StatsSnapshot>,
}

impl SocketServer {
    /// Listens at `path`, which must not exist, except as a socket whose server is gone. A path
    /// that begins with `@` is abstract. Only the user of this process may open the socket, unless
    /// others are admitted.
    pub fn bind(
        path: &Path,
        fs: Arc<dyn FileSystem>,
        options: ServerOptions,
    ) -> Result<SocketServer, ServeError> {
        let failed = |errno| ServeError::Listen { path: path.to_path_buf(), errno };
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let listener =
            rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
                .map_err(|error| failed(errno(error)))?;
        let mode = if options.admission == AdmissionPolicy::SameUser { 0o600 } else { 0o666 };
        let name = give_name(&listener, path, mode).map_err(|error| match error {
            rustix::io::Errno::ADDRINUSE => ServeError::InUse(path.to_path_buf()),
            error => failed(errno(error)),
        })?;
        SocketServer::serve_listener(listener, name, fs, options).map_err(failed)
    }

    /// Takes over `listener`, a listening socket of type `SOCK_SEQPACKET`.
    pub fn from_listener(
        listener: OwnedFd,
        fs: Arc<dyn FileSystem>,
        options: ServerOptions,
    ) -> Result<SocketServer, ServeError> {
        let failed = |errno| ServeError::Listen { path: PathBuf::from("(inherited)"), errno };
        rustix::io::ioctl_fionbio(&listener, true).map_err(|error| failed(errno(error)))?;
        SocketServer::serve_listener(listener, None, fs, options).map_err(failed)
    }

    fn serve_listener(
        listener: OwnedFd,
        name: Option<SocketName>,
        fs: Arc<dyn FileSystem>,
        options: ServerOptions,
    ) -> defuse_fs::Result<SocketServer> {
        let (waiting, ends) = (SocketWaitSet::new(&listener)?, EndedClients::new()?);
        let fs = with_locks(fs);
        let mut options = options;
        disable_caches(&mut options.session, &*fs);
        let quotas = ServiceQuotas {
            connection: options.limits,
            user: options.user_limits,
            mapped_bytes: options.mapped_bytes,
        };
        let shared = Arc::new_cyclic(|shared: &Weak<ServerShared>| {
            let shared = Weak::clone(shared);
            let await_ended = move || {
                if let Some(shared) = shared.upgrade() {
                    shared.await_ended();
                }
            };
            let service = match options.dead_after {
                Some(_) => ServiceState::with_watcher(quotas, await_ended),
                None => ServiceState::new(quotas, await_ended),
            };
            ServerShared {
                listener,
                waiting,
                ends,
                name: Mutex::new(name),
                fs,
                options,
                ending: AtomicBool::new(false),
                next: AtomicU64::new(0),
                clients: Mutex::default(),
                changed: Condvar::new(),
                threads: Arc::default(),
                service,
                watchdog: SharedWatchdog::default(),
                shares: Mutex::default(),
                left: AtomicBool::new(false),
            }
        });
        Ok(SocketServer { shared })
    }

    /// Accepts connections until [`shut_down`](SocketServer::shut_down), and then waits for their
    /// end. Returns false if some have not ended after eight seconds.
    pub fn run(&self) -> bool {
        if let Some(limit) = self.shared.options.dead_after {
            watch_stopped(&self.shared, limit);
        }
        self.shared.listen();
        self.shared.end()
    }

    /// Makes [`run`](SocketServer::run) return. No connection is accepted any more, and the
    /// existing ones end after the replies to their current requests.
    pub fn shut_down(&self) {
        self.shared.ending.store(true, Ordering::SeqCst);
        let _ = rustix::net::shutdown(&self.shared.listener, Shutdown::Both);
    }

    /// The name of the socket, which the caller removes from now on. The server then keeps no
    /// descriptor of the directory.
    pub fn take_name(&self) -> Option<SocketName> {
        lock(&self.shared.name).take()
    }

    /// The inode of the socket's name, while the server has one.
    pub fn inode(&self) -> Option<SocketInode> {
        lock(&self.shared.name).as_ref().map(SocketName::inode)
    }

    /// The number of connections.
    pub fn connections(&self) -> usize {
        lock(&self.shared.clients).connections.len()
    }

    /// The statistics of all connections, including ended ones, and the figures of the file system.
    pub fn snapshot(&self) -> StatsSnapshot {
        self.statistics().all
    }

    /// The statistics of all connections together, and of each client.
    pub fn statistics(&self) -> ServerStatistics {
        let clients = lock(&self.shared.clients);
        let mut all = clients.past.clone().unwrap_or_default();
        let connections = clients.connections.len() as u64;
        let served = clients.connections.values().filter_map(|one| match &one.stage {
            ConnectionStage::Served(served) => Some((one.begun, served.clone())),
            _ => None,
        });
        let served: Vec<(ConnectionStart, ServedClient)> = served.collect();
        // A client that connects does not wait for the sums.
        drop(clients);
        let mut clients = Vec::with_capacity(served.len());
        for (begun, one) in served {
            let (client, snapshot) = one.read_statistics(begun);
            all.merge(&snapshot);
            clients.extend(client);
        }
        clients.sort_unstable_by_key(|client| client.number);
        all.ops.sort_by_key(|stats| (stats.stage, stats.op));
        all.gauges.insert("connections".to_owned(), connections);
        all.gauges.insert("locks_lost".to_owned(), self.shared.service.locks_lost());
        ServerStatistics { all: all.with_figures(&*self.shared.fs), clients }
    }
}

/// Looks for locks of stopped processes, on a thread that ends with the server.
fn watch_stopped(shared: &Arc<ServerShared>, limit: Duration) {
    let step = (limit / 8).clamp(Duration::from_millis(5), Duration::from_secs(1));
    let shared = Arc::downgrade(shared);
    let watch = move || loop {
        std::thread::sleep(step);
        match shared.upgrade().filter(|shared| !shared.ending.load(Ordering::SeqCst)) {
            Some(shared) => {
                shared.service.release_stopped(&*shared.fs, limit, &processes::read_status);
            }
            None => return,
        }
    };
    let thread = std::thread::Builder::new().name("defuse-stopped".to_owned());
    if let Err(error) = thread.spawn(watch) {
        log::warn!("locks of stopped processes are not released: {error}");
    }
}

/// Clients are not notified of each other's changes. So nothing may be cached that relies on it.
pub(crate) fn disable_caches(session: &mut SessionOptions, fs: &dyn FileSystem) {
    if fs.caps().exclusive {
        for timeout in
            [&mut session.attr_timeout, &mut session.entry_timeout, &mut session.negative_timeout]
        {
            timeout.get_or_insert(Duration::ZERO);
        }
    }
}

/// Adds locks below all clients. Locks that each client kept by itself would not exclude others.
pub(crate) fn with_locks(fs: Arc<dyn FileSystem>) -> Arc<dyn FileSystem> {
    match fs.caps().locks {
        LockSupport::Frontend => Arc::new(LockingLayer::new(fs)),
        LockSupport::Either | LockSupport::FileSystem => fs,
    }
}

impl Drop for SocketServer {
    fn drop(&mut self) {
        self.shut_down();
        self.shared.end();
    }
}

impl ServerShared {
    pub(crate) fn is_ending(&self) -> bool {
        self.ending.load(Ordering::SeqCst)
    }

    /// True for the users that are always admitted, without limits: root, and the user of the
    /// server.
    pub(crate) fn trusts(uid: u32) -> bool {
        uid == 0 || uid == rustix::process::geteuid().as_raw()
    }

    /// Returns the counters that the connections of a user share; `None` for a user without limits.
    fn share_of(&self, uid: u32) -> Option<Arc<UserShare>> {
        if ServerShared::trusts(uid) {
            return None;
        }
        let mut shares = lock(&self.shares);
        if let Some(share) = shares.get(&uid).and_then(Weak::upgrade) {
            return Some(share);
        }
        shares.retain(|_, share| share.strong_count() > 0);
        let share = Arc::new(UserShare::new(self.options.shares));
        shares.insert(uid, Arc::downgrade(&share));
        Some(share)
    }

    /// The number of the next connection.
    pub(crate) fn next_number(&self) -> u64 {
        self.next.fetch_add(1, Ordering::Relaxed)
    }

    /// Serves one connection until it ends.
    pub(crate) fn serve(
        &self,
        number: u64,
        socket: &Arc<OwnedFd>,
        peer: &Arc<FusePeer>,
        name: ConnectionNumber,
    ) {
        let PeerCredentials { pid, uid, .. } = *peer.connection.credentials();
        let session = socket.try_clone().map_err(|error| error.to_string()).and_then(|socket| {
            let fs = Arc::clone(peer) as Arc<dyn FileSystem>;
            let memory = Some(Arc::clone(peer) as Arc<dyn SharedMemory>);
            let groups = Arc::new(peer.connection.credentials().clone());
            // Only root acts for others.
            let watchdog = Some(self.watchdog.clone());
            let (share, tells_groups) = (self.share_of(uid), uid == 0);
            let of_user = share.clone();
            let client =
                ClientHooks { memory, groups: Some(groups), tells_groups, watchdog, share };
            let mut source: Arc<dyn RequestSource> =
                Arc::new(MessageSource::new(Arc::new(socket), of_user));
            if let Some(lanes) = &self.options.lanes {
                source = lanes.upgrade(uid, source).map_err(|errno| errno.to_string())?;
            }
            let options = messages::options(&self.options.session, self.options.lanes.is_some());
            let watched = Arc::downgrade(&source);
            let session =
                Session::start_on(source, fs, &options, client).map_err(|e| e.to_string())?;
            Ok((session, watched))
        });
        match session {
            Ok((session, source)) => {
                log::debug!("process {pid} of user {uid} is served");
                let (statistics, peer) = (session.statistics(), Arc::downgrade(peer));
                if let Some(entry) = lock(&self.clients).connections.get_mut(&number) {
                    entry.stage =
                        ConnectionStage::Served(ServedClient { statistics, peer, source });
                }
                if let Err(errno) = session.wait().durable {
                    LOG.warn(|| format!("what process {pid} wrote may not be durable: {errno}"));
                }
            }
            Err(error) => LOG.warn(|| format!("process {pid} is not served: {error}")),
        }
        self.part(peer, name);
    }

    /// Releases everything that the client of an ended connection has. From now on no client can
    /// begin as its copy.
    pub(crate) fn part(&self, peer: &FusePeer, name: ConnectionNumber) {
        lock(&self.clients).named.remove(&name);
        peer.connection.close();
    }

    /// Waits until the connections of ended clients are released.
    fn await_ended(&self) {
        let ended = self.ends.list();
        if ended.is_empty() {
            return;
        }
        let mut clients = lock(&self.clients);
        let deadline = Instant::now() + TAKE_BACK_PATIENCE;
        while ended.iter().any(|number| clients.connections.contains_key(number)) {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            let waited = self.changed.wait_timeout(clients, left);
            clients = waited.unwrap_or_else(|poisoned| poisoned.into_inner()).0;
        }
    }

    pub(crate) fn remove_client(&self, number: u64) {
        let mut clients = lock(&self.clients);
        let gone = clients.remove(number);
        if let Some(one) = &gone {
            self.ends.remove(&one.socket);
        }
        if let Some(AcceptedConnection { stage: ConnectionStage::Served(served), .. }) = gone {
            clients.past.get_or_insert_default().merge(&clients::final_counts(&served.statistics));
        }
        self.changed.notify_all();
    }

    /// Ends all connections, and waits for a limited time: a client may not take its replies, and a
    /// file system may not answer.
    fn end(&self) -> bool {
        // Current requests are still answered, and no more are received.
        let mut clean = self.end_by(Shutdown::Read, END_PATIENCE);
        if !clean {
            // Ends the waits for clients that take no replies.
            clean = self.end_by(Shutdown::Both, LAST_PATIENCE);
        }
        let left = lock(&self.clients).connections.len();
        if !clean && !self.left.swap(true, Ordering::SeqCst) {
            log::warn!("{left} connections have not ended");
        }
        self.threads.end();
        if let Some(name) = lock(&self.name).take() {
            name.remove();
        }
        clean
    }

    /// Shuts all connections down by `how`, and waits until they have ended.
    fn end_by(&self, how: Shutdown, patience: Duration) -> bool {
        let patience = if self.left.load(Ordering::SeqCst) { Duration::ZERO } else { patience };
        let deadline = Instant::now() + patience;
        let mut clients = lock(&self.clients);
        for connection in clients.connections.values() {
            let _ = rustix::net::shutdown(&*connection.socket, how);
        }
        while !clients.connections.is_empty() {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            let waited = self.changed.wait_timeout(clients, left);
            clients = waited.unwrap_or_else(|poisoned| poisoned.into_inner()).0;
        }
        clients.connections.is_empty()
    }
}

/// Binds `socket` to `path` and listens, in place of a socket without a listener. An abstract
/// address has no name.
fn give_name(socket: &OwnedFd, path: &Path, mode: u32) -> rustix::io::Result<Option<SocketName>> {
    if let Some(name) = path.as_os_str().as_bytes().strip_prefix(b"@") {
        rustix::net::bind(socket, &SocketAddrUnix::new_abstract_name(name)?)?;
        return rustix::net::listen(socket, name::BACKLOG).map(|()| None);
    }
    // Clients connect by the path, which must not be too long.
    SocketAddrUnix::new(path)?;
    let (directory, last) = name::parts(path)?;
    let directory = name::open_directory(directory)?;
    name::clear_stale(&directory, last, SocketType::SEQPACKET)?;
    SocketName::bind_in(socket, directory, last, rustix::fs::Mode::from_raw_mode(mode)).map(Some)
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}
