//! Helpers for the tests of layers: a small tree, and frequent calls.

use std::sync::{Arc, mpsc};

use crate::path::PathAdapter;
use crate::path::tests::backend::PathTestBackend;
use crate::{
    Caller, Completion, Context, Errno, File, FileKind, FileSystem, Ino, InterruptToken, Io, IoOp,
    Lock, LockKind, LockOwner, LockRequest, LockType, LockWait, Name, NewNode, OpenArgs, OpenFlags,
    ReadArgs, ReadBuf, ReadSink, ReleaseArgs, Result, SliceSink, SliceSource, WriteArgs, WriteBuf,
    WriteSource,
};

pub(crate) fn cx() -> Context<'static> {
    Context::new(Caller::default())
}

pub(crate) fn name(text: &str) -> Name<'_> {
    Name::new(text.as_bytes()).unwrap()
}

pub(crate) fn node() -> NewNode<'static> {
    NewNode::new(FileKind::Regular, 0o644, Caller::default())
}

/// A file system with `/dir/file`, which contains `text`. No inode has lookups.
pub(crate) fn tree() -> Arc<PathAdapter<PathTestBackend>> {
    let fs = Arc::new(PathAdapter::new(PathTestBackend::new(true, false)));
    let dir = fs.mkdir(&cx(), Ino::ROOT, name("dir"), &node()).unwrap().ino;
    let file = fs.mknod(&cx(), dir, name("file"), &node()).unwrap().ino;
    write(&*fs, file, b"text").unwrap();
    fs.forget(file, 1);
    fs.forget(dir, 1);
    assert_eq!(fs.nodes(), 1);
    fs
}

/// Opens and writes.
pub(crate) fn write(fs: &dyn FileSystem, ino: Ino, text: &[u8]) -> Result<usize> {
    let args = OpenArgs { flags: OpenFlags(OpenFlags::WRONLY), kill_suidgid: false };
    let file = File { ino, fh: fs.open(&cx(), ino, args)?.fh };
    let mut source = SliceSource::new(text);
    let result = fs.write(&cx(), file, WriteArgs::default(), &mut WriteBuf::new(&mut source));
    fs.release(&cx(), file, ReleaseArgs::default())?;
    result
}

/// Opens and reads up to 64 bytes.
pub(crate) fn read(fs: &dyn FileSystem, ino: Ino) -> Result<Vec<u8>> {
    let file = File { ino, fh: fs.open(&cx(), ino, OpenArgs::default())?.fh };
    let mut memory = [0; 64];
    let mut sink = SliceSink::new(&mut memory);
    let mut out = ReadBuf::new(&mut sink, 64);
    let result = fs.read(&cx(), file, ReadArgs::default(), &mut out);
    let filled = out.filled_len();
    fs.release(&cx(), file, ReleaseArgs::default())?;
    result.map(|()| memory[..filled].to_vec())
}

/// The completion of a submitted write.
struct SentWrite {
    source: SliceSource<'static>,
    done: mpsc::Sender<Result<usize>>,
}

impl Completion for SentWrite {
    fn sink(&mut self) -> &mut dyn ReadSink {
        unreachable!("a write has no sink")
    }
    fn source(&mut self) -> &mut dyn WriteSource {
        &mut self.source
    }
    fn finish(self: Box<Self>, result: Result<usize>) {
        // The test may no longer wait.
        let _ = self.done.send(result);
    }
}

/// Submits a write of `text` through a read-only handle, and waits.
pub(crate) fn submit_write(fs: &dyn FileSystem, ino: Ino) -> Result<usize> {
    let file = File { ino, fh: fs.open(&cx(), ino, OpenArgs::default())?.fh };
    let (done, result) = mpsc::channel();
    let completion = Box::new(SentWrite { source: SliceSource::new(b"text"), done });
    let op = IoOp::Write { file, args: WriteArgs::default(), len: 4 };
    let token = Arc::new(InterruptToken::default());
    fs.submit(Io::new(op, Caller::default(), 1, token, completion));
    let result = result.recv().map_err(|_| Errno::EIO)?;
    fs.release(&cx(), file, ReleaseArgs::default())?;
    result
}

/// A request for a shared lock on the whole file, with waiting.
pub(crate) fn a_lock() -> LockRequest {
    let lock = Lock { typ: LockType::Read, start: 0, end: u64::MAX, pid: 1 };
    LockRequest { kind: LockKind::Posix, owner: LockOwner(1), lock, wait: true }
}

/// Waits for [`a_lock`].
pub(crate) fn wait_for_lock(fs: &dyn FileSystem, ino: Ino) -> Result<()> {
    let file = File { ino, fh: fs.open(&cx(), ino, OpenArgs::default())?.fh };
    let (done, result) = mpsc::channel();
    let answer = Box::new(move |result| {
        let _ = done.send(result);
    });
    fs.setlkw(LockWait::new((file, a_lock()), Caller::default(), 1, Arc::default(), answer));
    let result = result.recv().map_err(|_| Errno::EIO)?;
    fs.release(&cx(), file, ReleaseArgs::default())?;
    result
}
