use std::collections::HashMap;

use super::schedule::{OperationSchedule, PushedOperation};
use super::*;
use crate::{
    BlockCompletion, BlockOp, BlockOpKind, DeviceAccess, FileDevice, MemorySegments, RamDevice,
    SimDevice,
};

const BLOCKS: u64 = 64;

fn modes() -> Vec<SeparationOptions> {
    let mut separations = Vec::new();
    for mode in [SeparationMode::Off, SeparationMode::Static, SeparationMode::Learned] {
        separations.push(SeparationOptions::open(mode, 4, 8));
        let one = |class: &OperationClass| ClassSet::from_classes(&[*class]);
        let queues = OperationClass::ALL.iter().map(one).collect();
        separations.push(SeparationOptions {
            queues,
            caps: true,
            ..SeparationOptions::open(mode, 4, 8)
        });
    }
    separations.iter_mut().for_each(|separation| separation.large = 3 * 4096);
    separations
}

/// Pushes random operations, and checks that each read finds the writes that were pushed before it
/// and none that was pushed after it.
fn play(device: &Arc<dyn BlockDevice>, separation: &SeparationOptions, seed: u64) {
    let device = SeparatedDevice::new(Arc::clone(device), separation).unwrap();
    let mut queue = device.queue(32).unwrap();
    let region = MemoryRegion::new(256).unwrap();
    let mut random = fastrand::Rng::with_seed(seed);
    let mut model = vec![0_u8; BLOCKS as usize];
    let mut expected: HashMap<u64, Vec<u8>> = HashMap::new();
    let mut done = Vec::new();
    for tag in 0..600 {
        let count = random.u64(1..5);
        let block = random.u64(..BLOCKS - count);
        let range = block as usize..(block + count) as usize;
        let mut memory = region.take(count as u32).unwrap();
        let kind = match random.u8(..12) {
            0 => BlockOpKind::Flush,
            1 => {
                model[range].fill(0);
                BlockOpKind::Zero { block, blocks: count }
            }
            2..7 => {
                let byte = random.u8(1..);
                model[range].fill(byte);
                memory.fill(byte);
                BlockOpKind::Write { block, memory: memory.into(), fua: false }
            }
            _ => {
                expected.insert(tag, model[range].to_vec());
                BlockOpKind::Read { block, memory: memory.into() }
            }
        };
        let mut op = BlockOp { tag, kind };
        while let Err(again) = queue.push(op) {
            op = again;
            queue.wait(None);
            queue.reap(&mut done);
            done.drain(..).for_each(|one| check(&mut expected, one));
        }
        if random.u8(..4) == 0 {
            queue.kick();
        }
    }
    while queue.in_flight() > 0 {
        queue.wait(None);
        queue.reap(&mut done);
        done.drain(..).for_each(|one| check(&mut expected, one));
    }
    assert!(expected.is_empty());
}

fn check(expected: &mut HashMap<u64, Vec<u8>>, done: BlockCompletion) {
    done.result.unwrap();
    if let Some(blocks) = expected.remove(&done.tag) {
        let frames = done.memory.into_frames().unwrap();
        for (byte, block) in blocks.iter().zip(frames.chunks(4096)) {
            assert!(block.iter().all(|found| found == byte), "operation {}", done.tag);
        }
    }
}

#[test]
fn operations_on_the_same_blocks_keep_their_order() {
    for (seed, separation) in (0..).zip(modes()) {
        let play = |device: Arc<dyn BlockDevice>, seed| play(&device, &separation, seed);
        play(Arc::new(RamDevice::new(4096, BLOCKS)), seed);
        for seed in 0..20 {
            play(Arc::new(SimDevice::new(BLOCKS, seed)), seed);
        }
        play(Arc::new(crate::SsdModel::new(BLOCKS, &Default::default())), seed);
    }
}

fn file() -> (tempfile::TempDir, Arc<dyn BlockDevice>) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("disk");
    std::fs::File::create(&path).unwrap().set_len(BLOCKS * 4096).unwrap();
    let file = FileDevice::open(&path, DeviceAccess::ReadWrite).unwrap();
    (dir, Arc::new(file))
}

