//! The signal state in which a program with dispatched calls believes, and the state that the
//! kernel has.
//!
//! The kernel never has `SIGSYS` blocked: a call that is dispatched meanwhile would end the
//! program. So all masks that a program gives to the kernel go through here, without it. The
//! alternate stack that the kernel knows is this thread's stack for our code; this module notes the
//! program's alternate stack.

use std::cell::Cell;

use defuse_fs::Errno;

use crate::catch::frame::SignalContext;
use crate::machine::mask::{self, SYS};
use crate::machine::{pending, stack, sys};

/// The kernel's `struct sigaltstack`: address, flags, size.
type AltStack = [u64; 3];

thread_local! {
    /// The program's alternate stack.
    static ALT: Cell<AltStack> = const { Cell::new(NO_STACK) };
    /// True while the program believes that it has blocked `SIGSYS`.
    static SYS_IS_BLOCKED: Cell<bool> = const { Cell::new(false) };
}

const NO_STACK: AltStack = [0, libc::SS_DISABLE as u64, 0];
const MINSIGSTKSZ: u64 = 2048;

/// Makes this thread's stack for our code the alternate stack that the kernel knows.
pub fn arm() -> bool {
    let Some((from, len)) = stack::current() else { return false };
    set_stack([from, 0, len])
}

/// Removes the alternate stack that the kernel knows.
pub fn disarm() {
    set_stack(NO_STACK);
}

fn set_stack(stack: AltStack) -> bool {
    let args = [stack.as_ptr() as u64, 0, 0, 0, 0, 0];
    // SAFETY: the kernel reads three words, and will write to memory that is for that.
    sys::check(unsafe { sys::syscall(libc::SYS_sigaltstack as u64, &args) }).is_ok()
}

/// Resets the state of a thread that ends: the next one may get the same TLS block.
pub fn forget() {
    ALT.set(NO_STACK);
    SYS_IS_BLOCKED.set(false);
}

/// True while the program believes that it has blocked `SIGSYS` on this thread.
pub fn is_sys_blocked() -> bool {
    SYS_IS_BLOCKED.get()
}

/// The alternate stack that the program has set on this thread: address, flags, length.
pub fn alternate_stack() -> [u64; 3] {
    ALT.get()
}

/// Serves sigaltstack(2) and prctl(2), which are different with `--dispatch`. `sp` is the program's
/// stack pointer.
pub fn serve(number: u64, args: &[u64; 6], sp: u64) -> Option<i64> {
    let result = match number as i64 {
        libc::SYS_sigaltstack => set_alternate_stack(args, sp),
        // A program that has its calls dispatched to itself would take them from us.
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
    let mut mask = mask::change(libc::SIG_BLOCK, mask::CAN_WAIT);
    // Where a signal waits, the mask is what it will be afterwards.
    let result = match pending::change_waiting_mask(|mask| change_mask(args, mask)) {
        Some(result) => result,
        None => {
            let result = change_mask(args, &mut mask);
            mask::change(libc::SIG_SETMASK, mask);
            result
        }
    };
    result.unwrap_or_else(sys::failure)
}

/// sigaltstack(2).
fn set_alternate_stack(args: &[u64; 6], sp: u64) -> Result<i64, Errno> {
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
    /// The argument that points to it.
    pub at: usize,
    /// By a record of its address and length.
    pub is_pair: bool,
    /// The mask for the kernel.
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

/// Unblocks the signals that the interrupted thread has unblocked, while our code runs: they wait
/// for its end, and interrupt calls that wait.
pub fn unblock_signals(context: &mut SignalContext) {
    mask::change(libc::SIG_SETMASK, *context.mask());
}

/// Blocks them again.
pub fn keep_signals_out() {
    mask::change(libc::SIG_BLOCK, mask::CAN_WAIT);
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
        // The program sees the mask that it has set, although the kernel has another one.
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
        assert_eq!(set_alternate_stack(&[new, out, 0, 0, 0, 0], 1), Ok(0));
        assert_eq!(old[1], libc::SS_DISABLE as u64);
        assert_eq!(set_alternate_stack(&[0, out, 0, 0, 0, 0], 0x10010), Ok(0));
        assert_eq!(old, [0x10000, libc::SS_ONSTACK as u64, 8192]);
        assert_eq!(set_alternate_stack(&[new, 0, 0, 0, 0, 0], 0x10010), Err(Errno::EPERM));
        let small: AltStack = [0x10000, 0, 100];
        let args = [small.as_ptr() as u64, 0, 0, 0, 0, 0];
        assert_eq!(set_alternate_stack(&args, 1), Err(Errno::ENOMEM));
        let none = NO_STACK;
        assert_eq!(set_alternate_stack(&[none.as_ptr() as u64, 0, 0, 0, 0, 0], 1), Ok(0));
        assert_eq!(ALT.get(), NO_STACK);
    }
}
