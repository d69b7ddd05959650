//! The exported functions: the whole list.
//!
//! Where the C library is patched, each goes on to the library's own function, whose `syscall`
//! leads back to us: so locale, cancellation and errno are the library's. Where it is not, each
//! makes the system call itself. All arguments are taken as 64 bits: on x86-64 integers and
//! pointers are passed alike, in registers, also to functions with a variable number of arguments,
//! and what lies above the 32 bits of an `int` is not looked at.

use std::ffi::{CStr, c_char, c_int};
use std::sync::atomic::{AtomicBool, Ordering};

use crate::catch::next::{self as next_function, NextFunction, is_patched, result};
use crate::catch::{dispatch, environment, own_calls, patch, users};
use crate::machine::inside::{self, InsideGuard};
use crate::machine::{mode, pending, sys};
use crate::process::{fork as process_fork, state};
use crate::serve;
use crate::serve::open::library;

/// Finds all functions that ours go on with, while the program has not begun: a later lookup in the
/// loader would take the message away that dlerror(3) has for the program, and wait for the
/// loader's lock where a handler of a signal may not.
pub fn find_next() {
    let others = [&SYSCALL, &FORK, &FORK_ALONE, &DLOPEN];
    for next in next::ALL.iter().chain(&others).chain(users::ALL) {
        next.address();
    }
    let of_c_library = patch::find_own_code(next_function::find_in_c_library(c"getppid"));
    let is_its = |address: u64| of_c_library.is_some_and(|(a, b)| (a..b).contains(&address));
    let wrapped = |next: &&NextFunction| next.address() != 0 && !is_its(next.address());
    IS_WRAPPED.store(next::ALL.iter().any(wrapped), Ordering::Relaxed);
    // A symbol that was not found is no news for the program: dlerror(3) returns the message once,
    // and then forgets it.
    for _ in 0..2 {
        // SAFETY: dlerror(3) takes nothing.
        unsafe { libc::dlerror() };
    }
}

static SYSCALL: NextFunction = NextFunction::new(c"syscall");
static FORK: NextFunction = NextFunction::new(c"fork");
static FORK_ALONE: NextFunction = NextFunction::new(c"_Fork");
/// Where dlopen(3) goes on.
static DLOPEN: NextFunction = NextFunction::new(c"dlopen");
/// Where dlmopen(3) goes on.
static DLMOPEN: NextFunction = NextFunction::new(c"dlmopen");

/// True if another library has functions between this library's functions and the C library's.
static IS_WRAPPED: AtomicBool = AtomicBool::new(false);

/// Serves the call if it is ours; otherwise calls the next function. Our own calls are not for
/// other libraries.
#[inline]
fn serve(next: &NextFunction, original: &[u64; 6], number: i64, args: [u64; 6]) -> i64 {
    if IS_WRAPPED.load(Ordering::Relaxed) && inside::is_inside() {
        return result(sys::pass(number as u64, &args));
    }
    if is_patched() {
        return next.call(original);
    }
    match serve_call(number as u64, &args) {
        Some(value) => result(value),
        None => next.call(original),
    }
}

/// Serves a call by [`serve::call`], and once more after each signal whose handler restarts it.
fn serve_call(number: u64, args: &[u64; 6]) -> Option<i64> {
    loop {
        match serve::call(number, args) {
            Some(pending::AGAIN) => pending::deliver(),
            other => return other,
        }
    }
}

const CWD: u64 = libc::AT_FDCWD as u64;
const NOFOLLOW: u64 = libc::AT_SYMLINK_NOFOLLOW as u64;

