//! The functions that only libfuse 2 has, or has in this form.

use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::ptr::null_mut;
use std::sync::Arc;

use defuse_libfuse::OperationTable;
use defuse_libfuse::abi::{FuseArgs, FuseConfig};
use defuse_libfuse::args::{replace, words};
use defuse_libfuse::cmdline::{CommandLine, print_usage};
use defuse_libfuse::daemon::fuse_daemonize;
use defuse_libfuse::handle::{
    self, FuseHandle, MountedDevice, forget_mount, into_pointer, remember_mount, text_of,
};
use defuse_libfuse::logging::error;
use defuse_libfuse::low::{self, ThreadLimits};
use defuse_libfuse::options::{
    ApiVersion, ConnOptions, MountChoice, OptionOutcome, take_from, take_library_option,
};
use defuse_libfuse::signals::{fuse_remove_signal_handlers, fuse_set_signal_handlers};

/// Mounts with the options in `words`. Returns the mount with the remaining arguments, or an error
/// for the user.
pub(crate) fn mount_with(
    mountpoint: &CStr,
    words: &[CString],
) -> Result<(Arc<MountedDevice>, Vec<CString>), String> {
    let mut choice = MountChoice::new(ApiVersion::Two);
    let rest = take_from(words, |option| choice.take(option))?;
    if mountpoint.is_empty() {
        return Err("fuse: missing mountpoint parameter".to_owned());
    }
    Ok((remember_mount(MountedDevice::new(mountpoint, choice)?), rest))
}

/// Creates a handle for a mount, with the options in `words` and those about INIT. Returns an error
/// for the user.
pub(crate) fn handle_for(
    mounted: Option<Arc<MountedDevice>>,
    table: OperationTable,
    words: &[CString],
    data: *mut c_void,
) -> Result<Box<FuseHandle>, String> {
    let mut conn = ConnOptions::default();
    let rest = take_from(words, |option| conn.take(option))?;
    let mut handle = FuseHandle::new(ApiVersion::Two, table, &rest, data)?;
    handle.set_conn_options(conn);
    if let Some(mounted) = mounted {
        handle.adopt(mounted);
    }
    Ok(handle)
}

/// The mount that a program has as its channel.
pub(crate) fn channel(channel: *mut c_void) -> impl Fn(&Arc<MountedDevice>) -> bool {
    move |mounted| std::ptr::eq(Arc::as_ptr(mounted), channel.cast_const().cast())
}

/// Mounts, and returns the channel. Leaves the arguments that are not for the mount. Returns null
/// after an error, which is printed.
///
/// # Safety
///
/// `mountpoint` is a path, and `args` null or a `struct fuse_args`.
pub unsafe extern "C" fn fuse_mount(mountpoint: *const c_char, args: *mut FuseArgs) -> *mut c_void {
    // SAFETY: the caller's promise.
    unsafe {
        let all = if args.is_null() { Vec::new() } else { words(args) };
        match mount_with(text_of(mountpoint), &all) {
            Ok((mounted, rest)) => {
                if !args.is_null() {
                    replace(args, &rest);
                }
                mounted.as_channel()
            }
            Err(message) => {
                error(&message);
                null_mut()
            }
        }
    }
}

/// Unmounts a channel, or without one the mount at this path.
///
/// # Safety
///
/// `mountpoint` is null or a path, and `chan` null or a channel.
pub unsafe extern "C" fn fuse_unmount(mountpoint: *const c_char, chan: *mut c_void) {
    // SAFETY: the caller's promise.
    let path = unsafe { text_of(mountpoint) };
    let is_meant = channel(chan);
    let at_path = |mounted: &Arc<MountedDevice>| {
        use std::os::unix::ffi::OsStrExt;
        chan.is_null() && mounted.mountpoint.as_os_str().as_bytes() == path.to_bytes()
    };
    for mounted in forget_mount(|mounted| is_meant(mounted) || at_path(mounted)) {
        mounted.unmount();
    }
}

