//! stat and its kin, access, chmod, chown, times, truncate, statfs.

use defuse_direct::{FileStat, NeededAccess, NewOwner, NewTimes, WalkStart};
use defuse_fs::{Errno, StatFs, Timestamp};

use crate::machine::sys;
use crate::process::table::DescriptorEntry;
use crate::process::user_namespace::IdKind::{Groups, Users};
use crate::process::user_namespace::{to_program, to_server};
use crate::serve::call::{CallFailure, CallResult, ProgramCall};
use crate::serve::data::raise_at_limit;
use crate::serve::path::{PathOrigin, PathTarget};

fn write_stat(address: u64, stat: &FileStat) -> CallResult {
    let attr = &stat.attr;
    let mut raw: libc::stat = sys::zeroed();
    raw.st_dev = stat.dev;
    raw.st_ino = attr.st_ino;
    raw.st_nlink = u64::from(attr.nlink);
    raw.st_mode = attr.kind.mode_bits() | attr.perm;
    raw.st_uid = to_program(Users, attr.uid);
    raw.st_gid = to_program(Groups, attr.gid);
    raw.st_rdev = attr.rdev;
    raw.st_size = attr.size as i64;
    raw.st_blksize = i64::from(attr.blksize);
    raw.st_blocks = attr.blocks as i64;
    (raw.st_atime, raw.st_atime_nsec) = (attr.atime.secs, i64::from(attr.atime.nanos));
    (raw.st_mtime, raw.st_mtime_nsec) = (attr.mtime.secs, i64::from(attr.mtime.nanos));
    (raw.st_ctime, raw.st_ctime_nsec) = (attr.ctime.secs, i64::from(attr.ctime.nanos));
    sys::store(address, raw)?;
    Ok(0)
}

/// The attributes of the file at `target`, with the time of creation if `birth` is set; a link of
/// /proc itself is the kernel's.
fn find(
    call: &ProgramCall<'_>,
    target: &PathTarget<'_>,
    follow: bool,
    birth: bool,
) -> Result<FileStat, CallFailure> {
    match target.entry_if_whole() {
        Some(_) if target.magic && !follow => Err(CallFailure::Pass),
        Some(entry) => Ok(call.client().fstat_with(call.task(), entry.file(), birth)?),
        None => Ok(call.client().stat(call.task(), target.as_walk_start(), target.path, follow)?),
    }
}

pub fn stat(call: &ProgramCall<'_>) -> CallResult {
    let target = call.target(None, 0, false)?;
    write_stat(call.args[1], &find(call, &target, call.number as i64 == libc::SYS_stat, false)?)
}

pub fn fstatat(call: &ProgramCall<'_>) -> CallResult {
    let flags = call.int(3);
    let target = call.target(Some(0), 1, flags & libc::AT_EMPTY_PATH != 0)?;
    let follow = flags & libc::AT_SYMLINK_NOFOLLOW == 0;
    write_stat(call.args[2], &find(call, &target, follow, false)?)
}

pub fn fstat(call: &ProgramCall<'_>, entry: &DescriptorEntry) -> CallResult {
    write_stat(call.args[1], &call.client().fstat_with(call.task(), entry.file(), false)?)
}

pub fn statx(call: &ProgramCall<'_>) -> CallResult {
    let flags = call.int(2);
    let empty = flags & libc::AT_EMPTY_PATH != 0;
    // A NULL path stands for an empty one, since Linux 6.11.
    let target = match call.entry(0).filter(|_| call.args[1] == 0 && empty) {
        Some(entry) => PathTarget { start: PathOrigin::Entry(entry), path: b"", magic: false },
        None => call.target(Some(0), 1, empty)?,
    };
    let birth = call.args[3] as u32 & libc::STATX_BTIME != 0;
    let stat = find(call, &target, flags & libc::AT_SYMLINK_NOFOLLOW == 0, birth)?;
    let attr = &stat.attr;
    let mut raw: libc::statx = sys::zeroed();
    let zero = raw.stx_atime;
    let time = |time: Timestamp| {
        let mut raw = zero;
        (raw.tv_sec, raw.tv_nsec) = (time.secs, time.nanos);
        raw
    };
    raw.stx_mask = libc::STATX_BASIC_STATS | libc::STATX_MNT_ID;
    raw.stx_blksize = attr.blksize;
    raw.stx_nlink = attr.nlink;
    raw.stx_uid = to_program(Users, attr.uid);
    raw.stx_gid = to_program(Groups, attr.gid);
    raw.stx_mode = (attr.kind.mode_bits() | attr.perm) as u16;
    raw.stx_ino = attr.st_ino;
    raw.stx_size = attr.size;
    raw.stx_blocks = attr.blocks;
    raw.stx_atime = time(attr.atime);
    raw.stx_mtime = time(attr.mtime);
    raw.stx_ctime = time(attr.ctime);
    if let Some(birth) = attr.btime {
        raw.stx_mask |= libc::STATX_BTIME;
        raw.stx_btime = time(birth);
    }
    (raw.stx_rdev_major, raw.stx_rdev_minor) = (libc::major(attr.rdev), libc::minor(attr.rdev));
    (raw.stx_dev_major, raw.stx_dev_minor) = (libc::major(stat.dev), libc::minor(stat.dev));
    raw.stx_mnt_id = u64::from(stat.mount_id);
    raw.stx_attributes_mask = libc::STATX_ATTR_MOUNT_ROOT as u64;
    if stat.mount_root {
        raw.stx_attributes = libc::STATX_ATTR_MOUNT_ROOT as u64;
    }
    sys::store(call.args[4], raw)?;
    Ok(0)
}

