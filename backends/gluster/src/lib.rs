//! A GlusterFS volume, through libgfapi instead of GlusterFS's own FUSE client.
//!
//! Inodes are known by their GFID, the identity that all servers of a volume agree on. Reads,
//! writes and syncs are asynchronous; all other operations block their thread, as libgfapi has no
//! other form of them. The servers check the rights of every caller, and keep POSIX locks for all
//! clients.
//!
//! libgfapi is loaded when the first volume is opened, so that programs start and build without it.
//! The crate caches no data, and has no file system checks of its own: the servers define the
//! volume. It keeps names and attributes only for several frontends that share it, while servers
//! report changes.

mod absent;
mod address;
mod answers;
mod attributes;
mod changes;
mod connect;
mod contents;
mod data;
mod defaults;
mod ffi;
mod file;
mod fs;
mod gluster;
mod graph_file;
mod held;
mod kind;
mod listing;
mod locks;
mod looked_up;
mod messages;
mod name_locks;
mod names;
mod nodes;
mod pages;
mod subvolumes;
mod transfer;
mod upcalls;
mod volume;
mod writes;
mod xattrs;

use std::time::Duration;

pub use gluster::Gluster;
pub use kind::KIND;

/// The transport to the management servers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ManagementTransport {
    /// TCP.
    #[default]
    Tcp,
    /// The socket of the server on this machine.
    Unix,
}

impl ManagementTransport {
    fn name(self) -> &'static str {
        match self {
            ManagementTransport::Tcp => "tcp",
            ManagementTransport::Unix => "unix",
        }
    }
}

/// Options of a volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GlusterOptions {
    /// The directory that is served as the root, in place of one in the address.
    pub sub_directory: Option<String>,
    /// Amount that libgfapi writes to the log of the program: 0 (nothing) to 9 (everything).
    pub log_level: u8,
    /// The transport.
    pub transport: ManagementTransport,
    /// The port; 0 for the usual one.
    pub port: u16,
    /// Validity of names and attributes in frontends.
    pub valid_for: Duration,
    /// The longest validity if servers report changes by other clients
    /// (`features.cache-invalidation`), at most half of the time for which they do. Zero: never
    /// longer than `valid_for`.
    pub upcall_time: Duration,
    /// Answers are kept for that time in this process, and not in the frontends. For several
    /// frontends, which receive no notifications of each other's changes.
    pub keeps_here: bool,
    /// The time for which this process keeps answers if servers do not report changes. With
    /// `keeps_here`.
    pub untold_for: Duration,
    /// Seconds without an answer after which a connection to a brick is given up. `None`: as the
    /// volume says.
    pub ping_timeout: Option<u16>,
    /// Access lists are served, if the servers keep them.
    pub acl: bool,
    /// The calling threads belong to an application, which continues after the volume is closed.
    pub in_application: bool,
    /// Threads of libgfapi answer reads, writes and syncs. These answers must not wait for
    /// anything: all others need these threads.
    pub submits: bool,
}

impl Default for GlusterOptions {
    fn default() -> Self {
        GlusterOptions {
            sub_directory: None,
            log_level: 3,
            transport: ManagementTransport::Tcp,
            port: 0,
            valid_for: Duration::from_secs(1),
            upcall_time: Duration::from_secs(300),
            keeps_here: false,
            untold_for: Duration::ZERO,
            ping_timeout: None,
            acl: true,
            in_application: false,
            submits: true,
        }
    }
}
