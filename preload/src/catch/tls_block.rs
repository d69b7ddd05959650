//! Thread-local variables of ours in static programs, which do not have the C library's variables.
//!
//! A static program sets the base of FS as it likes, so our thread-local variables, which the
//! loader has laid out, are not where the compiler looks for them. Every thread of such a program
//! therefore has a *TLS block*: a copy of the variables that the loader made for the first thread,
//! and a stack for our code. The base of GS, which programs on x86-64 leave alone, points to it. FS
//! is exchanged on the way into our code, and restored on the way out ([`crate::catch::delivery`]).
//!
//! The kernel does not announce the end of such a thread. The thread ends by exit(2), which comes
//! here: its TLS block is free for the next thread once it no longer needs it.

use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicPtr, AtomicU32, Ordering};

use crate::catch::{signal_state, user_dispatch};
use crate::machine::inside::InsideGuard;
use crate::machine::lock::FutexLock;
use crate::machine::{mode, pid, stack, sys};
use crate::process::credentials;

/// The record that GS points to. It is never freed.
#[repr(C)]
struct TlsBlock {
    /// The base of FS for our code. The first, where assembly looks for it.
    fs: u64,
    /// Where its stack for our code ends.
    stack: u64,
    state: AtomicU32,
}

const FREE: u32 = 0;
const TAKEN: u32 = 1;
/// The block of the first thread, which the loader made.
const FIRST: u32 = 2;

static BLOCKS: FutexLock<Vec<&'static TlsBlock>> = FutexLock::new(Vec::new());

/// The thread-local blocks of the first thread.
static TEMPLATE: AtomicPtr<TlsTemplate> = AtomicPtr::new(std::ptr::null_mut());

struct TlsTemplate {
    /// The base of FS.
    fs: u64,
    /// How much lies below it.
    below: u64,
    /// Of each block: how far below it begins, where its first bytes come from, and how many.
    blocks: Vec<(u64, u64, usize)>,
    /// Where the C library keeps the thread's number, behind the base.
    tid_at: Option<u64>,
}

/// Room for what the C library has behind the base: `struct pthread` has 2304 bytes in glibc 2.36.
const BEHIND: u64 = 8192;

std::arch::global_asm!(
    // Begins a thread of a static program: clone(2) or clone3(2), whose number is in rdi and whose
    // arguments rsi leads to.
    ".globl defuse_clone",
    ".hidden defuse_clone",
    "defuse_clone:",
    "mov rax, rdi",
    "mov r11, rsi",
    "mov rdi, [r11]",
    "mov rsi, [r11 + 8]",
    "mov rdx, [r11 + 16]",
    "mov r10, [r11 + 24]",
    "mov r8, [r11 + 32]",
    "mov r9, [r11 + 40]",
    "syscall",
    "test rax, rax",
    "jz 2f",
    "ret",
    // Here the new thread begins; on its stack is a `ThreadStart`.
    "2:",
    "mov rax, [rsp + 8]",
    "wrfsbase rax",
    "mov rax, [rsp]",
    "wrgsbase rax",
    "mov rbx, rsp",
    "cld",
    "call {begin}",
    "mov rax, [rbx + 16]",
    "wrfsbase rax",
    "mov rsp, [rbx + 24]",
    "jmp defuse_return",
    // The end of a thread: from the second instruction on, others may have its stack.
    ".globl defuse_exit",
    ".hidden defuse_exit",
    "defuse_exit:",
    "mov eax, {exit}",
    "mov dword ptr [rsi], {free}",
    "syscall",
    "ud2",
    // The first thread begins: with its stack in rdi, at rsi.
    ".globl defuse_jump",
    ".hidden defuse_jump",
    "defuse_jump:",
    "mov rsp, rdi",
    "mov [rsp - 8], rsi",
    "xor eax, eax",
    "wrfsbase rax",
    "xor ebx, ebx",
    "xor ecx, ecx",
    "xor edx, edx",
    "xor esi, esi",
    "xor edi, edi",
    "xor ebp, ebp",
    "xor r8d, r8d",
    "xor r9d, r9d",
    "xor r10d, r10d",
    "xor r11d, r11d",
    "xor r12d, r12d",
    "xor r13d, r13d",
    "xor r14d, r14d",
    "xor r15d, r15d",
    "jmp qword ptr [rsp - 8]",
    begin = sym begin_thread,
    exit = const libc::SYS_exit,
    free = const FREE,
);

// SAFETY: defined above, and called as the comment there requires.
unsafe extern "C" {
    fn defuse_clone(number: u64, args: *const [u64; 6]) -> i64;
    fn defuse_exit(code: u64, state: *const AtomicU32) -> !;
    fn defuse_jump(sp: u64, address: u64) -> !;
}

