//! Power cuts of a controller with a volatile cache: flushed data survives in any case.

use defuse_block::{
    BlockDevice, BlockOp, BlockOpKind, BlockingQueue, DeviceQueue, MemoryRegion, MemorySegments,
    OperationMemory, SimDevice,
};
use defuse_nvme::{ControllerModel, NvmeDevice, NvmeOptions};

/// Writes one block in each of `rounds` rounds, each followed by a flush or written with FUA.
/// Returns for each the number of events of the simulation after which it was durable.
fn write(sim: &SimDevice, rounds: u64) -> Vec<usize> {
    let model = ControllerModel::new(sim, 5).unwrap();
    let disk = NvmeDevice::open(model, &NvmeOptions::default()).unwrap();
    let region = MemoryRegion::new(8).unwrap();
    disk.register(&region).unwrap();
    let mut queue = disk.queue(4).unwrap();
    let finish = |queue: &mut dyn DeviceQueue| {
        let mut done = Vec::new();
        while queue.in_flight() > 0 {
            queue.wait(None);
            queue.reap(&mut done);
        }
        assert!(done.iter().all(|done| done.result.is_ok()));
    };
    let mut durable = Vec::new();
    for round in 0..rounds {
        let fua = round % 2 == 1;
        let mut run = region.take(1).unwrap();
        run.fill(round as u8 + 1);
        let memory = MemorySegments::One(OperationMemory::Frames(run));
        queue
            .push(BlockOp { tag: 0, kind: BlockOpKind::Write { block: round, memory, fua } })
            .unwrap();
        finish(&mut *queue);
        if !fua {
            queue.push(BlockOp { tag: 1, kind: BlockOpKind::Flush }).unwrap();
            finish(&mut *queue);
        }
        durable.push(sim.events());
    }
    durable
}

/// True if all rounds that were durable before a cut are there after it.
fn holds(sim: &SimDevice, durable: &[usize]) -> bool {
    let mut cuts = sim.power_cuts();
    let mut holds = true;
    while let Some(cut) = cuts.next() {
        let rounds = durable.iter().filter(|events| **events <= cut.event_index()).count();
        for state in cut.combinations() {
            let mut bytes = vec![0; durable.len() * 4096];
            BlockingQueue::new(&state).unwrap().read(0, &mut bytes).unwrap();
            let mut blocks = bytes.chunks(4096).enumerate().take(rounds);
            holds &= blocks.all(|(at, block)| block.iter().all(|byte| *byte == at as u8 + 1));
        }
    }
    holds
}

#[test]
fn what_was_flushed_or_written_through_survives_a_power_cut() {
    let sim = SimDevice::new(64, 3);
    let durable = write(&sim, 12);
    assert!(holds(&sim, &durable));
}

/// This test shows that the other one can fail.
#[test]
fn a_controller_whose_flushes_lie_is_noticed() {
    let sim = SimDevice::new(64, 3);
    sim.ignore_flushes();
    let durable = write(&sim, 12);
    assert!(!holds(&sim, &durable));
}
