//! A device that is a file or a block device, past the page cache: by io_uring(7), or by threads where that is refused.

mod bounce;
mod buffers;
mod facts;
mod loops;
mod open;
mod pool;
mod queue;
mod threads;

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use crate::{BlockDevice, BlockOpKind, DeviceProperties, DeviceQueue, Errno, MemoryRegion, Result};
pub use facts::ENDING;
use open::LockedFile;
pub use open::OpenDeviceFile;
use pool::IoThreadPool;
use queue::RingQueue;
use threads::ThreadQueue;

/// Operations that a [`FileDevice`] is opened for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceAccess {
    /// Reads only; others may read, too.
    Read,
    /// Everything. No other process has the device open through this library.
    ReadWrite,
}

/// An open file or block device, with its facts. [`OpenDeviceFile`] has the lock.
#[derive(Clone)]
pub struct FileDevice {
    open: Arc<FileDeviceState>,
}

/// The state that queues share with their device.
struct FileDeviceState {
    locked: Arc<LockedFile>,
    facts: DeviceProperties,
    /// Addresses of memory for direct I/O are multiples of this.
    alignment: usize,
    regions: Mutex<Vec<Arc<MemoryRegion>>>,
    /// The error of io_uring_setup(2): all queues use threads.
    ringless: Option<Errno>,
    pool: IoThreadPool,
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

impl FileDevice {
    /// Opens and locks `path`, see [`OpenDeviceFile::open`] and [`OpenDeviceFile::device`].
    ///
    /// # Errors
    ///
    /// See [`DeviceOpenError`].
    pub fn open(path: &Path, access: DeviceAccess) -> Result<FileDevice, DeviceOpenError> {
        OpenDeviceFile::open(path, access)?.device()
    }

    fn new(locked: &Arc<LockedFile>) -> Result<FileDevice, DeviceOpenError> {
        match queue::probe(&locked.fd) {
            Ok(()) => FileDevice::from_locked(locked, None),
            // Only one more descriptor is missing.
            Err(errno @ (Errno::MFILE | Errno::NFILE)) => Err(DeviceOpenError::NoRing { errno }),
            Err(errno) => FileDevice::from_locked(locked, Some(errno)),
        }
    }

    /// Makes the device. Its queues use threads if there are no rings.
    fn from_locked(
        locked: &Arc<LockedFile>,
        ringless: Option<Errno>,
    ) -> Result<FileDevice, DeviceOpenError> {
        let examined = facts::read_properties(&locked.fd, &locked.path, &locked.stat);
        let (facts, alignment) = examined.map_err(locked.step_error("examine"))?;
        if facts.blocks == 0 {
            let bytes = rustix::fs::seek(&locked.fd, rustix::fs::SeekFrom::End(0)).unwrap_or(0);
            return Err(DeviceOpenError::TooSmall { path: locked.path.clone(), bytes });
        }
        let (locked, regions, pool) =
            (Arc::clone(locked), Mutex::default(), IoThreadPool::default());
        Ok(FileDevice {
            open: Arc::new(FileDeviceState { locked, facts, alignment, regions, ringless, pool }),
        })
    }

    /// True where operations pass by the page cache.
    pub fn is_direct(&self) -> bool {
        self.open.locked.direct
    }

    /// True where operations are performed by io_uring(7).
    pub fn has_rings(&self) -> bool {
        self.open.ringless.is_none()
    }

    /// True for a regular file, false for a block device.
    pub fn is_regular(&self) -> bool {
        self.open.locked.is_regular()
    }
}

impl FileDeviceState {
    /// Fails with `EBADF` for a change of a device that is open for reads.
    fn refuse(&self, kind: &BlockOpKind) -> Result<()> {
        let reads = matches!(kind, BlockOpKind::Read { .. } | BlockOpKind::Flush);
        if self.locked.access == DeviceAccess::Read && !reads { Err(Errno::BADF) } else { Ok(()) }
    }

    /// True where a write with `fua` must be followed by a sync: the flag of the write would do nothing.
    fn syncs_after(&self, kind: &BlockOpKind) -> bool {
        matches!(kind, BlockOpKind::Write { fua: true, .. }) && !self.facts.fua
    }
}

impl BlockDevice for FileDevice {
    fn properties(&self) -> &DeviceProperties {
        &self.open.facts
    }

    fn register(&self, region: &Arc<MemoryRegion>) -> Result<()> {
        let mut regions = self.open.regions.lock().unwrap_or_else(PoisonError::into_inner);
        if regions.iter().all(|known| known.id() != region.id()) {
            regions.push(Arc::clone(region));
        }
        Ok(())
    }

    fn queue(&self, depth: u32) -> Result<Box<dyn DeviceQueue>> {
        let depth = depth.clamp(1, self.open.facts.max_depth);
        if self.has_rings() {
            match RingQueue::new(&self.open, depth) {
                Ok(queue) => return Ok(Box::new(queue)),
                // One more ring is more memory than this process may lock.
                Err(Errno::NOMEM) => {}
                Err(errno) => return Err(errno),
            }
        }
        Ok(Box::new(ThreadQueue::new(&self.open, depth)))
    }

    fn note(&self) -> Option<String> {
        let errno = self.open.ringless?;
        let name = &self.open.facts.name;
        Some(format!(
            "{name}: io_uring is refused here ({errno}), so threads do its I/O, at more cost: see \
             kernel.io_uring_disabled in sysctl(8), the seccomp profile of a container, and RLIMIT_MEMLOCK"
        ))
    }
}

impl fmt::Debug for FileDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("File")
            .field("facts", &self.open.facts)
            .field("direct", &self.is_direct())
            .finish_non_exhaustive()
    }
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
