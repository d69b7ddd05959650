//! A model of a controller, in this process and in virtual time.
//!
//! The model works on the real queues: it reads commands from the memory of the driver when a
//! doorbell rings, follows PRP lists and SGLs, and writes completions with their phase. Any device
//! of `defuse-block` provides its blocks: with a simulation of power failures the states after a
//! power cut are known. Its clock advances when a thread sleeps or reads it, so that time-outs take
//! no real time, and a run is always the same for the same seed if one thread uses the model.
//!
//! The time of a command comes by chance, or from the parts of an SSD ([`ModelProperties::parts`]):
//! its dies and channels, its write buffer, and a limited number of commands at work, as in
//! [`defuse_block::model`]. Then nothing is left to chance. An admin command takes only the time of
//! the controller. A flush lasts until the pages that were in the write buffer before it are
//! programmed, and a write with FUA until its own pages are. A reset forgets commands, but the dies
//! continue. A shutdown does not wait for the write buffer.
//!
//! A call of [`now`](ControllerTransport::now), by which the driver times commands, takes 1 us, or
//! with an SSD 20 ns: little beside the times of its parts, and not 0, so that a thread that polls
//! comes to an end. Commands at work continue meanwhile. With an SSD the driver does not poll
//! ([`wakes_at_once`](ControllerTransport::wakes_at_once)). A reading of the
//! [`clock`](ControllerTransport::clock), which measures the device, takes no time, and neither
//! does the code of the driver.

mod admin;
mod arbiter;
mod controller_state;
mod event_queue;
mod faults;
mod io;
mod memory;
mod properties;

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use defuse_block::{
    BlockDevice, DeviceClock, Errno, MemoryRegion, QueueParker, QueueWaker, Result,
};

use crate::measure::QueuePairMemory;
use crate::spec::register;
use crate::{ControllerTransport, DmaMemory};
use controller_state::ControllerModelState;

pub use faults::{CandidateCommand, ControllerFault};
pub use properties::ModelProperties;

/// Bytes of registers: doorbells of 1023 pairs of queues.
const REGISTERS: u64 = 0x1000 + 8 * 1024;

/// Virtual time that a reading of the clock takes.
const LOOK: Duration = Duration::from_micros(1);

/// Virtual time that a reading of the clock takes if the parts of an SSD have their own times.
const LOOK_AT_SSD: Duration = Duration::from_nanos(20);

/// A modelled controller. Clones share the controller.
#[derive(Clone)]
pub struct ControllerModel {
    chip: Arc<Mutex<ControllerModelState>>,
    sleepers: Arc<Mutex<HashMap<u16, Arc<QueueParker>>>>,
    shape: Arc<ModelProperties>,
}

impl ControllerModel {
    /// A controller with the only namespace `device`. `seed` determines times.
    ///
    /// # Errors
    ///
    /// Fails with the errors of [`BlockDevice::queue`].
    pub fn new(device: &dyn BlockDevice, seed: u64) -> Result<Self> {
        ControllerModel::with(device, seed, ModelProperties::default())
    }

    /// A controller with the properties `shape`.
    ///
    /// # Errors
    ///
    /// Fails with the errors of [`new`](ControllerModel::new).
    ///
    /// # Panics
    ///
    /// Panics if the [parts](ModelProperties::parts) make no SSD.
    pub fn with(device: &dyn BlockDevice, seed: u64, shape: ModelProperties) -> Result<Self> {
        let shape = Arc::new(shape);
        let chip = ControllerModelState::new(device, seed, Arc::clone(&shape))?;
        Ok(ControllerModel { chip: Arc::new(Mutex::new(chip)), sleepers: Arc::default(), shape })
    }

    /// Sets the range of the times of commands, in microseconds, from now on, unless the controller
    /// has an SSD.
    pub fn pace(&self, latency_us: (u64, u64)) {
        self.lock().latency_us = latency_us;
    }

    /// Calls `fault` for every command from now on, when it is fetched.
    pub fn fail(
        &self,
        fault: impl FnMut(&CandidateCommand) -> Option<ControllerFault> + Send + 'static,
    ) {
        self.lock().faults.hook = Some(Box::new(fault));
    }

    /// Ends the faults.
    pub fn end_faults(&self) {
        self.lock().faults.hook = None;
    }

    /// Falsifies registers and completions by `bytes` from now on, until they are used up.
    pub fn falsify(&self, bytes: &[u8]) {
        self.lock().faults.falsify(bytes);
    }

    /// Removes the controller from its slot: registers read all ones, and nothing is answered.
    pub fn unplug(&self) {
        self.lock().unplug();
    }

    /// Completes a request for an event, if there is one, with this result.
    pub fn raise(&self, event: u32) {
        self.lock().raise(event);
        self.wake_all();
    }

    /// The number of commands that were fetched from I/O queues.
    pub fn commands(&self) -> u64 {
        self.lock().fetched
    }

