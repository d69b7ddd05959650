//! Conversion between the types of the contract and the kernel's structures.

use std::time::Duration;

use defuse_fs::{
    Attr, CacheMode, Entry, Errno, FileKind, Lock, LockKind, LockOwner, LockRequest, LockType,
    OpenFlags, OpenReply, Result, SetAttr, SetTime, StatFs, Timestamp,
};

use crate::abi;
use crate::vendor::PublishedAttr;

/// The times for which the kernel may cache replies. `None` leaves them to the file system.
#[derive(Clone, Copy, Debug, Default)]
pub struct CacheTimeouts {
    /// Attributes.
    pub attr: Option<Duration>,
    /// Names.
    pub entry: Option<Duration>,
    /// Names that do not exist.
    pub negative: Option<Duration>,
    /// The upper limit for attributes of a regular file, unless `attr` is set.
    pub file_attr_most: Duration,
    /// The kernel may have pages of the inode that the file system lacks. The reply to the kernel
    /// has at least one block for a regular file that is not empty: tar(1) copies no byte of a file
    /// without blocks.
    pub has_unwritten_pages: bool,
}

impl CacheTimeouts {
    fn attr_valid(&self, from: &Attr) -> Duration {
        // The kernel checks the cached mode when executing a file, and gets no notification when a
        // write clears set-user-id. Regardless of options, such a mode is not cached.
        if has_set_id(from) {
            return Duration::ZERO;
        }
        let most = if from.kind == FileKind::Regular { self.file_attr_most } else { Duration::MAX };
        self.attr.unwrap_or(from.valid_for.min(most))
    }

    /// Returns the attributes that the other side gets.
    fn limit_attr(&self, from: &Attr) -> Attr {
        /// Blocks of 512 bytes in a page.
        const BLOCKS: u64 = 8;
        let has_data = self.has_unwritten_pages && from.kind == FileKind::Regular && from.size > 0;
        Attr { blocks: if has_data { from.blocks.max(BLOCKS) } else { from.blocks }, ..*from }
    }

    /// Encodes the reply to LOOKUP and to creations.
    pub fn entry_out(&self, entry: &Entry) -> abi::EntryOut {
        let entry_valid = self.entry.unwrap_or(entry.valid_for);
        let attr_valid = self.attr_valid(&entry.attr);
        abi::EntryOut {
            nodeid: entry.ino.0,
            generation: entry.generation,
            entry_valid: entry_valid.as_secs(),
            attr_valid: attr_valid.as_secs(),
            entry_valid_nsec: entry_valid.subsec_nanos(),
            attr_valid_nsec: attr_valid.subsec_nanos(),
            attr: attr(&self.limit_attr(&entry.attr)),
        }
    }

    /// Encodes the reply to LOOKUP for a missing name, which the kernel may cache for `valid`.
    pub fn encode_negative(&self, valid: Duration) -> abi::EntryOut {
        let valid = self.negative.unwrap_or(valid);
        abi::EntryOut {
            entry_valid: valid.as_secs(),
            entry_valid_nsec: valid.subsec_nanos(),
            ..abi::EntryOut::default()
        }
    }

    /// Encodes the reply to GETATTR and SETATTR.
    pub fn attr_out(&self, from: &Attr) -> abi::AttrOut {
        let valid = self.attr_valid(from);
        abi::AttrOut {
            attr_valid: valid.as_secs(),
            attr_valid_nsec: valid.subsec_nanos(),
            dummy: 0,
            attr: attr(&self.limit_attr(from)),
        }
    }

    /// Encodes the reply to STATX.
    pub fn statx_out(&self, from: &Attr) -> abi::StatxOut {
        let valid = self.attr_valid(from);
        abi::StatxOut {
            attr_valid: valid.as_secs(),
            attr_valid_nsec: valid.subsec_nanos(),
            flags: 0,
            spare: [0; 2],
            stat: statx(&self.limit_attr(from)),
        }
    }
}

/// Encodes a reply to GETATTR that must not be cached.
pub fn attr_for_now(from: &Attr) -> abi::AttrOut {
    abi::AttrOut { attr: attr(from), ..abi::AttrOut::default() }
}

/// Encodes attributes that lie beside a name.
pub fn encode_published_attr(from: &Attr) -> PublishedAttr {
    let btime = from.btime.unwrap_or_default();
    PublishedAttr {
        attr: attr(from),
        btime: btime.secs,
        btime_nanos: btime.nanos,
        flags: if from.btime.is_some() { PublishedAttr::HAS_BTIME } else { 0 },
    }
}

