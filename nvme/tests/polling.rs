//! A wait polls for answers that come soon, and sleeps until an interrupt for answers that come
//! late; it learns from the controller which of the two to do. Time is virtual.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use defuse_block::{
    BlockCompletion, BlockDevice, BlockOp, BlockOpKind, DeviceQueue, MemoryRegion, QueueWaker,
    RamDevice, Result,
};
use defuse_nvme::model::{ControllerFault, ModelProperties};
use defuse_nvme::{ControllerModel, ControllerTransport, DmaMemory, NvmeDevice, NvmeOptions};

/// Microseconds of a command that comes soon, and of a command that comes late.
const SOON: (u64, u64) = (3, 7);
const LATE: (u64, u64) = (300, 500);

/// Readings of the clock that a sleeper loses when it wakes up: more time than the driver ever
/// polls.
const WAKING: usize = 50;

/// A model that counts the sleeps for I/O queues.
#[derive(Clone)]
struct SleepCountingModel {
    model: ControllerModel,
    counts: Arc<SleepCounts>,
}

#[derive(Default)]
struct SleepCounts {
    sleeps: AtomicU64,
    /// Time from the calls to their returns, with waking up.
    asleep: Mutex<Duration>,
    /// Sleeps without an end.
    endless: AtomicU64,
}

impl ControllerTransport for SleepCountingModel {
    fn name(&self) -> String {
        self.model.name()
    }

    fn read32(&self, at: u32) -> u32 {
        self.model.read32(at)
    }

    fn read64(&self, at: u32) -> u64 {
        self.model.read64(at)
    }

    fn write32(&self, at: u32, value: u32) {
        self.model.write32(at, value);
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
        let begin = self.model.now();
        self.model.sleep(vector, timeout);
        if self.vectors() == 0 {
            // Only the end of its time ends this sleep.
            while timeout.is_some_and(|timeout| self.model.now() < begin + timeout) {}
        }
        for _ in 0..WAKING {
            self.model.now();
        }
        if vector > 0 {
            self.counts.sleeps.fetch_add(1, Ordering::Relaxed);
            self.counts.endless.fetch_add(u64::from(timeout.is_none()), Ordering::Relaxed);
            *self.counts.asleep.lock().unwrap() += self.model.now() - begin;
        }
    }

    fn waker(&self, vector: u16) -> QueueWaker {
        self.model.waker(vector)
    }

    fn now(&self) -> Duration {
        self.model.now()
    }
}

/// A queue, and the controller below it.
struct PollingFixture {
    transport: SleepCountingModel,
    region: Arc<MemoryRegion>,
    queue: Box<dyn DeviceQueue>,
    _disk: NvmeDevice,
}

/// The course of some reads, one after the other.
#[derive(Debug)]
struct PollingTimes {
    sleeps: u64,
    awake: Duration,
    asleep: Duration,
}

impl PollingFixture {
    fn new(latency_us: (u64, u64), interrupts: bool) -> Self {
        let shape = ModelProperties { latency_us, interrupts, ..ModelProperties::default() };
        let model = ControllerModel::with(&RamDevice::new(4096, 64), 5, shape).unwrap();
        let transport = SleepCountingModel { model, counts: Arc::default() };
        let disk = NvmeDevice::open(transport.clone(), &NvmeOptions::default()).unwrap();
        let region = MemoryRegion::new(4).unwrap();
        disk.register(&region).unwrap();
        let queue = disk.queue(1).unwrap();
        PollingFixture { transport, region, queue, _disk: disk }
    }

    fn read(&mut self) -> BlockCompletion {
        let memory = self.region.take(1).unwrap().into();
        self.queue.push(BlockOp { tag: 0, kind: BlockOpKind::Read { block: 1, memory } }).unwrap();
        let mut done = Vec::new();
        while done.is_empty() {
            self.queue.wait(None);
            self.queue.reap(&mut done);
        }
        done.remove(0)
    }

