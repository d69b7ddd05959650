//! Versions of names and attributes: the server alone writes them, and clients compare them instead
//! of repeating requests.
//!
//! A change adds to the version of each item that it changes before it begins and after it has
//! ended. So a reader that finds a version unchanged knows that no change of the item has begun
//! since. Items of one kind may share a version: a change of one then looks like a change of
//! another, which costs a request and is never wrong.

use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering;

use rustix::io::{Errno, Result};

use crate::MappedMemory;
use crate::published::{PublishedMemory, ReadableMemory, WritableMemory};

/// The first word of the memory: "defuseV2".
const MAGIC: u64 = u64::from_le_bytes(*b"defuseV2");
/// `u64`: the version of everything. Each change adds to it once.
const AT_ALL: usize = 64;
/// `u64`: 1 after the end of the server.
const AT_ENDED: usize = 128;
/// Versions of attributes, 8 bytes each. Inodes that were made one after the other have
/// neighbouring ones.
const AT_ATTRIBUTES: usize = 4096;
/// The number of versions of attributes, a power of two.
const ATTRIBUTES: usize = 1 << 18;
/// Versions of rights.
const AT_RIGHTS: usize = AT_ATTRIBUTES + 8 * ATTRIBUTES;
/// The number of versions of rights, a power of two.
const RIGHTS: usize = 1 << 16;
/// Versions of names.
const AT_NAMES: usize = AT_RIGHTS + 8 * RIGHTS;
/// The number of versions of names, a power of two.
const NAMES: usize = 1 << 18;
/// Bytes of the memory, of which only used pages take room.
pub const BYTES: usize = AT_NAMES + 8 * NAMES;

const _: () = assert!(ATTRIBUTES.is_power_of_two() && RIGHTS.is_power_of_two());
const _: () = assert!(NAMES.is_power_of_two() && AT_ENDED + 8 <= AT_ATTRIBUTES);

/// The lowest bits of a version: the number of changes that have begun and not ended.
const RUNNING: u64 = (1 << 16) - 1;
/// The addend at the end of a change: one more change, and one fewer in progress.
const ENDED: u64 = RUNNING;
// One addition counts the change and ends it.
const _: () = assert!(1 + ENDED == RUNNING + 1);

/// An item with a version.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VersionedItem<'a> {
    /// The attributes of an inode.
    Attributes(u64),
    /// Its mode, owner, group and access list.
    Rights(u64),
    /// A name in a directory: its existence, and its inode.
    Name(u64, &'a [u8]),
}

impl VersionedItem<'_> {
    /// Returns the position of its version.
    fn position(self) -> usize {
        let fold = |ino: u64| (ino ^ ino >> 18 ^ ino >> 36) as usize;
        match self {
            VersionedItem::Attributes(ino) => AT_ATTRIBUTES + 8 * (fold(ino) % ATTRIBUTES),
            VersionedItem::Rights(ino) => AT_RIGHTS + 8 * (fold(ino) % RIGHTS),
            VersionedItem::Name(dir, name) => AT_NAMES + 8 * (hash(dir, name) as usize % NAMES),
        }
    }
}

fn mix(hash: u64, word: u64) -> u64 {
    let hash = (hash ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    hash ^ hash >> 32
}

/// The hash of a directory.
pub(crate) fn hash_of_dir(dir: u64) -> u64 {
    mix(0, dir)
}

/// The hash of a name in a directory.
pub(crate) fn hash(dir: u64, name: &[u8]) -> u64 {
    let mut hash = mix(hash_of_dir(dir), name.len() as u64);
    for piece in name.chunks(8) {
        let mut word = [0; 8];
        word[..piece.len()].copy_from_slice(piece);
        hash = mix(hash, u64::from_le_bytes(word));
    }
    hash
}

/// The server's side.
pub struct VersionWriter<M: WritableMemory = PublishedMemory>(M);

/// A client's side.
pub struct VersionReader<M = MappedMemory>(M);

impl VersionWriter {
    /// Versions of a file system in which no change runs.
    ///
    /// # Errors
    ///
    /// The errors of memfd_create(2), ftruncate(2) and mmap(2).
    pub fn new() -> Result<VersionWriter> {
        PublishedMemory::new(BYTES, MAGIC).map(VersionWriter)
    }

    /// A descriptor to read the memory, for [`VersionReader::from_fd`].
    ///
    /// # Errors
    ///
    /// The errors of open(2) in /proc.
    pub fn reader(&self) -> Result<OwnedFd> {
        self.0.reader()
    }
}

impl<M: WritableMemory> VersionWriter<M> {
    /// Versions in this memory of [`BYTES`].
    pub fn from_memory(memory: M) -> VersionWriter<M> {
        VersionWriter(memory)
    }

    /// The number of changes that have ended.
    pub fn changes(&self) -> u64 {
        self.0.load64(AT_ALL) / (RUNNING + 1)
    }

    /// Returns the same value as [`VersionReader::global_version`].
    pub fn global_version(&self) -> Option<u64> {
        read_stable(&self.0, AT_ALL)
    }

    /// Returns the same value as [`VersionReader::version_of`].
    pub fn version_of(&self, thing: VersionedItem<'_>) -> Option<u64> {
        read_stable(&self.0, thing.position())
    }

    /// Records that a change of these items begins. Call [`end`](VersionWriter::end) for the same
    /// items.
    pub fn begin<'a>(&self, things: impl Iterator<Item = VersionedItem<'a>>) {
        self.0.add64(AT_ALL, 1);
        things.for_each(|thing| self.0.add64(thing.position(), 1));
        // The versions are visible before any part of the change.
        self.0.fence(Ordering::SeqCst);
    }

    /// Records that a change has ended. Call it before the reply to the change.
    pub fn end<'a>(&self, things: impl Iterator<Item = VersionedItem<'a>>) {
        things.for_each(|thing| self.0.add64(thing.position(), ENDED));
        self.0.add64(AT_ALL, ENDED);
    }
}

