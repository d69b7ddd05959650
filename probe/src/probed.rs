//! A layer that measures the file system below it.

use std::sync::Arc;

use defuse_fs::layer::{Method, Shortcut};
use defuse_fs::{
    Buffer, Completion, Context, CopyRange, DirBuf, File, FileSystem, Ino, Io, IoOp, LockRequest,
    LockWait, Name, Notify, Origin, ReadArgs, ReadBuf, ReadSink, RenameFlags, Result, Shortcuts,
    WriteArgs, WriteBuf, WriteSource, delegate,
};

use crate::{Op, Recorder, clock};

/// Measures each call of a file system into a [`Recorder`]. Above or below a cache, it shows the
/// calls that the cache saves.
///
/// Measured on an AMD EPYC guest: 26 ns a call, of which the two readings of the clock take 19. A
/// call that returns an error counts as an error, even if the error is the expected answer
/// (`ENOENT` of a lookup); so does a panic. An operation passed to [`submit`](FileSystem::submit)
/// is measured until it completes, on the thread that completes it.
#[derive(Clone, Debug)]
pub struct ProbedFileSystem<F> {
    inner: F,
    recorder: Recorder,
}

impl<F: FileSystem> ProbedFileSystem<F> {
    /// Measures `inner` into `recorder`.
    pub fn new(inner: F, recorder: Recorder) -> Self {
        ProbedFileSystem { inner, recorder }
    }

    /// The measured file system.
    pub fn inner(&self) -> &F {
        &self.inner
    }

    /// The recorder of the measurements.
    pub fn recorder(&self) -> &Recorder {
        &self.recorder
    }

    #[inline]
    fn intercept<T>(
        &self,
        method: Method,
        _: &Context<'_>,
        call: impl FnOnce(&F) -> Result<T>,
    ) -> Result<T> {
        self.measure(op_of(method), call, |_| 0)
    }

    /// Measures `call` as `op`. `bytes` returns the number of bytes that a successful call
    /// transferred.
    #[inline]
    fn measure<T>(
        &self,
        op: Op,
        call: impl FnOnce(&F) -> Result<T>,
        bytes: impl FnOnce(&T) -> u64,
    ) -> Result<T> {
        let mut span = CallSpan::new(&self.recorder, op);
        let result = call(&self.inner);
        if let Ok(value) = &result {
            span.bytes = bytes(value);
            span.ok = true;
        }
        result
    }
}

impl<F: FileSystem> FileSystem for ProbedFileSystem<F> {
    delegate!(intercept inner, except attach, detach, forget, submit, setlkw, rename, read, write,
        copy_file_range, readdir, setlk);

    fn shortcuts(&self) -> Option<&dyn Shortcuts> {
        Some(self)
    }

    fn attach(&self, origin: Origin, notify: Arc<dyn Notify>) {
        let mut span = CallSpan::new(&self.recorder, Op::INIT);
        self.inner.attach(origin, notify);
        span.ok = true;
    }

    fn detach(&self, origin: Origin) -> Result<()> {
        self.measure(Op::DESTROY, |inner| inner.detach(origin), |()| 0)
    }

    fn forget(&self, ino: Ino, lookups: u64) {
        let mut span = CallSpan::new(&self.recorder, Op::FORGET);
        self.inner.forget(ino, lookups);
        span.ok = true;
    }

    fn submit(&self, io: Io) {
        let op = match io.op() {
            IoOp::Read { .. } => Op::READ,
            IoOp::Write { .. } => Op::WRITE,
            IoOp::Fsync { .. } => Op::FSYNC,
            IoOp::Fsyncdir { .. } => Op::FSYNCDIR,
            IoOp::Syncfs => Op::SYNCFS,
        };
        let (recorder, start) = (self.recorder.clone(), clock::now());
        self.inner.submit(io.map_completion(|inner| {
            Box::new(MeasuredCompletion { recorder, op, start, inner }) as Box<dyn Completion>
        }));
    }

