//! Opening: a path is followed once, and all later operations use that open file.

use std::fmt;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::fs::{AtFlags, FallocateFlags, FileType, FlockOperation, Mode, OFlags, SeekFrom, Stat};

use super::access::{DeviceAccess, DeviceOpenError};
use super::facts::{ENDING, holder, is_alive, name_of};
use super::loops;
use crate::{Errno, Result};

/// A file or block device that is open and locked. Its [`device`](OpenDeviceFile::device) has the
/// facts and the I/O.
///
/// The path is followed once: renaming files or changing links meanwhile cannot make a decision
/// about one file apply to another. The lock is an flock(2) on the open file that the operations
/// use, so it ends with the process, even if the process is killed. It is held as long as this
/// value, one of the devices, or a queue of a device exists.
#[derive(Clone)]
pub struct OpenDeviceFile {
    pub(super) locked: Arc<LockedFile>,
}

/// The open file that devices share.
pub(super) struct LockedFile {
    pub(super) fd: OwnedFd,
    pub(super) path: PathBuf,
    pub(super) stat: Stat,
    pub(super) access: DeviceAccess,
    /// Operations pass by the page cache.
    pub(super) direct: bool,
}

impl OpenDeviceFile {
    /// Opens `path` and locks it. Reads share their lock. Operations pass by the page cache if the
    /// file system below has direct I/O ([`FileDevice::is_direct`](super::FileDevice::is_direct)).
    ///
    /// # Errors
    ///
    /// See [`DeviceOpenError`]. A file that is too small for a device is only refused by
    /// [`device`](OpenDeviceFile::device).
    pub fn open(path: &Path, access: DeviceAccess) -> Result<OpenDeviceFile, DeviceOpenError> {
        let flags = match access {
            DeviceAccess::Read => OFlags::RDONLY,
            // A mounted block device is refused, and a device that is open with this flag cannot be
            // mounted. open(2) ignores the flag for everything else.
            DeviceAccess::ReadWrite => OFlags::RDWR | OFlags::EXCL,
        };
        let open = || rustix::fs::open(path, flags | ALWAYS, Mode::empty());
        let held = || match rustix::fs::stat(path) {
            Ok(stat) if HolderState::detect(&stat) == HolderState::Ending => HolderState::Ending,
            _ => HolderState::Gone,
        };
        let fd = retry_while_busy(Errno::BUSY, open, held).map_err(|errno| match errno {
            Errno::BUSY => DeviceOpenError::Busy { path: path.to_owned(), holder: None },
            errno => DeviceOpenError::System { path: path.to_owned(), action: "open", errno },
        })?;
        OpenDeviceFile::from_fd(fd, path, access)
    }

    /// Creates an empty file for its owner alone, to read and write.
    ///
    /// # Errors
    ///
    /// Fails with the errors of [`open`](OpenDeviceFile::open), and with `EEXIST`, also for a
    /// symbolic link.
    pub fn create(path: &Path) -> Result<OpenDeviceFile, DeviceOpenError> {
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | ALWAYS;
        let fd = rustix::fs::open(path, flags, Mode::RUSR | Mode::WUSR).map_err(|errno| {
            DeviceOpenError::System { path: path.to_owned(), action: "create", errno }
        })?;
        OpenDeviceFile::from_fd(fd, path, DeviceAccess::ReadWrite)
    }

    fn from_fd(
        fd: OwnedFd,
        path: &Path,
        access: DeviceAccess,
    ) -> Result<OpenDeviceFile, DeviceOpenError> {
        let path = path.to_owned();
        let stat = match rustix::fs::fstat(&fd) {
            Ok(stat) => stat,
            Err(errno) => return Err(DeviceOpenError::System { path, action: "examine", errno }),
        };
        let kind = FileType::from_raw_mode(stat.st_mode);
        if !matches!(kind, FileType::RegularFile | FileType::BlockDevice) {
            return Err(DeviceOpenError::WrongKind { path });
        }
        match retry_while_busy(
            Errno::WOULDBLOCK,
            || lock(&fd, access),
            || HolderState::detect(&stat),
        ) {
            Ok(()) => {}
            Err(Errno::WOULDBLOCK) => {
                return Err(DeviceOpenError::Busy { path, holder: holder(&stat) });
            }
            Err(errno) => return Err(DeviceOpenError::System { path, action: "lock", errno }),
        }
        if let Some(device) = loops::device_of(&stat, access) {
            return Err(DeviceOpenError::OfLoopDevice { path, device });
        }
        // A process that has the backing file of a loop device has the device, too.
        if let Some(file) = loops::file_of(&stat) {
            let held = || holder(&file).map_or(Ok(()), |_| Err(Errno::BUSY));
            if retry_while_busy(Errno::BUSY, held, || HolderState::detect(&file)).is_err() {
                return Err(DeviceOpenError::Busy { path, holder: holder(&file) });
            }
        }
        // This is not a flag of open(2): if open(2) refused it, the path would have to be followed
        // again.
        let direct = rustix::fs::fcntl_setfl(&fd, ALWAYS | OFlags::DIRECT).is_ok();
        Ok(OpenDeviceFile { locked: Arc::new(LockedFile { fd, path, stat, access, direct }) })
    }

    /// True for a regular file, false for a block device.
    pub fn is_regular(&self) -> bool {
        self.locked.is_regular()
    }

    /// The bytes that the file or the device has now.
    ///
    /// # Errors
    ///
    /// Fails with the errors of lseek(2).
    pub fn bytes(&self) -> Result<u64> {
        rustix::fs::seek(&self.locked.fd, SeekFrom::End(0))
    }

