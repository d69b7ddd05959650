//! The values that frontends and backends exchange. Names and units come from stat(2), open(2),
//! fcntl(2) and related system calls.

use std::fmt;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use crate::native::{LastRelease, NativeFile};
use crate::timestamp::Timestamp;
use crate::{Errno, Result};

/// The longest name of one component in bytes, `NAME_MAX`.
pub const NAME_MAX: usize = 255;

/// A part of the storage behind a file system that fails apart from others, by a number that the
/// file system chooses ([`crate::FileSystem::failure_domain`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct FailureDomain(pub u32);

/// Identifies an inode. The backend chooses the number. It is valid from the lookup that returned
/// it until all lookups have been forgotten.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Ino(pub u64);

impl Ino {
    /// The root directory. Always valid, never looked up or forgotten.
    pub const ROOT: Ino = Ino(1);
}

/// Identifies an open file or directory. The backend chooses the number. It is valid from open to
/// release.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Fh(pub u64);

/// An open file: the inode it was opened on, and its handle.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct File {
    /// The inode.
    pub ino: Ino,
    /// The handle that open, create, tmpfile or opendir returned.
    pub fh: Fh,
}

/// One component of a path: not empty, not `.` or `..`, no `/`, no NUL, at most [`NAME_MAX`] bytes.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Name<'a>(&'a [u8]);

impl<'a> Name<'a> {
    /// Checks `bytes`. Fails with `ENAMETOOLONG` for more than 255 bytes, and with `EINVAL` for
    /// other invalid names.
    pub fn new(bytes: &'a [u8]) -> Result<Self> {
        if bytes.len() > NAME_MAX {
            return Err(Errno::ENAMETOOLONG);
        }
        let bad = bytes.is_empty()
            || bytes == b"."
            || bytes == b".."
            || bytes.iter().any(|&byte| byte == b'/' || byte == 0);
        if bad { Err(Errno::EINVAL) } else { Ok(Name(bytes)) }
    }

    /// A name whose bytes were checked before.
    pub(crate) fn from_checked(bytes: &'a [u8]) -> Self {
        Name(bytes)
    }

    /// The bytes, in the encoding of the caller.
    pub fn as_bytes(self) -> &'a [u8] {
        self.0
    }

    /// The name as an `OsStr`.
    pub fn as_os_str(self) -> &'a std::ffi::OsStr {
        std::os::unix::ffi::OsStrExt::from_bytes(self.0)
    }
}

impl fmt::Debug for Name<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self.as_os_str(), f)
    }
}

/// The name of an extended attribute with its namespace, such as `user.color`, xattr(7).
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct XattrName<'a>(&'a [u8]);

impl<'a> XattrName<'a> {
    /// Checks `bytes`. Fails with `ERANGE` if empty or longer than 255 bytes (as setxattr(2)), and
    /// with `EINVAL` for a NUL.
    pub fn new(bytes: &'a [u8]) -> Result<Self> {
        if bytes.is_empty() || bytes.len() > 255 {
            return Err(Errno::ERANGE);
        }
        if bytes.contains(&0) { Err(Errno::EINVAL) } else { Ok(XattrName(bytes)) }
    }

    /// The bytes of the name.
    pub fn as_bytes(self) -> &'a [u8] {
        self.0
    }

    /// True for the two POSIX ACLs, acl(5), which a frontend caches together with the attributes.
    pub fn is_acl(self) -> bool {
        matches!(self.0, b"system.posix_acl_access" | b"system.posix_acl_default")
    }

    /// The name as an `OsStr`.
    pub fn as_os_str(self) -> &'a std::ffi::OsStr {
        std::os::unix::ffi::OsStrExt::from_bytes(self.0)
    }
}

impl fmt::Debug for XattrName<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self.as_os_str(), f)
    }
}

/// The type of an inode.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FileKind {
    /// `S_IFREG`.
    Regular,
    /// `S_IFDIR`.
    Directory,
    /// `S_IFLNK`.
    Symlink,
    /// `S_IFCHR`.
    CharDevice,
    /// `S_IFBLK`.
    BlockDevice,
    /// `S_IFIFO`.
    Fifo,
    /// `S_IFSOCK`.
    Socket,
}

