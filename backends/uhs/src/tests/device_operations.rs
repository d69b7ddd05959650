//! The operations of the device that reads, writes and removals take.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Barrier};
use std::time::Duration;

use defuse_block::sim::SimOpKind;
use defuse_block::{RamDevice, SimDevice};
use defuse_fs::{
    CopyRange, Errno, Fh, File, FileKind, FileSystem, Ino, ReadArgs, ReadBuf, SliceSink,
    SliceSource, WriteArgs, WriteBuf,
};

use super::{contents, cx, name, node, random};
use crate::{Uhs, UhsOptions};

const PAGES: u64 = 2000;

/// A device that counts the operations of each kind, and a file system on it, with a file.
struct CountingVolume {
    sim: SimDevice,
    fs: Uhs,
    file: Ino,
    calls: [Arc<AtomicU64>; 2],
}

impl CountingVolume {
    /// `calls` are the kinds that are counted.
    fn new(discard: bool, calls: [SimOpKind; 2]) -> CountingVolume {
        let ram = RamDevice::new(4096, 16 * 512);
        Uhs::make(Arc::new(ram.clone()), (0o755, 0, 0), &mut random()).unwrap();
        let sim = SimDevice::from_ram(&ram, 1);
        let options = UhsOptions { commit: None, discard, ..UhsOptions::default() };
        let fs = Uhs::open(Arc::new(sim.clone()), options, random()).unwrap().0;
        let file = make(&fs, "file");
        write(&fs, file, &pattern());
        fs.syncfs(&cx()).unwrap();
        let mut counted = CountingVolume { sim, fs, file, calls: Default::default() };
        counted.remount(options);
        let counters = counted.calls.clone();
        counted.sim.fail(move |victim| {
            if let Some(at) = calls.iter().position(|call| *call == victim.call) {
                counters[at].fetch_add(1, Ordering::Relaxed);
            }
            None
        });
        counted
    }

    /// Opens the file system again, with an empty cache.
    fn remount(&mut self, options: UhsOptions) {
        self.fs = Uhs::open(Arc::new(self.sim.clone()), options, random()).unwrap().0;
    }

    fn count(&self, at: usize) -> u64 {
        self.calls[at].swap(0, Ordering::Relaxed)
    }

    fn read(&self, page: u64) {
        let mut bytes = [0; 4096];
        let mut sink = SliceSink::new(&mut bytes);
        let args = ReadArgs { offset: page * 4096, ..ReadArgs::default() };
        let mut out = ReadBuf::new(&mut sink, 4096);
        self.fs.read(&cx(), File { ino: self.file, fh: Fh(0) }, args, &mut out).unwrap();
        assert_eq!(bytes, [page as u8; 4096]);
    }
}

fn pattern() -> Vec<u8> {
    (0..PAGES).flat_map(|page| [page as u8; 4096]).collect()
}

fn make(fs: &Uhs, text: &str) -> Ino {
    fs.mknod(&cx(), Ino::ROOT, name(text), &node(FileKind::Regular)).unwrap().ino
}

fn write(fs: &Uhs, ino: Ino, bytes: &[u8]) {
    let mut source = SliceSource::new(bytes);
    let mut data = WriteBuf::new(&mut source);
    let file = File { ino, fh: Fh(0) };
    assert_eq!(fs.write(&cx(), file, WriteArgs::default(), &mut data), Ok(bytes.len()));
}

#[test]
fn a_sequential_reader_needs_few_reads_and_a_random_one_no_more_than_it_asks_for() {
    let counted = CountingVolume::new(false, [SimOpKind::Read, SimOpKind::Write]);
    (0..PAGES).for_each(|page| counted.read(page));
    let sequential = counted.count(0);
    assert!(sequential < 40, "{sequential} reads of the device");
    let counted = CountingVolume::new(false, [SimOpKind::Read, SimOpKind::Write]);
    // Never two neighbours one after the other.
    (0..200).for_each(|nth| counted.read(nth * 7 % PAGES));
    assert_eq!(counted.count(0), 200);
}

#[test]
fn readers_of_several_places_are_read_ahead_for_as_one_is() {
    let counted = CountingVolume::new(false, [SimOpKind::Read, SimOpKind::Write]);
    let part = PAGES / 4;
    for nth in 0..part {
        (0..4).for_each(|reader| counted.read(reader * part + nth));
    }
    let reads = counted.count(0);
    assert!(reads < 4 * 20, "{reads} reads of the device");
}

