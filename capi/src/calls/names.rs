//! create, rename and remove names
//!
//! Renames and hard links stay within one mount (EXDEV). Symbolic links may lead anywhere;
//! following one that leads out of all mounts fails with EXDEV.

use std::ffi::{c_char, c_int, c_uint};

use defuse_direct::WalkStart;
use defuse_fs::{Errno, RenameFlags};

use crate::memory::{CStringArg, OutBuffer, allocate_copy};
use crate::state::{PathStart, call, count, succeed};

const CWD: c_int = libc::AT_FDCWD;

/// Creates a directory, mkdir(2).
// SAFETY: no other symbol has this name.
#[unsafe(no_mangle)]
pub extern "C" fn defuse_mkdir(path: CStringArg, mode: libc::mode_t) -> c_int {
    defuse_mkdirat(CWD, path, mode)
}

/// Creates a directory, mkdirat(2).
// SAFETY: no other symbol has this name.
#[unsafe(no_mangle)]
pub extern "C" fn defuse_mkdirat(dir: c_int, path: CStringArg, mode: libc::mode_t) -> c_int {
    succeed(|s| {
        let path = path.get()?;
        s.client.mkdir(&s.task, s.start(dir, path, 0)?.walk_start(), path, mode)
    })
}

/// Creates a file, fifo, socket or device, mknod(2).
// SAFETY: no other symbol has this name.
#[unsafe(no_mangle)]
pub extern "C" fn defuse_mknod(path: CStringArg, mode: libc::mode_t, device: libc::dev_t) -> c_int {
    defuse_mknodat(CWD, path, mode, device)
}

/// Creates a file, fifo, socket or device, mknodat(2).
// SAFETY: no other symbol has this name.
#[unsafe(no_mangle)]
pub extern "C" fn defuse_mknodat(
    dir: c_int,
    path: CStringArg,
    mode: libc::mode_t,
    device: libc::dev_t,
) -> c_int {
    succeed(|s| {
        let path = path.get()?;
        s.client.mknod(&s.task, s.start(dir, path, 0)?.walk_start(), path, mode, device)
    })
}

/// Creates a fifo, mkfifo(3). It can be listed and removed, but not opened (ENXIO).
// SAFETY: no other symbol has this name.
#[unsafe(no_mangle)]
pub extern "C" fn defuse_mkfifo(path: CStringArg, mode: libc::mode_t) -> c_int {
    defuse_mkfifoat(CWD, path, mode)
}

/// Creates a fifo, mkfifoat(3).
// SAFETY: no other symbol has this name.
#[unsafe(no_mangle)]
pub extern "C" fn defuse_mkfifoat(dir: c_int, path: CStringArg, mode: libc::mode_t) -> c_int {
    defuse_mknodat(dir, path, mode & 0o7777 | libc::S_IFIFO, 0)
}

/// Removes the name of a file that is no directory, unlink(2).
// SAFETY: no other symbol has this name.
#[unsafe(no_mangle)]
pub extern "C" fn defuse_unlink(path: CStringArg) -> c_int {
    defuse_unlinkat(CWD, path, 0)
}

/// Removes an empty directory, rmdir(2).
// SAFETY: no other symbol has this name.
#[unsafe(no_mangle)]
pub extern "C" fn defuse_rmdir(path: CStringArg) -> c_int {
    defuse_unlinkat(CWD, path, libc::AT_REMOVEDIR)
}

/// Removes a name, or with AT_REMOVEDIR an empty directory, unlinkat(2).
// SAFETY: no other symbol has this name.
#[unsafe(no_mangle)]
pub extern "C" fn defuse_unlinkat(dir: c_int, path: CStringArg, flags: c_int) -> c_int {
    succeed(|s| {
        let path = path.get()?;
        let start = s.start(dir, path, 0)?;
        match flags {
            0 => s.client.unlink(&s.task, start.walk_start(), path),
            libc::AT_REMOVEDIR => s.client.rmdir(&s.task, start.walk_start(), path),
            _ => Err(Errno::EINVAL.into()),
        }
    })
}

/// Removes a file or an empty directory, remove(3).
// SAFETY: no other symbol has this name.
#[unsafe(no_mangle)]
pub extern "C" fn defuse_remove(path: CStringArg) -> c_int {
    succeed(|s| {
        let path = path.get()?;
        match s.client.unlink(&s.task, WalkStart::Cwd, path) {
            Err(stop) if stop.errno() == Errno::EISDIR => {
                s.client.rmdir(&s.task, WalkStart::Cwd, path)
            }
            result => result,
        }
    })
}

/// Renames a file, rename(2).
// SAFETY: no other symbol has this name.
#[unsafe(no_mangle)]
pub extern "C" fn defuse_rename(from: CStringArg, to: CStringArg) -> c_int {
    defuse_renameat2(CWD, from, CWD, to, 0)
}

/// Renames a file, renameat(2).
// SAFETY: no other symbol has this name.
#[unsafe(no_mangle)]
pub extern "C" fn defuse_renameat(
    from_dir: c_int,
    from: CStringArg,
    to_dir: c_int,
    to: CStringArg,
) -> c_int {
    defuse_renameat2(from_dir, from, to_dir, to, 0)
}