    /// The priorities of the present I/O queues, by number: 0 is urgent, 1 high, 2 medium, 3 low;
    /// as the driver wrote them.
    pub fn priorities(&self) -> Vec<(u16, u8)> {
        let chip = self.lock();
        let queues = chip.submissions.iter().filter(|(number, _)| **number > 0);
        queues.map(|(number, queue)| (*number, queue.priority)).collect()
    }

    /// Commands of a round for the classes of high, medium and low priority; `None` in round robin.
    pub fn weights(&self) -> Option<[u32; 3]> {
        self.lock().arbiter.weights()
    }

    /// The number of times that the controller was enabled, and that it was shut down in order.
    pub fn count_starts_and_shutdowns(&self) -> (u64, u64) {
        let chip = self.lock();
        (chip.enabled, chip.shut_down)
    }

    /// The memory of a pair of queues, if it is there.
    pub(crate) fn line(&self, queue: u16) -> Option<QueuePairMemory> {
        let chip = self.lock();
        let (submissions, completions) =
            (chip.submissions.get(&queue)?, chip.completions.get(&queue)?);
        Some(QueuePairMemory {
            submissions: chip.memory.find_at(submissions.base)?,
            completions: chip.memory.find_at(completions.base)?,
            entries: submissions.entries,
            doorbell: register::DOORBELLS + 8 * u32::from(queue),
            head: 0,
            tail: 0,
            phase: true,
        })
    }

    fn lock(&self) -> MutexGuard<'_, ControllerModelState> {
        self.chip.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn parker(&self, vector: u16) -> Arc<QueueParker> {
        let mut sleepers = self.sleepers.lock().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(sleepers.entry(vector).or_default())
    }

    /// Delivers the interrupts of `chip`.
    fn interrupt(&self, mut chip: MutexGuard<'_, ControllerModelState>) {
        let vectors = std::mem::take(&mut chip.interrupts);
        drop(chip);
        vectors.into_iter().for_each(|vector| self.parker(vector).unpark());
    }

    fn wake_all(&self) {
        self.interrupt(self.lock());
    }
}

impl ControllerTransport for ControllerModel {
    fn name(&self) -> String {
        "model of a controller".to_owned()
    }

    fn read32(&self, at: u32) -> u32 {
        self.lock().read(at) as u32
    }

    fn read64(&self, at: u32) -> u64 {
        self.lock().read(at)
    }

    fn write32(&self, at: u32, value: u32) {
        self.lock().write(at, u64::from(value));
    }

    fn write64(&self, at: u32, value: u64) {
        self.lock().write(at, value);
    }

    fn registers_len(&self) -> u64 {
        REGISTERS
    }

    fn allocate(&self, bytes: usize) -> Result<DmaMemory> {
        if bytes > 64 << 20 {
            return Err(Errno::NOMEM);
        }
        let mut chip = self.lock();
        let bus = chip.memory.next(bytes);
        let dma = DmaMemory::heap(bytes, bus)?;
        chip.memory.add(&dma);
        Ok(dma)
    }

    fn map(&self, region: &Arc<MemoryRegion>) -> Result<Option<u64>> {
        if !self.shape.maps {
            return Ok(None);
        }
        let mut chip = self.lock();
        let bus = chip.memory.next(region.bytes());
        let dma = DmaMemory::region(region, bus, Box::new(()));
        chip.memory.keep(dma);
        Ok(Some(bus))
    }

    fn cut(&self) {
        self.lock().cut();
    }

    fn vectors(&self) -> u16 {
        if self.shape.interrupts { self.shape.queues + 1 } else { 0 }
    }

    fn sleep(&self, vector: u16, timeout: Option<Duration>) {
        let sleeper = self.parker(vector);
        if sleeper.park(Some(Duration::ZERO)) {
            // The interrupt came before the sleep, and no time passes.
            return;
        }
        let mut chip = self.lock();
        let slept = chip.advance(timeout);
        self.interrupt(chip);
        if slept {
            sleeper.park(Some(Duration::ZERO));
        } else {
            sleeper.park(None);
        }
    }

    /// True with an SSD: polling one queue would take virtual time in which no thread sees the
    /// answers of the other queues.
    fn wakes_at_once(&self) -> bool {
        self.shape.parts.is_some()
    }

    fn waker(&self, vector: u16) -> QueueWaker {
        let sleeper = self.parker(vector);
        QueueWaker::new(move || sleeper.unpark())
    }

    fn now(&self) -> Duration {
        let mut chip = self.lock();
        chip.pass(if self.shape.parts.is_some() { LOOK_AT_SSD } else { LOOK });
        let now = chip.now;
        self.interrupt(chip);
        now
    }

    fn clock(&self) -> Arc<dyn DeviceClock> {
        Arc::new(ModelClock(self.clone()))
    }
}

/// The clock of a model. A reading takes no time.
#[derive(Debug)]
struct ModelClock(ControllerModel);

impl DeviceClock for ModelClock {
    fn now(&self) -> Duration {
        self.0.lock().now
    }
}

impl fmt::Debug for ControllerModel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Model({:?})", self.lock().now)
    }
}
