//! Mounting, unmounting, and the list of mounts.
//!
//! Sources: `fs/fuse/inode.c` for the options, `fsopen(2)`, `fsmount(2)`, `move_mount(2)`,
//! `umount(2)`, `proc_pid_mountinfo(5)`, `fusermount3(1)`.
//!
//! No function here waits for a file system. The server behind a mount point may have ended or may
//! hang, and stat(2) would block. A request to such a file system is made by a thread of its own.

mod check;
mod error;
mod held;
mod helper;
mod info;
mod kernel;
mod loop_device;
mod options;
#[cfg(test)]
mod tests;
mod unmount;

pub use check::resolve;
pub use error::{MountError, UnmountError};
pub use held::HeldMountpoint;
pub use helper::HelperWatch;
pub use info::{
    MountEntry, ServerLiveness, connection_id, fuse_mounts, is_dead_mount, list_mounts, liveness,
    parse_mountinfo,
};
pub use options::{ApplyOutcome, MountOptions, OptionError, RootKind, mount_option_names};
pub use unmount::{abort, force_if, unmount, unmount_if};

use rustix::fs::FileType;
use rustix::io::Errno;
use std::os::fd::{FromRawFd, OwnedFd, RawFd};
use std::path::{Path, PathBuf};

/// A mounted file system whose requests can be read from `device`.
///
/// Dropping it closes the device. The mount is then dead until [`unmount`] removes it.
#[derive(Debug)]
pub struct PreparedMount {
    /// The opened `/dev/fuse`.
    pub device: OwnedFd,
    /// The absolute path of the mount point (or as given, if the parent process mounted).
    pub mountpoint: PathBuf,
    /// The way of mounting.
    pub how: MountMethod,
    /// The result of [`MountOptions::syncfs`].
    pub syncfs: SyncFs,
    /// The process that unmounts when this one is killed. Dropped after an orderly unmount.
    pub watch: Option<HelperWatch>,
}

/// The effect of sync(2) and syncfs(2) on a mount, and the wait of umount(2).
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SyncFs {
    /// They reach the file system.
    Reached,
    /// Not requested.
    NotWanted,
    /// Not possible here: this step failed.
    Impossible {
        /// The failed step.
        step: &'static str,
        /// Its error.
        errno: Errno,
    },
}

impl PreparedMount {
    /// Returns the type of the mount, as in `/proc/self/mountinfo`.
    pub fn fstype(&self, subtype: &str) -> String {
        let is_block_device = self.syncfs == SyncFs::Reached;
        let base = if is_block_device { kernel::FUSEBLK } else { kernel::FUSE };
        type_name(base, subtype)
    }
}

fn type_name(base: &str, subtype: &str) -> String {
    if subtype.is_empty() { base.to_owned() } else { format!("{base}.{subtype}") }
}

/// A way of mounting.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MountMethod {
    /// `fsopen(2)` and `move_mount(2)`.
    Fsopen,
    /// `mount(2)`.
    MountSyscall,
    /// By this set-user-id program.
    Helper(PathBuf),
    /// The parent process passed an open, mounted device.
    Inherited,
}

/// Opens `/dev/fuse` and mounts it on `mountpoint`.
///
/// The kernel queues INIT at once, and every access waits for its reply, so that the caller must
/// serve the device next. Root mounts directly, other users through `fusermount3`. A mount point
/// `/dev/fd/N` takes over file descriptor N, which the parent process opened and mounted
/// (mount.fuse3's `drop_privileges`); the caller must not use N itself.
pub fn mount(mountpoint: &Path, options: &MountOptions) -> Result<PreparedMount, MountError> {
    if let Some(fd) = parse_inherited_fd(mountpoint) {
        return inherit(fd, mountpoint);
    }
    let target = check::target(mountpoint, options)?;
    if !rustix::process::geteuid().is_root() {
        return mount_by_helper(&target, options, Errno::PERM);
    }
    match kernel::mount(&target, options) {
        // Root without CAP_SYS_ADMIN, as in many containers.
        Err(MountError::NotPermitted { errno, .. }) => mount_by_helper(&target, options, errno),
        other => other,
    }
}

/// Returns the result of [`MountOptions::syncfs`] if only root may mount that way.
fn decide_without_root(options: &MountOptions) -> SyncFs {
    match options.syncfs {
        Some(true) => SyncFs::Impossible { step: "fsopen of fuseblk", errno: Errno::PERM },
        _ => SyncFs::NotWanted,
    }
}

fn mount_by_helper(
    target: &check::CheckedTarget,
    options: &MountOptions,
    errno: Errno,
) -> Result<PreparedMount, MountError> {
    let Some(helper) = helper::find() else {
        return Err(MountError::NotPermitted { mountpoint: target.path.clone(), errno });
    };
    helper::mount(&helper, target, options)
}

/// The N of `/dev/fd/N`.
fn parse_inherited_fd(mountpoint: &Path) -> Option<RawFd> {
    let number = mountpoint.to_str()?.strip_prefix("/dev/fd/")?;
    let digits = !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit());
    if digits { number.parse().ok() } else { None }
}

fn inherit(fd: RawFd, mountpoint: &Path) -> Result<PreparedMount, MountError> {
    let not_fuse = || MountError::NotAFuseDevice { path: mountpoint.to_path_buf() };
    // Checked through /proc first, because only a descriptor that exists may become an owned one.
    let stat = rustix::fs::stat(format!("/proc/self/fd/{fd}")).map_err(|_| not_fuse())?;
    let fuse = rustix::fs::stat("/dev/fuse").map(|fuse| fuse.st_rdev);
    let is_device = FileType::from_raw_mode(stat.st_mode) == FileType::CharacterDevice;
    // Major 10, minor 229 if /dev/fuse itself is not visible.
    if !is_device || stat.st_rdev != fuse.unwrap_or(rustix::fs::makedev(10, 229)) {
        return Err(not_fuse());
    }
    // SAFETY: the descriptor is open, as just seen, and has no other owner in this process:
    // `mount`'s documentation has its caller uphold this, as the parent has handed it over under
    // this number for this purpose.
    let device = unsafe { OwnedFd::from_raw_fd(fd) };
    rustix::io::fcntl_setfd(&device, rustix::io::FdFlags::CLOEXEC).map_err(|_| not_fuse())?;
    Ok(PreparedMount {
        device,
        mountpoint: mountpoint.to_path_buf(),
        how: MountMethod::Inherited,
        syncfs: SyncFs::NotWanted,
        watch: None,
    })
}

/// Opens `/dev/fuse`. The error has the next step.
fn open_device(mountpoint: &Path) -> Result<OwnedFd, MountError> {
    use rustix::fs::{Mode, OFlags};
    match rustix::fs::open("/dev/fuse", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()) {
        Ok(device) => Ok(device),
        Err(errno @ (Errno::ACCESS | Errno::PERM)) => {
            Err(MountError::DeviceNotPermitted { errno, mountpoint: mountpoint.to_path_buf() })
        }
        Err(errno) => Err(MountError::NoDevice { errno }),
    }
}
