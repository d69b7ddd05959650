//! The exported functions: each turns what C gave into a call of the client.

#![allow(unsafe_code)]

use std::ffi::{OsStr, c_char, c_int, c_uint, c_void};
use std::os::unix::ffi::OsStrExt;

use defuse_compose::Settings;
use defuse_direct::{Access, At, FdFlags, How, IoFlags, MountArgs, Result, Stat};
use defuse_fs::{Errno, RenameFlags, Timestamp};

use crate::memory::{bytes, empty_stat, pieces, put, room, rooms, text};
use crate::state::{State, call};

fn mount(state: &State, target: &[u8], source: &[u8]) -> Result<i64> {
    let mut settings = Settings::default();
    // The threads are the application's, so nothing of them may stay changed.
    settings.passthrough.credentials = defuse_compose::APPLICATION_THREADS;
    let made = defuse_compose::open_text(OsStr::from_bytes(source), settings);
    let (source, settings, fs) = made.map_err(|error| match error {
        defuse_compose::Error::Usage(_) => Errno::EINVAL,
        defuse_compose::Error::Failed(_) => Errno::EIO,
    })?;
    let source = source.text().to_string_lossy().into_owned();
    let args = MountArgs { read_only: settings.read_only, source, ..MountArgs::default() };
    state.client.mount(target, fs, &args)?;
    Ok(0)
}

fn open(state: &State, at: At<'_>, path: &[u8], flags: c_int, mode: c_uint) -> Result<i64> {
    let how = How { flags: flags as u32, mode, ..How::default() };
    let file = state.client.open(&state.task, at, path, how)?;
    state.give(file, flags & libc::O_CLOEXEC != 0)
}

fn position(offset: i64) -> Result<Option<u64>> {
    match offset {
        -1 => Ok(None),
        offset => Ok(Some(u64::try_from(offset).map_err(|_| Errno::EINVAL)?)),
    }
}

/// Puts a text with a NUL at its end; its length without. `ERANGE`.
fn fill_text(room: &mut [u8], text: &[u8]) -> Result<i64> {
    let place = room.get_mut(..=text.len()).ok_or(Errno::ERANGE)?;
    place[..text.len()].copy_from_slice(text);
    place[text.len()] = 0;
    Ok(text.len() as i64)
}

fn c_stat(stat: &Stat) -> libc::stat {
    let attr = &stat.attr;
    let mut out = empty_stat();
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

/// Mounts `source`, such as "memory:" or "passthrough:/srv,exclusive", on `target`: an absolute
/// path, or a name with a colon ("mem:"). 0, or -1: EINVAL, EBUSY, and what making the file system
/// gives.
///
/// # Safety
///
/// Pointers are to memory as the call of that name has it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn defuse_mount(target: *const c_char, source: *const c_char) -> c_int {
    call(|state| {
        // SAFETY: the caller of this function promises it.
        let (target, source) = (unsafe { text(target) }?, unsafe { text(source) }?);
        mount(state, target, source)
    }) as c_int
}

/// Takes a mount away. EBUSY while it is in use, unless it is to be detached `lazily`.
///
/// # Safety
///
/// Pointers are to memory as the call of that name has it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn defuse_unmount(target: *const c_char, lazily: c_int) -> c_int {
    call(|state| {
        // SAFETY: the caller of this function promises it.
        let target = unsafe { text(target) }?;
        state.client.unmount(target, lazily != 0)?;
        Ok(0)
    }) as c_int
}

/// What was measured on a mount, as JSON with a NUL at its end. The length without it; ERANGE where
/// the buffer is too small.
///
/// # Safety
///
/// Pointers are to memory as the call of that name has it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn defuse_statistics(
    target: *const c_char,
    buf: *mut c_char,
    size: usize,
) -> isize {
    call(|state| {
        // SAFETY: the caller of this function promises it.
        let (target, room) = (unsafe { text(target) }?, unsafe { room(buf.cast(), size) }?);
        let snapshot = state.client.statistics(target)?;
        let json = serde_json::to_vec(&snapshot).map_err(|_| Errno::EIO)?;
        fill_text(room, &json)
    }) as isize
}

/// open(2). `mode` is always given; it counts with O_CREAT and O_TMPFILE.
///
/// # Safety
///
/// Pointers are to memory as the call of that name has it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn defuse_open(path: *const c_char, flags: c_int, mode: c_uint) -> c_int {
    call(|state| {
        // SAFETY: the caller of this function promises it.
        let path = unsafe { text(path) }?;
        open(state, At::Cwd, path, flags, mode)
    }) as c_int
}

