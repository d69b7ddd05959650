//! Tests that every file system must pass, written once.
//!
//! - [`model`]: an obviously correct file system, and a driver that runs random operations on it
//!   and on any [`FileSystem`](defuse_fs::FileSystem) side by side.
//! - [`posix`]: cases that make plain system calls on a directory. One suite thus tests every
//!   backend behind every frontend, and native file systems prove the suite itself.
//! - [`mounted`]: mounts of the real program that are always removed again.
//! - [`suites`]: third-party suites and real programs, run on such mounts and on native ext4.
//! - [`gluster`] and [`cluster`] (of `defuse-measure`): servers of GlusterFS in name spaces of
//!   their own, on one host or three.
//! - [`listing`]: the names in a directory of any file system.
//! - [`agent`]: operations on files as lines of text, for programs on other mounts and in runs.
//! - [`container`]: programs in a container with the limits of Docker.
//! - [`inside`]: third-party suites in programs under `defuse run`.
//!
//! Unsafe code is in `posix/sys.rs` only: a few system calls without a safe wrapper.
//!
//! This crate has no benchmarks and no fuzzers of formats, and is not shipped.

#![deny(unsafe_code)]

pub mod agent;
pub mod container;
pub mod inside;
pub mod listing;
pub mod model;
pub mod mounted;
pub mod posix;
pub mod suites;

pub use defuse_measure::{cluster, gluster};

/// The programs in docs/direct.md compile as they are.
#[cfg(doctest)]
#[doc = include_str!("../../docs/direct.md")]
pub struct DirectDocument;

/// A count of requests, once it stays the same for 20 ms: a server counts a request after its
/// answer.
pub fn await_settled(count: impl Fn() -> u64) -> u64 {
    let mut last = count();
    loop {
        std::thread::sleep(std::time::Duration::from_millis(20));
        let now = count();
        if now == last {
            return now;
        }
        last = now;
    }
}
