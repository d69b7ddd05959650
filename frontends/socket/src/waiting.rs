//! Connections that wait for INIT: new ones, and copies that are kept for children ([`COPY`]). The
//! accepting thread waits for all of them. A connection gets threads of its own when its client
//! sends INIT.

use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use defuse_connection::{PeerConnection, PeerCredentials};
use defuse_fs::{Errno, Result};
use defuse_wire::abi::{InHeader, OutHeader};
use defuse_wire::request::{DecodeOptions, DecodedRequest, RequestBody};
use defuse_wire::vendor::{COPY, ConnectionCopy, ConnectionNumber, ConnectionNumbers};
use rustix::event::Timespec;
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::net::{RecvFlags, SendAncillaryBuffer, SendFlags};
use zerocopy::{FromBytes, IntoBytes};

use crate::clients::{ConnectionStart, ServedClient};
use crate::messages::errno;
use crate::other_protocols::{OtherProtocol, PeerProcess};
use crate::peer::{self, FusePeer};
use crate::server::{AcceptedConnection, ClientTable, LOG, ServerShared, lock, next_step};

/// The time that a client has to send INIT.
pub(crate) const INIT_PATIENCE: Duration = Duration::from_secs(10);
/// The time that a client without admission has to send INIT.
const STRANGER_PATIENCE: Duration = Duration::from_secs(1);
/// Maximum number of connected clients that are not admitted.
const MOST_STRANGERS: usize = 64;
/// Maximum number of connections that are answered with an error. Further ones get no answer.
const MOST_REFUSED: usize = 64;
/// The interval of the checks for clients that send nothing.
const TICK: Duration = Duration::from_millis(200);
/// The event of the listening socket. Others have the number of their connection.
const LISTENER: u64 = u64::MAX;
/// The number of connections that are accepted in a row before messages of others are received.
const MOST_ACCEPTED: usize = 64;

/// The state of a connection.
pub(crate) enum ConnectionStage {
    /// The client has sent nothing.
    Silent { credentials: PeerCredentials, admitted: bool, until: Instant },
    /// There are too many connections: its first message is answered with this error.
    Refused { errno: Errno, until: Instant },
    /// The client has got a copy of another connection, and may send INIT at any time.
    Kept { peer: Arc<FusePeer>, name: ConnectionNumber },
    /// A thread waits for the beginning or the end of the connection.
    Begun,
    /// The client is served.
    Served(ServedClient),
}

impl ConnectionStage {
    /// True while the accepting thread waits for the client.
    fn waits(&self) -> bool {
        matches!(
            self,
            ConnectionStage::Silent { .. }
                | ConnectionStage::Refused { .. }
                | ConnectionStage::Kept { .. }
        )
    }
}

/// The sockets that the accepting thread waits for.
pub(crate) struct SocketWaitSet(OwnedFd);

/// The sockets of connections. Clients that have ended are found in as many steps as there are such
/// clients.
pub(crate) struct EndedClients(OwnedFd);

/// The number of ended clients that are found at once. Others are found when these are gone.
const MOST_ENDED: usize = 256;

impl EndedClients {
    pub(crate) fn new() -> Result<EndedClients> {
        epoll::create(CreateFlags::CLOEXEC).map(EndedClients).map_err(errno)
    }

    /// epoll reports the end of a socket without a requested event, epoll_ctl(2).
    fn add(&self, socket: &OwnedFd, number: u64) {
        let added = epoll::add(&self.0, socket, EventData::new_u64(number), EventFlags::empty());
        if let Err(error) = added {
            LOG.warn(|| format!("the end of a client will be noticed late: {error}"));
        }
    }

    pub(crate) fn remove(&self, socket: &OwnedFd) {
        let _ = epoll::delete(&self.0, socket);
    }

    /// The numbers of the connections of clients that have ended.
    pub(crate) fn list(&self) -> Vec<u64> {
        let mut events = [MaybeUninit::<epoll::Event>::uninit(); MOST_ENDED];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        match epoll::wait(&self.0, &mut events, Some(&now)) {
            Ok((ended, _)) => ended.iter().map(|event| event.data.u64()).collect(),
            Err(_) => Vec::new(),
        }
    }
}