/// The values that a new thread finds on its stack.
#[repr(C, align(16))]
struct ThreadStart {
    block: u64,
    block_fs: u64,
    program_fs: u64,
    /// The frame that it goes on from.
    context: u64,
}

/// True if the processor and the kernel let programs set FS and GS (Linux 5.9).
pub fn is_possible() -> bool {
    // SAFETY: getauxval reads what the kernel passed.
    unsafe { libc::getauxval(libc::AT_HWCAP2) & 2 != 0 }
}

/// The base of FS, for our code.
pub fn fs() -> u64 {
    let fs: u64;
    // SAFETY: the loader keeps the base of FS where FS leads.
    unsafe { std::arch::asm!("mov {}, fs:[0]", out(reg) fs, options(pure, readonly, nostack)) };
    fs
}

/// Gives the first thread its TLS block.
pub fn begin() {
    let template = TlsTemplate::for_this_thread();
    let block = TlsBlock { fs: template.fs, stack: 0, state: AtomicU32::new(FIRST) };
    TEMPLATE.store(Box::into_raw(Box::new(template)), Ordering::Release);
    let block: &TlsBlock = Box::leak(Box::new(block));
    // SAFETY: GS leads nowhere in a program that has just begun.
    unsafe { std::arch::asm!("wrgsbase {}", in(reg) std::ptr::from_ref(block), options(nostack)) };
    mode::set_static();
}

/// Starts the program at `address`, with this stack pointer.
///
/// # Safety
///
/// Stack pointer and address belong to the program. The current stack is not used any more.
pub unsafe fn jump(sp: u64, address: u64) -> ! {
    // SAFETY: the caller's promise.
    unsafe { defuse_jump(sp, address) }
}

/// The TLS block of this thread.
fn current() -> &'static TlsBlock {
    let block: *const TlsBlock;
    // SAFETY: GS has the address of the block.
    unsafe { std::arch::asm!("rdgsbase {}", out(reg) block, options(nostack)) };
    // SAFETY: as above; a TLS block is never freed.
    unsafe { &*block }
}

/// The values that a new thread needs of the thread that makes it.
pub struct NewThread {
    /// The call, with a copy of its arguments.
    pub call: (u64, [u64; 6]),
    /// The base of FS that the program gives it.
    pub fs: u64,
}

/// Makes a thread, which continues where its maker does. `copy` gets the first address and the
/// length of the new thread's stack for our code, copies the maker's frame to it, and returns the
/// address of the frame and the end of the free part below.
pub fn make(origin: NewThread, copy: impl FnOnce(u64, u64) -> (u64, u64)) -> i64 {
    let Some(block) = take() else { return -i64::from(libc::EAGAIN) };
    let (from, len) = stack::bounds(block.stack);
    let (context, free) = copy(from, len);
    let at = (free - size_of::<ThreadStart>() as u64) & !15;
    let begin = ThreadStart {
        block: std::ptr::from_ref(block) as u64,
        block_fs: block.fs,
        program_fs: origin.fs,
        context,
    };
    // SAFETY: the stack is the new thread's, which does not run yet.
    unsafe { (at as *mut ThreadStart).write(begin) };
    let (number, mut args) = origin.call;
    if number == libc::SYS_clone3 as u64 {
        let _ = sys::store(args[0] + 40, [from, at - from]);
    } else {
        args[1] = at;
    }
    // SAFETY: the new thread finds what it needs on its own stack.
    let value = unsafe { defuse_clone(number, &raw const args) };
    if value < 0 {
        block.state.store(FREE, Ordering::Release);
    }
    value
}

extern "C" fn begin_thread() {
    let tid = sys::plain(libc::SYS_gettid, 0, 0, 0).unwrap_or(0) as u32;
    // SAFETY: the template is there before the first thread is made; the place lies in this
    // thread's own block.
    unsafe {
        if let Some(at) = TEMPLATE.load(Ordering::Acquire).as_ref().and_then(|t| t.tid_at) {
            ((fs() + at) as *mut u32).write(tid);
        }
    }
    user_dispatch::arm();
}

/// exit(2): ends this thread. Returns for the first thread, whose TLS block stays.
pub fn end(code: u64) {
    let block = current();
    if block.state.load(Ordering::Relaxed) != TAKEN {
        return;
    }
    {
        let _inside = InsideGuard::enter();
        credentials::forget();
    }
    signal_state::forget();
    // SAFETY: the thread needs nothing of its block any more.
    unsafe { defuse_exit(code, &raw const block.state) }
}

