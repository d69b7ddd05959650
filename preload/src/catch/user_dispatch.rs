//! Syscall user dispatch of a thread, on and off, prctl(2).

use std::sync::atomic::{AtomicU64, Ordering};

use crate::catch::signal_state;
use crate::machine::{mode, stack, sys};

// prctl(2).
const SET_DISPATCH: u64 = 59;
const DISPATCH_OFF: u64 = 0;
const DISPATCH_ON: u64 = 1;

/// The code of this library: first address and length.
static OWN: [AtomicU64; 2] = [const { AtomicU64::new(0) }; 2];

/// Dispatches all system calls that this thread makes outside of this library, and the calls of all
/// threads and processes that it creates. False if the kernel cannot.
///
/// `own_code` is the code of this library, first and last (exclusive) address; `take_sys` installs
/// the handler of `SIGSYS`.
pub fn begin(own_code: (u64, u64), take_sys: impl FnOnce() -> bool) -> bool {
    let (from, end) = own_code;
    OWN[0].store(from, Ordering::Relaxed);
    OWN[1].store(end - from, Ordering::Relaxed);
    if !take_sys() {
        return false;
    }
    mode::set_dispatched(true);
    let is_armed = arm();
    if is_armed {
        let _ = stack::BEFORE_DROP.set(disarm);
    } else {
        mode::set_dispatched(false);
    }
    is_armed
}

/// Has the calls of a new thread dispatched.
pub fn arm() -> bool {
    signal_state::arm() && rearm()
}

/// Has the calls of a child dispatched, which has its parent's stacks.
pub fn rearm() -> bool {
    let [from, len] = OWN.each_ref().map(|word| word.load(Ordering::Relaxed));
    let args = [SET_DISPATCH, DISPATCH_ON, from, len, 0, 0];
    // SAFETY: the range is our own code; the handler is there.
    sys::check(unsafe { sys::syscall(libc::SYS_prctl as u64, &args) }).is_ok()
}

/// Ends the dispatch of this thread's calls: it is about to end, and its stack for our code goes.
pub fn disarm() {
    let args = [SET_DISPATCH, DISPATCH_OFF, 0, 0, 0, 0];
    // SAFETY: the call takes no addresses.
    let _ = unsafe { sys::syscall(libc::SYS_prctl as u64, &args) };
    signal_state::disarm();
}
