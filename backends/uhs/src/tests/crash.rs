//! Power failures at every moment of random operations.

use std::sync::Arc;

use defuse_block::{BlockDevice, RamDevice, SimDevice};
use defuse_fs::{Fallocate, Fh, File, FileKind, FileSystem, Ino, SliceSource, WriteArgs, WriteBuf};

use super::queues::make_shared_options;
use super::random_operations::{NameWorkload, OF_THE_DEAD};
use super::{
    OPTIONS, TreeSnapshot, contents, cx, device, make_fresh, name, node, open, open_with, random,
    snapshot,
};
use crate::commit::CommitRules;
use crate::engine::InPlaceRest;
use crate::store::survey;
use crate::{Uhs, UhsOptions, check};

/// A run, with everything that is needed to judge the state after a power failure.
pub(super) struct CrashRun {
    pub(super) sim: SimDevice,
    /// The state before the first operation and after each, with the events until then.
    states: Vec<TreeSnapshot>,
    acknowledged: Vec<Acknowledgement>,
    /// The device refused data: in its place there may be holes, or the former data.
    pub(super) loses_data: bool,
    /// Files whose data waits, and files of data groups, may be older than names.
    waits: bool,
}

/// A sync that has succeeded.
#[derive(Clone, Copy)]
struct Acknowledgement {
    /// The number of events of the device before it.
    events: usize,
    /// The state that is durable.
    state: usize,
    /// The file that was synced; `None` for all. The data of other files may be older.
    file: Option<u64>,
    /// Names may be older, too.
    only_data: bool,
}

/// The syncs that a state after a power failure must have.
struct DurableStates<'a>(Vec<&'a Acknowledgement>);

impl DurableStates<'_> {
    /// The oldest state that names may have.
    fn names(&self) -> usize {
        let of_names = self.0.iter().filter(|sync| !sync.only_data);
        of_names.map(|sync| sync.state).max().unwrap_or(0)
    }

    /// The oldest state that the data of a file may have.
    fn file(&self, ino: u64) -> usize {
        let of_file = self.0.iter().filter(|sync| sync.file.is_none_or(|file| file == ino));
        of_file.map(|sync| sync.state).max().unwrap_or(0)
    }
}

/// The parameters of a run.
#[derive(Clone, Copy)]
pub(super) struct CrashPlan {
    pub(super) options: UhsOptions,
    pub(super) rules: CommitRules,
    /// Flushes of the device make nothing durable.
    pub(super) lies: bool,
    /// Some operations are replaced by the sync of a file.
    pub(super) syncs_files: bool,
    /// Now and then a group is closed, and its data group is left to a later operation.
    pub(super) divides: bool,
    /// Syncs in place begin, and end after later operations.
    pub(super) holds: bool,
}

/// A sync in place that has begun.
struct HeldSync {
    rest: InPlaceRest,
    file: u64,
    /// The state that it makes durable.
    state: usize,
}

impl CrashRun {
    /// Begins a run without changes.
    pub(super) fn begin(sim: SimDevice, fs: &Uhs) -> CrashRun {
        let begin = Acknowledgement { events: 0, state: 0, file: None, only_data: false };
        let (states, acknowledged) = (vec![snapshot(fs)], vec![begin]);
        CrashRun { sim, states, acknowledged, loses_data: false, waits: false }
    }

    /// Records the state after an operation.
    pub(super) fn note(&mut self, fs: &Uhs, synced: bool) {
        self.states.push(snapshot(fs));
        if synced {
            self.acknowledge(None, false);
        }
    }

    /// Records that the newest state of a file, or of all files, is durable, and all names unless
    /// `only_data` is.
    fn acknowledge(&mut self, file: Option<u64>, only_data: bool) {
        let (events, state) = (self.sim.events(), self.states.len() - 1);
        self.acknowledged.push(Acknowledgement { events, state, file, only_data });
    }

    /// The newest state that was acknowledged.
    pub(super) fn durable(&self) -> usize {
        self.acknowledged.last().map_or(0, |sync| sync.state)
    }

