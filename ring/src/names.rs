//! Names that a server has published: clients with the same rights read them instead of making a
//! request.
//!
//! A name has the versions at its publication, so that a reader sees what has changed since
//! ([`versions`](crate::versions)). It lies in one of the eight slots of a set: a set near the
//! other names of its directory, so that these share pages, or if that is full, one of two other
//! sets. The tags of a set, parts of the hashes of its names, show the slot of a name. A slot has a
//! number that is odd while it is written.

use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustix::io::{Errno, Result};
use rustix::time::{ClockId, clock_gettime};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::MappedMemory;
use crate::published::{PublishedMemory, ReadableMemory, WritableMemory};
use crate::versions::{hash, hash_of_dir};

/// The first word of the memory: "defuseN1".
const MAGIC: u64 = u64::from_le_bytes(*b"defuseN1");
/// The tags, `u32` each; 0 for an empty slot.
const AT_TAGS: usize = 4096;
/// The slots.
const AT_SLOTS: usize = AT_TAGS + 4 * SLOTS;
/// The number of slots: as many names can be there.
pub const SLOTS: usize = 1 << 16;
/// Slots of a set.
const WAYS: usize = 8;
const SETS: usize = SLOTS / WAYS;
/// The near sets of a directory.
const NEAR: usize = 8;
/// Bytes of the memory, of which only used pages take room.
pub const BYTES: usize = AT_SLOTS + SLOTS * size_of::<NameSlot>();
/// Bytes of the attributes, which are opaque to this crate.
pub const ATTRIBUTES: usize = 104;
/// The longest name. A longer name is not published.
pub const NAME_MAX: usize = 88;
/// Locks of the server. Sets share them.
const LOCKS: usize = 64;

/// A slot as it lies in the memory.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct NameSlot {
    /// Odd while the slot is written, 0 if it never was.
    sequence: u64,
    dir: u64,
    name_len: u32,
    open_to_all: u32,
    ino: u64,
    stamps: NameVersions,
    attributes: [u8; ATTRIBUTES],
    name: [u8; NAME_MAX],
}

const _: () = assert!(size_of::<NameSlot>() == 256);
/// The directory in a slot.
const AT_DIR: usize = std::mem::offset_of!(NameSlot, dir);
/// The inode in a slot.
const AT_INO: usize = std::mem::offset_of!(NameSlot, ino);
/// The position of the attribute stamp in a slot. The attributes follow.
const AT_MOMENT: usize =
    std::mem::offset_of!(NameSlot, stamps) + std::mem::offset_of!(NameVersions, attributes);
const _: () =
    assert!(AT_MOMENT + size_of::<AttributeStamp>() == std::mem::offset_of!(NameSlot, attributes));

/// The versions at the publication of a name.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub struct NameVersions {
    /// The version of the name.
    pub name: u64,
    /// The version of the rights to its directory.
    pub rights: u64,
    /// The version and the time of the attributes.
    pub attributes: AttributeStamp,
}

/// The version and the time at the publication of attributes.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub struct AttributeStamp {
    /// The version of the attributes.
    pub version: u64,
    /// The time, in nanoseconds of `CLOCK_MONOTONIC_COARSE`.
    pub at: u64,
}

impl AttributeStamp {
    /// Returns the stamp of attributes of this version that are published now.
    pub fn now(version: u64) -> AttributeStamp {
        AttributeStamp { version, at: now_ns() }
    }

    /// Returns the time since then. If the clock of another namespace is ahead, the result is a
    /// long time.
    pub fn age(&self) -> Duration {
        Duration::from_nanos(now_ns().wrapping_sub(self.at))
    }
}

fn now_ns() -> u64 {
    let now = clock_gettime(ClockId::MonotonicCoarse);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// A name in the memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FoundName {
    /// The versions at its publication.
    pub stamps: NameVersions,
    /// True if every user may search its directory.
    pub open_to_all: bool,
    /// The inode and its attributes; `None` if the name does not exist.
    pub inode: Option<(u64, [u8; ATTRIBUTES])>,
}

/// A name that leads to an inode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ResolvedName {
    /// The directory.
    pub dir: u64,
    /// The versions at its publication.
    pub stamps: NameVersions,
    name: [u8; NAME_MAX],
    len: usize,
}

impl ResolvedName {
    /// The name.
    pub fn name(&self) -> &[u8] {
        &self.name[..self.len.min(NAME_MAX)]
    }
}

/// The number of a slot.
pub type SlotNumber = u32;

