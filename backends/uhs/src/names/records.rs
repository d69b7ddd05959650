//! All inodes, by number and by place, in shards with a lock each.

use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use defuse_fs::{Errno, Result};
use defuse_hugepages::{HugePages, Vec as HugeVec};
use hashbrown::HashTable;

use super::order::RecordId;
use super::record::{ChangingRecord, ExtraTable, InodeRecord, RecordExtra};
use crate::content::BlockPool;

const SHARDS: usize = 64;

/// Records that are allocated at a time.
const CHUNK: usize = 512;

/// Inodes whose numbers have the same remainder.
struct RecordShard {
    /// Places by number.
    by_ino: HashTable<u32, HugePages>,
    /// Chunks never move, and never grow.
    chunks: Vec<HugeVec<Option<InodeRecord>, HugePages>>,
    free: Vec<u32>,
    extras: ExtraTable,
}

/// A shard with its lock, aligned so that it shares no cache line with other shards, which other
/// processors lock.
#[repr(align(64))]
struct RecordShardLock(RwLock<RecordShard>);

pub(super) struct RecordTable {
    shards: [RecordShardLock; SHARDS],
    pool: Arc<BlockPool>,
    /// An odd random number for the hashes of inode numbers.
    key: u64,
}

fn shard_of(ino: u64) -> usize {
    ino as usize % SHARDS
}

impl RecordShard {
    fn new(memory: &HugePages) -> Self {
        let by_ino = HashTable::new_in(memory.clone());
        RecordShard { by_ino, chunks: Vec::new(), free: Vec::new(), extras: ExtraTable::default() }
    }

    /// The record at a place.
    fn get(&self, place: u32) -> Option<(&InodeRecord, Option<&RecordExtra>)> {
        let chunk = self.chunks.get(place as usize / CHUNK)?;
        let record = chunk.get(place as usize % CHUNK)?.as_ref()?;
        let extra = record.has_extra.then(|| self.extras.get(&place)).flatten();
        Some((record, extra.map(|extra| &**extra)))
    }

    fn get_mut(&mut self, place: u32) -> Option<ChangingRecord<'_>> {
        let chunk = self.chunks.get_mut(place as usize / CHUNK)?;
        let record = chunk.get_mut(place as usize % CHUNK)?.as_mut()?;
        Some(ChangingRecord { record, extras: &mut self.extras, at: place })
    }

    fn find_slot(&self, ino: u64, key: u64) -> Option<u32> {
        let same = |place: &u32| self.get(*place).is_some_and(|(record, _)| record.ino == ino);
        self.by_ino.find(hash(ino, key), same).copied()
    }

    fn insert(&mut self, record: InodeRecord, key: u64) -> u32 {
        let ino = record.ino;
        let place = match self.free.pop() {
            Some(place) => {
                self.chunks[place as usize / CHUNK][place as usize % CHUNK] = Some(record);
                place
            }
            None => {
                if self.chunks.last().is_none_or(|chunk| chunk.len() == CHUNK) {
                    let memory = self.by_ino.allocator().clone();
                    self.chunks.push(HugeVec::with_capacity_in(CHUNK, memory));
                }
                let (before, last) = (self.chunks.len() - 1, self.chunks.last_mut());
                let chunk = last.unwrap_or_else(|| unreachable!("one was pushed"));
                chunk.push(Some(record));
                (before * CHUNK + chunk.len() - 1) as u32
            }
        };
        let chunks = &self.chunks;
        let hasher = |place: &u32| {
            let record = &chunks[*place as usize / CHUNK][*place as usize % CHUNK];
            hash(record.as_ref().map_or(0, |record| record.ino), key)
        };
        self.by_ino.insert_unique(hash(ino, key), place, hasher);
        place
    }

    fn remove(&mut self, place: u32, key: u64) -> Option<InodeRecord> {
        let ino = self.get(place)?.0.ino;
        if let Ok(entry) = self.by_ino.find_entry(hash(ino, key), |other| *other == place) {
            entry.remove();
        }
        self.extras.remove(&place);
        self.free.push(place);
        self.chunks[place as usize / CHUNK][place as usize % CHUNK].take()
    }
}

fn hash(ino: u64, key: u64) -> u64 {
    (ino / SHARDS as u64).wrapping_mul(key)
}

impl RecordTable {
    pub(super) fn new(pool: Arc<BlockPool>) -> Self {
        let memory = HugePages::default();
        let shards =
            std::array::from_fn(|_| RecordShardLock(RwLock::new(RecordShard::new(&memory))));
        RecordTable { shards, pool, key: fastrand::u64(..) | 1 }
    }

