//! The stack of a thread for our code: the program's stack may be too small.

use std::sync::OnceLock;

use crate::machine::{sys, thread_exit};

// Where the stack of this thread for our code ends; 0 if it has none yet.
std::arch::global_asm!(
    ".section .tbss.defuse_stack,\"awT\",@nobits",
    ".hidden defuse_stack",
    ".globl defuse_stack",
    ".type defuse_stack,@tls_object",
    ".size defuse_stack, 8",
    ".balign 8",
    "defuse_stack:",
    ".zero 8",
    ".text",
);

/// The length in bytes of a thread's stack for our code. It costs memory as far as it is used.
pub const LEN: u64 = 512 << 10;
/// The length in bytes of the guard at its lower end, which no code may access.
const GUARD_LEN: u64 = 4096;

/// Where this thread keeps the end of its stack for our code.
pub fn slot() -> *mut u64 {
    let slot: *mut u64;
    // SAFETY: the address of a variable of the thread, computed as the loader lays it out.
    unsafe {
        std::arch::asm!(
            "mov {slot}, fs:[0]",
            "add {slot}, [rip + defuse_stack@GOTTPOFF]",
            slot = out(reg) slot,
            options(pure, readonly, nostack),
        );
    }
    slot
}

/// Makes a stack for our code on this thread; returns its end, 0 if there is no memory for one.
///
/// The program's own stack may be too small: the C library gives the threads of aio_write(3) and
/// the children of posix_spawn(3) some 16 KiB, and handlers of signals may run on as little.
pub extern "C" fn make() -> u64 {
    if thread_exit::has_ended() {
        return 0;
    }
    let Some(end) = map() else { return 0 };
    // SAFETY: the variable is this thread's own.
    unsafe { slot().write(end) };
    // A thread that has a stack gives it back.
    thread_exit::arm();
    end
}

/// A new stack for our code; returns its end.
pub fn map() -> Option<u64> {
    let at = sys::map(LEN as usize, libc::PROT_NONE, libc::MAP_NORESERVE).ok()?;
    let rest = LEN - GUARD_LEN;
    let protection = (libc::PROT_READ | libc::PROT_WRITE) as u64;
    if sys::plain(libc::SYS_mprotect, at + GUARD_LEN, rest, protection).is_err() {
        let _ = sys::plain(libc::SYS_munmap, at, LEN, 0);
        return None;
    }
    Some(at + LEN)
}

/// First address and length of the stack for our code that ends at `end`.
pub fn bounds(end: u64) -> (u64, u64) {
    let len = LEN - GUARD_LEN;
    (end - len, len)
}

/// This thread's stack for our code, first address and length, made if there is none; `None` if
/// there is no memory for one.
pub fn current() -> Option<(u64, u64)> {
    // SAFETY: as in `make`.
    let end = match unsafe { slot().read() } {
        0 => make(),
        end => end,
    };
    (end != 0).then(|| bounds(end))
}

/// True if `address` lies on this thread's stack for our code.
#[inline]
pub fn holds(address: u64) -> bool {
    // SAFETY: as in `make`.
    let end = unsafe { slot().read() };
    end.wrapping_sub(address).wrapping_sub(1) < LEN && end != 0
}

/// Called on a thread before its stack for our code goes.
pub static BEFORE_DROP: OnceLock<fn()> = OnceLock::new();

/// Gives this thread's stack for our code back, at its end. Not to be called on that stack.
pub fn drop_own() {
    // SAFETY: as in `make`.
    let end = unsafe { slot().replace(0) };
    if end != 0 {
        if let Some(before_drop) = BEFORE_DROP.get() {
            before_drop();
        }
        let _ = sys::plain(libc::SYS_munmap, end - LEN, LEN, 0);
    }
}
