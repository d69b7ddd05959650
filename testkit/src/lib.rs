//! Tests that every file system must pass, written once.
//!
//! What it is: [`model`], a file system so simple that it is obviously right, with a driver that
//! runs random operations on it and on any [`FileSystem`](defuse_fs::FileSystem) side by side; and
//! [`posix`], cases that run through plain system calls on a directory, so that one suite serves
//! every backend behind every frontend, and native file systems to prove the suite itself;
//! [`mounted`], mounts of the real program that always go away again; and [`suites`], the suites of
//! others and real programs, run on such mounts and on native ext4 beside them; [`inside`], suites of others in
//! programs under `defuse run`.
//!
//! Unsafe code is in `posix/sys.rs` alone: the few system calls for which there is no safe wrapper.
//!
//! What it is not: no benchmark, no fuzzer of formats, and no part of what is shipped.

#![deny(unsafe_code)]

pub mod inside;
pub mod model;
pub mod mounted;
pub mod posix;
pub mod suites;

/// The programs in docs/direct.md compile as they stand.
#[cfg(doctest)]
#[doc = include_str!("../../docs/direct.md")]
pub struct DirectDocument;
