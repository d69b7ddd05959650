//! Direct reads and writes (`O_DIRECT`), synchronous and submitted, beside reads and writes by the
//! cache.

use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use defuse_block::{
    BlockCompletion, BlockDevice, BlockOp, BlockOpKind, DeviceProperties, DeviceQueue,
    Errno as DeviceErrno, MemoryRegion, QueueWaker, RamDevice, SimDevice,
};
use defuse_fs::{
    Buffer, Completion, Errno, Fallocate, Fh, File, FileKind, FileSystem, Ino, Io, IoOp, OpenFlags,
    ReadArgs, ReadBuf, ReadSink, ReleaseArgs, SetAttr, SliceSink, SliceSource, WriteArgs, WriteBuf,
    WriteSource,
};

use super::{OPTIONS, cx, make_fresh, name, node, open, open_with};
use crate::commit::CommitRules;
use crate::{Uhs, UhsOptions, check};

const PAGE: usize = 4096;

fn flags(direct: bool) -> OpenFlags {
    OpenFlags(if direct { OpenFlags::DIRECT } else { 0 })
}

fn file(ino: Ino) -> File {
    File { ino, fh: Fh(0) }
}

fn make(fs: &Uhs, at: &str) -> Ino {
    let made = fs.mknod(&cx(), Ino::ROOT, name(at), &node(FileKind::Regular)).unwrap().ino;
    fs.open(&cx(), made, Default::default()).unwrap();
    made
}

fn write(fs: &Uhs, ino: Ino, offset: u64, bytes: &[u8], direct: bool) -> Result<usize, Errno> {
    let mut source = SliceSource::new(bytes);
    let args = WriteArgs { offset, flags: flags(direct), ..WriteArgs::default() };
    fs.write(&cx(), file(ino), args, &mut WriteBuf::new(&mut source))
}

fn read(fs: &Uhs, ino: Ino, offset: u64, len: usize, direct: bool) -> Vec<u8> {
    let mut bytes = vec![0xee; len];
    let mut sink = SliceSink::new(&mut bytes);
    let mut out = ReadBuf::new(&mut sink, len);
    let args = ReadArgs { offset, flags: flags(direct), ..ReadArgs::default() };
    fs.read(&cx(), file(ino), args, &mut out).unwrap();
    let filled = out.filled_len();
    bytes.truncate(filled);
    bytes
}

/// The result of an operation, and its memory.
type SubmissionAnswer = (Result<usize, Errno>, Buffer);

type AnswerCallback = Box<dyn FnOnce(&SubmissionAnswer) + Send>;

/// An operation that owns its memory.
struct DirectSubmission {
    memory: Option<Buffer>,
    /// Bytes that were read by the cache.
    read: Vec<u8>,
    answer: Sender<SubmissionAnswer>,
    then: Option<AnswerCallback>,
}

impl ReadSink for DirectSubmission {
    fn put(&mut self, bytes: &[u8]) -> Result<(), Errno> {
        self.read.extend_from_slice(bytes);
        Ok(())
    }
    fn put_zeros(&mut self, len: usize) -> Result<(), Errno> {
        self.read.resize(self.read.len() + len, 0);
        Ok(())
    }
    fn fill_from(&mut self, _: BorrowedFd<'_>, _: u64, _: usize) -> Result<usize, Errno> {
        Err(Errno::EIO)
    }
}

impl WriteSource for DirectSubmission {
    fn remaining(&self) -> usize {
        self.memory.as_ref().map_or(0, |memory| memory.len())
    }
    fn take(&mut self, out: &mut [u8]) -> Result<usize, Errno> {
        let memory = self.memory.take().unwrap_or_default().into_vec();
        let (now, later) = memory.split_at(out.len().min(memory.len()));
        out[..now.len()].copy_from_slice(now);
        self.memory = Some(later.to_vec().into());
        Ok(now.len())
    }
    fn drain_to(&mut self, _: BorrowedFd<'_>, _: u64, _: usize) -> Result<usize, Errno> {
        Err(Errno::EIO)
    }
}

