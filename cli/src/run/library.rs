//! The library that `defuse run` loads into programs.
//!
//! The program carries the library, so that a single file is complete. An equal file beside the
//! program is used where it lies, as packages and cargo install it. Otherwise the library is
//! unpacked into a directory that no other user can change, and stays there for later runs.

use std::ffi::OsStr;
use std::fs::{self, DirBuilder, File, Permissions};
use std::hash::{DefaultHasher, Hasher};
use std::io::{self, Read, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use defuse_preload_plan::trusted_directory::{
    create_settled, find_private, find_trusted_file, open_trusted,
};
use defuse_preload_plan::{LIBRARY, MARK, analysis};
use rustix::fs::StatVfsMountFlags;

use crate::error::{CommandFailure, Result};

/// The variable with the path of the library.
const VARIABLE: &str = "DEFUSE_PRELOAD_LIBRARY";

/// The library. It is empty in a build that cargo has made elsewhere than in a checkout.
const CARRIED: &[u8] = include_bytes!(env!("DEFUSE_BUILT_LIBRARY"));

/// The beginning of the names of directories with unpacked libraries.
const UNPACKED: &str = "library-";

/// The time after which an unpacked library that no run has used is removed.
const UNUSED: Duration = Duration::from_secs(30 * 24 * 60 * 60);

/// Finds the library: at the path in the variable, beside the program, or unpacked from it.
///
/// # Errors
///
/// Fails if there is none, if it is another library, and if its path cannot be named in
/// `LD_PRELOAD`.
pub fn find() -> Result<PathBuf> {
    let program = std::env::current_exe().map_err(CommandFailure::from_error)?;
    let named = std::env::var_os(VARIABLE).filter(|named| !named.is_empty());
    let library = match named {
        Some(named) => find_at(Path::new(&named))?,
        None => match find_beside(&program, CARRIED) {
            Some(library) => library,
            None if CARRIED.is_empty() => return Err(missing_error(&program)),
            None => unpack(&homes(), &[(LIBRARY, CARRIED)])?.join(LIBRARY),
        },
    };
    if !can_be_named(&library) {
        return Err(CommandFailure::Failed(format!(
            "{}: LD_PRELOAD can name no library with a space, a colon or a dollar sign in its path: \
             move it, and set its path in {VARIABLE}",
            library.display()
        )));
    }
    check(&library)?;
    Ok(library)
}

/// True if `LD_PRELOAD` can have this path, of which the loader makes no list and no variable.
pub fn can_be_named(path: &Path) -> bool {
    !path.as_os_str().as_bytes().iter().any(|byte| b": $".contains(byte))
}

/// The library at the path in the variable.
fn find_at(named: &Path) -> Result<PathBuf> {
    find_trusted_file(named).map_err(|error| match error.kind() {
        io::ErrorKind::PermissionDenied => CommandFailure::Failed(format!(
            "{}: the library for programs, which {VARIABLE} names, is not used, as {error}: unset the variable, or keep the library in \
             a directory that only root and you can write to",
            named.display()
        )),
        _ => CommandFailure::Failed(format!(
            "{}: the library for programs, which {VARIABLE} names, is not there: correct the path, or unset the variable",
            named.display()
        )),
    })
}

/// The directories of the program in which the library can lie.
fn places(program: &Path) -> [PathBuf; 3] {
    let folder = program.parent().unwrap_or(Path::new("/"));
    // Cargo builds dependencies in the first.
    ["deps", ".", "../lib/defuse"].map(|place| folder.join(place).join(LIBRARY))
}

/// The library in one of the directories of the program, if it equals the library that the program
/// carries: a library of another build would not understand this program's plan.
fn find_beside(program: &Path, carried: &[u8]) -> Option<PathBuf> {
    let found = places(program).into_iter().filter_map(|place| fs::canonicalize(place).ok());
    found.into_iter().find(|library| {
        let file = File::open(library);
        file.is_ok_and(|file| carried.is_empty() || is_same_build(file, carried))
    })
}

fn missing_error(program: &Path) -> CommandFailure {
    let places = places(program).map(|place| place.display().to_string());
    CommandFailure::Failed(format!(
        "the library for programs is not in this program, and was not found in {}: build it from a checkout \
         (`cargo xtask install`), or set its path in {VARIABLE}",
        places.join(", ")
    ))
}

/// Refuses another library: a program into which the loader does not load ours uses the files of
/// the kernel.
fn check(library: &Path) -> Result {
    match analysis::exports(library, MARK) {
        Ok(true) => Ok(()),
        Ok(false) => Err(CommandFailure::Failed(format!(
            "{}: not the library for programs of a run: install it with `cargo xtask install`, or set its path in \
             {VARIABLE}",
            library.display()
        ))),
        Err(error) => Err(CommandFailure::Failed(format!(
            "{error}: set the path of the library for programs in {VARIABLE}"
        ))),
    }
}

/// Directories for unpacked libraries, the best one first. A run of root starts programs of other
/// users, too.
pub fn homes() -> Vec<PathBuf> {
    let variable = |name: &str| {
        let path = PathBuf::from(std::env::var_os(name)?);
        path.is_absolute().then_some(path)
    };
    let user = rustix::process::geteuid();
    let shared = user.is_root().then(|| PathBuf::from("/var/cache"));
    let cache =
        variable("XDG_CACHE_HOME").or_else(|| variable("HOME").map(|home| home.join(".cache")));
    let own = [shared, cache, variable("XDG_RUNTIME_DIR")].into_iter().flatten();
    let mut homes: Vec<PathBuf> = own.map(|base| base.join("defuse")).collect();
    let name = format!("defuse-{}", user.as_raw());
    homes.extend(["/tmp", "/dev/shm"].map(|base| Path::new(base).join(&name)));
    homes
}

/// An empty directory in the first of these places that can have one: the mount point of programs
/// that serve no mount.
pub fn find_empty_directory(homes: &[PathBuf]) -> Option<PathBuf> {
    let find_in = |home: &PathBuf| {
        let base = create_settled(home.parent().unwrap_or(home))?;
        let home = find_private_directory(&base.join(home.file_name().unwrap_or_default()))?;
        find_private_directory(&home.join("mount-point"))
    };
    homes.iter().find_map(|home| find_in(home).ok())
}

/// Libraries by their names, with their contents.
pub type CarriedLibraries<'a> = [(&'a str, &'a [u8])];

/// Writes the libraries to a directory in the first of these places in which they can be kept and
/// executed, unless they are there. Returns the directory.
pub fn unpack(homes: &[PathBuf], libraries: &CarriedLibraries<'_>) -> Result<PathBuf> {
    let mut refusals = Vec::new();
    for home in homes {
        match unpack_into(home, libraries) {
            Ok(path) => return Ok(path),
            Err(error) => refusals.push(format!("{}: {error}", home.display())),
        }
    }
    Err(CommandFailure::Failed(format!(
        "the library for programs can be unpacked nowhere ({}): set XDG_CACHE_HOME to a directory of yours on a file \
         system that is not mounted with noexec",
        refusals.join("; ")
    )))
}

fn unpack_into(home: &Path, libraries: &CarriedLibraries<'_>) -> io::Result<PathBuf> {
    if !can_be_named(home) {
        return Err(io::Error::other(
            "LD_PRELOAD can name no path with a space, a colon or a dollar sign",
        ));
    }
    // A new user has no directory for caches.
    let base = create_settled(home.parent().unwrap_or(home))?;
    let home = find_private_directory(&base.join(home.file_name().unwrap_or_default()))?;
    let mut hasher = DefaultHasher::new();
    for (_, content) in libraries {
        hasher.write(content);
    }
    let name = format!("{UNPACKED}{:016x}", hasher.finish());
    let directory = find_private_directory(&home.join(&name))?;
    let mut is_new = false;
    for (library, content) in libraries {
        let path = directory.join(library);
        let is_there = open_trusted(&path).is_ok_and(|file| has_content(file, content));
        if !is_there {
            write(&directory, &path, content)?;
            is_new = true;
        }
    }
    if is_new {
        remove_unused(&home, &name);
        return Ok(directory);
    }
    // The time of the last use, within a day: a run writes nothing otherwise.
    let used = fs::metadata(&directory)?.modified()?;
    if age(used) > Duration::from_secs(24 * 60 * 60) {
        let _ = File::open(&directory)?.set_modified(SystemTime::now());
    }
    Ok(directory)
}

/// A directory that only this user and root can change. It is created if its parent is there.
fn find_private_directory(path: &Path) -> io::Result<PathBuf> {
    match DirBuilder::new().mode(0o700).create(path) {
        // Users may read it, whatever the umask: a program of root's run may be one of another
        // user.
        Ok(()) => fs::set_permissions(path, Permissions::from_mode(0o755))?,
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
        Err(error) => return Err(error),
    }
    find_private(path)
}

/// Writes the file as a whole: another run sees the complete file or nothing.
fn write(directory: &Path, path: &Path, library: &[u8]) -> io::Result<()> {
    let mut new = tempfile::Builder::new().prefix(".new-").tempfile_in(directory)?;
    let flags = rustix::fs::fstatvfs(&new)?.f_flag;
    if flags.contains(StatVfsMountFlags::NOEXEC) {
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, "it is mounted with noexec"));
    }
    new.write_all(library)?;
    new.as_file().set_permissions(Permissions::from_mode(0o755))?;
    new.persist(path).map_err(|error| error.error)?;
    Ok(())
}