impl FileKind {
    /// The `S_IFMT` bits of `st_mode`.
    pub const fn mode_bits(self) -> u32 {
        match self {
            FileKind::Fifo => 0o010000,
            FileKind::CharDevice => 0o020000,
            FileKind::Directory => 0o040000,
            FileKind::BlockDevice => 0o060000,
            FileKind::Regular => 0o100000,
            FileKind::Symlink => 0o120000,
            FileKind::Socket => 0o140000,
        }
    }

    /// Returns the kind for the `S_IFMT` bits of `mode`; `None` for other values.
    pub const fn from_mode(mode: u32) -> Option<Self> {
        Some(match mode & 0o170000 {
            0o010000 => FileKind::Fifo,
            0o020000 => FileKind::CharDevice,
            0o040000 => FileKind::Directory,
            0o060000 => FileKind::BlockDevice,
            0o100000 => FileKind::Regular,
            0o120000 => FileKind::Symlink,
            0o140000 => FileKind::Socket,
            _ => return None,
        })
    }

    /// `d_type` of readdir(3): the `S_IFMT` bits shifted down.
    pub const fn d_type(self) -> u8 {
        (self.mode_bits() >> 12) as u8
    }
}

/// The attributes of an inode, as stat(2) and statx(2) return them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Attr {
    /// `st_ino` for programs. May differ from the [`Ino`] of the contract.
    pub st_ino: u64,
    /// Type of the inode.
    pub kind: FileKind,
    /// Permission bits with set-user-id, set-group-id and sticky: 0 to 0o7777.
    pub perm: u32,
    /// Number of links.
    pub nlink: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Device number of a device inode (`st_rdev`, encoded as by makedev(3)), else 0.
    pub rdev: u64,
    /// File size in bytes.
    pub size: u64,
    /// Allocated space, in units of 512 bytes.
    pub blocks: u64,
    /// Preferred I/O size in bytes.
    pub blksize: u32,
    /// Time of last access.
    pub atime: Timestamp,
    /// Time of last change of the data.
    pub mtime: Timestamp,
    /// Time of last change of the inode.
    pub ctime: Timestamp,
    /// Time of creation, if the file system records it.
    pub btime: Option<Timestamp>,
    /// The time for which the receiver may cache these values.
    pub valid_for: Duration,
}

impl Attr {
    /// The attributes of a new, empty inode with the number `ino` that `node` describes. All times
    /// are the current one, and nothing may be cached.
    /// [`posix::new_inode`](crate::posix::new_inode) changes permission bits and group by the
    /// directory.
    pub fn for_new(ino: Ino, node: &NewNode<'_>) -> Self {
        let now = Timestamp::now();
        Attr {
            st_ino: ino.0,
            kind: node.kind,
            perm: node.perm,
            nlink: if node.kind == FileKind::Directory { 2 } else { 1 },
            uid: node.uid,
            gid: node.gid,
            rdev: node.rdev,
            size: 0,
            blocks: 0,
            blksize: 4096,
            atime: now,
            mtime: now,
            ctime: now,
            btime: Some(now),
            valid_for: Duration::ZERO,
        }
    }

    /// True if a read at `now` changes the access time, by the rule of `relatime`
    /// ([`access_time_is_due`](crate::posix::access_time_is_due)).
    pub fn read_is_due(&self, now: Timestamp) -> bool {
        crate::posix::access_time_is_due(self.atime, self.mtime.max(self.ctime), now)
    }

    /// `st_mode`: type and permission bits.
    pub const fn mode(&self) -> u32 {
        self.kind.mode_bits() | self.perm
    }
}

/// An inode that was looked up by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    /// The inode. The receiver owns one lookup of this inode (see [`crate::FileSystem::forget`]).
    pub ino: Ino,
    /// Distinguishes successive inodes with the same number.
    pub generation: u64,
    /// Its attributes.
    pub attr: Attr,
    /// The time for which the receiver may cache the name.
    pub valid_for: Duration,
}

/// A new value of a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SetTime {
    /// The time at which the operation runs (`UTIME_NOW`).
    Now,
    /// This time.
    At(Timestamp),
}

