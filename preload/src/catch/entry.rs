//! From a patched `syscall` instruction into Rust. Calls of our own code must not be intercepted.
//!
//! A trampoline calls [`defuse_entry`] where the instruction was. Everything that the kernel would
//! preserve is preserved: all registers but rax, rcx and r11, vector registers too (the C library
//! is built for the baseline, whose vectors are xmm0 to xmm15). Where the call is not ours, the
//! trampoline executes the instruction itself, on the program's own stack: so a blocking call is
//! interrupted, cancelled and restarted as without us.
//!
//! Our code runs on a stack of its own, one for every thread: the program's stack may be too small.
//!
//! A clone(2) that makes a process is executed here, because something has to be done after it, in
//! both processes, and the child may begin on a stack of its own (posix_spawn(3) gives it one):
//! with the registers and the stack that the program had, as it would have been without us; then
//! the entry is entered once more.

use std::sync::atomic::{AtomicI64, AtomicU8, AtomicU64, Ordering};

use defuse_fs::Errno;
use defuse_preload_plan::calls::CALLS;
use defuse_preload_plan::trampoline::TO_SYSCALL_END;

use crate::catch::{patch, signal_state};
use crate::machine::{inside, mode, pending, stack, sys};
use crate::process::{fork, table};
use crate::serve;

std::arch::global_asm!(
    ".globl defuse_entry",
    ".hidden defuse_entry",
    ".type defuse_entry,@function",
    "defuse_entry:",
    ".cfi_startproc",
    // Most calls move data by descriptors that are not placeholders: these are the kernel's, and
    // cost no more than this look. rcx and r11 are free, as behind a `syscall`.
    "cmp rax, 20",
    "ja 1f",
    "mov ecx, {moves_data}",
    "bt ecx, eax",
    "jnc 1f",
    "cmp edi, {kinds_len}",
    "jae 2f",
    "mov r11d, edi",
    "lea rcx, [rip + {kinds}]",
    "cmp byte ptr [rcx + r11], {placeholder}",
    "je 2f",
    "cmp byte ptr [rip + {counting}], 0",
    "jne 2f",
    "cmp byte ptr [rip + {armed}], 0",
    "jne 9f",
    "stc",
    "ret",
    // Where calls are dispatched, this is the one place where they are not.
    ".globl defuse_entry_call",
    ".hidden defuse_entry_call",
    "defuse_entry_call:",
    "9:",
    "syscall",
    ".globl defuse_entry_made",
    ".hidden defuse_entry_made",
    "defuse_entry_made:",
    "clc",
    "ret",
    // A clone(2) that makes a thread is executed here, too: the thread has a stack of its own.
    ".globl defuse_entry_thread",
    ".hidden defuse_entry_thread",
    "defuse_entry_thread:",
    "10:",
    "syscall",
    "test rax, rax",
    "jz defuse_begin_thread",
    "ret",
    // An instruction whose number is not constant makes calls that do not concern files, too.
    ".globl defuse_entry_look",
    ".hidden defuse_entry_look",
    "defuse_entry_look:",
    "1:",
    "cmp rax, {looked_at_len}",
    "jae 2f",
    "lea rcx, [rip + {looked_at}]",
    "cmp byte ptr [rcx + rax], 0",
    "jne 2f",
    "cmp byte ptr [rip + {counting}], 0",
    "jne 2f",
    "cmp byte ptr [rip + {armed}], 0",
    "jne 2f",
    "stc",
    "ret",
    ".globl defuse_entry_save",
    ".hidden defuse_entry_save",
    "defuse_entry_save:",
    "2:",
    "push rbp",
    ".cfi_def_cfa_offset 16",
    ".cfi_offset rbp, -16",
    "mov rbp, rsp",
    ".cfi_def_cfa_register rbp",
    "and rsp, -16",
    "sub rsp, 256 + 64",
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
    "12:",
    "mov rdi, rax",
    "mov rsi, rsp",
    "mov rcx, [rip + defuse_stack@GOTTPOFF]",
    "mov rcx, fs:[rcx]",
    "test rcx, rcx",
    "jz 8f",
    // Our own stack, unless this is a call from there.
    "4:",
    // The address where the trampoline continues identifies it.
    "mov rdx, [rbp + 8]",
    "mov rax, rcx",
    "sub rax, rsp",
    "cmp rax, {stack_len}",
    "jb 5f",
    // The thread is on our stack before it writes there: until then the handler of a signal makes
    // calls of its own, which use the same place.
    "mov rax, rsp",
    "lea rsp, [rcx - 16]",
    "mov [rsp + 8], rax",
    "call {serve}",
    "mov rsp, [rsp + 8]",
    "6:",
    // Back on the program's stack: signals that have waited may arrive.
    "mov rdi, rax",
    "mov rsi, rdx",
    "call {deliver}",
    // A signal has interrupted the call, and its handler wants it to go on.
    "bt edx, 4",
    "jc 12b",
    // Free, as behind a `syscall`.
    "mov ecx, edx",
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
    "bt ecx, 1",
    "jc 3f",
    "bt ecx, 2",
    "jc 9b",
    "bt ecx, 3",
    "jc 10b",
    // The carry flag is set if the kernel is to make the call.
    "bt ecx, 0",
    "ret",
    "3:",
    // One thread at a time comes here. The trampoline stepped over the red zone, and will step
    // back.
    "pop rcx",
    "mov [rip + {cloned_at}], rcx",
    "lea rsp, [rsp + {red_zone}]",
    "syscall",
    "lea rsp, [rsp - {red_zone}]",
    "push qword ptr [rip + {cloned_at}]",
    "mov [rip + {cloned}], rax",
    "mov rax, {after_clone}",
    "jmp 2b",
    "8:",
    "mov [rsp + 304], rax",
    "call {new_stack}",
    "mov rdi, [rsp + 304]",
    "mov rsi, rsp",
    "mov rdx, [rbp + 8]",
    "mov rcx, rax",
    "test rcx, rcx",
    "jnz 4b",
    "5:",
    "call {serve}",
    "jmp 6b",
    ".cfi_endproc",
    ".size defuse_entry, .-defuse_entry",
    serve = sym serve_site,
    moves_data = const MOVES_DATA,
    looked_at = sym LOOKED_AT,
    looked_at_len = const LOOKED_AT.len(),
    kinds = sym table::KINDS,
    kinds_len = const table::KINDS_LEN,
    placeholder = const table::PLACEHOLDER,
    counting = sym COUNTING,
    cloned_at = sym CLONED_AT,
    cloned = sym CLONED,
    after_clone = const AFTER_CLONE,
    red_zone = const 128,
    new_stack = sym stack::make,
    stack_len = const stack::LEN,
    armed = sym mode::DISPATCHED,
    deliver = sym deliver,
);

