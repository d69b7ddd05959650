//! A layer over a device that counts the pushed operations.

use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::{
    BlockCompletion, BlockDevice, BlockOp, BlockOpKind, DeviceClock, DeviceProperties, DeviceQueue,
    MemoryRegion, QueuePriority, QueuePurpose, QueueWaker, Result,
};

/// A device that counts the operations of all its queues.
pub struct CountedDevice {
    inner: Arc<dyn BlockDevice>,
    counts: Arc<OperationCounts>,
}

/// Operations that were pushed since the device was opened. Bytes count reads and writes.
#[derive(Debug, Default)]
#[repr(align(128))]
struct OperationCounts {
    reads: AtomicU64,
    read_bytes: AtomicU64,
    writes: AtomicU64,
    written_bytes: AtomicU64,
    fua_writes: AtomicU64,
    flushes: AtomicU64,
    discards: AtomicU64,
    discarded_blocks: AtomicU64,
    errors: AtomicU64,
    completed: AtomicU64,
}

/// Counts at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeviceCounters {
    /// Reads.
    pub reads: u64,
    /// Bytes of reads.
    pub read_bytes: u64,
    /// Writes, including zeroing.
    pub writes: u64,
    /// Bytes of writes.
    pub written_bytes: u64,
    /// Writes that are durable when they are complete.
    pub fua_writes: u64,
    /// Flushes.
    pub flushes: u64,
    /// Discards.
    pub discards: u64,
    /// Bytes of discards.
    pub discarded_bytes: u64,
    /// Operations that failed.
    pub errors: u64,
    /// Operations that were pushed and not reaped.
    pub in_flight: u64,
}

impl CountedDevice {
    /// Counts operations on `inner` from now on.
    pub fn new(inner: Arc<dyn BlockDevice>) -> Self {
        CountedDevice { inner, counts: Arc::default() }
    }

    fn wrap_queue(&self, inner: Box<dyn DeviceQueue>) -> Box<dyn DeviceQueue> {
        let block_size = u64::from(self.properties().block_size);
        Box::new(CountedQueue { inner, counts: Arc::clone(&self.counts), block_size })
    }

    /// The counts so far.
    pub fn counters(&self) -> DeviceCounters {
        let OperationCounts {
            reads, read_bytes, writes, written_bytes, fua_writes, flushes, ..
        } = &*self.counts;
        let OperationCounts { discards, discarded_blocks, errors, completed, .. } = &*self.counts;
        let of = |count: &AtomicU64| count.load(Ordering::Relaxed);
        // First, so that the difference is never negative.
        let completed = of(completed);
        let pushed = of(reads) + of(writes) + of(flushes) + of(discards);
        DeviceCounters {
            reads: of(reads),
            read_bytes: of(read_bytes),
            writes: of(writes),
            written_bytes: of(written_bytes),
            fua_writes: of(fua_writes),
            flushes: of(flushes),
            discards: of(discards),
            discarded_bytes: of(discarded_blocks) * u64::from(self.properties().block_size),
            errors: of(errors),
            in_flight: pushed.saturating_sub(completed),
        }
    }
}

impl BlockDevice for CountedDevice {
    fn properties(&self) -> &DeviceProperties {
        self.inner.properties()
    }

    fn register(&self, region: &Arc<MemoryRegion>) -> Result<()> {
        self.inner.register(region)
    }

    fn queue(&self, depth: u32) -> Result<Box<dyn DeviceQueue>> {
        self.queue_for(QueuePurpose::Caller, depth)
    }

    fn queue_for(&self, purpose: QueuePurpose, depth: u32) -> Result<Box<dyn DeviceQueue>> {
        Ok(self.wrap_queue(self.inner.queue_for(purpose, depth)?))
    }

    fn queue_with(&self, priority: QueuePriority, depth: u32) -> Result<Box<dyn DeviceQueue>> {
        Ok(self.wrap_queue(self.inner.queue_with(priority, depth)?))
    }

    fn shortage(&self) -> Option<String> {
        self.inner.shortage()
    }

    fn note(&self) -> Option<String> {
        self.inner.note()
    }

    fn clock(&self) -> Arc<dyn DeviceClock> {
        self.inner.clock()
    }
}

struct CountedQueue {
    inner: Box<dyn DeviceQueue>,
    counts: Arc<OperationCounts>,
    block_size: u64,
}

/// The part of an operation that counts.
#[derive(Clone, Copy)]
enum CountedOperation {
    Read(u64),
    Write { bytes: u64, fua: bool },
    Flush,
    Discard(u64),
}