/// The changes of [`crate::FileSystem::setattr`]: chmod, chown, truncate and utimens in one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SetAttr {
    /// New permission bits, 0 to 0o7777.
    pub perm: Option<u32>,
    /// New owner.
    pub uid: Option<u32>,
    /// New group.
    pub gid: Option<u32>,
    /// New file size in bytes. Added bytes read as zeros.
    pub size: Option<u64>,
    /// New time of last access.
    pub atime: Option<SetTime>,
    /// New time of last change of the data.
    pub mtime: Option<SetTime>,
    /// New time of last change of the inode. Only from a frontend with a write cache.
    pub ctime: Option<Timestamp>,
    /// Clear set-user-id, set-group-id (if group-executable) and `security.capability`, because a
    /// process without `CAP_FSETID` changes the data. A change of the owner always clears them.
    pub kill_suidgid: bool,
    /// The caller ignores the attributes in the answer, which may then be any.
    pub unanswered: bool,
}

impl SetAttr {
    /// True if nothing is to be changed.
    pub fn is_empty(&self) -> bool {
        *self == SetAttr { unanswered: self.unanswered, ..SetAttr::default() }
    }

    /// Makes all changes to `attr` but the change of the size, which also concerns the data. A file
    /// with a new owner or group loses its set-id bits. The frontend has checked the permissions.
    pub fn apply(&self, attr: &mut Attr) {
        let now = Timestamp::now();
        let drops_set_id = self.kill_suidgid || self.uid.or(self.gid).is_some();
        if drops_set_id && attr.kind != FileKind::Directory {
            attr.perm = crate::posix::drop_set_id(attr.perm, true);
        }
        let time = |set, old| match set {
            None => old,
            Some(SetTime::Now) => now,
            Some(SetTime::At(time)) => time,
        };
        attr.perm = self.perm.unwrap_or(attr.perm);
        attr.uid = self.uid.unwrap_or(attr.uid);
        attr.gid = self.gid.unwrap_or(attr.gid);
        attr.atime = time(self.atime, attr.atime);
        attr.mtime = time(self.mtime, attr.mtime);
        attr.ctime = self.ctime.unwrap_or(now);
    }
}

/// The attributes of a new inode.
#[derive(Clone, Copy, Debug)]
pub struct NewNode<'a> {
    /// Its type. mkdir and symlink pass [`FileKind::Directory`] and [`FileKind::Symlink`].
    pub kind: FileKind,
    /// Requested permission bits, before the umask.
    pub perm: u32,
    /// Bits to clear in `perm`, unless the parent has a default ACL, which replaces the umask.
    pub umask: u32,
    /// Device number of a device inode (encoded as by makedev(3)), else 0.
    pub rdev: u64,
    /// Owner of the new inode. Usually the caller, but separate from [`crate::Context`] because
    /// layers and id-mapped mounts change it.
    pub uid: u32,
    /// Group of the new inode, unless the parent has the set-group-id bit, and passes its own group
    /// on.
    pub gid: u32,
    /// A supplementary group of the caller that equals the parent's group, if the frontend knows
    /// it. With it the new inode may keep set-group-id.
    pub supplementary_gid: Option<u32>,
    /// Initial security label: name and value of an extended attribute.
    pub security: Option<(XattrName<'a>, &'a [u8])>,
}

impl NewNode<'_> {
    /// A node of `kind` with `perm`, owned by `caller`, without umask, device number and label.
    pub fn new(kind: FileKind, perm: u32, caller: crate::Caller) -> Self {
        NewNode {
            kind,
            perm,
            umask: 0,
            rdev: 0,
            uid: caller.uid,
            gid: caller.gid,
            supplementary_gid: None,
            security: None,
        }
    }
}

/// The access mode of open(2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AccessMode {
    /// `O_RDONLY`.
    Read,
    /// `O_WRONLY`.
    Write,
    /// `O_RDWR`.
    ReadWrite,
}

/// The flags of open(2), with the values of this architecture.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OpenFlags(pub u32);

#[cfg(any(target_arch = "x86_64", target_arch = "x86", target_arch = "riscv64"))]
mod arch {
    pub const DIRECT: u32 = 0o40000;
    pub const DIRECTORY: u32 = 0o200000;
    pub const NOFOLLOW: u32 = 0o400000;
}
#[cfg(any(target_arch = "aarch64", target_arch = "arm"))]
mod arch {
    pub const DIRECTORY: u32 = 0o40000;
    pub const NOFOLLOW: u32 = 0o100000;
    pub const DIRECT: u32 = 0o200000;
}

