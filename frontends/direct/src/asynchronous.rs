//! Asynchronous operations, and ways to wait for them.

use std::os::fd::BorrowedFd;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use defuse_fs::{
    Buffer, Completion, Errno, File, FileKind, InterruptToken, Io, IoOp, LockRequest, LockWait,
    ReadArgs, ReadSink, WriteArgs, WriteSource,
};
use defuse_probe::{Op, Recorder, clock};

use crate::client::DirectClient;
use crate::data::OFFSET_MAX;
use crate::description::FileDescription;
use crate::mount::{ClientMount, catch_panic};
use crate::node::lock;
use crate::stop::Result;
use crate::task::ClientTask;

/// The outcome of an operation: the number of bytes moved (0 for locks and fsync), and the data
/// read. A write answers with its memory, if the file system has given it back.
type AsyncAnswer = (Result<usize, Errno>, Buffer);

/// Called once, from any thread, with the result and the data read, or the memory of a write, which
/// may be empty.
pub type AsyncCallback = Box<dyn FnOnce(Result<usize, Errno>, Buffer) + Send>;

enum AsyncState {
    Running(Option<AsyncCallback>),
    Done(AsyncAnswer),
    Taken,
}

struct AsyncShared {
    state: Mutex<AsyncState>,
    done: Condvar,
    interrupt: Arc<InterruptToken>,
}

/// An operation in progress. Dropping it does not cancel the operation; its result is then lost.
pub struct PendingOperation {
    shared: Arc<AsyncShared>,
}

