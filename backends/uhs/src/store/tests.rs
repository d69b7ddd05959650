//! Stores on devices that fail, and mounts that may not write.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use defuse_block::sim::SimOpKind;
use defuse_block::{
    BlockCompletion, BlockOp, DeviceProperties, DeviceQueue, Errno, MemoryRegion, QueueWaker,
    RamDevice, SimDevice, WorkerDevice,
};

use super::chunks::{CHUNKS_KEPT, remove_unit};
use super::*;
use crate::format::chunks::{TableBlock, TablePointer};
use crate::format::superblock::{CHUNKS, COPIES, SlotChunk, SuperblockError};

const BLOCKS: u64 = 8 * 512;

fn make_fresh() -> RamDevice {
    let ram = RamDevice::new(4096, BLOCKS);
    make(&ram, [9; 16], &mut fastrand::Rng::with_seed(1)).unwrap();
    ram
}

fn open(sim: &SimDevice) -> Result<(InodeStore, SlotSurvey), StoreError> {
    let survey = survey(sim, CommitRules::ALL)?;
    let random = fastrand::Rng::with_seed(5);
    Ok((InodeStore::begin(Arc::new(sim.clone()), &survey, CommitRules::ALL, random)?, survey))
}

fn write(ino: u64, body: &[u8]) -> InodeChange {
    InodeChange::Write { ino, body: body.to_vec() }
}

fn commit(store: &InodeStore, changes: Vec<InodeChange>) -> Result<u64, StoreError> {
    store.commit(store.take_turn(), changes, false, &mut |_, _| None)
}

#[test]
fn a_slot_that_cannot_be_written_goes_elsewhere_and_its_old_block_is_not_used_again() {
    let sim = SimDevice::from_ram(&make_fresh(), 3);
    let (store, _) = open(&sim).unwrap();
    commit(&store, (1..=9).map(|ino| write(ino, b"old")).collect()).unwrap();
    store.sync(store.newest_group()).unwrap();
    // The next slots lie on a bad place of the device.
    let bad = 512 + 9..512 + 14;
    let place = bad.clone();
    sim.fail(move |victim| {
        let hit = victim.block < place.end && place.start < victim.block + victim.blocks;
        (victim.call == SimOpKind::Write && hit).then_some(Errno::IO)
    });
    for round in 0..40_u8 {
        let mut changes: Vec<InodeChange> = (1..=8).map(|ino| write(ino, &[round; 10])).collect();
        changes.extend((round == 9).then_some(InodeChange::Remove { ino: 9 }));
        commit(&store, changes).unwrap();
        store.sync(store.newest_group()).unwrap();
        let (_, found) = open(&SimDevice::from_ram(&sim.copy_present(), 1)).unwrap();
        assert!(found.found.damaged.is_empty() && found.found.lost_removals.is_empty(), "{round}");
        assert_eq!(found.inodes().len(), if round < 9 { 9 } else { 8 });
        assert!(found.inodes().iter().all(|(ino, body)| *ino == 9 || body == &[round; 10]));
    }
}

#[test]
fn a_device_that_takes_no_writes_ends_the_store() {
    let sim = SimDevice::from_ram(&make_fresh(), 3);
    let (store, _) = open(&sim).unwrap();
    commit(&store, vec![write(1, b"old")]).unwrap();
    store.sync(store.newest_group()).unwrap();
    sim.fail(|victim| (victim.call == SimOpKind::Write).then_some(Errno::IO));
    assert!(commit(&store, vec![write(1, b"new")]).is_err());
    sim.end_faults();
    assert_eq!(commit(&store, vec![write(1, b"newer")]), Err(StoreError::Failed));
    assert_eq!(store.sync(store.newest_group()), Err(StoreError::Failed));
    let (_, found) = open(&SimDevice::from_ram(&sim.copy_present(), 1)).unwrap();
    // A write that failed may have reached the device.
    assert!([&b"old"[..], b"new"].contains(&found.inodes()[0].1));
}

