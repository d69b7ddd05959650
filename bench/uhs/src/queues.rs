//! Tables 4 to 6 of UHSFS: reads and writes, small and large ones, with the separation of queues
//! off, static and learned, on a model of an SSD.

mod on_driver;
mod on_qemu;

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use defuse_block::separation::{ClassSet, OperationClass, SeparationMode};
use defuse_block::{
    BlockCompletion, BlockDevice, BlockOp, BlockOpKind, DeviceAccess, DeviceClock, DeviceQueue,
    FileDevice, MemoryRegion, MemorySegments, SeparatedDevice, SeparationOptions, SsdModel,
};

use crate::files::TimedFiles;
use crate::results::{FigureDirection, UhsBenchResults};
use crate::targets::TargetStage;
use crate::{UhsBenchScale, data, sync, time_work};

pub(crate) use on_driver::measure as measure_on_driver;
pub(crate) use on_qemu::measure as measure_on_qemu;

/// Queues that are open to all classes, or divided among them.
const QUEUES: usize = 4;

/// Blocks of the device at most: 4 GiB.
const BLOCKS: u64 = 1 << 20;

/// Operations of one kind.
#[derive(Clone, Copy, Debug)]
struct OperationStream {
    class: OperationClass,
    /// Blocks of 4 KiB.
    blocks: u64,
    sequential: bool,
    count: u64,
}

/// A workload of the paper.
struct QueueWorkload {
    name: String,
    streams: Vec<OperationStream>,
    /// The classes of each queue where they are divided.
    divided: Vec<ClassSet>,
}

/// The depths of each queue.
const DEPTHS: [u32; 4] = [16, 32, 128, 256];

/// Measures all workloads at all depths on the device of `stage`, where time is the machine's time.
/// The target `one queue` has no separation: a single queue of the same depth in all.
pub(crate) fn measure_on_device(
    stage: &mut TargetStage,
    scale: &UhsBenchScale,
    results: &mut UhsBenchResults,
) -> Result<()> {
    for workload in workloads(scale.queued) {
        for depth in DEPTHS {
            let name = format!("loop device, {}, depth {depth}", workload.name);
            let mut add = |target: &str, ran: &WorkloadRates| ran.add(&name, target, results);
            let device = Arc::new(FileDevice::open(stage.node()?, DeviceAccess::ReadWrite)?);
            let queue = device.queue(depth * QUEUES as u32)?;
            let clock = device.clock();
            add("one queue", &run(&*device, &clock, queue, None, &workload.streams)?);
            for (target, separation) in policies(&workload.divided, depth) {
                let device = Arc::clone(&device) as Arc<dyn BlockDevice>;
                add(target, &run_separated(device, &separation, None, &workload.streams)?);
            }
        }
    }
    measure_uhs(stage, scale, results)
}

/// uhs with queues of its own for each thread, and with shared ones.
fn measure_uhs(
    stage: &mut TargetStage,
    scale: &UhsBenchScale,
    results: &mut UhsBenchResults,
) -> Result<()> {
    let modes = [
        None,
        Some(SeparationMode::Off),
        Some(SeparationMode::Static),
        Some(SeparationMode::Learned),
    ];
    for (target, separation) in ["own queues", "off", "static", "learned"].into_iter().zip(modes) {
        let options = defuse_uhs::UhsOptions { separation, ..Default::default() };
        stage
            .with_uhs(options, |_, files| data::phases(files, ("uhs: ", target), scale, results))?;
        for threads in [1, 16] {
            let work = |_: &TargetStage, files: &dyn TimedFiles| {
                time_work(|| sync::write_and_sync(files, threads, scale.synced))
            };
            let took = stage.with_uhs(options, work)?;
            let name = format!("uhs: create, write 1 KiB, fsync; {threads} threads");
            let count = scale.synced as f64;
            results.add((&name, "1/s", FigureDirection::More, 0.0), target, count / took.seconds);
            let cpu = took.cpu * 1e6 / count;
            results.add((&name, "us of CPU", FigureDirection::Less, 0.0), target, cpu);
        }
    }
    Ok(())
}

