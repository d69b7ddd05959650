//! The leash: a process ends with its run, if the run was started with `--on-death end`.
//!
//! The run holds the only writing end of a pipe. Every process opens the reading end for itself,
//! and requests SIGKILL from the kernel when the pipe changes (`O_ASYNC`, `F_SETSIG`, fcntl(2)),
//! which happens when the run ends. `PR_SET_PDEATHSIG` of prctl(2) would reach the first program
//! only, and no child.

use std::ffi::CString;
use std::sync::atomic::{AtomicI32, Ordering};

use crate::machine::descriptors::{close, keep_above};
use crate::machine::message::write_line;
use crate::machine::{pid, sys};

/// This process's own descriptor; -1 for none.
static OWN: AtomicI32 = AtomicI32::new(-1);

/// Binds this process to the run, whose pipe is open as `pipe`. Our descriptor gets a number from
/// `floor` on. A run that has ended already ends this process here.
pub fn bind(pipe: i32, floor: i32) {
    let own = OWN.swap(-1, Ordering::Relaxed);
    if own >= 0 {
        // After fork(2), this is the parent's descriptor.
        close(own);
    }
    let path = CString::new(format!("/proc/self/fd/{pipe}")).unwrap_or_default();
    let flags = libc::O_RDONLY | libc::O_NONBLOCK | libc::O_CLOEXEC;
    let args = [libc::AT_FDCWD as u64, path.as_ptr() as u64, flags as u64, 0, 0, 0];
    let Ok(fd) = sys::check(sys::pass(libc::SYS_openat as u64, &args)) else {
        write_line("/proc: this program does not end with its run: mount /proc");
        return;
    };
    let kept = keep_above(fd as i32, floor, true);
    close(fd as i32);
    let Ok(kept) = kept else { return };
    OWN.store(kept, Ordering::Relaxed);
    let control = |what: i32, value: i32| {
        let _ = sys::plain(libc::SYS_fcntl, kept as u64, what as u64, value as u64);
    };
    control(libc::F_SETOWN, pid::read_pid());
    control(F_SETSIG, libc::SIGKILL);
    control(libc::F_SETFL, libc::O_NONBLOCK | libc::O_ASYNC);
    // Events before these calls send no signal. Nothing is ever written.
    let mut byte = 0u8;
    let args = [kept as u64, &raw mut byte as u64, 1, 0, 0, 0];
    if sys::pass(libc::SYS_read as u64, &args) == 0 {
        let _ = sys::plain(libc::SYS_kill, pid::read_pid() as u64, libc::SIGKILL as u64, 0);
    }
}

/// fcntl(2): the signal that is sent in place of SIGIO (include/uapi/asm-generic/fcntl.h).
const F_SETSIG: i32 = 10;

/// True if `fd` is the descriptor of the leash.
pub fn is_own(fd: i32) -> bool {
    OWN.load(Ordering::Relaxed) == fd
}