    fn new(ram: &RamDevice, seed: u64, by: CrashPlan) -> CrashRun {
        let CrashPlan { options, rules, lies, syncs_files, divides, holds } = by;
        if seed.is_multiple_of(4) {
            // The run begins with a snapshot.
            drop(open(ram.clone(), rules));
        }
        let sim = device(ram, seed);
        let (mut fs, problems) = open_with(sim.clone(), options, rules);
        assert_eq!(problems, []);
        if lies {
            sim.ignore_flushes();
        }
        let waits = syncs_files || divides || holds;
        let mut run = CrashRun { waits, ..CrashRun::begin(sim, &fs) };
        let mut held: Vec<HeldSync> = Vec::new();
        let mut random = fastrand::Rng::with_seed(seed);
        let (steps, end) =
            (random.usize(10..60), if seed.is_multiple_of(3) { random.usize(..30) } else { 60 });
        for step in 0..steps {
            if step == end {
                // A clean end, and another mount.
                held.drain(..).for_each(|sync| run.finish(&fs, sync));
                drop(fs);
                run.acknowledge(None, false);
                fs = open_with(run.sim.clone(), options, rules).0;
            }
            if divides && random.u8(..3) == 0 {
                fs.engine().divide_group().unwrap();
            }
            if holds {
                run.hold(&fs, &mut random, &mut held);
            }
            let mut player = NameWorkload { fs: &fs, random };
            let file = if syncs_files { player.sync_file() } else { None };
            let synced = file.is_none() && player.step();
            random = player.random;
            run.note(&fs, synced);
            if let Some((file, datasync)) = file {
                run.acknowledge(Some(file), datasync);
            }
        }
        // The run must not end with a clean end.
        fs.abandon();
        run
    }

    /// Begins a sync in place of a file now and then, and carries others on.
    fn hold(&mut self, fs: &Uhs, random: &mut fastrand::Rng, held: &mut Vec<HeldSync>) {
        let files: Vec<u64> =
            self.states.last().map_or_else(Vec::new, |state| state.data.keys().copied().collect());
        for file in files {
            if random.u8(..3) == 0
                && let Ok(Some(rest)) = fs.engine().begin_in_place(file)
            {
                held.push(HeldSync { rest, file, state: self.states.len() - 1 });
            }
        }
        match random.u8(..6) {
            0 => fs.engine().write_in_place_now(),
            1 | 2 if !held.is_empty() => {
                let sync = held.swap_remove(random.usize(..held.len()));
                self.finish(fs, sync);
            }
            _ => {}
        }
    }

    fn finish(&mut self, fs: &Uhs, HeldSync { rest, file, state }: HeldSync) {
        if fs.engine().finish_in_place(rest).unwrap() {
            let events = self.sim.events();
            self.acknowledged.push(Acknowledgement {
                events,
                state,
                file: Some(file),
                only_data: true,
            });
        }
    }

    /// Judges a state of the device. `durable` is the newest state that was acknowledged, for all
    /// files.
    pub(super) fn judge(
        &self,
        durable: usize,
        ram: &RamDevice,
        rules: CommitRules,
    ) -> Result<(), String> {
        let sync = Acknowledgement { events: 0, state: durable, file: None, only_data: false };
        self.judge_by(&DurableStates(vec![&sync]), ram, rules)
    }