/// openat(2), with `dir` from defuse_open or AT_FDCWD.
///
/// # Safety
///
/// Pointers are to memory as the call of that name has it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn defuse_openat(
    dir: c_int,
    path: *const c_char,
    flags: c_int,
    mode: c_uint,
) -> c_int {
    call(|state| {
        // SAFETY: the caller of this function promises it.
        let path = unsafe { text(path) }?;
        if dir == libc::AT_FDCWD {
            return open(state, At::Cwd, path, flags, mode);
        }
        open(state, At::Dir(&*state.file(dir)?), path, flags, mode)
    }) as c_int
}

/// close(2).
///
/// # Safety
///
/// Pointers are to memory as the call of that name has it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn defuse_close(fd: c_int) -> c_int {
    call(|state| {
        let file = state.descriptors.remove(fd)?;
        file.close(&state.task)?;
        Ok(0)
    }) as c_int
}

/// dup(2).
///
/// # Safety
///
/// Pointers are to memory as the call of that name has it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn defuse_dup(fd: c_int) -> c_int {
    call(|state| {
        let file = state.file(fd)?.to_arc();
        state.give(file, false)
    }) as c_int
}

/// dup2(2).
///
/// # Safety
///
/// Pointers are to memory as the call of that name has it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn defuse_dup2(fd: c_int, to: c_int) -> c_int {
    call(|state| {
        let file = state.file(fd)?.to_arc();
        if fd != to {
            let before = state.descriptors.replace(to, file, FdFlags::default())?;
            if let Some(before) = before {
                // As dup2(2): what closing it says, is lost.
                let _ = before.close(&state.task);
            }
        }
        Ok(to.into())
    }) as c_int
}

/// read(2).
///
/// # Safety
///
/// Pointers are to memory as the call of that name has it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn defuse_read(fd: c_int, buf: *mut c_void, size: usize) -> isize {
    call(|state| {
        // SAFETY: the caller of this function promises it.
        let room = unsafe { room(buf, size) }?;
        Ok(state.client.read(&state.task, &*state.file(fd)?, room)? as i64)
    }) as isize
}

/// write(2).
///
/// # Safety
///
/// Pointers are to memory as the call of that name has it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn defuse_write(fd: c_int, buf: *const c_void, size: usize) -> isize {
    call(|state| {
        // SAFETY: the caller of this function promises it.
        let bytes = unsafe { bytes(buf, size) }?;
        Ok(state.client.write(&state.task, &*state.file(fd)?, bytes)? as i64)
    }) as isize
}

/// pread(2).
///
/// # Safety
///
/// Pointers are to memory as the call of that name has it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn defuse_pread(
    fd: c_int,
    buf: *mut c_void,
    size: usize,
    offset: i64,
) -> isize {
    call(|state| {
        // SAFETY: the caller of this function promises it.
        let room = unsafe { room(buf, size) }?;
        let offset = u64::try_from(offset).map_err(|_| Errno::EINVAL)?;
        Ok(state.client.pread(&state.task, &*state.file(fd)?, room, offset)? as i64)
    }) as isize
}

/// pwrite(2).
///
/// # Safety
///
/// Pointers are to memory as the call of that name has it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn defuse_pwrite(
    fd: c_int,
    buf: *const c_void,
    size: usize,
    offset: i64,
) -> isize {
    call(|state| {
        // SAFETY: the caller of this function promises it.
        let bytes = unsafe { bytes(buf, size) }?;
        let offset = u64::try_from(offset).map_err(|_| Errno::EINVAL)?;
        Ok(state.client.pwrite(&state.task, &*state.file(fd)?, bytes, offset)? as i64)
    }) as isize
}

/// preadv2(2): an `offset` of -1 is the position.
///
/// # Safety
///
/// Pointers are to memory as the call of that name has it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn defuse_preadv2(
    fd: c_int,
    iov: *const libc::iovec,
    count: c_int,
    offset: i64,
    flags: c_int,
) -> isize {
    call(|state| {
        // SAFETY: the caller of this function promises it.
        let mut rooms = unsafe { rooms(iov, count) }?;
        let (at, flags) = (position(offset)?, IoFlags(flags as u32));
        let file = state.file(fd)?;
        Ok(state.client.preadv2(&state.task, &file, &mut rooms, at, flags)? as i64)
    }) as isize
}

/// pwritev2(2): an `offset` of -1 is the position.
///
/// # Safety
///
/// Pointers are to memory as the call of that name has it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn defuse_pwritev2(
    fd: c_int,
    iov: *const libc::iovec,
    count: c_int,
    offset: i64,
    flags: c_int,
) -> isize {
    call(|state| {
        // SAFETY: the caller of this function promises it.
        let pieces = unsafe { pieces(iov, count) }?;
        let (at, flags) = (position(offset)?, IoFlags(flags as u32));
        let file = state.file(fd)?;
        Ok(state.client.pwritev2(&state.task, &file, &pieces, at, flags)? as i64)
    }) as isize
}

