//! Access to a controller.

use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Duration;

use defuse_block::{DeviceClock, MemoryRegion, MonotonicClock, QueueWaker, Result};

use crate::DmaMemory;

/// Access to the registers of a controller, with memory that it reaches, and its interrupts. No
/// behaviour of a controller may make these methods panic or hang.
pub trait ControllerTransport: Send + Sync {
    /// The name of the controller for messages.
    fn name(&self) -> String;

    /// Reads a register of 32 bits. All bits are set where the controller is gone.
    fn read32(&self, at: u32) -> u32;

    /// Reads a register of 64 bits.
    fn read64(&self, at: u32) -> u64;

    /// Writes a register of 32 bits. Everything that was written to the controller's memory before
    /// is then visible to it.
    fn write32(&self, at: u32, value: u32);

    /// Writes a register of 64 bits.
    fn write64(&self, at: u32, value: u64);

    /// The size of the registers in bytes.
    fn registers_len(&self) -> u64;

    /// Zeroed memory that the controller reaches, on whole pages.
    ///
    /// # Errors
    ///
    /// `ENOMEM` where there is none.
    fn allocate(&self, bytes: usize) -> Result<DmaMemory>;

    /// Lets the controller reach `region`. Returns the address of its first byte, or `None` where
    /// data must be copied to memory of [`allocate`](ControllerTransport::allocate).
    ///
    /// # Errors
    ///
    /// `ENOMEM` at a limit.
    fn map(&self, region: &Arc<MemoryRegion>) -> Result<Option<u64>>;

    /// The reason for `ENOMEM`, with the next step: a limit of this process that
    /// [`allocate`](ControllerTransport::allocate) or [`map`](ControllerTransport::map) has met.
    fn shortage(&self) -> Option<String> {
        None
    }

    /// Ends all access of the controller to memory, in any state. The controller cannot be used any
    /// more.
    fn cut(&self);

    /// The number of interrupt vectors. Without any, waiting threads poll now and then.
    fn vectors(&self) -> u16;

    /// Sleeps until vector `vector` interrupts, another thread uses its
    /// [`waker`](ControllerTransport::waker), or `timeout` is over. May return early without a
    /// reason.
    fn sleep(&self, vector: u16, timeout: Option<Duration>);

    /// True if waking up takes no time, so that a thread that waits for an answer sleeps without
    /// polling before.
    fn wakes_at_once(&self) -> bool {
        false
    }

    /// Ends the present or the next sleep for `vector`.
    fn waker(&self, vector: u16) -> QueueWaker;

    /// A descriptor that is readable after an interrupt, until the next sleep.
    fn interrupt_fd(&self, vector: u16) -> Option<BorrowedFd<'_>> {
        let _ = vector;
        None
    }

    /// The time of the clock that limits commands.
    fn now(&self) -> Duration;

    /// The clock that measures the device
    /// ([`BlockDevice::clock`](defuse_block::BlockDevice::clock)): the clock of the machine, unless
    /// the controller lives in virtual time.
    fn clock(&self) -> Arc<dyn DeviceClock> {
        Arc::new(MonotonicClock::default())
    }

    /// The NUMA node of the device.
    fn numa_node(&self) -> Option<u32> {
        None
    }
}
