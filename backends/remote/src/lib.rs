//! A file system that another process serves: `socket:PATH` of `defuse serve`, or `fuse:COMMAND`, a
//! FUSE program without a mount.
//!
//! [`RemoteClient`] is a [`FileSystem`](defuse_fs::FileSystem) that turns each call into the
//! request that the kernel would send. It works with servers of this project and with others that
//! speak FUSE on an open descriptor. It caches nothing.
//!
//! Replies are not trusted: an invalid reply results in `EIO`, and a server that does not speak
//! FUSE is disconnected.

mod chained;
mod connection;
mod data;
mod dir;
mod exec_handover;
mod files;
mod forget;
mod fork_handover;
mod fs;
#[cfg(any(test, fuzzing))]
mod fuzzed;
mod init;
mod kind;
mod lanes;
mod listed_ahead;
mod notifications;
mod opened_ahead;
mod pages;
mod paths;
mod prefetch_interest;
mod prefetch_rate;
mod program;
mod reconnect;
mod reply_log;
mod slots;
mod sys;
mod versions;
mod whole_files;

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use defuse_fs::{Caller, Caps, Context, Errno, File, Ino, Result};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, sockopt};

use crate::reply_log::log_decode_error;
use crate::sys::{errno, peer_user};
use connection::ClientConnection;
use defuse_wire::abi::{self, Opcode};
use defuse_wire::decode;
use defuse_wire::encode::EncodedRequest;
use defuse_wire::vendor::{CALLER_GROUPS, ConnectionNumber, ConnectionNumbers};
pub use exec_handover::{HandoverClient, InodeHandover, OpenFileHandover};
use forget::PendingForgets;
pub use fork_handover::ConnectionHandover;
#[cfg(fuzzing)]
pub use fuzzed::answer as fuzz_answer;
use init::ServerAgreement;
pub use kind::{PROGRAM, SHARED, SOCKET};
pub use lanes::ClientLaneCounts;
use notifications::NoticeQueue;
pub use program::{
    FuseProgram, ProgramError, inherited_mount_point, place_mount_point, set_starter,
};
pub use reconnect::{MovingClient, ReconnectingClient};

/// The reason why a client could not be created.
#[derive(Debug, thiserror::Error)]
pub enum RemoteError {
    /// Connecting failed, for example because no process listens.
    #[error("cannot connect to {path}: {errno}; is it served (`defuse serve`)?")]
    Connect {
        /// The socket.
        path: PathBuf,
        /// The error.
        errno: Errno,
    },
    /// An untrusted user listens.
    #[error(
        "{path} is served by the untrusted user {uid}: serve it as root or \
         as the user of this process"
    )]
    Stranger {
        /// The socket.
        path: PathBuf,
        /// The user of the server.
        uid: u32,
    },
    /// The socket cannot be used.
    #[error("the socket to the server: {0}")]
    Socket(Errno),
    /// The server did not answer INIT.
    #[error("the server did not answer INIT: {0}; it may have refused this user, see its log")]
    Init(Errno),
    /// The server has as many connections of this user as it allows.
    #[error(
        "the server has as many connections of this user as it allows: end some, or raise its limit \
         (`defuse serve --max-connections-of-user`)"
    )]
    UserIsFull,
    /// The server has as many connections as it allows.
    #[error(
        "the server has as many connections as it allows: end some, or raise its limit \
         (`defuse serve --max-connections`)"
    )]
    ServerIsFull,
    /// The reply to INIT has an invalid length.
    #[error("the server answered INIT with {0} bytes, which is not a reply of FUSE 7")]
    BadInit(usize),
    /// The server made no copy of a connection for a child.
    #[error("the server made no copy of the connection for a child: {0}")]
    Copy(Errno),
    /// The server did not report which inodes and files it has handed over to the next program.
    #[error("the server does not hand files over to the next program: {0}")]
    Heir(Errno),
    /// The server speaks another version.
    #[error("the server speaks FUSE {0}.{1}; 7.{oldest} or later is needed", oldest = init::OLDEST_MINOR)]
    Version(u32, u32),
    /// The server offers no shared memory.
    #[error("the server offers no shared memory: serve with --shared, or use socket:PATH")]
    NoLanes,
    /// The memory that the server has offered cannot be used.
    #[error("the memory that the server shares cannot be used: {0}")]
    Lanes(Errno),
    /// The client does not know the path of its server.
    #[error("the connection was passed as an open socket: cannot connect again")]
    NoPath,
}