impl CountedQueue {
    fn part(&self, kind: &BlockOpKind) -> CountedOperation {
        match kind {
            BlockOpKind::Read { memory, .. } => CountedOperation::Read(memory.bytes() as u64),
            BlockOpKind::Write { memory, fua, .. } => {
                CountedOperation::Write { bytes: memory.bytes() as u64, fua: *fua }
            }
            // A forged number of blocks fails below.
            BlockOpKind::Zero { blocks, .. } => CountedOperation::Write {
                bytes: blocks.saturating_mul(self.block_size),
                fua: false,
            },
            BlockOpKind::Flush => CountedOperation::Flush,
            BlockOpKind::Discard { blocks, .. } => CountedOperation::Discard(*blocks),
        }
    }

    fn count(&self, part: CountedOperation) {
        let counts = &*self.counts;
        let add = |count: &AtomicU64, value: u64| {
            count.fetch_add(value, Ordering::Relaxed);
        };
        match part {
            CountedOperation::Read(bytes) => {
                add(&counts.reads, 1);
                add(&counts.read_bytes, bytes);
            }
            CountedOperation::Write { bytes, fua } => {
                add(&counts.writes, 1);
                add(&counts.written_bytes, bytes);
                if fua {
                    add(&counts.fua_writes, 1);
                }
            }
            CountedOperation::Flush => add(&counts.flushes, 1),
            CountedOperation::Discard(blocks) => {
                add(&counts.discards, 1);
                add(&counts.discarded_blocks, blocks);
            }
        }
    }
}

impl DeviceQueue for CountedQueue {
    fn push(&mut self, op: BlockOp) -> Result<(), BlockOp> {
        let part = self.part(&op.kind);
        self.inner.push(op)?;
        self.count(part);
        Ok(())
    }

    fn kick(&mut self) {
        self.inner.kick();
    }

    fn reap(&mut self, done: &mut Vec<BlockCompletion>) {
        let before = done.len();
        self.inner.reap(done);
        let new = &done[before..];
        let errors = new.iter().filter(|done| done.result.is_err()).count() as u64;
        if errors > 0 {
            self.counts.errors.fetch_add(errors, Ordering::Relaxed);
        }
        self.counts.completed.fetch_add(new.len() as u64, Ordering::Relaxed);
    }

    fn wait(&mut self, timeout: Option<Duration>) {
        self.inner.wait(timeout);
    }

    fn waker(&self) -> QueueWaker {
        self.inner.waker()
    }

    fn completion_fd(&self) -> Option<BorrowedFd<'_>> {
        self.inner.completion_fd()
    }

    fn in_flight(&self) -> usize {
        self.inner.in_flight()
    }

    fn depth(&self) -> usize {
        self.inner.depth()
    }
}

impl Drop for CountedQueue {
    fn drop(&mut self) {
        // These operations end with the queue, and are never reaped.
        self.counts.completed.fetch_add(self.inner.in_flight() as u64, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{BlockingQueue, Errno, RamDevice};

    #[test]
    fn every_operation_is_counted_once_with_its_bytes_and_outcome() {
        let device = CountedDevice::new(Arc::new(RamDevice::new(4096, 64)));
        let mut line = BlockingQueue::new(&device).unwrap();
        line.write(3, &[1; 8192]).unwrap();
        line.read(3, &mut [0; 4096]).unwrap();
        assert_eq!(line.read(64, &mut [0; 4096]), Err(Errno::INVAL));
        line.flush().unwrap();
        let mut queue = device.queue(4).unwrap();
        queue.push(BlockOp { tag: 1, kind: BlockOpKind::Discard { block: 8, blocks: 2 } }).unwrap();
        assert_eq!(device.counters().in_flight, 1);
        while queue.in_flight() > 0 {
            queue.wait(None);
            queue.reap(&mut Vec::new());
        }
        let found = device.counters();
        let discards = if device.properties().discard { 0 } else { 1 };
        let expected = DeviceCounters {
            reads: 2,
            read_bytes: 8192,
            writes: 1,
            written_bytes: 8192,
            flushes: 1,
            discards: 1,
            discarded_bytes: 8192,
            errors: 1 + discards,
            ..DeviceCounters::default()
        };
        assert_eq!(found, expected);
    }

    #[test]
    fn what_a_dropped_queue_had_in_flight_is_over() {
        let device = CountedDevice::new(Arc::new(RamDevice::new(4096, 64)));
        let mut queue = device.queue(4).unwrap();
        queue.push(BlockOp { tag: 1, kind: BlockOpKind::Flush }).unwrap();
        assert_eq!(device.counters().in_flight, 1);
        drop(queue);
        assert_eq!(device.counters().in_flight, 0);
    }
}
