//! Tables 4 to 6 of UHSFS: reads and writes, small and large ones, with the separation of queues off, static and
//! learned, on a model of an SSD.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use defuse_block::separation::{Class, Classes, Mode};
use defuse_block::{Device, Done, Kind, Model, Op, Region, Segments, Separated, Separation};

use crate::Scale;
use crate::results::{Better, Results};

/// Queues that are open to all classes, or divided among them.
const QUEUES: usize = 4;

/// Blocks of the device: 4 GiB.
const BLOCKS: u64 = 1 << 20;

/// Operations of one kind.
#[derive(Clone, Copy, Debug)]
struct Stream {
    class: Class,
    /// Blocks of 4 KiB.
    blocks: u64,
    sequential: bool,
    count: u64,
}

/// A workload of the paper.
struct Workload {
    name: String,
    streams: Vec<Stream>,
    /// The classes of each queue where they are divided.
    divided: Vec<Classes>,
}

/// Measures all workloads at all depths.
pub(crate) fn measure(
    scale: &Scale,
    results: &mut Results,
    say: &mut dyn FnMut(String),
) -> Result<()> {
    for workload in workloads(scale.queued) {
        say(format!("queues: {}", workload.name));
        for depth in [16, 32, 128, 256] {
            for (target, separation) in policies(&workload.divided, depth) {
                let model = Model::new(BLOCKS, &Default::default());
                let ran = run(Arc::new(model), &separation, &workload.streams)?;
                let name = format!("{}, depth {depth}", workload.name);
                results.add((&name, "MB/s", Better::More, 0.0), target, ran.rate / 1e6);
                if let Some(latency) = ran.small_reads {
                    let micros = latency.as_secs_f64() * 1e6;
                    results.add((&name, "us a read", Better::Less, 0.0), target, micros);
                }
            }
        }
    }
    Ok(())
}

fn policies(divided: &[Classes], depth: u32) -> Vec<(&'static str, Separation)> {
    let open = |mode| Separation { large: 32 << 10, ..Separation::open(mode, QUEUES, depth) };
    let split = Separation { queues: divided.to_vec(), ..open(Mode::Static) };
    vec![
        ("off", open(Mode::Off)),
        ("static", split.clone()),
        ("learned", open(Mode::Learned)),
        ("static+caps", Separation { caps: true, ..split }),
    ]
}

fn workloads(count: u64) -> Vec<Workload> {
    use Class::{Behind, LargeRead, LargeWrite, Reclaim, SmallRead, SmallWrite};
    let stream = |class, count| {
        let large = matches!(class, LargeRead | LargeWrite);
        Stream { class, blocks: if large { 16 } else { 1 }, sequential: large, count }
    };
    let of = |classes: &[Class]| vec![Classes::of(classes); QUEUES / 2];
    // The last two do not occur here.
    let writes = of(&[SmallWrite, LargeWrite, Behind, Reclaim]);
    let reads_and_writes = [of(&[SmallRead, LargeRead]), writes].concat();
    let large = of(&[LargeRead, LargeWrite, Behind, Reclaim]);
    let sizes = [of(&[SmallRead, SmallWrite]), large].concat();
    let all = [&[SmallRead][..], &[LargeRead], &[SmallWrite], &[LargeWrite, Behind, Reclaim]];
    let random = |stream: Stream| Stream { sequential: false, ..stream };
    let workload = |name: &str, streams, divided: &[Classes]| {
        let (name, divided) = (name.to_owned(), divided.to_vec());
        Workload { name, streams, divided }
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
            &all.map(Classes::of),
        ),
    ]
}

struct Ran {
    /// Bytes a second until all streams have ended.
    rate: f64,
    /// Mean latency of small reads.
    small_reads: Option<Duration>,
}

/// The progress of a stream.
struct Progress {
    stream: Stream,
    pushed: u64,
    in_flight: usize,
    latency: Duration,
    next_block: u64,
}

/// Runs the streams at the same time; each has the same part of the depth in flight.
fn run(device: Arc<dyn Device>, separation: &Separation, streams: &[Stream]) -> Result<Ran> {
    let clock = device.clock();
    let device = Separated::new(device, separation)?;
    let mut queue = device.queue(separation.depth * separation.queues.len() as u32)?;
    let window = queue.depth() / streams.len();
    let region = Region::new((window * streams.len() * 16).next_power_of_two() as u32)?;
    let mut random = fastrand::Rng::with_seed(11);
    let mut all: Vec<Progress> = streams.iter().map(|stream| Progress::new(*stream)).collect();
    let mut begun: Vec<Duration> = Vec::new();
    let (start, mut done) = (clock.now(), Vec::new());
    while all.iter().any(Progress::goes_on) {
        for (number, one) in all.iter_mut().enumerate() {
            while one.pushed < one.stream.count && one.in_flight < window {
                let memory = region.take(one.stream.blocks as u32).context("no frame is free")?;
                let tag = (begun.len() * streams.len() + number) as u64;
                begun.push(clock.now());
                let op = Op { tag, kind: one.next(memory.into(), &mut random) };
                ensure!(queue.push(op).is_ok(), "the queue takes what its depth says");
            }
        }
        queue.wait(None);
        queue.reap(&mut done);
        for Done { tag, result, .. } in done.drain(..) {
            result?;
            let one = &mut all[tag as usize % streams.len()];
            one.in_flight -= 1;
            one.latency += clock.now() - begun[tag as usize / streams.len()];
        }
    }
    let bytes: u64 = streams.iter().map(|stream| stream.count * stream.blocks * 4096).sum();
    let small = all.iter().find(|one| one.stream.class == Class::SmallRead);
    Ok(Ran {
        rate: bytes as f64 / (clock.now() - start).as_secs_f64(),
        small_reads: small.map(|one| one.latency / one.stream.count.max(1) as u32),
    })
}

impl Progress {
    fn new(stream: Stream) -> Self {
        Progress { stream, pushed: 0, in_flight: 0, latency: Duration::ZERO, next_block: 0 }
    }

    fn goes_on(&self) -> bool {
        self.pushed < self.stream.count || self.in_flight > 0
    }

    fn next(&mut self, memory: Segments, random: &mut fastrand::Rng) -> Kind {
        self.pushed += 1;
        self.in_flight += 1;
        let Stream { class, blocks, sequential, .. } = self.stream;
        // Streams use different parts of the device, so that none waits for the blocks of another.
        let (part, parts) = (class as u64, 4);
        let places = BLOCKS / parts / blocks;
        let place = if sequential { self.next_block % places } else { random.u64(..places) };
        self.next_block += 1;
        let block = BLOCKS / parts * part + place * blocks;
        match class {
            Class::SmallRead | Class::LargeRead => Kind::Read { block, memory },
            _ => Kind::Write { block, memory, fua: false },
        }
    }
}
