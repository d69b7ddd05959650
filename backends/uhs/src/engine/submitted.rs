//! Operations that a caller submits without waiting for them.
//!
//! A direct read or write of contiguous blocks goes between the memory of its owner and the device,
//! by one thread with a queue of its own, the *line*: so many operations are in flight, and a
//! system call begins some and waits for others. Another thread performs everything else that would
//! block (a sync, data that is in the cache), one operation after the other.
//!
//! Answers may run code of the owner on the line, which may begin further operations. The line must
//! not wait for one: see [`is_line`].

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Sender};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use defuse_block::signals::take_none;
use defuse_block::{
    BlockCompletion, BlockOp, BlockOpKind, DeviceQueue, MemorySegments, OperationMemory, OwnedBuf,
    QueuePurpose, QueueWaker,
};
use defuse_fs::{Buffer, Errno, Ino, Io, IoOp, OpenFlags};

use super::UhsEngine;
use super::direct::{IoPath, become_line, is_line, unreadable, unwritable};
use crate::content::{DirectSource, DirectTarget, SharedContent, whole_pages};
use crate::format::BLOCK;
use crate::locks::lock;
use crate::names::ContentState;

/// Direct operations in flight.
const DEPTH: u32 = 128;

/// Performs an operation, and answers it.
type IoHandler = fn(&UhsEngine, Io);

/// The threads that perform submitted operations.
pub(crate) struct SubmissionThreads {
    inbox: Arc<SubmissionInbox>,
    /// Ends the other thread when it is dropped. The line has the other one.
    others: Sender<Io>,
    threads: Vec<JoinHandle<()>>,
}

struct SubmissionInbox {
    new: Mutex<Vec<Io>>,
    /// The line sleeps, or is about to.
    sleeps: AtomicBool,
    ended: AtomicBool,
    waker: QueueWaker,
}

impl SubmissionThreads {
    /// Starts the threads. `None` where the device has no queue to spare.
    pub(crate) fn start(
        engine: &Arc<UhsEngine>,
        carry_out: IoHandler,
    ) -> Option<SubmissionThreads> {
        let queue = engine.io.queue(QueuePurpose::Caller, DEPTH)?;
        let inbox = Arc::new(SubmissionInbox {
            new: Mutex::default(),
            sleeps: AtomicBool::new(false),
            ended: AtomicBool::new(false),
            waker: queue.waker(),
        });
        let (others, waiting) = mpsc::channel::<Io>();
        let line = DirectThread {
            engine: Arc::clone(engine),
            inbox: Arc::clone(&inbox),
            queue,
            flights: Vec::new(),
            free: Vec::new(),
            waiting: VecDeque::new(),
            others: others.clone(),
        };
        let named = |name: &str| std::thread::Builder::new().name(name.to_owned());
        let run = named("uhs-direct").spawn(move || {
            take_none();
            line.run();
        });
        let run = run.inspect_err(|error| log::warn!("uhs: no thread for direct I/O: {error}"));
        let run = run.ok()?;
        let mut threads = vec![run];
        let engine = Arc::clone(engine);
        let other = named("uhs-submitted").spawn(move || {
            take_none();
            waiting.into_iter().for_each(|io| carry_out(&engine, io));
        });
        match other {
            Ok(other) => threads.push(other),
            // Operations for this thread answer EIO.
            Err(error) => log::error!("uhs: no thread for operations that wait: {error}"),
        }
        Some(SubmissionThreads { inbox, others, threads })
    }

    /// Begins a direct read or write.
    pub(crate) fn begin(&self, io: Io) {
        lock(&self.inbox.new).push(io);
        if self.inbox.sleeps.swap(false, Ordering::SeqCst) {
            self.inbox.waker.wake();
        }
    }

    /// Hands an operation to the other thread.
    pub(crate) fn forward(&self, io: Io) {
        // Without the thread the operation answers by its drop.
        let _ = self.others.send(io);
    }

    /// True on the thread that must not wait.
    pub(crate) fn is_line() -> bool {
        is_line()
    }

    /// Ends when all operations are answered.
    pub(crate) fn end(self) {
        let SubmissionThreads { inbox, others, threads } = self;
        inbox.ended.store(true, Ordering::SeqCst);
        inbox.waker.wake();
        drop(others);
        let here = std::thread::current().id();
        // An answer may drop the last user of the file system.
        if threads.iter().all(|thread| thread.thread().id() != here) {
            for thread in threads {
                let _ = thread.join();
            }
        }
    }
}

