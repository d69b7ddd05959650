//! Directories that walks have passed lately, by their name in a directory or by a longer path of
//! names.
//!
//! A directory whose names hold for no time is looked up for each path that leads through it. It
//! stays known here, so that the file system need not begin with a new inode each time. If the
//! changes that may lead a path to another directory are counted, the directory is not even looked
//! up again until the next change, for a limited time.

use std::array;
use std::hash::{BuildHasher, RandomState};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use defuse_fs::{Attr, Ino};

use crate::credentials::TaskCredentials;
use crate::node::{CachedInode, expiry, lock, now_ns};

/// The number of sets, each of which has a lock.
const SETS: usize = 32;

/// The directories of a set.
const WAYS: usize = 4;

/// The lifetime of a directory: this time, or until the counter of changes moves.
pub(crate) type DirectoryHold = (Duration, &'static AtomicU32);

pub(crate) struct PrefixCache {
    sets: [Mutex<PrefixSet>; SETS],
    hasher: RandomState,
    holds: Option<DirectoryHold>,
}

#[derive(Default)]
struct PrefixSet {
    /// At most [`WAYS`].
    dirs: Vec<PrefixEntry>,
    /// Counts directories that replaced others.
    turn: usize,
}

impl PrefixSet {
    fn find(&self, parent: Ino, name: &[u8]) -> Option<usize> {
        self.dirs.iter().position(|dir| dir.is(parent, name))
    }

    /// Adds a directory. It may replace an entry for the same directory or another entry, which is
    /// returned.
    fn insert(&mut self, dir: PrefixEntry) -> Option<PrefixEntry> {
        let known = self.find(dir.parent, &dir.name);
        if known.is_none() && self.dirs.len() < WAYS {
            self.dirs.push(dir);
            return None;
        }
        let place = known.unwrap_or_else(|| {
            self.turn = self.turn.wrapping_add(1);
            self.turn % WAYS
        });
        Some(std::mem::replace(&mut self.dirs[place], dir))
    }
}

struct PrefixEntry {
    parent: Ino,
    /// A name, or several with slashes between them.
    name: Box<[u8]>,
    found: PrefixDirectory,
    /// The credentials of a caller that may search all directories of the path, including this one;
    /// `None` if there is only one name.
    searched_by: Option<Box<TaskCredentials>>,
    /// The count of changes before it was looked up.
    changes: u32,
}

/// A directory that a walk has passed.
#[derive(Clone)]
pub(crate) struct PrefixDirectory {
    pub node: Arc<CachedInode>,
    /// The attributes that permission checks use, if they are known.
    pub attr: Option<Attr>,
    /// The time of [`now_ns`] until which it holds.
    pub until: u64,
}

/// The begin of a walk by names alone.
pub(crate) struct WalkBegin {
    /// The directory where it begins.
    pub parent: Ino,
    /// The count of changes before it.
    changes: u32,
    /// The earliest time at which a directory on the way no longer holds.
    until: u64,
}

impl WalkBegin {
    /// Records a directory on the way.
    pub(crate) fn pass(&mut self, until: u64) {
        self.until = self.until.min(until);
    }
}

impl PrefixEntry {
    fn is(&self, parent: Ino, name: &[u8]) -> bool {
        self.parent == parent && *self.name == *name
    }
}

impl PrefixCache {
    pub(crate) fn new(holds: Option<DirectoryHold>) -> Self {
        PrefixCache {
            sets: array::from_fn(|_| Mutex::default()),
            hasher: RandomState::new(),
            holds,
        }
    }

    /// Returns the set in which this directory may be.
    fn set(&self, parent: Ino, name: &[u8]) -> MutexGuard<'_, PrefixSet> {
        lock(&self.sets[(self.hasher.hash_one((parent.0, name)) >> 32) as usize % SETS])
    }

    /// The directory of this name, if it still holds.
    pub(crate) fn get(&self, parent: Ino, name: &[u8]) -> Option<PrefixDirectory> {
        self.get_for(parent, name, None)
    }

    /// Returns the directory at the end of a path of several names, if it still holds, and if `who`
    /// may search it and all directories before it.
    pub(crate) fn get_path(
        &self,
        parent: Ino,
        path: &[u8],
        who: &TaskCredentials,
    ) -> Option<PrefixDirectory> {
        self.get_for(parent, path, Some(who))
    }

    fn get_for(
        &self,
        parent: Ino,
        name: &[u8],
        who: Option<&TaskCredentials>,
    ) -> Option<PrefixDirectory> {
        let (_, counter) = self.holds?;
        let set = self.set(parent, name);
        let dir = &set.dirs[set.find(parent, name)?];
        let may_search = match (&dir.searched_by, who) {
            (Some(by), Some(who)) => by.has_rights_of(who),
            (by, who) => by.is_none() && who.is_none(),
        };
        let holds = may_search
            && dir.changes == counter.load(Ordering::Acquire)
            && now_ns() < dir.found.until;
        holds.then(|| dir.found.clone())
    }

    /// The count of changes. Call it before the lookup whose answer is [kept](PrefixCache::keep).
    pub(crate) fn changes(&self) -> u32 {
        self.holds.map_or(0, |(_, counter)| counter.load(Ordering::Acquire))
    }

    /// Begins a walk in the directory `parent`, if its end may be [kept](PrefixCache::keep_path).
    pub(crate) fn begin(&self, parent: Ino) -> Option<WalkBegin> {
        let begin = || WalkBegin { parent, changes: self.changes(), until: u64::MAX };
        self.holds.is_some().then(begin)
    }

    /// Keeps a directory that was looked up just now, possibly in place of another one. `changes`
    /// is the count before the lookup. Returns the time until which the directory holds.
    pub(crate) fn keep(
        &self,
        (parent, name): (Ino, &[u8]),
        node: &Arc<CachedInode>,
        attr: Option<Attr>,
        changes: u32,
    ) -> u64 {
        let is_it = |dir: &PrefixEntry| dir.is(parent, name) && Arc::ptr_eq(&dir.found.node, node);
        if self.holds.is_none() && self.set(parent, name).dirs.iter().any(is_it) {
            return 0;
        }
        let until = self.holds.map_or(0, |(time, _)| expiry(time));
        let found = PrefixDirectory { node: Arc::clone(node), attr, until };
        self.insert(PrefixEntry { parent, name: name.into(), found, searched_by: None, changes });
        until
    }

    /// Keeps the directory that a walk of several names has reached. `who` may search it and all
    /// directories before it.
    pub(crate) fn keep_path(
        &self,
        begin: &WalkBegin,
        path: &[u8],
        (node, attr): (&Arc<CachedInode>, Option<Attr>),
        who: &TaskCredentials,
    ) {
        let &WalkBegin { parent, changes, until } = begin;
        let found = PrefixDirectory { node: Arc::clone(node), attr, until };
        let searched_by = Some(Box::new(who.clone()));
        self.insert(PrefixEntry { parent, name: path.into(), found, searched_by, changes });
    }

    fn insert(&self, dir: PrefixEntry) {
        let old = self.set(dir.parent, &dir.name).insert(dir);
        // After the lock is released: the end of a node calls the file system.
        drop(old);
    }

    /// Counts a change, after it: a thread that looked a directory up before the change has the
    /// former count.
    pub(crate) fn count_change(&self) {
        if let Some((_, counter)) = self.holds {
            counter.fetch_add(1, Ordering::Release);
        }
    }

    /// Forgets the directory of this name.
    pub(crate) fn remove(&self, parent: Ino, name: &[u8]) {
        let mut set = self.set(parent, name);
        let old = set.find(parent, name).map(|place| set.dirs.swap_remove(place));
        drop(set);
        drop(old);
    }

    /// Forgets all directories.
    pub(crate) fn clear(&self) {
        self.forget_if(|_| true);
    }

    /// Forgets these inodes, and all paths, which may lead through them.
    pub(crate) fn prune(&self, inodes: &[Ino]) {
        self.forget_if(|dir| dir.searched_by.is_some() || inodes.contains(&dir.found.node.ino()));
    }

    fn forget_if(&self, is_meant: impl Fn(&PrefixEntry) -> bool) {
        for set in &self.sets {
            let mut set = lock(set);
            let old: Vec<PrefixEntry> = set.dirs.extract_if(.., |dir| is_meant(dir)).collect();
            drop(set);
            drop(old);
        }
    }
}