#[test]
fn the_queues_of_a_file_are_waited_for_together() {
    let (_dir, file) = file();
    for (seed, separation) in (0..).zip(modes()) {
        let mut line = crate::BlockingQueue::new(&*file).unwrap();
        line.write(0, &vec![0; (BLOCKS * 4096) as usize]).unwrap();
        play(&file, &separation, seed);
    }
}

#[test]
fn a_waker_ends_the_wait_for_all_queues() {
    let (_dir, file) = file();
    let devices: [Arc<dyn BlockDevice>; 2] = [file, Arc::new(RamDevice::new(4096, BLOCKS))];
    for device in devices {
        let device =
            SeparatedDevice::new(device, &SeparationOptions::open(SeparationMode::Static, 3, 4))
                .unwrap();
        let mut queue = device.queue(4).unwrap();
        let waker = queue.waker();
        let thread = std::thread::spawn(move || waker.wake());
        // Ends only if it is woken: nothing is in flight.
        queue.wait(None);
        thread.join().unwrap();
    }
}

#[test]
fn a_flush_makes_everything_durable_that_was_pushed_before_it() {
    for (seed, separation) in (0..).zip(modes()) {
        let sim = SimDevice::new(BLOCKS, seed);
        let device = SeparatedDevice::new(Arc::new(sim.clone()), &separation).unwrap();
        let mut queue = device.queue(32).unwrap();
        let region = MemoryRegion::new(32).unwrap();
        for block in 0..16 {
            let mut memory = region.take(1).unwrap();
            memory.fill(9);
            let memory = MemorySegments::from(memory);
            queue
                .push(BlockOp {
                    tag: block,
                    kind: BlockOpKind::Write { block, memory, fua: false },
                })
                .unwrap();
        }
        queue.push(BlockOp { tag: 99, kind: BlockOpKind::Flush }).unwrap();
        let mut done: Vec<BlockCompletion> = Vec::new();
        while done.iter().all(|one| one.tag != 99) {
            queue.wait(None);
            queue.reap(&mut done);
        }
        assert_eq!(done.len(), 17, "the flush is the last");
        let mut cuts = sim.power_cuts();
        let cut = cuts.last();
        assert_eq!(cut.open(), 0);
        let survivor = cut.combinations().next().unwrap();
        let mut line = crate::BlockingQueue::new(&survivor).unwrap();
        let mut bytes = vec![0; 16 * 4096];
        line.read(0, &mut bytes).unwrap();
        assert!(bytes.iter().all(|byte| *byte == 9));
    }
}

#[test]
fn classes_without_a_queue_are_refused() {
    let reads = ClassSet::from_classes(&[OperationClass::SmallRead, OperationClass::LargeRead]);
    let separation = SeparationOptions {
        queues: vec![reads],
        ..SeparationOptions::open(SeparationMode::Static, 1, 4)
    };
    let made = SeparatedDevice::new(Arc::new(RamDevice::new(4096, 8)), &separation);
    assert_eq!(made.err(), Some(Errno::INVAL));
}

/// The queues that operations of these classes go to.
fn queues(separation: &SeparationOptions, classes: &[OperationClass]) -> Vec<usize> {
    let depths = vec![separation.depth as usize; separation.queues.len()];
    let mut schedule = OperationSchedule::new(separation, &depths, 4096);
    let region = MemoryRegion::new(64).unwrap();
    for (block, class) in (0..).zip(classes) {
        let count = if matches!(class, OperationClass::SmallRead | OperationClass::SmallWrite) {
            1
        } else {
            8
        };
        let (block, memory) = (block * 8, region.take(count).unwrap().into());
        let kind = match class {
            OperationClass::SmallRead | OperationClass::LargeRead => {
                BlockOpKind::Read { block, memory }
            }
            _ => BlockOpKind::Write { block, memory, fua: false },
        };
        let op = BlockOp { tag: block, kind };
        let purpose = match class {
            OperationClass::Behind => QueuePurpose::Behind,
            OperationClass::Reclaim => QueuePurpose::Reclaim,
            _ => QueuePurpose::Caller,
        };
        schedule.push(PushedOperation { user: 0, purpose, op });
    }
    let next =
        |schedule: &mut OperationSchedule| schedule.next(Duration::ZERO).map(|(queue, _)| queue);
    std::iter::from_fn(|| next(&mut schedule)).collect()
}