    fn setlkw(&self, wait: LockWait) {
        let (recorder, start) = (self.recorder.clone(), clock::now());
        self.inner.setlkw(wait.map_answer(|answer| {
            Box::new(move |taken| {
                let ns = start.elapsed_ns();
                recorder.with_cells(|cells| cells.record(Op::SETLKW, ns, taken.is_ok()));
                answer(taken);
            })
        }));
    }

    fn rename(
        &self,
        cx: &Context<'_>,
        from: (Ino, Name<'_>),
        to: (Ino, Name<'_>),
        flags: RenameFlags,
    ) -> Result<()> {
        let op = if flags == RenameFlags::default() { Op::RENAME } else { Op::RENAME2 };
        self.measure(op, |inner| inner.rename(cx, from, to, flags), |()| 0)
    }

    fn read(
        &self,
        cx: &Context<'_>,
        file: File,
        args: ReadArgs,
        out: &mut ReadBuf<'_>,
    ) -> Result<()> {
        let before = out.filled_len();
        let call = |inner: &F| {
            inner.read(cx, file, args, out)?;
            Ok(out.filled_len() - before)
        };
        self.measure(Op::READ, call, |&bytes| bytes as u64).map(|_| ())
    }

    fn write(
        &self,
        cx: &Context<'_>,
        file: File,
        args: WriteArgs,
        data: &mut WriteBuf<'_>,
    ) -> Result<usize> {
        let call = |inner: &F| inner.write(cx, file, args, data);
        self.measure(Op::WRITE, call, |&bytes| bytes as u64)
    }

    fn copy_file_range(&self, cx: &Context<'_>, copy: &CopyRange) -> Result<u64> {
        let call = |inner: &F| inner.copy_file_range(cx, copy);
        self.measure(Op::COPY_FILE_RANGE, call, |&bytes| bytes)
    }

    fn readdir(&self, cx: &Context<'_>, dir: File, from: u64, out: &mut DirBuf<'_>) -> Result<()> {
        let op = if out.wants_entries() { Op::READDIRPLUS } else { Op::READDIR };
        self.measure(op, |inner| inner.readdir(cx, dir, from, out), |()| 0)
    }

    fn setlk(&self, cx: &Context<'_>, file: File, request: &LockRequest) -> Result<()> {
        let op = if request.wait { Op::SETLKW } else { Op::SETLK };
        self.measure(op, |inner| inner.setlk(cx, file, request), |()| 0)
    }
}

impl<F: FileSystem> Shortcuts for ProbedFileSystem<F> {
    delegate!(intercept inner, only resolve, peek);
}

/// The operation of a method of the contract, by the method's name.
const fn op_of(method: Method) -> Op {
    match method {
        Method::Lookup | Method::LookupParent => Op::LOOKUP,
        Method::Shortcut(Shortcut::Peek | Shortcut::LookupToOpen) => Op::LOOKUP,
        Method::Shortcut(Shortcut::Resolve | Shortcut::ResolveToOpen) => Op::RESOLVE,
        Method::Shortcut(Shortcut::CreateWith | Shortcut::OpenOrCreate) => Op::CREATE,
        Method::Mknod => Op::MKNOD,
        Method::Mkdir => Op::MKDIR,
        Method::Symlink => Op::SYMLINK,
        Method::Link => Op::LINK,
        Method::Unlink => Op::UNLINK,
        Method::Rmdir => Op::RMDIR,
        Method::Rename => Op::RENAME,
        Method::Readlink => Op::READLINK,
        Method::Getattr => Op::GETATTR,
        Method::Setattr => Op::SETATTR,
        Method::Access => Op::ACCESS,
        Method::Setxattr => Op::SETXATTR,
        Method::Getxattr => Op::GETXATTR,
        Method::Listxattr => Op::LISTXATTR,
        Method::Removexattr => Op::REMOVEXATTR,
        Method::Open => Op::OPEN,
        Method::Create => Op::CREATE,
        Method::Tmpfile => Op::TMPFILE,
        Method::Read => Op::READ,
        Method::Write => Op::WRITE,
        Method::Flush => Op::FLUSH,
        Method::Release => Op::RELEASE,
        Method::Fsync => Op::FSYNC,
        Method::Fallocate => Op::FALLOCATE,
        Method::Lseek => Op::LSEEK,
        Method::CopyFileRange => Op::COPY_FILE_RANGE,
        Method::Ioctl => Op::IOCTL,
        Method::Poll => Op::POLL,
        Method::Bmap => Op::BMAP,
        Method::Getlk => Op::GETLK,
        Method::Setlk => Op::SETLK,
        Method::Opendir => Op::OPENDIR,
        Method::Readdir => Op::READDIR,
        Method::Releasedir => Op::RELEASEDIR,
        Method::Fsyncdir => Op::FSYNCDIR,
        Method::Statfs => Op::STATFS,
        Method::Syncfs => Op::SYNCFS,
    }
}

/// A call in progress. It is counted when dropped, so that a panic is counted, too.
struct CallSpan<'a> {
    recorder: &'a Recorder,
    op: Op,
    ok: bool,
    bytes: u64,
    start: clock::ClockMoment,
}

impl<'a> CallSpan<'a> {
    #[inline]
    fn new(recorder: &'a Recorder, op: Op) -> Self {
        CallSpan { recorder, op, ok: false, bytes: 0, start: clock::now() }
    }
}

impl Drop for CallSpan<'_> {
    #[inline]
    fn drop(&mut self) {
        count(self.recorder, self.op, self.start.elapsed_ns(), self.ok, self.bytes);
    }
}

