//! The operations that a device is opened for, and the errors of opening one.

use std::fmt;
use std::path::PathBuf;

use crate::Errno;

/// Operations that a [`FileDevice`](super::FileDevice) is opened for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceAccess {
    /// Reads only; others may read, too.
    Read,
    /// Everything. No other process has the device open through this library.
    ReadWrite,
}

/// A failure to open a device.
#[derive(Debug)]
pub enum DeviceOpenError {
    /// A system call failed.
    System {
        /// The file or device.
        path: PathBuf,
        /// The step that failed, as a verb: "open".
        action: &'static str,
        /// The error.
        errno: Errno,
    },
    /// Another process has the device.
    Busy {
        /// The file or device.
        path: PathBuf,
        /// The process that has the device, if the kernel shows it.
        holder: Option<u32>,
    },
    /// A loop device has the file.
    OfLoopDevice {
        /// The file.
        path: PathBuf,
        /// The loop device.
        device: PathBuf,
    },
    /// Neither a regular file nor a block device.
    WrongKind {
        /// The file.
        path: PathBuf,
    },
    /// Fewer bytes than a block.
    TooSmall {
        /// The file or device.
        path: PathBuf,
        /// The length of the file or device.
        bytes: u64,
    },
    /// No ring could be made, for a reason that threads would not help with.
    NoRing {
        /// The error of io_uring_setup(2).
        errno: Errno,
    },
}

impl fmt::Display for DeviceOpenError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            DeviceOpenError::System { path, action, errno } => {
                write!(f, "cannot {action} {}: {errno}", path.display())
            }
            DeviceOpenError::Busy { path, holder: Some(pid) } => {
                write!(f, "{} is in use by process {pid}", path.display())
            }
            DeviceOpenError::Busy { path, holder: None } => {
                write!(f, "{} is in use (mounted, or open elsewhere)", path.display())
            }
            DeviceOpenError::OfLoopDevice { path, device } => {
                write!(f, "{} is the backing file of {}", path.display(), device.display())
            }
            DeviceOpenError::WrongKind { path } => {
                write!(f, "{} is neither a regular file nor a block device", path.display())
            }
            DeviceOpenError::TooSmall { path, bytes } => {
                write!(f, "{} has {bytes} bytes, less than one block", path.display())
            }
            DeviceOpenError::NoRing { errno } => {
                write!(f, "no ring for io_uring: {errno}; see RLIMIT_NOFILE (`ulimit -n`)")
            }
        }
    }
}

impl std::error::Error for DeviceOpenError {}
