//! extended attributes
//!
//! Names are in the namespaces of xattr(7), with the kernel's rules for each. A size of 0 queries
//! the required size; ERANGE means that the buffer is too small. EOPNOTSUPP means that the file
//! system has no such attributes, ENODATA that there is none of that name.

use std::ffi::{c_char, c_int, c_void};

use defuse_direct::{Result, WalkStart};
use defuse_fs::{Errno, SetXattrFlags, Xattr};

use crate::memory::{CStringArg, InBuffer, OutBuffer};
use crate::state::{count, succeed};

/// Copies a value to C and returns its length.
fn give(room: &mut [u8], value: Xattr) -> Result<usize> {
    let value = match value {
        Xattr::Size(size) => return Ok(size as usize),
        Xattr::Value(value) => value,
    };
    let place = room.get_mut(..value.len()).ok_or(Errno::ERANGE)?;
    place.copy_from_slice(&value);
    Ok(value.len())
}

fn get(
    (path, follow): (CStringArg, bool),
    name: CStringArg,
    (mut value, size): (OutBuffer<c_void>, usize),
) -> libc::ssize_t {
    count(|s| {
        // SAFETY: `size` is the length of `value`.
        let room = unsafe { value.as_mut_slice(size) }?;
        let place = (WalkStart::Cwd, path.get()?, follow);
        give(room, s.client.getxattr(&s.task, place, name.get()?, size)?)
    })
}

fn list(
    (path, follow): (CStringArg, bool),
    (mut names, size): (OutBuffer<c_char>, usize),
) -> libc::ssize_t {
    count(|s| {
        // SAFETY: `size` is the length of `names`.
        let room = unsafe { names.as_mut_slice(size) }?;
        give(room, s.client.listxattr(&s.task, WalkStart::Cwd, path.get()?, follow, size)?)
    })
}

fn set(
    (path, follow): (CStringArg, bool),
    name: CStringArg,
    (value, size): (InBuffer<c_void>, usize),
    flags: c_int,
) -> c_int {
    succeed(|s| {
        // SAFETY: `size` is the length of `value`.
        let bytes = unsafe { value.as_slice(size) }?;
        let place = (WalkStart::Cwd, path.get()?, follow);
        s.client.setxattr(&s.task, place, name.get()?, bytes, set_flags(flags)?)
    })
}

fn set_flags(flags: c_int) -> Result<SetXattrFlags> {
    if flags & !(libc::XATTR_CREATE | libc::XATTR_REPLACE) != 0 {
        return Err(Errno::EINVAL.into());
    }
    let (create, replace) = (flags & libc::XATTR_CREATE != 0, flags & libc::XATTR_REPLACE != 0);
    Ok(SetXattrFlags { create, replace, ..SetXattrFlags::default() })
}

/// Returns the value of an attribute, getxattr(2).
// SAFETY: no other symbol has this name.
#[unsafe(no_mangle)]
pub extern "C" fn defuse_getxattr(
    path: CStringArg,
    name: CStringArg,
    value: OutBuffer<c_void>,
    size: usize,
) -> libc::ssize_t {
    get((path, true), name, (value, size))
}

/// Returns the value of an attribute of a symbolic link, lgetxattr(2).
// SAFETY: no other symbol has this name.
#[unsafe(no_mangle)]
pub extern "C" fn defuse_lgetxattr(
    path: CStringArg,
    name: CStringArg,
    value: OutBuffer<c_void>,
    size: usize,
) -> libc::ssize_t {
    get((path, false), name, (value, size))
}

/// Returns the value of an attribute of an open file, fgetxattr(2).
// SAFETY: no other symbol has this name.
#[unsafe(no_mangle)]
pub extern "C" fn defuse_fgetxattr(
    fd: c_int,
    name: CStringArg,
    mut value: OutBuffer<c_void>,
    size: usize,
) -> libc::ssize_t {
    count(|s| {
        // SAFETY: `size` is the length of `value`.
        let room = unsafe { value.as_mut_slice(size) }?;
        give(room, s.client.fgetxattr(&s.task, &*s.file(fd)?, name.get()?, size)?)
    })
}

