//! read and write
//!
//! Data is transferred directly between the caller's memory and the file system. There is no copy
//! in between, no lock that two open files share, and no cache. Reads and writes at the position of
//! one open file are serialized, as POSIX requires.

use std::ffi::{c_int, c_void};

use defuse_direct::{IoFlags, Result};
use defuse_fs::Errno;

use crate::memory::{InBuffer, IovecArray, OutBuffer, OutPointer};
use crate::state::{call, count};

/// An offset from C. Fails with `EINVAL` if it is negative.
pub(super) fn offset(offset: libc::off_t) -> Result<u64> {
    Ok(u64::try_from(offset).map_err(|_| Errno::EINVAL)?)
}

/// An offset from C, where -1 means the file position.
pub(super) fn position(at: libc::off_t) -> Result<Option<u64>> {
    if at == -1 { Ok(None) } else { offset(at).map(Some) }
}

/// Reads at the file position and advances it, read(2).
// SAFETY: no other symbol has this name.
#[unsafe(no_mangle)]
pub extern "C" fn defuse_read(fd: c_int, mut buf: OutBuffer<c_void>, size: usize) -> libc::ssize_t {
    count(|s| {
        // SAFETY: `size` is the length of `buf`.
        s.client.read(&s.task, &*s.file(fd)?, unsafe { buf.as_mut_slice(size) }?)
    })
}

/// Writes at the file position and advances it, write(2); with O_APPEND, at the end.
// SAFETY: no other symbol has this name.
#[unsafe(no_mangle)]
pub extern "C" fn defuse_write(fd: c_int, buf: InBuffer<c_void>, size: usize) -> libc::ssize_t {
    count(|s| {
        // SAFETY: `size` is the length of `buf`.
        s.client.write(&s.task, &*s.file(fd)?, unsafe { buf.as_slice(size) }?)
    })
}

/// Reads at `at`, pread(2).
// SAFETY: no other symbol has this name.
#[unsafe(no_mangle)]
pub extern "C" fn defuse_pread(
    fd: c_int,
    mut buf: OutBuffer<c_void>,
    size: usize,
    at: libc::off_t,
) -> libc::ssize_t {
    count(|s| {
        // SAFETY: `size` is the length of `buf`.
        s.client.pread(&s.task, &*s.file(fd)?, unsafe { buf.as_mut_slice(size) }?, offset(at)?)
    })
}

/// Writes at `at`, pwrite(2). As on Linux, a file with O_APPEND is written at its end.
// SAFETY: no other symbol has this name.
#[unsafe(no_mangle)]
pub extern "C" fn defuse_pwrite(
    fd: c_int,
    buf: InBuffer<c_void>,
    size: usize,
    at: libc::off_t,
) -> libc::ssize_t {
    count(|s| {
        // SAFETY: `size` is the length of `buf`.
        s.client.pwrite(&s.task, &*s.file(fd)?, unsafe { buf.as_slice(size) }?, offset(at)?)
    })
}

fn read_pieces(
    fd: c_int,
    (iov, length): (IovecArray, c_int),
    at: impl FnOnce() -> Result<Option<u64>>,
    flags: c_int,
) -> libc::ssize_t {
    count(|s| {
        // SAFETY: `length` is the length of `iov`.
        let mut pieces = unsafe { iov.copy_array(length) }?;
        let (at, flags) = (at()?, IoFlags(flags as u32));
        // SAFETY: C gave the memory for the time of this call.
        s.client.preadv2(&s.task, &*s.file(fd)?, &mut unsafe { pieces.mut_slices() }, at, flags)
    })
}

fn write_pieces(
    fd: c_int,
    (iov, length): (IovecArray, c_int),
    at: impl FnOnce() -> Result<Option<u64>>,
    flags: c_int,
) -> libc::ssize_t {
    count(|s| {
        // SAFETY: `length` is the length of `iov`.
        let pieces = unsafe { iov.copy_array(length) }?;
        let (at, flags) = (at()?, IoFlags(flags as u32));
        // SAFETY: C gave the memory for the time of this call.
        s.client.pwritev2(&s.task, &*s.file(fd)?, &unsafe { pieces.slices() }, at, flags)
    })
}

