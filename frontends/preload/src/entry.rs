//! From a patched `syscall` instruction into Rust, and who must not be intercepted: ourselves.
//!
//! A trampoline calls [`defuse_entry`] where the instruction was. Everything that the kernel would
//! preserve is preserved: all registers but rax, rcx and r11, those of vectors too (the C library is
//! built for the baseline, whose vectors are xmm0 to xmm15). Where the call is not ours, the
//! trampoline executes the instruction itself, on the program's own stack: so a blocking call is
//! interrupted, cancelled and restarted as without us.

use std::cell::Cell;
use std::sync::atomic::{AtomicU8, AtomicU32, Ordering, compiler_fence};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::{serve, sys, table};

std::arch::global_asm!(
    ".globl defuse_entry",
    ".hidden defuse_entry",
    ".type defuse_entry,@function",
    "defuse_entry:",
    ".cfi_startproc",
    // Most calls move data by descriptors that are not placeholders: these are the kernel's, and
    // cost no more than this look. rcx and r11 are free, as behind a `syscall`.
    "cmp rax, 20",
    "ja 2f",
    "mov ecx, {moves_data}",
    "bt ecx, eax",
    "jnc 2f",
    "cmp edi, {kinds_len}",
    "jae 2f",
    "mov r11d, edi",
    "lea rcx, [rip + {kinds}]",
    "cmp byte ptr [rcx + r11], {placeholder}",
    "je 2f",
    "cmp byte ptr [rip + {counting}], 0",
    "jne 2f",
    "stc",
    "ret",
    "2:",
    "push rbp",
    ".cfi_def_cfa_offset 16",
    ".cfi_offset rbp, -16",
    "mov rbp, rsp",
    ".cfi_def_cfa_register rbp",
    "and rsp, -16",
    "sub rsp, 256 + 48",
    "movups [rsp + 48], xmm0",
    "movups [rsp + 64], xmm1",
    "movups [rsp + 80], xmm2",
    "movups [rsp + 96], xmm3",
    "movups [rsp + 112], xmm4",
    "movups [rsp + 128], xmm5",
    "movups [rsp + 144], xmm6",
    "movups [rsp + 160], xmm7",
    "movups [rsp + 176], xmm8",
    "movups [rsp + 192], xmm9",
    "movups [rsp + 208], xmm10",
    "movups [rsp + 224], xmm11",
    "movups [rsp + 240], xmm12",
    "movups [rsp + 256], xmm13",
    "movups [rsp + 272], xmm14",
    "movups [rsp + 288], xmm15",
    "mov [rsp], rdi",
    "mov [rsp + 8], rsi",
    "mov [rsp + 16], rdx",
    "mov [rsp + 24], r10",
    "mov [rsp + 32], r8",
    "mov [rsp + 40], r9",
    "cld",
    "mov rdi, rax",
    "mov rsi, rsp",
    "call {serve}",
    // The carry flag says that the kernel is to do it; nothing below changes it.
    "bt edx, 0",
    "movups xmm0, [rsp + 48]",
    "movups xmm1, [rsp + 64]",
    "movups xmm2, [rsp + 80]",
    "movups xmm3, [rsp + 96]",
    "movups xmm4, [rsp + 112]",
    "movups xmm5, [rsp + 128]",
    "movups xmm6, [rsp + 144]",
    "movups xmm7, [rsp + 160]",
    "movups xmm8, [rsp + 176]",
    "movups xmm9, [rsp + 192]",
    "movups xmm10, [rsp + 208]",
    "movups xmm11, [rsp + 224]",
    "movups xmm12, [rsp + 240]",
    "movups xmm13, [rsp + 256]",
    "movups xmm14, [rsp + 272]",
    "movups xmm15, [rsp + 288]",
    "mov rdi, [rsp]",
    "mov rsi, [rsp + 8]",
    "mov rdx, [rsp + 16]",
    "mov r10, [rsp + 24]",
    "mov r8, [rsp + 32]",
    "mov r9, [rsp + 40]",
    "mov rsp, rbp",
    "pop rbp",
    ".cfi_def_cfa rsp, 8",
    "ret",
    ".cfi_endproc",
    ".size defuse_entry, .-defuse_entry",
    serve = sym serve_site,
    moves_data = const MOVES_DATA,
    kinds = sym table::KINDS,
    kinds_len = const table::KINDS_LEN,
    placeholder = const table::PLACEHOLDER,
    counting = sym COUNTING,
);

// SAFETY: defined above; only its address is taken here.
unsafe extern "C" {
    fn defuse_entry();
}

/// Calls below 21 that move data by their first argument: read 0, write 1, lseek 8, ioctl 16, and
/// 17 to 20.
const MOVES_DATA: u32 = 1 << 0 | 1 << 1 | 1 << 8 | 0b11111 << 16;

/// Not 0 where every call is counted, so that none may be passed on unseen.
static COUNTING: AtomicU8 = AtomicU8::new(0);

/// Has every call seen, for a report.
pub fn count_all() {
    COUNTING.store(1, Ordering::Relaxed);
}

/// Where trampolines go.
pub fn address() -> u64 {
    defuse_entry as *const () as u64
}

/// rax and rdx as the entry expects them.
#[repr(C)]
struct Answer {
    value: i64,
    passes: u64,
}

extern "C" fn serve_site(number: u64, args: &mut [u64; 6]) -> Answer {
    if number == libc::SYS_clone as u64 || number == libc::SYS_clone3 as u64 {
        crate::symbols::before_clone(number, args);
        return Answer { value: number as i64, passes: 1 };
    }
    match serve::call(number, args) {
        Some(value) => Answer { value, passes: 0 },
        None => Answer { value: number as i64, passes: 1 },
    }
}

