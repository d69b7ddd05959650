//! A cache of directories by their paths: so a whole path takes two probes, here and in the index
//! of names, and no lock of a directory that all paths have in common.
//!
//! An entry records the directory to which a path led. It holds as long as no directory is moved or
//! removed, or gets other permissions: each such change begins a new *epoch*, and touches no entry.
//! Entries are written and read without a lock (`PathSlot`). Paths are known by 128 bits of two
//! keyed hashes, whose keys are secret.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::OnceLock;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicU64, fence};

/// Places for paths, 64 bytes each.
const PLACES: usize = 4096;

/// The increment of the epoch for a change of directories that runs.
const RUNNING: u64 = 1;

/// The next epoch.
const NEXT: u64 = 1 << 16;

/// The directory to which a path without its last name led.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PathDirectory {
    pub(super) ino: u64,
    /// Everyone may search it, and all directories on the way.
    pub(super) open_to_all: bool,
}

/// Directories by paths.
#[derive(Default)]
pub(super) struct PathCache {
    epoch: DirectoryEpoch,
    places: OnceLock<Box<[PathSlot]>>,
    keys: [RandomState; 2],
}

/// The number of the epoch, and the number of running changes, which is less than [`NEXT`].
#[derive(Default)]
#[repr(align(64))]
struct DirectoryEpoch(AtomicU64);

/// A path during an epoch.
#[derive(Clone, Copy)]
pub(super) struct PathKey {
    epoch: u64,
    hash: [u64; 2],
}

/// A place for one path. Its number grows with each use, and is odd during a write: a reader that
/// finds it even and unchanged has read the values of one write.
#[derive(Default)]
#[repr(align(64))]
struct PathSlot {
    number: AtomicU64,
    epoch: AtomicU64,
    hash: [AtomicU64; 2],
    /// The number of the inode, and the lowest bit for `open_to_all`.
    led_to: AtomicU64,
}

/// A change of a directory. The cache answers no lookup until the change ends.
pub(super) struct DirectoryChange<'a>(&'a DirectoryEpoch);

impl Drop for DirectoryChange<'_> {
    fn drop(&mut self) {
        self.0.0.fetch_add(NEXT - RUNNING, AcqRel);
    }
}

impl PathCache {
    /// Begins a change of the directories to which paths lead, or of the permission to search a
    /// directory.
    pub(super) fn change(&self) -> DirectoryChange<'_> {
        self.epoch.0.fetch_add(RUNNING, AcqRel);
        DirectoryChange(&self.epoch)
    }

    /// The key of `path` from the directory `from`; `None` while directories change.
    pub(super) fn key(&self, from: u64, path: &[u8]) -> Option<PathKey> {
        let epoch = self.epoch.0.load(Acquire);
        let hash = |keys: &RandomState| {
            let mut hasher = keys.build_hasher();
            hasher.write_u64(from);
            hasher.write(path);
            hasher.finish()
        };
        epoch.is_multiple_of(NEXT).then(|| PathKey { epoch, hash: self.keys.each_ref().map(hash) })
    }

    /// The directory to which the path leads, if it is known.
    pub(super) fn find(&self, key: PathKey) -> Option<PathDirectory> {
        let (first, second) = self.find_places(key);
        first.read(key).or_else(|| second.read(key))
    }

    /// Records the directory to which the path led. The caller has walked the path since it made
    /// the key.
    pub(super) fn note(&self, key: PathKey, found: PathDirectory) {
        let (first, second) = self.find_places(key);
        // Two paths that share their first place both stay.
        let is_current = |place: &PathSlot| place.epoch.load(Relaxed) == key.epoch;
        let place = if is_current(first) && !is_current(second) { second } else { first };
        place.write(key, found);
    }

    fn find_places(&self, key: PathKey) -> (&PathSlot, &PathSlot) {
        let places = self.places.get_or_init(|| (0..PLACES).map(|_| PathSlot::default()).collect());
        let at = key.hash[0] as usize % PLACES;
        (&places[at], &places[at ^ 1])
    }
}

impl PathSlot {
    fn read(&self, key: PathKey) -> Option<PathDirectory> {
        let number = self.number.load(Acquire);
        let epoch = self.epoch.load(Relaxed);
        let hash = self.hash.each_ref().map(|half| half.load(Relaxed));
        let led_to = self.led_to.load(Relaxed);
        fence(Acquire);
        let is_whole = number.is_multiple_of(2) && self.number.load(Relaxed) == number;
        let is_that = epoch == key.epoch && hash == key.hash && led_to != 0;
        (is_whole && is_that)
            .then_some(PathDirectory { ino: led_to >> 1, open_to_all: led_to & 1 == 1 })
    }

    /// Writes the entry, or does nothing while another thread writes.
    fn write(&self, key: PathKey, found: PathDirectory) {
        let number = self.number.load(Relaxed);
        let writing = number | 1;
        if writing == number
            || self.number.compare_exchange(number, writing, Acquire, Relaxed).is_err()
        {
            return;
        }
        fence(Release);
        self.epoch.store(key.epoch, Relaxed);
        for (place, half) in self.hash.iter().zip(key.hash) {
            place.store(half, Relaxed);
        }
        self.led_to.store(found.ino << 1 | u64::from(found.open_to_all), Relaxed);
        self.number.store(number.wrapping_add(2), Release);
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    fn directory(ino: u64) -> PathDirectory {
        PathDirectory { ino, open_to_all: !ino.is_multiple_of(3) }
    }

    #[test]
    fn a_path_is_known_until_a_directory_changes() {
        let paths = PathCache::default();
        let key = |path: &str| paths.key(1, path.as_bytes());
        for (ino, path) in (10..).zip(["a/b", "a/c", ""]) {
            let key = key(path).unwrap();
            assert_eq!(paths.find(key), None);
            paths.note(key, directory(ino));
            assert_eq!(paths.find(key), Some(directory(ino)));
        }
        assert_eq!(paths.find(paths.key(2, b"a/b").unwrap()), None, "from another directory");
        let before = key("a/b").unwrap();
        let change = paths.change();
        assert!(key("a/b").is_none(), "nobody knows while directories change");
        let further = paths.change();
        drop(change);
        assert!(key("a/b").is_none());
        drop(further);
        let after = key("a/b").unwrap();
        assert_eq!(paths.find(after), None);
        // A walk that began before the change.
        paths.note(before, directory(10));
        assert_eq!(paths.find(after), None);
    }

    /// Two threads write matching values, others read them.
    #[test]
    fn nobody_reads_halves_of_two_entries() {
        const ROUNDS: u64 = 200_000;
        let place = PathSlot::default();
        let key = |ino: u64| PathKey { epoch: 0, hash: [ino, !ino] };
        thread::scope(|scope| {
            for writer in 0..2 {
                let place = &place;
                scope.spawn(move || {
                    for round in 0..ROUNDS {
                        let ino = 1 + (2 * round + writer) % 4;
                        place.write(key(ino), directory(ino));
                    }
                });
            }
            for round in 0..ROUNDS {
                let ino = 1 + round % 4;
                let found = place.read(key(ino));
                assert!(found.is_none_or(|found| found == directory(ino)), "{found:?}");
            }
        });
        let left = (1..=4).filter(|ino| place.read(key(*ino)).is_some());
        assert_eq!(left.count(), 1, "what was written last");
    }
}
