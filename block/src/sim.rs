//! A simulated device: memory that records every event, fails on demand, and computes the possible
//! states after a power failure at any moment.
//!
//! It has no thread of its own, and its time is the number of events. Operations are in flight
//! until a queue waits, and then complete in an order that a seed decides; so a seed replays a run
//! bit for bit, provided that one thread at a time uses the device.

mod crash;
mod queue;

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::ram::{self, BlockStore};
use crate::{
    BlockDevice, BlockOpKind, DeviceClock, DeviceProperties, DeviceQueue, Errno, MemoryRegion,
    RamDevice, Result,
};
use queue::SimQueue;

pub use crash::{PowerCut, PowerCuts};

/// The kinds of operations, for [faults](SimDevice::fail).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SimOpKind {
    /// A read.
    Read,
    /// A write.
    Write,
    /// A flush.
    Flush,
    /// A discard.
    Discard,
    /// Zeroing.
    Zero,
}

/// An operation that a [fault](SimDevice::fail) may strike.
#[derive(Clone, Copy, Debug)]
pub struct CandidateOperation {
    /// The number of operations that began before it.
    pub number: u64,
    /// The kind of the operation.
    pub call: SimOpKind,
    /// The first block, if it has one.
    pub block: u64,
    /// The number of blocks.
    pub blocks: u64,
}

type SimFaultHook = Box<dyn FnMut(&CandidateOperation) -> Option<Errno> + Send>;

/// A simulated device. Clones are the same device.
#[derive(Clone)]
pub struct SimDevice {
    facts: Arc<DeviceProperties>,
    state: Arc<Mutex<SimDeviceState>>,
}

struct SimDeviceState {
    /// The present content.
    now: BlockStore,
    /// The content before the first event.
    begin: BlockStore,
    events: Vec<SimEvent>,
    /// Operations that began.
    began: u64,
    /// The number of beginnings and of completions of operations.
    steps: u64,
    random: fastrand::Rng,
    fault: Option<SimFaultHook>,
    /// Flushes complete, and make nothing durable.
    lies: bool,
}

/// Something that happened to the device. Operations are counted by the event of their submission.
#[derive(Clone, Debug)]
enum SimEvent {
    /// New content for the blocks from `block` on; `None` is a discard.
    Write { block: u64, blocks: u64, content: Option<Vec<Option<Arc<[u8]>>>>, fua: bool },
    /// A flush was submitted.
    Flush,
    /// The user reaped the submission at this index. `durable` is false if it failed.
    Done { submitted: usize, durable: bool },
}

impl SimDevice {
    /// A device of `blocks` blocks of 4 KiB, all zeros. `seed` decides the order of completions.
    pub fn new(blocks: u64, seed: u64) -> Self {
        SimDevice::from_store(BlockStore::new(4096, blocks), seed)
    }

    /// A device that begins as a copy of `ram`.
    pub fn from_ram(ram: &RamDevice, seed: u64) -> Self {
        SimDevice::from_store(ram.content(), seed)
    }

    fn from_store(store: BlockStore, seed: u64) -> Self {
        let facts =
            Arc::new(ram::memory_properties("simulation", store.block_size(), store.blocks()));
        let state = SimDeviceState {
            begin: store.clone(),
            now: store,
            events: Vec::new(),
            began: 0,
            steps: 0,
            random: fastrand::Rng::with_seed(seed),
            fault: None,
            lies: false,
        };
        SimDevice { facts, state: Arc::new(Mutex::new(state)) }
    }

    /// Limits operations to `blocks` blocks. Only handles that are made from now on have the limit.
    #[must_use]
    pub fn with_blocks_at_once(mut self, blocks: u32) -> Self {
        Arc::make_mut(&mut self.facts).max_transfer = blocks * self.facts.block_size;
        self
    }

    /// Calls `fault` for every operation from now on, when it begins: an error makes it fail. A
    /// write that fails leaves each sector old or new.
    pub fn fail(&self, fault: impl FnMut(&CandidateOperation) -> Option<Errno> + Send + 'static) {
        self.lock().fault = Some(Box::new(fault));
    }

    /// Ends the faults.
    pub fn end_faults(&self) {
        self.lock().fault = None;
    }

    /// Makes flushes and `fua` without effect from now on, although they succeed.
    pub fn ignore_flushes(&self) {
        self.lock().lies = true;
    }

    /// The number of operations that have begun.
    pub fn count_begun(&self) -> u64 {
        self.lock().began
    }

    /// The number of events so far: a moment for [`PowerCut::event_index`].
    pub fn events(&self) -> usize {
        self.lock().events.len()
    }

    /// A device with the present content.
    pub fn copy_present(&self) -> RamDevice {
        RamDevice::from_store(self.lock().now.clone())
    }

    /// All moments at which the power could have failed, from before the first event to after the
    /// last.
    pub fn power_cuts(&self) -> PowerCuts {
        let state = self.lock();
        PowerCuts::new(state.begin.clone(), state.events.clone())
    }

    /// Forgets the events: the present content survives every later power failure.
    pub fn forget(&self) {
        let mut state = self.lock();
        state.begin = state.now.clone();
        state.events.clear();
    }

    fn lock(&self) -> MutexGuard<'_, SimDeviceState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for SimDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Sim({} events)", self.events())
    }
}

impl BlockDevice for SimDevice {
    fn properties(&self) -> &DeviceProperties {
        &self.facts
    }

    fn register(&self, _: &Arc<MemoryRegion>) -> Result<()> {
        Ok(())
    }

    fn queue(&self, depth: u32) -> Result<Box<dyn DeviceQueue>> {
        let depth = depth.clamp(1, self.facts.max_depth) as usize;
        Ok(Box::new(SimQueue::new(self.clone(), depth)))
    }

    fn clock(&self) -> Arc<dyn DeviceClock> {
        Arc::new(self.clone())
    }
}

impl DeviceClock for SimDevice {
    /// A microsecond for each beginning and each end of an operation.
    fn now(&self) -> Duration {
        Duration::from_micros(self.lock().steps)
    }
}

impl BlockOpKind {
    fn call(&self) -> SimOpKind {
        match self {
            BlockOpKind::Read { .. } => SimOpKind::Read,
            BlockOpKind::Write { .. } => SimOpKind::Write,
            BlockOpKind::Flush => SimOpKind::Flush,
            BlockOpKind::Discard { .. } => SimOpKind::Discard,
            BlockOpKind::Zero { .. } => SimOpKind::Zero,
        }
    }
}

#[cfg(test)]
mod tests;
