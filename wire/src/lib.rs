//! The FUSE protocol as data: the kernel's structures, and the code that reads and writes them.
//!
//! A server decodes requests ([`request`]) and encodes answers and notifications ([`reply`]). A client,
//! which takes the kernel's place, encodes requests ([`encode`]) and decodes answers ([`decode`]).
//! [`abi`] has the kernel's structures, opcodes and flags, [`convert`] translates them to and from the
//! types of `defuse-fs`, [`op`] names opcodes for measurements, and [`vendor`] has what clients and
//! servers of this project add to the protocol, of which [`chain`] has several requests in one message.
//!
//! This crate does no I/O, starts no thread, knows no transport, and has no unsafe code.

#![forbid(unsafe_code)]

pub mod abi;
pub mod chain;
pub mod convert;
pub mod decode;
pub mod encode;
pub mod op;
pub mod reply;
pub mod request;
pub mod vendor;
