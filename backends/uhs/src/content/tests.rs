//! Random operations on the bytes of a file, beside a plain vector, with hardly any memory.

use std::sync::Arc;

use defuse_block::{BlockDevice, RamDevice};
use defuse_fs::{
    Caller, Context, Errno, Fallocate, Fh, File, FileKind, FileSystem, Ino, Name, NewNode,
    OpenArgs, ReadArgs, ReadBuf, ReleaseArgs, SetAttr, SliceSink, SliceSource, Whence, WriteArgs,
    WriteBuf,
};

use crate::commit::CommitRules;
use crate::{Uhs, UhsOptions, check};

const PAGE: u64 = 4096;

fn cx() -> Context<'static> {
    Context::new(Caller { uid: 0, gid: 0, pid: 1 })
}

fn random() -> fastrand::Rng {
    fastrand::Rng::with_seed(3)
}

fn options(cache_pages: usize, dirty_pages: usize) -> UhsOptions {
    UhsOptions {
        read_only: false,
        commit: None,
        discard: false,
        cache_pages,
        dirty_pages,
        index: u64::MAX,
        separation: None,
        queues: None,
        worker: false,
        writeback: false,
        access_times: defuse_fs::posix::AccessTimeRule::Relative,
    }
}

/// A file system in memory with one file.
struct TestVolume {
    ram: RamDevice,
    fs: Option<Uhs>,
    options: UhsOptions,
    rules: CommitRules,
    ino: Ino,
}

impl TestVolume {
    fn new(units: u64, options: UhsOptions) -> TestVolume {
        TestVolume::with_rules(CommitRules::ALL, units, options)
    }

    fn with_rules(rules: CommitRules, units: u64, options: UhsOptions) -> TestVolume {
        let ram = RamDevice::new(4096, units * 512);
        Uhs::make(Arc::new(ram.clone()), (0o755, 0, 0), &mut random()).unwrap();
        let mut volume = TestVolume { ram, fs: None, options, rules, ino: Ino::ROOT };
        volume.open();
        let (name, node) =
            (Name::new(b"file").unwrap(), NewNode::new(FileKind::Regular, 0o644, cx().caller));
        volume.ino = volume.fs().mknod(&cx(), Ino::ROOT, name, &node).unwrap().ino;
        volume
    }

    fn open(&mut self) {
        let device: Arc<dyn BlockDevice> = Arc::new(self.ram.clone());
        let (fs, problems) = Uhs::open_by(device, self.options, self.rules, random()).unwrap();
        assert_eq!(problems, []);
        self.fs = Some(fs);
    }

    /// Ends the file system, checks it, and opens it again.
    fn remount(&mut self) {
        let free = self.free();
        self.fs().syncfs(&cx()).unwrap();
        self.fs = None;
        let report = check(&(Arc::new(self.ram.clone()) as Arc<dyn BlockDevice>)).unwrap();
        assert_eq!(report.problems, []);
        self.open();
        let name = Name::new(b"file").unwrap();
        assert_eq!(self.fs().lookup(&cx(), Ino::ROOT, name).unwrap().ino, self.ino);
        assert!(self.free() >= free, "{} blocks instead of {free}", self.free());
    }

    fn fs(&self) -> &Uhs {
        self.fs.as_ref().unwrap()
    }

    fn file(&self) -> File {
        File { ino: self.ino, fh: Fh(0) }
    }

    fn free(&self) -> u64 {
        self.fs().statfs(&cx(), Ino::ROOT).unwrap().blocks_free
    }

    fn size(&self) -> u64 {
        self.fs().getattr(&cx(), self.ino, None).unwrap().size
    }

    fn blocks(&self) -> u64 {
        self.fs().getattr(&cx(), self.ino, None).unwrap().blocks / 8
    }

