//! attributes, permissions and space
//!
//! The structures are the C library's. `st_dev` is a number of the library, different for
//! each mount.

use std::ffi::{c_int, c_uint};

use defuse_direct::{FileStat, NeededAccess, OpenHow, Result, WalkStart};
use defuse_fs::{Errno, StatFs, Timestamp};

use crate::memory::{CStringArg, OutPointer, zeroed};
use crate::state::{LibraryState, follows, succeed};

/// Returns the attributes of a file, stat(2). Follows symbolic links.
// SAFETY: no other symbol has this name.
#[unsafe(no_mangle)]
pub extern "C" fn defuse_stat(path: CStringArg, out: OutPointer<libc::stat>) -> c_int {
    succeed(|s| out.put(c_stat(&s.client.stat(&s.task, WalkStart::Cwd, path.get()?, true)?)))
}

/// Returns the attributes of a file or symbolic link, lstat(2).
// SAFETY: no other symbol has this name.
#[unsafe(no_mangle)]
pub extern "C" fn defuse_lstat(path: CStringArg, out: OutPointer<libc::stat>) -> c_int {
    succeed(|s| out.put(c_stat(&s.client.stat(&s.task, WalkStart::Cwd, path.get()?, false)?)))
}

/// Returns the attributes of an open file, fstat(2).
// SAFETY: no other symbol has this name.
#[unsafe(no_mangle)]
pub extern "C" fn defuse_fstat(fd: c_int, out: OutPointer<libc::stat>) -> c_int {
    succeed(|s| out.put(c_stat(&s.client.fstat(&s.task, &*s.file(fd)?)?)))
}

/// Returns attributes, fstatat(2), with AT_SYMLINK_NOFOLLOW and AT_EMPTY_PATH.
// SAFETY: no other symbol has this name.
#[unsafe(no_mangle)]
pub extern "C" fn defuse_fstatat(
    dir: c_int,
    path: CStringArg,
    out: OutPointer<libc::stat>,
    flags: c_int,
) -> c_int {
    succeed(|s| out.put(c_stat(&find(s, dir, path.get()?, flags)?)))
}

/// Returns attributes, statx(2). All known attributes are returned, whatever `mask` requests.
/// AT_STATX_FORCE_SYNC and AT_STATX_DONT_SYNC have no effect.
// SAFETY: no other symbol has this name.
#[unsafe(no_mangle)]
pub extern "C" fn defuse_statx(
    dir: c_int,
    path: CStringArg,
    flags: c_int,
    mask: c_uint,
    out: OutPointer<libc::statx>,
) -> c_int {
    succeed(|s| {
        if mask & libc::STATX__RESERVED as c_uint != 0 {
            return Err(Errno::EINVAL.into());
        }
        let sync = libc::AT_STATX_FORCE_SYNC | libc::AT_STATX_DONT_SYNC;
        if flags & sync == sync {
            return Err(Errno::EINVAL.into());
        }
        out.put(c_statx(&find(s, dir, path.get()?, flags & !sync)?))
    })
}

fn find(s: &LibraryState, dir: c_int, path: &[u8], flags: c_int) -> Result<FileStat> {
    let ignored = libc::AT_NO_AUTOMOUNT;
    let follow = follows(flags, libc::AT_SYMLINK_NOFOLLOW | libc::AT_EMPTY_PATH | ignored)?;
    let start = s.start(dir, path, flags)?;
    s.client.stat(&s.task, start.walk_start(), path, follow)
}