impl OpenFlags {
    /// `O_WRONLY`.
    pub const WRONLY: u32 = 0o1;
    /// `O_RDWR`.
    pub const RDWR: u32 = 0o2;
    /// `__FMODE_EXEC` of the kernel (include/linux/fs.h): the file is opened to be executed,
    /// execve(2).
    pub const EXEC: u32 = 0o40;
    /// `O_CREAT`.
    pub const CREAT: u32 = 0o100;
    /// `O_EXCL`.
    pub const EXCL: u32 = 0o200;
    /// `O_TRUNC`.
    pub const TRUNC: u32 = 0o1000;
    /// `O_APPEND`.
    pub const APPEND: u32 = 0o2000;
    /// `O_NONBLOCK`.
    pub const NONBLOCK: u32 = 0o4000;
    /// `O_DSYNC`.
    pub const DSYNC: u32 = 0o10000;
    /// `O_SYNC`, which includes `O_DSYNC`.
    pub const SYNC: u32 = 0o4010000;
    /// `O_DIRECT`.
    pub const DIRECT: u32 = arch::DIRECT;
    /// `O_DIRECTORY`.
    pub const DIRECTORY: u32 = arch::DIRECTORY;
    /// `O_NOFOLLOW`.
    pub const NOFOLLOW: u32 = arch::NOFOLLOW;
    /// `O_NOATIME`.
    pub const NOATIME: u32 = 0o1000000;
    /// `O_CLOEXEC`.
    pub const CLOEXEC: u32 = 0o2000000;

    /// The access mode. `O_ACCMODE` itself (3) counts as reading and writing.
    pub const fn access(self) -> AccessMode {
        match self.0 & 3 {
            0 => AccessMode::Read,
            1 => AccessMode::Write,
            _ => AccessMode::ReadWrite,
        }
    }

    /// True if reads are allowed.
    pub const fn readable(self) -> bool {
        self.0 & 3 != 1
    }

    /// True if writes are allowed.
    pub const fn writable(self) -> bool {
        self.0 & 3 != 0
    }

    /// True if all bits of `flags` are set.
    pub const fn has(self, flags: u32) -> bool {
        self.0 & flags == flags
    }

    /// These flags without the bits of `flags`.
    pub const fn difference(self, flags: u32) -> Self {
        OpenFlags(self.0 & !flags)
    }
}

/// The arguments of [`crate::FileSystem::open`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OpenArgs {
    /// The flags of open(2) without `O_NOCTTY`. `O_CREAT` and `O_EXCL` are passed to create
    /// (always) and tmpfile only. `O_TRUNC` is passed to open only if [`Caps`] allows it; a new
    /// file is empty anyway.
    pub flags: OpenFlags,
    /// With `O_TRUNC`: clear set-user-id and set-group-id, see [`SetAttr::kill_suidgid`].
    pub kill_suidgid: bool,
}

/// The caching of an open file that the frontend may do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CacheMode {
    /// Cache pages while the file is open. Drop those from earlier opens.
    #[default]
    Cached,
    /// Also keep pages from earlier opens: the file has not changed since.
    Keep,
    /// Cache nothing: every read and write reaches the file system.
    Direct,
}

/// The backing file of an open file: it has the same data at the same offsets for as long as the
/// file is open.
#[derive(Clone, Debug)]
pub struct BackingFile {
    /// The open file.
    pub fd: Arc<OwnedFd>,
    /// Reads and writes must be made without `CAP_FSETID`, so that the lower file system clears
    /// set-user-id, set-group-id and `security.capability` at every write. Nothing else does. A
    /// frontend that passes `fd` to the kernel does so from a thread without the capability.
    pub without_fsetid: bool,
    /// The file is one that the program would have opened itself: see [`native`](crate::native).
    pub native: Option<NativeFile>,
}