    fn judge_by(
        &self,
        durable: &DurableStates<'_>,
        ram: &RamDevice,
        rules: CommitRules,
    ) -> Result<(), String> {
        let report =
            check(&(Arc::new(ram.clone()) as Arc<dyn BlockDevice>)).map_err(|e| e.to_string())?;
        if !report.problems.is_empty() {
            return Err(format!("the check found {:?}", report.problems));
        }
        if report.has_damaged_snapshot || !report.lost_superblocks.is_empty() {
            return Err(format!("a power failure passes for damage: {report:?}"));
        }
        let (fs, problems) = Uhs::open_by(Arc::new(ram.clone()), OPTIONS, rules, random())
            .map_err(|e| e.to_string())?;
        if !problems.is_empty() {
            return Err(format!("the mount found {problems:?}"));
        }
        let found = snapshot(&fs);
        let oldest = durable.names();
        // The data of a file waits while others are synced, and so does its size.
        let waits = self.waits;
        let names =
            |state: &TreeSnapshot| if waits { state.drop_sizes() } else { state.names.clone() };
        let all = names(&found);
        let Some(at) = (oldest..self.states.len()).find(|at| names(&self.states[*at]) == all)
        else {
            return Err(format!(
                "names of no state from {oldest} on: {all:#?}\ninstead of {:#?}",
                self.states[oldest].names
            ));
        };
        for Acknowledgement { state, file, .. } in &durable.0 {
            let stays =
                |ino: &u64| self.states[*state..].iter().all(|state| state.data.contains_key(ino));
            let lost = file.filter(|ino| stays(ino) && !found.data.contains_key(ino));
            if let Some(ino) = lost {
                return Err(format!(
                    "state {at}: inode {ino} is lost, which was synced in {state}"
                ));
            }
        }
        for (ino, bytes) in &found.data {
            // Data reaches the device before the names and sizes of its moment, and later writes
            // may follow.
            let first = if waits { durable.file(*ino) } else { at };
            let later = if self.loses_data { &self.states[..] } else { &self.states[first..] };
            let has_size = |state: &TreeSnapshot| {
                state.data.get(ino).is_some_and(|data| data.len() == bytes.len())
            };
            if !later.iter().any(has_size) {
                return Err(format!(
                    "state {at}: inode {ino} has a size of no state from {first} on"
                ));
            }
            for (sector, content) in bytes.chunks(512).enumerate() {
                let same = |state: &TreeSnapshot| {
                    let data = state.data.get(ino).and_then(|data| data.get(sector * 512..));
                    let Some(old) = data.filter(|old| !old.is_empty()) else { return false };
                    // The file may have been shorter then, and longer since.
                    let (kept, zeros) = content.split_at(old.len().min(content.len()));
                    old.starts_with(kept) && zeros.iter().all(|byte| *byte == 0)
                };
                // The file may have been written to after its removal.
                let removed = later.iter().any(|state| !state.data.contains_key(ino));
                let of_the_dead = removed && content.iter().all(|byte| *byte == OF_THE_DEAD);
                let lost = self.loses_data && content.iter().all(|byte| *byte == 0);
                if !later.iter().any(same) && !of_the_dead && !lost {
                    return Err(format!("state {at}: inode {ino}, sector {sector} is of no state"));
                }
            }
        }
        // No block is lost: a remount finds the same free space as this mount.
        drop(fs);
        let again =
            check(&(Arc::new(ram.clone()) as Arc<dyn BlockDevice>)).map_err(|e| e.to_string())?;
        match (again.problems.is_empty(), again.free_blocks == report.free_blocks) {
            (true, true) => Ok(()),
            _ => Err(format!("after the mount: {again:?} instead of {report:?}")),
        }
    }

    /// Judges states of all moments, about `wanted` of them.
    pub(super) fn judge_all(
        &self,
        wanted: usize,
        seed: u64,
        rules: CommitRules,
    ) -> Result<usize, String> {
        let mut random = fastrand::Rng::with_seed(seed);
        let share = wanted as f64 / (self.sim.events() + 1) as f64;
        let mut judged = 0;
        let mut cuts = self.sim.power_cuts();
        while let Some(cut) = cuts.next() {
            let before = self.acknowledged.iter().filter(|sync| sync.events <= cut.event_index());
            let durable = DurableStates(before.collect());
            let mut wanted_order = share;
            while random.f64() < wanted_order {
                wanted_order -= 1.0;
                let ram = match cut.is_small() && random.u8(..4) == 0 {
                    true => random
                        .choice(cut.combinations().collect::<Vec<_>>())
                        .unwrap_or_else(|| self.sim.copy_present()),
                    false => cut.sample(&mut random),
                };
                self.judge_by(&durable, &ram, rules)
                    .map_err(|why| format!("event {}: {why}", cut.event_index()))?;
                judged += 1;
            }
        }
        Ok(judged)
    }
}