#[test]
fn no_write_is_larger_than_the_device_takes() {
    for blocks in [1, 3, 128, 512] {
        let sim = SimDevice::from_ram(&make_fresh(), 3).with_blocks_at_once(blocks);
        let (store, _) = open(&sim).unwrap();
        for now in [false, true] {
            let changes = (1..=200).map(|ino| write(ino, &[u8::from(now)])).collect();
            store.commit(store.take_turn(), changes, now, &mut |_, _| None).unwrap();
        }
        let records: Vec<(u64, [u8; 4096])> = (2048..2348).map(|at| (at, [7; 4096])).collect();
        store.write_blocks(&records).unwrap();
        let (_, found) = open(&SimDevice::from_ram(&sim.copy_present(), 1)).unwrap();
        assert_eq!(found.inodes().len(), 200, "{blocks} blocks");
        assert!(found.inodes().iter().all(|(_, body)| *body == [1]), "{blocks} blocks");
        let mut line = BlockingQueue::new(&sim).unwrap();
        let mut out = vec![0; 300 * 4096];
        line.read(2048, &mut out).unwrap();
        assert!(out.iter().all(|byte| *byte == 7), "{blocks} blocks");
    }
}

/// A device whose queues panic at each reap, once `panics` is set.
struct PanickingDevice {
    inner: RamDevice,
    panics: Arc<AtomicBool>,
}

struct PanickingQueue {
    inner: Box<dyn DeviceQueue>,
    panics: Arc<AtomicBool>,
}

impl BlockDevice for PanickingDevice {
    fn properties(&self) -> &DeviceProperties {
        self.inner.properties()
    }
    fn register(&self, region: &Arc<MemoryRegion>) -> Result<(), Errno> {
        self.inner.register(region)
    }
    fn queue(&self, depth: u32) -> Result<Box<dyn DeviceQueue>, Errno> {
        let (inner, panics) = (self.inner.queue(depth)?, Arc::clone(&self.panics));
        Ok(Box::new(PanickingQueue { inner, panics }))
    }
}

impl DeviceQueue for PanickingQueue {
    fn push(&mut self, op: BlockOp) -> Result<(), BlockOp> {
        self.inner.push(op)
    }
    fn kick(&mut self) {
        self.inner.kick();
    }
    fn reap(&mut self, done: &mut Vec<BlockCompletion>) {
        assert!(!self.panics.load(Ordering::Relaxed), "the queue is broken");
        self.inner.reap(done);
    }
    fn wait(&mut self, timeout: Option<Duration>) {
        self.inner.wait(timeout);
    }
    fn waker(&self) -> QueueWaker {
        self.inner.waker()
    }
    fn in_flight(&self) -> usize {
        self.inner.in_flight()
    }
    fn depth(&self) -> usize {
        self.inner.depth()
    }
}

/// The device keeps the memory of its operations, and the group does not count as written.
#[test]
fn a_device_whose_thread_fails_ends_the_store() {
    let panics = Arc::new(AtomicBool::new(false));
    let broken = PanickingDevice { inner: make_fresh(), panics: Arc::clone(&panics) };
    let worker: Arc<dyn BlockDevice> = Arc::new(WorkerDevice::start_for(Arc::new(broken)).unwrap());
    let survey = survey(&*worker, CommitRules::ALL).unwrap();
    let store =
        InodeStore::begin(worker, &survey, CommitRules::ALL, fastrand::Rng::with_seed(5)).unwrap();
    commit(&store, vec![write(1, b"old")]).unwrap();
    panics.store(true, Ordering::Relaxed);
    for now in [true, false] {
        let changes = vec![write(1, b"new")];
        assert!(store.commit(store.take_turn(), changes, now, &mut |_, _| None).is_err());
    }
    assert!(store.sync(store.newest_group()).is_err());
}

#[test]
fn after_a_flush_that_failed_every_sync_fails() {
    let sim = SimDevice::from_ram(&make_fresh(), 3);
    let (store, _) = open(&sim).unwrap();
    let group = commit(&store, vec![write(1, b"new")]).unwrap();
    sim.fail(|victim| (victim.call == SimOpKind::Flush).then_some(Errno::IO));
    assert!(store.sync(group).is_err());
    sim.end_faults();
    for _ in 0..2 {
        assert_eq!(store.sync(group), Err(StoreError::Failed));
        assert_eq!(store.flush(), Err(StoreError::Failed));
    }
}

