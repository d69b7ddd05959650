//! The signal that ends a system call in which a worker is blocked.

use std::sync::Once;

use defuse_fs::Result;

/// `SIGURG`: ignored by default, so that one that arrives late does no harm, and used by runtimes
/// for the same purpose.
const WAKE_UP: libc::c_int = libc::SIGURG;

extern "C" fn nothing(_: libc::c_int) {}

/// Installs the handler, once per process. It does nothing; its presence without `SA_RESTART` makes
/// blocking system calls return EINTR (signal(7)).
pub(crate) fn install() -> Result<()> {
    static ONCE: Once = Once::new();
    let mut result = Ok(());
    ONCE.call_once(|| {
        // SAFETY: all bytes of `sigaction` may be zero (no flags, empty mask), and `nothing` is a
        // handler that touches nothing, so it is async-signal-safe.
        let rc = unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = nothing as extern "C" fn(libc::c_int) as usize;
            libc::sigaction(WAKE_UP, &action, std::ptr::null_mut())
        };
        if rc != 0 {
            result = Err(std::io::Error::last_os_error().into());
        }
    });
    result
}

/// Interrupts the blocking system call of the thread `thread` of this process, if it is in one.
pub(crate) fn wake(thread: i32) {
    // SAFETY: tgkill takes three numbers; a thread that has ended gives ESRCH, and the process id
    // makes sure that no other process can be meant.
    unsafe {
        libc::syscall(libc::SYS_tgkill, libc::getpid(), thread, WAKE_UP);
    }
}

/// The kernel's id of the calling thread.
pub(crate) fn own_thread_id() -> i32 {
    rustix::thread::gettid().as_raw_nonzero().get()
}
