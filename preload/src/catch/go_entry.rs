//! The entry for instructions of static Go programs, whose trampolines come here.
//!
//! It makes the calls that do not concern files of mounts, which this library need not see: that
//! costs a jump in place of a signal. It uses no variables of the thread, because the base of FS is
//! the program's, and eight bytes of the stack, because the stack of a goroutine is small. All
//! other calls are made by the trampoline, and dispatched.

use defuse_preload_plan::calls::CALLS;

use crate::process::table;

std::arch::global_asm!(
    ".globl defuse_pass_entry",
    ".hidden defuse_pass_entry",
    ".type defuse_pass_entry,@function",
    "defuse_pass_entry:",
    // rcx and r11 are free, as behind a `syscall`.
    "cmp rax, {passes_len}",
    "jae 3f",
    "lea rcx, [rip + {passes}]",
    "movzx ecx, byte ptr [rcx + rax]",
    "cmp ecx, {always}",
    "je 2f",
    "cmp ecx, {by_descriptor}",
    "jne 1f",
    "cmp edi, {kinds_len}",
    "jae 3f",
    "mov r11d, edi",
    "lea rcx, [rip + {kinds}]",
    "cmp byte ptr [rcx + r11], {placeholder}",
    "je 3f",
    "2:",
    "syscall",
    "clc",
    "ret",
    // epoll_pwait(2) without a mask of signals.
    "1:",
    "cmp rax, {epoll_pwait}",
    "jne 3f",
    "test r8, r8",
    "jz 2b",
    // The trampoline makes it.
    "3:",
    "stc",
    "ret",
    ".size defuse_pass_entry, .-defuse_pass_entry",
    passes = sym PASSES,
    passes_len = const PASSES.len(),
    always = const ALWAYS,
    by_descriptor = const BY_DESCRIPTOR,
    kinds = sym table::KINDS,
    kinds_len = const table::KINDS_LEN,
    placeholder = const table::PLACEHOLDER,
    epoll_pwait = const libc::SYS_epoll_pwait,
);

// SAFETY: defined above; only its address is taken here.
unsafe extern "C" {
    fn defuse_pass_entry();
}

/// Where trampolines of Go programs go.
pub fn address() -> u64 {
    defuse_pass_entry as *const () as u64
}

/// The call is made here.
const ALWAYS: u8 = 1;
/// It is made here if its descriptor is no placeholder.
const BY_DESCRIPTOR: u8 = 2;

/// Calls that are dispatched although they concern no files: they make processes and threads,
/// return elsewhere, end a thread, have a mask of signals, or change the alternate stack or
/// segments.
const DISPATCHED: [usize; 13] = [13, 14, 15, 56, 57, 58, 60, 130, 131, 158, 281, 435, 441];

/// Calls that move data by their first argument: read, write, lseek, and 17 to 20.
const MOVES_DATA: [usize; 7] = [0, 1, 8, 17, 18, 19, 20];

/// The way of each call.
static PASSES: [u8; 456] = {
    let (mut all, mut at) = ([ALWAYS; 456], 0);
    while at < CALLS.len() {
        if (CALLS[at].0 as usize) < all.len() {
            all[CALLS[at].0 as usize] = 0;
        }
        at += 1;
    }
    at = 0;
    while at < DISPATCHED.len() {
        all[DISPATCHED[at]] = 0;
        at += 1;
    }
    at = 0;
    while at < MOVES_DATA.len() {
        all[MOVES_DATA[at]] = BY_DESCRIPTOR;
        at += 1;
    }
    all
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_that_concern_files_or_signals_are_dispatched() {
        for call in [libc::SYS_openat, libc::SYS_mmap, libc::SYS_clone, libc::SYS_rt_sigprocmask] {
            assert_eq!(PASSES[call as usize], 0, "{call}");
        }
        assert_eq!(PASSES[libc::SYS_write as usize], BY_DESCRIPTOR);
        for call in [libc::SYS_futex, libc::SYS_nanosleep, libc::SYS_getppid, libc::SYS_madvise] {
            assert_eq!(PASSES[call as usize], ALWAYS, "{call}");
        }
    }
}
