//! Signals that arrive while our own code runs wait until it is done.
//!
//! A handler may call anything that the kernel serves, read(2) and open(2) among it, also while it
//! interrupts such a call. So the handlers of the program are called by one of ours. Where it
//! interrupts our code it takes a note, blocks all signals for the interrupted thread, and returns;
//! at the end of our code the signal is sent again, with all that came with it. The usual way costs
//! nothing but a look at a variable of the thread.

use std::cell::{Cell, UnsafeCell};
use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicU64, Ordering};

use defuse_fs::Errno;

use crate::catch::{delivery, dispatch, entry, tls_block};
use crate::machine::{inside, sys};
use crate::serve::{Call, Fail, Served};

/// The kernel's structure: handler, flags, restorer, mask.
pub type Action = [u64; 4];

const SIGINFO: u64 = libc::SA_SIGINFO as u64;
const RESETHAND: u64 = libc::SA_RESETHAND as u64;

/// What the program asked for, by signal.
pub struct Wanted {
    /// Its handler, and what stands for none.
    pub handler: AtomicU64,
    flags: AtomicU64,
    restorer: AtomicU64,
    mask: AtomicU64,
}

impl Wanted {
    const fn nothing() -> Wanted {
        Wanted {
            handler: AtomicU64::new(0),
            flags: AtomicU64::new(0),
            restorer: AtomicU64::new(0),
            mask: AtomicU64::new(0),
        }
    }

    fn get(&self) -> Action {
        let rest = [&self.flags, &self.restorer, &self.mask].map(|it| it.load(Ordering::Relaxed));
        [self.handler.load(Ordering::Acquire), rest[0], rest[1], rest[2]]
    }

    fn set(&self, action: &Action) {
        self.flags.store(action[1], Ordering::Relaxed);
        self.restorer.store(action[2], Ordering::Relaxed);
        self.mask.store(action[3], Ordering::Relaxed);
        self.handler.store(action[0], Ordering::Release);
    }
}

/// By signal.
pub static WANTED: [Wanted; 65] = [const { Wanted::nothing() }; 65];

/// What the program asked for.
pub fn wanted(number: c_int) -> Action {
    WANTED[number as usize % WANTED.len()].get()
}

/// A signal that waits, with the signals that were blocked before.
struct Waiting {
    number: Cell<c_int>,
    mask: Cell<u64>,
    info: UnsafeCell<[u64; 16]>,
}

thread_local! {
    static WAITING: Waiting = const {
        Waiting { number: Cell::new(0), mask: Cell::new(0), info: UnsafeCell::new([0; 16]) }
    };
}

