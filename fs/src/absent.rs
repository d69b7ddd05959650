//! The file system of a place where none is.

use crate::{Attr, Context, DirBuf, Entry, Errno, Fh, File, FileSystem, Ino, Name, Result};

/// A file system that has gone, or is not there yet: what every file system has fails with this
/// error, and all the rest is not implemented.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AbsentFileSystem(pub Errno);

impl FileSystem for AbsentFileSystem {
    fn lookup(&self, _: &Context<'_>, _: Ino, _: Name<'_>) -> Result<Entry> {
        Err(self.0)
    }

    fn getattr(&self, _: &Context<'_>, _: Ino, _: Option<Fh>) -> Result<Attr> {
        Err(self.0)
    }

    fn readdir(&self, _: &Context<'_>, _: File, _: u64, _: &mut DirBuf<'_>) -> Result<()> {
        Err(self.0)
    }
}