fn play(seed: u64, rules: CommitRules, lies: bool) -> Result<usize, String> {
    play_by(
        seed,
        CrashPlan {
            options: OPTIONS,
            rules,
            lies,
            syncs_files: false,
            divides: false,
            holds: false,
        },
    )
}

fn play_with_syncs_of_files(seed: u64, rules: CommitRules) -> Result<usize, String> {
    let by = CrashPlan {
        options: OPTIONS,
        rules,
        lies: false,
        syncs_files: true,
        divides: false,
        holds: false,
    };
    play_by(seed, by)
}

fn play_with_data_groups(seed: u64, rules: CommitRules) -> Result<usize, String> {
    let by = CrashPlan {
        options: OPTIONS,
        rules,
        lies: false,
        syncs_files: true,
        divides: true,
        holds: false,
    };
    play_by(seed, by)
}

fn play_with_syncs_in_place(seed: u64, rules: CommitRules) -> Result<usize, String> {
    let (syncs_files, divides) = (true, seed.is_multiple_of(3));
    let by = CrashPlan { options: OPTIONS, rules, lies: false, syncs_files, divides, holds: true };
    play_by(seed, by)
}

/// Plays a seed, and judges states of its device.
pub(super) fn play_by(seed: u64, by: CrashPlan) -> Result<usize, String> {
    let (rules, ram) = (by.rules, make_fresh());
    // Some seeds write as early as possible, others larger runs, and others nothing.
    let early_run = [1, 2, 4, rules.early_run][seed as usize / 2 % 4];
    let rules = CommitRules { early_run, ..rules };
    CrashRun::new(&ram, seed, CrashPlan { rules, ..by }).judge_all(30, seed, rules)
}

#[test]
fn after_a_power_failure_names_are_those_of_one_moment_and_data_is_what_was_written() {
    let mut judged = 0;
    for seed in 0..300 {
        judged +=
            play(seed, CommitRules::ALL, false).unwrap_or_else(|why| panic!("seed {seed}: {why}"));
    }
    assert!(judged > 5000, "{judged} states");
    println!("{judged} states");
}

/// A device with three units of slots, two of which had only files that are gone.
fn with_slots_to_spare() -> RamDevice {
    let ram = RamDevice::new(4096, 12 * 512);
    Uhs::make(Arc::new(ram.clone()), (0o755, 0, 0), &mut random()).unwrap();
    let (fs, _) = open(ram.clone(), CommitRules { snapshots: false, ..CommitRules::ALL });
    let names: Vec<String> = (0..1400).map(|number: u32| number.to_string()).collect();
    for text in &names {
        let made = fs.mknod(&cx(), Ino::ROOT, name(text), &node(FileKind::Regular)).unwrap();
        fs.forget(made.ino, 1);
    }
    fs.syncfs(&cx()).unwrap();
    names.iter().for_each(|text| fs.unlink(&cx(), Ino::ROOT, name(text)).unwrap());
    fs.syncfs(&cx()).unwrap();
    drop(fs);
    let slots = survey(&ram, CommitRules::ALL).unwrap().superblock.chunks;
    assert!(slots.iter().map(|chunk| chunk.units).sum::<u32>() >= 3, "{slots:?}");
    ram
}

fn play_with_slots(ram: &RamDevice, seed: u64, rules: CommitRules) -> Result<usize, String> {
    let by = CrashPlan {
        options: OPTIONS,
        rules,
        lies: false,
        syncs_files: false,
        divides: false,
        holds: false,
    };
    CrashRun::new(&ram.fork(), seed, by).judge_all(20, seed, rules)
}

