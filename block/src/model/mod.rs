//! A model of an SSD in virtual time: dies, channels, a write buffer, and a controller with a
//! limited number of commands at work.
//!
//! The model shows the behaviour of an order of operations on a device of these parts, without a
//! device. Its clock advances when a queue waits, so a run takes no longer than its computation and
//! all runs are equal, provided that one thread at a time uses the device.
//!
//! A die reads before it programs, but does not suspend a program. The controller takes commands
//! from the queues in turn, and a limited number from each. A write is at work until it is in the
//! buffer. A write with `fua` is at work until its pages are programmed. A flush is at work until
//! all pages that were in the buffer before it are programmed. Both program a page that is not full
//! as it is.
//!
//! [`CommandTiming`] has these times without queues and data, for models of other devices.
//!
//! The model leaves out: garbage collection, errors, program suspension, and the bus to the host.

mod flash;
mod queue;
#[cfg(test)]
mod tests;
mod timing;

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::{BlockDevice, DeviceClock, DeviceProperties, DeviceQueue, MemoryRegion, Result, ram};
use queue::{SsdController, SsdModelQueue};
pub use timing::{CommandTiming, SsdWork};

/// The parts of the SSD. Each time is for one operation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SsdParameters {
    /// Dies, each of which reads or programs one page at a time.
    pub dies: usize,
    /// Channels; die n is on channel n modulo their number.
    pub channels: usize,
    /// Blocks of 4 KiB in a page of the flash.
    pub page_blocks: u64,
    /// Time to read a page from a die.
    pub read: Duration,
    /// Time to program a page.
    pub program: Duration,
    /// Additional time when a die changes between reading and programming, which ends the
    /// pipelining of its two registers.
    pub turn: Duration,
    /// Time to move a block over a channel.
    pub transfer: Duration,
    /// Time of the controller for each command.
    pub command: Duration,
    /// Commands that the controller works on at a time.
    pub commands: usize,
    /// Commands of one queue that the controller works on at a time.
    pub queue_commands: usize,
    /// Blocks in the write buffer: a write is complete when all its blocks are there.
    pub buffer_blocks: u64,
}

impl Default for SsdParameters {
    /// Four dies on each of eight channels, about 2 GB/s of random 4 KiB reads and 850 MB/s of
    /// writes.
    fn default() -> Self {
        SsdParameters {
            dies: 32,
            channels: 8,
            page_blocks: 4,
            read: Duration::from_micros(60),
            program: Duration::from_micros(600),
            turn: Duration::from_micros(10),
            transfer: Duration::from_nanos(3400),
            command: Duration::from_nanos(800),
            commands: 128,
            queue_commands: 32,
            buffer_blocks: 1024,
        }
    }
}

/// A modelled SSD, and its clock. Clones are the same device.
#[derive(Clone)]
pub struct SsdModel {
    facts: Arc<DeviceProperties>,
    state: Arc<Mutex<SsdModelState>>,
}

struct SsdModelState {
    controller: SsdController,
    content: ram::BlockStore,
}

impl SsdModel {
    /// An SSD of `blocks` blocks of 4 KiB.
    ///
    /// # Panics
    ///
    /// Without dies, channels, pages, commands or a buffer.
    pub fn new(blocks: u64, parts: &SsdParameters) -> Self {
        let facts = Arc::new(ram::memory_properties("model of an SSD", 4096, blocks));
        let (controller, content) = (SsdController::new(parts), ram::BlockStore::new(4096, blocks));
        SsdModel { facts, state: Arc::new(Mutex::new(SsdModelState { controller, content })) }
    }

    fn lock(&self) -> MutexGuard<'_, SsdModelState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for SsdModel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Model({:?})", self.now())
    }
}

impl DeviceClock for SsdModel {
    fn now(&self) -> Duration {
        self.lock().controller.now()
    }
}

impl BlockDevice for SsdModel {
    fn properties(&self) -> &DeviceProperties {
        &self.facts
    }

    fn register(&self, _: &Arc<MemoryRegion>) -> Result<()> {
        Ok(())
    }

    fn queue(&self, depth: u32) -> Result<Box<dyn DeviceQueue>> {
        let depth = depth.clamp(1, self.facts.max_depth) as usize;
        let number = self.lock().controller.add_queue();
        Ok(Box::new(SsdModelQueue::new(self.clone(), number, depth)))
    }
    fn clock(&self) -> Arc<dyn DeviceClock> {
        Arc::new(self.clone())
    }
}
