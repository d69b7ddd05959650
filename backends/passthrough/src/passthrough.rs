//! The file system object, and how an inode is found, opened and entered.

use std::fmt;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use defuse_fs::{Errno, FileKind, Result};
use rustix::fs::{Mode, OFlags};
use rustix::process::{Resource, getrlimit, setrlimit};

use crate::error::SourceError;
use crate::fd_cache::FdCache;
use crate::handle::Handle;
use crate::inode::{Inode, InodeTable};
use crate::locks::LockTable;
use crate::lower::{self, OrErrno, ProcPath, Stat, above};
use crate::mounts::{Mount, MountError, MountTable};
use crate::open_files::OpenFiles;
use crate::options::{Credentials, FileHandles, Options};
use crate::recent::RecentFiles;
use crate::removal::Removals;
use crate::sys;

/// Descriptors that the cache gives up when the process has too many.
const SHRINK_BY: usize = 64;

/// A directory of another file system, served as a [`FileSystem`](defuse_fs::FileSystem).
pub struct Passthrough {
    pub(crate) options: Options,
    pub(crate) mounts: MountTable,
    pub(crate) inodes: InodeTable,
    pub(crate) files: OpenFiles,
    pub(crate) cache: FdCache,
    pub(crate) recent: RecentFiles,
    pub(crate) locks: LockTable,
    pub(crate) posix_acl: bool,
    pub(crate) read_only: bool,
    /// Every file is opened with `O_NOATIME`, because the mount of the source moves access times.
    pub(crate) opens_without_atime: bool,
    /// Taken to find out whether an inode has lost its last name, see `removal.rs`.
    pub(crate) removals: Removals,
    /// See [`Passthrough::keep_descriptors`].
    by_descriptor: AtomicBool,
}

/// What a [`Passthrough`] holds at a moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Stats {
    /// Inodes that frontends know, with the root.
    pub inodes: usize,
    /// Memory for all inodes and their tables, in bytes; an estimate without the allocator's own.
    pub inode_bytes: usize,
    /// Open files and directories of frontends.
    pub open_files: usize,
    /// Descriptors kept for inodes: in the cache, of files that were open for reading a moment ago,
    /// and those that stay until an inode is forgotten.
    pub cached_fds: usize,
    /// Descriptors that stay until their inode is forgotten: of unlinked files, and, without file
    /// handles, of what is not found again by name.
    pub pinned_fds: usize,
    /// All descriptors: files, cache, pins, lock owners and one for each mount.
    pub open_fds: usize,
    /// Times that the descriptor of an inode was in the cache.
    pub cache_hits: u64,
    /// Times that it was not, and was opened by its handle.
    pub cache_misses: u64,
}

/// A descriptor of an inode for the time of one operation, mostly `O_PATH`.
pub(crate) type InodeFd = Arc<OwnedFd>;

impl Passthrough {
    /// Serves the directory `source` (a symbolic link to one is followed).
    ///
    /// Without file handles (see [`FileHandles`]) the soft limit `RLIMIT_NOFILE` of the process is
    /// raised to the hard one, because more descriptors are kept then.
    ///
    /// # Errors
    ///
    /// See [`SourceError`], whose text says what to do next.
    pub fn new(source: &Path, options: Options) -> Result<Self, SourceError> {
        let fail = |errno| SourceError::new(source.to_path_buf(), errno);
        rustix::fs::access("/proc/self/fd", rustix::fs::Access::EXEC_OK)
            .or_errno()
            .map_err(SourceError::NoProc)?;
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let root = rustix::fs::open(source, flags, Mode::empty()).or_errno().map_err(fail)?;
        let quiet = options.noatime.then(|| lower::without_access_times(root.as_fd())).flatten();
        let opens_without_atime = options.noatime && quiet.is_none();
        let root = quiet.unwrap_or(root);
        let mut mount =
            Mount::open(root.as_fd(), options.file_handles).map_err(|error| match error {
                MountError::NoHandles(errno) => {
                    SourceError::NoFileHandles(source.to_path_buf(), errno)
                }
                MountError::Other(errno) => fail(errno),
            })?;
        mount.fd = mount.fd.map(|fd| above(fd, options.descriptors_from));
        if !mount.handles {
            if options.descriptors_from == 0 {
                raise_nofile_limit();
            }
            if options.file_handles == FileHandles::Auto {
                log::info!(
                    "no file handles in {}: what is known is found again by name",
                    source.display()
                );
            }
        }
        let served = Passthrough::build(root, mount, options).map_err(fail)?;
        Ok(Passthrough { opens_without_atime, ..served })
    }

