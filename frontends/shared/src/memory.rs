//! The bound of the memory for pages: which groups of frames are in it.
//!
//! A client reads pages without notifying the server, which therefore does not see what is in use.
//! So a hand goes over the groups while others leave, and *hides* one or two for each that leaves:
//! the pages of a hidden group are in memory, and no reader finds them. A client that misses them
//! makes a request, which shows them again and notifies the policy of the user. So the policy
//! learns of a use of each group that is in use, whenever the hand has come round, and decides on
//! all groups by that. This needs no memory that clients write, and relies on no claim of a client.
//! It costs at most two requests for each group that leaves.

use std::collections::HashSet;
use std::hash::{BuildHasher, Hasher, RandomState};

use defuse_cache::{ExtentKey, ExtentUse, LruPolicy, OwnerShares, PolicyKind, ReplacementPolicy};
use defuse_fs::{Caller, Ino};
use defuse_ring::pages::{GROUP_BYTES, PageWriter};

use crate::counts::{PartCounts, PartDivision};
use crate::paged::HEADS;

/// The divisor for the part of all groups that should be hidden.
const LEAD: u64 = 4;

/// The pages of files.
pub(crate) trait PageGroups {
    /// Returns the pages of one file.
    fn pages(&mut self, ino: Ino) -> Option<&mut PageWriter>;
}

/// Groups of frames that take memory.
pub(crate) struct FrameGroups {
    /// All groups.
    groups: OwnerShares,
    /// The groups that readers find: the hand is at the group that was shown first.
    shown: LruPolicy,
    hidden: HashSet<ExtentKey>,
    pub(crate) counts: PartCounts,
}

impl FrameGroups {
    /// Groups in so many bytes, without those for heads. They are counted by parts.
    pub(crate) fn new(bytes: u64, policy: PolicyKind, parts: Option<PartDivision>) -> FrameGroups {
        assert!(bytes >= GROUP_BYTES * HEADS, "{bytes} bytes have no room for a group");
        // Clients must not know which keys the policy learns from.
        let seed = RandomState::new().build_hasher().finish();
        let groups = OwnerShares::new(policy.make(bytes - bytes / HEADS, seed));
        let (shown, hidden) = (LruPolicy::new(u64::MAX), HashSet::new());
        FrameGroups { groups, shown, hidden, counts: PartCounts::new(parts) }
    }

    /// A request reads a group. It may be filled if the bound [holds](FrameGroups::holds) it
    /// afterwards. Returns true if it was hidden.
    pub(crate) fn record_use(
        &mut self,
        files: &mut impl PageGroups,
        ino: Ino,
        group: u64,
        by: Caller,
    ) -> bool {
        let key = ExtentKey::new(ino.0, group);
        let was_hidden = self.hidden.remove(&key);
        if was_hidden && let Some(pages) = files.pages(ino) {
            pages.show(group);
        }
        let mut left = Vec::new();
        let was_there = self.groups.access(make_use(key, by.pid), by.uid, &mut left);
        let is_new = !was_there && self.groups.policy().contains(key);
        if is_new || was_hidden {
            self.shown.access(make_use(key, 0), &mut Vec::new());
        }
        let count = self.counts.count_mut(ino);
        count.missed += u64::from(was_hidden);
        count.groups += u64::from(is_new);
        for key in left {
            self.give_back(files, key);
            self.hide_next(files);
            // Without a lead, the hand would hide the group that leaves next anyway.
            if self.hidden.len() as u64 * LEAD * GROUP_BYTES < self.groups.policy().bytes() {
                self.hide_next(files);
            }
        }
        was_hidden
    }

    /// True if the group has its memory, and is not hidden.
    pub(crate) fn holds(&self, ino: Ino, group: u64) -> bool {
        self.shown.contains(ExtentKey::new(ino.0, group))
    }

