//! open, duplicate and close files
//!
//! Descriptors are numbers of a table of the library, the lowest free one first. They are invalid
//! for calls without the prefix, as the kernel's descriptors are for these calls. Duplicates share
//! file position and flags. Fifos, sockets and devices can only be opened with O_PATH (otherwise
//! ENXIO). If opening fails, defuse_last_error(3) returns the details.

use std::ffi::{c_int, c_ulong, c_void};

use defuse_direct::{FdFlags, OpenHow, ResolveFlags, Result};
use defuse_fs::{Errno, FileKind, IoctlArgs};

use super::locks;
use crate::explain::record_failure;
use crate::memory::{CStringArg, InBuffer, InPointer, OutBuffer};
use crate::state::{LibraryState, call, succeed};

/// Opens a file, open(2). `mode` is used with O_CREAT and O_TMPFILE.
// SAFETY: no other symbol has this name.
#[unsafe(no_mangle)]
pub extern "C" fn defuse_open(path: CStringArg, flags: c_int, mode: libc::mode_t) -> c_int {
    call(|state| open(state, libc::AT_FDCWD, path.get()?, flags, mode))
}

/// Opens a file, openat(2). `dir` is a descriptor of the library, or AT_FDCWD.
// SAFETY: no other symbol has this name.
#[unsafe(no_mangle)]
pub extern "C" fn defuse_openat(
    dir: c_int,
    path: CStringArg,
    flags: c_int,
    mode: libc::mode_t,
) -> c_int {
    call(|state| open(state, dir, path.get()?, flags, mode))
}

/// Creates a file and opens it for writing, creat(2).
// SAFETY: no other symbol has this name.
#[unsafe(no_mangle)]
pub extern "C" fn defuse_creat(path: CStringArg, mode: libc::mode_t) -> c_int {
    let flags = libc::O_CREAT | libc::O_WRONLY | libc::O_TRUNC;
    call(|state| open(state, libc::AT_FDCWD, path.get()?, flags, mode))
}

/// Creates a file of the `size` bytes at `data`, and closes it: as open(2) with O_CREAT, O_EXCL and
/// O_WRONLY, write(2) and close(2), and one request to a server of defuse does all three, up to 96
/// KiB. Fails with EEXIST if the path exists, and with EFBIG beyond RLIMIT_FSIZE. After another
/// failure the file may be there, with a part of the data.
// SAFETY: no other symbol has this name.
#[unsafe(no_mangle)]
pub extern "C" fn defuse_create_with(
    path: CStringArg,
    data: InBuffer<c_void>,
    size: usize,
    mode: libc::mode_t,
) -> c_int {
    succeed(|state| {
        let path = path.get()?;
        let start = state.start(libc::AT_FDCWD, path, 0)?;
        // SAFETY: `size` is the length of `data`.
        let data = unsafe { data.as_slice(size) }?;
        let made = state.client.create_with(&state.task, start.walk_start(), path, mode, data);
        record_failure("create", path, made)
    })
}

pub(super) fn open(
    state: &LibraryState,
    dir: c_int,
    path: &[u8],
    flags: c_int,
    mode: libc::mode_t,
) -> Result<c_int> {
    open_how(state, dir, path, OpenHow { flags: flags as u32, mode, ..OpenHow::default() })
}

fn open_how(state: &LibraryState, dir: c_int, path: &[u8], how: OpenHow) -> Result<c_int> {
    let start = state.start(dir, path, 0);
    let opened =
        start.and_then(|start| state.client.open(&state.task, start.walk_start(), path, how));
    state.give(record_failure("open", path, opened)?, how.flags & libc::O_CLOEXEC as u32 != 0)
}

/// Opens a file with restrictions on path resolution, openat2(2). `how` is a `struct open_how` of
/// <linux/openat2.h>, and `size` its size. Fails with EINVAL for unknown bits and for another size,
/// and with EXDEV, ELOOP and EAGAIN as described in its manual page.
// SAFETY: no other symbol has this name.
#[unsafe(no_mangle)]
pub extern "C" fn defuse_openat2(
    dir: c_int,
    path: CStringArg,
    how: InPointer<libc::open_how>,
    size: usize,
) -> c_int {
    call(|state| {
        if size != size_of::<libc::open_how>() {
            return Err(Errno::EINVAL.into());
        }
        let (path, how) = (path.get()?, how.get()?);
        let (Ok(flags), Ok(mode)) = (u32::try_from(how.flags), u32::try_from(how.mode)) else {
            return Err(Errno::EINVAL.into());
        };
        let makes = flags & (libc::O_CREAT | libc::O_TMPFILE & !libc::O_DIRECTORY) as u32 != 0;
        if mode & !0o7777 != 0 || mode != 0 && !makes {
            return Err(Errno::EINVAL.into());
        }
        open_how(state, dir, path, OpenHow { flags, mode, resolve: ResolveFlags(how.resolve) })
    })
}

/// Closes a descriptor, close(2).
// SAFETY: no other symbol has this name.
#[unsafe(no_mangle)]
pub extern "C" fn defuse_close(fd: c_int) -> c_int {
    succeed(|state| close(state, fd))
}

pub(super) fn close(state: &LibraryState, fd: c_int) -> Result<()> {
    Ok(state.descriptors.remove(fd)?.close(&state.task)?)
}

