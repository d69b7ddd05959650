//! Images whose numbers leave no room, or whose content is impossible, with right checksums.

use std::sync::Arc;

use defuse_block::{BlockDevice, RamDevice};
use defuse_fs::{Errno, FileKind, FileSystem, Ino, RenameFlags};

use super::damage::{IDENTITY, TAIL, examine, get, image, put, seal_slot};
use super::{OPTIONS, cx, list_bytes, name, node, random};
use crate::format::inode::{HEAD, RECORD_BYTES};
use crate::format::superblock::{COPIES, Superblock};
use crate::format::{BLOCK, LAST, LAST_NEW, LAST_OPENED, NUMBERS, UNIT_BLOCKS};
use crate::names::ROOT;
use crate::{LoadProblem, RepairAction, StoreError, Uhs, check, repair};

/// Places in a slot: of the kind, the inode, the stamp, the group and the group before in an
/// identity, and of the position of the first name.
const KIND: usize = 4;
const INO: usize = 40;
const STAMP: usize = 48;
const GROUP: usize = 56;
const INDEX: usize = 64;
const DURABLE: usize = 72;
const POSITION: usize = IDENTITY + HEAD + RECORD_BYTES + 8;

fn device(ram: &RamDevice) -> Arc<dyn BlockDevice> {
    Arc::new(ram.clone())
}

fn open(ram: &RamDevice) -> (Uhs, Vec<LoadProblem>) {
    Uhs::open(device(ram), OPTIONS, random()).unwrap()
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap())
}

/// The blocks of the slots of this kind, and their bytes.
fn slots(ram: &RamDevice, kind: u8) -> Vec<(u64, Vec<u8>)> {
    let blocks = UNIT_BLOCKS..2 * UNIT_BLOCKS;
    let slots = blocks.map(|block| (block, get(ram, block)));
    slots.filter(|(_, slot)| slot.starts_with(b"UHSS") && slot[KIND] == kind).collect()
}

/// The newest slot of an inode.
fn slot_of(ram: &RamDevice, ino: u64) -> (u64, Vec<u8>) {
    let slots = slots(ram, 1).into_iter().filter(|(_, slot)| u64_at(slot, INO) == ino);
    slots.max_by_key(|(_, slot)| u64_at(slot, STAMP)).unwrap()
}

/// Writes numbers to the identities at both ends of a slot.
fn forge(ram: &RamDevice, (block, mut slot): (u64, Vec<u8>), numbers: &[(usize, u64)]) {
    for end in [0, TAIL] {
        for (at, number) in numbers {
            slot[end + at..][..8].copy_from_slice(&number.to_le_bytes());
        }
    }
    seal_slot(&mut slot);
    put(ram, block, &slot);
}

fn fifo(ram: &RamDevice) -> u64 {
    open(ram).0.lookup(&cx(), Ino::ROOT, name("fifo")).unwrap().ino.0
}

/// Makes an image whose file "fifo" has this position in listings.
fn with_position(position: u64) -> RamDevice {
    let ram = image();
    let (block, mut slot) = slot_of(&ram, fifo(&ram.fork()));
    slot[POSITION..][..8].copy_from_slice(&position.to_le_bytes());
    seal_slot(&mut slot);
    put(&ram, block, &slot);
    ram
}

fn names(ram: &RamDevice) -> Vec<Vec<u8>> {
    let (fs, problems) = open(ram);
    assert_eq!(problems, []);
    list_bytes(&fs, Ino::ROOT)
}

// A sound image with one large position was mounted for writing. Files that were made then had
// positions that no later mount took: they were gone although they had been synced, and a repair
// lost them, too.
#[test]
fn files_that_are_made_on_a_forged_image_are_there_at_the_next_mount() {
    for position in [LAST_NEW - 3, LAST_NEW - 1, LAST - 1] {
        let ram = with_position(position);
        let before = names(&ram.fork()).len();
        let (fs, problems) = open(&ram);
        assert_eq!(problems, []);
        let mut made = 0;
        for at in 0..5 {
            match fs.mknod(&cx(), Ino::ROOT, name(&format!("new {at}")), &node(FileKind::Regular)) {
                Ok(_) => made += 1,
                Err(errno) => assert_eq!(errno, Errno::ENOSPC),
            }
        }
        let (from, to) = ((Ino::ROOT, name("fifo")), (Ino::ROOT, name("renamed")));
        let renamed = fs.rename(&cx(), from, to, RenameFlags::default());
        assert!(matches!(renamed, Ok(_) | Err(Errno::ENOSPC)));
        assert_eq!(fs.syncfs(&cx()), Ok(()));
        drop(fs);
        assert_eq!(names(&ram).len(), before + made, "from {position}");
        assert_eq!(made, if position < LAST_NEW - 1 { 2 } else { 0 });
    }
}

