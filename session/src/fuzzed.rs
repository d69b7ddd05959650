//! Dispatch without a kernel, for the fuzzer and for tests: any request against a file system that
//! answers anything, with every rule that the kernel has for answers checked.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use defuse_fs::{
    Attr, Caps, Context, CopyRange, DirBuf, DirItem, Entry, Errno, Fallocate, Fh, File, FileKind,
    FileSystem, Ino, InterruptCheck, Io, IoctlArgs, IoctlReply, Lock, LockOwner, LockRequest,
    LockSupport, LockType, LockWait, Name, NewNode, OpenArgs, OpenFlags, OpenReply, PollHandle,
    PushOutcome, ReadArgs, ReadBuf, ReadSink, RenameFlags, Result, SetAttr, SetXattrFlags,
    Timestamp, Whence, WriteArgs, WriteBuf, WriteSource, Xattr, XattrName,
};
use defuse_probe::clock;

use crate::dispatch::{Dispatcher, SessionPeer};
use crate::init::negotiate;
use crate::notify::KernelNotify;
use crate::options::SessionOptions;
use crate::transport::{DeferredKind, DeferredReply, ReplyPort, RequestReply};
use defuse_wire::abi::InitIn;
use defuse_wire::request::{DecodeOptions, DecodedRequest};

/// Handles the request in `bytes` with a file system that answers by chance, from `seed`.
///
/// # Panics
///
/// Panics if a request that needs a reply gets none or two, if a reply is longer than requested, or
/// if a lookup was granted by an undelivered reply and is not undone.
pub fn dispatch(seed: u64, bytes: &[u8]) {
    let fs = Arc::new(NullFs { state: AtomicU64::new(seed | 1), granted: AtomicU64::new(0) });
    let Ok(request) =
        DecodedRequest::parse(bytes, &DecodeOptions { setxattr_ext: true, ..Default::default() })
    else {
        return;
    };
    let dispatcher = dispatcher(fs.clone(), seed);
    if !request.opcode.has_reply() {
        dispatcher.forget(&request);
        return;
    }
    let gone = seed & (1 << 40) != 0;
    let mut reply = FuzzedReply::new(gone);
    let outcome = dispatcher.handle(&request, &mut reply, &FuzzedInterrupt, clock::now());
    let answers = reply.answers.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    assert_eq!(answers.len(), 1, "{}: {answers:?}", request.opcode.name());
    let most = 16 + dispatcher.negotiated.max_read + 4096;
    assert!(answers[0] <= most, "{}: an answer of {} bytes", request.opcode.name(), answers[0]);
    if gone && !outcome.deferred {
        let granted = fs.granted.load(Ordering::Relaxed);
        assert_eq!(granted, 0, "{}: {granted} lookups lost", request.opcode.name());
    }
}

fn dispatcher(fs: Arc<NullFs>, seed: u64) -> Arc<Dispatcher> {
    let kernel =
        InitIn { major: 7, minor: 45, flags: u32::MAX, flags2: u32::MAX, ..InitIn::default() };
    let options = SessionOptions {
        max_write: 128 * 1024,
        passthrough: false,
        negative_timeout: (seed & (1 << 41) != 0).then_some(Duration::from_secs(1)),
        ..SessionOptions::default()
    };
    let negotiated = match negotiate(&kernel, &fs.caps(), &options) {
        Ok((_, negotiated)) => negotiated,
        Err(error) => panic!("{error}"),
    };
    let port: Arc<dyn ReplyPort> = Arc::new(FuzzedPort);
    let notify = Arc::new(KernelNotify::new(&port, negotiated.minor, false));
    Arc::new(Dispatcher::new(
        (fs, defuse_fs::Origin::new()),
        notify,
        negotiated,
        &options,
        SessionPeer::Kernel(open_nothing()),
    ))
}

/// A descriptor that leads nowhere.
fn open_nothing() -> Arc<OwnedFd> {
    let file = std::fs::File::open("/dev/null").expect("/dev/null can be opened");
    Arc::new(file.into())
}