/// Exports functions, each as the system call that it is.
macro_rules! exports {
    ($($name:ident($a:ident $b:ident $c:ident $d:ident $e:ident $f:ident)
       = $number:ident[$($arg:expr),*];)*) => {
        /// The names that are exported as system calls, each with the call.
        #[cfg(test)]
        pub const EXPORTS: &[(&str, i64)] = &[$((stringify!($name), libc::$number)),*];
        /// The functions of the C library that these go on with.
        #[allow(non_upper_case_globals)]
        mod next {
            use crate::catch::next::{NextFunction, name};

            $(pub static $name: NextFunction = NextFunction::new(name(concat!(stringify!($name), "\0")));)*
            pub static ALL: &[&NextFunction] = &[$(&$name),*];
        }

        $(
            /// # Safety
            ///
            /// As the function of the C library of this name.
            #[unsafe(no_mangle)]
            // SAFETY: the arguments are the program's, for the function of this name.
            pub unsafe extern "C" fn $name($a: u64, $b: u64, $c: u64, $d: u64, $e: u64, $f: u64) -> i64 {
                let mut args = [0; 6];
                let list: &[u64] = &[$($arg),*];
                args[..list.len()].copy_from_slice(list);
                serve(&next::$name, &[$a, $b, $c, $d, $e, $f], libc::$number, args)
            }
        )*
    };
}