    /// Gives a regular file another size.
    ///
    /// # Errors
    ///
    /// Fails with the errors of ftruncate(2).
    pub fn resize(&self, bytes: u64) -> Result<()> {
        rustix::fs::ftruncate(&self.locked.fd, bytes)
    }

    /// Allocates the space of a part of a regular file, which is enlarged if necessary.
    ///
    /// # Errors
    ///
    /// Fails with the errors of fallocate(2).
    pub fn allocate(&self, part: Range<u64>) -> Result<()> {
        let (start, len) = (part.start, part.end.saturating_sub(part.start));
        rustix::fs::fallocate(&self.locked.fd, FallocateFlags::empty(), start, len)
    }

    /// Makes the size and the space of the file durable.
    ///
    /// # Errors
    ///
    /// Fails with the errors of fsync(2).
    pub fn sync(&self) -> Result<()> {
        rustix::fs::fsync(&self.locked.fd)
    }

    /// True if the path of the file still leads to this very file, and not to another one in its
    /// place.
    pub fn is_in_place(&self) -> bool {
        let found =
            rustix::fs::statat(rustix::fs::CWD, &self.locked.path, AtFlags::SYMLINK_NOFOLLOW);
        let own = &self.locked.stat;
        found.is_ok_and(|found| (found.st_dev, found.st_ino) == (own.st_dev, own.st_ino))
    }
}

impl LockedFile {
    pub(super) fn is_regular(&self) -> bool {
        FileType::from_raw_mode(self.stat.st_mode) == FileType::RegularFile
    }

    /// The error of a step.
    pub(super) fn step_error(&self, action: &'static str) -> impl FnOnce(Errno) -> DeviceOpenError {
        let path = self.path.clone();
        move |errno| DeviceOpenError::System { path, action, errno }
    }
}

impl Drop for LockedFile {
    fn drop(&mut self) {
        // The kernel closes the registered files of a ring a moment after the ring.
        let _ = rustix::fs::flock(&self.fd, FlockOperation::Unlock);
    }
}

impl fmt::Debug for OpenDeviceFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OpenFile").field("path", &self.locked.path).finish_non_exhaustive()
    }
}

/// Flags of every open: a FIFO does not wait for its other end, and a terminal is not taken over.
const ALWAYS: OFlags = OFlags::CLOEXEC.union(OFlags::NOCTTY).union(OFlags::NONBLOCK);

/// The state of the process that holds a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum HolderState {
    /// The process has ended: the kernel takes down the rings of a process that was killed, and
    /// with them its locks, after the process.
    Gone,
    /// The process has nothing to serve any more, and makes everything durable.
    Ending,
    /// The process is a daemon of this project. Its mount may have been removed a moment ago, which
    /// it will notice.
    Daemon,
    /// Another process that uses the file.
    Other,
}

impl HolderState {
    fn detect(stat: &Stat) -> HolderState {
        let Some(pid) = holder(stat).filter(|pid| is_alive(*pid)) else { return HolderState::Gone };
        match name_of(pid).as_deref() {
            Some(name) if name == ENDING => HolderState::Ending,
            Some("defuse") => HolderState::Daemon,
            _ => HolderState::Other,
        }
    }

    /// The time for which an opener waits for the process.
    fn wait_limit(self) -> Duration {
        match self {
            HolderState::Gone => Duration::from_secs(1),
            HolderState::Ending => Duration::from_secs(20),
            HolderState::Daemon => Duration::from_millis(200),
            HolderState::Other => Duration::ZERO,
        }
    }
}

/// Repeats `attempt` while it fails with `busy`, for a time that depends on the holder of the file.
fn retry_while_busy<T>(
    busy: Errno,
    attempt: impl Fn() -> Result<T>,
    held: impl Fn() -> HolderState,
) -> Result<T> {
    let begun = Instant::now();
    loop {
        match attempt() {
            Err(errno) if errno == busy && begun.elapsed() < held().wait_limit() => {
                std::thread::sleep(Duration::from_millis(10));
            }
            result => return result,
        }
    }
}

fn lock(fd: &OwnedFd, access: DeviceAccess) -> Result<()> {
    let operation = match access {
        DeviceAccess::Read => FlockOperation::NonBlockingLockShared,
        DeviceAccess::ReadWrite => FlockOperation::NonBlockingLockExclusive,
    };
    rustix::fs::flock(fd, operation)
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    /// The number of attempts until the wait for `held` ended, or the third attempt succeeded.
    fn attempts(held: HolderState) -> (usize, Result<()>) {
        let count = Cell::new(0);
        let attempt = || {
            count.set(count.get() + 1);
            if count.get() < 3 { Err(Errno::WOULDBLOCK) } else { Ok(()) }
        };
        let result = retry_while_busy(Errno::WOULDBLOCK, attempt, || held);
        (count.get(), result)
    }

    #[test]
    fn a_file_of_a_process_that_ends_is_waited_for_and_one_that_is_in_use_is_not() {
        for held in [HolderState::Gone, HolderState::Ending, HolderState::Daemon] {
            assert_eq!(attempts(held), (3, Ok(())), "{held:?}");
        }
        assert_eq!(attempts(HolderState::Other), (1, Err(Errno::WOULDBLOCK)));
        let other =
            retry_while_busy(Errno::WOULDBLOCK, || Err::<(), _>(Errno::IO), || HolderState::Gone);
        assert_eq!(other, Err(Errno::IO));
    }
}
