//! change modes, owners and times
//!
//! Permissions are checked as in the kernel, against the credentials that the process had at its
//! first call of the library.

use std::ffi::c_int;

use defuse_direct::{NewOwner, NewTimes, Result, WalkStart};
use defuse_fs::Errno;

use crate::memory::{CStringArg, InPointer};
use crate::state::{LibraryState, call, follows, succeed};

/// Changes the permission bits, chmod(2).
// SAFETY: no other symbol has this name.
#[unsafe(no_mangle)]
pub extern "C" fn defuse_chmod(path: CStringArg, mode: libc::mode_t) -> c_int {
    succeed(|s| s.client.chmod(&s.task, WalkStart::Cwd, path.get()?, mode, true))
}

/// Changes the permission bits of an open file, fchmod(2).
// SAFETY: no other symbol has this name.
#[unsafe(no_mangle)]
pub extern "C" fn defuse_fchmod(fd: c_int, mode: libc::mode_t) -> c_int {
    succeed(|s| s.client.fchmod(&s.task, &*s.file(fd)?, mode))
}

/// Changes the permission bits, fchmodat(2), with AT_SYMLINK_NOFOLLOW (EOPNOTSUPP for a symbolic
/// link) and AT_EMPTY_PATH.
// SAFETY: no other symbol has this name.
#[unsafe(no_mangle)]
pub extern "C" fn defuse_fchmodat(
    dir: c_int,
    path: CStringArg,
    mode: libc::mode_t,
    flags: c_int,
) -> c_int {
    succeed(|s| {
        let (path, follow) = (path.get()?, follows(flags, ALLOWED)?);
        s.client.chmod(&s.task, s.start(dir, path, flags)?.walk_start(), path, mode, follow)
    })
}

const ALLOWED: c_int = libc::AT_SYMLINK_NOFOLLOW | libc::AT_EMPTY_PATH;

fn owner(uid: libc::uid_t, gid: libc::gid_t) -> NewOwner {
    let given = |id: u32| (id != u32::MAX).then_some(id);
    NewOwner { uid: given(uid), gid: given(gid) }
}

/// Changes owner and group, chown(2); -1 leaves an id unchanged.
// SAFETY: no other symbol has this name.
#[unsafe(no_mangle)]
pub extern "C" fn defuse_chown(path: CStringArg, uid: libc::uid_t, gid: libc::gid_t) -> c_int {
    succeed(|s| s.client.chown(&s.task, WalkStart::Cwd, path.get()?, owner(uid, gid), true))
}

/// Changes owner and group of a symbolic link, lchown(2).
// SAFETY: no other symbol has this name.
#[unsafe(no_mangle)]
pub extern "C" fn defuse_lchown(path: CStringArg, uid: libc::uid_t, gid: libc::gid_t) -> c_int {
    succeed(|s| s.client.chown(&s.task, WalkStart::Cwd, path.get()?, owner(uid, gid), false))
}

/// Changes owner and group of an open file, fchown(2).
// SAFETY: no other symbol has this name.
#[unsafe(no_mangle)]
pub extern "C" fn defuse_fchown(fd: c_int, uid: libc::uid_t, gid: libc::gid_t) -> c_int {
    succeed(|s| s.client.fchown(&s.task, &*s.file(fd)?, owner(uid, gid)))
}

/// Changes owner and group, fchownat(2), with AT_SYMLINK_NOFOLLOW and AT_EMPTY_PATH.
// SAFETY: no other symbol has this name.
#[unsafe(no_mangle)]
pub extern "C" fn defuse_fchownat(
    dir: c_int,
    path: CStringArg,
    uid: libc::uid_t,
    gid: libc::gid_t,
    flags: c_int,
) -> c_int {
    succeed(|s| {
        let (path, follow) = (path.get()?, follows(flags, ALLOWED)?);
        s.client.chown(
            &s.task,
            s.start(dir, path, flags)?.walk_start(),
            path,
            owner(uid, gid),
            follow,
        )
    })
}

/// The new timestamps: access, then modification. NULL means now.
fn times(values: &InPointer<libc::timespec>) -> Result<NewTimes> {
    if values.is_null() {
        return Ok(NewTimes::NOW);
    }
    let (atime, mtime) = (values.nth(0)?, values.nth(1)?);
    Ok(NewTimes::from_raw((atime.tv_sec, atime.tv_nsec), (mtime.tv_sec, mtime.tv_nsec))?)
}

/// Changes timestamps, utimensat(2). `times` has two values, access and modification, which may be
/// UTIME_NOW or UTIME_OMIT; NULL sets both to the current time. A NULL `path` means the open file
/// `dir`. Supports AT_SYMLINK_NOFOLLOW and AT_EMPTY_PATH.
// SAFETY: no other symbol has this name.
#[unsafe(no_mangle)]
pub extern "C" fn defuse_utimensat(
    dir: c_int,
    path: CStringArg,
    values: InPointer<libc::timespec>,
    flags: c_int,
) -> c_int {
    succeed(|s| {
        if path.is_null() {
            return change_times(s, dir, &values, flags);
        }
        let (path, follow) = (path.get()?, follows(flags, ALLOWED)?);
        s.client.utimens(
            &s.task,
            s.start(dir, path, flags)?.walk_start(),
            path,
            times(&values)?,
            follow,
        )
    })
}

/// Changes the timestamps of an open file, futimens(3).
// SAFETY: no other symbol has this name.
#[unsafe(no_mangle)]
pub extern "C" fn defuse_futimens(fd: c_int, values: InPointer<libc::timespec>) -> c_int {
    succeed(|s| change_times(s, fd, &values, 0))
}

fn change_times(
    s: &LibraryState,
    fd: c_int,
    values: &InPointer<libc::timespec>,
    flags: c_int,
) -> Result<()> {
    if flags != 0 {
        return Err(Errno::EINVAL.into());
    }
    s.client.futimens(&s.task, &*s.file(fd)?, times(values)?)
}

/// Sets the file mode creation mask and returns the previous one, umask(2). It applies to the calls
/// of the library only, and is initially the mask of the process.
// SAFETY: no other symbol has this name.
#[unsafe(no_mangle)]
pub extern "C" fn defuse_umask(mask: libc::mode_t) -> libc::mode_t {
    call(|s| Ok(s.task.set_umask(mask) as i32)) as libc::mode_t
}
