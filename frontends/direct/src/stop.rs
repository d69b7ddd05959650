//! How a call ends that does not succeed here.

use std::fmt;

use defuse_fs::Errno;

/// What every call of the client returns.
pub type Result<T, E = Stop> = std::result::Result<T, E>;

/// Why a call did not succeed here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Stop {
    /// It failed, with the error of the system call of the same name.
    Errno(Errno),
    /// What it names lies outside of all mounts: the kernel is to do it.
    Outside(Outside),
}

/// Where the kernel is to go on.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Outside {
    /// The path that takes the place of the caller's, absolute; `None` where the caller's own path
    /// (and directory) is right as it is.
    pub path: Option<Vec<u8>>,
    /// The same for the second path of rename and link.
    pub second: Option<Vec<u8>>,
}

impl Stop {
    /// The error number; `EXDEV` for what lies outside, as a caller has it that cannot ask the
    /// kernel.
    pub fn errno(&self) -> Errno {
        match self {
            Stop::Errno(errno) => *errno,
            Stop::Outside(_) => Errno::EXDEV,
        }
    }

    pub(crate) fn outside(path: Option<Vec<u8>>) -> Self {
        Stop::Outside(Outside { path, second: None })
    }
}

impl From<Errno> for Stop {
    fn from(errno: Errno) -> Self {
        Stop::Errno(errno)
    }
}

impl fmt::Display for Stop {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Stop::Errno(errno) => errno.fmt(f),
            Stop::Outside(_) => f.write_str("the path lies outside of all mounts"),
        }
    }
}

impl std::error::Error for Stop {}
