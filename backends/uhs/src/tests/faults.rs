//! Devices that fail, and devices that are full.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use defuse_block::sim::SimOpKind;
use defuse_block::{BlockDevice, Errno as Failure, RamDevice, SimDevice};
use defuse_fs::{Errno, Fh, File, FileKind, FileSystem, Ino, SliceSource, WriteArgs, WriteBuf};

use super::crash::CrashRun;
use super::random_operations::NameWorkload;
use super::{EARLY, OPTIONS, cx, device, make_fresh, name, node, random};
use crate::commit::CommitRules;
use crate::{Uhs, check};

/// The operations of the device that fail.
#[derive(Clone, Copy, Debug)]
enum FaultPlan {
    None,
    /// The operation with this number.
    One(u64),
    /// All operations of one kind from this number on.
    From(u64, SimOpKind),
}

/// Makes a device on which operations fail while `armed` is set. Also returns the flag, and the
/// number of operations while it was set.
fn make_failing(
    ram: &RamDevice,
    seed: u64,
    fails: FaultPlan,
) -> (SimDevice, Arc<AtomicBool>, Arc<AtomicU64>) {
    let sim = device(ram, seed);
    let (armed, count) = (Arc::new(AtomicBool::new(true)), Arc::new(AtomicU64::new(0)));
    let (is_armed, counted) = (armed.clone(), count.clone());
    sim.fail(move |victim| {
        if !is_armed.load(Ordering::Relaxed) {
            return None;
        }
        let number = counted.fetch_add(1, Ordering::Relaxed);
        let hit = match fails {
            FaultPlan::None => false,
            FaultPlan::One(one) => number == one,
            FaultPlan::From(first, call) => number >= first && victim.call == call,
        };
        hit.then_some(Failure::IO)
    });
    (sim, armed, count)
}

/// Performs random operations on a failing device, and judges the state that a mount finds
/// afterwards. Returns the number of operations of the device.
fn suffer(seed: u64, fails: FaultPlan) -> Result<u64, String> {
    let (sim, armed, count) = make_failing(&make_fresh(), seed, fails);
    let rules = if seed.is_multiple_of(2) { CommitRules::ALL } else { EARLY };
    let opened = Uhs::open_by(Arc::new(sim.clone()), OPTIONS, rules, random());
    let Ok((fs, problems)) = opened else {
        sim.end_faults();
        let report = check(&(Arc::new(sim.copy_present()) as Arc<dyn BlockDevice>));
        let report = report.map_err(|error| format!("the mount failed, and then: {error}"))?;
        return match report.problems.is_empty() && report.inodes == 1 {
            true => Ok(count.load(Ordering::Relaxed)),
            false => Err(format!("the mount failed, and then: {report:?}")),
        };
    };
    if !problems.is_empty() {
        // A read failed.
        return Ok(count.load(Ordering::Relaxed));
    }
    armed.store(false, Ordering::Relaxed);
    let mut run = CrashRun::begin(sim.clone(), &fs);
    run.loses_data = matches!(fails, FaultPlan::From(_, SimOpKind::Write));
    let mut player = NameWorkload { fs: &fs, random: fastrand::Rng::with_seed(seed) };
    let mut failed = false;
    for _ in 0..60 {
        armed.store(true, Ordering::Relaxed);
        let synced = player.step();
        let again = fs.syncfs(&cx());
        armed.store(false, Ordering::Relaxed);
        if failed && again.is_ok() {
            return Err("a sync succeeds after one that failed".to_owned());
        }
        failed |= again.is_err();
        run.note(&fs, synced && again.is_ok() || again.is_ok());
    }
    armed.store(true, Ordering::Relaxed);
    drop(fs);
    sim.end_faults();
    run.judge(run.durable(), &sim.copy_present(), CommitRules::ALL)?;
    let mut cuts = sim.power_cuts();
    let cut = cuts.last();
    let mut random = fastrand::Rng::with_seed(seed);
    for _ in 0..3 {
        run.judge(run.durable(), &cut.sample(&mut random), CommitRules::ALL)?;
    }
    Ok(count.load(Ordering::Relaxed))
}

#[test]
fn whatever_fails_of_the_device_nothing_that_was_acknowledged_is_lost() {
    let mut sufferings = 0;
    for seed in 0..5 {
        let operations = suffer(seed, FaultPlan::None).unwrap();
        assert!(operations > 40, "{operations}");
        for number in 0..operations {
            let kinds =
                [SimOpKind::Read, SimOpKind::Write, SimOpKind::Flush].map(|call| (number, call));
            let from = kinds.iter().filter(|_| number % 5 == seed);
            let fails = from.map(|(number, call)| FaultPlan::From(*number, *call));
            for fails in fails.chain([FaultPlan::One(number)]) {
                suffer(seed, fails).unwrap_or_else(|why| panic!("seed {seed}, {fails:?}: {why}"));
                sufferings += 1;
            }
        }
    }
    println!("{sufferings} devices");
}

/// The error of an operation that may find no space.
fn expect_unless_full<T>(result: Result<T, Errno>) -> Option<T> {
    match result {
        Ok(value) => Some(value),
        Err(Errno::ENOSPC | Errno::EEXIST) => None,
        Err(errno) => panic!("{errno}"),
    }
}

#[test]
fn a_full_device_says_so_at_once_and_every_sync_succeeds() {
    for (seed, len) in [(1, 0), (2, 100_000), (3, 5000), (4, 2000)] {
        let ram = make_fresh();
        let (fs, _) = Uhs::open(Arc::new(ram.clone()), OPTIONS, random()).unwrap();
        let free = fs.statfs(&cx(), Ino::ROOT).unwrap().blocks_free;
        let mut random = fastrand::Rng::with_seed(seed);
        let (mut files, mut full) = (Vec::new(), 0);
        for number in 0.. {
            let text = format!("{number}");
            let made = fs.mknod(&cx(), Ino::ROOT, name(&text), &node(FileKind::Regular));
            let entry = expect_unless_full(made);
            full += u32::from(entry.is_none());
            if let Some(entry) = entry {
                let mut bytes = vec![0; random.usize(len / 2..=len)];
                random.fill(&mut bytes);
                let mut source = SliceSource::new(&bytes);
                let file = File { ino: entry.ino, fh: Fh(0) };
                let mut data = WriteBuf::new(&mut source);
                let written = fs.write(&cx(), file, WriteArgs::default(), &mut data);
                full += u32::from(expect_unless_full(written) != Some(bytes.len()));
                fs.forget(entry.ino, 1);
                files.push(text);
            }
            if random.u8(..8) == 0 {
                assert_eq!(fs.syncfs(&cx()), Ok(()), "seed {seed}, file {number}");
            }
            if full > 50 {
                break;
            }
        }
        assert_eq!(fs.syncfs(&cx()), Ok(()));
        let report = check(&(Arc::new(ram.fork()) as Arc<dyn BlockDevice>)).unwrap();
        assert_eq!(report.problems, []);
        assert_eq!(report.inodes, files.len() as u64 + 1);
        // On a full device files can be removed, and that gives their space back.
        for text in files {
            fs.unlink(&cx(), Ino::ROOT, name(&text)).unwrap();
        }
        assert_eq!(fs.syncfs(&cx()), Ok(()));
        let slots = fs.statfs(&cx(), Ino::ROOT).unwrap().blocks_free;
        assert!(slots <= free && slots > free / 4, "{slots} of {free}");
        drop(fs);
        assert_eq!(check(&(Arc::new(ram) as Arc<dyn BlockDevice>)).unwrap().problems, []);
    }
}
