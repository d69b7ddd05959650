//! Damaged and forged images: every byte of every structure gets other values, with right checksums
//! and without.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use defuse_block::{BlockDevice, BlockingQueue, RamDevice, SimDevice};
use defuse_fs::{
    Errno, Fh, File, FileKind, FileSystem, Ino, Name, ReadArgs, ReadBuf, SetAttr, SliceSink,
    SliceSource, WriteArgs, WriteBuf,
};

use super::{OPTIONS, cx, list_bytes, make_fresh, name, node, open, random};
use crate::commit::CommitRules;
use crate::format::superblock::COPIES;
use crate::format::{BLOCK, NUMBERS};
use crate::names::ROOT;
use crate::store::survey;
use crate::{RepairAction, StoreError, Uhs, check, repair};

/// Bytes of an identity, and the offset of the identity at the end of a slot.
pub(super) const IDENTITY: usize = 96;
pub(super) const TAIL: usize = BLOCK - IDENTITY;

/// Inodes with their size and the beginning of their data.
pub(super) type InodeWalk = BTreeMap<u64, (u64, Vec<u8>)>;

/// The most that one image may take.
const LONGEST: Duration = Duration::from_secs(10);

fn write(fs: &Uhs, ino: Ino, offset: u64, bytes: &[u8]) {
    let mut source = SliceSource::new(bytes);
    let args = WriteArgs { offset, ..WriteArgs::default() };
    let file = File { ino, fh: Fh(0) };
    fs.write(&cx(), file, args, &mut WriteBuf::new(&mut source)).unwrap();
}

/// Makes an image with one of everything: directories, small and large files, a link, two names, an
/// inode with overflow records, and removals.
pub(super) fn image() -> RamDevice {
    let ram = make_fresh();
    // A snapshot would replace the content of the slots.
    let rules = CommitRules { snapshots: false, ..CommitRules::ALL };
    let (fs, _) = open(ram.clone(), rules);
    let make =
        |dir: Ino, text: &str, kind| fs.mknod(&cx(), dir, name(text), &node(kind)).unwrap().ino;
    let dir = fs.mkdir(&cx(), Ino::ROOT, name("dir"), &node(FileKind::Directory)).unwrap().ino;
    let below = fs.mkdir(&cx(), dir, name("below"), &node(FileKind::Directory)).unwrap().ino;
    write(&fs, make(below, "small", FileKind::Regular), 0, b"a few bytes");
    write(&fs, make(dir, "large", FileKind::Regular), 0, &[7; 50_000]);
    let linked = make(dir, "one", FileKind::Regular);
    fs.link(&cx(), linked, below, name("two")).unwrap();
    fs.symlink(&cx(), dir, name("link"), b"target", &node(FileKind::Symlink)).unwrap();
    make(Ino::ROOT, "fifo", FileKind::Fifo);
    let pieces = make(Ino::ROOT, "pieces", FileKind::Regular);
    for piece in 0..220 {
        write(&fs, pieces, piece * 8192, &[piece as u8; 4096]);
        if piece % 40 == 0 {
            fs.syncfs(&cx()).unwrap();
        }
    }
    for text in ["x", "y", "z"] {
        make(below, text, FileKind::Regular);
    }
    fs.syncfs(&cx()).unwrap();
    fs.unlink(&cx(), below, name("y")).unwrap();
    fs.setattr(&cx(), linked, None, &SetAttr { perm: Some(0o600), ..SetAttr::default() }).unwrap();
    fs.syncfs(&cx()).unwrap();
    drop(fs);
    ram
}

pub(super) fn get(ram: &RamDevice, block: u64) -> Vec<u8> {
    let mut bytes = vec![0; BLOCK];
    BlockingQueue::new(ram).unwrap().read(block, &mut bytes).unwrap();
    bytes
}

pub(super) fn put(ram: &RamDevice, block: u64, bytes: &[u8]) {
    BlockingQueue::new(ram).unwrap().write(block, bytes).unwrap();
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap())
}

pub(super) fn seal(bytes: &mut [u8]) {
    let end = bytes.len() - 4;
    let crc = crc32c::crc32c(&bytes[..end]);
    bytes[end..].copy_from_slice(&crc.to_le_bytes());
}

/// Makes the checksums of a slot right again.
pub(super) fn seal_slot(slot: &mut [u8]) {
    let len = (u32_at(slot, 80) as usize).min(TAIL - IDENTITY);
    let crc = crc32c::crc32c(&slot[IDENTITY..][..len]);
    for end in [0, TAIL] {
        slot[end + 84..][..4].copy_from_slice(&crc.to_le_bytes());
        seal(&mut slot[end..end + IDENTITY]);
    }
}