/// Removes the libraries of other builds that were not used for long. A run that is as old could
/// need one.
fn remove_unused(home: &Path, keep: &str) {
    for entry in fs::read_dir(home).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let is_one = name.as_bytes().starts_with(UNPACKED.as_bytes()) && name != OsStr::new(keep);
        let used = entry.metadata().and_then(|meta| meta.modified());
        if is_one && used.is_ok_and(|used| age(used) > UNUSED) {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

fn age(since: SystemTime) -> Duration {
    SystemTime::now().duration_since(since).unwrap_or_default()
}

/// True if the file is as long and begins with the same page, which has the build id (ld(1),
/// `--build-id`). The rest is not compared, because that takes as long as a fifth of the start of a
/// run.
fn is_same_build(file: File, expected: &[u8]) -> bool {
    has_size(&file, expected.len()) && has_bytes(file, &expected[..expected.len().min(4096)])
}

/// True if the file has exactly these bytes.
fn has_content(file: File, expected: &[u8]) -> bool {
    has_size(&file, expected.len()) && has_bytes(file, expected)
}

fn has_size(file: &File, expected: usize) -> bool {
    file.metadata().is_ok_and(|meta| meta.size() == expected as u64)
}

/// True if the file begins with these bytes.
fn has_bytes(mut file: File, expected: &[u8]) -> bool {
    let mut buffer = vec![0; 1 << 18];
    expected.chunks(buffer.len()).all(|part| {
        let read = file.read_exact(&mut buffer[..part.len()]);
        read.is_ok() && &buffer[..part.len()] == part
    })
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    const CONTENT: &[u8] = b"a library";

    fn unpack_one(homes: &[PathBuf], content: &[u8]) -> Result<PathBuf> {
        Ok(unpack(homes, &[(LIBRARY, content)])?.join(LIBRARY))
    }

    #[test]
    fn several_libraries_lie_together_and_are_those_of_one_build() {
        let (_dir, place) = place();
        let homes = [place.join("defuse")];
        let directory = unpack(&homes, &[("a.so", b"one"), ("b.so", b"two")]).unwrap();
        assert_eq!(fs::read(directory.join("a.so")).unwrap(), b"one");
        fs::write(directory.join("b.so"), b"twp").unwrap();
        assert_eq!(unpack(&homes, &[("a.so", b"one"), ("b.so", b"two")]).unwrap(), directory);
        assert_eq!(fs::read(directory.join("b.so")).unwrap(), b"two");
        assert_ne!(unpack(&homes, &[("a.so", b"one"), ("b.so", b"new")]).unwrap(), directory);
    }

    fn place() -> (tempfile::TempDir, PathBuf) {
        let dir = tempfile::tempdir().unwrap();
        let path = fs::canonicalize(dir.path()).unwrap();
        (dir, path)
    }

    #[test]
    fn the_library_beside_the_program_is_used_if_it_is_the_same() {
        let (_dir, place) = place();
        let program = place.join("bin/defuse");
        let put = |folder: &str, content: &[u8]| {
            let path = place.join(folder).join(LIBRARY);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(&path, content).unwrap();
            path
        };
        fs::create_dir_all(place.join("bin")).unwrap();
        let error = missing_error(&program).to_string();
        for part in ["bin/deps/", "bin/./libdefuse", "../lib/defuse/", "xtask install"] {
            assert!(error.contains(part), "{error}");
        }
        // Each is preferred to those before.
        for folder in ["lib/defuse", "bin", "bin/deps"] {
            let path = put(folder, CONTENT);
            assert_eq!(find_beside(&program, CONTENT), Some(path));
        }
        put("bin/deps", b"another");
        put("bin", b"a librarx");
        assert_eq!(find_beside(&program, CONTENT), Some(place.join("lib/defuse").join(LIBRARY)));
        assert_eq!(find_beside(&program, b""), Some(place.join("bin/deps").join(LIBRARY)));
        let error = find_at(Path::new("/no/such")).unwrap_err().to_string();
        assert!(error.contains("/no/such") && error.contains(VARIABLE), "{error}");
    }

    #[test]
    fn an_unpacked_library_is_used_again_and_mended_when_damaged() {
        let (_dir, place) = place();
        let homes = [place.join("no/such/base"), place.join("new/defuse")];
        let path = unpack_one(&homes, CONTENT).unwrap();
        assert!(path.starts_with(place.join("new/defuse")), "{path:?}");
        let first = fs::metadata(&path).unwrap();
        assert_eq!(unpack_one(&homes, CONTENT).unwrap(), path);
        assert_eq!(fs::metadata(&path).unwrap().ino(), first.ino());
        for damage in ["a librarx", "short", ""] {
            fs::write(&path, damage).unwrap();
            assert_eq!(unpack_one(&homes, CONTENT).unwrap(), path);
            assert_eq!(fs::read(&path).unwrap(), CONTENT);
        }
        let other = unpack_one(&homes, b"another build").unwrap();
        assert!(other != path && path.exists());
    }

    #[test]
    fn a_directory_that_others_can_change_is_not_used() {
        let (_dir, place) = place();
        let homes = [place.join("open/defuse"), place.join("own/defuse")];
        fs::create_dir_all(&homes[0]).unwrap();
        fs::set_permissions(&homes[0], Permissions::from_mode(0o777)).unwrap();
        let path = unpack_one(&homes, CONTENT).unwrap();
        assert!(path.starts_with(place.join("own")), "{path:?}");
        // A link to a file elsewhere, and a file that others can write.
        let foreign = place.join("foreign");
        fs::write(&foreign, CONTENT).unwrap();
        fs::remove_file(&path).unwrap();
        symlink(&foreign, &path).unwrap();
        unpack_one(&homes, CONTENT).unwrap();
        assert!(fs::symlink_metadata(&path).unwrap().is_file());
        fs::set_permissions(&path, Permissions::from_mode(0o666)).unwrap();
        unpack_one(&homes, CONTENT).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o755);
        let spaced = [place.join("a b/defuse")];
        let error = unpack_one(&spaced, CONTENT).unwrap_err().to_string();
        assert!(error.contains("a b") && error.contains("XDG_CACHE_HOME"), "{error}");
    }

    #[test]
    fn libraries_of_other_builds_are_removed_after_a_month() {
        let (_dir, place) = place();
        let homes = [place.join("defuse")];
        let old = unpack_one(&homes, b"an old build").unwrap();
        let young = unpack_one(&homes, b"a young build").unwrap();
        let long_ago = SystemTime::now() - UNUSED - Duration::from_secs(1);
        File::open(old.parent().unwrap()).unwrap().set_modified(long_ago).unwrap();
        fs::create_dir(homes[0].join("something")).unwrap();
        unpack_one(&homes, CONTENT).unwrap();
        assert!(!old.exists() && young.exists() && homes[0].join("something").exists());
    }

    /// Also a build for tests has the library: what an unpacked one does is tested by the program.
    #[test]
    fn the_program_carries_the_library_that_was_built_with_it() {
        assert!(CARRIED.starts_with(b"\x7fELF"), "{} bytes", CARRIED.len());
        // The name of the note with the build id.
        assert!(CARRIED[..4096].windows(4).any(|bytes| bytes == b"GNU\0"));
    }
}