    fn read(&self, offset: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0xee; len];
        let mut sink = SliceSink::new(&mut bytes);
        let mut out = ReadBuf::new(&mut sink, len);
        let args = ReadArgs { offset, ..ReadArgs::default() };
        self.fs().read(&cx(), self.file(), args, &mut out).unwrap();
        let filled = out.filled_len();
        bytes.truncate(filled);
        bytes
    }

    fn write(&self, offset: u64, bytes: &[u8]) -> Result<usize, Errno> {
        let mut source = SliceSource::new(bytes);
        let args = WriteArgs { offset, ..WriteArgs::default() };
        self.fs().write(&cx(), self.file(), args, &mut WriteBuf::new(&mut source))
    }

    fn truncate(&self, size: u64) -> Result<(), Errno> {
        let set = SetAttr { size: Some(size), ..SetAttr::default() };
        self.fs().setattr(&cx(), self.ino, None, &set).map(drop)
    }

    fn fallocate(&self, mode: u32, offset: u64, length: u64) -> Result<(), Errno> {
        self.fs().fallocate(&cx(), self.file(), Fallocate { mode, offset, length })
    }

    fn seek(&self, offset: u64, whence: Whence) -> Result<u64, Errno> {
        self.fs().lseek(&cx(), self.file(), offset, whence)
    }
}

/// The longest file of the random operations.
const LONGEST: u64 = 300_000;

/// A player of random operations, with the bytes that the file must have.
struct ContentWorkload {
    volume: TestVolume,
    model: Vec<u8>,
    random: fastrand::Rng,
}

impl ContentWorkload {
    /// A range of bytes; on pages now and then.
    fn range(&mut self) -> (u64, u64) {
        let (offset, len) = (self.random.u64(..LONGEST), self.random.u64(1..60_000));
        match self.random.u8(..3) {
            0 => (offset / PAGE * PAGE, len.div_ceil(PAGE) * PAGE),
            _ => (offset, len),
        }
    }

    fn step(&mut self) {
        let (offset, len) = self.range();
        let (from, to) = (offset as usize, (offset + len) as usize);
        let size = self.model.len();
        const KEEP: u32 = Fallocate::KEEP_SIZE;
        match self.random.u8(..14) {
            0..=3 => {
                let len = if self.random.bool() { len } else { self.random.u64(1..3000) };
                let to = from + len as usize;
                let mut bytes = vec![0; len as usize];
                self.random.fill(&mut bytes);
                assert_eq!(self.volume.write(offset, &bytes), Ok(bytes.len()));
                self.model.resize(size.max(to), 0);
                self.model[from..to].copy_from_slice(&bytes);
            }
            4 => {
                self.volume.truncate(offset).unwrap();
                self.model.resize(from, 0);
            }
            5 => {
                let mode = if self.random.bool() { KEEP } else { 0 };
                self.volume.fallocate(mode, offset, len).unwrap();
                self.model.resize(if mode == 0 { size.max(to) } else { size }, 0);
            }
            6 => {
                let mode = Fallocate::PUNCH_HOLE | KEEP;
                self.volume.fallocate(mode, offset, len).unwrap();
                self.model[from.min(size)..to.min(size)].fill(0);
            }
            7 => {
                let mode = Fallocate::ZERO_RANGE | if self.random.bool() { KEEP } else { 0 };
                self.volume.fallocate(mode, offset, len).unwrap();
                self.model[from.min(size)..to.min(size)].fill(0);
                self.model.resize(if mode & KEEP == 0 { size.max(to) } else { size }, 0);
            }
            8 => {
                let valid = offset % PAGE == 0 && len % PAGE == 0 && to < size;
                let done = self.volume.fallocate(Fallocate::COLLAPSE_RANGE, offset, len);
                assert_eq!(done, if valid { Ok(()) } else { Err(Errno::EINVAL) });
                if valid {
                    self.model.drain(from..to);
                }
            }
            9 => {
                let valid = offset % PAGE == 0 && len % PAGE == 0 && from < size;
                let done = self.volume.fallocate(Fallocate::INSERT_RANGE, offset, len);
                assert_eq!(done, if valid { Ok(()) } else { Err(Errno::EINVAL) });
                if valid {
                    self.model.splice(from..from, vec![0; len as usize]);
                }
                if self.model.len() > 2 * LONGEST as usize {
                    self.volume.truncate(LONGEST).unwrap();
                    self.model.truncate(LONGEST as usize);
                }
            }
            10 => self.volume.fs().syncfs(&cx()).unwrap(),
            11 if self.random.u8(..4) == 0 => self.volume.remount(),
            12 => self.holes(),
            _ => {
                let expected = &self.model[from.min(size)..to.min(size)];
                assert!(self.volume.read(offset, len as usize) == expected, "{offset}+{len}");
            }
        }
        assert_eq!(self.volume.size(), self.model.len() as u64);
    }