impl SocketWaitSet {
    pub(crate) fn new(listener: &OwnedFd) -> Result<SocketWaitSet> {
        let waiting = SocketWaitSet(epoll::create(CreateFlags::CLOEXEC).map_err(errno)?);
        waiting.add(listener, LISTENER)?;
        Ok(waiting)
    }

    fn add(&self, socket: &OwnedFd, number: u64) -> Result<()> {
        epoll::add(&self.0, socket, EventData::new_u64(number), EventFlags::IN).map_err(errno)
    }

    /// Sockets that were not added are allowed.
    fn remove(&self, socket: &OwnedFd) {
        let _ = epoll::delete(&self.0, socket);
    }

    /// Returns the numbers of the sockets that can be received from, within a tick.
    fn find_ready(&self) -> Vec<u64> {
        let mut events = [MaybeUninit::<epoll::Event>::uninit(); 64];
        let tick = Timespec { tv_sec: 0, tv_nsec: TICK.subsec_nanos().into() };
        match epoll::wait(&self.0, &mut events, Some(&tick)) {
            Ok((ready, _)) => ready.iter().map(|event| event.data.u64()).collect(),
            Err(_) => Vec::new(),
        }
    }
}

/// The first message of a socket, which stays in it.
enum FirstMessage<'a> {
    None,
    Message(&'a [u8]),
    End,
}

impl ServerShared {
    /// Accepts connections and receives their first messages, until the server ends.
    pub(crate) fn listen(self: &Arc<Self>) {
        let mut looked = Instant::now();
        while !self.is_ending() {
            for number in self.waiting.find_ready() {
                match number {
                    LISTENER => self.accept(),
                    number => self.handle_message(number),
                }
            }
            if looked.elapsed() >= TICK {
                looked = Instant::now();
                self.end_those(|stage| match stage {
                    ConnectionStage::Silent { until, credentials, .. } if *until <= looked => {
                        let PeerCredentials { pid, uid, .. } = credentials;
                        LOG.warn(|| {
                            format!("process {pid} of user {uid} has connected and sends nothing")
                        });
                        true
                    }
                    ConnectionStage::Refused { until, .. } => *until <= looked,
                    _ => false,
                });
            }
        }
        self.end_those(|_| true);
    }

    fn accept(self: &Arc<Self>) {
        for _ in 0..MOST_ACCEPTED {
            match rustix::net::accept_with(&self.listener, rustix::net::SocketFlags::CLOEXEC) {
                Ok(socket) => self.admit(socket),
                Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => return,
                Err(_) if self.is_ending() => return,
                Err(error) => {
                    log::warn!("a connection was not accepted: {error}");
                    // For example, no descriptor is free. Do not spin.
                    return std::thread::sleep(Duration::from_millis(100));
                }
            }
        }
    }

