//! Sessions: FUSE requests come in, a [`FileSystem`] is called, and answers go out.
//!
//! A session begins with INIT and serves one client until it ends the connection. The client is the
//! kernel, over /dev/fuse or over io_uring ([`Session::start`]), or a process in its place, over any
//! [`Line`] ([`Session::over`]). A session has threads that receive requests ([`Session`] starts them),
//! and a dispatcher with one short function for each operation.
//!
//! This crate does not mount (`frontends/fuse`), does not listen (`frontends/socket`), does not check the
//! rights of a client (`connection`), and leaves the protocol's data to `wire`.
//!
//! [`FileSystem`]: defuse_fs::FileSystem

mod backing;
mod dispatch;
#[cfg(any(test, fuzzing))]
mod fuzzed;
mod groups;
#[cfg(fuzzing)]
mod handler;
mod init;
mod notify;
mod options;
pub mod process;
mod recall;
mod session;
mod share;
mod sync;
mod transport;
mod workers;

/// The structure of INIT, which [`negotiate`] takes, and the flags that it decides.
pub use defuse_wire::abi;
pub use dispatch::{ClientHooks, SharedMemory};
#[cfg(fuzzing)]
pub use fuzzed::dispatch as fuzz_dispatch;
pub use groups::OfProcesses;
#[cfg(fuzzing)]
pub use handler::Handler;
pub use init::{Decision, InitError, Negotiated, negotiate};
pub use options::{GroupSource, IoUring, SessionOptions, ThreadPolicy};
pub use session::{Ended, ResizeError, Session, StartError, Statistics, Workers};
pub use share::{Count, Share, ShareLimits, Taken};
#[cfg(fuzzing)]
pub use transport::Answer;
pub use transport::dev::SpliceLimits;
pub use transport::{COPIED_MOST, LaneCounts, Line, Lines, Places, Port, ReplyPort};
pub use workers::sentinel::Sentinel;

/// The worker pool's bookkeeping, for its checker in `tests/shuttle.rs`.
#[cfg(feature = "shuttle")]
pub mod checked {
    pub use crate::workers::pool::{Growth, Pool, PoolCounts, PoolLimits, Standing, Woken};
}