impl Completion for DirectSubmission {
    fn sink(&mut self) -> &mut dyn ReadSink {
        self
    }
    fn source(&mut self) -> &mut dyn WriteSource {
        self
    }
    fn take_room(&mut self) -> Option<Buffer> {
        self.memory.take()
    }
    fn give_room(&mut self, room: Buffer, _: usize) -> Result<(), Errno> {
        self.memory = Some(room);
        Ok(())
    }
    fn take_data(&mut self) -> Option<Buffer> {
        self.memory.take()
    }
    fn give_data(&mut self, data: Buffer) {
        self.memory = Some(data);
    }
    fn finish(mut self: Box<Self>, result: Result<usize, Errno>) {
        let memory = match self.read.is_empty() {
            true => self.memory.take().unwrap_or_default(),
            false => std::mem::take(&mut self.read).into(),
        };
        let answer = (result, memory);
        if let Some(then) = self.then.take() {
            then(&answer);
        }
        let _ = self.answer.send(answer);
    }
}

fn submit(
    fs: &Uhs,
    op: IoOp,
    memory: Buffer,
    then: Option<AnswerCallback>,
) -> Receiver<SubmissionAnswer> {
    let (answer, answers) = channel();
    let completion =
        Box::new(DirectSubmission { memory: Some(memory), read: Vec::new(), answer, then });
    fs.submit(Io::new(op, cx().caller, 0, Arc::default(), completion));
    answers
}

fn start_write(fs: &Uhs, ino: Ino, offset: u64, bytes: &[u8]) -> Receiver<SubmissionAnswer> {
    let mut memory = Buffer::new_aligned(bytes.len());
    memory.copy_from_slice(bytes);
    let args = WriteArgs { offset, flags: flags(true), ..WriteArgs::default() };
    submit(fs, IoOp::Write { file: file(ino), args, len: bytes.len() }, memory, None)
}

fn start_read(fs: &Uhs, ino: Ino, offset: u64, len: usize) -> Receiver<SubmissionAnswer> {
    let args = ReadArgs { offset, flags: flags(true), ..ReadArgs::default() };
    submit(fs, IoOp::Read { file: file(ino), args, len }, Buffer::new_aligned(len), None)
}

fn wait(answers: &Receiver<SubmissionAnswer>) -> SubmissionAnswer {
    answers.recv_timeout(Duration::from_secs(20)).expect("the operation is answered")
}

/// The bytes that a file should have.
struct FileBytesModel {
    bytes: Vec<u8>,
    random: fastrand::Rng,
}

impl FileBytesModel {
    fn place(&mut self, whole: bool) -> (usize, usize) {
        let (most, len) = (20 * PAGE, [1, 300, PAGE, 3 * PAGE, 40_000][self.random.usize(..5)]);
        let (offset, len) = (self.random.usize(..most), self.random.usize(1..=len));
        match whole {
            true => (offset / PAGE * PAGE, len.next_multiple_of(PAGE)),
            false => (offset, len),
        }
    }

    fn has_written(&mut self, offset: usize, bytes: &[u8]) {
        let end = offset + bytes.len();
        self.bytes.resize(self.bytes.len().max(end), 0);
        self.bytes[offset..end].copy_from_slice(bytes);
    }

