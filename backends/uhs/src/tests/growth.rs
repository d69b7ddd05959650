//! Files that grow by appends with a sync each, and the blocks that one sync writes.

use std::sync::Arc;

use defuse_block::RamDevice;
use defuse_fs::{
    Errno, Fallocate, Fh, File, FileKind, FileSystem, Ino, OpenArgs, RenameFlags, SetAttr,
    SliceSource, WriteArgs, WriteBuf,
};

use super::{cx, name, node, random};
use crate::commit::CommitRules;
use crate::locks::lock;
use crate::names::ContentState;
use crate::{Uhs, UhsOptions, check};

const PAGE: usize = 4096;

struct Device {
    ram: RamDevice,
    fs: Uhs,
}

impl Device {
    fn new(units: u64) -> Device {
        let ram = RamDevice::new(4096, units * 512);
        Uhs::make(Arc::new(ram.clone()), (0o755, 0, 0), &mut random()).unwrap();
        let fs = open(&ram);
        Device { ram, fs }
    }

    fn make(&self, text: &str) -> Ino {
        let ino =
            self.fs.mknod(&cx(), Ino::ROOT, name(text), &node(FileKind::Regular)).unwrap().ino;
        self.fs.open(&cx(), ino, OpenArgs::default()).unwrap();
        ino
    }

    fn write(&self, ino: Ino, page: u64, byte: u8) -> Result<usize, Errno> {
        let bytes = [byte; PAGE];
        let mut source = SliceSource::new(&bytes);
        let args = WriteArgs { offset: page * PAGE as u64, ..WriteArgs::default() };
        self.fs.write(&cx(), file(ino), args, &mut WriteBuf::new(&mut source))
    }

    fn sync(&self, ino: Ino) {
        self.fs.fsync(&cx(), file(ino), true).unwrap();
    }

    fn close(&self, ino: Ino) {
        self.fs.release(&cx(), file(ino), Default::default()).unwrap();
    }

    fn figure(&self, name: &str) -> u64 {
        self.fs.figures().into_iter().find(|figure| figure.name == name).unwrap().value
    }

    /// The blocks that `work` makes the device write.
    fn blocks(&self, work: impl FnOnce()) -> u64 {
        let before = self.figure("device_written");
        work();
        (self.figure("device_written") - before) / PAGE as u64
    }

    fn extents(&self, ino: Ino) -> usize {
        match self.fs.engine().names().content(ino.0) {
            Ok(ContentState::Here(content)) => lock(&content).extents(),
            _ => 1,
        }
    }

    /// Checks that a power failure leaves the same files, and that no block is lost.
    fn judge(self) {
        let all = super::snapshot(&self.fs);
        let space = self.fs.statfs(&cx(), Ino::ROOT).unwrap().blocks_free;
        self.fs.abandon();
        assert_eq!(
            check(&(Arc::new(self.ram.clone()) as Arc<dyn defuse_block::BlockDevice>))
                .unwrap()
                .problems,
            Vec::new()
        );
        let fs = open(&self.ram);
        assert!(super::snapshot(&fs) == all);
        assert_eq!(fs.statfs(&cx(), Ino::ROOT).unwrap().blocks_free, space);
    }
}

fn open(ram: &RamDevice) -> Uhs {
    let options = UhsOptions { commit: None, ..UhsOptions::default() };
    Uhs::open_by(Arc::new(ram.clone()), options, CommitRules::ALL, random()).unwrap().0
}

fn file(ino: Ino) -> File {
    File { ino, fh: Fh(0) }
}

/// The most frequent number, and the sum.
fn find_usual(mut numbers: Vec<u64>) -> (u64, u64) {
    numbers.sort_unstable();
    let runs = numbers.chunk_by(|a, b| a == b);
    let usual = runs.max_by_key(|run| run.len()).unwrap()[0];
    (usual, numbers.iter().sum())
}

