//! `libfuse.so.2`: the functions of libfuse 2.9, and those for programs since 2.2, by their names
//! and versions.
//!
//! [`SYMBOLS`] lists what the library exports. The functions are in `defuse-libfuse`, in [`calls`]
//! and [`channels`] where only libfuse 2 has them, and in [`compat`] for programs that were built
//! before libfuse 2.6. Nothing here is for Rust programs.

pub mod calls;
pub mod channels;
pub mod compat;
mod symbols;

pub use symbols::SYMBOLS;
