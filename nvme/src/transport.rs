//! The way to a controller.

use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Duration;

use defuse_block::{DeviceClock, MemoryRegion, MonotonicClock, QueueWaker, Result};

use crate::DmaMemory;

/// A way to the registers of a controller, with memory that it reaches, and its interrupts. Nothing that a
/// controller does may make these methods panic or hang.
pub trait ControllerTransport: Send + Sync {
    /// The name of the controller for people.
    fn name(&self) -> String;

    /// Reads a register of 32 bits. All bits are set where the controller is gone.
    fn read32(&self, at: u32) -> u32;

    /// Reads a register of 64 bits.
    fn read64(&self, at: u32) -> u64;

    /// Writes a register of 32 bits. The controller then sees everything that was written to its memory before.
    fn write32(&self, at: u32, value: u32);

    /// Writes a register of 64 bits.
    fn write64(&self, at: u32, value: u64);

    /// The bytes of registers that there are.
    fn registers_len(&self) -> u64;

    /// Zeroed memory that the controller reaches, on whole pages.
    ///
    /// # Errors
    ///
    /// `ENOMEM` where there is none.
    fn allocate(&self, bytes: usize) -> Result<DmaMemory>;

    /// Lets the controller reach `region`. Returns the address of its first byte, or `None` where data must be copied to
    /// memory of [`allocate`](ControllerTransport::allocate).
    ///
    /// # Errors
    ///
    /// `ENOMEM` at a limit.
    fn map(&self, region: &Arc<MemoryRegion>) -> Result<Option<u64>>;

    /// The reason for `ENOMEM`, with the next step: a limit of this process that [`allocate`](ControllerTransport::allocate) or
    /// [`map`](ControllerTransport::map) has met.
    fn shortage(&self) -> Option<String> {
        None
    }

    /// Ends all access of the controller to memory, whatever state it is in. It cannot be used any more.
    fn cut(&self);

    /// The number of interrupt vectors. With none, whoever waits looks now and then.
    fn vectors(&self) -> u16;

    /// Sleeps until vector `vector` interrupts, somebody uses its [`waker`](ControllerTransport::waker), or `timeout` is over.
    /// Returns early for no reason now and then.
    fn sleep(&self, vector: u16, timeout: Option<Duration>);

    /// True where waking up takes no time, so that whoever waits for an answer sleeps and does not look for it before.
    fn wakes_at_once(&self) -> bool {
        false
    }

    /// Ends the present or the next sleep for `vector`.
    fn waker(&self, vector: u16) -> QueueWaker;

    /// A descriptor that is readable after an interrupt, until the next sleep.
    fn ready(&self, vector: u16) -> Option<BorrowedFd<'_>> {
        let _ = vector;
        None
    }

    /// The clock by which commands time out.
    fn now(&self) -> Duration;

    /// The clock by which the device is measured ([`Device::clock`](defuse_block::BlockDevice::clock)): that of the machine, unless the
    /// controller lives in virtual time.
    fn clock(&self) -> Arc<dyn DeviceClock> {
        Arc::new(MonotonicClock::default())
    }

    /// The NUMA node of the device.
    fn numa_node(&self) -> Option<u32> {
        None
    }
}