/// Addresses of the depths of all threads that were ever in our code, and still live.
static THREADS: Mutex<Vec<usize>> = Mutex::new(Vec::new());

/// A fork is under way: nobody begins, so that no lock is held in the copy that the child gets.
static FORKING: AtomicU32 = AtomicU32::new(0);

const WAIT: u64 = (libc::FUTEX_WAIT | libc::FUTEX_PRIVATE_FLAG) as u64;
const WAKE: u64 = (libc::FUTEX_WAKE | libc::FUTEX_PRIVATE_FLAG) as u64;

/// Takes the thread off the list when it ends.
struct Listed;

impl Drop for Listed {
    fn drop(&mut self) {
        let _ = DEPTH.try_with(|depth| {
            begin(depth);
            let own = std::ptr::from_ref(depth) as usize;
            threads().retain(|other| *other != own);
            depth.store(0, Ordering::Relaxed);
        });
    }
}

thread_local! {
    /// How deep this thread is in our own code.
    static DEPTH: AtomicU32 = const { AtomicU32::new(0) };
    /// The signals that were blocked before this thread forked.
    static MASK: Cell<u64> = const { Cell::new(0) };
    static IS_LISTED: Cell<bool> = const { Cell::new(false) };
    static LISTED: Listed = const { Listed };
}

fn threads() -> MutexGuard<'static, Vec<usize>> {
    THREADS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Says that this thread is in our code; waits while another one forks. The store is seen by the one
/// that forks before its look at it: membarrier(2) orders them, so that nothing has to be ordered
/// here.
#[inline]
fn begin(depth: &AtomicU32) {
    depth.store(1, Ordering::Relaxed);
    compiler_fence(Ordering::SeqCst);
    while FORKING.load(Ordering::Relaxed) != 0 {
        depth.store(0, Ordering::Relaxed);
        let word = &raw const FORKING as u64;
        let _ = sys::plain(libc::SYS_futex, word, WAIT, 1);
        if FORKING.load(Ordering::Relaxed) == 0 {
            depth.store(1, Ordering::Relaxed);
            compiler_fence(Ordering::SeqCst);
        }
    }
}

/// Our own code runs on this thread: what it calls is not intercepted, and signals wait.
pub struct Inside(());

impl Inside {
    /// Begins; `None` where this thread is inside already, so that the call is one of our own.
    #[inline]
    pub fn enter() -> Option<Inside> {
        DEPTH.with(|depth| {
            if depth.load(Ordering::Relaxed) > 0 {
                return None;
            }
            begin(depth);
            if !IS_LISTED.get() {
                list(depth);
            }
            Some(Inside(()))
        })
    }
}

#[cold]
fn list(depth: &AtomicU32) {
    IS_LISTED.set(true);
    threads().push(std::ptr::from_ref(depth) as usize);
    // So that it is taken off.
    let _ = LISTED.try_with(|_| ());
}

impl Drop for Inside {
    #[inline]
    fn drop(&mut self) {
        DEPTH.with(|depth| depth.store(0, Ordering::Release));
        crate::signals::deliver();
    }
}

/// Whether this thread runs our own code.
#[inline]
pub fn is_inside() -> bool {
    DEPTH.with(|depth| depth.load(Ordering::Relaxed) > 0)
}

const MEMBARRIER_PRIVATE: u64 = 1 << 3;
const MEMBARRIER_REGISTER: u64 = 1 << 4;

/// Makes [`stop_others`] possible.
pub fn register() {
    let _ = sys::plain(libc::SYS_membarrier, MEMBARRIER_REGISTER, 0, 0);
}

/// Waits until no other thread is in our code, and keeps them out. A thread that waits in there for
/// something of the kernel is waited for one second at most.
pub fn stop_others() {
    // A handler on this very thread would wait for the end of the fork.
    MASK.set(change_mask(libc::SIG_BLOCK, u64::MAX));
    while FORKING.compare_exchange(0, 1, Ordering::SeqCst, Ordering::Relaxed).is_err() {
        let _ = sys::plain(libc::SYS_sched_yield, 0, 0, 0);
    }
    let _ = sys::plain(libc::SYS_membarrier, MEMBARRIER_PRIVATE, 0, 0);
    let own = DEPTH.with(|depth| std::ptr::from_ref(depth) as usize);
    let end = Instant::now() + Duration::from_secs(1);
    for other in threads().iter().filter(|other| **other != own) {
        // SAFETY: a thread is taken off the list before its variables go, and it needs the list's
        // lock for that, which is held here.
        let depth = unsafe { &*(*other as *const AtomicU32) };
        while depth.load(Ordering::Acquire) > 0 && Instant::now() < end {
            let _ = sys::plain(libc::SYS_sched_yield, 0, 0, 0);
        }
    }
}

/// The fork is done.
pub fn let_others_go_on() {
    FORKING.store(0, Ordering::SeqCst);
    let word = &raw const FORKING as u64;
    let all = i32::MAX as u64;
    let _ = sys::plain(libc::SYS_futex, word, WAKE, all);
    change_mask(libc::SIG_SETMASK, MASK.get());
}

/// Changes the signals that are blocked; returns those that were.
fn change_mask(how: libc::c_int, mask: u64) -> u64 {
    let mut before = 0u64;
    let args = [how as u64, &raw const mask as u64, &raw mut before as u64, 8, 0, 0];
    // SAFETY: the kernel reads and writes eight bytes each.
    unsafe { sys::syscall(libc::SYS_rt_sigprocmask as u64, &args) };
    before
}

/// This is the child: the other threads are not here.
pub fn alone() {
    let own = DEPTH.with(|depth| std::ptr::from_ref(depth) as usize);
    threads().retain(|other| *other == own);
    if FORKING.load(Ordering::SeqCst) != 0 {
        let_others_go_on();
    }
}
