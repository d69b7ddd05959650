//! The agreement between `defuse run` and the library that is preloaded into programs.
//!
//! It is the [`ProgramPlan`] (mounts, and the system call sites to patch) with its encoding, the
//! layout of the memory that all processes of a run share ([`layout`]), and the analysis of
//! programs and libraries that finds those sites before anything runs ([`analysis`]), with a cache
//! of its results ([`cache`]).
//!
//! It is no part of the library: it maps nothing, patches nothing and intercepts nothing; that is
//! the library's part. The two are apart because a program that links the library would intercept
//! itself.

#![forbid(unsafe_code)]

pub mod analysis;
pub mod cache;
pub mod calls;
mod codec;
pub mod go;
pub mod image;
mod inherited;
pub mod layout;
mod plan;
pub mod reach;
mod scan;
pub mod trampoline;
pub mod trusted_directory;
mod unwind;

pub use codec::{MalformedState, StateError};
pub use inherited::{EXEC_STATE_VERSION, ExecState, InheritedDescriptors};
pub use plan::{ForkPolicy, MountPlan, ObjectSites, PatchSite, ProgramPlan, ServerPlace};

/// The variable that leads from one program of a run to the next: [`InheritedDescriptors`] as text.
pub const VARIABLE: &str = "DEFUSE_PRELOAD";

/// The variable with the directory that the first program of a run begins in.
pub const DIRECTORY: &str = "DEFUSE_PRELOAD_DIRECTORY";

/// The variable with the path that a program was executed by which the kernel executes by a
/// descriptor: a static one, and one of a mount.
pub const NAME: &str = "DEFUSE_PRELOAD_NAME";

/// The variable with the absolute path of such a program.
pub const EXECUTABLE: &str = "DEFUSE_PRELOAD_EXECUTABLE";

/// The symbol that the library exports, and no other: by it `defuse run` knows it.
pub const MARK: &str = "defuse_preload_library";

/// The file name of the library.
pub const LIBRARY: &str = "libdefuse_preload.so";