/// Every page was an extent of its own, and each sync wrote the records of all of them.
#[test]
fn a_sync_of_an_append_writes_the_page_and_the_inode_however_many_files_grow_and_however_long_they_are()
 {
    for files in [1, 2, 16] {
        let device = Device::new(128);
        let all: Vec<Ino> = (0..files).map(|nth| device.make(&nth.to_string())).collect();
        let rounds = 6000 / files as u64;
        let mut written = Vec::new();
        for page in 0..rounds {
            for ino in &all {
                written.push(device.blocks(|| {
                    device.write(*ino, page, page as u8).unwrap();
                    device.sync(*ino);
                }));
            }
        }
        let (half, appends) = (written.len() / 2, written.len() as u64);
        let (early, late) =
            (find_usual(written[..half].to_vec()), find_usual(written[half..].to_vec()));
        assert_eq!((early.0, late.0), (2, 2), "{files} files");
        // Slots are added now and then, and the superblock with them.
        let sum = early.1 + late.1;
        assert!(sum * 100 <= appends * 2 * 101, "{files} files: {sum} blocks for {appends} pages");
        for ino in &all {
            let extents = device.extents(*ino);
            assert!(extents <= 16, "{files} files: {extents} extents for {rounds} pages");
        }
        device.judge();
    }
}

#[test]
fn what_is_ahead_of_a_file_is_free_for_others_when_it_is_closed_and_when_space_is_short() {
    let device = Device::new(32);
    let free = || device.fs.engine().pool().space().units().free;
    let ahead = || device.fs.engine().pool().has_ahead();
    let before = device.fs.statfs(&cx(), Ino::ROOT).unwrap().blocks_free;
    let grow = |ino, pages: std::ops::Range<u64>| {
        for page in pages {
            device.write(ino, page, 1).unwrap();
            device.sync(ino);
        }
    };
    let log = device.make("log");
    grow(log, 0..700);
    assert!(ahead());
    let units = free();
    // Blocks ahead count as free.
    assert_eq!(device.fs.statfs(&cx(), Ino::ROOT).unwrap().blocks_free, before - 700);
    device.fs.open(&cx(), log, OpenArgs::default()).unwrap();
    device.close(log);
    assert!(ahead(), "somebody has it open");
    device.close(log);
    assert!(!ahead() && free() >= units);

    device.fs.open(&cx(), log, OpenArgs::default()).unwrap();
    grow(log, 700..900);
    assert!(ahead());
    // Another file takes everything.
    let other = device.make("other");
    let mut page = 0;
    let errno = loop {
        match device.write(other, page, 2) {
            Ok(_) => page += 1,
            Err(errno) => break errno,
        }
    };
    device.sync(other);
    assert_eq!(errno, Errno::ENOSPC);
    let left = device.fs.statfs(&cx(), Ino::ROOT).unwrap().blocks_free;
    assert!(left < 64, "{left} blocks are free after {page} pages, and nobody gets them");
    // Inodes need whole units, and few are left.
    let _ = device.fs.mknod(&cx(), Ino::ROOT, name("small"), &node(FileKind::Regular));
    assert!(!ahead());
    // A file that is cut, removed or shortened loses no blocks ahead.
    let size = |size| SetAttr { size: Some(size), ..SetAttr::default() };
    device.fs.setattr(&cx(), other, None, &size(0)).unwrap();
    device.sync(other);
    grow(log, 900..1000);
    device.fs.setattr(&cx(), log, None, &size(10 * PAGE as u64)).unwrap();
    device.sync(log);
    grow(log, 10..60);
    device.fs.unlink(&cx(), Ino::ROOT, name("log")).unwrap();
    device.close(log);
    device.fs.forget(log, 1);
    device.fs.syncfs(&cx()).unwrap();
    assert!(!ahead());
    device.judge();
}