#[test]
fn a_position_that_leaves_no_room_is_a_problem_until_a_repair_gives_another_one() {
    for position in [LAST, NUMBERS - 1] {
        let ram = with_position(position);
        let ino = fifo(&ram.fork());
        assert_eq!(check(&device(&ram)).unwrap().problems, [LoadProblem::Position { ino }]);
        let (fs, _) = open(&ram.fork());
        assert!(fs.engine().is_read_only());
        drop(fs);
        let (repairs, _) = examine(&ram).unwrap();
        assert_eq!(repairs, [RepairAction::Position { ino }]);
        repair(&device(&ram), None, random()).unwrap();
        let before = names(&ram.fork()).len();
        let (fs, _) = open(&ram);
        fs.mknod(&cx(), Ino::ROOT, name("new"), &node(FileKind::Regular)).unwrap();
        fs.syncfs(&cx()).unwrap();
        drop(fs);
        assert_eq!(names(&ram).len(), before + 1);
    }
}

#[test]
fn numbers_that_leave_no_room_are_refused_with_a_reason() {
    let mut forged = Vec::new();
    for number in [LAST, NUMBERS - 1] {
        for numbers in [
            &[(INO, number)][..],
            &[(STAMP, number)],
            &[(GROUP, number), (INDEX, 1 << 32), (DURABLE, number - 1)],
        ] {
            let ram = image();
            forge(&ram, slot_of(&ram, fifo(&ram.fork())), numbers);
            forged.push(ram);
        }
        let changes: [fn(&mut Superblock, u64); 3] =
            [|s, to| s.epoch = to, |s, to| s.durable = to, |s, to| s.next_ino = to];
        for change in changes {
            let ram = image();
            let mut superblock = Superblock::decode(&get(&ram, COPIES[0])).unwrap();
            change(&mut superblock, number);
            COPIES.iter().for_each(|block| put(&ram, *block, &superblock.encode()));
            forged.push(ram);
        }
    }
    for number in [LAST_OPENED, LAST - 2] {
        let ram = image();
        forge(&ram, slot_of(&ram, fifo(&ram.fork())), &[(STAMP, number)]);
        let opened = Uhs::open(device(&ram), OPTIONS, random()).map(drop);
        assert_eq!(opened, Err(StoreError::Numbers), "not for writing");
        assert_eq!(check(&device(&ram)).unwrap().problems, []);
    }
    for (at, ram) in forged.iter().enumerate() {
        let opened = Uhs::open(device(&ram.fork()), OPTIONS, random()).map(drop);
        assert_eq!(opened, Err(StoreError::Numbers), "image {at}");
        assert_eq!(check(&device(ram)), Err(StoreError::Numbers));
        let repaired = repair(&device(&ram.fork()), None, random());
        assert_eq!(repaired, Err(StoreError::Numbers));
        let tables = crate::image::tables(ram, None, &defuse_fs::source::NoWatch);
        assert!(tables.is_ok(), "it can be looked at");
    }
}

// A mount that could write left an image that no later one took.
#[test]
fn an_image_with_the_largest_numbers_of_inodes_can_be_mounted_again_and_again() {
    for number in [LAST_NEW - 2, LAST_NEW, LAST - 2] {
        let ram = image();
        forge(&ram, slot_of(&ram, fifo(&ram.fork())), &[(INO, number)]);
        repair(&device(&ram), None, random()).unwrap();
        let before = names(&ram.fork()).len();
        for round in 0..3 {
            let (fs, problems) = open(&ram);
            assert_eq!(problems, []);
            let text = format!("new {round}");
            let made = fs.mknod(&cx(), Ino::ROOT, name(&text), &node(FileKind::Regular));
            assert!(matches!(made, Ok(_) | Err(Errno::ENOSPC)));
            assert_eq!(fs.syncfs(&cx()), Ok(()));
            drop(fs);
        }
        assert!(names(&ram).len() >= before);
    }
}

// A list that stated that the root was removed hid each root that a repair had made.
#[test]
fn a_list_of_removed_inodes_with_the_root_hides_no_root() {
    let ram = image();
    let (block, mut slot) = slots(&ram, 2).pop().unwrap();
    slot[IDENTITY..][..8].copy_from_slice(&ROOT.to_le_bytes());
    seal_slot(&mut slot);
    put(&ram, block, &slot);
    assert_eq!(check(&device(&ram)).unwrap().problems, []);
    let (repairs, walk) = examine(&ram).unwrap();
    assert!(repairs.is_empty() && walk.len() > 5, "{repairs:?}");
}

