//! asynchronous reads, writes and syncs
//!
//! A context accepts operations from any thread. It executes them on its own threads, several at a
//! time and in no particular order. A completed operation is reported by an event, which
//! defuse_aio_getevents() returns, or by a callback. The memory of an operation, including the
//! memory that its vectors point to, must stay valid until then. The vectors themselves and the
//! descriptor are only needed until defuse_aio_submit() returns. A context has room for `capacity`
//! operations that are in progress or whose events were not collected yet. A child process of
//! fork(2) cannot use its parent's contexts (EINVAL).

use std::ffi::{c_int, c_uint, c_void};
use std::mem::offset_of;
use std::os::fd::AsRawFd;

use defuse_direct::{IoFlags, JobCallback, Result};
use defuse_fs::Errno;

use super::data::position;
use crate::aio::{encode_error, result};
use crate::memory::{InPointer, IovecArray, IovecBuffers, OutPointer};
use crate::state::{LibraryState, call, succeed};

/// Read `count` bytes into `buf`.
pub const DEFUSE_AIO_READ: u32 = 0;
/// Write `count` bytes of `buf`.
pub const DEFUSE_AIO_WRITE: u32 = 1;
/// Read into the `count` vectors (`struct iovec`) at `buf`.
pub const DEFUSE_AIO_READV: u32 = 2;
/// Write the `count` vectors (`struct iovec`) at `buf`.
pub const DEFUSE_AIO_WRITEV: u32 = 3;
/// Like fsync(2), for operations that have completed before.
pub const DEFUSE_AIO_FSYNC: u32 = 4;
/// Like fdatasync(2), for operations that have completed before.
pub const DEFUSE_AIO_FDATASYNC: u32 = 5;

/// The result of an operation.
#[allow(non_camel_case_types)]
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct defuse_aio_event {
    /// The `data` of the operation.
    pub data: u64,
    /// The number of bytes, or a negative error number such as -EIO, or -ECANCELED.
    pub result: i64,
}

/// Called at the end of an operation, on a thread of the context. It should return soon. It must
/// not wait for events or destroy the context (EDEADLK).
#[allow(non_camel_case_types)]
pub type defuse_aio_callback = Option<extern "C" fn(event: *const defuse_aio_event)>;

/// An operation.
#[allow(non_camel_case_types)]
#[repr(C)]
#[derive(Clone, Copy)]
pub struct defuse_aio_op {
    /// DEFUSE_AIO_READ or another of the operations.
    pub opcode: u32,
    /// A descriptor of the library.
    pub fd: c_int,
    /// A buffer, or an array of `struct iovec`.
    pub buf: *mut c_void,
    /// Number of bytes, or of vectors.
    pub count: usize,
    /// Offset in the file in bytes; -1 for the file position.
    pub offset: i64,
    /// Returned in the event.
    pub data: u64,
    /// Called at the end instead of adding an event for defuse_aio_getevents(); or NULL.
    pub callback: defuse_aio_callback,
}

// The header asserts the same numbers.
const _: () = {
    assert!(size_of::<defuse_aio_event>() == 16 && size_of::<defuse_aio_op>() == 48);
    assert!(offset_of!(defuse_aio_event, result) == 8);
    assert!(offset_of!(defuse_aio_op, offset) == 24 && offset_of!(defuse_aio_op, callback) == 40);
};

/// Creates a context for `capacity` operations (1 to 65,536), which executes up to `threads` of
/// them at a time (1 to 1024; 0 for twice the number of processors, but at least 4). Threads are
/// started on demand. Returns the number of the context.
// SAFETY: no other symbol has this name.
#[unsafe(no_mangle)]
pub extern "C" fn defuse_aio_create(capacity: c_uint, threads: c_uint) -> c_int {
    call(|s| Ok(s.contexts.create(capacity as usize, threads as usize)?))
}

/// Starts `count` operations. Returns the number of operations started. If not even the first could
/// be started, returns -1 with EAGAIN (no room), EBADF, EINVAL or EFAULT. The error of an operation
/// that was started is in its event.
// SAFETY: no other symbol has this name.
#[unsafe(no_mangle)]
pub extern "C" fn defuse_aio_submit(
    aio: c_int,
    ops: InPointer<defuse_aio_op>,
    count: c_int,
) -> c_int {
    call(|s| {
        let context = s.contexts.get(aio)?;
        let count = usize::try_from(count).map_err(|_| Errno::EINVAL)?;
        for started in 0..count {
            let begun = ops.nth(started).and_then(|op| {
                Ok(context.submit(op.data, work(s, &op)?, wrap_callback(op.callback))?)
            });
            match begun {
                Ok(()) => {}
                Err(stop) if started == 0 => return Err(stop),
                Err(_) => return Ok(started as c_int),
            }
        }
        Ok(count as c_int)
    })
}

/// Wraps a C callback.
fn wrap_callback(callback: defuse_aio_callback) -> Option<JobCallback<i64>> {
    let callback = callback?;
    Some(Box::new(move |data, outcome| {
        callback(&defuse_aio_event { data, result: result(outcome) })
    }))
}

