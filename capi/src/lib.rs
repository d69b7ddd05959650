//! libdefuse: the in-process client for C.
//!
//! What it is: the POSIX calls with the prefix `defuse_`, on descriptors of a table of their own,
//! with `errno` set as POSIX says; and `defuse_mount`, `defuse_unmount`, `defuse_statistics`. The
//! header is `include/defuse.h`.
//!
//! What it is not: it passes nothing on to the kernel. A path outside of all mounts gives `EXDEV`,
//! and the descriptors mean nothing to the calls without the prefix.
//!
//! Nothing here unwinds into C: what panics gives `EIO`. Unsafe code is in `memory.rs`, and
//! in `calls.rs` where it is called.

#![deny(unsafe_code)]

mod calls;
mod memory;
mod state;