/// In a file of separate pages, each sync wrote the records of all of them.
#[test]
fn a_sync_of_random_writes_writes_no_more_when_a_file_has_many_extents() {
    let device = Device::new(160);
    let ino = device.make("sparse");
    let size = SetAttr { size: Some(4 << 30), ..SetAttr::default() };
    device.fs.setattr(&cx(), ino, None, &size).unwrap();
    let mut pages = fastrand::Rng::with_seed(5);
    let mut sync = || {
        device.blocks(|| {
            (0..10).for_each(|_| assert_eq!(device.write(ino, pages.u64(..1 << 20), 3), Ok(PAGE)));
            device.sync(ino);
        })
    };
    let written: Vec<u64> = (0..5000).map(|_| sync()).collect();
    let extents = device.extents(ino);
    assert!(extents > 40_000, "{extents} extents");
    // Ten pages, a leaf for each, blocks of pointers, the slot; and leaves that are divided now and
    // then.
    let mean = |part: &[u64]| part.iter().sum::<u64>() as f64 / part.len() as f64;
    println!(
        "{} blocks for each sync of the last, {} of the first",
        mean(&written[4500..]),
        mean(&written[..500])
    );
    for part in written.chunks(500) {
        assert!(mean(part) < 27.0, "{} blocks", mean(part));
    }
    let most = written.iter().max().unwrap();
    assert!(*most < 600, "{most} blocks");
    device.judge();
}

/// Extents that come and go, in files with many names and attributes, also where no space is left
/// for more than one copy.
#[test]
fn leaves_hold_what_a_file_has_after_any_changes() {
    for seed in 0..6 {
        let device = Device::new(if seed % 2 == 0 { 8 } else { 64 });
        let mut random = fastrand::Rng::with_seed(seed);
        let ino = device.make("file");
        let (mut attributes, mut longest) = (0, 0);
        for round in 0..120 {
            let (from, few) = (random.u64(..6000), random.u64(1..60));
            match random.u8(..10) {
                0 => {
                    let size = Some(from * PAGE as u64 + random.u64(..3));
                    let size = SetAttr { size, ..SetAttr::default() };
                    let _ = device.fs.setattr(&cx(), ino, None, &size);
                }
                1 => {
                    let (offset, length) = (from * PAGE as u64, (few * 10 * PAGE as u64));
                    let mode = [Fallocate::PUNCH_HOLE, Fallocate::COLLAPSE_RANGE];
                    let keep = Fallocate::KEEP_SIZE;
                    let mode = if random.bool() { mode[0] | keep } else { mode[1] };
                    let range = Fallocate { offset, length, mode };
                    let _ = device.fs.fallocate(&cx(), file(ino), range);
                }
                2 => {
                    attributes += 1;
                    let name = format!("user.{attributes}");
                    let name = defuse_fs::XattrName::new(name.as_bytes()).unwrap();
                    let value = vec![1; random.usize(..900)];
                    let _ = device.fs.setxattr(&cx(), ino, name, &value, Default::default());
                }
                // Each second page, so that none is a neighbour of another one.
                3..6 => (0..few).for_each(|nth| {
                    let _ = device.write(ino, from + 2 * nth, round);
                }),
                _ => (0..few).for_each(|_| {
                    let _ = device.write(ino, random.u64(..6000), round);
                }),
            }
            longest = longest.max(device.extents(ino));
            if random.u8(..3) > 0 {
                device.sync(ino);
            }
        }
        device.fs.syncfs(&cx()).unwrap();
        assert!(longest > 400, "{longest} extents");
        device.judge();
    }
}

/// Nothing is kept ahead of a file that is opened for each append.
#[test]
fn small_blocks_of_files_that_reach_two_mebibytes_move_to_a_unit_of_their_own() {
    let device = Device::new(64);
    let all: Vec<Ino> = (0..3).map(|nth| device.make(&nth.to_string())).collect();
    all.iter().for_each(|ino| device.close(*ino));
    for page in 0..1100 {
        for ino in &all {
            device.fs.open(&cx(), *ino, OpenArgs::default()).unwrap();
            device.write(*ino, page, page as u8 ^ ino.0 as u8).unwrap();
            device.sync(*ino);
            device.close(*ino);
        }
        if page % 100 == 99 {
            // The committing thread does this, too.
            device.fs.engine().merge_scattered();
        }
    }
    // From there on each file continues in a unit of its own.
    assert_eq!(device.figure("units_merged"), 3);
    for ino in &all {
        let extents = device.extents(*ino);
        assert!(extents <= 4, "{extents} extents");
    }
    // A part without data, and a part that is changed meanwhile, are not moved.
    let punch = Fallocate {
        mode: Fallocate::PUNCH_HOLE | Fallocate::KEEP_SIZE,
        offset: 0,
        length: PAGE as u64,
    };
    device.fs.fallocate(&cx(), file(all[0]), punch).unwrap();
    device.sync(all[0]);
    device.fs.engine().merge_scattered();
    assert_eq!(device.figure("units_merged"), 3);
    device.judge();
}

