//! The reasons why a directory cannot be served.

use std::fmt;
use std::path::PathBuf;

use defuse_fs::Errno;

/// The reason why [`Passthrough::new`](crate::Passthrough::new) failed. The text names the object
/// and the next step.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum SourceError {
    /// The path does not exist.
    NotFound(PathBuf),
    /// The path is not a directory.
    NotADirectory(PathBuf),
    /// This process may not search the path or read the directory.
    NotPermitted(PathBuf),
    /// Another system error.
    Io(PathBuf, Errno),
    /// [`FileHandles::On`](crate::FileHandles::On) is set, but file handles do not work here, for
    /// this reason.
    NoFileHandles(PathBuf, Errno),
    /// `/proc` is not mounted. Inodes are opened and changed through `/proc/self/fd`.
    NoProc(Errno),
}

impl SourceError {
    pub(crate) fn new(path: PathBuf, errno: Errno) -> Self {
        match errno {
            Errno::ENOENT => SourceError::NotFound(path),
            Errno::ENOTDIR => SourceError::NotADirectory(path),
            Errno::EACCES | Errno::EPERM => SourceError::NotPermitted(path),
            other => SourceError::Io(path, other),
        }
    }
}

impl fmt::Display for SourceError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            SourceError::NotFound(path) => write!(
                f,
                "the source {} does not exist; create it (mkdir) or check the spelling",
                path.display()
            ),
            SourceError::NotADirectory(path) => write!(
                f,
                "the source {} is not a directory; give the directory that holds it",
                path.display()
            ),
            SourceError::NotPermitted(path) => write!(
                f,
                "the source {} may not be read by uid {}; run as its owner or as root",
                path.display(),
                rustix::process::geteuid().as_raw()
            ),
            SourceError::Io(path, errno) => write!(
                f,
                "the source {} cannot be opened: {errno}; check it with `ls`",
                path.display()
            ),
            SourceError::NoFileHandles(path, errno) => write!(
                f,
                "file handles do not work in {}: {errno}; they need CAP_DAC_READ_SEARCH and a \
                 file system that can be exported; use automatic file handles, or turn them off",
                path.display()
            ),
            SourceError::NoProc(errno) => write!(
                f,
                "/proc/self/fd cannot be opened: {errno}; mount it (mount -t proc proc /proc)"
            ),
        }
    }
}

impl std::error::Error for SourceError {}
