//! The functions that only libfuse 3 has, or has in this form.

use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::os::fd::IntoRawFd;
use std::ptr::null_mut;

use defuse_libfuse::OperationTable;
use defuse_libfuse::abi::{ConnInfoThree, DataPart, FuseArgs, LoopConfigOld};
use defuse_libfuse::args::{replace, words};
use defuse_libfuse::cmdline::{CommandLine, DEFAULT_THREADS, print_usage};
use defuse_libfuse::daemon::fuse_daemonize;
use defuse_libfuse::handle::{self, FuseHandle, MountedDevice, into_pointer, text_of};
use defuse_libfuse::logging::error;
use defuse_libfuse::low::{self, ThreadLimits};
use defuse_libfuse::options::{ApiVersion, ConnOptions, MountChoice, take_from};
use defuse_libfuse::signals::{fuse_remove_signal_handlers, fuse_set_signal_handlers};

/// `struct fuse_loop_config`, which programs only get from [`fuse_loop_cfg_create`].
pub struct LoopSettings {
    max_threads: c_uint,
    idle_threads: c_uint,
    clone_fd: bool,
}

impl Default for LoopSettings {
    fn default() -> Self {
        LoopSettings { max_threads: DEFAULT_THREADS, idle_threads: u32::MAX, clone_fd: false }
    }
}

impl LoopSettings {
    fn limits(&self) -> ThreadLimits {
        let LoopSettings { max_threads, idle_threads, clone_fd } = *self;
        ThreadLimits { most: max_threads as usize, idle: idle_threads as usize, clone_fd }
    }
}

