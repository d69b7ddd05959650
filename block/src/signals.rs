//! Signals and the threads of this crate.

/// Blocks all signals on the calling thread: a program expects its handlers on threads of its own,
/// and its masks to decide about all threads.
pub fn take_none() {
    // SAFETY: all bytes of `sigset_t` may be zero; sigfillset writes the whole set, and the mask
    // that is changed is this thread's own.
    unsafe {
        let mut all: libc::sigset_t = std::mem::zeroed();
        libc::sigfillset(&raw mut all);
        libc::pthread_sigmask(libc::SIG_BLOCK, &raw const all, std::ptr::null_mut());
    }
}