// SAFETY: defined above; only its address is taken here.
unsafe extern "C" {
    fn defuse_entry();
    fn defuse_entry_call();
    fn defuse_entry_made();
    fn defuse_entry_thread();
    fn defuse_entry_look();
    fn defuse_entry_save();
}

/// The part of the entry that a thread is in, which has not saved its registers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EntryPart {
    /// The kernel's calls are told from ours.
    Decision,
    /// The instruction that makes a call of the kernel.
    Call,
    /// Behind that instruction.
    Made,
}

/// The part of the entry that the instruction at `ip` belongs to.
pub fn part_of(ip: u64) -> Option<EntryPart> {
    // SAFETY: the type of the labels above, of which only the addresses are taken.
    let address = |label: unsafe extern "C" fn()| label as *const () as u64;
    let decides = (address(defuse_entry)..address(defuse_entry_call)).contains(&ip)
        || (address(defuse_entry_look)..address(defuse_entry_save)).contains(&ip);
    match ip {
        _ if decides => Some(EntryPart::Decision),
        _ if ip == address(defuse_entry_call) => Some(EntryPart::Call),
        _ if (address(defuse_entry_made)..address(defuse_entry_thread)).contains(&ip) => {
            Some(EntryPart::Made)
        }
        _ => None,
    }
}

/// Calls below 21 that move data by their first argument: read 0, write 1, lseek 8, ioctl 16, and
/// 17 to 20.
const MOVES_DATA: u32 = 1 << 0 | 1 << 1 | 1 << 8 | 0b11111 << 16;

/// Not 0 for the numbers of calls that are looked at.
static LOOKED_AT: [u8; 512] = {
    let (mut all, mut at) = ([0; 512], 0);
    while at < CALLS.len() {
        all[CALLS[at].0 as usize] = 1;
        at += 1;
    }
    all
};

/// Where the trampoline goes on after the clone(2) that this thread makes; the child has a copy.
static CLONED_AT: AtomicU64 = AtomicU64::new(0);
/// The result of that clone(2).
static CLONED: AtomicI64 = AtomicI64::new(0);
/// The number by which the entry is entered after clone(2): no call uses it, because the kernel
/// looks at 32 bits.
const AFTER_CLONE: u64 = 1 << 40;

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
struct EntryRegisters {
    value: i64,
    then: u64,
}

/// rt_sigreturn(2), fork(2) and vfork(2), from an instruction whose number is not constant: the
/// trampoline makes them, with the stack of the program.
const RETURNS_ELSEWHERE: [u64; 3] = [15, 57, 58];

/// The call is served.
const SERVED: u64 = 0;
/// The kernel is to do it.
const PASS: u64 = 1;
/// It is a clone(2) to be made here.
const CLONE: u64 = 2;
/// The kernel is to do it, and it is made here: elsewhere it would be dispatched.
const PASS_HERE: u64 = 4;
/// It is a clone(2) that makes a thread, to be made here.
const THREAD: u64 = 8;
/// It is to be entered once more.
const AGAIN: u64 = 16;

