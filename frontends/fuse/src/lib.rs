//! The kernel mount.
//!
//! This crate mounts a file system, unmounts it, and lists mounts ([`mount`]). A [`Session`] serves
//! the mount. This crate contains no file systems and depends on no backend, has no cache of file
//! data (the kernel does that), and parses no command line.

pub mod mount;

pub use defuse_session::{
    CallerWorker, GroupSource, InitDecision, InitError, IoUring, NegotiatedInit, ProcessGroups,
    ResizeError, Session, SessionEnd, SessionOptions, SessionStatistics, SessionStopper,
    SpliceLimits, StartError, ThreadPolicy, WorkerControl, abi, negotiate, process,
};