/// Renames a file, renameat2(2), with RENAME_NOREPLACE, RENAME_EXCHANGE and RENAME_WHITEOUT.
// SAFETY: no other symbol has this name.
#[unsafe(no_mangle)]
pub extern "C" fn defuse_renameat2(
    from_dir: c_int,
    from: CStringArg,
    to_dir: c_int,
    to: CStringArg,
    flags: c_uint,
) -> c_int {
    succeed(|s| {
        let (from, to) = (from.get()?, to.get()?);
        let (old, new) = (s.start(from_dir, from, 0)?, s.start(to_dir, to, 0)?);
        s.client.rename(
            &s.task,
            (old.walk_start(), from),
            (new.walk_start(), to),
            RenameFlags(flags),
        )
    })
}

/// Creates a hard link, link(2).
// SAFETY: no other symbol has this name.
#[unsafe(no_mangle)]
pub extern "C" fn defuse_link(from: CStringArg, to: CStringArg) -> c_int {
    defuse_linkat(CWD, from, CWD, to, 0)
}

/// Creates a hard link, linkat(2), with AT_SYMLINK_FOLLOW and AT_EMPTY_PATH. The latter gives an
/// unnamed file (O_TMPFILE) a name.
// SAFETY: no other symbol has this name.
#[unsafe(no_mangle)]
pub extern "C" fn defuse_linkat(
    from_dir: c_int,
    from: CStringArg,
    to_dir: c_int,
    to: CStringArg,
    flags: c_int,
) -> c_int {
    succeed(|s| {
        if flags & !(libc::AT_SYMLINK_FOLLOW | libc::AT_EMPTY_PATH) != 0 {
            return Err(Errno::EINVAL.into());
        }
        let (from, to) = (from.get()?, to.get()?);
        let (old, new) = (s.start(from_dir, from, flags)?, s.start(to_dir, to, 0)?);
        if let PathStart::Itself(file) = &old {
            return s.client.flink(&s.task, file, (new.walk_start(), to));
        }
        let follow = flags & libc::AT_SYMLINK_FOLLOW != 0;
        s.client.link(&s.task, (old.walk_start(), from), (new.walk_start(), to), follow)
    })
}

/// Creates a symbolic link with the text `target`, symlink(2).
// SAFETY: no other symbol has this name.
#[unsafe(no_mangle)]
pub extern "C" fn defuse_symlink(target: CStringArg, path: CStringArg) -> c_int {
    defuse_symlinkat(target, CWD, path)
}

/// Creates a symbolic link with the text `target`, symlinkat(2).
// SAFETY: no other symbol has this name.
#[unsafe(no_mangle)]
pub extern "C" fn defuse_symlinkat(target: CStringArg, dir: c_int, path: CStringArg) -> c_int {
    succeed(|s| {
        let (target, path) = (target.get()?, path.get()?);
        s.client.symlink(&s.task, target, s.start(dir, path, 0)?.walk_start(), path)
    })
}

/// Reads a symbolic link, without a final NUL, readlink(2).
// SAFETY: no other symbol has this name.
#[unsafe(no_mangle)]
pub extern "C" fn defuse_readlink(
    path: CStringArg,
    buf: OutBuffer<c_char>,
    size: usize,
) -> libc::ssize_t {
    defuse_readlinkat(CWD, path, buf, size)
}

/// Reads a symbolic link, readlinkat(2). With an empty path, reads the link that is open as `dir`.
// SAFETY: no other symbol has this name.
#[unsafe(no_mangle)]
pub extern "C" fn defuse_readlinkat(
    dir: c_int,
    path: CStringArg,
    mut buf: OutBuffer<c_char>,
    size: usize,
) -> libc::ssize_t {
    count(|s| {
        if size == 0 {
            return Err(Errno::EINVAL.into());
        }
        // SAFETY: `size` is the length of `buf`.
        let (path, room) = (path.get()?, unsafe { buf.as_mut_slice(size) }?);
        let start = s.start(dir, path, libc::AT_EMPTY_PATH)?;
        let text = s.client.readlink(&s.task, start.walk_start(), path)?;
        let len = text.len().min(room.len());
        room[..len].copy_from_slice(&text[..len]);
        Ok(len)
    })
}

/// Returns the path without links, `.` and `..`, realpath(3): in `resolved`, which has room for
/// PATH_MAX bytes, or if that is NULL, in memory that the caller frees with free(3).
// SAFETY: no other symbol has this name.
#[unsafe(no_mangle)]
pub extern "C" fn defuse_realpath(
    path: CStringArg,
    mut resolved: OutBuffer<c_char>,
) -> *mut c_char {
    call(|s| {
        let full = s.client.real_path(&s.task, path.get()?)?;
        if resolved.start().is_null() {
            return allocate_copy(&full);
        }
        // SAFETY: the caller must provide this much room.
        let room = unsafe { resolved.as_mut_slice(libc::PATH_MAX as usize) }?;
        let fits = super::mount::fill_text(room, &full);
        fits.map_err(|_| Errno::ENAMETOOLONG)?;
        Ok(resolved.start())
    })
}
