//! The signals that a thread blocks.

use crate::machine::sys;

/// `SIGSYS`, as a bit of a mask.
pub const SYS: u64 = 1 << (libc::SIGSYS - 1);

/// Signals that a thread raises by what it does. The kernel ends a process that blocks them then.
pub const OWN: u64 = SYS
    | 1 << (libc::SIGSEGV - 1)
    | 1 << (libc::SIGBUS - 1)
    | 1 << (libc::SIGILL - 1)
    | 1 << (libc::SIGFPE - 1)
    | 1 << (libc::SIGTRAP - 1);

/// All signals that can wait.
pub const CAN_WAIT: u64 = !OWN;

/// rt_sigprocmask(2) of this thread; returns the mask before.
pub fn change(how: libc::c_int, mask: u64) -> u64 {
    let mut before = 0u64;
    let args = [how as u64, &raw const mask as u64, &raw mut before as u64, 8, 0, 0];
    // SAFETY: the kernel reads and writes eight bytes each.
    unsafe { sys::syscall(libc::SYS_rt_sigprocmask as u64, &args) };
    before
}