/// True for a regular file with set-user-id or set-group-id. Its attributes must not be cached: the
/// kernel checks the cached mode when executing the file, and gets no notification when a write
/// that bypasses the page cache clears the bits.
pub fn has_set_id(attr: &Attr) -> bool {
    attr.kind == FileKind::Regular && attr.perm & 0o6000 != 0
}

fn attr(from: &Attr) -> abi::Attr {
    abi::Attr {
        ino: from.st_ino,
        size: from.size,
        blocks: from.blocks,
        atime: from.atime.secs as u64,
        mtime: from.mtime.secs as u64,
        ctime: from.ctime.secs as u64,
        atimensec: from.atime.nanos,
        mtimensec: from.mtime.nanos,
        ctimensec: from.ctime.nanos,
        mode: from.mode(),
        nlink: from.nlink,
        uid: from.uid,
        gid: from.gid,
        rdev: kernel_dev(from.rdev),
        blksize: from.blksize,
        flags: 0,
    }
}

/// `STATX_BASIC_STATS` and `STATX_BTIME`, statx(2).
const STATX_BASIC_STATS: u32 = 0x7ff;
const STATX_BTIME: u32 = 0x800;

fn statx(from: &Attr) -> abi::Statx {
    let time = |time: Timestamp| abi::SxTime {
        tv_sec: time.secs,
        tv_nsec: time.nanos,
        ..abi::SxTime::default()
    };
    abi::Statx {
        mask: STATX_BASIC_STATS | if from.btime.is_some() { STATX_BTIME } else { 0 },
        blksize: from.blksize,
        nlink: from.nlink,
        uid: from.uid,
        gid: from.gid,
        mode: from.mode() as u16,
        ino: from.st_ino,
        size: from.size,
        blocks: from.blocks,
        atime: time(from.atime),
        btime: time(from.btime.unwrap_or_default()),
        ctime: time(from.ctime),
        mtime: time(from.mtime),
        rdev_major: dev_major(from.rdev),
        rdev_minor: dev_minor(from.rdev),
        ..abi::Statx::default()
    }
}

/// `new_encode_dev`: 12 bits of major and 20 of minor, encoded as by makedev(3).
pub fn kernel_dev(rdev: u64) -> u32 {
    let (major, minor) = (dev_major(rdev), dev_minor(rdev));
    (minor & 0xff) | (major << 8) | ((minor & !0xff) << 12)
}

/// Converts a number from `new_encode_dev` to the number of makedev(3).
pub fn library_dev(dev: u32) -> u64 {
    let major = (dev & 0xf_ff00) >> 8;
    let minor = (dev & 0xff) | ((dev >> 12) & 0xf_ff00);
    u64::from(minor & 0xff) | u64::from(major) << 8 | u64::from(minor & !0xff) << 12
}

fn dev_major(rdev: u64) -> u32 {
    (((rdev >> 32) & !0xfff) | ((rdev >> 8) & 0xfff)) as u32
}

fn dev_minor(rdev: u64) -> u32 {
    (((rdev >> 12) & !0xff) | (rdev & 0xff)) as u32
}

/// Encodes the reply to STATFS.
pub fn statfs(from: &StatFs) -> abi::StatfsOut {
    let st = abi::Kstatfs {
        blocks: from.blocks,
        bfree: from.blocks_free,
        bavail: from.blocks_available,
        files: from.files,
        ffree: from.files_free,
        bsize: from.bsize,
        namelen: from.name_max,
        frsize: from.frsize,
        ..abi::Kstatfs::default()
    };
    abi::StatfsOut { st }
}

/// Decodes the changes of a SETATTR.
pub fn set_attr(from: &abi::SetattrIn) -> SetAttr {
    let has = |bit| from.valid & bit != 0;
    let time = |set, now, secs: u64, nanos| {
        if has(now) {
            Some(SetTime::Now)
        } else {
            has(set).then_some(SetTime::At(Timestamp { secs: secs as i64, nanos }))
        }
    };
    SetAttr {
        perm: has(abi::FATTR_MODE).then_some(from.mode & 0o7777),
        uid: has(abi::FATTR_UID).then_some(from.uid),
        gid: has(abi::FATTR_GID).then_some(from.gid),
        size: has(abi::FATTR_SIZE).then_some(from.size),
        atime: time(abi::FATTR_ATIME, abi::FATTR_ATIME_NOW, from.atime, from.atimensec),
        mtime: time(abi::FATTR_MTIME, abi::FATTR_MTIME_NOW, from.mtime, from.mtimensec),
        ctime: has(abi::FATTR_CTIME)
            .then_some(Timestamp { secs: from.ctime as i64, nanos: from.ctimensec }),
        kill_suidgid: has(abi::FATTR_KILL_SUIDGID),
        unanswered: false,
    }
}

