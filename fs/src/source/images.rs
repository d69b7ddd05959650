//! Unmounted file systems that lie in an image: a regular file or a block device.

use std::path::Path;
use std::sync::Arc;

use super::SourceResult;

/// An eye on work that takes long.
pub trait WorkWatch: Send + Sync {
    /// `done` of `all` parts of a step are done, such as `reading inodes`. Returns true to end the
    /// work: it then fails with
    /// [`SourceOpenError::Interrupted`](super::SourceOpenError::Interrupted), and leaves what a
    /// power failure at this moment would leave, or less. Any thread of the work calls it, often.
    fn report_progress(&self, step: &'static str, done: u64, all: u64) -> bool;
}

/// Looks at nothing, and lets the work come to its end.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoWatch;

impl WorkWatch for NoWatch {
    fn report_progress(&self, _: &'static str, _: u64, _: u64) -> bool {
        false
    }
}

/// Operations on the images of a kind. The process must have the rights to open them, and no other
/// process may use them meanwhile.
pub trait ImageOperations: Sync {
    /// Opens `image`, to change it if `writes` is set. `None` if it has no file system of this
    /// kind; one that is damaged or of a newer version is one. The path is followed once: the image
    /// stays the same whatever happens to its name. `watch` sees all work on the image.
    ///
    /// # Errors
    ///
    /// [`SourceOpenError::Failed`](super::SourceOpenError::Failed) and
    /// [`SourceOpenError::Busy`](super::SourceOpenError::Busy), if it cannot be opened or read.
    fn open(
        &self,
        image: &Path,
        writes: bool,
        watch: Arc<dyn WorkWatch>,
    ) -> SourceResult<Option<Box<dyn SourceImage>>>;

    /// Makes an empty file system. A file that does not exist is created, for its owner alone.
    ///
    /// # Errors
    ///
    /// [`SourceOpenError::Usage`](super::SourceOpenError::Usage) for a size that is missing, too
    /// small or superfluous; [`SourceOpenError::Failed`](super::SourceOpenError::Failed) if `image`
    /// has data and [`NewImage::force`] is not set, and for failures of the system;
    /// [`SourceOpenError::Busy`](super::SourceOpenError::Busy) if a process uses it. A file that
    /// was created is then removed.
    fn make(&self, image: &Path, new: &NewImage, watch: &dyn WorkWatch) -> SourceResult<()>;
}

/// An open image. All operations fail with
/// [`SourceOpenError::Failed`](super::SourceOpenError::Failed) if it cannot be read, and those that
/// write also if it was not opened for that. They fail with
/// [`SourceOpenError::Interrupted`](super::SourceOpenError::Interrupted) if the [`WorkWatch`] ends
/// them.
pub trait SourceImage {
    /// Reads all of a file system but the data of its files, and writes nothing.
    ///
    /// # Errors
    ///
    /// Fails with the errors of [`SourceImage`].
    fn check(&self) -> SourceResult<CheckResult>;

    /// Repairs what [`check`](SourceImage::check) finds, and deletes nothing that can be read.
    /// Returns all changes, a line each; none for an image without damage, which is not written to.
    /// May be interrupted, and run again.
    ///
    /// # Errors
    ///
    /// Fails with the errors of [`SourceImage`]. If unreadable parts make it unknown whether the
    /// newest changes were complete, the error names these changes, and nothing is written unless
    /// `newest` decides.
    fn repair(&self, newest: Option<NewestChanges>) -> SourceResult<Vec<String>>;

    /// Gives the file system the features that a new one has, and that it lacks. Returns their
    /// names; none for a file system that has all, which is not written to. Older programs then
    /// refuse the image. A power failure leaves the old features or the new ones, and all files.
    ///
    /// # Errors
    ///
    /// [`SourceOpenError::Failed`](super::SourceOpenError::Failed) for an image with problems,
    /// which a repair must mend first; see [`SourceImage`] for others.
    fn upgrade(&self) -> SourceResult<Vec<&'static str>>;

    /// Makes the file system larger. A power failure leaves the old size or the new one, and all
    /// files.
    ///
    /// # Errors
    ///
    /// [`SourceOpenError::Usage`](super::SourceOpenError::Usage) for a size that is missing,
    /// smaller than the file system, or superfluous; see [`SourceImage`] for others.
    fn grow(&self, growth: &ImageGrowth) -> SourceResult<GrowthResult>;

    /// The structures of the file system for people who study it, damaged or not; with `ino` the
    /// structures of one inode. Writes nothing.
    ///
    /// # Errors
    ///
    /// [`SourceOpenError::Failed`](super::SourceOpenError::Failed) if there is no such inode; see
    /// [`SourceImage`] for others.
    fn dump(&self, ino: Option<u64>) -> SourceResult<Vec<DumpTable>>;
}

/// The fate of the newest changes in a repair, where it is unknown whether they were complete.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NewestChanges {
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
pub struct ImageGrowth {
    /// Bytes of the file. `None`: those that the file or device has.
    pub size: Option<u64>,
    /// Leave the space of a file to the time when it is used.
    pub sparse: bool,
}

/// The sizes of a file system, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GrowthResult {
    /// The size that it had.
    pub before: u64,
    /// The size that it has.
    pub now: u64,
}

/// The findings of [`SourceImage::check`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CheckResult {
    /// Everything that is wrong, a line each.
    pub problems: Vec<String>,
    /// Figures with their names, such as `("inodes", 12)`. Names in bytes end with `_bytes`.
    pub figures: Vec<(&'static str, u64)>,
}

/// A part of [`SourceImage::dump`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DumpTable {
    /// The name, such as `superblocks`.
    pub name: &'static str,
    /// The names of the columns.
    pub columns: &'static [&'static str],
    /// The rows, each with a cell for each column.
    pub rows: Vec<Vec<DumpCell>>,
}

/// A cell of a [`DumpTable`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DumpCell {
    /// A number.
    Number(u64),
    /// Text without control characters.
    Text(String),
}

impl From<u64> for DumpCell {
    fn from(number: u64) -> Self {
        DumpCell::Number(number)
    }
}

impl From<u32> for DumpCell {
    fn from(number: u32) -> Self {
        DumpCell::Number(number.into())
    }
}

impl From<usize> for DumpCell {
    fn from(number: usize) -> Self {
        DumpCell::Number(number as u64)
    }
}

impl From<&str> for DumpCell {
    fn from(text: &str) -> Self {
        DumpCell::Text(text.to_owned())
    }
}

impl From<String> for DumpCell {
    fn from(text: String) -> Self {
        DumpCell::Text(text)
    }
}
