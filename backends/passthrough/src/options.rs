//! How a directory is served.

use std::time::Duration;

use defuse_fs::CacheMode;

/// Whether inodes are found again by file handles, open_by_handle_at(2).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum FileHandles {
    /// Where the process may (`CAP_DAC_READ_SEARCH`) and the file system can.
    #[default]
    Auto,
    /// Always; [`Passthrough::new`](crate::Passthrough::new) fails where it is not possible.
    On,
    /// Never: inodes are found again by name, checked by mount, number and birth time; where no birth
    /// times are kept, by an `O_PATH` descriptor for each, up to `RLIMIT_NOFILE`.
    Off,
}

/// Where POSIX and flock locks live.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Locks {
    /// In the frontend. They hold among all who come through it, and cost nothing here.
    #[default]
    Frontend,
    /// In the lower file system, so that they also hold against processes that use the source
    /// directly: one descriptor more for every pair of inode and lock owner.
    FileSystem,
    /// As `FileSystem`, in a process that forks: children and the next program have its open files,
    /// and with them their locks. Open files come with [`Opened::lower`](defuse_fs::Opened::lower),
    /// on which the frontend takes the locks that belong to an open file; a release closes the
    /// descriptor and unlocks nothing, because another process may still have the open file. No lock is
    /// waited for, and the frontend asks again (`EAGAIN`): a thread that waits is not there in a child,
    /// which has its mutex as it was at the moment of the fork, and the descriptors that it held.
    Inherited,
}

/// Whose threads the operations run on, and so whether the owner that a thread took on to create
/// something may stay.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Credentials {
    /// Threads that serve requests and do nothing else (a kernel mount): file-system user, group,
    /// umask, supplementary groups and `CAP_FSETID` are changed only when they differ from those
    /// of the operation before, and stay.
    #[default]
    Sticky,
    /// Threads of an application (in-process frontends): everything is put back before an
    /// operation returns. The umask of the process is not touched and applies on top of
    /// [`NewNode::umask`](defuse_fs::NewNode::umask), but neither does below a default ACL.
    Restore,
}

/// The settings of a [`Passthrough`](crate::Passthrough).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// How long attributes may be relied on. Default 1 s.
    pub attr_valid_for: Duration,
    /// How long a name may be relied on. Default 1 s.
    pub entry_valid_for: Duration,
    /// How long the absence of a name may be relied on. Default 0.
    pub negative_valid_for: Duration,
    /// How inodes are found again. Default [`FileHandles::Auto`].
    pub file_handles: FileHandles,
    /// Hand out [`Opened::backing`](defuse_fs::Opened::backing) for regular files. Default true.
    pub backing_files: bool,
    /// Where locks live. Default [`Locks::Frontend`].
    pub locks: Locks,
    /// How the frontend may cache data. Default [`CacheMode::Cached`]; `exclusive` makes `Cached`
    /// into [`CacheMode::Keep`].
    pub cache: CacheMode,
    /// Descriptors kept open for inodes that have file handles; 0 (the default) derives it from
    /// `RLIMIT_NOFILE`: half the limit, at most 8192.
    pub fd_cache: usize,
    /// Nobody changes the source but through this file system. Default false.
    pub exclusive: bool,
    /// Extended attributes exist, and with them ACLs and security labels. Default true.
    pub xattrs: bool,
    /// The frontend holds writes back (kernel writeback cache): files opened for writing are
    /// opened for reading too, because partly written pages are read through them, and
    /// `O_APPEND` is left to the frontend. Default false.
    pub writeback: bool,
    /// Reading moves no access time below, as on a mount with `noatime`. A privileged process then
    /// serves mounts of its own, which what is mounted below the source later does not reach. Default
    /// false.
    pub noatime: bool,
    /// Be told of every close(2), also where nothing is to be done about it. Default false.
    pub flushes: bool,
    /// Whose threads the operations run on. Default [`Credentials::Sticky`].
    pub credentials: Credentials,
    /// Descriptors that outlive an operation get numbers from here on, where there are some: an
    /// in-process frontend keeps the lower ones for its program. With 0 (the default) they are as
    /// the kernel gives them; otherwise the limit of descriptors is left as it is.
    pub descriptors_from: u32,
    /// What the frontend lets the files do. Default: neither.
    pub granted: Granted,
}

/// Effects of files that a frontend may let them have, see [`Denied`](defuse_fs::Denied). What is
/// mounted below the source and denies one of them is not served then (`EACCES`). What the source
/// itself denies is in [`Caps::denied`](defuse_fs::Caps::denied), for the frontend to obey.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Granted {
    /// Set-user-id programs.
    pub suid: bool,
    /// Device files.
    pub dev: bool,
}

impl Default for Options {
    fn default() -> Self {
        Options {
            attr_valid_for: Duration::from_secs(1),
            entry_valid_for: Duration::from_secs(1),
            negative_valid_for: Duration::ZERO,
            file_handles: FileHandles::Auto,
            backing_files: true,
            locks: Locks::Frontend,
            cache: CacheMode::Cached,
            fd_cache: 0,
            exclusive: false,
            xattrs: true,
            writeback: false,
            noatime: false,
            flushes: false,
            credentials: Credentials::Sticky,
            descriptors_from: 0,
            granted: Granted::default(),
        }
    }
}

impl Options {
    /// What the Stackfs of "To FUSE or Not to FUSE" (FAST '17) does, to compare with its numbers:
    /// no extended attributes (its `getxattr` answered `ENOSYS`, after which the kernel stops
    /// asking), no backing files (every byte passes through the daemon, kernel passthrough did not
    /// exist), and no file handles (it kept a path for each inode; here it is a descriptor in a
    /// cache, and names where it is not in there). It is told of every close (not to be came with
    /// Linux 5.16). Names and attributes are valid for 1 s as there. What else it set (big writes, splice, threads) belongs to the frontend.
    pub fn paper() -> Self {
        Options {
            file_handles: FileHandles::Off,
            backing_files: false,
            xattrs: false,
            flushes: true,
            ..Options::default()
        }
    }
}