#[test]
fn classes_go_to_the_queues_that_take_them() {
    use OperationClass::{Behind, LargeRead, LargeWrite, Reclaim, SmallRead, SmallWrite};
    let classes = [SmallWrite, SmallRead, LargeWrite, LargeRead, SmallWrite, SmallRead];
    let open = SeparationOptions::open(SeparationMode::Off, 4, 8);
    assert_eq!(queues(&open, &classes), [0, 1, 2, 3, 0, 1]);
    let of = |classes: &[OperationClass]| ClassSet::from_classes(classes);
    let by_way = vec![of(&[SmallRead, LargeRead]), of(&[SmallWrite, LargeWrite])];
    let separation = SeparationOptions {
        queues: by_way,
        ..SeparationOptions::open(SeparationMode::Static, 2, 8)
    };
    assert_eq!(queues(&separation, &classes), [1, 0, 1, 0, 1, 0]);
    let classes = [SmallWrite, Behind, SmallRead, Reclaim, LargeWrite, LargeRead];
    assert_eq!(queues(&SeparationOptions::new_divided(4, 8), &classes), [2, 3, 0, 3, 2, 1]);
    assert_eq!(queues(&SeparationOptions::new_divided(6, 8), &classes), [2, 4, 0, 5, 3, 1]);
}

#[test]
fn every_number_of_queues_takes_every_class() {
    for count in 1..=16 {
        let separation = SeparationOptions::new_divided(count, 8);
        assert_eq!(separation.queues.len(), count);
        assert!(
            SeparatedDevice::new(Arc::new(RamDevice::new(4096, 8)), &separation).is_ok(),
            "{count}"
        );
    }
}

/// Many users at a time, each with blocks of its own, and flushes between.
#[test]
fn users_on_many_threads_get_their_own_completions() {
    const USERS: u64 = 8;
    let (_dir, file) = file();
    let devices: [Arc<dyn BlockDevice>; 2] = [file, Arc::new(RamDevice::new(4096, BLOCKS))];
    for (device, separation) in
        devices.iter().flat_map(|device| modes().into_iter().map(move |s| (device, s)))
    {
        let device = SeparatedDevice::new(Arc::clone(device), &separation).unwrap();
        std::thread::scope(|scope| {
            for user in 0..USERS {
                let device = &device;
                scope.spawn(move || use_own_blocks(device, user));
            }
        });
        assert_eq!(device.queues().iter().map(|queue| queue.in_flight).sum::<usize>(), 0);
    }
}

fn use_own_blocks(device: &SeparatedDevice, user: u64) {
    let purpose =
        [QueuePurpose::Caller, QueuePurpose::Behind, QueuePurpose::Reclaim][user as usize % 3];
    let mut queue = device.queue_for(purpose, 4).unwrap();
    let region = MemoryRegion::new(8).unwrap();
    let mut done: Vec<BlockCompletion> = Vec::new();
    for round in 0..60_u64 {
        let byte = (user * 31 + round) as u8;
        let block = user * 8 + round % 8;
        let mut memory = region.take(1).unwrap();
        memory.fill(byte);
        let write = BlockOpKind::Write { block, memory: memory.into(), fua: false };
        let read = BlockOpKind::Read { block, memory: region.take(1).unwrap().into() };
        let kinds = [Some(write), (round % 5 == 0).then_some(BlockOpKind::Flush), Some(read)];
        for (tag, kind) in (0..).zip(kinds.into_iter().flatten()) {
            queue.push(BlockOp { tag: round * 10 + tag, kind }).unwrap();
        }
        while queue.in_flight() > 0 {
            queue.wait(None);
            queue.reap(&mut done);
        }
        for BlockCompletion { tag, result, memory } in done.drain(..) {
            assert_eq!((tag / 10, result), (round, Ok(())));
            let frames = memory.into_frames();
            assert!(frames.is_none_or(|frames| frames[0] == byte && frames[4095] == byte));
        }
    }
}