/// The user of the process that listened for the connected `socket`, as the kernel vouches for it.
///
/// # Errors
///
/// The errors of getsockopt(2).
pub fn user_of_server(socket: impl std::os::fd::AsFd) -> Result<u32> {
    peer_user(socket)
}

/// Settings of a client.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RemoteOptions {
    /// A request that takes longer ends the connection, like the kernel's `request_timeout`. `None`
    /// waits as long as the server lives.
    pub timeout: Option<Duration>,
    /// The lowest number for the descriptor of the socket, if possible: an in-process frontend
    /// reserves lower ones for its program. With 0, the default, any number is used.
    pub descriptors_from: u16,
    /// The use of shared memory for requests.
    pub lanes: LaneUse,
    /// A write with `O_APPEND` is sent with the size of the file as its offset, as the kernel does,
    /// one at a time. For programs that write at the offset: servers of this project find the end
    /// by themselves.
    pub appends_at_size: bool,
}

impl RemoteOptions {
    fn init_patience(&self) -> Duration {
        self.timeout.map_or(INIT_PATIENCE, |timeout| timeout.min(INIT_PATIENCE))
    }
}

/// The use of shared memory for requests (`defuse serve --shared`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LaneUse {
    /// Messages only.
    #[default]
    Never,
    /// Used if the server offers it.
    IfOffered,
    /// The server must offer it ([`RemoteError::NoLanes`]). It may still have none left for this
    /// connection, which then uses messages.
    Required,
}

/// The time for INIT. Without it, a silent server would block its client forever.
const INIT_PATIENCE: Duration = Duration::from_secs(30);
/// The time for DESTROY.
const DESTROY_PATIENCE: Duration = Duration::from_secs(1);

/// A file system at the other end of a socket.
///
/// Any number of threads may call it at once. A child process must not use the client of its parent
/// (`ENOTCONN`): see [`hand_over`](RemoteClient::hand_over).
///
/// Notifications of the server are delivered by a thread that waits for a reply, before it returns.
/// If no thread waits, [`deliver`](RemoteClient::deliver) does so. A thread of its own
/// (`defuse-client`) exists only during a wait for a lock or a poll of a file.
pub struct RemoteClient {
    shared: Arc<RemoteShared>,
}

/// The state that the file system and its thread share.
struct RemoteShared {
    connection: ClientConnection,
    agreement: ServerAgreement,
    caps: Caps,
    /// Opcodes that the server has answered with `ENOSYS`, by their numbers.
    missing: AtomicU64,
    forgets: Arc<PendingForgets>,
    pages: pages::FilePages,
    paths: paths::ServedNameCache,
    whole: whole_files::WholeFiles,
    listed_ahead: listed_ahead::ListingPrefetch,
    opened_ahead: opened_ahead::OpenPrefetch,
    notices: Arc<NoticeQueue>,
    /// Number of requests whose replies no caller waits for, polls included.
    expected: AtomicU64,
    listening: AtomicBool,
    /// Held during a write with `O_APPEND` whose offset is the size.
    appends: Mutex<()>,
    options: RemoteOptions,
    path: Option<PathBuf>,
    names: ConnectionNumbers,
    /// The program to end with the file system.
    program: Mutex<Option<FuseProgram>>,
}