    fn step(&mut self, fs: &Uhs, ino: Ino) {
        match self.random.u8(..14) {
            0..6 => {
                let direct = self.random.bool();
                // A direct write that is not of whole pages goes by the cache.
                let whole = direct && self.random.u8(..8) > 0;
                let (offset, len) = self.place(whole);
                let mut bytes = vec![0; len];
                self.random.fill(&mut bytes);
                let written = match direct && self.random.bool() {
                    true => wait(&start_write(fs, ino, offset as u64, &bytes)).0,
                    false => write(fs, ino, offset as u64, &bytes, direct),
                };
                assert_eq!(written, Ok(len));
                self.has_written(offset, &bytes);
            }
            6 | 7 => {
                let (offset, len) = self.place(true);
                let expected = self.bytes.get(offset..).unwrap_or_default();
                let expected = &expected[..expected.len().min(len)];
                match self.random.u8(..3) {
                    0 => {
                        let (read, bytes) = wait(&start_read(fs, ino, offset as u64, len));
                        assert_eq!(read, Ok(expected.len()));
                        assert!(bytes[..expected.len()] == *expected, "submitted");
                    }
                    way => {
                        let found = read(fs, ino, offset as u64, len, way == 1);
                        assert!(found == expected, "direct: {}", way == 1);
                    }
                }
            }
            8 => {
                let size = self.random.usize(..24 * PAGE);
                let set = SetAttr { size: Some(size as u64), ..SetAttr::default() };
                fs.setattr(&cx(), ino, None, &set).unwrap();
                self.bytes.resize(size, 0);
            }
            9 | 10 => self.allocate(fs, ino),
            11 => fs.fsync(&cx(), file(ino), false).unwrap(),
            12 => drop(fs.engine().move_everything()),
            _ => fs.syncfs(&cx()).unwrap(),
        }
        let all = read(fs, ino, 0, self.bytes.len() + PAGE, false);
        assert!(all == self.bytes, "{} bytes instead of {}", all.len(), self.bytes.len());
    }

    fn allocate(&mut self, fs: &Uhs, ino: Ino) {
        let modes = [
            0,
            Fallocate::KEEP_SIZE,
            Fallocate::PUNCH_HOLE | Fallocate::KEEP_SIZE,
            Fallocate::ZERO_RANGE,
            Fallocate::COLLAPSE_RANGE,
            Fallocate::INSERT_RANGE,
        ];
        let mode = modes[self.random.usize(..6)];
        let moves = matches!(mode, Fallocate::COLLAPSE_RANGE | Fallocate::INSERT_RANGE);
        let (at, len) = self.place(moves);
        if moves && at + len >= self.bytes.len() {
            return;
        }
        let range = Fallocate { mode, offset: at as u64, length: len as u64 };
        fs.fallocate(&cx(), file(ino), range).unwrap();
        let old = self.bytes.len();
        match mode {
            0 => self.bytes.resize(old.max(at + len), 0),
            Fallocate::KEEP_SIZE => {}
            Fallocate::COLLAPSE_RANGE => drop(self.bytes.drain(at..at + len)),
            Fallocate::INSERT_RANGE => {
                drop(self.bytes.splice(at..at, std::iter::repeat_n(0, len)));
                self.bytes.truncate(old + len);
            }
            mode => {
                if mode == Fallocate::ZERO_RANGE {
                    self.bytes.resize(old.max(at + len), 0);
                }
                let end = (at + len).min(self.bytes.len());
                self.bytes[at.min(end)..end].fill(0);
            }
        }
    }
}

#[test]
fn a_file_that_is_used_both_ways_is_like_bytes() {
    for seed in 0..60 {
        let ram = make_fresh();
        let options = UhsOptions { cache_pages: 8, dirty_pages: 32, ..OPTIONS };
        let mut model =
            FileBytesModel { bytes: Vec::new(), random: fastrand::Rng::with_seed(seed) };
        let mut fs = open_with(ram.clone(), options, CommitRules::ALL).0;
        let ino = make(&fs, "a");
        for step in 0..150 {
            model.step(&fs, ino);
            if step % 50 == 49 {
                drop(fs);
                let report = check(&(Arc::new(ram.clone()) as Arc<dyn BlockDevice>)).unwrap();
                assert_eq!(report.problems, [], "seed {seed}");
                fs = open_with(ram.clone(), options, CommitRules::ALL).0;
                fs.open(&cx(), ino, Default::default()).unwrap();
                let all = read(&fs, ino, 0, model.bytes.len() + 1, false);
                assert!(all == model.bytes, "seed {seed}: after a remount");
            }
        }
    }
}