impl<M: WritableMemory> Drop for VersionWriter<M> {
    fn drop(&mut self) {
        // Changes are no longer published.
        self.0.store64(AT_ENDED, 1);
    }
}

impl VersionReader {
    /// The versions in the memory of a server.
    ///
    /// # Errors
    ///
    /// `EINVAL` where it has another format, or could be made shorter.
    pub fn from_fd(fd: OwnedFd) -> Result<VersionReader> {
        let memory = MappedMemory::map_to_read(fd, BYTES)?;
        let mut magic = [0; 8];
        if memory.len() == BYTES {
            memory.copy(0, &mut magic);
        }
        if magic == MAGIC.to_ne_bytes() { Ok(VersionReader(memory)) } else { Err(Errno::INVAL) }
    }

    /// The version of everything after one more change than at `all`.
    pub fn version_after_one(all: u64) -> u64 {
        all.wrapping_add(RUNNING + 1)
    }
}

impl<M: ReadableMemory> VersionReader<M> {
    /// The versions in this memory.
    pub fn from_memory(memory: M) -> VersionReader<M> {
        VersionReader(memory)
    }

    /// The version of everything; `None` while a change runs, and after the end of the server.
    pub fn global_version(&self) -> Option<u64> {
        read_stable(&self.0, AT_ALL)
    }

    /// Returns the version of an item; `None` while the item changes, and after the end of the
    /// server.
    pub fn version_of(&self, thing: VersionedItem<'_>) -> Option<u64> {
        read_stable(&self.0, thing.position())
    }
}

/// The version at `at`, unless a change runs or the server has ended.
fn read_stable(memory: &impl ReadableMemory, at: usize) -> Option<u64> {
    let version = memory.load64(at);
    (version & RUNNING == 0 && memory.load64(AT_ENDED) == 0).then_some(version)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::WRITABLE;

    fn make_both() -> (VersionWriter, VersionReader) {
        let versions = VersionWriter::new().unwrap();
        let reader = VersionReader::from_fd(versions.reader().unwrap()).unwrap();
        (versions, reader)
    }

    #[test]
    fn a_change_is_seen_while_it_runs_and_afterwards() {
        let (versions, reader) = make_both();
        let (name, other) = (VersionedItem::Name(1, b"name"), VersionedItem::Name(1, b"other"));
        let before = [name, other].map(|thing| reader.version_of(thing));
        let all = reader.global_version().unwrap();
        versions.begin([name].into_iter());
        assert_eq!((reader.version_of(name), reader.global_version()), (None, None));
        assert_eq!(reader.version_of(other), before[1]);
        versions.begin([name, VersionedItem::Attributes(1)].into_iter());
        versions.end([name].into_iter());
        assert_eq!(reader.version_of(name), None, "the other change still runs");
        versions.end([name, VersionedItem::Attributes(1)].into_iter());
        assert!(reader.version_of(name).is_some_and(|now| Some(now) != before[0]));
        let two = VersionReader::version_after_one(VersionReader::version_after_one(all));
        assert_eq!((reader.global_version(), versions.changes()), (Some(two), 2));
    }

    #[test]
    fn nothing_is_known_after_the_end_of_the_server() {
        let (versions, reader) = make_both();
        assert!(
            reader.global_version().is_some()
                && reader.version_of(VersionedItem::Rights(1)).is_some()
        );
        drop(versions);
        assert_eq!(
            (reader.global_version(), reader.version_of(VersionedItem::Rights(1))),
            (None, None)
        );
    }

    #[test]
    fn few_things_share_a_version() {
        let names: Vec<_> = (0..1000).map(|number| format!("file-{number}.txt")).collect();
        let mut places: Vec<_> =
            names.iter().map(|name| VersionedItem::Name(7, name.as_bytes()).position()).collect();
        places.extend((0..1000).flat_map(|ino| {
            [VersionedItem::Attributes(ino).position(), VersionedItem::Rights(ino).position()]
        }));
        assert!(places.iter().all(|at| at + 8 <= BYTES && at % 8 == 0));
        places.sort_unstable();
        places.dedup();
        assert!(places.len() > 2900, "{} places", places.len());
    }

    /// A client that could write would make others believe that nothing has changed.
    #[test]
    fn a_client_can_neither_write_nor_shorten_the_versions() {
        let (versions, _reader) = make_both();
        let fd = versions.reader().unwrap();
        assert_eq!(rustix::io::pwrite(&fd, &[1], 0), Err(Errno::BADF));
        assert!(rustix::fs::ftruncate(&fd, 0).is_err());
        assert_eq!(rustix::fs::fstat(&fd).unwrap().st_mode & 0o777, 0o400);
        assert!(MappedMemory::map(&fd, BYTES, WRITABLE).is_err(), "a mapping for writing");
    }

    #[test]
    fn memory_with_another_format_is_refused() {
        let (_, fd) = MappedMemory::new().unwrap();
        assert!(VersionReader::from_fd(fd).is_err());
        let (_, fd) = MappedMemory::create_sealed(64).unwrap();
        assert!(VersionReader::from_fd(fd).is_err());
    }
}
