//! The inodes known to frontends, by number and by identity in the lower file system.

use std::hash::{BuildHasher, Hash, RandomState};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

use arc_swap::ArcSwapOption;
use defuse_fs::{Errno, FileKind, Ino, Result};
use hashbrown::HashTable;

use crate::handle::CompactHandle;
use crate::lease::Lease;
use crate::tables::inode_names::InodeNames;
use crate::tables::slab::{GenerationSlab, SHARDS, SlabIndex};

/// The identity of an inode in the lower file systems.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct InodeKey {
    /// `stx_ino`.
    pub(crate) ino: u64,
    /// Birth time in nanoseconds, or a hash of the file handle without birth times. It
    /// distinguishes most successive inodes of the same number (`identity.rs`).
    pub(crate) birth: u64,
    /// Index into the table of mounts.
    pub(crate) mount: u32,
}

/// The way back to an inode that has no descriptor of its own.
pub(crate) enum ReopenMethod {
    Handle(CompactHandle),
    /// The names that are recorded.
    Names,
    /// This descriptor of an open file, which becomes the pin.
    OpenFile(Arc<OwnedFd>),
}

impl ReopenMethod {
    fn handle(&self) -> Option<&CompactHandle> {
        match self {
            ReopenMethod::Handle(handle) => Some(handle),
            ReopenMethod::Names | ReopenMethod::OpenFile(_) => None,
        }
    }
}

/// An inode known to a frontend.
pub(crate) struct LowerInode {
    /// The inode number that frontends use.
    pub(crate) number: u64,
    pub(crate) key: InodeKey,
    lookups: AtomicU64,
    /// The last slot of this inode in the descriptor cache, as a hint.
    pub(crate) cache_slot: AtomicU32,
    pub(crate) kind: FileKind,
    /// The file had no `security.capability` when last checked. The kernel reads the attribute at
    /// the first write after every change of attributes.
    pub(crate) without_capability: Lease,
    /// A descriptor that stays open while nothing else leads to the inode: for the root, for an
    /// inode without names (no handle finds it any more), and for an inode with neither a handle
    /// nor a known name. The descriptor of an open file, if a program has that file open by its
    /// name (`by_open_file.rs`).
    pub(crate) pin: ArcSwapOption<OwnedFd>,
    /// The pin is the descriptor of an open file.
    pub(crate) has_borrowed_pin: AtomicBool,
    pub(crate) handle: Option<CompactHandle>,
    /// The names by which it is found again without a handle.
    pub(crate) places: Option<Box<InodeNames>>,
    /// No later inode can have `key`; see `identity.rs`.
    key_is_unique: AtomicBool,
    /// Its numbers do not change again; see `tables/watches.rs`.
    pub(crate) has_final_numbers: AtomicBool,
}

impl LowerInode {
    pub(crate) fn is_pinned(&self) -> bool {
        self.pin.load().is_some()
    }

    /// True if its key leads to no other inode, because no later inode can have the key, or the
    /// inode is open.
    pub(crate) fn has_unique_key(&self) -> bool {
        self.key_stays_unique() || self.is_pinned()
    }

    /// True if its key leads to no other inode even when it is gone.
    pub(crate) fn key_stays_unique(&self) -> bool {
        self.key_is_unique.load(Ordering::Relaxed)
    }

    /// From now on no other inode can have its key.
    pub(crate) fn set_unique_key(&self) {
        self.key_is_unique.store(true, Ordering::Relaxed);
    }

    /// True if `handle` is a handle of another inode.
    fn differs_from(&self, handle: Option<&CompactHandle>) -> bool {
        matches!((&self.handle, handle), (Some(own), Some(other)) if own != other)
    }

    /// Puts `other` in the place of the pin, if that is `fd`.
    pub(crate) fn change_pin(&self, fd: Arc<OwnedFd>, other: Arc<OwnedFd>) {
        self.pin.compare_and_swap(&Some(fd), Some(other));
    }

    /// Sets the pin. Returns false if there is one already.
    fn set_pin(&self, fd: Arc<OwnedFd>) -> bool {
        self.pin.compare_and_swap(&None::<Arc<OwnedFd>>, Some(fd)).is_none()
    }

    pub(crate) fn ino(&self) -> Ino {
        Ino(self.number)
    }

    pub(crate) fn root(key: InodeKey, way: ReopenMethod, fd: OwnedFd) -> Self {
        let mut root = LowerInode::new(key, FileKind::Directory, way, Some(fd));
        root.number = Ino::ROOT.0;
        root
    }

