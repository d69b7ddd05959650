//! Mounts that may not write.

use std::sync::Arc;

use defuse_block::{BlockDevice, BlockingQueue, RamDevice, SimDevice};
use defuse_fs::{Errno, FileKind, FileSystem, Ino};

use super::{BLOCKS, OPTIONS, cx, make_fresh, name, node, open, random, snapshot};
use crate::commit::CommitRules;
use crate::{Uhs, UhsOptions, check, store};

/// Reads of 96 slots were made in a region for two of them. A region gives runs out of blocks of a
/// power of two, so the second one failed with ENOMEM, and with it the mount.
#[test]
fn a_file_system_with_any_number_of_slots_can_be_checked() {
    let device: Arc<dyn BlockDevice> = Arc::new(defuse_block::RamDevice::new(4096, 16 * 1024));
    Uhs::make(Arc::clone(&device), (0o755, 0, 0), &mut random()).unwrap();
    let (fs, _) = Uhs::open(Arc::clone(&device), OPTIONS, super::random()).unwrap();
    for round in 0..12 {
        for file in 0..250 {
            let text = format!("{round}-{file}");
            fs.mknod(&cx(), Ino::ROOT, name(&text), &node(FileKind::Regular)).unwrap();
        }
        fs.syncfs(&cx()).unwrap();
        assert_eq!(check(&device).unwrap().problems, [], "{round}");
    }
    assert_eq!(check(&device).unwrap().inodes, 3001);
}

/// Mounting zeroed slots and wrote a superblock before it had looked at the inodes.
#[test]
fn a_mount_that_is_read_only_or_finds_damage_writes_nothing() {
    let sim = SimDevice::from_ram(&make_fresh(), 1);
    let (fs, _) = open(sim.clone(), CommitRules::ALL);
    for text in ["a", "b", "c", "d"] {
        fs.mknod(&cx(), Ino::ROOT, name(text), &node(FileKind::Regular)).unwrap();
    }
    fs.syncfs(&cx()).unwrap();
    fs.mknod(&cx(), Ino::ROOT, name("e"), &node(FileKind::Regular)).unwrap();
    fs.mknod(&cx(), Ino::ROOT, name("f"), &node(FileKind::Regular)).unwrap();
    fs.syncfs(&cx()).unwrap();
    let mut cuts = sim.power_cuts();
    let mut random = random();
    let mut unfinished = 0;
    while let Some(cut) = cuts.next() {
        let left = SimDevice::from_ram(&cut.sample(&mut random), 2);
        let device: Arc<dyn BlockDevice> = Arc::new(left.clone());
        unfinished += check(&device).unwrap().unfinished;
        let options = UhsOptions { read_only: true, ..OPTIONS };
        let (fs, problems) = Uhs::open(device, options, super::random()).unwrap();
        assert_eq!(problems, []);
        let made = fs.mknod(&cx(), Ino::ROOT, name("g"), &node(FileKind::Regular));
        assert_eq!(made.map(drop), Err(Errno::EROFS));
        assert_eq!(fs.syncfs(&cx()), Ok(()));
        drop(fs);
        assert_eq!(left.events(), 0, "event {}", cut.event_index());
    }
    assert!(unfinished > 0, "nothing was there to undo");
    // A byte of a slot that counts changes at rest.
    fs.abandon();
    let damaged = SimDevice::from_ram(&sim.copy_present(), 2);
    let mut line = BlockingQueue::new(&damaged).unwrap();
    let mut bytes = [0; 4096];
    line.read(514, &mut bytes).unwrap();
    bytes[200] ^= 1;
    line.write(514, &bytes).unwrap();
    let before = damaged.events();
    let (fs, problems) = open(damaged.clone(), CommitRules::ALL);
    assert!(!problems.is_empty());
    drop(fs);
    assert_eq!(damaged.events(), before);
}

#[test]
fn a_power_failure_while_a_file_system_grows_leaves_one_of_both_sizes_and_all_files() {
    let (small, large) = (make_fresh(), RamDevice::new(4096, 3 * BLOCKS));
    let (fs, _) = open(small.clone(), CommitRules::ALL);
    for text in ["a", "b"] {
        fs.mknod(&cx(), Ino::ROOT, name(text), &node(FileKind::Regular)).unwrap();
    }
    let before = snapshot(&fs);
    drop(fs);
    let mut bytes = vec![0; BLOCKS as usize * 4096];
    BlockingQueue::new(&small).unwrap().read(0, &mut bytes).unwrap();
    BlockingQueue::new(&large).unwrap().write(0, &bytes).unwrap();
    let sim = SimDevice::from_ram(&large, 1);
    store::grow(&sim, 2 * BLOCKS).unwrap();
    let (mut cuts, mut sizes) = (sim.power_cuts(), Vec::new());
    while let Some(cut) = cuts.next() {
        for ram in cut.combinations() {
            let report = check(&(Arc::new(ram.clone()) as Arc<dyn BlockDevice>)).unwrap();
            assert_eq!(report.problems, [], "event {}", cut.event_index());
            assert_eq!(report.lost_superblocks, [], "event {}", cut.event_index());
            sizes.push(report.blocks);
            let (fs, problems) = open(ram, CommitRules::ALL);
            assert!(problems.is_empty() && snapshot(&fs) == before, "event {}", cut.event_index());
        }
    }
    assert_eq!((sizes.first(), sizes.last()), (Some(&BLOCKS), Some(&(2 * BLOCKS))));
    assert!(sizes.iter().all(|size| [BLOCKS, 2 * BLOCKS].contains(size)), "{sizes:?}");
}
