//! The file system object, and how an inode is found, opened and entered.

use std::fmt;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;

use defuse_fs::{Entry, Errno, FileKind, Ino, Result};
use rustix::fs::{Mode, OFlags};
use rustix::path::Arg;
use rustix::process::{Resource, getrlimit, setrlimit};

use crate::error::SourceError;
use crate::fd_cache::FdCache;
use crate::handle::Handle;
use crate::inode::{Inode, InodeTable, Key};
use crate::locks::LockTable;
use crate::lower::{OrErrno, ProcPath, Stat};
use crate::mounts::{Mount, MountError, MountTable};
use crate::open_files::OpenFiles;
use crate::options::{FileHandles, Options};
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
    pub(crate) locks: LockTable,
    pub(crate) posix_acl: bool,
    pub(crate) read_only: bool,
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
    /// Descriptors kept for inodes: in the cache, and those that stay until an inode is forgotten.
    pub cached_fds: usize,
    /// Descriptors that stay until their inode is forgotten: of unlinked files, and of all files
    /// where file handles do not work.
    pub pinned_fds: usize,
    /// All descriptors: files, cache, pins, lock owners and one for each mount.
    pub open_fds: usize,
    /// Times that the descriptor of an inode was in the cache.
    pub cache_hits: u64,
    /// Times that it was not, and was opened by its handle.
    pub cache_misses: u64,
}

/// A descriptor of an inode for the time of one operation, mostly `O_PATH`.
pub(crate) enum InodeFd<'a> {
    Pinned(BorrowedFd<'a>),
    Cached(Arc<OwnedFd>),
}

impl AsFd for InodeFd<'_> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            InodeFd::Pinned(fd) => *fd,
            InodeFd::Cached(fd) => fd.as_fd(),
        }
    }
}