    fn build(root: OwnedFd, mount: Mount, options: Options) -> Result<Self> {
        if options.credentials == Credentials::Sticky {
            crate::creds::remember();
        }
        let stat = Stat::of(root.as_fd())?;
        let handle =
            if mount.handles { Some(sys::name_to_handle(root.as_fd(), c"")?) } else { None };
        let key = mount.key(0, &stat, handle.as_ref()).ok_or(Errno::EIO)?;
        let vfs = rustix::fs::fstatvfs(&root).or_errno()?;
        let posix_acl = options.xattrs && has_acls(root.as_fd());
        Ok(Passthrough {
            posix_acl,
            read_only: vfs.f_flag.contains(rustix::fs::StatVfsMountFlags::RDONLY),
            cache: FdCache::new(cache_capacity(options.fd_cache)),
            recent: RecentFiles::new(recent_capacity()),
            mounts: MountTable::new(mount, options.file_handles, options.granted),
            inodes: InodeTable::new(Inode::root(
                key,
                handle,
                above(root, options.descriptors_from),
            )),
            files: OpenFiles::new(),
            locks: LockTable::new(),
            removals: Removals::default(),
            opens_without_atime: false,
            by_descriptor: AtomicBool::new(false),
            options,
        })
    }

    /// What is held at the moment. Walks all inodes; for people, not for every request.
    pub fn stats(&self) -> Stats {
        let (inodes, inode_bytes) = self.inodes.size();
        let (cached, cache_hits, cache_misses) = self.cache.counts();
        let cached = cached + self.recent.len();
        let (pinned_fds, open_files) = (self.inodes.pinned(), self.files.len());
        let mounts = self.mounts.iter().filter(|mount| mount.fd.is_some()).count();
        Stats {
            inodes,
            inode_bytes,
            open_files,
            cached_fds: cached + pinned_fds,
            pinned_fds,
            open_fds: cached + pinned_fds + open_files + mounts + self.locks.len(),
            cache_hits,
            cache_misses,
        }
    }

    /// True where inodes of the source are found again by file handles.
    pub fn uses_file_handles(&self) -> bool {
        self.mounts.get(0).is_ok_and(|mount| mount.handles)
    }

    /// From now on every inode that a frontend knows keeps a descriptor: open_by_handle_at(2) takes a
    /// privilege (`CAP_DAC_READ_SEARCH`) that the threads of an application may give up.
    pub(crate) fn keep_descriptors(&self) {
        if self.by_descriptor.swap(true, Ordering::Relaxed) {
            return;
        }
        for inode in self.inodes.all().iter().filter(|inode| !inode.is_pinned()) {
            if let Ok(fd) = self.open_inode(inode, OFlags::PATH) {
                self.inodes.pin(inode, Arc::new(self.placed(fd)));
            }
        }
    }

    /// Whether every inode keeps a descriptor although it has a handle.
    pub(crate) fn keeps_descriptors(&self) -> bool {
        self.by_descriptor.load(Ordering::Relaxed)
    }

    // ---- from inode to descriptor ---------------------------------------------------------

    /// An `O_PATH` descriptor of an inode.
    pub(crate) fn fd(&self, inode: &Inode) -> Result<InodeFd> {
        if let Some(fd) = inode.pin.load_full() {
            return Ok(fd);
        }
        if let Some(fd) = self.cache.get(inode) {
            return Ok(fd);
        }
        let fd = match &inode.handle {
            Some(_) => self.open_inode(inode, OFlags::PATH),
            None => self.reopen(inode).inspect_err(|_| self.inodes.unhash(inode)),
        }?;
        let fd = Arc::new(self.placed(fd));
        // Lookups and creations need directories again and again; other inodes mostly once.
        self.cache.put(inode, &fd, inode.kind == FileKind::Directory);
        Ok(fd)
    }