/// Each of several readers found the pages missing, and read them.
#[test]
fn what_several_read_at_once_is_read_from_the_device_once() {
    let counted = CountingVolume::new(false, [SimOpKind::Read, SimOpKind::Write]);
    let blocks = Arc::new(AtomicU64::new(0));
    let read = Arc::clone(&blocks);
    // A device that takes its time, so that all readers meet there.
    counted.sim.fail(move |victim| {
        std::thread::sleep(Duration::from_millis(1));
        read.fetch_add(victim.blocks, Ordering::Relaxed);
        None
    });
    let together = Barrier::new(4);
    std::thread::scope(|scope| {
        for first in [0, 0, 0, PAGES / 2] {
            let (counted, together) = (&counted, &together);
            scope.spawn(move || {
                together.wait();
                (first..PAGES).chain(0..first).for_each(|page| counted.read(page));
            });
        }
    });
    assert_eq!(blocks.load(Ordering::Relaxed), PAGES);
}

/// Without this, they would wait for ever.
#[test]
fn readers_that_wait_for_a_read_that_fails_read_themselves() {
    let counted = CountingVolume::new(false, [SimOpKind::Read, SimOpKind::Write]);
    let mut left = 2;
    counted.sim.fail(move |_| {
        std::thread::sleep(Duration::from_millis(20));
        left -= i32::from(left > 0);
        (left > 0).then_some(defuse_block::Errno::IO)
    });
    let together = Barrier::new(4);
    let failed = std::thread::scope(|scope| {
        let readers = [(); 4].map(|()| {
            scope.spawn(|| {
                together.wait();
                let mut bytes = [0; 4096];
                let mut sink = SliceSink::new(&mut bytes);
                let mut out = ReadBuf::new(&mut sink, 4096);
                let file = File { ino: counted.file, fh: Fh(0) };
                counted.fs.read(&cx(), file, ReadArgs::default(), &mut out).is_err()
            })
        });
        readers.map(|reader| reader.join().unwrap()).into_iter().filter(|failed| *failed).count()
    });
    assert_eq!(failed, 1, "the one whose read failed");
}

#[test]
fn blocks_are_discarded_when_it_is_durable_that_they_are_free() {
    let counted = CountingVolume::new(true, [SimOpKind::Discard, SimOpKind::Write]);
    counted.fs.unlink(&cx(), Ino::ROOT, name("file")).unwrap();
    assert_eq!(counted.count(0), 0, "the file may come back");
    counted.fs.syncfs(&cx()).unwrap();
    assert!((1..10).contains(&counted.count(0)) && counted.count(1) > 0);
    let again = make(&counted.fs, "again");
    write(&counted.fs, again, &pattern());
    counted.fs.syncfs(&cx()).unwrap();
    assert!(contents(&counted.fs, again, PAGES * 4096) == pattern());
    let silent = CountingVolume::new(false, [SimOpKind::Discard, SimOpKind::Flush]);
    silent.fs.unlink(&cx(), Ino::ROOT, name("file")).unwrap();
    silent.fs.syncfs(&cx()).unwrap();
    assert_eq!(silent.count(0), 0);
}

#[test]
fn ranges_are_copied_within_the_file_system() {
    let counted = CountingVolume::new(false, [SimOpKind::Read, SimOpKind::Write]);
    let (fs, other) = (&counted.fs, make(&counted.fs, "other"));
    let file = |ino| File { ino, fh: Fh(0) };
    let copy = |from: (Ino, u64), to: (Ino, u64), length| {
        let (src, dst) = (file(from.0), file(to.0));
        let (src_offset, dst_offset) = (from.1, to.1);
        fs.copy_file_range(&cx(), &CopyRange { src, src_offset, dst, dst_offset, length, flags: 0 })
    };
    let all = PAGES * 4096;
    // The copy ends where the file ends.
    assert_eq!(copy((counted.file, 5000), (other, 100), u64::MAX / 2), Ok(all - 5000));
    assert!(contents(fs, other, all - 4900)[100..] == pattern()[5000..]);
    assert_eq!(copy((other, 0), (other, 5000), 6000), Err(Errno::EINVAL), "an overlap");
    assert_eq!(copy((other, 0), (other, 6000), 6000), Ok(6000));
    assert!(contents(fs, other, 12_000)[6000..] == contents(fs, other, 6000));
    assert_eq!(copy((other, all), (counted.file, 0), 1), Ok(0));
    assert_eq!(copy((other, 9), (counted.file, 0), u64::MAX), Err(Errno::EOVERFLOW));
    assert_eq!(copy((other, 0), (Ino::ROOT, 0), 5), Err(Errno::EISDIR));
}