/// True for reads and writes that the line may carry out.
pub(crate) fn is_direct(op: IoOp) -> bool {
    let whole = |offset: u64, len: usize| whole_pages(offset, len as u64).is_some();
    match op {
        IoOp::Read { args, len, .. } => {
            IoPath::from(args.flags) == IoPath::Direct && whole(args.offset, len)
        }
        IoOp::Write { args, len, .. } => {
            let waits = OpenFlags::SYNC | OpenFlags::DSYNC | OpenFlags::APPEND;
            let is_direct = IoPath::from(args.flags) == IoPath::Direct && args.flags.0 & waits == 0;
            is_direct && whole(args.offset, len)
        }
        _ => false,
    }
}

/// The thread with direct operations.
struct DirectThread {
    engine: Arc<UhsEngine>,
    inbox: Arc<SubmissionInbox>,
    queue: Box<dyn DeviceQueue>,
    flights: Vec<Option<OperationInFlight>>,
    free: Vec<usize>,
    /// Operations that do not fit into the queue yet.
    waiting: VecDeque<BlockOp>,
    others: Sender<Io>,
}

/// An operation of a caller.
struct OperationInFlight {
    io: Io,
    content: SharedContent,
    what: DirectTransfer,
    /// Operations of the device that are not complete.
    left: usize,
    failed: Option<defuse_block::Errno>,
}

enum DirectTransfer {
    /// With the place of the bytes in their vector.
    Read(DirectSource, usize),
    Write(DirectTarget, WriteData),
}

/// The bytes of a write while the device has them.
enum WriteData {
    /// In the operation of the device; their place in the vector.
    Given(usize),
    /// In several operations.
    Lent(Arc<Vec<u8>>, usize),
}

impl DirectThread {
    fn run(mut self) {
        become_line();
        let (mut new, mut done) = (Vec::new(), Vec::new());
        loop {
            std::mem::swap(&mut new, &mut *lock(&self.inbox.new));
            new.drain(..).for_each(|io| self.begin(io));
            while let Some(op) = self.waiting.pop_front() {
                if let Err(again) = self.queue.push(op) {
                    self.waiting.push_front(again);
                    break;
                }
            }
            self.inbox.sleeps.store(true, Ordering::SeqCst);
            if !lock(&self.inbox.new).is_empty() {
                self.queue.kick();
            } else if self.queue.in_flight() == 0 && self.inbox.ended.load(Ordering::SeqCst) {
                return;
            } else {
                self.queue.wait(None);
            }
            self.inbox.sleeps.store(false, Ordering::SeqCst);
            self.queue.reap(&mut done);
            done.drain(..).for_each(|done| self.complete(done));
        }
    }

    fn begin(&mut self, io: Io) {
        let refused = match io.op() {
            IoOp::Read { file, args, len } => self.begin_read(io, file.ino.0, args.offset, len),
            IoOp::Write { file, args, len } => self.begin_write(io, file.ino.0, args.offset, len),
            _ => Some(io),
        };
        if let Some(io) = refused {
            let _ = self.others.send(io);
        }
    }

    /// The content of an inode, if it is in memory.
    fn content(&self, ino: u64) -> Option<SharedContent> {
        match self.engine.names.content(ino) {
            Ok(ContentState::Here(content)) => Some(content),
            _ => None,
        }
    }

    /// Returns the operation where the line cannot carry it out.
    fn begin_read(&mut self, mut io: Io, ino: u64, offset: u64, len: usize) -> Option<Io> {
        let Some(content) = self.content(ino) else { return Some(io) };
        let source = lock(&content).direct_source(&self.engine.pool, offset, len as u64);
        let most = self.engine.io.gather_limit();
        let Some(source) = source.filter(|source| source.run.count as usize <= most) else {
            return Some(io);
        };
        let Some(room) = io.take_room() else { return Some(io) };
        let (vec, start) = room.into_parts();
        let memory = OwnedBuf::new(vec, start..start + source.run.count as usize * BLOCK);
        let flight = OperationInFlight {
            io,
            content,
            what: DirectTransfer::Read(source, start),
            left: 1,
            failed: None,
        };
        let tag = self.add(flight);
        let kind = BlockOpKind::Read { block: source.run.block, memory: memory.into() };
        self.waiting.push_back(BlockOp { tag, kind });
        None
    }

