//! Recovery: from the slots of a device to its current state.

use std::collections::{BTreeMap, BTreeSet, HashSet};

use hashbrown::HashMap;

use super::CommitRules;
use crate::format::NUMBERS;
use crate::format::slot::{FoundSlot, SlotHeader, SlotKind, list_removed};

/// A slot as the scan found it, without its body.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum ScannedSlot {
    /// A whole slot, with the inodes that it lists as gone.
    Whole(SlotHeader, Vec<u64>),
    /// A torn or damaged one.
    Broken(SlotHeader, Option<SlotHeader>),
}

impl ScannedSlot {
    /// The part of `found` that recovery needs; `None` for no slot.
    pub(crate) fn from_found(found: &FoundSlot<'_>) -> Option<ScannedSlot> {
        match found {
            FoundSlot::Nothing => None,
            FoundSlot::Whole(identity, body) => {
                let list = if identity.kind == SlotKind::Removals {
                    list_removed(body)
                } else {
                    Vec::new()
                };
                Some(ScannedSlot::Whole(*identity, list))
            }
            FoundSlot::Broken(one, other) => Some(ScannedSlot::Broken(*one, *other)),
        }
    }
}

/// The current copy of an inode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CurrentCopy {
    /// The block of the slot.
    pub(crate) block: u64,
    /// Grows with every slot that is written.
    pub(crate) stamp: u64,
}

/// The state of a device.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct RecoveredState {
    /// The newest group that counts. All before it count, too.
    pub(crate) durable: u64,
    /// Higher than all stamps on the device.
    pub(crate) next_stamp: u64,
    /// Higher than all inode numbers on the device.
    pub(crate) next_ino: u64,
    /// The inodes.
    pub(crate) live: HashMap<u64, CurrentCopy>,
    /// All copies of inodes on the device: inode and block.
    pub(crate) copies: Vec<(u64, u64)>,
    /// Removal blocks, with the inodes that they list.
    pub(crate) removals: Vec<(u64, Vec<u64>)>,
    /// The oldest stamp that a needed removal block may have.
    pub(crate) removals_from: u64,
    /// Slots of groups that do not count. They are zeroed before anything else is written.
    pub(crate) void: Vec<u64>,
    /// Inodes whose newest copy is damaged. These inodes are not in `live`.
    pub(crate) damaged: BTreeMap<u64, CurrentCopy>,
    /// Removal blocks that are damaged: inodes may be in `live` that are gone.
    pub(crate) lost_removals: Vec<u64>,
}

/// Computes the current state from `scan`, which has each slot once, ordered by block. `known` is
/// the group that the superblock states to be durable.
pub(crate) fn recover(
    scan: &[(u64, ScannedSlot)],
    known: u64,
    rules: CommitRules,
) -> RecoveredState {
    let durable = newest_group(scan, known, rules);
    let mut found =
        RecoveredState { durable, next_stamp: 1, next_ino: 1, ..RecoveredState::default() };
    let mut newest: HashMap<u64, (u64, bool, u64)> = HashMap::with_capacity(scan.len());
    let (mut removals, mut lost) = (HashSet::new(), Vec::new());
    let mut needed_from = 0;
    for (block, scanned) in scan {
        let identities: &[Option<SlotHeader>] = match scanned {
            ScannedSlot::Whole(identity, _) => &[Some(*identity), None],
            ScannedSlot::Broken(one, other) => &[Some(*one), *other],
        };
        for identity in identities.iter().flatten() {
            found.next_stamp = found.next_stamp.max(identity.stamp + 1);
            found.next_ino = found.next_ino.max(identity.ino + 1);
        }
        if identities.iter().flatten().any(|identity| identity.group > durable) {
            found.void.push(*block);
            continue;
        }
        if let ScannedSlot::Whole(identity, _) = scanned {
            needed_from = needed_from.max(identity.removals_from);
        }
        if let ScannedSlot::Whole(SlotHeader { kind: SlotKind::Removals, stamp, .. }, list) =
            scanned
        {
            removals.insert(*stamp);
            let last = list.iter().copied().max().unwrap_or(0);
            found.next_ino = found.next_ino.max(last.saturating_add(1)).min(NUMBERS);
            found.removals.push((*block, list.clone()));
            continue;
        }
        // Of two identities in a slot, the older copy was overwritten and does not count.
        let whole = matches!(scanned, ScannedSlot::Whole(..));
        let newer = identities.iter().flatten().max_by_key(|identity| identity.stamp);
        for identity in
            identities.iter().flatten().filter(|identity| identity.kind == SlotKind::Inode)
        {
            found.copies.push((identity.ino, *block));
        }
        match newer {
            Some(SlotHeader { kind: SlotKind::Inode, ino, stamp, .. }) => {
                // A slot whose write failed may hold a part of a copy that lies whole in another
                // slot.
                let version = (*stamp, whole, *block);
                let best = newest.entry(*ino).or_insert(version);
                *best = (*best).max(version);
            }
            Some(SlotHeader { kind: SlotKind::Removals, stamp, .. }) => lost.push((*stamp, *block)),
            _ => {}
        }
    }
    if !rules.removals_wait_for_mention {
        needed_from = 0;
    }
    // A slot that was about to be overwritten may be damaged in the middle.
    let needed = |stamp: &u64| *stamp >= needed_from && !removals.contains(stamp);
    let lost = lost.into_iter().filter(|(stamp, _)| needed(stamp));
    found.removals_from = needed_from;
    found.lost_removals = lost.map(|(_, block)| block).collect();
    let gone: HashSet<u64> = found.removals.iter().flat_map(|(_, list)| list).copied().collect();
    found.live.reserve(newest.len());
    for (ino, (stamp, whole, block)) in newest.into_iter().filter(|(ino, _)| !gone.contains(ino)) {
        match whole {
            true => drop(found.live.insert(ino, CurrentCopy { block, stamp })),
            false => drop(found.damaged.insert(ino, CurrentCopy { block, stamp })),
        }
    }
    found
}

/// The newest group that counts: the newest group that the device states to be durable, and after
/// it all whole groups up to the first that is not whole.
fn newest_group(scan: &[(u64, ScannedSlot)], known: u64, rules: CommitRules) -> u64 {
    let whole = || {
        scan.iter().filter_map(|(_, scanned)| match scanned {
            ScannedSlot::Whole(identity, _) => Some(identity),
            ScannedSlot::Broken(..) => None,
        })
    };
    let mut durable = whole().map(|identity| identity.durable).fold(known, u64::max);
    let mut members: BTreeMap<u64, (BTreeSet<u32>, u32)> = BTreeMap::new();
    for identity in whole().filter(|identity| identity.group > durable) {
        let (present, count) = members.entry(identity.group).or_default();
        present.insert(identity.index);
        *count = identity.count;
    }
    while let Some((present, count)) = members.get(&(durable + 1)) {
        if rules.groups_are_counted && present.len() != *count as usize {
            break;
        }
        durable += 1;
    }
    durable
}
