//! Unmounting, also of dead mounts.

use super::check::resolve;
use super::held::HeldMountpoint;
use super::info::MountEntry;
use super::{UnmountError, helper, info};
use rustix::io::Errno;
use rustix::mount::UnmountFlags;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Unmounts a FUSE file system, alive or dead. `lazy` detaches it at once, and its users can
/// continue (`umount2(2)`, MNT_DETACH).
///
/// Never sends a request to the file system. Refuses mounts of other types, so that a wrong path
/// does no harm.
pub fn unmount(path: &Path, lazy: bool) -> Result<(), UnmountError> {
    unmount_if(path, lazy, |_| true)
}

/// Unmounts a FUSE file system like [`unmount`], if `is_it` is true for it: a user who owns a
/// directory on the way can let the path lead to another mount at any time.
///
/// # Errors
///
/// [`UnmountError::NotMounted`] where another mount is, and the errors of [`unmount`].
pub fn unmount_if(
    path: &Path,
    lazy: bool,
    is_it: impl Fn(&MountEntry) -> bool,
) -> Result<(), UnmountError> {
    let mut flags = UnmountFlags::empty();
    flags.set(UnmountFlags::DETACH, lazy);
    detach(path, flags, is_it)
}

/// Ends the calls in progress of a FUSE file system, if `is_it` is true for it, and unmounts it if
/// it is not in use (`umount2(2)`, MNT_FORCE).
///
/// # Errors
///
/// The errors of [`unmount_if`]. A helper cannot do it.
pub fn force_if(path: &Path, is_it: impl Fn(&MountEntry) -> bool) -> Result<(), UnmountError> {
    detach(path, UnmountFlags::FORCE, is_it)
}

/// Aborts a FUSE file system: its requests fail with ECONNABORTED, even if the server never answers
/// them, and the mount point becomes free (`umount2(2)`, MNT_FORCE and MNT_DETACH). Needs
/// permission to unmount; a helper cannot do it.
pub fn abort(path: &Path) -> Result<(), UnmountError> {
    detach(path, UnmountFlags::FORCE | UnmountFlags::DETACH, |_| true)
}

fn detach(
    path: &Path,
    flags: UnmountFlags,
    is_it: impl Fn(&MountEntry) -> bool,
) -> Result<(), UnmountError> {
    let path = resolve(path);
    let place = match HeldMountpoint::open(&path) {
        Ok(place) => place,
        Err(Errno::NOENT | Errno::NOTDIR) => return Err(UnmountError::NotMounted { path }),
        Err(errno) => return Err(UnmountError::Failed { path, message: errno.to_string() }),
    };
    let mount = match &place {
        Some(place) => place.mount(),
        None => info::mount_at(&path),
    };
    let seen = match mount {
        Ok(None) => return Err(UnmountError::NotMounted { path }),
        Ok(Some(mount)) if !mount.is_fuse() => {
            return Err(UnmountError::NotFuse { path, fstype: mount.fstype });
        }
        Ok(Some(mount)) if !is_it(&mount) => return Err(UnmountError::NotMounted { path }),
        Ok(Some(_)) => true,
        // Without /proc, the error of the kernel must suffice.
        Err(_) => false,
    };
    let unmounted = match place {
        Some(place) if seen => place.unmount(flags),
        _ => rustix::mount::unmount(&path, flags | UnmountFlags::NOFOLLOW),
    };
    match unmounted {
        Ok(()) => Ok(()),
        Err(Errno::PERM) => match helper::find() {
            Some(helper) if !flags.contains(UnmountFlags::FORCE) => {
                match unmount_by_helper(&helper, path, flags.contains(UnmountFlags::DETACH)) {
                    // The helper does not see the mounts of other users.
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

fn unmount_by_helper(helper: &Path, path: PathBuf, lazy: bool) -> Result<(), UnmountError> {
    let mut command = Command::new(helper);
    command.arg("-u");
    if lazy {
        command.arg("-z");
    }
    // The messages are parsed, and must not be translated.
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
    fn the_messages_of_the_helper_are_classified() {
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
    fn other_file_systems_are_not_unmounted() {
        let error = unmount(Path::new("/proc"), true).unwrap_err();
        assert!(matches!(&error, UnmountError::NotFuse { fstype, .. } if fstype == "proc"));
        let error = unmount(Path::new("/nonexistent/x"), false).unwrap_err();
        assert!(matches!(error, UnmountError::NotMounted { .. }));
    }
}