/// A write that has begun delays the flush, a read does not.
#[test]
fn a_flush_waits_for_changes_of_all_users_and_for_no_read() {
    let separation = SeparationOptions::open(SeparationMode::Static, 2, 8);
    let mut schedule = OperationSchedule::new(&separation, &[8, 8], 4096);
    let region = MemoryRegion::new(8).unwrap();
    let push = |schedule: &mut OperationSchedule, user, kind| {
        schedule.push(PushedOperation {
            user,
            purpose: QueuePurpose::Caller,
            op: BlockOp { tag: user as u64, kind },
        });
    };
    let memory = || region.take(1).unwrap().into();
    push(&mut schedule, 1, BlockOpKind::Read { block: 1, memory: memory() });
    push(&mut schedule, 2, BlockOpKind::Write { block: 2, memory: memory(), fua: false });
    push(&mut schedule, 3, BlockOpKind::Flush);
    let mut begun: Vec<BlockOp> = Vec::new();
    while let Some((_, op)) = schedule.next(Duration::ZERO) {
        begun.push(op);
    }
    assert_eq!(begun.len(), 2);
    assert_eq!(schedule.count_waiting(None), 1);
    let write = begun.pop().unwrap();
    let done = BlockCompletion { tag: write.tag, result: Ok(()), memory: write.kind.into_memory() };
    assert_eq!(schedule.record_completion(done, Duration::ZERO).0, 2);
    assert!(matches!(
        schedule.next(Duration::ZERO),
        Some((_, BlockOp { kind: BlockOpKind::Flush, .. }))
    ));
}

#[test]
fn more_users_than_there_may_be_are_refused_until_one_leaves() {
    let ram: Arc<dyn BlockDevice> = Arc::new(RamDevice::new(4096, BLOCKS));
    let device =
        SeparatedDevice::new(ram, &SeparationOptions::open(SeparationMode::Off, 1, 4)).unwrap();
    let mut all: Vec<_> = (0..USERS).map(|_| device.queue(1).unwrap()).collect();
    assert_eq!(device.queue(1).err(), Some(Errno::BUSY));
    all.pop();
    assert!(device.queue(1).is_ok());
}

/// A queue that was opened before would not know the memory.
#[test]
fn queues_are_opened_anew_when_memory_is_registered() {
    let ram = Arc::new(crate::CountedDevice::new(Arc::new(RamDevice::new(4096, BLOCKS))));
    let sim = SimDevice::new(BLOCKS, 3);
    for device in [ram as Arc<dyn BlockDevice>, Arc::new(sim), file().1] {
        let device =
            SeparatedDevice::new(device, &SeparationOptions::open(SeparationMode::Off, 2, 4))
                .unwrap();
        let region = MemoryRegion::new(8).unwrap();
        let mut queue = device.queue(4).unwrap();
        let memory = region.take(1).unwrap().into();
        queue
            .push(BlockOp { tag: 1, kind: BlockOpKind::Write { block: 0, memory, fua: false } })
            .unwrap();
        device.register(&region).unwrap();
        assert!(device.shared.lock().is_stale(), "something is in flight");
        while queue.in_flight() > 0 {
            queue.wait(None);
            queue.reap(&mut Vec::new());
        }
        assert!(!device.shared.lock().is_stale());
        let mut line = crate::BlockingQueue::new(&device).unwrap();
        line.write(0, &[5; 4096]).unwrap();
        let mut bytes = [0; 4096];
        line.read(0, &mut bytes).unwrap();
        assert_eq!(bytes, [5; 4096]);
    }
}
