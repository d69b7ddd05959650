//! Helpers for system calls on the lower file system: errors, attributes, mounts.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use defuse_fs::posix::AccessTimeRule;
use defuse_fs::{Attr, Errno, FileKind, Result, Timestamp};
use rustix::fs::{AtFlags, Mode, OFlags, Statx, StatxFlags, StatxTimestamp};

/// Moves a descriptor to a number from `floor` on, if there is a free one.
pub(crate) fn move_above(fd: OwnedFd, floor: u32) -> OwnedFd {
    let floor = i32::try_from(floor).unwrap_or(i32::MAX);
    if floor == 0 || fd.as_raw_fd() >= floor {
        return fd;
    }
    rustix::io::fcntl_dupfd_cloexec(&fd, floor).unwrap_or(fd)
}

/// Clones the mounts of `dir` and below, with another rule for access times, mount_setattr(2).
/// Backing files are read by the kernel, which uses the flags of the mount and not of our
/// descriptor. Returns `None` for the default rule, without the privilege, or before Linux 5.12.
pub(crate) fn with_access_times(dir: BorrowedFd<'_>, rule: AccessTimeRule) -> Option<OwnedFd> {
    use rustix::mount::{OpenTreeFlags, open_tree};
    /// `MOUNT_ATTR_NOATIME` and `MOUNT_ATTR_STRICTATIME` of linux/mount.h.
    const NOATIME: u64 = 0x10;
    const STRICTATIME: u64 = 0x20;
    let attribute = match rule {
        AccessTimeRule::Relative => return None,
        AccessTimeRule::Strict => STRICTATIME,
        AccessTimeRule::Never => NOATIME,
    };
    let flags = OpenTreeFlags::OPEN_TREE_CLONE
        | OpenTreeFlags::OPEN_TREE_CLOEXEC
        | OpenTreeFlags::AT_EMPTY_PATH
        | OpenTreeFlags::AT_RECURSIVE;
    let tree = open_tree(dir, c"", flags).ok()?;
    crate::sys::set_access_times(&tree, attribute).ok()?;
    Some(tree)
}

/// The parent of the directory `dir`, also across mounts.
pub(crate) fn open_parent(dir: BorrowedFd<'_>) -> Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    rustix::fs::openat(dir, c"..", flags, Mode::empty()).or_errno()
}

/// True if the directory `dir` is `root` or below it. `open_parent` is [`open_parent`], or more
/// patient.
pub(crate) fn is_below(
    dir: BorrowedFd<'_>,
    root: &StatxResult,
    open_parent: impl Fn(BorrowedFd<'_>) -> Result<OwnedFd>,
) -> Result<bool> {
    /// More levels than any path can have.
    const MAX_DEPTH: usize = 1 << 16;
    let same =
        |a: &StatxResult, b: &StatxResult| (a.ino(), a.mount_id()) == (b.ino(), b.mount_id());
    let (mut at, mut here) = (None::<OwnedFd>, StatxResult::read(dir)?);
    for _ in 0..MAX_DEPTH {
        if same(&here, root) {
            return Ok(true);
        }
        let above = open_parent(at.as_ref().map_or(dir, |at| at.as_fd()))?;
        let stat = StatxResult::read(above.as_fd())?;
        if same(&stat, &here) {
            break;
        }
        (at, here) = (Some(above), stat);
    }
    Ok(false)
}

/// Converts errors of rustix to errors of the contract.
pub(crate) trait OrErrno<T> {
    fn or_errno(self) -> Result<T>;
}

impl<T> OrErrno<T> for rustix::io::Result<T> {
    fn or_errno(self) -> Result<T> {
        self.map_err(|error| Errno::from_raw(error.raw_os_error()))
    }
}

/// Maximum number of mounts (and btrfs subvolumes) that are known at a time.
pub(crate) const MAX_MOUNTS: usize = 1024;

/// The bits of the index of a mount that are its place in the table; the others are a generation.
pub(crate) const PLACE_BITS: u32 = MAX_MOUNTS.trailing_zeros();

/// The place of the mount with this index, which no other mount has at the same time.
pub(crate) fn place_of(index: u32) -> u32 {
    index & (MAX_MOUNTS as u32 - 1)
}

/// Mount and device of an inode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MountId {
    pub(crate) mount: u64,
    pub(crate) device: u64,
}

/// A result of statx(2).
pub(crate) struct StatxResult(Statx);

/// `STATX_MNT_ID_UNIQUE` of Linux 6.8, which rustix lacks. Kernels from 5.8 to 6.7 ignore it and
/// return an id that may be reused after an unmount.
const MNT_ID_UNIQUE: u32 = 0x4000;

