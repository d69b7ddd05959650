//! The in-process client: an application calls user-space file systems without entering the kernel.
//!
//! This crate implements everything POSIX-like *inside* of mounts: a table of mounts by path and by
//! name ([`Client`]), path walks that follow symbolic links and cross mounts, open files with
//! shared offsets ([`Description`]), a cache of names and attributes, the permission checks of the
//! kernel, locks, and directory streams. Data transfers take no global lock and allocate nothing.
//!
//! It neither replaces symbols of the C library nor owns kernel descriptors. The caller supplies
//! credentials, working directory and umask ([`Task`]), and assigns descriptor numbers, for example
//! with [`Descriptors`]. For a path outside of all mounts, a call returns [`Stop::Outside`] with
//! the path at which the kernel must continue.
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
mod client;
mod copying;
mod credentials;
mod cwd;
mod data;
mod description;
mod descriptors;
mod directory;
mod exec_state;
mod fresh;
mod locks;
mod mount;
mod mounts;
mod names;
mod node;
mod open;
mod outside;
mod owned;
mod passed;
mod queue;
mod resolve;
mod rest;
mod stop;
mod task;
mod walk;
mod xattrs;

pub use access::Access;
pub use asynchronous::{Callback, Pending};
pub use attributes::{Owner, Stat, Times};
pub use client::{Client, MountArgs, MountInfo, Options, Protected};
pub use credentials::{Credentials, cap};
pub use cwd::WorkDir;
pub use data::IoFlags;
pub use description::{Arena, Description, OpenCells};
pub use descriptors::{Descriptors, FdFlags, Opened};
pub use directory::DirEntry;
pub use exec_state::OpenFileState;
pub use locks::LockFamily;
pub use mount::Mount;
pub use open::{How, Resolve};
pub use queue::{Outcome, Queue, QueueOptions, Then};
pub use stop::{Outside, Result, Stop};
pub use task::Task;
pub use walk::At;
