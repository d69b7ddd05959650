//! Types that pass between the adapter and a path file system.

use std::fmt;

use crate::{Attr, Caps, Errno, Fh, FileKind, Result};

/// A path from the root of the file system: a `/`, or components each after a `/`. It has no `.`,
/// `..`, empty component or NUL. Its length is not limited; a backend refuses a path that is too
/// long with `ENAMETOOLONG`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PathRef<'a>(&'a [u8]);

impl<'a> PathRef<'a> {
    /// The root.
    pub const ROOT: PathRef<'static> = PathRef(b"/");

    /// The adapter's paths are valid by construction.
    pub(super) fn from_checked(bytes: &'a [u8]) -> Self {
        debug_assert!(bytes.starts_with(b"/") && (bytes.len() == 1 || !bytes.ends_with(b"/")));
        PathRef(bytes)
    }

    /// The bytes, with the leading `/`.
    pub fn as_bytes(self) -> &'a [u8] {
        self.0
    }

    /// The path as an `OsStr`, with the leading `/`.
    pub fn as_os_str(self) -> &'a std::ffi::OsStr {
        std::os::unix::ffi::OsStrExt::from_bytes(self.0)
    }

    /// The path without its leading `/`, to be joined to a directory. Empty for the root.
    pub fn relative(self) -> &'a std::path::Path {
        let bytes: &std::ffi::OsStr = std::os::unix::ffi::OsStrExt::from_bytes(&self.0[1..]);
        std::path::Path::new(bytes)
    }

    /// The directory and the last component; `None` for the root.
    pub fn split(self) -> Option<(PathRef<'a>, &'a [u8])> {
        let slash = self.0.iter().rposition(|&byte| byte == b'/')?;
        let name = &self.0[slash + 1..];
        let parent = PathRef(&self.0[..slash.max(1)]);
        (!name.is_empty()).then_some((parent, name))
    }
}

impl fmt::Debug for PathRef<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self.as_os_str(), f)
    }
}

/// An open file or directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PathFile<'a> {
    /// Its present path, which may differ from the path at open. `None` with
    /// [`PathCaps::handles_survive_unlink`], unless [`PathCaps::paths_while_named`] is set and the
    /// file has a name.
    pub path: Option<PathRef<'a>>,
    /// The handle that open, create or opendir returned.
    pub fh: Fh,
}

impl<'a> PathFile<'a> {
    /// Returns the path. Fails with `EIO` if there is none, which backends that need paths never
    /// see.
    pub fn path(self) -> Result<PathRef<'a>> {
        self.path.ok_or(Errno::EIO)
    }
}

/// The object of an operation on an inode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PathOperand<'a> {
    /// The object at this path.
    Path(PathRef<'a>),
    /// This open file, which may have no path any more.
    Open(PathFile<'a>),
}

impl<'a> PathOperand<'a> {
    /// Returns the path. Fails with `ESTALE` if there is none.
    pub fn path(self) -> Result<PathRef<'a>> {
        match self {
            PathOperand::Path(path) => Ok(path),
            PathOperand::Open(file) => file.path.ok_or(Errno::ESTALE),
        }
    }

    /// Returns the handle, if any.
    pub fn fh(self) -> Option<Fh> {
        match self {
            PathOperand::Path(_) => None,
            PathOperand::Open(file) => Some(file.fh),
        }
    }
}

/// One entry of a directory. `.` and `..` are optional.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PathDirEntry {
    /// One component.
    pub name: Vec<u8>,
    /// Its type.
    pub kind: FileKind,
    /// `st_ino`, or 0 if unknown.
    pub st_ino: u64,
}

/// The arguments of copy_file_range(2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PathCopy<'a> {
    /// Open for reading.
    pub src: PathFile<'a>,
    /// First byte to read.
    pub src_offset: u64,
    /// Open for writing.
    pub dst: PathFile<'a>,
    /// First byte to write.
    pub dst_offset: u64,
    /// Length in bytes.
    pub length: u64,
    /// Flags of the system call, 0 today.
    pub flags: u64,
}

/// The properties of a path file system.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PathCaps {
    /// The properties for the frontend.
    pub caps: Caps,
    /// [`Attr::st_ino`] identifies a file during its whole life, under all names, and is unique:
    /// names with one number are hard links of one inode. If false, each name is an inode of its
    /// own, with a number from the adapter.
    pub stable_ino: bool,
    /// All operations on an open file work through its handle, even after a rename or unlink: the
    /// adapter passes no path with them. If false, every operation comes with the present path.
    /// When an open file is unlinked, it is kept under the hidden name `.defuse_hidden` with a
    /// number, in the same directory, until it is released.
    pub handles_survive_unlink: bool,
    /// With [`handles_survive_unlink`](Self::handles_survive_unlink): an operation on an open file
    /// comes with the present path nevertheless, while the file has one.
    pub paths_while_named: bool,
    /// Programs see [`Attr::st_ino`] of the backend, although it does not identify a file
    /// ([`stable_ino`](Self::stable_ino)).
    pub shows_st_ino: bool,
    /// The time for which the frontend may cache names.
    pub entry_valid_for: std::time::Duration,
}

impl PathCaps {
    /// The inode that the attributes `attr` belong to.
    pub(super) fn identity(&self, attr: &Attr) -> Option<u64> {
        self.stable_ino.then_some(attr.st_ino)
    }
}
