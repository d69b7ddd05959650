//! Compaction: small blocks that lie in many units make room for inodes and for large files.

use std::collections::BTreeMap;
use std::sync::Arc;

use defuse_block::{BlockDevice, RamDevice};
use defuse_fs::{
    Errno, Fallocate, Fh, File, FileKind, FileSystem, Ino, SliceSource, WriteArgs, WriteBuf,
};

use super::{OPTIONS, contents, cx, name, node, random, snapshot};
use crate::commit::CommitRules;
use crate::{Uhs, UhsOptions, check};

const UNITS: u64 = 24;

/// Bytes of a small file.
const SMALL: usize = 5 * 4096;

struct ScatteredVolume {
    ram: RamDevice,
    fs: Uhs,
    /// The remaining files, with their first byte.
    files: BTreeMap<String, u8>,
}

fn figure(fs: &Uhs, name: &str) -> u64 {
    fs.figures().into_iter().find(|figure| figure.name == name).unwrap().value
}

fn write(fs: &Uhs, ino: Ino, bytes: &[u8]) -> Result<usize, Errno> {
    let mut source = SliceSource::new(bytes);
    let file = File { ino, fh: Fh(0) };
    fs.write(&cx(), file, WriteArgs::default(), &mut WriteBuf::new(&mut source))
}

fn make(fs: &Uhs, text: &str) -> Result<Ino, Errno> {
    fs.mknod(&cx(), Ino::ROOT, name(text), &node(FileKind::Regular)).map(|entry| entry.ino)
}

impl ScatteredVolume {
    /// Fills a device with small files, and then removes all of them except every `kept`th.
    fn new(kept: usize) -> ScatteredVolume {
        let ram = RamDevice::new(4096, UNITS * 512);
        Uhs::make(Arc::new(ram.clone()), (0o755, 0, 0), &mut random()).unwrap();
        let options = UhsOptions { cache_pages: 256, dirty_pages: 1024, ..OPTIONS };
        let fs =
            Uhs::open_by(Arc::new(ram.clone()), options, CommitRules::ALL, random()).unwrap().0;
        let mut all = Vec::new();
        for number in 0.. {
            let text = number.to_string();
            let Ok(ino) = make(&fs, &text) else { break };
            let written = write(&fs, ino, &vec![number as u8; SMALL]);
            fs.forget(ino, 1);
            match written {
                Ok(SMALL) => all.push((text, number as u8)),
                Ok(_) | Err(Errno::ENOSPC) => break,
                Err(errno) => panic!("{errno}"),
            }
        }
        assert!(all.len() > 1500, "{}", all.len());
        let mut scattered = ScatteredVolume { ram, fs, files: BTreeMap::new() };
        for (nth, (text, byte)) in all.into_iter().enumerate() {
            match nth % kept {
                0 => drop(scattered.files.insert(text, byte)),
                _ => scattered.fs.unlink(&cx(), Ino::ROOT, name(&text)).unwrap(),
            }
        }
        scattered.fs.syncfs(&cx()).unwrap();
        scattered
    }

    fn judge(&self, fs: &Uhs) {
        for (text, byte) in &self.files {
            let entry = fs.lookup(&cx(), Ino::ROOT, name(text)).unwrap();
            assert!(contents(fs, entry.ino, SMALL as u64) == vec![*byte; SMALL], "{text}");
            fs.forget(entry.ino, 1);
        }
    }

    /// The files are there, before and after a power failure, and no block is lost.
    fn end(self) {
        self.judge(&self.fs);
        self.fs.syncfs(&cx()).unwrap();
        let free = figure(&self.fs, "space_free");
        let left = snapshot(&self.fs).names;
        let after = self.ram.fork();
        let report = check(&(Arc::new(after.clone()) as Arc<dyn BlockDevice>)).unwrap();
        assert_eq!((report.problems, report.free_blocks * 4096), (Vec::new(), free));
        let fs = Uhs::open(Arc::new(after), OPTIONS, random()).unwrap().0;
        self.judge(&fs);
        assert_eq!(snapshot(&fs).names, left);
    }
}

