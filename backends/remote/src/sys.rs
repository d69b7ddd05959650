//! System calls that rustix lacks, and the conversion of its errors.

use std::os::fd::{AsFd, AsRawFd};
use std::sync::OnceLock;

use defuse_fs::{Errno, Result};

/// The error of a system call in the contract's type.
pub(crate) fn errno(error: rustix::io::Errno) -> Errno {
    Errno::from_raw(error.raw_os_error())
}

/// True if a server may run while a thread of this process polls for its reply. A control group may
/// permit less time than the processors have: a check takes fifteen system calls, and late replies
/// also reveal it.
pub(crate) fn has_several_processors() -> bool {
    static SEVERAL: OnceLock<bool> = OnceLock::new();
    *SEVERAL.get_or_init(|| {
        rustix::thread::sched_getaffinity(None).map_or(true, |processors| processors.count() > 1)
    })
}

/// The user at the other end of a connected socket (`SO_PEERCRED`, unix(7)). The function of rustix
/// cannot represent a process of another PID namespace.
pub(crate) fn peer_user(socket: impl AsFd) -> Result<u32> {
    let mut all = libc::ucred { pid: 0, uid: u32::MAX, gid: u32::MAX };
    let mut len = size_of_val(&all) as libc::socklen_t;
    // SAFETY: the kernel writes at most `len` bytes to `all`, which has that many and holds any
    // bytes, and the number of bytes to `len`.
    let rc = unsafe {
        libc::getsockopt(
            socket.as_fd().as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut all).cast(),
            &mut len,
        )
    };
    if rc == 0 { Ok(all.uid) } else { Err(std::io::Error::last_os_error().into()) }
}

/// Blocks all signals in the calling thread. The threads of this crate run in the process of a
/// program, whose handlers expect its own threads.
pub(crate) fn block_signals() {
    // SAFETY: all bytes of `sigset_t` may be zero; sigfillset writes the whole set, and the mask
    // that is changed is this thread's own.
    unsafe {
        let mut all: libc::sigset_t = std::mem::zeroed();
        libc::sigfillset(&raw mut all);
        libc::pthread_sigmask(libc::SIG_BLOCK, &raw const all, std::ptr::null_mut());
    }
}
