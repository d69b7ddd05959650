//! Elastic separation of queues: many users share several queues of a device.
//!
//! A device that works on a long write keeps the reads behind it waiting. So operations have
//! classes, small or large reads or writes, and each operation goes to the queue that ends it
//! soonest. Equation (1) of UHSFS computes this from the work that waits in each queue and the mean
//! cost of each class there. A queue that is closed to a class has an infinite cost. Caps limit the
//! operations of a class in flight.
//!
//! If operations use the same blocks and one of them changes the blocks, they wait for one another,
//! since queues have no order between them. A flush begins when all changes before it are complete,
//! in all queues and of all users; it does not wait for reads.
//!
//! A [`SeparatedDevice`] is a device of its own, whose queues are its users. They share one lock.
//! One of the waiting users sleeps on the descriptors of all queues, and passes completions of
//! other users to them.
//!
//! The code uses the traits of the crate and a [`DeviceClock`], and knows no kind of device.

mod caps;
mod class;
mod costs;
mod overlaps;
mod schedule;
mod shared;
#[cfg(test)]
mod tests;
mod user;

use std::sync::Arc;
use std::time::Duration;

use crate::{
    BlockDevice, DeviceClock, DeviceProperties, DeviceQueue, Errno, MemoryRegion, QueuePurpose,
    Result,
};
pub use class::{ClassSet, OperationClass};
use shared::SeparationShared;
use user::SeparatedQueue;

/// Users of a separated device at most.
const USERS: u32 = 256;

/// The rule by which operations find their queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SeparationMode {
    /// The queues take turns, independently of the class.
    Off,
    /// By the number of operations that wait in each queue that is open to the class.
    Static,
    /// By the measured costs.
    Learned,
}

/// Settings of a [`SeparatedDevice`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SeparationOptions {
    /// The rule by which operations find their queue.
    pub mode: SeparationMode,
    /// The classes that each queue takes.
    pub queues: Vec<ClassSet>,
    /// Operations of so many bytes or more are large.
    pub large: usize,
    /// Operations in flight of each queue at most.
    pub depth: u32,
    /// While small reads are slow, fewer operations of other classes are in flight.
    pub caps: bool,
}

impl SeparationOptions {
    /// `count` queues of `depth` operations that take every class.
    pub fn open(mode: SeparationMode, count: usize, depth: u32) -> Self {
        let queues = vec![ClassSet::ALL; count];
        SeparationOptions { mode, queues, large: 32 << 10, depth, caps: false }
    }

    /// `count` queues of `depth` operations that are divided among the classes: operations for
    /// which readers wait, operations for which writers wait, and the rest. More queues divide
    /// these further, in turn.
    pub fn new_divided(count: usize, depth: u32) -> Self {
        use OperationClass::{Behind, LargeRead, LargeWrite, Reclaim, SmallRead, SmallWrite};
        let parts: &[&[OperationClass]] = match count {
            0 | 1 => &[&OperationClass::ALL],
            2 => &[&[SmallRead, LargeRead], &[SmallWrite, LargeWrite, Behind, Reclaim]],
            3 => &[&[SmallRead, LargeRead], &[SmallWrite, LargeWrite], &[Behind, Reclaim]],
            4 => &[&[SmallRead], &[LargeRead], &[SmallWrite, LargeWrite], &[Behind, Reclaim]],
            5 => &[&[SmallRead], &[LargeRead], &[SmallWrite], &[LargeWrite], &[Behind, Reclaim]],
            _ => &[&[SmallRead], &[LargeRead], &[SmallWrite], &[LargeWrite], &[Behind], &[Reclaim]],
        };
        let of = parts.iter().map(|classes| ClassSet::from_classes(classes));
        let queues = of.cycle().take(count).collect();
        SeparationOptions {
            queues,
            ..SeparationOptions::open(SeparationMode::Static, count, depth)
        }
    }
}

/// The state of a queue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QueueState {
    /// Operations that it has.
    pub in_flight: usize,
    /// Operations that it can have.
    pub depth: usize,
    /// The mean cost of each class, in the order of [`OperationClass::ALL`]; `None` if nothing was
    /// measured.
    pub costs: [Option<Duration>; class::CLASSES],
}

/// A device whose users share a few queues of another device, see the [module](self).
pub struct SeparatedDevice {
    device: Arc<dyn BlockDevice>,
    facts: DeviceProperties,
    shared: Arc<SeparationShared>,
}

impl SeparatedDevice {
    /// Opens queues of `device`.
    ///
    /// # Errors
    ///
    /// `EINVAL` without queues, or if no queue takes a class; otherwise the errors of
    /// [`BlockDevice::queue`].
    pub fn new(device: Arc<dyn BlockDevice>, separation: &SeparationOptions) -> Result<Self> {
        let takes = |class| separation.queues.iter().any(|classes| classes.has(class));
        if separation.queues.is_empty() || !OperationClass::ALL.into_iter().all(takes) {
            return Err(Errno::INVAL);
        }
        let shared = Arc::new(SeparationShared::new(&*device, separation)?);
        let facts = DeviceProperties { max_queues: USERS, ..device.properties().clone() };
        Ok(SeparatedDevice { device, facts, shared })
    }

    /// The states of the queues.
    pub fn queues(&self) -> Vec<QueueState> {
        self.shared.queues()
    }

    /// The mean cost of `class` in a queue; `None` if nothing was measured.
    pub fn mean(&self, queue: usize, class: OperationClass) -> Option<Duration> {
        self.shared.lock().schedule.mean(queue, class)
    }

    /// Operations of `class` in flight at most.
    pub fn cap(&self, class: OperationClass) -> usize {
        self.shared.lock().schedule.cap(class)
    }

    /// Operations of `class` (`None`: flushes) that wait for a queue, or for other operations.
    pub fn count_waiting(&self, class: Option<OperationClass>) -> usize {
        self.shared.lock().schedule.count_waiting(class)
    }
}

impl BlockDevice for SeparatedDevice {
    fn properties(&self) -> &DeviceProperties {
        &self.facts
    }

    /// The queues are opened anew, so that they know the region, as soon as nothing is in flight.
    fn register(&self, region: &Arc<MemoryRegion>) -> Result<()> {
        self.device.register(region)?;
        self.shared.renew(&self.device);
        Ok(())
    }

    fn queue(&self, depth: u32) -> Result<Box<dyn DeviceQueue>> {
        self.queue_for(QueuePurpose::Caller, depth)
    }

    fn queue_for(&self, purpose: QueuePurpose, depth: u32) -> Result<Box<dyn DeviceQueue>> {
        let depth = depth.clamp(1, self.facts.max_depth) as usize;
        Ok(Box::new(SeparatedQueue::new(&self.shared, purpose, depth)?))
    }

    fn shortage(&self) -> Option<String> {
        self.device.shortage()
    }

    fn note(&self) -> Option<String> {
        self.device.note()
    }

    fn clock(&self) -> Arc<dyn DeviceClock> {
        self.device.clock()
    }
}
