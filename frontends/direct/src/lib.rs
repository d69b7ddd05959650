//! The in-process client: an application reaches several user-space file systems with no kernel
//! crossing.
//!
//! What it is: everything POSIX-like that happens *inside* mounts. A table of mounts by path and by
//! name ([`Client`]), a walk that follows symbolic links and crosses mounts, open files with shared
//! offsets ([`Description`]), a cache of names and attributes, the permission checks of the kernel,
//! locks, directory streams, and data without a lock or an allocation that is common to all.
//!
//! What it is not: it replaces no symbol and owns no descriptor of the kernel. Its caller says who
//! asks, from which directory and with which umask ([`Task`]), and gives out descriptor numbers
//! ([`Descriptors`] is there for that). What lies outside of all mounts is answered with
//! [`Stop::Outside`] and the path at which the kernel is to go on.
//!
//! Sources of the rules: the manual pages of the calls, path_resolution(7), acl(5), credentials(7),
//! and fs/namei.c, fs/attr.c and fs/open.c of Linux where they are silent.

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
mod handover;
mod locks;
mod mount;
mod mounts;
mod names;
mod node;
mod open;
mod outside;
mod queue;
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
pub use cwd::Place;
pub use data::IoFlags;
pub use description::{Arena, Description, OpenCells};
pub use descriptors::{Descriptors, FdFlags, Opened};
pub use directory::DirEntry;
pub use handover::Parcel;
pub use locks::LockFamily;
pub use mount::Mount;
pub use open::{How, Resolve};
pub use queue::{Outcome, Queue, QueueOptions, Then};
pub use stop::{Outside, Result, Stop};
pub use task::Task;
pub use walk::At;
