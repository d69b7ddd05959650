//! A modelled controller with an SSD behind it: commands take the stated times of its parts, and
//! the driver takes none.

use std::sync::Arc;
use std::time::Duration;

use defuse_block::model::SsdParameters;
use defuse_block::separation::SeparationMode;
use defuse_block::{
    BlockCompletion, BlockDevice, BlockOp, BlockOpKind, DeviceQueue, Errno, MemoryRegion,
    MemorySegments, RamDevice, SeparatedDevice, SeparationOptions,
};
use defuse_nvme::model::{ControllerFault, ModelProperties};
use defuse_nvme::{ControllerModel, NvmeDevice, NvmeOptions};

const BLOCKS: u64 = 1 << 16;

fn open(parts: &SsdParameters) -> (ControllerModel, NvmeDevice) {
    open_with(1, ModelProperties { parts: Some(parts.clone()), ..ModelProperties::default() })
}

fn open_with(seed: u64, shape: ModelProperties) -> (ControllerModel, NvmeDevice) {
    let model = ControllerModel::with(&RamDevice::new(4096, BLOCKS), seed, shape).unwrap();
    let disk = NvmeDevice::open(model.clone(), &NvmeOptions::default()).unwrap();
    (model, disk)
}

/// A transfer of blocks.
#[derive(Clone, Copy)]
enum BlockTransfer {
    Read(u64, u32),
    Write(u64, u32),
}

impl BlockTransfer {
    fn op(self, tag: u64, region: &Arc<MemoryRegion>) -> BlockOp {
        let memory = |blocks| MemorySegments::from(region.take(blocks).expect("a frame is free"));
        let kind = match self {
            BlockTransfer::Read(block, blocks) => {
                BlockOpKind::Read { block, memory: memory(blocks) }
            }
            BlockTransfer::Write(block, blocks) => {
                BlockOpKind::Write { block, memory: memory(blocks), fua: false }
            }
        };
        BlockOp { tag, kind }
    }
}

/// The course of some transfers: the time of all, and the sum of their own times.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct TransferTimes {
    took: Duration,
    waited: Duration,
}

/// Performs transfers with `depth` of them in flight.
fn run(device: &dyn BlockDevice, depth: u32, steps: &[BlockTransfer]) -> TransferTimes {
    let region = MemoryRegion::new((depth * 16).next_power_of_two()).unwrap();
    device.register(&region).unwrap();
    let (mut queue, clock) = (device.queue(depth).unwrap(), device.clock());
    let (begin, mut waited) = (clock.now(), Duration::ZERO);
    let (mut begun, mut ended, mut done) = (Vec::new(), 0, Vec::new());
    while ended < steps.len() {
        while begun.len() < steps.len() && queue.in_flight() < depth as usize {
            let tag = begun.len();
            begun.push(clock.now());
            queue.push(steps[tag].op(tag as u64, &region)).unwrap();
        }
        queue.wait(None);
        queue.reap(&mut done);
        for BlockCompletion { tag, result, .. } in done.drain(..) {
            assert_eq!(result, Ok(()));
            waited += clock.now() - begun[tag as usize];
            ended += 1;
        }
    }
    TransferTimes { took: clock.now() - begin, waited }
}

/// Performs one operation, and returns its time.
fn measure_one(disk: &NvmeDevice, queue: &mut dyn DeviceQueue, kind: BlockOpKind) -> Duration {
    let begin = disk.clock().now();
    queue.push(BlockOp { tag: 0, kind }).unwrap();
    let mut done = Vec::new();
    while done.is_empty() {
        queue.wait(None);
        queue.reap(&mut done);
    }
    assert_eq!(done[0].result, Ok(()));
    disk.clock().now() - begin
}

/// True where two numbers differ by this part at most.
fn agree(one: Duration, other: Duration, part: f64) -> bool {
    (one.as_secs_f64() / other.as_secs_f64() - 1.0).abs() <= part
}

