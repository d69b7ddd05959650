//! A file system on a raw device, from user space.
//!
//! Inodes lie in slots of 4 KiB, and only the slots determine which files exist and which space is
//! used: there is no journal and no bitmap. A change goes to a free slot, changes that belong
//! together form a counted group, and mounting reads the slots. DESIGN.md gives the reasons,
//! SPEC.md every byte.
//!
//! The crate does all I/O through `defuse-block`, and keeps no checksums of file data. It checks no
//! permission bits, which is the task of the frontend.

#![forbid(unsafe_code)]

mod check;
mod commit;
mod content;
mod engine;
mod format;
mod fs;
mod fuzzed;
mod group;
mod image;
mod io;
mod kind;
mod load;
mod locks;
mod names;
mod repair;
mod space;
mod store;
#[cfg(test)]
mod tests;

use std::time::Duration;

use defuse_fs::posix::AccessTimeRule;

pub use check::{CheckReport, check};
pub use defuse_block::separation::SeparationMode;
pub use format::superblock::SuperblockError;
pub use fs::Uhs;
pub use fuzzed::{image as fuzz_image, snapshot as fuzz_snapshot};
pub use kind::KIND;
pub use names::LoadProblem;
pub use repair::{DoubtfulGroups, RepairAction, WrittenInode, repair};
pub use store::StoreError;

/// Options of a [`Uhs`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UhsOptions {
    /// Nothing is written to the device, not even the changes by which a mount recovers from a
    /// power failure.
    pub read_only: bool,
    /// The time after which changes without a sync become durable. `None`: only a sync makes them
    /// durable.
    pub commit: Option<Duration>,
    /// Free blocks are discarded on the device, once it is durable that they are free.
    pub discard: bool,
    /// The number of pages of 4 KiB in memory from which on pages that are on the device are
    /// dropped.
    pub cache_pages: usize,
    /// The number of pages that are not on the device from which on writers wait.
    pub dirty_pages: usize,
    /// Bytes of memory for names and attributes of all files. A larger file system is refused, and
    /// no file is made that would need more.
    pub index: u64,
    /// All threads share a few queues of the device, and so operations are divided among these.
    /// `None`: each thread has queues of its own.
    pub separation: Option<SeparationMode>,
    /// The number of queues that they share; `None`: 4.
    pub queues: Option<u32>,
    /// One thread does all I/O, on the NUMA node of the device, see
    /// [`Worker`](defuse_block::WorkerDevice).
    pub worker: bool,
    /// The frontend has a write-back cache, and dates changes by the last tick of the kernel's
    /// clock.
    pub writeback: bool,
    /// The rule by which reading updates access times.
    pub access_times: AccessTimeRule,
}

impl Default for UhsOptions {
    /// The default cache has 256 MiB, or a quarter of the memory that this process may use, if that
    /// is less. The index has half as much as the cache.
    fn default() -> Self {
        let memory = defuse_hugepages::memory_limit();
        let cache_pages = (memory / 4 / format::BLOCK as u64).min(65_536) as usize;
        UhsOptions {
            read_only: false,
            commit: Some(Duration::from_secs(1)),
            discard: false,
            cache_pages,
            dirty_pages: cache_pages / 8,
            index: memory / 2,
            separation: None,
            queues: None,
            worker: false,
            writeback: false,
            access_times: AccessTimeRule::Relative,
        }
    }
}
