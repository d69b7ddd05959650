//! How signals reach a program whose calls are dispatched.
//!
//! The kernel puts the frame of every signal that the program handles onto this thread's stack for
//! our code, which it knows as the alternate one, and blocks all others. From there the frame goes
//! where the program wants it: to its own alternate stack, which the kernel never hears of, or to the
//! stack that was interrupted; the mask is then as the program asked for it, and its handler begins
//! as if the kernel had called it. Where the signal has interrupted our code, it waits as ever
//! ([`crate::catch::signals`]).
//!
//! `SIGSYS` is never blocked and never ignored as far as the kernel is concerned: a call that is
//! dispatched meanwhile would end the program. What the program believes of it is noted here. So all
//! masks that a program gives to the kernel go through here, without it.

use std::cell::Cell;
use std::sync::atomic::Ordering;

use defuse_fs::Errno;

use crate::catch::{
    dispatch, entry,
    signals::{self, Action, WANTED},
    tls_block,
};
use crate::machine::{inside, sys};

/// The kernel's `struct sigaltstack`: address, flags, size.
type AltStack = [u64; 3];

const SYS: u64 = 1 << (libc::SIGSYS - 1);

/// Signals that a thread raises by what it does; a thread that blocks them would end.
const OWN: u64 = SYS
    | 1 << (libc::SIGSEGV - 1)
    | 1 << (libc::SIGBUS - 1)
    | 1 << (libc::SIGILL - 1)
    | 1 << (libc::SIGFPE - 1)
    | 1 << (libc::SIGTRAP - 1);

/// All signals that can wait.
pub const ALL: u64 = !OWN;

thread_local! {
    /// The program's alternate stack.
    static ALT: Cell<AltStack> = const { Cell::new(NO_STACK) };
    /// Whether the program believes that it has blocked `SIGSYS`.
    static SYS_IS_BLOCKED: Cell<bool> = const { Cell::new(false) };
}

const NO_STACK: AltStack = [0, libc::SS_DISABLE as u64, 0];
const MINSIGSTKSZ: u64 = 2048;

/// What a handler of signals does at its end: the registers that `defuse_signal` loads.
#[repr(C)]
pub struct Leave {
    sp: u64,
    /// The base of FS that a static program has.
    pub fs: u64,
    handler: u64,
    number: u64,
    info: u64,
    context: u64,
    mask: u64,
}

/// The thread goes on as the frame says on whose stack this is.
const RETURN: u64 = 0;
/// The handler of the program begins.
const HANDLE: u64 = 1;

impl Leave {
    /// The thread goes on as the frame says that a handler of the program has left, whose stack
    /// pointer is `sp` at rt_sigreturn(2).
    pub fn return_from(&mut self, sp: u64) {
        self.sp = sp;
    }
}

