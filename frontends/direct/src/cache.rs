//! The cache of names: positive and negative entries, bounded and divided into shards.

use std::array;
use std::hash::{BuildHasher, RandomState};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock, RwLockWriteGuard};

use defuse_fs::Ino;
use hashbrown::HashTable;

use crate::lifetime::{AnswerValidity, CallMoment, ChangeTracker};
use crate::node::CachedInode;
use crate::prefix_cache::{DirectoryHold, PrefixCache};

const SHARDS: usize = 16;

/// The result of a cached lookup.
pub(crate) enum CachedLookup {
    /// The name leads to this inode.
    Node(Arc<CachedInode>),
    /// The name does not exist.
    Missing,
}

/// The version of a shard before a lookup. [`DentryCache::keep`] needs it to detect removals since then.
#[derive(Clone, Copy)]
pub(crate) struct LookupTicket {
    version: u64,
    /// The moment in the file system.
    pub(crate) moment: CallMoment,
}

struct Dentry {
    parent: Ino,
    name: Box<[u8]>,
    node: Option<Arc<CachedInode>>,
    lasts: AnswerValidity<u64>,
    /// Set when the entry is found; cleared by a sweep.
    used: AtomicBool,
}

#[derive(Default)]
struct DentryShard {
    table: RwLock<HashTable<Dentry>>,
    /// Increased by every removal, under the lock of the table.
    version: AtomicU64,
}

/// The cache of one mount.
pub(crate) struct DentryCache {
    shards: [DentryShard; SHARDS],
    hasher: RandomState,
    per_shard: usize,
    fresh: ChangeTracker,
    pub(crate) passed: PrefixCache,
}

impl DentryCache {
    /// Creates a cache of at most `limit` names, whose lifetime `fresh` decides, and the lifetime of directories
    /// `holds`.
    pub(crate) fn new(limit: usize, fresh: ChangeTracker, holds: Option<DirectoryHold>) -> Self {
        let shards = array::from_fn(|_| DentryShard::default());
        let per_shard = limit.div_ceil(SHARDS);
        let passed = PrefixCache::new(holds);
        DentryCache { shards, hasher: RandomState::new(), per_shard, fresh, passed }
    }

    fn hash(&self, parent: Ino, name: &[u8]) -> u64 {
        self.hasher.hash_one((parent.0, name))
    }

    fn shard(&self, hash: u64) -> &DentryShard {
        &self.shards[(hash >> 57) as usize % SHARDS]
    }

    /// True if the cache keeps nothing.
    pub(crate) fn is_off(&self) -> bool {
        self.per_shard == 0
    }

    /// Looks up a name in the cache.
    pub(crate) fn get(&self, parent: Ino, name: &[u8]) -> Option<CachedLookup> {
        let hash = self.hash(parent, name);
        let table = self.shard(hash).table.read().unwrap_or_else(PoisonError::into_inner);
        let found = table.find(hash, |dentry| dentry.parent == parent && *dentry.name == *name)?;
        if !self.fresh.has_name(found.lasts, parent, name) {
            return None;
        }
        if !found.used.load(Ordering::Relaxed) {
            found.used.store(true, Ordering::Relaxed);
        }
        Some(match &found.node {
            Some(node) => CachedLookup::Node(Arc::clone(node)),
            None => CachedLookup::Missing,
        })
    }

    /// Takes a ticket. Call this before the lookup whose answer is [kept](DentryCache::keep).
    pub(crate) fn ticket(&self, parent: Ino, name: &[u8]) -> LookupTicket {
        let version = self.shard(self.hash(parent, name)).version.load(Ordering::Acquire);
        LookupTicket { version, moment: self.fresh.current_moment() }
    }

