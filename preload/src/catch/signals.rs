//! Signals that arrive while our own code runs wait until it is done.
//!
//! A handler may call anything that the kernel serves, read(2) and open(2) among it, also while it
//! interrupts such a call. So the handlers of the program are called by one of ours. Where it
//! interrupts our code it takes a note, blocks all signals for the interrupted thread, and returns;
//! at the end of our code the signal is sent again, with all that came with it. The usual way costs
//! nothing but a look at a variable of the thread.

use std::ffi::{c_int, c_void};
use std::sync::atomic::Ordering;

use defuse_fs::Errno;
use defuse_preload_plan::trampoline::ProgramPoint;

use crate::catch::frame::SignalContext;
use crate::catch::signal_actions::{KernelAction, ProgramAction, WANTED};
use crate::catch::{delivery, program_point};
use crate::machine::{inside, mode, pending, stack, sys, wait};
use crate::serve::call::{CallFailure, CallResult, ProgramCall};

const SIGINFO: u64 = libc::SA_SIGINFO as u64;
const RESTART: u64 = libc::SA_RESTART as u64;
const RESETHAND: u64 = libc::SA_RESETHAND as u64;

/// rt_sigaction(2).
pub fn action(call: &ProgramCall<'_>) -> CallResult {
    let (number, new, old) = (call.int(0), call.args[1], call.args[2]);
    let Some(wanted) = usize::try_from(number).ok().and_then(|number| WANTED.get(number)) else {
        return Err(CallFailure::Pass);
    };
    let before = wanted.get();
    if mode::is_dispatched() && number == libc::SIGSYS {
        return action_of_sys(call, wanted, &before);
    }
    let mut args = *call.args;
    let mut ours: KernelAction = [0; 4];
    if new != 0 {
        ours = sys::load::<KernelAction>(new)?;
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
        let mut seen = sys::load::<KernelAction>(old).map_err(|_| Errno::EFAULT)?;
        if seen[0] == handle as *const () as u64 {
            (seen[0], seen[1]) = (before[0], before[1]);
            sys::store(old, seen)?;
        } else if seen[0] == delivery::handler() {
            sys::store(old, before)?;
        }
    }
    Ok(value)
}

/// Gives all signals that the program handles their default action, as `CLONE_CLEAR_SIGHAND` does.
/// The kernel would also take the handler of `SIGSYS`, by which calls are dispatched.
pub fn clear_actions() {
    let default: KernelAction = [0; 4];
    for (number, wanted) in WANTED.iter().enumerate() {
        if wanted.handler.load(Ordering::Acquire) > 1 {
            if number != libc::SIGSYS as usize {
                let args = [number as u64, &raw const default as u64, 0, 8, 0, 0];
                let _ = sys::pass(libc::SYS_rt_sigaction as u64, &args);
            }
            wanted.set(&default);
        }
    }
}

/// The action for the kernel if the program wants `wanted`, a handler.
fn our_action(wanted: &KernelAction) -> KernelAction {
    if mode::is_dispatched() {
        return delivery::action_of(wanted);
    }
    let flags = (wanted[1] | SIGINFO) & !RESETHAND;
    [handle as *const () as u64, flags, wanted[2], wanted[3]]
}

/// rt_sigaction(2) of `SIGSYS`, by which calls are dispatched: the action is only noted.
fn action_of_sys(
    call: &ProgramCall<'_>,
    wanted: &ProgramAction,
    before: &KernelAction,
) -> CallResult {
    let [_, new, old, len, ..] = *call.args;
    if len != 8 {
        return Err(Errno::EINVAL.into());
    }
    if new != 0 {
        wanted.set(&sys::load::<KernelAction>(new)?);
    }
    if old != 0 {
        sys::store(old, *before)?;
    }
    Ok(0)
}

/// The handler of all signals that the program handles.
extern "C" fn handle(number: c_int, info: *mut u64, context: *mut c_void) {
    let wanted = &WANTED[number as usize % WANTED.len()];
    // A signal that a thread raises by its own instruction cannot wait: the instruction would raise
    // it again.
    let own = matches!(
        number,
        libc::SIGSEGV | libc::SIGBUS | libc::SIGILL | libc::SIGFPE | libc::SIGTRAP | libc::SIGSYS
    );
    let context: *mut libc::ucontext_t = context.cast();
    // SAFETY: the kernel passed the state of the interrupted thread.
    let sp = unsafe { (*context).uc_mcontext.gregs[libc::REG_RSP as usize] } as u64;
    if !own && (inside::is_inside() || stack::holds(sp)) {
        // SAFETY: as above; from there the kernel takes the blocked signals when the handler
        // returns.
        let mask = unsafe { &mut *(&raw mut (*context).uc_sigmask).cast::<u64>() };
        let restarts = wanted.flags.load(Ordering::Relaxed) & RESTART != 0;
        pending::note(number, info, mask, restarts);
        // SAFETY: as above; the thread goes on there.
        let ip = unsafe { &mut (*context).uc_mcontext.gregs[libc::REG_RIP as usize] };
        if let Some(behind) = wait::find_resume_point(*ip as u64) {
            *ip = behind as i64;
        }
        return;
    }
    if wanted.flags.load(Ordering::Relaxed) & RESETHAND != 0 {
        let none: KernelAction = [0; 4];
        let args = [number as u64, &raw const none as u64, 0, 8, 0, 0];
        // SAFETY: the kernel reads the structure.
        unsafe { sys::syscall(libc::SYS_rt_sigaction as u64, &args) };
    }
    // SAFETY: the type of a handler with all arguments; one that takes fewer does not look at them.
    type SignalHandler = unsafe extern "C" fn(c_int, *mut u64, *mut c_void);
    let handler = wanted.handler.load(Ordering::Acquire);
    // SAFETY: the program gave it to sigaction(2) as its handler for this signal.
    let handler = unsafe { std::mem::transmute::<u64, SignalHandler>(handler) };
    let mut interrupted = SignalContext(context.cast());
    let there = program_point::show(&mut interrupted);
    let shown = ProgramPoint { ip: interrupted.ip(), sp: interrupted.sp() };
    // SAFETY: see above; the kernel passed the arguments.
    unsafe { handler(number, info, context.cast()) };
    if let Some(there) = there {
        program_point::restore(&mut interrupted, shown, there);
    }
}
