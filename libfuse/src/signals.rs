//! `fuse_set_signal_handlers`: signals that end the loop.

use std::ffi::{c_int, c_void};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};

use crate::handle::end_by_signal;
use crate::logging::error;

/// The handle or session that signals end, or null.
static HANDLE: AtomicPtr<c_void> = AtomicPtr::new(null_mut());

/// Handlers that read `HANDLE` at this moment.
static READERS: AtomicUsize = AtomicUsize::new(0);

/// The signals that end the loop.
const ENDING: [c_int; 3] = [libc::SIGHUP, libc::SIGINT, libc::SIGTERM];

extern "C" fn end(signal: c_int) {
    READERS.fetch_add(1, Ordering::SeqCst);
    let handle = HANDLE.load(Ordering::SeqCst);
    if !handle.is_null() {
        // SAFETY: `fuse_remove_signal_handlers`, which comes before the handle is destroyed, waits
        // for the readers. It makes system calls only, which signal-safety(7) lists.
        unsafe { end_by_signal(handle, signal) };
    }
    READERS.fetch_sub(1, Ordering::SeqCst);
}

/// Lets SIGHUP, SIGINT and SIGTERM end the loop of the handle, and ignores SIGPIPE, where the
/// program has not decided otherwise. Returns -1 on an error, which was printed.
///
/// # Safety
///
/// `handle` is a handle or a session until [`fuse_remove_signal_handlers`].
pub unsafe extern "C" fn fuse_set_signal_handlers(handle: *mut c_void) -> c_int {
    let handlers = ENDING.map(|signal| (signal, end as extern "C" fn(c_int) as usize));
    for (signal, handler) in handlers.into_iter().chain([(libc::SIGPIPE, libc::SIG_IGN)]) {
        if exchange(signal, libc::SIG_DFL, handler).is_err() {
            error("fuse: cannot set signal handler");
            return -1;
        }
    }
    HANDLE.store(handle, Ordering::SeqCst);
    0
}

/// Takes back what [`fuse_set_signal_handlers`] has set.
///
/// # Safety
///
/// No condition; the argument is not used.
pub unsafe extern "C" fn fuse_remove_signal_handlers(_handle: *mut c_void) {
    HANDLE.store(null_mut(), Ordering::SeqCst);
    for signal in ENDING {
        let _ = exchange(signal, end as extern "C" fn(c_int) as usize, libc::SIG_DFL);
    }
    let _ = exchange(libc::SIGPIPE, libc::SIG_IGN, libc::SIG_DFL);
    while READERS.load(Ordering::SeqCst) > 0 {
        std::thread::yield_now();
    }
}

/// Sets the handler of a signal where the present one is `old`.
fn exchange(signal: c_int, old: usize, new: usize) -> Result<(), ()> {
    // SAFETY: all bytes of `sigaction` may be zero (no flags, empty mask), and the handlers are
    // those above, or the system's.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        if libc::sigaction(signal, null_mut(), &mut action) != 0 {
            return Err(());
        }
        if action.sa_sigaction != old {
            return Ok(());
        }
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = new;
        if libc::sigaction(signal, &action, null_mut()) == 0 { Ok(()) } else { Err(()) }
    }
}
