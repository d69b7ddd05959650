//! A device in front of another one, which counts what is pushed.

use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::{
    Clock, Device, Done, Facts, Op, OpKind, Priority, Purpose, Queue, Region, Result, Waker,
};

/// A device that counts the operations of all its queues.
pub struct Counted {
    inner: Arc<dyn Device>,
    counts: Arc<Counts>,
}

/// Operations that were pushed since the device was opened. Bytes are those of reads and writes.
#[derive(Debug, Default)]
#[repr(align(128))]
struct Counts {
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
pub struct Counters {
    /// Reads.
    pub reads: u64,
    /// Bytes of them.
    pub read_bytes: u64,
    /// Writes, those that zero among them.
    pub writes: u64,
    /// Bytes of them.
    pub written_bytes: u64,
    /// Those of the writes that are durable when they are complete.
    pub fua_writes: u64,
    /// Flushes.
    pub flushes: u64,
    /// Discards.
    pub discards: u64,
    /// Bytes of them.
    pub discarded_bytes: u64,
    /// Operations that failed.
    pub errors: u64,
    /// Operations that were pushed and not reaped.
    pub in_flight: u64,
}

impl Counted {
    /// Counts what is done to `inner` from now on.
    pub fn new(inner: Arc<dyn Device>) -> Self {
        Counted { inner, counts: Arc::default() }
    }

    fn counted(&self, inner: Box<dyn Queue>) -> Box<dyn Queue> {
        let block_size = u64::from(self.facts().block_size);
        Box::new(CountedQueue { inner, counts: Arc::clone(&self.counts), block_size })
    }

    /// The counts so far.
    pub fn counters(&self) -> Counters {
        let Counts { reads, read_bytes, writes, written_bytes, fua_writes, flushes, .. } =
            &*self.counts;
        let Counts { discards, discarded_blocks, errors, completed, .. } = &*self.counts;
        let of = |count: &AtomicU64| count.load(Ordering::Relaxed);
        // First, so that the difference is never negative.
        let completed = of(completed);
        let pushed = of(reads) + of(writes) + of(flushes) + of(discards);
        Counters {
            reads: of(reads),
            read_bytes: of(read_bytes),
            writes: of(writes),
            written_bytes: of(written_bytes),
            fua_writes: of(fua_writes),
            flushes: of(flushes),
            discards: of(discards),
            discarded_bytes: of(discarded_blocks) * u64::from(self.facts().block_size),
            errors: of(errors),
            in_flight: pushed.saturating_sub(completed),
        }
    }
}

impl Device for Counted {
    fn facts(&self) -> &Facts {
        self.inner.facts()
    }

    fn register(&self, region: &Arc<Region>) -> Result<()> {
        self.inner.register(region)
    }

    fn queue(&self, depth: u32) -> Result<Box<dyn Queue>> {
        self.queue_for(Purpose::Caller, depth)
    }

    fn queue_for(&self, purpose: Purpose, depth: u32) -> Result<Box<dyn Queue>> {
        Ok(self.counted(self.inner.queue_for(purpose, depth)?))
    }

    fn queue_with(&self, priority: Priority, depth: u32) -> Result<Box<dyn Queue>> {
        Ok(self.counted(self.inner.queue_with(priority, depth)?))
    }

    fn shortage(&self) -> Option<String> {
        self.inner.shortage()
    }

    fn note(&self) -> Option<String> {
        self.inner.note()
    }

    fn clock(&self) -> Arc<dyn Clock> {
        self.inner.clock()
    }
}

struct CountedQueue {
    inner: Box<dyn Queue>,
    counts: Arc<Counts>,
    block_size: u64,
}

/// The part of an operation that counts.
#[derive(Clone, Copy)]
enum Part {
    Read(u64),
    Write { bytes: u64, fua: bool },
    Flush,
    Discard(u64),
}

impl CountedQueue {
    fn part(&self, kind: &OpKind) -> Part {
        match kind {
            OpKind::Read { memory, .. } => Part::Read(memory.bytes() as u64),
            OpKind::Write { memory, fua, .. } => {
                Part::Write { bytes: memory.bytes() as u64, fua: *fua }
            }
            // A forged number of blocks fails below.
            OpKind::Zero { blocks, .. } => {
                Part::Write { bytes: blocks.saturating_mul(self.block_size), fua: false }
            }
            OpKind::Flush => Part::Flush,
            OpKind::Discard { blocks, .. } => Part::Discard(*blocks),
        }
    }

    fn count(&self, part: Part) {
        let counts = &*self.counts;
        let add = |count: &AtomicU64, value: u64| {
            count.fetch_add(value, Ordering::Relaxed);
        };
        match part {
            Part::Read(bytes) => {
                add(&counts.reads, 1);
                add(&counts.read_bytes, bytes);
            }
            Part::Write { bytes, fua } => {
                add(&counts.writes, 1);
                add(&counts.written_bytes, bytes);
                if fua {
                    add(&counts.fua_writes, 1);
                }
            }
            Part::Flush => add(&counts.flushes, 1),
            Part::Discard(blocks) => {
                add(&counts.discards, 1);
                add(&counts.discarded_blocks, blocks);
            }
        }
    }
}

impl Queue for CountedQueue {
    fn push(&mut self, op: Op) -> Result<(), Op> {
        let part = self.part(&op.kind);
        self.inner.push(op)?;
        self.count(part);
        Ok(())
    }

    fn kick(&mut self) {
        self.inner.kick();
    }

    fn reap(&mut self, done: &mut Vec<Done>) {
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

    fn waker(&self) -> Waker {
        self.inner.waker()
    }

    fn ready(&self) -> Option<BorrowedFd<'_>> {
        self.inner.ready()
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
        // They end with the queue, and nobody reaps them.
        self.counts.completed.fetch_add(self.inner.in_flight() as u64, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Blocking, Errno, Ram};

    #[test]
    fn every_operation_is_counted_once_with_its_bytes_and_outcome() {
        let device = Counted::new(Arc::new(Ram::new(4096, 64)));
        let mut line = Blocking::new(&device).unwrap();
        line.write(3, &[1; 8192]).unwrap();
        line.read(3, &mut [0; 4096]).unwrap();
        assert_eq!(line.read(64, &mut [0; 4096]), Err(Errno::INVAL));
        line.flush().unwrap();
        let mut queue = device.queue(4).unwrap();
        queue.push(Op { tag: 1, kind: OpKind::Discard { block: 8, blocks: 2 } }).unwrap();
        assert_eq!(device.counters().in_flight, 1);
        while queue.in_flight() > 0 {
            queue.wait(None);
            queue.reap(&mut Vec::new());
        }
        let found = device.counters();
        let discards = if device.facts().discard { 0 } else { 1 };
        let expected = Counters {
            reads: 2,
            read_bytes: 8192,
            writes: 1,
            written_bytes: 8192,
            flushes: 1,
            discards: 1,
            discarded_bytes: 8192,
            errors: 1 + discards,
            ..Counters::default()
        };
        assert_eq!(found, expected);
    }

    #[test]
    fn what_a_dropped_queue_had_in_flight_is_over() {
        let device = Counted::new(Arc::new(Ram::new(4096, 64)));
        let mut queue = device.queue(4).unwrap();
        queue.push(Op { tag: 1, kind: OpKind::Flush }).unwrap();
        assert_eq!(device.counters().in_flight, 1);
        drop(queue);
        assert_eq!(device.counters().in_flight, 0);
    }
}