/// Whether a signal waits for the end of our code on this thread.
pub fn waits() -> bool {
    WAITING.with(|waiting| waiting.number.get() != 0)
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

/// Sends again what had to wait, and lets nothing in: who calls this sees to it.
pub fn send_waiting() {
    WAITING.with(|waiting| {
        if waiting.number.get() != 0 {
            queue(waiting);
        }
    });
}

/// Delivers what had to wait: on the way out of our code, once its stack is free.
pub extern "C" fn deliver_outside() {
    if !inside::is_inside() {
        deliver();
    }
}

/// Has this thread block what it blocked before a signal that waits, so that a program that is
/// executed now does; returns what undoes that, where the program is none.
pub fn unblock_for_exec() -> impl FnOnce() {
    let mask = waiting_mask(|mask| *mask);
    if let Some(mask) = mask {
        inside::change_mask(libc::SIG_SETMASK, mask);
    }
    move || {
        if mask.is_some() {
            inside::change_mask(libc::SIG_BLOCK, delivery::ALL);
        }
    }
}

/// Runs `change` on the mask that this thread has when what waits was delivered; `None` where nothing
/// waits.
pub fn waiting_mask<T>(change: impl FnOnce(&mut u64) -> T) -> Option<T> {
    WAITING.with(|waiting| {
        let mut mask = (waiting.number.get() != 0).then(|| waiting.mask.get())?;
        let result = change(&mut mask);
        waiting.mask.set(mask);
        Some(result)
    })
}

#[cold]
fn send_again(waiting: &Waiting) {
    // A handler of the program, on a stack of its own (`SA_ONSTACK`), would use ours once more, from its
    // beginning on.
    if entry::is_on_stack(std::ptr::from_ref(&waiting) as u64) {
        return;
    }
    queue(waiting);
    // The signal arrives before this returns.
    inside::change_mask(libc::SIG_SETMASK, waiting.mask.get());
}

fn queue(waiting: &Waiting) {
    let number = waiting.number.replace(0);
    if number == CANCEL && !tls_block::is_used() {
        // Its handler would end the thread here and now, by unwinding our own code. It only notes
        // that the thread is cancelled where that may wait until the next call: which the call that
        // is served here was, too.
        let mut before = 0;
        // SAFETY: both arguments are right, and nothing is unwound by this change.
        unsafe { pthread_setcanceltype(DEFERRED, &raw mut before) };
    }
    let number = number as u64;
    let (pid, tid) = (crate::process::state::pid() as u64, sys::plain(libc::SYS_gettid, 0, 0, 0));
    let tid = tid.unwrap_or(0) as u64;
    let args = [pid, tid, number, waiting.info.get() as u64, 0, 0];
    // SAFETY: the kernel copies the information; all signals are blocked, so nobody changes it.
    unsafe { sys::syscall(libc::SYS_rt_tgsigqueueinfo as u64, &args) };
}

/// rt_sigaction(2).
pub fn action(call: &Call<'_>) -> Served {
    let (number, new, old) = (call.int(0), call.args[1], call.args[2]);
    let Some(wanted) = usize::try_from(number).ok().and_then(|number| WANTED.get(number)) else {
        return Err(Fail::Pass);
    };
    let before = wanted.get();
    if dispatch::is_armed() && number == libc::SIGSYS {
        return action_of_sys(call, wanted, &before);
    }
    let mut args = *call.args;
    let mut ours: Action = [0; 4];
    if new != 0 {
        ours = sys::load::<Action>(new)?;
        if ours[0] > 1 {
            wanted.set(&ours);
            ours = our_action(&ours);
        }
        args[1] = &raw const ours as u64;
    }
    let value = sys::pass(call.number, &args);
    let _ = &ours;
    if value < 0 {
        wanted.set(&before);
    } else if old != 0 {
        let mut seen = sys::load::<Action>(old).map_err(|_| Errno::EFAULT)?;
        if seen[0] == handle as *const () as u64 {
            (seen[0], seen[1]) = (before[0], before[1]);
            sys::store(old, seen)?;
        } else if seen[0] == delivery::handler() {
            sys::store(old, before)?;
        }
    }
    Ok(value)
}

/// What the kernel is told where the program wants `wanted`, a handler.
fn our_action(wanted: &Action) -> Action {
    if dispatch::is_armed() {
        return delivery::action_of(wanted);
    }
    let flags = (wanted[1] | SIGINFO) & !RESETHAND;
    [handle as *const () as u64, flags, wanted[2], wanted[3]]
}

/// What the program asks for of the signal that calls are dispatched by is noted alone.
fn action_of_sys(call: &Call<'_>, wanted: &Wanted, before: &Action) -> Served {
    let [_, new, old, len, ..] = *call.args;
    if len != 8 {
        return Err(Errno::EINVAL.into());
    }
    if new != 0 {
        wanted.set(&sys::load::<Action>(new)?);
    }
    if old != 0 {
        sys::store(old, *before)?;
    }
    Ok(0)
}

/// A signal waits until our code is done: everything is blocked in `mask`, that of the interrupted
/// thread, until then.
pub fn note(number: c_int, info: *mut u64, mask: &mut u64) {
    WAITING.with(|waiting| {
        // SAFETY: the kernel passed 128 bytes about the signal. Until our code is done nothing else
        // comes, so that one place is enough.
        unsafe { std::ptr::copy_nonoverlapping(info, waiting.info.get().cast(), 16) };
        waiting.mask.set(*mask);
        *mask |= delivery::ALL;
        waiting.number.set(number);
    });
}

/// The handler of all signals that the program handles.
extern "C" fn handle(number: c_int, info: *mut u64, context: *mut c_void) {
    let wanted = &WANTED[number as usize % WANTED.len()];
    // What a thread does to itself cannot wait: it would do it again.
    let own = matches!(
        number,
        libc::SIGSEGV | libc::SIGBUS | libc::SIGILL | libc::SIGFPE | libc::SIGTRAP | libc::SIGSYS
    );
    let context: *mut libc::ucontext_t = context.cast();
    // SAFETY: the kernel passed the state of the interrupted thread.
    let sp = unsafe { (*context).uc_mcontext.gregs[libc::REG_RSP as usize] } as u64;
    if !own && (inside::is_inside() || entry::is_on_stack(sp)) {
        // SAFETY: as above; from there the kernel takes the blocked signals when the handler returns.
        let mask = unsafe { &mut *(&raw mut (*context).uc_sigmask).cast::<u64>() };
        note(number, info, mask);
        return;
    }
    if wanted.flags.load(Ordering::Relaxed) & RESETHAND != 0 {
        let none: Action = [0; 4];
        let args = [number as u64, &raw const none as u64, 0, 8, 0, 0];
        // SAFETY: the kernel reads the structure.
        unsafe { sys::syscall(libc::SYS_rt_sigaction as u64, &args) };
    }
    // SAFETY: the type of a handler with all arguments; one that takes fewer does not look at them.
    type Handler = unsafe extern "C" fn(c_int, *mut u64, *mut c_void);
    let handler = wanted.handler.load(Ordering::Acquire);
    // SAFETY: the program gave it to sigaction(2) as its handler for this signal.
    let handler = unsafe { std::mem::transmute::<u64, Handler>(handler) };
    // SAFETY: see above; the arguments are those of the kernel.
    unsafe { handler(number, info, context.cast()) };
}