    /// Adds `socket` to the connections, if its peer is admitted or may prove that it is.
    fn admit(self: &Arc<Self>, socket: OwnedFd) {
        let credentials = match peer::credentials(&socket) {
            Ok(credentials) => credentials,
            Err(errno) => {
                return LOG.warn(|| format!("a connection whose user is not known ({errno})"));
            }
        };
        let (pid, uid) = (credentials.pid, credentials.uid);
        let admitted = self.is_admitted(uid);
        let socket = Arc::new(socket);
        let number = self.next_number();
        {
            let mut clients = lock(&self.clients);
            let refusal = self.full(&clients, uid).map(|(errno, why)| {
                LOG.warn(|| format!("process {pid}: {why}"));
                errno
            });
            if refusal.is_some() && clients.refused >= MOST_REFUSED {
                return;
            }
            // A process that has changed its user since it connected makes a connection for its
            // child, and identifies itself by the number of its own connection.
            if !admitted && refusal.is_none() && clients.strangers >= MOST_STRANGERS {
                return LOG.warn(|| format!("process {pid} of user {uid} is not admitted"));
            }
            let begun = ConnectionStart { number, pid, at: Instant::now() };
            let patience = if admitted { INIT_PATIENCE } else { STRANGER_PATIENCE };
            let until = begun.at + patience;
            let stage = match refusal {
                Some(errno) => {
                    ConnectionStage::Refused { errno, until: begun.at + STRANGER_PATIENCE }
                }
                None => ConnectionStage::Silent { credentials, admitted, until },
            };
            let (socket, is_refused) = (Arc::clone(&socket), refusal.is_some());
            clients.add(number, AcceptedConnection { socket, uid, begun, stage, is_refused });
        }
        self.ends.add(&socket, number);
        if let Err(errno) = self.waiting.add(&socket, number) {
            LOG.warn(|| format!("process {pid} cannot be waited for: {errno}"));
            return self.end_waiting(number);
        }
        // Most clients have sent their first message by now.
        self.handle_message(number);
    }

    /// The reason why a user has no further connection, if there is one.
    fn full(&self, clients: &ClientTable, uid: u32) -> Option<(Errno, String)> {
        let (all, most) =
            (clients.connections.len() - clients.refused, self.options.max_connections);
        if all >= most {
            return Some((
                Errno::ENFILE,
                format!("there are {most} connections already (--max-connections)"),
            ));
        }
        let (own, most) = (clients.count_of_user(uid), self.options.max_connections_of_user);
        let is_full = own >= most && !ServerShared::trusts(uid);
        is_full.then(|| {
            let text =
                format!("user {uid} has {own} connections already (--max-connections-of-user)");
            (Errno::EMFILE, text)
        })
    }

    fn is_admitted(&self, uid: u32) -> bool {
        ServerShared::trusts(uid) || self.options.admission.names(uid)
    }

    /// Handles the message of a waiting connection, if there is one.
    fn handle_message(self: &Arc<Self>, number: u64) {
        let mut guard = lock(&self.clients);
        let clients = &mut *guard;
        let waiting = clients.connections.get_mut(&number).filter(|one| one.stage.waits());
        let Some(one) = waiting else { return };
        let (socket, pid, uid) = (Arc::clone(&one.socket), one.begun.pid, one.uid);
        let mut room = [0; 256];
        let message = match peek(&socket, &mut room) {
            FirstMessage::None => return,
            FirstMessage::End => {
                drop(guard);
                return self.end_waiting(number);
            }
            FirstMessage::Message(message) => message,
        };
        let Some(stage) = clients.take_stage(number) else { return };
        if let ConnectionStage::Refused { errno, .. } = stage {
            drop(guard);
            if let Ok((header, _)) = InHeader::read_from_prefix(message) {
                let _ = answer(&socket, header.unique, -errno.raw());
            }
            return self.end_stage(number, &socket, stage);
        }
        let asks_copy = parse_copy(message);
        let next = match asks_copy {
            Some((unique, names)) => match clients.find_copied(names, stage) {
                Ok(copied) => {
                    drop(guard);
                    self.waiting.remove(&socket);
                    let begin = ConnectionWork::Copy { copied, own: names.copy_number(), unique };
                    return self.begin_apart(number, socket, begin);
                }
                Err(refused) => Err(refused),
            },
            None => self.decide(clients, message, stage),
        };
        let refused = match next {
            Ok(begin) => {
                drop(guard);
                self.waiting.remove(&socket);
                return self.begin_apart(number, socket, begin);
            }
            Err(RefusedConnection { why, errno, stage }) => {
                LOG.warn(|| format!("process {pid} of user {uid} {why}"));
                (errno, stage)
            }
        };
        drop(guard);
        let (errno, stage) = refused;
        if let Some((unique, _)) = asks_copy {
            let _ = answer(&socket, unique, -errno.raw());
        }
        self.end_stage(number, &socket, stage);
    }

