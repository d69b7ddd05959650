//! All sequences of one and two operations, each followed by no sync or by one sync of each kind,
//! and sequences by which programs keep their files safe: with power failures at every moment.

use std::sync::Arc;

use defuse_block::{RamDevice, SimDevice};
use defuse_fs::{
    Entry, Fh, File, FileKind, FileSystem, Ino, OpenFlags, RenameFlags, SetAttr, SliceSource,
    WriteArgs, WriteBuf,
};

use super::crash::CrashRun;
use super::queues::make_shared_options;
use super::{OPTIONS, TreeSnapshot, cx, make_fresh, name, node, open, random};
use crate::commit::CommitRules;
use crate::{Uhs, UhsOptions};

/// A file by its path: at most one directory.
fn find(fs: &Uhs, path: &str) -> Option<Entry> {
    let (dir, last) = parent(fs, path)?;
    fs.lookup(&cx(), dir, name(last)).ok()
}

fn parent<'a>(fs: &Uhs, path: &'a str) -> Option<(Ino, &'a str)> {
    match path.split_once('/') {
        None => Some((Ino::ROOT, path)),
        Some((dir, last)) => Some((fs.lookup(&cx(), Ino::ROOT, name(dir)).ok()?.ino, last)),
    }
}

fn make(fs: &Uhs, path: &str, kind: FileKind) {
    let Some((dir, last)) = parent(fs, path) else { return };
    let _ = match kind {
        FileKind::Directory => fs.mkdir(&cx(), dir, name(last), &node(kind)),
        FileKind::Symlink => fs.symlink(&cx(), dir, name(last), b"to", &node(kind)),
        _ => fs.mknod(&cx(), dir, name(last), &node(kind)),
    };
}

fn unlink(fs: &Uhs, path: &str) {
    let Some((dir, last)) = parent(fs, path) else { return };
    let _ = fs.unlink(&cx(), dir, name(last));
}

fn rmdir(fs: &Uhs, path: &str) {
    let Some((dir, last)) = parent(fs, path) else { return };
    let _ = fs.rmdir(&cx(), dir, name(last));
}

fn rename(fs: &Uhs, from: &str, to: &str, flags: u32) {
    let (Some(from), Some(to)) = (parent(fs, from), parent(fs, to)) else { return };
    let (from, to) = ((from.0, name(from.1)), (to.0, name(to.1)));
    let _ = fs.rename(&cx(), from, to, RenameFlags(flags));
}

fn link(fs: &Uhs, from: &str, to: &str) {
    let (Some(from), Some((dir, last))) = (find(fs, from), parent(fs, to)) else { return };
    let _ = fs.link(&cx(), from.ino, dir, name(last));
}

/// Writes `len` bytes, with `mark` in each sector.
fn write(fs: &Uhs, path: &str, offset: u64, len: usize, mark: u8) {
    write_as(fs, path, (offset, 0), len, mark);
}

/// Writes `len` bytes past the cache, with `mark` in each sector.
fn write_directly(fs: &Uhs, path: &str, offset: u64, len: usize, mark: u8) {
    write_as(fs, path, (offset, OpenFlags::DIRECT), len, mark);
}

fn write_as(fs: &Uhs, path: &str, (offset, flags): (u64, u32), len: usize, mark: u8) {
    let Some(entry) = find(fs, path).filter(|entry| entry.attr.kind == FileKind::Regular) else {
        return;
    };
    let bytes = vec![mark; len];
    let mut source = SliceSource::new(&bytes);
    let args = WriteArgs { offset, flags: OpenFlags(flags), ..WriteArgs::default() };
    let file = File { ino: entry.ino, fh: Fh(0) };
    let _ = fs.write(&cx(), file, args, &mut WriteBuf::new(&mut source));
}

fn set(fs: &Uhs, path: &str, set: SetAttr) {
    if let Some(entry) = find(fs, path) {
        let _ = fs.setattr(&cx(), entry.ino, None, &set);
    }
}

