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

/// The version of a shard before a lookup. [`DentryCache::keep`] needs it to detect removals since
/// then.
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
    table: RwLock<DentryTable>,
    /// Increased by every removal, under the lock of the table.
    version: AtomicU64,
}

#[derive(Default)]
struct DentryTable {
    names: HashTable<Dentry>,
    /// The hashes of names that calls of this process are changing, once for each call. Answers
    /// about them are not kept.
    changing: Vec<u64>,
}

/// A call that changes a name, from before the call of the file system to the end of this value.
/// Another thread may see the change as soon as the file system has made it. From then on no thread
/// may find an older answer, which a lookup has received before.
pub(crate) struct NameChange<'a> {
    shard: &'a DentryShard,
    hash: u64,
}

impl Drop for NameChange<'_> {
    fn drop(&mut self) {
        let mut table = write(self.shard);
        self.shard.version.fetch_add(1, Ordering::Release);
        if let Some(place) = table.changing.iter().position(|&hash| hash == self.hash) {
            table.changing.swap_remove(place);
        }
    }
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
    /// Creates a cache of at most `limit` names, whose lifetime `fresh` decides, and the lifetime
    /// of directories `holds`.
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
        let same = |dentry: &Dentry| dentry.parent == parent && *dentry.name == *name;
        let found = table.names.find(hash, same)?;
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

    /// Begins a change of a name. Call this before the file system makes it. `None` if the cache
    /// keeps nothing.
    pub(crate) fn change(&self, parent: Ino, name: &[u8]) -> Option<NameChange<'_>> {
        if self.is_off() {
            return None;
        }
        let hash = self.hash(parent, name);
        let shard = self.shard(hash);
        write(shard).changing.push(hash);
        self.remove(parent, name);
        Some(NameChange { shard, hash })
    }

    /// Caches an answer. If the shard has had a removal since the ticket was taken, or the name is
    /// being changed, the answer may be outdated and is not cached.
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
        let is_old = shard.version.load(Ordering::Relaxed) != ticket.version;
        if is_old || table.changing.contains(&hash) {
            return;
        }
        let same = |dentry: &Dentry| dentry.parent == parent && *dentry.name == *name;
        if let Some(old) = table.names.find_mut(hash, same) {
            old.lasts = lasts;
            // Drop the old node after the lock is released: if it is the last reference, the drop
            // calls the file system.
            gone.extend(std::mem::replace(&mut old.node, node.cloned()));
            drop(table);
            return;
        }
        if table.names.len() >= self.per_shard {
            sweep(&mut table.names, &self.fresh, &mut gone);
        }
        let dentry = Dentry {
            parent,
            name: name.into(),
            node: node.cloned(),
            lasts,
            used: AtomicBool::new(false),
        };
        table.names.insert_unique(hash, dentry, |dentry| {
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
        let gone = table.names.find_entry(hash, same).ok().map(|entry| entry.remove().0);
        drop(table);
        drop(gone);
    }

    /// Removes all names, and the directories that were passed.
    pub(crate) fn clear(&self) {
        self.passed.clear();
        for shard in &self.shards {
            let mut table = write(shard);
            shard.version.fetch_add(1, Ordering::Release);
            let gone = std::mem::take(&mut table.names);
            drop(table);
            drop(gone);
        }
    }

    /// Removes all names that lead to one of `inodes`, and the passed directories among these
    /// inodes.
    pub(crate) fn prune(&self, inodes: &[Ino]) {
        self.passed.prune(inodes);
        for shard in &self.shards {
            let mut table = write(shard);
            shard.version.fetch_add(1, Ordering::Release);
            let of = |dentry: &mut Dentry| {
                dentry.node.as_ref().is_some_and(|node| inodes.contains(&node.ino()))
            };
            let gone: Vec<_> = table.names.extract_if(of).collect();
            drop(table);
            drop(gone);
        }
    }

    /// The number of cached names.
    pub(crate) fn len(&self) -> usize {
        let len = |shard: &DentryShard| {
            shard.table.read().unwrap_or_else(PoisonError::into_inner).names.len()
        };
        self.shards.iter().map(len).sum()
    }
}

fn write(shard: &DentryShard) -> RwLockWriteGuard<'_, DentryTable> {
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

#[cfg(test)]
mod tests {
    use super::*;

    fn is_missing(cache: &DentryCache) -> bool {
        matches!(cache.get(Ino::ROOT, b"name"), Some(CachedLookup::Missing))
    }

    /// A thread that had seen a directory, which another thread was making, found it missing
    /// afterwards: a third one had looked it up before, and its answer was kept until the end of
    /// mkdir.
    #[test]
    fn no_answer_about_a_name_is_kept_while_it_changes() {
        let cache = DentryCache::new(1024, ChangeTracker::default(), None);
        let keep = |ticket| {
            cache.keep(ticket, (Ino::ROOT, b"name"), None, AnswerValidity::Until(u64::MAX));
        };
        let before = cache.ticket(Ino::ROOT, b"name");
        keep(before);
        assert!(is_missing(&cache));
        let change = cache.change(Ino::ROOT, b"name").unwrap();
        assert!(!is_missing(&cache), "an answer from before the change");
        let within = cache.ticket(Ino::ROOT, b"name");
        for ticket in [before, within] {
            keep(ticket);
            assert!(!is_missing(&cache), "the change may have happened meanwhile");
        }
        let other = cache.change(Ino::ROOT, b"name").unwrap();
        drop(change);
        keep(cache.ticket(Ino::ROOT, b"name"));
        assert!(!is_missing(&cache), "there is another change");
        drop(other);
        keep(within);
        assert!(!is_missing(&cache), "an answer from within the change");
        keep(cache.ticket(Ino::ROOT, b"name"));
        assert!(is_missing(&cache));
    }
}
