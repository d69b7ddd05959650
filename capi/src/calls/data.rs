//! read and write
//!
//! The bytes go between the caller's memory and the file system, without a copy in between and
//! without a lock that two open files share. Nothing is cached. Reads and writes of one open file at
//! its position come one after the other, as POSIX wants it.

use std::ffi::{c_int, c_void};

use defuse_direct::{IoFlags, Result};
use defuse_fs::Errno;

use crate::memory::{Bytes, Out, Room, Vectors};
use crate::state::{call, count};

/// An offset of C. `EINVAL` where it is negative.
pub(super) fn offset(offset: libc::off_t) -> Result<u64> {
    Ok(u64::try_from(offset).map_err(|_| Errno::EINVAL)?)
}

/// An offset of C, of which -1 is the position of the file.
pub(super) fn position(at: libc::off_t) -> Result<Option<u64>> {
    if at == -1 { Ok(None) } else { offset(at).map(Some) }
}

/// Reads at the position, and moves it, read(2).
// SAFETY: no other symbol has this name.
#[unsafe(no_mangle)]
pub extern "C" fn defuse_read(fd: c_int, mut buf: Room<c_void>, size: usize) -> libc::ssize_t {
    count(|s| {
        // SAFETY: `size` is the length of `buf`.
        s.client.read(&s.task, &*s.file(fd)?, unsafe { buf.of(size) }?)
    })
}

/// Writes at the position, and moves it, write(2); with O_APPEND at the end.
// SAFETY: no other symbol has this name.
#[unsafe(no_mangle)]
pub extern "C" fn defuse_write(fd: c_int, buf: Bytes<c_void>, size: usize) -> libc::ssize_t {
    count(|s| {
        // SAFETY: `size` is the length of `buf`.
        s.client.write(&s.task, &*s.file(fd)?, unsafe { buf.of(size) }?)
    })
}

/// Reads at `at`, pread(2).
// SAFETY: no other symbol has this name.
#[unsafe(no_mangle)]
pub extern "C" fn defuse_pread(
    fd: c_int,
    mut buf: Room<c_void>,
    size: usize,
    at: libc::off_t,
) -> libc::ssize_t {
    count(|s| {
        // SAFETY: `size` is the length of `buf`.
        s.client.pread(&s.task, &*s.file(fd)?, unsafe { buf.of(size) }?, offset(at)?)
    })
}

/// Writes at `at`, pwrite(2); with O_APPEND at the end all the same, as on Linux.
// SAFETY: no other symbol has this name.
#[unsafe(no_mangle)]
pub extern "C" fn defuse_pwrite(
    fd: c_int,
    buf: Bytes<c_void>,
    size: usize,
    at: libc::off_t,
) -> libc::ssize_t {
    count(|s| {
        // SAFETY: `size` is the length of `buf`.
        s.client.pwrite(&s.task, &*s.file(fd)?, unsafe { buf.of(size) }?, offset(at)?)
    })
}

fn read_pieces(
    fd: c_int,
    (iov, length): (Vectors, c_int),
    at: impl FnOnce() -> Result<Option<u64>>,
    flags: c_int,
) -> libc::ssize_t {
    count(|s| {
        // SAFETY: `length` is the length of `iov`.
        let mut pieces = unsafe { iov.of(length) }?;
        let (at, flags) = (at()?, IoFlags(flags as u32));
        // SAFETY: C gave the memory for the time of this call.
        s.client.preadv2(&s.task, &*s.file(fd)?, &mut unsafe { pieces.rooms() }, at, flags)
    })
}

fn write_pieces(
    fd: c_int,
    (iov, length): (Vectors, c_int),
    at: impl FnOnce() -> Result<Option<u64>>,
    flags: c_int,
) -> libc::ssize_t {
    count(|s| {
        // SAFETY: `length` is the length of `iov`.
        let pieces = unsafe { iov.of(length) }?;
        let (at, flags) = (at()?, IoFlags(flags as u32));
        // SAFETY: C gave the memory for the time of this call.
        s.client.pwritev2(&s.task, &*s.file(fd)?, &unsafe { pieces.slices() }, at, flags)
    })
}

