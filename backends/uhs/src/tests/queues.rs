//! Threads that share queues of the device, in every mode: the state after a power failure is as
//! without sharing.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};

use defuse_block::sim::SimOpKind;
use defuse_block::{BlockDevice, BlockingQueue, RamDevice, SimDevice};
use defuse_fs::{Fh, File, FileKind, FileSystem, Ino, SliceSource, WriteArgs, WriteBuf};

use super::crash::{CrashPlan, play_by};
use super::random_operations::NameWorkload;
use super::{OPTIONS, TreeSnapshot, cx, make_fresh, name, node, open_with, snapshot};
use crate::commit::CommitRules;
use crate::{SeparationMode, StoreError, Uhs, UhsOptions};

/// One of the modes with one to four queues, by a number.
pub(super) fn make_shared_options(number: u64) -> UhsOptions {
    let mode =
        [SeparationMode::Off, SeparationMode::Static, SeparationMode::Learned][number as usize % 3];
    UhsOptions { separation: Some(mode), queues: Some(1 + (number / 3 % 4) as u32), ..OPTIONS }
}

#[test]
fn after_a_power_failure_names_are_those_of_one_moment_in_every_mode() {
    let mut judged = 0;
    for seed in 0..240 {
        let by = CrashPlan {
            options: make_shared_options(seed),
            rules: CommitRules::ALL,
            lies: false,
            syncs_files: false,
            divides: false,
            holds: false,
        };
        judged += play_by(seed, by).unwrap_or_else(|why| panic!("seed {seed}: {why}"));
    }
    assert!(judged > 4000, "{judged} states");
    println!("{judged} states");
}

/// A mode that hides operations in flight would go unnoticed otherwise.
#[test]
fn rules_that_are_broken_are_noticed_in_every_mode() {
    for number in 0..12 {
        let by = CrashPlan {
            options: make_shared_options(number),
            rules: CommitRules::ALL,
            lies: false,
            syncs_files: false,
            divides: false,
            holds: false,
        };
        let lies = CrashPlan { lies: true, ..by };
        assert!((0..60).any(|seed| play_by(seed, lies).is_err()), "mode {number}: flushes");
    }
    let rules = CommitRules { data_is_first: false, ..CommitRules::ALL };
    for number in 0..3 {
        let by = CrashPlan {
            options: make_shared_options(number + 9),
            rules,
            lies: false,
            syncs_files: false,
            divides: false,
            holds: false,
        };
        assert!((0..4000).any(|seed| play_by(seed, by).is_err()), "mode {number}: data");
    }
}

/// All operations of the device in order, the names and data in the end, and a checksum of every
/// byte of the device.
fn replay(
    ram: &RamDevice,
    options: UhsOptions,
    seed: u64,
) -> (Vec<(SimOpKind, u64, u64)>, TreeSnapshot, u32) {
    let sim = SimDevice::from_ram(ram, seed);
    let log = Arc::new(Mutex::new(Vec::new()));
    let noted = Arc::clone(&log);
    sim.fail(move |victim| {
        noted.lock().unwrap().push((victim.call, victim.block, victim.blocks));
        None
    });
    let rules = CommitRules { early_run: 2, stepped_time: true, ..CommitRules::ALL };
    let (fs, _) = open_with(sim.clone(), options, rules);
    let mut player = NameWorkload { fs: &fs, random: fastrand::Rng::with_seed(seed) };
    for _ in 0..60 {
        player.step();
    }
    let found = snapshot(&fs);
    drop(fs);
    sim.end_faults();
    let log = std::mem::take(&mut *log.lock().unwrap());
    (log, found, checksum(&sim.copy_present()))
}

/// A checksum of all blocks.
fn checksum(ram: &RamDevice) -> u32 {
    let facts = ram.properties().clone();
    let mut line = BlockingQueue::new(ram).unwrap();
    let mut block = vec![0; facts.block_size as usize];
    (0..facts.blocks).fold(0, |sum, at| {
        line.read(at, &mut block).unwrap();
        crc32c::crc32c_append(sum, &block)
    })
}