impl RemoteClient {
    /// Connects to the server that listens at `path`; a path that begins with `@` is abstract.
    /// Every process may bind an abstract name, so that its server must be root or the user of this
    /// process ([`RemoteError::Stranger`]). A path is protected by the permissions of its
    /// directory.
    pub fn connect(
        path: &Path,
        options: RemoteOptions,
    ) -> std::result::Result<RemoteClient, RemoteError> {
        RemoteClient::connect_within(path, options, None, |uid| {
            let is_abstract = path.as_os_str().as_bytes().starts_with(b"@");
            !is_abstract || uid == 0 || uid == rustix::process::geteuid().as_raw()
        })
    }

    /// With `patience`, neither connecting nor INIT takes longer.
    fn connect_within(
        path: &Path,
        options: RemoteOptions,
        patience: Option<Duration>,
        trusts: impl FnOnce(u32) -> bool,
    ) -> std::result::Result<RemoteClient, RemoteError> {
        let own = new_number().map_err(RemoteError::Socket)?;
        let names = ConnectionNumbers { own, ..ConnectionNumbers::default() };
        let socket = connect_socket(path, options.descriptors_from, patience, trusts)?;
        let patience = patience.unwrap_or(INIT_PATIENCE);
        RemoteClient::start_within(patience, socket, options, Some(path.to_path_buf()), names)
    }

    /// Uses the server at the other end of `socket`, which has the type `SOCK_SEQPACKET`.
    pub fn from_socket(
        socket: OwnedFd,
        options: RemoteOptions,
    ) -> std::result::Result<RemoteClient, RemoteError> {
        RemoteClient::start(socket, options)
    }

    /// Starts `program`, which serves during the life of the client.
    pub fn start_program(
        mut program: FuseProgram,
        options: RemoteOptions,
    ) -> std::result::Result<RemoteClient, ProgramError> {
        let socket = program.take_socket();
        let options = RemoteOptions { appends_at_size: true, ..options };
        match RemoteClient::start(socket, options) {
            Ok(client) => {
                *lock(&client.shared.program) = Some(program);
                Ok(client)
            }
            Err(error) => Err(program.into_error(error)),
        }
    }

    /// Requests a copy of this connection from the server, for a child process:
    /// [`ConnectionHandover`]. A parent does so before fork(2), while no other thread makes
    /// requests.
    ///
    /// # Errors
    ///
    /// [`RemoteError::NoPath`] for a client that was not created by
    /// [`connect`](RemoteClient::connect), [`RemoteError::Stranger`] if another user listens there
    /// now, and [`RemoteError::Copy`] if the server refuses.
    pub fn hand_over(&self) -> std::result::Result<ConnectionHandover, RemoteError> {
        // The copy would also have these open files, without knowing of them.
        self.shared.close_ahead();
        ConnectionHandover::copy_connection(self)
    }

    /// Like [`hand_over`](RemoteClient::hand_over), but the server makes the copy when the child
    /// uses it. `socket` is the child's own descriptor of this connection. The child calls this,
    /// and nothing may use the connection before the child has ended or executed a program, like a
    /// parent that waits for that in vfork(2).
    ///
    /// # Errors
    ///
    /// [`RemoteError::NoPath`] for a client that was not created by
    /// [`connect`](RemoteClient::connect).
    pub fn hand_over_when_used(
        &self,
        socket: OwnedFd,
    ) -> std::result::Result<ConnectionHandover, RemoteError> {
        ConnectionHandover::copy_when_used(self, socket)
    }

    /// Closes the files and directories that were opened in advance and not used, and reports reads
    /// to the server that it does not know yet.
    pub fn give_back(&self) {
        self.shared.close_ahead();
    }

    /// Reports reads to the server that it does not know yet. Must be called before the connection
    /// ends with the process, which would otherwise lose an access time.
    pub fn report_reads(&self) {
        let (uid, gid) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
        let cx = Context::new(Caller { uid, gid, pid: 0 });
        self.shared.report_reads(&cx, Opcode::Getattr);
    }

