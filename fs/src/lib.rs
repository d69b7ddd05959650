//! The contract of defuse: one trait, [`FileSystem`], that every backend implements and every
//! frontend calls, with the types that pass between them.
//!
//! It has: synchronous inode operations, an optional asynchronous path for data and lock waits
//! ([`FileSystem::submit`]), buffers that belong to the frontend ([`ReadBuf`], [`WriteBuf`]), a
//! path API on top ([`path::PathFileSystem`]), layers that wrap any file system ([`layer`]), a lock
//! manager for file locks ([`locks`]), several file systems in one tree ([`namespace`]), open files
//! that are open files of the calling program ([`native`]), the caches of several frontends of one
//! file system ([`frontends`]), and the description of a kind of source ([`source`]).
//!
//! It knows no transport, no FUSE opcode, no system call and no third-party crate.
//! A frontend never imports a backend and a backend never imports a frontend; both import this.

#![forbid(unsafe_code)]

mod absent;
mod buf;
mod buffer;
mod context;
mod creation;
mod dates;
mod errno;
mod figures;
mod file_system;
pub mod frontends;
mod io;
pub mod layer;
mod lifecycle;
mod lock_wait;
pub mod locks;
pub mod namespace;
pub mod native;
mod notify;
mod number_hasher;
mod origin;
pub mod path;
pub mod posix;
mod resolve;
mod shortcuts;
pub mod source;
mod timestamp;
mod types;
mod versions;

pub use absent::AbsentFileSystem;
pub use buf::{
    DirBuf, DirItem, DirSink, PushOutcome, ReadBuf, ReadSink, SliceSink, SliceSource, WriteBuf,
    WriteSource,
};
pub use buffer::Buffer;
pub use context::{
    Caller, Context, InterruptCheck, InterruptToken, OwnerCapability, SupplementaryGroups,
};
pub use creation::{CREATE_WITH, create_in_calls, fill_new};
pub use dates::DateFloor;
pub use errno::{Errno, Result};
pub use figures::{Figure, MeasureUnit};
pub use file_system::FileSystem;
pub use frontends::{AnswerLifetime, Frontends};
pub use io::{Completion, Io, IoOp};
pub use lifecycle::Lifecycle;
pub use lock_wait::{LockAnswer, LockWait};
pub use notify::{NoNotify, Notify, RecallCallback, RenumberedNotify};
pub use number_hasher::NumberHasher;
pub use origin::Origin;
pub use resolve::{NormalPath, OpenOutcome, PathResolution};
pub use shortcuts::{Shortcuts, shortcuts_of};
pub use timestamp::Timestamp;
pub use types::*;
pub use versions::{ATTRIBUTES_HOLD, Versions};