/// Sets an attribute, setxattr(2), with XATTR_CREATE and XATTR_REPLACE.
// SAFETY: no other symbol has this name.
#[unsafe(no_mangle)]
pub extern "C" fn defuse_setxattr(
    path: CStringArg,
    name: CStringArg,
    value: InBuffer<c_void>,
    size: usize,
    flags: c_int,
) -> c_int {
    set((path, true), name, (value, size), flags)
}

/// Sets an attribute of a symbolic link, lsetxattr(2).
// SAFETY: no other symbol has this name.
#[unsafe(no_mangle)]
pub extern "C" fn defuse_lsetxattr(
    path: CStringArg,
    name: CStringArg,
    value: InBuffer<c_void>,
    size: usize,
    flags: c_int,
) -> c_int {
    set((path, false), name, (value, size), flags)
}

/// Sets an attribute of an open file, fsetxattr(2).
// SAFETY: no other symbol has this name.
#[unsafe(no_mangle)]
pub extern "C" fn defuse_fsetxattr(
    fd: c_int,
    name: CStringArg,
    value: InBuffer<c_void>,
    size: usize,
    flags: c_int,
) -> c_int {
    succeed(|s| {
        // SAFETY: `size` is the length of `value`.
        let bytes = unsafe { value.as_slice(size) }?;
        s.client.fsetxattr(&s.task, &*s.file(fd)?, name.get()?, bytes, set_flags(flags)?)
    })
}

/// Lists the names of all attributes, each with a final NUL, listxattr(2).
// SAFETY: no other symbol has this name.
#[unsafe(no_mangle)]
pub extern "C" fn defuse_listxattr(
    path: CStringArg,
    names: OutBuffer<c_char>,
    size: usize,
) -> libc::ssize_t {
    list((path, true), (names, size))
}

/// Lists the names of all attributes of a symbolic link, llistxattr(2).
// SAFETY: no other symbol has this name.
#[unsafe(no_mangle)]
pub extern "C" fn defuse_llistxattr(
    path: CStringArg,
    names: OutBuffer<c_char>,
    size: usize,
) -> libc::ssize_t {
    list((path, false), (names, size))
}

/// Lists the names of all attributes of an open file, flistxattr(2).
// SAFETY: no other symbol has this name.
#[unsafe(no_mangle)]
pub extern "C" fn defuse_flistxattr(
    fd: c_int,
    mut names: OutBuffer<c_char>,
    size: usize,
) -> libc::ssize_t {
    count(|s| {
        // SAFETY: `size` is the length of `names`.
        let room = unsafe { names.as_mut_slice(size) }?;
        give(room, s.client.flistxattr(&s.task, &*s.file(fd)?, size)?)
    })
}

/// Removes an attribute, removexattr(2).
// SAFETY: no other symbol has this name.
#[unsafe(no_mangle)]
pub extern "C" fn defuse_removexattr(path: CStringArg, name: CStringArg) -> c_int {
    succeed(|s| s.client.removexattr(&s.task, (WalkStart::Cwd, path.get()?, true), name.get()?))
}

/// Removes an attribute of a symbolic link, lremovexattr(2).
// SAFETY: no other symbol has this name.
#[unsafe(no_mangle)]
pub extern "C" fn defuse_lremovexattr(path: CStringArg, name: CStringArg) -> c_int {
    succeed(|s| s.client.removexattr(&s.task, (WalkStart::Cwd, path.get()?, false), name.get()?))
}

/// Removes an attribute of an open file, fremovexattr(2).
// SAFETY: no other symbol has this name.
#[unsafe(no_mangle)]
pub extern "C" fn defuse_fremovexattr(fd: c_int, name: CStringArg) -> c_int {
    succeed(|s| s.client.fremovexattr(&s.task, &*s.file(fd)?, name.get()?))
}
