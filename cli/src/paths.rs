//! Paths and files for several commands.

use std::fs::{self, Metadata};
use std::io::{self, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use defuse_socket::name;

/// The absolute path of a mount point, as in `/proc/self/mountinfo`. Never accesses a mount at the path,
/// whose server may have died.
pub fn mountpoint(path: &Path) -> PathBuf {
    defuse_fuse::mount::resolve(&absolute(path))
}

/// The absolute path, whether it exists or not. The daemon works in `/`, where a relative path would mean
/// something else.
pub fn absolute(path: &Path) -> PathBuf {
    std::path::absolute(path).unwrap_or_else(|_| path.to_path_buf())
}

/// An image as [`absolute`] has it; the name of a device that has no path stays.
pub fn image(path: &Path) -> PathBuf {
    match defuse_block::driver_of(path.as_os_str()) {
        Some(_) => path.to_path_buf(),
        None => absolute(path),
    }
}

/// A directory without symbolic links in its path, which nobody but root and this user can exchange for another one: each
/// directory on the way belongs to one of them, and others can remove no name from it. Its path can be used
/// any number of times.
///
/// # Errors
///
/// `PermissionDenied` for any other directory, and those of the system.
pub fn settled(directory: &Path) -> io::Result<PathBuf> {
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

/// As [`settled`], for a directory in which nobody but this user and root can create names.
///
/// # Errors
///
/// As for [`settled`].
pub fn private(directory: &Path) -> io::Result<PathBuf> {
    let directory = settled(directory)?;
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

/// The owner of all files whose owner has no number in the user namespace, such as root outside of it
/// (user_namespaces(7)).
const OVERFLOW: u32 = 65534;

fn maps_all_users() -> bool {
    let map = fs::read_to_string("/proc/self/uid_map").unwrap_or_default();
    map.split_ascii_whitespace().eq(["0", "0", "4294967295"])
}

/// Replaces a file atomically: readers see the old text or the new one.
pub fn write_atomically(path: &Path, text: &[u8]) -> io::Result<()> {
    let (folder, name) = name::parts(path)?;
    let mut prefix = std::ffi::OsString::from(".");
    prefix.push(name);
    prefix.push(".");
    // Another user may exchange the directory between two steps.
    let opened = name::open_directory(folder)?;
    let folder = PathBuf::from(format!("/proc/self/fd/{}", opened.as_raw_fd()));
    // A new file with a random name, because all users may be able to write to the directory.
    let mut temporary = tempfile::Builder::new()
        .prefix(&prefix)
        .permissions(fs::Permissions::from_mode(0o666))
        .tempfile_in(&folder)?;
    temporary.write_all(text)?;
    temporary.persist(folder.join(name))?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_parent_of_a_mount_point_is_resolved_but_not_the_mount_point() {
        let dir = tempfile::tempdir().unwrap();
        let top = dir.path().canonicalize().unwrap();
        fs::create_dir_all(top.join("a/b")).unwrap();
        std::os::unix::fs::symlink("a", top.join("link")).unwrap();
        assert_eq!(mountpoint(&top.join("link/b")), top.join("a/b"));
        assert_eq!(mountpoint(&top.join("link")), top.join("a"));
        assert_eq!(mountpoint(&top.join("a/../a/b/")), top.join("a/b"));
        assert_eq!(mountpoint(Path::new("/")), Path::new("/"));
        assert_eq!(mountpoint(&top.join("missing/x")), top.join("missing/x"));
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
        assert_eq!(settled(&top.join("link/b")).unwrap(), top.join("a/b"));
        for (mode, settles) in [(0o755, true), (0o1777, true), (0o777, false), (0o770, false)] {
            put_at("a", mode);
            assert_eq!(settled(&top.join("a/b")).is_ok(), settles, "below {mode:o}");
            assert_eq!(private(&top.join("a/b")).is_ok(), settles, "below {mode:o}");
            assert_eq!(private(&top.join("a")).is_ok(), mode == 0o755, "{mode:o}");
        }
        put_at("a", 0o755);
        if rustix::process::geteuid().is_root() {
            std::os::unix::fs::chown(top.join("a"), Some(12345), None).unwrap();
            for path in ["a", "a/b", "link/b"] {
                let error = settled(&top.join(path)).unwrap_err().to_string();
                assert!(error.contains("could exchange") && error.ends_with("/a"), "{error}");
            }
        }
        assert!(settled(&top.join("missing")).is_err());
    }

    #[test]
    fn a_file_is_replaced_and_nothing_is_left_beside_it() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x.json");
        write_atomically(&path, b"1").unwrap();
        write_atomically(&path, b"22").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"22");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
        assert!(write_atomically(&dir.path().join("no/x"), b"").is_err());
    }
}
