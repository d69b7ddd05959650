use std::collections::BTreeSet;

use super::*;
use crate::{BlockCompletion, BlockOp, BlockingQueue, MemorySegments};

fn block(fill: u8) -> MemorySegments {
    let mut frames = MemoryRegion::new(1).unwrap().take(1).unwrap();
    frames.fill(fill);
    frames.into()
}

fn write(tag: u64, block_at: u64, fill: u8, fua: bool) -> BlockOp {
    BlockOp { tag, kind: BlockOpKind::Write { block: block_at, memory: block(fill), fua } }
}

fn reap_all(queue: &mut dyn DeviceQueue) -> Vec<BlockCompletion> {
    let mut done = Vec::new();
    while queue.in_flight() > 0 {
        queue.wait(None);
        queue.reap(&mut done);
    }
    done
}

/// The first bytes of the first blocks, in every state of the last moment.
fn collect_ends(sim: &SimDevice, blocks: u64) -> BTreeSet<Vec<u8>> {
    let mut cuts = sim.power_cuts();
    let first = |ram: RamDevice| -> Vec<u8> {
        let mut line = BlockingQueue::new(&ram).unwrap();
        let mut bytes = vec![0; 4096];
        (0..blocks)
            .map(|at| {
                line.read(at, &mut bytes).unwrap();
                bytes[0]
            })
            .collect()
    };
    cuts.last().combinations().map(first).collect()
}

#[test]
fn a_flush_covers_what_was_reaped_before_it_and_nothing_else() {
    let sim = SimDevice::new(4, 1);
    let mut queue = sim.queue(8).unwrap();
    queue.push(write(1, 0, 1, false)).unwrap();
    reap_all(&mut *queue);
    queue.push(write(2, 1, 2, false)).unwrap();
    queue.push(BlockOp { tag: 3, kind: BlockOpKind::Flush }).unwrap();
    reap_all(&mut *queue);
    let expected = [[1, 0], [1, 2]].map(Vec::from);
    assert_eq!(collect_ends(&sim, 2), BTreeSet::from(expected));
}

#[test]
fn a_flush_covers_the_writes_of_a_queue_that_was_dropped() {
    let sim = SimDevice::new(4, 1);
    let mut queue = sim.queue(8).unwrap();
    queue.push(write(1, 0, 1, false)).unwrap();
    drop(queue);
    BlockingQueue::new(&sim).unwrap().flush().unwrap();
    assert_eq!(collect_ends(&sim, 1), BTreeSet::from([vec![1]]));
}

#[test]
fn a_write_with_fua_is_there_once_it_is_reaped() {
    let sim = SimDevice::new(4, 2);
    let mut queue = sim.queue(8).unwrap();
    queue.push(write(1, 0, 1, true)).unwrap();
    queue.push(write(2, 1, 2, false)).unwrap();
    reap_all(&mut *queue);
    assert_eq!(collect_ends(&sim, 2), BTreeSet::from([vec![1, 0], vec![1, 2]]));
}

#[test]
fn of_two_writes_in_flight_either_wins_and_of_two_in_a_row_the_second() {
    for seed in 0..20 {
        let sim = SimDevice::new(2, seed);
        let mut queue = sim.queue(8).unwrap();
        queue.push(write(1, 0, 1, true)).unwrap();
        queue.push(write(2, 0, 2, true)).unwrap();
        reap_all(&mut *queue);
        assert_eq!(collect_ends(&sim, 1), BTreeSet::from([vec![1], vec![2]]), "seed {seed}");
        queue.push(write(3, 0, 3, true)).unwrap();
        reap_all(&mut *queue);
        assert_eq!(collect_ends(&sim, 1), BTreeSet::from([vec![3]]), "seed {seed}");
    }
}

#[test]
fn a_device_that_lies_about_flushes_loses_what_it_confirmed() {
    let sim = SimDevice::new(2, 3);
    sim.ignore_flushes();
    let mut line = BlockingQueue::new(&sim).unwrap();
    line.write(0, &[9; 4096]).unwrap();
    line.flush().unwrap();
    assert_eq!(collect_ends(&sim, 1), BTreeSet::from([vec![0], vec![9]]));
}

