//! A file system for other processes, by shared memory.
//!
//! A client connects to the socket of a server (`frontends/socket`), which decides about its
//! admission and its rights. [`LaneOffers`] adds lanes in memory that this client and the server
//! alone share (`ring/`): requests and replies of short calls then need no system call while both
//! sides run. Everything else stays on the socket: INIT, notifications, descriptors, interrupts,
//! and the end of the client.
//!
//! [`PagedFileSystem`] keeps pages of open files in bounded memory that clients read without a
//! request; a policy of `cache/` decides which of them leave. [`VersionedFileSystem`] shows clients
//! by versions in memory which names and attributes have changed, and clients with the same rights
//! share the names that were reported to them (`named`).
//!
//! This crate does not listen, decides no rights (`connection`), and handles no requests
//! (`session`).

mod counts;
mod lanes;
mod layers;
mod memory;
mod named;
mod paged;
mod versioned;

pub use counts::PartDivision;
pub use lanes::{LaneLimits, LaneOffers};
pub use layers::{SharedLayers, SharedOptions};
pub use paged::{PagedFileSystem, PagedOptions};
pub use versioned::{UnseenChanges, VersionedFileSystem};