    /// Makes a copy of a connection for a child that may need it, which then waits with all other
    /// connections. Copying takes time in proportion to the connection's inodes and open files.
    /// Therefore a thread of its own makes the copy, and no lock of the server is held. False if
    /// the connection ends.
    fn copy_apart(
        &self,
        number: u64,
        socket: &OwnedFd,
        copy: (&FusePeer, ConnectionNumber, u64),
    ) -> bool {
        let (copied, own, unique) = copy;
        let connection = match copied.connection.copy() {
            Ok(connection) => connection,
            Err(errno) => {
                let uid = copied.connection.credentials().uid;
                LOG.warn(|| format!("a child of user {uid}: the user cannot have as much again"));
                let _ = answer(socket, unique, -errno.raw());
                return false;
            }
        };
        let (pages, versions) = (copied.pages.clone(), copied.versions.clone());
        let peer = Arc::new(FusePeer { connection, pages, versions });
        let is_kept = {
            let mut clients = lock(&self.clients);
            let is_free = !self.is_ending() && !clients.named.contains_key(&own);
            match clients.connections.get_mut(&number).filter(|_| is_free) {
                Some(one) => {
                    one.stage = ConnectionStage::Kept { peer: Arc::clone(&peer), name: own };
                    clients.named.insert(own, Arc::clone(&peer));
                    true
                }
                None => false,
            }
        };
        if !is_kept {
            peer.connection.close();
            return false;
        }
        let is_notified =
            answer(socket, unique, 0).is_ok() && self.waiting.add(socket, number).is_ok();
        // The client is gone. At the end of the server, another thread may have handled it.
        let is_ours = !is_notified && lock(&self.clients).take_stage(number).is_some();
        if is_ours {
            self.part(&peer, own);
        }
        !is_ours
    }

    /// Decides about a connection whose first message is not [`COPY`].
    fn decide(
        &self,
        clients: &mut ClientTable,
        message: &[u8],
        stage: ConnectionStage,
    ) -> std::result::Result<ConnectionWork, RefusedConnection> {
        let names = names_of(message);
        let (credentials, admitted) = match stage {
            ConnectionStage::Silent { credentials, admitted, .. } => (credentials, admitted),
            ConnectionStage::Kept { peer, name }
                if names.is_some_and(|names| names.own == name) =>
            {
                return Ok(ConnectionWork::Client { peer, name });
            }
            stage => {
                return Err(RefusedConnection {
                    stage,
                    ..RefusedConnection::with_reason("does not use its copy")
                });
            }
        };
        if let Some(others) = self.options.others.as_ref().filter(|_| admitted)
            && others.knows(message)
        {
            let PeerCredentials { pid, uid, .. } = credentials;
            return Ok(ConnectionWork::Other(Arc::clone(others), PeerProcess { pid, uid }));
        }
        let Some(ConnectionNumbers { predecessor, own }) = names else {
            return Err(RefusedConnection::with_reason("has connected and does not send INIT"));
        };
        if clients.named.contains_key(&own) {
            return Err(RefusedConnection::with_reason("has chosen a number that is taken"));
        }
        let connection = match clients.named.get(&predecessor).filter(|_| predecessor != 0) {
            // A program has only the rights of the user as which it begins.
            Some(peer) => peer.connection.prepare_exec(credentials),
            None if !admitted => return Err(RefusedConnection::with_reason("is not admitted")),
            None if predecessor != 0 => {
                return Err(RefusedConnection::with_reason(
                    "is the heir of a connection that has ended",
                ));
            }
            None => {
                let (fs, service) = (Arc::clone(&self.fs), Arc::clone(&self.service));
                PeerConnection::new(fs, service, credentials)
            }
        };
        let (pages, versions) = (self.options.pages.clone(), self.options.versions.clone());
        let names = versions.as_ref().and_then(|versions| versions.names(connection.credentials()));
        if let Some(names) = names {
            connection.share(names);
        }
        let peer = Arc::new(FusePeer { connection, pages, versions });
        if own != 0 {
            clients.named.insert(own, Arc::clone(&peer));
        }
        Ok(ConnectionWork::Client { peer, name: own })
    }

