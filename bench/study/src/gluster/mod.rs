//! GlusterFS's own client beside ours, on the same volumes: the experiments of *Multithreaded FUSE
//! for GlusterFS* (paper 004), small files, and lookups behind latency.
//!
//! [`run()`] starts servers of its own, and this program again among them ([`rounds`]). That
//! process mounts every target, and measures every case on each of them in turn, so that ratios are
//! valid on a busy machine. The whole measurement is in name spaces that the kernel ends with this
//! process, also after SIGKILL.

pub mod cases;
pub mod fio;
pub mod goals;
mod graph;
mod inside;
pub mod names;
mod outside;
mod report;
pub mod results;
mod shell;
mod stage;
mod table;
pub mod targets;

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

pub use inside::rounds;
pub use outside::{InsideOrder, run};
pub use report::{html, write as write_report};
pub use table::table;

use cases::CaseSelection;
use targets::GlusterTargetSpec;

/// Options of the measurement.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GlusterStudyOptions {
    /// The cases.
    pub choice: CaseSelection,
    /// The targets.
    pub targets: Vec<GlusterTargetSpec>,
    /// Number of rounds, at least 1.
    pub rounds: u32,
    /// Time of a run of fio, in milliseconds.
    pub time_ms: u64,
    /// Size of the file of each job, in bytes.
    pub file_bytes: u64,
    /// Number of small files.
    pub files: u32,
    /// The path of this program.
    pub program: PathBuf,
}
