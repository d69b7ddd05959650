//! Errors of tracing, and the next step after each.

use std::fmt;
use std::path::PathBuf;

/// The reason why an operation on a connection failed. The text names the next step.
#[derive(Debug)]
#[non_exhaustive]
pub enum TraceError {
    /// Requires root, or CAP_BPF and CAP_PERFMON.
    NotPermitted {
        /// The operation.
        what: &'static str,
        /// The error of the kernel.
        cause: String,
    },
    /// The kernel does not support this mechanism.
    Unsupported {
        /// The operation.
        what: &'static str,
        /// The missing feature.
        cause: String,
    },
    /// A file of the kernel could not be read or written.
    File {
        /// The path, as users find it.
        path: PathBuf,
        /// The error.
        cause: std::io::Error,
    },
    /// A map of the BPF program could not be read.
    Map(String),
}

impl fmt::Display for TraceError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            TraceError::NotPermitted { what, cause } => {
                write!(
                    f,
                    "{what} is not permitted ({cause}): run it as root with CAP_BPF and CAP_PERFMON"
                )
            }
            TraceError::Unsupported { what, cause } => {
                write!(f, "{what} is not supported here: {cause}")
            }
            TraceError::File { path, cause }
                if cause.kind() == std::io::ErrorKind::PermissionDenied =>
            {
                write!(f, "{}: {cause}: run it as root", path.display())
            }
            TraceError::File { path, cause } => write!(f, "{}: {cause}", path.display()),
            TraceError::Map(cause) => write!(f, "the BPF program's counts cannot be read: {cause}"),
        }
    }
}

impl std::error::Error for TraceError {}
