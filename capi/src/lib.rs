//! libdefuse: the in-process client for C.
//!
//! What it is: the POSIX calls with the prefix `defuse_`, on descriptors of a table of their own,
//! with `errno` set as POSIX says; reads and writes that finish later; and `defuse_mount`,
//! `defuse_unmount`, `defuse_statistics`. Its functions are in `calls`, a file for each family. The
//! header `include/defuse.h` and the manual pages in `man` are made of them.
//!
//! What it is not: it passes nothing on to the kernel. A path outside of all mounts gives `EXDEV`,
//! and the descriptors mean nothing to the calls without the prefix.
//!
//! Nothing here unwinds into C: what panics gives `EIO`. Pointers are for `memory.rs` alone; what
//! is unsafe in `calls` are the names of symbols, and lengths that go with a pointer.

#![deny(unsafe_code)]

mod aio;
mod calls;
mod explain;
mod mappings;
mod memory;
mod state;