/// The server's side.
pub struct NameWriter<M: WritableMemory = PublishedMemory> {
    memory: M,
    /// Each for sets of its own.
    locks: [Mutex<()>; LOCKS],
}

/// A client's side.
pub struct NameReader<M = MappedMemory>(M);

/// The places for a name.
struct NameSets {
    /// A set near other names of its directory, and two other sets.
    all: [usize; 3],
    hash: u64,
}

impl NameSets {
    fn for_name(dir: u64, name: &[u8]) -> NameSets {
        let hash = hash(dir, name);
        let near = hash_of_dir(dir) as usize % (SETS / NEAR) * NEAR;
        // The versions are placed by other bits.
        let others = [(hash >> 18) as usize % SETS, (hash >> 31) as usize % SETS];
        NameSets { all: [near + (hash >> 16) as usize % NEAR, others[0], others[1]], hash }
    }

    fn tag(&self) -> u32 {
        (self.hash >> 32) as u32 | 1
    }

    /// Returns the first result of `look` in a slot that may have a name with this tag.
    fn find_first_tagged<T>(
        &self,
        memory: &impl ReadableMemory,
        tag: u32,
        mut look: impl FnMut(usize) -> Option<T>,
    ) -> Option<T> {
        for set in self.all {
            for slot in slots_of(set) {
                if memory.load32(tag_at(slot)) == tag
                    && let Some(found) = look(slot)
                {
                    return Some(found);
                }
            }
        }
        None
    }

    /// Returns the slot of another name, if all are full.
    fn choose_victim(&self) -> usize {
        self.all[1] * WAYS + (self.hash >> 44) as usize % WAYS
    }
}

fn slots_of(set: usize) -> Range<usize> {
    set * WAYS..(set + 1) * WAYS
}

fn tag_at(slot: usize) -> usize {
    AT_TAGS + 4 * slot
}

fn slot_at(slot: usize) -> usize {
    AT_SLOTS + slot * size_of::<NameSlot>()
}

fn read(memory: &impl ReadableMemory, slot: usize) -> NameSlot {
    let mut bytes = [0; size_of::<NameSlot>()];
    memory.copy(slot_at(slot), &mut bytes);
    zerocopy::transmute!(bytes)
}

impl NameWriter {
    /// Memory without a name.
    ///
    /// # Errors
    ///
    /// The errors of memfd_create(2), ftruncate(2) and mmap(2).
    pub fn new() -> Result<NameWriter> {
        PublishedMemory::new(BYTES, MAGIC).map(NameWriter::from_memory)
    }

    /// A descriptor to read the memory, for [`NameReader::from_fd`].
    ///
    /// # Errors
    ///
    /// The errors of open(2) in /proc.
    pub fn reader(&self) -> Result<OwnedFd> {
        self.memory.reader()
    }
}

impl<M: WritableMemory> NameWriter<M> {
    /// Names in this memory of [`BYTES`], all zero.
    pub fn from_memory(memory: M) -> NameWriter<M> {
        NameWriter { memory, locks: std::array::from_fn(|_| Mutex::default()) }
    }

    fn lock(&self, of: usize) -> MutexGuard<'_, ()> {
        self.locks[of].lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Publishes a name in `dir`, in place of its earlier publication or of another name. Returns
    /// the slot, and the inode that was there; 0 if there was none.
    ///
    /// # Panics
    ///
    /// If the name is longer than [`NAME_MAX`].
    pub fn publish(&self, dir: u64, name: &[u8], found: &FoundName) -> (SlotNumber, u64) {
        let sets = NameSets::for_name(dir, name);
        let mut of = sets.all.map(|set| set % LOCKS);
        of.sort_unstable();
        let _first = self.lock(of[0]);
        let _second = (of[1] != of[0]).then(|| self.lock(of[1]));
        let _third = (of[2] != of[1]).then(|| self.lock(of[2]));
        let (memory, tag) = (&self.memory, sets.tag());
        let is_known = |slot| read(memory, slot).is_of(dir, name).then_some(slot);
        let known = sets.find_first_tagged(memory, tag, is_known);
        let free = || sets.find_first_tagged(memory, 0, Some);
        let slot = known.or_else(free).unwrap_or_else(|| sets.choose_victim());
        let (ino, attributes) = found.inode.unwrap_or((0, [0; ATTRIBUTES]));
        let mut padded = [0; NAME_MAX];
        padded[..name.len()].copy_from_slice(name);
        let stamps = NameSlot {
            sequence: 0,
            dir,
            name_len: name.len() as u32,
            open_to_all: found.open_to_all.into(),
            ino,
            stamps: found.stamps,
            attributes,
            name: padded,
        };
        let former = memory.load64(slot_at(slot) + AT_INO);
        self.write(slot, AT_DIR, &stamps.as_bytes()[AT_DIR..]);
        memory.store32(tag_at(slot), tag);
        (slot as SlotNumber, former)
    }

