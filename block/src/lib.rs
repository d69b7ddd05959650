//! Block devices from user space: operations that are pushed to a queue and reaped later.
//!
//! The crate has the traits [`Device`] and [`Queue`], the memory that operations use ([`Region`],
//! [`Memory`]), and four devices: [`File`] (a file or block device, by io_uring or by threads), [`Ram`] (memory),
//! [`Sim`] (memory that remembers every event, so that a test can compute what a power cut could
//! leave behind) and [`Model`] (an SSD in virtual time). [`Separated`] shares a few queues of a
//! device among many users by the classes of their operations, [`Counted`] counts what goes to a device,
//! and [`Worker`] has one thread do all I/O, near the device.
//!
//! It knows no file system, keeps no cache, and promises no order that the device does not promise. No word of io_uring appears in the traits, so that a pair of NVMe queues fits them.
//!
//! ```
//! use defuse_block::{Blocking, Device, Ram};
//!
//! let disk = Ram::new(4096, 256);
//! let mut line = Blocking::new(&disk)?;
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

pub use blocking::Blocking;
pub use clock::{Clock, Monotonic};
pub use counted::{Counted, Counters};
pub use device::{Device, Facts, Priority, Purpose, Queue};
pub use driver::{Driver, Opened, add_driver, driver_of};
pub use file::{Access, ENDING, File, OpenError, OpenFile};
pub use memory::{Memory, OwnedBuf, RawBuf, Segments};
pub use model::Model;
pub use op::{Done, Op, OpKind};
pub use ram::Ram;
pub use region::{FRAME, Frames, Region};
pub use rustix::io::Errno;
pub use separation::{Separated, Separation};
pub use sim::Sim;
pub use waker::{Parker, Waker};
pub use worker::Worker;

/// The result of an operation; errors are those of errno(3).
pub type Result<T, E = Errno> = std::result::Result<T, E>;
