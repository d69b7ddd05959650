//! set lengths, allocate space, and make data durable
//!
//! Nothing is held back in this process: what these calls do, the file system does.

use std::ffi::c_int;

use defuse_fs::Errno;

use crate::memory::Text;
use crate::state::{done, number};

/// Sets the length of a file, truncate(2).
// SAFETY: no other symbol has this name.
#[unsafe(no_mangle)]
pub extern "C" fn defuse_truncate(path: Text, length: libc::off_t) -> c_int {
    done(|s| s.client.truncate(&s.task, defuse_direct::At::Cwd, path.get()?, length))
}

/// Sets the length of an open file, ftruncate(2).
// SAFETY: no other symbol has this name.
#[unsafe(no_mangle)]
pub extern "C" fn defuse_ftruncate(fd: c_int, length: libc::off_t) -> c_int {
    done(|s| s.client.ftruncate(&s.task, &*s.file(fd)?, length))
}

/// Allocates, punches holes and so on, fallocate(2): EOPNOTSUPP where the file system cannot.
// SAFETY: no other symbol has this name.
#[unsafe(no_mangle)]
pub extern "C" fn defuse_fallocate(
    fd: c_int,
    mode: c_int,
    at: libc::off_t,
    length: libc::off_t,
) -> c_int {
    done(|s| s.client.fallocate(&s.task, &*s.file(fd)?, mode as u32, (at, length)))
}

/// Allocates space, posix_fallocate(3): returns 0 or the number of the error, and leaves `errno`
/// alone. What the file system cannot allocate (EOPNOTSUPP) is not written as zeros instead.
// SAFETY: no other symbol has this name.
#[unsafe(no_mangle)]
pub extern "C" fn defuse_posix_fallocate(fd: c_int, at: libc::off_t, length: libc::off_t) -> c_int {
    number(|s| s.client.fallocate(&s.task, &*s.file(fd)?, 0, (at, length)))
}

/// Says how the data will be used, posix_fadvise(2): returns 0, or EBADF or EINVAL, and leaves
/// `errno` alone. As nothing is cached, there is nothing to do for it.
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
    done(|s| s.client.fsync(&s.task, &*s.file(fd)?, false))
}

/// Makes the data of an open file durable, fdatasync(2).
// SAFETY: no other symbol has this name.
#[unsafe(no_mangle)]
pub extern "C" fn defuse_fdatasync(fd: c_int) -> c_int {
    done(|s| s.client.fsync(&s.task, &*s.file(fd)?, true))
}

/// Makes everything durable in the file system of an open file, syncfs(2).
// SAFETY: no other symbol has this name.
#[unsafe(no_mangle)]
pub extern "C" fn defuse_syncfs(fd: c_int) -> c_int {
    done(|s| s.client.syncfs(&s.task, &*s.file(fd)?))
}

/// Makes everything durable in all mounts of this process, sync(2).
// SAFETY: no other symbol has this name.
#[unsafe(no_mangle)]
pub extern "C" fn defuse_sync() {
    done(|s| {
        s.client.sync(&s.task);
        Ok(())
    });
}
