//! The traits of devices and of their queues.

use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Duration;

use crate::{
    BlockCompletion, BlockOp, DeviceClock, MemoryRegion, MonotonicClock, QueueWaker, Result,
};

/// Facts about a device. They do not change while it is open.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceProperties {
    /// The name for messages: a path, or the kind of the device.
    pub name: String,
    /// Bytes of a block. Every offset and length of an operation is a whole number of blocks.
    pub block_size: u32,
    /// The number of blocks.
    pub blocks: u64,
    /// Bytes that an aligned write replaces whole or not at all when the power fails. Users that
    /// stay correct with 512 work on every device.
    pub atomic_write: u32,
    /// Completed writes can be lost in a power failure until a flush.
    pub volatile_cache: bool,
    /// A write with `fua` costs less than a write and a flush.
    pub fua: bool,
    /// The device can discard blocks ([`BlockOpKind::Discard`](crate::BlockOpKind::Discard)).
    pub discard: bool,
    /// Bytes of the largest operation.
    pub max_transfer: u32,
    /// Pieces of memory of an operation at most.
    pub max_segments: usize,
    /// Queues at most.
    pub max_queues: u32,
    /// Operations in flight of one queue at most.
    pub max_depth: u32,
    /// Bytes that the device erases at a time: data that ends together lies best within one unit.
    pub erase_unit: u32,
    /// The NUMA node that the device is attached to.
    pub numa_node: Option<u32>,
}

impl DeviceProperties {
    /// Bytes of the whole device.
    pub fn bytes(&self) -> u64 {
        self.blocks * u64::from(self.block_size)
    }

    /// Blocks of one read or write at most, even where each of them is a piece of memory of its
    /// own.
    pub fn blocks_at_once(&self) -> usize {
        ((self.max_transfer / self.block_size) as usize).min(self.max_segments).max(1)
    }

    /// True where `blocks` blocks from `block` on lie on the device.
    pub fn holds(&self, block: u64, blocks: u64) -> bool {
        block.checked_add(blocks).is_some_and(|end| end <= self.blocks)
    }
}

/// The purpose of the operations of a queue, for a device that treats them differently
/// ([`SeparatedDevice`](crate::SeparatedDevice)).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum QueuePurpose {
    /// A caller waits for the operations.
    #[default]
    Caller,
    /// The operations write data for which no caller waits yet.
    Behind,
    /// The operations make space.
    Reclaim,
}

/// The share of a queue when the device is busy. Devices that do not distinguish queues ignore it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum QueuePriority {
    /// Before others.
    High,
    /// In turn.
    #[default]
    Medium,
    /// After others, but not never.
    Low,
}

/// A block device.
///
/// # Order and durability
///
/// - Operations in flight have no order, even operations on one block: an overlapping read sees
///   old, new or mixed bytes, and of two overlapping writes either may win.
/// - A flush covers the writes that were *reaped* before it was pushed, on all queues of the
///   device, and the writes of queues that were dropped before. Once the flush is reaped without an
///   error they survive a power failure. A write with `fua` survives once it is reaped.
/// - All other writes survive in part, whole or not at all, each unit of
///   [`atomic_write`](DeviceProperties::atomic_write) bytes by itself.
/// - A write that failed leaves each of these units old or new.
/// - Discarded blocks hold anything.
pub trait BlockDevice: Send + Sync {
    /// The facts about the device.
    fn properties(&self) -> &DeviceProperties;

    /// Makes the frames of `region` cheap to use for queues that are made from now on (registered
    /// buffers, mappings for DMA). Operations may use frames of other regions, too.
    ///
    /// # Errors
    ///
    /// `ENOMEM` at a limit.
    fn register(&self, region: &Arc<MemoryRegion>) -> Result<()>;

    /// A new queue for up to `depth` operations in flight; fewer where the device has less room.
    ///
    /// # Errors
    ///
    /// `EBUSY` where the device has no further queue, `ENOMEM` at a limit of the process.
    fn queue(&self, depth: u32) -> Result<Box<dyn DeviceQueue>>;

    /// A queue for operations of one purpose. Most devices treat all purposes alike.
    ///
    /// # Errors
    ///
    /// Fails with the errors of [`queue`](BlockDevice::queue).
    fn queue_for(&self, _: QueuePurpose, depth: u32) -> Result<Box<dyn DeviceQueue>> {
        self.queue(depth)
    }

    /// A queue with a priority. Most devices serve all queues alike.
    ///
    /// # Errors
    ///
    /// Fails with the errors of [`queue`](BlockDevice::queue).
    fn queue_with(&self, _: QueuePriority, depth: u32) -> Result<Box<dyn DeviceQueue>> {
        self.queue(depth)
    }

    /// The reason for an earlier `ENOMEM` of this device, with the next step: a limit of this
    /// process. `None` if the device has met no limit.
    fn shortage(&self) -> Option<String> {
        None
    }

    /// A line about this device for its users, with the next step: it works, but not as well as it
    /// could. `None` if there is nothing to report.
    fn note(&self) -> Option<String> {
        None
    }

    /// The clock that measures operations of this device. A device in virtual time has its own, so
    /// that all runs are equal.
    fn clock(&self) -> Arc<dyn DeviceClock> {
        Arc::new(MonotonicClock::default())
    }
}

/// A pair of queues, for submissions and completions. One thread at a time uses it. Only
/// [`wait`](DeviceQueue::wait) blocks, and dropping the queue, which waits for operations in
/// flight.
pub trait DeviceQueue: Send {
    /// Adds an operation, which begins at the next [`kick`](DeviceQueue::kick) at the latest. An
    /// invalid operation (outside of the device, with memory of another length) completes with
    /// `EINVAL`.
    ///
    /// # Errors
    ///
    /// The operation itself, where the queue is full: reap first.
    fn push(&mut self, op: BlockOp) -> Result<(), BlockOp>;

    /// Begins all operations that were pushed: one system call, one doorbell.
    fn kick(&mut self);

    /// Appends the operations that are complete to `done`, each exactly once, in any order.
    fn reap(&mut self, done: &mut Vec<BlockCompletion>);

    /// Kicks, and sleeps until an operation is complete, a [`QueueWaker`] is used, or `timeout` is
    /// over; at once where something can be reaped. Returns early for no reason now and then.
    fn wait(&mut self, timeout: Option<Duration>);

    /// Returns a waker that ends a [`wait`](DeviceQueue::wait) from another thread, also one that
    /// begins later.
    fn waker(&self) -> QueueWaker;

    /// A descriptor that is readable by poll(2) while kicked operations can be reaped, for a thread
    /// that waits for several queues at a time. `None` if the queue has no such descriptor.
    fn completion_fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    /// Operations that were pushed and not reaped.
    fn in_flight(&self) -> usize;

    /// Operations in flight at most.
    fn depth(&self) -> usize;
}
