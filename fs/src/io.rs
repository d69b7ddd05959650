//! Operations that may finish later: reads, writes and syncs.

use std::fmt;
use std::sync::Arc;

use crate::{
    Buffer, Caller, Context, Errno, File, FileSystem, InterruptToken, Origin, ReadArgs, ReadBuf,
    ReadSink, Result, SupplementaryGroups, WriteArgs, WriteBuf, WriteSource,
};

/// An operation for [`FileSystem::submit`](crate::FileSystem::submit).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IoOp {
    /// [`FileSystem::read`](crate::FileSystem::read) of `len` bytes.
    Read {
        /// The open file.
        file: File,
        /// Offset and flags.
        args: ReadArgs,
        /// Bytes to read.
        len: usize,
    },
    /// [`FileSystem::write`](crate::FileSystem::write) of `len` bytes.
    Write {
        /// The open file.
        file: File,
        /// Offset and flags.
        args: WriteArgs,
        /// Bytes to write.
        len: usize,
    },
    /// [`FileSystem::fsync`](crate::FileSystem::fsync).
    Fsync {
        /// The open file.
        file: File,
        /// Only what fdatasync(2) needs to read the data back.
        datasync: bool,
    },
    /// [`FileSystem::fsyncdir`](crate::FileSystem::fsyncdir).
    Fsyncdir {
        /// The open directory.
        dir: File,
        /// Only what is needed to find the names again.
        datasync: bool,
    },
    /// [`FileSystem::syncfs`](crate::FileSystem::syncfs).
    Syncfs,
}

/// The frontend's side of an [`Io`]: the buffers, and the receiver of the result.
pub trait Completion: Send {
    /// The sink of a read's bytes. Called for [`IoOp::Read`] only.
    fn sink(&mut self) -> &mut dyn ReadSink;
    /// The source of a write's bytes. Called for [`IoOp::Write`] only.
    fn source(&mut self) -> &mut dyn WriteSource;
    /// Gives away the memory of a read, for [`Io::take_room`]. `None` (the default) if it cannot be
    /// owned: it is shared with another process, or belongs to the caller of a blocking call.
    fn take_room(&mut self) -> Option<Buffer> {
        None
    }
    /// Takes back the memory from [`take_room`](Completion::take_room), whose first `filled` bytes
    /// have been read. Fails with `EINVAL` if it is too small.
    fn give_room(&mut self, _room: Buffer, _filled: usize) -> Result<()> {
        Err(Errno::EINVAL)
    }
    /// Gives away the data of a write, for [`Io::take_data`]; `None` as for
    /// [`take_room`](Completion::take_room). An implementation that gives it away overrides
    /// [`give_data`](Completion::give_data), too.
    fn take_data(&mut self) -> Option<Buffer> {
        None
    }
    /// Takes the memory from [`take_data`](Completion::take_data) back: the source has the data
    /// again, or its owner uses the memory for something else.
    fn give_data(&mut self, _data: Buffer) {}
    /// Sends the result: the number of bytes read or written, 0 for other operations. Called
    /// exactly once, from any thread.
    fn finish(self: Box<Self>, result: Result<usize>);
}

/// An operation in progress. It owns its buffers, and any thread may finish it at any time. If it
/// is dropped without [`finish`](Io::finish), also by a panic, it answers `EIO`.
pub struct Io {
    op: IoOp,
    caller: Caller,
    unique: u64,
    origin: Origin,
    interrupt: Arc<InterruptToken>,
    groups: Option<Arc<dyn SupplementaryGroups>>,
    filled: usize,
    completion: Option<Box<dyn Completion>>,
}

impl Io {
    /// An operation for `caller`, answered through `completion`.
    pub fn new(
        op: IoOp,
        caller: Caller,
        unique: u64,
        interrupt: Arc<InterruptToken>,
        completion: Box<dyn Completion>,
    ) -> Self {
        let completion = Some(completion);
        Io {
            op,
            caller,
            unique,
            origin: Origin::NONE,
            interrupt,
            groups: None,
            filled: 0,
            completion,
        }
    }

    /// Returns this operation with `origin` as its origin.
    #[must_use]
    pub fn from_origin(mut self, origin: Origin) -> Self {
        self.origin = origin;
        self
    }