    /// Checks that bytes outside of the ranges with data are zeros, and that the ranges follow each
    /// other.
    fn holes(&self) {
        let size = self.model.len() as u64;
        let mut at = 0;
        while at < size {
            let data = self.volume.seek(at, Whence::Data).unwrap_or(size);
            assert!(self.model[at as usize..data as usize].iter().all(|byte| *byte == 0));
            if data == size {
                break;
            }
            assert_eq!(self.volume.seek(data, Whence::Data), Ok(data));
            at = self.volume.seek(data, Whence::Hole).unwrap();
            assert!(at > data && at <= size);
        }
        assert_eq!(self.volume.seek(size, Whence::Data), Err(Errno::ENXIO));
        assert_eq!(self.volume.seek(size, Whence::Hole), Err(Errno::ENXIO));
    }
}

#[test]
fn a_file_holds_the_bytes_that_a_plain_vector_holds() {
    for seed in 0..150 {
        // Pages that are written at once, and runs of them.
        let early_run = [1, 3, CommitRules::ALL.early_run][seed as usize % 3];
        let rules = CommitRules { early_run, ..CommitRules::ALL };
        let volume = TestVolume::with_rules(rules, 16, options(4 + seed as usize, 20));
        let random = fastrand::Rng::with_seed(seed);
        let mut player = ContentWorkload { volume, model: Vec::new(), random };
        (0..250).for_each(|_| player.step());
        player.volume.remount();
        assert!(player.volume.read(0, 1 << 20) == player.model);
    }
}

fn small() -> TestVolume {
    TestVolume::new(16, options(64, 64))
}

#[test]
fn a_sparse_file_of_100_gib_has_the_blocks_that_were_written() {
    let mut volume = small();
    let end = 100 << 30;
    for at in [0, 50 << 30, end - 3] {
        volume.write(at, b"abc").unwrap();
    }
    for _ in 0..2 {
        assert_eq!((volume.size(), volume.blocks()), (end, 3));
        assert_eq!(volume.seek(PAGE, Whence::Data), Ok(50 << 30));
        assert_eq!(volume.seek(50 << 30, Whence::Hole), Ok((50 << 30) + PAGE));
        assert_eq!(volume.read((50 << 30) - 2, 10), b"\0\0abc\0\0\0\0\0");
        volume.remount();
    }
    volume.fallocate(Fallocate::PUNCH_HOLE | Fallocate::KEEP_SIZE, 1, end).unwrap();
    assert_eq!((volume.read(0, 4), volume.blocks()), (b"a\0\0\0".to_vec(), 1));
}

#[test]
fn ten_thousand_extents_survive_a_remount() {
    let mut volume = TestVolume::new(200, options(64, 2000));
    for page in 0..10_000 {
        volume.write(page * 2 * PAGE, &page.to_le_bytes()).unwrap();
    }
    volume.remount();
    assert_eq!(volume.blocks(), 10_000);
    for page in 0..10_000 {
        assert_eq!(volume.read(page * 2 * PAGE, 8), page.to_le_bytes());
    }
}

#[test]
fn blocks_that_are_allocated_are_there_when_the_device_is_full() {
    let volume = small();
    volume.fallocate(0, 0, 4 << 20).unwrap();
    assert_eq!((volume.size(), volume.blocks()), (4 << 20, 1024));
    assert_eq!(volume.seek(0, Whence::Data), Err(Errno::ENXIO), "nothing is written yet");
    let too_much = (volume.free() + 1) * PAGE;
    assert_eq!(volume.fallocate(Fallocate::KEEP_SIZE, 8 << 20, too_much), Err(Errno::ENOSPC));
    assert_eq!((volume.size(), volume.blocks()), (4 << 20, 1024));
    // Another file takes the rest.
    let node = NewNode::new(FileKind::Regular, 0o644, cx().caller);
    let other = volume.fs().mknod(&cx(), Ino::ROOT, Name::new(b"x").unwrap(), &node).unwrap().ino;
    let fill = |offset: u64| {
        let (bytes, args) = (vec![7; 1 << 16], WriteArgs { offset, ..WriteArgs::default() });
        let mut source = SliceSource::new(&bytes);
        let file = File { ino: other, fh: Fh(0) };
        volume.fs().write(&cx(), file, args, &mut WriteBuf::new(&mut source))
    };
    let mut offset = 0;
    while let Ok(written) = fill(offset) {
        offset += written as u64;
    }
    assert_eq!((fill(offset), volume.free()), (Err(Errno::ENOSPC), 0));
    assert_eq!(volume.write(0, &vec![1; 4 << 20]), Ok(4 << 20));
    assert_eq!(volume.write(4 << 20, b"more"), Err(Errno::ENOSPC));
    volume.fs().syncfs(&cx()).unwrap();
    // Allocated pages can still be cut off, also within a page.
    volume.truncate((2 << 20) + 5).unwrap();
    volume.fs().syncfs(&cx()).unwrap();
    assert_eq!(volume.read(2 << 20, 10), [1; 5]);
    assert_eq!(volume.free(), 511);
}

