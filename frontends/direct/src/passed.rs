//! Directories that walks have passed lately.
//!
//! A directory whose names hold for no time is looked up for each path that leads through it. It stays known here, so that the
//! file system need not begin with a new inode each time. Where somebody counts the changes that may lead a path to
//! another directory, it is not even looked up again until the next one, for a limited time.

use std::array;
use std::hash::{BuildHasher, RandomState};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use arc_swap::ArcSwapOption;
use defuse_fs::{Attr, Ino};

use crate::node::{Node, expiry, now_ns};

/// The number of directories.
const PLACES: usize = 128;

/// How long a directory holds: for this time, until the counter of changes moves.
pub(crate) type Holds = (Duration, &'static AtomicU32);

pub(crate) struct Passed {
    /// Those that had a directory: the end of each one looks at all threads that the program has had at a time.
    places: [OnceLock<Place>; PLACES],
    hasher: RandomState,
    holds: Option<Holds>,
}

type Place = ArcSwapOption<Dir>;

struct Dir {
    parent: Ino,
    name: Box<[u8]>,
    node: Arc<Node>,
    attr: Option<Attr>,
    /// The count of changes before it was looked up.
    changes: u32,
    /// The time of [`now_ns`] until which it holds.
    until: u64,
}

impl Dir {
    fn is(&self, parent: Ino, name: &[u8]) -> bool {
        self.parent == parent && *self.name == *name
    }
}

fn forget_if(place: Option<&Place>, is_meant: impl FnOnce(&Dir) -> bool) {
    if let Some(place) = place
        && place.load().as_ref().is_some_and(|dir| is_meant(dir))
    {
        place.store(None);
    }
}

impl Passed {
    pub(crate) fn new(holds: Option<Holds>) -> Self {
        let places = array::from_fn(|_| OnceLock::new());
        Passed { places, hasher: RandomState::new(), holds }
    }

    fn place(&self, parent: Ino, name: &[u8]) -> &OnceLock<Place> {
        &self.places[(self.hasher.hash_one((parent.0, name)) >> 32) as usize % PLACES]
    }

    /// The directory at this place, with the attributes that permission checks use, if it still holds.
    pub(crate) fn get(&self, parent: Ino, name: &[u8]) -> Option<(Arc<Node>, Option<Attr>)> {
        let (_, counter) = self.holds?;
        let kept = self.place(parent, name).get()?.load();
        let dir = kept.as_ref().filter(|dir| dir.is(parent, name))?;
        let holds = dir.changes == counter.load(Ordering::Acquire) && now_ns() < dir.until;
        holds.then(|| (Arc::clone(&dir.node), dir.attr))
    }

    /// The count of changes. Call it before the lookup whose answer is [kept](Passed::keep).
    pub(crate) fn changes(&self) -> u32 {
        self.holds.map_or(0, |(_, counter)| counter.load(Ordering::Acquire))
    }

    /// Keeps a directory, possibly in the place of another one. `changes` is the count before it was looked up.
    pub(crate) fn keep(
        &self,
        (parent, name): (Ino, &[u8]),
        node: &Arc<Node>,
        attr: Option<Attr>,
        changes: u32,
    ) {
        let place = self.place(parent, name).get_or_init(Place::empty);
        let is_it = |dir: &Arc<Dir>| dir.is(parent, name) && Arc::ptr_eq(&dir.node, node);
        if self.holds.is_none() && place.load().as_ref().is_some_and(is_it) {
            return;
        }
        let until = self.holds.map_or(0, |(time, _)| expiry(time));
        let (name, node) = (name.into(), Arc::clone(node));
        place.store(Some(Arc::new(Dir { parent, name, node, attr, changes, until })));
    }

    /// Counts a change, after it: whoever looked a directory up before it has the former count.
    pub(crate) fn count_change(&self) {
        if let Some((_, counter)) = self.holds {
            counter.fetch_add(1, Ordering::Release);
        }
    }

    /// Forgets the directory at this place.
    pub(crate) fn remove(&self, parent: Ino, name: &[u8]) {
        let place = self.place(parent, name).get();
        forget_if(place, |dir| dir.is(parent, name));
    }

    /// Forgets all directories.
    pub(crate) fn clear(&self) {
        self.places.iter().for_each(|place| forget_if(place.get(), |_| true));
    }

    /// Forgets those of these inodes.
    pub(crate) fn prune(&self, inodes: &[Ino]) {
        for place in &self.places {
            forget_if(place.get(), |dir| inodes.contains(&dir.node.ino()));
        }
    }
}
