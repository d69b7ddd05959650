//! Unmodified programs on user-space file systems, in their own process.
//!
//! It is a library for `LD_PRELOAD`. One core at the level of the kernel's interface
//! (`serve::call`: a number and six arguments) decides whether a call concerns a mount, and serves
//! it through `defuse_direct` as the kernel would. Two ways lead there: the `syscall` instructions
//! of the C library, which are patched when a program starts (`catch::patch`), so that stdio,
//! opendir, glob and posix_spawn need no code of their own; and the exported functions
//! (`catch::symbols`), for C libraries that cannot be patched and for the calls that are made most.
//!
//! It is not a file system and knows none but at its composition point (`process::compose`), and it
//! walks no paths itself. A call of a program outside of all mounts stays the kernel's.
//!
//! Descriptors are the kernel's own numbers: either the descriptor of the bytes (where a file
//! system gives one, `Opened::backing`), or a placeholder (`O_PATH`), with which the kernel can do
//! nothing, so that a call that we miss fails with `EBADF` instead of succeeding elsewhere.

#![deny(unsafe_code)]

mod catch;
#[cfg(test)]
mod coverage;
mod machine;
mod process;
mod serve;
