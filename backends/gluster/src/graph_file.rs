//! Volfiles: descriptions of translators, which are libraries that this process loads.
//!
//! A translator is named by the path of its library below a directory of GlusterFS, and the name
//! may lead out of that directory. So the author of the file decides on the code of this process.
//! Therefore a file is accepted by the same rules as a program that the user executes: it must
//! belong to root or to the user of this process, and no other user may have write access.
//!
//! The file is opened once. The checks and the text refer to the open file, and libgfapi reads a
//! copy of the text that cannot be changed.

use std::ffi::CString;
use std::fs::{File, Metadata, OpenOptions};
use std::io::{Read, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};

/// Bytes of the largest file that is read. Volfiles of GlusterFS have a few thousand.
const LARGEST: u64 = 1 << 20;

/// A copy of a volume file.
#[derive(Debug)]
pub struct GraphFile(OwnedFd);

impl GraphFile {
    /// Copies the file at `path`.
    ///
    /// # Errors
    ///
    /// A text that names the file and the next step: it cannot be read, it is no regular file, or
    /// another user could have written it.
    pub fn open(path: &Path) -> Result<GraphFile, String> {
        let wrong = |why: &str| format!("volume file {}: {why}", path.display());
        let failed = |error: std::io::Error| wrong(&format!("{error}: name another file"));
        // A fifo must not wait for a writer, and a terminal must not become the terminal of this
        // process.
        let flags = libc::O_NONBLOCK | libc::O_NOCTTY;
        let file = OpenOptions::new().read(true).custom_flags(flags).open(path).map_err(failed)?;
        let is_own = |uid| uid == 0 || uid == rustix::process::geteuid().as_raw();
        check(&file.metadata().map_err(failed)?, is_own).map_err(|why| wrong(&why))?;
        let mut text = Vec::new();
        file.take(LARGEST + 1).read_to_end(&mut text).map_err(failed)?;
        if text.len() as u64 > LARGEST {
            return Err(wrong("it has more than a megabyte: name a volume file"));
        }
        make_sealed_file(&text).map(GraphFile).map_err(failed)
    }

    /// The path of the copy for this process.
    pub fn path(&self) -> CString {
        let path = format!("/proc/self/fd/{}", self.0.as_raw_fd());
        CString::new(path).unwrap_or_default()
    }
}

/// Fails with the reason why a file with these attributes is not trusted.
fn check(file: &Metadata, is_own: impl Fn(u32) -> bool) -> Result<(), String> {
    if !file.is_file() {
        return Err("it is no regular file: name a volume file".to_owned());
    }
    if !is_own(file.uid()) {
        return Err(format!(
            "it belongs to user {}, who would decide which libraries this process loads: copy it, or give it to \
             the user of this process by chown",
            file.uid()
        ));
    }
    // With an access list, the bits of the group are the mask of all its entries.
    if file.mode() & 0o022 != 0 {
        return Err(format!(
            "its mode {:o} lets others write, who would decide which libraries this process loads: chmod go-w",
            file.mode() & 0o7777
        ));
    }
    Ok(())
}

/// Memory with this content, sealed against changes.
fn make_sealed_file(text: &[u8]) -> std::io::Result<OwnedFd> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let mut memory = File::from(memfd_create("defuse-volume", flags)?);
    memory.write_all(text)?;
    let all = SealFlags::SEAL | SealFlags::SHRINK | SealFlags::GROW | SealFlags::WRITE;
    fcntl_add_seals(&memory, all)?;
    Ok(memory.into())
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::ffi::OsStrExt;
    use std::os::unix::fs::{PermissionsExt, symlink};
    use std::path::PathBuf;

    use super::*;

    /// A directory that is removed at the end.
    struct GraphFileDirectory(PathBuf);

    impl GraphFileDirectory {
        fn new(name: &str) -> GraphFileDirectory {
            let path = std::env::temp_dir().join(format!("defuse-{name}-{}", std::process::id()));
            fs::create_dir(&path).unwrap();
            GraphFileDirectory(path)
        }

        fn file(&self, name: &str, text: &[u8], mode: u32) -> PathBuf {
            let path = self.0.join(name);
            fs::write(&path, text).unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
            path
        }
    }

    impl Drop for GraphFileDirectory {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    fn describe_refusal(path: &Path) -> String {
        GraphFile::open(path).unwrap_err()
    }

    fn text(file: &GraphFile) -> String {
        fs::read_to_string(std::ffi::OsStr::from_bytes(file.path().as_bytes())).unwrap()
    }

    /// Any user with write access to the file could have libraries loaded by the mount of another
    /// user.
    #[test]
    fn a_volume_file_that_others_could_have_written_is_refused() {
        let place = GraphFileDirectory::new("graph-others");
        assert_eq!(text(&GraphFile::open(&place.file("own", b"volume", 0o644)).unwrap()), "volume");
        for mode in [0o664, 0o646, 0o620, 0o777] {
            let error = describe_refusal(&place.file("shared", b"volume", mode));
            assert!(error.contains("/shared: its mode") && error.contains("chmod go-w"), "{error}");
        }
        let file = fs::metadata(place.file("other", b"volume", 0o600)).unwrap();
        let error = check(&file, |uid| uid != file.uid()).unwrap_err();
        assert!(error.contains(&format!("it belongs to user {}", file.uid())), "{error}");
        if rustix::process::geteuid().is_root() {
            let path = place.file("foreign", b"volume", 0o600);
            std::os::unix::fs::chown(&path, Some(4321), None).unwrap();
            assert!(describe_refusal(&path).contains("it belongs to user 4321"));
            // The file counts, and not the link to it.
            let link = place.0.join("link");
            symlink(&path, &link).unwrap();
            assert!(describe_refusal(&link).contains("it belongs to user 4321"));
        }
    }

    #[test]
    fn only_a_regular_file_of_limited_size_is_a_volume_file() {
        let place = GraphFileDirectory::new("graph-kinds");
        let missing = describe_refusal(&place.0.join("missing"));
        assert!(
            missing.contains("/missing: ") && missing.contains("name another file"),
            "{missing}"
        );
        let fifo = place.0.join("fifo");
        rustix::fs::mknodat(
            rustix::fs::CWD,
            &fifo,
            rustix::fs::FileType::Fifo,
            rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR,
            0,
        )
        .unwrap();
        for path in [place.0.as_path(), &fifo, Path::new("/dev/zero")] {
            assert!(describe_refusal(path).contains("it is no regular file"), "{}", path.display());
        }
        let large = place.file("large", &vec![b' '; (LARGEST + 1) as usize], 0o600);
        assert!(describe_refusal(&large).contains("more than a megabyte"));
    }

    /// A change between the checks and the use would have been effective.
    #[test]
    fn the_text_of_a_volume_file_is_that_of_the_moment_when_it_was_checked() {
        let place = GraphFileDirectory::new("graph-copy");
        let path = place.file("file", b"checked", 0o600);
        let file = GraphFile::open(&path).unwrap();
        fs::write(&path, "changed").unwrap();
        fs::rename(place.file("new", b"replaced", 0o600), &path).unwrap();
        assert_eq!(text(&file), "checked");
        assert!(fs::write(std::ffi::OsStr::from_bytes(file.path().as_bytes()), "x").is_err());
    }
}