#[test]
fn one_sync_writes_as_many_blocks_as_the_table_of_the_design_says() {
    let device = Device::new(32);
    let ino = device.make("file");
    device.sync(ino);
    let new = || device.make("new");
    assert_eq!(
        device.blocks(|| {
            new();
            device.sync(ino);
        }),
        1,
        "create"
    );
    let rename = |from, to| {
        let (root, none) = (Ino::ROOT, RenameFlags::default());
        device.fs.rename(&cx(), (root, name(from)), (root, name(to)), none).unwrap();
        device.sync(ino);
    };
    assert_eq!(device.blocks(|| rename("new", "free")), 1, "rename");
    new();
    device.sync(ino);
    assert_eq!(device.blocks(|| rename("new", "free")), 2, "rename over a file");
    let overwrite = |byte| {
        device.write(ino, 0, byte).unwrap();
        device.sync(ino);
    };
    assert_eq!(device.blocks(|| overwrite(1)), 2, "the first page");
    assert_eq!(device.blocks(|| overwrite(2)), 1, "an overwrite, fdatasync");
    let overwrite = || {
        device.write(ino, 0, 3).unwrap();
        device.fs.fsync(&cx(), file(ino), false).unwrap();
    };
    assert_eq!(device.blocks(overwrite), 2, "an overwrite, fsync");
    let root = File { ino: Ino::ROOT, fh: Fh(0) };
    for (datasync, blocks) in [(true, 1), (false, 2)] {
        let name = format!("in a synced directory {datasync}");
        let sync = || {
            device.make(&name);
            device.fs.fsyncdir(&cx(), root, datasync).unwrap();
        };
        // The times of the directory may wait, unless all of its metadata is synced.
        device.fs.fsyncdir(&cx(), root, false).unwrap();
        assert_eq!(device.blocks(sync), blocks, "a directory, datasync {datasync}");
    }
    device.judge();
}

/// A sync beside a program that writes much waited for all of that data.
#[test]
fn a_sync_of_a_file_overtakes_the_data_group_of_another_one() {
    let device = Device::new(64);
    let (large, small) = (device.make("large"), device.make("small"));
    let fill =
        |byte| (0..100).for_each(|page| assert_eq!(device.write(large, page, byte), Ok(PAGE)));
    let sync = |byte| {
        device.blocks(|| {
            device.write(small, 0, byte).unwrap();
            device.fs.fsync(&cx(), file(small), false).unwrap();
        })
    };
    let divide = || device.blocks(|| device.fs.engine().divide_group().unwrap());
    fill(1);
    device.sync(large);
    device.write(small, 0, 1).unwrap();
    fill(2);
    assert_eq!(divide(), 2, "the small file");
    assert_eq!(sync(2), 2);
    // The large file changes again, which may wait, too.
    device.write(large, 3, 3).unwrap();
    assert_eq!(sync(3), 2);
    // Its own sync waits for the data group, and so does one that finds nothing to write.
    assert_eq!(device.blocks(|| device.sync(large)), 101 + 1);
    fill(4);
    assert_eq!(divide(), 0);
    assert_eq!(device.blocks(|| device.sync(large)), 101);
    // A group with another change of the inode comes after the data group.
    fill(5);
    assert_eq!(divide(), 0);
    let (root, none) = (Ino::ROOT, RenameFlags::default());
    device.fs.rename(&cx(), (root, name("large")), (root, name("other")), none).unwrap();
    assert_eq!(sync(6), 101 + 3);
    // A full group leaves the data group alone, and a sync of everything does not.
    fill(7);
    assert_eq!(divide(), 0);
    assert_eq!(device.blocks(|| device.fs.syncfs(&cx()).unwrap()), 102, "with the directory");
    device.judge();
}