#[test]
fn lost_copies_of_the_superblock_are_found_and_written_anew() {
    for lost in [&COPIES[..2], &COPIES[1..], &[COPIES[0], COPIES[2]]] {
        let ram = image();
        assert_eq!(check(&device(&ram)).unwrap().lost_superblocks, []);
        lost.iter().for_each(|block| put(&ram, *block, &[0; BLOCK]));
        let report = check(&device(&ram)).unwrap();
        assert_eq!((&report.lost_superblocks[..], report.problems), (lost, Vec::new()));
        let mounted = ram.fork();
        drop(open(&mounted));
        assert_eq!(check(&device(&mounted)).unwrap().lost_superblocks, [], "a mount writes all");
        let repairs = repair(&device(&ram), None, random()).unwrap();
        let written = |block: &u64| RepairAction::Superblock { block: *block };
        assert_eq!(repairs, lost.iter().map(written).collect::<Vec<_>>());
        assert_eq!(check(&device(&ram)).unwrap().lost_superblocks, []);
        assert_eq!(repair(&device(&ram), None, random()).unwrap(), []);
    }
}

/// Only a copy that had lost its first bytes was reported: all other damage passed for an
/// interrupted write.
#[test]
fn damaged_copies_of_the_superblock_are_told_and_written_anew() {
    const UUID: usize = 16;
    const EPOCH: usize = 32;
    let ram = image();
    // After a clean end, all copies are durable and equal.
    drop(open(&ram));
    let good = get(&ram, COPIES[0]);
    assert!(COPIES.iter().all(|block| get(&ram, *block) == good));
    let mut garbage = good.clone();
    random().fill(&mut garbage[8..]);
    let fields = |change: &dyn Fn(&mut [u8]), is_sealed: bool| {
        let mut bytes = good.clone();
        change(&mut bytes);
        if is_sealed {
            super::damage::seal(&mut bytes);
        }
        bytes
    };
    let older = |bytes: &mut [u8]| {
        let epoch = u64_at(bytes, EPOCH) - COPIES.len() as u64;
        bytes[EPOCH..][..8].copy_from_slice(&epoch.to_le_bytes());
    };
    let damages = [
        ("zeros", vec![0; BLOCK], true),
        ("garbage", garbage, true),
        ("ones", [&good[..8], &[0xff; BLOCK - 8][..]].concat(), true),
        ("another uuid", fields(&|bytes| bytes[UUID] ^= 1, false), true),
        (
            "that of another file system",
            fields(
                &|bytes| {
                    bytes[UUID] ^= 1;
                    older(bytes)
                },
                true,
            ),
            true,
        ),
        ("that of an earlier time", fields(&older, true), true),
        ("a far epoch", fields(&|bytes| bytes[EPOCH + 5] ^= 1, false), true),
        ("a chunk outside", fields(&|bytes| bytes[112 + 3] = 0xff, false), true),
        ("something after the chunks", fields(&|bytes| bytes[BLOCK - 5] ^= 1, false), true),
        // A power failure may leave these.
        ("the checksum", fields(&|bytes| bytes[BLOCK - 4] ^= 1, false), false),
        ("the next version, torn", fields(&|bytes| bytes[EPOCH] += 1, false), false),
        ("the durable group", fields(&|bytes| bytes[DURABLE] ^= 1, false), false),
    ];
    for (what, bytes, is_error) in damages {
        for block in COPIES {
            let ram = ram.fork();
            put(&ram, block, &bytes);
            let report = check(&device(&ram)).unwrap();
            let found = (&report.lost_superblocks[..], &report.unfinished_superblocks[..]);
            let expected: (&[u64], &[u64]) =
                if is_error { (&[block], &[]) } else { (&[], &[block]) };
            assert_eq!(found, expected, "{what}, {block}");
            assert_eq!(report.problems, [], "{what}");
            let repairs = repair(&device(&ram), None, random()).unwrap();
            assert_eq!(repairs, [RepairAction::Superblock { block }], "{what}");
            let again = check(&device(&ram)).unwrap();
            assert_eq!((again.lost_superblocks, again.unfinished_superblocks), (vec![], vec![]));
            assert_eq!(repair(&device(&ram), None, random()).unwrap(), [], "{what}");
        }
    }
}