    /// Caches an answer. If the shard has had a removal since the ticket was taken, the answer may be
    /// outdated and is not cached.
    pub(crate) fn keep(
        &self,
        ticket: LookupTicket,
        (parent, name): (Ino, &[u8]),
        node: Option<&Arc<CachedInode>>,
        lasts: AnswerValidity<u64>,
    ) {
        if self.is_off() {
            return;
        }
        let hash = self.hash(parent, name);
        let shard = self.shard(hash);
        let mut gone = Vec::new();
        let mut table = write(shard);
        if shard.version.load(Ordering::Relaxed) != ticket.version {
            return;
        }
        let same = |dentry: &Dentry| dentry.parent == parent && *dentry.name == *name;
        if let Some(old) = table.find_mut(hash, same) {
            old.lasts = lasts;
            // Drop the old node after the lock is released: if it is the last reference, the drop
            // calls the file system.
            gone.extend(std::mem::replace(&mut old.node, node.cloned()));
            drop(table);
            return;
        }
        if table.len() >= self.per_shard {
            sweep(&mut table, &self.fresh, &mut gone);
        }
        let dentry = Dentry {
            parent,
            name: name.into(),
            node: node.cloned(),
            lasts,
            used: AtomicBool::new(false),
        };
        table.insert_unique(hash, dentry, |dentry| {
            self.hasher.hash_one((dentry.parent.0, &*dentry.name))
        });
        drop(table);
    }

    /// Removes a name from the cache.
    pub(crate) fn remove(&self, parent: Ino, name: &[u8]) {
        self.passed.remove(parent, name);
        let hash = self.hash(parent, name);
        let shard = self.shard(hash);
        let mut table = write(shard);
        shard.version.fetch_add(1, Ordering::Release);
        let same = |dentry: &Dentry| dentry.parent == parent && *dentry.name == *name;
        let gone = table.find_entry(hash, same).ok().map(|entry| entry.remove().0);
        drop(table);
        drop(gone);
    }

    /// Removes all names, and the directories that were passed.
    pub(crate) fn clear(&self) {
        self.passed.clear();
        for shard in &self.shards {
            let mut table = write(shard);
            shard.version.fetch_add(1, Ordering::Release);
            let gone = std::mem::take(&mut *table);
            drop(table);
            drop(gone);
        }
    }

    /// Removes all names that lead to one of `inodes`, and the passed directories among these inodes.
    pub(crate) fn prune(&self, inodes: &[Ino]) {
        self.passed.prune(inodes);
        for shard in &self.shards {
            let mut table = write(shard);
            shard.version.fetch_add(1, Ordering::Release);
            let of = |dentry: &mut Dentry| {
                dentry.node.as_ref().is_some_and(|node| inodes.contains(&node.ino()))
            };
            let gone: Vec<_> = table.extract_if(of).collect();
            drop(table);
            drop(gone);
        }
    }

    /// The number of cached names.
    pub(crate) fn len(&self) -> usize {
        let len =
            |shard: &DentryShard| shard.table.read().unwrap_or_else(PoisonError::into_inner).len();
        self.shards.iter().map(len).sum()
    }
}

fn write(shard: &DentryShard) -> RwLockWriteGuard<'_, HashTable<Dentry>> {
    shard.table.write().unwrap_or_else(PoisonError::into_inner)
}

/// Removes the entries that were not found since the last sweep. If they are less than a quarter,
/// it removes all entries. A sweep thus frees room in proportion to the entries it visits.
fn sweep(table: &mut HashTable<Dentry>, fresh: &ChangeTracker, gone: &mut Vec<Arc<CachedInode>>) {
    let before = table.len();
    let goes = |dentry: &mut Dentry| {
        let used = std::mem::take(dentry.used.get_mut());
        !used || !fresh.has_name(dentry.lasts, dentry.parent, &dentry.name)
    };
    for dentry in table.extract_if(goes) {
        gone.extend(dentry.node);
    }
    if table.len() > before - before / 4 {
        gone.extend(table.drain().filter_map(|dentry| dentry.node));
    }
}
