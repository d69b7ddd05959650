//! The functions that create sessions, and those of programs that receive messages by themselves.

use std::ffi::{CString, c_int, c_void};
use std::sync::Arc;

use super::abi::{CustomIo, LowOperations, OPERATIONS_TWO, SessionFunctions};
use super::dispatch::process;
use super::port::LowPort;
use super::session::{LowSession, into_pointer, of};
use crate::abi::{BUF_IS_FD, DataPart, DataParts};
use crate::buffers::fuse_buf_copy;
use crate::calls::copy;
use crate::logging::error;

/// Copies a `struct fuse_lowlevel_ops` with `size` bytes.
///
/// # Safety
///
/// `operations` is null or has `size` readable bytes, and the functions in it can be called from
/// any thread until the program ends.
unsafe fn table(operations: *const c_void, size: usize, known: usize) -> LowOperations {
    let mut table = LowOperations::default();
    if size > size_of::<LowOperations>() {
        error("fuse: warning: library too old, some operations may not work");
    }
    // SAFETY: all fields are optional functions, for which zeros mean none; the rest is the
    // caller's promise.
    unsafe { copy(operations, size.min(known), &mut table) };
    table
}

/// Creates a session of libfuse 3. Returns null after an error, which is printed.
///
/// # Safety
///
/// `operations` is null or has `size` readable bytes, and the functions in it can be called from
/// any thread until the program ends.
pub unsafe fn session_three(
    words: &[CString],
    operations: *const c_void,
    size: usize,
    data: *mut c_void,
) -> *mut c_void {
    // SAFETY: the caller's promise.
    let table = unsafe { table(operations, size, size_of::<LowOperations>()) };
    into_pointer(LowSession::three(table, words, data))
}

/// Creates a session of libfuse 2. Returns null after an error, which is printed.
///
/// # Safety
///
/// `operations` is null or has `size` readable bytes, and the functions in it can be called from
/// any thread until the program ends.
pub unsafe fn session_two(
    words: &[CString],
    operations: *const c_void,
    size: usize,
    data: *mut c_void,
) -> *mut c_void {
    // SAFETY: the caller's promise.
    let table = unsafe { table(operations, size, OPERATIONS_TWO) };
    into_pointer(LowSession::two(table, words, data))
}

/// Creates a session of libfuse 2 whose messages the program decodes. Returns null after an error,
/// which is printed.
///
/// # Safety
///
/// `functions` is a `struct fuse_session_ops`, whose functions can be called with `data`.
pub unsafe fn session_with_functions(
    functions: *const SessionFunctions,
    data: *mut c_void,
) -> *mut c_void {
    // SAFETY: the caller's promise.
    into_pointer(LowSession::with_functions(unsafe { *functions }, data))
}

/// Serves a descriptor of the program by its functions. Fails with a negated error number.
///
/// # Safety
///
/// `session` is null or a session, and `io` null or a `struct fuse_custom_io` of libfuse 3.14. `fd`
/// is a descriptor that the program gives away.
pub unsafe extern "C" fn fuse_session_custom_io(
    session: *mut c_void,
    io: *const CustomIo,
    fd: c_int,
) -> c_int {
    // SAFETY: the caller's promise.
    let Some(session) = (unsafe { of(session) }) else { return -libc::EINVAL };
    if fd < 0 {
        error(&format!("Invalid file descriptor value {fd} passed to fuse_session_custom_io()"));
        return -libc::EBADF;
    }
    if io.is_null() {
        error("No custom IO passed to fuse_session_custom_io()");
        return -libc::EINVAL;
    }
    // SAFETY: the caller's promise.
    let io = unsafe { *io };
    if io.read.is_none() || io.writev.is_none() {
        error(
            "io passed to fuse_session_custom_io() must implement both io->read() and io->writev",
        );
        return -libc::EINVAL;
    }
    // SAFETY: the caller's promise.
    session.serve_port(unsafe { LowPort::custom(fd, io, session.userdata()) });
    0
}

/// Receives a message into `buffer`, whose memory is made if there is none. Returns its length, 0
/// at the end of the session, or a negated error number.
///
/// # Safety
///
/// `buffer` is a `struct fuse_buf`: without memory, or with that of an earlier call.
pub unsafe fn receive_buffer(session: &LowSession, port: &LowPort, buffer: *mut DataPart) -> c_int {
    let size = session.largest_message();
    // SAFETY: the caller's promise; the program frees the memory, so that it is from malloc(3).
    let room = unsafe {
        if (*buffer).mem.is_null() {
            (*buffer).mem = libc::calloc(1, size);
            if (*buffer).mem.is_null() {
                error("fuse: failed to allocate read buffer");
                return -libc::ENOMEM;
            }
        }
        std::slice::from_raw_parts_mut((*buffer).mem.cast::<u8>(), size)
    };
    match session.receive(port, room) {
        Ok(len) => {
            // SAFETY: the caller's promise.
            unsafe {
                (*buffer).size = len;
                (*buffer).flags = 0;
            }
            len as c_int
        }
        Err(errno) => -errno,
    }
}

/// Handles the message in `buffer`.
///
/// # Safety
///
/// `buffer` is a `struct fuse_buf` with a message, in memory or in a file.
pub unsafe fn process_buffer(
    session: &Arc<LowSession>,
    port: &Arc<LowPort>,
    buffer: *const DataPart,
) {
    // SAFETY: the caller's promise.
    unsafe {
        let mut part = *buffer;
        if part.flags & BUF_IS_FD == 0 {
            let message = std::slice::from_raw_parts(part.mem.cast::<u8>(), part.size);
            return process(session, message, port);
        }
        part.size = part.size.min(session.largest_message());
        let mut room = vec![0_u8; part.size];
        let memory =
            DataPart { size: room.len(), flags: 0, mem: room.as_mut_ptr().cast(), fd: -1, pos: 0 };
        let mut from = DataParts { count: 1, idx: 0, off: 0, buf: [part] };
        let mut to = DataParts { count: 1, idx: 0, off: 0, buf: [memory] };
        match usize::try_from(fuse_buf_copy(&mut to, &mut from, 0)) {
            Ok(len) => process(session, &room[..len], port),
            Err(_) => error("fuse: copy from pipe failed"),
        }
    }
}
