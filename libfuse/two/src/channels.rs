//! Channels and sessions of the interface of inodes. A channel is a mount, or what a program has
//! made by itself.

use std::ffi::{c_char, c_int, c_void};
use std::os::fd::{FromRawFd, OwnedFd};
use std::ptr::null_mut;
use std::sync::Arc;

use defuse_libfuse::abi::{DataPart, DataParts, FuseArgs};
use defuse_libfuse::args::words;
use defuse_libfuse::handle::{
    FuseHandle, MountedDevice, find_mount, forget_mount, of as handle_of, remember_mount,
};
use defuse_libfuse::low::{
    self, ChannelFunctions, LowPort, SessionFunctions, notify_delete as delete,
    notify_inval_entry as inval_entry, notify_inval_inode as inval_inode,
    notify_retrieve as retrieve, notify_store as store,
};
use libc::{iovec, off_t};

use crate::calls::channel;
use crate::compat::list;

/// Bytes of the largest request of a mount.
const LARGEST: usize = (128 << 10) + 4096;

/// Creates a session for the operations of a program on inodes. Returns null after an error, which
/// is printed.
///
/// # Safety
///
/// `args` is null or a `struct fuse_args`, and `operations` has `size` bytes of a
/// `struct fuse_lowlevel_ops`.
pub unsafe extern "C" fn fuse_lowlevel_new(
    args: *mut FuseArgs,
    operations: *const c_void,
    size: usize,
    data: *mut c_void,
) -> *mut c_void {
    // SAFETY: the caller's promise.
    unsafe {
        let all = if args.is_null() { Vec::new() } else { words(args) };
        low::session_two(&all, operations, size, data)
    }
}

/// Creates a session for a program of libfuse 2.4, with a list of options.
///
/// # Safety
///
/// `options` is null or a string, and `operations` has `size` bytes of the structure of 2.4.
pub unsafe extern "C" fn fuse_lowlevel_new_compat(
    options: *const c_char,
    operations: *const c_void,
    size: usize,
    data: *mut c_void,
) -> *mut c_void {
    // SAFETY: the caller's promise.
    unsafe { low::session_two(&list(options), operations, size, data) }
}

/// Creates a session whose messages the program decodes. Returns null after an error, which is
/// printed.
///
/// # Safety
///
/// `functions` is a `struct fuse_session_ops`, whose functions can be called with `data`.
pub unsafe extern "C" fn fuse_session_new(
    functions: *const SessionFunctions,
    data: *mut c_void,
) -> *mut c_void {
    // SAFETY: the caller's promise.
    unsafe { low::session_with_functions(functions, data) }
}

/// Ends a session with its channel. A handle ends by `fuse_destroy`.
///
/// # Safety
///
/// `session` is a handle, a session or null, and is not used any more.
pub unsafe extern "C" fn fuse_session_destroy(session: *mut c_void) {
    // SAFETY: the caller's promise.
    unsafe {
        let chan = low::of(session).and_then(|own| own.mounted_device());
        low::destroy(session);
        if let Some(chan) = chan {
            fuse_chan_destroy(chan.as_channel());
        }
    }
}

/// The data that the program has passed to [`fuse_session_new`] or [`fuse_lowlevel_new`].
///
/// # Safety
///
/// `session` is a handle, a session or null.
pub unsafe extern "C" fn fuse_session_data(session: *mut c_void) -> *mut c_void {
    // SAFETY: the caller's promise.
    unsafe { low::of(session) }.map_or(null_mut(), |session| session.userdata())
}

/// Lets a session serve a channel.
///
/// # Safety
///
/// `session` is a handle, a session or null. A handle has its channel already.
pub unsafe extern "C" fn fuse_session_add_chan(session: *mut c_void, chan: *mut c_void) {
    // SAFETY: the caller's promise.
    if let Some(own) = unsafe { low::of(session) }
        && let Some(mounted) = find_mount(channel(chan))
    {
        mounted.set_session(session);
        own.adopt(mounted);
    }
}

/// Lets no session serve a channel.
///
/// # Safety
///
/// `chan` is a channel or null.
pub unsafe extern "C" fn fuse_session_remove_chan(chan: *mut c_void) {
    let Some(mounted) = find_mount(channel(chan)) else { return };
    // SAFETY: a session stays until it is destroyed, which comes after this call or ends its
    // channel.
    if let Some(session) = unsafe { low::of(mounted.session()) } {
        session.abandon();
        mounted.set_session(null_mut());
    }
}

/// The channel of a session after `chan`: there is one.
///
/// # Safety
///
/// `session` is a handle, a session or null.
pub unsafe extern "C" fn fuse_session_next_chan(
    session: *mut c_void,
    chan: *mut c_void,
) -> *mut c_void {
    // SAFETY: the caller's promise.
    let mounted = unsafe {
        let of_paths = handle_of(session).and_then(FuseHandle::mounted_device);
        of_paths.or_else(|| low::of(session)?.mounted_device())
    };
    mounted.filter(|_| chan.is_null()).map_or(null_mut(), |mounted| mounted.as_channel())
}

