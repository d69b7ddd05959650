//! The one place where this frontend meets backends: how a file system of the plan is made.

use std::ffi::OsStr;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use arc_swap::ArcSwap;
use defuse_compose::{IN_PROCESS, OpenSource, SourceRegistry, SourceSettings};
use defuse_direct::ClientMountArgs;
use defuse_fs::source::{CallingThreads, FrontendProperties, LockPlace, SourceSharing};
use defuse_fs::{
    AbsentFileSystem, Caller, Caps, Context, Errno, File, FileSystem, Ino, Whence, delegate,
};
use defuse_preload_plan::{ForkPolicy, MountPlan, ServerPlace};
use defuse_remote::{
    ConnectionHandover, HandoverClient, InodeHandover, LaneUse, RemoteClient, RemoteError,
    RemoteOptions,
};

use crate::machine::descriptors::{close, take_owned};
use crate::machine::lock::FutexLock;

/// The kinds of sources that this library links. A run serves all others to its programs.
static SOURCES: SourceRegistry = SourceRegistry::new(&[IN_PROCESS]);

/// How long a directory within a path holds that lies in a directory of the kernel, which others
/// may change. It is the time of names on a kernel mount. Programs of the run see the changes of
/// each other at once.
const DIRECTORIES_HOLD: Duration = Duration::from_secs(1);

/// A file system of a plan.
pub struct ComposedMount {
    /// The file system.
    pub fs: Arc<dyn FileSystem>,
    /// How it is mounted.
    pub args: ClientMountArgs,
    /// How it survives a fork: never [`ForkPolicy::Auto`].
    pub fork: ForkPolicy,
    /// The connection to the process that serves the file system, if another one does.
    pub relay: Option<Arc<RelayFileSystem>>,
    /// The run that served the file system has ended.
    pub is_gone: bool,
}

/// A connection that the program before has made.
pub struct InheritedConnection {
    /// The place of its mount in the plan.
    pub mount: usize,
    /// Its descriptor.
    pub fd: OwnedFd,
    /// The memory for its requests, if the server has offered some.
    pub lanes: Option<OwnedFd>,
    /// The values that both ends have agreed on, as text.
    pub known: String,
}

/// A file system in another process, which every process of the run reaches by a connection of its
/// own.
///
/// The server makes the child's connection before the fork, while no other thread of the parent is
/// at work: it begins with all inodes and open files of the parent's connection, and from then on
/// parent and child each give back their own. A child that makes no request does not begin to use
/// it. Where the parent waits for the child, as in vfork(2), the server makes it with the child's
/// first request.
pub struct RelayFileSystem {
    inner: ProcessConnection,
    /// For the child that is being made.
    next: FutexLock<ChildConnection>,
}

/// The connection of the child that is being made.
enum ChildConnection {
    /// No connection was prepared.
    Unknown,
    /// The server has made it.
    Made(ConnectionHandover),
    /// The child requests its connection.
    WhenUsed,
}

impl FileSystem for RelayFileSystem {
    delegate!(to inner, except caps);

    fn caps(&self) -> Caps {
        self.inner.now().caps()
    }
}

/// The connection of this process.
struct ProcessConnection(ArcSwap<&'static OwnConnection>);

impl ProcessConnection {
    fn new(own: OwnConnection) -> ProcessConnection {
        ProcessConnection(ArcSwap::from_pointee(leak(own)))
    }

    fn now(&self) -> &'static OwnConnection {
        **self.0.load()
    }
}

impl std::ops::Deref for ProcessConnection {
    type Target = RemoteClient;

    fn deref(&self) -> &RemoteClient {
        self.now().begin()
    }
}

/// A connection stays: a thread may have been using the parent's connection when the process was
/// copied.
fn leak(own: OwnConnection) -> &'static OwnConnection {
    Box::leak(Box::new(own))
}

/// The connection of one process.
struct OwnConnection {
    begun: OnceLock<RemoteClient>,
    /// The connection before the first request.
    inherited: FutexLock<Option<ConnectionHandover>>,
}

impl OwnConnection {
    fn from_client(client: RemoteClient) -> OwnConnection {
        OwnConnection { begun: OnceLock::from(client), inherited: FutexLock::new(None) }
    }

    fn from_inherited(from: ConnectionHandover) -> OwnConnection {
        OwnConnection { begun: OnceLock::new(), inherited: FutexLock::new(Some(from)) }
    }

    /// The connection in use, from now on.
    fn begin(&self) -> &RemoteClient {
        self.begun.get_or_init(|| {
            let inherited = self.inherited.lock().take();
            inherited.expect("it is there until the connection is in use").begin()
        })
    }