/// A device that holds writes or reads back, and may refuse writes.
#[derive(Clone)]
struct HeldDevice {
    ram: RamDevice,
    holds: Arc<AtomicBool>,
    holds_reads: Arc<AtomicBool>,
    refuses: Arc<AtomicBool>,
    held: Arc<AtomicU64>,
    wakers: Arc<Mutex<Vec<QueueWaker>>>,
}

/// Releases all held operations when it is dropped, also when a test fails: dropping the file
/// system waits for the device.
struct DeviceHold(HeldDevice);

impl Drop for DeviceHold {
    fn drop(&mut self) {
        self.0.wait_for(0);
        self.0.release();
    }
}

struct HeldQueue {
    queue: Box<dyn DeviceQueue>,
    kept: Vec<BlockOp>,
    done: Vec<BlockCompletion>,
    device: HeldDevice,
}

impl HeldDevice {
    fn new(ram: RamDevice) -> HeldDevice {
        let (holds, holds_reads, refuses, held, wakers) = Default::default();
        HeldDevice { ram, holds, holds_reads, refuses, held, wakers }
    }

    /// Writes that begin from now on wait.
    fn hold(&self) {
        self.holds.store(true, Ordering::SeqCst);
    }

    /// Reads that begin from now on wait.
    fn hold_reads(&self) {
        self.holds_reads.store(true, Ordering::SeqCst);
    }

    fn wait_for(&self, held: u64) {
        while self.held.load(Ordering::SeqCst) < held {
            std::thread::sleep(Duration::from_millis(1));
        }
        // Others do not wait.
        self.holds.store(false, Ordering::SeqCst);
        self.holds_reads.store(false, Ordering::SeqCst);
    }

    fn release(&self) {
        self.held.store(0, Ordering::SeqCst);
        self.wakers.lock().unwrap().iter().for_each(QueueWaker::wake);
    }
}

impl BlockDevice for HeldDevice {
    fn properties(&self) -> &DeviceProperties {
        self.ram.properties()
    }
    fn register(&self, region: &Arc<MemoryRegion>) -> defuse_block::Result<()> {
        self.ram.register(region)
    }
    fn queue(&self, depth: u32) -> defuse_block::Result<Box<dyn DeviceQueue>> {
        let queue = self.ram.queue(depth)?;
        self.wakers.lock().unwrap().push(queue.waker());
        Ok(Box::new(HeldQueue { queue, kept: Vec::new(), done: Vec::new(), device: self.clone() }))
    }
}

impl HeldQueue {
    fn release_all(&mut self) {
        if self.device.held.load(Ordering::SeqCst) == 0 {
            for op in self.kept.drain(..) {
                self.queue.push(op).unwrap();
            }
        }
    }
}

impl DeviceQueue for HeldQueue {
    fn push(&mut self, op: BlockOp) -> Result<(), BlockOp> {
        let is_write = matches!(op.kind, BlockOpKind::Write { .. });
        if is_write && self.device.refuses.load(Ordering::SeqCst) {
            let (tag, memory) = (op.tag, op.kind.into_memory());
            self.done.push(BlockCompletion { tag, result: Err(DeviceErrno::IO), memory });
            return Ok(());
        }
        let is_read = matches!(op.kind, BlockOpKind::Read { .. });
        let holds = is_write && self.device.holds.load(Ordering::SeqCst);
        if holds || is_read && self.device.holds_reads.load(Ordering::SeqCst) {
            self.kept.push(op);
            self.device.held.fetch_add(1, Ordering::SeqCst);
            return Ok(());
        }
        self.queue.push(op)
    }
    fn kick(&mut self) {
        self.queue.kick();
    }
    fn reap(&mut self, done: &mut Vec<BlockCompletion>) {
        self.release_all();
        done.append(&mut self.done);
        self.queue.reap(done);
    }
    fn wait(&mut self, timeout: Option<Duration>) {
        self.release_all();
        if self.done.is_empty() {
            self.queue.wait(timeout);
        }
    }
    fn waker(&self) -> QueueWaker {
        self.queue.waker()
    }
    fn in_flight(&self) -> usize {
        self.kept.len() + self.done.len() + self.queue.in_flight()
    }
    fn depth(&self) -> usize {
        self.queue.depth()
    }
}