/// Creates a handle for the operations of a program. Returns null after an error, which is printed.
///
/// # Safety
///
/// `chan` is null or a channel, `args` a `struct fuse_args` or null, and `operations` has `size`
/// bytes of a `struct fuse_operations`.
pub unsafe extern "C" fn fuse_new(
    chan: *mut c_void,
    args: *mut FuseArgs,
    operations: *const c_void,
    size: usize,
    data: *mut c_void,
) -> *mut c_void {
    // SAFETY: the caller's promise.
    let (all, table) = unsafe {
        let all = if args.is_null() { Vec::new() } else { words(args) };
        (all, OperationTable::two(operations, size))
    };
    let mounted = handle::find_mount(channel(chan));
    into_pointer(handle_for(mounted, table, &all, data))
}

/// Ends a handle.
///
/// # Safety
///
/// `fuse` is a handle or null, and is not used any more.
pub unsafe extern "C" fn fuse_destroy(fuse: *mut c_void) {
    // SAFETY: the caller's promise.
    unsafe { handle::destroy(fuse) };
}

/// Serves the mount of a handle. Returns 0, or -1 after an error, which is printed.
///
/// # Safety
///
/// `fuse` is a handle, a session or null.
unsafe fn run(fuse: *mut c_void, threads: Option<usize>) -> c_int {
    // SAFETY: the caller's promise.
    let ended = match unsafe { (handle::of(fuse), low::of(fuse)) } {
        (Some(handle), _) => handle.run(threads),
        (_, Some(session)) if threads == Some(1) => session.run_alone(),
        (_, Some(session)) => session.run_many(LIMITS),
        (None, None) => -1,
    };
    // A signal is an orderly end.
    ended.clamp(-1, 0)
}

/// The threads of a session: as many as there are requests, of which ten stay.
const LIMITS: ThreadLimits = ThreadLimits { most: usize::MAX, idle: 10, clone_fd: false };

/// Serves the mount by one thread until it ends.
///
/// # Safety
///
/// `fuse` is a handle or null.
pub unsafe extern "C" fn fuse_loop(fuse: *mut c_void) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { run(fuse, Some(1)) }
}

/// Serves the mount by several threads until it ends.
///
/// # Safety
///
/// `fuse` is a handle or null.
pub unsafe extern "C" fn fuse_loop_mt(fuse: *mut c_void) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { run(fuse, None) }
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

/// True if the loop ends.
///
/// # Safety
///
/// `fuse` is a handle or null.
pub unsafe extern "C" fn fuse_exited(fuse: *mut c_void) -> c_int {
    // SAFETY: the caller's promise.
    let ends = match unsafe { (handle::of(fuse), low::of(fuse)) } {
        (Some(handle), _) => handle.has_exited(),
        (_, Some(session)) => session.has_exited(),
        (None, None) => true,
    };
    c_int::from(ends)
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
pub unsafe extern "C" fn fuse_invalidate(fuse: *mut c_void, path: *const c_char) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { handle::of(fuse).map_or(-libc::EINVAL, |handle| handle.invalidate(text_of(path))) }
}

/// True if an option belongs to libfuse.
///
/// # Safety
///
/// `option` is a string.
pub unsafe extern "C" fn fuse_is_lib_option(option: *const c_char) -> c_int {
    // SAFETY: the caller's promise.
    let option = unsafe { text_of(option) }.to_string_lossy();
    let mut config = FuseConfig::default();
    let of_paths = take_library_option(ApiVersion::Two, &mut config, &option);
    let of_init = ConnOptions::default().take(&option);
    // A wrong value is an option, too.
    let is_known = |outcome| outcome != Ok(OptionOutcome::Foreign);
    c_int::from(is_known(of_paths) || is_known(of_init))
}

