//! `struct fuse` and `struct fuse_session`: a program's operations, with the mount that serves
//! them.

use std::ffi::{CStr, CString, OsStr, c_char, c_int, c_void};
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicPtr, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};

use defuse_fs::FileSystem;
use defuse_fs::layer::ReadOnlyLayer;
use defuse_fs::path::PathAdapter;
use defuse_fuse::abi::{self, InitIn};
use defuse_fuse::mount::{HelperWatch, MountMethod, RootKind, mount, unmount};
use defuse_fuse::{CallerWorker, IoUring, Session, SessionOptions};
use defuse_shared::LaneOffers;
use defuse_socket::start_trusted;
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};

use crate::abi::{ConnInfoThree, FuseConfig, caps};
use crate::calls::OperationTable;
use crate::connection;
use crate::context::{ProgramPointers, set_program};
use crate::file_system::{ConnWishes, ProgramFileSystem};
use crate::logging::error;
use crate::low::LowPort;
use crate::options::{
    ApiVersion, ConnOptions, MountChoice, OptionOutcome, take_from, take_library_option,
};

/// Bytes of the largest write that programs of libfuse 2 get.
pub(crate) const WRITE_TWO: u32 = 128 << 10;
/// Bytes of the largest write that programs of libfuse 3 get.
pub(crate) const WRITE_THREE: u32 = 1 << 20;

/// The interface of the program that has a `struct fuse` or a `struct fuse_session`. Both begin
/// with it.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HandleKind {
    /// A [`FuseHandle`].
    Paths,
    /// A [`LowSession`](crate::low::LowSession).
    Inodes,
}

/// The kind of a pointer that a program passes; `None` for a null pointer.
///
/// # Safety
///
/// `handle` is null, or leads to a [`FuseHandle`] or a [`LowSession`](crate::low::LowSession).
pub unsafe fn kind_of(handle: *mut c_void) -> Option<HandleKind> {
    // SAFETY: the caller's promise; both structures begin with the kind.
    (!handle.is_null()).then(|| unsafe { handle.cast::<HandleKind>().read() })
}

/// A mount, from `fuse_mount` to `fuse_unmount`.
pub struct MountedDevice {
    /// The mount point.
    pub mountpoint: PathBuf,
    /// The device, until a session takes it.
    device: Mutex<Option<OwnedFd>>,
    /// Its number.
    pub fd: RawFd,
    is_mounted: AtomicBool,
    /// The device is a connection to another process, in the place of a mount.
    is_connection: bool,
    watch: Mutex<Option<HelperWatch>>,
    choice: MountChoice,
    /// The port that takes the device for the interface of inodes.
    port: OnceLock<Arc<LowPort>>,
    /// The session that has this mount as its channel.
    session: AtomicPtr<c_void>,
    /// Bytes of the largest request.
    pub size: usize,
    /// The data of a channel of the program's own.
    data: AtomicPtr<c_void>,
}

impl MountedDevice {
    /// The pointer that programs of libfuse 2 have of a mount, as a channel.
    pub fn as_channel(self: &Arc<Self>) -> *mut c_void {
        Arc::as_ptr(self).cast_mut().cast()
    }

    /// Mounts, or takes the connection that this process has in the place of a mount. Returns an
    /// error for the user.
    pub fn new(mountpoint: &CStr, choice: MountChoice) -> Result<Self, String> {
        let mut choice = choice.settle();
        let path = PathBuf::from(OsStr::from_bytes(mountpoint.to_bytes()));
        if let Some(connection) = connection::take() {
            return Ok(Self::on_connection(connection, path, choice));
        }
        choice.mount.root = RootKind::AsMountPoint;
        let prepared = mount(&path, &choice.mount).map_err(|error| format!("fuse: {error}"))?;
        let fd = prepared.device.as_raw_fd();
        let is_inherited = prepared.how == MountMethod::Inherited;
        if choice.mount.auto_unmount && prepared.watch.is_none() && !is_inherited {
            log::warn!("auto_unmount: root mounts without a helper that waits");
        }
        Ok(MountedDevice {
            mountpoint: prepared.mountpoint,
            device: Mutex::new(Some(prepared.device)),
            fd,
            is_mounted: AtomicBool::new(!is_inherited),
            is_connection: false,
            watch: Mutex::new(prepared.watch),
            choice,
            port: OnceLock::new(),
            session: AtomicPtr::default(),
            size: WRITE_TWO as usize + 4096,
            data: AtomicPtr::default(),
        })
    }

