//! A layer for each client of a file system that is served to other processes.
//!
//! A client in another process may end at any moment, and its requests may be wrong. A
//! [`PeerConnection`] is a [`FileSystem`](defuse_fs::FileSystem) for one client, around the file
//! system that all clients share:
//!
//! - The client may name only inodes and open files that it got (`ledger`). Everything that it has
//!   not given back is released when the connection ends.
//! - A client whose user is not root may do what the user may do (`guard`, by the rules in
//!   `rules`). Between a check and the change that it permits, no other client changes what was
//!   checked (`inode_locks`).
//! - The number of inodes, open files, locks and mapped bytes is limited for each client (`usage`),
//!   for each user over all its clients, and mapped bytes for all users together (`quotas`).
//! - A client may request all inodes on the way of a path at once (`steps`), and have several small
//!   files opened at once (`prefetch`).
//! - A file that clients have mapped has one memory, and all of them see it (`maps`).
//! - A client that is stopped loses locks for which others wait (`stopped`).
//!
//! This crate knows no protocol and no transport. A frontend for other processes finds out who its
//! client is, makes a connection, and calls it.

#![forbid(unsafe_code)]

mod call;
mod connection;
mod credentials;
mod fs;
mod guard;
mod inode_locks;
mod ledger;
mod listing;
mod maps;
mod pages;
mod paths;
mod prefetch;
mod quotas;
mod rules;
mod steps;
mod stopped;
#[cfg(test)]
mod tests;
mod usage;

pub use connection::{PeerConnection, ServiceState};
pub use credentials::PeerCredentials;
pub use ledger::InheritedInode;
pub use pages::{LookupVersions, NameSource, PageSource, VersionSource};
pub use prefetch::{WantedFiles, WholeBytes, WholeOpenFile};
pub use quotas::ServiceQuotas;
pub use steps::{PathStep, WalkEnd};
pub use stopped::ProcessStatus;
pub use usage::{ClientHoldings, ConnectionLimits};
