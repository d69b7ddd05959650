//! The cost of operations on a device, for comparisons.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use defuse_block::{
    BlockCompletion, BlockDevice, BlockOp, BlockOpKind, DeviceClock, FrameRun, MemoryRegion,
    MonotonicClock, QueueWaker, Result,
};
use rustix::time::{ClockId, clock_gettime};

use crate::spec::{COMPLETION, SUBMISSION};
use crate::{ControllerModel, ControllerTransport, DmaMemory};

/// A controller that answers each command of its first I/O queue with success when the doorbell
/// rings, and moves no data: what remains is the cost of the driver. A [`ControllerModel`] does
/// everything else.
pub struct InstantController {
    model: ControllerModel,
    line: Mutex<Option<QueuePairMemory>>,
    clock: MonotonicClock,
}

/// The memory of a pair of queues.
pub(crate) struct QueuePairMemory {
    pub(crate) submissions: DmaMemory,
    pub(crate) completions: DmaMemory,
    pub(crate) entries: u16,
    pub(crate) doorbell: u32,
    pub(crate) head: u16,
    pub(crate) tail: u16,
    pub(crate) phase: bool,
}

/// Random reads of one block each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RandomReadTest {
    /// Reads in flight.
    pub depth: u32,
    /// Time for the measurement.
    pub time: Duration,
}

/// The cost of reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReadCost {
    /// Reads that were complete.
    pub operations: u64,
    /// CPU time of this process.
    pub cpu: Duration,
    /// Time.
    pub wall: Duration,
}

impl ReadCost {
    /// CPU time of one read in nanoseconds.
    pub fn cpu_ns(&self) -> f64 {
        self.cpu.as_nanos() as f64 / self.operations.max(1) as f64
    }
}

impl RandomReadTest {
    /// Reads random blocks of `device` into memory that is registered with it.
    ///
    /// # Errors
    ///
    /// Fails with the errors of the device.
    pub fn run(&self, device: &dyn BlockDevice) -> Result<ReadCost> {
        let facts = device.properties();
        let frames = facts.block_size.div_ceil(4096);
        let count = frames.next_power_of_two() * self.depth;
        let region = MemoryRegion::new(count.next_power_of_two())?;
        device.register(&region)?;
        let mut queue = device.queue(self.depth)?;
        let mut random = fastrand::Rng::with_seed(1);
        let mut memory: Vec<FrameRun> =
            std::iter::from_fn(|| region.take(frames)).take(queue.depth()).collect();
        let mut done: Vec<BlockCompletion> = Vec::new();
        let (begin, cpu) = (Instant::now(), process_cpu());
        let mut operations = 0;
        loop {
            while let Some(frames) = memory.pop() {
                let kind =
                    BlockOpKind::Read { block: random.u64(..facts.blocks), memory: frames.into() };
                // The memory is for no more than the depth.
                let _ = queue.push(BlockOp { tag: 0, kind });
            }
            queue.wait(None);
            queue.reap(&mut done);
            operations += done.len() as u64;
            for BlockCompletion { result, memory: used, .. } in done.drain(..) {
                result?;
                memory.extend(used.into_frames());
            }
            if operations % 64 < 32 && begin.elapsed() > self.time {
                let cpu = process_cpu().saturating_sub(cpu);
                return Ok(ReadCost { operations, cpu, wall: begin.elapsed() });
            }
        }
    }
}

fn process_cpu() -> Duration {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec.unsigned_abs(), time.tv_nsec.unsigned_abs() as u32)
}

impl InstantController {
    /// A controller with the facts of `model`. `model` must not have queues yet.
    pub fn new(model: ControllerModel) -> Self {
        InstantController { model, line: Mutex::default(), clock: MonotonicClock::default() }
    }

    fn line(&self) -> MutexGuard<'_, Option<QueuePairMemory>> {
        self.line.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl QueuePairMemory {
    /// Answers all commands up to `tail`.
    fn answer(&mut self, tail: u16) {
        while self.head != tail && tail < self.entries {
            let command = self.submissions.read64(usize::from(self.head) * SUBMISSION);
            self.head = if self.head + 1 == self.entries { 0 } else { self.head + 1 };
            let at = usize::from(self.tail) * COMPLETION;
            self.completions.write32(at + 8, u32::from(self.head) | 1 << 16);
            let phase = u32::from(self.phase) << 16;
            self.completions.write32(at + 12, (command >> 16) as u16 as u32 | phase);
            self.tail += 1;
            if self.tail == self.entries {
                (self.tail, self.phase) = (0, !self.phase);
            }
        }
    }
}

impl ControllerTransport for InstantController {
    fn name(&self) -> String {
        "controller that answers at once".to_owned()
    }

    fn read32(&self, at: u32) -> u32 {
        self.model.read32(at)
    }

    fn read64(&self, at: u32) -> u64 {
        self.model.read64(at)
    }

    fn write32(&self, at: u32, value: u32) {
        let mut line = self.line();
        if line.is_none() {
            *line = self.model.line(1);
        }
        match &mut *line {
            Some(line) if line.doorbell == at => line.answer(value as u16),
            Some(line) if line.doorbell + 4 == at => {}
            _ => self.model.write32(at, value),
        }
    }

    fn write64(&self, at: u32, value: u64) {
        self.model.write64(at, value);
    }

    fn registers_len(&self) -> u64 {
        self.model.registers_len()
    }

    fn allocate(&self, bytes: usize) -> Result<DmaMemory> {
        self.model.allocate(bytes)
    }

    fn map(&self, region: &Arc<MemoryRegion>) -> Result<Option<u64>> {
        self.model.map(region)
    }

    fn cut(&self) {
        self.model.cut();
    }

    fn vectors(&self) -> u16 {
        self.model.vectors()
    }

    fn sleep(&self, vector: u16, timeout: Option<Duration>) {
        self.model.sleep(vector, timeout);
    }

    fn waker(&self, vector: u16) -> QueueWaker {
        self.model.waker(vector)
    }

    fn now(&self) -> Duration {
        self.clock.now()
    }
}