std::arch::global_asm!(
    ".globl defuse_signal",
    ".hidden defuse_signal",
    "defuse_signal:",
    "mov rbx, rsp",
    "and rsp, -16",
    "sub rsp, {leave}",
    "lea rax, [rbx + 8]",
    "mov [rsp], rax",
    "cmp byte ptr [rip + {homes}], 0",
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
    "cmp byte ptr [rip + {homes}], 0",
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
    leave = const size_of::<Leave>().next_multiple_of(16),
    decide = sym decide,
    homes = sym tls_block::USED,
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

/// Where our handler is, by which the kernel knows those of the program.
pub fn handler() -> u64 {
    defuse_signal as *const () as u64
}

// `struct ucontext` of the kernel, arch/x86/include/uapi/asm/sigcontext.h: what follows the 40 bytes
// of flags, link and stack.
const LINK: usize = 8;
const STACK: usize = 16;
const REGISTERS: usize = 40;
const STATE: usize = REGISTERS + 23 * 8;
const MASK: usize = STATE + 9 * 8;
/// Before it the frame has the address to return to, behind it the information about the signal.
const FRAME: usize = 8 + MASK + 8 + 128;

/// What the kernel notes of an interrupted thread.
pub struct Context(*mut u64);

impl Context {
    fn register(&mut self, number: libc::c_int) -> &mut u64 {
        // SAFETY: the kernel passed the address of its record to our handler, which is under way; the
        // numbers are those of its registers.
        unsafe { &mut *self.0.byte_add(REGISTERS + number as usize * 8) }
    }

    /// The number of the call, of which the kernel takes 32 bits.
    pub fn number(&mut self) -> u64 {
        u64::from(*self.register(libc::REG_RAX) as u32)
    }

    /// The arguments of the call.
    pub fn args(&mut self) -> [u64; 6] {
        ARGS.map(|number| *self.register(number))
    }

    /// The call gets other arguments.
    pub fn set_args(&mut self, args: &[u64; 6]) {
        ARGS.iter().zip(args).for_each(|(&number, &value)| *self.register(number) = value);
    }

    /// The call returns `value`.
    pub fn set_result(&mut self, value: i64) {
        *self.register(libc::REG_RAX) = value as u64;
    }

    /// The stack pointer.
    pub fn sp(&mut self) -> u64 {
        *self.register(libc::REG_RSP)
    }

    /// Sets the stack pointer.
    pub fn set_sp(&mut self, sp: u64) {
        *self.register(libc::REG_RSP) = sp;
    }

    /// Where the thread goes on: behind the call.
    pub fn ip(&mut self) -> u64 {
        *self.register(libc::REG_RIP)
    }

    /// The thread goes on at `address`, with this stack pointer.
    pub fn go_to(&mut self, address: u64, sp: u64) {
        *self.register(libc::REG_RIP) = address;
        self.set_sp(sp);
    }

    /// The signals that are blocked once it goes on.
    pub fn mask(&mut self) -> &mut u64 {
        // SAFETY: as in `register`.
        unsafe { &mut *self.0.byte_add(MASK) }
    }

    /// The state of vector registers, and its length in bytes.
    fn state(&self) -> (u64, usize) {
        /// Where the kernel says how long it is, and by what one knows that it does.
        const SAYS: (usize, u32) = (464, 0x4650_5853);
        // SAFETY: as in `register`; the state is none, or has 512 bytes at least.
        unsafe {
            let at = self.0.byte_add(STATE).read();
            let word = |offset: usize| ((at as usize + offset) as *const u32).read_unaligned();
            match at {
                0 => (0, 0),
                _ if word(SAYS.0) == SAYS.1 => (at, word(SAYS.0 + 4) as usize),
                _ => (at, 512),
            }
        }
    }
}

const ARGS: [libc::c_int; 6] =
    [libc::REG_RDI, libc::REG_RSI, libc::REG_RDX, libc::REG_R10, libc::REG_R8, libc::REG_R9];

/// Takes `SIGSYS` for us.
pub fn begin() -> bool {
    let flags = libc::SA_SIGINFO | libc::SA_ONSTACK | libc::SA_NODEFER | RESTORER;
    set_action(libc::SIGSYS, [handler(), flags as u64, defuse_return as *const () as u64, ALL])
        .is_ok()
}

const RESTORER: i32 = 0x0400_0000;

fn set_action(number: i32, action: Action) -> Result<i64, Errno> {
    let args = [number as u64, action.as_ptr() as u64, 0, 8, 0, 0];
    // SAFETY: the kernel reads the structure; the handler is ours, or none.
    sys::check(unsafe { sys::syscall(libc::SYS_rt_sigaction as u64, &args) })
}

/// Tells the kernel this thread's alternate stack.
pub fn arm() -> bool {
    let Some((from, len)) = entry::stack() else { return false };
    set_stack([from, 0, len])
}

/// There is none any more.
pub fn disarm() {
    set_stack(NO_STACK);
}

fn set_stack(stack: AltStack) -> bool {
    let args = [stack.as_ptr() as u64, 0, 0, 0, 0, 0];
    // SAFETY: the kernel reads three words, and will write to memory that is for that.
    sys::check(unsafe { sys::syscall(libc::SYS_sigaltstack as u64, &args) }).is_ok()
}

/// The action for the kernel where the program wants `wanted`.
pub fn action_of(wanted: &Action) -> Action {
    const KEPT: i32 = libc::SA_RESTART | libc::SA_NOCLDSTOP | libc::SA_NOCLDWAIT;
    let flags = libc::SA_SIGINFO | libc::SA_ONSTACK | RESTORER;
    let flags = wanted[1] & KEPT as u64 | flags as u64;
    [handler(), flags, defuse_return as *const () as u64, ALL]
}

/// What becomes of a signal.
extern "C" fn decide(number: i32, info: *mut u64, context: *mut u64, leave: &mut Leave) -> u64 {
    let mut context = Context(context);
    // SAFETY: the kernel's record begins with number, errno and code.
    let code = unsafe { info.cast::<i32>().add(2).read() };
    if dispatch::is_dispatched(number, code) {
        dispatch::serve(&mut context, leave);
        signals::send_waiting();
        return RETURN;
    }
    let is_ours = inside::is_inside() || entry::is_on_stack(context.sp());
    if is_ours && OWN >> (number - 1) & 1 == 0 {
        signals::note(number, info, context.mask());
        return RETURN;
    }
    let wanted = signals::wanted(number);
    match wanted[0] {
        // SIGSYS of another origin: what the program does not handle.
        DEFAULT if number == libc::SIGSYS => end_by(number),
        DEFAULT | IGNORE => RETURN,
        _ => {
            if wanted[1] & libc::SA_RESETHAND as u64 != 0 {
                WANTED[number as usize].handler.store(DEFAULT, Ordering::Release);
                if number != libc::SIGSYS {
                    let _ = set_action(number, [DEFAULT, 0, 0, 0]);
                }
            }
            hand_over(number, info, &mut context, &wanted, leave);
            HANDLE
        }
    }
}

const DEFAULT: u64 = 0;
const IGNORE: u64 = 1;

/// The program ends as by a signal that it does not handle.
fn end_by(number: i32) -> u64 {
    let _ = set_action(number, [DEFAULT, 0, 0, 0]);
    let tid = sys::plain(libc::SYS_gettid, 0, 0, 0).unwrap_or(0) as u64;
    let pid = crate::process::state::pid() as u64;
    let _ = sys::plain(libc::SYS_tgkill, pid, tid, number as u64);
    RETURN
}

/// Puts the frame where the program wants it, and its handler into `leave`.
fn hand_over(
    number: i32,
    info: *mut u64,
    context: &mut Context,
    wanted: &Action,
    leave: &mut Leave,
) {
    let old = context.0 as u64 - 8;
    let is_sys_blocked = SYS_IS_BLOCKED.get();
    let deferred = if wanted[1] & libc::SA_NODEFER as u64 != 0 { 0 } else { 1 << (number - 1) };
    let mask = (*context.mask() | wanted[3] | deferred) & !SYS;
    let frame = match entry::is_on_stack(old) {
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
            seen.write(seen.read() | SYS);
        }
    }
    let _ = info;
    *leave = Leave {
        sp: frame,
        fs: leave.fs,
        handler: wanted[0],
        number: number as u64,
        info: frame + FRAME as u64 - 128,
        context: frame + 8,
        mask: frame + 8 + LINK as u64,
    };
}