#[test]
fn a_superblock_is_written_although_one_of_its_copies_cannot_be() {
    for bad in crate::format::superblock::COPIES {
        let sim = SimDevice::from_ram(&make_fresh(), 3);
        sim.fail(move |victim| {
            (victim.call == SimOpKind::Write && victim.block == bad).then_some(Errno::IO)
        });
        for _ in 0..4 {
            let (store, _) = open(&sim).unwrap();
            let epoch = store.lock().superblock.epoch;
            let mut cuts = sim.power_cuts();
            let mut random = fastrand::Rng::with_seed(bad);
            for _ in 0..20 {
                let survey = survey(&cuts.last().sample(&mut random), CommitRules::ALL).unwrap();
                assert_eq!(survey.superblock.epoch, epoch, "the copy at {bad}");
            }
        }
    }
}

/// Each thread does the I/O of its own groups, so groups are in flight at the same time and
/// complete in any order.
#[test]
fn groups_of_many_threads_are_durable_in_the_order_of_their_turns() {
    const THREADS: u64 = 8;
    let ram = make_fresh();
    let store = survey(&ram, CommitRules::ALL).and_then(|survey| {
        InodeStore::begin(
            Arc::new(ram.clone()),
            &survey,
            CommitRules::ALL,
            fastrand::Rng::with_seed(5),
        )
    });
    let store = store.unwrap();
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let store = &store;
            scope.spawn(move || {
                for round in 0..50_u64 {
                    let changes = vec![write(thread + 1, &round.to_le_bytes())];
                    let now = round % 2 == 0;
                    let group =
                        store.commit(store.take_turn(), changes, now, &mut |_, _| None).unwrap();
                    store.sync(group).unwrap();
                    assert!(store.durable() >= group);
                }
            });
        }
    });
    let found = survey(&ram, CommitRules::ALL).unwrap();
    assert_eq!(found.inodes().len() as u64, THREADS);
    assert!(found.inodes().iter().all(|(_, body)| *body == 49_u64.to_le_bytes()));
}

#[test]
fn a_slot_that_cannot_be_read_is_reported_and_the_others_are_there() {
    let sim = SimDevice::from_ram(&make_fresh(), 3);
    let (store, _) = open(&sim).unwrap();
    commit(&store, (1..=9).map(|ino| write(ino, b"body")).collect()).unwrap();
    store.sync(store.newest_group()).unwrap();
    store.record_clean_state().unwrap();
    sim.fail(|victim| {
        let hit = (victim.block..victim.block + victim.blocks).contains(&515);
        (victim.call == SimOpKind::Read && hit).then_some(Errno::IO)
    });
    let found = survey(&sim, CommitRules::ALL).unwrap();
    assert_eq!(found.unreadable, [515]);
    assert_eq!(found.inodes().len(), 8);
    assert!(found.found.void.is_empty());
}

/// Units from the middle of chunks used up the places of the superblock, and then no inode could be
/// added.
#[test]
fn units_that_are_given_back_leave_places_for_chunks() {
    let mut chunks = vec![SlotChunk { first_unit: 0, units: 4096, key: 1 }];
    let mut taken = 0;
    for unit in (1..4096).step_by(2) {
        let Some(left) = remove_unit(&chunks, unit, CHUNKS) else { break };
        chunks = left;
        taken += 1;
    }
    assert_eq!((chunks.len(), taken), (CHUNKS - CHUNKS_KEPT, CHUNKS - CHUNKS_KEPT - 1));
    // A unit whose removal adds no chunk can be removed nevertheless.
    let before = chunks.len();
    assert_eq!(remove_unit(&chunks, 0, CHUNKS).map(|left| left.len()), Some(before - 1));
}

/// A store of many chunks of one unit each, on a device of `units`.
fn with_table(sim: &SimDevice, chunks: u32) -> InodeStore {
    let (store, _) = open(sim).unwrap();
    let mut next = 8;
    let mut unit = |_: u32, _: UnitUse| {
        next += 2;
        Some((next, 1))
    };
    for _ in 0..chunks {
        store
            .add_slots(&mut |wanted, need| (need == UnitUse::Slots).then(|| unit(wanted, need))?)
            .unwrap();
    }
    store
}