impl Passthrough {
    /// Serves the directory `source` (a symbolic link to one is followed).
    ///
    /// Without file handles (see [`FileHandles`]) the soft limit `RLIMIT_NOFILE` of the process is
    /// raised to the hard one, because every known inode holds a descriptor.
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
        let mount =
            Mount::open(root.as_fd(), options.file_handles).map_err(|error| match error {
                MountError::NoHandles(errno) => {
                    SourceError::NoFileHandles(source.to_path_buf(), errno)
                }
                MountError::Other(errno) => fail(errno),
            })?;
        if !mount.handles {
            raise_nofile_limit();
            if options.file_handles == FileHandles::Auto {
                log::info!(
                    "no file handles in {}: one descriptor for each inode",
                    source.display()
                );
            }
        }
        Passthrough::build(root, mount, options).map_err(fail)
    }

    fn build(root: OwnedFd, mount: Mount, options: Options) -> Result<Self> {
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
            mounts: MountTable::new(mount, options.file_handles),
            inodes: InodeTable::new(Inode::root(key, handle, root)),
            files: OpenFiles::new(),
            locks: LockTable::new(),
            options,
        })
    }

    /// What is held at the moment. Walks all inodes; for people, not for every request.
    pub fn stats(&self) -> Stats {
        let (inodes, inode_bytes) = self.inodes.size();
        let (cached, cache_hits, cache_misses) = self.cache.counts();
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

    // ---- from inode to descriptor ---------------------------------------------------------

    /// An `O_PATH` descriptor of an inode.
    pub(crate) fn fd<'a>(&self, inode: &'a Inode) -> Result<InodeFd<'a>> {
        if let Some(fd) = inode.pin.get() {
            return Ok(InodeFd::Pinned(fd.as_fd()));
        }
        if let Some(fd) = self.cache.get(inode) {
            return Ok(InodeFd::Cached(fd));
        }
        let fd = Arc::new(self.open_inode(inode, OFlags::PATH)?);
        // Lookups and creations need directories again and again; other inodes mostly once.
        self.cache.put(inode, &fd, inode.kind == FileKind::Directory);
        Ok(InodeFd::Cached(fd))
    }

    /// Opens an inode: one system call. The caller has seen to it that `flags` suit its kind.
    pub(crate) fn open_inode(&self, inode: &Inode, flags: OFlags) -> Result<OwnedFd> {
        let flags = flags | OFlags::CLOEXEC;
        let result = self.with_spare_fds(|| match (&inode.handle, inode.pin.get()) {
            // By the pin where there is one, because no handle finds an unlinked file on tmpfs.
            (_, Some(pin)) => {
                let path = ProcPath::new(pin.as_fd());
                rustix::fs::open(path.as_c_str(), flags - OFlags::NOFOLLOW, Mode::empty())
                    .or_errno()
            }
            (Some(handle), None) => {
                let mount = self.mounts.get(inode.key.mount)?.fd.as_ref().ok_or(Errno::ESTALE)?;
                sys::open_by_handle(mount.as_fd(), handle, flags.bits())
            }
            (None, None) => Err(Errno::ESTALE),
        });
        if matches!(result, Err(Errno::ESTALE)) {
            // It was removed behind our back. Its number may lead to a new inode from now on.
            self.inodes.unhash(inode);
        }
        result
    }

    /// Runs `open`, and once more with fewer descriptors in the cache if there were too many.
    pub(crate) fn with_spare_fds<T>(&self, open: impl Fn() -> Result<T>) -> Result<T> {
        match open() {
            Err(Errno::EMFILE) => {
                self.cache.shrink(SHRINK_BY);
                open().inspect_err(|errno| {
                    if *errno == Errno::EMFILE {
                        log::error!(
                            "too many open files ({}): raise the limit of descriptors (ulimit -n)",
                            self.files.len() + self.inodes.pinned()
                        );
                    }
                })
            }
            other => other,
        }
    }

    // ---- from name to inode ---------------------------------------------------------------

    /// Looks `name` up in `dir`, a directory on the mount `likely`; one lookup more.
    ///
    /// Between the calls the name may come to lead elsewhere; that is noticed because the handle
    /// names an inode, and a descriptor, which can only be of one inode, is taken instead.
    pub(crate) fn lookup_in(&self, likely: u32, dir: BorrowedFd<'_>, name: &[u8]) -> Result<Entry> {
        let stat = Stat::at(dir, name)?;
        let Some(index) = self.mounts.find(stat.mount_id(), likely) else {
            return self.lookup_by_fd(likely, dir, name);
        };
        let mount = self.mounts.get(index)?;
        if let Some(key) = mount.key(index, &stat, None)
            && let Some(ino) = self.inodes.acquire(&key)
        {
            return self.entry(ino, index, &stat);
        }
        if !mount.handles {
            return self.lookup_by_fd(likely, dir, name);
        }
        let handle = handle_of(dir, name)?;
        if !same_inode(mount, &handle, &stat, dir, name)? {
            return self.lookup_by_fd(likely, dir, name);
        }
        self.enter(index, &stat, Some(handle), None)
    }

    /// The same with a descriptor: where there are no handles, at mount points, and where
    /// the name is changing.
    fn lookup_by_fd(&self, likely: u32, dir: BorrowedFd<'_>, name: &[u8]) -> Result<Entry> {
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let open = || rustix::fs::openat(dir, name, flags, Mode::empty()).or_errno();
        self.enter_path_fd(likely, self.with_spare_fds(open)?)
    }

    /// Enters what an `O_PATH` descriptor has open; one lookup more.
    pub(crate) fn enter_path_fd(&self, likely: u32, fd: OwnedFd) -> Result<Entry> {
        let stat = Stat::of(fd.as_fd())?;
        let (index, handle) = self.identify(likely, fd.as_fd(), &stat)?;
        let pin = if handle.is_some() { None } else { Some(fd) };
        self.enter(index, &stat, handle, pin)
    }

    /// Enters what `fd` has open for reading or writing; one lookup more.
    pub(crate) fn enter_open_fd(&self, likely: u32, fd: BorrowedFd<'_>) -> Result<Entry> {
        let stat = Stat::of(fd)?;
        let (index, handle) = self.identify(likely, fd, &stat)?;
        // A file without a name is found by no handle.
        let pin = if handle.is_some() && stat.nlink() > 0 {
            None
        } else {
            let path = ProcPath::new(fd);
            let flags = OFlags::PATH | OFlags::CLOEXEC;
            let open = || rustix::fs::open(path.as_c_str(), flags, Mode::empty()).or_errno();
            Some(self.with_spare_fds(open)?)
        };
        self.enter(index, &stat, handle, pin)
    }

    fn identify(
        &self,
        likely: u32,
        fd: BorrowedFd<'_>,
        stat: &Stat,
    ) -> Result<(u32, Option<Handle>)> {
        let index = match self.mounts.find(stat.mount_id(), likely) {
            Some(index) => index,
            None => self.with_spare_fds(|| self.mounts.enter(fd, stat))?,
        };
        let handles = self.mounts.get(index)?.handles;
        let handle = if handles { Some(sys::name_to_handle(fd, c"")?) } else { None };
        Ok((index, handle))
    }

    fn enter(
        &self,
        index: u32,
        stat: &Stat,
        handle: Option<Handle>,
        pin: Option<OwnedFd>,
    ) -> Result<Entry> {
        let key = self.mounts.get(index)?.key(index, stat, handle.as_ref()).ok_or(Errno::EIO)?;
        let ino = self.inodes.insert(key, stat.kind()?, handle, pin)?;
        self.entry(ino, index, stat)
    }

    fn entry(&self, ino: Ino, mount: u32, stat: &Stat) -> Result<Entry> {
        let attr = stat.attr(mount, self.options.attr_valid_for).inspect_err(|_| {
            self.give_back(ino, 1);
        })?;
        Ok(Entry { ino, generation: 0, attr, valid_for: self.options.entry_valid_for })
    }

    /// Gives lookups back, and closes what was kept for the inode after the last.
    pub(crate) fn give_back(&self, ino: Ino, lookups: u64) {
        if let Some(inode) = self.inodes.forget(ino, lookups) {
            self.cache.remove(&inode);
            if self.forwards_locks() {
                self.locks.forget(ino);
            }
        }
    }

    /// Keeps a descriptor of what `name` in `dir` leads to, if a frontend knows it and it is about
    /// to lose what may be its last name: the contract keeps its number valid, but no handle leads
    /// to a file without names. Not more than a precaution, so that errors are ignored: the
    /// operation itself will show them.
    pub(crate) fn pin_victim(&self, likely: u32, dir: BorrowedFd<'_>, name: &[u8]) {
        let Ok(stat) = Stat::at(dir, name) else { return };
        // With three names and more, others remain whatever happens at the same time.
        let directory = stat.kind() == Ok(FileKind::Directory);
        if stat.nlink() > 2 && !directory {
            return;
        }
        let Some(index) = self.mounts.find(stat.mount_id(), likely) else { return };
        let Ok(mount) = self.mounts.get(index) else { return };
        if !mount.handles {
            return;
        }
        let key = mount
            .key(index, &stat, None)
            .or_else(|| mount.key(index, &stat, Some(&handle_of(dir, name).ok()?)));
        let Some(inode) = key.and_then(|key| self.inodes.peek(&key)) else { return };
        if inode.pin.get().is_none()
            && let Ok(fd) = self.open_inode(&inode, OFlags::PATH)
        {
            self.inodes.pin(&inode, fd);
            self.cache.remove(&inode);
        }
    }
}

