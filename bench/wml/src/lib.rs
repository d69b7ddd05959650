//! A runner for the workload language of Filebench 1.5 (WML).
//!
//! This crate has a parser that reports errors with their position before anything runs, the file
//! sets and flowops of the language with the semantics of Filebench, and measurements of each
//! flowop. It includes the workloads of *To FUSE or Not to FUSE* (FAST '17) and the four
//! personalities of UHSFS. docs/workloads.md explains the language and the differences to
//! Filebench.
//!
//! It knows no frontend and no backend. A workload accesses files through a [`WorkloadDriver`].
//! [`SystemCallDriver`] is the driver that uses the kernel; the program has another one for a file
//! system in its own process.
//!
//! ```no_run
//! let plan = defuse_wml::load("run 1", "my.f", &defuse_wml::LoadOptions::default())?;
//! let settings = defuse_wml::RunSettings::default();
//! let reports = defuse_wml::execute(&plan, &defuse_wml::SystemCallDriver, settings, &())?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

#![forbid(unsafe_code)]

mod driver;
mod engine;
mod files;
mod lang;
pub mod plan;
mod random;
mod report;
mod rows;
mod statistics;

pub use driver::{OpenAccess, SpaceFigures, SystemCallDriver, WorkloadDriver};
pub use engine::{RunFailure, RunObserver, RunSettings, execute};
pub use lang::{LanguageDiagnostic, SourcePosition};
pub use plan::{LoadOptions, MemoryShare, WorkloadPlan, load};
pub use random::{RandomAmount, RandomVariable};
pub use report::{FlowopReport, RunReport};
pub use rows::{BuiltinWorkload, ROWS, RowDevice, WorkloadRow, builtin, builtins};

pub use statistics::FlowopHistogram;