    fn new(key: InodeKey, kind: FileKind, way: ReopenMethod, pin: Option<OwnedFd>) -> Self {
        let (handle, places, borrowed) = match way {
            ReopenMethod::Handle(handle) => (Some(handle), None, None),
            ReopenMethod::Names => (None, Some(Box::default()), None),
            ReopenMethod::OpenFile(fd) => (None, None, Some(fd)),
        };
        let has_borrowed_pin = AtomicBool::new(borrowed.is_some());
        LowerInode {
            number: 0,
            key,
            lookups: AtomicU64::new(0),
            cache_slot: AtomicU32::new(u32::MAX),
            kind,
            without_capability: Lease::default(),
            pin: ArcSwapOption::from(borrowed.or(pin.map(Arc::new))),
            has_borrowed_pin,
            places,
            handle,
            key_is_unique: AtomicBool::new(true),
            has_final_numbers: AtomicBool::new(false),
        }
    }
}

/// All inodes known to frontends. The shard is chosen by identity and is part of the number, so
/// that both kinds of lookup take the lock of one shard. The lock is shared, except for the first
/// lookup and the last forget of an inode.
pub(crate) struct InodeTable {
    shards: Box<[RwLock<InodeTableShard>]>,
    hasher: RandomState,
    root: Arc<LowerInode>,
    pinned: AtomicUsize,
    /// Number of inodes that are no directories.
    files: AtomicUsize,
}

struct InodeTableShard {
    slab: GenerationSlab<LowerInode>,
    /// Slots of the slab, by hash of their keys.
    by_key: HashTable<u32>,
}

impl InodeTableShard {
    fn unhash(&mut self, hash: u64, slot: u32) {
        if let Ok(entry) = self.by_key.find_entry(hash, |found| *found == slot) {
            entry.remove();
        }
    }
}

/// An inode that was found in a lower file system.
pub(crate) struct FoundInode {
    pub(crate) key: InodeKey,
    pub(crate) kind: FileKind,
    pub(crate) way: ReopenMethod,
    pub(crate) pin: Option<OwnedFd>,
    /// No later inode can have `key`.
    pub(crate) key_is_unique: bool,
}

impl InodeTable {
    pub(crate) fn new(root: LowerInode) -> Self {
        let shard = || {
            RwLock::new(InodeTableShard { slab: GenerationSlab::new(), by_key: HashTable::new() })
        };
        InodeTable {
            shards: (0..SHARDS).map(|_| shard()).collect(),
            hasher: RandomState::new(),
            root: Arc::new(root),
            pinned: AtomicUsize::new(1),
            files: AtomicUsize::new(0),
        }
    }

    pub(crate) fn root(&self) -> &Arc<LowerInode> {
        &self.root
    }

    /// The inode with this number. Fails with `ESTALE` if it was forgotten.
    pub(crate) fn get(&self, ino: Ino) -> Result<Arc<LowerInode>> {
        if ino == Ino::ROOT {
            return Ok(Arc::clone(&self.root));
        }
        let place = SlabIndex::from_number(ino.0);
        self.read(place.shard).slab.get(place).cloned().ok_or(Errno::ESTALE)
    }

    /// The inode with this identity. Does not count a lookup.
    pub(crate) fn peek(&self, key: &InodeKey) -> Option<Arc<LowerInode>> {
        if *key == self.root.key {
            return Some(Arc::clone(&self.root));
        }
        let (hash, index) = self.place(key);
        find(&self.read(index), hash, key).cloned()
    }

    /// Counts a lookup of the inode with this identity, if it is known and no other inode can have
    /// the identity.
    pub(crate) fn acquire(&self, key: &InodeKey) -> Option<Ino> {
        if *key == self.root.key {
            return Some(Ino::ROOT);
        }
        let (hash, index) = self.place(key);
        let shard = self.read(index);
        let inode = find(&shard, hash, key).filter(|inode| inode.has_unique_key())?;
        // The shared lock is enough: `forget` removes inodes with a count of 0 under the exclusive
        // lock.
        inode.lookups.fetch_add(1, Ordering::Relaxed);
        Some(inode.ino())
    }

    /// Counts a lookup of the inode with this number, if it is known.
    pub(crate) fn acquire_number(&self, ino: Ino) -> Option<Ino> {
        if ino != Ino::ROOT {
            let place = SlabIndex::from_number(ino.0);
            let shard = self.read(place.shard);
            // Under the shared lock, as in `acquire`.
            shard.slab.get(place)?.lookups.fetch_add(1, Ordering::Relaxed);
        }
        Some(ino)
    }

