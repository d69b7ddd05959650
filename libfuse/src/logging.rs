//! `fuse_log`: messages to standard error, or to the function of the program.

use std::ffi::{CString, c_char, c_int, c_void};
use std::sync::Mutex;

/// `fuse_log_func_t`. The last argument is a `va_list`.
// SAFETY: a type; `log_with_list` says what it needs.
pub type LogFunction = unsafe extern "C" fn(c_int, *const c_char, *mut c_void);

/// The function of the program.
static FUNCTION: Mutex<Option<LogFunction>> = Mutex::new(None);

// SAFETY: the declaration of vdprintf(3).
unsafe extern "C" {
    fn vdprintf(fd: c_int, format: *const c_char, list: *mut c_void) -> c_int;
}

/// Sets the function that gets all messages; without one they go to standard error.
pub extern "C" fn fuse_set_log_func(function: Option<LogFunction>) {
    *FUNCTION.lock().unwrap_or_else(|poisoned| poisoned.into_inner()) = function;
}

/// Logs a message whose arguments are in `list`.
///
/// # Safety
///
/// `format` is a format of printf(3), and `list` a `va_list` with its arguments.
pub unsafe extern "C" fn log_with_list(level: c_int, format: *const c_char, list: *mut c_void) {
    let function = *FUNCTION.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    // SAFETY: the caller's promise, for a function of the program and for one of the C library.
    unsafe {
        match function {
            Some(function) => function(level, format, list),
            None => {
                vdprintf(libc::STDERR_FILENO, format, list);
            }
        }
    }
}

/// Logs an error of this library, without a line end.
pub fn error(message: &str) {
    // A percent sign of the message is no conversion.
    let text = format!("{message}\n").replace('%', "%%");
    let Ok(text) = CString::new(text) else { return };
    // An empty list: the message has no conversions.
    let mut list = [0_u64; 4];
    const ERROR: c_int = 3;
    // SAFETY: the format takes no argument, so that the list is not read.
    unsafe { log_with_list(ERROR, text.as_ptr(), list.as_mut_ptr().cast()) };
}

// `fuse_log` takes a variable number of arguments, which Rust cannot define. This saves the
// registers with arguments as the System V ABI describes a `va_list`, and passes it on.
#[cfg(target_arch = "x86_64")]
core::arch::global_asm!(
    ".pushsection .text.defuse_libfuse_log,\"ax\",@progbits",
    ".globl defuse_libfuse_log",
    ".hidden defuse_libfuse_log",
    ".type defuse_libfuse_log,@function",
    "defuse_libfuse_log:",
    "sub rsp, 216",
    "mov [rsp+48], rdx",
    "mov [rsp+56], rcx",
    "mov [rsp+64], r8",
    "mov [rsp+72], r9",
    "test al, al",
    "je 2f",
    "movaps [rsp+80], xmm0",
    "movaps [rsp+96], xmm1",
    "movaps [rsp+112], xmm2",
    "movaps [rsp+128], xmm3",
    "movaps [rsp+144], xmm4",
    "movaps [rsp+160], xmm5",
    "movaps [rsp+176], xmm6",
    "movaps [rsp+192], xmm7",
    "2:",
    "mov dword ptr [rsp], 16",
    "mov dword ptr [rsp+4], 48",
    "lea rax, [rsp+224]",
    "mov [rsp+8], rax",
    "lea rax, [rsp+32]",
    "mov [rsp+16], rax",
    "mov rdx, rsp",
    "call {log}",
    "add rsp, 216",
    "ret",
    ".size defuse_libfuse_log,.-defuse_libfuse_log",
    ".popsection",
    log = sym log_with_list,
);

#[cfg(target_arch = "x86_64")]
// SAFETY: the function that the assembly above defines.
unsafe extern "C" {
    /// `fuse_log`: logs a message with the arguments of printf(3).
    #[link_name = "defuse_libfuse_log"]
    pub fn fuse_log(level: c_int, format: *const c_char, ...);
}

#[cfg(all(test, target_arch = "x86_64"))]
mod tests {
    use super::*;
    use std::ffi::CStr;

    static SEEN: Mutex<Vec<String>> = Mutex::new(Vec::new());

    // SAFETY: the declaration of vsnprintf(3).
    unsafe extern "C" {
        fn vsnprintf(
            to: *mut c_char,
            len: usize,
            format: *const c_char,
            list: *mut c_void,
        ) -> c_int;
    }

    // SAFETY: needs what `fuse_log` passes.
    unsafe extern "C" fn record(level: c_int, format: *const c_char, list: *mut c_void) {
        let mut text = [0_u8; 200];
        // SAFETY: the arguments are those of the message, and the buffer is ours.
        unsafe { vsnprintf(text.as_mut_ptr().cast(), text.len(), format, list) };
        let text = CStr::from_bytes_until_nul(&text).unwrap().to_string_lossy().into_owned();
        SEEN.lock().unwrap().push(format!("{level} {text}"));
    }

    #[test]
    fn a_message_reaches_the_function_of_the_program_with_all_its_arguments() {
        fuse_set_log_func(Some(record));
        // SAFETY: the arguments have the types of the conversions.
        unsafe {
            fuse_log(
                6,
                c"%d %s %.1f %d %d %d %d %.2f".as_ptr(),
                1 as c_int,
                c"two".as_ptr(),
                3.5_f64,
                4 as c_int,
                5 as c_int,
                6 as c_int,
                7 as c_int,
                8.25_f64,
            );
        }
        error("100%d of it");
        fuse_set_log_func(None);
        assert_eq!(*SEEN.lock().unwrap(), ["6 1 two 3.5 4 5 6 7 8.25", "3 100%d of it\n"]);
    }
}
