//! What everyone who measures needs: CPU clocks, context switches, cold caches, other programs, and medians.
//!
//! What it is: the ground that the benchmark (`defuse-bench`) and the study (`defuse-study`) share. What it is not: it
//! has no workload, mounts nothing and reports nothing.

#![forbid(unsafe_code)]

pub mod caches;
pub mod command;
pub mod cpu;
pub mod limits;
pub mod stats;
pub mod switches;