exports! {
    open(a b c d e f) = SYS_openat[CWD, a, b, c];
    open64(a b c d e f) = SYS_openat[CWD, a, b, c];
    __open(a b c d e f) = SYS_openat[CWD, a, b, c];
    __open64(a b c d e f) = SYS_openat[CWD, a, b, c];
    __open_2(a b c d e f) = SYS_openat[CWD, a, b];
    __open64_2(a b c d e f) = SYS_openat[CWD, a, b];
    openat(a b c d e f) = SYS_openat[a, b, c, d];
    openat64(a b c d e f) = SYS_openat[a, b, c, d];
    __openat_2(a b c d e f) = SYS_openat[a, b, c];
    __openat64_2(a b c d e f) = SYS_openat[a, b, c];
    creat(a b c d e f) = SYS_creat[a, b];
    creat64(a b c d e f) = SYS_creat[a, b];
    name_to_handle_at(a b c d e f) = SYS_name_to_handle_at[a, b, c, d, e];
    close(a b c d e f) = SYS_close[a];
    __close(a b c d e f) = SYS_close[a];
    close_range(a b c d e f) = SYS_close_range[a, b, c];
    read(a b c d e f) = SYS_read[a, b, c];
    __read(a b c d e f) = SYS_read[a, b, c];
    __read_chk(a b c d e f) = SYS_read[a, b, c];
    write(a b c d e f) = SYS_write[a, b, c];
    __write(a b c d e f) = SYS_write[a, b, c];
    pread(a b c d e f) = SYS_pread64[a, b, c, d];
    pread64(a b c d e f) = SYS_pread64[a, b, c, d];
    __pread64(a b c d e f) = SYS_pread64[a, b, c, d];
    __pread_chk(a b c d e f) = SYS_pread64[a, b, c, d];
    __pread64_chk(a b c d e f) = SYS_pread64[a, b, c, d];
    pwrite(a b c d e f) = SYS_pwrite64[a, b, c, d];
    pwrite64(a b c d e f) = SYS_pwrite64[a, b, c, d];
    __pwrite64(a b c d e f) = SYS_pwrite64[a, b, c, d];
    readv(a b c d e f) = SYS_readv[a, b, c];
    writev(a b c d e f) = SYS_writev[a, b, c];
    preadv(a b c d e f) = SYS_preadv[a, b, c, d];
    preadv64(a b c d e f) = SYS_preadv[a, b, c, d];
    pwritev(a b c d e f) = SYS_pwritev[a, b, c, d];
    pwritev64(a b c d e f) = SYS_pwritev[a, b, c, d];
    preadv2(a b c d e f) = SYS_preadv2[a, b, c, d, 0, e];
    preadv64v2(a b c d e f) = SYS_preadv2[a, b, c, d, 0, e];
    pwritev2(a b c d e f) = SYS_pwritev2[a, b, c, d, 0, e];
    pwritev64v2(a b c d e f) = SYS_pwritev2[a, b, c, d, 0, e];
    lseek(a b c d e f) = SYS_lseek[a, b, c];
    lseek64(a b c d e f) = SYS_lseek[a, b, c];
    __lseek(a b c d e f) = SYS_lseek[a, b, c];
    llseek(a b c d e f) = SYS_lseek[a, b, c];
    copy_file_range(a b c d e f) = SYS_copy_file_range[a, b, c, d, e, f];
    sendfile(a b c d e f) = SYS_sendfile[a, b, c, d];
    sendfile64(a b c d e f) = SYS_sendfile[a, b, c, d];
    splice(a b c d e f) = SYS_splice[a, b, c, d, e, f];
    tee(a b c d e f) = SYS_tee[a, b, c, d];
    vmsplice(a b c d e f) = SYS_vmsplice[a, b, c, d];
    readahead(a b c d e f) = SYS_readahead[a, b, c];
    ftruncate(a b c d e f) = SYS_ftruncate[a, b];
    ftruncate64(a b c d e f) = SYS_ftruncate[a, b];
    truncate(a b c d e f) = SYS_truncate[a, b];
    truncate64(a b c d e f) = SYS_truncate[a, b];
    fallocate(a b c d e f) = SYS_fallocate[a, b, c, d];
    fallocate64(a b c d e f) = SYS_fallocate[a, b, c, d];
    sync_file_range(a b c d e f) = SYS_sync_file_range[a, b, c, d];
    fsync(a b c d e f) = SYS_fsync[a];
    fdatasync(a b c d e f) = SYS_fdatasync[a];
    syncfs(a b c d e f) = SYS_syncfs[a];
    sync(a b c d e f) = SYS_sync[];
    msync(a b c d e f) = SYS_msync[a, b, c];
    mprotect(a b c d e f) = SYS_mprotect[a, b, c];
    dup(a b c d e f) = SYS_dup[a];
    dup2(a b c d e f) = SYS_dup2[a, b];
    __dup2(a b c d e f) = SYS_dup2[a, b];
    dup3(a b c d e f) = SYS_dup3[a, b, c];
    fcntl(a b c d e f) = SYS_fcntl[a, b, c];
    fcntl64(a b c d e f) = SYS_fcntl[a, b, c];
    __fcntl(a b c d e f) = SYS_fcntl[a, b, c];
    ioctl(a b c d e f) = SYS_ioctl[a, b, c];
    flock(a b c d e f) = SYS_flock[a, b];
    bind(a b c d e f) = SYS_bind[a, b, c];
    connect(a b c d e f) = SYS_connect[a, b, c];
    __connect(a b c d e f) = SYS_connect[a, b, c];
    stat(a b c d e f) = SYS_newfstatat[CWD, a, b, 0];
    stat64(a b c d e f) = SYS_newfstatat[CWD, a, b, 0];
    lstat(a b c d e f) = SYS_newfstatat[CWD, a, b, NOFOLLOW];
    lstat64(a b c d e f) = SYS_newfstatat[CWD, a, b, NOFOLLOW];
    fstat(a b c d e f) = SYS_fstat[a, b];
    fstat64(a b c d e f) = SYS_fstat[a, b];
    fstatat(a b c d e f) = SYS_newfstatat[a, b, c, d];
    fstatat64(a b c d e f) = SYS_newfstatat[a, b, c, d];
    statx(a b c d e f) = SYS_statx[a, b, c, d, e];
    __xstat(a b c d e f) = SYS_newfstatat[CWD, b, c, 0];
    __xstat64(a b c d e f) = SYS_newfstatat[CWD, b, c, 0];
    __lxstat(a b c d e f) = SYS_newfstatat[CWD, b, c, NOFOLLOW];
    __lxstat64(a b c d e f) = SYS_newfstatat[CWD, b, c, NOFOLLOW];
    __fxstat(a b c d e f) = SYS_fstat[b, c];
    __fxstat64(a b c d e f) = SYS_fstat[b, c];
    __fxstatat(a b c d e f) = SYS_newfstatat[b, c, d, e];
    __fxstatat64(a b c d e f) = SYS_newfstatat[b, c, d, e];
    statfs(a b c d e f) = SYS_statfs[a, b];
    statfs64(a b c d e f) = SYS_statfs[a, b];
    __statfs(a b c d e f) = SYS_statfs[a, b];
    fstatfs(a b c d e f) = SYS_fstatfs[a, b];
    fstatfs64(a b c d e f) = SYS_fstatfs[a, b];
    access(a b c d e f) = SYS_access[a, b];
    eaccess(a b c d e f) = SYS_faccessat2[CWD, a, b, 0x200];
    euidaccess(a b c d e f) = SYS_faccessat2[CWD, a, b, 0x200];
    faccessat(a b c d e f) = SYS_faccessat2[a, b, c, d];
    chmod(a b c d e f) = SYS_chmod[a, b];
    fchmod(a b c d e f) = SYS_fchmod[a, b];
    fchmodat(a b c d e f) = SYS_fchmodat[a, b, c];
    chown(a b c d e f) = SYS_chown[a, b, c];
    fchown(a b c d e f) = SYS_fchown[a, b, c];
    lchown(a b c d e f) = SYS_lchown[a, b, c];
    fchownat(a b c d e f) = SYS_fchownat[a, b, c, d, e];
    utime(a b c d e f) = SYS_utime[a, b];
    utimes(a b c d e f) = SYS_utimes[a, b];
    futimesat(a b c d e f) = SYS_futimesat[a, b, c];
    futimes(a b c d e f) = SYS_futimesat[a, 0, b];
    utimensat(a b c d e f) = SYS_utimensat[a, b, c, d];
    futimens(a b c d e f) = SYS_utimensat[a, 0, b, 0];
    setxattr(a b c d e f) = SYS_setxattr[a, b, c, d, e];
    lsetxattr(a b c d e f) = SYS_lsetxattr[a, b, c, d, e];
    fsetxattr(a b c d e f) = SYS_fsetxattr[a, b, c, d, e];
    getxattr(a b c d e f) = SYS_getxattr[a, b, c, d];
    lgetxattr(a b c d e f) = SYS_lgetxattr[a, b, c, d];
    fgetxattr(a b c d e f) = SYS_fgetxattr[a, b, c, d];
    listxattr(a b c d e f) = SYS_listxattr[a, b, c];
    llistxattr(a b c d e f) = SYS_llistxattr[a, b, c];
    flistxattr(a b c d e f) = SYS_flistxattr[a, b, c];
    removexattr(a b c d e f) = SYS_removexattr[a, b];
    lremovexattr(a b c d e f) = SYS_lremovexattr[a, b];
    fremovexattr(a b c d e f) = SYS_fremovexattr[a, b];
    umask(a b c d e f) = SYS_umask[a];
    mkdir(a b c d e f) = SYS_mkdir[a, b];
    mkdirat(a b c d e f) = SYS_mkdirat[a, b, c];
    rmdir(a b c d e f) = SYS_rmdir[a];
    unlink(a b c d e f) = SYS_unlink[a];
    unlinkat(a b c d e f) = SYS_unlinkat[a, b, c];
    rename(a b c d e f) = SYS_rename[a, b];
    renameat(a b c d e f) = SYS_renameat[a, b, c, d];
    renameat2(a b c d e f) = SYS_renameat2[a, b, c, d, e];
    link(a b c d e f) = SYS_link[a, b];
    linkat(a b c d e f) = SYS_linkat[a, b, c, d, e];
    symlink(a b c d e f) = SYS_symlink[a, b];
    symlinkat(a b c d e f) = SYS_symlinkat[a, b, c];
    readlink(a b c d e f) = SYS_readlink[a, b, c];
    readlinkat(a b c d e f) = SYS_readlinkat[a, b, c, d];
    __readlink_chk(a b c d e f) = SYS_readlink[a, b, c];
    __readlinkat_chk(a b c d e f) = SYS_readlinkat[a, b, c, d];
    mknod(a b c d e f) = SYS_mknod[a, b, c];
    mknodat(a b c d e f) = SYS_mknodat[a, b, c, d];
    mkfifo(a b c d e f) = SYS_mknod[a, b | 0o10000, 0];
    mkfifoat(a b c d e f) = SYS_mknodat[a, b, c | 0o10000, 0];
    chdir(a b c d e f) = SYS_chdir[a];
    fchdir(a b c d e f) = SYS_fchdir[a];
    chroot(a b c d e f) = SYS_chroot[a];
    getdents64(a b c d e f) = SYS_getdents64[a, b, c];
    mmap(a b c d e f) = SYS_mmap[a, b, c, d, e, f];
    mmap64(a b c d e f) = SYS_mmap[a, b, c, d, e, f];
    munmap(a b c d e f) = SYS_munmap[a, b];
    poll(a b c d e f) = SYS_poll[a, b, c];
    __poll(a b c d e f) = SYS_poll[a, b, c];
    __poll_chk(a b c d e f) = SYS_poll[a, b, c];
    select(a b c d e f) = SYS_select[a, b, c, d, e];
    __select(a b c d e f) = SYS_select[a, b, c, d, e];
    epoll_ctl(a b c d e f) = SYS_epoll_ctl[a, b, c, d];
    inotify_add_watch(a b c d e f) = SYS_inotify_add_watch[a, b, c];
    fanotify_mark(a b c d e f) = SYS_fanotify_mark[a, b, c, d, e];
    execve(a b c d e f) = SYS_execve[a, b, c];
    execveat(a b c d e f) = SYS_execveat[a, b, c, d, e];
    execv(a b c d e f) = SYS_execve[a, b, environment::variables()];
}

