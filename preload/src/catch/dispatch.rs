//! System calls that are made without the C library: the kernel sends them back, as signals.
//!
//! Syscall user dispatch (Linux 5.11, `Documentation/admin-guide/syscall-user-dispatch.rst`) turns
//! every `syscall` instruction outside of one range of addresses into a `SIGSYS`. The range is the
//! code of this library, so that nothing escapes: all sites of the C library are patched, file or
//! not, and what they pass on is executed by the entry itself; everything else (code of the
//! program, of libraries that came later, of the loader, made while the program runs) comes here.
//! No selector is needed then, and no code can forget to change it.
//!
//! The handler runs on this thread's stack for our code, which the kernel knows as the alternate
//! one: the program's stack may be a few hundred bytes. The results of a call are:
//!
//! - *served*: the result is put into the registers of the interrupted thread.
//! - *passed*: the thread goes on in a stub of ours, on its own stack and with its own registers,
//!   which executes the instruction and goes back: so it blocks, restarts and is interrupted as
//!   without us.
//! - *a process*: both processes return from the handler, each by its own copy of the stack.
//! - *a thread*: it begins in our code, is dispatched as well, and goes on where its maker does.
//!
//! All signals wait while the handler runs ([`crate::catch::delivery`]), but for calls that may
//! take long.

use defuse_fs::Errno;
use defuse_preload_plan::layout::OnceMessage;

use crate::catch::frame::{HandlerRegisters, SignalContext};
use crate::catch::{signal_state, tls_block, user_dispatch};
use crate::machine::inside::{self, InsideGuard};
use crate::machine::message::write_line;
use crate::machine::{mode, pending, stack, sys};
use crate::process::{fork, state};
use crate::serve;

/// `si_code` of a call that was dispatched.
const SYS_USER_DISPATCH: i32 = 2;

/// Bytes of the program's stack that a passed call needs: the red zone, and the address to return
/// to.
const PASSED: u64 = 128 + 8;
/// The bytes if arguments are exchanged: also six registers, a mask, and an address with a length.
const EXCHANGED: u64 = 128 + 8 + 6 * 8 + 3 * 8;

std::arch::global_asm!(
    // The thread has made room on its stack, with the address to go back to.
    ".globl defuse_pass",
    ".hidden defuse_pass",
    "defuse_pass:",
    "syscall",
    "ret {after_passed}",
    // A call with arguments that are not the program's: the registers are restored afterwards.
    ".globl defuse_pass_exchanged",
    ".hidden defuse_pass_exchanged",
    "defuse_pass_exchanged:",
    "syscall",
    "mov rdi, [rsp + 8]",
    "mov rsi, [rsp + 16]",
    "mov rdx, [rsp + 24]",
    "mov r10, [rsp + 32]",
    "mov r8, [rsp + 40]",
    "mov r9, [rsp + 48]",
    "ret {after_exchanged}",
    // A clone(2) that shares memory: the other one has a stack of its own, with the address to go
    // on at below its end.
    ".globl defuse_pass_clone",
    ".hidden defuse_pass_clone",
    "defuse_pass_clone:",
    "syscall",
    "test rax, rax",
    "jz 2f",
    "ret {after_passed}",
    "2:",
    "jmp qword ptr [rsp - 8]",
    // A thread begins, on its own stack: below its end is where it goes on.
    ".globl defuse_begin_thread",
    ".hidden defuse_begin_thread",
    "defuse_begin_thread:",
    "lea rsp, [rsp - 8]",
    "push rdi",
    "push rsi",
    "push rdx",
    "push r10",
    "push r8",
    "push r9",
    "push rbp",
    "mov rbp, rsp",
    "and rsp, -16",
    "cld",
    "call {begin_thread}",
    "mov rsp, rbp",
    "pop rbp",
    "pop r9",
    "pop r8",
    "pop r10",
    "pop rdx",
    "pop rsi",
    "pop rdi",
    "xor eax, eax",
    "lea rsp, [rsp + 8]",
    "jmp qword ptr [rsp - 8]",
    after_passed = const PASSED - 8,
    after_exchanged = const EXCHANGED - 8,
    begin_thread = sym begin_thread,
);

// SAFETY: defined above; only their addresses are taken here.
unsafe extern "C" {
    fn defuse_pass();
    fn defuse_pass_exchanged();
    fn defuse_pass_clone();
}

extern "C" fn begin_thread() {
    // One that our own code makes for a moment has the variables of its maker, which waits for it.
    if !inside::is_inside() {
        user_dispatch::arm();
    }
}

/// True if a signal is a dispatched call.
pub fn is_dispatched(number: i32, code: i32) -> bool {
    number == libc::SIGSYS && code == SYS_USER_DISPATCH
}

/// `AUDIT_ARCH_X86_64` of audit.h.
pub const X86_64: u32 = 0xc000_003e;

/// A call of 32 bits (`int 0x80`), whose numbers are others: it fails with `ENOSYS`.
pub fn refuse(context: &mut SignalContext) {
    if let (Some(process), Some(_inside)) = (state::get(), InsideGuard::enter())
        && process.shared.is_news(OnceMessage::Calls32)
    {
        write_line("system calls of 32 bits (int 0x80) are not served: they fail with ENOSYS");
    }
    context.set_result(sys::failure(Errno::ENOSYS));
}