    /// One of both, by what the connection is at the moment.
    fn with_state<T>(
        &self,
        before: impl FnOnce(&ConnectionHandover) -> T,
        begun: impl FnOnce(&RemoteClient) -> T,
    ) -> T {
        match &*self.inherited.lock() {
            Some(inherited) => before(inherited),
            None => begun(self.begin()),
        }
    }

    fn caps(&self) -> Caps {
        self.with_state(ConnectionHandover::caps, FileSystem::caps)
    }
}

impl RelayFileSystem {
    /// Goes on with `own`, or connects.
    fn connect(
        path: &OsStr,
        floor: u32,
        own: Option<InheritedConnection>,
    ) -> Result<Arc<Self>, RemoteError> {
        let floor = u16::try_from(floor).unwrap_or(u16::MAX);
        let lanes = LaneUse::IfOffered;
        let options = RemoteOptions { descriptors_from: floor, lanes, ..RemoteOptions::default() };
        let path = Path::new(path);
        let own = own
            .and_then(|own| RemoteClient::from_text(own.fd, own.lanes, &own.known, path, options));
        let client = match own {
            Some(client) => client,
            None => RemoteClient::connect(path, options)?,
        };
        Ok(Arc::new(RelayFileSystem {
            inner: ProcessConnection::new(OwnConnection::from_client(client)),
            next: FutexLock::new(ChildConnection::Unknown),
        }))
    }

    fn hand_over(&self) -> Result<ConnectionHandover, String> {
        let made =
            self.inner.now().with_state(ConnectionHandover::hand_over, RemoteClient::hand_over);
        made.map_err(|error| error.to_string())
    }

    /// Before a fork, while no other thread is at work. If this fails, the child reports it. If the
    /// parent `waits` until the child has executed a program or ended, its connection stays as it
    /// is for so long.
    pub fn prepare_fork(&self, waits: bool) {
        *self.next.lock() = if waits {
            // The child's program may look at the access times of what was read.
            self.report_reads();
            ChildConnection::WhenUsed
        } else {
            self.hand_over().map_or(ChildConnection::Unknown, ChildConnection::Made)
        };
    }

    /// In the parent, after a fork or in place of one.
    pub fn finish_fork(&self) {
        *self.next.lock() = ChildConnection::Unknown;
    }

    /// True once the process that has the file system is gone.
    pub fn is_dead(&self) -> bool {
        self.inner.now().begun.get().is_some_and(RemoteClient::is_dead)
    }

    /// True if this process has made no request. Then it holds nothing that its parent did not.
    pub fn is_unused(&self) -> bool {
        self.inner.now().begun.get().is_none()
    }

    /// Before the connection ends with this program: reports its reads to the server.
    pub fn report_reads(&self) {
        if let Some(client) = self.inner.now().begun.get() {
            client.report_reads();
        }
    }

    /// A connection for the next program of this process, which takes over these things alone.
    pub fn prepare_exec(&self, handovers: &[InodeHandover]) -> Option<HandoverClient> {
        let own = self.inner.now();
        own.with_state(
            |inherited| inherited.prepare_exec(handovers),
            |begun| begun.prepare_exec(handovers),
        )
        .ok()
    }

    /// The memory that all mappings of an open file share, with `range` of the file in it. `ENOSYS`
    /// if the server has none.
    pub fn map(
        &self,
        caller: Caller,
        file: File,
        range: Range<u64>,
        writes: bool,
    ) -> Result<OwnedFd, Errno> {
        self.inner.map(&Context::new(caller), file, range, writes)
    }

    /// A mapping is gone. Fails if the server could not write to the file what was stored through
    /// it.
    pub fn unmap(&self, caller: Caller, ino: Ino) -> Result<(), Errno> {
        self.inner.unmap(&Context::new(caller), ino)
    }

    /// Has the server write to an open file what was stored through its mappings.
    pub fn write_back(&self, caller: Caller, file: File) -> Result<(), Errno> {
        // The server writes stores back before it answers about holes.
        match self.inner.lseek(&Context::new(caller), file, 0, Whence::Data) {
            Ok(_) | Err(Errno::ENXIO) => Ok(()),
            Err(errno) => Err(errno),
        }
    }

    /// In a child: its own connection.
    pub fn follow_fork(&self) -> Result<(), String> {
        let parents = self.inner.now();
        let socket = parents.with_state(
            |inherited| inherited.as_fd().as_raw_fd(),
            |begun| begun.as_fd().as_raw_fd(),
        );
        // The values of the parent's connection stay here, unused.
        let (next, needs_parents) =
            match std::mem::replace(&mut *self.next.lock(), ChildConnection::Unknown) {
                ChildConnection::Made(next) => (next, false),
                // The fork went past this library.
                ChildConnection::Unknown => (self.hand_over()?, false),
                ChildConnection::WhenUsed => {
                    let made = parents.with_state(
                        |inherited| Ok(inherited.hand_over_when_used(take_owned(socket))),
                        |begun| begun.hand_over_when_used(take_owned(socket)),
                    );
                    (made.map_err(|error| error.to_string())?, true)
                }
            };
        self.inner.0.store(Arc::new(leak(OwnConnection::from_inherited(next))));
        if !needs_parents {
            // It would not end with the parent.
            close(socket);
        }
        Ok(())
    }
}

