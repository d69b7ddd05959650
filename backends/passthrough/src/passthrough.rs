//! The file system object, and the functions that find, open and add inodes.

use std::fmt;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use defuse_fs::posix::AccessTimeRule;
use defuse_fs::{Errno, FileKind, Result};
use rustix::fs::{Mode, OFlags};
use rustix::process::{Resource, getrlimit, setrlimit};

use crate::error::SourceError;
use crate::lower::{self, OrErrno, StatxResult, move_above};
use crate::options::{CredentialsPolicy, FileHandles, PassthroughOptions};
use crate::proc_path::ProcPath;
use crate::sys;
use crate::tables::fd_cache::FdCache;
use crate::tables::foreign_mounts::ForeignMounts;
use crate::tables::inode::{InodeTable, LowerInode, ReopenMethod};
use crate::tables::mounts::{LowerMount, LowerMountError, MountTable};
use crate::tables::open_files::OpenFiles;
use crate::tables::own_mount::OwnMount;
use crate::tables::owner_locks::OwnerLocks;
use crate::tables::positions::PositionTables;
use crate::tables::pruning::InodePruning;
use crate::tables::recent::RecentFiles;
use crate::tables::removal_locks::RemovalLocks;
use crate::tables::watches::IdentityWatches;
use crate::tables::young::YoungInodes;

/// Number of descriptors that the cache closes when the process has too many.
const SHRINK_BY: usize = 64;

/// A directory of another file system, served as a [`FileSystem`](defuse_fs::FileSystem).
pub struct Passthrough {
    pub(crate) options: PassthroughOptions,
    pub(crate) mounts: MountTable,
    pub(crate) inodes: InodeTable,
    pub(crate) pruning: Arc<InodePruning>,
    pub(crate) foreign: ForeignMounts,
    pub(crate) own_mount: Option<OwnMount>,
    /// Inodes whose birth time the clock has not passed, see `identity.rs`.
    pub(crate) young: YoungInodes,
    /// Inodes whose numbers change, see `tables/watches.rs`.
    pub(crate) watches: IdentityWatches,
    pub(crate) files: OpenFiles,
    pub(crate) positions: PositionTables,
    pub(crate) cache: FdCache,
    pub(crate) recent: RecentFiles,
    pub(crate) locks: OwnerLocks,
    pub(crate) read_only: bool,
    /// Open every file with `O_NOATIME`, because the mount of the source updates access times.
    pub(crate) opens_without_atime: bool,
    /// Locks for detecting that an inode has lost its last name; see `removal.rs`.
    pub(crate) removals: RemovalLocks,
    /// True after [`Passthrough::keep_descriptors`].
    by_descriptor: AtomicBool,
}

/// The current resources of a [`Passthrough`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ResourceStats {
    /// Number of inodes known to frontends, including the root.
    pub inodes: usize,
    /// Memory of all inodes and their tables in bytes: an estimate without the allocator's
    /// overhead.
    pub inode_bytes: usize,
    /// Number of open files and directories.
    pub open_files: usize,
    /// Number of descriptors kept for inodes: in the cache, of files recently open for reading, and
    /// pins.
    pub cached_fds: usize,
    /// Number of pins: descriptors that stay open until their inode is forgotten. Needed for
    /// unlinked files and, without file handles, for inodes that cannot be found by name.
    pub pinned_fds: usize,
    /// Number of all descriptors: open files, cache, pins, lock owners and one per mount.
    pub open_fds: usize,
    /// Number of inodes with a watch of inotify(7), because numbers do not find them.
    pub watched_inodes: usize,
    /// Number of hits in the descriptor cache.
    pub cache_hits: u64,
    /// Number of misses in the descriptor cache, after which the handle was opened.
    pub cache_misses: u64,
}

/// A descriptor of an inode during one operation, usually `O_PATH`.
pub(crate) type InodeFd = Arc<OwnedFd>;

impl Passthrough {
    /// Serves the directory `source`, or the directory that it links to.
    ///
    /// Without file handles (see [`FileHandles`]), more descriptors are needed, so this raises the
    /// soft limit `RLIMIT_NOFILE` of the process to the hard limit.
    ///
    /// # Errors
    ///
    /// Fails with a [`SourceError`], whose text names the next step.
    pub fn new(source: &Path, options: PassthroughOptions) -> Result<Self, SourceError> {
        let fail = |errno| SourceError::new(source.to_path_buf(), errno);
        rustix::fs::access("/proc/self/fd", rustix::fs::Access::EXEC_OK)
            .or_errno()
            .map_err(SourceError::NoProc)?;
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let root = rustix::fs::open(source, flags, Mode::empty()).or_errno().map_err(fail)?;
        let dated = lower::with_access_times(root.as_fd(), options.access_times);
        let opens_without_atime = options.access_times == AccessTimeRule::Never && dated.is_none();
        let root = dated.unwrap_or(root);
        let mut mount =
            LowerMount::open(root.as_fd(), options.file_handles).map_err(|error| match error {
                LowerMountError::NoHandles(errno) => {
                    SourceError::NoFileHandles(source.to_path_buf(), errno)
                }
                LowerMountError::Other(errno) => fail(errno),
            })?;
        let fd = mount.fd.take().and_then(Arc::into_inner);
        mount.fd = fd.map(|fd| Arc::new(move_above(fd, options.descriptors_from)));
        if !mount.handles {
            if options.descriptors_from == 0 {
                raise_nofile_limit();
            }
            if options.file_handles == FileHandles::Auto {
                log::info!(
                    "no file handles in {}: inodes are found again by name",
                    source.display()
                );
            }
        }
        let served = Passthrough::build(root, mount, options).map_err(fail)?;
        Ok(Passthrough { opens_without_atime, ..served })
    }