/// Everything that a walk finds.
fn walk_all(fs: &Uhs) -> InodeWalk {
    let mut found = BTreeMap::new();
    let mut dirs = vec![Ino::ROOT];
    let mut visits = 0;
    while let Some(dir) = dirs.pop() {
        visits += 1;
        assert!(visits < 1000, "a walk meets a directory again and again");
        for child in list_bytes(fs, dir) {
            let child = Name::new(&child).unwrap();
            let Ok(entry) = fs.lookup(&cx(), dir, child) else { continue };
            let mut size = entry.attr.size;
            let mut data = vec![0; size.min(60_000) as usize];
            match entry.attr.kind {
                FileKind::Directory => {
                    // The size of a directory depends on its entries.
                    (size, data) = (0, Vec::new());
                    dirs.push(entry.ino);
                }
                FileKind::Regular => {
                    let len = data.len();
                    let mut sink = SliceSink::new(&mut data);
                    let mut out = ReadBuf::new(&mut sink, len);
                    let file = File { ino: entry.ino, fh: Fh(0) };
                    let _ = fs.read(&cx(), file, ReadArgs::default(), &mut out);
                }
                _ => {}
            }
            found.insert(entry.ino.0, (size, data));
            assert!(found.len() < 1000, "a walk without an end");
        }
    }
    found
}

/// Mounts, walks, checks and repairs `ram`. After the repair nothing is wrong any more, and a
/// second repair finds nothing. Returns the repairs and the remaining inodes; `None` if no
/// superblock can be used.
pub(super) fn examine(ram: &RamDevice) -> Option<(Vec<RepairAction>, InodeWalk)> {
    let begun = Instant::now();
    let open = |ram: RamDevice| Uhs::open(Arc::new(ram), OPTIONS, random());
    let device = |ram: &RamDevice| Arc::new(ram.clone()) as Arc<dyn BlockDevice>;
    let report = match check(&device(ram)) {
        Ok(report) => report,
        Err(StoreError::Unusable(_) | StoreError::Short { .. } | StoreError::Numbers) => {
            assert!(open(ram.fork()).is_err() && repair(&device(ram), None, random()).is_err());
            return None;
        }
        Err(error) => panic!("{error}"),
    };
    let (fs, problems) = open(ram.fork()).unwrap();
    assert_eq!(problems, report.problems);
    walk_all(&fs);
    drop(fs);
    let mended = ram.fork();
    let repairs = repair(&device(&mended), None, random()).unwrap();
    let again = check(&device(&mended)).unwrap();
    assert_eq!(again.problems, [], "after {repairs:?}, before {:?}", report.problems);
    assert_eq!(repair(&device(&mended), None, random()).unwrap(), []);
    let (fs, problems) = open(mended).unwrap();
    assert_eq!(problems, []);
    let found = walk_all(&fs);
    // A forged extent may have all the space.
    let made = fs.mknod(&cx(), Ino::ROOT, name("new"), &node(FileKind::Regular));
    assert!(matches!(made, Ok(_) | Err(Errno::ENOSPC)), "{made:?}");
    let found_now = survey(ram, CommitRules::ALL).unwrap().found;
    let largest = found_now.next_ino.max(found_now.next_stamp).max(found_now.durable);
    let synced = fs.syncfs(&cx());
    // Forged numbers leave no room for further ones.
    assert!(synced.is_ok() || largest > NUMBERS / 2, "{synced:?}");
    assert!(begun.elapsed() < LONGEST, "{:?}", begun.elapsed());
    Some((repairs, found))
}

/// The values that a field gets.
fn values(old: u64, bytes: usize, other: u64, random: &mut fastrand::Rng) -> Vec<u64> {
    let max = u64::MAX >> (64 - 8 * bytes);
    let mut values =
        vec![0, 1, 2, max, max / 2, old ^ 1, (old + 1) & max, other, random.u64(..) & max];
    values.sort_unstable();
    values.dedup();
    values.retain(|value| *value != old);
    values
}

/// Places and values: all bytes, and all fields of 2, 4 and 8 bytes that begin at even places.
fn changes(bytes: &[u8], other: &[u8], random: &mut fastrand::Rng) -> Vec<(usize, usize, u64)> {
    let mut found = Vec::new();
    for at in 0..bytes.len() {
        for len in [1, 2, 4, 8] {
            if at + len > bytes.len() || len > 1 && at % 2 == 1 {
                continue;
            }
            let number = |of: &[u8]| {
                let mut value = [0; 8];
                let part = of.get(at..at + len).unwrap_or_default();
                value[..part.len()].copy_from_slice(part);
                u64::from_le_bytes(value)
            };
            let values = values(number(bytes), len, number(other), random);
            found.extend(values.into_iter().map(|value| (at, len, value)));
        }
    }
    found
}

