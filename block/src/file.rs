//! A device that is a file or a block device, by io_uring and past the page cache.

mod buffers;
mod facts;
mod open;
mod queue;

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use crate::{Device, Errno, Facts, Queue, Region, Result};
pub use facts::ENDING;
use open::Locked;
pub use open::OpenFile;
use queue::FileQueue;

/// Operations that a [`File`] is opened for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Reads only; others may read, too.
    Read,
    /// Everything. Nobody else has the device open through this library.
    ReadWrite,
}

/// An open file or block device, with its facts. [`OpenFile`] has the lock.
#[derive(Clone)]
pub struct File {
    open: Arc<Open>,
}

/// The state that queues share with their device.
struct Open {
    locked: Arc<Locked>,
    facts: Facts,
    /// Addresses of memory for direct I/O are multiples of this.
    alignment: usize,
    regions: Mutex<Vec<Arc<Region>>>,
}

/// A failure to open a device.
#[derive(Debug)]
pub enum OpenError {
    /// A system call failed.
    System {
        /// The file or device.
        path: PathBuf,
        /// The step that failed, as a verb: "open".
        action: &'static str,
        /// The error.
        errno: Errno,
    },
    /// Somebody else has the device.
    Busy {
        /// The file or device.
        path: PathBuf,
        /// The process that has it, where the kernel shows that.
        holder: Option<u32>,
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
        /// Its length.
        bytes: u64,
    },
    /// This process may not use io_uring, or the kernel has none.
    NoRing {
        /// The error of io_uring_setup(2).
        errno: Errno,
    },
}

impl File {
    /// Opens and locks `path`, see [`OpenFile::open`] and [`OpenFile::device`].
    ///
    /// # Errors
    ///
    /// See [`OpenError`].
    pub fn open(path: &Path, access: Access) -> Result<File, OpenError> {
        OpenFile::open(path, access)?.device()
    }

    fn new(locked: &Arc<Locked>) -> Result<File, OpenError> {
        let examined = facts::of(&locked.fd, &locked.path, &locked.stat);
        let (facts, alignment) = examined.map_err(locked.failed("examine"))?;
        if facts.blocks == 0 {
            let bytes = rustix::fs::seek(&locked.fd, rustix::fs::SeekFrom::End(0)).unwrap_or(0);
            return Err(OpenError::TooSmall { path: locked.path.clone(), bytes });
        }
        let (locked, regions) = (Arc::clone(locked), Mutex::default());
        let file = File { open: Arc::new(Open { locked, facts, alignment, regions }) };
        // A process that may make no ring hears of it now and not at its first operation.
        FileQueue::new(&file.open, 1).map_err(|errno| OpenError::NoRing { errno })?;
        Ok(file)
    }

    /// True where operations pass by the page cache.
    pub fn is_direct(&self) -> bool {
        self.open.locked.direct
    }

    /// True for a regular file, false for a block device.
    pub fn is_regular(&self) -> bool {
        self.open.locked.is_regular()
    }
}

impl Device for File {
    fn facts(&self) -> &Facts {
        &self.open.facts
    }

    fn register(&self, region: &Arc<Region>) -> Result<()> {
        let mut regions = self.open.regions.lock().unwrap_or_else(PoisonError::into_inner);
        if regions.iter().all(|known| known.id() != region.id()) {
            regions.push(Arc::clone(region));
        }
        Ok(())
    }

    fn queue(&self, depth: u32) -> Result<Box<dyn Queue>> {
        let depth = depth.clamp(1, self.open.facts.max_depth);
        Ok(Box::new(FileQueue::new(&self.open, depth)?))
    }
}

impl fmt::Debug for File {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("File")
            .field("facts", &self.open.facts)
            .field("direct", &self.is_direct())
            .finish_non_exhaustive()
    }
}

impl fmt::Display for OpenError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            OpenError::System { path, action, errno } => {
                write!(f, "cannot {action} {}: {errno}", path.display())
            }
            OpenError::Busy { path, holder: Some(pid) } => {
                write!(f, "{} is in use by process {pid}", path.display())
            }
            OpenError::Busy { path, holder: None } => {
                write!(f, "{} is in use (mounted, or open elsewhere)", path.display())
            }
            OpenError::WrongKind { path } => {
                write!(f, "{} is neither a regular file nor a block device", path.display())
            }
            OpenError::TooSmall { path, bytes } => {
                write!(f, "{} has {bytes} bytes, less than one block", path.display())
            }
            OpenError::NoRing { errno } => {
                let hint = "see kernel.io_uring_disabled in sysctl(8), and RLIMIT_MEMLOCK";
                write!(f, "this process cannot use io_uring: {errno}; {hint}")
            }
        }
    }
}

impl std::error::Error for OpenError {}
