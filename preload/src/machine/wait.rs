//! System calls of ours that may wait, and signals that end the wait.
//!
//! The handler of the program waits for the end of our code ([`crate::machine::pending`]), so a
//! signal has to end what our code waits for. The kernel does not see to that: it makes a call
//! again after a handler with `SA_RESTART`, which ours looks like, and a signal that came just
//! before the call is forgotten. So both are seen by where the signal has interrupted the thread
//! ([`interrupted`]): on the way into the call, where the kernel also goes back to in order to make
//! it again.

use crate::machine::pending;

std::arch::global_asm!(
    ".globl defuse_wait",
    ".hidden defuse_wait",
    ".type defuse_wait,@function",
    "defuse_wait:",
    ".cfi_startproc",
    "mov rax, rdi",
    "mov r11, rsi",
    "mov rcx, rdx",
    "mov rdi, [r11]",
    "mov rsi, [r11 + 8]",
    "mov rdx, [r11 + 16]",
    "mov r10, [r11 + 24]",
    "mov r8, [r11 + 32]",
    "mov r9, [r11 + 40]",
    // From here on to the call a signal changes where the thread goes on.
    ".globl defuse_wait_begin",
    ".hidden defuse_wait_begin",
    "defuse_wait_begin:",
    "cmp dword ptr [rcx], 0",
    "jne defuse_wait_again",
    ".globl defuse_wait_call",
    ".hidden defuse_wait_call",
    "defuse_wait_call:",
    "syscall",
    "ret",
    ".globl defuse_wait_again",
    ".hidden defuse_wait_again",
    "defuse_wait_again:",
    "mov rax, {again}",
    "ret",
    ".cfi_endproc",
    ".size defuse_wait, .-defuse_wait",
    again = const pending::AGAIN,
);

// SAFETY: defined above.
unsafe extern "C" {
    fn defuse_wait(number: u64, args: *const [u64; 6], waits: *const i32) -> i64;
    fn defuse_wait_begin();
    fn defuse_wait_call();
    fn defuse_wait_again();
}

/// A call of the program that may wait, as [`crate::machine::sys::pass`]. If a signal waits for the
/// end of our code, or comes meanwhile, the result is `EINTR`, or [`pending::AGAIN`] where the call
/// was not made: it is to be made again if the handler wants that.
pub fn pass(number: u64, args: &[u64; 6]) -> i64 {
    // SAFETY: the program made this very call; it would have got to the kernel without us. The flag
    // is a variable of this thread.
    unsafe { defuse_wait(number, args, pending::flag()) }
}

/// Where a thread goes on that a signal has interrupted at `ip`, if it was about to wait.
pub fn find_resume_point(ip: u64) -> Option<u64> {
    let begin = defuse_wait_begin as *const () as u64;
    let call = defuse_wait_call as *const () as u64;
    (begin..=call).contains(&ip).then_some(defuse_wait_again as *const () as u64)
}