/// The number of clone(2), by which fork(2) is served.
const CLONE: u64 = libc::SYS_clone as u64;
const FORK: u64 = libc::SIGCHLD as u64;
const VFORK: u64 = (libc::CLONE_VM | libc::CLONE_VFORK | libc::SIGCHLD) as u64;

/// Serves a dispatched call, and sets how the interrupted thread continues.
pub fn serve(context: &mut SignalContext, leave: &mut HandlerRegisters) {
    let (number, args) = (context.number(), context.args());
    if stack::holds(context.sp()) {
        // Our own code, by a function of the C library.
        context.set_result(sys::pass(number, &args));
        return;
    }
    match number as i64 {
        libc::SYS_rt_sigreturn => leave.return_from(context.sp()),
        libc::SYS_rt_sigprocmask => {
            let result = signal_state::change_mask(&args, context.mask());
            context.set_result(result.unwrap_or_else(sys::failure));
        }
        libc::SYS_fork => make(context, leave, (CLONE, [FORK, 0, 0, 0, 0, 0])),
        libc::SYS_vfork => make(context, leave, (CLONE, [VFORK, 0, 0, 0, 0, 0])),
        libc::SYS_clone | libc::SYS_clone3 => make(context, leave, (number, args)),
        libc::SYS_arch_prctl if mode::is_static() && SET_GS <= args[0] && args[0] <= GET_GS => {
            let result = segment(args[0], args[1], &mut leave.fs);
            context.set_result(result.unwrap_or_else(sys::failure));
        }
        libc::SYS_exit if mode::is_static() => {
            tls_block::end(args[0]);
            pass(context, number, &args);
        }
        _ => dispatch_one(context, number, &args),
    }
}

/// True if a call by the function syscall(3) that is not ours may be executed at once. Otherwise it
/// is dispatched, with the same result and at a higher cost.
pub fn passes(number: u64) -> bool {
    let returns_once = !matches!(
        number as i64,
        libc::SYS_clone
            | libc::SYS_clone3
            | libc::SYS_fork
            | libc::SYS_vfork
            | libc::SYS_prctl
            | libc::SYS_rt_sigreturn
            | libc::SYS_rt_sigprocmask
            | libc::SYS_rt_sigsuspend
            | libc::SYS_sigaltstack
            | libc::SYS_ppoll
            | libc::SYS_pselect6
            | libc::SYS_epoll_pwait
            | 441
    );
    mode::is_dispatched() && returns_once
}

/// The length of the instruction in bytes.
const SYSCALL_LEN: u64 = 2;

/// A call that makes no process and changes no signals.
fn dispatch_one(context: &mut SignalContext, number: u64, args: &[u64; 6]) {
    let may_wait = may_take_long(number);
    if may_wait {
        signal_state::unblock_signals(context);
    }
    let served =
        signal_state::serve(number, args, context.sp()).or_else(|| serve::call(number, args));
    if may_wait {
        signal_state::keep_signals_out();
    }
    match served {
        // The signal that waits is delivered first.
        Some(pending::AGAIN) => {
            let call = context.ip() - SYSCALL_LEN;
            context.set_ip(call);
        }
        Some(value) => context.set_result(value),
        // The stack of the thread may be what goes.
        None if changes_memory(number) => context.set_result(sys::pass(number, args)),
        None => pass(context, number, args),
    }
}

/// The thread goes on with the call.
fn pass(context: &mut SignalContext, number: u64, args: &[u64; 6]) {
    if let Some(mask) = signal_state::mask_of(number, args) {
        exchange(context, mask);
        return;
    }
    let (sp, back) = (context.sp() - PASSED, context.ip());
    if sys::store(sp, back).is_ok() {
        context.set_address(defuse_pass as *const () as u64, sp);
    }
}

/// Has a thread that a signal interrupts in a call that was passed on be at its own instruction.
pub fn leave_stub(context: &mut SignalContext) {
    let (ip, sp) = (context.ip(), context.sp());
    let offset = |stub: u64| ip.checked_sub(stub).filter(|at| [0, SYSCALL_LEN].contains(at));
    let plain = offset(defuse_pass as *const () as u64);
    let exchanged = offset(defuse_pass_exchanged as *const () as u64);
    let (Some(offset), Ok(back)) = (plain.or(exchanged), sys::load::<u64>(sp)) else { return };
    if plain.is_none() {
        let Ok(args) = sys::load::<[u64; 6]>(sp + 8) else { return };
        context.set_args(&args);
    }
    let room = if plain.is_none() { EXCHANGED } else { PASSED };
    context.set_address(back - SYSCALL_LEN + offset, sp + room);
}

