//! A repair in cases where it is unknown if the newest groups were complete.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use defuse_block::sim::SimOpKind;
use defuse_block::{BlockDevice, Errno, SimDevice};
use defuse_fs::source::NewestChanges;
use defuse_fs::source::NoWatch;
use defuse_fs::{FileKind, FileSystem, Ino, SetAttr};

use super::{cx, list, make_fresh, name, node, open, random};
use crate::commit::{CommitRules, ScannedSlot};
use crate::store::survey_with_slots;
use crate::{RepairAction, StoreError, check, repair};

/// A device that was switched off after a sync that changed the modes of the files a, b and c.
/// Since then, the slot of b cannot be read.
struct UnreadableSlotDevice {
    sim: SimDevice,
    /// The inodes of the files, in the order of their names.
    inos: [Ino; 3],
    block: u64,
}

impl UnreadableSlotDevice {
    fn new() -> UnreadableSlotDevice {
        let ram = make_fresh();
        let (fs, _) = open(ram.clone(), CommitRules::ALL);
        let make =
            |text| fs.mknod(&cx(), Ino::ROOT, name(text), &node(FileKind::Regular)).unwrap().ino;
        let inos = ["a", "b", "c"].map(make);
        fs.syncfs(&cx()).unwrap();
        for ino in inos {
            let set = SetAttr { perm: Some(0o600), ..SetAttr::default() };
            fs.setattr(&cx(), ino, None, &set).unwrap();
        }
        // The group is acknowledged, and no slot states that it is durable yet.
        fs.syncfs(&cx()).unwrap();
        fs.abandon();
        let mut newest = (0, 0);
        let see = |scan: &[(u64, ScannedSlot)]| {
            for (block, scanned) in scan {
                if let ScannedSlot::Whole(identity, _) = scanned
                    && identity.ino == inos[1].0
                {
                    newest = newest.max((identity.stamp, *block));
                }
            }
        };
        survey_with_slots(&ram, CommitRules::ALL, see, &NoWatch).unwrap();
        let sim = SimDevice::from_ram(&ram, 1);
        let failing = UnreadableSlotDevice { sim, inos, block: newest.1 };
        failing.fail();
        failing
    }

    /// Makes reads of the block fail until it is written.
    fn fail(&self) {
        let (block, good) = (self.block, Arc::new(AtomicU64::new(0)));
        self.sim.fail(move |victim| {
            let inside = (victim.block..victim.block + victim.blocks).contains(&block);
            if inside && victim.call == SimOpKind::Write {
                good.store(1, Ordering::Relaxed);
            }
            let bad = inside && victim.call == SimOpKind::Read && good.load(Ordering::Relaxed) == 0;
            bad.then_some(Errno::IO)
        });
    }

    fn device(&self) -> Arc<dyn BlockDevice> {
        Arc::new(self.sim.clone())
    }

    /// The modes of the files after a repair that leaves nothing to repair.
    fn modes(&self, newest: NewestChanges) -> (Vec<RepairAction>, Vec<Option<u32>>) {
        let repairs = repair(&self.device(), Some(newest), random()).unwrap();
        assert_eq!(check(&self.device()).unwrap().problems, []);
        assert_eq!(repair(&self.device(), None, random()), Ok(Vec::new()));
        let (fs, problems) = open(self.sim.clone(), CommitRules::ALL);
        assert_eq!(problems, []);
        let names = list(&fs, Ino::ROOT);
        let modes = ["a", "b", "c"].map(|text| {
            let found = fs.lookup(&cx(), Ino::ROOT, name(text)).ok();
            assert_eq!(found.is_some(), names.iter().any(|name| name == text));
            found.map(|entry| entry.attr.perm)
        });
        (repairs, modes.to_vec())
    }
}

/// A repair voided groups that had been acknowledged, because a slot of theirs could not be read
/// any more.
#[test]
fn a_repair_asks_before_it_undoes_changes_that_may_have_been_acknowledged() {
    let failing = UnreadableSlotDevice::new();
    let before = failing.sim.copy_present();
    let error = repair(&failing.device(), None, random()).unwrap_err();
    let StoreError::Doubtful(doubt) = &error else { panic!("{error}") };
    assert_eq!(doubt.unreadable, [failing.block]);
    let written: Vec<u64> = doubt.written.iter().map(|written| written.ino).collect();
    assert_eq!(written, [failing.inos[0].0, failing.inos[2].0]);
    let text = error.to_string();
    assert!(
        text.contains("\"a\" in directory 1") && text.contains("\"c\" in directory 1"),
        "{text}"
    );
    assert!(text.contains(&failing.block.to_string()), "{text}");
    // Nothing was written.
    let bytes = |ram: &defuse_block::RamDevice| {
        let mut all = vec![0; (super::BLOCKS * 4096) as usize];
        defuse_block::BlockingQueue::new(ram).unwrap().read(0, &mut all).unwrap();
        all
    };
    assert!(bytes(&before) == bytes(&failing.sim.copy_present()));
}

#[test]
fn doubtful_changes_are_kept_as_far_as_they_can_be_read_or_undone() {
    let (repairs, modes) = UnreadableSlotDevice::new().modes(NewestChanges::Undo);
    assert_eq!(modes, [Some(0o644); 3]);
    assert!(repairs.iter().any(|repair| matches!(repair, RepairAction::Unfinished { slots: 2 })));
    let failing = UnreadableSlotDevice::new();
    let (repairs, modes) = failing.modes(NewestChanges::Keep);
    assert_eq!(modes, [Some(0o600), Some(0o644), Some(0o600)]);
    assert_eq!(repairs, [RepairAction::Slot { block: failing.block }]);
}
