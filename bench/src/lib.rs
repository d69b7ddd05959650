//! Comparison benchmarks: the same workloads over a native directory, the peers and defuse, side by side in one run.
//!
//! What it is: plain system calls by a few threads ([`workloads`]), targets that are mounted together over one backing
//! file system ([`target`], [`backing`], [`peers`]), a [`runner`] that interleaves them cell by cell and round by
//! round, and a [`report`] of ratios. Ratios taken side by side survive a loaded machine; absolute figures do not.
//!
//! ```text
//! cargo run --release -p defuse-bench -- --quick                      a look at everything, in a minute or two
//! cargo run --release -p defuse-bench -- --only create,write-4k      some workloads, by prefix
//! cargo run --release -p defuse-bench -- --markdown table.md --check  the section for docs/performance.md
//! ```
//!
//! It needs root: it makes an ext4 on a loop device, mounts every target and drops the kernel's caches. The libfuse peer
//! is installed and compiled when it is first needed.
//!
//! What it is not: part of the product. Competitors live here and nowhere else; nothing depends on this crate.

#![forbid(unsafe_code)]

pub mod args;
pub mod backing;
pub mod measure;
pub mod peers;
pub mod report;
pub mod runner;
pub mod target;
pub mod workloads;

pub use defuse_measure::{caches, command, cpu, stats};