struct FuzzedInterrupt;
impl InterruptCheck for FuzzedInterrupt {
    fn is_interrupted(&self) -> bool {
        false
    }
}

struct FuzzedPort;
impl ReplyPort for FuzzedPort {
    fn send(&self, _: &[std::io::IoSlice<'_>]) -> Result<()> {
        Ok(())
    }
}

/// Remembers the length of each answer. `gone`: the kernel takes none.
struct FuzzedReply {
    buf: Vec<u8>,
    filled: usize,
    gone: bool,
    answers: Arc<Mutex<Vec<usize>>>,
}

impl FuzzedReply {
    fn new(gone: bool) -> Self {
        FuzzedReply { buf: vec![0; 1 << 18], filled: 0, gone, answers: Arc::default() }
    }

    fn answer(&self, len: usize) -> Result<()> {
        self.answers.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).push(16 + len);
        if self.gone { Err(Errno::ENOENT) } else { Ok(()) }
    }
}

impl RequestReply for FuzzedReply {
    fn send(&mut self, body: &[&[u8]]) -> Result<()> {
        self.answer(body.iter().map(|part| part.len()).sum())
    }
    fn send_errno(&mut self, errno: i32) -> Result<()> {
        assert!((0..=4095).contains(&errno), "errno {errno}");
        self.answer(0)
    }
    fn room(&mut self, len: usize) -> &mut [u8] {
        &mut self.buf[..len]
    }
    fn send_room(&mut self, len: usize) -> Result<()> {
        self.answer(len)
    }
    fn data(&mut self, _: usize) -> &mut dyn ReadSink {
        self.filled = 0;
        self
    }
    fn send_data(&mut self) -> Result<()> {
        self.answer(self.filled)
    }
    fn write_source(&mut self) -> &mut dyn WriteSource {
        unreachable!("nothing is in a pipe")
    }
    fn defer(&mut self, _: DeferredKind) -> Box<dyn DeferredReply> {
        let answers = Arc::clone(&self.answers);
        Box::new(FuzzedReply { buf: vec![0; 1 << 18], filled: 0, gone: self.gone, answers })
    }
}

impl ReadSink for FuzzedReply {
    fn put(&mut self, bytes: &[u8]) -> Result<()> {
        self.filled += bytes.len();
        Ok(())
    }
    fn put_zeros(&mut self, len: usize) -> Result<()> {
        self.filled += len;
        Ok(())
    }
    fn fill_from(&mut self, _: std::os::fd::BorrowedFd<'_>, _: u64, len: usize) -> Result<usize> {
        self.filled += len;
        Ok(len)
    }
}

impl DeferredReply for FuzzedReply {
    fn sink(&mut self) -> &mut dyn ReadSink {
        self
    }
    fn source(&mut self) -> &mut dyn WriteSource {
        unreachable!("the null file system asks for no data")
    }
    fn send_data(self: Box<Self>) -> Result<()> {
        self.answer(self.filled)
    }
    fn send(self: Box<Self>, body: &[u8]) -> Result<()> {
        self.answer(body.len())
    }
    fn send_errno(self: Box<Self>, errno: i32) -> Result<()> {
        assert!((0..=4095).contains(&errno), "errno {errno}");
        self.answer(0)
    }
}

/// Answers by chance, within the contract, and counts the lookups that it grants.
struct NullFs {
    state: AtomicU64,
    granted: AtomicU64,
}

impl NullFs {
    /// xorshift: short, and the same for the same seed.
    fn next(&self) -> u64 {
        let mut x = self.state.load(Ordering::Relaxed);
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        self.state.store(x, Ordering::Relaxed);
        x
    }

    fn chance<T>(&self, value: impl FnOnce() -> T) -> Result<T> {
        match self.next() % 8 {
            0 => Err(Errno::from_raw((self.next() % 200) as i32)),
            1 => Err(Errno::ENOENT),
            _ => Ok(value()),
        }
    }

