//! Paths and files for several commands.

use std::fs::{self, File};
use std::io::{self, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

pub use defuse_preload_plan::trusted_directory::{find_private, find_trusted};
use defuse_socket::name;
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

/// The absolute path of a mount point, as in `/proc/self/mountinfo`. Never accesses a mount at the
/// path, whose server may have died. The name of a descriptor that another process opened and
/// mounted stays.
pub fn mountpoint(path: &Path) -> PathBuf {
    if path.starts_with("/dev/fd") {
        return path.to_path_buf();
    }
    defuse_fuse::mount::resolve(&absolute(path))
}

/// The absolute path, whether it exists or not. The daemon works in `/`, where a relative path
/// would mean something else.
pub fn absolute(path: &Path) -> PathBuf {
    std::path::absolute(path).unwrap_or_else(|_| path.to_path_buf())
}

/// Returns an image's path, made absolute as by [`absolute`]; the name of a device that has no path
/// stays.
pub fn image(path: &Path) -> PathBuf {
    match defuse_block::driver_of(path.as_os_str()) {
        Some(_) => path.to_path_buf(),
        None => absolute(path),
    }
}

/// Opens a file to append to it, and creates it if needed. A symbolic link is followed only where
/// no other user can have made it.
///
/// # Errors
///
/// `PermissionDenied` for such a link, and errors of open(2).
pub fn open_to_append(path: &Path) -> io::Result<File> {
    let (folder, name) = name::parts(path)?;
    let opened = name::open_directory(folder)?;
    let flags = OFlags::WRONLY | OFlags::APPEND | OFlags::CREATE | OFlags::CLOEXEC;
    match rustix::fs::openat(&opened, name, flags | OFlags::NOFOLLOW, Mode::from_raw_mode(0o666)) {
        Ok(file) => Ok(file.into()),
        Err(Errno::LOOP) => {
            let meta = fs::symlink_metadata(path)?;
            let own = [0, rustix::process::geteuid().as_raw()].contains(&meta.uid());
            if !own || find_trusted(folder).is_err() {
                let text = "another user could have made this symbolic link";
                return Err(io::Error::new(io::ErrorKind::PermissionDenied, text));
            }
            File::options().append(true).create(true).open(path)
        }
        Err(errno) => Err(errno.into()),
    }
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
        .tempfile_in(&folder)
        // Without the path by way of the descriptor.
        .map_err(|error| io::Error::from(error.kind()))?;
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

    /// The log of root in a directory of another user was appended to the file to which that user's
    /// link led.
    #[test]
    fn a_link_of_another_user_leads_to_no_file() {
        let dir = tempfile::tempdir().unwrap();
        let (file, link) = (dir.path().join("file"), dir.path().join("link"));
        open_to_append(&file).unwrap().write_all(b"1").unwrap();
        std::os::unix::fs::symlink("file", &link).unwrap();
        open_to_append(&link).unwrap().write_all(b"2").unwrap();
        assert_eq!(fs::read(&file).unwrap(), b"12");
        open_to_append(Path::new("/dev/null")).unwrap();
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o777)).unwrap();
        let refused = |what: &str| {
            let error = open_to_append(&link).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::PermissionDenied, "{what}");
        };
        refused("all may exchange it");
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o1777)).unwrap();
        if std::os::unix::fs::lchown(&link, Some(12345), None).is_ok() {
            refused("a link of another user");
            std::os::unix::fs::lchown(&link, Some(0), None).unwrap();
        }
        assert!(open_to_append(&link).is_ok());
        assert_eq!(fs::read(&file).unwrap(), b"12");
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
