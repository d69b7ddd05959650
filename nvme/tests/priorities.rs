//! Priorities of queues: the priorities that the controller receives, and the time that an urgent
//! read then takes.

use std::sync::Arc;
use std::time::Duration;

use defuse_block::{
    BlockCompletion, BlockDevice, BlockOp, BlockOpKind, DeviceQueue, MemoryRegion, QueuePriority,
    QueuePurpose, RamDevice,
};
use defuse_block::{SeparatedDevice, SeparationOptions};
use defuse_nvme::model::{ControllerFault, ModelProperties};
use defuse_nvme::{ControllerModel, ControllerTransport, NvmeDevice, NvmeOptions};

/// Queues of low priority.
const CROWD: usize = 8;

/// Operations in flight of each queue of low priority.
const DEPTH: u64 = 16;

fn open(priorities: bool) -> (ControllerModel, NvmeDevice) {
    let shape = ModelProperties {
        priorities,
        slots: 4,
        latency_us: (20, 40),
        ..ModelProperties::default()
    };
    let model = ControllerModel::with(&RamDevice::new(4096, 1024), 3, shape).unwrap();
    let disk = NvmeDevice::open(model.clone(), &NvmeOptions::default()).unwrap();
    (model, disk)
}

#[test]
fn the_controller_is_told_of_priorities_where_it_has_them() {
    let (model, disk) = open(true);
    assert!(disk.has_priorities());
    let mut queues = vec![
        disk.queue(4).unwrap(),
        disk.queue_with(QueuePriority::High, 4).unwrap(),
        disk.queue_with(QueuePriority::Low, 4).unwrap(),
        disk.queue_for(QueuePurpose::Behind, 4).unwrap(),
    ];
    let expected = [(1, 2), (2, 1), (3, 3), (4, 3)];
    assert_eq!(model.priorities(), expected);
    // A reset forgets the queues, and they are made again with their priorities.
    model.fail(|victim| (victim.number == 0).then_some(ControllerFault::Break));
    queues[1].push(BlockOp { tag: 0, kind: BlockOpKind::Flush }).unwrap();
    for queue in &mut queues {
        let mut done = Vec::new();
        while queue.in_flight() > 0 {
            queue.wait(None);
            queue.reap(&mut done);
        }
        queue.reap(&mut done);
        queue.push(BlockOp { tag: 0, kind: BlockOpKind::Flush }).unwrap();
        while queue.in_flight() > 0 {
            queue.wait(None);
            queue.reap(&mut done);
        }
        assert!(done.iter().all(|done| done.result.is_ok()));
    }
    assert_eq!((disk.count_resets(), model.priorities()), (1, expected.to_vec()));
    assert_eq!(model.weights(), Some([16, 4, 1]), "also after the reset");
    drop(queues);
    let (model, disk) = open(false);
    assert!(!disk.has_priorities());
    let _queue = disk.queue_with(QueuePriority::High, 4).unwrap();
    assert_eq!(model.priorities(), [(1, 0)], "the field is reserved without priorities");
    assert_eq!(model.weights(), None);
}

#[test]
fn separated_queues_of_small_operations_are_of_high_priority() {
    let (model, disk) = open(true);
    let separated =
        SeparatedDevice::new(Arc::new(disk), &SeparationOptions::new_divided(4, 8)).unwrap();
    // Small reads, large reads, writes, and operations for which no caller waits.
    assert_eq!(model.priorities(), [(1, 1), (2, 2), (3, 2), (4, 3)]);
    drop(separated);
}

/// Keeps a queue full of writes.
fn refill(queue: &mut dyn DeviceQueue, region: &Arc<MemoryRegion>, tag: u64) {
    let mut done: Vec<BlockCompletion> = Vec::new();
    queue.reap(&mut done);
    done.clear();
    while (queue.in_flight() as u64) < DEPTH {
        let kind =
            BlockOpKind::Write { block: tag, memory: region.take(1).unwrap().into(), fua: false };
        queue.push(BlockOp { tag, kind }).unwrap();
    }
    queue.kick();
}

/// The mean time of reads beside queues full of writes, in virtual time.
fn time_of_reads(priorities: bool) -> Duration {
    const READS: u32 = 200;
    let (model, disk) = open(priorities);
    let region = MemoryRegion::new(1024).unwrap();
    disk.register(&region).unwrap();
    let low = || disk.queue_with(QueuePriority::Low, DEPTH as u32).unwrap();
    let mut crowd: Vec<Box<dyn DeviceQueue>> = (0..CROWD).map(|_| low()).collect();
    let mut reads = disk.queue_with(QueuePriority::High, 1).unwrap();
    let mut time = Duration::ZERO;
    for read in 0..READS {
        for (tag, queue) in crowd.iter_mut().enumerate() {
            refill(&mut **queue, &region, tag as u64);
        }
        let (begin, mut done) = (model.now(), Vec::new());
        let memory = region.take(1).unwrap().into();
        let kind = BlockOpKind::Read { block: u64::from(read), memory };
        reads.push(BlockOp { tag: 0, kind }).unwrap();
        while done.is_empty() {
            reads.wait(None);
            reads.reap(&mut done);
        }
        assert_eq!(done[0].result, Ok(()));
        time += model.now() - begin;
    }
    time / READS
}

#[test]
fn a_read_of_high_priority_passes_queues_that_are_full_of_writes() {
    let (with, without) = (time_of_reads(true), time_of_reads(false));
    println!("a read beside {CROWD} queues of writes: {with:?}, without priorities {without:?}");
    assert!(with.as_secs_f64() < 0.75 * without.as_secs_f64(), "{with:?} and {without:?}");
}