impl Context {
    /// A copy of the frame for a new thread, on its stack for our code, which begins at `from` and has
    /// `len` bytes: there the call returned 0, and `sp` is the stack pointer. Returns where it is, and
    /// what is free below.
    pub fn copy_for_thread(&mut self, (from, len): (u64, u64), sp: u64) -> (u64, u64) {
        let frame = self.copy(from + len);
        let mut copy = Context((frame + 8) as *mut u64);
        copy.set_result(0);
        copy.set_sp(sp);
        // SAFETY: the copy was made just now.
        unsafe { copy.0.byte_add(STACK).cast::<AltStack>().write([from, 0, len]) };
        (frame + 8, frame - 8)
    }

    /// Copies frame and state to below `top`; returns where the frame is.
    fn copy(&mut self, top: u64) -> u64 {
        let (state, state_len) = self.state();
        let new_state = (top - state_len as u64) & !63;
        // As the stack is behind a call.
        let frame = ((new_state - FRAME as u64) & !15) - 8;
        let old = self.0.cast::<u8>().wrapping_sub(8);
        // SAFETY: the frame and the state were put here by the kernel, and lie on our stack; the other
        // one has room for them, as it would have to have without us. They do not overlap.
        unsafe {
            std::ptr::copy_nonoverlapping(old, frame as *mut u8, FRAME);
            std::ptr::copy_nonoverlapping(state as *const u8, new_state as *mut u8, state_len);
            if state != 0 {
                ((frame + 8 + STATE as u64) as *mut u64).write(new_state);
            }
        }
        frame
    }
}

/// This thread, which ends, leaves its home as it found it.
pub fn forget() {
    ALT.set(NO_STACK);
    SYS_IS_BLOCKED.set(false);
}

