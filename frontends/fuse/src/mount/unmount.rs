//! Unmounting, also of what no longer answers.

use super::check::resolve;
use super::{UnmountError, helper, info};
use rustix::io::Errno;
use rustix::mount::UnmountFlags;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Unmounts a FUSE file system, alive or dead. `lazy` detaches it at once and
/// lets what uses it finish (`umount2(2)`, MNT_DETACH).
///
/// Never asks the file system. Refuses mounts of other types, so that a slip
/// in a path does no harm.
pub fn unmount(path: &Path, lazy: bool) -> Result<(), UnmountError> {
    let mut flags = UnmountFlags::NOFOLLOW;
    flags.set(UnmountFlags::DETACH, lazy);
    detach(path, flags)
}

/// Ends a FUSE file system whatever it is doing: its requests fail with ECONNABORTED, also those
/// that the server will never answer, and the mount point is free (`umount2(2)`, MNT_FORCE and
/// MNT_DETACH). Needs the right to unmount; a helper cannot do it.
pub fn abort(path: &Path) -> Result<(), UnmountError> {
    detach(path, UnmountFlags::NOFOLLOW | UnmountFlags::FORCE | UnmountFlags::DETACH)
}

fn detach(path: &Path, flags: UnmountFlags) -> Result<(), UnmountError> {
    let path = resolve(path);
    let seen = match info::mount_at(&path) {
        Ok(None) => return Err(UnmountError::NotMounted { path }),
        Ok(Some(mount)) if !mount.is_fuse() => {
            return Err(UnmountError::NotFuse { path, fstype: mount.fstype });
        }
        Ok(Some(_)) => true,
        // Without /proc the kernel's answer has to do.
        Err(_) => false,
    };
    match rustix::mount::unmount(&path, flags) {
        Ok(()) => Ok(()),
        Err(Errno::PERM) => match helper::find() {
            Some(helper) if !flags.contains(UnmountFlags::FORCE) => {
                match by_helper(&helper, path, flags.contains(UnmountFlags::DETACH)) {
                    // To the helper, the mounts of other users are none.
                    Err(UnmountError::NotMounted { path }) if seen => {
                        Err(UnmountError::NotPermitted { path })
                    }
                    other => other,
                }
            }
            _ => Err(UnmountError::NotPermitted { path }),
        },
        Err(Errno::BUSY) => Err(UnmountError::Busy { path }),
        Err(Errno::INVAL | Errno::NOENT) => Err(UnmountError::NotMounted { path }),
        Err(errno) => Err(UnmountError::Failed { path, message: errno.to_string() }),
    }
}

fn by_helper(helper: &Path, path: PathBuf, lazy: bool) -> Result<(), UnmountError> {
    let mut command = Command::new(helper);
    command.arg("-u");
    if lazy {
        command.arg("-z");
    }
    // Its messages are recognized, so they must not be translated.
    let command = command.arg("--").arg(&path).env("LC_ALL", "C").stdin(Stdio::null());
    match command.output() {
        Ok(output) if output.status.success() => Ok(()),
        Ok(output) => Err(classify(path, String::from_utf8_lossy(&output.stderr).trim())),
        Err(error) => {
            let message = format!("{}: {error}", helper.display());
            Err(UnmountError::Failed { path, message })
        }
    }
}

fn classify(path: PathBuf, message: &str) -> UnmountError {
    let says = |text| message.contains(text);
    if says("busy") {
        UnmountError::Busy { path }
    } else if says("not permitted") || says("Permission denied") {
        UnmountError::NotPermitted { path }
    } else if says("not found in") || says("not mounted") || says("Invalid argument") {
        UnmountError::NotMounted { path }
    } else {
        UnmountError::Failed { path, message: message.to_owned() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_helpers_messages_are_told_apart() {
        let of = |message| classify("/m".into(), message).to_string();
        assert!(
            of("fusermount3: failed to unmount /m: Device or resource busy").contains("in use")
        );
        assert!(of("fusermount3: entry for /m not found in /etc/mtab").contains("not mounted"));
        assert!(
            of("fusermount3: failed to unmount /m: Operation not permitted").contains("as root")
        );
        assert_eq!(of("other"), "cannot unmount /m: other");
    }

    #[test]
    fn what_is_not_fuse_is_left_alone() {
        let error = unmount(Path::new("/proc"), true).unwrap_err();
        assert!(matches!(&error, UnmountError::NotFuse { fstype, .. } if fstype == "proc"));
        let error = unmount(Path::new("/nonexistent/x"), false).unwrap_err();
        assert!(matches!(error, UnmountError::NotMounted { .. }));
    }
}