fn set(bytes: &mut [u8], (at, len, value): (usize, usize, u64)) {
    bytes[at..at + len].copy_from_slice(&value.to_le_bytes()[..len]);
}

/// The slots that hold something: block and bytes.
fn slots(ram: &RamDevice) -> Vec<(u64, Vec<u8>)> {
    let all = (512..1024).map(|block| (block, get(ram, block)));
    all.filter(|(_, bytes)| bytes.starts_with(b"UHSS")).collect()
}

/// The changes that a test tries: `wanted` of them, or all with `DEFUSE_FULL`.
fn choose_some<T>(mut all: Vec<T>, wanted: usize, random: &mut fastrand::Rng) -> Vec<T> {
    random.shuffle(&mut all);
    if std::env::var_os("DEFUSE_FULL").is_none() {
        all.truncate(wanted);
    }
    all
}

#[test]
fn any_value_in_a_superblock_is_refused_or_harmless() {
    let ram = image();
    let mut random = random();
    let good = get(&ram, 0);
    let all = changes(&good[..160], &good[16..], &mut random);
    let (mut refused, mut used) = (0, 0);
    for change in choose_some(all, 400, &mut random) {
        let forged = ram.fork();
        let mut bytes = good.clone();
        set(&mut bytes, change);
        seal(&mut bytes);
        COPIES.iter().for_each(|block| put(&forged, *block, &bytes));
        match examine(&forged) {
            None => refused += 1,
            Some(_) => used += 1,
        }
    }
    assert!(refused > 50 && used > 50, "{refused} {used}");
}

/// A directory whose slot had the number of the root became the root, below one of its own
/// children: a walk had no end.
#[test]
fn no_walk_from_a_forged_root_meets_a_directory_twice() {
    let ram = image();
    let mut forgeries = 0;
    for (block, bytes) in slots(&ram) {
        let forged = ram.fork();
        let mut bytes = bytes.clone();
        for end in [0, TAIL] {
            bytes[end + 40..][..8].copy_from_slice(&ROOT.to_le_bytes());
            bytes[end + 48..][..8].copy_from_slice(&(1_u64 << 40).to_le_bytes());
        }
        seal_slot(&mut bytes);
        put(&forged, block, &bytes);
        examine(&forged).unwrap();
        forgeries += 1;
    }
    assert!(forgeries > 5, "{forgeries}");
}

#[test]
fn any_value_in_the_identity_of_a_slot_is_survived() {
    let ram = image();
    let mut random = random();
    let slots = slots(&ram);
    let mut all = Vec::new();
    for (block, bytes) in &slots {
        let (_, other) = &slots[random.usize(..slots.len())];
        let changes = changes(&bytes[..IDENTITY - 4], other, &mut random);
        all.extend(changes.into_iter().map(|change| (*block, change, random.bool())));
    }
    for (block, change, at_both_ends) in choose_some(all, 700, &mut random) {
        let forged = ram.fork();
        let mut bytes = get(&ram, block);
        set(&mut bytes, change);
        if at_both_ends {
            set(&mut bytes[TAIL..], change);
        }
        seal_slot(&mut bytes);
        put(&forged, block, &bytes);
        examine(&forged).unwrap();
    }
}

/// The repair leaves all other inodes unchanged, except for blocks that it reports.
#[test]
fn any_value_in_the_body_of_a_slot_is_survived_and_all_other_inodes_stay() {
    let ram = image();
    let mut random = random();
    let (_, before) = examine(&ram).unwrap();
    let live = survey(&ram, CommitRules::ALL).unwrap().found.live;
    let counts = |block: u64| live.values().any(|version| version.block == block);
    let slots: Vec<_> = slots(&ram).into_iter().filter(|(block, _)| counts(*block)).collect();
    let mut all = Vec::new();
    for (block, bytes) in &slots {
        let (_, other) = &slots[random.usize(..slots.len())];
        let body = &bytes[IDENTITY..][..u32_at(bytes, 80) as usize];
        let changes = changes(body, &other[IDENTITY..], &mut random);
        all.extend(changes.into_iter().map(|change| (*block, change)));
    }
    let mut mended = 0;
    for (block, change) in choose_some(all, 1500, &mut random) {
        let forged = ram.fork();
        let mut bytes = get(&ram, block);
        set(&mut bytes[IDENTITY..], change);
        seal_slot(&mut bytes);
        put(&forged, block, &bytes);
        let (repairs, after) = examine(&forged).unwrap();
        mended += u32::from(!repairs.is_empty());
        let removals = bytes[4] == 2;
        let itself = u64::from(u32_at(&bytes, 40));
        for (ino, file) in before.iter().filter(|(ino, _)| **ino != itself && !removals) {
            let lost = repairs
                .iter()
                .any(|r| matches!(r, RepairAction::Blocks { ino: loser, .. } if loser == ino));
            let what = || format!("block {block}, {change:?}, inode {ino}, {repairs:?}");
            match after.get(ino) {
                Some(found) => assert!(lost || found == file, "{}", what()),
                None => panic!("{}", what()),
            }
        }
    }
    assert!(mended > 200, "{mended}");
}