    fn build(root: OwnedFd, mount: LowerMount, options: PassthroughOptions) -> Result<Self> {
        if options.credentials == CredentialsPolicy::Sticky {
            crate::creds::remember();
        }
        let stat = StatxResult::read(root.as_fd())?;
        let handle =
            if mount.handles { Some(sys::name_to_handle(root.as_fd(), c"")?) } else { None };
        let key = mount.key(0, &stat, handle.as_ref()).ok_or(Errno::EIO)?;
        let vfs = rustix::fs::fstatvfs(&root).or_errno()?;
        let pruning = Arc::new(InodePruning::new());
        let mountpoint = options.mountpoint.as_deref();
        let own_mount = mountpoint.and_then(|path| OwnMount::find(path, root.as_fd()));
        Ok(Passthrough {
            read_only: vfs.f_flag.contains(rustix::fs::StatVfsMountFlags::RDONLY),
            cache: FdCache::new(cache_capacity(options.fd_cache)),
            recent: RecentFiles::new(recent_capacity()),
            mounts: MountTable::new(mount, options.file_handles, options.granted),
            inodes: InodeTable::new(LowerInode::root(
                key,
                handle.map_or(ReopenMethod::Names, ReopenMethod::Handle),
                move_above(root, options.descriptors_from),
            )),
            own_mount,
            foreign: ForeignMounts::new(cache_capacity(options.fd_cache), Arc::clone(&pruning)),
            pruning,
            young: YoungInodes::default(),
            watches: IdentityWatches::new(options.descriptors_from),
            files: OpenFiles::new(),
            positions: PositionTables::default(),
            locks: OwnerLocks::new(),
            removals: RemovalLocks::default(),
            opens_without_atime: false,
            by_descriptor: AtomicBool::new(false),
            options,
        })
    }

    /// The current resources. It visits all inodes, so it is not meant for hot paths.
    pub fn stats(&self) -> ResourceStats {
        let (inodes, inode_bytes) = self.inodes.size();
        let (cached, cache_hits, cache_misses) = self.cache.counts();
        let foreign = self.foreign.existing_cache().map(FdCache::counts).unwrap_or_default();
        let (cache_hits, cache_misses) = (cache_hits + foreign.1, cache_misses + foreign.2);
        let cached = cached + foreign.0 + self.recent.len();
        let (pinned_fds, open_files) = (self.inodes.pin_count(), self.files.len());
        let mounts = self.mounts.descriptors() + self.foreign.open_roots();
        ResourceStats {
            inodes,
            inode_bytes,
            open_files,
            cached_fds: cached + pinned_fds,
            pinned_fds,
            open_fds: cached
                + pinned_fds
                + open_files
                + mounts
                + self.locks.len()
                + self.watches.descriptors(),
            watched_inodes: self.watches.len(),
            cache_hits,
            cache_misses,
        }
    }

    /// True if inodes of the source are found by file handles.
    pub fn uses_file_handles(&self) -> bool {
        self.mounts.get(0).is_ok_and(|mount| mount.handles)
    }

    /// From now on, every known inode keeps a descriptor. open_by_handle_at(2) requires a privilege
    /// (`CAP_DAC_READ_SEARCH`) that the threads of an application may drop.
    pub(crate) fn keep_descriptors(&self) {
        if self.by_descriptor.swap(true, Ordering::Relaxed) {
            return;
        }
        for inode in self.inodes.list_all().iter().filter(|inode| !inode.is_pinned()) {
            if let Ok(fd) = self.open_inode(inode, OFlags::PATH) {
                self.inodes.pin(inode, Arc::new(self.place_descriptor(fd)));
            }
        }
    }

    /// True if every inode keeps a descriptor even if it has a handle.
    pub(crate) fn keeps_descriptors(&self) -> bool {
        self.by_descriptor.load(Ordering::Relaxed)
    }

    // ---- from inode to descriptor ---------------------------------------------------------