#[test]
fn a_large_file_has_whole_units() {
    for early_run in [CommitRules::ALL.early_run, u64::MAX / PAGE] {
        large_file(CommitRules { early_run, ..CommitRules::ALL });
    }
}

fn large_file(rules: CommitRules) {
    let volume = TestVolume::with_rules(rules, 32, options(64, 4096));
    let bytes = vec![3; 1 << 20];
    for part in 0..20 {
        volume.write(part << 20, &bytes).unwrap();
    }
    volume.write(20 << 20, b"the rest").unwrap();
    volume.fs().syncfs(&cx()).unwrap();
    let content = volume.fs().engine().content(volume.ino.0).unwrap();
    let content = content.lock().unwrap();
    let whole = content.extents.iter().all(|extent| {
        extent.end() > 20 * 256 || (extent.block % 512, extent.count % 512) == (0, 0)
    });
    assert!(whole, "{:?}", content.extents);
}

// Each close listed the file once more, and the oldest entry left memory for each new one: files
// that were opened all the time, too.
#[test]
fn a_file_that_is_opened_again_and_again_stays_in_memory_and_others_leave_it() {
    const FILES: usize = 100;
    let options = options(64, 64);
    let volume = TestVolume::new(16, options);
    let fs = volume.fs();
    let make = |number: usize| {
        let name = format!("f{number}");
        let node = NewNode::new(FileKind::Regular, 0o644, cx().caller);
        let name = Name::new(name.as_bytes()).unwrap();
        let ino = fs.mknod(&cx(), Ino::ROOT, name, &node).unwrap().ino;
        let mut source = SliceSource::new(&[1; 5000]);
        let (file, args) = (File { ino, fh: Fh(0) }, WriteArgs::default());
        fs.write(&cx(), file, args, &mut WriteBuf::new(&mut source)).unwrap();
        ino
    };
    let inos: Vec<Ino> = (0..FILES).map(make).collect();
    volume.write(0, &[1; 5000]).unwrap();
    fs.syncfs(&cx()).unwrap();
    let is_here = |ino: Ino| {
        let kept = fs.engine().names().content(ino.0).unwrap();
        matches!(kept, crate::names::ContentState::Here(_))
    };
    for _ in 0..3 {
        for ino in &inos {
            for ino in [*ino, volume.ino] {
                fs.open(&cx(), ino, OpenArgs::default()).unwrap();
                let mut bytes = [0; 8];
                let mut sink = SliceSink::new(&mut bytes);
                let file = File { ino, fh: Fh(0) };
                let mut out = ReadBuf::new(&mut sink, 8);
                fs.read(&cx(), file, ReadArgs::default(), &mut out).unwrap();
                fs.release(&cx(), file, ReleaseArgs::default()).unwrap();
            }
            assert!(is_here(volume.ino));
        }
    }
    let here = inos.iter().filter(|ino| is_here(**ino)).count();
    assert!(here <= options.cache_pages / 4, "{here} of {FILES}");
}