    /// Creates another connection to the same server, for the program that this process is about to
    /// execute. It begins with nothing and takes over what the program inherits. The server frees
    /// all other objects when this connection ends. It acts for the present user of the process,
    /// and leaves the [lanes](RemoteClient::unused_lanes) to that program.
    ///
    /// # Errors
    ///
    /// The errors of [`hand_over`](RemoteClient::hand_over).
    pub fn prepare_exec(
        &self,
        handovers: &[InodeHandover],
    ) -> std::result::Result<HandoverClient, RemoteError> {
        let shared = &self.shared;
        let path = shared.path.as_deref().ok_or(RemoteError::NoPath)?;
        HandoverClient::connect((self.as_fd(), shared.names.own), path, shared.options, handovers)
    }

    /// Returns the memory that all mappings of an open file share, across all clients of the
    /// server. At least `range` of the file is filled; offsets in the memory are those in the file.
    /// Must be released by [`unmap`](RemoteClient::unmap) after the mapping is removed. Fails with
    /// `EACCES` if the file is not open for this access, and with `ENOSYS` if the server does not
    /// support it.
    pub fn map(
        &self,
        cx: &Context<'_>,
        file: File,
        range: std::ops::Range<u64>,
        writes: bool,
    ) -> Result<OwnedFd> {
        if self.shared.lacks(Opcode::Setupmapping) {
            return Err(Errno::ENOSYS);
        }
        let write = if writes { abi::FUSE_SETUPMAPPING_FLAG_WRITE } else { 0 };
        let flags = abi::FUSE_SETUPMAPPING_FLAG_READ | write;
        let mapped = self.shared.mapping(cx, file, range, flags);
        if matches!(mapped, Err(Errno::ENOSYS)) {
            self.shared.missing.fetch_or(1 << Opcode::Setupmapping as u32, Ordering::Relaxed);
        }
        mapped
    }

    /// Releases a mapping. Changes through it are then in the file system.
    pub fn unmap(&self, cx: &Context<'_>, ino: Ino) -> Result<()> {
        let request = EncodedRequest::new(Opcode::Removemapping, cx, ino)
            .with(&abi::RemovemappingIn { count: 1 })
            .with(&abi::RemovemappingOne::default());
        self.shared.request(cx, request, decode::check_empty)
    }

    /// The state of the connection as text without spaces, for an executed program that inherits
    /// the descriptor. It is secret: it grants the rights of the connection.
    pub fn to_text(&self) -> String {
        let ServerAgreement { minor, flags, max_write, max_read, .. } = self.shared.agreement;
        let granularity = self.shared.agreement.time_granularity_ns();
        let missing = self.shared.missing.load(Ordering::Relaxed);
        let own = self.shared.names.own;
        format!(
            "{minor:x},{flags:x},{max_write:x},{max_read:x},{granularity:x},{missing:x},{own:x}"
        )
    }

    /// Returns the memory of the lanes that the server has offered to the [next
    /// program](RemoteClient::prepare_exec). `None` if there are none, or if they were taken.
    pub fn unused_lanes(&self) -> Option<OwnedFd> {
        self.shared.connection.take_offered()
    }

