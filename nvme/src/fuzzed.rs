//! A controller that lies, for the fuzzer.

use std::sync::Arc;
use std::time::Duration;

use defuse_block::{
    BlockCompletion, BlockDevice, BlockOp, BlockOpKind, Errno, FrameRun, MemoryRegion, RamDevice,
    Result,
};

use crate::model::ModelProperties;
use crate::{ControllerModel, NvmeDevice, NvmeOptions};

/// Operations of a run.
const OPERATIONS: u64 = 48;

/// Runs operations on a controller whose registers and completions `script` falsifies: from the
/// first register on, or, for an odd first byte, from the first operation on.
///
/// # Panics
///
/// Panics if an operation does not have exactly one answer, memory does not come back, or a run
/// does not end.
pub fn controller(script: &[u8]) {
    let shape =
        ModelProperties { maps: false, queues: 2, entries: 64, ..ModelProperties::default() };
    let disk = RamDevice::new(4096, 256);
    let Ok(model) = ControllerModel::with(&disk, 1, shape) else { return };
    let from_the_start = script.first().is_none_or(|byte| byte % 2 == 0);
    let script = script.get(1..).unwrap_or_default();
    if from_the_start {
        model.falsify(script);
    }
    let options = NvmeOptions { timeout: Duration::from_secs(1), ..NvmeOptions::default() };
    let Ok(device) = NvmeDevice::open(model.clone(), &options) else { return };
    if !from_the_start {
        model.falsify(script);
    }
    // The facts are in bounds, independently of the controller's claims.
    let facts = device.properties();
    assert!(facts.block_size >= 512 && facts.block_size.is_power_of_two(), "{facts:?}");
    assert!(facts.max_transfer >= facts.block_size && facts.blocks > 0, "{facts:?}");
    let Ok(region) = MemoryRegion::new(OPERATIONS as u32 * 16) else { return };
    run(&device, &region);
    assert_eq!(region.free_frames(), region.frames(), "memory is missing");
}

/// Pushes operations of every kind, and checks that each is answered once.
fn run(device: &NvmeDevice, region: &Arc<MemoryRegion>) {
    let Ok(mut queue) = device.queue(8) else { return };
    let mut random = fastrand::Rng::with_seed(1);
    let (mut done, mut pushed, mut answers) = (Vec::new(), 0, vec![0; OPERATIONS as usize]);
    while pushed < OPERATIONS || queue.in_flight() > 0 {
        if pushed < OPERATIONS {
            let kind = operation(device, region, &mut random);
            pushed += u64::from(queue.push(BlockOp { tag: pushed, kind }).is_ok());
        }
        queue.wait(None);
        queue.reap(&mut done);
        for BlockCompletion { tag, result, .. } in done.drain(..) {
            answers[tag as usize] += 1;
            check_error(result);
        }
    }
    drop(queue);
    assert!(answers.iter().all(|answers| *answers == 1), "{answers:?}");
    let _ = (device.smart(), device.errors(), device.events());
}

fn operation(
    device: &NvmeDevice,
    region: &Arc<MemoryRegion>,
    random: &mut fastrand::Rng,
) -> BlockOpKind {
    let facts = device.properties();
    let frame = u64::from(facts.block_size.max(4096));
    let frames = (frame / 4096 * random.u64(1..4)).min(16) as u32;
    let block = random.u64(..facts.blocks.min(200));
    let memory = || region.take(frames).map(FrameRun::into);
    match random.u8(..6) {
        0 => BlockOpKind::Flush,
        1 => BlockOpKind::Discard { block, blocks: 3 },
        2 => BlockOpKind::Zero { block, blocks: 3 },
        3 => BlockOpKind::Read { block, memory: memory().unwrap_or_default() },
        fua => BlockOpKind::Write { block, memory: memory().unwrap_or_default(), fua: fua == 4 },
    }
}

/// Checks that an error is a possible error of operations of a device.
fn check_error(result: Result<()>) {
    let Err(errno) = result else { return };
    let all = [
        Errno::IO,
        Errno::INVAL,
        Errno::TIMEDOUT,
        Errno::OPNOTSUPP,
        Errno::NOSPC,
        Errno::ROFS,
        Errno::PERM,
        Errno::ACCESS,
        Errno::NOMEM,
    ];
    assert!(all.contains(&errno), "{errno:?} is no error of a device");
}
