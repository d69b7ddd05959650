//! Comparison benchmarks: the same workloads on a native directory, the peers and defuse, side by
//! side in one run.
//!
//! [`workloads`] are plain system calls by a few threads. All targets are mounted together over one
//! backing file system ([`target`], [`backing`], [`peers`]). A [`runner`] interleaves them cell by
//! cell and round by round, and a [`report`] shows ratios. Ratios measured side by side are valid
//! on a loaded machine; absolute figures are not.
//!
//! ```text
//! cargo run --release -p defuse-bench -- --quick             an overview, in a minute or two
//! cargo run --release -p defuse-bench -- --only create,write-4k      some workloads, by prefix
//! cargo run --release -p defuse-bench -- --markdown FILE --check  for docs/performance.md
//! ```
//!
//! It requires root: it creates an ext4 on a loop device, mounts every target and drops the
//! kernel's caches. The libfuse peer is installed and compiled on first use.
//!
//! This crate is not part of the product. Competitors are here and nowhere else, and nothing
//! depends on this crate.

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
