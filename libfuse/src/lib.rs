//! Programs that were written for libfuse 2 or 3, on the sessions of this project.
//!
//! The libraries `libfuse3.so.3` (`three/`) and `libfuse.so.2` (`two/`) export the functions of
//! libfuse by their names and versions, and this crate has the functions. A program hands over a
//! structure of operations on paths ([`OperationTable`]). [`ProgramFileSystem`] calls them as a
//! [`PathFileSystem`](defuse_fs::path::PathFileSystem), the
//! [`PathAdapter`](defuse_fs::path::PathAdapter) makes a file system of inodes of it, and a session
//! of `session/` serves its mount.
//!
//! Programs of the interface of inodes ("low-level") get the requests themselves ([`low`]).
//! Character devices (CUSE) and modules are not served: [`refused`] answers their functions as a
//! libfuse that cannot create them.
//!
//! Sources: the symbols of the shared libraries of libfuse 2.9.9 and 3.14.0, the structures in
//! their headers, and the behaviour that these document.

pub mod abi;
pub mod args;
pub mod buffers;
mod calls;
pub mod cmdline;
pub mod connection;
mod context;
pub mod daemon;
pub mod exports;
mod file_system;
pub mod handle;
pub mod logging;
pub mod low;
pub mod options;
pub mod refused;
pub mod signals;

pub use calls::OperationTable;
pub use context::{fuse_get_context, fuse_getgroups, fuse_interrupted};
pub use file_system::ProgramFileSystem;
