//! `libfuse3.so.3`: the functions of libfuse 3.14, by their names and versions.
//!
//! [`SYMBOLS`] lists what the library exports. The functions are in `defuse-libfuse`, or in
//! [`calls`] where only libfuse 3 has them. Nothing here is for Rust programs.

pub mod calls;
mod symbols;

pub use symbols::SYMBOLS;