    /// Restores the connection over `socket` to the server at `path`, from the
    /// [text](RemoteClient::to_text) and the [lanes](RemoteClient::unused_lanes) of the previously
    /// executed program. Returns `None` if the text is invalid. Without lanes that can be used, it
    /// sends messages.
    pub fn from_text(
        socket: OwnedFd,
        lanes: Option<OwnedFd>,
        text: &str,
        path: &Path,
        options: RemoteOptions,
    ) -> Option<RemoteClient> {
        let mut numbers = text.split(',').map(|word| u128::from_str_radix(word, 16).ok());
        let mut next = || numbers.next().flatten();
        let minor = u32::try_from(next()?).ok()?;
        let flags = u64::try_from(next()?).ok()?;
        let most = (usize::try_from(next()?).ok()?, usize::try_from(next()?).ok()?);
        let granularity = u32::try_from(next()?).ok()?;
        let missing = u64::try_from(next()?).ok()?;
        let names = ConnectionNumbers { own: next()?, ..ConnectionNumbers::default() };
        let agreement = ServerAgreement::from_predecessor(minor, flags, most, granularity);
        ClientConnection::prepare(&socket).ok()?;
        let connection = RemoteClient::connection(socket, options);
        let client = RemoteClient::with(connection, agreement, options, Some(path), names);
        client.shared.missing.store(missing, Ordering::Relaxed);
        if let Some(lanes) = lanes.filter(|_| options.lanes != LaneUse::Never)
            && let Err(errno) = client.shared.connection.use_these_lanes(lanes)
        {
            log::debug!("requests are messages: the lanes cannot be used: {errno}");
        }
        Some(client)
    }

    /// In the parent: leaves the connection to another process. Dropping this does not end it.
    pub fn leave_to_child(self) {
        self.shared.connection.set_owner(0);
    }

    fn start(
        socket: OwnedFd,
        options: RemoteOptions,
    ) -> std::result::Result<RemoteClient, RemoteError> {
        RemoteClient::start_within(
            options.init_patience(),
            socket,
            options,
            None,
            ConnectionNumbers::default(),
        )
    }

    fn start_within(
        patience: Duration,
        socket: OwnedFd,
        options: RemoteOptions,
        path: Option<PathBuf>,
        names: ConnectionNumbers,
    ) -> std::result::Result<RemoteClient, RemoteError> {
        ClientConnection::prepare(&socket).map_err(RemoteError::Socket)?;
        let (connection, notices) = RemoteClient::connection(socket, options);
        let agreement = introduce(&connection, names, patience)?;
        if options.lanes != LaneUse::Never {
            let offered = connection.use_lanes().map_err(RemoteError::Lanes)?;
            if !offered && options.lanes == LaneUse::Required {
                return Err(RemoteError::NoLanes);
            }
        }
        log::debug!("a FUSE server speaks 7.{}, flags {:#x}", agreement.minor, agreement.flags);
        let path = path.as_deref();
        Ok(RemoteClient::with((connection, notices), agreement, options, path, names))
    }

    /// Of a socket that is [prepared](ClientConnection::prepare).
    fn connection(socket: OwnedFd, options: RemoteOptions) -> (ClientConnection, Arc<NoticeQueue>) {
        let notices = Arc::new(NoticeQueue::default());
        let heard = Arc::clone(&notices);
        let on_notification = Box::new(move |code, body: &[u8]| heard.receive(code, body));
        (ClientConnection::new(socket, options.timeout, on_notification), notices)
    }

    fn with(
        (connection, notices): (ClientConnection, Arc<NoticeQueue>),
        agreement: ServerAgreement,
        options: RemoteOptions,
        path: Option<&Path>,
        names: ConnectionNumbers,
    ) -> RemoteClient {
        let shared = Arc::new(RemoteShared {
            connection,
            caps: agreement.caps(),
            agreement,
            missing: AtomicU64::new(0),
            forgets: Arc::default(),
            pages: pages::FilePages::default(),
            paths: paths::ServedNameCache::default(),
            whole: whole_files::WholeFiles::default(),
            listed_ahead: listed_ahead::ListingPrefetch::default(),
            opened_ahead: opened_ahead::OpenPrefetch::default(),
            notices,
            expected: AtomicU64::new(0),
            listening: AtomicBool::new(false),
            appends: Mutex::default(),
            options,
            path: path.map(Path::to_path_buf),
            names,
            program: Mutex::new(None),
        });
        shared.notices.reach(&shared);
        RemoteClient { shared }
    }

    /// Delivers notifications that arrived while no thread waited for a reply, without waiting for
    /// more. The socket becomes readable when there are some.
    pub fn deliver(&self) {
        self.shared.connection.drain();
    }

