//! How signals reach a program whose calls are dispatched.
//!
//! The kernel puts the frame of every signal that the program handles onto this thread's stack for
//! our code, which it knows as the alternate one, and blocks all others. From there the frame goes
//! where the program wants it: to its own alternate stack, of which the kernel does not know, or to
//! the stack that was interrupted; the mask is then the program's own, and its handler begins as if
//! the kernel had called it. Where the signal has interrupted our code, it waits as ever
//! ([`crate::catch::signals`]).
//!
//! `SIGSYS` is never blocked and never ignored as far as the kernel is concerned: a call that is
//! dispatched meanwhile would end the program. This module notes the state of `SIGSYS` in which the
//! program believes. So all masks that a program gives to the kernel go through here, without
//! `SIGSYS`.

use std::sync::atomic::Ordering;

use defuse_fs::Errno;

use crate::catch::frame::{FRAME, HandlerRegisters, LINK, MASK, SignalContext};
use crate::catch::signal_actions::{KernelAction, WANTED, program_action};
use crate::catch::{dispatch, program_point, signal_state};
use crate::machine::{inside, mask, mode, pending, pid, stack, sys, wait};

/// The thread continues as the frame on the current stack specifies.
const RETURN: u64 = 0;
/// The handler of the program begins.
const HANDLE: u64 = 1;

std::arch::global_asm!(
    ".globl defuse_signal",
    ".hidden defuse_signal",
    "defuse_signal:",
    "mov rbx, rsp",
    "and rsp, -16",
    "sub rsp, {leave}",
    "lea rax, [rbx + 8]",
    "mov [rsp], rax",
    "cmp byte ptr [rip + {is_static}], 0",
    "je 2f",
    "rdfsbase rax",
    "mov [rsp + 8], rax",
    "mov rax, gs:[0]",
    "wrfsbase rax",
    "2:",
    "mov rcx, rsp",
    "cld",
    "call {decide}",
    "mov rbp, rsp",
    "cmp byte ptr [rip + {is_static}], 0",
    "je 2f",
    "mov rcx, [rbp + 8]",
    "wrfsbase rcx",
    "2:",
    "mov rsp, [rbp]",
    "test eax, eax",
    "jz defuse_return",
    // On the program's stack, and nothing of ours is in use: now other signals may come.
    "mov rbx, [rbp + 16]",
    "mov r12, [rbp + 24]",
    "mov r13, [rbp + 32]",
    "mov r14, [rbp + 40]",
    "mov rsi, [rbp + 48]",
    "mov edi, {set_mask}",
    "xor edx, edx",
    "mov r10d, 8",
    "mov eax, {sigprocmask}",
    "syscall",
    "mov rdi, r12",
    "mov rsi, r13",
    "mov rdx, r14",
    "xor eax, eax",
    "jmp rbx",
    // Where handlers return to. The mask that a handler has left in its frame may block SIGSYS.
    ".globl defuse_return",
    ".hidden defuse_return",
    "defuse_return:",
    "btr qword ptr [rsp + {mask}], {sys}",
    "mov eax, {sigreturn}",
    "syscall",
    leave = const size_of::<HandlerRegisters>().next_multiple_of(16),
    decide = sym decide,
    is_static = sym mode::STATIC,
    set_mask = const libc::SIG_SETMASK,
    sigprocmask = const libc::SYS_rt_sigprocmask,
    sigreturn = const libc::SYS_rt_sigreturn,
    mask = const MASK,
    sys = const libc::SIGSYS - 1,
);

// SAFETY: defined above; only their addresses are taken here.
unsafe extern "C" {
    fn defuse_signal();
    fn defuse_return();
}

/// The address of our handler, which the kernel has in place of the program's.
pub fn handler() -> u64 {
    defuse_signal as *const () as u64
}

/// Installs our handler of `SIGSYS`.
pub fn begin() -> bool {
    let flags = libc::SA_SIGINFO | libc::SA_ONSTACK | libc::SA_NODEFER | RESTORER;
    set_action(
        libc::SIGSYS,
        [handler(), flags as u64, defuse_return as *const () as u64, mask::CAN_WAIT],
    )
    .is_ok()
}

const RESTORER: i32 = 0x0400_0000;

fn set_action(number: i32, action: KernelAction) -> Result<i64, Errno> {
    let args = [number as u64, action.as_ptr() as u64, 0, 8, 0, 0];
    // SAFETY: the kernel reads the structure; the handler is ours, or none.
    sys::check(unsafe { sys::syscall(libc::SYS_rt_sigaction as u64, &args) })
}