/// Makes the file system of `plan`; descriptors that it keeps get numbers from `floor` on.
/// `sockets` are the sockets of the run; `own` is the connection that the program before has made.
/// The error is a message for users.
pub fn open(
    plan: &MountPlan,
    sockets: &[i32],
    floor: u32,
    own: Option<InheritedConnection>,
) -> Result<ComposedMount, String> {
    let text = OsStr::from_bytes(&plan.source);
    let server = match &plan.served_by {
        ServerPlace::Program => None,
        ServerPlace::Socket(path) => Some(OsStr::from_bytes(path).to_owned()),
        ServerPlace::Run(place) => {
            let socket = sockets.get(*place).ok_or("the run has no socket for it")?;
            Some(format!("/proc/self/fd/{socket}").into())
        }
    };
    if let Some(server) = server {
        let is_of_run = matches!(plan.served_by, ServerPlace::Run(_));
        let relay = match RelayFileSystem::connect(&server, floor, own) {
            Ok(relay) => Some(relay),
            // A program that outlives its run goes on, and starts others.
            Err(RemoteError::Connect { errno: Errno::ECONNREFUSED, .. }) if is_of_run => None,
            Err(why) if is_of_run => {
                return Err(format!("the run that serves it has ended ({why})"));
            }
            Err(why) => return Err(why.to_string()),
        };
        let source = text.display().to_string();
        let parsed = SOURCES.parse_with_options(text, SourceSettings::default());
        let read_only = parsed.is_ok_and(|(_, settings)| settings.read_only);
        let args = ClientMountArgs { read_only, source, ..ClientMountArgs::default() };
        let is_gone = relay.is_none();
        let fs: Arc<dyn FileSystem> = match &relay {
            Some(relay) => Arc::clone(relay) as _,
            None => Arc::new(AbsentFileSystem(Errno::ENOTCONN)),
        };
        return Ok(ComposedMount { fs, args, fork: ForkPolicy::Server, relay, is_gone });
    }
    let frontend = FrontendProperties {
        threads: CallingThreads::Callers,
        locks: LockPlace::Inherited,
        concurrent: true,
        descriptors_kept: 256,
        descriptors_from: floor,
        ..FrontendProperties::default()
    };
    let opened = SOURCES
        .open(text, SourceSettings::for_frontend(frontend))
        .map_err(|error| error.to_string())?;
    let OpenSource { source, settings, fs } = opened;
    let own = match source.sharing() {
        SourceSharing::InDirectory | SourceSharing::Shared => ForkPolicy::Share,
        SourceSharing::NeedsServer | SourceSharing::Remote => ForkPolicy::Deny,
    };
    let directories_hold = match source.sharing() {
        SourceSharing::InDirectory => DIRECTORIES_HOLD,
        _ => Duration::ZERO,
    };
    let args = ClientMountArgs {
        read_only: settings.read_only,
        source: text.display().to_string(),
        directories_hold,
        ..ClientMountArgs::default()
    };
    let fork = if plan.fork == ForkPolicy::Auto { own } else { plan.fork };
    Ok(ComposedMount { fs, args, fork, relay: None, is_gone: false })
}

/// The directory of the kernel that has the files of `plan`; `None` for other sources. It does not
/// depend on the process that serves the mount.
pub fn directory(plan: &MountPlan) -> Option<Vec<u8>> {
    let text = OsStr::from_bytes(&plan.source);
    let (source, _) = SOURCES.parse_with_options(text, SourceSettings::default()).ok()?;
    let path = source.directory()?.as_os_str().as_bytes();
    path.starts_with(b"/").then(|| path.to_vec())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_that_a_file_system_lacks_are_refused_by_name() {
        let plan = MountPlan { source: b"memory:,sise=1G".to_vec(), ..MountPlan::default() };
        let error = open(&plan, &[], 0, None).err().unwrap();
        assert!(error.contains("sise"), "{error}");
    }

    #[test]
    fn what_is_kept_in_the_process_is_not_shared() {
        let plan = MountPlan { source: b"memory:".to_vec(), ..MountPlan::default() };
        assert_eq!(open(&plan, &[], 0, None).unwrap().fork, ForkPolicy::Deny);
    }
}