/// Measures all workloads at all depths on the model.
pub(crate) fn measure(
    scale: &UhsBenchScale,
    results: &mut UhsBenchResults,
    say: &mut dyn FnMut(String),
) -> Result<()> {
    for workload in workloads(scale.queued) {
        say(format!("queues: {}", workload.name));
        for depth in DEPTHS {
            for (target, separation) in policies(&workload.divided, depth) {
                let model = SsdModel::new(BLOCKS, &Default::default());
                let ran = run_separated(Arc::new(model), &separation, None, &workload.streams)?;
                ran.add(&format!("{}, depth {depth}", workload.name), target, results);
            }
        }
    }
    Ok(())
}

fn policies(divided: &[ClassSet], depth: u32) -> Vec<(&'static str, SeparationOptions)> {
    let open = |mode| SeparationOptions {
        large: 32 << 10,
        ..SeparationOptions::open(mode, QUEUES, depth)
    };
    let split = SeparationOptions { queues: divided.to_vec(), ..open(SeparationMode::Static) };
    vec![
        ("off", open(SeparationMode::Off)),
        ("static", split.clone()),
        ("learned", open(SeparationMode::Learned)),
        ("static+caps", SeparationOptions { caps: true, ..split }),
    ]
}

fn workloads(count: u64) -> Vec<QueueWorkload> {
    use OperationClass::{Behind, LargeRead, LargeWrite, Reclaim, SmallRead, SmallWrite};
    let stream = |class, count| {
        let large = matches!(class, LargeRead | LargeWrite);
        OperationStream { class, blocks: if large { 16 } else { 1 }, sequential: large, count }
    };
    let of = |classes: &[OperationClass]| vec![ClassSet::from_classes(classes); QUEUES / 2];
    // The last two do not occur here.
    let writes = of(&[SmallWrite, LargeWrite, Behind, Reclaim]);
    let reads_and_writes = [of(&[SmallRead, LargeRead]), writes].concat();
    let large = of(&[LargeRead, LargeWrite, Behind, Reclaim]);
    let sizes = [of(&[SmallRead, SmallWrite]), large].concat();
    let all = [&[SmallRead][..], &[LargeRead], &[SmallWrite], &[LargeWrite, Behind, Reclaim]];
    let random = |stream: OperationStream| OperationStream { sequential: false, ..stream };
    let workload = |name: &str, streams, divided: &[ClassSet]| {
        let (name, divided) = (name.to_owned(), divided.to_vec());
        QueueWorkload { name, streams, divided }
    };
    vec![
        workload(
            "table 4: 4K reads and writes",
            vec![stream(SmallRead, count), stream(SmallWrite, count)],
            &reads_and_writes,
        ),
        workload(
            "table 4: 64K reads and writes",
            vec![random(stream(LargeRead, count / 4)), random(stream(LargeWrite, count / 4))],
            &reads_and_writes,
        ),
        workload(
            "table 5: 4K and 64K writes",
            vec![stream(SmallWrite, count), stream(LargeWrite, count / 10)],
            &sizes,
        ),
        workload(
            "table 5: 4K and 64K reads",
            vec![stream(SmallRead, count), stream(LargeRead, count / 10)],
            &sizes,
        ),
        workload(
            "table 6: all four",
            vec![
                stream(SmallWrite, count / 2),
                stream(SmallRead, count / 2),
                stream(LargeWrite, count / 20),
                stream(LargeRead, count / 20),
            ],
            &all.map(ClassSet::from_classes),
        ),
    ]
}

struct WorkloadRates {
    /// Bytes a second until all streams have ended.
    rate: f64,
    /// Mean latency of small reads.
    small_reads: Option<Duration>,
}

impl WorkloadRates {
    fn add(&self, name: &str, target: &str, results: &mut UhsBenchResults) {
        results.add((name, "MB/s", FigureDirection::More, 0.0), target, self.rate / 1e6);
        if let Some(latency) = self.small_reads {
            let micros = latency.as_secs_f64() * 1e6;
            results.add((name, "us a read", FigureDirection::Less, 0.0), target, micros);
        }
    }
}

