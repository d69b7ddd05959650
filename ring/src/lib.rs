//! Structures in memory that a client and a server share: lanes, each with a ring of submissions, a
//! ring of completions and an arena for messages (`ring/SPEC.md`).
//!
//! [`pages`] are cached pages of a file, [`names`] are names with their attributes, and
//! [`versions`] show what has changed. The server alone writes them, through [`published`], behind
//! which a test can put memory of its own.
//!
//! Neither side trusts the other one. A side copies each word and each message once, and checks the
//! copy: whatever the other process writes meanwhile, the result is a valid message, or a
//! [`ProtocolViolation`].
//!
//! This crate knows no protocol, no file system and no socket. It does not decide who shares memory
//! with whom (`frontends/shared`, `backends/remote`).

mod client;
pub mod layout;
mod marks;
mod memory;
pub mod names;
pub mod pages;
pub mod published;
mod server;
pub mod versions;

pub use client::{ClientLane, LATER, LaneReply};
pub use marks::InodeVersionSet;
pub use memory::{MappedMemory, PeerMemory};
pub use server::{ArrivedRequest, LaneServer, LaneServerCounts};

/// The other side has broken the rules of the memory. The connection to it has to end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProtocolViolation(pub &'static str);

impl std::fmt::Display for ProtocolViolation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "shared memory: {}", self.0)
    }
}

impl std::error::Error for ProtocolViolation {}
