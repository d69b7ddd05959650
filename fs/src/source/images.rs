//! Unmounted file systems that lie in an image: a regular file or a block device.

use std::path::Path;
use std::sync::Arc;

use super::Result;

/// An eye on work that takes long.
pub trait Watch: Send + Sync {
    /// `done` of `all` parts of a step are done, such as `reading inodes`. Returns true to end the work: it then fails with
    /// [`Error::Interrupted`](super::Error::Interrupted), and leaves what a power failure at this moment would leave, or
    /// less. Any thread of the work calls it, often.
    fn ends(&self, step: &'static str, done: u64, all: u64) -> bool;
}

/// Looks at nothing, and lets the work come to its end.
#[derive(Clone, Copy, Debug, Default)]
pub struct Unwatched;

impl Watch for Unwatched {
    fn ends(&self, _: &'static str, _: u64, _: u64) -> bool {
        false
    }
}

/// Operations on the images of a kind. The process must have the rights to open them, and nobody else may use
/// them meanwhile.
pub trait Images: Sync {
    /// Opens `image`, to change it if `writes` is set. `None` if it has no file system of this kind; one that is
    /// damaged or of a newer version is one. The path is followed once: the image stays the same whatever
    /// happens to its name. `watch` sees all work on the image.
    ///
    /// # Errors
    ///
    /// [`Error::Failed`](super::Error::Failed) and [`Error::Busy`](super::Error::Busy), if it cannot be opened or
    /// read.
    fn open(
        &self,
        image: &Path,
        writes: bool,
        watch: Arc<dyn Watch>,
    ) -> Result<Option<Box<dyn Image>>>;

    /// Makes an empty file system. A file that does not exist is created, for its owner alone.
    ///
    /// # Errors
    ///
    /// [`Error::Usage`](super::Error::Usage) for a size that is missing, too small or superfluous;
    /// [`Error::Failed`](super::Error::Failed) if `image` has data and [`NewImage::force`] is not set, and for
    /// failures of the system; [`Error::Busy`](super::Error::Busy) if somebody uses it. A file that was
    /// created is then removed.
    fn make(&self, image: &Path, new: &NewImage, watch: &dyn Watch) -> Result<()>;
}

/// An open image. All operations fail with [`Error::Failed`](super::Error::Failed) if it cannot be read, and those
/// that write also if it was not opened for that. They fail with [`Error::Interrupted`](super::Error::Interrupted) if
/// the [`Watch`] ends them.
pub trait Image {
    /// Reads all of a file system but the data of its files, and writes nothing.
    ///
    /// # Errors
    ///
    /// See [`Image`].
    fn check(&self) -> Result<Checked>;

    /// Repairs what [`check`](Image::check) finds, and deletes nothing that can be read. Returns all changes, a
    /// line each; none for an image without damage, which is not written to. May be interrupted, and run again.
    ///
    /// # Errors
    ///
    /// See [`Image`]. Where nobody can know if the newest changes were complete, because parts of them cannot be
    /// read, the error says what they are, and nothing is written unless `newest` decides.
    fn repair(&self, newest: Option<Newest>) -> Result<Vec<String>>;

    /// Makes the file system larger. A power failure leaves the old size or the new one, and all files.
    ///
    /// # Errors
    ///
    /// [`Error::Usage`](super::Error::Usage) for a size that is missing, smaller than that of the file system, or
    /// superfluous; see [`Image`] for others.
    fn grow(&self, growth: &Growth) -> Result<Grown>;

    /// The structures of the file system for people who study it, damaged or not; with `ino` those of one
    /// inode. Writes nothing.
    ///
    /// # Errors
    ///
    /// [`Error::Failed`](super::Error::Failed) if there is no such inode; see [`Image`] for others.
    fn dump(&self, ino: Option<u64>) -> Result<Vec<Table>>;
}

/// The fate of the newest changes in a repair, where nobody can know if they were complete.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Newest {
    /// All that can be read of them stays, as if they had been complete.
    Keep,
    /// They are undone, as if they had not been.
    Undo,
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

/// The wanted size of a file system.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Growth {
    /// Bytes of the file. `None`: those that the file or device has.
    pub size: Option<u64>,
    /// Leave the space of a file to the time when it is used.
    pub sparse: bool,
}

/// The sizes of a file system, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grown {
    /// The size that it had.
    pub before: u64,
    /// The size that it has.
    pub now: u64,
}

/// The findings of [`Image::check`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Checked {
    /// Everything that is wrong, a line each.
    pub problems: Vec<String>,
    /// Figures with their names, such as `("inodes", 12)`. Names in bytes end with `_bytes`.
    pub figures: Vec<(&'static str, u64)>,
}

/// A part of [`Image::dump`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Table {
    /// The name, such as `superblocks`.
    pub name: &'static str,
    /// The names of the columns.
    pub columns: &'static [&'static str],
    /// The rows, each with a cell for each column.
    pub rows: Vec<Vec<Cell>>,
}

/// A cell of a [`Table`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Cell {
    /// A number.
    Number(u64),
    /// Text without control characters.
    Text(String),
}

impl From<u64> for Cell {
    fn from(number: u64) -> Self {
        Cell::Number(number)
    }
}

impl From<u32> for Cell {
    fn from(number: u32) -> Self {
        Cell::Number(number.into())
    }
}

impl From<usize> for Cell {
    fn from(number: usize) -> Self {
        Cell::Number(number as u64)
    }
}

impl From<&str> for Cell {
    fn from(text: &str) -> Self {
        Cell::Text(text.to_owned())
    }
}

impl From<String> for Cell {
    fn from(text: String) -> Self {
        Cell::Text(text)
    }
}
