//! The kernel mount: FUSE protocol, transports, sessions, mounting.
//!
//! What is here: the kernel's structures ([`abi`]), a codec without I/O
//! ([`request`], [`reply`]), and mounting ([`mount`]). What is not here: file
//! systems (those are backends, which this crate never names), caches of file
//! data (the kernel's), and option syntax (the program's).

pub mod abi;
pub mod mount;
pub mod reply;
pub mod request;