/// Copies a frame from our stack to that which the program wants its handler to run on; returns where
/// it is.
fn move_frame(context: &mut Context, wanted_flags: u64) -> u64 {
    let (sp, [from, flags, len]) = (context.sp(), ALT.get());
    let has_other =
        wanted_flags & libc::SA_ONSTACK as u64 != 0 && flags & libc::SS_DISABLE as u64 == 0;
    let is_there = (from..from + len).contains(&sp);
    let top = if has_other && !is_there { from + len } else { sp - 128 };
    context.copy(top)
}

// ---- the calls about signals -----------------------------------------------------------------

/// Serves the calls about signals that are not those of every program, with the stack pointer that
/// the program has.
pub fn serve(number: u64, args: &[u64; 6], sp: u64) -> Option<i64> {
    let result = match number as i64 {
        libc::SYS_sigaltstack => alternate(args, sp),
        // Who has its calls dispatched to itself would take them from us.
        libc::SYS_prctl if args[0] == 59 => Err(Errno::EINVAL),
        _ => return None,
    };
    Some(result.unwrap_or_else(sys::failure))
}

/// rt_sigprocmask(2) on the mask of an interrupted thread.
pub fn change_mask(args: &[u64; 6], mask: &mut u64) -> Result<i64, Errno> {
    let [how, new, old, len, ..] = *args;
    if len != 8 {
        return Err(Errno::EINVAL);
    }
    let before = *mask & !SYS | if SYS_IS_BLOCKED.get() { SYS } else { 0 };
    if new != 0 {
        let set = sys::load::<u64>(new)?;
        let now = match how as i32 {
            libc::SIG_BLOCK => before | set,
            libc::SIG_UNBLOCK => before & !set,
            libc::SIG_SETMASK => set,
            _ => return Err(Errno::EINVAL),
        };
        SYS_IS_BLOCKED.set(now & SYS != 0);
        *mask = now & !SYS;
    }
    if old != 0 {
        sys::store(old, before)?;
    }
    Ok(0)
}

/// rt_sigprocmask(2) by the entry.
pub fn change_own_mask(args: &[u64; 6]) -> i64 {
    let mut mask = inside::change_mask(libc::SIG_BLOCK, ALL);
    // Where a signal waits, the mask is what it will be afterwards.
    let result = match signals::waiting_mask(|mask| change_mask(args, mask)) {
        Some(result) => result,
        None => {
            let result = change_mask(args, &mut mask);
            inside::change_mask(libc::SIG_SETMASK, mask);
            result
        }
    };
    result.unwrap_or_else(sys::failure)
}

/// sigaltstack(2).
fn alternate(args: &[u64; 6], sp: u64) -> Result<i64, Errno> {
    let [new, old, ..] = *args;
    let before = ALT.get();
    let is_there = before[1] & libc::SS_DISABLE as u64 == 0
        && (before[0]..before[0] + before[2]).contains(&sp);
    let wanted = if new != 0 { Some(sys::load::<AltStack>(new)?) } else { None };
    if let Some(wanted) = wanted {
        const AUTODISARM: u32 = 1 << 31;
        let flags = wanted[1] as u32 & !AUTODISARM;
        match flags as i32 {
            _ if is_there => return Err(Errno::EPERM),
            libc::SS_DISABLE => ALT.set(NO_STACK),
            0 | libc::SS_ONSTACK if wanted[2] < MINSIGSTKSZ => return Err(Errno::ENOMEM),
            0 | libc::SS_ONSTACK => ALT.set([wanted[0], 0, wanted[2]]),
            _ => return Err(Errno::EINVAL),
        }
    }
    if old != 0 {
        let on = if is_there { libc::SS_ONSTACK as u64 } else { 0 };
        sys::store(old, [before[0], before[1] | on, before[2]])?;
    }
    Ok(0)
}

/// A mask of signals among the arguments of a call that waits, with `SIGSYS` in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MaskArgument {
    /// Which argument leads to it.
    pub at: usize,
    /// By a record of its address and length.
    pub is_pair: bool,
    /// What the kernel is to get.
    pub without_sys: u64,
}

