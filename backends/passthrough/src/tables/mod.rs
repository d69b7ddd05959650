//! The tables that a [`Passthrough`](crate::Passthrough) consists of: inodes, mounts, open files,
//! locks and descriptors.
//!
//! No file here knows the object. Operations, which use several tables, are in the files above.

pub(crate) mod dir_stream;
pub(crate) mod fd_cache;
pub(crate) mod foreign_mounts;
pub(crate) mod inode;
pub(crate) mod inode_names;
pub(crate) mod mounts;
pub(crate) mod open_files;
pub(crate) mod own_mount;
pub(crate) mod owner_locks;
pub(crate) mod positions;
pub(crate) mod pruning;
pub(crate) mod recent;
pub(crate) mod removal_locks;
pub(crate) mod slab;
pub(crate) mod watches;
pub(crate) mod young;