    /// A connection in the place of a mount.
    fn on_connection(connection: OwnedFd, mountpoint: PathBuf, choice: MountChoice) -> Self {
        let fd = connection.as_raw_fd();
        MountedDevice {
            mountpoint,
            device: Mutex::new(Some(connection)),
            fd,
            is_mounted: AtomicBool::new(false),
            is_connection: true,
            watch: Mutex::new(None),
            choice,
            port: OnceLock::new(),
            session: AtomicPtr::default(),
            size: WRITE_TWO as usize + 4096,
            data: AtomicPtr::default(),
        }
    }

    /// A channel of the program's own, which is no mount of this library.
    pub fn without_mount(port: Arc<LowPort>, size: usize, data: *mut c_void) -> Self {
        MountedDevice {
            mountpoint: PathBuf::new(),
            device: Mutex::new(None),
            fd: port.number(),
            is_mounted: AtomicBool::new(false),
            is_connection: false,
            watch: Mutex::new(None),
            choice: MountChoice::new(ApiVersion::Two),
            port: OnceLock::from(port),
            session: AtomicPtr::default(),
            size,
            data: AtomicPtr::new(data),
        }
    }

    /// The data of a channel of the program's own, or null.
    pub fn data(&self) -> *mut c_void {
        self.data.load(Ordering::SeqCst)
    }

    /// The device, which the caller closes; the mount stays. `None` if a session has it.
    pub fn into_device(self) -> Option<OwnedFd> {
        // A process that waits for the end of this one would unmount then.
        let watch = lock(&self.watch).take();
        std::mem::forget(watch);
        lock(&self.device).take()
    }

    /// The port for the interface of inodes, which takes the device; `None` if a session has it.
    pub fn port(&self) -> Option<Arc<LowPort>> {
        if let Some(port) = self.port.get() {
            return Some(Arc::clone(port));
        }
        let device = lock(&self.device).take()?;
        let made = || match self.is_connection {
            true => LowPort::connection(device),
            false => LowPort::device(device),
        };
        Some(Arc::clone(self.port.get_or_init(made)))
    }

    /// The session that has this mount as its channel, or null.
    pub fn session(&self) -> *mut c_void {
        self.session.load(Ordering::SeqCst)
    }

    /// Sets the session that has this mount as its channel.
    pub fn set_session(&self, session: *mut c_void) {
        self.session.store(session, Ordering::SeqCst);
    }

    /// Notes that the kernel has ended the mount: there is nothing to unmount any more.
    pub(crate) fn note_end(&self) {
        self.is_mounted.store(false, Ordering::SeqCst);
    }

    /// True for a mount with `allow_root`.
    pub(crate) fn is_private(&self) -> bool {
        self.choice.allow_root
    }

    /// True for a connection whose program is to refuse changes (`ro`), as the kernel would.
    pub(crate) fn refuses_changes(&self) -> bool {
        self.is_connection && self.choice.mount.ro
    }

    /// Unmounts, unless that is done, and closes the device, unless a session has it. The kernel
    /// then answers what is under way.
    pub fn unmount(&self) {
        let device = lock(&self.device).take();
        let port = self.port.get();
        // Another mount may be at this place now.
        if port.is_some_and(|port| port.is_dead()) {
            self.note_end();
        }
        if self.is_mounted.swap(false, Ordering::SeqCst)
            && let Err(failure) = unmount(&self.mountpoint, true)
        {
            error(&format!("fuse: {failure}"));
        }
        drop(device);
        if let Some(port) = port {
            port.close();
        }
        *lock(&self.watch) = None;
    }
}

/// The operations of a program, and their mount.
#[repr(C)]
pub struct FuseHandle {
    kind: HandleKind,
    version: ApiVersion,
    table: OperationTable,
    data: AtomicPtr<c_void>,
    config: Mutex<ConfigBox>,
    choice: Mutex<MountChoice>,
    mounted: Mutex<Option<Arc<MountedDevice>>>,
    conn_options: ConnOptions,
    served: OnceLock<Arc<PathAdapter<ProgramFileSystem>>>,
    is_initialised: AtomicBool,
    has_exited: AtomicBool,
    signal: AtomicI32,
    /// Counts the reasons to leave the loop.
    wake_fd: OwnedFd,
}

/// The settings, whose pointer is never read here.
struct ConfigBox(FuseConfig);