type AioWork = Box<dyn FnOnce() -> i64 + Send>;

fn encode_result(moved: Result<usize>) -> i64 {
    moved.map_or_else(|stop| encode_error(stop.errno()), |count| count as i64)
}

/// The work of an operation, with everything that it needs.
fn work(s: &'static LibraryState, op: &defuse_aio_op) -> Result<AioWork> {
    let file = s.file(op.fd)?.to_arc();
    let at = position(op.offset)?;
    let one = || IovecBuffers::from_buffer(op.buf, op.count);
    let several = || {
        let vectors = IovecArray::from_address(op.buf.cast());
        let count = i32::try_from(op.count).map_err(|_| Errno::EINVAL)?;
        // SAFETY: the operation states the number of vectors.
        unsafe { vectors.copy_array(count) }
    };
    let flags = IoFlags::default();
    Ok(match op.opcode {
        DEFUSE_AIO_READ | DEFUSE_AIO_READV => {
            let mut pieces = if op.opcode == DEFUSE_AIO_READ { one() } else { several() }?;
            Box::new(move || {
                // SAFETY: C leaves the memory to the operation until its end.
                let mut rooms = unsafe { pieces.mut_slices() };
                encode_result(s.client.preadv2(&s.task, &file, &mut rooms, at, flags))
            })
        }
        DEFUSE_AIO_WRITE | DEFUSE_AIO_WRITEV => {
            let pieces = if op.opcode == DEFUSE_AIO_WRITE { one() } else { several() }?;
            Box::new(move || {
                // SAFETY: C leaves the memory to the operation until its end.
                encode_result(s.client.pwritev2(
                    &s.task,
                    &file,
                    &unsafe { pieces.slices() },
                    at,
                    flags,
                ))
            })
        }
        DEFUSE_AIO_FSYNC | DEFUSE_AIO_FDATASYNC => {
            let datasync = op.opcode == DEFUSE_AIO_FDATASYNC;
            Box::new(move || encode_result(s.client.fsync(&s.task, &file, datasync).map(|()| 0)))
        }
        _ => return Err(Errno::EINVAL.into()),
    })
}

/// Collects up to `max` events. Waits until there are at least `min`, or until `timeout` is over; a
/// NULL timeout waits without limit. Returns the number of events. Signals do not end the wait.
// SAFETY: no other symbol has this name.
#[unsafe(no_mangle)]
pub extern "C" fn defuse_aio_getevents(
    aio: c_int,
    min: c_int,
    max: c_int,
    events: OutPointer<defuse_aio_event>,
    timeout: InPointer<libc::timespec>,
) -> c_int {
    call(|s| {
        let context = s.contexts.get(aio)?;
        let (Ok(min), Ok(max)) = (usize::try_from(min), usize::try_from(max)) else {
            return Err(Errno::EINVAL.into());
        };
        if min > max {
            return Err(Errno::EINVAL.into());
        }
        let limit = if timeout.is_null() { None } else { Some(duration(timeout.get()?)?) };
        let found = context.collect(min, max, limit)?;
        let count = found.len() as c_int;
        for (index, (data, outcome)) in found.into_iter().enumerate() {
            events.put_nth(index, defuse_aio_event { data, result: result(outcome) })?;
        }
        Ok(count)
    })
}

fn duration(time: libc::timespec) -> Result<std::time::Duration> {
    match (u64::try_from(time.tv_sec), u32::try_from(time.tv_nsec)) {
        (Ok(secs), Ok(nanos @ 0..1_000_000_000)) => Ok(std::time::Duration::new(secs, nanos)),
        _ => Err(Errno::EINVAL.into()),
    }
}

/// A kernel descriptor for poll(2), select(2) and epoll(7), which is readable while there are
/// events to collect. It belongs to the context; callers must neither read nor close it.
// SAFETY: no other symbol has this name.
#[unsafe(no_mangle)]
pub extern "C" fn defuse_aio_eventfd(aio: c_int) -> c_int {
    call(|s| Ok(s.contexts.get(aio)?.eventfd().as_raw_fd()))
}

/// Cancels an operation with this `data` that has not begun. Its event reports -ECANCELED. Fails
/// with EINPROGRESS if it has begun (its end is reported as usual), and with ENOENT if there is
/// none.
// SAFETY: no other symbol has this name.
#[unsafe(no_mangle)]
pub extern "C" fn defuse_aio_cancel(aio: c_int, data: u64) -> c_int {
    succeed(|s| Ok(s.contexts.get(aio)?.cancel(data)?))
}

/// Cancels all operations that have not begun, waits for the others, and frees the context with its
/// remaining events. Callbacks are called.
// SAFETY: no other symbol has this name.
#[unsafe(no_mangle)]
pub extern "C" fn defuse_aio_destroy(aio: c_int) -> c_int {
    succeed(|s| Ok(s.contexts.destroy(aio)?))
}
