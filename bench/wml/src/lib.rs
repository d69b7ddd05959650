//! A runner for the workload language of Filebench 1.5 (WML).
//!
//! This crate has a parser that reports errors with their position before anything runs, the file
//! sets and flowops of the language with the semantics of Filebench, and measurements of each
//! flowop. It includes the workloads of *To FUSE or Not to FUSE* (FAST '17) and the four
//! personalities of UHSFS. docs/workloads.md explains the language and the differences to
//! Filebench.
//!
//! It knows no frontend and no backend. A workload accesses files through a [`Driver`].
//! [`SystemCalls`] is the driver that uses the kernel; the program has another one for a file
//! system in its own process.
//!
//! ```no_run
//! let plan = defuse_wml::load("run 1", "my.f", &defuse_wml::Options::default())?;
//! let settings = defuse_wml::Settings::default();
//! let reports = defuse_wml::execute(&plan, &defuse_wml::SystemCalls, settings, &())?;
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

pub use driver::{Access, Driver, Room, SystemCalls};
pub use engine::{Failure, Observer, Settings, execute};
pub use lang::{Diagnostic, Position};
pub use plan::{MemoryShare, Options, Plan, load};
pub use random::{Amount, RandomVariable};
pub use report::{FlowopReport, RunReport};
pub use rows::{Builtin, Device, ROWS, Row, builtin, builtins};

pub use statistics::Histogram;