// SAFETY: the pointer in the settings is one of the program, which this library only passes back to
// it.
unsafe impl Send for ConfigBox {}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

impl FuseHandle {
    /// A handle for the operations, with the options in `words`. Returns an error for the user.
    pub fn new(
        version: ApiVersion,
        table: OperationTable,
        words: &[CString],
        data: *mut c_void,
    ) -> Result<Box<Self>, String> {
        let mut config = FuseConfig::default();
        let mut choice = MountChoice::new(version);
        let mut foreign = Vec::new();
        let rest = take_from(words, |option| {
            let outcome = match take_library_option(version, &mut config, option)? {
                OptionOutcome::Foreign if version == ApiVersion::Three => choice.take(option)?,
                outcome => outcome,
            };
            if outcome == OptionOutcome::Foreign {
                foreign.push(option.to_owned());
            }
            Ok(OptionOutcome::Taken)
        })?;
        let others = rest.iter().skip(1).map(|word| word.to_string_lossy().into_owned());
        foreign.extend(others.filter(|word| word != "-d" && word != "--debug"));
        if !foreign.is_empty() {
            return Err(format!("fuse: unknown option(s): `{}'", foreign.join(",")));
        }
        let wake_fd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|errno| format!("fuse: eventfd: {errno}"))?;
        Ok(Box::new(FuseHandle {
            kind: HandleKind::Paths,
            version,
            table,
            data: AtomicPtr::new(data),
            config: Mutex::new(ConfigBox(config)),
            choice: Mutex::new(choice),
            mounted: Mutex::new(None),
            conn_options: ConnOptions::default(),
            served: OnceLock::new(),
            is_initialised: AtomicBool::new(false),
            has_exited: AtomicBool::new(false),
            signal: AtomicI32::new(0),
            wake_fd,
        }))
    }

    /// Sets wishes about INIT, which `init` of the program can change.
    pub fn set_conn_options(&mut self, options: ConnOptions) {
        self.conn_options = options;
    }

    fn pointers(&self) -> ProgramPointers {
        let fuse = (self as *const Self).cast_mut().cast();
        ProgramPointers { fuse, private_data: self.data.load(Ordering::SeqCst) }
    }

    /// Mounts with the options of the handle. Returns an error for the user.
    pub fn mount(&self, mountpoint: &CStr) -> Result<(), String> {
        let choice = lock(&self.choice).clone();
        self.adopt(Arc::new(MountedDevice::new(mountpoint, choice)?));
        Ok(())
    }

    /// Serves this mount.
    pub fn adopt(&self, mounted: Arc<MountedDevice>) {
        *lock(&self.mounted) = Some(mounted);
    }

    /// The mount.
    pub fn mounted_device(&self) -> Option<Arc<MountedDevice>> {
        lock(&self.mounted).clone()
    }

    /// Unmounts.
    pub fn unmount(&self) {
        let mounted = lock(&self.mounted).take();
        if let Some(mounted) = mounted {
            mounted.unmount();
        }
    }

    /// Lets the loop end.
    pub fn exit(&self) {
        self.has_exited.store(true, Ordering::SeqCst);
        self.ring();
    }

    /// Lets the loop end because of a signal. Makes system calls only.
    pub fn end_by(&self, signal: c_int) {
        self.signal.store(signal, Ordering::SeqCst);
        self.exit();
    }

    /// True after [`exit`](Self::exit).
    pub fn has_exited(&self) -> bool {
        self.has_exited.load(Ordering::SeqCst)
    }

    /// Lets the handle be used for another loop.
    pub fn reset(&self) {
        self.has_exited.store(false, Ordering::SeqCst);
        self.signal.store(0, Ordering::SeqCst);
    }

    fn ring(&self) {
        // A counter that is full has been rung.
        let _ = rustix::io::write(&self.wake_fd, &1_u64.to_ne_bytes());
    }

    /// Serves the mount until it is unmounted, or until [`exit`](Self::exit). Returns 0, the number
    /// of the signal that has ended the loop, or -1 after an error, which was printed. `threads` is
    /// the number of threads; `None` lets the session decide.
    pub fn run(&self, threads: Option<usize>) -> c_int {
        let Some(mounted) = self.mounted_device() else {
            error("fuse: nothing is mounted: call fuse_mount first");
            return -1;
        };
        let Some(device) = lock(&mounted.device).take() else {
            error("fuse: the mount is served already, or was unmounted");
            return -1;
        };
        if self.has_exited() {
            *lock(&mounted.device) = Some(device);
            return self.signal.load(Ordering::SeqCst);
        }
        let mut refusal: Option<String> = None;
        let choose = |init: &InitIn| {
            let (fs, options, refused) = self.choose(init, &mounted, threads);
            refusal = refused;
            (fs, options)
        };
        let started = match mounted.is_connection {
            true => start_trusted(device, Some(&LaneOffers::default()), choose),
            false => Session::start_chosen(device, choose),
        };
        let session = match (started, refusal) {
            (Ok(session), None) => session,
            (Ok(session), Some(refusal)) => {
                error(&refusal);
                drop(session.caller_worker());
                session.stopper().stop();
                let _ = session.wait();
                return -1;
            }
            (Err(failure), _) => {
                error(&format!("fuse: {failure}"));
                return -1;
            }
        };
        let is_clean = match session.caller_worker() {
            Some(worker) => self.serve_here(&mounted, session, worker),
            None => self.wait_for(&mounted, session),
        };
        if !is_clean {
            log::warn!("an operation of the program has not returned");
        }
        self.signal.load(Ordering::SeqCst)
    }

    /// Serves the session on the calling thread, where a program of one thread may expect its
    /// operations, until it ends. Returns true if they have all returned.
    fn serve_here(&self, mounted: &MountedDevice, session: Session, worker: CallerWorker) -> bool {
        std::thread::scope(|scope| {
            let ending = scope.spawn(move || {
                self.wait_for_wake();
                self.has_exited.store(true, Ordering::SeqCst);
                session.stopper().stop();
                session.wait().clean
            });
            worker.run();
            self.note_end(mounted);
            ending.join().unwrap_or(false)
        })
    }

    /// Waits until the session ends, which its own threads serve. Returns the same as
    /// [`serve_here`](Self::serve_here).
    fn wait_for(&self, mounted: &MountedDevice, session: Session) -> bool {
        std::thread::scope(|scope| {
            scope.spawn(|| {
                session.wait_for_end();
                self.note_end(mounted);
            });
            self.wait_for_wake();
            self.has_exited.store(true, Ordering::SeqCst);
            session.stopper().stop();
        });
        session.wait().clean
    }

    /// Notes the end of the session, after which the loop ends: the kernel has unmounted, unless
    /// the program has ended it.
    fn note_end(&self, mounted: &MountedDevice) {
        if !self.has_exited() {
            mounted.is_mounted.store(false, Ordering::SeqCst);
        }
        self.ring();
    }

    /// Waits until the loop ends.
    fn wait_for_wake(&self) {
        let mut count = [0; 8];
        loop {
            let mut fds = [PollFd::from_borrowed_fd(self.wake_fd.as_fd(), PollFlags::IN)];
            // An error is a signal: the loop continues unless its handler has rung.
            if poll(&mut fds, None).is_ok() && rustix::io::read(&self.wake_fd, &mut count).is_ok() {
                return;
            }
        }
    }

    /// Calls `init` of the program, and returns the file system, the settings of its session, and
    /// an error for the user.
    fn choose(
        &self,
        init: &InitIn,
        mounted: &MountedDevice,
        threads: Option<usize>,
    ) -> (Arc<dyn FileSystem>, SessionOptions, Option<String>) {
        let MountChoice { mount: choice, allow_root } = &mounted.choice;
        let mut conn = self.make_offer(init, choice.max_read);
        let before = conn;
        self.conn_options.apply(&mut conn);
        let mut config = lock(&self.config).0;
        set_program(self.pointers());
        if let Some(data) = self.table.init(&mut conn, &mut config) {
            self.data.store(data, Ordering::SeqCst);
        }
        self.is_initialised.store(true, Ordering::SeqCst);
        let beyond = conn.want & !conn.capable;
        let refusal = (beyond != 0).then(|| {
            format!("fuse: the program wants capabilities {beyond:#x} that there are not here")
        });
        let wants = |bit| conn.want & bit != 0;
        let wishes =
            ConnWishes { open_truncates: wants(caps::ATOMIC_O_TRUNC), time_gran: conn.time_gran };
        let only_user = allow_root.then(|| rustix::process::getuid().as_raw());
        let fs = ProgramFileSystem::new(self.table.clone(), self.pointers(), &config, wishes)
            .for_user(only_user);
        let (record, flock) = self.table.keeps_locks();
        let mut options = SessionOptions {
            workers: threads,
            max_write: conn.max_write as usize,
            max_readahead: conn.max_readahead.min(before.max_readahead),
            max_background: u16::try_from(conn.max_background).ok().filter(|&most| most > 0),
            congestion_threshold: u16::try_from(conn.congestion_threshold)
                .ok()
                .filter(|&at| at > 0),
            writeback: wants(caps::WRITEBACK_CACHE),
            caller_serves: threads == Some(1),
            io_uring: if threads == Some(1) { IoUring::Off } else { IoUring::Auto },
            passthrough: false,
            default_permissions: choice.default_permissions,
            atomic_o_trunc: wants(caps::ATOMIC_O_TRUNC),
            signals: config.intr != 0,
            ..SessionOptions::default()
        };
        if !record {
            options.disabled |= abi::FUSE_POSIX_LOCKS;
        }
        if !flock {
            options.disabled |= abi::FUSE_FLOCK_LOCKS;
        }
        // Bits that both sides number in the same way.
        let same = caps::ASYNC_READ
            | caps::POSIX_LOCKS
            | caps::FLOCK_LOCKS
            | caps::IOCTL_DIR
            | caps::AUTO_INVAL_DATA
            | caps::ASYNC_DIO
            | caps::PARALLEL_DIROPS;
        options.disabled |= u64::from(before.want & !conn.want & same);
        let adapter = Arc::new(PathAdapter::new(fs));
        let _ = self.served.set(Arc::clone(&adapter));
        let served: Arc<dyn FileSystem> = match mounted.refuses_changes() {
            true => Arc::new(ReadOnlyLayer::new(adapter as Arc<dyn FileSystem>)),
            false => adapter,
        };
        (served, options, refusal)
    }

    /// The capabilities and sizes that the program can choose from.
    fn make_offer(&self, init: &InitIn, max_read: u32) -> ConnInfoThree {
        let (record, flock) = self.table.keeps_locks();
        let is_three = self.version == ApiVersion::Three;
        let served = caps::ASYNC_READ
            | caps::POSIX_LOCKS
            | caps::ATOMIC_O_TRUNC
            | BIG_WRITES
            | SPLICE
            | caps::FLOCK_LOCKS
            | caps::IOCTL_DIR
            | if is_three { OF_THREE } else { 0 };
        let capable = init.flags & served;
        let want = caps::ASYNC_READ
            | caps::IOCTL_DIR
            | if record { caps::POSIX_LOCKS } else { 0 }
            | if flock { caps::FLOCK_LOCKS } else { 0 }
            | if is_three {
                caps::ATOMIC_O_TRUNC
                    | caps::AUTO_INVAL_DATA
                    | caps::ASYNC_DIO
                    | caps::PARALLEL_DIROPS
            } else {
                BIG_WRITES
            };
        offer_of(self.version, init, max_read, (capable, want))
    }

    /// Drops what the kernel caches of the file at `path`. Returns 0 or a negated error number.
    pub fn invalidate(&self, path: &CStr) -> c_int {
        let Some(adapter) = self.served.get() else { return -libc::ENOENT };
        let Some(ino) = adapter.ino_of(path.to_bytes()) else { return -libc::ENOENT };
        let Some(notify) = adapter.inner().notify() else { return -libc::ENOENT };
        notify.invalidate_inode(ino, Some((0, 0))).map_or_else(|errno| -errno.raw(), |()| 0)
    }
}