fn c_stat(stat: &FileStat) -> libc::stat {
    let attr = &stat.attr;
    let mut out: libc::stat = zeroed();
    out.st_dev = stat.dev;
    out.st_ino = attr.st_ino;
    out.st_mode = attr.mode();
    out.st_nlink = attr.nlink.into();
    (out.st_uid, out.st_gid) = (attr.uid, attr.gid);
    out.st_rdev = attr.rdev;
    out.st_size = attr.size as i64;
    out.st_blocks = attr.blocks as i64;
    out.st_blksize = attr.blksize.into();
    let parts = |time: Timestamp| (time.secs, i64::from(time.nanos));
    (out.st_atime, out.st_atime_nsec) = parts(attr.atime);
    (out.st_mtime, out.st_mtime_nsec) = parts(attr.mtime);
    (out.st_ctime, out.st_ctime_nsec) = parts(attr.ctime);
    out
}

fn c_statx(stat: &FileStat) -> libc::statx {
    let attr = &stat.attr;
    let mut out: libc::statx = zeroed();
    let time = |time: Timestamp| {
        let mut out = zeroed::<libc::statx>().stx_atime;
        (out.tv_sec, out.tv_nsec) = (time.secs, time.nanos);
        out
    };
    out.stx_mask = libc::STATX_BASIC_STATS | libc::STATX_MNT_ID;
    (out.stx_ino, out.stx_mode, out.stx_nlink) = (attr.st_ino, attr.mode() as u16, attr.nlink);
    (out.stx_uid, out.stx_gid) = (attr.uid, attr.gid);
    (out.stx_size, out.stx_blocks, out.stx_blksize) = (attr.size, attr.blocks, attr.blksize);
    (out.stx_atime, out.stx_mtime) = (time(attr.atime), time(attr.mtime));
    out.stx_ctime = time(attr.ctime);
    if let Some(birth) = attr.btime {
        out.stx_mask |= libc::STATX_BTIME;
        out.stx_btime = time(birth);
    }
    (out.stx_rdev_major, out.stx_rdev_minor) = (libc::major(attr.rdev), libc::minor(attr.rdev));
    (out.stx_dev_major, out.stx_dev_minor) = (libc::major(stat.dev), libc::minor(stat.dev));
    out.stx_mnt_id = stat.mount_id.into();
    let root = libc::STATX_ATTR_MOUNT_ROOT as u64;
    out.stx_attributes_mask = root;
    out.stx_attributes = if stat.mount_root { root } else { 0 };
    out
}

/// Checks whether the real user has the access `mode` to a file (R_OK, W_OK, X_OK, F_OK),
/// access(2).
// SAFETY: no other symbol has this name.
#[unsafe(no_mangle)]
pub extern "C" fn defuse_access(path: CStringArg, mode: c_int) -> c_int {
    succeed(|s| may(s, libc::AT_FDCWD, path.get()?, mode, 0))
}

/// Checks access to a file, faccessat(2), with AT_EACCESS (for the effective user),
/// AT_SYMLINK_NOFOLLOW and AT_EMPTY_PATH.
// SAFETY: no other symbol has this name.
#[unsafe(no_mangle)]
pub extern "C" fn defuse_faccessat(
    dir: c_int,
    path: CStringArg,
    mode: c_int,
    flags: c_int,
) -> c_int {
    succeed(|s| may(s, dir, path.get()?, mode, flags))
}

fn may(s: &LibraryState, dir: c_int, path: &[u8], mode: c_int, flags: c_int) -> Result<()> {
    let allowed = libc::AT_EACCESS | libc::AT_SYMLINK_NOFOLLOW | libc::AT_EMPTY_PATH;
    let how = (follows(flags, allowed)?, flags & libc::AT_EACCESS != 0);
    let mode = u32::try_from(mode).ok().filter(|mode| mode & !7 == 0).ok_or(Errno::EINVAL)?;
    let start = s.start(dir, path, flags)?;
    s.client.access(&s.task, start.walk_start(), path, NeededAccess::from_bits(mode), how)
}

/// Returns space and inodes of the file system of `path`, statvfs(3).
// SAFETY: no other symbol has this name.
#[unsafe(no_mangle)]
pub extern "C" fn defuse_statvfs(path: CStringArg, out: OutPointer<libc::statvfs>) -> c_int {
    succeed(|s| out.put(MountSpace::find_space_of_path(s, path.get()?)?.statvfs()))
}

