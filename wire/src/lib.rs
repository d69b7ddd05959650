//! The FUSE protocol as data: the kernel's structures, and the code that reads and writes them.
//!
//! A server decodes requests ([`request`]) and encodes replies and notifications ([`reply`]). A
//! client, which takes the kernel's place, encodes requests ([`encode`]) and decodes replies
//! ([`decode`]). [`abi`] has the kernel's structures, opcodes and flags, [`convert`] translates
//! them to and from the types of `defuse-fs`, and [`op`] names opcodes for measurements. [`vendor`]
//! has the additions of clients and servers of this project to the protocol. One of them,
//! [`chain`], puts several requests into one message.
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