#[test]
fn a_seed_replays_every_operation_and_every_byte_of_the_device_in_every_mode() {
    let ram = make_fresh();
    for number in 0..12 {
        for seed in 0..6 {
            let (options, seed) = (make_shared_options(number), seed * 12 + number);
            let (first, second) = (replay(&ram, options, seed), replay(&ram, options, seed));
            assert!(first.0.len() > 20);
            assert!(first == second, "mode {number}, seed {seed}");
        }
    }
    // Operations in flight complete in another order, so that the modes differ.
    let differ = |seed| {
        replay(&ram, make_shared_options(9), seed).0
            != replay(&ram, make_shared_options(10), seed).0
    };
    assert!((0..40).any(differ));
}

fn write(fs: &Uhs, ino: Ino, offset: u64, len: usize) {
    let bytes = vec![offset as u8; len];
    let mut source = SliceSource::new(&bytes);
    let args = WriteArgs { offset, ..WriteArgs::default() };
    let file = File { ino, fh: Fh(0) };
    assert_eq!(fs.write(&cx(), file, args, &mut WriteBuf::new(&mut source)), Ok(len));
}

#[test]
fn figures_tell_depth_and_costs_of_each_queue() {
    let ram = make_fresh();
    let options = UhsOptions { queues: Some(2), ..make_shared_options(2) };
    let (fs, _) = open_with(SimDevice::from_ram(&ram, 1), options, CommitRules::ALL);
    let ino = fs.mknod(&cx(), Ino::ROOT, name("file"), &node(FileKind::Regular)).unwrap().ino;
    for at in 0..20 {
        write(&fs, ino, at * 40_000, 9000);
        fs.fsync(&cx(), File { ino, fh: Fh(0) }, false).unwrap();
    }
    let figures = fs.figures();
    let value = |wanted: &str| {
        figures.iter().find(|figure| figure.name == wanted).map(|figure| figure.value)
    };
    assert_eq!((value("queues"), value("queues_depth")), (Some(2), Some(64)));
    assert_eq!((value("queues_in_flight"), value("queue_2_in_flight")), (Some(0), Some(0)));
    assert_eq!(value("queues_waiting_small_writes"), Some(0));
    assert!(value("queue_1_small_write").is_some_and(|cost| cost > 0));
    assert_eq!(value("queue_3_in_flight"), None);
    for figure in &figures {
        let reported = include_str!("../../../../docs/statistics.md");
        let number = figure.name.split('_').nth(1).filter(|_| figure.name.starts_with("queue_"));
        let shown =
            number.map_or(figure.name.to_owned(), |number| figure.name.replacen(number, "N", 1));
        assert!(reported.contains(&format!("`{shown}`")), "docs/statistics.md lacks {shown}");
    }
    let names: BTreeSet<&str> = figures.iter().map(|figure| figure.name).collect();
    assert_eq!(names.len(), figures.len());
}

#[test]
fn without_the_option_no_queue_is_shared() {
    let (fs, _) = open_with(make_fresh(), OPTIONS, CommitRules::ALL);
    assert!(fs.figures().iter().all(|figure| !figure.name.starts_with("queue")));
}

/// A device with fewer queues than threads are to share.
struct FewQueuesDevice(RamDevice);

impl BlockDevice for FewQueuesDevice {
    fn properties(&self) -> &defuse_block::DeviceProperties {
        self.0.properties()
    }
    fn register(&self, region: &Arc<defuse_block::MemoryRegion>) -> defuse_block::Result<()> {
        self.0.register(region)
    }
    fn queue(&self, _: u32) -> defuse_block::Result<Box<dyn defuse_block::DeviceQueue>> {
        Err(defuse_block::Errno::BUSY)
    }
}

#[test]
fn a_device_with_too_few_queues_is_refused_with_the_option_to_change() {
    let opened =
        Uhs::open(Arc::new(FewQueuesDevice(make_fresh())), make_shared_options(9), super::random());
    let Err(error) = opened else { panic!("it was opened") };
    assert!(matches!(error, StoreError::Device { .. }));
    assert!(error.to_string().contains("queues="), "{error}");
}
