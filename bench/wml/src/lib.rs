//! A runner for the workload language of Filebench 1.5 (WML).
//!
//! What it is: a parser that says what is wrong and where before anything is run; the language's
//! file sets and flowops with the semantics of Filebench; and measurement of each flowop. The
//! workloads of *To FUSE or Not to FUSE* (FAST '17) and the four personalities of UHSFS come with
//! it. docs/workloads.md explains the language and where this differs from Filebench.
//!
//! What it is not: it knows no frontend and no backend. What a workload does goes through
//! [`Driver`]; [`SystemCalls`] is the one that asks the kernel, and the program has one for a file
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
pub use lang::{Diagnostic, Place};
pub use plan::{MemoryShare, Options, Plan, load};
pub use random::{Amount, RandomVariable};
pub use report::{FlowopReport, RunReport};
pub use rows::{Builtin, Device, ROWS, Row, builtin, builtins};

pub use statistics::Histogram;
