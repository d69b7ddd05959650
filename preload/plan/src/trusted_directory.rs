//! Directories whose paths can be used more than once: those that no other user can exchange.

use std::fs::{self, DirBuilder, File, Metadata};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags};

/// A directory without symbolic links in its path, which only root and this user can exchange for
/// another one: each directory on the way belongs to one of them, and others can remove no name
/// from it. Its path can be used any number of times.
///
/// # Errors
///
/// `PermissionDenied` for any other directory, and errors of the system.
pub fn find_trusted(directory: &Path) -> io::Result<PathBuf> {
    let directory = fs::canonicalize(directory)?;
    let all: Vec<&Path> = directory.ancestors().collect();
    // From the root on: a directory below a settled one stays what it is.
    for above in all.into_iter().rev() {
        let meta = fs::symlink_metadata(above)?;
        if !meta.is_dir() || !is_of_this_user_or_root(&meta) || removes_for_others(&meta) {
            let text = format!("another user could exchange {}", above.display());
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, text));
        }
    }
    Ok(directory)
}

/// Like [`find_trusted`], and creates the directory for this user alone if it is missing and its
/// parent is settled. Nothing is created where another user could lead the path elsewhere.
///
/// # Errors
///
/// As for [`find_trusted`].
pub fn create_settled(directory: &Path) -> io::Result<PathBuf> {
    let missing = match find_trusted(directory) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => error,
        result => return result,
    };
    let (Some(parent), Some(name)) = (directory.parent(), directory.file_name()) else {
        return Err(missing);
    };
    let new = find_trusted(parent)?.join(name);
    match DirBuilder::new().mode(0o700).create(&new) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(error),
        _ => find_trusted(&new),
    }
}

/// Opens a regular file for reading that only root and this user can have written to. A symbolic
/// link is not followed.
///
/// # Errors
///
/// `PermissionDenied` for any other file, and the errors of open(2).
pub fn open_trusted(path: &Path) -> io::Result<File> {
    // A fifo would block.
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = File::from(rustix::fs::open(path, flags, Mode::empty())?);
    let meta = file.metadata()?;
    if meta.is_file() && is_trusted(&meta) {
        return Ok(file);
    }
    let text = format!("another user could have written {}", path.display());
    Err(io::Error::new(io::ErrorKind::PermissionDenied, text))
}

/// The path of a regular file without symbolic links, which only root and this user can exchange or
/// have written: code that a variable of the environment names, which su(1) and `sudo -E` leave to
/// another user. The path can be used any number of times.
///
/// # Errors
///
/// `PermissionDenied` for any other file, and errors of the system.
pub fn find_trusted_file(path: &Path) -> io::Result<PathBuf> {
    let path = fs::canonicalize(path)?;
    let (Some(directory), Some(name)) = (path.parent(), path.file_name()) else {
        return Err(io::ErrorKind::InvalidInput.into());
    };
    let directory = find_trusted(directory)?;
    let path = directory.join(name);
    let meta = fs::symlink_metadata(&path)?;
    // An owner without a number here may be any user, who can make files in a directory for all.
    let is_private = || fs::symlink_metadata(&directory).is_ok_and(|dir| dir.mode() & 0o022 == 0);
    let is_own = is_trusted(&meta) || is_of_this_user_or_root(&meta) && is_private();
    if meta.is_file() && is_own && meta.mode() & 0o022 == 0 {
        return Ok(path);
    }
    let text = format!("another user could have written {}", path.display());
    Err(io::Error::new(io::ErrorKind::PermissionDenied, text))
}

/// True if only root and this user can have written to the file.
pub(crate) fn is_trusted(meta: &Metadata) -> bool {
    let own = [0, rustix::process::geteuid().as_raw()].contains(&meta.uid());
    own && meta.mode() & 0o022 == 0
}

