//! A file system for other processes, over a Unix socket.
//!
//! A [`SocketServer`] listens, decides which users may connect, and gives each connection a session
//! over one file system, so that one client reads data that another one writes. A client speaks
//! FUSE in messages of a `SOCK_SEQPACKET` socket (`backends/remote` is the other end).
//!
//! [`serve_one`] serves one trusted process at the other end of a connected socket, and
//! [`start_trusted`] one that takes the place of the kernel.
//!
//! This crate does not decide the rights of a client (`connection`), handles no requests
//! (`session`), and contains no file systems.

mod clients;
#[cfg(fuzzing)]
mod fuzzed;
mod messages;
pub mod name;
mod other_protocols;
mod peer;
mod prefetch;
mod processes;
mod server;
mod single;
mod steps;
mod threads;
mod unsent;
mod waiting;

pub use clients::{ClientStatistics, ServerStatistics};
pub use defuse_connection::{ClientHoldings, ConnectionLimits};
pub use defuse_session::ShareLimits;
#[cfg(fuzzing)]
pub use fuzzed::peers as fuzz_peers;
pub use other_protocols::{OtherProtocol, PeerProcess};
pub use server::{AdmissionPolicy, ServeError, ServerOptions, SocketServer};
pub use single::{serve_one, start_trusted};
