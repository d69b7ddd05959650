//! set sizes, allocate space, and make data durable
//!
//! Nothing is cached in this process, so these calls go to the file system.

use std::ffi::c_int;

use defuse_fs::Errno;

use crate::memory::CStringArg;
use crate::state::{number, succeed};

/// Sets the size of a file, truncate(2).
// SAFETY: no other symbol has this name.
#[unsafe(no_mangle)]
pub extern "C" fn defuse_truncate(path: CStringArg, length: libc::off_t) -> c_int {
    succeed(|s| s.client.truncate(&s.task, defuse_direct::WalkStart::Cwd, path.get()?, length))
}

/// Sets the size of an open file, ftruncate(2).
// SAFETY: no other symbol has this name.
#[unsafe(no_mangle)]
pub extern "C" fn defuse_ftruncate(fd: c_int, length: libc::off_t) -> c_int {
    succeed(|s| s.client.ftruncate(&s.task, &*s.file(fd)?, length))
}

/// Allocates space, punches holes and so on, fallocate(2). Fails with EOPNOTSUPP if the file system
/// does not support it.
// SAFETY: no other symbol has this name.
#[unsafe(no_mangle)]
pub extern "C" fn defuse_fallocate(
    fd: c_int,
    mode: c_int,
    at: libc::off_t,
    length: libc::off_t,
) -> c_int {
    succeed(|s| s.client.fallocate(&s.task, &*s.file(fd)?, mode as u32, (at, length)))
}

/// Allocates space, posix_fallocate(3). Returns 0 or the error number, and leaves `errno`
/// unchanged. If the file system does not support it (EOPNOTSUPP), no zeros are written instead.
// SAFETY: no other symbol has this name.
#[unsafe(no_mangle)]
pub extern "C" fn defuse_posix_fallocate(fd: c_int, at: libc::off_t, length: libc::off_t) -> c_int {
    number(|s| s.client.fallocate(&s.task, &*s.file(fd)?, 0, (at, length)))
}

/// Announces the use of data, posix_fadvise(2). Returns 0, EBADF or EINVAL, and leaves `errno`
/// unchanged. It has no effect, because nothing is cached.
// SAFETY: no other symbol has this name.
#[unsafe(no_mangle)]
pub extern "C" fn defuse_posix_fadvise(
    fd: c_int,
    at: libc::off_t,
    length: libc::off_t,
    advice: c_int,
) -> c_int {
    let known = libc::POSIX_FADV_NORMAL..=libc::POSIX_FADV_NOREUSE;
    number(|s| match s.file(fd)? {
        file if file.is_path() => Err(Errno::EBADF.into()),
        _ if at < 0 || length < 0 || !known.contains(&advice) => Err(Errno::EINVAL.into()),
        _ => Ok(()),
    })
}

/// Makes data and attributes of an open file durable, fsync(2).
// SAFETY: no other symbol has this name.
#[unsafe(no_mangle)]
pub extern "C" fn defuse_fsync(fd: c_int) -> c_int {
    succeed(|s| s.client.fsync(&s.task, &*s.file(fd)?, false))
}

/// Makes the data of an open file durable, fdatasync(2).
// SAFETY: no other symbol has this name.
#[unsafe(no_mangle)]
pub extern "C" fn defuse_fdatasync(fd: c_int) -> c_int {
    succeed(|s| s.client.fsync(&s.task, &*s.file(fd)?, true))
}

/// Makes all changes to the file system of an open file durable, syncfs(2).
// SAFETY: no other symbol has this name.
#[unsafe(no_mangle)]
pub extern "C" fn defuse_syncfs(fd: c_int) -> c_int {
    succeed(|s| s.client.syncfs(&s.task, &*s.file(fd)?))
}

/// Makes all changes to all mounts of this process durable, sync(2).
// SAFETY: no other symbol has this name.
#[unsafe(no_mangle)]
pub extern "C" fn defuse_sync() {
    succeed(|s| {
        s.client.sync(&s.task);
        Ok(())
    });
}