/// Returns the result of [`find_trusted`], for a directory in which only this user and root can
/// create names.
///
/// # Errors
///
/// Fails with the errors of [`find_trusted`].
pub fn find_private(directory: &Path) -> io::Result<PathBuf> {
    let directory = find_trusted(directory)?;
    let meta = fs::symlink_metadata(&directory)?;
    let own = meta.uid() == rustix::process::geteuid().as_raw();
    if own && meta.mode() & 0o022 == 0 {
        return Ok(directory);
    }
    let text = format!("{} does not belong to this user alone", directory.display());
    Err(io::Error::new(io::ErrorKind::PermissionDenied, text))
}

/// True if users other than the owner may remove or rename files of others in the directory.
fn removes_for_others(meta: &Metadata) -> bool {
    meta.mode() & 0o022 != 0 && meta.mode() & 0o1000 == 0
}

fn is_of_this_user_or_root(meta: &Metadata) -> bool {
    let known = [0, rustix::process::geteuid().as_raw()];
    known.contains(&meta.uid()) || meta.uid() == OVERFLOW && !maps_all_users()
}

/// The id that stands for owners without a number in the user namespace, such as root outside of
/// the namespace (user_namespaces(7)).
const OVERFLOW: u32 = 65534;

fn maps_all_users() -> bool {
    let map = fs::read_to_string("/proc/self/uid_map").unwrap_or_default();
    map.split_ascii_whitespace().eq(["0", "0", "4294967295"])
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    /// A variable of another user, as after `sudo -E`, named a place, and root made a directory
    /// there.
    #[test]
    fn a_directory_is_created_only_where_no_other_user_can_exchange_its_parent() {
        let dir = tempfile::tempdir().unwrap();
        let top = dir.path().canonicalize().unwrap();
        for name in ["own", "open"] {
            fs::create_dir(top.join(name)).unwrap();
        }
        fs::set_permissions(top.join("open"), fs::Permissions::from_mode(0o777)).unwrap();
        let new = top.join("own/new");
        assert_eq!(create_settled(&new).unwrap(), new);
        assert_eq!(create_settled(&new).unwrap(), new);
        assert_eq!(fs::metadata(&new).unwrap().mode() & 0o777, 0o700);
        let error = create_settled(&top.join("open/new")).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::PermissionDenied);
        assert!(!top.join("open/new").exists());
        let error = create_settled(&top.join("own/no/new")).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
    }

    #[test]
    fn a_directory_is_settled_if_no_other_user_can_exchange_it() {
        let dir = tempfile::tempdir().unwrap();
        let top = dir.path().canonicalize().unwrap();
        let put_at = |name: &str, mode| {
            fs::set_permissions(top.join(name), fs::Permissions::from_mode(mode)).unwrap();
        };
        fs::create_dir_all(top.join("a/b")).unwrap();
        std::os::unix::fs::symlink("a", top.join("link")).unwrap();
        assert_eq!(find_trusted(&top.join("link/b")).unwrap(), top.join("a/b"));
        for (mode, settles) in [(0o755, true), (0o1777, true), (0o777, false), (0o770, false)] {
            put_at("a", mode);
            assert_eq!(find_trusted(&top.join("a/b")).is_ok(), settles, "below {mode:o}");
            assert_eq!(find_private(&top.join("a/b")).is_ok(), settles, "below {mode:o}");
            assert_eq!(find_private(&top.join("a")).is_ok(), mode == 0o755, "{mode:o}");
        }
        put_at("a", 0o755);
        if rustix::process::geteuid().is_root() {
            std::os::unix::fs::chown(top.join("a"), Some(12345), None).unwrap();
            for path in ["a", "a/b", "link/b"] {
                let error = find_trusted(&top.join(path)).unwrap_err().to_string();
                assert!(error.contains("could exchange") && error.ends_with("/a"), "{error}");
            }
        }
        assert!(find_trusted(&top.join("missing")).is_err());
    }
}