/// The number of the device of a channel, or -1.
pub extern "C" fn fuse_chan_fd(chan: *mut c_void) -> c_int {
    find_mount(channel(chan)).map_or(-1, |mounted| mounted.fd)
}

/// Bytes of the largest request.
pub extern "C" fn fuse_chan_bufsize(chan: *mut c_void) -> usize {
    find_mount(channel(chan)).map_or(LARGEST, |mounted| mounted.size)
}

/// The data that the program has passed to [`fuse_chan_new`].
pub extern "C" fn fuse_chan_data(chan: *mut c_void) -> *mut c_void {
    find_mount(channel(chan)).map_or(null_mut(), |mounted| mounted.data())
}

/// The session that serves a channel, or null.
pub extern "C" fn fuse_chan_session(chan: *mut c_void) -> *mut c_void {
    find_mount(channel(chan)).map_or(null_mut(), |mounted| mounted.session())
}

/// Ends a channel: unmounts it, or calls the function of the program.
///
/// # Safety
///
/// `chan` is null or a channel, and is not used any more.
pub unsafe extern "C" fn fuse_chan_destroy(chan: *mut c_void) {
    // SAFETY: the caller's promise.
    unsafe { fuse_session_remove_chan(chan) };
    for mounted in forget_mount(channel(chan)) {
        if let Some(port) = mounted.port() {
            port.end_channel();
        }
        mounted.unmount();
    }
}

fn remember_channel(port: Arc<LowPort>, size: usize, data: *mut c_void) -> *mut c_void {
    let made = MountedDevice::without_mount(Arc::clone(&port), size, data);
    let chan = remember_mount(made).as_channel();
    port.set_channel(chan);
    chan
}

/// A channel with functions of the program.
///
/// # Safety
///
/// `functions` is a `struct fuse_chan_ops`, whose functions can be called from any thread.
pub unsafe extern "C" fn fuse_chan_new(
    functions: *const ChannelFunctions,
    fd: c_int,
    size: usize,
    data: *mut c_void,
) -> *mut c_void {
    // SAFETY: the caller's promise.
    remember_channel(unsafe { LowPort::channel(fd, *functions) }, size, data)
}

/// A channel for a device that the program has opened and gives away.
///
/// # Safety
///
/// `fd` is an open descriptor that nothing else closes.
pub unsafe extern "C" fn fuse_kern_chan_new(fd: c_int) -> *mut c_void {
    if fd < 0 {
        return null_mut();
    }
    // SAFETY: the caller's promise.
    remember_channel(LowPort::device(unsafe { OwnedFd::from_raw_fd(fd) }), LARGEST, null_mut())
}

/// Receives a message. Returns its length, 0 at the end of the session, or a negated error number.
///
/// # Safety
///
/// `chan` leads to a channel, and `room` has `size` bytes.
pub unsafe extern "C" fn fuse_chan_recv(
    chan: *mut *mut c_void,
    room: *mut c_char,
    size: usize,
) -> c_int {
    // SAFETY: the caller's promise, also for the session, which is there while it has the channel.
    unsafe {
        let Some(mounted) = find_mount(channel(*chan)) else { return -libc::EBADF };
        let (Some(port), session) = (mounted.port(), low::of(mounted.session())) else {
            return -libc::EBADF;
        };
        let room = std::slice::from_raw_parts_mut(room.cast::<u8>(), size);
        let received = match session {
            Some(session) => session.receive(&port, room),
            None => port.receive(room),
        };
        received.map_or_else(|errno| -errno, |len| len as c_int)
    }
}

/// Receives a message for a program of libfuse 2.4. Returns its length, 0 at the end of the session
/// or after a signal, or -1.
///
/// # Safety
///
/// `chan` is a channel, and `room` has `size` bytes.
pub unsafe extern "C" fn fuse_chan_receive(
    mut chan: *mut c_void,
    room: *mut c_char,
    size: usize,
) -> c_int {
    // SAFETY: the caller's promise.
    match unsafe { fuse_chan_recv(&mut chan, room, size) } {
        code if code == -libc::EINTR || code == -libc::EAGAIN => 0,
        code => code.max(-1),
    }
}