/// lseek(2), with SEEK_DATA and SEEK_HOLE.
///
/// # Safety
///
/// Pointers are to memory as the call of that name has it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn defuse_lseek(fd: c_int, offset: i64, whence: c_int) -> i64 {
    call(|state| {
        let whence = u32::try_from(whence).map_err(|_| Errno::EINVAL)?;
        Ok(state.client.lseek(&state.task, &*state.file(fd)?, offset, whence)? as i64)
    })
}

/// ftruncate(2).
///
/// # Safety
///
/// Pointers are to memory as the call of that name has it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn defuse_ftruncate(fd: c_int, length: i64) -> c_int {
    call(|state| {
        state.client.ftruncate(&state.task, &*state.file(fd)?, length)?;
        Ok(0)
    }) as c_int
}

/// fallocate(2).
///
/// # Safety
///
/// Pointers are to memory as the call of that name has it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn defuse_fallocate(
    fd: c_int,
    mode: c_int,
    offset: i64,
    length: i64,
) -> c_int {
    call(|state| {
        let range = (offset, length);
        state.client.fallocate(&state.task, &*state.file(fd)?, mode as u32, range)?;
        Ok(0)
    }) as c_int
}

/// fsync(2).
///
/// # Safety
///
/// Pointers are to memory as the call of that name has it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn defuse_fsync(fd: c_int) -> c_int {
    call(|state| {
        state.client.fsync(&state.task, &*state.file(fd)?, false)?;
        Ok(0)
    }) as c_int
}

/// fdatasync(2).
///
/// # Safety
///
/// Pointers are to memory as the call of that name has it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn defuse_fdatasync(fd: c_int) -> c_int {
    call(|state| {
        state.client.fsync(&state.task, &*state.file(fd)?, true)?;
        Ok(0)
    }) as c_int
}

/// copy_file_range(2) at the positions of both, also between mounts.
///
/// # Safety
///
/// Pointers are to memory as the call of that name has it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn defuse_copy_file_range(from: c_int, to: c_int, size: usize) -> isize {
    call(|state| {
        let (from, to) = (state.file(from)?, state.file(to)?);
        let ends = ((&**from, None), (&**to, None));
        Ok(state.client.copy_file_range(&state.task, ends.0, ends.1, size)? as i64)
    }) as isize
}

/// stat(2).
///
/// # Safety
///
/// Pointers are to memory as the call of that name has it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn defuse_stat(path: *const c_char, out: *mut libc::stat) -> c_int {
    call(|state| {
        // SAFETY: the caller of this function promises it.
        let path = unsafe { text(path) }?;
        let stat = state.client.stat(&state.task, At::Cwd, path, true)?;
        // SAFETY: the caller of this function promises it.
        unsafe { put(out, c_stat(&stat)) }?;
        Ok(0)
    }) as c_int
}

/// lstat(2).
///
/// # Safety
///
/// Pointers are to memory as the call of that name has it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn defuse_lstat(path: *const c_char, out: *mut libc::stat) -> c_int {
    call(|state| {
        // SAFETY: the caller of this function promises it.
        let path = unsafe { text(path) }?;
        let stat = state.client.stat(&state.task, At::Cwd, path, false)?;
        // SAFETY: the caller of this function promises it.
        unsafe { put(out, c_stat(&stat)) }?;
        Ok(0)
    }) as c_int
}

/// fstat(2).
///
/// # Safety
///
/// Pointers are to memory as the call of that name has it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn defuse_fstat(fd: c_int, out: *mut libc::stat) -> c_int {
    call(|state| {
        let stat = state.client.fstat(&state.task, &*state.file(fd)?)?;
        // SAFETY: the caller of this function promises it.
        unsafe { put(out, c_stat(&stat)) }?;
        Ok(0)
    }) as c_int
}

/// access(2).
///
/// # Safety
///
/// Pointers are to memory as the call of that name has it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn defuse_access(path: *const c_char, mode: c_int) -> c_int {
    call(|state| {
        // SAFETY: the caller of this function promises it.
        let path = unsafe { text(path) }?;
        let access = Access::from_bits(mode as u32);
        state.client.access(&state.task, At::Cwd, path, access, (true, false))?;
        Ok(0)
    }) as c_int
}

