//! The backend `passthrough`: serves a directory of another file system through the contract of
//! defuse (the Stackfs of the FAST '17 paper, on inodes instead of paths).
//!
//! [`Passthrough`] is a [`FileSystem`](defuse_fs::FileSystem) that maps every operation to the
//! lower file system. Owners, modes, ACLs and errors are the same as in native access. Inodes are
//! identified by file handle, or by name, so that a million known files need no million
//! descriptors.
//!
//! It caches no data and no attributes, which is the task of frontends, and checks no permissions
//! (see the contract). It is no sandbox: a process with the user id of the daemon can still access
//! the source. It never follows a symbolic link of the source and walks by single components only,
//! so no operation leaves the source, except into file systems mounted below it.
//!
//! # Decisions
//!
//! - An inode is identified by mount, number and birth time, which detects a reused number without
//!   a system call; without birth times by a hash of the file handle. Without file handles, inodes
//!   are found again by name (`reopen.rs`).
//! - A thread acts as the caller (`creds.rs`), with the capabilities that override permission
//!   checks, since the frontend has made them, but without CAP_FOWNER and CAP_SYS_RESOURCE. The
//!   lower file system thus checks ownership on the actual file.
//! - Number and birth time of a removed inode may come back within a tick of the clock.
//!   `identity.rs` has the rules by which no caller opens such a successor through the removed
//!   inode.
//! - Numbers of an overlay without `nfs_export` change, and those of its hard links are no
//!   identity: such inodes are known by their descriptors (`tables/watches.rs`).
//!
//! - A file system mounted below the source can be unmounted: no descriptor on it lasts
//!   (`tables/foreign_mounts.rs`), and others take its place in the table of mounts (`reuse.rs`).
//!   The own mount is not entered (`tables/own_mount.rs`).
//!
//! # System calls per operation
//!
//! The table is for file handles on ext4, xfs, btrfs, f2fs or tmpfs, with thread credentials
//! already set. *+dir* is one open_by_handle_at(2) if the directory's descriptor is not in the
//! cache.
//!
//! | operation | calls |
//! |---|---|
//! | lookup of a known inode, also in readdirplus | 1: statx +dir |
//! | lookup of a new inode | 3: statx, name_to_handle_at, statx +dir |
//! | getattr by handle; by inode | 1: statx; one more to open an inode that is not in the cache |
//! | open, opendir | 1: open_by_handle_at, or fstat of a recently read file; one more fstat to open for writing; 3 more where a handle is not exact (`identity.rs`) |
//! | create | 3: openat, statx, name_to_handle_at +dir |
//! | mknod, mkdir, symlink | 3: the call, statx, name_to_handle_at +dir |
//! | unlink, rmdir, rename over an existing name | 1 where no frontend knows a file; otherwise 4: statx, open_by_handle_at if a frontend knows the inode, the call, statx of the inode +dir |
//! | rename to a new name | 2: statx, renameat2 +dirs |
//! | link | 2: linkat, statx +dir; one more to open an inode that is not in the cache |
//! | setattr | 1 for each kind of change, and statx if the caller wants the attributes |
//! | read, write, fsync, lseek, fallocate, copy_file_range | 1 |
//! | readdir | 1 getdents64 for 32 KiB of entries |
//! | xattrs | 1 by `/proc/self/fd`; one more to open an inode that is not in the cache |
//! | release, forget of a pinned inode | 1: close; 0 for a file open for reading, until it is trimmed |
//! | flush | 0 on local file systems |
//!
//! Without file handles, a lookup of a new inode takes 3 calls (statx, openat, statx), and open
//! goes through `/proc/self/fd`. An inode that is not in the cache takes 2 more calls (openat,
//! statx), and so does each directory above it that is not. On an overlay without `nfs_export`, a
//! file with several names takes 4 (statx, openat, statx, inotify_add_watch), and the first change
//! of an inode 3 more.
//!
//! A program in whose process this is ([`CredentialsPolicy::Callers`]) looks a file up and opens it
//! for reading with 3 calls, with and without file handles: statx, openat, statx. One more gives it
//! a descriptor of its own. A file that it creates takes one call less than in the table. The
//! handle is left out: the open file leads to its inode (`by_open_file.rs`).
//!
//! # Effects on the calling threads
//!
//! See [`CredentialsPolicy`]. By default, a thread keeps the file-system user, group, umask and
//! capabilities that an operation has set, and gets its own working directory. Every operation acts
//! as its caller and does not depend on the state that earlier ones left. Threads of an application
//! need [`CredentialsPolicy::Restore`], or [`CredentialsPolicy::Callers`] if they are the callers.

#![deny(unsafe_code)]

mod attributes;
mod by_open_file;
mod changing_numbers;
mod control;
mod creds;
mod data;
mod directory;
mod error;
mod file_system;
mod foreign;
mod handle;
mod identity;
mod kind;
mod lease;
mod locks;
mod lookup;
mod lower;
mod names;
mod options;
mod passthrough;
mod proc_path;
mod removal;
mod reopen;
mod reuse;
#[allow(unsafe_code)]
mod sys;
mod tables;

pub use defuse_fs::source::{GrantedEffects, LockPlace};
pub use error::SourceError;
pub use kind::KIND;
pub use options::{CredentialsPolicy, FileHandles, PassthroughOptions};
pub use passthrough::{Passthrough, ResourceStats};