    /// Returns the name in a slot, as it was published. `None` if the slot has another name by now.
    pub fn get(&self, place: SlotNumber, ino: u64) -> Option<ResolvedName> {
        let slot = place as usize;
        let _alone = self.lock(slot / WAYS % LOCKS);
        let NameSlot { dir, name_len, ino: found, stamps, name, .. } = read(&self.memory, slot);
        (found == ino).then_some(ResolvedName { dir, stamps, name, len: name_len as usize })
    }

    /// Publishes new attributes of an inode, in the slot of a name that was published before and
    /// leads to it.
    pub fn publish_attributes(
        &self,
        place: SlotNumber,
        ino: u64,
        stamps: AttributeStamp,
        attributes: &[u8; ATTRIBUTES],
    ) {
        let slot = place as usize;
        let _alone = self.lock(slot / WAYS % LOCKS);
        if self.memory.load64(slot_at(slot) + AT_INO) == ino {
            let mut bytes = [0; size_of::<AttributeStamp>() + ATTRIBUTES];
            let (moment, rest) = bytes.split_at_mut(size_of::<AttributeStamp>());
            moment.copy_from_slice(stamps.as_bytes());
            rest.copy_from_slice(attributes);
            self.write(slot, AT_MOMENT, &bytes);
        }
    }

    /// Writes a part of a slot, of which the caller has the lock.
    fn write(&self, slot: usize, from: usize, bytes: &[u8]) {
        let at = slot_at(slot);
        let sequence = self.memory.load64(at);
        self.memory.store64(at, sequence + 1);
        // The odd number is visible before any part of the change.
        self.memory.fence(Ordering::Release);
        self.memory.put(at + from, bytes);
        self.memory.store64(at, sequence + 2);
    }
}

impl NameSlot {
    fn is_of(&self, dir: u64, name: &[u8]) -> bool {
        self.dir == dir && self.name.get(..self.name_len as usize) == Some(name)
    }
}

impl NameReader {
    /// The names in the memory of a server.
    ///
    /// # Errors
    ///
    /// `EINVAL` where it has another format, or could be made shorter.
    pub fn from_fd(fd: OwnedFd) -> Result<NameReader> {
        let memory = MappedMemory::map_to_read(fd, BYTES)?;
        let is_known = memory.len() == BYTES && memory.load64(0) == MAGIC;
        if is_known { Ok(NameReader(memory)) } else { Err(Errno::INVAL) }
    }
}

impl<M: ReadableMemory> NameReader<M> {
    /// The names in this memory.
    pub fn from_memory(memory: M) -> NameReader<M> {
        NameReader(memory)
    }

