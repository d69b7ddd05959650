//! The client: its mounts, and the calls on them.

use std::ffi::OsStr;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use defuse_fs::{Errno, FileSystem};
use defuse_probe::StatsSnapshot;

use crate::credentials::TaskCredentials;
use crate::description::CellArena;
use crate::kernel_walk::KnownDirs;
use crate::link_protection::LinkProtection;
use crate::mount::{ClientMount, MountSettings, MountSpot};
use crate::mounts::ClientMounts;
use crate::stop::{CallError, Result};

/// Options of a client.
#[derive(Clone)]
pub struct ClientOptions {
    /// Follow symbolic links of the kernel's name space that lead into a mount. This costs one
    /// readlink(2) for every component of a path whose text is outside of all mounts. Default true.
    pub kernel_links: bool,
    /// Counts changes that may make a path lead to another directory. The embedding program counts
    /// symlink(2), link(2), rename(2) and rmdir(2) of the kernel's name space, after the call, and
    /// the client counts such changes of its mounts. Directories are then looked up once a second
    /// and after each change; with `None` (the default) they are looked up for each path. All
    /// processes that share the counter see the changes of each other at once.
    pub path_changes: Option<&'static AtomicU32>,
    /// Memory for the shared state of open files; `None` (the default) uses the heap.
    pub arena: Option<Arc<dyn CellArena>>,
    /// The kernel's restrictions on links; `None` (the default) reads them from /proc/sys/fs.
    pub protected: Option<LinkProtection>,
}

impl Default for ClientOptions {
    fn default() -> Self {
        ClientOptions { kernel_links: true, path_changes: None, arena: None, protected: None }
    }
}

/// Options of a mount.
#[derive(Clone, Debug)]
pub struct ClientMountArgs {
    /// Refuse all changes (`EROFS`).
    pub read_only: bool,
    /// Refuse to execute programs.
    pub noexec: bool,
    /// Maximum number of cached names. Default 65,536.
    pub cached_names: usize,
    /// Name of the source, shown in lists of mounts.
    pub source: String,
    /// Names and rights of directories within a path are looked up again only after this time, and
    /// after a change that [`ClientOptions::path_changes`] counts. Without that counter this has no
    /// effect. It is meant for file systems whose names hold for no time because others may change
    /// them. Default 0: for each path.
    pub directories_hold: Duration,
}

impl Default for ClientMountArgs {
    fn default() -> Self {
        ClientMountArgs {
            read_only: false,
            noexec: false,
            cached_names: 1 << 16,
            source: String::new(),
            directories_hold: Duration::ZERO,
        }
    }
}

/// Information about a mount, from [`DirectClient::mounts`].
#[derive(Clone, Debug)]
pub struct MountInfo {
    /// The path of the mount, or its name with a colon.
    pub target: Vec<u8>,
    /// The source that was passed to `mount`.
    pub source: String,
    /// Number of open files and working directories on the mount.
    pub users: usize,
    /// The mount itself.
    pub mount: Arc<ClientMount>,
}

/// User-space file systems inside of this process. Create one client and share it among all
/// threads.
#[derive(Default)]
pub struct DirectClient {
    pub(crate) mounts: ClientMounts,
    pub(crate) protected: LinkProtection,
    pub(crate) options: ClientOptions,
    known_dirs: KnownDirs,
    next_id: AtomicU32,
}

impl DirectClient {
    /// Creates a client without mounts.
    pub fn new(options: ClientOptions) -> Self {
        let protected = options.protected.unwrap_or_else(LinkProtection::read);
        DirectClient {
            mounts: ClientMounts::default(),
            protected,
            options,
            known_dirs: KnownDirs::default(),
            next_id: AtomicU32::new(1),
        }
    }

    /// Mounts `fs` on `target`. The target is an absolute path or a name with a colon at its end.
    ///
    /// An absolute path need not exist in the kernel's name space. A path inside of another mount
    /// must be a directory there. A named mount (`mem:`) is reached as `mem:/a/b` from everywhere.
    ///
    /// Errors: `EINVAL` for any other target and for the root of the name space, `EBUSY` if the
    /// target is already the root of a mount, `ENOENT`, `ENOTDIR`, and the errors of a path walk.
    pub fn mount(
        &self,
        target: &[u8],
        fs: Arc<dyn FileSystem>,
        args: &ClientMountArgs,
    ) -> Result<Arc<ClientMount>, Errno> {
        let spot = self.spot(target)?;
        let settings = MountSettings {
            read_only: args.read_only,
            noexec: args.noexec,
            id: self.next_id.fetch_add(1, Ordering::Relaxed),
            names: args.cached_names,
            source: args.source.clone(),
            directories: (!args.directories_hold.is_zero())
                .then_some(args.directories_hold)
                .zip(self.options.path_changes),
        };
        let mount = ClientMount::new(fs, spot, settings)?;
        self.mounts.add(Arc::clone(&mount))?;
        Ok(mount)
    }

