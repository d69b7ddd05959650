//! The functions for programs that were built with libfuse 2.2 to 2.5. Their `init` takes no
//! argument and is passed one, which it does not read.

use std::ffi::{CString, c_char, c_int, c_void};
use std::ptr::null_mut;

use defuse_libfuse::OperationTable;
use defuse_libfuse::abi::FuseArgs;
use defuse_libfuse::args::{replace, words};
use defuse_libfuse::handle::{into_pointer, mount_by_number, text_of};
use defuse_libfuse::logging::error;

use crate::calls::{fuse_unmount, give, handle_for, mount_with, run_program, set_up, tear_down};

/// `fuse_main` of libfuse 2.5.
///
/// # Safety
///
/// `argv` has `argc` strings, and `operations` has `size` bytes of the structure of 2.5.
pub unsafe extern "C" fn main_real_25(
    argc: c_int,
    argv: *mut *mut c_char,
    operations: *const c_void,
    size: usize,
) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { run_program(argc, argv, OperationTable::two(operations, size), null_mut()) }
}

/// `fuse_main` of libfuse 2.2.
///
/// # Safety
///
/// `argv` has `argc` strings, and `operations` has `size` bytes of the structure of 2.2.
pub unsafe extern "C" fn main_real_22(
    argc: c_int,
    argv: *mut *mut c_char,
    operations: *const c_void,
    size: usize,
) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { run_program(argc, argv, OperationTable::oldest(operations, size), null_mut()) }
}

/// Mounts, and returns the number of the device, or -1 after an error, which is printed.
///
/// # Safety
///
/// `mountpoint` is a path, and `args` null or a `struct fuse_args`.
pub unsafe extern "C" fn mount_25(mountpoint: *const c_char, args: *mut FuseArgs) -> c_int {
    // SAFETY: the caller's promise.
    unsafe {
        let all = if args.is_null() { Vec::new() } else { words(args) };
        match mount_with(text_of(mountpoint), &all) {
            Ok((mounted, rest)) => {
                if !args.is_null() {
                    replace(args, &rest);
                }
                mounted.fd
            }
            Err(message) => {
                error(&message);
                -1
            }
        }
    }
}

/// The arguments of a program with one list of options.
///
/// # Safety
///
/// `options` is null or a string.
pub(crate) unsafe fn list(options: *const c_char) -> Vec<CString> {
    let program = c"fuse".to_owned();
    if options.is_null() {
        return vec![program];
    }
    // SAFETY: the caller's promise.
    let options = unsafe { text_of(options) }.to_owned();
    vec![program, c"-o".to_owned(), options]
}

/// Mounts with a list of options, and returns the number of the device, or -1.
///
/// # Safety
///
/// `mountpoint` is a path, and `options` null or a string.
pub unsafe extern "C" fn mount_22(mountpoint: *const c_char, options: *const c_char) -> c_int {
    // SAFETY: the caller's promise.
    match unsafe { mount_with(text_of(mountpoint), &list(options)) } {
        Ok((mounted, _)) => mounted.fd,
        Err(message) => {
            error(&message);
            -1
        }
    }
}

/// Mounts for programs of libfuse 1, which this library does not serve. Returns -1.
pub extern "C" fn mount_1(_mountpoint: *const c_char, _args: *const *const c_char) -> c_int {
    too_old();
    -1
}

/// Creates a handle for the mount with this device. Returns null after an error, which is printed.
///
/// # Safety
///
/// `args` is null or a `struct fuse_args`, and `operations` has `size` bytes of the structure of
/// 2.5.
pub unsafe extern "C" fn new_25(
    fd: c_int,
    args: *mut FuseArgs,
    operations: *const c_void,
    size: usize,
) -> *mut c_void {
    // SAFETY: the caller's promise.
    let (all, table) = unsafe {
        let all = if args.is_null() { Vec::new() } else { words(args) };
        (all, OperationTable::two(operations, size))
    };
    into_pointer(handle_for(mount_by_number(fd), table, &all, null_mut()))
}