#[test]
fn any_value_in_blocks_of_records_is_survived() {
    let ram = image();
    let mut random = random();
    let outside = |(_, bytes): &(u64, Vec<u8>)| bytes[4] == 1 && bytes[IDENTITY + 12] != 0;
    let slots: Vec<(u64, Vec<u8>)> = slots(&ram).into_iter().filter(outside).collect();
    let (block, slot) = slots.iter().max_by_key(|(_, bytes)| u32_at(bytes, 48)).unwrap();
    let pointers = IDENTITY + 112 + 16;
    let leaf = u64::from(u32_at(slot, pointers));
    let good = get(&ram, leaf);
    let all = changes(&good[..200], &good[23..], &mut random);
    for (nth, change) in choose_some(all, 300, &mut random).into_iter().enumerate() {
        let forged = ram.fork();
        let mut bytes = good.clone();
        set(&mut bytes, change);
        put(&forged, leaf, &bytes);
        // One in three has a wrong checksum.
        if nth % 3 > 0 {
            let mut slot = slot.clone();
            slot[pointers + 8..][..4].copy_from_slice(&crc32c::crc32c(&bytes).to_le_bytes());
            seal_slot(&mut slot);
            put(&forged, *block, &slot);
        }
        examine(&forged).unwrap();
    }
}

#[test]
fn flipped_bits_are_survived() {
    let ram = image();
    let mut random = random();
    let blocks: Vec<u64> = slots(&ram).iter().map(|(block, _)| *block).chain(COPIES).collect();
    for _ in 0..400 {
        let forged = ram.fork();
        for _ in 0..random.usize(1..4) {
            let block = blocks[random.usize(..blocks.len())];
            let mut bytes = get(&forged, block);
            let at = random.usize(..BLOCK);
            bytes[at] ^= 1 << random.u8(..8);
            put(&forged, block, &bytes);
        }
        examine(&forged);
    }
}

/// A repair writes groups like a mount, so that the next repair after a power failure succeeds.
#[test]
fn a_repair_survives_a_power_failure_at_any_moment() {
    let ram = image();
    let mut random = random();
    let (_, before) = examine(&ram).unwrap();
    let slots = slots(&ram);
    let (mut states, mut seed) = (0, 0);
    while states < 300 {
        seed += 1;
        let forged = ram.fork();
        let mut itself = Vec::new();
        for _ in 0..3 {
            let (block, mut bytes) = slots[random.usize(..slots.len())].clone();
            let len = u32_at(&bytes, 80) as usize;
            bytes[IDENTITY + random.usize(..len.max(1))] ^= 1 << random.u8(..8);
            if bytes[4] == 2 {
                continue;
            }
            if random.bool() {
                seal_slot(&mut bytes);
            }
            put(&forged, block, &bytes);
            itself.push(u64::from(u32_at(&bytes, 40)));
        }
        let sim = SimDevice::from_ram(&forged, seed);
        let device: Arc<dyn BlockDevice> = Arc::new(sim.clone());
        let repairs = repair(&device, None, super::random()).unwrap();
        let mut cuts = sim.power_cuts();
        while let Some(cut) = cuts.next() {
            if repairs.is_empty() || random.u8(..4) > 0 {
                continue;
            }
            let (again, after) = examine(&cut.sample(&mut random)).unwrap();
            states += 1;
            for (ino, file) in before.iter().filter(|(ino, _)| !itself.contains(ino)) {
                let lost = |repair: &RepairAction| matches!(repair, RepairAction::Blocks { ino: loser, .. } if loser == ino);
                let good = repairs.iter().chain(&again).any(lost) || after.get(ino) == Some(file);
                assert!(good, "seed {seed}, event {}: inode {ino}, {repairs:?}", cut.event_index());
            }
        }
    }
}