/// True if an option belongs to the interface of inodes.
///
/// # Safety
///
/// `option` is a string.
pub unsafe extern "C" fn fuse_lowlevel_is_lib_option(option: *const c_char) -> c_int {
    // SAFETY: the caller's promise.
    let option = unsafe { text_of(option) }.to_string_lossy();
    c_int::from(ConnOptions::default().take(&option) != Ok(OptionOutcome::Foreign))
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
    unsafe { fuse_exited(session) }
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

/// Serves the mount by one thread.
///
/// # Safety
///
/// `session` is a handle, a session or null.
pub unsafe extern "C" fn fuse_session_loop(session: *mut c_void) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { fuse_loop(session) }
}

/// Serves the mount by several threads.
///
/// # Safety
///
/// `session` is a handle, a session or null.
pub unsafe extern "C" fn fuse_session_loop_mt(session: *mut c_void) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { fuse_loop_mt(session) }
}

/// Programs cannot read requests by themselves. Returns null.
pub extern "C" fn fuse_read_cmd(_fuse: *mut c_void) -> *mut c_void {
    null_mut()
}

/// Does nothing: there are no requests for programs.
pub extern "C" fn fuse_process_cmd(_fuse: *mut c_void, _command: *mut c_void) {}

/// A loop with a function of the program for each request, which this library does not serve.
/// Returns -1.
pub extern "C" fn fuse_loop_mt_proc(
    _fuse: *mut c_void,
    _process: *mut c_void,
    _data: *mut c_void,
) -> c_int {
    error("fuse: fuse_loop_mt_proc is not served by this library: use the original libfuse");
    -1
}

/// Does nothing, as in libfuse 2.9.
pub extern "C" fn fuse_set_getcontext_func(_function: *mut c_void) {}

/// No thread is needed: inodes in use are never forgotten.
pub extern "C" fn fuse_start_cleanup_thread(_fuse: *mut c_void) -> c_int {
    0
}

/// Ends nothing.
pub extern "C" fn fuse_stop_cleanup_thread(_fuse: *mut c_void) {}

/// Cleans nothing. Returns the seconds until the next call.
pub extern "C" fn fuse_clean_cache(_fuse: *mut c_void) -> c_uint {
    3600
}

/// A program that has mounted and continues in the background.
pub(crate) struct ProgramSetup {
    pub(crate) fuse: *mut c_void,
    pub(crate) mountpoint: CString,
    pub(crate) single: bool,
    pub(crate) fd: c_int,
}

/// Parses the command line, mounts, continues in the background, and handles signals. Prints
/// errors.
///
/// # Safety
///
/// `argv` has `argc` strings.
pub(crate) unsafe fn set_up(
    argc: c_int,
    argv: *mut *mut c_char,
    table: OperationTable,
    data: *mut c_void,
) -> Option<ProgramSetup> {
    let args = FuseArgs { argc, argv, allocated: 0 };
    // SAFETY: the caller's promise.
    let all = unsafe { words(&args) };
    // SAFETY: the handle was just created.
    let made = unsafe { set_up_words(&all, table, data) };
    made.map_err(|message| {
        if !message.is_empty() {
            error(&message);
        }
    })
    .ok()
}