/// Returns space and inodes of the file system of an open file, fstatvfs(3).
// SAFETY: no other symbol has this name.
#[unsafe(no_mangle)]
pub extern "C" fn defuse_fstatvfs(fd: c_int, out: OutPointer<libc::statvfs>) -> c_int {
    succeed(|s| out.put(MountSpace::find_space_of_file(s, &*s.file(fd)?)?.statvfs()))
}

/// Like defuse_statvfs(), in the format of statfs(2). The type is the type of FUSE, 0x65735546.
// SAFETY: no other symbol has this name.
#[unsafe(no_mangle)]
pub extern "C" fn defuse_statfs(path: CStringArg, out: OutPointer<libc::statfs64>) -> c_int {
    succeed(|s| out.put(MountSpace::find_space_of_path(s, path.get()?)?.statfs()))
}

/// Like defuse_fstatvfs(), in the format of fstatfs(2).
// SAFETY: no other symbol has this name.
#[unsafe(no_mangle)]
pub extern "C" fn defuse_fstatfs(fd: c_int, out: OutPointer<libc::statfs64>) -> c_int {
    succeed(|s| out.put(MountSpace::find_space_of_file(s, &*s.file(fd)?)?.statfs()))
}

// The structures are the same, except that this one has its flags.
const _: () = assert!(size_of::<libc::statfs64>() == size_of::<libc::statfs>());

/// The space of a file system, and the flags of its mount.
struct MountSpace {
    stat: StatFs,
    device: u64,
    read_only: bool,
}

impl MountSpace {
    fn find_space_of_path(s: &LibraryState, path: &[u8]) -> Result<MountSpace> {
        let how = OpenHow { flags: libc::O_PATH as u32, ..OpenHow::default() };
        MountSpace::find_space_of_file(s, &*s.client.open(&s.task, WalkStart::Cwd, path, how)?)
    }

    fn find_space_of_file(
        s: &LibraryState,
        file: &defuse_direct::FileDescription,
    ) -> Result<MountSpace> {
        let stat = s.client.fstatfs(&s.task, file)?;
        let mount = file.mount();
        Ok(MountSpace { stat, device: mount.device(), read_only: mount.read_only() })
    }

    fn statvfs(&self) -> libc::statvfs {
        let (stat, mut out) = (&self.stat, zeroed::<libc::statvfs>());
        (out.f_bsize, out.f_frsize) = (stat.bsize.into(), stat.frsize.into());
        (out.f_blocks, out.f_bfree) = (stat.blocks, stat.blocks_free);
        out.f_bavail = stat.blocks_available;
        (out.f_files, out.f_ffree, out.f_favail) = (stat.files, stat.files_free, stat.files_free);
        out.f_fsid = self.device;
        out.f_flag = if self.read_only { libc::ST_RDONLY } else { 0 };
        out.f_namemax = stat.name_max.into();
        out
    }

    fn statfs(&self) -> libc::statfs64 {
        const FUSE_SUPER_MAGIC: i64 = 0x6573_5546;
        // ST_VALID: the flags are valid.
        const VALID: i64 = 0x20;
        let (stat, mut out) = (&self.stat, zeroed::<libc::statfs64>());
        out.f_type = FUSE_SUPER_MAGIC;
        (out.f_bsize, out.f_frsize) = (stat.bsize.into(), stat.frsize.into());
        (out.f_blocks, out.f_bfree) = (stat.blocks, stat.blocks_free);
        out.f_bavail = stat.blocks_available;
        (out.f_files, out.f_ffree) = (stat.files, stat.files_free);
        out.f_namelen = stat.name_max.into();
        out.f_flags = VALID | if self.read_only { libc::ST_RDONLY as libc::c_long } else { 0 };
        out
    }
}
