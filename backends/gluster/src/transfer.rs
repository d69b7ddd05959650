//! Reads, writes and syncs that libgfapi finishes on its own threads.

use std::ffi::c_void;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::NonNull;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use defuse_fs::{Buffer, Errno, Io, ReadBuf, Result};

use crate::answers::OwnChangeGuard;
use crate::changes::ClientChange;
use crate::ffi::{GlfsFd, GlfsStat, IoCallback};
use crate::file::{GfapiHandle, as_callback, position};
use crate::volume::{check, last};
use crate::writes::{WriteAnswer, WritePosition, WriteTracker};

/// Bytes of buffers that are kept for reuse.
const KEPT: usize = 16 << 20;

/// Buffers for frontends that do not lend their memory.
#[derive(Debug, Default)]
pub struct TransferBuffers {
    kept: Mutex<(Vec<Vec<u8>>, usize)>,
}

impl TransferBuffers {
    /// A buffer of at least `len` bytes, with any content.
    pub fn take(&self, len: usize) -> Vec<u8> {
        let mut kept = self.lock();
        if let Some(at) = kept.0.iter().rposition(|buffer| buffer.len() >= len) {
            let buffer = kept.0.swap_remove(at);
            kept.1 -= buffer.len();
            return buffer;
        }
        drop(kept);
        vec![0; len.next_power_of_two().max(4096)]
    }

    /// Keeps a buffer for reuse.
    pub fn give(&self, buffer: Vec<u8>) {
        let mut kept = self.lock();
        if kept.1 + buffer.len() <= KEPT {
            kept.1 += buffer.len();
            kept.0.push(buffer);
        }
    }

    fn lock(&self) -> MutexGuard<'_, (Vec<Vec<u8>>, usize)> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The thread that answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AnswerThread {
    /// The thread of libgfapi: the answer calls no file system.
    Callback,
    /// A thread of this crate: the answer may run code of an application.
    OwnThread,
}

/// The memory of a transfer.
enum TransferMemory {
    None,
    /// From [`Io::take_room`].
    Room(Buffer),
    /// Memory of the frontend, for a read.
    Lent,
    /// From the pool, for a read.
    Pooled(Vec<u8>),
}

/// The write tracker of an open file, and this write.
type TrackedWrite = (Arc<WriteTracker>, WritePosition, WriteAnswer);

/// The open file of a transfer.
pub struct TransferFile {
    pub handle: Arc<GfapiHandle>,
    pub write: Option<TrackedWrite>,
    /// The guard of the change of the file's attributes, which ends before the answer.
    pub change: Option<OwnChangeGuard<'static>>,
    /// The change of a write, and its offset.
    pub own: Option<(ClientChange, u64)>,
}

/// A transfer in flight. It owns everything that libgfapi uses.
struct GfapiTransfer {
    io: Io,
    subject: TransferFile,
    pool: Arc<TransferBuffers>,
    memory: TransferMemory,
    answer_on: AnswerThread,
}

/// Starts a read of `len` bytes from `offset`.
pub fn read(
    mut io: Io,
    (file, offset): (TransferFile, u64),
    len: usize,
    pool: &Arc<TransferBuffers>,
    on: AnswerThread,
) {
    let Ok(offset) = position(offset) else { return io.finish(Err(Errno::EINVAL)) };
    let start_of = |room: &mut [u8]| {
        // libgfapi writes up to `len` bytes, so that the frontend's room must have as many.
        assert!(room.len() >= len, "{} bytes of room for {len}", room.len());
        room.as_mut_ptr()
    };
    let (start_of_room, memory) = if let Some(mut room) = io.take_room() {
        (start_of(&mut room), TransferMemory::Room(room))
    } else if let Some(room) = lend_memory(&mut io, len) {
        (room.as_ptr(), TransferMemory::Lent)
    } else {
        let mut room = pool.take(len);
        (start_of(&mut room), TransferMemory::Pooled(room))
    };
    start(io, file, (memory, pool, on), |handle, done, data| {
        let read = handle.volume().library().glfs_pread_async;
        // SAFETY: the room has at least `len` bytes. It belongs to the transfer until its end, or
        // to the frontend, which lends it until then.
        unsafe { read(handle.raw(), start_of_room.cast(), len, offset, 0, done, data) }
    });
}

/// The memory of the frontend for a read of `len` bytes. It stays valid until the end of the
/// operation.
fn lend_memory(io: &mut Io, len: usize) -> Option<NonNull<u8>> {
    let lend = |out: &mut ReadBuf<'_>| {
        if out.remaining() != len {
            return None;
        }
        if let Some(room) = out.lend() {
            return NonNull::new(room.as_mut_ptr()).filter(|_| room.len() == len);
        }
        out.lend_shared()
    };
    io.with_read_buf(|_, out| Ok(lend(out))).ok().flatten()
}