// The pages that an insertion moved were remembered by the distance between the first and the last:
// four writes and one call took gigabytes.
#[test]
fn operations_remember_as_many_pages_as_there_are_however_far_apart() {
    const KEEP: u32 = Fallocate::KEEP_SIZE;
    type VolumeOperation = fn(&TestVolume, u64) -> Result<(), Errno>;
    let operations: [(&str, VolumeOperation); 9] = [
        ("insert", |volume, far| volume.fallocate(Fallocate::INSERT_RANGE, 0, far)),
        ("collapse", |volume, far| volume.fallocate(Fallocate::COLLAPSE_RANGE, PAGE, far / 2)),
        ("punch", |volume, far| volume.fallocate(Fallocate::PUNCH_HOLE | KEEP, 1, 2 * far)),
        ("truncate", |volume, far| volume.truncate(far + 1)),
        ("grow and truncate", |volume, _| {
            volume.truncate(i64::MAX as u64)?;
            volume.truncate(1)
        }),
        ("seek", |volume, far| {
            assert_eq!(volume.seek(PAGE, Whence::Data), Ok(far));
            assert_eq!(volume.seek(far, Whence::Hole), Ok(far + PAGE));
            Ok(())
        }),
        ("read", |volume, far| {
            assert_eq!(volume.read(far / 2, 100), [0; 100]);
            Ok(())
        }),
        ("allocate", |volume, far| {
            let all = volume.fallocate(KEEP, PAGE, 2 * far);
            assert!(matches!(all, Ok(()) | Err(Errno::ENOSPC)));
            Ok(())
        }),
        ("zero", |volume, far| {
            let all = volume.fallocate(KEEP | Fallocate::ZERO_RANGE, 1, 2 * far);
            assert!(matches!(all, Ok(()) | Err(Errno::ENOSPC)));
            Ok(())
        }),
    ];
    for (text, operation) in operations {
        let entries = |far: u64| {
            let volume = small();
            for offset in [0, far, far + (far >> 1), 2 * far] {
                volume.write(offset, b"data").unwrap();
            }
            assert_eq!(operation(&volume, far), Ok(()), "{text} over {far}");
            volume.fs().syncfs(&cx()).unwrap();
            volume.fs().engine().pool().clock_entries()
        };
        // A distance of pages that made 24 MiB of entries, and a distance that would make more than
        // there is memory.
        let (near, far, farther) = (entries(1 << 16), entries(1 << 36), 1 << 60);
        assert!(near <= 16 && far == near, "{text}: {near} entries, {far} over a longer hole");
        assert_eq!(entries(farther), near, "{text}");
    }
}

// The clock kept an entry for each page that ever came into memory, as long as memory was not
// short.
#[test]
fn the_clock_has_few_entries_however_often_pages_come_go_and_move() {
    let volume = small();
    let frames = 64 + 64 + 1024;
    const HOLE: u32 = Fallocate::PUNCH_HOLE | Fallocate::KEEP_SIZE;
    (0..8).for_each(|page| assert_eq!(volume.write(page * 2 * PAGE, b"x"), Ok(1)));
    for _ in 0..4 * frames {
        volume.write(0, b"x").unwrap();
        volume.fallocate(HOLE, 0, PAGE).unwrap();
    }
    for _ in 0..frames {
        volume.fallocate(Fallocate::INSERT_RANGE, 0, PAGE).unwrap();
        volume.fallocate(Fallocate::COLLAPSE_RANGE, 0, PAGE).unwrap();
    }
    let entries = volume.fs().engine().pool().clock_entries();
    assert!(entries <= 2 * frames + 32, "{entries} entries for {frames} frames");
    // The remaining entries still lead to the pages: they leave the memory.
    volume.fs().syncfs(&cx()).unwrap();
    for page in 0..2000 {
        volume.write((1 << 30) + page * PAGE, b"y").unwrap();
    }
    volume.fs().syncfs(&cx()).unwrap();
    let (in_use, limit) = volume.fs().engine().pool().frames_in_use();
    assert!(in_use <= limit + 64, "{in_use} frames of {limit}");
}

// A block that was taken counted once more as promised, until the caller gave its promise up: the
// largest allocation was half of the free space, and others met ENOSPC meanwhile.
#[test]
fn blocks_that_are_taken_take_the_place_of_their_promise() {
    let volume = small();
    let engine = volume.fs().engine();
    let (content, pool) = (engine.content(volume.ino.0).unwrap(), engine.pool());
    let before = pool.count_blocks().1;
    assert!(pool.promise(1500, false));
    assert_eq!(pool.count_blocks().1, before - 1500);
    let taken = content.lock().unwrap().find_blocks(pool, 0..1500).unwrap();
    assert_eq!((pool.count_blocks().1, pool.set_aside().0), (before - 1500, 0));
    // More blocks than there are were not promised, and the promise stays as it was.
    assert!(content.lock().unwrap().find_blocks(pool, 2000..200_000).is_err());
    assert_eq!(pool.set_aside().0, 0);
    let mut space = pool.space();
    taken.into_iter().for_each(|extent| space.free(extent.into()));
    drop(space);
    assert_eq!(pool.count_blocks().1, before);
}
