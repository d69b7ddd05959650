//! The index from a directory and a name to the inode, by a keyed hash. The name itself lies in the
//! record of the inode, where a hit is verified.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use defuse_hugepages::{HugePages, Vec};

use super::order::RecordId;

const SHARDS: usize = 64;

/// Entries of the smallest table.
const SMALLEST: usize = 16;

/// The hash of a directory and a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct NameHash {
    shard: usize,
    hash: u32,
}

impl NameHash {
    /// All bits of the hash, for other tables.
    pub(super) fn all_bits(self) -> u64 {
        let bits = (self.shard as u64) << 32 | u64::from(self.hash);
        bits.wrapping_mul(0x9e37_79b9_7f4a_7c15)
    }
}

/// A table with linear probing: an entry of 8 bytes lies at the place of its hash or shortly after,
/// so that a search usually reads one line of the cache. At least a quarter of the places is empty.
pub(super) struct IndexTable {
    /// None, or a power of two.
    places: Vec<IndexEntry, HugePages>,
    used: usize,
}

/// Nothing, or the hash of a name with the place of its inode.
#[derive(Clone, Copy, PartialEq, Eq)]
struct IndexEntry(u64);

impl IndexEntry {
    const EMPTY: IndexEntry = IndexEntry(0);

    /// No inode has the place `RecordId::MAX`, so that the lower half is not 0.
    fn new(hash: u32, rid: RecordId) -> IndexEntry {
        IndexEntry(u64::from(hash) << 32 | (u64::from(rid) + 1))
    }

    fn hash(self) -> u32 {
        (self.0 >> 32) as u32
    }

    fn rid(self) -> RecordId {
        (self.0 as u32).wrapping_sub(1)
    }
}

/// The index of all names.
pub(super) struct NameIndex {
    shards: [IndexShard; SHARDS],
    keys: RandomState,
}

/// A shard with its lock, aligned so that it shares no cache line with other shards, which other
/// processors lock.
#[repr(align(64))]
struct IndexShard(RwLock<IndexTable>);

/// The locked shards of two names, which may be one shard.
pub(super) struct IndexTablePair<'a> {
    first: RwLockWriteGuard<'a, IndexTable>,
    second: Option<RwLockWriteGuard<'a, IndexTable>>,
    shard_of_first: usize,
}

impl NameIndex {
    pub(super) fn new() -> Self {
        let memory = HugePages::default();
        let shards = std::array::from_fn(|_| IndexShard(RwLock::new(IndexTable::new(&memory))));
        NameIndex { shards, keys: RandomState::new() }
    }

    /// Reserves room for `count` names.
    pub(super) fn reserve(&self, count: usize) {
        for shard in &self.shards {
            let mut part = shard.0.write().unwrap_or_else(PoisonError::into_inner);
            part.reserve(count / SHARDS);
        }
    }

    pub(super) fn key(&self, dir: u64, name: &[u8]) -> NameHash {
        let mut hasher = self.keys.build_hasher();
        hasher.write_u64(dir);
        hasher.write(name);
        let hash = hasher.finish();
        NameHash { shard: (hash >> 32) as usize % SHARDS, hash: hash as u32 }
    }

    pub(super) fn read(&self, key: NameHash) -> RwLockReadGuard<'_, IndexTable> {
        self.shards[key.shard].0.read().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn write(&self, key: NameHash) -> RwLockWriteGuard<'_, IndexTable> {
        self.shards[key.shard].0.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// Locks the shards of two names.
    pub(super) fn write_two(&self, one: NameHash, other: NameHash) -> IndexTablePair<'_> {
        let (low, high) = match one.shard <= other.shard {
            true => (one, other),
            false => (other, one),
        };
        let first = self.write(low);
        let second = (low.shard != high.shard).then(|| self.write(high));
        IndexTablePair { first, second, shard_of_first: low.shard }
    }
}

impl IndexTablePair<'_> {
    pub(super) fn part(&mut self, key: NameHash) -> &mut IndexTable {
        match &mut self.second {
            Some(second) if key.shard != self.shard_of_first => second,
            _ => &mut self.first,
        }
    }
}

impl IndexTable {
    fn new(memory: &HugePages) -> Self {
        IndexTable { places: Vec::new_in(memory.clone()), used: 0 }
    }

    /// Returns the inode that `verify` accepts.
    pub(super) fn find(
        &self,
        key: NameHash,
        mut verify: impl FnMut(RecordId) -> bool,
    ) -> Option<RecordId> {
        let same = |place: IndexEntry| place.hash() == key.hash && verify(place.rid());
        self.search(key.hash, same).map(|at| self.places[at].rid())
    }

