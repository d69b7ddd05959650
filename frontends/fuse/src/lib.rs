//! The kernel mount: FUSE protocol, transports, sessions, mounting.
//!
//! This crate mounts ([`mount`]) and serves a [`FileSystem`](defuse_fs::FileSystem) on a mount
//! ([`Session`]). It contains no file systems (those are backends, which this crate never names), no
//! cache of file data (that is the kernel's), and no syntax of options (that is the program's). The
//! protocol itself is `defuse-wire`.

mod backing;
mod dispatch;
#[cfg(any(test, fuzzing))]
mod fuzzed;
mod init;
pub mod mount;
mod notify;
mod options;
mod server;
mod session;
mod sync;
mod transport;
mod workers;

pub use defuse_connection::Limits;
/// The structure of INIT, which [`negotiate`] takes, and the flags that it decides.
pub use defuse_wire::abi;
#[cfg(fuzzing)]
pub use fuzzed::dispatch as fuzz_dispatch;
pub use init::{Decision, InitError, Negotiated, negotiate};
pub use options::{IoUring, SessionOptions};
#[cfg(fuzzing)]
pub use server::fuzzed::peers as fuzz_peers;
pub use server::{Admission, ServeError, Server, ServerOptions};
pub use session::{Ended, Session, StartError, Statistics};
pub use transport::dev::SpliceLimits;

/// The worker pool's bookkeeping, open to its checker in `tests/shuttle.rs` and to nobody else.
#[cfg(feature = "shuttle")]
pub mod checked {
    pub use crate::workers::pool::{Growth, Pool, PoolCounts, PoolLimits, Woken};
}