    /// Adds an inode with a lookup count of one, or counts one more lookup of the existing inode.
    /// True if it is new.
    pub(crate) fn insert(&self, new: FoundInode) -> Result<(Ino, bool)> {
        let FoundInode { key, kind, way, pin, key_is_unique } = new;
        if key == self.root.key {
            return Ok((Ino::ROOT, false));
        }
        let (hash, index) = self.place(&key);
        let mut guard = self.write(index);
        let shard = &mut *guard;
        let known = find(shard, hash, &key).cloned();
        if let Some(known) = known.as_ref().filter(|known| !known.differs_from(way.handle())) {
            known.lookups.fetch_add(1, Ordering::Relaxed);
            if key_is_unique {
                known.set_unique_key();
            }
            let ino = known.ino();
            let mut needless = pin;
            if !known.is_pinned()
                && let Some(fd) = needless.take()
                && known.set_pin(Arc::new(fd))
            {
                self.pinned.fetch_add(1, Ordering::Relaxed);
            }
            // Closes the unneeded descriptor outside of the lock.
            drop(guard);
            drop(needless);
            return Ok((ino, false));
        }
        if let Some(predecessor) = known {
            shard.unhash(hash, SlabIndex::from_number(predecessor.number).slot);
        }
        let mut inode = LowerInode::new(key, kind, way, pin);
        inode.key_is_unique = AtomicBool::new(key_is_unique);
        let pinned = usize::from(inode.is_pinned());
        let InodeTableShard { slab, by_key } = shard;
        let (slot, inode) = slab
            .insert(index, |number| {
                inode.number = number;
                inode.lookups = AtomicU64::new(1);
                Arc::new(inode)
            })
            .ok_or(Errno::ENFILE)?;
        let hash_of =
            |slot: &u32| slab.get_used(*slot).map_or(0, |inode| self.hasher.hash_one(inode.key));
        by_key.insert_unique(hash, slot, hash_of);
        self.pinned.fetch_add(pinned, Ordering::Relaxed);
        if kind != FileKind::Directory {
            self.files.fetch_add(1, Ordering::Relaxed);
        }
        Ok((inode.ino(), true))
    }

