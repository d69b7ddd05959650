//! Unmounted file systems that lie in an image: a regular file or a block device.

use std::path::Path;

use super::Result;

/// Operations on the images of a kind. The process must have the rights to open them, and nobody else may use
/// them meanwhile.
pub trait Images: Sync {
    /// True if `image` has a file system of this kind, even one that is damaged or of a newer version.
    ///
    /// # Errors
    ///
    /// [`Error::Failed`](super::Error::Failed) and [`Error::Busy`](super::Error::Busy), if it cannot be read.
    fn recognises(&self, image: &Path) -> Result<bool>;

    /// Makes an empty file system. A file that does not exist is created, for its owner alone.
    ///
    /// # Errors
    ///
    /// [`Error::Usage`](super::Error::Usage) for a size that is missing, too small or superfluous;
    /// [`Error::Failed`](super::Error::Failed) if `image` has data and [`NewImage::force`] is not set, and for
    /// failures of the system; [`Error::Busy`](super::Error::Busy) if somebody uses it. A file that was
    /// created is then removed.
    fn make(&self, image: &Path, new: &NewImage) -> Result<()>;

    /// Reads all of a file system but the data of its files, and writes nothing.
    ///
    /// # Errors
    ///
    /// [`Error::Failed`](super::Error::Failed) and [`Error::Busy`](super::Error::Busy), if it cannot be read.
    fn check(&self, image: &Path) -> Result<Checked>;

    /// Repairs what [`check`](Images::check) finds, and deletes nothing that can be read. Returns all changes, a
    /// line each; none for an image without damage, which is not written to. May be interrupted, and run again.
    ///
    /// # Errors
    ///
    /// [`Error::Failed`](super::Error::Failed) and [`Error::Busy`](super::Error::Busy), if it cannot be read or
    /// written.
    fn repair(&self, image: &Path) -> Result<Vec<String>>;
}

/// The properties of a new file system.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NewImage {
    /// Bytes of the file. `None`: those that the file or device has.
    pub size: Option<u64>,
    /// Leave the space of a file to the time when it is used.
    pub sparse: bool,
    /// Overwrite data that is there.
    pub force: bool,
    /// Permission bits of the root directory.
    pub root_perm: u32,
    /// Owner of the root directory.
    pub root_uid: u32,
    /// Group of the root directory.
    pub root_gid: u32,
}

/// The findings of [`Images::check`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Checked {
    /// Everything that is wrong, a line each.
    pub problems: Vec<String>,
    /// Figures with their names, such as `("inodes", 12)`. Names in bytes end with `_bytes`.
    pub figures: Vec<(&'static str, u64)>,
}