    pub(super) fn insert(&mut self, key: NameHash, rid: RecordId) {
        self.reserve(1);
        self.used += 1;
        self.insert_entry(IndexEntry::new(key.hash, rid));
    }

    /// Removes one entry: an inode may have two names with the same hash.
    pub(super) fn remove(&mut self, key: NameHash, rid: RecordId) {
        let gone = IndexEntry::new(key.hash, rid);
        let Some(mut gap) = self.search(key.hash, |place| place == gone) else { return };
        self.used -= 1;
        // Entries behind the gap move into it, unless the gap is before the place of their hashes.
        let mask = self.places.len() - 1;
        let mut at = gap;
        loop {
            at = (at + 1) & mask;
            let place = self.places[at];
            if place == IndexEntry::EMPTY {
                break;
            }
            let distance = at.wrapping_sub(self.home(place.hash())) & mask;
            if distance >= at.wrapping_sub(gap) & mask {
                self.places[gap] = place;
                gap = at;
            }
        }
        self.places[gap] = IndexEntry::EMPTY;
    }

    /// Makes room for `more` entries.
    fn reserve(&mut self, more: usize) {
        let least = (self.used + more) * 4 / 3 + 1;
        if least <= self.places.len() {
            return;
        }
        let mut empty = Vec::new_in(self.places.allocator().clone());
        empty.resize(least.next_power_of_two().max(SMALLEST), IndexEntry::EMPTY);
        let full = std::mem::replace(&mut self.places, empty);
        full.into_iter()
            .filter(|place| *place != IndexEntry::EMPTY)
            .for_each(|place| self.insert_entry(place));
    }

    fn insert_entry(&mut self, place: IndexEntry) {
        let mask = self.places.len() - 1;
        let mut at = self.home(place.hash());
        while self.places[at] != IndexEntry::EMPTY {
            at = (at + 1) & mask;
        }
        self.places[at] = place;
    }

    /// The place of the first entry for which `same` holds, searched from the place of `hash` on.
    fn search(&self, hash: u32, mut same: impl FnMut(IndexEntry) -> bool) -> Option<usize> {
        let mask = self.places.len().checked_sub(1)?;
        let mut at = self.home(hash);
        loop {
            match self.places[at] {
                IndexEntry::EMPTY => return None,
                place if same(place) => return Some(at),
                _ => at = (at + 1) & mask,
            }
        }
    }

    /// The place for a hash. All its bits decide.
    fn home(&self, hash: u32) -> usize {
        let spread = u64::from(hash).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        (spread >> 32) as usize & (self.places.len() - 1)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    /// Few hashes, so that entries crowd, also around the end of the table.
    #[test]
    fn a_part_finds_what_was_inserted_and_not_removed() {
        let mut random = fastrand::Rng::with_seed(11);
        let (mut part, mut model) = (IndexTable::new(&HugePages::default()), BTreeSet::new());
        for round in 0..20_000 {
            let (hash, rid) = (random.u32(..12) << 20, random.u32(..6));
            let key = NameHash { shard: 0, hash };
            let found = part.find(key, |other| other == rid);
            assert_eq!(found.is_some(), model.contains(&(hash, rid)), "round {round}");
            match found {
                Some(_) => {
                    part.remove(key, rid);
                    model.remove(&(hash, rid));
                }
                None => {
                    part.insert(key, rid);
                    model.insert((hash, rid));
                }
            }
            assert_eq!(part.used, model.len());
            let mut all = BTreeSet::new();
            for hash in 0..12 {
                let key = NameHash { shard: 0, hash: hash << 20 };
                part.find(key, |rid| !all.insert((hash << 20, rid)));
            }
            assert_eq!(all, model, "round {round}");
        }
    }

    #[test]
    fn a_quarter_of_a_part_is_empty_and_the_last_inode_has_a_place() {
        let mut part = IndexTable::new(&HugePages::default());
        part.reserve(1000);
        let room = part.places.len();
        for rid in (RecordId::MAX - 1000)..RecordId::MAX {
            let key = NameHash { shard: 0, hash: rid.wrapping_mul(77) };
            part.insert(key, rid);
            assert_eq!(part.find(key, |other| other == rid), Some(rid));
        }
        assert_eq!(part.places.len(), room, "there was room for so many");
        (0..5000).for_each(|rid| part.insert(NameHash { shard: 0, hash: rid }, rid));
        assert!(part.used * 4 <= part.places.len() * 3);
    }
}