impl fmt::Debug for Passthrough {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Passthrough").field("options", &self.options).finish_non_exhaustive()
    }
}

impl Mount {
    /// The identity of an inode on this mount, the `index`th. `None` where that takes the handle,
    /// because the file system keeps no birth times that can be relied upon.
    fn key(&self, index: u32, stat: &Stat, handle: Option<&Handle>) -> Option<Key> {
        let birth = match (self.birth_is_constant(), self.handles) {
            (true, _) if stat.birth().is_some() => stat.birth()?,
            (_, true) => handle?.digest(),
            // The descriptor that every inode holds keeps its number from being used again.
            (_, false) => 0,
        };
        Some(Key { ino: stat.ino(), birth, mount: index })
    }
}

/// The handle of `name` in `dir`.
fn handle_of(dir: BorrowedFd<'_>, name: &[u8]) -> Result<Handle> {
    // Names of up to 255 bytes are terminated on the stack.
    name.into_with_c_str(|name| Ok(sys::name_to_handle(dir, name))).or_errno()?
}

/// Whether `handle` belongs to the inode of `stat`: by the number in it, or by a second look at
/// the name.
fn same_inode(
    mount: &Mount,
    handle: &Handle,
    stat: &Stat,
    dir: BorrowedFd<'_>,
    name: &[u8],
) -> Result<bool> {
    match handle.names(mount.f_type, stat.ino()) {
        Some(same) => Ok(same),
        None => {
            let again = Stat::at(dir, name)?;
            Ok(again.ino() == stat.ino() && again.mount_id() == stat.mount_id())
        }
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

fn raise_nofile_limit() {
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    if let Err(error) = setrlimit(Resource::Nofile, limit) {
        log::warn!("the limit of open files cannot be raised: {error}");
    }
}
