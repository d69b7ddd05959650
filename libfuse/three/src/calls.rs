//! The functions that only libfuse 3 has, or has in this form.

use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::ptr::null_mut;

use defuse_libfuse::OperationTable;
use defuse_libfuse::abi::{ConnInfoThree, FuseArgs, LoopConfigOld};
use defuse_libfuse::args::{replace, words};
use defuse_libfuse::cmdline::{CommandLine, DEFAULT_THREADS, print_usage};
use defuse_libfuse::daemon::fuse_daemonize;
use defuse_libfuse::handle::{self, FuseHandle, into_pointer, text_of};
use defuse_libfuse::logging::error;
use defuse_libfuse::options::{ApiVersion, ConnOptions, take_from};
use defuse_libfuse::signals::{fuse_remove_signal_handlers, fuse_set_signal_handlers};

/// `struct fuse_loop_config`, which programs only get from [`fuse_loop_cfg_create`].
pub struct LoopSettings {
    max_threads: c_uint,
}

/// Creates settings of a loop.
pub extern "C" fn fuse_loop_cfg_create() -> *mut LoopSettings {
    Box::into_raw(Box::new(LoopSettings { max_threads: DEFAULT_THREADS }))
}

/// Frees settings of a loop.
///
/// # Safety
///
/// `config` is null or from [`fuse_loop_cfg_create`].
pub unsafe extern "C" fn fuse_loop_cfg_destroy(config: *mut LoopSettings) {
    if !config.is_null() {
        // SAFETY: the caller's promise.
        drop(unsafe { Box::from_raw(config) });
    }
}

/// Accepted: idle threads end by themselves.
pub extern "C" fn fuse_loop_cfg_set_idle_threads(_config: *mut LoopSettings, _threads: c_uint) {}

/// Sets the most threads.
///
/// # Safety
///
/// `config` is from [`fuse_loop_cfg_create`].
pub unsafe extern "C" fn fuse_loop_cfg_set_max_threads(config: *mut LoopSettings, threads: c_uint) {
    // SAFETY: the caller's promise.
    unsafe { (*config).max_threads = threads };
}

/// Accepted: each thread has a descriptor of its own where that is possible.
pub extern "C" fn fuse_loop_cfg_set_clone_fd(_config: *mut LoopSettings, _clone_fd: c_uint) {}

/// Takes over the settings of an older program, which have no effect.
pub extern "C" fn fuse_loop_cfg_convert(_config: *mut LoopSettings, _old: *mut LoopConfigOld) {}

/// Creates a handle for the operations of a program. Returns null after an error, which is printed.
///
/// # Safety
///
/// `args` is a `struct fuse_args`, and `operations` has `size` bytes of a `struct fuse_operations`.
pub unsafe extern "C" fn fuse_new(
    args: *mut FuseArgs,
    operations: *const c_void,
    size: usize,
    data: *mut c_void,
) -> *mut c_void {
    // SAFETY: the caller's promise.
    unsafe {
        let table = OperationTable::three(operations, size);
        into_pointer(FuseHandle::new(ApiVersion::Three, table, &words(args), data))
    }
}

/// Mounts. Returns -1 after an error, which is printed.
///
/// # Safety
///
/// `fuse` is a handle, and `mountpoint` a path.
pub unsafe extern "C" fn fuse_mount(fuse: *mut c_void, mountpoint: *const c_char) -> c_int {
    // SAFETY: the caller's promise.
    let (handle, mountpoint) = unsafe { (handle::of(fuse), text_of(mountpoint)) };
    match handle.map(|handle| handle.mount(mountpoint)) {
        Some(Ok(())) => 0,
        Some(Err(message)) => {
            error(&message);
            -1
        }
        None => -1,
    }
}

/// Unmounts.
///
/// # Safety
///
/// `fuse` is a handle or null.
pub unsafe extern "C" fn fuse_unmount(fuse: *mut c_void) {
    // SAFETY: the caller's promise.
    if let Some(handle) = unsafe { handle::of(fuse) } {
        handle.unmount();
    }
}

/// Ends a handle.
///
/// # Safety
///
/// `fuse` is a handle or null, and is not used any more.
pub unsafe extern "C" fn fuse_destroy(fuse: *mut c_void) {
    // SAFETY: the caller's promise.
    unsafe {
        fuse_unmount(fuse);
        handle::destroy(fuse);
    }
}

/// Serves the mount by one thread until it ends. Returns 0, the number of a signal that has ended it, or -1.
///
/// # Safety
///
/// `fuse` is a handle or null.
pub unsafe extern "C" fn fuse_loop(fuse: *mut c_void) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { handle::of(fuse) }.map_or(-1, |handle| handle.run(Some(1)))
}