    /// Opens an inode: one system call. The caller has seen to it that `flags` suit its kind.
    pub(crate) fn open_inode(&self, inode: &Inode, flags: OFlags) -> Result<OwnedFd> {
        let flags = flags | OFlags::CLOEXEC;
        let result = self.with_spare_fds(|| match (&inode.handle, &*inode.pin.load()) {
            // By the pin where there is one, because no handle finds an unlinked file on tmpfs.
            (_, Some(pin)) => {
                let path = ProcPath::new(pin.as_fd());
                rustix::fs::open(path.as_c_str(), flags - OFlags::NOFOLLOW, Mode::empty())
                    .or_errno()
            }
            (Some(handle), None) => {
                let mount = self.mounts.get(inode.key.mount)?.fd.as_ref().ok_or(Errno::ESTALE)?;
                open_by_handle(mount.as_fd(), inode, handle, flags)
            }
            (None, None) => {
                let fd = self.fd(inode)?;
                let path = ProcPath::new(fd.as_fd());
                rustix::fs::open(path.as_c_str(), flags - OFlags::NOFOLLOW, Mode::empty())
                    .or_errno()
            }
        });
        if matches!(result, Err(Errno::ESTALE)) {
            // It was removed behind our back. Its number may lead to a new inode from now on.
            self.inodes.unhash(inode);
        }
        result
    }

    /// A descriptor that is kept, under a number where the application has none of its own.
    pub(crate) fn placed(&self, fd: OwnedFd) -> OwnedFd {
        above(fd, self.options.descriptors_from)
    }

    /// Runs `open`, and once more with fewer descriptors in the cache if there were too many.
    pub(crate) fn with_spare_fds<T>(&self, open: impl Fn() -> Result<T>) -> Result<T> {
        match open() {
            Err(Errno::EMFILE) => {
                self.recent.clear();
                self.cache.shrink(SHRINK_BY);
                open().inspect_err(|errno| {
                    if *errno == Errno::EMFILE {
                        self.say_that_descriptors_ran_out();
                    }
                })
            }
            other => other,
        }
    }

    /// Once, because from then on every lookup may fail.
    fn say_that_descriptors_ran_out(&self) {
        static SAID: std::sync::Once = std::sync::Once::new();
        SAID.call_once(|| {
            log::error!(
                "too many open files: {} of frontends and {} of inodes; raise the limit \
                 (ulimit -n), or use file handles",
                self.files.len(),
                self.inodes.pinned()
            );
        });
    }
}

impl fmt::Debug for Passthrough {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Passthrough").field("options", &self.options).finish_non_exhaustive()
    }
}

/// Whether the file system of `root` keeps POSIX ACLs.
fn has_acls(root: BorrowedFd<'_>) -> bool {
    let path = ProcPath::new(root);
    let answer = rustix::fs::getxattr_query(path.as_c_str(), c"system.posix_acl_access");
    !matches!(answer, Err(rustix::io::Errno::OPNOTSUPP | rustix::io::Errno::NOSYS))
}

/// Half of what the process may open, so that as many open files of frontends fit beside.
fn cache_capacity(wanted: usize) -> usize {
    const MOST: u64 = 8192;
    if wanted > 0 {
        return wanted;
    }
    let limit = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    (limit / 2).clamp(1, MOST) as usize
}

/// A sixteenth of what the process may open.
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

/// Opens `inode` by its handle. What was made of the number alone may be of a successor by now, so
/// that nothing but its path is opened before its birth time has told; then the generation is known,
/// and the handle as good as any.
fn open_by_handle(
    mount: BorrowedFd<'_>,
    inode: &Inode,
    handle: &Handle,
    flags: OFlags,
) -> Result<OwnedFd> {
    if handle.generation() != Some(0) {
        return sys::open_by_handle(mount, handle, flags.bits());
    }
    let generation = inode.generation.load(Ordering::Relaxed);
    if generation != 0 {
        let exact = Handle::ext4(inode.key.ino, generation).ok_or(Errno::ESTALE)?;
        return sys::open_by_handle(mount, &exact, flags.bits());
    }
    let path = sys::open_by_handle(mount, handle, (OFlags::PATH | OFlags::CLOEXEC).bits())?;
    let stat = Stat::of(path.as_fd())?;
    if stat.ino() != inode.key.ino || stat.birth() != Some(inode.key.birth) {
        return Err(Errno::ESTALE);
    }
    let exact = sys::name_to_handle(path.as_fd(), c"")?;
    inode.generation.store(exact.generation().unwrap_or(0), Ordering::Relaxed);
    if flags.contains(OFlags::PATH) {
        return Ok(path);
    }
    sys::open_by_handle(mount, &exact, flags.bits())
}