/// # Safety
///
/// No condition; the functions that it calls get what it creates.
unsafe fn set_up_words(
    all: &[CString],
    table: OperationTable,
    data: *mut c_void,
) -> Result<ProgramSetup, String> {
    let (line, left) = CommandLine::parse(ApiVersion::Two, all)?;
    if line.version {
        println!("FUSE library version: 2.9.9");
    }
    if line.help {
        print_usage(all, ApiVersion::Two);
    }
    if line.version || line.help {
        return Err(String::new());
    }
    let mountpoint = line.mountpoint.ok_or("fuse: missing mountpoint parameter")?;
    let (mounted, rest) = mount_with(&mountpoint, &left)?;
    let undo = |mounted: &Arc<MountedDevice>| {
        forget_mount(|other| Arc::ptr_eq(other, mounted));
        mounted.unmount();
    };
    let fuse = match handle_for(Some(Arc::clone(&mounted)), table, &rest, data) {
        Ok(handle) => into_pointer(Ok(handle)),
        Err(message) => {
            undo(&mounted);
            return Err(message);
        }
    };
    // SAFETY: the handle was just created, and is not used after a failure.
    unsafe {
        if fuse_daemonize(c_int::from(line.foreground)) != 0 || fuse_set_signal_handlers(fuse) != 0
        {
            undo(&mounted);
            fuse_destroy(fuse);
            return Err(String::new());
        }
    }
    Ok(ProgramSetup { fuse, mountpoint, single: line.single, fd: mounted.fd })
}

/// Parses the command line, mounts, continues in the background, and handles signals. Returns the
/// handle, or null.
///
/// # Safety
///
/// `argv` has `argc` strings, `operations` has `size` bytes of a `struct fuse_operations`, and the
/// others lead to variables.
pub unsafe extern "C" fn fuse_setup(
    argc: c_int,
    argv: *mut *mut c_char,
    operations: *const c_void,
    size: usize,
    mountpoint: *mut *mut c_char,
    multithreaded: *mut c_int,
    data: *mut c_void,
) -> *mut c_void {
    // SAFETY: the caller's promise.
    unsafe {
        let table = OperationTable::two(operations, size);
        let Some(made) = set_up(argc, argv, table, data) else { return null_mut() };
        give(&made, mountpoint, multithreaded);
        made.fuse
    }
}

/// Tells the program what was set up.
///
/// # Safety
///
/// The pointers are null, or lead to variables.
pub(crate) unsafe fn give(
    made: &ProgramSetup,
    mountpoint: *mut *mut c_char,
    multithreaded: *mut c_int,
) {
    // SAFETY: the caller's promise.
    unsafe {
        if !mountpoint.is_null() {
            mountpoint.write(libc::strdup(made.mountpoint.as_ptr()));
        }
        if !multithreaded.is_null() {
            multithreaded.write(c_int::from(!made.single));
        }
    }
}

/// Undoes [`fuse_setup`].
///
/// # Safety
///
/// `fuse` is a handle, and `mountpoint` a string of malloc(3) or null.
pub unsafe extern "C" fn fuse_teardown(fuse: *mut c_void, mountpoint: *mut c_char) {
    // SAFETY: the caller's promise.
    unsafe {
        tear_down(fuse);
        libc::free(mountpoint.cast());
    }
}

/// # Safety
///
/// `fuse` is a handle or null.
pub(crate) unsafe fn tear_down(fuse: *mut c_void) {
    // SAFETY: the caller's promise.
    unsafe {
        fuse_remove_signal_handlers(fuse);
        if let Some(handle) = handle::of(fuse) {
            if let Some(mounted) = handle.mounted_device() {
                forget_mount(|other| Arc::ptr_eq(other, &mounted));
            }
            handle.unmount();
        }
        fuse_destroy(fuse);
    }
}

/// `fuse_main`: parses the command line, mounts, serves, and unmounts. Returns 1 after an error,
/// which is printed.
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
    // SAFETY: the caller's promise.
    unsafe { run_program(argc, argv, OperationTable::two(operations, size), data) }
}

/// # Safety
///
/// `argv` has `argc` strings.
pub(crate) unsafe fn run_program(
    argc: c_int,
    argv: *mut *mut c_char,
    table: OperationTable,
    data: *mut c_void,
) -> c_int {
    // SAFETY: the caller's promise, and a handle that is used until it ends.
    unsafe {
        let Some(made) = set_up(argc, argv, table, data) else { return 1 };
        let ended = run(made.fuse, made.single.then_some(1));
        tear_down(made.fuse);
        c_int::from(ended != 0)
    }
}