/// Creates settings of a loop.
pub extern "C" fn fuse_loop_cfg_create() -> *mut LoopSettings {
    Box::into_raw(Box::default())
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

/// Sets the most threads that wait, for the interface of inodes; for that of paths, idle threads
/// end by themselves.
///
/// # Safety
///
/// `config` is from [`fuse_loop_cfg_create`].
pub unsafe extern "C" fn fuse_loop_cfg_set_idle_threads(
    config: *mut LoopSettings,
    threads: c_uint,
) {
    // SAFETY: the caller's promise.
    unsafe { (*config).idle_threads = threads };
}

/// Sets the most threads.
///
/// # Safety
///
/// `config` is from [`fuse_loop_cfg_create`].
pub unsafe extern "C" fn fuse_loop_cfg_set_max_threads(config: *mut LoopSettings, threads: c_uint) {
    // SAFETY: the caller's promise.
    unsafe { (*config).max_threads = threads };
}

/// Sets if each thread has a descriptor of its own, for the interface of inodes; for that of paths,
/// each has one where that is possible.
///
/// # Safety
///
/// `config` is from [`fuse_loop_cfg_create`].
pub unsafe extern "C" fn fuse_loop_cfg_set_clone_fd(config: *mut LoopSettings, clone_fd: c_uint) {
    // SAFETY: the caller's promise.
    unsafe { (*config).clone_fd = clone_fd != 0 };
}

/// Takes over the settings of an older program.
///
/// # Safety
///
/// `config` is from [`fuse_loop_cfg_create`], and `old` the structure of libfuse 3.2 to 3.11.
pub unsafe extern "C" fn fuse_loop_cfg_convert(
    config: *mut LoopSettings,
    old: *const LoopConfigOld,
) {
    // SAFETY: the caller's promise.
    unsafe {
        (*config).idle_threads = (*old).max_idle_threads;
        (*config).clone_fd = (*old).clone_fd != 0;
    }
}

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
/// `fuse` is a handle or a session, and `mountpoint` a path.
pub unsafe extern "C" fn fuse_mount(fuse: *mut c_void, mountpoint: *const c_char) -> c_int {
    // SAFETY: the caller's promise.
    let mounted = unsafe {
        let mountpoint = text_of(mountpoint);
        match (handle::of(fuse), low::of(fuse)) {
            (Some(handle), _) => handle.mount(mountpoint),
            (_, Some(session)) => session.mount(mountpoint),
            (None, None) => return -1,
        }
    };
    match mounted {
        Ok(()) => 0,
        Err(message) => {
            error(&message);
            -1
        }
    }
}

/// Unmounts.
///
/// # Safety
///
/// `fuse` is a handle, a session or null.
pub unsafe extern "C" fn fuse_unmount(fuse: *mut c_void) {
    // SAFETY: the caller's promise.
    match unsafe { (handle::of(fuse), low::of(fuse)) } {
        (Some(handle), _) => handle.unmount(),
        (_, Some(session)) => session.unmount(),
        (None, None) => {}
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

/// Serves the mount by one thread until it ends: for a session, by the calling one. Returns 0, the
/// number of a signal that has ended it, or a negative number after an error, which is printed.
///
/// # Safety
///
/// `fuse` is a handle, a session or null.
pub unsafe extern "C" fn fuse_loop(fuse: *mut c_void) -> c_int {
    // SAFETY: the caller's promise.
    match unsafe { (handle::of(fuse), low::of(fuse)) } {
        (Some(handle), _) => handle.run(Some(1)),
        (_, Some(session)) => session.run_alone(),
        (None, None) => -1,
    }
}

/// Serves the mount by several threads until it ends.
///
/// # Safety
///
/// `fuse` is a handle, a session or null, and `config` null or from [`fuse_loop_cfg_create`].
pub unsafe extern "C" fn fuse_loop_mt_312(fuse: *mut c_void, config: *const LoopSettings) -> c_int {
    let usual = LoopSettings::default();
    // SAFETY: the caller's promise.
    let (handle, config) = unsafe { (handle::of(fuse), config.as_ref().unwrap_or(&usual)) };
    let most = config.max_threads;
    // The number that no program has requested leaves the decision to the session.
    let threads = (most != DEFAULT_THREADS).then_some(most.max(1) as usize);
    // SAFETY: the caller's promise.
    match (handle, unsafe { low::of(fuse) }) {
        (Some(handle), _) => handle.run(threads),
        (_, Some(session)) => session.run_many(config.limits()),
        (None, None) => -1,
    }
}

/// Serves the mount by several threads, with the settings of older programs.
///
/// # Safety
///
/// `fuse` is a handle, a session or null, and `old` null or the structure of libfuse 3.2 to 3.11.
pub unsafe extern "C" fn fuse_loop_mt_32(fuse: *mut c_void, old: *const LoopConfigOld) -> c_int {
    let mut config = LoopSettings::default();
    // SAFETY: the caller's promise.
    unsafe {
        if !old.is_null() {
            fuse_loop_cfg_convert(&mut config, old);
        }
        fuse_loop_mt_312(fuse, &config)
    }
}

/// Serves the mount by several threads.
///
/// # Safety
///
/// `fuse` is a handle, a session or null.
pub unsafe extern "C" fn fuse_loop_mt_31(fuse: *mut c_void, clone_fd: c_int) -> c_int {
    let config = LoopSettings { clone_fd: clone_fd != 0, ..LoopSettings::default() };
    // SAFETY: the caller's promise.
    unsafe { fuse_loop_mt_312(fuse, &config) }
}

/// Lets the loop end.
///
/// # Safety
///
/// `fuse` is a handle or null.
pub unsafe extern "C" fn fuse_exit(fuse: *mut c_void) {
    // SAFETY: the caller's promise.
    match unsafe { (handle::of(fuse), low::of(fuse)) } {
        (Some(handle), _) => handle.exit(),
        (_, Some(session)) => session.exit(),
        (None, None) => {}
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
/// `session` is a handle, a session or null.
pub unsafe extern "C" fn fuse_session_unmount(session: *mut c_void) {
    // SAFETY: the caller's promise.
    unsafe { fuse_unmount(session) };
}

/// Ends a session. Unmounts a handle, which ends by [`fuse_destroy`].
///
/// # Safety
///
/// `session` is a handle, a session or null.
pub unsafe extern "C" fn fuse_session_destroy(session: *mut c_void) {
    // SAFETY: the caller's promise.
    unsafe {
        if !low::destroy(session) {
            fuse_unmount(session);
        }
    }
}

/// Lets the loop end.
///
/// # Safety
///
/// `session` is a handle, a session or null.
pub unsafe extern "C" fn fuse_session_exit(session: *mut c_void) {
    // SAFETY: the caller's promise.
    unsafe { fuse_exit(session) };
}

/// True if the loop ends.
///
/// # Safety
///
/// `session` is a handle, a session or null.
pub unsafe extern "C" fn fuse_session_exited(session: *mut c_void) -> c_int {
    // SAFETY: the caller's promise.
    let ends = match unsafe { (handle::of(session), low::of(session)) } {
        (Some(handle), _) => handle.has_exited(),
        (_, Some(session)) => session.has_exited(),
        (None, None) => true,
    };
    c_int::from(ends)
}

/// Lets the handle be used for another loop.
///
/// # Safety
///
/// `session` is a handle, a session or null.
pub unsafe extern "C" fn fuse_session_reset(session: *mut c_void) {
    // SAFETY: the caller's promise.
    match unsafe { (handle::of(session), low::of(session)) } {
        (Some(handle), _) => handle.reset(),
        (_, Some(session)) => session.reset(),
        (None, None) => {}
    }
}

/// The number of the device of a mount, or -1.
///
/// # Safety
///
/// `session` is a handle, a session or null.
pub unsafe extern "C" fn fuse_session_fd(session: *mut c_void) -> c_int {
    // SAFETY: the caller's promise.
    unsafe {
        let mounted = handle::of(session).and_then(FuseHandle::mounted_device);
        let port = low::of(session).and_then(|session| session.port());
        mounted.map(|mounted| mounted.fd).or(port.map(|port| port.number())).unwrap_or(-1)
    }
}

/// Serves the mount by one thread.
///
/// # Safety
///
/// `session` is a handle, a session or null.
pub unsafe extern "C" fn fuse_session_loop(session: *mut c_void) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { fuse_loop(session) }
}

/// Creates a session for the operations of a program on inodes. Returns null after an error, which
/// is printed.
///
/// # Safety
///
/// `args` is a `struct fuse_args`, and `operations` has `size` bytes of a
/// `struct fuse_lowlevel_ops`.
pub unsafe extern "C" fn fuse_session_new(
    args: *mut FuseArgs,
    operations: *const c_void,
    size: usize,
    data: *mut c_void,
) -> *mut c_void {
    // SAFETY: the caller's promise.
    unsafe { low::session_three(&words(args), operations, size, data) }
}

/// Receives a message into `buffer`. Returns its length, 0 at the end of the session, or a negated
/// error number.
///
/// # Safety
///
/// `session` is null or a session, and `buffer` a `struct fuse_buf` without memory, or with that of
/// an earlier call.
pub unsafe extern "C" fn fuse_session_receive_buf(
    session: *mut c_void,
    buffer: *mut DataPart,
) -> c_int {
    // SAFETY: the caller's promise.
    unsafe {
        let Some(session) = low::of(session) else { return -libc::EINVAL };
        let Some(port) = session.port() else { return -libc::EBADF };
        low::receive_buffer(&session, &port, buffer)
    }
}

/// Handles the message in `buffer`.
///
/// # Safety
///
/// `session` is null or a session, and `buffer` a `struct fuse_buf` with a message.
pub unsafe extern "C" fn fuse_session_process_buf(session: *mut c_void, buffer: *const DataPart) {
    // SAFETY: the caller's promise.
    unsafe {
        if let Some(session) = low::of(session)
            && let Some(port) = session.port()
        {
            low::process_buffer(&session, &port, buffer);
        }
    }
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

/// Mounts with a list of options, and returns the device for another program. Returns -1 after an
/// error, which is printed.
///
/// # Safety
///
/// `mountpoint` is a path, and `options` null or a string.
pub unsafe extern "C" fn fuse_open_channel(
    mountpoint: *const c_char,
    options: *const c_char,
) -> c_int {
    // SAFETY: the caller's promise.
    let (mountpoint, options) = unsafe { (text_of(mountpoint), text_of(options).to_owned()) };
    let mut choice = MountChoice::new(ApiVersion::Three);
    // Options of the program stay with it.
    let list = [c"fuse".to_owned(), c"-o".to_owned(), options];
    let mounted = take_from(&list, |option| choice.take(option))
        .and_then(|_| MountedDevice::new(mountpoint, choice));
    match mounted.map(MountedDevice::into_device) {
        Ok(device) => device.map_or(-1, IntoRawFd::into_raw_fd),
        Err(message) => {
            error(&message);
            -1
        }
    }
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

/// `fuse_main`: parses the command line, mounts, serves, and unmounts. Returns the exit code of the
/// program: 1 for wrong options, 2 without a mount point, 3 if the setup fails, 4 if the mount
/// fails, 5 if the background process fails, 6 if signals cannot be handled, 7 or 8 after an error
/// or a signal of the loop.
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