    fn begin_write(&mut self, mut io: Io, ino: u64, offset: u64, len: usize) -> Option<Io> {
        let Some(content) = self.content(ino) else { return Some(io) };
        let Some(data) = io.take_data() else { return Some(io) };
        let begun = match data.len() == len {
            true => self.engine.begin_direct(&mut lock(&content), offset, len),
            false => Ok(None),
        };
        // The other thread reports the reason.
        let Ok(Some(target)) = begun else {
            io.return_data(data);
            return Some(io);
        };
        let (vec, start) = data.into_parts();
        let most = self.engine.io.gather_limit() as u64;
        let parts = target.runs.iter().flat_map(|run| {
            let parts = (run.block..run.end()).step_by(most as usize);
            parts.map(|block| (block, (run.end() - block).min(most) as usize * BLOCK))
        });
        let parts: Vec<(u64, usize)> = parts.collect();
        let left = parts.len();
        let write =
            |block, memory: MemorySegments| BlockOpKind::Write { block, memory, fua: false };
        let (data, kinds) = match &parts[..] {
            [(block, _)] => {
                let memory = OwnedBuf::new(vec, start..start + len);
                (WriteData::Given(start), vec![write(*block, memory.into())])
            }
            _ => {
                let shared = Arc::new(vec);
                let mut at = start;
                let kinds = parts.iter().map(|(block, bytes)| {
                    let memory = OperationMemory::Bytes(Arc::clone(&shared), at..at + bytes);
                    at += bytes;
                    write(*block, MemorySegments::One(memory))
                });
                let kinds = kinds.collect();
                (WriteData::Lent(shared, start), kinds)
            }
        };
        let what = DirectTransfer::Write(target, data);
        let tag = self.add(OperationInFlight { io, content, what, left, failed: None });
        self.waiting.extend(kinds.into_iter().map(|kind| BlockOp { tag, kind }));
        None
    }

    fn add(&mut self, flight: OperationInFlight) -> u64 {
        match self.free.pop() {
            Some(at) => {
                self.flights[at] = Some(flight);
                at as u64
            }
            None => {
                self.flights.push(Some(flight));
                self.flights.len() as u64 - 1
            }
        }
    }

    fn complete(&mut self, BlockCompletion { tag, result, memory }: BlockCompletion) {
        let at = tag as usize;
        let Some(flight) = self.flights.get_mut(at).and_then(Option::as_mut) else { return };
        flight.failed = flight.failed.or(result.err());
        flight.left -= 1;
        if flight.left > 0 {
            return;
        }
        self.free.push(at);
        let Some(flight) = self.flights[at].take() else { return };
        let OperationInFlight { io, content, what, failed, .. } = flight;
        match what {
            DirectTransfer::Read(source, start) => {
                self.has_read(io, &content, (source, start), (memory, failed));
            }
            DirectTransfer::Write(target, data) => {
                let buffer = match data {
                    WriteData::Given(start) => memory.into_vec().map(|vec| (vec, start)),
                    WriteData::Lent(shared, start) => {
                        drop(memory);
                        Arc::try_unwrap(shared).ok().map(|vec| (vec, start))
                    }
                };
                let buffer = buffer.map(|(vec, start)| Buffer::from_parts(vec, start));
                self.has_written(io, &content, target, (buffer, failed));
            }
        }
    }

    fn has_read(
        &mut self,
        mut io: Io,
        content: &SharedContent,
        (source, start): (DirectSource, usize),
        (memory, failed): (MemorySegments, Option<defuse_block::Errno>),
    ) {
        // A device that failed in the middle keeps the memory.
        let Some(vec) = memory.into_vec() else { return io.finish(Err(Errno::EIO)) };
        let room = Buffer::from_parts(vec, start);
        if let Some(errno) = failed {
            return io.finish_room(room, Err(unreadable(source.run, errno)));
        }
        let (ino, flags) = match io.op() {
            IoOp::Read { file, args, .. } => (file.ino, args.flags),
            _ => return,
        };
        if lock(content).version() != source.version {
            // The blocks may belong to another file since then.
            if io.return_room(room).is_ok() {
                let _ = self.others.send(io);
            }
            return;
        }
        self.engine.has_read_directly(source.run);
        if !flags.has(OpenFlags::NOATIME) && self.engine.names.record_access(ino.0) {
            self.notify_frontends(&io, ino);
        }
        io.finish_room(room, Ok(source.bytes));
    }

    /// Notifies all frontends, except the origin of the operation, that attributes have changed.
    fn notify_frontends(&self, io: &Io, ino: Ino) {
        let origin = io.with_context(|cx| cx.origin);
        self.engine.frontends.notify_attributes(origin, &[ino]);
    }

    fn has_written(
        &mut self,
        mut io: Io,
        content: &SharedContent,
        target: DirectTarget,
        (data, failed): (Option<Buffer>, Option<defuse_block::Errno>),
    ) {
        let IoOp::Write { file, args, len } = io.op() else { return };
        let written = failed.map_or(Ok(()), |errno| Err(unwritable(&target.runs, errno)));
        let of = (file.ino.0, content);
        let ended = self.engine.end_direct(of, target, written, args.kill_suidgid);
        let result = written.and(ended).map(|()| len);
        self.notify_frontends(&io, file.ino);
        match (result, data) {
            (Err(Errno::EBUSY), Some(data)) => {
                io.return_data(data);
                let _ = self.others.send(io);
            }
            (result, Some(data)) => io.finish_data(data, result),
            (result, None) => io.finish(result),
        }
    }
}