/// Transfers at random places: reads and writes, small and large.
fn make_mixed(count: usize) -> Vec<BlockTransfer> {
    let mut random = fastrand::Rng::with_seed(3);
    let mut step = || {
        let blocks = if random.u8(..5) == 0 { 16 } else { 1 };
        let block = random.u64(..BLOCKS - 16);
        if random.bool() {
            BlockTransfer::Read(block, blocks)
        } else {
            BlockTransfer::Write(block, blocks)
        }
    };
    (0..count).map(|_| step()).collect()
}

#[test]
fn a_read_takes_the_time_of_its_parts() {
    let parts = SsdParameters::default();
    let (_, disk) = open(&parts);
    let steps: Vec<BlockTransfer> =
        (0..1000).map(|block| BlockTransfer::Read(block * 7, 1)).collect();
    let course = run(&disk, 1, &steps);
    let expected = 1000 * (parts.command + parts.read + parts.transfer);
    assert!(agree(course.took, expected, 0.005), "{course:?} for {expected:?}");
}

#[test]
fn many_reads_use_all_dies() {
    let parts = SsdParameters { queue_commands: 128, ..SsdParameters::default() };
    let (_, disk) = open(&parts);
    let count = 20_000;
    let steps: Vec<BlockTransfer> =
        (0..count).map(|page| BlockTransfer::Read(page * 4 % BLOCKS, 1)).collect();
    let course = run(&disk, 256, &steps);
    let bound = parts.read * count as u32 / parts.dies as u32;
    assert!(course.took >= bound && agree(course.took, bound, 0.03), "{course:?} for {bound:?}");
}

#[test]
fn a_single_die_reads_one_page_after_the_other() {
    let parts = SsdParameters { dies: 1, channels: 1, ..SsdParameters::default() };
    let (_, disk) = open(&parts);
    let steps: Vec<BlockTransfer> =
        (0..1000).map(|page| BlockTransfer::Read(page * 4, 1)).collect();
    let course = run(&disk, 32, &steps);
    assert!(agree(course.took, 1000 * parts.read, 0.01), "{course:?}");
}

#[test]
fn writes_are_complete_in_the_buffer_and_then_as_fast_as_the_dies_program() {
    let parts = SsdParameters::default();
    let (_, disk) = open(&parts);
    let write = |block: u64| BlockTransfer::Write(block * 16 % BLOCKS, 16);
    let few: Vec<BlockTransfer> = (0..parts.buffer_blocks / 16).map(write).collect();
    let course = run(&disk, 1, &few);
    assert!(agree(course.took, few.len() as u32 * parts.command, 0.15), "{course:?}");
    assert!(course.took < parts.program, "{course:?}");
    let many: Vec<BlockTransfer> = (0..4000).map(write).collect();
    let course = run(&disk, 32, &many);
    let pages = 4000 * 16 / parts.page_blocks as u32;
    let bound = parts.program * pages / parts.dies as u32;
    assert!(agree(course.took, bound, 0.03), "{course:?} for {bound:?}");
}

#[test]
fn a_flush_and_a_write_with_fua_take_the_time_of_programs() {
    let parts = SsdParameters { dies: 2, channels: 2, ..SsdParameters::default() };
    let (_, disk) = open(&parts);
    let region = MemoryRegion::new(32).unwrap();
    disk.register(&region).unwrap();
    let mut queue = disk.queue(4).unwrap();
    let write = |blocks, fua| {
        let memory = region.take(blocks).unwrap().into();
        BlockOpKind::Write { block: 9, memory, fua }
    };
    let mut one = |kind| measure_one(&disk, &mut *queue, kind);
    assert!(one(write(1, true)) > parts.program);
    assert!(one(write(16, false)) < parts.read, "it is in the buffer");
    let flush = one(BlockOpKind::Flush);
    // Two pages for each die.
    assert!(agree(flush, 2 * parts.program, 0.05), "{flush:?}");
    let flush = one(BlockOpKind::Flush);
    assert!(flush < 2 * parts.command, "nothing is in the buffer: {flush:?}");
}