/// Reads into several buffers at the file position, readv(2).
// SAFETY: no other symbol has this name.
#[unsafe(no_mangle)]
pub extern "C" fn defuse_readv(fd: c_int, iov: IovecArray, length: c_int) -> libc::ssize_t {
    read_pieces(fd, (iov, length), || Ok(None), 0)
}

/// Writes several buffers at the file position, writev(2).
// SAFETY: no other symbol has this name.
#[unsafe(no_mangle)]
pub extern "C" fn defuse_writev(fd: c_int, iov: IovecArray, length: c_int) -> libc::ssize_t {
    write_pieces(fd, (iov, length), || Ok(None), 0)
}

/// Reads into several buffers at `at`, preadv(2).
// SAFETY: no other symbol has this name.
#[unsafe(no_mangle)]
pub extern "C" fn defuse_preadv(
    fd: c_int,
    iov: IovecArray,
    length: c_int,
    at: libc::off_t,
) -> libc::ssize_t {
    read_pieces(fd, (iov, length), || offset(at).map(Some), 0)
}

/// Writes several buffers at `at`, pwritev(2).
// SAFETY: no other symbol has this name.
#[unsafe(no_mangle)]
pub extern "C" fn defuse_pwritev(
    fd: c_int,
    iov: IovecArray,
    length: c_int,
    at: libc::off_t,
) -> libc::ssize_t {
    write_pieces(fd, (iov, length), || offset(at).map(Some), 0)
}

/// Like defuse_preadv(), with flags (such as RWF_NOWAIT), preadv2(2). An offset of -1 means the
/// file position.
// SAFETY: no other symbol has this name.
#[unsafe(no_mangle)]
pub extern "C" fn defuse_preadv2(
    fd: c_int,
    iov: IovecArray,
    length: c_int,
    at: libc::off_t,
    flags: c_int,
) -> libc::ssize_t {
    read_pieces(fd, (iov, length), || position(at), flags)
}

/// Like defuse_pwritev(), with flags (such as RWF_APPEND and RWF_DSYNC), pwritev2(2). An offset of
/// -1 means the file position.
// SAFETY: no other symbol has this name.
#[unsafe(no_mangle)]
pub extern "C" fn defuse_pwritev2(
    fd: c_int,
    iov: IovecArray,
    length: c_int,
    at: libc::off_t,
    flags: c_int,
) -> libc::ssize_t {
    write_pieces(fd, (iov, length), || position(at), flags)
}

/// Sets the file position, lseek(2). `whence` is SEEK_SET, SEEK_CUR, SEEK_END, SEEK_DATA or
/// SEEK_HOLE.
// SAFETY: no other symbol has this name.
#[unsafe(no_mangle)]
pub extern "C" fn defuse_lseek(fd: c_int, by: libc::off_t, whence: c_int) -> libc::off_t {
    call(|s| {
        let whence = u32::try_from(whence).map_err(|_| Errno::EINVAL)?;
        Ok(s.client.lseek(&s.task, &*s.file(fd)?, by, whence)? as libc::off_t)
    })
}

/// Copies up to `size` bytes from one open file to another, copy_file_range(2), also between mounts
/// of different types. An offset that is given is advanced in place of the file position. `flags`
/// must be 0.
// SAFETY: no other symbol has this name.
#[unsafe(no_mangle)]
pub extern "C" fn defuse_copy_file_range(
    from: c_int,
    from_at: OutPointer<libc::off_t>,
    to: c_int,
    to_at: OutPointer<libc::off_t>,
    size: usize,
    flags: libc::c_uint,
) -> libc::ssize_t {
    count(|s| {
        if flags != 0 {
            return Err(Errno::EINVAL.into());
        }
        let given = |at: &OutPointer<libc::off_t>| match at.is_null() {
            true => Ok(None),
            false => offset(at.get()?).map(Some),
        };
        let (start, end) = (given(&from_at)?, given(&to_at)?);
        let (from, to) = (s.file(from)?, s.file(to)?);
        let copied = s.client.copy_file_range(&s.task, (&from, start), (&to, end), size)?;
        for (place, before) in [(from_at, start), (to_at, end)] {
            if let Some(before) = before {
                place.put((before + copied as u64) as libc::off_t)?;
            }
        }
        Ok(copied)
    })
}
