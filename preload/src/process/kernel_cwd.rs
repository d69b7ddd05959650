//! The kernel's working directory while the program's working directory is in a mount.
//!
//! A call that goes past this library with a relative path, and a program that is not served, would
//! use the directory in which the program was before. So the kernel's working directory is one in
//! which no user, not even root, can create or find a name: `ns` of a process in /proc that has
//! ended. From there, no path but `..` leads to another directory, and none from `..`.

use std::ffi::{CStr, CString};
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};

use defuse_fs::Errno;

use crate::machine::descriptors::take_owned;
use crate::machine::{mask, sys};

/// True while the kernel's working directory is nowhere. Children have a copy.
static IS_NOWHERE: AtomicBool = AtomicBool::new(false);

/// The working directory of the process is in a mount.
pub fn enter() {
    if !IS_NOWHERE.swap(true, Ordering::Relaxed) && change().is_err() {
        IS_NOWHERE.store(false, Ordering::Relaxed);
    }
}

/// The program before was in a mount.
pub fn note_inherited() {
    IS_NOWHERE.store(true, Ordering::Relaxed);
}

/// The kernel has gone to another directory.
pub fn record_leave() {
    IS_NOWHERE.store(false, Ordering::Relaxed);
}

fn change() -> Result<(), Errno> {
    let fd = open_ended_process().or_else(|_| open(c"/proc/self/ns"))?;
    sys::plain(libc::SYS_fchdir, fd.as_raw_fd() as u64, 0, 0).map(drop)
}

/// The directory of a process that ends with this function.
fn open_ended_process() -> Result<OwnedFd, Errno> {
    if !has_plain_numbers() {
        return Err(Errno::ENOSYS);
    }
    // A handler in the child would use the memory of this process.
    let before = mask::change(libc::SIG_SETMASK, u64::MAX);
    let child = sys::make_ended_process();
    mask::change(libc::SIG_SETMASK, before);
    let child = child?;
    let path = CString::new(format!("/proc/{child}/ns")).unwrap_or_default();
    let fd = open(&path);
    let _ = sys::plain(libc::SYS_wait4, child as u64, 0, libc::__WALL as u64);
    fd
}

/// True if /proc knows a child of this process by the number that clone(2) returns, and the child
/// is not the first process of a PID name space, which would end with it.
fn has_plain_numbers() -> bool {
    let link = |path: &str| std::fs::read_link(path).ok();
    let own = link("/proc/self").and_then(|own| own.to_str()?.parse().ok());
    let here = link("/proc/self/ns/pid");
    own == sys::plain(libc::SYS_getpid, 0, 0, 0).ok()
        && here.is_some()
        && here == link("/proc/self/ns/pid_for_children")
}

fn open(path: &CStr) -> Result<OwnedFd, Errno> {
    let flags = (libc::O_PATH | libc::O_DIRECTORY | libc::O_CLOEXEC) as u64;
    let fd = sys::plain(libc::SYS_open, path.as_ptr() as u64, flags, 0)?;
    Ok(take_owned(fd as i32))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_made_or_found_nowhere() {
        let fd = open_ended_process().unwrap();
        let at = |path: &CStr, flags: i32| {
            let args = [fd.as_raw_fd() as u64, path.as_ptr() as u64, flags as u64, 0o600, 0, 0];
            sys::check(sys::pass(libc::SYS_openat as u64, &args))
        };
        for path in [c"made", c"net", c"../made", c"../../made", c"../../../made"] {
            assert!(at(path, libc::O_CREAT | libc::O_WRONLY).is_err(), "{path:?}");
            assert!(at(path, libc::O_RDONLY).is_err(), "{path:?}");
        }
        assert!(at(c"../..", libc::O_PATH).is_err());
    }
}