fn cut(fs: &Uhs, path: &str, size: u64) {
    if find(fs, path).is_some_and(|entry| entry.attr.kind == FileKind::Regular) {
        set(fs, path, SetAttr { size: Some(size), ..SetAttr::default() });
    }
}

fn fsync(fs: &Uhs, path: &str) -> bool {
    find(fs, path)
        .is_some_and(|entry| fs.fsync(&cx(), File { ino: entry.ino, fh: Fh(0) }, false).is_ok())
}

fn fsync_dir(fs: &Uhs, dir: Ino) -> bool {
    fs.fsyncdir(&cx(), File { ino: dir, fh: Fh(0) }, false).is_ok()
}

type SequenceOperation = fn(&Uhs, u8);

/// Every operation and flag. The number marks the written data.
const OPERATIONS: &[SequenceOperation] = &[
    |fs, _| make(fs, "c", FileKind::Regular),
    |fs, _| make(fs, "d/c", FileKind::Regular),
    |fs, _| make(fs, "c", FileKind::Directory),
    |fs, _| make(fs, "d/c", FileKind::Directory),
    |fs, _| make(fs, "c", FileKind::Symlink),
    |fs, _| make(fs, "c", FileKind::Fifo),
    |fs, _| unlink(fs, "a"),
    |fs, _| unlink(fs, "d/b"),
    |fs, _| rmdir(fs, "d"),
    |fs, _| rmdir(fs, "c"),
    |fs, _| link(fs, "a", "d/c"),
    |fs, _| link(fs, "d/b", "c"),
    |fs, _| rename(fs, "a", "c", 0),
    |fs, _| rename(fs, "a", "d/b", 0),
    |fs, _| rename(fs, "d/b", "a", 0),
    |fs, _| rename(fs, "d", "c", 0),
    |fs, _| rename(fs, "c", "d", 0),
    |fs, _| rename(fs, "a", "c", RenameFlags::NOREPLACE),
    |fs, _| rename(fs, "a", "d/b", RenameFlags::EXCHANGE),
    |fs, _| rename(fs, "a", "d", RenameFlags::EXCHANGE),
    |fs, _| rename(fs, "a", "c", RenameFlags::WHITEOUT),
    |fs, mark| write(fs, "a", 0, 700, mark),
    |fs, mark| write(fs, "a", 600, 9000, mark),
    |fs, mark| write(fs, "d/b", 1024, 5000, mark),
    |fs, mark| write(fs, "d/b", 40_000, 100, mark),
    |fs, mark| write(fs, "c", 0, 2000, mark),
    |fs, mark| write_directly(fs, "d/b", 4096, 8192, mark),
    |fs, mark| write_directly(fs, "a", 0, 4096, mark),
    |fs, mark| write_directly(fs, "c", 8192, 4096, mark),
    |fs, _| cut(fs, "a", 0),
    |fs, _| cut(fs, "d/b", 5000),
    |fs, _| cut(fs, "d/b", 30_000),
    |fs, _| set(fs, "a", SetAttr { perm: Some(0o600), ..SetAttr::default() }),
    |fs, _| set(fs, "d", SetAttr { uid: Some(5), ..SetAttr::default() }),
];

type SyncOperation = fn(&Uhs) -> bool;

const SYNCS: &[SyncOperation] =
    &[|_| false, |fs| fsync(fs, "a"), |fs| fsync_dir(fs, Ino::ROOT), |fs| fs.syncfs(&cx()).is_ok()];

/// A directory `d` with a file `b` in blocks, and a small file `a`.
fn base() -> RamDevice {
    let ram = make_fresh();
    let (fs, _) = open(ram.clone(), CommitRules::ALL);
    make(&fs, "a", FileKind::Regular);
    write(&fs, "a", 0, 500, 1);
    make(&fs, "d", FileKind::Directory);
    make(&fs, "d/b", FileKind::Regular);
    write(&fs, "d/b", 0, 20_000, 2);
    drop(fs);
    ram
}

