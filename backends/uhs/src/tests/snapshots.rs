//! Snapshots of a clean end: their content, the changes that make them void, and the effects of
//! damage.

use std::sync::Arc;

use defuse_block::sim::SimOpKind;
use defuse_block::{BlockDevice, BlockingQueue, Errno as Failure, RamDevice, SimDevice};
use defuse_fs::{FileKind, FileSystem, Ino, SetAttr, SetXattrFlags, XattrName};

use super::random_operations::NameWorkload;
use super::{BLOCKS, OPTIONS, cx, make_fresh, name, node, open, random, snapshot};
use crate::commit::CommitRules;
use crate::format::BLOCK;
use crate::format::snapshot::{SnapshotHeader, SnapshotPointer, SnapshotSegment};
use crate::format::superblock::{COPIES, Superblock};
use crate::{RepairAction, UhsOptions, check, load, repair, store};

const WITHOUT: CommitRules = CommitRules { snapshots: false, ..CommitRules::ALL };

fn superblock(ram: &RamDevice) -> Superblock {
    store::superblock(ram).unwrap()
}

/// Writes all copies of another superblock.
fn put(ram: &RamDevice, superblock: &Superblock) {
    let mut line = BlockingQueue::new(ram).unwrap();
    COPIES.iter().for_each(|block| line.write(*block, &superblock.encode()).unwrap());
}

/// Returns the image without its snapshot.
fn drop_snapshot(ram: &RamDevice) -> RamDevice {
    let copy = ram.fork();
    put(&copy, &Superblock { snapshot: None, ..superblock(ram) });
    copy
}

fn is_used(ram: &RamDevice) -> bool {
    load::restore(ram, &superblock(ram), u64::MAX).unwrap().is_some()
}

/// All that can be seen of a file system, with its times and its space.
fn describe_all(ram: &RamDevice) -> String {
    let options = UhsOptions { read_only: true, ..OPTIONS };
    let device: Arc<dyn BlockDevice> = Arc::new(ram.clone());
    let (fs, problems) = crate::Uhs::open_by(device, options, CommitRules::ALL, random()).unwrap();
    assert_eq!(problems, []);
    let found = snapshot(&fs);
    let times = found.names.values().map(|seen| {
        let attr = fs.getattr(&cx(), Ino(seen.ino), None).unwrap();
        // A scan takes the times of a directory from its newest entry.
        let times = (attr.kind != FileKind::Directory).then_some((attr.mtime, attr.ctime));
        (times, attr.btime, attr.uid, attr.rdev, attr.blocks)
    });
    let times: Vec<_> = times.collect();
    let attributes = found.names.values().map(|seen| {
        let names = fs.listxattr(&cx(), Ino(seen.ino), 4096).unwrap();
        format!("{names:?}")
    });
    let attributes: Vec<String> = attributes.collect();
    let space = (fs.engine().pool().count_blocks(), fs.engine().names().count());
    format!("{found:#?}{times:?}{attributes:?}{space:?}")
}

fn play(player: &mut NameWorkload<'_>, steps: usize) {
    for _ in 0..steps {
        player.step();
    }
}

/// Makes an image after a clean end, with one of everything that a snapshot encodes in its own way.
fn make_ended() -> RamDevice {
    let ram = make_fresh();
    let (fs, _) = open(ram.clone(), CommitRules::ALL);
    let make = |text: &str, kind| {
        let node = defuse_fs::NewNode { rdev: 0x105, ..node(kind) };
        fs.mknod(&cx(), Ino::ROOT, name(text), &node).unwrap().ino
    };
    let (one, two) = (make("one", FileKind::Regular), make("two", FileKind::Regular));
    make("device", FileKind::CharDevice);
    make("fifo", FileKind::Fifo);
    let dir = fs.mkdir(&cx(), Ino::ROOT, name("dir"), &node(FileKind::Directory)).unwrap().ino;
    fs.symlink(&cx(), dir, name("link"), b"target", &node(FileKind::Symlink)).unwrap();
    fs.link(&cx(), one, dir, name("a name of more than twenty-two bytes")).unwrap();
    let attribute = XattrName::new(b"user.key").unwrap();
    fs.setxattr(&cx(), two, attribute, &[7; 3000], SetXattrFlags::default()).unwrap();
    fs.setxattr(&cx(), dir, attribute, &[8; 5000], SetXattrFlags::default()).unwrap();
    let old = defuse_fs::SetTime::At(defuse_fs::Timestamp { secs: -1 << 40, nanos: 5 });
    let set = SetAttr { mtime: Some(old), ..SetAttr::default() };
    fs.setattr(&cx(), make("old", FileKind::Fifo), None, &set).unwrap();
    fs.syncfs(&cx()).unwrap();
    let mut player = NameWorkload { fs: &fs, random: fastrand::Rng::with_seed(4) };
    play(&mut player, 80);
    drop(fs);
    ram
}

