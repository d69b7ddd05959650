//! The kernel mount: FUSE protocol, transports, sessions, mounting.
//!
//! What is here: the kernel's structures ([`abi`]), a codec without I/O ([`request`], [`reply`]),
//! mounting ([`mount`]), and sessions that serve a [`FileSystem`](defuse_fs::FileSystem)
//! ([`Session`]). What is not here: file systems (those are backends, which this crate never
//! names), caches of file data (the kernel's), and option syntax (the program's).

pub mod abi;
mod backing;
pub mod client;
mod dispatch;
#[cfg(any(test, fuzzing))]
mod fuzzed;
mod init;
mod limited;
pub mod mount;
mod notify;
mod options;
mod own;
mod probing;
pub mod reply;
pub mod request;
mod server;
mod session;
mod sync;
mod transport;
mod workers;

#[cfg(fuzzing)]
pub use fuzzed::dispatch as fuzz_dispatch;
pub use init::{Decision, InitError, Negotiated, negotiate};
pub use options::{IoUring, SessionOptions};
#[cfg(fuzzing)]
pub use server::fuzzed::peers as fuzz_peers;
pub use server::{Admission, Limits, ServeError, Server, ServerOptions};
pub use session::{Session, StartError, Statistics};
pub use transport::dev::SpliceLimits;

/// The worker pool's bookkeeping, open to its checker in `tests/shuttle.rs` and to nobody else.
#[cfg(feature = "shuttle")]
pub mod checked {
    pub use crate::workers::pool::{Growth, Pool, PoolCounts, PoolLimits, Woken};
}
