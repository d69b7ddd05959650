//! libdefuse: the in-process client for C.
//!
//! It exports the POSIX calls with the prefix `defuse_`, which use their own descriptor table and
//! set `errno` as POSIX specifies. It also has asynchronous reads and writes, and `defuse_mount`,
//! `defuse_unmount` and `defuse_statistics`. The functions are in `calls`, one file for each
//! family. The header `include/defuse.h` and the manual pages in `man` are generated from them.
//!
//! It passes no calls to the kernel: a path outside of all mounts fails with `EXDEV`, and its
//! descriptors are invalid for calls without the prefix.
//!
//! Nothing unwinds into C: a panic becomes `EIO`. Only `memory.rs` dereferences pointers. The
//! unsafe code in `calls` is for symbol names, and for the lengths that belong to pointers.

#![deny(unsafe_code)]

mod aio;
mod calls;
mod explain;
mod mappings;
mod memory;
mod state;