/// The units then hold data of files, which must not pass for slots, and their former slots must
/// not be missed.
#[test]
fn after_a_power_failure_units_that_were_given_back_hold_what_their_users_wrote() {
    let ram = with_slots_to_spare();
    let mut judged = 0;
    for seed in 0..30 {
        let found = play_with_slots(&ram, seed, CommitRules::ALL);
        judged += found.unwrap_or_else(|why| panic!("seed {seed}: {why}"));
    }
    assert!(judged > 200, "{judged} states");
    let without = CommitRules { units_leave_first: false, ..CommitRules::ALL };
    let found = (0..60).find(|seed| play_with_slots(&ram, *seed, without).is_err());
    assert!(found.is_some(), "nothing fails although units are used before they leave");
    // A removal block that is torn in the middle passes for a damaged one.
    let without = CommitRules { removals_wait_for_mention: false, ..CommitRules::ALL };
    let found = (0..60).find(|seed| play_with_slots(&ram, *seed, without).is_err());
    assert!(found.is_some(), "nothing fails although nobody says that removals are not needed");
}

/// The table of chunks moves whenever units are given back or added, and every mount needs it.
#[test]
fn after_a_power_failure_the_table_of_chunks_leads_to_all_slots() {
    let ram = with_slots_to_spare();
    let rules = CommitRules { listed_chunks: 1, ..CommitRules::ALL };
    let mut judged = 0;
    for seed in 0..30 {
        let found = play_with_slots(&ram, seed, rules);
        judged += found.unwrap_or_else(|why| panic!("seed {seed}: {why}"));
    }
    assert!(judged > 200, "{judged} states");
}

/// The data of other files waits while a file is synced: it may be older than names, and is what
/// was written at any moment since the last sync of its own file.
#[test]
fn after_a_power_failure_a_synced_file_is_there_and_others_are_of_a_moment_of_their_own() {
    let rules = CommitRules { waiting_pages: 1, ..CommitRules::ALL };
    let mut judged = 0;
    for seed in 0..300 {
        let found = play_with_syncs_of_files(seed, rules);
        judged += found.unwrap_or_else(|why| panic!("seed {seed}: {why}"));
    }
    assert!(judged > 5000, "{judged} states");
    let without = CommitRules { changes_do_not_wait: false, ..rules };
    let found = (0..4000).find(|seed| play_with_syncs_of_files(*seed, without).is_err());
    assert!(found.is_some(), "nothing fails although a new file may wait");
}

/// Groups that close while a data group waits have earlier numbers. So each of them must leave the
/// inodes of the data group alone, and a sync of such a file must wait.
#[test]
fn after_a_power_failure_files_of_data_groups_are_of_a_moment_since_their_last_sync() {
    let rules = CommitRules { waiting_pages: 1, ..CommitRules::ALL };
    let mut judged = 0;
    for seed in 0..300 {
        let found = play_with_data_groups(seed, rules);
        judged += found.unwrap_or_else(|why| panic!("seed {seed}: {why}"));
    }
    assert!(judged > 5000, "{judged} states");
    let without = [
        ("data groups keep order", CommitRules { data_groups_keep_order: false, ..rules }),
        ("syncs wait for data groups", CommitRules { syncs_wait_for_data_groups: false, ..rules }),
        ("data is first", CommitRules { data_is_first: false, ..rules }),
        (
            "syncs in place know extents",
            CommitRules { syncs_in_place_know_extents: false, ..rules },
        ),
    ];
    for (name, rules) in without {
        let found = (0..4000).find(|seed| play_with_data_groups(*seed, rules).is_err());
        assert!(found.is_some(), "nothing fails without: {name}");
        println!("without \"{name}\", seed {} fails", found.unwrap_or(0));
    }
}