/// Reads into several pieces of memory at the position, readv(2).
// SAFETY: no other symbol has this name.
#[unsafe(no_mangle)]
pub extern "C" fn defuse_readv(fd: c_int, iov: Vectors, length: c_int) -> libc::ssize_t {
    read_pieces(fd, (iov, length), || Ok(None), 0)
}

/// Writes several pieces of memory at the position, writev(2).
// SAFETY: no other symbol has this name.
#[unsafe(no_mangle)]
pub extern "C" fn defuse_writev(fd: c_int, iov: Vectors, length: c_int) -> libc::ssize_t {
    write_pieces(fd, (iov, length), || Ok(None), 0)
}

/// Reads into several pieces of memory at `at`, preadv(2).
// SAFETY: no other symbol has this name.
#[unsafe(no_mangle)]
pub extern "C" fn defuse_preadv(
    fd: c_int,
    iov: Vectors,
    length: c_int,
    at: libc::off_t,
) -> libc::ssize_t {
    read_pieces(fd, (iov, length), || offset(at).map(Some), 0)
}

/// Writes several pieces of memory at `at`, pwritev(2).
// SAFETY: no other symbol has this name.
#[unsafe(no_mangle)]
pub extern "C" fn defuse_pwritev(
    fd: c_int,
    iov: Vectors,
    length: c_int,
    at: libc::off_t,
) -> libc::ssize_t {
    write_pieces(fd, (iov, length), || offset(at).map(Some), 0)
}

/// As defuse_preadv(), with flags (RWF_NOWAIT and so on), preadv2(2): an offset of -1 is the
/// position.
// SAFETY: no other symbol has this name.
#[unsafe(no_mangle)]
pub extern "C" fn defuse_preadv2(
    fd: c_int,
    iov: Vectors,
    length: c_int,
    at: libc::off_t,
    flags: c_int,
) -> libc::ssize_t {
    read_pieces(fd, (iov, length), || position(at), flags)
}

/// As defuse_pwritev(), with flags (RWF_APPEND, RWF_DSYNC and so on), pwritev2(2): an offset of -1 is
/// the position.
// SAFETY: no other symbol has this name.
#[unsafe(no_mangle)]
pub extern "C" fn defuse_pwritev2(
    fd: c_int,
    iov: Vectors,
    length: c_int,
    at: libc::off_t,
    flags: c_int,
) -> libc::ssize_t {
    write_pieces(fd, (iov, length), || position(at), flags)
}

/// Moves the position, lseek(2): `whence` is SEEK_SET, SEEK_CUR, SEEK_END, SEEK_DATA or SEEK_HOLE.
// SAFETY: no other symbol has this name.
#[unsafe(no_mangle)]
pub extern "C" fn defuse_lseek(fd: c_int, by: libc::off_t, whence: c_int) -> libc::off_t {
    call(|s| {
        let whence = u32::try_from(whence).map_err(|_| Errno::EINVAL)?;
        Ok(s.client.lseek(&s.task, &*s.file(fd)?, by, whence)? as libc::off_t)
    })
}

/// Copies up to `size` bytes from one open file to another one, copy_file_range(2), also between
/// mounts of different types. Where an offset is given, it moves and the position does not. `flags`
/// has to be 0.
// SAFETY: no other symbol has this name.
#[unsafe(no_mangle)]
pub extern "C" fn defuse_copy_file_range(
    from: c_int,
    from_at: Out<libc::off_t>,
    to: c_int,
    to_at: Out<libc::off_t>,
    size: usize,
    flags: libc::c_uint,
) -> libc::ssize_t {
    count(|s| {
        if flags != 0 {
            return Err(Errno::EINVAL.into());
        }
        let given = |at: &Out<libc::off_t>| match at.is_null() {
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
