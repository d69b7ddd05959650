//! Operations and their measurements, the same for every frontend.
//!
//! What it is: one vocabulary of operations ([`Op`]), latency histograms as *To FUSE or Not to
//! FUSE* (FAST '17) keeps them ([`Histogram`]), cells that every worker thread writes without
//! locks ([`Recorder`], [`Cells`]), what is read from them ([`Snapshot`]), and a layer that
//! measures any file system ([`Probed`]).
//!
//! What it is not: it starts no thread, opens no file, and decides nothing: who shows a snapshot,
//! when and where, is the business of frontends and of the command line.
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
mod op;
mod probed;
mod snapshot;

pub use cells::{Cells, Recorder};
pub use histogram::{BUCKETS, Histogram};
pub use op::{Op, Stage};
pub use probed::Probed;
pub use snapshot::{OpStats, Snapshot};
