//! From a directory and a name to the inode, by a keyed hash. The name itself lies in the record of the
//! inode, where a hit is verified.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use hashbrown::HashTable;

use super::order::Rid;

const SHARDS: usize = 64;

/// The hash of a directory and a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Key {
    shard: usize,
    hash: u32,
}

#[derive(Clone, Copy, Debug)]
struct Found {
    hash: u32,
    rid: Rid,
}

#[derive(Default)]
pub(super) struct Part(HashTable<Found>);

/// The index of all names.
pub(super) struct Index {
    shards: [RwLock<Part>; SHARDS],
    keys: RandomState,
}

/// The parts of two names, which may be the same one.
pub(super) struct Two<'a> {
    first: RwLockWriteGuard<'a, Part>,
    second: Option<RwLockWriteGuard<'a, Part>>,
    shard_of_first: usize,
}

impl Index {
    pub(super) fn new() -> Self {
        let shards = std::array::from_fn(|_| RwLock::default());
        Index { shards, keys: RandomState::new() }
    }

    /// Makes room for `count` names.
    pub(super) fn reserve(&self, count: usize) {
        for shard in &self.shards {
            let mut part = shard.write().unwrap_or_else(PoisonError::into_inner);
            part.0.reserve(count / SHARDS, |found| spread(found.hash));
        }
    }

    pub(super) fn key(&self, dir: u64, name: &[u8]) -> Key {
        let mut hasher = self.keys.build_hasher();
        hasher.write_u64(dir);
        hasher.write(name);
        let hash = hasher.finish();
        Key { shard: (hash >> 32) as usize % SHARDS, hash: hash as u32 }
    }

    pub(super) fn read(&self, key: Key) -> RwLockReadGuard<'_, Part> {
        self.shards[key.shard].read().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn write(&self, key: Key) -> RwLockWriteGuard<'_, Part> {
        self.shards[key.shard].write().unwrap_or_else(PoisonError::into_inner)
    }

    /// Locks the parts of two names.
    pub(super) fn write_two(&self, one: Key, other: Key) -> Two<'_> {
        let (low, high) = match one.shard <= other.shard {
            true => (one, other),
            false => (other, one),
        };
        let first = self.write(low);
        let second = (low.shard != high.shard).then(|| self.write(high));
        Two { first, second, shard_of_first: low.shard }
    }
}

impl Two<'_> {
    pub(super) fn part(&mut self, key: Key) -> &mut Part {
        match &mut self.second {
            Some(second) if key.shard != self.shard_of_first => second,
            _ => &mut self.first,
        }
    }
}

/// The table wants 64 bits; those that it looks at come from all 32.
fn spread(hash: u32) -> u64 {
    u64::from(hash).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

impl Part {
    /// The inode for which `verify` holds.
    pub(super) fn find(&self, key: Key, mut verify: impl FnMut(Rid) -> bool) -> Option<Rid> {
        let same = |found: &Found| found.hash == key.hash && verify(found.rid);
        self.0.find(spread(key.hash), same).map(|found| found.rid)
    }

    pub(super) fn insert(&mut self, key: Key, rid: Rid) {
        let found = Found { hash: key.hash, rid };
        self.0.insert_unique(spread(key.hash), found, |found| spread(found.hash));
    }

    /// Takes one entry out: an inode may have two names with the same hash.
    pub(super) fn remove(&mut self, key: Key, rid: Rid) {
        let same = |found: &Found| found.hash == key.hash && found.rid == rid;
        if let Ok(entry) = self.0.find_entry(spread(key.hash), same) {
            entry.remove();
        }
    }
}