/// Serves the mount by several threads until it ends.
///
/// # Safety
///
/// `fuse` is a handle or null, and `config` null or from [`fuse_loop_cfg_create`].
pub unsafe extern "C" fn fuse_loop_mt_312(fuse: *mut c_void, config: *const LoopSettings) -> c_int {
    // SAFETY: the caller's promise.
    let (handle, config) = unsafe { (handle::of(fuse), config.as_ref()) };
    let most = config.map_or(DEFAULT_THREADS, |config| config.max_threads);
    // The number that nobody has asked for leaves the decision to the session.
    let threads = (most != DEFAULT_THREADS).then_some(most.max(1) as usize);
    handle.map_or(-1, |handle| handle.run(threads))
}

/// Serves the mount by several threads; the settings of older programs have no effect.
///
/// # Safety
///
/// `fuse` is a handle or null.
pub unsafe extern "C" fn fuse_loop_mt_32(
    fuse: *mut c_void,
    _config: *const LoopConfigOld,
) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { fuse_loop_mt_312(fuse, std::ptr::null()) }
}

/// Serves the mount by several threads.
///
/// # Safety
///
/// `fuse` is a handle or null.
pub unsafe extern "C" fn fuse_loop_mt_31(fuse: *mut c_void, _clone_fd: c_int) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { fuse_loop_mt_312(fuse, std::ptr::null()) }
}

/// Lets the loop end.
///
/// # Safety
///
/// `fuse` is a handle or null.
pub unsafe extern "C" fn fuse_exit(fuse: *mut c_void) {
    // SAFETY: the caller's promise.
    if let Some(handle) = unsafe { handle::of(fuse) } {
        handle.exit();
    }
}

/// The session of a handle, which is the handle.
pub extern "C" fn fuse_get_session(fuse: *mut c_void) -> *mut c_void {
    fuse
}

/// Drops what the kernel caches of a file. Returns a negated error number.
///
/// # Safety
///
/// `fuse` is a handle or null, and `path` a path.
pub unsafe extern "C" fn fuse_invalidate_path(fuse: *mut c_void, path: *const c_char) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { handle::of(fuse).map_or(-libc::EINVAL, |handle| handle.invalidate(text_of(path))) }
}

/// Mounts. Returns -1 after an error, which is printed.
///
/// # Safety
///
/// The conditions of [`fuse_mount`].
pub unsafe extern "C" fn fuse_session_mount(
    session: *mut c_void,
    mountpoint: *const c_char,
) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { fuse_mount(session, mountpoint) }
}

/// Unmounts.
///
/// # Safety
///
/// `session` is a handle or null.
pub unsafe extern "C" fn fuse_session_unmount(session: *mut c_void) {
    // SAFETY: the caller's promise.
    unsafe { fuse_unmount(session) };
}

/// Unmounts. The handle ends by [`fuse_destroy`].
///
/// # Safety
///
/// `session` is a handle or null.
pub unsafe extern "C" fn fuse_session_destroy(session: *mut c_void) {
    // SAFETY: the caller's promise.
    unsafe { fuse_unmount(session) };
}

/// Lets the loop end.
///
/// # Safety
///
/// `session` is a handle or null.
pub unsafe extern "C" fn fuse_session_exit(session: *mut c_void) {
    // SAFETY: the caller's promise.
    unsafe { fuse_exit(session) };
}

/// True if the loop ends.
///
/// # Safety
///
/// `session` is a handle or null.
pub unsafe extern "C" fn fuse_session_exited(session: *mut c_void) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { handle::of(session) }.map_or(1, |handle| c_int::from(handle.has_exited()))
}

/// Lets the handle be used for another loop.
///
/// # Safety
///
/// `session` is a handle or null.
pub unsafe extern "C" fn fuse_session_reset(session: *mut c_void) {
    // SAFETY: the caller's promise.
    if let Some(handle) = unsafe { handle::of(session) } {
        handle.reset();
    }
}

/// The number of the device of a mount, or -1.
///
/// # Safety
///
/// `session` is a handle or null.
pub unsafe extern "C" fn fuse_session_fd(session: *mut c_void) -> c_int {
    // SAFETY: the caller's promise.
    let mounted = unsafe { handle::of(session) }.and_then(FuseHandle::mounted_device);
    mounted.map_or(-1, |mounted| mounted.fd)
}

/// Serves the mount by one thread.
///
/// # Safety
///
/// `session` is a handle or null.
pub unsafe extern "C" fn fuse_session_loop(session: *mut c_void) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { fuse_loop(session) }
}