    fn measure_reads(&mut self, count: u32) -> PollingTimes {
        let sleeps = self.count_sleeps();
        *self.transport.counts.asleep.lock().unwrap() = Duration::ZERO;
        let begin = self.transport.model.now();
        for _ in 0..count {
            assert_eq!(self.read().result, Ok(()));
        }
        let asleep = *self.transport.counts.asleep.lock().unwrap();
        let awake = self.transport.model.now() - begin - asleep;
        PollingTimes { sleeps: self.count_sleeps() - sleeps, awake, asleep }
    }

    fn count_sleeps(&self) -> u64 {
        self.transport.counts.sleeps.load(Ordering::Relaxed)
    }
}

#[test]
fn where_answers_come_soon_a_wait_looks_and_does_not_sleep() {
    let mut bench = PollingFixture::new(SOON, true);
    bench.measure_reads(10);
    let course = bench.measure_reads(1000);
    assert_eq!(course.sleeps, 0, "{course:?}");
}

#[test]
fn where_answers_come_late_a_wait_sleeps_at_once() {
    let mut bench = PollingFixture::new(LATE, true);
    bench.measure_reads(10);
    let course = bench.measure_reads(1000);
    assert!(course.sleeps >= 1000, "{course:?}");
    // Polling before each sleep would take a twentieth of this time, or more.
    assert!(course.awake * 40 < course.asleep, "{course:?}");
}

#[test]
fn a_wait_learns_that_the_controller_has_become_slow_and_that_it_has_become_fast() {
    let mut bench = PollingFixture::new(SOON, true);
    for _ in 0..3 {
        bench.transport.model.pace(SOON);
        bench.measure_reads(100);
        assert_eq!(bench.measure_reads(200).sleeps, 0, "it has become fast");
        bench.transport.model.pace(LATE);
        bench.measure_reads(100);
        let slow = bench.measure_reads(200);
        assert!(
            slow.sleeps >= 200 && slow.awake * 40 < slow.asleep,
            "it has become slow: {slow:?}"
        );
    }
}

#[test]
fn a_single_late_answer_does_not_end_looking() {
    let mut bench = PollingFixture::new(SOON, true);
    bench.measure_reads(100);
    bench.transport.model.pace((100_000, 100_000));
    bench.measure_reads(1);
    bench.transport.model.pace(SOON);
    assert_eq!(bench.measure_reads(200).sleeps, 0);
}

#[test]
fn without_interrupts_a_wait_ends_soon_after_the_answer() {
    for latency_us in [SOON, LATE] {
        let mut bench = PollingFixture::new(latency_us, false);
        bench.measure_reads(100);
        let course = bench.measure_reads(200);
        let took = course.awake + course.asleep;
        assert!(took < 200 * Duration::from_micros(2 * LATE.1), "{latency_us:?}: {course:?}");
        assert_eq!(bench.transport.counts.endless.load(Ordering::Relaxed), 0);
        assert_eq!(course.sleeps == 0, latency_us == SOON, "{latency_us:?}: {course:?}");
    }
    // An answer that never comes ends as well.
    let mut bench = PollingFixture::new(SOON, false);
    bench.transport.model.fail(|_| Some(ControllerFault::Ignore));
    assert!(bench.read().result.is_err());
}

#[test]
fn a_wait_looks_no_longer_than_it_may_last() {
    let mut bench = PollingFixture::new((15, 15), true);
    bench.measure_reads(100);
    bench.transport.model.pace(LATE);
    let memory = bench.region.take(1).unwrap().into();
    bench.queue.push(BlockOp { tag: 0, kind: BlockOpKind::Read { block: 1, memory } }).unwrap();
    *bench.transport.counts.asleep.lock().unwrap() = Duration::ZERO;
    let begin = bench.transport.model.now();
    bench.queue.wait(Some(Duration::from_micros(2)));
    let awake =
        bench.transport.model.now() - begin - *bench.transport.counts.asleep.lock().unwrap();
    assert!(awake < Duration::from_micros(SOON.1 + 8), "{awake:?}");
}