#[test]
fn a_mount_after_a_clean_end_finds_what_a_scan_finds() {
    let ram = make_ended();
    assert!(is_used(&ram) && !is_used(&drop_snapshot(&ram)));
    assert_eq!(describe_all(&ram), describe_all(&drop_snapshot(&ram)));
    for seed in 0..60 {
        let rules = CommitRules { usable: 120, ..CommitRules::ALL };
        let rules = if seed % 2 == 0 { rules } else { CommitRules::ALL };
        let (fs, problems) = open(ram.clone(), rules);
        assert_eq!(problems, [], "seed {seed}");
        let mut player = NameWorkload { fs: &fs, random: fastrand::Rng::with_seed(seed) };
        play(&mut player, 40);
        drop(fs);
        assert!(is_used(&ram), "seed {seed}");
        assert!(describe_all(&ram) == describe_all(&drop_snapshot(&ram)), "seed {seed}");
        assert_eq!(check(&(Arc::new(ram.clone()) as Arc<dyn BlockDevice>)).unwrap().problems, []);
    }
}

/// The snapshot has thousands of entries in several segments, which several threads read.
#[test]
fn a_snapshot_of_many_inodes_is_read_by_all_cores() {
    let ram = RamDevice::new(4096, 96 * 512);
    let device: Arc<dyn BlockDevice> = Arc::new(ram.clone());
    crate::Uhs::make(Arc::clone(&device), (0o755, 0, 0), &mut random()).unwrap();
    let (fs, _) = open(ram.clone(), CommitRules::ALL);
    let long = "x".repeat(200);
    let dirs = ["a", "b", "c"].map(|text| {
        fs.mkdir(&cx(), Ino::ROOT, name(text), &node(FileKind::Directory)).unwrap().ino
    });
    for file in 0..20_000 {
        let (text, dir) = (format!("{file}{long}"), dirs[file % 3]);
        fs.mknod(&cx(), dir, name(&text), &node(FileKind::Fifo)).unwrap();
        if file % 5 == 0 {
            fs.unlink(&cx(), dir, name(&text)).unwrap();
        }
    }
    drop(fs);
    let at = superblock(&ram);
    let header = store::snapshot::header(&ram, &at).unwrap();
    assert!(header.segments.len() >= 4 && header.inodes == 16_004, "{header:?}");
    assert!(is_used(&ram));
    assert_eq!(describe_all(&ram), describe_all(&drop_snapshot(&ram)));
}