#[test]
fn a_read_passes_a_queue_that_is_full_of_writes() {
    let parts = SsdParameters {
        commands: 8,
        queue_commands: 4,
        buffer_blocks: 4,
        ..SsdParameters::default()
    };
    let time_of_read = |parts: &SsdParameters| {
        let (_, disk) = open(parts);
        let region = MemoryRegion::new(128).unwrap();
        disk.register(&region).unwrap();
        let (mut writes, mut reads) = (disk.queue(64).unwrap(), disk.queue(1).unwrap());
        let begin = disk.clock().now();
        for block in 0..64 {
            writes.push(BlockTransfer::Write(block, 1).op(block, &region)).unwrap();
        }
        // Some writes go to the buffer, which is full then.
        while disk.clock().now() < begin + parts.program / 4 {
            writes.wait(Some(parts.program / 20));
            writes.reap(&mut Vec::new());
        }
        let memory = region.take(1).unwrap().into();
        measure_one(&disk, &mut *reads, BlockOpKind::Read { block: 1000, memory })
    };
    let time = time_of_read(&parts);
    assert!(time < 2 * parts.read, "{time:?}");
    let time = time_of_read(&SsdParameters { queue_commands: 8, ..parts.clone() });
    assert!(time > parts.program / 2, "writes have all places of the controller: {time:?}");
}

#[test]
fn nothing_is_left_to_chance() {
    let course = |seed, parts| {
        let (_, disk) = open_with(seed, ModelProperties { parts, ..ModelProperties::default() });
        run(&disk, 64, &make_mixed(2000))
    };
    let parts = || Some(SsdParameters::default());
    assert_eq!(course(1, parts()), course(1, parts()));
    assert_eq!(course(1, parts()), course(2, parts()));
    assert_ne!(course(1, None), course(2, None), "times by chance show here");
}

#[test]
fn transfers_take_as_long_through_the_driver_as_on_the_model_of_an_ssd_itself() {
    for depth in [1, 16, 256] {
        let (_, disk) = open(&SsdParameters::default());
        let through = run(&disk, depth, &make_mixed(5000));
        let ssd = defuse_block::SsdModel::new(BLOCKS, &SsdParameters::default());
        let itself = run(&ssd, depth, &make_mixed(5000));
        println!("depth {depth}: {through:?} through the driver, {itself:?} itself");
        assert!(agree(through.took, itself.took, 0.01), "{depth}: {through:?} {itself:?}");
        assert!(agree(through.waited, itself.waited, 0.01), "{depth}: {through:?} {itself:?}");
    }
}

/// Reads, small and large, each kind in order or at random places.
fn make_reads(count: usize) -> Vec<BlockTransfer> {
    let mut random = fastrand::Rng::with_seed(5);
    let mut step = |at: usize| match at % 2 {
        0 => BlockTransfer::Read(random.u64(..BLOCKS / 2), 1),
        _ => BlockTransfer::Read(BLOCKS / 2 + (at as u64 / 2 * 16) % (BLOCKS / 2), 16),
    };
    (0..count).map(&mut step).collect()
}

/// The answers of all queues are seen when they come, although the test waits for one queue at a
/// time.
#[test]
fn several_queues_take_as_long_through_the_driver_as_on_the_model_of_an_ssd_itself() {
    for mode in [SeparationMode::Off, SeparationMode::Learned] {
        let course = |device: Arc<dyn BlockDevice>| {
            let separated =
                SeparatedDevice::new(device, &SeparationOptions::open(mode, 4, 4)).unwrap();
            run(&separated, 16, &make_reads(5000))
        };
        let through = course(Arc::new(open(&SsdParameters::default()).1));
        let itself =
            course(Arc::new(defuse_block::SsdModel::new(BLOCKS, &SsdParameters::default())));
        println!("{mode:?}: {through:?} through the driver, {itself:?} itself");
        assert!(agree(through.took, itself.took, 0.01), "{mode:?}: {through:?} {itself:?}");
        assert!(agree(through.waited, itself.waited, 0.01), "{mode:?}: {through:?} {itself:?}");
    }
}