/// A TLS block that is free, or a new one.
fn take() -> Option<&'static TlsBlock> {
    let _inside = InsideGuard::enter();
    let free = |block: &&&'static TlsBlock| {
        let state = &block.state;
        state.compare_exchange(FREE, TAKEN, Ordering::Acquire, Ordering::Relaxed).is_ok()
    };
    let mut all = BLOCKS.lock();
    if let Some(block) = all.iter().find(free) {
        return Some(block);
    }
    // SAFETY: `begin` stored it, for good.
    let template = unsafe { TEMPLATE.load(Ordering::Acquire).as_ref() }?;
    let fs = template.copy()?;
    let stack_end = stack::map()?;
    // SAFETY: the variable has the same offset in the new thread's block as in this thread's block.
    unsafe { ((stack::slot() as u64 + fs - self::fs()) as *mut u64).write(stack_end) };
    let block = TlsBlock { fs, stack: stack_end, state: AtomicU32::new(TAKEN) };
    let block: &'static TlsBlock = Box::leak(Box::new(block));
    all.push(block);
    Some(block)
}

/// In a child, which has one thread: the blocks of the others stay as they are, unused.
pub fn reset() {
    BLOCKS.reset();
}

impl TlsTemplate {
    fn for_this_thread() -> Self {
        let fs = fs();
        let mut blocks: Vec<(u64, u64, usize)> = Vec::new();
        // SAFETY: called by dl_iterate_phdr alone, with what it promises.
        unsafe extern "C" fn add(
            info: *mut libc::dl_phdr_info,
            _: usize,
            all: *mut c_void,
        ) -> c_int {
            // SAFETY: dl_iterate_phdr passes a valid record, and the vector that it was given.
            let (info, all) = unsafe { (&*info, &mut *all.cast::<Vec<(u64, u64, usize)>>()) };
            let count = usize::from(info.dlpi_phnum);
            // SAFETY: the record contains the number of program headers.
            let headers = unsafe { std::slice::from_raw_parts(info.dlpi_phdr, count) };
            let block = info.dlpi_tls_data as u64;
            for header in headers.iter().filter(|h| h.p_type == libc::PT_TLS && block != 0) {
                all.push((block, info.dlpi_addr + header.p_vaddr, header.p_filesz as usize));
            }
            0
        }
        // SAFETY: the callback gets the vector that outlives the call, and keeps no pointer.
        unsafe { libc::dl_iterate_phdr(Some(add), (&raw mut blocks).cast()) };
        // Blocks of libraries that came later lie elsewhere.
        blocks.retain(|(block, ..)| (fs.saturating_sub(1 << 20)..fs).contains(block));
        blocks.iter_mut().for_each(|block| block.0 = fs - block.0);
        let below = blocks.iter().map(|block| block.0).max().unwrap_or(0).next_multiple_of(4096);
        let tid = pid::read_pid() as u32;
        let is_tid = |at: &u64| {
            // SAFETY: the C library's record of this thread is longer than this.
            unsafe { ((fs + at) as *const u32).read() == tid }
        };
        let tid_at = (64..1536).step_by(4).find(is_tid);
        TlsTemplate { fs, below, blocks, tid_at }
    }

    /// A copy, with variables as they are at the beginning; returns its base of FS.
    fn copy(&self) -> Option<u64> {
        let (old, below) = (self.fs, self.below);
        // SAFETY: the loader keeps the table of blocks behind the base; the word before its first
        // pair says how many there are.
        let (slots, pairs) = unsafe {
            let pairs = ((old + 8) as *const *const [u64; 2]).read();
            (pairs.sub(1).read()[0] as usize, pairs)
        };
        let table = (slots as u64 + 2) * 16;
        let len = (below + BEHIND + table).next_multiple_of(4096);
        let at = sys::map(len as usize, libc::PROT_READ | libc::PROT_WRITE, 0).ok()?;
        let (fs, table_at) = (at + below, at + below + BEHIND);
        // SAFETY: all writes go to the memory that was mapped just now; all reads are from the
        // loader's own records.
        unsafe {
            for &(offset, from, len) in &self.blocks {
                let to = (fs - offset) as *mut u8;
                std::ptr::copy_nonoverlapping(from as *const u8, to, len);
            }
            let word = |at: u64| at as *mut u64;
            let to = table_at as *mut [u64; 2];
            for slot in 0..slots + 2 {
                let mut pair = pairs.sub(1).add(slot).read();
                if slot > 1 && (old - below..old).contains(&pair[0]) {
                    pair[0] = pair[0] + fs - old;
                }
                to.add(slot).write(pair);
            }
            word(fs).write(fs);
            word(fs + 8).write(table_at + 16);
            word(fs + 16).write(fs);
            // The values by which the C library guards stacks and pointers.
            word(fs + 0x28).write(word(old + 0x28).read());
            word(fs + 0x30).write(word(old + 0x30).read());
        }
        Some(fs)
    }
}