/// Starts a write of all data at `offset`.
pub fn write(
    mut io: Io,
    (file, offset): (TransferFile, u64),
    pool: &Arc<TransferBuffers>,
    on: AnswerThread,
) {
    let Ok(offset) = position(offset) else { return io.finish(Err(Errno::EINVAL)) };
    let mut data = Vec::new();
    // libgfapi copies the data before the call returns, so that lent memory is passed to it without
    // another copy.
    let mut lent: (*const u8, usize) = (std::ptr::null(), 0);
    let taken = io.with_write_buf(|_, source| {
        let len = source.remaining();
        if let Some(bytes) = source.borrow()
            && bytes.len() == len
        {
            lent = (bytes.as_ptr(), len);
            return Ok(());
        }
        if let Some(bytes) = source.borrow_shared() {
            lent = (bytes.as_ptr().cast_const(), len);
            return Ok(());
        }
        data = pool.take(len);
        let mut done = 0;
        while done < len {
            match source.take(&mut data[done..len])? {
                0 => break,
                count => done += count,
            }
        }
        lent = (data.as_ptr(), done);
        Ok(())
    });
    if let Err(errno) = taken {
        return io.finish(Err(errno));
    }
    let flags = file.write.as_ref().map_or(0, |(_, _, by)| by.flags());
    start(io, file, (TransferMemory::None, pool, on), |handle, done, data| {
        let write = handle.volume().library().glfs_pwrite_async;
        let Ok(len) = i32::try_from(lent.1) else { return -1 };
        // SAFETY: lent memory is valid until the operation ends, which is after this call; pooled
        // memory is valid until the end of this function.
        unsafe { write(handle.raw(), lent.0.cast(), len, offset, flags, done, data) }
    });
    if !data.is_empty() {
        pool.give(data);
    }
}

/// Starts a sync.
pub fn sync(
    io: Io,
    handle: Arc<GfapiHandle>,
    datasync: bool,
    pool: &Arc<TransferBuffers>,
    on: AnswerThread,
) {
    let file = TransferFile { handle, write: None, change: None, own: None };
    start(io, file, (TransferMemory::None, pool, on), |handle, done, data| {
        let library = handle.volume().library();
        let sync = if datasync { library.glfs_fdatasync_async } else { library.glfs_fsync_async };
        // SAFETY: the handle is open until the end of the transfer.
        unsafe { sync(handle.raw(), done, data) }
    });
}

fn start(
    io: Io,
    subject: TransferFile,
    (memory, pool, answer_on): (TransferMemory, &Arc<TransferBuffers>, AnswerThread),
    submit: impl FnOnce(&GfapiHandle, IoCallback, *mut c_void) -> i32,
) {
    let open = Arc::clone(&subject.handle);
    let transfer = GfapiTransfer { io, subject, pool: Arc::clone(pool), memory, answer_on };
    let transfer = Box::into_raw(Box::new(transfer));
    // From here on the transfer belongs to its callback.
    let submitted = check(submit(&open, done, transfer.cast()));
    if let Err(errno) = submitted {
        // SAFETY: a call that failed never runs the callback.
        unsafe { Box::from_raw(transfer) }.finish(Err(errno));
    }
}

/// The callback of every transfer.
// SAFETY: libgfapi calls it once, with the transfer that `start` submitted.
unsafe extern "C" fn done(
    _: *mut GlfsFd,
    result: isize,
    _: *mut GlfsStat,
    _: *mut GlfsStat,
    data: *mut c_void,
) {
    let result = usize::try_from(result).map_err(|_| last());
    // SAFETY: `data` is the transfer that `start` submitted, and this is called once.
    let transfer = unsafe { Box::from_raw(data.cast::<GfapiTransfer>()) };
    as_callback(|| {
        // A panic must not enter C. It drops the operation, which answers it with EIO.
        let finish = AssertUnwindSafe(|| match transfer.answer_on {
            AnswerThread::Callback => transfer.finish(result),
            AnswerThread::OwnThread => drop(answer_queue().send((transfer, result))),
        });
        let _ = catch_unwind(finish);
    });
}

impl GfapiTransfer {
    fn finish(self, result: Result<usize>) {
        let GfapiTransfer { mut io, subject, pool, memory, .. } = self;
        let TransferFile { handle, write, change, own } = subject;
        drop(change);
        if let Some((writes, at, by)) = write
            && let Ok(count) = result
        {
            writes.add(at, by);
            if let Some((own, offset)) = own
                && at == WritePosition::Offset
            {
                own.finish_write(offset + count as u64);
            }
        }
        // The handle is dropped before the answer, after which the frontend may release the file:
        // the release then waits for no close here.
        drop(handle);
        match memory {
            TransferMemory::None => io.finish(result),
            TransferMemory::Room(room) => io.finish_room(room, result),
            TransferMemory::Lent => {
                let filled = result.and_then(|len| io.with_read_buf(|_, out| out.advance(len)));
                io.finish_filled(filled);
            }
            TransferMemory::Pooled(room) => {
                let result = result.and_then(|len| {
                    let bytes = room.get(..len).ok_or(Errno::EIO)?;
                    io.with_read_buf(|_, out| out.put(bytes).map(drop))
                });
                pool.give(room);
                io.finish_filled(result);
            }
        }
    }
}

type TransferResult = (Box<GfapiTransfer>, Result<usize>);

/// The thread that answers applications.
fn answer_queue() -> &'static Sender<TransferResult> {
    static ANSWERER: OnceLock<Sender<TransferResult>> = OnceLock::new();
    ANSWERER.get_or_init(|| {
        let (send, answers) = channel::<TransferResult>();
        let answer = move || {
            for (transfer, result) in answers {
                let _ = catch_unwind(AssertUnwindSafe(|| transfer.finish(result)));
            }
        };
        let started = std::thread::Builder::new().name("gluster-answer".to_owned()).spawn(answer);
        if let Err(error) = started {
            log::error!("transfers of GlusterFS fail: no thread: {error}");
        }
        send
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_are_used_again_and_those_kept_are_bounded() {
        let pool = TransferBuffers::default();
        let buffer = pool.take(5000);
        assert_eq!(buffer.len(), 8192);
        let at = buffer.as_ptr();
        pool.give(buffer);
        let again = pool.take(8192);
        assert_eq!(again.as_ptr(), at);
        for _ in 0..40 {
            pool.give(vec![0; 1 << 20]);
        }
        assert_eq!(pool.lock().1, KEPT);
    }
}