#[test]
fn there_is_no_snapshot_after_a_write_that_failed_nor_without_space() {
    let sim = SimDevice::from_ram(&make_fresh(), 1);
    let (fs, _) = open(sim.clone(), CommitRules::ALL);
    fs.mknod(&cx(), Ino::ROOT, name("a"), &node(FileKind::Regular)).unwrap();
    let mut once = true;
    // A slot goes to another place.
    sim.fail(move |victim| {
        let hit = once && victim.call == SimOpKind::Write;
        once &= !hit;
        hit.then_some(Failure::IO)
    });
    drop(fs);
    assert_eq!(superblock(&sim.copy_present()).snapshot, None);
    assert_eq!(check(&(Arc::new(sim.copy_present()) as Arc<dyn BlockDevice>)).unwrap().inodes, 2);

    for (call, number) in [(SimOpKind::Write, 1), (SimOpKind::Write, 2), (SimOpKind::Flush, 0)] {
        let sim = SimDevice::from_ram(&make_fresh(), 1);
        let (fs, _) = open(sim.clone(), CommitRules::ALL);
        fs.syncfs(&cx()).unwrap();
        let mut count = 0;
        sim.fail(move |victim| {
            count += usize::from(victim.call == call);
            (victim.call == call && count > number).then_some(Failure::IO)
        });
        drop(fs);
        let now = sim.copy_present();
        assert!(superblock(&now).snapshot.is_none() || is_used(&now), "{call:?} {number}");
        assert_eq!(describe_all(&now), describe_all(&drop_snapshot(&now)));
    }

    let ram = make_fresh();
    let (fs, _) = open(ram.clone(), CommitRules::ALL);
    let full = |space: &mut crate::space::BlockSpace| {
        while let Some((first, count)) = space.find_units(8) {
            space.reserve(first, count);
        }
    };
    full(&mut fs.engine().pool().space());
    drop(fs);
    assert_eq!(
        (superblock(&ram).snapshot, describe_all(&ram)),
        (None, describe_all(&drop_snapshot(&ram)))
    );
}

/// Writes a changed header, with right checksums up to the superblock.
fn seal(ram: &RamDevice, header: &SnapshotHeader) {
    let bytes = header.encode().unwrap();
    let old = superblock(ram);
    let at = SnapshotPointer { crc: crc32c::crc32c(&bytes), ..old.snapshot.unwrap() };
    BlockingQueue::new(ram).unwrap().write(at.block, &bytes).unwrap();
    put(ram, &Superblock { snapshot: Some(at), ..old });
}

/// fsck reads the slots, and reported an image as clean although its snapshot, which the next mount
/// would use, was damaged.
#[test]
fn a_damaged_snapshot_is_told_and_given_up() {
    let device = |ram: &RamDevice| Arc::new(ram.clone()) as Arc<dyn BlockDevice>;
    let whole = make_ended();
    assert!(!check(&device(&whole)).unwrap().has_damaged_snapshot);
    let at = superblock(&whole).snapshot.unwrap();
    let header = store::snapshot::header(&whole, &superblock(&whole)).unwrap();
    let last = header.segments.last().unwrap();
    for (block, byte) in
        [(at.block, 0), (at.block, 90), (last.block, 0), (last.block, last.bytes / 2)]
    {
        let (block, byte) = (block + u64::from(byte) / BLOCK as u64, byte as usize % BLOCK);
        let ram = whole.fork();
        let mut line = BlockingQueue::new(&ram).unwrap();
        let mut bytes = vec![0; BLOCK];
        line.read(block, &mut bytes).unwrap();
        bytes[byte] ^= 0x40;
        line.write(block, &bytes).unwrap();
        let report = check(&device(&ram)).unwrap();
        assert!(report.has_damaged_snapshot && report.problems.is_empty(), "{block} {byte}");
        let mounted = ram.fork();
        drop(open(mounted.clone(), CommitRules::ALL));
        assert!(!check(&device(&mounted)).unwrap().has_damaged_snapshot, "a mount writes another");
        let repairs = repair(&device(&ram), None, random()).unwrap();
        assert_eq!(repairs, [RepairAction::Snapshot], "{block} {byte}");
        assert!(!check(&device(&ram)).unwrap().has_damaged_snapshot && !is_used(&ram));
        assert_eq!(repair(&device(&ram), None, random()).unwrap(), []);
    }
    // An interrupted mount makes the snapshot void first, which is no damage.
    let ram = whole.fork();
    BlockingQueue::new(&ram).unwrap().write(at.block, &[0; BLOCK]).unwrap();
    assert!(!check(&device(&ram)).unwrap().has_damaged_snapshot);
}

