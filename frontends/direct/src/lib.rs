//! The in-process client: an application calls user-space file systems without entering the kernel.
//!
//! This crate implements everything POSIX-like *inside* of mounts: a table of mounts by path and by
//! name ([`DirectClient`]), path walks that follow symbolic links and cross mounts, open files with
//! shared offsets ([`FileDescription`]), a cache of names and attributes, the permission checks of
//! the kernel, locks, and directory streams. Data transfers take no global lock and allocate
//! nothing.
//!
//! It neither replaces symbols of the C library nor owns kernel descriptors. The caller supplies
//! credentials, working directory and umask ([`ClientTask`]), and assigns descriptor numbers, for
//! example with [`DescriptorTable`]. For a path outside of all mounts, a call returns
//! [`CallError::Outside`] with the path at which the kernel must continue.
//!
//! The rules come from the manual pages of the calls, path_resolution(7), acl(5) and
//! credentials(7). Where these are silent, they follow fs/namei.c, fs/attr.c and fs/open.c of
//! Linux.

#![forbid(unsafe_code)]

mod access;
mod asynchronous;
mod attributes;
mod buffers;
mod cache;
mod call_target;
mod client;
mod copying;
mod credentials;
mod cwd;
mod data;
mod description;
mod descriptors;
mod directory;
mod exec_state;
mod kernel_walk;
mod lifetime;
mod link_protection;
mod locks;
mod mount;
mod mounted_inode;
mod mounts;
mod names;
mod node;
mod open;
mod open_how;
mod owned;
mod prefix_cache;
mod queue;
mod remaining_path;
mod resolve;
mod stop;
mod task;
mod walk;
mod work_dir;
mod xattrs;

pub use access::NeededAccess;
pub use asynchronous::{AsyncCallback, PendingOperation};
pub use attributes::{FileStat, NewOwner, NewTimes};
pub use client::{ClientMountArgs, ClientOptions, DirectClient, MountInfo};
pub use credentials::{TaskCredentials, cap};
pub use data::IoFlags;
pub use description::{CellArena, FileDescription, OpenCells};
pub use descriptors::{DescriptorFile, DescriptorTable, FdFlags};
pub use directory::DirEntry;
pub use exec_state::OpenFileState;
pub use link_protection::LinkProtection;
pub use locks::LockFamily;
pub use mount::ClientMount;
pub use open_how::{OpenHow, ResolveFlags};
pub use queue::{JobCallback, JobOutcome, JobQueue, QueueOptions};
pub use stop::{CallError, OutsidePaths, Result};
pub use task::ClientTask;
pub use walk::WalkStart;
pub use work_dir::WorkDir;