#[test]
fn a_look_at_the_clock_that_measures_takes_no_time() {
    let (_, disk) = open(&SsdParameters::default());
    let clock = disk.clock();
    let begin = clock.now();
    assert!(begin > Duration::ZERO, "it was opened in virtual time");
    assert!((0..1000).all(|_| clock.now() == begin));
}

/// A namespace with blocks of 512 bytes: eight of them are a block of the SSD.
#[test]
fn small_blocks_of_a_page_are_read_at_once() {
    let parts = SsdParameters::default();
    let shape = ModelProperties { parts: Some(parts.clone()), ..ModelProperties::default() };
    let model = ControllerModel::with(&RamDevice::new(512, 1024), 1, shape).unwrap();
    let disk = NvmeDevice::open(model, &NvmeOptions::default()).unwrap();
    let region = MemoryRegion::new(4).unwrap();
    disk.register(&region).unwrap();
    let mut queue = disk.queue(1).unwrap();
    let memory = region.take(1).unwrap().into();
    let time = measure_one(&disk, &mut *queue, BlockOpKind::Read { block: 32, memory });
    let expected = parts.command + parts.read + parts.transfer;
    assert!(agree(time, expected, 0.01), "{time:?} for {expected:?}");
}

#[test]
fn commands_without_an_answer_time_out_and_a_reset_forgets_what_dies_work_on() {
    for (fault, resets) in [(ControllerFault::Ignore, 0), (ControllerFault::Forget, 1)] {
        let parts = SsdParameters { buffer_blocks: 16, ..SsdParameters::default() };
        let (model, disk) = open(&parts);
        let region = MemoryRegion::new(256).unwrap();
        disk.register(&region).unwrap();
        let mut queue = disk.queue(64).unwrap();
        model.fail(move |victim| (victim.number == 5).then_some(fault));
        for tag in 0..64 {
            let step = if tag % 2 == 0 {
                BlockTransfer::Read(tag, 1)
            } else {
                BlockTransfer::Write(tag, 1)
            };
            queue.push(step.op(tag, &region)).unwrap();
        }
        let mut done: Vec<BlockCompletion> = Vec::new();
        while queue.in_flight() > 0 {
            queue.wait(None);
            queue.reap(&mut done);
        }
        let failed: Vec<_> = done.iter().filter(|done| done.result.is_err()).collect();
        assert_eq!(done.len(), 64);
        assert_eq!((failed.len(), failed[0].result), (1, Err(Errno::TIMEDOUT)));
        assert_eq!(disk.count_resets(), resets);
        let memory = region.take(1).unwrap().into();
        let time = measure_one(&disk, &mut *queue, BlockOpKind::Read { block: 1, memory });
        assert!(time < 2 * parts.read, "{time:?}");
    }
}

/// The driver resets the controller at a wrong completion, while writes wait for the buffer: they
/// are sent again, and take no time twice.
#[test]
fn commands_are_sent_again_after_a_reset_amid_work_that_is_forgotten() {
    let parts =
        SsdParameters { dies: 1, channels: 1, buffer_blocks: 16, ..SsdParameters::default() };
    let (model, disk) = open(&parts);
    let region = MemoryRegion::new(1024).unwrap();
    disk.register(&region).unwrap();
    let (mut queue, begin) = (disk.queue(64).unwrap(), disk.clock().now());
    model.fail(|victim| (victim.number == 5).then_some(ControllerFault::AnswerTwice));
    for tag in 0..64 {
        queue.push(BlockTransfer::Write(tag * 16, 16).op(tag, &region)).unwrap();
    }
    let mut done: Vec<BlockCompletion> = Vec::new();
    while queue.in_flight() > 0 {
        queue.wait(None);
        queue.reap(&mut done);
    }
    assert_eq!(disk.count_resets(), 1);
    assert!(done.len() == 64 && done.iter().all(|done| done.result.is_ok()));
    assert!(model.commands() > 64, "some were sent again");
    let took = disk.clock().now() - begin;
    assert!(agree(took, 64 * 4 * parts.program, 0.1), "{took:?}");
}