/// A file of some pages of ones, on a device that is small enough to be filled.
fn with_file(pages: usize) -> (Uhs, Ino, DeviceHold) {
    let held = HeldDevice::new(make_fresh());
    let fs = open(held.clone(), CommitRules::ALL).0;
    let ino = make(&fs, "a");
    write(&fs, ino, 0, &vec![1; pages * PAGE], true).unwrap();
    fs.syncfs(&cx()).unwrap();
    (fs, ino, DeviceHold(held))
}

/// Takes all blocks of the device, and returns the bytes written.
fn fill(fs: &Uhs, ino: Ino) -> Vec<u8> {
    let part = vec![5; 16 * PAGE];
    let mut all = Vec::new();
    while let Ok(taken) = write(fs, ino, all.len() as u64, &part, false) {
        all.extend_from_slice(&part[..taken]);
        fs.syncfs(&cx()).unwrap();
    }
    while let Ok(taken @ 1..) = write(fs, ino, all.len() as u64, &part[..PAGE], false) {
        all.extend_from_slice(&part[..taken]);
    }
    fs.syncfs(&cx()).unwrap();
    all
}

/// While the device overwrites blocks of a file, no other file gets them, even if the file is cut
/// or removed.
#[test]
fn blocks_go_to_nobody_while_a_device_writes_to_them() {
    type FileAction = fn(&Uhs, Ino);
    let acts: [(&str, FileAction); 4] = [
        ("cut", |fs, ino| {
            let set = SetAttr { size: Some(0), ..SetAttr::default() };
            fs.setattr(&cx(), ino, None, &set).unwrap();
        }),
        ("removed", |fs, ino| {
            fs.unlink(&cx(), Ino::ROOT, name("a")).unwrap();
            fs.release(&cx(), file(ino), ReleaseArgs::default()).unwrap();
            fs.forget(ino, 1);
        }),
        ("punched", |fs, ino| {
            let mode = Fallocate::PUNCH_HOLE | Fallocate::KEEP_SIZE;
            let range = Fallocate { mode, offset: 0, length: (8 * PAGE) as u64 };
            fs.fallocate(&cx(), file(ino), range).unwrap();
        }),
        ("overwritten", |fs, ino| {
            write(fs, ino, 0, &[9; 8 * PAGE], false).unwrap();
        }),
    ];
    for (what, act) in acts {
        let (fs, ino, held) = with_file(8);
        let other = make(&fs, "b");
        held.0.hold();
        let answers = start_write(&fs, ino, 0, &[2; 8 * PAGE]);
        held.0.wait_for(1);
        act(&fs, ino);
        fs.syncfs(&cx()).unwrap();
        fs.syncfs(&cx()).unwrap();
        let all = fill(&fs, other);
        assert!(all.len() > 1000 * PAGE, "{what}");
        held.0.release();
        let (written, memory) = wait(&answers);
        assert!(written == Ok(8 * PAGE) || what == "removed", "{what}: {written:?}");
        assert!(memory == [2; 8 * PAGE], "{what}: the memory comes back");
        drop(fs);
        let fs = open(held.0.ram.clone(), CommitRules::ALL).0;
        assert!(read(&fs, other, 0, all.len(), false) == all, "{what}: another file has changed");
        drop(fs);
        let report = check(&(Arc::new(held.0.ram.clone()) as Arc<dyn BlockDevice>)).unwrap();
        assert_eq!(report.problems, [], "{what}");
    }
}

