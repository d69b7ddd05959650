//! The ways in which a call can fail.

use std::fmt;

use defuse_fs::Errno;

/// The result of every call of the client.
pub type Result<T, E = CallError> = std::result::Result<T, E>;

/// The reason why a call failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CallError {
    /// The error of the system call of the same name.
    Errno(Errno),
    /// The path is outside of all mounts, so that the kernel must perform the call.
    Outside(OutsidePaths),
}

/// The paths at which the kernel must continue.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OutsidePaths {
    /// An absolute path that replaces the caller's path; `None` if the caller's own path and
    /// directory are correct.
    pub path: Option<Vec<u8>>,
    /// The second path of rename and link, in the same way.
    pub second: Option<Vec<u8>>,
}

impl CallError {
    /// The error number. A path outside of all mounts is `EXDEV`, for callers that cannot pass the
    /// call to the kernel.
    pub fn errno(&self) -> Errno {
        match self {
            CallError::Errno(errno) => *errno,
            CallError::Outside(_) => Errno::EXDEV,
        }
    }

    pub(crate) fn outside_mounts(path: Option<Vec<u8>>) -> Self {
        CallError::Outside(OutsidePaths { path, second: None })
    }
}

impl From<Errno> for CallError {
    fn from(errno: Errno) -> Self {
        CallError::Errno(errno)
    }
}

impl fmt::Display for CallError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            CallError::Errno(errno) => errno.fmt(f),
            CallError::Outside(_) => f.write_str("the path lies outside of all mounts"),
        }
    }
}

impl std::error::Error for CallError {}