/// The offer to a program: the `capable` capabilities and the sizes, with those of the capabilities
/// that libfuse wants by default.
pub(crate) fn offer_of(
    version: ApiVersion,
    init: &InitIn,
    max_read: u32,
    (capable, want): (u32, u32),
) -> ConnInfoThree {
    ConnInfoThree {
        proto_major: init.major,
        proto_minor: init.minor,
        max_write: largest_write(version),
        max_read,
        max_readahead: init.max_readahead,
        capable,
        want: want & capable,
        time_gran: 1,
        ..ConnInfoThree::default()
    }
}

/// Bytes of the largest WRITE.
pub(crate) fn largest_write(version: ApiVersion) -> u32 {
    match version {
        ApiVersion::Two => WRITE_TWO,
        ApiVersion::Three => WRITE_THREE,
    }
}

impl Drop for FuseHandle {
    fn drop(&mut self) {
        if self.is_initialised.load(Ordering::SeqCst) {
            set_program(self.pointers());
            self.table.destroy(self.data.load(Ordering::SeqCst));
        }
    }
}

/// `FUSE_CAP_BIG_WRITES`.
pub(crate) const BIG_WRITES: u32 = 1 << 5;
/// `FUSE_CAP_SPLICE_*`.
pub(crate) const SPLICE: u32 = 7 << 7;
/// Capabilities that only programs of libfuse 3 know.
const OF_THREE: u32 = caps::AUTO_INVAL_DATA
    | READDIRPLUS
    | caps::ASYNC_DIO
    | caps::WRITEBACK_CACHE
    | caps::PARALLEL_DIROPS;
