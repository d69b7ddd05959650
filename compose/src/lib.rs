//! Which file systems there are, and how one is made from what the user wrote.
//!
//! What it is: the one place that names all backends, for whatever puts them behind a frontend: the
//! program, the C library, the preloaded library. A source is `KIND:REST` ([`Source`]), options
//! belong to one kind ([`OPTIONS`]), and both together are one text for those without a command
//! line: `passthrough:/srv,exclusive` ([`open_text`]).
//!
//! What it is not: it puts nothing behind a frontend, and knows no option of a mount or a session. Of
//! `defuse-fuse` it uses the client alone, which is a file system.

#![forbid(unsafe_code)]

mod options;
mod sources;
mod value;

pub use options::{BackendOpt, OPTIONS, Settings, split};
pub use sources::{BACKENDS, Backend, Source, Switch, help, open_text};
pub use value::{Value, bytes, seconds};

use std::fmt;

/// What [`Settings::passthrough`] needs where operations run on threads of an application.
pub const APPLICATION_THREADS: defuse_passthrough::Credentials =
    defuse_passthrough::Credentials::Restore;

/// What [`Settings::passthrough`] needs where several processes open the same file system, each by
/// itself: locks that hold among all of them.
pub const SHARED_LOCKS: defuse_passthrough::Locks = defuse_passthrough::Locks::Inherited;

/// What [`Settings::passthrough`] needs in a server of several processes: each would keep its locks to
/// itself otherwise, because the file system keeps none.
pub const SERVED_LOCKS: defuse_passthrough::Locks = defuse_passthrough::Locks::FileSystem;

/// Why there is no file system. The text names the object and the next step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Error {
    /// What was asked for cannot be meant.
    Usage(String),
    /// What was asked for could not be done.
    Failed(String),
}

impl Error {
    pub(crate) fn failed(error: impl fmt::Display) -> Self {
        Error::Failed(error.to_string())
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Usage(text) | Error::Failed(text) => f.write_str(text),
        }
    }
}

impl std::error::Error for Error {}

/// What is made here, or why not.
pub type Result<T = ()> = std::result::Result<T, Error>;