    /// Returns this operation with `groups` as the source of the caller's supplementary groups.
    #[must_use]
    pub fn with_groups(mut self, groups: Arc<dyn SupplementaryGroups>) -> Self {
        self.groups = Some(groups);
        self
    }

    /// The operation.
    pub fn op(&self) -> IoOp {
        self.op
    }

    /// The process that requested it.
    pub fn caller(&self) -> Caller {
        self.caller
    }

    /// The interrupt of this operation. A backend that queues the operation registers a wake that
    /// removes it from the queue and finishes it with `EINTR`.
    pub fn interrupt(&self) -> &Arc<InterruptToken> {
        &self.interrupt
    }

    /// Replaces the file by the result of `map`, for layers over a file system with other inode
    /// numbers or handles.
    #[must_use]
    pub fn map_file(mut self, map: impl FnOnce(File) -> File) -> Self {
        match &mut self.op {
            IoOp::Read { file, .. }
            | IoOp::Write { file, .. }
            | IoOp::Fsync { file, .. }
            | IoOp::Fsyncdir { dir: file, .. } => *file = map(*file),
            IoOp::Syncfs => {}
        }
        self
    }

    /// Replaces the operation by the result of `map`, for layers that change other arguments. It
    /// must transfer the same number of bytes.
    #[must_use]
    pub fn map_op(mut self, map: impl FnOnce(IoOp) -> IoOp) -> Self {
        self.op = map(self.op);
        self
    }

    /// Wraps the completion, for layers that observe the result. Bytes already in the buffer remain
    /// counted.
    #[must_use]
    pub fn map_completion(
        mut self,
        map: impl FnOnce(Box<dyn Completion>) -> Box<dyn Completion>,
    ) -> Self {
        self.completion = self.completion.take().map(map);
        self
    }

    /// Runs a read: `fill` receives the buffer. The bytes that it appends are the result of
    /// [`finish_filled`](Io::finish_filled). Fails with `EINVAL` unless the operation is a read.
    pub fn with_read_buf<T>(
        &mut self,
        fill: impl FnOnce(&Context<'_>, &mut ReadBuf<'_>) -> Result<T>,
    ) -> Result<T> {
        let IoOp::Read { len, .. } = self.op else { return Err(Errno::EINVAL) };
        let (interrupt, groups) = (Arc::clone(&self.interrupt), self.groups.clone());
        let cx = context((self.caller, self.origin), self.unique, &interrupt, groups.as_deref());
        let completion = self.completion.as_mut().ok_or(Errno::EIO)?;
        let mut out = ReadBuf::resume(completion.sink(), len, self.filled);
        let result = fill(&cx, &mut out);
        self.filled = out.filled_len();
        result
    }

    /// Runs a write: `drain` receives the data. Fails with `EINVAL` unless the operation is a
    /// write.
    pub fn with_write_buf<T>(
        &mut self,
        drain: impl FnOnce(&Context<'_>, &mut WriteBuf<'_>) -> Result<T>,
    ) -> Result<T> {
        let IoOp::Write { .. } = self.op else { return Err(Errno::EINVAL) };
        let (interrupt, groups) = (Arc::clone(&self.interrupt), self.groups.clone());
        let cx = context((self.caller, self.origin), self.unique, &interrupt, groups.as_deref());
        let completion = self.completion.as_mut().ok_or(Errno::EIO)?;
        drain(&cx, &mut WriteBuf::new(completion.source()))
    }

    /// Takes the memory that a read is to fill: at least as many bytes as it requests. A device may
    /// write to it without a borrow of this operation, until
    /// [`finish_room`](Io::finish_room) returns it. Returns `None` if the frontend cannot give its
    /// memory away, if bytes have been appended already, or for other operations; use
    /// [`with_read_buf`](Io::with_read_buf) then. Memory that an untrusted process shares is never
    /// given away.
    ///
    /// An operation whose memory is not returned can only fail.
    pub fn take_room(&mut self) -> Option<Buffer> {
        let IoOp::Read { len, .. } = self.op else { return None };
        if self.filled > 0 {
            return None;
        }
        let completion = self.completion.as_mut()?;
        let room = completion.take_room()?;
        if room.len() >= len {
            return Some(room);
        }
        let _ = completion.give_room(room, 0);
        None
    }