/// Each unit had some blocks in use, so that none was free for inodes: files could not be created,
/// although most of the device was free.
#[test]
fn scattered_blocks_leave_room_for_any_number_of_inodes() {
    let scattered = ScatteredVolume::new(3);
    let fs = &scattered.fs;
    let free = figure(fs, "space_free");
    assert!(figure(fs, "units_free") <= 6 && free > UNITS / 3 * (2 << 20), "{free}");
    // A slot takes 4 KiB, and there are slots left.
    let wanted = figure(fs, "slots") + free / 4096 / 2;
    let mut made = scattered.files.len() as u64;
    while made < wanted {
        match make(fs, &format!("new{made}")) {
            Ok(ino) => fs.forget(ino, 1),
            Err(errno) => panic!("{errno} after {made} of {wanted}, {:?}", fs.figures()),
        }
        made += 1;
    }
    assert!(figure(fs, "compaction_units") > 0);
    scattered.end();
}

/// A large file became thousands of extents.
#[test]
fn scattered_blocks_leave_whole_units_to_large_files() {
    let scattered = ScatteredVolume::new(4);
    let fs = &scattered.fs;
    let before = figure(fs, "units_free");
    while fs.engine().compact_anyway().unwrap() {}
    let after = figure(fs, "units_free");
    assert!(after >= before + 6, "{before} and then {after} free units");
    let large = make(fs, "large").unwrap();
    let bytes: Vec<u8> = (0..8 << 20).map(|at| (at / 4096) as u8).collect();
    for part in 0..8 {
        let mut source = SliceSource::new(&bytes[part << 20..(part + 1) << 20]);
        let args = WriteArgs { offset: (part << 20) as u64, ..WriteArgs::default() };
        let file = File { ino: large, fh: Fh(0) };
        assert_eq!(fs.write(&cx(), file, args, &mut WriteBuf::new(&mut source)), Ok(1 << 20));
    }
    fs.syncfs(&cx()).unwrap();
    assert!(contents(fs, large, 8 << 20) == bytes);
    assert!(figure(fs, "units_full") >= 4);
    scattered.end();
}

#[test]
fn a_compaction_moves_what_has_no_bytes_and_leaves_what_is_being_written() {
    let scattered = ScatteredVolume::new(4);
    let fs = &scattered.fs;
    let text = scattered.files.keys().next().unwrap().clone();
    let sparse = make(fs, "allocated").unwrap();
    let range = Fallocate { mode: 0, offset: 0, length: 200 * 4096 };
    fs.fallocate(&cx(), File { ino: sparse, fh: Fh(0) }, range).unwrap();
    fs.syncfs(&cx()).unwrap();
    // A page without a sync, and a file without a name.
    let ino = fs.lookup(&cx(), Ino::ROOT, name(&text)).unwrap().ino;
    write(fs, ino, &[scattered.files[&text]; 100]).unwrap();
    let dead = make(fs, "dead").unwrap();
    fs.open(&cx(), dead, Default::default()).unwrap();
    write(fs, dead, &[9; 3 * 4096]).unwrap();
    fs.unlink(&cx(), Ino::ROOT, name("dead")).unwrap();
    while fs.engine().compact_anyway().unwrap() {}
    assert!(contents(fs, dead, 3 * 4096) == [9; 3 * 4096]);
    assert!(contents(fs, sparse, 200 * 4096).iter().all(|byte| *byte == 0));
    fs.release(&cx(), File { ino: dead, fh: Fh(0) }, Default::default()).unwrap();
    fs.forget(dead, 1);
    fs.forget(sparse, 1);
    fs.forget(ino, 1);
    scattered.end();
}