    /// An `O_PATH` descriptor of an inode.
    pub(crate) fn fd(&self, inode: &LowerInode) -> Result<InodeFd> {
        if let Some(fd) = inode.pin.load_full() {
            if inode.key.mount != 0 {
                self.foreign.note_pin_use();
            }
            return Ok(fd);
        }
        if let Some(fd) = self.cache_of(inode).get(inode) {
            return Ok(fd);
        }
        let fd = match &inode.handle {
            Some(_) => self.open_inode(inode, OFlags::PATH),
            None => self.reopen(inode).inspect_err(|_| self.inodes.unhash(inode)),
        }?;
        let fd = Arc::new(self.place_descriptor(fd));
        // Directories are used again and again by lookups and creations; other inodes mostly once.
        self.cache_fd(inode, &fd, inode.kind == FileKind::Directory);
        Ok(fd)
    }

    /// Opens an inode with one system call. The caller has checked that `flags` are valid for its
    /// type.
    pub(crate) fn open_inode(&self, inode: &LowerInode, flags: OFlags) -> Result<OwnedFd> {
        let flags = flags | OFlags::CLOEXEC;
        let result = self.with_spare_fds(|| match (&inode.handle, &*inode.pin.load()) {
            // Use the pin if there is one, because no handle finds an unlinked file on tmpfs.
            (_, Some(pin)) => {
                let path = ProcPath::new(pin.as_fd());
                rustix::fs::open(path.as_c_str(), flags - OFlags::NOFOLLOW, Mode::empty())
                    .or_errno()
            }
            (Some(handle), None) => self.open_by_handle(inode, handle, flags),
            (None, None) => {
                let fd = self.fd(inode)?;
                let path = ProcPath::new(fd.as_fd());
                rustix::fs::open(path.as_c_str(), flags - OFlags::NOFOLLOW, Mode::empty())
                    .or_errno()
            }
        });
        if matches!(result, Err(Errno::ESTALE)) {
            // The inode was removed on the source. Its number may belong to a new inode from now
            // on.
            self.inodes.unhash(inode);
        }
        result
    }

    /// Moves a descriptor to the range of numbers that the application does not use.
    pub(crate) fn place_descriptor(&self, fd: OwnedFd) -> OwnedFd {
        move_above(fd, self.options.descriptors_from)
    }

    /// Runs `open`, and repeats it with fewer cached descriptors if there were too many.
    pub(crate) fn with_spare_fds<T>(&self, open: impl Fn() -> Result<T>) -> Result<T> {
        match open() {
            Err(Errno::EMFILE) => {
                self.recent.clear();
                self.wait_for_young();
                self.cache.shrink(SHRINK_BY);
                if let Some(cache) = self.foreign.existing_cache() {
                    cache.shrink(SHRINK_BY);
                }
                let again = match open() {
                    Err(Errno::EMFILE) => self.wait_for_pruning(&open),
                    other => other,
                };
                again.inspect_err(|errno| {
                    if *errno == Errno::EMFILE {
                        self.say_that_descriptors_ran_out();
                    }
                })
            }
            other => other,
        }
    }

    /// Requests that the frontends forget inodes if many are pinned.
    pub(crate) fn prune_if_many(&self) {
        if self.pruning.is_due(self.inodes.pin_count()) {
            self.pruning.start(|| self.inodes.list_all());
        }
    }

    /// Repeats `open`, which failed for lack of descriptors, while frontends forget inodes.
    fn wait_for_pruning<T>(&self, open: impl Fn() -> Result<T>) -> Result<T> {
        const PAUSE: Duration = Duration::from_millis(5);
        const TRIES: usize = 200;
        for _ in 0..TRIES {
            if self.pruning.is_useless(self.inodes.pin_count()) {
                break;
            }
            self.pruning.start(|| self.inodes.list_all());
            std::thread::sleep(PAUSE);
            match open() {
                Err(Errno::EMFILE) => {}
                other => return other,
            }
        }
        Err(Errno::EMFILE)
    }

    /// Logged once, because every lookup may fail from then on.
    fn say_that_descriptors_ran_out(&self) {
        static SAID: std::sync::Once = std::sync::Once::new();
        SAID.call_once(|| {
            log::error!(
                "too many open files: {} of frontends and {} of inodes; raise the limit \
                 (ulimit -n), or use file handles",
                self.files.len(),
                self.inodes.pin_count()
            );
        });
    }
}

impl fmt::Debug for Passthrough {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Passthrough").field("options", &self.options).finish_non_exhaustive()
    }
}

/// Half of the limit on descriptors, so that an equal number of open files fits.
fn cache_capacity(wanted: usize) -> usize {
    const MOST: u64 = 8192;
    if wanted > 0 {
        return wanted;
    }
    let limit = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    (limit / 2).clamp(1, MOST) as usize
}

/// A sixteenth of the limit on descriptors.
fn recent_capacity() -> usize {
    const MOST: u64 = 1024;
    let limit = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    (limit / 16).clamp(1, MOST) as usize
}

fn raise_nofile_limit() {
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    if let Err(error) = setrlimit(Resource::Nofile, limit) {
        log::warn!("the limit of open files cannot be raised: {error}");
    }
}