/// By this symbol `defuse run` knows the library ([`defuse_preload_plan::MARK`]).
// SAFETY: no other library has a symbol of this name.
#[unsafe(no_mangle)]
pub static defuse_preload_library: u8 = 0;

/// The names that are exported for what is more than a system call.
#[cfg(test)]
pub const OTHERS: &[&str] = &[
    "syscall", "fork", "__fork", "_Fork", "vfork", "__vfork", "dlopen", "dlmopen", "_exit", "_Exit",
];

/// # Safety
///
/// syscall(2). The sixth argument comes on the stack, as the caller of a function with a variable
/// number of arguments puts it.
#[unsafe(no_mangle)]
// SAFETY: the arguments are the program's.
pub unsafe extern "C" fn syscall(
    number: u64,
    a: u64,
    b: u64,
    c: u64,
    d: u64,
    e: u64,
    f: u64,
) -> i64 {
    // SAFETY: the type of syscall(2), called with what the program passed.
    type SyscallFunction = unsafe extern "C" fn(u64, u64, u64, u64, u64, u64, u64) -> i64;
    if let Some(value) = serve_call(number, &[a, b, c, d, e, f]) {
        return result(value);
    }
    match SYSCALL.address() {
        _ if dispatch::passes(number) => result(sys::pass(number, &[a, b, c, d, e, f])),
        0 => result(sys::pass(number, &[a, b, c, d, e, f])),
        address => {
            // SAFETY: the address belongs to the C library's syscall, which takes these arguments.
            let next = unsafe { std::mem::transmute::<u64, SyscallFunction>(address) };
            // SAFETY: see above.
            unsafe { next(number, a, b, c, d, e, f) }
        }
    }
}