/// `FUSE_CAP_READDIRPLUS` and `FUSE_CAP_READDIRPLUS_AUTO`. Wanting them changes nothing for
/// programs of paths.
pub(crate) const READDIRPLUS: u32 = 3 << 13;

/// The handle that a program passes, or `None` for a null pointer and for a session of the
/// interface of inodes.
///
/// # Safety
///
/// `handle` is null, a session, or a pointer from [`into_pointer`] that was not given to
/// [`destroy`].
pub unsafe fn of<'a>(handle: *mut c_void) -> Option<&'a FuseHandle> {
    // SAFETY: the caller's promise.
    unsafe {
        let is_meant = kind_of(handle) == Some(HandleKind::Paths);
        is_meant.then(|| &*handle.cast::<FuseHandle>())
    }
}

/// Lets the loop of a handle or session end because of a signal. Makes system calls only.
///
/// # Safety
///
/// The condition of [`kind_of`].
pub(crate) unsafe fn end_by_signal(handle: *mut c_void, signal: c_int) {
    // SAFETY: the caller's promise.
    unsafe {
        if let Some(handle) = of(handle) {
            handle.end_by(signal);
        } else if let Some(session) = crate::low::of(handle) {
            session.end_by(signal);
        }
    }
}

/// The pointer for the program; null after an error, which is printed.
pub fn into_pointer(handle: Result<Box<FuseHandle>, String>) -> *mut c_void {
    match handle {
        Ok(handle) => Box::into_raw(handle).cast(),
        Err(message) => {
            error(&message);
            null_mut()
        }
    }
}

