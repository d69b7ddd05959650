//! Sessions: FUSE requests come in, a [`FileSystem`] is called, and answers go out.
//!
//! A session begins with INIT and serves one client until it ends the connection. The client is the
//! kernel, over /dev/fuse or over io_uring ([`Session::start`]), or a process in its place, over
//! any [`RequestSource`] ([`Session::start_on`]). A session has threads that receive requests
//! ([`Session`] starts them), and a dispatcher with one short function for each operation.
//!
//! This crate does not mount (`frontends/fuse`), does not listen (`frontends/socket`), does not
//! check the rights of a client (`connection`), and leaves the protocol's data to `wire`.
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
mod inode_bound;
mod notify;
mod options;
pub mod process;
mod recall;
mod session;
mod sync;
mod transport;
mod user_share;
mod workers;

/// The structure of INIT, which [`negotiate`] takes, and the flags that it decides.
pub use defuse_wire::abi;
pub use dispatch::{ClientHooks, SharedMemory};
#[cfg(fuzzing)]
pub use fuzzed::dispatch as fuzz_dispatch;
pub use groups::ProcessGroups;
#[cfg(fuzzing)]
pub use handler::Handler;
pub use init::{InitDecision, InitError, NegotiatedInit, negotiate};
pub use options::{GroupSource, IoUring, SessionOptions, ThreadPolicy};
pub use session::{
    CallerWorker, ResizeError, Session, SessionEnd, SessionStatistics, SessionStopper, StartError,
    WorkerControl,
};
#[cfg(fuzzing)]
pub use transport::RequestAnswer;
pub use transport::dev::SpliceLimits;
pub use transport::{
    COPIED_MOST, ReplyPort, RequestPort, RequestSource, ServerLaneCounts, SharedData,
    TransportUpgrade,
};
pub use user_share::{CountGuard, LimitedCount, ShareLimits, UserShare};
pub use workers::watchdog::SharedWatchdog;

/// The worker pool's bookkeeping, for its checker in `tests/shuttle.rs`.
#[cfg(feature = "shuttle")]
pub mod checked {
    pub use crate::workers::pool::{
        PoolCounts, PoolGrowth, PoolLimits, PoolLoad, WakeReason, WorkerPool,
    };
}