/// The mask that a call has among its arguments, where `SIGSYS` is in it.
pub fn mask_of(number: u64, args: &[u64; 6]) -> Option<MaskArgument> {
    const EPOLL_PWAIT2: i64 = 441;
    let (at, len_at) = match number as i64 {
        libc::SYS_rt_sigsuspend => (0, 1),
        libc::SYS_ppoll => (3, 4),
        libc::SYS_epoll_pwait | EPOLL_PWAIT2 => (4, 5),
        libc::SYS_pselect6 => (5, 5),
        _ => return None,
    };
    let is_pair = number as i64 == libc::SYS_pselect6;
    let (address, len) = match is_pair {
        true if args[at] == 0 => return None,
        true => sys::load::<[u64; 2]>(args[at]).ok()?.into(),
        false => (args[at], args[len_at]),
    };
    if address == 0 || len != 8 {
        return None;
    }
    let mask = sys::load::<u64>(address).ok()?;
    (mask & SYS != 0).then_some(MaskArgument { at, is_pair, without_sys: mask & !SYS })
}

/// Lets the signals in that the interrupted thread would get, while our code is at work: they wait
/// for its end, and end what it waits for.
pub fn let_signals_in(context: &mut Context) {
    inside::change_mask(libc::SIG_SETMASK, *context.mask());
}

/// The end of that.
pub fn keep_signals_out() {
    inside::change_mask(libc::SIG_BLOCK, ALL);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mask_goes_to_the_kernel_without_the_signal_of_ours() {
        let (mask, empty) = (SYS | 1, 1u64);
        let at = |mask: &u64| std::ptr::from_ref(mask) as u64;
        let suspend = libc::SYS_rt_sigsuspend as u64;
        let found = mask_of(suspend, &[at(&mask), 8, 0, 0, 0, 0]);
        assert_eq!(found, Some(MaskArgument { at: 0, is_pair: false, without_sys: 1 }));
        assert_eq!(mask_of(suspend, &[at(&empty), 8, 0, 0, 0, 0]), None);
        let pair = [at(&mask), 8];
        let args = [0, 0, 0, 0, 0, pair.as_ptr() as u64];
        let found = mask_of(libc::SYS_pselect6 as u64, &args);
        assert_eq!(found, Some(MaskArgument { at: 5, is_pair: true, without_sys: 1 }));
        assert_eq!(mask_of(libc::SYS_pselect6 as u64, &[0; 6]), None);
    }

    #[test]
    fn masks_change_as_the_kernel_changes_them() {
        let mut mask = 0b100;
        let set = SYS | 0b11;
        let mut old = 0u64;
        let args = |how: i32, new: u64, old: u64| [how as u64, new, old, 8, 0, 0];
        let (new, out) = (&raw const set as u64, &raw mut old as u64);
        assert_eq!(change_mask(&args(libc::SIG_BLOCK, new, 0), &mut mask), Ok(0));
        assert_eq!(mask, 0b111);
        // What the program has blocked it sees, although the kernel has not.
        assert_eq!(change_mask(&args(libc::SIG_UNBLOCK, new, out), &mut mask), Ok(0));
        assert_eq!((mask, old), (0b100, SYS | 0b111));
        assert_eq!(change_mask(&args(9, new, 0), &mut mask), Err(Errno::EINVAL));
        assert_eq!(change_mask(&[0, 0, 0, 4, 0, 0], &mut mask), Err(Errno::EINVAL));
        assert_eq!(change_mask(&args(9, 0, out), &mut mask), Ok(0));
        assert_eq!(old, 0b100);
    }

    #[test]
    fn an_alternate_stack_is_noted_and_told() {
        let stack: AltStack = [0x10000, 0, 8192];
        let mut old = [7u64; 3];
        let (new, out) = (stack.as_ptr() as u64, old.as_mut_ptr() as u64);
        assert_eq!(alternate(&[new, out, 0, 0, 0, 0], 1), Ok(0));
        assert_eq!(old[1], libc::SS_DISABLE as u64);
        assert_eq!(alternate(&[0, out, 0, 0, 0, 0], 0x10010), Ok(0));
        assert_eq!(old, [0x10000, libc::SS_ONSTACK as u64, 8192]);
        assert_eq!(alternate(&[new, 0, 0, 0, 0, 0], 0x10010), Err(Errno::EPERM));
        let small: AltStack = [0x10000, 0, 100];
        let args = [small.as_ptr() as u64, 0, 0, 0, 0, 0];
        assert_eq!(alternate(&args, 1), Err(Errno::ENOMEM));
        let none = NO_STACK;
        assert_eq!(alternate(&[none.as_ptr() as u64, 0, 0, 0, 0, 0], 1), Ok(0));
        assert_eq!(ALT.get(), NO_STACK);
    }
}