    fn attr(&self) -> Attr {
        let time =
            Timestamp { secs: self.next() as i64, nanos: (self.next() % 1_000_000_000) as u32 };
        Attr {
            st_ino: self.next(),
            kind: FileKind::from_mode((self.next() as u32) & 0o170000).unwrap_or(FileKind::Fifo),
            perm: self.next() as u32 & 0o7777,
            nlink: self.next() as u32,
            uid: self.next() as u32,
            gid: self.next() as u32,
            rdev: self.next(),
            size: self.next(),
            blocks: self.next(),
            blksize: self.next() as u32,
            atime: time,
            mtime: time,
            ctime: time,
            btime: (self.next() & 1 == 0).then_some(time),
            valid_for: Duration::from_nanos(self.next()),
        }
    }

    fn entry(&self) -> Result<Entry> {
        let entry = self.chance(|| Entry {
            ino: Ino(self.next() | 2),
            generation: self.next(),
            attr: self.attr(),
            valid_for: Duration::from_nanos(self.next()),
        })?;
        self.granted.fetch_add(1, Ordering::Relaxed);
        Ok(entry)
    }

    fn make_open_reply(&self) -> OpenReply {
        OpenReply { no_flush: self.next() & 1 == 0, ..OpenReply::new(Fh(self.next())) }
    }
}