    fn read(&self, shard: usize) -> RwLockReadGuard<'_, RecordShard> {
        self.shards[shard].0.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self, shard: usize) -> RwLockWriteGuard<'_, RecordShard> {
        self.shards[shard].0.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes room for `count` inodes.
    pub(super) fn reserve(&self, count: usize) {
        for shard in 0..SHARDS {
            self.write(shard).by_ino.reserve(count / SHARDS, |_| 0);
        }
    }

    /// Calls `see` with all inodes.
    pub(super) fn for_each(&self, mut see: impl FnMut(&InodeRecord, Option<&RecordExtra>)) {
        for shard in 0..SHARDS {
            let shard = self.read(shard);
            let places = 0..(shard.chunks.len() * CHUNK) as u32;
            places
                .filter_map(|place| shard.get(place))
                .for_each(|(record, extra)| see(record, extra));
        }
    }

    /// Adds an inode; `None` if there is one with its number.
    pub(super) fn insert_new(&self, record: InodeRecord) -> Option<RecordId> {
        let shard = shard_of(record.ino);
        let mut locked = self.write(shard);
        if locked.find_slot(record.ino, self.key).is_some() {
            return None;
        }
        self.pool.inodes().fetch_add(1, Ordering::Relaxed);
        Some(locked.insert(record, self.key) * SHARDS as u32 + shard as u32)
    }

    pub(super) fn insert(&self, record: InodeRecord) -> RecordId {
        let shard = shard_of(record.ino);
        self.pool.inodes().fetch_add(1, Ordering::Relaxed);
        self.write(shard).insert(record, self.key) * SHARDS as u32 + shard as u32
    }

    /// Adds an inode with an extra.
    pub(super) fn insert_with(
        &self,
        record: InodeRecord,
        extra: Option<Box<RecordExtra>>,
    ) -> RecordId {
        let Some(extra) = extra else { return self.insert(record) };
        let shard = shard_of(record.ino);
        self.pool.inodes().fetch_add(1, Ordering::Relaxed);
        let mut locked = self.write(shard);
        let place = locked.insert(record, self.key);
        locked.extras.insert(place, extra);
        place * SHARDS as u32 + shard as u32
    }

    /// The place of an inode. `ESTALE`.
    pub(super) fn find(&self, ino: u64) -> Result<RecordId> {
        let shard = shard_of(ino);
        let place = self.read(shard).find_slot(ino, self.key).ok_or(Errno::ESTALE)?;
        Ok(place * SHARDS as u32 + shard as u32)
    }

    /// Calls `see` with an inode. `ESTALE`.
    pub(super) fn with_inode<T>(
        &self,
        ino: u64,
        see: impl FnOnce(&InodeRecord, Option<&RecordExtra>) -> Result<T>,
    ) -> Result<T> {
        let shard = self.read(shard_of(ino));
        let place = shard.find_slot(ino, self.key).ok_or(Errno::ESTALE)?;
        let (record, extra) = shard.get(place).ok_or(Errno::ESTALE)?;
        see(record, extra)
    }

    /// Calls `see` with the inode in a place. `ESTALE`.
    pub(super) fn with_record<T>(
        &self,
        rid: RecordId,
        see: impl FnOnce(&InodeRecord, Option<&RecordExtra>) -> Result<T>,
    ) -> Result<T> {
        let shard = self.read(rid as usize % SHARDS);
        let (record, extra) = shard.get(rid / SHARDS as u32).ok_or(Errno::ESTALE)?;
        see(record, extra)
    }

    /// Changes an inode. `ESTALE`.
    pub(super) fn change<T>(
        &self,
        ino: u64,
        change: impl FnOnce(ChangingRecord<'_>) -> Result<T>,
    ) -> Result<T> {
        let mut shard = self.write(shard_of(ino));
        let place = shard.find_slot(ino, self.key).ok_or(Errno::ESTALE)?;
        change(shard.get_mut(place).ok_or(Errno::ESTALE)?)
    }

    /// Changes the inode in a place, and removes it if it is unused then. `ESTALE`.
    pub(super) fn change_at<T>(
        &self,
        rid: RecordId,
        change: impl FnOnce(ChangingRecord<'_>) -> Result<T>,
    ) -> Result<(T, Option<InodeRecord>)> {
        let mut shard = self.write(rid as usize % SHARDS);
        let place = rid / SHARDS as u32;
        let done = change(shard.get_mut(place).ok_or(Errno::ESTALE)?)?;
        Ok((done, self.take_unused(&mut shard, place)))
    }

    /// Removes an unused inode.
    pub(super) fn remove_unused(&self, ino: u64) -> Option<InodeRecord> {
        let mut shard = self.write(shard_of(ino));
        let place = shard.find_slot(ino, self.key)?;
        self.take_unused(&mut shard, place)
    }

    fn take_unused(&self, shard: &mut RecordShard, place: u32) -> Option<InodeRecord> {
        shard.get(place).filter(|(record, _)| record.is_unused())?;
        self.pool.inodes().fetch_sub(1, Ordering::Relaxed);
        shard.remove(place, self.key)
    }
}
