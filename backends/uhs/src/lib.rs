//! A file system on a raw device, from user space.
//!
//! Inodes lie in slots of 4 KiB, and the slots alone say what exists and what space is used: there is no
//! journal and no bitmap. A change goes to a free slot, changes that belong together form a counted
//! group, and mounting reads the slots.
//!
//! The crate has the format of the device, and the commit rule by which groups survive a power failure whole
//! or not at all. DESIGN.md gives the reasons, SPEC.md every byte.
//!
//! It does I/O through `defuse-block` alone, and keeps no checksums of file data.

#![forbid(unsafe_code)]

pub use commit::{Change, Recovered, Version};
pub use format::slot::BODY;
pub use format::superblock::Unusable;
pub use store::{Store, StoreError, make};

mod commit;
mod format;
mod store;
