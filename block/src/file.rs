//! A device that is a file or a block device, past the page cache: by io_uring(7), or by threads
//! where that is refused.

mod access;
mod bounce;
mod buffers;
mod facts;
mod loops;
mod open;
mod pool;
mod queue;
mod state;
mod threads;

use std::fmt;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use crate::{BlockDevice, DeviceProperties, DeviceQueue, Errno, MemoryRegion, Result};
pub use access::{DeviceAccess, DeviceOpenError};
pub use facts::ENDING;
use open::LockedFile;
pub use open::OpenDeviceFile;
use pool::IoThreadPool;
use queue::RingQueue;
use state::FileDeviceState;
use threads::ThreadQueue;

/// An open file or block device, with its facts. [`OpenDeviceFile`] has the lock.
#[derive(Clone)]
pub struct FileDevice {
    open: Arc<FileDeviceState>,
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

impl OpenDeviceFile {
    /// The device, with the size that the file has now.
    ///
    /// # Errors
    ///
    /// [`DeviceOpenError::TooSmall`], and errors of system calls.
    pub fn device(&self) -> Result<FileDevice, DeviceOpenError> {
        FileDevice::new(&self.locked)
    }

    /// The device as [`device`](OpenDeviceFile::device) returns it where io_uring(7) is refused:
    /// threads perform the operations.
    ///
    /// # Errors
    ///
    /// Fails with the errors of [`device`](OpenDeviceFile::device).
    pub fn device_of_threads(&self) -> Result<FileDevice, DeviceOpenError> {
        FileDevice::from_locked(&self.locked, Some(Errno::NOSYS))
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