impl PendingOperation {
    /// Waits until the operation ends. Returns the result and the data read.
    pub fn wait(self) -> (Result<usize, Errno>, Buffer) {
        let mut state = lock(&self.shared.state);
        while matches!(*state, AsyncState::Running(_)) {
            state = self.shared.done.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        take(&mut state).unwrap_or((Err(Errno::EINVAL), Buffer::default()))
    }

    /// Waits until the operation ends, for at most `time`. Returns true if it has ended.
    pub fn wait_timeout(&self, time: Duration) -> bool {
        let end = Instant::now() + time;
        let mut state = lock(&self.shared.state);
        while matches!(*state, AsyncState::Running(_)) {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            let waited = self.shared.done.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }

    /// True if the operation has ended.
    pub fn is_done(&self) -> bool {
        !matches!(*lock(&self.shared.state), AsyncState::Running(_))
    }

    /// Requests cancellation. The operation then ends with `EINTR`, unless it succeeds first.
    pub fn cancel(&self) {
        self.shared.interrupt.trip();
    }
}

fn take(state: &mut AsyncState) -> Option<AsyncAnswer> {
    match std::mem::replace(state, AsyncState::Taken) {
        AsyncState::Done(answer) => Some(answer),
        other => {
            *state = other;
            None
        }
    }
}

/// The buffers of an operation, and the receiver of its result.
struct AsyncOperation {
    shared: Arc<AsyncShared>,
    /// Bytes that were read: the first `filled`, with lent memory behind them.
    room: Buffer,
    filled: usize,
    limit: usize,
    bytes: Buffer,
    taken: usize,
    recorder: Recorder,
    op: Op,
    start: clock::ClockMoment,
    /// Keeps the file open until the operation ends, if no caller waits for it.
    file: Option<Arc<FileDescription>>,
}

impl ReadSink for AsyncOperation {
    fn put(&mut self, bytes: &[u8]) -> Result<(), Errno> {
        if self.filled + bytes.len() > self.limit {
            return Err(Errno::EIO);
        }
        let rest = self.room.len() - self.filled;
        let (here, behind) = bytes.split_at(bytes.len().min(rest));
        self.room[self.filled..][..here.len()].copy_from_slice(here);
        self.room.extend(behind);
        self.filled += bytes.len();
        Ok(())
    }

    fn put_zeros(&mut self, len: usize) -> Result<(), Errno> {
        self.lend(len).ok_or(Errno::EIO)?.fill(0);
        self.filled += len;
        Ok(())
    }

    fn fill_from(&mut self, fd: BorrowedFd<'_>, offset: u64, len: usize) -> Result<usize, Errno> {
        let room = self.lend(len).ok_or(Errno::EIO)?;
        let count = crate::buffers::ReadArea::new(room).fill_from(fd, offset, len)?;
        self.filled += count;
        Ok(count)
    }

    fn lend(&mut self, len: usize) -> Option<&mut [u8]> {
        let end = self.filled + len;
        if end > self.limit {
            return None;
        }
        if self.room.len() < end {
            self.room.resize(end);
        }
        Some(&mut self.room[self.filled..end])
    }

    fn advance(&mut self, count: usize) -> Result<(), Errno> {
        let end = self.filled + count;
        self.filled = if end <= self.room.len() { end } else { return Err(Errno::EINVAL) };
        Ok(())
    }
}

impl WriteSource for AsyncOperation {
    fn remaining(&self) -> usize {
        self.bytes.len() - self.taken
    }

    fn take(&mut self, out: &mut [u8]) -> Result<usize, Errno> {
        let count = crate::buffers::WriteArea::new(&self.bytes[self.taken..]).take(out)?;
        self.taken += count;
        Ok(count)
    }

    fn drain_to(&mut self, fd: BorrowedFd<'_>, offset: u64, len: usize) -> Result<usize, Errno> {
        let rest = &self.bytes[self.taken..];
        let count = crate::buffers::WriteArea::new(rest).drain_to(fd, offset, len)?;
        self.taken += count;
        Ok(count)
    }

    fn borrow(&mut self) -> Option<&[u8]> {
        Some(&self.bytes[self.taken..])
    }

    fn skip(&mut self, count: usize) -> Result<(), Errno> {
        let fits = count <= self.bytes.len() - self.taken;
        self.taken += if fits { count } else { return Err(Errno::EINVAL) };
        Ok(())
    }
}

impl Completion for AsyncOperation {
    fn sink(&mut self) -> &mut dyn ReadSink {
        self
    }

    fn source(&mut self) -> &mut dyn WriteSource {
        self
    }

    fn take_room(&mut self) -> Option<Buffer> {
        let room = std::mem::take(&mut self.room);
        Some(if room.len() < self.limit { Buffer::new_aligned(self.limit) } else { room })
    }

    fn give_room(&mut self, room: Buffer, filled: usize) -> Result<(), Errno> {
        if room.len() < self.limit || filled > self.limit {
            return Err(Errno::EINVAL);
        }
        (self.room, self.filled) = (room, filled);
        Ok(())
    }

    fn take_data(&mut self) -> Option<Buffer> {
        if self.taken > 0 {
            return None;
        }
        Some(std::mem::take(&mut self.bytes))
    }

    fn give_data(&mut self, data: Buffer) {
        self.bytes = data;
    }

    fn finish(self: Box<Self>, result: Result<usize, Errno>) {
        let mut this = *self;
        this.room.truncate(this.filled);
        if this.op == Op::WRITE {
            this.room = std::mem::take(&mut this.bytes);
        }
        if let Some(file) = &this.file {
            file.inode().node.invalidate();
        }
        let moved = *result.as_ref().unwrap_or(&0) as u64;
        let (ns, ok) = (this.start.elapsed_ns(), result.is_ok());
        this.recorder.with_cells(|cells| {
            cells.record(this.op, ns, ok);
            cells.add_bytes(this.op, moved);
        });
        // Release the file before reporting the end: the waiter may unmount next.
        drop(this.file);
        let mut state = lock(&this.shared.state);
        if let AsyncState::Running(Some(callback)) =
            std::mem::replace(&mut *state, AsyncState::Taken)
        {
            drop(state);
            // A panic of the callback must not reach the file system.
            let _ = catch_panic(|| {
                callback(result, this.room);
                Ok(())
            });
        } else {
            *state = AsyncState::Done((result, this.room));
            drop(state);
            this.shared.done.notify_all();
        }
    }
}

impl DirectClient {
    /// Starts a read of `len` bytes at `offset`. The answer contains the data.
    pub fn start_read(
        &self,
        task: &ClientTask,
        file: &Arc<FileDescription>,
        len: usize,
        offset: u64,
    ) -> Result<PendingOperation> {
        self.start_read_then(task, file, (len, offset), None)
    }

    /// Like [`start_read`](DirectClient::start_read), but calls `callback` with the reply, if there
    /// is a callback.
    pub fn start_read_then(
        &self,
        task: &ClientTask,
        file: &Arc<FileDescription>,
        (len, offset): (usize, u64),
        callback: Option<AsyncCallback>,
    ) -> Result<PendingOperation> {
        self.start_read_in(task, file, (Buffer::default(), len, offset), callback)
    }

    /// Starts a read at `offset` that fills `room`. The answer contains it, cut to the bytes that
    /// were read. No byte is copied if the file system or its device reads into lent memory.
    pub fn start_read_into(
        &self,
        task: &ClientTask,
        file: &Arc<FileDescription>,
        (room, offset): (impl Into<Buffer>, u64),
        callback: Option<AsyncCallback>,
    ) -> Result<PendingOperation> {
        let room = room.into();
        let len = room.len();
        self.start_read_in(task, file, (room, len, offset), callback)
    }

    fn start_read_in(
        &self,
        task: &ClientTask,
        file: &Arc<FileDescription>,
        (room, len, offset): (Buffer, usize, u64),
        callback: Option<AsyncCallback>,
    ) -> Result<PendingOperation> {
        let open = file.file()?;
        if !file.reads() {
            return Err(Errno::EBADF.into());
        }
        if file.kind == FileKind::Directory {
            return Err(Errno::EISDIR.into());
        }
        check_offset(file, offset)?;
        let args = ReadArgs { offset, flags: file.flags(), lock_owner: None };
        let op = IoOp::Read { file: open, args, len };
        Ok(start(task, file, op, room, callback))
    }

    /// Starts a write of `bytes` at `offset`, or at the end of the file with `O_APPEND`.
    pub fn start_write(
        &self,
        task: &ClientTask,
        file: &Arc<FileDescription>,
        bytes: impl Into<Buffer>,
        offset: u64,
    ) -> Result<PendingOperation> {
        self.start_write_then(task, file, (bytes, offset), None)
    }

    /// Like [`start_write`](DirectClient::start_write), but calls `callback` with the reply, if
    /// there is a callback.
    pub fn start_write_then(
        &self,
        task: &ClientTask,
        file: &Arc<FileDescription>,
        (bytes, offset): (impl Into<Buffer>, u64),
        callback: Option<AsyncCallback>,
    ) -> Result<PendingOperation> {
        let mut bytes = bytes.into();
        let open = file.file()?;
        if !file.writes() {
            return Err(Errno::EBADF.into());
        }
        check_offset(file, offset)?;
        let room = task.raw_file_size_limit().min(OFFSET_MAX).saturating_sub(offset);
        if room == 0 && !bytes.is_empty() {
            return Err(Errno::EFBIG.into());
        }
        bytes.truncate(usize::try_from(room).unwrap_or(usize::MAX));
        let args = WriteArgs {
            offset,
            flags: file.flags(),
            lock_owner: None,
            kill_suidgid: !task.keeps_suid(),
            from_cache: false,
        };
        let op = IoOp::Write { file: open, args, len: bytes.len() };
        Ok(start(task, file, op, bytes, callback))
    }

    /// Starts an fsync, or with `datasync` an fdatasync, of a file or a directory.
    pub fn start_fsync(
        &self,
        task: &ClientTask,
        file: &Arc<FileDescription>,
        datasync: bool,
        callback: Option<AsyncCallback>,
    ) -> Result<PendingOperation> {
        Ok(start(task, file, fsync_op(file, datasync)?, Buffer::default(), callback))
    }

    /// Starts a syncfs of the file system that `file` is in.
    pub fn start_syncfs(
        &self,
        task: &ClientTask,
        file: &Arc<FileDescription>,
        callback: Option<AsyncCallback>,
    ) -> Result<PendingOperation> {
        file.file()?;
        Ok(start(task, file, IoOp::Syncfs, Buffer::default(), callback))
    }
}

/// The fsync of a file or of a directory.
pub(crate) fn fsync_op(file: &FileDescription, datasync: bool) -> Result<IoOp> {
    let open = file.file()?;
    Ok(match file.kind {
        FileKind::Directory => IoOp::Fsyncdir { dir: open, datasync },
        _ => IoOp::Fsync { file: open, datasync },
    })
}

fn check_offset(file: &FileDescription, offset: u64) -> Result<(), Errno> {
    if file.stream {
        return Err(Errno::ESPIPE);
    }
    if offset > OFFSET_MAX { Err(Errno::EINVAL) } else { Ok(()) }
}

/// Submits an operation to the file system.
pub(crate) fn start(
    task: &ClientTask,
    file: &Arc<FileDescription>,
    op: IoOp,
    bytes: Buffer,
    callback: Option<AsyncCallback>,
) -> PendingOperation {
    let ending = OperationEnd { callback, file: Some(Arc::clone(file)) };
    let (pending, io) = prepare(task, file.mount(), op, bytes, ending);
    submit(file, io);
    pending
}

fn submit(file: &FileDescription, io: Io) {
    let fs = &file.mount().core.fs;
    // If `submit` panics, the operation is dropped, and its drop answers EIO.
    let _ = catch_panic(|| {
        fs.submit(io);
        Ok(())
    });
}

/// Waits for a lock that the file system keeps.
pub(crate) fn setlkw(file: &FileDescription, wait: LockWait) {
    let fs = &file.mount().core.fs;
    let _ = catch_panic(|| {
        fs.setlkw(wait);
        Ok(())
    });
}

/// Actions at the end of an operation.
#[derive(Default)]
pub(crate) struct OperationEnd {
    pub callback: Option<AsyncCallback>,
    /// Released when the operation ends.
    pub file: Option<Arc<FileDescription>>,
}

/// An operation that is not submitted yet. `memory` is the data of a write, or the memory of a
/// read.
pub(crate) fn prepare(
    task: &ClientTask,
    mount: &ClientMount,
    op: IoOp,
    memory: Buffer,
    ending: OperationEnd,
) -> (PendingOperation, Io) {
    let (measured, limit) = match op {
        IoOp::Read { len, .. } => (Op::READ, len),
        IoOp::Write { .. } => (Op::WRITE, 0),
        IoOp::Fsync { .. } => (Op::FSYNC, 0),
        IoOp::Fsyncdir { .. } => (Op::FSYNCDIR, 0),
        IoOp::Syncfs => (Op::SYNCFS, 0),
    };
    let (pending, operation) = begin(mount.recorder(), (measured, limit), memory, ending);
    let interrupt = Arc::clone(&pending.shared.interrupt);
    let io = Io::new(op, task.caller(), 0, interrupt, operation);
    (pending, io.with_groups(task.credentials()).from_origin(mount.origin))
}

/// A wait for a lock that is not begun yet.
pub(crate) fn prepare_wait(
    task: &ClientTask,
    mount: &ClientMount,
    lock: (File, LockRequest),
    ending: OperationEnd,
) -> (PendingOperation, LockWait) {
    let (pending, operation) = begin(mount.recorder(), (Op::SETLKW, 0), Buffer::default(), ending);
    let interrupt = Arc::clone(&pending.shared.interrupt);
    let answer = Box::new(move |taken: Result<(), Errno>| operation.finish(taken.map(|()| 0)));
    let wait = LockWait::new(lock, task.caller(), 0, interrupt, answer);
    (pending, wait.with_groups(task.credentials()).from_origin(mount.origin))
}

fn begin(
    recorder: &Recorder,
    (op, limit): (Op, usize),
    memory: Buffer,
    ending: OperationEnd,
) -> (PendingOperation, Box<AsyncOperation>) {
    let none = Buffer::default();
    let (room, bytes) = if op == Op::READ { (memory, none) } else { (none, memory) };
    let shared = Arc::new(AsyncShared {
        state: Mutex::new(AsyncState::Running(ending.callback)),
        done: Condvar::new(),
        interrupt: Arc::default(),
    });
    let operation = AsyncOperation {
        shared: Arc::clone(&shared),
        room,
        filled: 0,
        limit,
        bytes,
        taken: 0,
        recorder: recorder.clone(),
        op,
        start: clock::now(),
        file: ending.file,
    };
    (PendingOperation { shared }, Box::new(operation))
}

/// Reads from a file system that requires data operations to be submitted. It costs one more copy,
/// because the operation may outlive the call.
pub(crate) fn read_now(
    task: &ClientTask,
    file: &FileDescription,
    sink: &mut dyn ReadSink,
    len: usize,
    args: ReadArgs,
) -> Result<usize, Errno> {
    let op = IoOp::Read { file: file.file()?, args, len };
    let (result, bytes) = run(task, file, op, Buffer::default());
    let count = result?.min(bytes.len());
    sink.put(&bytes[..count])?;
    Ok(count)
}

/// Writes to a file system that requires data operations to be submitted; see [`read_now`].
pub(crate) fn write_now(
    task: &ClientTask,
    file: &FileDescription,
    source: &mut dyn WriteSource,
    args: WriteArgs,
) -> Result<usize, Errno> {
    let mut bytes = Buffer::new_aligned(source.remaining());
    let len = source.take(&mut bytes)?;
    bytes.truncate(len);
    let op = IoOp::Write { file: file.file()?, args, len };
    run(task, file, op, bytes).0
}

/// Runs a sync operation of a file system that requires its operations to be submitted.
pub(crate) fn sync_now(task: &ClientTask, file: &FileDescription, op: IoOp) -> Result<(), Errno> {
    run(task, file, op, Buffer::default()).0.map(drop)
}

/// Submits an operation and waits for it.
fn run(task: &ClientTask, file: &FileDescription, op: IoOp, bytes: Buffer) -> AsyncAnswer {
    let (pending, io) = prepare(task, file.mount(), op, bytes, OperationEnd::default());
    submit(file, io);
    pending.wait()
}