    fn spot(&self, target: &[u8]) -> Result<MountSpot, Errno> {
        if let Some(name) = target.strip_suffix(b":").filter(|name| !name.contains(&b'/')) {
            let valid = !name.is_empty() && name.len() < 255 && !name.contains(&0);
            return if valid { Ok(MountSpot::Name(name.into())) } else { Err(Errno::EINVAL) };
        }
        let named = self.mounts.load().find_named(target).is_some();
        if !target.starts_with(b"/") && !named {
            return Err(Errno::EINVAL);
        }
        match self.find_covered(target) {
            Ok(here) if !here.node.is_dir() => Err(Errno::ENOTDIR),
            // A mount on the root of another mount would hide it. A mount on a directory inside
            // only covers that directory.
            Ok(here) => {
                let path = self.path_of(&here, &TaskCredentials::user(0, 0, &[]))?;
                Ok(MountSpot::Covers { node: here.node, mount: here.mount, path: path.into() })
            }
            Err(CallError::Errno(errno)) => Err(errno),
            Err(CallError::Outside(_)) => match canonical(target) {
                path if path.is_empty() => Err(Errno::EINVAL),
                path => Ok(MountSpot::Path(path.into())),
            },
        }
    }

    /// Unmounts the file system at `target`. Fails with `EBUSY` while it has open files, working
    /// directories or mounts on it, and with `EINVAL` if nothing is mounted there. If `lazily` is
    /// set, it is detached at once: no path leads there any more, and the file system is released
    /// with its last user.
    ///
    /// The mount is also removed if [`FileSystem::detach`] fails, which means that not all data
    /// could be made durable. A file system that is still in use, by files of a lazy unmount or by
    /// a call on another thread, is detached later, and its error is not reported.
    pub fn unmount(&self, target: &[u8], lazily: bool) -> Result<(), Errno> {
        let mount = self.mount_on(target).ok_or(Errno::EINVAL)?;
        let durable = Arc::clone(&mount.durable);
        self.mounts.remove(&mount, lazily)?;
        drop(mount);
        durable.get().copied().unwrap_or(Ok(()))
    }

    /// The topmost mount on `target`.
    fn mount_on(&self, target: &[u8]) -> Option<Arc<ClientMount>> {
        let canonical = canonical(target);
        let is = |mount: &&Arc<ClientMount>| {
            let own = mount.target();
            own == target || target.starts_with(b"/") && own == canonical
        };
        self.mounts.load_full().iter().filter(is).last().cloned()
    }

    /// Unmounts this mount, like [`unmount`](DirectClient::unmount).
    pub fn unmount_one(&self, mount: &Arc<ClientMount>, lazily: bool) -> Result<(), Errno> {
        self.mounts.remove(mount, lazily)
    }

    /// All mounts.
    pub fn mounts(&self) -> Vec<MountInfo> {
        let info = |mount: &Arc<ClientMount>| MountInfo {
            target: mount.target(),
            source: mount.source.clone(),
            users: mount.users.load(Ordering::Relaxed),
            mount: Arc::clone(mount),
        };
        self.mounts.load().iter().map(info).collect()
    }

    /// Notifies all file systems that a thread of this process is about to drop its privileges.
    /// They then need no privileges any more, not even for open files.
    pub fn prepare_privilege_drop(&self) {
        for mount in self.mounts.load().iter() {
            mount.notify_lifecycle(|lifecycle| lifecycle.prepare_privilege_drop());
        }
    }

    /// Releases memory that the mounts and their file systems keep only for speed, for a process
    /// that is short of memory.
    pub fn release_memory(&self) {
        for mount in self.mounts.load().iter() {
            mount.release_memory();
        }
    }

    /// The statistics of the mount at `target`. Fails with `EINVAL` if nothing is mounted there.
    pub fn statistics(&self, target: &[u8]) -> Result<StatsSnapshot, Errno> {
        let table = self.mounts.load_full();
        let found = table.iter().filter(|mount| mount.target() == target).last();
        found.map(|mount| mount.statistics()).ok_or(Errno::EINVAL)
    }

    /// Drops all cached names of all mounts. A file system returns `ESTALE` if the inode that a
    /// cached name led to is gone. The kernel then repeats the walk without its caches
    /// (`retry_estale()` in include/linux/namei.h); callers can do the same with this method.
    pub fn forget_names(&self) {
        for mount in self.mounts.load().iter() {
            mount.forget_names();
        }
    }

    /// True if a path may lead into a mount, judged by its text alone. This is the cheapest check
    /// for embedders that see every path of a program.
    pub fn may_be_inside(&self, path: &[u8]) -> bool {
        let table = self.mounts.load();
        match path.first() {
            Some(b'/') => table.prefix(path).is_some(),
            _ => table.find_named(path).is_some(),
        }
    }

    pub(crate) fn follows_kernel_links(&self) -> bool {
        self.options.kernel_links
    }

    /// Returns the directories that are no links, with the counter of changes; `None` if changes
    /// are not counted.
    pub(crate) fn known_directories(&self) -> Option<(&KnownDirs, &'static AtomicU32)> {
        Some((&self.known_dirs, self.options.path_changes?))
    }
}

impl std::fmt::Debug for DirectClient {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Client").field("mounts", &self.mounts()).finish_non_exhaustive()
    }
}

/// Resolves the links of a path, as far as the path exists, and removes a trailing slash.
fn canonical(path: &[u8]) -> Vec<u8> {
    let path = PathBuf::from(OsStr::from_bytes(path));
    let mut missing = Vec::new();
    let mut existing: &Path = &path;
    let found = loop {
        match existing.canonicalize() {
            Ok(found) => break found,
            Err(_) => match (existing.parent(), existing.file_name()) {
                (Some(parent), Some(name)) => {
                    missing.push(name);
                    existing = parent;
                }
                _ => break existing.to_path_buf(),
            },
        }
    };
    let full = missing.iter().rev().fold(found, |path, name| path.join(name));
    let mut bytes = full.into_os_string().into_vec();
    while bytes.last() == Some(&b'/') {
        bytes.pop();
    }
    bytes
}