/// chmod(2).
///
/// # Safety
///
/// Pointers are to memory as the call of that name has it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn defuse_chmod(path: *const c_char, mode: c_uint) -> c_int {
    call(|state| {
        // SAFETY: the caller of this function promises it.
        state.client.chmod(&state.task, At::Cwd, unsafe { text(path) }?, mode, true)?;
        Ok(0)
    }) as c_int
}

/// truncate(2).
///
/// # Safety
///
/// Pointers are to memory as the call of that name has it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn defuse_truncate(path: *const c_char, length: i64) -> c_int {
    call(|state| {
        // SAFETY: the caller of this function promises it.
        state.client.truncate(&state.task, At::Cwd, unsafe { text(path) }?, length)?;
        Ok(0)
    }) as c_int
}

/// mkdir(2).
///
/// # Safety
///
/// Pointers are to memory as the call of that name has it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn defuse_mkdir(path: *const c_char, mode: c_uint) -> c_int {
    call(|state| {
        // SAFETY: the caller of this function promises it.
        state.client.mkdir(&state.task, At::Cwd, unsafe { text(path) }?, mode)?;
        Ok(0)
    }) as c_int
}

/// rmdir(2).
///
/// # Safety
///
/// Pointers are to memory as the call of that name has it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn defuse_rmdir(path: *const c_char) -> c_int {
    call(|state| {
        // SAFETY: the caller of this function promises it.
        state.client.rmdir(&state.task, At::Cwd, unsafe { text(path) }?)?;
        Ok(0)
    }) as c_int
}

/// unlink(2).
///
/// # Safety
///
/// Pointers are to memory as the call of that name has it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn defuse_unlink(path: *const c_char) -> c_int {
    call(|state| {
        // SAFETY: the caller of this function promises it.
        state.client.unlink(&state.task, At::Cwd, unsafe { text(path) }?)?;
        Ok(0)
    }) as c_int
}

/// rename(2).
///
/// # Safety
///
/// Pointers are to memory as the call of that name has it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn defuse_rename(from: *const c_char, to: *const c_char) -> c_int {
    call(|state| {
        // SAFETY: the caller of this function promises it.
        let (from, to) = (unsafe { text(from) }?, unsafe { text(to) }?);
        let (from, to) = ((At::Cwd, from), (At::Cwd, to));
        state.client.rename(&state.task, from, to, RenameFlags::default())?;
        Ok(0)
    }) as c_int
}

/// link(2).
///
/// # Safety
///
/// Pointers are to memory as the call of that name has it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn defuse_link(from: *const c_char, to: *const c_char) -> c_int {
    call(|state| {
        // SAFETY: the caller of this function promises it.
        let (from, to) = (unsafe { text(from) }?, unsafe { text(to) }?);
        state.client.link(&state.task, (At::Cwd, from), (At::Cwd, to), false)?;
        Ok(0)
    }) as c_int
}

/// symlink(2).
///
/// # Safety
///
/// Pointers are to memory as the call of that name has it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn defuse_symlink(from: *const c_char, to: *const c_char) -> c_int {
    call(|state| {
        // SAFETY: the caller of this function promises it.
        let (from, to) = (unsafe { text(from) }?, unsafe { text(to) }?);
        state.client.symlink(&state.task, from, At::Cwd, to)?;
        Ok(0)
    }) as c_int
}

/// readlink(2): no NUL at the end.
///
/// # Safety
///
/// Pointers are to memory as the call of that name has it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn defuse_readlink(
    path: *const c_char,
    buf: *mut c_char,
    size: usize,
) -> isize {
    call(|state| {
        // SAFETY: the caller of this function promises it.
        let (path, room) = (unsafe { text(path) }?, unsafe { room(buf.cast(), size) }?);
        let link = state.client.readlink(&state.task, At::Cwd, path)?;
        let len = link.len().min(room.len());
        room[..len].copy_from_slice(&link[..len]);
        Ok(len as i64)
    }) as isize
}

/// chdir(2), for the defuse_ calls alone.
///
/// # Safety
///
/// Pointers are to memory as the call of that name has it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn defuse_chdir(path: *const c_char) -> c_int {
    call(|state| {
        // SAFETY: the caller of this function promises it.
        state.client.chdir(&state.task, unsafe { text(path) }?)?;
        Ok(0)
    }) as c_int
}

/// The working directory, with a NUL at its end. The length without it; ERANGE where the buffer is
/// too small.
///
/// # Safety
///
/// Pointers are to memory as the call of that name has it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn defuse_getcwd(buf: *mut c_char, size: usize) -> isize {
    call(|state| {
        // SAFETY: the caller of this function promises it.
        let room = unsafe { room(buf.cast(), size) }?;
        fill_text(room, &state.client.getcwd(&state.task)?)
    }) as isize
}
