//! The study of 45 workloads, and advice about the user's own command: it measures the cost of user
//! space on this machine.
//!
//! [`run()`] follows the procedure of *To FUSE or Not to FUSE* (FAST '17). For each row and
//! configuration it creates an ext4 on a new device and the files of the row, mounts, and runs the
//! workload. It measures throughput, latency, CPU time, requests and device traffic ([`results`]).
//! [`report`] makes tables and a report of them, and [`advise`] measures a command of the user.
//! [`direct`] has the tables of *Direct-FUSE* (ROSS '18), for programs that use a file system
//! without the kernel, [`programs`] runs well-known programs in that way, and [`gluster`] compares
//! clients of GlusterFS.
//!
//! This crate serves no file system and knows no frontend or backend. It mounts each configuration
//! by running a program, for defuse, too.

#![forbid(unsafe_code)]

pub mod advise;
mod cell;
mod cgroup;
mod check;
mod device;
pub mod direct;
pub mod engine;
pub mod gluster;
mod interrupt;
mod kernel;
mod mount;
pub mod options;
mod process;
pub mod programs;
pub mod report;
pub mod results;
pub mod rows;
mod run;
mod sizes;
mod throttle;

pub use run::run;