/// No thread is needed: inodes in use are never forgotten.
pub extern "C" fn fuse_start_cleanup_thread(_fuse: *mut c_void) -> c_int {
    0
}

/// Ends nothing.
pub extern "C" fn fuse_stop_cleanup_thread(_fuse: *mut c_void) {}

/// Cleans nothing. Returns the seconds until the next call.
pub extern "C" fn fuse_clean_cache(_fuse: *mut c_void) -> c_int {
    3600
}

/// Mounts without a handle, which this library does not serve. Returns -1.
pub extern "C" fn fuse_open_channel(_mountpoint: *const c_char, _options: *const c_char) -> c_int {
    error("fuse: fuse_open_channel is not served by this library: use the original libfuse");
    -1
}

/// Takes options about INIT out of `args`. Returns null after an error, which is printed.
///
/// # Safety
///
/// `args` is a `struct fuse_args`.
pub unsafe extern "C" fn fuse_parse_conn_info_opts(args: *mut FuseArgs) -> *mut ConnOptions {
    let mut options = ConnOptions::default();
    // SAFETY: the caller's promise.
    unsafe {
        match take_from(&words(args), |option| options.take(option)) {
            Ok(rest) => replace(args, &rest),
            Err(message) => {
                error(&message);
                return null_mut();
            }
        }
        // Programs free(3) it, so that it must not own more.
        let place = libc::malloc(size_of::<ConnOptions>()).cast::<ConnOptions>();
        if !place.is_null() {
            place.write(options);
        }
        place
    }
}

/// Applies options about INIT.
///
/// # Safety
///
/// `options` is from [`fuse_parse_conn_info_opts`], and `conn` is the structure that `init` got.
pub unsafe extern "C" fn fuse_apply_conn_info_opts(
    options: *const ConnOptions,
    conn: *mut ConnInfoThree,
) {
    // SAFETY: the caller's promise.
    unsafe { (*options).apply(&mut *conn) };
}

/// `fuse_main`: parses the command line, mounts, serves, and unmounts. Returns the exit code of the program: 1 for wrong options, 2
/// without a mount point, 3 if the setup fails, 4 if the mount fails, 5 if the background process fails, 6 if signals cannot be
/// handled, 7 or 8 after an error or a signal of the loop.
///
/// # Safety
///
/// `argv` has `argc` strings, and `operations` has `size` bytes of a `struct fuse_operations`.
pub unsafe extern "C" fn fuse_main_real(
    argc: c_int,
    argv: *mut *mut c_char,
    operations: *const c_void,
    size: usize,
    data: *mut c_void,
) -> c_int {
    let args = FuseArgs { argc, argv, allocated: 0 };
    // SAFETY: the caller's promise.
    let (all, table) = unsafe { (words(&args), OperationTable::three(operations, size)) };
    let (line, left) = match CommandLine::parse(ApiVersion::Three, &all) {
        Ok(parsed) => parsed,
        Err(message) => {
            error(&message);
            return 1;
        }
    };
    if line.version {
        println!("FUSE library version 3.14.0");
        return 0;
    }
    if line.help {
        print_usage(&all, ApiVersion::Three);
        return 0;
    }
    let Some(mountpoint) = &line.mountpoint else {
        error("error: no mountpoint specified");
        return 2;
    };
    let fuse = into_pointer(FuseHandle::new(ApiVersion::Three, table, &left, data));
    if fuse.is_null() {
        return 3;
    }
    // SAFETY: the handle was just created, and is destroyed after its last use.
    unsafe {
        let code = serve(fuse, &line, mountpoint);
        fuse_destroy(fuse);
        code
    }
}

/// Mounts, serves and unmounts. Returns the exit code.
///
/// # Safety
///
/// `fuse` is a handle.
unsafe fn serve(fuse: *mut c_void, line: &CommandLine, mountpoint: &CString) -> c_int {
    let mountpoint: &CStr = mountpoint;
    // SAFETY: the caller's promise.
    unsafe {
        if fuse_mount(fuse, mountpoint.as_ptr()) != 0 {
            return 4;
        }
        if fuse_daemonize(c_int::from(line.foreground)) != 0 {
            fuse_unmount(fuse);
            return 5;
        }
        if fuse_set_signal_handlers(fuse) != 0 {
            fuse_unmount(fuse);
            return 6;
        }
        let threads = line.max_threads.filter(|&most| most != DEFAULT_THREADS);
        let threads = if line.single { Some(1) } else { threads.map(|most| most.max(1) as usize) };
        let ended = handle::of(fuse).map_or(-1, |handle| handle.run(threads));
        fuse_remove_signal_handlers(fuse);
        fuse_unmount(fuse);
        if ended == 0 { 0 } else { 8 }
    }
}