/// Blocks that are being read may belong to another file when the read completes.
#[test]
fn bytes_of_another_file_are_not_read() {
    for submitted in [false, true] {
        let (fs, ino, held) = with_file(8);
        let fs = Arc::new(fs);
        let held = held;
        let other = make(&fs, "b");
        held.0.hold_reads();
        let reader = std::thread::spawn({
            let fs = Arc::clone(&fs);
            move || match submitted {
                true => {
                    let (count, bytes) = wait(&start_read(&fs, ino, 0, 8 * PAGE));
                    bytes[..count.unwrap()].to_vec()
                }
                false => read(&fs, ino, 0, 8 * PAGE, true),
            }
        });
        held.0.wait_for(1);
        let set = SetAttr { size: Some(0), ..SetAttr::default() };
        fs.setattr(&cx(), ino, None, &set).unwrap();
        fs.syncfs(&cx()).unwrap();
        fs.syncfs(&cx()).unwrap();
        fill(&fs, other);
        held.0.release();
        let found = reader.join().unwrap();
        assert!(found.iter().all(|byte| *byte == 1), "submitted: {submitted}");
    }
}

#[test]
fn a_page_that_is_read_while_the_device_overwrites_it_is_no_older_than_the_device() {
    let (fs, ino, held) = with_file(8);
    let options = UhsOptions { cache_pages: 64, ..OPTIONS };
    drop(fs);
    let fs = Arc::new(open_with(held.0.clone(), options, CommitRules::ALL).0);
    // The hold is dropped before the file system.
    let held = held;
    fs.open(&cx(), ino, Default::default()).unwrap();
    held.0.hold();
    let answers = start_write(&fs, ino, 0, &[2; 4 * PAGE]);
    held.0.wait_for(1);
    let reader = std::thread::spawn({
        let fs = Arc::clone(&fs);
        move || read(&fs, ino, 0, 8 * PAGE, false)
    });
    std::thread::sleep(Duration::from_millis(20));
    held.0.release();
    assert_eq!(wait(&answers).0, Ok(4 * PAGE));
    let expected = [vec![2; 4 * PAGE], vec![1; 4 * PAGE]].concat();
    assert!(reader.join().unwrap() == expected);
    assert!(read(&fs, ino, 0, 8 * PAGE, false) == expected, "from the cache");
}

/// A part of a page is written while a device overwrites the page, or writes it for the first time.
#[test]
fn bytes_beside_those_that_are_written_meanwhile_stay() {
    for (at, what) in [(0, "has blocks"), (8, "has none"), (16, "is allocated")] {
        let (fs, ino, held) = with_file(8);
        let fs = Arc::new(fs);
        let range = Fallocate { mode: 0, offset: (16 * PAGE) as u64, length: (4 * PAGE) as u64 };
        fs.fallocate(&cx(), file(ino), range).unwrap();
        fs.syncfs(&cx()).unwrap();
        let offset = (at * PAGE) as u64;
        held.0.hold();
        let answers = start_write(&fs, ino, offset, &[2; 4 * PAGE]);
        held.0.wait_for(1);
        let writer = std::thread::spawn({
            let fs = Arc::clone(&fs);
            move || {
                write(&fs, ino, offset + 100, &[3; 100], false).unwrap();
                fs.syncfs(&cx()).unwrap();
            }
        });
        std::thread::sleep(Duration::from_millis(20));
        held.0.release();
        assert_eq!(wait(&answers).0, Ok(4 * PAGE), "{what}");
        writer.join().unwrap();
        let found = read(&fs, ino, offset, 4 * PAGE, false);
        fs.syncfs(&cx()).unwrap();
        drop(fs);
        let fs = open(held.0.ram.clone(), CommitRules::ALL).0;
        assert!(read(&fs, ino, offset, 4 * PAGE, false) == found, "{what}: after a remount");
        let (before, rest) = found.split_at(100);
        let (part, after) = rest.split_at(100);
        assert!(before.iter().chain(after).all(|byte| *byte == 2), "{what}");
        assert!(part == [3; 100] || part == [2; 100], "{what}");
    }
}

