//! Operations and their measurements, the same for every frontend.
//!
//! This crate has one vocabulary of operations ([`Op`]), latency histograms in the format of *To
//! FUSE or Not to FUSE* (FAST '17) ([`LatencyHistogram`]), cells that worker threads write without
//! locks ([`Recorder`], [`ThreadCells`]), their readings ([`StatsSnapshot`]), and a layer that
//! measures any file system ([`ProbedFileSystem`]).
//!
//! [`WarningLimiter`] writes warnings that another user can cause at any rate, and [`processors`]
//! counts the processors once.
//!
//! It starts no threads, and prints nothing but those warnings, to the log. Frontends and the
//! command line decide when and where a snapshot is shown.
//!
//! ```
//! use defuse_probe::{Op, Recorder, clock};
//!
//! let recorder = Recorder::new();
//! let cells = recorder.cells(); // one for each worker thread
//! let start = clock::now();
//! // ... answer a request ...
//! cells.record(Op::GETATTR, start.elapsed_ns(), true);
//! println!("{}", recorder.snapshot());
//! ```

#![forbid(unsafe_code)]

mod cells;
pub mod clock;
mod histogram;
mod limited;
mod op;
mod probed;
mod processors;
mod snapshot;

pub use cells::{Recorder, ThreadCells};
pub use histogram::{BUCKETS, LatencyHistogram};
pub use limited::WarningLimiter;
pub use op::{Op, RequestStage};
pub use probed::ProbedFileSystem;
pub use processors::processors;
pub use snapshot::{BytesText, FigureStats, FigureUnit, OpStats, StatsSnapshot};