/// # Safety
///
/// vfork(2), with a child that has memory of its own: one that shares ours would change our table.
#[unsafe(no_mangle)]
#[unsafe(naked)]
// SAFETY: the frame of the caller begins behind the address to return to.
pub unsafe extern "C" fn vfork() -> c_int {
    std::arch::naked_asm!("lea rdi, [rsp + 8]", "jmp {vfork}", vfork = sym vfork_from)
}

extern "C" fn vfork_from(frame: u64) -> c_int {
    // SAFETY: fork has no preconditions that vfork does not have.
    process_fork::as_vfork(frame, || unsafe { fork() })
}

/// # Safety
///
/// vfork(2) by its inner name.
#[unsafe(no_mangle)]
#[unsafe(naked)]
// SAFETY: as vfork.
pub unsafe extern "C" fn __vfork() -> c_int {
    std::arch::naked_asm!("lea rdi, [rsp + 8]", "jmp {vfork}", vfork = sym vfork_from)
}

/// # Safety
///
/// fork(2). `EPERM` if a file system is in the memory of this process and its policy is `deny`.
#[unsafe(no_mangle)]
// SAFETY: as the function of this name.
pub unsafe extern "C" fn fork() -> c_int {
    if process_fork::is_refused() {
        return result(-i64::from(libc::EPERM)) as c_int;
    }
    FORK.call(&[0; 6]) as c_int
}