fn large(units: u64) -> SimDevice {
    let ram = RamDevice::new(4096, units * 512);
    make(&ram, [9; 16], &mut fastrand::Rng::with_seed(1)).unwrap();
    SimDevice::from_ram(&ram, 3)
}

fn table(device: &dyn BlockDevice) -> Vec<u64> {
    superblock(device).unwrap().table_blocks().to_vec()
}

#[test]
fn chunks_beyond_those_of_the_superblock_are_found_by_the_next_mount() {
    let sim = large(2048);
    let store = with_table(&sim, 600);
    let inos = 1..=600 * 512 / 4;
    let changes: Vec<InodeChange> = inos.clone().map(|ino| write(ino, b"body")).collect();
    commit(&store, changes).unwrap();
    store.sync(store.newest_group()).unwrap();
    let (after, found) = open(&SimDevice::from_ram(&sim.copy_present(), 1)).unwrap();
    assert_eq!((found.superblock.chunks.len(), found.inodes().len() as u64), (601, *inos.end()));
    // 381 chunks in two blocks, each of them twice.
    assert_eq!(found.superblock.table_blocks().len(), 4);
    assert_eq!(after.slots().0, 601 * 512 - 4);
    // No slot is one of the table.
    let free = after.progress().slots_free;
    assert_eq!(free, 601 * 512 - 4 - *inos.end());
}

/// The former table is overwritten only when no copy of the superblock leads to it, and its blocks
/// are slots then.
#[test]
fn a_table_moves_with_each_change_and_its_former_blocks_are_slots_again() {
    let sim = large(1024);
    let store = with_table(&sim, 300);
    let before = table(&sim);
    let slots = store.slots().0;
    let granted = store.give_back(64, 2, true).unwrap();
    assert_eq!((granted.len(), store.slots().0), (2, slots - 1024));
    let now = table(&sim);
    assert!(now.iter().all(|block| !before.contains(block)), "{now:?} {before:?}");
    assert!(now.iter().all(|block| !granted.contains(&((block / 512) as u32))));
    // Every copy leads to the present table, even if the power fails now.
    let mut cuts = sim.power_cuts();
    let cut = cuts.last().sample(&mut fastrand::Rng::with_seed(1));
    for copy in COPIES {
        let mut bytes = vec![0; 4096];
        BlockingQueue::new(&cut).unwrap().read(copy, &mut bytes).unwrap();
        let found = Superblock::decode(&bytes).unwrap();
        let first = found.table.map(|table| table.first.blocks);
        assert_eq!(first, Some([now[0], now[1]]), "the copy at block {copy}");
    }
    // All slots that are free can be taken: the former blocks of the table are among them.
    let free = store.progress().slots_free;
    commit(&store, (1..=free).map(|ino| write(ino, b"body")).collect()).unwrap();
    store.sync(store.newest_group()).unwrap();
    let (_, found) = open(&SimDevice::from_ram(&sim.copy_present(), 1)).unwrap();
    assert_eq!((found.inodes().len() as u64, table(&sim)), (free, now));
}

/// The number of states after a power failure that no mount takes, of a run that adds chunks and
/// gives units back.
fn unusable_after_cuts(rules: CommitRules) -> usize {
    let ram = RamDevice::new(4096, 64 * 512);
    make(&ram, [9; 16], &mut fastrand::Rng::with_seed(1)).unwrap();
    let sim = SimDevice::from_ram(&ram, 3);
    let survey = survey(&sim, rules).unwrap();
    let random = fastrand::Rng::with_seed(5);
    let store = InodeStore::begin(Arc::new(sim.clone()), &survey, rules, random).unwrap();
    let mut next = 8;
    for _ in 0..4 {
        store
            .add_slots(&mut |_, need| {
                next += 2;
                (need == UnitUse::Slots).then_some((next, 1))
            })
            .unwrap();
        commit(&store, (1..=600).map(|ino| write(ino, b"body")).collect()).unwrap();
    }
    store.sync(store.newest_group()).unwrap();
    store.give_back(64, 1, true).unwrap();
    drop(store);
    let mut cuts = sim.power_cuts();
    let (mut random, mut unusable) = (fastrand::Rng::with_seed(7), 0);
    while let Some(cut) = cuts.next() {
        let states: Vec<RamDevice> = match cut.is_small() {
            true => cut.combinations().collect(),
            false => (0..4).map(|_| cut.sample(&mut random)).collect(),
        };
        unusable += states.iter().filter(|state| superblock(*state).is_err()).count();
    }
    unusable
}