#[test]
fn a_damaged_snapshot_is_not_used() {
    let whole = make_ended();
    let old = superblock(&whole);
    let (at, expected) = (old.snapshot.unwrap(), describe_all(&drop_snapshot(&whole)));
    let header = store::snapshot::header(&whole, &old).unwrap();
    let unused = |ram: &RamDevice, what: &str| {
        assert!(!is_used(ram), "{what}");
        assert_eq!(describe_all(ram), expected, "{what}");
    };
    for block in
        (0..at.blocks).map(|block| at.block + u64::from(block)).chain([header.segments[0].block])
    {
        let mut bytes = vec![0; BLOCK];
        BlockingQueue::new(&whole).unwrap().read(block, &mut bytes).unwrap();
        for byte in (0..100).step_by(3) {
            let ram = whole.fork();
            let mut damaged = bytes.clone();
            damaged[byte] ^= 0x40;
            BlockingQueue::new(&ram).unwrap().write(block, &damaged).unwrap();
            assert!(!is_used(&ram), "byte {byte} of block {block}");
        }
        let ram = whole.fork();
        BlockingQueue::new(&ram).unwrap().write(block, &[0; BLOCK]).unwrap();
        unused(&ram, "zeros");
    }
    for (what, other) in [
        ("place", SnapshotPointer { block: BLOCKS - 1, ..at }),
        ("outside", SnapshotPointer { block: u64::MAX, ..at }),
        ("length", SnapshotPointer { blocks: 2, ..at }),
        ("no length", SnapshotPointer { blocks: 0, ..at }),
        ("long", SnapshotPointer { blocks: u32::MAX, ..at }),
        ("checksum", SnapshotPointer { crc: at.crc ^ 1, ..at }),
    ] {
        let ram = whole.fork();
        put(&ram, &Superblock { snapshot: Some(other), ..old.clone() });
        unused(&ram, what);
    }
    let first = header.segments[0];
    for (what, other) in [
        ("uuid", SnapshotHeader { uuid: [1; 16], ..header.clone() }),
        ("group", SnapshotHeader { durable: header.durable - 1, ..header.clone() }),
        ("inodes", SnapshotHeader { inodes: header.inodes + 1, ..header.clone() }),
        ("twice", SnapshotHeader { segments: vec![first, first], ..header.clone() }),
        ("none", SnapshotHeader { segments: Vec::new(), inodes: 0, ..header.clone() }),
        (
            "bytes",
            SnapshotHeader {
                segments: vec![SnapshotSegment { bytes: first.bytes - 1, ..first }],
                ..header.clone()
            },
        ),
    ] {
        let ram = whole.fork();
        seal(&ram, &other);
        unused(&ram, what);
    }
    // A device that cannot read it.
    let sim = SimDevice::from_ram(&whole, 1);
    sim.fail(move |victim| (victim.block == at.block).then_some(Failure::IO));
    let (fs, problems) = crate::Uhs::open_by(
        Arc::new(sim),
        UhsOptions { read_only: true, ..OPTIONS },
        CommitRules::ALL,
        random(),
    )
    .unwrap();
    assert!(problems.is_empty() && !snapshot(&fs).names.is_empty());
}

#[test]
fn a_read_only_mount_uses_a_snapshot_and_keeps_it_and_a_mount_that_writes_voids_it_first() {
    let ram = make_ended();
    let before = superblock(&ram);
    describe_all(&ram);
    assert_eq!(superblock(&ram), before);
    let sim = SimDevice::from_ram(&ram, 1);
    let (fs, _) = open(sim.clone(), CommitRules::ALL);
    assert_eq!(superblock(&sim.copy_present()).snapshot, None);
    // The snapshot is void even if only an older copy of the superblock is left.
    let mut header = vec![1; BLOCK];
    BlockingQueue::new(&sim.copy_present())
        .unwrap()
        .read(before.snapshot.unwrap().block, &mut header)
        .unwrap();
    assert!(header.iter().all(|byte| *byte == 0));
    fs.abandon();
    let (fs, _) = open(sim.clone(), WITHOUT);
    drop(fs);
    assert_eq!(superblock(&sim.copy_present()).snapshot, None);
}
