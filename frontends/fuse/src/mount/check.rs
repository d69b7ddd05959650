//! Checks of a mount point before mounting.

use super::info::{self, ServerLiveness};
use super::{MountError, MountOptions, RootKind};
use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, StatxFlags};
use rustix::io::Errno;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

/// A checked mount point. It is held open, so that the mount uses what was checked.
#[derive(Debug)]
pub(super) struct CheckedTarget {
    pub(super) fd: OwnedFd,
    pub(super) path: PathBuf,
    /// The file type bits, which must equal the root's.
    pub(super) rootmode: u32,
}

pub(super) fn target(
    mountpoint: &Path,
    options: &MountOptions,
) -> Result<CheckedTarget, MountError> {
    let path = resolve(mountpoint);
    let unusable = |errno| match errno {
        Errno::NOENT => MountError::Missing { path: path.clone() },
        Errno::NOTCONN => MountError::DeadMount { path: path.clone() },
        errno => MountError::Unusable { path: path.clone(), errno },
    };
    match info::liveness(&path) {
        ServerLiveness::Dead => return Err(MountError::DeadMount { path }),
        ServerLiveness::Silent => return Err(MountError::SilentMount { path }),
        ServerLiveness::Alive | ServerLiveness::NotFuse => {}
    }
    let fd = rustix::fs::openat(CWD, &path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty());
    let fd = fd.map_err(unusable)?;
    // DONT_SYNC, because the mount point may be in another slow file system.
    let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
    let stat = rustix::fs::statx(&fd, "", flags, StatxFlags::TYPE).map_err(unusable)?;
    let kind = FileType::from_raw_mode(u32::from(stat.stx_mode));
    match (options.root, kind) {
        (RootKind::Directory | RootKind::AsMountPoint, FileType::Directory) => {
            if !options.nonempty && !is_empty(&fd).map_err(unusable)? {
                return Err(MountError::NotEmpty { path });
            }
        }
        (RootKind::File | RootKind::AsMountPoint, FileType::RegularFile) => {}
        (RootKind::Directory | RootKind::AsMountPoint, _) => {
            return Err(MountError::NotADirectory { path });
        }
        (RootKind::File, _) => return Err(MountError::NotAFile { path }),
    }
    Ok(CheckedTarget { fd, path, rootmode: u32::from(stat.stx_mode) & 0o170000 })
}

/// Returns the absolute path, as in mountinfo. Resolves only the parent: the mount point itself may
/// not answer.
pub fn resolve(path: &Path) -> PathBuf {
    // lstat(2) would send a request to the file system. readlink(2) sends none: a mount point is
    // not a link.
    if rustix::fs::readlink(path, Vec::new()).is_ok() {
        return path.canonicalize().unwrap_or(path.to_path_buf());
    }
    let parent = match path.parent() {
        Some(parent) if parent.as_os_str().is_empty() => Path::new("."),
        Some(parent) => parent,
        None => path,
    };
    match (parent.canonicalize(), path.file_name()) {
        (Ok(parent), Some(name)) => parent.join(name),
        // `..` and `/` have no name of their own.
        _ => path.canonicalize().unwrap_or(path.to_path_buf()),
    }
}

/// True for an empty directory. An unreadable directory counts as empty, because its entries are
/// hidden already.
fn is_empty(dir: impl AsFd) -> Result<bool, Errno> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let dir = match rustix::fs::openat(dir, ".", flags, Mode::empty()) {
        Err(Errno::ACCESS | Errno::PERM) => return Ok(true),
        other => other?,
    };
    for entry in rustix::fs::Dir::new(dir)? {
        if !matches!(entry?.file_name().to_bytes(), b"." | b"..") {
            return Ok(false);
        }
    }
    Ok(true)
}
