//! Tools for measurements: CPU clocks, context switches, cold caches, loop devices, servers of
//! GlusterFS and of defuse, mounts by its commands, other programs, and medians.
//!
//! The benchmarks (`defuse-bench`, `defuse-bench-uhs`), the study (`defuse-study`) and, for the
//! servers, the testkit share this crate. It has no workloads and reports nothing.

#![forbid(unsafe_code)]

pub mod caches;
pub mod cluster;
pub mod command;
pub mod cpu;
pub mod gluster;
pub mod limits;
pub mod loop_device;
pub mod mount;
pub mod server;
pub mod stats;
pub mod switches;
pub mod threads;