    /// Returns memory that does not suit the device, for example by its alignment.
    /// [`with_read_buf`](Io::with_read_buf) then fills it.
    pub fn return_room(&mut self, room: Buffer) -> Result<()> {
        self.completion.as_mut().ok_or(Errno::EIO)?.give_room(room, 0)
    }

    /// Finishes a read in the memory from [`take_room`](Io::take_room) with the number of bytes at
    /// its start that were read, or with the error.
    pub fn finish_room(mut self, room: Buffer, result: Result<usize>) {
        let filled = result.unwrap_or(0);
        let fits = matches!(self.op, IoOp::Read { len, .. } if filled <= len);
        let given = match self.completion.as_mut().filter(|_| fits) {
            Some(completion) => completion.give_room(room, filled),
            None => Err(Errno::EIO),
        };
        self.complete(given.and(result));
    }

    /// Takes the data of a write, which a device may then read without a borrow of this operation.
    /// `None` as for [`take_room`](Io::take_room); use [`with_write_buf`](Io::with_write_buf) then.
    pub fn take_data(&mut self) -> Option<Buffer> {
        match self.op {
            IoOp::Write { .. } => self.completion.as_mut()?.take_data(),
            _ => None,
        }
    }

    /// Returns data that was [taken](Io::take_data), for [`with_write_buf`](Io::with_write_buf).
    pub fn return_data(&mut self, data: Buffer) {
        if let Some(completion) = self.completion.as_mut() {
            completion.give_data(data);
        }
    }

    /// Finishes a write whose data was [taken](Io::take_data), and gives the memory back.
    pub fn finish_data(mut self, data: Buffer, result: Result<usize>) {
        self.return_data(data);
        self.complete(result);
    }

    /// Runs `run` with the context of this operation.
    pub fn with_context<T>(&self, run: impl FnOnce(&Context<'_>) -> T) -> T {
        run(&context(
            (self.caller, self.origin),
            self.unique,
            &self.interrupt,
            self.groups.as_deref(),
        ))
    }

    /// Performs the operation by the synchronous method of `fs`, and finishes it.
    pub fn perform<F: FileSystem + ?Sized>(mut self, fs: &F) {
        match self.op {
            IoOp::Read { file, args, .. } => {
                let result = self.with_read_buf(|cx, out| fs.read(cx, file, args, out));
                self.finish_filled(result);
            }
            IoOp::Write { file, args, .. } => {
                let result = self.with_write_buf(|cx, data| fs.write(cx, file, args, data));
                self.finish(result);
            }
            IoOp::Fsync { file, datasync } => {
                let result = self.with_context(|cx| fs.fsync(cx, file, datasync));
                self.finish(result.map(|()| 0));
            }
            IoOp::Fsyncdir { dir, datasync } => {
                let result = self.with_context(|cx| fs.fsyncdir(cx, dir, datasync));
                self.finish(result.map(|()| 0));
            }
            IoOp::Syncfs => {
                let result = self.with_context(|cx| fs.syncfs(cx));
                self.finish(result.map(|()| 0));
            }
        }
    }

    /// Finishes with `result`: the number of bytes for reads and writes, 0 for other operations.
    pub fn finish(mut self, result: Result<usize>) {
        self.complete(result);
    }

    /// Finishes a read with the number of bytes in its buffer, or with the error.
    pub fn finish_filled(mut self, result: Result<()>) {
        let filled = self.filled;
        self.complete(result.map(|()| filled));
    }

    fn complete(&mut self, result: Result<usize>) {
        if let Some(completion) = self.completion.take() {
            completion.finish(result);
        }
    }
}

/// The context of something that is done later.
pub(crate) fn context<'a>(
    (caller, origin): (Caller, Origin),
    unique: u64,
    interrupt: &'a InterruptToken,
    groups: Option<&'a dyn SupplementaryGroups>,
) -> Context<'a> {
    let cx = Context::with_interrupt(caller, unique, interrupt).from_origin(origin);
    match groups {
        Some(groups) => cx.with_groups(groups),
        None => cx,
    }
}

impl Drop for Io {
    fn drop(&mut self) {
        self.complete(Err(Errno::EIO));
    }
}

impl fmt::Debug for Io {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Io")
            .field("op", &self.op)
            .field("unique", &self.unique)
            .field("filled", &self.filled)
            .finish_non_exhaustive()
    }
}
