//! The controller that QEMU emulates, without a guest: an implementation that is independent of
//! this driver, for tests and development.
//!
//! QEMU runs with a stopped processor. Registers are read and written over its test protocol, on a
//! socket without a name. The memory of the machine is a memfd that both processes map, so that
//! data needs no copies in between. QEMU gets the image by its descriptor. The controller has no
//! interrupts, and is slow: about 30 us for each access to a register.

mod machine;
mod protocol;

use std::collections::HashMap;
use std::fmt;
use std::fs::File;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use defuse_block::{
    DeviceClock, Errno, MemoryRegion, MonotonicClock, QueueParker, QueueWaker, Result,
};

use crate::spec::PAGE;
use crate::{ControllerTransport, DmaMemory};
use machine::QemuMachine;

/// Settings of the emulated machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QemuOptions {
    /// The program.
    pub program: String,
    /// Bytes of a logical block.
    pub block_size: u32,
    /// Bytes of the memory for queues and data, at least 8 MiB.
    pub memory: u32,
    /// More properties of the device `nvme`, such as `mdts=3`.
    pub properties: Vec<String>,
    /// More properties of the drive below it, such as `throttling.iops-total=1000`.
    pub drive: Vec<String>,
}

impl Default for QemuOptions {
    fn default() -> Self {
        QemuOptions {
            program: "qemu-system-x86_64".to_owned(),
            block_size: 4096,
            memory: 64 << 20,
            properties: Vec::new(),
            drive: Vec::new(),
        }
    }
}

/// A controller in QEMU. Dropping the value ends QEMU.
pub struct QemuController {
    machine: Mutex<QemuMachine>,
    memory: Arc<MemoryRegion>,
    clock: MonotonicClock,
    registers_len: u64,
    sleepers: Mutex<HashMap<u16, Arc<QueueParker>>>,
}

impl QemuController {
    /// Starts QEMU with a controller that has the only namespace `image`.
    ///
    /// # Errors
    ///
    /// `NotFound` without the program; other errors contain the output of QEMU.
    pub fn start(image: &File, options: &QemuOptions) -> io::Result<QemuController> {
        let frames = (options.memory / PAGE as u32).max(2048);
        let memory = MemoryRegion::new(frames)?;
        let (machine, registers_len) = QemuMachine::start(image, &memory, options)?;
        let qemu = QemuController {
            machine: Mutex::new(machine),
            memory,
            clock: MonotonicClock::default(),
            registers_len,
            sleepers: Mutex::default(),
        };
        Ok(qemu)
    }

    /// The memory of the machine: data in its frames is not copied, once the region is registered.
    pub fn memory(&self) -> &Arc<MemoryRegion> {
        &self.memory
    }

    fn lock(&self) -> MutexGuard<'_, QemuMachine> {
        self.machine.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn parker(&self, vector: u16) -> Arc<QueueParker> {
        let mut sleepers = self.sleepers.lock().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(sleepers.entry(vector).or_default())
    }
}

impl ControllerTransport for QemuController {
    fn name(&self) -> String {
        "controller of QEMU".to_owned()
    }

    fn read32(&self, at: u32) -> u32 {
        self.lock().read(at, 4).map_or(u32::MAX, |value| value as u32)
    }

    fn read64(&self, at: u32) -> u64 {
        self.lock().read(at, 8).unwrap_or(u64::MAX)
    }

    fn write32(&self, at: u32, value: u32) {
        self.lock().write(at, 4, u64::from(value));
    }

    fn write64(&self, at: u32, value: u64) {
        self.lock().write(at, 8, value);
    }

    fn registers_len(&self) -> u64 {
        self.registers_len
    }

    fn allocate(&self, bytes: usize) -> Result<DmaMemory> {
        let frames = self.memory.take(bytes.div_ceil(PAGE) as u32).ok_or(Errno::NOMEM)?;
        // The memory of the machine begins at the address 0.
        let bus = u64::from(frames.index()) * PAGE as u64;
        let dma = DmaMemory::frames(frames, bus);
        dma.clear();
        Ok(dma)
    }

    fn map(&self, region: &Arc<MemoryRegion>) -> Result<Option<u64>> {
        // The memory of the machine begins at the address 0.
        Ok((region.id() == self.memory.id()).then_some(0))
    }

    fn cut(&self) {
        self.lock().cut();
    }

    fn vectors(&self) -> u16 {
        0
    }

    fn sleep(&self, vector: u16, timeout: Option<Duration>) {
        self.parker(vector).park(timeout);
    }

    fn waker(&self, vector: u16) -> QueueWaker {
        let sleeper = self.parker(vector);
        QueueWaker::new(move || sleeper.unpark())
    }

    fn now(&self) -> Duration {
        self.clock.now()
    }
}

impl fmt::Debug for QemuController {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Qemu")
    }
}