fn write_statfs(address: u64, stat: &StatFs) -> CallResult {
    // `FUSE_SUPER_MAGIC`: programs that look know what such file systems are like.
    const MAGIC: u64 = 0x6573_5546;
    const ST_VALID: u64 = 0x20;
    // Type, block size, blocks, free, available, files, free files, id (two words of 32 bits),
    // longest name, fragment size, flags, and four to spare.
    let (mut raw, name_max) = ([0u64; 15], u64::from(stat.name_max));
    raw[..3].copy_from_slice(&[MAGIC, u64::from(stat.bsize), stat.blocks]);
    raw[3..5].copy_from_slice(&[stat.blocks_free, stat.blocks_available]);
    raw[5..7].copy_from_slice(&[stat.files, stat.files_free]);
    raw[8..11].copy_from_slice(&[name_max, u64::from(stat.frsize), ST_VALID]);
    sys::store(address, raw)?;
    Ok(0)
}

pub fn statfs(call: &ProgramCall<'_>) -> CallResult {
    let target = call.target(None, 0, false)?;
    let stat = call.client().statfs(call.task(), target.as_walk_start(), target.path)?;
    write_statfs(call.args[1], &stat)
}

pub fn fstatfs(call: &ProgramCall<'_>, entry: &DescriptorEntry) -> CallResult {
    write_statfs(call.args[1], &call.client().fstatfs(call.task(), entry.file())?)
}

fn may(
    call: &ProgramCall<'_>,
    target: &PathTarget<'_>,
    mode: u32,
    follow: bool,
    effective: bool,
) -> CallResult {
    if mode & !7 != 0 {
        return Err(Errno::EINVAL.into());
    }
    let access = NeededAccess::from_bits(mode);
    let how = (follow, effective);
    call.client().access(call.task(), target.as_walk_start(), target.path, access, how)?;
    Ok(0)
}

pub fn access(call: &ProgramCall<'_>) -> CallResult {
    let target = call.target(None, 0, false)?;
    may(call, &target, call.args[1] as u32, true, false)
}

pub fn faccessat(call: &ProgramCall<'_>) -> CallResult {
    let flags = if call.number as i64 == libc::SYS_faccessat2 { call.int(3) } else { 0 };
    let target = call.target(Some(0), 1, flags & libc::AT_EMPTY_PATH != 0)?;
    let follow = flags & libc::AT_SYMLINK_NOFOLLOW == 0;
    may(call, &target, call.args[2] as u32, follow, flags & libc::AT_EACCESS != 0)
}

fn change_mode(
    call: &ProgramCall<'_>,
    target: &PathTarget<'_>,
    mode: u64,
    follow: bool,
) -> CallResult {
    call.client().chmod(call.task(), target.as_walk_start(), target.path, mode as u32, follow)?;
    Ok(0)
}

pub fn chmod(call: &ProgramCall<'_>) -> CallResult {
    change_mode(call, &call.target(None, 0, false)?, call.args[1], true)
}

pub fn fchmod(call: &ProgramCall<'_>, entry: &DescriptorEntry) -> CallResult {
    if entry.is_inode() {
        let itself = WalkStart::Itself(entry.file());
        call.client().chmod(call.task(), itself, b"", call.args[1] as u32, true)?;
        return Ok(0);
    }
    call.client().fchmod(call.task(), entry.file(), call.args[1] as u32)?;
    Ok(0)
}

pub fn fchmodat(call: &ProgramCall<'_>) -> CallResult {
    // The older call has no flags.
    let flags = if call.number == 452 { call.int(3) } else { 0 };
    let target = call.target(Some(0), 1, flags & libc::AT_EMPTY_PATH != 0)?;
    change_mode(call, &target, call.args[2], flags & libc::AT_SYMLINK_NOFOLLOW == 0)
}

fn owner(uid: u64, gid: u64) -> Result<NewOwner, Errno> {
    let id = |kind, id: u64| {
        let id = Some(id as u32).filter(|&id| id != u32::MAX);
        id.map(|id| to_server(kind, id)).transpose()
    };
    Ok(NewOwner { uid: id(Users, uid)?, gid: id(Groups, gid)? })
}

