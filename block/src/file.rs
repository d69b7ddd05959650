//! A device that is a file or a block device, by io_uring and past the page cache.

mod facts;
mod queue;

use std::fmt;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rustix::fs::{FileType, FlockOperation, Mode, OFlags};

use crate::{Device, Errno, Facts, Queue, Region, Result};
use queue::FileQueue;

/// Operations that a [`File`] is opened for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Reads only; others may read, too.
    Read,
    /// Everything. Nobody else has the device open through this library.
    ReadWrite,
}

/// An open file or block device.
///
/// The lock is an flock(2) on the open file that the operations use, so it ends with the process,
/// whatever ends that.
#[derive(Clone)]
pub struct File {
    open: Arc<Open>,
}

/// The state that queues share with their device.
struct Open {
    fd: OwnedFd,
    facts: Facts,
    access: Access,
    direct: bool,
    regular: bool,
    /// Addresses of memory for direct I/O are multiples of this.
    alignment: usize,
    regions: Mutex<Vec<Arc<Region>>>,
}

impl Drop for Open {
    fn drop(&mut self) {
        // The kernel closes what a ring has registered a moment after the ring.
        let _ = rustix::fs::flock(&self.fd, FlockOperation::Unlock);
    }
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
    /// Opens `path` with direct I/O, or through the page cache where the file system below has no direct
    /// I/O ([`is_direct`](File::is_direct)).
    ///
    /// # Errors
    ///
    /// See [`OpenError`].
    pub fn open(path: &Path, access: Access) -> Result<File, OpenError> {
        let system = |action: &'static str| {
            let path = path.to_owned();
            move |errno| OpenError::System { path, action, errno }
        };
        let (fd, direct) = open(path, access, false).map_err(system("open"))?;
        let stat = rustix::fs::fstat(&fd).map_err(system("examine"))?;
        let busy = |holder| OpenError::Busy { path: path.to_owned(), holder };
        let (fd, direct, regular) = match FileType::from_raw_mode(stat.st_mode) {
            FileType::RegularFile => (fd, direct, true),
            // With O_EXCL a block device that is mounted is refused, and one that is open so cannot be
            // mounted.
            FileType::BlockDevice if access == Access::ReadWrite => {
                let exclusively = || open(path, access, true);
                let (exclusive, direct) =
                    patiently(Errno::BUSY, exclusively, || true).map_err(|errno| match errno {
                        Errno::BUSY => busy(None),
                        errno => system("open")(errno),
                    })?;
                let again = rustix::fs::fstat(&exclusive).map_err(system("examine"))?;
                if (again.st_rdev, again.st_mode) != (stat.st_rdev, stat.st_mode) {
                    return Err(system("open")(Errno::AGAIN));
                }
                (exclusive, direct, false)
            }
            FileType::BlockDevice => (fd, direct, false),
            _ => return Err(OpenError::WrongKind { path: path.to_owned() }),
        };
        let gone = || facts::holder(&stat).is_none_or(|pid| !facts::is_alive(pid));
        patiently(Errno::WOULDBLOCK, || lock(&fd, access), gone).map_err(|errno| match errno {
            Errno::WOULDBLOCK => busy(facts::holder(&stat)),
            errno => system("lock")(errno),
        })?;
        let (facts, alignment) = facts::of(&fd, path, &stat).map_err(system("examine"))?;
        if facts.blocks == 0 {
            let bytes = rustix::fs::seek(&fd, rustix::fs::SeekFrom::End(0)).unwrap_or(0);
            return Err(OpenError::TooSmall { path: path.to_owned(), bytes });
        }
        let regions = Mutex::default();
        let open = Open { fd, facts, access, direct, regular, alignment, regions };
        let file = File { open: Arc::new(open) };
        // A process that may make no ring hears of it now and not at its first operation.
        FileQueue::new(&file.open, 1).map_err(|errno| OpenError::NoRing { errno })?;
        Ok(file)
    }

    /// True where operations pass by the page cache.
    pub fn is_direct(&self) -> bool {
        self.open.direct
    }

    /// True for a regular file, false for a block device.
    pub fn is_regular(&self) -> bool {
        self.open.regular
    }
}

/// Opens with O_DIRECT, and without it where that is refused. True for O_DIRECT.
fn open(path: &Path, access: Access, exclusive: bool) -> Result<(OwnedFd, bool)> {
    let mut flags = OFlags::CLOEXEC | OFlags::NOCTTY | OFlags::NONBLOCK;
    flags |= match access {
        Access::Read => OFlags::RDONLY,
        Access::ReadWrite => OFlags::RDWR,
    };
    flags.set(OFlags::EXCL, exclusive);
    match rustix::fs::open(path, flags | OFlags::DIRECT, Mode::empty()) {
        Ok(fd) => Ok((fd, true)),
        Err(Errno::INVAL) => Ok((rustix::fs::open(path, flags, Mode::empty())?, false)),
        Err(errno) => Err(errno),
    }
}

/// Tries again for up to a second while `attempt` says `busy` and its holder may be `gone`: the kernel
/// takes down the rings of a process that was killed, and with them its locks, after the process.
fn patiently<T>(
    busy: Errno,
    attempt: impl Fn() -> Result<T>,
    gone: impl Fn() -> bool,
) -> Result<T> {
    for _ in 0..100 {
        match attempt() {
            Err(errno) if errno == busy && gone() => std::thread::sleep(Duration::from_millis(10)),
            result => return result,
        }
    }
    attempt()
}

fn lock(fd: &OwnedFd, access: Access) -> Result<()> {
    let operation = match access {
        Access::Read => FlockOperation::NonBlockingLockShared,
        Access::ReadWrite => FlockOperation::NonBlockingLockExclusive,
    };
    rustix::fs::flock(fd, operation)
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
            .field("direct", &self.open.direct)
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
