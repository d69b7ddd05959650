//! Functions of the C library that our own code calls and other preloaded libraries replace: their
//! replacements are for the program, and may hold locks of theirs, or call us.
//!
//! This library has functions of these names that no other library sees, so that its own calls lead
//! here. Calls that it exports ([`crate::catch::symbols`]) lead to themselves.

use std::ffi::{c_int, c_void};
use std::sync::OnceLock;

use crate::catch::next::{self, result};
use crate::machine::sys;

std::arch::global_asm!(
    ".globl dl_iterate_phdr",
    ".hidden dl_iterate_phdr",
    ".type dl_iterate_phdr,@function",
    "dl_iterate_phdr:",
    "jmp {objects}",
    ".globl getsockopt",
    ".hidden getsockopt",
    ".type getsockopt,@function",
    "getsockopt:",
    "jmp {getsockopt}",
    ".globl socketpair",
    ".hidden socketpair",
    ".type socketpair,@function",
    "socketpair:",
    "jmp {socketpair}",
    ".globl sendmsg",
    ".hidden sendmsg",
    ".type sendmsg,@function",
    "sendmsg:",
    "jmp {sendmsg}",
    ".globl recvmsg",
    ".hidden recvmsg",
    ".type recvmsg,@function",
    "recvmsg:",
    "jmp {recvmsg}",
    objects = sym objects,
    getsockopt = sym getsockopt_unwrapped,
    socketpair = sym socketpair_unwrapped,
    sendmsg = sym sendmsg_unwrapped,
    recvmsg = sym recvmsg_unwrapped,
);

/// The callback, in the form in which the C library calls it for each object.
// SAFETY: the type of the first argument of dl_iterate_phdr(3), which is passed on.
type IterateCallback = Option<unsafe extern "C" fn(*mut c_void, usize, *mut c_void) -> c_int>;
// SAFETY: the type of dl_iterate_phdr(3), called with its arguments.
type IterateFunction = unsafe extern "C" fn(IterateCallback, *mut c_void) -> c_int;

extern "C" fn objects(callback: IterateCallback, data: *mut c_void) -> c_int {
    static REAL: OnceLock<u64> = OnceLock::new();
    let name = c"dl_iterate_phdr";
    let real = *REAL.get_or_init(|| match next::find_in_c_library(name) {
        0 => next::find(name),
        address => address,
    });
    if real == 0 {
        return 0;
    }
    // SAFETY: the address belongs to the function of this name, which gets its arguments.
    unsafe { std::mem::transmute::<u64, IterateFunction>(real)(callback, data) }
}

extern "C" fn getsockopt_unwrapped(
    fd: c_int,
    level: c_int,
    name: c_int,
    at: u64,
    len: u64,
) -> c_int {
    let args = [fd as u64, level as u64, name as u64, at, len, 0];
    result(sys::pass(libc::SYS_getsockopt as u64, &args)) as c_int
}

extern "C" fn socketpair_unwrapped(domain: c_int, kind: c_int, protocol: c_int, at: u64) -> c_int {
    let args = [domain as u64, kind as u64, protocol as u64, at, 0, 0];
    result(sys::pass(libc::SYS_socketpair as u64, &args)) as c_int
}

extern "C" fn sendmsg_unwrapped(fd: c_int, message: u64, flags: c_int) -> i64 {
    result(sys::pass(libc::SYS_sendmsg as u64, &[fd as u64, message, flags as u64, 0, 0, 0]))
}

extern "C" fn recvmsg_unwrapped(fd: c_int, message: u64, flags: c_int) -> i64 {
    result(sys::pass(libc::SYS_recvmsg as u64, &[fd as u64, message, flags as u64, 0, 0, 0]))
}