/// A completion that counts the operation before it passes the result on.
struct MeasuredCompletion {
    recorder: Recorder,
    op: Op,
    start: clock::ClockMoment,
    inner: Box<dyn Completion>,
}

impl Completion for MeasuredCompletion {
    fn sink(&mut self) -> &mut dyn ReadSink {
        self.inner.sink()
    }

    fn source(&mut self) -> &mut dyn WriteSource {
        self.inner.source()
    }

    fn take_room(&mut self) -> Option<Buffer> {
        self.inner.take_room()
    }

    fn give_room(&mut self, room: Buffer, filled: usize) -> Result<()> {
        self.inner.give_room(room, filled)
    }

    fn take_data(&mut self) -> Option<Buffer> {
        self.inner.take_data()
    }

    fn give_data(&mut self, data: Buffer) {
        self.inner.give_data(data);
    }

    fn finish(self: Box<Self>, result: Result<usize>) {
        let bytes = result.map_or(0, |bytes| bytes as u64);
        count(&self.recorder, self.op, self.start.elapsed_ns(), result.is_ok(), bytes);
        self.inner.finish(result);
    }
}

#[inline]
fn count(recorder: &Recorder, op: Op, ns: u64, ok: bool, bytes: u64) {
    recorder.with_cells(|cells| {
        cells.record(op, ns, ok);
        if bytes > 0 {
            cells.add_bytes(op, bytes);
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use defuse_fs::{
        Attr, Caller, Entry, Errno, Fh, InterruptToken, SliceSink, SliceSource, Whence,
    };
    use std::os::fd::BorrowedFd;

    /// Reads return 100 bytes, writes take all, submitted operations are completed by another
    /// thread.
    struct MixedResultFileSystem;

    impl FileSystem for MixedResultFileSystem {
        fn lookup(&self, _: &Context<'_>, _: Ino, _: Name<'_>) -> Result<Entry> {
            Err(Errno::ENOENT)
        }
        fn getattr(&self, _: &Context<'_>, _: Ino, _: Option<Fh>) -> Result<Attr> {
            panic!("a bug")
        }
        fn readdir(&self, _: &Context<'_>, _: File, _: u64, _: &mut DirBuf<'_>) -> Result<()> {
            Ok(())
        }
        fn read(&self, _: &Context<'_>, _: File, _: ReadArgs, out: &mut ReadBuf<'_>) -> Result<()> {
            out.put_zeros(100).map(|_| ())
        }
        fn submit(&self, mut io: Io) {
            std::thread::spawn(move || {
                std::thread::sleep(std::time::Duration::from_millis(2));
                let result = io.with_read_buf(|_, out| out.put_zeros(7));
                io.finish_filled(result.map(|_| ()));
            });
        }
    }

    const FILE: File = File { ino: Ino(2), fh: Fh(3) };

    #[test]
    fn calls_errors_bytes_and_panics_are_counted() {
        let probed = ProbedFileSystem::new(MixedResultFileSystem, Recorder::new());
        let cx = Context::new(Caller::default());
        assert!(probed.lookup(&cx, Ino::ROOT, Name::new(b"x").unwrap()).is_err());
        let mut memory = [0; 60];
        let mut sink = SliceSink::new(&mut memory);
        probed.read(&cx, FILE, ReadArgs::default(), &mut ReadBuf::new(&mut sink, 60)).unwrap();
        assert!(probed.lseek(&cx, FILE, 0, Whence::Data).is_err());
        let flags = RenameFlags(RenameFlags::NOREPLACE);
        let name = (Ino::ROOT, Name::new(b"x").unwrap());
        assert!(probed.rename(&cx, name, name, flags).is_err());
        let panics = std::panic::AssertUnwindSafe(|| probed.getattr(&cx, Ino::ROOT, None));
        assert!(std::panic::catch_unwind(panics).is_err());

        let snapshot = probed.recorder().snapshot();
        let seen: Vec<_> = snapshot
            .ops
            .iter()
            .map(|stats| (stats.op, stats.latency.count, stats.latency.errors, stats.bytes))
            .collect();
        let expected = [
            (Op::LOOKUP, 1, 1, 0),
            (Op::GETATTR, 1, 1, 0),
            (Op::READ, 1, 0, 60),
            (Op::RENAME2, 1, 1, 0),
            (Op::LSEEK, 1, 1, 0),
        ];
        assert_eq!(seen, expected);
    }

    /// Keeps nothing, and sends the result to the test.
    struct ChannelCompletion {
        source: SliceSource<'static>,
        done: std::sync::mpsc::Sender<Result<usize>>,
    }

    impl ReadSink for ChannelCompletion {
        fn put(&mut self, _: &[u8]) -> Result<()> {
            Ok(())
        }
        fn put_zeros(&mut self, _: usize) -> Result<()> {
            Ok(())
        }
        fn fill_from(&mut self, _: BorrowedFd<'_>, _: u64, _: usize) -> Result<usize> {
            Ok(0)
        }
    }

    impl Completion for ChannelCompletion {
        fn sink(&mut self) -> &mut dyn ReadSink {
            self
        }
        fn source(&mut self) -> &mut dyn WriteSource {
            &mut self.source
        }
        fn finish(self: Box<Self>, result: Result<usize>) {
            self.done.send(result).unwrap();
        }
    }

    #[test]
    fn a_submitted_operation_is_measured_until_it_is_finished() {
        let probed = ProbedFileSystem::new(MixedResultFileSystem, Recorder::new());
        let (done, result) = std::sync::mpsc::channel();
        let channel = ChannelCompletion { source: SliceSource::new(b""), done };
        let op = IoOp::Read { file: FILE, args: ReadArgs::default(), len: 8 };
        let token = Arc::new(InterruptToken::default());
        probed.submit(Io::new(op, Caller::default(), 1, token, Box::new(channel)));
        assert_eq!(result.recv().unwrap(), Ok(7));
        let snapshot = probed.recorder().snapshot();
        let reads = snapshot.get(Op::READ).unwrap();
        assert_eq!((reads.latency.count, reads.bytes), (1, 7));
        assert!(reads.latency.min_ns >= 2_000_000);
    }
}