extern "C" fn serve_site(number: u64, args: &mut [u64; 6], from: u64) -> EntryRegisters {
    if number == AFTER_CLONE {
        let value = CLONED.load(Ordering::Relaxed);
        fork::finish_clone(value);
        return EntryRegisters { value, then: SERVED };
    }
    let number = number & u64::from(u32::MAX);
    if RETURNS_ELSEWHERE.contains(&number) {
        return EntryRegisters { value: number as i64, then: PASS };
    }
    if number == libc::SYS_clone as u64 || number == libc::SYS_clone3 as u64 {
        return match fork::prepare_clone(number, args, std::ptr::from_ref(args) as u64 + FRAME) {
            Ok(true) => EntryRegisters { value: number as i64, then: CLONE },
            Ok(false) if mode::is_dispatched() => share(number, args, from),
            Ok(false) => EntryRegisters { value: number as i64, then: PASS },
            Err(errno) => EntryRegisters { value: sys::failure(errno), then: SERVED },
        };
    }
    if mode::is_dispatched() {
        let sp = std::ptr::from_ref(args) as u64;
        let served = match number as i64 {
            libc::SYS_rt_sigprocmask => Some(signal_state::change_own_mask(args)),
            _ => signal_state::serve(number, args, sp),
        };
        if let Some(value) = served {
            return EntryRegisters { value, then: SERVED };
        }
    }
    let counts = COUNTING.load(Ordering::Relaxed) != 0 && !inside::is_inside();
    let served = serve::call(number, args);
    if served == Some(pending::AGAIN) {
        return EntryRegisters { value: number as i64, then: AGAIN };
    }
    if counts && let Some(site) = patch::site_of(from) {
        serve::count_site(number, args, site, served.is_some());
    }
    match served {
        Some(value) => EntryRegisters { value, then: SERVED },
        None => EntryRegisters { value: number as i64, then: pass_through(number, args) },
    }
}

/// Lets the signals arrive that have waited, and returns how the call goes on.
extern "C" fn deliver(value: i64, then: u64) -> EntryRegisters {
    // Calls of our own code are not the program's.
    let is_cancelled = !inside::is_inside() && pending::is_canceling();
    inside::deliver_outside();
    if is_cancelled && then & (PASS | PASS_HERE) != 0 && may_be_cancelled(value as u64) {
        // The C library ends the thread after a call that fails so. The call itself would not see
        // that it is to end.
        return EntryRegisters { value: sys::failure(Errno::EINTR), then: SERVED };
    }
    EntryRegisters { value, then }
}

/// True for calls that may wait without end, and in which a thread can be cancelled: all that
/// signals interrupt among those that are looked at, pthreads(7).
fn may_be_cancelled(number: u64) -> bool {
    matches!(
        number as i64,
        libc::SYS_read
            | libc::SYS_write
            | libc::SYS_open
            | libc::SYS_openat
            | libc::SYS_creat
            | libc::SYS_poll
            | libc::SYS_ppoll
            | libc::SYS_select
            | libc::SYS_pselect6
            | libc::SYS_pread64
            | libc::SYS_pwrite64
            | libc::SYS_readv
            | libc::SYS_writev
            | libc::SYS_preadv
            | libc::SYS_pwritev
            | libc::SYS_preadv2
            | libc::SYS_pwritev2
            | libc::SYS_connect
            | libc::SYS_sendmsg
            | libc::SYS_fcntl
            | libc::SYS_splice
            | libc::SYS_tee
            | libc::SYS_vmsplice
    )
}

/// How far the frame of the program begins above the registers that the entry saves: these, the two
/// words that are pushed, the red zone, and as much as the stack is aligned by.
const FRAME: u64 = 256 + 64 + 16 + 128 + 16;

/// Where a call that is not ours is made.
fn pass_through(number: u64, args: &[u64; 6]) -> u64 {
    match mode::is_dispatched() {
        // The trampoline makes it, and it is dispatched: its arguments have to be exchanged.
        true if signal_state::mask_of(number, args).is_some() => PASS,
        true => PASS_HERE,
        false => PASS,
    }
}

/// A clone(2) that shares our memory, from the trampoline that goes on at `from`. The new thread
/// goes on behind the instruction there.
fn share(number: u64, args: &[u64; 6], from: u64) -> EntryRegisters {
    let stack = fork::stack_of_child(number, args);
    let is_stored = stack != 0 && sys::store(stack - 8, from + TO_SYSCALL_END).is_ok();
    EntryRegisters { value: number as i64, then: if is_stored { THREAD } else { PASS_HERE } }
}