/// Data in place is written while no thread has the right to write groups. A group that did not
/// wait freed the blocks for other files, or was overtaken by older bytes.
#[test]
fn after_a_power_failure_data_is_what_was_written_also_while_syncs_in_place_are_on_their_way() {
    let rules = CommitRules { waiting_pages: 1, ..CommitRules::ALL };
    let mut judged = 0;
    for seed in 0..300 {
        let found = play_with_syncs_in_place(seed, rules);
        judged += found.unwrap_or_else(|why| panic!("seed {seed}: {why}"));
    }
    assert!(judged > 5000, "{judged} states");
    let without = [
        (
            "groups wait for data in place",
            CommitRules { groups_wait_for_data_in_place: false, ..rules },
        ),
        ("syncs in place take turns", CommitRules { syncs_in_place_take_turns: false, ..rules }),
    ];
    for (name, rules) in without {
        let found = (0..4000).find(|seed| play_with_syncs_in_place(*seed, rules).is_err());
        assert!(found.is_some(), "nothing fails without: {name}");
        println!("without \"{name}\", seed {} fails", found.unwrap_or(0));
    }
}

/// True if a power failure may take data of a file that was synced, after another sync has written
/// that data in place and has not flushed it.
fn loses_unflushed_data(rules: CommitRules) -> bool {
    let sim = SimDevice::from_ram(&make_fresh(), 1);
    let (fs, _) = open(sim.clone(), rules);
    let made = fs.mknod(&cx(), Ino::ROOT, name("file"), &node(FileKind::Regular)).unwrap();
    let file = File { ino: made.ino, fh: Fh(0) };
    let write = |page: u64, byte: u8| {
        let bytes = [byte; 4096];
        let mut source = SliceSource::new(&bytes);
        let args = WriteArgs { offset: page * 4096, ..WriteArgs::default() };
        fs.write(&cx(), file, args, &mut WriteBuf::new(&mut source)).unwrap();
    };
    (0..3).for_each(|page| write(page, 1));
    fs.fsync(&cx(), file, false).unwrap();
    // Two runs are not written through.
    [0, 2].into_iter().for_each(|page| write(page, 2));
    let begun = fs.engine().begin_in_place(made.ino.0).unwrap();
    assert!(begun.is_some(), "the data is in place");
    fs.engine().write_in_place_now();
    fs.fsync(&cx(), file, false).unwrap();
    fs.abandon();
    let (mut cuts, mut random) = (sim.power_cuts(), random());
    let cut = cuts.last();
    (0..50).any(|_| {
        let (fs, _) = open(cut.sample(&mut random), rules);
        let bytes = contents(&fs, made.ino, 3 * 4096);
        fs.abandon();
        bytes[0] != 2 || bytes[2 * 4096] != 2
    })
}

/// The second sync of the file found nothing to write and no need to flush.
#[test]
fn a_synced_file_has_data_that_another_sync_has_written_and_not_flushed() {
    assert!(!loses_unflushed_data(CommitRules::ALL));
    let without = CommitRules { syncs_in_place_are_flushed: false, ..CommitRules::ALL };
    assert!(loses_unflushed_data(without), "the data is in the cache of the device");
}

/// The number of problems after a power failure, if a file has a hole where it had blocks, and
/// another one is synced afterwards while it takes free blocks.
fn problems_of_a_hole(rules: CommitRules) -> usize {
    let ram = make_fresh();
    let (fs, _) = open(ram.clone(), rules);
    let make = |text: &str| {
        let made = fs.mknod(&cx(), Ino::ROOT, name(text), &node(FileKind::Regular)).unwrap();
        File { ino: made.ino, fh: Fh(0) }
    };
    let write = |file: File, offset: u64, bytes: &[u8]| {
        let mut source = SliceSource::new(bytes);
        let args = WriteArgs { offset, ..WriteArgs::default() };
        fs.write(&cx(), file, args, &mut WriteBuf::new(&mut source))
    };
    let holed = make("holed");
    write(holed, 0, &[1; 64 << 10]).unwrap();
    fs.fsync(&cx(), holed, false).unwrap();
    write(holed, 0, &[2; 8 << 10]).unwrap();
    let mode = Fallocate::PUNCH_HOLE | Fallocate::KEEP_SIZE;
    let range = Fallocate { mode, offset: 32 << 10, length: 32 << 10 };
    fs.fallocate(&cx(), holed, range).unwrap();
    let other = make("other");
    // The last free blocks are taken after a commit of all files, which is another case.
    let most = fs.statfs(&cx(), Ino::ROOT).unwrap().blocks_free / 8 * 7;
    for page in 0..most {
        write(other, page * 4096, &[3; 4096]).unwrap();
        fs.fsync(&cx(), other, false).unwrap();
    }
    let left: Arc<dyn BlockDevice> = Arc::new(ram.fork());
    fs.abandon();
    check(&left).unwrap().problems.len()
}