fn change_owner(
    call: &ProgramCall<'_>,
    target: &PathTarget<'_>,
    owner: NewOwner,
    follow: bool,
) -> CallResult {
    call.client().chown(call.task(), target.as_walk_start(), target.path, owner, follow)?;
    Ok(0)
}

pub fn chown(call: &ProgramCall<'_>) -> CallResult {
    let follow = call.number as i64 == libc::SYS_chown;
    let target = call.target(None, 0, false)?;
    change_owner(call, &target, owner(call.args[1], call.args[2])?, follow)
}

pub fn fchown(call: &ProgramCall<'_>, entry: &DescriptorEntry) -> CallResult {
    let owner = owner(call.args[1], call.args[2])?;
    if entry.is_inode() {
        call.client().chown(call.task(), WalkStart::Itself(entry.file()), b"", owner, true)?;
    } else {
        call.client().fchown(call.task(), entry.file(), owner)?;
    }
    Ok(0)
}

pub fn fchownat(call: &ProgramCall<'_>) -> CallResult {
    let flags = call.int(4);
    let target = call.target(Some(0), 1, flags & libc::AT_EMPTY_PATH != 0)?;
    let owner = owner(call.args[2], call.args[3])?;
    change_owner(call, &target, owner, flags & libc::AT_SYMLINK_NOFOLLOW == 0)
}

fn change_times(
    call: &ProgramCall<'_>,
    target: &PathTarget<'_>,
    times: NewTimes,
    follow: bool,
) -> CallResult {
    call.client().utimens(call.task(), target.as_walk_start(), target.path, times, follow)?;
    Ok(0)
}

/// Changes the times of an open file.
fn times_of(call: &ProgramCall<'_>, entry: &DescriptorEntry, times: NewTimes) -> CallResult {
    if entry.is_inode() {
        call.client().utimens(call.task(), WalkStart::Itself(entry.file()), b"", times, true)?;
    } else if entry.file().is_path() {
        return Err(Errno::EBADF.into());
    } else {
        call.client().futimens(call.task(), entry.file(), times)?;
    }
    Ok(0)
}

pub fn utime(call: &ProgramCall<'_>) -> CallResult {
    let target = call.target(None, 0, false)?;
    let times = match call.args[1] {
        0 => NewTimes::NOW,
        address => {
            let raw = sys::load::<libc::utimbuf>(address)?;
            NewTimes::from_raw((raw.actime, 0), (raw.modtime, 0))?
        }
    };
    change_times(call, &target, times, true)
}

/// Two times in microseconds; NULL stands for now.
fn microseconds(address: u64) -> Result<NewTimes, CallFailure> {
    if address == 0 {
        return Ok(NewTimes::NOW);
    }
    let raw = sys::load::<[libc::timeval; 2]>(address)?;
    if raw.iter().any(|time| !(0..1_000_000).contains(&time.tv_usec)) {
        return Err(Errno::EINVAL.into());
    }
    let [atime, mtime] = raw.map(|time| (time.tv_sec, time.tv_usec * 1000));
    Ok(NewTimes::from_raw(atime, mtime)?)
}

pub fn utimes(call: &ProgramCall<'_>) -> CallResult {
    let target = call.target(None, 0, false)?;
    change_times(call, &target, microseconds(call.args[1])?, true)
}

pub fn futimesat(call: &ProgramCall<'_>) -> CallResult {
    if call.args[1] == 0 {
        let entry = call.entry(0).ok_or(CallFailure::Pass)?;
        return times_of(call, &entry, microseconds(call.args[2])?);
    }
    let target = call.target(Some(0), 1, false)?;
    change_times(call, &target, microseconds(call.args[2])?, true)
}

pub fn utimensat(call: &ProgramCall<'_>) -> CallResult {
    // Without a path it is the descriptor itself: futimens(3).
    let itself = if call.args[1] == 0 { call.entry(0) } else { None };
    if itself.as_ref().is_some_and(|entry| entry.is_file_itself) {
        return Err(CallFailure::Pass);
    }
    let times = match call.args[2] {
        0 => NewTimes::NOW,
        address => {
            let [atime, mtime] = sys::load::<[libc::timespec; 2]>(address)?;
            NewTimes::from_raw((atime.tv_sec, atime.tv_nsec), (mtime.tv_sec, mtime.tv_nsec))?
        }
    };
    if call.args[1] == 0 {
        let entry = itself.ok_or(CallFailure::Pass)?;
        return times_of(call, &entry, times);
    }
    let flags = call.int(3);
    let target = call.target(Some(0), 1, flags & libc::AT_EMPTY_PATH != 0)?;
    change_times(call, &target, times, flags & libc::AT_SYMLINK_NOFOLLOW == 0)
}

pub fn truncate(call: &ProgramCall<'_>) -> CallResult {
    let target = call.target(None, 0, false)?;
    let length = call.args[1] as i64;
    let set = call.client().truncate(call.task(), target.as_walk_start(), target.path, length);
    raise_at_limit(set)?;
    Ok(0)
}