    /// The counts of requests through shared memory; `None` if there is none.
    pub fn lane_counts(&self) -> Option<ClientLaneCounts> {
        Some(self.shared.connection.lanes()?.read_counts())
    }

    /// True after the server has ended or was given up.
    pub fn is_dead(&self) -> bool {
        self.shared.connection.is_dead()
    }
}

impl AsFd for RemoteClient {
    fn as_fd(&self) -> std::os::fd::BorrowedFd<'_> {
        self.shared.connection.as_fd()
    }
}

impl Drop for RemoteClient {
    fn drop(&mut self) {
        self.shared.part();
    }
}

impl RemoteShared {
    /// Sends a request without data, and waits for its reply.
    fn request<T>(
        &self,
        cx: &Context<'_>,
        request: EncodedRequest,
        decode: impl FnOnce(&[u8]) -> Result<T>,
    ) -> Result<T> {
        self.request_with_data(cx, request, &[], decode)
    }

    /// Sends a request with data, and waits for its reply. `decode` must not make requests.
    fn request_with_data<T>(
        &self,
        cx: &Context<'_>,
        mut request: EncodedRequest,
        data: &[u8],
        decode: impl FnOnce(&[u8]) -> Result<T>,
    ) -> Result<T> {
        let opcode = request.opcode;
        let checked = |body: &[u8]| log_decode_error(opcode, body.len(), decode(body));
        if data.is_empty() {
            request = self.with_groups(cx, request);
        }
        self.run_request(cx, opcode, || {
            self.connection.request(cx, request.finish(data.len()), data, checked)
        })
    }

    /// Root may do anything, and open files have been checked: all other requests carry the groups
    /// of their caller.
    fn with_groups(&self, cx: &Context<'_>, request: EncodedRequest) -> EncodedRequest {
        if cx.caller.uid != 0
            && self.agreement.uses(CALLER_GROUPS)
            && let Ok(groups) = cx.supplementary_groups()
        {
            return request.with_caller_groups(&groups);
        }
        request
    }

    /// Runs `ask`, which makes a request of `opcode`, with the steps before and after each request.
    fn run_request<T>(
        &self,
        cx: &Context<'_>,
        opcode: Opcode,
        ask: impl FnOnce() -> Result<T>,
    ) -> Result<T> {
        if self.lacks(opcode) {
            return Err(Errno::ENOSYS);
        }
        self.report_reads(cx, opcode);
        let result = ask();
        if matches!(result, Err(Errno::ESTALE)) {
            // The server may have forgotten that it reported the inode. It reports the inode again
            // on request.
            self.paths.forget();
        }
        if matches!(result, Err(Errno::ENOSYS)) && is_remembered(opcode) {
            log::debug!("the server has no {}", opcode.name());
            self.missing.fetch_or(1 << opcode as u32, Ordering::Relaxed);
        }
        self.send_overdue();
        result
    }

    /// True if the server has answered `opcode` with `ENOSYS`.
    fn lacks(&self, opcode: Opcode) -> bool {
        let bit = 1_u64.checked_shl(opcode as u32).unwrap_or(0);
        self.missing.load(Ordering::Relaxed) & bit != 0
    }

    /// Sends DESTROY, and ends the connection.
    fn part(&self) {
        if self.connection.is_own() && !self.connection.is_dead() {
            if self.opened_ahead.must_report_read() {
                self.send_last_closing(DESTROY_PATIENCE);
            }
            self.send_forgets();
            let cx = Context::new(Caller::default());
            let mut destroy = EncodedRequest::new(Opcode::Destroy, &cx, Ino(0));
            let sent = self.connection.request_deferred(destroy.finish(0), &[], Box::new(|_| ()));
            let begun = Instant::now();
            while sent.is_ok()
                && self.connection.in_flight() > 0
                && !self.connection.is_dead()
                && begun.elapsed() < DESTROY_PATIENCE
            {
                self.connection.wait_readable();
                self.connection.drain();
            }
            self.connection.end("");
        }
        // The program may take some time to end. The socket must be closed first.
        drop(lock(&self.program).take());
    }
}