/// Slots of files that were gone stayed slots: a device that had held a million small files had no
/// room for large ones.
#[test]
fn units_of_slots_that_hold_nothing_are_space_for_data() {
    let ram = RamDevice::new(4096, UNITS * 512);
    Uhs::make(Arc::new(ram.clone()), (0o755, 0, 0), &mut random()).unwrap();
    let options = UhsOptions { cache_pages: 256, dirty_pages: 1024, ..OPTIONS };
    let fs = Uhs::open_by(Arc::new(ram.clone()), options, CommitRules::ALL, random()).unwrap().0;
    let empty = figure(&fs, "space_free");
    let names: Vec<String> = (0..8000).map(|number: u32| number.to_string()).collect();
    names.iter().for_each(|text| fs.forget(make(&fs, text).unwrap(), 1));
    fs.syncfs(&cx()).unwrap();
    assert!(figure(&fs, "units_of_slots") >= 8000 / 512);
    names.iter().for_each(|text| fs.unlink(&cx(), Ino::ROOT, name(text)).unwrap());
    fs.syncfs(&cx()).unwrap();
    let large = make(&fs, "large").unwrap();
    let (mut offset, part) = (0, vec![5; 1 << 20]);
    let mut written = |fs: &Uhs| {
        let mut source = SliceSource::new(&part);
        let args = WriteArgs { offset, ..WriteArgs::default() };
        let file = File { ino: large, fh: Fh(0) };
        let done = fs.write(&cx(), file, args, &mut WriteBuf::new(&mut source));
        offset += *done.as_ref().unwrap_or(&0) as u64;
        done.is_ok()
    };
    while written(&fs) {}
    let left = figure(&fs, "units_of_slots");
    assert!(figure(&fs, "units_of_slots_given_back") > 0 && left <= 6, "{:?}", fs.figures());
    // Two units are kept for inodes, and some blocks for operations that must succeed on a full
    // device.
    assert!(offset + (left + 3) * (2 << 20) > empty, "{offset} of {empty}, {left} units of slots");
    fs.syncfs(&cx()).unwrap();
    let after = ram.fork();
    let report = check(&(Arc::new(after.clone()) as Arc<dyn BlockDevice>)).unwrap();
    assert_eq!((report.problems, report.inodes), (Vec::new(), 2));
    let again = Uhs::open(Arc::new(after), OPTIONS, random()).unwrap().0;
    assert!(contents(&again, large, 1 << 20) == part);
}

/// A unit with one inode stayed a unit of slots for ever.
#[test]
fn units_of_slots_with_few_inodes_are_space_for_data() {
    let ram = RamDevice::new(4096, UNITS * 512);
    Uhs::make(Arc::new(ram.clone()), (0o755, 0, 0), &mut random()).unwrap();
    let options = UhsOptions { cache_pages: 256, dirty_pages: 1024, ..OPTIONS };
    let fs = Uhs::open_by(Arc::new(ram.clone()), options, CommitRules::ALL, random()).unwrap().0;
    let names: Vec<String> = (0..8000).map(|number: u32| number.to_string()).collect();
    for (number, text) in names.iter().enumerate() {
        let ino = make(&fs, text).unwrap();
        if number % 100 == 0 {
            write(&fs, ino, text.as_bytes()).unwrap();
        }
        fs.forget(ino, 1);
    }
    fs.syncfs(&cx()).unwrap();
    let before = figure(&fs, "units_of_slots");
    assert!(before >= 8000 / 512);
    for (number, text) in names.iter().enumerate().filter(|(number, _)| number % 100 != 0) {
        assert!(number % 100 != 0);
        fs.unlink(&cx(), Ino::ROOT, name(text)).unwrap();
    }
    fs.syncfs(&cx()).unwrap();
    let large = make(&fs, "large").unwrap();
    let part = vec![5; 1 << 20];
    let mut offset = 0;
    loop {
        let mut source = SliceSource::new(&part);
        let args = WriteArgs { offset, ..WriteArgs::default() };
        let file = File { ino: large, fh: Fh(0) };
        match fs.write(&cx(), file, args, &mut WriteBuf::new(&mut source)) {
            Ok(written) => offset += written as u64,
            Err(errno) => break assert_eq!(errno, Errno::ENOSPC),
        }
    }
    let left = figure(&fs, "units_of_slots");
    assert!(left <= 7 && figure(&fs, "slots_moved") > 0, "{left} of {before} units are left");
    assert!(offset > (UNITS - 12) * (2 << 20), "{offset}");
    fs.syncfs(&cx()).unwrap();
    let now = snapshot(&fs);
    let after = ram.fork();
    let report = check(&(Arc::new(after.clone()) as Arc<dyn BlockDevice>)).unwrap();
    assert_eq!((report.problems, report.inodes), (Vec::new(), 82));
    let again = Uhs::open(Arc::new(after), OPTIONS, random()).unwrap().0;
    assert!(snapshot(&again) == now);
}
