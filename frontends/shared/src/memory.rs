//! The bound of the memory for pages: which groups of frames are in it.
//!
//! A client reads pages without a word to the server, which therefore does not see what is in use. So a group that
//! the policy evicts is first *hidden*: its pages are in memory, and no reader finds them. A client that misses them
//! makes a request, which shows them again and tells the policy who uses them. Only a group that nobody asked for is
//! given back. This needs no memory that clients write, and believes nothing that they say.

use std::hash::{BuildHasher, Hasher, RandomState};

use defuse_cache::{Extent, Key, Lru, Policy, PolicyKind, Shares};
use defuse_fs::{Caller, Ino};
use defuse_ring::pages::{GROUP_BYTES, Pages};

use crate::paged::HEADS;

/// Of the memory, this part is for hidden groups.
const HIDDEN: u64 = 4;

/// The pages of files.
pub(crate) trait Groups {
    /// Those of one file.
    fn pages(&mut self, ino: Ino) -> Option<&mut Pages>;
}

/// Groups of frames that take memory.
pub(crate) struct Bound {
    shown: Shares,
    hidden: Lru,
}

impl Bound {
    /// Groups in so many bytes, without those for heads.
    pub(crate) fn new(bytes: u64, policy: PolicyKind) -> Bound {
        // Clients must not know which keys the policy learns from.
        let seed = RandomState::new().build_hasher().finish();
        let shown = bytes - bytes / HIDDEN - bytes / HEADS;
        Bound { shown: Shares::new(policy.make(shown, seed)), hidden: Lru::new(bytes / HIDDEN) }
    }

    /// A request reads a group. It may be filled if the bound [holds](Bound::holds) it afterwards.
    pub(crate) fn used(&mut self, files: &mut impl Groups, ino: Ino, group: u64, by: Caller) {
        let key = Key::new(ino.0, group);
        if self.hidden.remove(key)
            && let Some(pages) = files.pages(ino)
        {
            pages.show(group);
        }
        let mut evicted = Vec::new();
        self.shown.access(of_group(key, by.pid), by.uid, &mut evicted);
        evicted.into_iter().for_each(|key| self.hide(files, key));
    }

    /// True if the group has its place in memory, and is not hidden.
    pub(crate) fn holds(&self, ino: Ino, group: u64) -> bool {
        self.shown.policy().contains(Key::new(ino.0, group))
    }

    /// A file of so many groups has no pages any more.
    pub(crate) fn closed(&mut self, ino: Ino, groups: u64) {
        for key in (0..groups).map(|group| Key::new(ino.0, group)) {
            self.shown.remove(key);
            self.hidden.remove(key);
        }
    }

    fn hide(&mut self, files: &mut impl Groups, key: Key) {
        if let Some(pages) = files.pages(Ino(key.file)) {
            pages.hide(key.index);
        }
        let mut gone = Vec::new();
        self.hidden.access(of_group(key, 0), &mut gone);
        for key in gone {
            if let Some(pages) = files.pages(Ino(key.file)) {
                pages.give_back(key.index);
            }
        }
    }
}

fn of_group(key: Key, user: u32) -> Extent {
    Extent { key, size: GROUP_BYTES, user }
}
