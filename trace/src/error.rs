//! Why the kernel does not let itself be looked into, and what to do then.

use std::fmt;
use std::path::PathBuf;

/// Why something about a connection could not be done. The text names the next step.
#[derive(Debug)]
#[non_exhaustive]
pub enum Error {
    /// Only root, or who has CAP_BPF and CAP_PERFMON, may.
    NotPermitted {
        /// What was tried.
        what: &'static str,
        /// What the kernel said.
        cause: String,
    },
    /// The kernel has no way of that kind.
    Unsupported {
        /// What was tried.
        what: &'static str,
        /// What is missing.
        cause: String,
    },
    /// A file of the kernel could not be read or written.
    File {
        /// Which, as one would find it.
        path: PathBuf,
        /// Why.
        cause: std::io::Error,
    },
    /// A map of the BPF program could not be read.
    Map(String),
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::NotPermitted { what, cause } => {
                write!(
                    f,
                    "{what} is not permitted ({cause}): do it as root with CAP_BPF and CAP_PERFMON"
                )
            }
            Error::Unsupported { what, cause } => write!(f, "{what} is not possible here: {cause}"),
            Error::File { path, cause } if cause.kind() == std::io::ErrorKind::PermissionDenied => {
                write!(f, "{}: {cause}: do it as root", path.display())
            }
            Error::File { path, cause } => write!(f, "{}: {cause}", path.display()),
            Error::Map(cause) => write!(f, "the BPF program's counts cannot be read: {cause}"),
        }
    }
}

impl std::error::Error for Error {}