/// Plays a sequence, and judges about `wanted` states. Returns how many.
fn play(
    ram: &RamDevice,
    sequence: &[(usize, usize)],
    wanted: usize,
    seed: u64,
) -> Result<usize, String> {
    play_with(OPTIONS, ram, sequence, (wanted, seed))
}

fn play_with(
    options: UhsOptions,
    ram: &RamDevice,
    sequence: &[(usize, usize)],
    (wanted, seed): (usize, u64),
) -> Result<usize, String> {
    let sim = SimDevice::from_ram(ram, seed);
    let (fs, _) = Uhs::open(Arc::new(sim.clone()), options, random()).map_err(|e| e.to_string())?;
    let mut run = CrashRun::begin(sim, &fs);
    for (nth, (operation, sync)) in sequence.iter().enumerate() {
        OPERATIONS[*operation](&fs, 10 + nth as u8);
        run.note(&fs, false);
        if SYNCS[*sync](&fs) {
            run.note(&fs, true);
        }
    }
    // Changes without a sync are written, too, and may survive.
    let _ = fs.syncfs(&cx());
    fs.abandon();
    run.judge_all(wanted, seed, CommitRules::ALL)
}

#[test]
fn after_any_one_operation_and_a_power_failure_the_state_is_one_of_two() {
    let ram = base();
    let mut judged = 0;
    for operation in 0..OPERATIONS.len() {
        for sync in 0..SYNCS.len() {
            let sequence = [(operation, sync)];
            judged += play(&ram, &sequence, 20, operation as u64)
                .unwrap_or_else(|why| panic!("{sequence:?}: {why}"));
        }
    }
    println!("{judged} states");
    assert!(judged > 1500, "{judged} states");
}

#[test]
fn with_shared_queues_two_operations_by_chance_leave_a_state_of_one_moment() {
    let ram = base();
    let (mut random, mut judged) = (random(), 0);
    for seed in 0..1200 {
        let mut step = || (random.usize(..OPERATIONS.len()), random.usize(..SYNCS.len()));
        let sequence = [step(), step()];
        judged += play_with(make_shared_options(seed), &ram, &sequence, (2, seed))
            .unwrap_or_else(|why| panic!("seed {seed}: {sequence:?}: {why}"));
    }
    println!("{judged} states");
    assert!(judged > 1500, "{judged} states");
}

#[test]
fn after_any_two_operations_and_a_power_failure_the_state_is_one_of_three() {
    let ram = base();
    let (mut judged, mut seed) = (0, 0);
    for first in 0..OPERATIONS.len() {
        for second in 0..OPERATIONS.len() {
            for syncs in 0..SYNCS.len() * SYNCS.len() {
                let sequence = [(first, syncs / SYNCS.len()), (second, syncs % SYNCS.len())];
                seed += 1;
                judged += play(&ram, &sequence, 1, seed)
                    .unwrap_or_else(|why| panic!("seed {seed}: {sequence:?}: {why}"));
            }
        }
    }
    println!("{judged} states");
    assert!(judged > 10_000, "{judged} states");
}

#[test]
fn three_operations_by_chance_leave_a_state_of_one_moment() {
    let ram = base();
    let mut random = random();
    let mut judged = 0;
    for seed in 0..400 {
        let mut step = || (random.usize(..OPERATIONS.len()), random.usize(..SYNCS.len()));
        let sequence = [step(), step(), step()];
        judged += play(&ram, &sequence, 3, seed)
            .unwrap_or_else(|why| panic!("seed {seed}: {sequence:?}: {why}"));
    }
    println!("{judged} states");
    assert!(judged > 800, "{judged} states");
}