/// Creates a handle for the mount with this device, with a list of options.
///
/// # Safety
///
/// `options` is null or a string, and `operations` has `size` bytes of the structure of 2.2.
pub unsafe extern "C" fn new_22(
    fd: c_int,
    options: *const c_char,
    operations: *const c_void,
    size: usize,
) -> *mut c_void {
    // SAFETY: the caller's promise.
    let (all, table) = unsafe { (list(options), OperationTable::oldest(operations, size)) };
    into_pointer(handle_for(mount_by_number(fd), table, &all, null_mut()))
}

/// `fuse_setup` of libfuse 2.5.
///
/// # Safety
///
/// `argv` has `argc` strings, `operations` has `size` bytes of the structure of 2.5, and the others
/// lead to variables.
pub unsafe extern "C" fn setup_25(
    argc: c_int,
    argv: *mut *mut c_char,
    operations: *const c_void,
    size: usize,
    mountpoint: *mut *mut c_char,
    multithreaded: *mut c_int,
    fd: *mut c_int,
) -> *mut c_void {
    // SAFETY: the caller's promise.
    unsafe {
        let table = OperationTable::two(operations, size);
        set_up_with(argc, argv, table, (mountpoint, multithreaded, fd))
    }
}

/// `fuse_setup` of libfuse 2.2.
///
/// # Safety
///
/// `argv` has `argc` strings, `operations` has `size` bytes of the structure of 2.2, and the others
/// lead to variables.
pub unsafe extern "C" fn setup_22(
    argc: c_int,
    argv: *mut *mut c_char,
    operations: *const c_void,
    size: usize,
    mountpoint: *mut *mut c_char,
    multithreaded: *mut c_int,
    fd: *mut c_int,
) -> *mut c_void {
    // SAFETY: the caller's promise.
    unsafe {
        let table = OperationTable::oldest(operations, size);
        set_up_with(argc, argv, table, (mountpoint, multithreaded, fd))
    }
}

/// # Safety
///
/// `argv` has `argc` strings, and the variables are null or variables.
unsafe fn set_up_with(
    argc: c_int,
    argv: *mut *mut c_char,
    table: OperationTable,
    (mountpoint, multithreaded, fd): (*mut *mut c_char, *mut c_int, *mut c_int),
) -> *mut c_void {
    // SAFETY: the caller's promise.
    unsafe {
        let Some(made) = set_up(argc, argv, table, null_mut()) else { return null_mut() };
        give(&made, mountpoint, multithreaded);
        if !fd.is_null() {
            fd.write(made.fd);
        }
        made.fuse
    }
}

/// `fuse_teardown` of libfuse 2.2 to 2.5.
///
/// # Safety
///
/// `fuse` is a handle, and `mountpoint` a string of malloc(3) or null.
pub unsafe extern "C" fn teardown_22(fuse: *mut c_void, _fd: c_int, mountpoint: *mut c_char) {
    // SAFETY: the caller's promise.
    unsafe {
        tear_down(fuse);
        libc::free(mountpoint.cast());
    }
}

/// Unmounts what is mounted at this path.
///
/// # Safety
///
/// `mountpoint` is a path.
pub unsafe extern "C" fn unmount_22(mountpoint: *const c_char) {
    // SAFETY: the caller's promise.
    unsafe { fuse_unmount(mountpoint, null_mut()) };
}

/// Programs of libfuse 1 and 2.1 are not served. Returns null.
pub extern "C" fn new_oldest() -> *mut c_void {
    too_old();
    null_mut()
}

/// `fuse_main` of programs of libfuse 1 and 2.1, which are not served. Returns 1.
pub extern "C" fn main_oldest() -> c_int {
    too_old();
    1
}

fn too_old() {
    error(
        "fuse: programs that were built before libfuse 2.2 are not served by this library: use the original libfuse",
    );
}