    /// Serves a connection on a thread of its own. Without one, the objects that it holds are
    /// released here.
    fn begin_apart(self: &Arc<Self>, number: u64, socket: Arc<OwnedFd>, begin: ConnectionWork) {
        let kept = begin.clone();
        let shared = Arc::clone(self);
        let started = self.threads.run(Box::new(move || {
            match begin {
                ConnectionWork::Client { peer, name } => shared.serve(number, &socket, &peer, name),
                ConnectionWork::Other(others, who) => {
                    others.serve(&socket, who, &|| shared.is_ending());
                }
                ConnectionWork::End { peer, name } => shared.part(&peer, name),
                ConnectionWork::Copy { copied, own, unique } => {
                    if shared.copy_apart(number, &socket, (&copied, own, unique)) {
                        return;
                    }
                }
            }
            shared.remove_client(number);
        }));
        if let Err(error) = started {
            LOG.warn(|| {
                let next = next_step(Errno::EAGAIN);
                format!("there is no thread for a connection: {error}{next}")
            });
            if let ConnectionWork::Client { peer, name } | ConnectionWork::End { peer, name } = kept
            {
                self.part(&peer, name);
            }
            self.remove_client(number);
        }
    }

    /// Ends a waiting connection.
    fn end_waiting(self: &Arc<Self>, number: u64) {
        let mut clients = lock(&self.clients);
        let waiting = clients.connections.get_mut(&number).filter(|one| one.stage.waits());
        let Some(one) = waiting else { return };
        let socket = Arc::clone(&one.socket);
        let Some(stage) = clients.take_stage(number) else { return };
        drop(clients);
        self.end_stage(number, &socket, stage);
    }

    /// Ends a waiting connection, whose stage was taken out.
    fn end_stage(self: &Arc<Self>, number: u64, socket: &Arc<OwnedFd>, stage: ConnectionStage) {
        self.waiting.remove(socket);
        match stage {
            ConnectionStage::Kept { peer, name } => {
                self.begin_apart(number, Arc::clone(socket), ConnectionWork::End { peer, name });
            }
            _ => self.remove_client(number),
        }
    }

    /// Ends the waiting connections that `ends` chooses.
    fn end_those(self: &Arc<Self>, ends: impl Fn(&ConnectionStage) -> bool) {
        let clients = lock(&self.clients);
        let all = clients.connections.iter();
        let ended = all.filter(|(_, one)| one.stage.waits() && ends(&one.stage));
        let ended: Vec<u64> = ended.map(|(&number, _)| number).collect();
        drop(clients);
        ended.into_iter().for_each(|number| self.end_waiting(number));
    }
}

/// The work of a thread for a connection.
#[derive(Clone)]
enum ConnectionWork {
    /// The client is served.
    Client { peer: Arc<FusePeer>, name: ConnectionNumber },
    /// A connection of another protocol.
    Other(Arc<dyn OtherProtocol>, PeerProcess),
    /// The connection is copied.
    Copy { copied: Arc<FusePeer>, own: ConnectionNumber, unique: u64 },
    /// The client has ended, and the file system may need some time to release its objects.
    End { peer: Arc<FusePeer>, name: ConnectionNumber },
}

/// A refused connection, which ends.
struct RefusedConnection {
    why: &'static str,
    errno: Errno,
    stage: ConnectionStage,
}

impl RefusedConnection {
    fn with_reason(why: &'static str) -> RefusedConnection {
        RefusedConnection { why, errno: Errno::EPROTO, stage: ConnectionStage::Begun }
    }
}

impl ClientTable {
    /// Adds a connection.
    fn add(&mut self, number: u64, connection: AcceptedConnection) {
        match connection.stage {
            ConnectionStage::Refused { .. } => self.refused += 1,
            _ => *self.of_users.entry(connection.uid).or_default() += 1,
        }
        if let ConnectionStage::Silent { admitted: false, .. } = connection.stage {
            self.strangers += 1;
        }
        self.connections.insert(number, connection);
    }