    /// Decreases the lookup count. Returns the inode if it reached 0.
    pub(crate) fn forget(&self, ino: Ino, lookups: u64) -> Option<Arc<LowerInode>> {
        if ino == Ino::ROOT {
            return None;
        }
        let place = SlabIndex::from_number(ino.0);
        {
            let shard = self.read(place.shard);
            let count = &shard.slab.get(place)?.lookups;
            let less = |count: u64| Some(count.saturating_sub(lookups));
            let before = count.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less);
            if before.is_ok_and(|before| before > lookups) {
                return None;
            }
        }
        let mut guard = self.write(place.shard);
        let inode = guard.slab.get(place)?;
        // The inode was looked up again between the two locks.
        if inode.lookups.load(Ordering::Relaxed) > 0 {
            return None;
        }
        let hash = self.hasher.hash_one(inode.key);
        guard.unhash(hash, place.slot);
        let inode = guard.slab.remove(place)?;
        if inode.is_pinned() {
            self.pinned.fetch_sub(1, Ordering::Relaxed);
        }
        if inode.kind != FileKind::Directory {
            self.files.fetch_sub(1, Ordering::Relaxed);
        }
        Some(inode)
    }

    /// Removes the identity of `inode`, which is gone, so that a successor can have it. Its number
    /// stays valid until it is forgotten.
    pub(crate) fn unhash(&self, inode: &LowerInode) {
        let place = SlabIndex::from_number(inode.number);
        if inode.ino() != Ino::ROOT {
            let hash = self.hasher.hash_one(inode.key);
            self.write(place.shard).unhash(hash, place.slot);
        }
    }

    /// Pins `fd` until the inode is forgotten or [`unpin`](InodeTable::unpin)ned.
    pub(crate) fn pin(&self, inode: &LowerInode, fd: Arc<OwnedFd>) {
        // Under the lock of the shard and only while the inode is in the table, so that `forget`
        // counts every pin that it removes.
        let place = SlabIndex::from_number(inode.number);
        let shard = self.read(place.shard);
        if shard.slab.get(place).is_some() && inode.set_pin(fd) {
            self.pinned.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Releases the pin of an inode that its handle can find.
    pub(crate) fn unpin(&self, inode: &LowerInode) {
        let place = SlabIndex::from_number(inode.number);
        let shard = self.read(place.shard);
        if shard.slab.get(place).is_some() && inode.pin.swap(None).is_some() {
            self.pinned.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// All inodes known to frontends.
    pub(crate) fn list_all(&self) -> Vec<Arc<LowerInode>> {
        let shards = (0..SHARDS).flat_map(|index| {
            let shard = self.read(index);
            shard.slab.values().cloned().collect::<Vec<_>>()
        });
        shards.collect()
    }

    /// True if a frontend knows an inode that is no directory.
    pub(crate) fn has_files(&self) -> bool {
        self.files.load(Ordering::Relaxed) > 0
    }

    /// Number of pins.
    pub(crate) fn pin_count(&self) -> usize {
        self.pinned.load(Ordering::Relaxed)
    }

    /// Number of inodes including the root, and their memory in bytes.
    pub(crate) fn size(&self) -> (usize, usize) {
        const ARC_COUNTS: usize = 2 * size_of::<usize>();
        let (mut count, mut bytes) = (1, 0);
        for index in 0..SHARDS {
            let shard = self.read(index);
            count += shard.slab.len();
            bytes += shard.slab.memory_bytes() + shard.by_key.allocation_size();
            bytes += shard.slab.len() * (size_of::<LowerInode>() + ARC_COUNTS);
            let handles = shard.slab.values().filter_map(|inode| inode.handle.as_ref());
            bytes += handles.map(CompactHandle::heap_bytes).sum::<usize>();
        }
        (count, bytes)
    }

    fn place(&self, key: &InodeKey) -> (u64, usize) {
        let hash = self.hasher.hash_one(key);
        // The table of a shard uses the low and the topmost bits of the hash.
        (hash, (hash >> 40) as usize % SHARDS)
    }

    fn read(&self, shard: usize) -> std::sync::RwLockReadGuard<'_, InodeTableShard> {
        self.shards[shard].read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self, shard: usize) -> std::sync::RwLockWriteGuard<'_, InodeTableShard> {
        self.shards[shard].write().unwrap_or_else(PoisonError::into_inner)
    }
}

fn find<'a>(shard: &'a InodeTableShard, hash: u64, key: &InodeKey) -> Option<&'a Arc<LowerInode>> {
    let same = |slot: &u32| shard.slab.get_used(*slot).is_some_and(|inode| inode.key == *key);
    shard.by_key.find(hash, same).and_then(|slot| shard.slab.get_used(*slot))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table() -> InodeTable {
        let fd = std::fs::File::open("/").unwrap().into();
        InodeTable::new(LowerInode::root(key(0), ReopenMethod::Names, fd))
    }

    fn key(ino: u64) -> InodeKey {
        InodeKey { ino, birth: 7, mount: 0 }
    }

    fn make_found(ino: u64, way: ReopenMethod) -> FoundInode {
        let kind = FileKind::Regular;
        FoundInode { key: key(ino), kind, way, pin: None, key_is_unique: true }
    }

    #[test]
    fn an_inode_stays_until_its_last_lookup_is_given_back() {
        let table = table();
        let (ino, _) = table.insert(make_found(2, ReopenMethod::Names)).unwrap();
        let again = table.insert(make_found(2, ReopenMethod::Names));
        assert_eq!(again, Ok((ino, false)));
        assert_eq!(table.acquire(&key(2)), Some(ino));
        assert!(table.forget(ino, 2).is_none());
        assert!(table.get(ino).is_ok());
        assert!(table.forget(ino, 1).is_some());
        assert_eq!(table.get(ino).err(), Some(Errno::ESTALE));
        assert_eq!(table.acquire(&key(2)), None);
        assert!(table.forget(ino, 1).is_none(), "too many forgets are ignored");
    }

    #[test]
    fn a_successor_with_the_same_key_is_another_inode() {
        let table = table();
        let way = |generation| {
            ReopenMethod::Handle(CompactHandle::new(1, &[2, 0, 0, 0, generation, 0, 0, 0]))
        };
        let young =
            |generation| FoundInode { key_is_unique: false, ..make_found(2, way(generation)) };
        let (old, _) = table.insert(young(1)).unwrap();
        assert_eq!(table.acquire(&key(2)), None, "the key may lead to a successor");
        assert_eq!(table.insert(young(1)), Ok((old, false)));
        let (new, is_new) = table.insert(make_found(2, way(2))).unwrap();
        assert!(is_new && new != old);
        assert_eq!(table.acquire(&key(2)), Some(new));
        assert!(table.get(old).is_ok(), "it stays valid until it is forgotten");
        assert!(table.forget(old, 2).is_some());
        assert_eq!(table.acquire(&key(2)), Some(new), "the successor keeps its key");
    }

    #[test]
    fn an_inode_takes_less_than_150_bytes() {
        let table = table();
        for ino in 1..100_000 {
            let way = ReopenMethod::Handle(CompactHandle::new(1, &[0; 12]));
            table.insert(make_found(ino, way)).unwrap();
        }
        let (count, bytes) = table.size();
        assert_eq!(count, 100_000);
        assert!(bytes / count < 150, "{} bytes", bytes / count);
    }
}