/// Ends a handle: calls `destroy` of the program.
///
/// # Safety
///
/// The condition of [`of`]; no other thread uses the handle any more.
pub unsafe fn destroy(handle: *mut c_void) {
    // SAFETY: the caller's promise.
    unsafe {
        if kind_of(handle) == Some(HandleKind::Paths) {
            drop(Box::from_raw(handle.cast::<FuseHandle>()));
        }
    }
}

/// Mounts are also known by the number of their device, by which old programs name them.
static BY_NUMBER: Mutex<Vec<Arc<MountedDevice>>> = Mutex::new(Vec::new());

/// Keeps a mount until [`forget_mount`], and returns it by the number of its device.
pub fn remember_mount(mounted: MountedDevice) -> Arc<MountedDevice> {
    let mounted = Arc::new(mounted);
    lock(&BY_NUMBER).push(Arc::clone(&mounted));
    mounted
}

/// The mount whose device has this number.
pub fn mount_by_number(fd: RawFd) -> Option<Arc<MountedDevice>> {
    lock(&BY_NUMBER).iter().find(|mounted| mounted.fd == fd).cloned()
}

/// The mount that `is_meant` accepts.
pub fn find_mount(is_meant: impl Fn(&Arc<MountedDevice>) -> bool) -> Option<Arc<MountedDevice>> {
    lock(&BY_NUMBER).iter().find(|mounted| is_meant(mounted)).cloned()
}

/// Forgets the mounts that `is_meant` accepts, and returns them.
pub fn forget_mount(is_meant: impl Fn(&Arc<MountedDevice>) -> bool) -> Vec<Arc<MountedDevice>> {
    let mut all = lock(&BY_NUMBER);
    let mut meant = Vec::new();
    all.retain(|mounted| {
        let keep = !is_meant(mounted);
        if !keep {
            meant.push(Arc::clone(mounted));
        }
        keep
    });
    meant
}

/// A string as the name of a C function's argument; empty for a null pointer.
///
/// # Safety
///
/// `text` is null or a string.
pub unsafe fn text_of<'a>(text: *const c_char) -> &'a CStr {
    if text.is_null() {
        return c"";
    }
    // SAFETY: the caller's promise.
    unsafe { CStr::from_ptr(text) }
}
