//! Groups that may or may not have been complete. This module does no I/O.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use crate::commit::ScannedSlot;
use crate::format::inode::{DecodedBody, DiskInode};
use crate::format::slot::{SlotHeader, SlotKind};

/// Changes that are shown one by one.
const SHOWN: usize = 10;

/// The newest groups, whose missing slots may be among the slots that cannot be read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DoubtfulGroups {
    /// The first of these groups, and the last.
    pub groups: (u64, u64),
    /// Blocks that cannot be read.
    pub unreadable: Vec<u64>,
    /// Inodes that the groups write, as far as they can be read.
    pub written: Vec<WrittenInode>,
    /// Inodes that the groups remove.
    pub removed: Vec<u64>,
}

/// An inode that a group writes.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct WrittenInode {
    /// The inode.
    pub ino: u64,
    /// The directory of its first name, and the name, if it has one and that is readable.
    pub name: Option<(u64, Vec<u8>)>,
}

/// The slots of a group that were found.
#[derive(Default)]
struct GroupMembers {
    whole: BTreeSet<u32>,
    broken: BTreeSet<u32>,
    count: u32,
}

impl GroupMembers {
    /// The number of slots without any trace.
    fn count_missing(&self) -> usize {
        let found = self.whole.union(&self.broken).count();
        (self.count as usize).saturating_sub(found)
    }

    fn is_torn(&self) -> bool {
        self.count_missing() == 0 && self.whole.len() < self.count as usize
    }
}

impl DoubtfulGroups {
    /// The doubt about the slots `scan`, of which the groups up to `durable` count. `None` if no
    /// block is unreadable, or if there are too few unreadable blocks to complete the next group:
    /// then a power failure has interrupted it.
    pub(super) fn find(
        scan: &[(u64, ScannedSlot)],
        durable: u64,
        unreadable: &[u64],
    ) -> Option<DoubtfulGroups> {
        let newer = |identity: &&SlotHeader| identity.group > durable;
        let mut groups: BTreeMap<u64, GroupMembers> = BTreeMap::new();
        for (_, scanned) in scan {
            let (identities, whole) = match scanned {
                ScannedSlot::Whole(identity, _) => ([Some(identity), None], true),
                ScannedSlot::Broken(one, other) => ([Some(one), other.as_ref()], false),
            };
            for identity in identities.into_iter().flatten().filter(newer) {
                let members = groups.entry(identity.group).or_default();
                members.count = members.count.max(identity.count);
                let of_kind = if whole { &mut members.whole } else { &mut members.broken };
                of_kind.insert(identity.index);
            }
        }
        let newest = *groups.keys().next_back()?;
        let (mut left, mut last) = (unreadable.len(), durable);
        for group in durable + 1..=newest {
            // A group without a trace lacks at least one slot.
            let missing = groups.get(&group).map_or(1, GroupMembers::count_missing);
            // A slot that is torn was being written when the power failed.
            if missing > left || groups.get(&group).is_some_and(GroupMembers::is_torn) {
                break;
            }
            left -= missing;
            // Groups without a trace have nothing to keep.
            last = if groups.contains_key(&group) { group } else { last };
        }
        let unreadable = unreadable.to_vec();
        let (written, removed) = (Vec::new(), Vec::new());
        (last > durable).then_some(DoubtfulGroups {
            groups: (durable + 1, last),
            unreadable,
            written,
            removed,
        })
    }