/// The optional opcodes. The kernel does not repeat them after `ENOSYS`, either.
fn is_remembered(opcode: Opcode) -> bool {
    use Opcode::*;
    matches!(
        opcode,
        Flush
            | Access
            | Getxattr
            | Setxattr
            | Listxattr
            | Removexattr
            | Create
            | Rename2
            | Fallocate
            | Lseek
            | CopyFileRange
            | CopyFileRange64
            | Statx
            | Open
            | Opendir
            | Fsync
            | Fsyncdir
            | Getlk
            | Setlk
            | Setlkw
            | Bmap
            | Poll
            | Syncfs
            | Tmpfile
            | Readdirplus
    )
}

fn introduce(
    connection: &ClientConnection,
    names: ConnectionNumbers,
    patience: Duration,
) -> std::result::Result<ServerAgreement, RemoteError> {
    let mut request = init::request(names);
    let cx = Context::new(Caller::default());
    let answer = connection.request_with_timeout(patience, &cx, request.finish(0), init::answer);
    ServerAgreement::from_init_reply(&answer.map_err(init_error)?)
}

/// The error of a server that answers INIT by `errno`, or does not answer.
fn init_error(errno: Errno) -> RemoteError {
    match errno {
        Errno::EMFILE => RemoteError::UserIsFull,
        Errno::ENFILE => RemoteError::ServerIsFull,
        other => RemoteError::Init(other),
    }
}

/// Connects to the server of a user that `trusts` approves. Waits up to `patience` for a server
/// that does not accept; without it, as long as the server runs. The descriptor is `floor` or
/// higher, if possible.
fn connect_socket(
    path: &Path,
    floor: u16,
    patience: Option<Duration>,
    trusts: impl FnOnce(u32) -> bool,
) -> std::result::Result<OwnedFd, RemoteError> {
    let connected = || {
        let address = address(path)?;
        let (kind, flags) = (SocketType::SEQPACKET, SocketFlags::CLOEXEC);
        let socket = rustix::net::socket_with(AddressFamily::UNIX, kind, flags, None);
        let socket = socket.map_err(errno)?;
        sockopt::set_socket_timeout(&socket, sockopt::Timeout::Send, patience).map_err(errno)?;
        rustix::net::connect(&socket, &address).map_err(errno)?;
        let uid = peer_user(&socket)?;
        Ok((socket, uid))
    };
    let failed = |errno| RemoteError::Connect { path: path.to_path_buf(), errno };
    let (socket, uid) = connected().map_err(failed)?;
    if !trusts(uid) {
        return Err(RemoteError::Stranger { path: path.to_path_buf(), uid });
    }
    Ok(match floor {
        0 => socket,
        floor => rustix::io::fcntl_dupfd_cloexec(&socket, floor.into()).unwrap_or(socket),
    })
}

/// The address of a socket: `@name` is abstract, unix(7).
fn address(path: &Path) -> Result<SocketAddrUnix> {
    match path.as_os_str().as_bytes().strip_prefix(b"@") {
        Some(name) => SocketAddrUnix::new_abstract_name(name).map_err(errno),
        None => SocketAddrUnix::new(path).map_err(errno),
    }
}

fn new_number() -> Result<ConnectionNumber> {
    let mut bytes = [0; 16];
    let flags = rustix::rand::GetRandomFlags::empty();
    // The kernel returns so few bytes at once, or none.
    match rustix::rand::getrandom(&mut bytes, flags).map_err(errno)? {
        len if len == bytes.len() => Ok(ConnectionNumber::from_ne_bytes(bytes) | 1),
        _ => Err(Errno::EIO),
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}