#[test]
fn blocks_that_a_file_has_lost_are_not_taken_while_its_data_waits() {
    let rules = CommitRules { waiting_pages: 1, ..CommitRules::ALL };
    assert_eq!(problems_of_a_hole(rules), 0);
    let without = CommitRules { lost_blocks_do_not_wait: false, ..rules };
    assert!(problems_of_a_hole(without) > 0, "the durable inode still has these blocks");
}

#[test]
fn each_sentence_about_data_is_needed() {
    let without: [(&str, CommitRules); 7] = [
        ("groups wait", CommitRules { groups_wait_for_early: false, ..CommitRules::ALL }),
        (
            "lost blocks wait for data on its way",
            CommitRules { lost_blocks_wait_for_early: false, ..CommitRules::ALL },
        ),
        ("snapshots are voided", CommitRules { snapshots_are_voided: false, ..CommitRules::ALL }),
        ("data is first", CommitRules { data_is_first: false, ..CommitRules::ALL }),
        (
            "blocks wait for the group",
            CommitRules { blocks_wait_for_group: false, ..CommitRules::ALL },
        ),
        ("tails move", CommitRules { tails_move: false, ..CommitRules::ALL }),
        ("shifted blocks move", CommitRules { shifted_blocks_move: false, ..CommitRules::ALL }),
    ];
    for (name, rules) in without {
        let found = (0..4000).find(|seed| play(*seed, rules, false).is_err());
        assert!(found.is_some(), "nothing fails without: {name}");
        println!("without \"{name}\", seed {} fails", found.unwrap_or(0));
    }
}

#[test]
fn the_suite_notices_a_device_that_lies_about_flushes() {
    assert!((0..50).any(|seed| play(seed, CommitRules::ALL, true).is_err()));
}

/// `cargo xtask crash`: seeds from `DEFUSE_SEED` on, until one fails or the run is stopped.
#[test]
#[ignore = "runs until it is stopped"]
fn random_operations_and_power_failures_until_stopped() {
    let first = std::env::var("DEFUSE_SEED").ok().and_then(|seed| seed.parse().ok());
    let first = first.unwrap_or_else(|| fastrand::u64(..1 << 40));
    println!("from seed {first} on");
    let (mut states, mut reported) = (0, std::time::Instant::now());
    for seed in first.. {
        // Half of them share queues.
        let options = if seed.is_multiple_of(2) { OPTIONS } else { make_shared_options(seed / 2) };
        let syncs_files = seed / 2 % 2 == 0;
        // A file of one page waits, too.
        let waiting_pages = if syncs_files { 1 } else { CommitRules::ALL.waiting_pages };
        let rules = CommitRules { waiting_pages, ..CommitRules::ALL };
        let divides = syncs_files && seed / 4 % 2 == 0;
        let holds = syncs_files && seed / 8 % 2 == 0;
        let by = CrashPlan { options, rules, lies: false, syncs_files, divides, holds };
        let judged =
            play_by(seed, by).and_then(|judged| Ok(judged + crate::commit::crashes(seed)?));
        states += judged.unwrap_or_else(|why| {
            panic!("{why}\nto see it again: cargo xtask crash {seed}");
        });
        if reported.elapsed().as_secs() >= 10 {
            reported = std::time::Instant::now();
            println!("{states} states, seed {seed}");
        }
    }
}