    /// Adds the readable changes of the groups. `body` returns the body of the inode in a block.
    pub(super) fn name(
        &mut self,
        scan: &[(u64, ScannedSlot)],
        mut body: impl FnMut(u64) -> Option<Vec<u8>>,
    ) {
        let (first, last) = self.groups;
        for (block, scanned) in scan {
            let ScannedSlot::Whole(identity, list) = scanned else { continue };
            if !(first..=last).contains(&identity.group) {
                continue;
            }
            match identity.kind {
                SlotKind::Inode => {
                    let inode = body(*block).as_deref().and_then(DiskInode::decode);
                    let links = inode.map(|decoded| match decoded {
                        DecodedBody::Whole(inode) | DecodedBody::Outside { inode, .. } => {
                            inode.links
                        }
                    });
                    let link = links.and_then(|links| links.into_iter().next());
                    let name = link.map(|link| (link.parent, link.name));
                    self.written.push(WrittenInode { ino: identity.ino, name });
                }
                SlotKind::Removals => self.removed.extend(list),
                SlotKind::Nothing => {}
            }
        }
        self.written.sort();
        self.removed.sort_unstable();
    }
}

impl fmt::Display for DoubtfulGroups {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (first, last) = self.groups;
        let blocks: Vec<String> = self.unreadable.iter().take(SHOWN).map(u64::to_string).collect();
        let more = if self.unreadable.len() > SHOWN { ", ..." } else { "" };
        write!(
            f,
            "the newest changes (groups {first} to {last}) may have been complete and synced, or interrupted \
             by a power failure: slots that they lack may lie in blocks that cannot be read ({}{more}). \
             These changes can be read:",
            blocks.join(", ")
        )?;
        let written = self.written.iter().map(|WrittenInode { ino, name }| match name {
            Some((parent, name)) => {
                format!("inode {ino}, \"{}\" in directory {parent}", name.escape_ascii())
            }
            None => format!("inode {ino}"),
        });
        let removed = self.removed.iter().map(|ino| format!("the removal of inode {ino}"));
        let all = self.written.len() + self.removed.len();
        for change in written.chain(removed).take(SHOWN) {
            write!(f, "\n  {change}")?;
        }
        match all.saturating_sub(SHOWN) {
            0 => Ok(()),
            more => write!(f, "\n  and {more} more"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slot(group: u64, index: u32, count: u32) -> SlotHeader {
        let identity = SlotHeader::new(SlotKind::Inode, 5, 77);
        SlotHeader { group, index, count, ..identity }
    }

    fn make_whole(group: u64, index: u32, count: u32) -> (u64, ScannedSlot) {
        (u64::from(index), ScannedSlot::Whole(slot(group, index, count), Vec::new()))
    }

    fn groups(scan: &[(u64, ScannedSlot)], unreadable: usize) -> Option<(u64, u64)> {
        let blocks: Vec<u64> = (1000..).take(unreadable).collect();
        DoubtfulGroups::find(scan, 7, &blocks).map(|doubt| doubt.groups)
    }

    #[test]
    fn a_group_is_in_doubt_if_unreadable_blocks_are_as_many_as_it_lacks() {
        let scan =
            [make_whole(7, 0, 1), make_whole(8, 0, 3), make_whole(9, 0, 1), make_whole(10, 1, 2)];
        assert_eq!(groups(&scan, 0), None);
        assert_eq!(groups(&scan, 1), None, "two are missing");
        assert_eq!(groups(&scan, 2), Some((8, 9)), "the one after them is whole");
        assert_eq!(groups(&scan, 3), Some((8, 10)));
        assert_eq!(groups(&scan[..1], 3), None, "there is nothing of it");
    }

    #[test]
    fn a_torn_slot_is_a_power_failure_and_a_group_without_a_trace_lacks_a_slot() {
        let torn = (81, ScannedSlot::Broken(slot(8, 1, 2), None));
        assert_eq!(groups(&[make_whole(8, 0, 2), torn.clone()], 5), None);
        assert_eq!(groups(&[make_whole(8, 0, 3), torn], 1), Some((8, 8)));
        assert_eq!(groups(&[make_whole(10, 0, 1)], 1), None);
        assert_eq!(groups(&[make_whole(10, 0, 1)], 2), Some((8, 10)));
        // Forged numbers take no time.
        assert_eq!(groups(&[make_whole(u64::MAX >> 3, 0, 1)], 2), None);
    }
}
