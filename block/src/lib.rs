//! Block devices from user space: operations that are pushed to a queue and reaped later.
//!
//! The crate has the traits [`BlockDevice`] and [`DeviceQueue`], the memory that operations use
//! ([`MemoryRegion`], [`OperationMemory`]), and four devices: [`FileDevice`] (a file or block
//! device, by io_uring or by threads), [`RamDevice`] (memory), [`SimDevice`] (memory that records
//! every event, so that a test can compute the possible states after a power cut) and [`SsdModel`]
//! (an SSD in virtual time). [`SeparatedDevice`] shares a few queues of a device among many users
//! by the classes of their operations, [`CountedDevice`] counts the operations of a device, and
//! [`WorkerDevice`] has one thread do all I/O, near the device.
//!
//! The crate knows no file system, keeps no cache, and promises no order that the device does not
//! promise. The traits are independent of io_uring, so that a pair of NVMe queues can implement
//! them.
//!
//! ```
//! use defuse_block::{BlockingQueue, BlockDevice, RamDevice};
//!
//! let disk = RamDevice::new(4096, 256);
//! let mut line = BlockingQueue::new(&disk)?;
//! line.write(7, &[1; 4096])?;
//! line.flush()?;
//! let mut block = vec![0; 4096];
//! line.read(7, &mut block)?;
//! assert_eq!(block, [1; 4096]);
//! # Ok::<(), defuse_block::Errno>(())
//! ```

mod blocking;
mod clock;
mod counted;
mod device;
mod driver;
mod file;
mod memory;
pub mod model;
mod op;
mod outbox;
mod ram;
mod region;
pub mod separation;
pub mod signals;
pub mod sim;
mod waker;
pub mod worker;

pub use blocking::BlockingQueue;
pub use clock::{DeviceClock, MonotonicClock};
pub use counted::{CountedDevice, DeviceCounters};
pub use device::{BlockDevice, DeviceProperties, DeviceQueue, QueuePriority, QueuePurpose};
pub use driver::{DeviceDriver, DriverResult, add_driver, driver_of};
pub use file::{DeviceAccess, DeviceOpenError, ENDING, FileDevice, OpenDeviceFile};
pub use memory::{MemorySegments, OperationMemory, OwnedBuf, RawBuf};
pub use model::SsdModel;
pub use op::{BlockCompletion, BlockOp, BlockOpKind};
pub use ram::RamDevice;
pub use region::{FRAME, FrameRun, MemoryRegion};
pub use rustix::io::Errno;
pub use separation::{SeparatedDevice, SeparationOptions};
pub use sim::SimDevice;
pub use waker::{QueueParker, QueueWaker};
pub use worker::WorkerDevice;

/// The result of an operation; errors are errno(3) values.
pub type Result<T, E = Errno> = std::result::Result<T, E>;
