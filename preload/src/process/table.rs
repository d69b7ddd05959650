//! The descriptors of the process that are files of mounts: a table by number, read without a lock.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicI32, AtomicU8, Ordering};
use std::sync::{Arc, OnceLock};

use arc_swap::{ArcSwapOption, Guard};
use defuse_direct::FileDescription;

use super::opened_by::OpenPath;

/// How many descriptors have their kind noted where one instruction finds it.
pub const KINDS_LEN: usize = 1 << 16;
/// The kind of a descriptor with which the kernel can do nothing.
pub const PLACEHOLDER: u8 = 2;

/// The kind of every descriptor: [`PLACEHOLDER`], or anything else where the kernel has the bytes.
pub static KINDS: [AtomicU8; KINDS_LEN] = [const { AtomicU8::new(0) }; KINDS_LEN];

fn note(fd: i32, kind: u8) {
    if let Some(known) = usize::try_from(fd).ok().and_then(|fd| KINDS.get(fd)) {
        known.store(kind, Ordering::Release);
    }
}

const CHUNK: usize = 256;
const GROUP: usize = 64;
const GROUPS: usize = 64;

/// The open file of a descriptor of the process.
pub struct DescriptorEntry {
    /// The open file.
    file: Arc<FileDescription>,
    /// The descriptor is the file's own bytes (`Opened::backing`): data, positions, locks and
    /// mappings are the kernel's. Otherwise it is a placeholder, with which the kernel can do
    /// nothing.
    pub backed: bool,
    /// The descriptor is the file itself (`defuse_fs::native`): the kernel changes its attributes,
    /// too.
    pub is_file_itself: bool,
    /// The path that it was opened by. The next program after execve(2) and links of
    /// `/proc/self/fd` use it.
    pub opened_by: OpenPath,
    /// The number of the open file in the shared memory.
    pub cells: Option<u32>,
    /// Of a placeholder: the open file of the lower file system (`Opened::lower`). Children inherit
    /// it, and so does the next program, so that it is one in all processes that have this open
    /// file.
    pub lower: Option<Arc<OwnedFd>>,
}

impl DescriptorEntry {
    /// A descriptor of `file`.
    pub fn new(
        file: Arc<FileDescription>,
        backed: bool,
        opened_by: OpenPath,
        cells: Option<u32>,
    ) -> Self {
        let lower = if backed { None } else { file.lower().cloned() };
        let is_file_itself = backed && file.is_backed_by_file_itself();
        DescriptorEntry { file, backed, is_file_itself, opened_by, cells, lower }
    }

    /// The entry with the lower file that the program before has left.
    pub fn with_lower(self, lower: Option<OwnedFd>) -> Self {
        match lower {
            Some(lower) if !self.backed => DescriptorEntry { lower: Some(Arc::new(lower)), ..self },
            _ => self,
        }
    }

    /// True if the kernel has the file open and we know only the inode: the program before opened
    /// it, it is a fifo or device, or it was opened by a link of /proc.
    pub fn is_inode(&self) -> bool {
        self.backed && self.file.is_path()
    }

    /// The open file.
    #[inline]
    pub fn file(&self) -> &Arc<FileDescription> {
        &self.file
    }
}

/// A descriptor's entry, without counting a reference.
pub type EntryGuard = Guard<Option<Arc<DescriptorEntry>>>;

type EntryChunk = Box<[ArcSwapOption<DescriptorEntry>]>;
type EntryGroup = Box<[OnceLock<EntryChunk>]>;

/// The table, in two levels: a program begins with it, and most use the first numbers alone.
pub struct EntryTable {
    groups: Box<[OnceLock<EntryGroup>]>,
    /// One past the largest number that was ever set.
    end: AtomicI32,
}

impl Default for EntryTable {
    fn default() -> Self {
        EntryTable {
            groups: (0..GROUPS).map(|_| OnceLock::new()).collect(),
            end: AtomicI32::new(0),
        }
    }
}

impl EntryTable {
    #[inline]
    fn slot(&self, fd: i32) -> Option<&ArcSwapOption<DescriptorEntry>> {
        let fd = usize::try_from(fd).ok()?;
        let group = self.groups.get(fd / CHUNK / GROUP)?.get()?;
        group.get(fd / CHUNK % GROUP)?.get()?.get(fd % CHUNK)
    }

    /// The entry at `fd`; `None` if the descriptor is no file of a mount.
    #[inline]
    pub fn get(&self, fd: i32) -> Option<EntryGuard> {
        let guard = self.slot(fd)?.load();
        guard.is_some().then_some(guard)
    }

    /// True if `fd` has an entry.
    #[inline]
    pub fn has(&self, fd: i32) -> bool {
        self.get(fd).is_some()
    }

    /// Puts `entry` at `fd`; returns the entry that was there. For a number beyond the table
    /// (1,048,576) the error is `entry`.
    pub fn set(
        &self,
        fd: i32,
        entry: Arc<DescriptorEntry>,
    ) -> Result<Option<Arc<DescriptorEntry>>, Arc<DescriptorEntry>> {
        let place = usize::try_from(fd).ok();
        let group = place.and_then(|place| self.groups.get(place / CHUNK / GROUP));
        let (Some(place), Some(group)) = (place, group) else { return Err(entry) };
        let group = group.get_or_init(|| (0..GROUP).map(|_| OnceLock::new()).collect());
        let make = || (0..CHUNK).map(|_| ArcSwapOption::empty()).collect();
        let slot = &group[place / CHUNK % GROUP].get_or_init(make)[place % CHUNK];
        self.end.fetch_max(fd + 1, Ordering::Relaxed);
        note(fd, if entry.backed { 1 } else { PLACEHOLDER });
        Ok(slot.swap(Some(entry)))
    }

    /// Removes the entry at `fd`.
    pub fn remove(&self, fd: i32) -> Option<Arc<DescriptorEntry>> {
        let slot = self.slot(fd)?;
        if slot.load().is_none() {
            return None;
        }
        note(fd, 0);
        slot.swap(None)
    }

    /// All entries with their numbers.
    pub fn list_entries(&self) -> Vec<(i32, Arc<DescriptorEntry>)> {
        let end = self.end.load(Ordering::Relaxed);
        let entry = |fd| self.get(fd).and_then(|found| found.clone().map(|entry| (fd, entry)));
        (0..end).filter_map(entry).collect()
    }
}