/// The result of open.
#[derive(Clone, Debug, Default)]
pub struct OpenReply {
    /// The handle, passed to every operation on the open file until release.
    pub fh: Fh,
    /// The caching that the frontend may do.
    pub cache: CacheMode,
    /// The backing file, which a frontend may read and write without calling the file system. Only
    /// with [`Caps::backing_files`]. A layer that must see reads or writes sets this to `None`.
    pub backing: Option<BackingFile>,
    /// The corresponding open file of the lower file system, with or without `backing`.
    ///
    /// An in-process frontend uses it for operations that a file system cannot provide across
    /// processes: flock(2) and open file description locks, which belong to the open file, and
    /// shared mappings. Child processes and executed programs inherit it as a descriptor. The
    /// frontend never reads or writes through it. It has the access mode of the open (`O_RDWR`
    /// instead of `O_WRONLY` is possible). A layer that must see mapped changes sets this to
    /// `None`.
    pub lower: Option<Arc<OwnedFd>>,
    /// [`flush`](crate::FileSystem::flush) of this file only drops locks. It need not be called if
    /// the frontend keeps them, or if the file has none of them since it was opened.
    pub no_flush: bool,
    /// No lseek: the file is a stream with a position of its own.
    pub stream: bool,
    /// Direct writes to this file may run in parallel.
    pub parallel_direct_writes: bool,
    /// The listing of this directory may be cached, between opens with [`CacheMode::Keep`]. The
    /// frontend drops it when the directory's change time differs.
    pub cache_dir: bool,
}

impl OpenReply {
    /// A handle with default properties.
    pub fn new(fh: Fh) -> Self {
        OpenReply { fh, ..OpenReply::default() }
    }

    /// The native file, if it is one.
    pub fn native(&self) -> Option<&NativeFile> {
        self.backing.as_ref()?.native.as_ref()
    }
}

/// Offset and flags of a read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReadArgs {
    /// First byte.
    pub offset: u64,
    /// Present flags of the open file (fcntl `F_SETFL` changes them). They override the flags of
    /// open.
    pub flags: OpenFlags,
    /// The reader, for mandatory locks.
    pub lock_owner: Option<LockOwner>,
}

/// Offset and flags of a write.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WriteArgs {
    /// First byte. With `O_APPEND` it is the end of file as the frontend knows it; the file system
    /// appends at the actual end.
    pub offset: u64,
    /// Present flags of the open file, see [`ReadArgs`].
    pub flags: OpenFlags,
    /// The writer, for mandatory locks.
    pub lock_owner: Option<LockOwner>,
    /// Clear set-user-id and set-group-id, see [`SetAttr::kill_suidgid`].
    pub kill_suidgid: bool,
    /// The write comes from a cache: the offset is valid even with `O_APPEND`, and the handle may
    /// belong to another open of the same inode.
    pub from_cache: bool,
}

/// The arguments of [`crate::FileSystem::release`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReleaseArgs {
    /// Flags of the open file.
    pub flags: OpenFlags,
    /// Drop the [`LockKind::Flock`] lock of this owner.
    pub flock_owner: Option<LockOwner>,
    /// The frontend gives back all lookups of the inode next, of a [`native`](crate::native) file.
    pub last: Option<LastRelease>,
}

impl ReleaseArgs {
    /// The release of a file without locks, which was opened with `flags`.
    pub fn from_flags(flags: OpenFlags) -> Self {
        ReleaseArgs { flags, ..ReleaseArgs::default() }
    }
}

/// The owner of a lock: a process (its file descriptor table) for POSIX locks, an open file for
/// flock locks. Locks of one owner never conflict.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LockOwner(pub u64);

impl LockOwner {
    const PROCESS: u64 = 1 << 40;

    /// The process `pid`, as used by in-process frontends. The flag bit distinguishes it from
    /// owners that represent an open file. Owners from the kernel are arbitrary.
    pub fn for_process(pid: u32) -> Self {
        LockOwner(u64::from(pid) | Self::PROCESS)
    }

    /// True for an owner from [`for_process`](LockOwner::for_process).
    pub fn is_process(self) -> bool {
        self.0 & Self::PROCESS != 0
    }
}

/// The two families of locks, which are independent of each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LockKind {
    /// fcntl(2) record locks.
    Posix,
    /// flock(2): the whole file, per open file.
    Flock,
}

/// The type of a lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LockType {
    /// Shared.
    Read,
    /// Exclusive.
    Write,
    /// Release.
    Unlock,
}

