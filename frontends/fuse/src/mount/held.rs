//! A mount point whose path is followed once.
//!
//! Another user may own a directory on the way, and exchange it between two uses of a path. Here
//! the directory of the mount point stays open: the mount that is checked is the mount that is
//! changed.

use std::ffi::OsString;
use std::fs;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, Mode, OFlags};
use rustix::io::Errno;
use rustix::mount::{MountFlags, UnmountFlags, mount_remount};

use super::info::{MountEntry, list_mounts};

/// A name in a directory that is open.
pub struct HeldMountpoint {
    parent: OwnedFd,
    name: OsString,
}

impl HeldMountpoint {
    /// The place of `path`, as [`resolve`](super::resolve) returns it. `None` for `/`, which no
    /// other user can exchange.
    ///
    /// # Errors
    ///
    /// The errors of open(2).
    pub fn open(path: &Path) -> Result<Option<HeldMountpoint>, Errno> {
        let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else { return Ok(None) };
        let parent = if parent.as_os_str().is_empty() { Path::new(".") } else { parent };
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let parent = rustix::fs::openat(CWD, parent, flags, Mode::empty())?;
        Ok(Some(HeldMountpoint { parent, name: name.to_owned() }))
    }

    /// The mount that is visible there; `None` if the name is no mount point. Sends no request to
    /// its file system.
    ///
    /// # Errors
    ///
    /// The errors of reading /proc.
    pub fn mount(&self) -> io::Result<Option<MountEntry>> {
        match self.open_root() {
            Ok(root) => self.mount_of(root.as_fd()),
            Err(_) => Ok(None),
        }
    }

    fn mount_of(&self, root: BorrowedFd<'_>) -> io::Result<Option<MountEntry>> {
        let id = mount_id(root)?;
        if id == mount_id(self.parent.as_fd())? {
            return Ok(None);
        }
        Ok(list_mounts()?.into_iter().find(|mount| mount.mount_id == id))
    }

    /// Holds the mount, which is busy for umount2(2) meanwhile.
    fn open_root(&self) -> Result<OwnedFd, Errno> {
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        rustix::fs::openat(&self.parent, &self.name, flags, Mode::empty())
    }

    /// Calls umount2(2) for what is mounted there. A link is not followed.
    ///
    /// # Errors
    ///
    /// The errors of umount2(2).
    pub(super) fn unmount(&self, flags: UnmountFlags) -> Result<(), Errno> {
        rustix::mount::unmount(self.magic_path(), flags | UnmountFlags::NOFOLLOW)
    }

    /// The way by the open directory.
    fn magic_path(&self) -> PathBuf {
        let dir = format!("/proc/thread-self/fd/{}", self.parent.as_raw_fd());
        Path::new(&dir).join(&self.name)
    }

    /// Changes the flags of the mount, if `is_it` is true for it.
    ///
    /// # Errors
    ///
    /// `EINVAL` for another mount or none; the errors of mount(2).
    pub fn remount(
        &self,
        flags: MountFlags,
        is_it: impl Fn(&MountEntry) -> bool,
    ) -> Result<(), Errno> {
        let root = self.open_root()?;
        let mount = self.mount_of(root.as_fd()).map_err(|_| Errno::INVAL)?;
        if !mount.is_some_and(|mount| is_it(&mount)) {
            return Err(Errno::INVAL);
        }
        mount_remount(format!("/proc/thread-self/fd/{}", root.as_raw_fd()), flags, "")
    }
}

/// The id of the mount of an open file, proc_pid_fdinfo(5).
fn mount_id(fd: BorrowedFd<'_>) -> io::Result<u32> {
    let text = fs::read_to_string(format!("/proc/thread-self/fdinfo/{}", fd.as_raw_fd()))?;
    let id = text.lines().find_map(|line| line.strip_prefix("mnt_id:")?.trim().parse().ok());
    id.ok_or_else(|| io::ErrorKind::InvalidData.into())
}
