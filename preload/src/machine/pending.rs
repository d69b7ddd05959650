//! The signal that waits for the end of our code on a thread.
//!
//! A handler of the program may call anything that the kernel serves. If a signal interrupts our
//! code, our handler notes it here ([`note`]), blocks all signals of the interrupted thread, and
//! returns. At the end of our code [`deliver`] sends the signal again, with all that came with it.
//! A call that no signal interrupts pays for one look at a variable of the thread.

use std::cell::{Cell, UnsafeCell};
use std::ffi::c_int;

use crate::machine::{mask, mode, pid, stack, sys};

/// A signal that waits, with the signals that were blocked before.
struct PendingSignal {
    number: Cell<c_int>,
    /// A call that it has interrupted is made again.
    restarts: Cell<bool>,
    mask: Cell<u64>,
    info: UnsafeCell<[u64; 16]>,
}

thread_local! {
    static WAITING: PendingSignal = const {
        PendingSignal {
            number: Cell::new(0),
            restarts: Cell::new(false),
            mask: Cell::new(0),
            info: UnsafeCell::new([0; 16]),
        }
    };
}

/// The result of a call that was not made, or not finished, because a signal waits: it is made
/// again after the signal was delivered. The kernel has the same number for that, which no program
/// sees (`ERESTARTSYS`).
pub const AGAIN: i64 = -512;

/// True if a signal waits for the end of our code on this thread.
pub fn waits() -> bool {
    WAITING.with(|waiting| waiting.number.get() != 0)
}

/// True if a call that the waiting signal has interrupted is made again after its handler
/// (`SA_RESTART`).
pub fn restarts() -> bool {
    WAITING.with(|waiting| waiting.number.get() != 0 && waiting.restarts.get())
}

/// True if the C library cancels this thread by the signal that waits (pthread_cancel(3)).
pub fn is_canceling() -> bool {
    WAITING.with(|waiting| waiting.number.get() == CANCEL)
}

/// The variable of this thread that is not 0 while a signal waits.
pub fn flag() -> *const c_int {
    WAITING.with(|waiting| waiting.number.as_ptr().cast_const())
}

/// Delivers what had to wait.
#[inline]
pub fn deliver() {
    WAITING.with(|waiting| {
        if waiting.number.get() != 0 {
            send_again(waiting);
        }
    });
}

// SAFETY: as the C library exports it.
unsafe extern "C" {
    fn pthread_setcanceltype(kind: c_int, before: *mut c_int) -> c_int;
}

/// The signal by which the C library cancels a thread in a call that waits.
const CANCEL: c_int = 32;
const DEFERRED: c_int = 0;

/// Sends the waiting signal again. The caller keeps all signals blocked.
pub fn send_waiting() {
    WAITING.with(|waiting| {
        if waiting.number.get() != 0 {
            queue(waiting);
        }
    });
}

/// Has this thread get a signal at the end of our code, as if what it did there had raised it: a
/// program that blocks or ignores the signal ends.
#[cold]
pub fn raise(number: c_int, code: i32, address: u64) {
    let bit = 1u64 << (number - 1);
    let mut before = mask::change(libc::SIG_BLOCK, mask::CAN_WAIT | bit);
    let mut action = [0u64; 4];
    let args = [number as u64, 0, action.as_mut_ptr() as u64, 8, 0, 0];
    // SAFETY: the kernel fills the structure.
    unsafe { sys::syscall(libc::SYS_rt_sigaction as u64, &args) };
    if waits() {
        // All signals are blocked until then, and come one after the other.
        before = change_waiting_mask(|mask| *mask).unwrap_or(before);
    }
    if action[0] == libc::SIG_IGN as u64 || before & bit != 0 {
        let none = [0u64; 4];
        let args = [number as u64, none.as_ptr() as u64, 0, 8, 0, 0];
        // SAFETY: the kernel reads the structure.
        unsafe { sys::syscall(libc::SYS_rt_sigaction as u64, &args) };
        before &= !bit;
    }
    let info =
        [number as u32 as u64, code as u32 as u64, address, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    WAITING.with(|waiting| {
        if waits() {
            waiting.mask.set(before);
            send(number, info.as_ptr());
            return;
        }
        // SAFETY: the memory is this thread's, and no signal comes.
        unsafe { waiting.info.get().write(info) };
        waiting.mask.set(before);
        waiting.restarts.set(true);
        waiting.number.set(number);
    });
}

/// Has this thread block what it blocked before a signal that waits, so that a program that is
/// executed now does; returns what undoes that, where the program is none.
pub fn unblock_for_exec() -> impl FnOnce() {
    let mask = change_waiting_mask(|mask| *mask);
    if let Some(mask) = mask {
        mask::change(libc::SIG_SETMASK, mask);
    }
    move || {
        if mask.is_some() {
            mask::change(libc::SIG_BLOCK, mask::CAN_WAIT);
        }
    }
}

/// Runs `change` on the mask that this thread has when what waits was delivered; `None` if nothing
/// waits.
pub fn change_waiting_mask<T>(change: impl FnOnce(&mut u64) -> T) -> Option<T> {
    WAITING.with(|waiting| {
        let mut mask = (waiting.number.get() != 0).then(|| waiting.mask.get())?;
        let result = change(&mut mask);
        waiting.mask.set(mask);
        Some(result)
    })
}

#[cold]
fn send_again(waiting: &PendingSignal) {
    // A handler of the program, on a stack of its own (`SA_ONSTACK`), would use ours once more,
    // from its beginning on.
    if stack::holds(std::ptr::from_ref(&waiting) as u64) {
        return;
    }
    queue(waiting);
    // The signal arrives before this returns.
    mask::change(libc::SIG_SETMASK, waiting.mask.get());
}

fn queue(waiting: &PendingSignal) {
    let number = waiting.number.replace(0);
    if number == CANCEL && !mode::is_static() {
        // Its handler would end the thread here and now, by unwinding our own code. It only notes
        // that the thread is cancelled where that may wait until the next call: which the call that
        // is served here was, too.
        let mut before = 0;
        // SAFETY: both arguments are right, and nothing is unwound by this change.
        unsafe { pthread_setcanceltype(DEFERRED, &raw mut before) };
    }
    send(number, waiting.info.get().cast());
}

/// Sends a signal to this thread, with what came with it.
fn send(number: c_int, info: *const u64) {
    let (pid, tid) = (pid::read_pid() as u64, sys::plain(libc::SYS_gettid, 0, 0, 0));
    let args = [pid, tid.unwrap_or(0) as u64, number as u64, info as u64, 0, 0];
    // SAFETY: the kernel copies the information; all signals are blocked, so no handler changes it.
    unsafe { sys::syscall(libc::SYS_rt_tgsigqueueinfo as u64, &args) };
}

/// Makes a signal wait until our code is done. Until then `mask`, the mask of the interrupted
/// thread, blocks every signal. The handler restarts a call that it interrupts, if it `restarts`.
pub fn note(number: c_int, info: *mut u64, mask: &mut u64, restarts: bool) {
    WAITING.with(|waiting| {
        // SAFETY: the kernel passed 128 bytes about the signal. Until our code is done nothing else
        // comes, so that one place is enough.
        unsafe { std::ptr::copy_nonoverlapping(info, waiting.info.get().cast(), 16) };
        waiting.mask.set(*mask);
        *mask |= mask::CAN_WAIT;
        // A thread that is cancelled does not go on with what it waits for.
        waiting.restarts.set(restarts && number != CANCEL);
        waiting.number.set(number);
    });
}
