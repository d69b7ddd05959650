//! The signal that ends a thread's wait for a request.

use std::ptr::null_mut;

/// Ignored by default, so that one that arrives late does no harm.
const WAKE_UP: libc::c_int = libc::SIGURG;

extern "C" fn nothing(_: libc::c_int) {}

/// Gives the signal a handler that does nothing, unless the program has one: its presence ends a
/// blocking system call (signal(7)).
pub(crate) fn install() {
    // SAFETY: all bytes of `sigaction` may be zero (no flags, empty mask), and the handler touches
    // nothing.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        if libc::sigaction(WAKE_UP, null_mut(), &mut action) != 0
            || !matches!(action.sa_sigaction, libc::SIG_DFL | libc::SIG_IGN)
        {
            return;
        }
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = nothing as extern "C" fn(libc::c_int) as usize;
        libc::sigaction(WAKE_UP, &action, null_mut());
    }
}

/// Ends the blocking system call of a thread of this process.
pub(crate) fn wake(thread: i32) {
    // SAFETY: tgkill takes three numbers; a thread that has ended gives ESRCH.
    unsafe {
        libc::syscall(libc::SYS_tgkill, libc::getpid(), thread, WAKE_UP);
    }
}

/// The signals of the process that a thread leaves to the one that has called the loop, while a
/// value of this type lives.
pub(crate) struct SignalMask(libc::sigset_t);

impl SignalMask {
    /// Blocks the signals that end programs in the calling thread, and in those that it starts.
    pub(crate) fn block() -> SignalMask {
        // SAFETY: the sets are initialised by sigemptyset, and the mask is this thread's own.
        unsafe {
            let mut set: libc::sigset_t = std::mem::zeroed();
            let mut old: libc::sigset_t = std::mem::zeroed();
            libc::sigemptyset(&mut set);
            for signal in [libc::SIGTERM, libc::SIGINT, libc::SIGHUP, libc::SIGQUIT] {
                libc::sigaddset(&mut set, signal);
            }
            libc::pthread_sigmask(libc::SIG_BLOCK, &set, &mut old);
            SignalMask(old)
        }
    }
}

impl Drop for SignalMask {
    fn drop(&mut self) {
        // SAFETY: the set was filled by `block`, for this thread.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &self.0, null_mut()) };
    }
}
