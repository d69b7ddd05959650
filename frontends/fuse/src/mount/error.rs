//! The errors of mounting and unmounting. Each message names the object and the next step.

use rustix::io::Errno;
use std::path::PathBuf;

/// The reason why [`mount`](super::mount) failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the fields are what their names and the messages say")]
pub enum MountError {
    /// The mount point does not exist.
    #[error("mount point {} does not exist: create it first (mkdir)", path.display())]
    Missing { path: PathBuf },
    /// The root is a directory, the mount point is not.
    #[error("mount point {} is not a directory: choose a directory", path.display())]
    NotADirectory { path: PathBuf },
    /// The root is a file, the mount point is not.
    #[error("mount point {} is not a regular file, but this file system's root is one: create \
             a file to mount on (touch)", path.display())]
    NotAFile { path: PathBuf },
    /// The mount would hide files.
    #[error("mount point {} is not empty: choose an empty directory, or mount with -o nonempty \
             to hide what is there", path.display())]
    NotEmpty { path: PathBuf },
    /// A FUSE mount whose server has ended is in the way.
    #[error("{} has a dead mount whose server is gone: run `defuse umount {}`", path.display(),
            path.display())]
    DeadMount { path: PathBuf },
    /// A FUSE mount whose server does not answer is in the way.
    #[error("{} has a mount that does not answer: stop its server, or run `defuse umount --lazy \
             {}`", path.display(), path.display())]
    SilentMount { path: PathBuf },
    /// The mount point cannot be accessed.
    #[error("mount point {}: {errno}", path.display())]
    Unusable { path: PathBuf, errno: Errno },
    /// The kernel has no FUSE, or the container has no device.
    #[error(
        "cannot open /dev/fuse ({errno}): load the module (modprobe fuse), or pass the \
             device into this container (--device /dev/fuse)"
    )]
    NoDevice { errno: Errno },
    /// `/dev/fuse` exists, but this user or container may not open it.
    #[error("not permitted to open /dev/fuse ({errno}) to mount {}: run as root, or allow the \
             device in this container (--device /dev/fuse)", mountpoint.display())]
    DeviceNotPermitted { mountpoint: PathBuf, errno: Errno },
    /// The kernel was built without FUSE, or its module is not loaded.
    #[error("this kernel has no FUSE ({errno}): load the module (modprobe fuse)")]
    NoFuse { errno: Errno },
    /// The user is not root, and there is no helper.
    #[error("not permitted to mount {} ({errno}): run as root, or install fuse3 for its \
             fusermount3", mountpoint.display())]
    NotPermitted { mountpoint: PathBuf, errno: Errno },
    /// `allow_other` needs the permission of the administrator.
    #[error(
        "allow_other is not permitted for users: add the line user_allow_other to \
             /etc/fuse.conf, or run as root, or mount without allow_other"
    )]
    AllowOtherRefused,
    /// The kernel refused.
    #[error("cannot mount {}: {step}: {errno}{}", mountpoint.display(), detail(log))]
    Refused { mountpoint: PathBuf, step: &'static str, errno: Errno, log: String },
    /// The helper refused, or cannot be executed.
    #[error("cannot mount {} with {}: {message}{}", mountpoint.display(), helper.display(),
            next_step(message))]
    Helper { mountpoint: PathBuf, helper: PathBuf, message: String },
    /// `/dev/fd/N` is not a FUSE device.
    #[error("{} is not an open /dev/fuse: the parent process must open and mount it, and leave \
             it open", path.display())]
    NotAFuseDevice { path: PathBuf },
}

/// Why [`unmount`](super::unmount) failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the fields are what their names and the messages say")]
pub enum UnmountError {
    /// The mount is in use.
    #[error("{} is in use: close what uses it (fuser -vm {}), or detach it now with --lazy",
            path.display(), path.display())]
    Busy { path: PathBuf },
    /// Nothing is mounted there.
    #[error("{} is not mounted: `defuse list` shows the mounts", path.display())]
    NotMounted { path: PathBuf },
    /// Another type of file system is mounted there.
    #[error("{} is a mount of {fstype}, not of FUSE: use umount(8)", path.display())]
    NotFuse { path: PathBuf, fstype: String },
    /// It belongs to another user.
    #[error("not permitted to unmount {}: run as root, or as the user who mounted it with \
             fusermount3 installed", path.display())]
    NotPermitted { path: PathBuf },
    /// Another error.
    #[error("cannot unmount {}: {message}", path.display())]
    Failed { path: PathBuf, message: String },
}

/// The next step for errors of the helper (`util/fusermount.c` of libfuse) without one.
fn next_step(message: &str) -> &'static str {
    if message.contains("/dev/fuse") {
        "; load the module (modprobe fuse), or pass the device into this container (--device \
         /dev/fuse)"
    } else if message.contains("no write access") || message.contains("not owner") {
        "; choose a mount point that is yours, or run as root"
    } else if message.contains("too many FUSE filesystems") {
        "; raise mount_max in /etc/fuse.conf, or unmount what is not needed"
    } else if message.contains("not permitted") {
        "; a mount takes CAP_SYS_ADMIN (a container: --cap-add SYS_ADMIN), or a helper that is \
         set-user-id root (chmod u+s), which a process without new privileges cannot use"
    } else {
        ""
    }
}

fn detail(log: &str) -> String {
    match log {
        "" => String::new(),
        log => format!(" (kernel: {log})"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_of_the_helper_get_a_next_step() {
        let said = |message: &str| {
            let message = format!("fusermount3: {message}");
            let (mountpoint, helper) = ("/mnt/x".into(), "/bin/fusermount3".into());
            MountError::Helper { mountpoint, helper, message }.to_string()
        };
        assert!(said("failed to open /dev/fuse: Permission denied").contains("--device"));
        assert!(said("user has no write access to mountpoint /mnt/x").contains("is yours"));
        assert!(said("mount failed: Operation not permitted").contains("set-user-id"));
        assert!(said("something new").ends_with("something new"));
    }
}
