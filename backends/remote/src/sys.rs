//! System calls that rustix lacks, and the conversion of its errors.

use std::os::fd::{AsFd, AsRawFd};
use std::ptr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

use defuse_fs::{Errno, Result};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous};

/// The number of this process, in a page that the kernel empties in children; `None` if there is no such page.
static KEPT: OnceLock<Option<&'static AtomicU32>> = OnceLock::new();

/// The error of a system call in the contract's type.
pub(crate) fn errno(error: rustix::io::Errno) -> Errno {
    Errno::from_raw(error.raw_os_error())
}

/// True if a server may run while a thread of this process looks for its reply. A control group may permit less time than the
/// processors have: to ask that takes fifteen system calls, and replies that come late tell it, too.
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
    // SAFETY: the kernel writes at most `len` bytes to `all`, which has that many and holds any bytes,
    // and the number of bytes to `len`.
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
    // SAFETY: all bytes of `sigset_t` may be zero; sigfillset writes the whole set, and the mask that is
    // changed is this thread's own.
    unsafe {
        let mut all: libc::sigset_t = std::mem::zeroed();
        libc::sigfillset(&raw mut all);
        libc::pthread_sigmask(libc::SIG_BLOCK, &raw const all, std::ptr::null_mut());
    }
}

/// Keeps the number of this process for [`process_id`]. A child that shares its parent's memory must not call it.
pub(crate) fn keep_process_id() {
    if let Some(kept) = KEPT.get_or_init(emptied_in_children) {
        kept.store(std::process::id(), Ordering::Relaxed);
    }
}

/// The number of this process: without a system call after [`keep_process_id`]. A child that shares its parent's memory
/// has that of its parent.
#[inline]
pub(crate) fn process_id() -> u32 {
    match KEPT.get().copied().flatten().map_or(0, |kept| kept.load(Ordering::Relaxed)) {
        0 => std::process::id(),
        id => id,
    }
}

/// A word in a page that stays mapped, and is zero in each child that has a copy of the memory.
fn emptied_in_children() -> Option<&'static AtomicU32> {
    let len = rustix::param::page_size();
    let (prot, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE);
    // SAFETY: the kernel chooses where the new memory is, so that nothing else lies there.
    let page = unsafe { mmap_anonymous(ptr::null_mut(), len, prot, flags) }.ok()?;
    // SAFETY: the page was mapped just now, and nobody else knows it.
    if unsafe { madvise(page, len, Advice::LinuxWipeOnFork) }.is_err() {
        // SAFETY: as above.
        let _ = unsafe { rustix::mm::munmap(page, len) };
        return None;
    }
    // SAFETY: the page is never unmapped, is aligned to more than the word needs, and its zeros are a valid value. It is
    // reached through this reference alone, by atomic operations.
    Some(unsafe { &*page.cast::<AtomicU32>() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_child_is_not_taken_for_its_parent() {
        assert_eq!(process_id(), std::process::id());
        keep_process_id();
        assert_eq!(process_id(), std::process::id());
        // SAFETY: the child makes no calls but getpid(2) and _exit(2).
        let child = unsafe { libc::fork() };
        if child == 0 {
            let is_right = process_id() == std::process::id();
            // SAFETY: it ends the child without running anything of the parent.
            unsafe { libc::_exit(if is_right { 0 } else { 1 }) };
        }
        let mut status = -1;
        // SAFETY: the kernel writes the status to the variable.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert_eq!(status, 0);
        assert_eq!(process_id(), std::process::id());
    }
}