/// # Safety
///
/// fork(2) by its inner name.
#[unsafe(no_mangle)]
// SAFETY: as fork.
pub unsafe extern "C" fn __fork() -> c_int {
    // SAFETY: the same function.
    unsafe { fork() }
}

/// # Safety
///
/// fork(2) without the handlers of pthread_atfork(3).
#[unsafe(no_mangle)]
// SAFETY: as the function of this name.
pub unsafe extern "C" fn _Fork() -> c_int {
    if process_fork::is_refused() {
        return result(-i64::from(libc::EPERM)) as c_int;
    }
    process_fork::call_without_handlers(|| FORK_ALONE.call(&[0; 6])) as c_int
}

/// # Safety
///
/// _exit(2).
#[unsafe(no_mangle)]
// SAFETY: as the function of this name.
pub unsafe extern "C" fn _exit(code: c_int) -> ! {
    let args = [code as u64, 0, 0, 0, 0, 0];
    let _ = serve::call(libc::SYS_exit_group as u64, &args);
    sys::pass(libc::SYS_exit_group as u64, &args);
    std::process::abort()
}

/// # Safety
///
/// _Exit(3), the same by its name in C.
#[unsafe(no_mangle)]
// SAFETY: as the function of this name.
pub unsafe extern "C" fn _Exit(code: c_int) -> ! {
    // SAFETY: the same function.
    unsafe { _exit(code) }
}

/// # Safety
///
/// dlopen(3). The dynamic loader looks at who called it: where its run path and its name space come
/// from. So the real function is jumped to, with the path replaced where it lies in a mount.
#[unsafe(no_mangle)]
#[unsafe(naked)]
// SAFETY: the arguments and the stack are left as the caller made them.
pub unsafe extern "C" fn dlopen(path: *const c_char, flags: c_int) -> *mut libc::c_void {
    std::arch::naked_asm!(
        "push rsi",
        "call {decide}",
        "pop rsi",
        "mov rdi, rax",
        "jmp qword ptr [rip + {next} + {address}]",
        decide = sym decide_library,
        next = sym DLOPEN,
        address = const std::mem::offset_of!(NextFunction, address),
    );
}