#[test]
fn a_write_that_failed_leaves_sectors_old_or_new_until_another_one_replaces_them() {
    let sim = SimDevice::new(2, 4);
    let mut line = BlockingQueue::new(&sim).unwrap();
    sim.fail(|victim| (victim.call == SimOpKind::Write).then_some(Errno::IO));
    assert_eq!(line.write(0, &[9; 4096]), Err(Errno::IO));
    sim.end_faults();
    let mut bytes = [0; 4096];
    line.read(0, &mut bytes).unwrap();
    assert!(bytes.chunks(512).all(|sector| sector == [0; 512] || sector == [9; 512]));
    line.flush().unwrap();
    assert_eq!(collect_ends(&sim, 1), BTreeSet::from([vec![0], vec![9]]));
    line.write(0, &[5; 4096]).unwrap();
    line.flush().unwrap();
    assert_eq!(collect_ends(&sim, 1), BTreeSet::from([vec![5]]));
}

#[test]
fn discarded_blocks_hold_anything_until_they_are_written() {
    let sim = SimDevice::new(1, 5);
    let mut line = BlockingQueue::new(&sim).unwrap();
    line.write(0, &[7; 4096]).unwrap();
    line.run(BlockOpKind::Discard { block: 0, blocks: 1 }).unwrap();
    line.flush().unwrap();
    let mut cuts = sim.power_cuts();
    let cut = cuts.last();
    let mut random = fastrand::Rng::with_seed(1);
    let mut found = BTreeSet::new();
    for _ in 0..40 {
        let mut bytes = vec![0; 4096];
        BlockingQueue::new(&cut.sample(&mut random)).unwrap().read(0, &mut bytes).unwrap();
        found.insert(bytes);
    }
    assert!(found.len() > 3, "old, zeros and garbage: {}", found.len());
}

#[test]
fn torn_writes_mix_sectors_of_512_bytes() {
    let sim = SimDevice::new(1, 6);
    BlockingQueue::new(&sim).unwrap().write(0, &[7; 4096]).unwrap();
    let mut cuts = sim.power_cuts();
    let cut = cuts.last();
    let mut random = fastrand::Rng::with_seed(1);
    let mut mixed = 0;
    for _ in 0..100 {
        let mut bytes = vec![0; 4096];
        BlockingQueue::new(&cut.sample(&mut random)).unwrap().read(0, &mut bytes).unwrap();
        let sectors: BTreeSet<&[u8]> = bytes.chunks(512).collect();
        assert!(sectors.iter().all(|sector| *sector == [0; 512] || *sector == [7; 512]));
        mixed += usize::from(sectors.len() == 2);
    }
    assert!(mixed > 0);
}

#[test]
fn a_seed_replays_a_run() {
    let run = |seed| {
        let sim = SimDevice::new(16, seed);
        let mut queue = sim.queue(16).unwrap();
        (0..16).for_each(|at| queue.push(write(at, at, at as u8, false)).unwrap());
        let order: Vec<u64> = reap_all(&mut *queue).into_iter().map(|done| done.tag).collect();
        (order, format!("{:?}", sim.lock().events))
    };
    assert_eq!(run(11), run(11));
    assert_ne!(run(11).0, run(12).0);
}

#[test]
fn an_operation_outside_of_the_device_or_of_another_length_is_refused() {
    let sim = SimDevice::new(4, 7);
    let mut queue = sim.queue(8).unwrap();
    queue.push(write(1, 4, 1, false)).unwrap();
    queue.push(write(2, u64::MAX, 1, false)).unwrap();
    queue.push(BlockOp { tag: 3, kind: BlockOpKind::Zero { block: 0, blocks: 0 } }).unwrap();
    let memory = MemorySegments::default();
    queue.push(BlockOp { tag: 4, kind: BlockOpKind::Read { block: 0, memory } }).unwrap();
    let results: Vec<_> = reap_all(&mut *queue).into_iter().map(|done| done.result).collect();
    assert_eq!(results, [Err(Errno::INVAL); 4]);
}