/// A lock on the bytes `start..=end`. An `end` of at least `u64::MAX >> 1` (`OFFSET_MAX`) means the
/// end of the file, even if the file grows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lock {
    /// Shared, exclusive, or none.
    pub typ: LockType,
    /// First byte.
    pub start: u64,
    /// Last byte.
    pub end: u64,
    /// Process that holds or requests it.
    pub pid: u32,
}

/// The request of [`crate::FileSystem::setlk`], `setlkw` and `getlk`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LockRequest {
    /// Its family.
    pub kind: LockKind,
    /// Its owner.
    pub owner: LockOwner,
    /// The lock.
    pub lock: Lock,
    /// Wait until the lock is available (`F_SETLKW`).
    pub wait: bool,
}

/// The flags of renameat2(2).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RenameFlags(pub u32);

impl RenameFlags {
    /// `RENAME_NOREPLACE`: fail with `EEXIST` if the new name exists.
    pub const NOREPLACE: u32 = 1;
    /// `RENAME_EXCHANGE`: both names exist and are exchanged.
    pub const EXCHANGE: u32 = 2;
    /// `RENAME_WHITEOUT`: leave a whiteout (character device 0/0) at the old name.
    pub const WHITEOUT: u32 = 4;

    /// True if all bits of `flags` are set.
    pub const fn has(self, flags: u32) -> bool {
        self.0 & flags == flags
    }
}

/// Space and inodes, as statvfs(3) returns them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StatFs {
    /// Size in units of `frsize`.
    pub blocks: u64,
    /// Free blocks, in units of `frsize`.
    pub blocks_free: u64,
    /// Free blocks for unprivileged users, in units of `frsize`.
    pub blocks_available: u64,
    /// Total number of inodes.
    pub files: u64,
    /// Number of free inodes.
    pub files_free: u64,
    /// Preferred I/O size in bytes.
    pub bsize: u32,
    /// Unit of the block counts, in bytes.
    pub frsize: u32,
    /// Maximum length of a name in bytes.
    pub name_max: u32,
}

/// The result of [`crate::FileSystem::getxattr`] and [`crate::FileSystem::listxattr`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Xattr {
    /// The length of the value in bytes, if the caller's buffer is empty.
    Size(u32),
    /// The value, or the names each followed by a NUL.
    Value(Vec<u8>),
}

impl Xattr {
    /// The result for a complete value: its length if `room` is 0, otherwise the value. Fails with
    /// `ERANGE` if it does not fit.
    pub fn answer(value: Vec<u8>, room: usize) -> Result<Self> {
        if room == 0 {
            u32::try_from(value.len()).map(Xattr::Size).map_err(|_| Errno::E2BIG)
        } else if value.len() > room {
            Err(Errno::ERANGE)
        } else {
            Ok(Xattr::Value(value))
        }
    }
}

/// The flags of setxattr(2).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SetXattrFlags {
    /// `XATTR_CREATE`: fail with `EEXIST` if it exists.
    pub create: bool,
    /// `XATTR_REPLACE`: fail with `ENODATA` if it does not exist.
    pub replace: bool,
    /// Clear set-group-id: a process outside the owning group sets the access ACL.
    pub clear_sgid: bool,
}

/// The target of a seek, lseek(2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Whence {
    /// `SEEK_DATA`.
    Data,
    /// `SEEK_HOLE`.
    Hole,
}

/// The flags of fallocate(2), with its range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fallocate {
    /// `FALLOC_FL_*`.
    pub mode: u32,
    /// First byte.
    pub offset: u64,
    /// Length in bytes, never 0.
    pub length: u64,
}

impl Fallocate {
    /// `FALLOC_FL_KEEP_SIZE`.
    pub const KEEP_SIZE: u32 = 0x01;
    /// `FALLOC_FL_PUNCH_HOLE`.
    pub const PUNCH_HOLE: u32 = 0x02;
    /// `FALLOC_FL_COLLAPSE_RANGE`.
    pub const COLLAPSE_RANGE: u32 = 0x08;
    /// `FALLOC_FL_ZERO_RANGE`.
    pub const ZERO_RANGE: u32 = 0x10;
    /// `FALLOC_FL_INSERT_RANGE`.
    pub const INSERT_RANGE: u32 = 0x20;
    /// `FALLOC_FL_UNSHARE_RANGE`.
    pub const UNSHARE_RANGE: u32 = 0x40;
}