    /// Removes the pages of a file with so many groups.
    pub(crate) fn remove_file(&mut self, ino: Ino, groups: u64) {
        for key in (0..groups).map(|group| ExtentKey::new(ino.0, group)) {
            self.counts.count_mut(ino).groups -= u64::from(self.groups.remove(key));
            self.is_gone(key);
        }
    }

    fn is_gone(&mut self, key: ExtentKey) {
        self.shown.remove(key);
        self.hidden.remove(&key);
    }

    fn give_back(&mut self, files: &mut impl PageGroups, key: ExtentKey) {
        self.is_gone(key);
        let count = self.counts.count_mut(Ino(key.file));
        count.evicted += 1;
        count.groups -= 1;
        if let Some(pages) = files.pages(Ino(key.file)) {
            pages.give_back(key.index);
        }
    }

    /// Hides the group at the hand.
    fn hide_next(&mut self, files: &mut impl PageGroups) {
        // The group of the request is the last one, and is about to be filled.
        if self.shown.tracked_extents() < 2 {
            return;
        }
        let Some(key) = self.shown.evict(&|_| true) else { return };
        let is_new = self.hidden.insert(key);
        assert!(is_new && !self.shown.contains(key), "a hidden group was shown");
        self.counts.count_mut(Ino(key.file)).hidden += 1;
        if let Some(pages) = files.pages(Ino(key.file)) {
            pages.hide(key.index);
        }
    }
}

fn make_use(key: ExtentKey, user: u32) -> ExtentUse {
    ExtentUse { key, size: GROUP_BYTES, user }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;
    use std::sync::Arc;

    use super::*;
    use crate::counts::PartCount;

    struct PageFiles(HashMap<Ino, PageWriter>);

    impl PageGroups for PageFiles {
        fn pages(&mut self, ino: Ino) -> Option<&mut PageWriter> {
            self.0.get_mut(&ino)
        }
    }

    #[test]
    fn the_counts_of_groups_are_those_that_the_bound_has_whatever_its_policy() {
        for policy in ["lru", "lfu", "arc", "s3-fifo", "plain-e", "e"] {
            let policy = PolicyKind::from_name(policy).unwrap();
            let parts = PartDivision {
                count: 2,
                of: Arc::new(|ino| (ino.0 < 3).then_some(ino.0 as usize - 1)),
                without: Vec::new(),
            };
            let mut bound = FrameGroups::new(1 << 20, policy, Some(parts));
            let new = |ino| (Ino(ino), PageWriter::new(1 << 20).unwrap());
            let mut files = PageFiles((1..=3).map(new).collect());
            let mut random = 1_u64;
            for step in 0..3000 {
                random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                let (ino, group) = (Ino(1 + (random >> 33) % 3), (random >> 40) % 16);
                let by = Caller { uid: (random >> 50) as u32 % 2, gid: 0, pid: 1 };
                bound.record_use(&mut files, ino, group, by);
                if step % 500 == 499 {
                    bound.remove_file(ino, 16);
                    files.0.extend([new(ino.0)]);
                }
                let bytes = bound.groups.policy().bytes();
                let apart = bound.shown.bytes() + bound.hidden.len() as u64 * GROUP_BYTES;
                assert_eq!((bytes, bytes), (apart, bound.counts.groups() * GROUP_BYTES));
                assert!(bytes <= (1 << 20) / HEADS * (HEADS - 1), "{policy:?} at {step}");
            }
            let all = [0, 1, 2].map(|part| bound.counts.part(part));
            assert!(
                all.iter().all(|one| one.hidden > 0 && one.evicted > 0 && one.missed > 0),
                "{all:?}"
            );
            let sum = |of: fn(&PartCount) -> u64| all.iter().map(of).sum::<u64>();
            assert!(sum(|one| one.missed) <= sum(|one| one.hidden), "{all:?}");
            assert!(sum(|one| one.hidden) <= 2 * sum(|one| one.evicted), "{all:?}");
            (1..=3).for_each(|ino| bound.remove_file(Ino(ino), 16));
            assert_eq!(bound.counts.groups(), 0, "{policy:?}");
        }
    }
}