/// Returns another descriptor of the same open file, dup(2).
// SAFETY: no other symbol has this name.
#[unsafe(no_mangle)]
pub extern "C" fn defuse_dup(fd: c_int) -> c_int {
    call(|state| state.give(state.file(fd)?.to_arc(), false))
}

/// Makes `to` a descriptor of the same open file, dup2(2). If it was open before, it is closed.
// SAFETY: no other symbol has this name.
#[unsafe(no_mangle)]
pub extern "C" fn defuse_dup2(fd: c_int, to: c_int) -> c_int {
    call(|state| match fd == to {
        true => state.file(fd).map(|_| to),
        false => duplicate(state, fd, to, 0),
    })
}

/// Like defuse_dup2(), with O_CLOEXEC if `flags` contain it, dup3(2). Fails with EINVAL if both
/// descriptors are the same.
// SAFETY: no other symbol has this name.
#[unsafe(no_mangle)]
pub extern "C" fn defuse_dup3(fd: c_int, to: c_int, flags: c_int) -> c_int {
    call(|state| match fd == to || flags & !libc::O_CLOEXEC != 0 {
        true => Err(Errno::EINVAL.into()),
        false => duplicate(state, fd, to, flags),
    })
}

fn duplicate(state: &LibraryState, fd: c_int, to: c_int, flags: c_int) -> Result<c_int> {
    let file = state.file(fd)?.to_arc();
    let flags = FdFlags { cloexec: flags & libc::O_CLOEXEC != 0 };
    if let Some(before) = state.descriptors.replace(to, file, flags)? {
        // As in dup2(2), an error of the close is lost.
        let _ = before.close(&state.task);
    }
    Ok(to)
}

/// Controls flags and record locks of an open file, fcntl(2). Supports F_DUPFD, F_DUPFD_CLOEXEC,
/// F_GETFD, F_SETFD, F_GETFL and F_SETFL with a number, and F_GETLK, F_SETLK, F_SETLKW,
/// F_OFD_GETLK, F_OFD_SETLK and F_OFD_SETLKW with a pointer to a `struct flock`. Fails with EINVAL
/// for other commands. A signal ends the wait for a lock with EINTR, even if its handler was
/// installed with SA_RESTART.
// SAFETY: no other symbol has this name.
#[unsafe(no_mangle)]
pub extern "C" fn defuse_fcntl(fd: c_int, command: c_int, argument: locks::FcntlArgument) -> c_int {
    call(|state| {
        let file = state.file(fd)?;
        match command {
            libc::F_DUPFD | libc::F_DUPFD_CLOEXEC => {
                let flags = FdFlags { cloexec: command == libc::F_DUPFD_CLOEXEC };
                Ok(state.descriptors.insert(file.to_arc(), argument.number(), flags)?)
            }
            libc::F_GETFD => match state.descriptors.flags(fd)?.cloexec {
                true => Ok(libc::FD_CLOEXEC),
                false => Ok(0),
            },
            libc::F_SETFD => {
                let cloexec = argument.number() & libc::FD_CLOEXEC != 0;
                state.descriptors.set_flags(fd, FdFlags { cloexec })?;
                Ok(0)
            }
            libc::F_GETFL => Ok(file.flags().0 as c_int),
            libc::F_SETFL => {
                state.client.set_flags(&state.task, &file, argument.number() as u32)?;
                Ok(0)
            }
            _ => locks::record(state, &file, command, &argument),
        }
    })
}

/// Controls a device, ioctl(2). Fails with ENOTTY if the file system does not know the request. The
/// request number defines how many bytes are read and written (see `_IOC` in <linux/ioctl.h>).
/// FIOCLEX and FIONCLEX work like F_SETFD of fcntl.
// SAFETY: no other symbol has this name.
#[unsafe(no_mangle)]
pub extern "C" fn defuse_ioctl(
    fd: c_int,
    request: c_ulong,
    mut argument: OutBuffer<c_void>,
) -> c_int {
    call(|state| {
        let file = state.file(fd)?;
        if request == libc::FIOCLEX || request == libc::FIONCLEX {
            let cloexec = request == libc::FIOCLEX;
            state.descriptors.set_flags(fd, FdFlags { cloexec })?;
            return Ok(0);
        }
        // Only the lower half of the number is used, as in the kernel.
        let cmd = request as u32;
        let (size, goes_in, comes_out) =
            (cmd >> 16 & 0x3fff, cmd & 1 << 30 != 0, cmd & 1 << 31 != 0);
        let (arg, size) = (argument.start().addr() as u64, size as usize);
        let given: &[u8] = match goes_in {
            // SAFETY: the request number is C's statement of the length.
            true => unsafe { argument.as_mut_slice(size) }?,
            false => &[],
        };
        let output_len = if comes_out { size } else { 0 };
        let dir = file.kind() == FileKind::Directory;
        let args = IoctlArgs { cmd, arg, input: given, output_len, dir, compat32: false };
        let reply = state.client.ioctl(&state.task, &file, &args)?;
        let out = reply.output.get(..output_len.min(reply.output.len())).unwrap_or_default();
        // SAFETY: no more than the request number states.
        unsafe { argument.as_mut_slice(out.len()) }?.copy_from_slice(out);
        Ok(reply.result)
    })
}