fn mask() -> StatxFlags {
    StatxFlags::BASIC_STATS
        | StatxFlags::BTIME
        | StatxFlags::MNT_ID
        | StatxFlags::from_bits_retain(MNT_ID_UNIQUE)
}

impl StatxResult {
    /// statx of `name` in `dir`, without following a symbolic link.
    pub(crate) fn read_at(dir: BorrowedFd<'_>, name: &[u8]) -> Result<Self> {
        let flags = AtFlags::SYMLINK_NOFOLLOW | AtFlags::NO_AUTOMOUNT;
        rustix::fs::statx(dir, name, flags, mask()).or_errno().map(StatxResult)
    }

    /// statx of an open file.
    pub(crate) fn read(fd: BorrowedFd<'_>) -> Result<Self> {
        rustix::fs::statx(fd, c"", AtFlags::EMPTY_PATH, mask()).or_errno().map(StatxResult)
    }

    pub(crate) fn kind(&self) -> Result<FileKind> {
        FileKind::from_mode(self.0.stx_mode.into()).ok_or(Errno::EIO)
    }

    pub(crate) fn nlink(&self) -> u32 {
        self.0.stx_nlink
    }

    pub(crate) fn uid(&self) -> u32 {
        self.0.stx_uid
    }

    pub(crate) fn gid(&self) -> u32 {
        self.0.stx_gid
    }

    /// The permission bits, with set-user-id, set-group-id and sticky.
    pub(crate) fn perm(&self) -> u32 {
        u32::from(self.0.stx_mode) & 0o7777
    }

    pub(crate) fn ino(&self) -> u64 {
        self.0.stx_ino
    }

    pub(crate) fn mount_id(&self) -> MountId {
        let device = rustix::fs::makedev(self.0.stx_dev_major, self.0.stx_dev_minor);
        let known = StatxFlags::MNT_ID.bits() | MNT_ID_UNIQUE;
        let mount = if self.0.stx_mask & known != 0 { self.0.stx_mnt_id } else { 0 };
        MountId { mount, device }
    }

    /// True if all attributes but the numbers are equal, with the time of the last change, so that
    /// this is the same file right after a change of it.
    pub(crate) fn describes_same_file(&self, other: &StatxResult) -> bool {
        let times = |stat: &Statx| {
            [stat.stx_mtime, stat.stx_ctime, stat.stx_btime]
                .map(timestamp)
                .map(|time| (time.secs, time.nanos))
        };
        let rest = |stat: &Statx| {
            let owner = (stat.stx_uid, stat.stx_gid, stat.stx_mode, stat.stx_nlink);
            (owner, stat.stx_size, stat.stx_blocks, stat.stx_rdev_major, stat.stx_rdev_minor)
        };
        times(&self.0) == times(&other.0) && rest(&self.0) == rest(&other.0)
    }

    /// Birth time in nanoseconds, if the file system has one.
    pub(crate) fn birth(&self) -> Option<u64> {
        let time = self.btime()?;
        Some((time.secs as u64).wrapping_mul(1_000_000_000).wrapping_add(time.nanos.into()))
    }

    fn btime(&self) -> Option<Timestamp> {
        let kept = self.0.stx_mask & StatxFlags::BTIME.bits() != 0;
        kept.then(|| timestamp(self.0.stx_btime)).filter(|time| *time != Timestamp::default())
    }

    /// The attributes, where `mount` is the index of the mount. Inode numbers of file systems
    /// mounted below the source are made distinct, because all appear on one device.
    pub(crate) fn attr(&self, mount: u32, valid_for: Duration) -> Result<Attr> {
        let stat = &self.0;
        Ok(Attr {
            st_ino: distinct_ino(stat.stx_ino, mount),
            kind: self.kind()?,
            perm: self.perm(),
            nlink: stat.stx_nlink,
            uid: stat.stx_uid,
            gid: stat.stx_gid,
            rdev: rustix::fs::makedev(stat.stx_rdev_major, stat.stx_rdev_minor),
            size: stat.stx_size,
            blocks: stat.stx_blocks,
            blksize: stat.stx_blksize,
            atime: timestamp(stat.stx_atime),
            mtime: timestamp(stat.stx_mtime),
            ctime: timestamp(stat.stx_ctime),
            btime: self.btime(),
            valid_for,
        })
    }
}

/// `st_ino` as programs see it. The numbers of the source's own file system are unchanged.
pub(crate) fn distinct_ino(ino: u64, mount: u32) -> u64 {
    ino ^ (u64::from(place_of(mount)) << 48)
}

fn timestamp(time: StatxTimestamp) -> Timestamp {
    Timestamp { secs: time.tv_sec, nanos: time.tv_nsec }
}