/// # Safety
///
/// dlmopen(3). A library in a name space of its own brings a C library of its own, which is not
/// patched: its calls would concern the kernel's files. Where calls are not dispatched, the call
/// fails like a loader's failure, by a dlopen(3) of a name that contains the reason.
#[unsafe(no_mangle)]
#[unsafe(naked)]
// SAFETY: the arguments and the stack are left as the caller made them.
pub unsafe extern "C" fn dlmopen(
    space: libc::c_long,
    path: *const c_char,
    flags: c_int,
) -> *mut libc::c_void {
    std::arch::naked_asm!(
        "push rdi",
        "push rsi",
        "push rdx",
        "call {decide}",
        "mov rcx, rdx",
        "pop rdx",
        "pop rsi",
        "pop rdi",
        "test rcx, rcx",
        "jnz 2f",
        "mov rsi, rax",
        "jmp qword ptr [rip + {own} + {address}]",
        "2:",
        "mov rdi, rax",
        "mov esi, edx",
        "jmp qword ptr [rip + {next} + {address}]",
        decide = sym decide_space,
        own = sym DLMOPEN,
        next = sym DLOPEN,
        address = const std::mem::offset_of!(NextFunction, address),
    );
}

/// The arguments with which [`dlmopen`] continues.
#[repr(C)]
struct DlmopenArguments {
    path: *const c_char,
    /// Not 0 where the path is the reason of a refusal.
    refused: u64,
}

/// The error that dlerror(3) returns begins with the path.
const NO_SPACE: &CStr =
    c"/dlmopen: a C library in a name space of its own would go past the mounts \
    of this run: use `defuse run --dispatch`";

extern "C" fn decide_space(space: libc::c_long, path: *const c_char) -> DlmopenArguments {
    DLMOPEN.address();
    let is_served = state::get().is_none() || mode::is_dispatched();
    if space != 0 && !is_served {
        DLOPEN.address();
        return DlmopenArguments { path: NO_SPACE.as_ptr(), refused: 1 };
    }
    DlmopenArguments { path: decide_library(path), refused: 0 }
}

extern "C" fn decide_library(path: *const c_char) -> *const c_char {
    DLOPEN.address();
    let Ok(text) = sys::string(path as u64) else { return path };
    let other = if text.contains(&b'/') { library(text) } else { None };
    if let Some(process) = state::get()
        && is_patched()
        && !mode::is_dispatched()
        && let Some(_inside) = InsideGuard::enter()
    {
        own_calls::check_library(process, other.as_ref().map_or(text, |other| other.to_bytes()));
    }
    // The loader keeps the name for as long as the library is loaded, which has no end here.
    other.map_or(path, |other| other.into_raw().cast_const())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::path::Path;

    use defuse_preload_plan::analysis::ObjectFile;
    use defuse_preload_plan::calls;

    use super::*;

    #[test]
    fn every_name_is_a_call_that_is_looked_at() {
        for (name, number) in EXPORTS {
            assert!(calls::name(*number as u16).is_some(), "{name} is {number}");
        }
        let names: BTreeSet<_> = EXPORTS.iter().map(|(name, _)| name).collect();
        assert_eq!(names.len(), EXPORTS.len());
    }

    #[test]
    fn the_c_library_of_this_machine_has_no_site_that_cannot_be_patched() {
        let Ok(libc) = ObjectFile::read(Path::new("/lib/x86_64-linux-gnu/libc.so.6")) else {
            println!("not here: the C library is elsewhere");
            return;
        };
        assert_eq!(libc.unreachable, []);
        let numbers: BTreeSet<_> = libc.sites.iter().filter_map(|site| site.number).collect();
        // Functions that the C library makes by other calls.
        let other = [
            "open",
            "select",
            "getdents",
            "getrlimit",
            "setrlimit",
            "utime",
            "utimes",
            "futimesat",
            "mknod",
            "io_setup",
            "io_submit",
            "io_uring_setup",
            "io_uring_enter",
            "io_uring_register",
            "openat2",
            "fchmodat2",
            "seccomp",
            "setxattrat",
            "getxattrat",
            "listxattrat",
            "removexattrat",
            "file_getattr",
            "file_setattr",
        ];
        for (number, name) in calls::CALLS {
            assert!(numbers.contains(number) || other.contains(name), "{name} has no site");
        }
        let missing: Vec<_> = OTHERS.iter().filter(|name| !libc.exports.contains(**name)).collect();
        assert!(missing.is_empty(), "{missing:?}");
    }
}