/// The arguments of copy_file_range(2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CopyRange {
    /// Open for reading.
    pub src: File,
    /// First byte to read.
    pub src_offset: u64,
    /// Open for writing.
    pub dst: File,
    /// First byte to write.
    pub dst_offset: u64,
    /// Length in bytes.
    pub length: u64,
    /// Flags of the system call, 0 today.
    pub flags: u64,
}

/// An ioctl(2) on an open file.
#[derive(Clone, Copy, Debug)]
pub struct IoctlArgs<'a> {
    /// Request number. It encodes size and direction as `_IOC` does.
    pub cmd: u32,
    /// The third argument as a number.
    pub arg: u64,
    /// The input data that the argument points to, if the request number has a write direction.
    pub input: &'a [u8],
    /// Maximum length of the output in bytes.
    pub output_len: usize,
    /// The file is a directory.
    pub dir: bool,
    /// The caller is a 32-bit process.
    pub compat32: bool,
}

/// The result of an ioctl.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct IoctlReply {
    /// The result of the system call, 0 or positive.
    pub result: i32,
    /// The output for the caller's memory.
    pub output: Vec<u8>,
}

/// A waiter for a polled file, for [`crate::Notify::poll_wake`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PollHandle(pub u64);

/// The permissions of access(2): any of read (4), write (2), execute or search (1). 0 checks that
/// the file exists.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AccessMask(pub u32);

/// The keeper of POSIX and flock locks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LockSupport {
    /// The file system has no locks. Only the locks of the frontend exist.
    #[default]
    Frontend,
    /// The file system has locks, but all conflicting callers use the same frontend, which may
    /// therefore keep them itself.
    Either,
    /// The file system's locks are shared with other processes and must be taken there.
    FileSystem,
}

/// The properties of a file system. Each frontend derives its own settings from them. Called once,
/// after construction.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Caps {
    /// Every change fails with `EROFS`.
    pub read_only: bool,
    /// Operations may sleep (disk, network), so that more of them should run at once than there are
    /// processors.
    pub blocking: bool,
    /// Names, attributes and data change only through this file system, or it notifies of other
    /// changes. Caches stay valid until invalidated, and writes may be delayed.
    pub exclusive: bool,
    /// readdir can return attributes without additional cost.
    pub readdir_entries: bool,
    /// Entries of listings cost no request, but a lookup of a name does: a frontend requests them
    /// with each listing, and not only where it has seen that they are used.
    pub listings_bring_entries: bool,
    /// `system.posix_acl_access` and `_default` are stored and are part of the permission check.
    pub posix_acl: bool,
    /// Extended attributes exist at all.
    pub xattrs: bool,
    /// The file system clears set-user-id, set-group-id and `security.capability` if an operation
    /// has `kill_suidgid`, and on every change of owner.
    pub kill_suidgid: bool,
    /// open handles `O_TRUNC` itself.
    pub open_truncates: bool,
    /// The keeper of locks.
    pub locks: LockSupport,
    /// [`crate::FileSystem::submit`] finishes reads, writes and fsyncs asynchronously, so that a
    /// frontend should prefer it, unless its caller waits anyway: [`crate::FileSystem::read`] and
    /// `write` then get the memory of the caller, and may refuse by `ENOSYS`.
    pub submits: bool,
    /// Open files come with [`OpenReply::backing`].
    pub backing_files: bool,
    /// [`NewNode::security`] is honoured.
    pub security_labels: bool,
    /// The longest time for which a frontend may cache that a name does not exist; see
    /// [`crate::FileSystem::negative_lifetime`].
    pub negative_lifetime: Duration,
    /// Times are kept in multiples of this many nanoseconds.
    pub time_granularity_ns: u32,
    /// Attributes may have a birth time ([`Attr::btime`]). If none has one, a frontend does not
    /// request it, and uses attributes that it has.
    pub birth_times: bool,
    /// The file system uses the groups of callers ([`crate::Context::supplementary_groups`]), so
    /// that clients in other processes send them.
    pub asks_for_groups: bool,
    /// Operations on names look at them by themselves: create fails with `EEXIST` for an existing
    /// name, unlink with `EISDIR` for a directory, rmdir with `ENOTDIR` for another file, and both
    /// with `ENOENT` where there is nothing. So a frontend need not look at the name before.
    pub decides_on_names: bool,
    /// Changes wait in this process until a sync makes them durable, or for a time: a kernel mount
    /// should be one from which sync(2) and syncfs(2) reach [`crate::FileSystem::syncfs`].
    pub delays_changes: bool,
    /// A child of fork(2) cannot use it: threads, or the state of a device, stay in the process
    /// that opened it. A frontend in an application refuses the calls of its children.
    pub of_one_process: bool,
    /// Restrictions on the use of the files, regardless of their modes.
    pub denied: SourceRestrictions,
}

