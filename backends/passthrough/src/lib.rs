//! The backend `passthrough`: a directory of another file system, served through the contract of
//! defuse (the Stackfs of the FAST '17 paper, on inodes instead of paths).
//!
//! What it is: [`Passthrough`], a [`FileSystem`](defuse_fs::FileSystem) whose every operation is
//! that of the lower file system, with owners, modes, ACLs and errors as they would be natively.
//! Inodes are kept by file handle, or by name, so a million known files need no million descriptors.
//!
//! What it is not: it caches no data and no attributes (frontends do), checks no permissions (see
//! the contract), and is no sandbox: a process of the daemon's own user can still reach the source.
//! It never follows a symbolic link of the source and walks by single components only, so nothing
//! that is done through it leaves the source, but through what is mounted below.
//!
//! # System calls for each operation
//!
//! With file handles, on ext4, xfs, btrfs, f2fs or tmpfs, once the credentials of the thread fit.
//! *+dir* is one open_by_handle_at(2) where the directory's descriptor is not in the cache.
//!
//! | operation | calls |
//! |---|---|
//! | lookup of a known inode, also in readdirplus | 1: statx +dir |
//! | lookup of a new inode | 2: statx, name_to_handle_at +dir |
//! | getattr by handle; by inode | 1: statx; the same and 1 to open what is not in the cache |
//! | open, opendir | 1: open_by_handle_at; fstat where it was open for reading a moment ago, and one for what is written |
//! | create | 3: openat, statx, name_to_handle_at +dir |
//! | mknod, mkdir, symlink | 3: the call, statx, name_to_handle_at +dir |
//! | unlink, rmdir, rename over something | 4: statx, open_by_handle_at of what a frontend still knows, the call, statx of the same +dir |
//! | rename to a new name | 2: statx, renameat2 +dirs |
//! | link | 2: linkat, statx +dir, and 1 to open the inode if not in the cache |
//! | setattr | 1 for each kind of change, and statx |
//! | read, write, fsync, lseek, fallocate, copy_file_range | 1 |
//! | readdir | 1 getdents64 for 32 KiB of entries |
//! | xattrs | 1 by `/proc/self/fd`, and 1 to open what is not in the cache |
//! | release, forget of a pinned inode | 1: close; 0 for what was open for reading, until it is trimmed |
//! | flush | 0 on local file systems |
//!
//! Without file handles: lookup of a new inode 3 (statx, openat, statx), open by `/proc/self/fd`, and 2
//! (openat, statx) for what is not in the cache and each directory above it that is not.
//!
//! # What is done to the threads that call
//!
//! See [`Credentials`]: with the default, threads keep the file-system user, group, umask and
//! capabilities that an operation has set, and get a working directory of their own; every operation
//! acts as its caller and depends on nothing that is left over. Threads of an application want
//! [`Credentials::Restore`].

#![deny(unsafe_code)]

mod attributes;
mod control;
mod creds;
mod data;
mod directory;
mod error;
mod fd_cache;
mod file_system;
mod handle;
mod inode;
mod lease;
mod locks;
mod lookup;
mod lower;
mod mounts;
mod names;
mod open_files;
mod options;
mod passthrough;
mod recent;
mod removal;
mod reopen;
mod slab;
#[allow(unsafe_code)]
mod sys;

pub use error::SourceError;
pub use options::{Credentials, FileHandles, Granted, Locks, Options};
pub use passthrough::{Passthrough, Stats};