/// Runs a program, cuts the power at every moment, and passes the state that is left to `judge`,
/// with the number of steps that were acknowledged before.
fn program(
    prepare: impl Fn(&Uhs),
    steps: impl Fn(&Uhs, &mut dyn FnMut()),
    judge: impl Fn(&TreeSnapshot, usize) -> Result<(), String>,
) {
    for seed in 0..20 {
        let ram = make_fresh();
        let (fs, _) = open(ram.clone(), CommitRules::ALL);
        prepare(&fs);
        drop(fs);
        let sim = SimDevice::from_ram(&ram, seed);
        let (fs, _) = open(sim.clone(), CommitRules::ALL);
        let mut acknowledged = Vec::new();
        steps(&fs, &mut || acknowledged.push(sim.events()));
        fs.abandon();
        let mut random = fastrand::Rng::with_seed(seed);
        let mut cuts = sim.power_cuts();
        while let Some(cut) = cuts.next() {
            if random.u8(..4) > 0 {
                continue;
            }
            let done = acknowledged.iter().filter(|events| **events <= cut.event_index()).count();
            let (fs, problems) = open(cut.sample(&mut random), CommitRules::ALL);
            assert_eq!(problems, []);
            judge(&super::snapshot(&fs), done).unwrap_or_else(|why| {
                panic!("seed {seed}, event {}, {done} steps: {why}", cut.event_index())
            });
        }
    }
}

fn data<'a>(found: &'a TreeSnapshot, path: &str) -> Option<&'a [u8]> {
    Some(&found.data[&found.names.get(path)?.ino])
}

#[test]
fn a_file_that_is_replaced_by_rename_is_old_or_new() {
    let content = |version: usize| vec![version as u8 + 1; 3000 + 4000 * version];
    let put = |fs: &Uhs, path: &str, version: usize| {
        make(fs, path, FileKind::Regular);
        write(fs, path, 0, content(version).len(), version as u8 + 1);
    };
    program(
        |fs| put(fs, "x", 0),
        |fs, done| {
            for version in 1..5 {
                put(fs, "tmp", version);
                assert!(fsync(fs, "tmp"));
                rename(fs, "tmp", "x", 0);
                assert!(fsync_dir(fs, Ino::ROOT));
                done();
            }
        },
        |found, done| match data(found, "/x") {
            Some(bytes) if (done..=done + 1).any(|version| bytes == content(version)) => Ok(()),
            other => Err(format!("{:?} bytes", other.map(<[u8]>::len))),
        },
    );
}

#[test]
fn a_log_has_all_records_that_were_synced() {
    const RECORD: usize = 777;
    program(
        |fs| make(fs, "log", FileKind::Regular),
        |fs, done| {
            for record in 0..12 {
                write(fs, "log", (record * RECORD) as u64, RECORD, record as u8 + 1);
                assert!(fsync(fs, "log"));
                done();
            }
        },
        |found, done| {
            let bytes = data(found, "/log").ok_or("no log")?;
            let is_right = |(at, byte): (usize, &u8)| *byte == (at / RECORD) as u8 + 1;
            match bytes.len() >= done * RECORD && bytes.iter().enumerate().all(is_right) {
                true => Ok(()),
                false => Err(format!("{} bytes", bytes.len())),
            }
        },
    );
}

/// A rollback journal, as in small databases.
#[test]
fn a_database_with_a_journal_is_before_or_after_a_transaction() {
    const SIZE: usize = 12_000;
    program(
        |fs| {
            make(fs, "db", FileKind::Regular);
            write(fs, "db", 0, SIZE, 1);
        },
        |fs, done| {
            for version in 2..6 {
                make(fs, "journal", FileKind::Regular);
                write(fs, "journal", 0, SIZE, version - 1);
                assert!(fsync(fs, "journal") && fsync_dir(fs, Ino::ROOT));
                write(fs, "db", 0, SIZE, version);
                assert!(fsync(fs, "db"));
                unlink(fs, "journal");
                assert!(fsync_dir(fs, Ino::ROOT));
                done();
            }
        },
        |found, done| {
            // A whole journal has the former content of the database; a short journal was never
            // used.
            let journal = data(found, "/journal").filter(|journal| journal.len() == SIZE);
            let bytes = journal.or(data(found, "/db")).ok_or("no database")?;
            let version = usize::from(bytes[0]);
            let same = bytes.len() == SIZE && bytes.iter().all(|byte| *byte == bytes[0]);
            match same && (done + 1..=done + 2).contains(&version) {
                true => Ok(()),
                false => Err(format!("version {version}")),
            }
        },
    );
}