#[test]
fn after_a_power_failure_a_superblock_leads_to_a_whole_table() {
    let rules = CommitRules { listed_chunks: 1, ..CommitRules::ALL };
    assert_eq!(unusable_after_cuts(rules), 0);
    let without = CommitRules { tables_come_first: false, ..rules };
    assert!(unusable_after_cuts(without) > 0, "a superblock may overtake its table");
}

#[test]
fn a_damaged_copy_of_the_table_is_reported_and_written_anew_and_two_are_refused() {
    let sim = large(1024);
    drop(with_table(&sim, 300));
    let good = sim.copy_present();
    let blocks = table(&good);
    for damaged in [0, 1] {
        let ram = good.fork();
        BlockingQueue::new(&ram).unwrap().write(blocks[damaged], &[7; 4096]).unwrap();
        assert_eq!(find_bad(&ram).unwrap().tables, [blocks[damaged]]);
        let (_, found) = open(&SimDevice::from_ram(&ram, 1)).unwrap();
        assert_eq!(found.superblock.chunks.len(), 301);
    }
    let ram = good.fork();
    BlockingQueue::new(&ram).unwrap().write(blocks[1], &[7; 4096]).unwrap();
    let sim = SimDevice::from_ram(&ram, 1);
    drop(open(&sim).unwrap());
    assert_eq!(find_bad(&sim.copy_present()).unwrap(), BadCopies::default());
    let mut line = BlockingQueue::new(&ram).unwrap();
    line.write(blocks[0], &[7; 4096]).unwrap();
    let lost = SuperblockError::Table { blocks: [blocks[0], blocks[1]] };
    assert_eq!(superblock(&ram).unwrap_err(), StoreError::Unusable(lost));
}

/// A right checksum proves nothing, since an image may be forged.
#[test]
fn a_forged_table_is_refused() {
    let sim = large(1024);
    drop(with_table(&sim, 300));
    let good = sim.copy_present();
    let sound = superblock(&good).unwrap();
    let forge = |change: &dyn Fn(&mut TableBlock, &mut [u64; 2])| {
        let ram = good.fork();
        let mut line = BlockingQueue::new(&ram).unwrap();
        let first = sound.table.as_ref().unwrap().first;
        let mut bytes = vec![0; 4096];
        line.read(first.blocks[0], &mut bytes).unwrap();
        let mut block = TableBlock::decode(&bytes, &sound.uuid).unwrap();
        let mut places = first.blocks;
        change(&mut block, &mut places);
        let bytes = block.encode(&sound.uuid);
        places.iter().for_each(|place| line.write(*place, &bytes).unwrap());
        let mut forged = sound.clone();
        forged.table.as_mut().unwrap().first =
            TablePointer { blocks: places, crc: crc32c::crc32c(&bytes) };
        write_superblock(&mut line, &forged).unwrap();
        superblock(&ram).map(|found| found.chunks.len())
    };
    assert_eq!(forge(&|_, _| {}), Ok(301));
    let damaged = || Err(StoreError::Unusable(SuperblockError::Damaged));
    // Outside of all chunks, twice in one place, a chunk beyond the end, chunks that overlap.
    assert_eq!(forge(&|_, places| places[0] = 8), damaged());
    assert_eq!(forge(&|_, places| places[1] = places[0]), damaged());
    assert_eq!(forge(&|block, _| block.chunks[0].units = 4096), damaged());
    assert_eq!(forge(&|block, _| block.chunks[0] = block.chunks[1]), damaged());
    let nowhere = TablePointer { blocks: [u64::MAX, 1 << 40], crc: 0 };
    let lost = SuperblockError::Table { blocks: nowhere.blocks };
    assert_eq!(forge(&|block, _| block.next = Some(nowhere)), Err(StoreError::Unusable(lost)));
}