/// Sends a message. Returns 0, or a negated error number.
///
/// # Safety
///
/// `chan` is a channel, and `list` has `count` structures.
pub unsafe extern "C" fn fuse_chan_send(
    chan: *mut c_void,
    list: *const iovec,
    count: usize,
) -> c_int {
    let port = find_mount(channel(chan)).and_then(|mounted| mounted.port());
    let Some(port) = port else { return -libc::EBADF };
    if list.is_null() {
        return 0;
    }
    // SAFETY: the caller's promise; `IoSlice` has the layout of the structure.
    let parts = unsafe { std::slice::from_raw_parts(list.cast::<std::io::IoSlice<'_>>(), count) };
    port.send(parts).map_or_else(|errno| -errno, |()| 0)
}

/// Handles a message that came through a channel.
///
/// # Safety
///
/// `session` is null or a session, `message` has `len` bytes, and `chan` is null or a channel.
pub unsafe extern "C" fn fuse_session_process(
    session: *mut c_void,
    message: *const c_char,
    len: usize,
    chan: *mut c_void,
) {
    let mem = message.cast_mut().cast();
    let buffer = DataPart { size: len, flags: 0, mem, fd: -1, pos: 0 };
    // SAFETY: the caller's promise.
    unsafe { fuse_session_process_buf(session, &buffer, chan) };
}

/// Handles the message in `buffer`, which came through a channel.
///
/// # Safety
///
/// `session` is null or a session, `buffer` a `struct fuse_buf` with a message, and `chan` null or
/// a channel.
pub unsafe extern "C" fn fuse_session_process_buf(
    session: *mut c_void,
    buffer: *const DataPart,
    chan: *mut c_void,
) {
    // SAFETY: the caller's promise.
    unsafe {
        let Some(session) = low::of(session) else { return };
        let of_chan = find_mount(channel(chan)).and_then(|mounted| mounted.port());
        if let Some(port) = of_chan.or_else(|| session.port()) {
            low::process_buffer(&session, &port, buffer);
        }
    }
}

/// Receives a message into `buffer`. Returns its length, 0 at the end of the session, or a negated
/// error number.
///
/// # Safety
///
/// `session` is null or a session, `buffer` a `struct fuse_buf` with memory of
/// [`fuse_chan_bufsize`], and `chan` null, or leads to a channel or null.
pub unsafe extern "C" fn fuse_session_receive_buf(
    session: *mut c_void,
    buffer: *mut DataPart,
    chan: *mut *mut c_void,
) -> c_int {
    // SAFETY: the caller's promise.
    unsafe {
        let Some(session) = low::of(session) else { return -libc::EINVAL };
        let named = if chan.is_null() { null_mut() } else { *chan };
        let of_chan = find_mount(channel(named)).and_then(|mounted| mounted.port());
        let Some(port) = of_chan.or_else(|| session.port()) else { return -libc::EBADF };
        if (*buffer).mem.is_null() || (*buffer).size == 0 {
            return -libc::EINVAL;
        }
        let room = std::slice::from_raw_parts_mut((*buffer).mem.cast::<u8>(), (*buffer).size);
        match session.receive(&port, room) {
            Ok(len) => {
                ((*buffer).size, (*buffer).flags) = (len, 0);
                len as c_int
            }
            Err(errno) => -errno,
        }
    }
}

/// Drops attributes that the kernel caches of an inode, and data from `off` on, unless that is
/// negative.
///
/// # Safety
///
/// `chan` is null or a channel.
pub unsafe extern "C" fn notify_inval_inode(
    chan: *mut c_void,
    ino: u64,
    off: off_t,
    len: off_t,
) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { inval_inode(fuse_chan_session(chan), ino, off, len) }
}

/// Drops a name that the kernel caches.
///
/// # Safety
///
/// `chan` is null or a channel, and `name` has `len` bytes.
pub unsafe extern "C" fn notify_inval_entry(
    chan: *mut c_void,
    parent: u64,
    name: *const c_char,
    len: usize,
) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { inval_entry(fuse_chan_session(chan), parent, name, len) }
}

/// Reports that a name was removed.
///
/// # Safety
///
/// `chan` is null or a channel, and `name` has `len` bytes.
pub unsafe extern "C" fn notify_delete(
    chan: *mut c_void,
    parent: u64,
    child: u64,
    name: *const c_char,
    len: usize,
) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { delete(fuse_chan_session(chan), parent, child, name, len) }
}

/// Stores data in the page cache of an inode.
///
/// # Safety
///
/// `chan` is null or a channel, and `parts` a `struct fuse_bufvec` as `fuse_reply_data` needs it.
pub unsafe extern "C" fn notify_store(
    chan: *mut c_void,
    ino: u64,
    offset: off_t,
    parts: *mut DataParts,
    flags: c_int,
) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { store(fuse_chan_session(chan), ino, offset, parts, flags) }
}

/// Requests data of the page cache of an inode, which `retrieve_reply` of the program gets with the
/// cookie.
///
/// # Safety
///
/// `chan` is null or a channel.
pub unsafe extern "C" fn notify_retrieve(
    chan: *mut c_void,
    ino: u64,
    size: usize,
    offset: off_t,
    cookie: *mut c_void,
) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { retrieve(fuse_chan_session(chan), ino, size, offset, cookie) }
}