/// `F_RDLCK` of fcntl(2).
const F_RDLCK: u32 = 0;
/// `F_WRLCK` of fcntl(2).
const F_WRLCK: u32 = 1;
/// `F_UNLCK` of fcntl(2).
pub const F_UNLCK: u32 = 2;

/// Decodes the lock of GETLK, SETLK or SETLKW.
///
/// # Errors
///
/// `EINVAL` for an unknown type of lock, and for a range that ends before it starts.
pub fn lock_request(from: &abi::LkIn, wait: bool) -> Result<LockRequest> {
    let typ = match from.lk.type_ {
        F_RDLCK => LockType::Read,
        F_WRLCK => LockType::Write,
        F_UNLCK => LockType::Unlock,
        _ => return Err(Errno::EINVAL),
    };
    let flock = from.lk_flags & abi::FUSE_LK_FLOCK != 0;
    if from.lk.start > from.lk.end {
        return Err(Errno::EINVAL);
    }
    Ok(LockRequest {
        kind: if flock { LockKind::Flock } else { LockKind::Posix },
        owner: LockOwner(from.owner),
        lock: Lock { typ, start: from.lk.start, end: from.lk.end, pid: from.lk.pid },
        wait,
    })
}

/// Encodes the reply to GETLK: the conflicting lock, or none.
pub fn lk_out(found: Option<Lock>) -> abi::LkOut {
    let lk = match found {
        None => abi::FileLock { type_: F_UNLCK, ..abi::FileLock::default() },
        Some(lock) => abi::FileLock {
            start: lock.start,
            end: lock.end,
            type_: match lock.typ {
                LockType::Read => F_RDLCK,
                LockType::Write => F_WRLCK,
                LockType::Unlock => F_UNLCK,
            },
            pid: lock.pid,
        },
    };
    abi::LkOut { lk }
}

/// The reply for an open file or directory, without flags that depend on the other side.
pub fn open_out(opened: &OpenReply) -> abi::OpenOut {
    let mut out = abi::OpenOut { fh: opened.fh.0, ..abi::OpenOut::default() };
    let mut set = |flag, on: bool| out.open_flags |= if on { flag } else { 0 };
    set(abi::FOPEN_DIRECT_IO, opened.cache == CacheMode::Direct);
    set(abi::FOPEN_KEEP_CACHE, opened.cache == CacheMode::Keep);
    set(abi::FOPEN_NONSEEKABLE | abi::FOPEN_STREAM, opened.stream);
    set(abi::FOPEN_CACHE_DIR, opened.cache_dir);
    set(abi::FOPEN_PARALLEL_DIRECT_WRITES, opened.parallel_direct_writes);
    out
}

/// The flags of open(2) for the file system, without those that the kernel handles.
pub fn open_flags(flags: u32) -> OpenFlags {
    const O_NOCTTY: u32 = 0o400;
    OpenFlags(flags).difference(O_NOCTTY)
}

/// The type of the node that MKNOD creates.
///
/// # Errors
///
/// `EINVAL` for an unknown type.
pub fn node_kind(mode: u32) -> Result<FileKind> {
    // mknod(2): a mode without a type creates a regular file.
    if mode & 0o170000 == 0 {
        return Ok(FileKind::Regular);
    }
    FileKind::from_mode(mode).ok_or(Errno::EINVAL)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn device_numbers_round_trip() {
        for (major, minor) in [(0u64, 0u64), (1, 3), (8, 17), (259, 300), (4095, 0xf_ffff)] {
            let rdev = (minor & 0xff) | (major << 8) | ((minor & !0xff) << 12);
            assert_eq!(library_dev(kernel_dev(rdev)), rdev, "{major}:{minor}");
            assert_eq!((dev_major(rdev), dev_minor(rdev)), (major as u32, minor as u32));
        }
    }

    #[test]
    fn only_valid_fields_are_set() {
        let none = set_attr(&abi::SetattrIn { mode: 0o644, size: 7, ..Default::default() });
        assert_eq!(none, SetAttr::default());
        let valid = abi::FATTR_SIZE | abi::FATTR_MTIME | abi::FATTR_MTIME_NOW | abi::FATTR_ATIME;
        let some =
            set_attr(&abi::SetattrIn { valid, size: 7, atime: -1i64 as u64, ..Default::default() });
        assert_eq!(some.size, Some(7));
        assert_eq!(some.mtime, Some(SetTime::Now));
        assert_eq!(some.atime, Some(SetTime::At(Timestamp { secs: -1, nanos: 0 })));
        assert_eq!(some.perm, None);
    }
}