/// The action for the kernel where the program wants `wanted`.
pub fn action_of(wanted: &KernelAction) -> KernelAction {
    const KEPT: i32 = libc::SA_RESTART | libc::SA_NOCLDSTOP | libc::SA_NOCLDWAIT;
    let flags = libc::SA_SIGINFO | libc::SA_ONSTACK | RESTORER;
    let flags = wanted[1] & KEPT as u64 | flags as u64;
    [handler(), flags, defuse_return as *const () as u64, mask::CAN_WAIT]
}

/// Decides what happens with a signal.
extern "C" fn decide(
    number: i32,
    info: *mut u64,
    context: *mut u64,
    leave: &mut HandlerRegisters,
) -> u64 {
    let mut context = SignalContext(context);
    // SAFETY: the kernel's record begins with number, errno and code.
    let code = unsafe { info.cast::<i32>().add(2).read() };
    if dispatch::is_dispatched(number, code) {
        // SAFETY: the record of a dispatched call has the architecture, `si_arch`, as its eighth
        // number.
        match unsafe { info.cast::<u32>().add(7).read() } {
            dispatch::X86_64 => dispatch::serve(&mut context, leave),
            _ => dispatch::refuse(&mut context),
        }
        pending::send_waiting();
        return RETURN;
    }
    let is_ours = inside::is_inside() || stack::holds(context.sp());
    if is_ours && mask::OWN >> (number - 1) & 1 == 0 {
        let restarts = program_action(number)[1] & libc::SA_RESTART as u64 != 0;
        pending::note(number, info, context.mask(), restarts);
        if let Some(behind) = wait::find_resume_point(context.ip()) {
            context.set_ip(behind);
        }
        return RETURN;
    }
    let wanted = program_action(number);
    match wanted[0] {
        // SIGSYS of another origin, which the program does not handle.
        DEFAULT if number == libc::SIGSYS => end_by(number),
        DEFAULT | IGNORE => RETURN,
        _ => {
            if wanted[1] & libc::SA_RESETHAND as u64 != 0 {
                WANTED[number as usize].handler.store(DEFAULT, Ordering::Release);
                if number != libc::SIGSYS {
                    let _ = set_action(number, [DEFAULT, 0, 0, 0]);
                }
            }
            program_point::leave_call(&mut context);
            place_frame(number, info, &mut context, &wanted, leave);
            HANDLE
        }
    }
}

const DEFAULT: u64 = 0;
const IGNORE: u64 = 1;

/// Ends the program as a signal does that it does not handle.
fn end_by(number: i32) -> u64 {
    let _ = set_action(number, [DEFAULT, 0, 0, 0]);
    let tid = sys::plain(libc::SYS_gettid, 0, 0, 0).unwrap_or(0) as u64;
    let pid = pid::read_pid() as u64;
    let _ = sys::plain(libc::SYS_tgkill, pid, tid, number as u64);
    RETURN
}

/// Moves the frame to where the program wants it, and puts the handler into `leave`.
fn place_frame(
    number: i32,
    info: *mut u64,
    context: &mut SignalContext,
    wanted: &KernelAction,
    leave: &mut HandlerRegisters,
) {
    let old = context.0 as u64 - 8;
    let is_sys_blocked = signal_state::is_sys_blocked();
    let deferred = if wanted[1] & libc::SA_NODEFER as u64 != 0 { 0 } else { 1 << (number - 1) };
    let mask = (*context.mask() | wanted[3] | deferred) & !mask::SYS;
    let frame = match stack::holds(old) {
        true => move_frame(context, wanted[1]),
        // The thread is about to end, and the kernel knows no stack of ours any more.
        false => old,
    };
    // SAFETY: the frame is where the program's handler is to find it; where the kernel keeps the
    // address of the next record there is room.
    unsafe {
        ((frame + 8 + LINK as u64) as *mut u64).write(mask);
        if is_sys_blocked {
            // The handler sees what the program believes.
            let seen = (frame + 8 + MASK as u64) as *mut u64;
            seen.write(seen.read() | mask::SYS);
        }
    }
    let _ = info;
    *leave = HandlerRegisters {
        sp: frame,
        fs: leave.fs,
        handler: wanted[0],
        number: number as u64,
        info: frame + FRAME as u64 - 128,
        context: frame + 8,
        mask: frame + 8 + LINK as u64,
    };
}

/// Copies a frame from our stack to that which the program wants its handler to run on; returns
/// where it is.
fn move_frame(context: &mut SignalContext, wanted_flags: u64) -> u64 {
    let (sp, [from, flags, len]) = (context.sp(), signal_state::alternate_stack());
    let has_other =
        wanted_flags & libc::SA_ONSTACK as u64 != 0 && flags & libc::SS_DISABLE as u64 == 0;
    let is_there = (from..from + len).contains(&sp);
    let top = if has_other && !is_there { from + len } else { sp - 128 };
    context.copy(top)
}