/// The restrictions of the source, with their names in mount(8). A frontend must enforce them: they
/// protect against users who can create files there.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SourceRestrictions {
    /// Set-user-id, set-group-id and file capabilities have no effect (`nosuid`).
    pub suid: bool,
    /// Device files cannot be opened (`nodev`).
    pub dev: bool,
    /// Programs are not executed (`noexec`).
    pub exec: bool,
}

impl Default for Caps {
    /// Conservative defaults: no caching, and no optional feature except extended attributes.
    fn default() -> Self {
        Caps {
            read_only: false,
            blocking: true,
            exclusive: false,
            readdir_entries: false,
            listings_bring_entries: false,
            posix_acl: false,
            xattrs: true,
            kill_suidgid: false,
            open_truncates: false,
            locks: LockSupport::Frontend,
            submits: false,
            backing_files: false,
            security_labels: false,
            negative_lifetime: Duration::ZERO,
            time_granularity_ns: 1,
            birth_times: true,
            asks_for_groups: false,
            decides_on_names: false,
            delays_changes: false,
            of_one_process: false,
            denied: SourceRestrictions::default(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn invalid_names_are_refused() {
        for bad in ["", ".", "..", "a/b", "/", "a\0"] {
            assert_eq!(Name::new(bad.as_bytes()), Err(Errno::EINVAL), "{bad:?}");
        }
        assert!(Name::new(&[b'x'; 255]).is_ok());
        assert_eq!(Name::new(&[b'x'; 256]), Err(Errno::ENAMETOOLONG));
        assert!(Name::new(b"...").is_ok());
        assert!(Name::new(b"\xff\xfe").is_ok());
    }

    #[test]
    fn changes_of_attributes_are_those_that_are_set() {
        let node = NewNode::new(FileKind::Regular, 0o6755, crate::Caller::default());
        let old = Attr { ctime: Timestamp::default(), ..Attr::for_new(Ino(7), &node) };
        let apply = |set: SetAttr| {
            let mut attr = old;
            set.apply(&mut attr);
            assert!(attr.ctime > old.ctime);
            Attr { ctime: old.ctime, ..attr }
        };
        assert_eq!(apply(SetAttr::default()), old);
        let time = Timestamp { secs: 5, nanos: 6 };
        let set = SetAttr { mtime: Some(SetTime::At(time)), size: Some(9), ..SetAttr::default() };
        assert_eq!(apply(set), Attr { mtime: time, ..old }, "the size is for the file system");
        let set = SetAttr { gid: Some(3), ..SetAttr::default() };
        assert_eq!(apply(set), Attr { gid: 3, perm: 0o755, ..old });
        let set = SetAttr { perm: Some(0o4711), ..SetAttr::default() };
        assert_eq!(apply(set), Attr { perm: 0o4711, ..old });
    }

    #[test]
    fn kinds_and_mode_bits_are_inverse() {
        for mode in 0..16 {
            if let Some(kind) = FileKind::from_mode(mode << 12) {
                assert_eq!(kind.mode_bits(), mode << 12);
                assert_eq!(u32::from(kind.d_type()), mode);
            }
        }
    }

    #[test]
    fn a_value_is_returned_by_size_query_and_buffer_size() {
        assert_eq!(Xattr::answer(vec![1, 2, 3], 0), Ok(Xattr::Size(3)));
        assert_eq!(Xattr::answer(vec![1, 2, 3], 2), Err(Errno::ERANGE));
        assert_eq!(Xattr::answer(vec![1, 2, 3], 3), Ok(Xattr::Value(vec![1, 2, 3])));
    }
}