    /// Finds the latest publication of a name in `dir`. `None` if there is none, or if it changes
    /// at this moment.
    pub fn find(&self, dir: u64, name: &[u8]) -> Option<FoundName> {
        let sets = NameSets::for_name(dir, name);
        let found = sets.find_first_tagged(&self.0, sets.tag(), |place| {
            let sequence = self.0.load64(slot_at(place));
            let slot = read(&self.0, place);
            // The copy is complete before the number is read again.
            self.0.fence(Ordering::Acquire);
            let is_whole = sequence.is_multiple_of(2) && self.0.load64(slot_at(place)) == sequence;
            (is_whole && slot.is_of(dir, name)).then_some(slot)
        })?;
        let inode = (found.ino != 0).then_some((found.ino, found.attributes));
        Some(FoundName { stamps: found.stamps, open_to_all: found.open_to_all != 0, inode })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn make_both() -> (NameWriter, NameReader) {
        let names = NameWriter::new().unwrap();
        let reader = NameReader::from_fd(names.reader().unwrap()).unwrap();
        (names, reader)
    }

    fn make_found(ino: u64, at: u64) -> FoundName {
        let stamps =
            NameVersions { name: 1, rights: 2, attributes: AttributeStamp { version: 3, at } };
        FoundName { stamps, open_to_all: true, inode: Some((ino, [ino as u8; ATTRIBUTES])) }
    }

    #[test]
    fn a_name_is_found_as_it_was_told_last() {
        let (names, reader) = make_both();
        let long = [b'x'; NAME_MAX];
        assert_eq!(reader.find(1, b"name"), None);
        let (place, former) = names.publish(1, b"name", &make_found(7, 1));
        assert_eq!((former, names.publish(1, &long, &make_found(9, 1)).1), (0, 0));
        assert_eq!(reader.find(1, b"name"), Some(make_found(7, 1)));
        assert_eq!(reader.find(1, &long), Some(make_found(9, 1)));
        assert_eq!((reader.find(2, b"name"), reader.find(1, b"nam")), (None, None));
        let missing = FoundName { inode: None, open_to_all: false, ..make_found(0, 2) };
        assert_eq!(names.publish(1, b"name", &missing), (place, 7));
        assert_eq!(reader.find(1, b"name"), Some(missing));
        // The attributes of an inode that no longer exists.
        names.publish_attributes(place, 7, AttributeStamp::default(), &[9; ATTRIBUTES]);
        assert_eq!(reader.find(1, b"name"), Some(missing));
        let (place, _) = names.publish(1, b"name", &make_found(8, 2));
        let new = AttributeStamp { version: 4, at: 3 };
        names.publish_attributes(place, 8, new, &[9; ATTRIBUTES]);
        let stamps = NameVersions { attributes: new, ..make_found(8, 2).stamps };
        let inode = Some((8, [9; ATTRIBUTES]));
        assert_eq!(reader.find(1, b"name"), Some(FoundName { stamps, inode, open_to_all: true }));
    }

    #[test]
    fn names_that_find_no_room_take_that_of_others_and_the_server_learns_of_their_inodes() {
        let (names, reader) = make_both();
        let texts: Vec<_> = (0..100_000_u64).map(|number| number.to_string()).collect();
        let mut left: Vec<_> = (1..)
            .zip(&texts)
            .map(|(ino, text)| names.publish(1, text.as_bytes(), &make_found(ino, ino)).1)
            .filter(|left| *left != 0)
            .collect();
        left.sort_unstable();
        let gone = (1..).zip(&texts).filter(|(_, text)| reader.find(1, text.as_bytes()).is_none());
        assert_eq!(left, gone.map(|(ino, _)| ino).collect::<Vec<_>>());
        assert!(left.len() < 45_000, "{} names", left.len());
    }

    #[test]
    fn most_names_of_a_large_tree_have_room() {
        let (names, reader) = make_both();
        let all: Vec<_> = (0..20_000_u64).map(|n| (n / 20, format!("file-{n}.txt"))).collect();
        for (dir, text) in &all {
            names.publish(*dir, text.as_bytes(), &make_found(dir + 1, 1));
        }
        let near = |(dir, text): &&(u64, String)| {
            let sets = NameSets::for_name(*dir, text.as_bytes());
            let is_near = |slot| (slot / WAYS == sets.all[0]).then_some(());
            sets.find_first_tagged(&names.memory, sets.tag(), is_near).is_some()
        };
        assert!(all.iter().filter(near).count() > 16_000, "most are near the others");
        let there = all.iter().filter(|(dir, text)| reader.find(*dir, text.as_bytes()).is_some());
        assert!(there.count() > 19_980);
    }

    /// A reader meets the old name or the new one, and never a part of each.
    #[test]
    fn a_name_that_is_told_meanwhile_is_whole() {
        let (names, reader) = make_both();
        names.publish(1, b"name", &make_found(2, 1));
        std::thread::scope(|scope| {
            let writer = scope.spawn(|| {
                for round in 0..100_000_u64 {
                    names.publish(1, b"name", &make_found(round % 200 + 1, round));
                }
            });
            while !writer.is_finished() {
                if let Some(FoundName { inode: Some((ino, bytes)), stamps, .. }) =
                    reader.find(1, b"name")
                {
                    assert_eq!(bytes, [ino as u8; ATTRIBUTES]);
                    assert_eq!((stamps.attributes.at % 200 + 1 == ino, stamps.name), (true, 1));
                }
            }
        });
    }

    #[test]
    fn a_client_can_neither_write_nor_shorten_the_names() {
        let (names, _reader) = make_both();
        let fd = names.reader().unwrap();
        assert_eq!(rustix::io::pwrite(&fd, &[1], 0), Err(Errno::BADF));
        assert!(rustix::fs::ftruncate(&fd, 0).is_err());
        assert_eq!(rustix::fs::fstat(&fd).unwrap().st_mode & 0o777, 0o400);
        let (_, other) = MappedMemory::create_sealed(BYTES).unwrap();
        assert!(NameReader::from_fd(other).is_err(), "no magic number");
    }
}