/// The two writes run at the same time, so that either may be the last one. But the device and the
/// cache must agree.
#[test]
fn a_page_that_others_write_meanwhile_is_the_same_in_the_cache_and_on_the_device() {
    for offset in [0, 4 * PAGE as u64, 8 * PAGE as u64] {
        let (fs, ino, held) = with_file(8);
        held.0.hold();
        let answers = start_write(&fs, ino, offset, &[2; 4 * PAGE]);
        held.0.wait_for(1);
        write(&fs, ino, offset + PAGE as u64, &[3; 2 * PAGE], false).unwrap();
        fs.fsync(&cx(), file(ino), false).unwrap();
        held.0.release();
        assert_eq!(wait(&answers).0, Ok(4 * PAGE));
        let found = read(&fs, ino, 0, 12 * PAGE, false);
        fs.syncfs(&cx()).unwrap();
        drop(fs);
        let fs = open(held.0.ram.clone(), CommitRules::ALL).0;
        assert!(read(&fs, ino, 0, 12 * PAGE, false) == found, "at {offset}");
        let part = &found[offset as usize..][..4 * PAGE];
        let pages =
            part.chunks(PAGE).map(|page| (page[0], page.iter().all(|byte| *byte == page[0])));
        let pages: Vec<(u8, bool)> = pages.collect();
        let twos = vec![(2, true); 4];
        let both = vec![(2, true), (3, true), (3, true), (2, true)];
        assert!(pages == twos || pages == both, "at {offset}: {pages:?}");
    }
}

#[test]
fn a_write_that_the_device_refuses_is_told_and_takes_no_space() {
    let (fs, ino, held) = with_file(8);
    let free = |fs: &Uhs| fs.statfs(&cx(), Ino::ROOT).unwrap().blocks_free;
    let before = free(&fs);
    for (offset, submitted) in [(0, false), (0, true), (100, false), (100, true)] {
        held.0.refuses.store(true, Ordering::SeqCst);
        let offset = offset * PAGE as u64;
        let written = match submitted {
            true => wait(&start_write(&fs, ino, offset, &[2; PAGE])).0,
            false => write(&fs, ino, offset, &[2; PAGE], true),
        };
        held.0.refuses.store(false, Ordering::SeqCst);
        assert_eq!(written, Err(Errno::EIO), "{offset}");
        fs.fsync(&cx(), file(ino), false).unwrap();
        assert_eq!(fs.getattr(&cx(), ino, None).unwrap().size, 8 * PAGE as u64);
    }
    // Blocks that could not be written are not used again.
    assert!(before - free(&fs) <= 2, "{} blocks are lost", before - free(&fs));
    assert!(read(&fs, ino, 0, 8 * PAGE, false) == [1; 8 * PAGE], "nothing was written");
}

#[test]
fn a_write_without_memory_takes_no_space() {
    let (fs, ino, _held) = with_file(8);
    let free = |fs: &Uhs| fs.statfs(&cx(), Ino::ROOT).unwrap().blocks_free;
    let before = free(&fs);
    let all: Vec<_> = std::iter::from_fn(|| fs.engine().pool().frames(1)).collect();
    let written = write(&fs, ino, 100 * PAGE as u64, &[2; PAGE], true);
    assert_eq!(written, Err(Errno::ENOMEM));
    drop(all);
    fs.syncfs(&cx()).unwrap();
    assert_eq!(free(&fs), before, "no block is left alone");
    write(&fs, ino, 100 * PAGE as u64, &[2; PAGE], true).unwrap();
}

