//! The number of this process.

use std::sync::atomic::{AtomicI32, Ordering};

use crate::machine::sys;

/// The number that [`note`] noted; 0 before.
static NOTED: AtomicI32 = AtomicI32::new(0);

/// Returns the number from the kernel.
pub fn read_pid() -> i32 {
    sys::plain(libc::SYS_getpid, 0, 0, 0).unwrap_or(0) as i32
}

/// Reads the number from the kernel and notes it: when a program begins, and in a child.
pub fn note() -> i32 {
    let pid = read_pid();
    NOTED.store(pid, Ordering::Relaxed);
    pid
}

/// The noted number, without a system call. A child that does not know yet that it is one has the
/// number of its parent here.
#[inline]
pub fn cached_pid() -> i32 {
    match NOTED.load(Ordering::Relaxed) {
        0 => read_pid(),
        pid => pid,
    }
}
