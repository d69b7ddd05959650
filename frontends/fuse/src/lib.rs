//! The kernel mount.
//!
//! This crate mounts a file system, unmounts it, and lists mounts ([`mount`]). A [`Session`] serves the
//! mount. This crate contains no file systems (those are backends, which it never names), no cache of
//! file data (that is the kernel's), and no syntax of options (that is the program's).

pub mod mount;

pub use defuse_session::{
    Decision, Ended, InitError, IoUring, Negotiated, Session, SessionOptions, SpliceLimits,
    StartError, Statistics, abi, negotiate,
};