/// The thread that ends operations runs the code of their owners, which may begin others, and must
/// not wait for itself.
#[test]
fn an_answer_may_begin_operations_and_waits_for_none() {
    let (fs, ino, held) = with_file(8);
    let fs = Arc::new(fs);
    let seen = Arc::new(Mutex::new(Vec::new()));
    let then: AnswerCallback = Box::new({
        let (fs, seen) = (Arc::clone(&fs), Arc::clone(&seen));
        move |_| {
            let overlapping = write(&fs, ino, 4 * PAGE as u64 + 1, &[7; 10], false);
            let beside = write(&fs, ino, 7 * PAGE as u64 + 1, &[7; 10], false);
            fs.fsync(&cx(), file(ino), false).unwrap();
            let next = start_write(&fs, ino, 0, &[4; PAGE]);
            seen.lock().unwrap().push((overlapping, beside, next));
        }
    });
    held.0.hold();
    let slow = start_write(&fs, ino, 4 * PAGE as u64, &[2; PAGE]);
    held.0.wait_for(1);
    let args = WriteArgs { offset: 0, flags: flags(true), ..WriteArgs::default() };
    let mut memory = Buffer::new_aligned(PAGE);
    memory.fill(3);
    let op = IoOp::Write { file: file(ino), args, len: PAGE };
    let (written, _) = wait(&submit(&fs, op, memory, Some(then)));
    assert_eq!(written, Ok(PAGE));
    let (overlapping, beside, next) = seen.lock().unwrap().pop().unwrap();
    assert_eq!((overlapping, beside), (Err(Errno::EDEADLK), Ok(10)));
    assert_eq!(wait(&next).0, Ok(PAGE));
    assert!(slow.try_recv().is_err());
    held.0.release();
    assert_eq!(wait(&slow).0, Ok(PAGE));
    let expected = [[4, 4], [1, 1], [2, 2]];
    for (page, byte) in [0, 1, 4].into_iter().zip(expected) {
        assert_eq!(read(&fs, ino, page * PAGE as u64, 2, false), byte);
    }
}

/// Many operations in flight on pages of their own, beside a thread that uses the cache.
#[test]
fn operations_in_flight_and_a_thread_beside_them_lose_nothing() {
    let sim = SimDevice::from_ram(&RamDevice::new(4096, 16 * 512), 3);
    Uhs::make(Arc::new(sim.clone()), (0o755, 0, 0), &mut super::random()).unwrap();
    let options = UhsOptions { cache_pages: 32, dirty_pages: 64, ..OPTIONS };
    let fs = open_with(sim, options, CommitRules::ALL).0;
    let ino = make(&fs, "a");
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for round in 0..6_u8 {
                for page in (1..400).step_by(2) {
                    let bytes = [round ^ page as u8; PAGE];
                    write(&fs, ino, page * PAGE as u64 + 8, &bytes[8..], false).unwrap();
                    if page % 64 == 1 {
                        fs.fsync(&cx(), file(ino), false).unwrap();
                    }
                }
            }
        });
        for round in 0..6_u8 {
            let begin = |page: u64| {
                let bytes = [!round ^ page as u8; PAGE];
                start_write(&fs, ino, page * PAGE as u64, &bytes)
            };
            let all: Vec<_> = (0..400).step_by(2).map(begin).collect();
            assert!(all.iter().all(|answers| wait(answers).0 == Ok(PAGE)));
            for page in (0..400).step_by(2) {
                let (count, bytes) = wait(&start_read(&fs, ino, page * PAGE as u64, PAGE));
                assert_eq!(count, Ok(PAGE));
                assert!(bytes == [!round ^ page as u8; PAGE]);
            }
        }
    });
    for page in 0..400_u64 {
        let byte = if page % 2 == 0 { !5 ^ page as u8 } else { 5 ^ page as u8 };
        let found = read(&fs, ino, page * PAGE as u64 + 8, PAGE - 8, false);
        assert!(found.iter().all(|other| *other == byte), "page {page}");
    }
}
