//! Where in its own code the program is, if a signal interrupts it on the way to a call that the
//! kernel makes, or in one.
//!
//! A handler gets that place instead of one of ours. The C library since glibc 2.41 needs this: its
//! handler cancels a thread (pthread_cancel(3)) only if the thread is at its own `syscall`
//! instruction or right before. An unwinder needs it as well, because trampolines have no unwind
//! tables.

use defuse_preload_plan::trampoline::{self, KeptCall, ProgramPoint};

use crate::catch::entry::{self, EntryPart};
use crate::catch::frame::SignalContext;
use crate::catch::{dispatch, patch};
use crate::machine::sys;

/// The carry flag among the flags of a thread.
const CARRY: u64 = 1;

/// Has an interrupted thread be at the point of the program that it is at; returns the point at
/// which it continues if the handler returns. `None` if they are the same, or nothing of the
/// program's own is known.
pub fn show(context: &mut SignalContext) -> Option<ProgramPoint> {
    let there = ProgramPoint { ip: context.ip(), sp: context.sp() };
    let own =
        find_in_entry(there).or_else(|| find_in_trampoline(there, context.flags() & CARRY != 0))?;
    context.set_address(own.ip, own.sp);
    Some(there)
}

/// Undoes [`show`] after the handler, unless the handler has changed where the thread continues.
pub fn restore(context: &mut SignalContext, shown: ProgramPoint, there: ProgramPoint) {
    if (ProgramPoint { ip: context.ip(), sp: context.sp() }) == shown {
        context.set_address(there.ip, there.sp);
    }
}

/// Has a thread that a signal interrupts in a call of the kernel be at its own instruction, before
/// or behind it, and continue there: the call is dispatched once more if it is made again. For
/// programs whose calls are dispatched.
pub fn leave_call(context: &mut SignalContext) {
    let there = ProgramPoint { ip: context.ip(), sp: context.sp() };
    let is_at_call = matches!(entry::part_of(there.ip), Some(EntryPart::Call | EntryPart::Made));
    match find_in_entry(there).filter(|_| is_at_call) {
        Some(own) => context.set_address(own.ip, own.sp),
        None => dispatch::leave_stub(context),
    }
}

/// The point of a thread that is in the entry, which a trampoline has called.
fn find_in_entry(there: ProgramPoint) -> Option<ProgramPoint> {
    let part = entry::part_of(there.ip)?;
    let back = sys::load::<u64>(there.sp).ok()?;
    let call = KeptCall::find(&sys::load(back).ok()?, back)?;
    Some(call.point(part == EntryPart::Made, there.sp))
}

fn find_in_trampoline(there: ProgramPoint, carry: bool) -> Option<ProgramPoint> {
    let at = patch::trampoline_of(there.ip)?;
    trampoline::program_point(&sys::load(at).ok()?, at, there, carry)
}
