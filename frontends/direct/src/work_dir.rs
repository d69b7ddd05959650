//! Working directories.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::description::FileDescription;
use crate::mounted_inode::MountedInode;

/// A directory, inside of a mount or outside of all.
#[derive(Clone, Debug)]
pub enum WorkDir {
    /// A directory in a mount. The mount stays in use while this value exists.
    Inside(HeldDirectory),
    /// An absolute path of the kernel's name space.
    Outside(Vec<u8>),
}

/// A directory of a mount, and a reference that keeps the mount in use.
#[derive(Debug)]
pub struct HeldDirectory {
    pub(crate) here: MountedInode,
    /// Keeps the directory open, and so its number valid, if it has no lookup.
    pub(crate) open: Option<Arc<FileDescription>>,
}

impl HeldDirectory {
    pub(crate) fn new(here: MountedInode) -> Self {
        HeldDirectory::with(here, None)
    }

    pub(crate) fn with(here: MountedInode, open: Option<Arc<FileDescription>>) -> Self {
        here.mount.users.fetch_add(1, Ordering::Relaxed);
        HeldDirectory { here, open }
    }
}

impl Clone for HeldDirectory {
    fn clone(&self) -> Self {
        HeldDirectory::with(self.here.clone(), self.open.clone())
    }
}

impl Drop for HeldDirectory {
    fn drop(&mut self) {
        self.here.mount.users.fetch_sub(1, Ordering::Release);
    }
}
