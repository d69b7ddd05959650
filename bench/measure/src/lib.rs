//! Tools for measurements: CPU clocks, context switches, cold caches, other programs, and medians.
//!
//! The benchmark (`defuse-bench`) and the study (`defuse-study`) share this crate. It has no
//! workloads, mounts nothing and reports nothing.

#![forbid(unsafe_code)]

pub mod caches;
pub mod command;
pub mod cpu;
pub mod limits;
pub mod stats;
pub mod switches;
