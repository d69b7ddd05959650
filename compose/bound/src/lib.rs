//! Devices of a manager that an application binds.
//!
//! The source `bound:SOCKET,device=/PATH` requests one of the devices of the manager at SOCKET,
//! opens the device in this process, and serves the others that reach it through the manager.
//! Operations of this process are calls in it; operations of others come through memory that this
//! process and the manager share. When the file system is dropped, the manager gets the device
//! back; when the process ends in any other way, the manager takes it.
//!
//! [`protocol`] is the conversation of the two, which the manager uses, too. The manager itself is
//! in the program `defuse`.
//!
//! Two processes never have one device: the lock on its open file decides (docs/uhs.md), whatever
//! either of them believes. The conversation only reports when the device is free.
//!
//! Deliberately absent: a device that the manager hands over as an open descriptor. The application
//! opens it by its own rights, so that a manager gives away no rights of its own.

#![forbid(unsafe_code)]

mod companion;
mod kinds;
mod open;
pub mod protocol;

pub use companion::give_back_all;
pub use kinds::KINDS;
pub use open::{BOUND, BoundDevice};