/// The thread goes on with the call, without `SIGSYS` in the mask of signals among its arguments.
fn exchange(context: &mut SignalContext, mask: signal_state::MaskArgument) {
    let (sp, back, mut args) = (context.sp() - EXCHANGED, context.ip(), context.args());
    let room = sp + 7 * 8;
    let mut words = [back, args[0], args[1], args[2], args[3], args[4], args[5], 0, 0, 0];
    words[7] = mask.without_sys;
    if mask.is_pair {
        // Address and length, as in pselect6(2).
        (words[8], words[9]) = (room, 8);
        args[mask.at] = room + 8;
    } else {
        args[mask.at] = room;
    }
    if sys::store(sp, words).is_ok() {
        context.set_args(&args);
        context.set_address(defuse_pass_exchanged as *const () as u64, sp);
    }
}

/// fork(2), vfork(2), clone(2) and clone3(2).
fn make(
    context: &mut SignalContext,
    leave: &mut HandlerRegisters,
    (number, args): (u64, [u64; 6]),
) {
    let mut record = [0u64; 11];
    let mut own = args;
    let is_clone3 = number == libc::SYS_clone3 as u64;
    if is_clone3 {
        // The program's record stays as it is. A longer one means what this does not know.
        let len = (args[1] as usize).min(size_of_val(&record));
        let Ok(bytes) = sys::bytes(args[0], len) else {
            return context.set_result(sys::failure(Errno::EFAULT));
        };
        for (word, bytes) in record.iter_mut().zip(bytes.chunks_exact(8)) {
            *word = u64::from_le_bytes(bytes.try_into().unwrap_or_default());
        }
        (own[0], own[1]) = (record.as_mut_ptr() as u64, len as u64);
    }
    let flags = if is_clone3 { record[0] } else { args[0] };
    let stack = fork::stack_of_child(number, &own);
    // A child begins in our code, with our variables.
    let mut fs = leave.fs;
    if mode::is_static() && flags & libc::CLONE_SETTLS as u64 != 0 {
        fs = if is_clone3 { record[7] } else { args[4] };
        fork::remove_flag(number, &mut own, libc::CLONE_SETTLS);
    }
    let is_thread = flags & libc::CLONE_THREAD as u64 != 0;
    if !is_thread && fork::is_refused() {
        return context.set_result(sys::failure(Errno::EPERM));
    }
    match fork::prepare_clone(number, &mut own, context.sp()) {
        Err(errno) => context.set_result(sys::failure(errno)),
        Ok(true) => {
            // Each of both goes on by its copy of this stack.
            if is_clone3 {
                let _ = sys::store(own[0] + 40, [0u64; 2]);
            } else {
                own[1] = 0;
            }
            let value = sys::pass(number, &own);
            fork::finish_clone(value);
            if value == 0 {
                leave.fs = fs;
                if stack != 0 {
                    context.set_sp(stack);
                }
            }
            context.set_result(value);
        }
        Ok(false) if stack == 0 => pass(context, number, &args),
        Ok(false) if mode::is_static() && is_thread => {
            let origin = tls_block::NewThread { call: (number, own), fs };
            let copy = |from, len| context.copy_for_thread((from, len), stack);
            let value = tls_block::make(origin, copy);
            context.set_result(value);
        }
        Ok(false) => share(context, stack),
    }
}

// arch_prctl(2).
const SET_GS: u64 = 0x1001;
const SET_FS: u64 = 0x1002;
const GET_FS: u64 = 0x1003;
const GET_GS: u64 = 0x1004;

/// arch_prctl(2) in a static program, which may set the base of FS, but not the base of GS.
fn segment(code: u64, value: u64, fs: &mut u64) -> Result<i64, Errno> {
    match code {
        SET_FS if value >= 0x7fff_ffff_f000 => return Err(Errno::EPERM),
        SET_FS => *fs = value,
        GET_FS => sys::store(value, *fs)?,
        GET_GS => sys::store(value, 0u64)?,
        _ => return Err(Errno::EPERM),
    }
    Ok(0)
}

/// A clone(2) that shares our memory, with a `stack` of its own.
fn share(context: &mut SignalContext, stack: u64) {
    let (sp, back) = (context.sp() - PASSED, context.ip());
    let stored = sys::store(sp, back).and_then(|()| sys::store(stack - 8, back));
    if stored.is_ok() {
        context.set_address(defuse_pass_clone as *const () as u64, sp);
    }
}

/// True for calls that remove memory. They do not wait.
fn changes_memory(number: u64) -> bool {
    matches!(
        number as i64,
        libc::SYS_munmap | libc::SYS_mremap | libc::SYS_mprotect | libc::SYS_madvise
    )
}

/// True for calls that may wait for others, so that signals have to come in meanwhile.
fn may_take_long(number: u64) -> bool {
    matches!(
        number as i64,
        libc::SYS_open
            | libc::SYS_openat
            | libc::SYS_openat2
            | libc::SYS_creat
            | libc::SYS_fcntl
            | libc::SYS_flock
            | libc::SYS_poll
            | libc::SYS_ppoll
            | libc::SYS_select
            | libc::SYS_pselect6
            | libc::SYS_sendfile
            | libc::SYS_splice
            | libc::SYS_connect
            // The next program begins with the mask of this one.
            | libc::SYS_execve
            | libc::SYS_execveat
    )
}