    /// Removes a connection.
    pub(crate) fn remove(&mut self, number: u64) -> Option<AcceptedConnection> {
        let one = self.connections.remove(&number)?;
        match (one.is_refused, self.of_users.get_mut(&one.uid)) {
            (true, _) => self.refused -= 1,
            (false, Some(count)) if *count > 1 => *count -= 1,
            (false, _) => drop(self.of_users.remove(&one.uid)),
        }
        Some(one)
    }

    /// The number of connections of a user, without those that are refused.
    fn count_of_user(&self, uid: u32) -> usize {
        self.of_users.get(&uid).copied().unwrap_or(0)
    }

    /// Takes the stage of a waiting connection, which afterwards no longer waits.
    fn take_stage(&mut self, number: u64) -> Option<ConnectionStage> {
        let one = self.connections.get_mut(&number).filter(|one| one.stage.waits())?;
        let stage = std::mem::replace(&mut one.stage, ConnectionStage::Begun);
        if let ConnectionStage::Silent { admitted: false, .. } = stage {
            self.strangers -= 1;
        }
        Some(stage)
    }

    /// Finds the connection that is to be copied.
    fn find_copied(
        &self,
        names: ConnectionCopy,
        stage: ConnectionStage,
    ) -> std::result::Result<Arc<FusePeer>, RefusedConnection> {
        let own = names.copy_number();
        if !matches!(stage, ConnectionStage::Silent { .. }) {
            return Err(RefusedConnection {
                stage,
                ..RefusedConnection::with_reason("asks for a copy twice")
            });
        }
        if own == 0 || self.named.contains_key(&own) {
            return Err(RefusedConnection::with_reason("has chosen a number that is taken"));
        }
        let copied = self.named.get(&names.copy_of()).cloned();
        copied
            .ok_or(RefusedConnection::with_reason("asks for a copy of a connection that has ended"))
    }
}

/// Returns the number of the request and the connections in a message [`COPY`].
fn parse_copy(message: &[u8]) -> Option<(u64, ConnectionCopy)> {
    let (header, rest) = InHeader::read_from_prefix(message).ok()?;
    let names = ConnectionCopy::read_from_bytes(rest).ok()?;
    (header.opcode == COPY && header.len as usize == message.len())
        .then_some((header.unique, names))
}

/// Returns the connection numbers in the INIT of a client. `None` if the message is no INIT.
fn names_of(message: &[u8]) -> Option<ConnectionNumbers> {
    match DecodedRequest::parse(message, &DecodeOptions::default()) {
        Ok(DecodedRequest { body: RequestBody::Init(init), .. }) => {
            Some(ConnectionNumbers::from_init(&init))
        }
        _ => None,
    }
}

/// Takes the message out of the socket, and answers it.
fn answer(socket: &OwnedFd, unique: u64, error: i32) -> Result<()> {
    let mut room = [0; size_of::<InHeader>()];
    rustix::net::recv(socket, &mut room[..], RecvFlags::DONTWAIT).map_err(errno)?;
    let header = OutHeader { len: size_of::<OutHeader>() as u32, error, unique };
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    let nothing = &mut SendAncillaryBuffer::default();
    let parts = [IoSlice::new(header.as_bytes())];
    rustix::net::sendmsg(socket, &parts, nothing, flags).map_err(errno).map(drop)
}

/// The beginning of the next message, which stays in the socket.
fn peek<'a>(socket: &OwnedFd, room: &'a mut [u8]) -> FirstMessage<'a> {
    match rustix::net::recv(socket, &mut *room, RecvFlags::PEEK | RecvFlags::DONTWAIT) {
        Ok((0, _)) => FirstMessage::End,
        Ok((len, _)) => FirstMessage::Message(&room[..len]),
        Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => FirstMessage::None,
        Err(_) => FirstMessage::End,
    }
}