impl FileSystem for NullFs {
    fn caps(&self) -> Caps {
        let readdir_entries = true;
        Caps { locks: LockSupport::FileSystem, readdir_entries, posix_acl: true, ..Caps::default() }
    }
    fn lookup(&self, _: &Context<'_>, _: Ino, _: Name<'_>) -> Result<Entry> {
        self.entry()
    }
    fn lookup_parent(&self, _: &Context<'_>, _: Ino) -> Result<Entry> {
        self.entry()
    }
    fn forget(&self, _: Ino, lookups: u64) {
        self.granted
            .fetch_sub(lookups.min(self.granted.load(Ordering::Relaxed)), Ordering::Relaxed);
    }
    fn mknod(&self, _: &Context<'_>, _: Ino, _: Name<'_>, _: &NewNode<'_>) -> Result<Entry> {
        self.entry()
    }
    fn mkdir(&self, _: &Context<'_>, _: Ino, _: Name<'_>, _: &NewNode<'_>) -> Result<Entry> {
        self.entry()
    }
    fn symlink(
        &self,
        _: &Context<'_>,
        _: Ino,
        _: Name<'_>,
        _: &[u8],
        _: &NewNode<'_>,
    ) -> Result<Entry> {
        self.entry()
    }
    fn link(&self, _: &Context<'_>, _: Ino, _: Ino, _: Name<'_>) -> Result<Entry> {
        self.entry()
    }
    fn unlink(&self, _: &Context<'_>, _: Ino, _: Name<'_>) -> Result<()> {
        self.chance(|| ())
    }
    fn rename(
        &self,
        _: &Context<'_>,
        _: (Ino, Name<'_>),
        _: (Ino, Name<'_>),
        _: RenameFlags,
    ) -> Result<()> {
        self.chance(|| ())
    }
    fn readlink(&self, _: &Context<'_>, _: Ino) -> Result<Vec<u8>> {
        self.chance(|| vec![b'x'; (self.next() % 4096) as usize])
    }
    fn getattr(&self, _: &Context<'_>, _: Ino, _: Option<Fh>) -> Result<Attr> {
        self.chance(|| self.attr())
    }
    fn setattr(&self, _: &Context<'_>, _: Ino, _: Option<Fh>, _: &SetAttr) -> Result<Attr> {
        self.chance(|| self.attr())
    }
    fn setxattr(
        &self,
        _: &Context<'_>,
        _: Ino,
        _: XattrName<'_>,
        _: &[u8],
        _: SetXattrFlags,
    ) -> Result<()> {
        self.chance(|| ())
    }
    fn getxattr(&self, _: &Context<'_>, _: Ino, _: XattrName<'_>, _: usize) -> Result<Xattr> {
        // Also returns values where only a size was requested, and values longer than the room.
        self.chance(|| Xattr::Value(vec![0; (self.next() % 65536) as usize]))
    }
    fn open(&self, _: &Context<'_>, _: Ino, _: OpenArgs) -> Result<OpenReply> {
        self.chance(|| self.make_open_reply())
    }
    fn create(
        &self,
        _: &Context<'_>,
        _: Ino,
        _: Name<'_>,
        _: &NewNode<'_>,
        _: OpenArgs,
    ) -> Result<(Entry, OpenReply)> {
        Ok((self.entry()?, self.make_open_reply()))
    }
    fn read(&self, _: &Context<'_>, _: File, _: ReadArgs, out: &mut ReadBuf<'_>) -> Result<()> {
        out.put_zeros(self.next() as usize % (1 << 20))?;
        self.chance(|| ())
    }
    fn write(
        &self,
        _: &Context<'_>,
        _: File,
        _: WriteArgs,
        data: &mut WriteBuf<'_>,
    ) -> Result<usize> {
        let mut room = vec![0; data.remaining()];
        let count = data.take(&mut room)?;
        self.chance(|| count)
    }
    fn submit(&self, io: Io) {
        // Dropped now and then, which answers EIO.
        if !self.next().is_multiple_of(4) {
            io.finish(self.chance(|| 0));
        }
    }
    fn setlkw(&self, wait: LockWait) {
        if !self.next().is_multiple_of(4) {
            wait.finish(self.chance(|| ()));
        }
    }
    fn flush(&self, _: &Context<'_>, _: File, _: LockOwner) -> Result<()> {
        self.chance(|| ())
    }
    fn fallocate(&self, _: &Context<'_>, _: File, _: Fallocate) -> Result<()> {
        self.chance(|| ())
    }
    fn lseek(&self, _: &Context<'_>, _: File, offset: u64, _: Whence) -> Result<u64> {
        self.chance(|| offset)
    }
    fn copy_file_range(&self, _: &Context<'_>, copy: &CopyRange) -> Result<u64> {
        self.chance(|| copy.length)
    }
    fn ioctl(&self, _: &Context<'_>, _: File, _: &IoctlArgs<'_>) -> Result<IoctlReply> {
        let output = vec![0; (self.next() % 65536) as usize];
        self.chance(|| IoctlReply { result: self.next() as i32, output })
    }
    fn poll(&self, _: &Context<'_>, _: File, events: u32, _: Option<PollHandle>) -> Result<u32> {
        self.chance(|| events)
    }
    fn getlk(&self, _: &Context<'_>, _: File, request: &LockRequest) -> Result<Option<Lock>> {
        self.chance(|| Some(request.lock).filter(|lock| lock.typ != LockType::Unlock))
    }
    fn opendir(&self, _: &Context<'_>, _: Ino, _: OpenFlags) -> Result<OpenReply> {
        self.chance(|| self.make_open_reply())
    }
    fn readdir(&self, _: &Context<'_>, _: File, from: u64, out: &mut DirBuf<'_>) -> Result<()> {
        let name = [b'n'; 255];
        for next in 1..1 + self.next() % 64 {
            let name = &name[..1 + (self.next() % 255) as usize];
            let kind = FileKind::Regular;
            let item = DirItem { ino: next, next: from.wrapping_add(next), kind, name };
            if out.push_with(item, || self.entry().ok()) == PushOutcome::Full {
                break;
            }
        }
        self.chance(|| ())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_of_request_gets_exactly_one_answer() {
        let mut handled = 0;
        for sample in defuse_wire::request::samples::samples() {
            let bytes = sample.bytes();
            for seed in 0..200_u64 {
                dispatch(0x9e37_79b9_7f4a_7c15_u64.wrapping_mul(seed), &bytes);
                handled += 1;
            }
        }
        assert!(handled > 40 * 200, "{handled}");
    }
}
