//! The study of 45 workloads, and advice about anybody's own command: what does user space cost here?
//!
//! What it is: the procedure of *To FUSE or Not to FUSE* (FAST '17) in one call ([`run()`]): for each row and configuration
//! a fresh ext4 on a device made for the purpose, the files of the row, a mount, the workload, and throughput, latency,
//! CPU time, requests and device traffic of it ([`results`]); tables and a report of them ([`report`]); and the same
//! questions asked about a command of the user ([`advise`]). Beside it the tables of *Direct-FUSE* (ROSS '18), for programs that
//! reach a file system without the kernel ([`direct`]).
//!
//! What it is not: it serves no file system and knows no frontend or backend. What is compared is mounted by running the
//! program that mounts it, our own included.

#![forbid(unsafe_code)]

pub mod advise;
mod cell;
mod cgroup;
mod check;
mod device;
pub mod direct;
pub mod engine;
mod interrupt;
mod kernel;
mod mount;
pub mod options;
mod process;
pub mod report;
pub mod results;
pub mod rows;
mod run;
mod sizes;
mod throttle;

pub use run::run;