/// The progress of a stream.
struct StreamProgress {
    stream: OperationStream,
    pushed: u64,
    in_flight: usize,
    latency: Duration,
    next_block: u64,
}

fn run_separated(
    device: Arc<dyn BlockDevice>,
    separation: &SeparationOptions,
    memory: Option<&Arc<MemoryRegion>>,
    streams: &[OperationStream],
) -> Result<WorkloadRates> {
    let clock = device.clock();
    let device = SeparatedDevice::new(device, separation)?;
    let queue = device.queue(separation.depth * separation.queues.len() as u32)?;
    run(&device, &clock, queue, memory, streams)
}

/// Runs the streams at the same time, with data in `memory` or in memory of their own; each has the
/// same part of the depth in flight.
fn run(
    device: &dyn BlockDevice,
    clock: &Arc<dyn DeviceClock>,
    mut queue: Box<dyn DeviceQueue>,
    memory: Option<&Arc<MemoryRegion>>,
    streams: &[OperationStream],
) -> Result<WorkloadRates> {
    let window = queue.depth() / streams.len();
    let region = match memory {
        Some(memory) => Arc::clone(memory),
        None => MemoryRegion::new((window * streams.len() * 16).next_power_of_two() as u32)?,
    };
    let blocks = device.properties().blocks.min(BLOCKS);
    let mut random = fastrand::Rng::with_seed(11);
    let mut all: Vec<StreamProgress> =
        streams.iter().map(|stream| StreamProgress::new(*stream)).collect();
    let mut begun: Vec<Duration> = Vec::new();
    let (start, mut done) = (clock.now(), Vec::new());
    while all.iter().any(StreamProgress::should_continue) {
        for (number, one) in all.iter_mut().enumerate() {
            while one.pushed < one.stream.count && one.in_flight < window {
                let memory = region.take(one.stream.blocks as u32).context("no frame is free")?;
                let tag = (begun.len() * streams.len() + number) as u64;
                begun.push(clock.now());
                let op = BlockOp { tag, kind: one.next(memory.into(), blocks, &mut random) };
                ensure!(queue.push(op).is_ok(), "the queue takes what its depth says");
            }
        }
        queue.wait(None);
        queue.reap(&mut done);
        for BlockCompletion { tag, result, .. } in done.drain(..) {
            result?;
            let one = &mut all[tag as usize % streams.len()];
            one.in_flight -= 1;
            one.latency += clock.now() - begun[tag as usize / streams.len()];
        }
    }
    let bytes: u64 = streams.iter().map(|stream| stream.count * stream.blocks * 4096).sum();
    let small = all.iter().find(|one| one.stream.class == OperationClass::SmallRead);
    Ok(WorkloadRates {
        rate: bytes as f64 / (clock.now() - start).as_secs_f64(),
        small_reads: small.map(|one| one.latency / one.stream.count.max(1) as u32),
    })
}

impl StreamProgress {
    fn new(stream: OperationStream) -> Self {
        StreamProgress { stream, pushed: 0, in_flight: 0, latency: Duration::ZERO, next_block: 0 }
    }

    fn should_continue(&self) -> bool {
        self.pushed < self.stream.count || self.in_flight > 0
    }

    fn next(
        &mut self,
        memory: MemorySegments,
        device: u64,
        random: &mut fastrand::Rng,
    ) -> BlockOpKind {
        self.pushed += 1;
        self.in_flight += 1;
        let OperationStream { class, blocks, sequential, .. } = self.stream;
        // Streams use different parts of the device, so that none waits for the blocks of another.
        let (part, parts) = (class as u64, 4);
        let places = device / parts / blocks;
        let place = if sequential { self.next_block % places } else { random.u64(..places) };
        self.next_block += 1;
        let block = device / parts * part + place * blocks;
        match class {
            OperationClass::SmallRead | OperationClass::LargeRead => {
                BlockOpKind::Read { block, memory }
            }
            _ => BlockOpKind::Write { block, memory, fua: false },
        }
    }
}
