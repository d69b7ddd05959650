//! Closing commit groups, and recording that they are durable.

use std::collections::btree_map::OccupiedEntry;
use std::collections::{BTreeMap, HashSet};

use hashbrown::HashMap;
use smallvec::SmallVec;

use super::copies::InodeCopies;
use super::recover::RecoveredState;
use super::slots::{InodeSlot, NOBODY, SlotBlocks};
use super::{CommitRules, SlotTable};
use crate::format::slot::{REMOVALS, SlotHeader, SlotKind, removals};
use crate::format::superblock::SlotChunk;

/// A change of one inode, as it is when the group closes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum InodeChange {
    /// An inode, new or not, and the body that its slot is to hold.
    Write {
        /// The number of the inode, not 0.
        ino: u64,
        /// The body of the slot.
        body: Vec<u8>,
    },
    /// The inode is removed.
    Remove {
        /// The number of the inode.
        ino: u64,
    },
}

/// A slot that is to be written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SlotWrite {
    pub(crate) block: u64,
    pub(crate) identity: SlotHeader,
    pub(crate) body: Vec<u8>,
}

/// A closed group. Its slots may be written in any order, and at the same time as slots of other
/// groups.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ClosedGroup {
    pub(crate) number: u64,
    pub(crate) writes: SmallVec<[SlotWrite; 1]>,
}

/// The result of [`CommitState::stale_and_removal_slots`].
pub(crate) type LeftoverSlots = (Vec<(u64, u64)>, Vec<(u64, Vec<u64>)>);

/// There are too few slots that may be overwritten.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NoSlots {
    /// There will be enough when a superblock states that [`CommitState::newest_durable`] is
    /// durable.
    UntilMentioned,
    /// There may be enough when the groups that were closed are durable.
    UntilDurable,
    /// There are not so many slots at all: another chunk is needed.
    Full,
}

/// The state of commits.
#[derive(Debug)]
pub(crate) struct CommitState {
    rules: CommitRules,
    slots: SlotTable,
    next_group: u64,
    next_stamp: u64,
    /// The newest group that is durable.
    durable: u64,
    /// The newest group that a durable slot or superblock states to be durable.
    mentioned: u64,
    /// For each group that is not durable, the statements of its slots.
    mentions: BTreeMap<u64, GroupStatements>,
    copies: InodeCopies,
    /// Slots whose overwriting is not durable: by group, each with the inode whose copy is
    /// overwritten.
    overwritten: BTreeMap<u64, OverwrittenSlots>,
    /// Inodes that are gone and have stale copies, with the block that lists each.
    removed: HashMap<u64, u64>,
    /// Removal blocks that are needed.
    removal_blocks: HashMap<u64, RemovalBlock>,
    /// The stamps of the needed removal blocks, each with the number of blocks.
    needed_stamps: BTreeMap<u64, usize>,
    /// Removal blocks that no inode needs, by stamp, until the device states that they are not
    /// needed.
    obsolete: BTreeMap<u64, Vec<u64>>,
}

/// The slots that a group overwrites, each with the inode whose copy lay there.
type OverwrittenSlots = SmallVec<[(u64, Option<u64>); 2]>;

/// The statements that the slots of a group make about others.
#[derive(Clone, Copy, Debug)]
struct GroupStatements {
    /// The newest durable group.
    durable: u64,
    /// No older removal block is needed.
    removals_from: u64,
}

#[derive(Clone, Copy, Debug)]
struct RemovalBlock {
    /// Inodes in `removed` that need it.
    needed: usize,
    /// Its stamp. All blocks from before the mount have one number, which is not above their
    /// stamps: slots state a higher stamp only when none of those blocks is needed.
    stamp: u64,
}

impl InodeChange {
    /// The inode.
    pub(crate) fn ino(&self) -> u64 {
        match self {
            InodeChange::Write { ino, .. } | InodeChange::Remove { ino } => *ino,
        }
    }
}

impl CommitState {
    /// Starts from the state that a scan of `chunks` has found.
    pub(crate) fn new(chunks: &[SlotChunk], found: &RecoveredState, rules: CommitRules) -> Self {
        let mut groups = CommitState {
            rules,
            slots: SlotTable::new(chunks, rules.usable),
            next_group: found.durable + 1,
            // Slots of nothing have the one before.
            next_stamp: found.next_stamp + 1,
            durable: found.durable,
            mentioned: found.durable,
            mentions: BTreeMap::new(),
            copies: InodeCopies::new(),
            overwritten: BTreeMap::new(),
            removed: HashMap::new(),
            removal_blocks: HashMap::new(),
            needed_stamps: BTreeMap::new(),
            obsolete: BTreeMap::new(),
        };
        for (ino, block) in &found.copies {
            let slot = InodeSlot { owner: *ino, ..groups.slots.get(*block) };
            groups.slots.set(*block, slot);
            match found.live.get(ino) {
                Some(version) if version.block == *block => {
                    groups.slots.set(*block, InodeSlot { live: true, ..slot });
                    groups.copies.set_live(*ino, *block);
                }
                _ => groups.copies.add_stale(*ino, *block),
            }
        }
        for (block, inos) in &found.removals {
            let needed: Vec<u64> = inos.iter().copied().filter(|ino| groups.needs(*ino)).collect();
            if needed.is_empty() {
                groups.is_obsolete(*block, found.next_stamp);
            }
            for ino in needed {
                groups.list(ino, *block, found.removals_from);
            }
        }
        groups
    }

    /// True if the inode has stale copies, and no known removal block lists it.
    fn needs(&self, ino: u64) -> bool {
        self.copies.has_stale(ino) && !self.removed.contains_key(&ino)
    }

    fn list(&mut self, ino: u64, block: u64, stamp: u64) {
        self.removed.insert(ino, block);
        let block_of = self.removal_blocks.entry(block).or_insert_with(|| {
            *self.needed_stamps.entry(stamp).or_default() += 1;
            RemovalBlock { needed: 0, stamp }
        });
        block_of.needed += 1;
        self.slots.set(block, InodeSlot { live: true, ..self.slots.get(block) });
    }

    /// Adds an empty chunk, which the superblock on the device must already list.
    pub(crate) fn add(&mut self, chunk: &SlotChunk) {
        self.slots.add(chunk);
    }

    /// Takes `count` slots for which `fits` is true, to be overwritten by the table of chunks.
    pub(crate) fn take_for_table(
        &mut self,
        count: usize,
        fits: &dyn Fn(&u64) -> bool,
    ) -> Option<Vec<u64>> {
        let reusable = self.newest_reusable();
        self.slots.take_where(count, reusable, fits)
    }

    /// Records that the table of chunks durably lies in these blocks: what was in their slots is
    /// gone.
    pub(crate) fn hold_table(&mut self, blocks: impl Iterator<Item = u64>) {
        for block in blocks {
            let former = self.slots.get(block).owner();
            self.slots.set(block, InodeSlot { owner: NOBODY, live: true, writing: false });
            if let Some(ino) = former {
                self.forget_copy(ino, block);
            }
        }
    }

    /// Records that no superblock leads to these blocks of a former table.
    pub(crate) fn release_table(&mut self, blocks: &[u64]) {
        blocks.iter().for_each(|block| self.slots.release(*block, 0));
    }

    /// Units all of whose slots may be overwritten, but only so many that `keep` such slots remain.
    pub(crate) fn empty_units(&mut self, keep: usize) -> Vec<u32> {
        let reusable = self.newest_reusable();
        self.slots.empty_units(keep, reusable)
    }

    /// Closes units with few current copies, see [`SlotTable::close_units`].
    pub(crate) fn close_units(
        &mut self,
        few: (usize, usize),
        by_chunk: bool,
    ) -> (Vec<u32>, Vec<u64>) {
        let reusable = self.newest_reusable();
        self.slots.close_units(few, by_chunk, reusable)
    }

    /// Reopens closed units: their slots may be taken again.
    pub(crate) fn reopen(&mut self, units: &[u32]) {
        self.slots.reopen(units);
    }

    /// Units that are closed.
    pub(crate) fn count_closed_units(&self) -> usize {
        self.slots.count_closed_units()
    }

    /// True if a group of so many changes would be written to many places
    /// ([`SlotTable::is_scattered`]), although less than half of all slots hold current copies.
    pub(crate) fn is_scattered(&mut self, count: usize) -> bool {
        let reusable = self.newest_reusable();
        self.slots.count() < 2 * self.copies.count() && self.slots.is_scattered(count, reusable)
    }

    /// Removes a unit that a durable superblock no longer lists: the copies in it are gone.
    pub(crate) fn remove_unit(&mut self, unit: u32) {
        for (block, ino) in self.slots.remove_unit(unit) {
            self.forget_copy(ino, block);
        }
    }

    /// The block of the slot with the current copy of an inode.
    pub(crate) fn live(&self, ino: u64) -> Option<u64> {
        self.copies.live(ino)
    }

    /// Slots that may be overwritten.
    pub(crate) fn free_slots(&self) -> usize {
        self.slots.free()
    }

    /// The newest group that is durable.
    pub(crate) fn newest_durable(&self) -> u64 {
        self.durable
    }

    /// The largest number that has been written to a slot: a group or a stamp.
    pub(crate) fn largest(&self) -> u64 {
        self.next_group.max(self.next_stamp)
    }

    /// True if the device states that the newest durable group is durable.
    pub(crate) fn is_mentioned(&self) -> bool {
        self.mentioned == self.durable
    }

    /// A number that is higher than the stamps of all slots.
    pub(crate) fn next_stamp(&self) -> u64 {
        self.next_stamp
    }

    /// The slots of stale copies, with their inodes, and the removal slots that must stay, each
    /// with the inodes that need it. `None` unless all groups are durable and all slots hold what
    /// this state records.
    pub(crate) fn stale_and_removal_slots(&self) -> Option<LeftoverSlots> {
        let at_rest = self.durable == self.newest_group() && self.mentions.is_empty();
        let lies = |ino: u64, block: u64| {
            let slot = self.slots.get(block);
            slot.owner == ino && !slot.live && !slot.writing
        };
        let stale = self.copies.list_stale();
        let sound = at_rest && stale.iter().all(|(ino, block)| lies(*ino, *block));
        let mut removals: BTreeMap<u64, Vec<u64>> = BTreeMap::new();
        for (ino, block) in &self.removed {
            removals.entry(*block).or_default().push(*ino);
        }
        removals.values_mut().for_each(|inos| inos.sort_unstable());
        removals.extend(self.obsolete.values().flatten().map(|block| (*block, Vec::new())));
        sound.then(|| (stale, removals.into_iter().collect()))
    }

    /// The newest group that was closed.
    pub(crate) fn newest_group(&self) -> u64 {
        self.next_group - 1
    }

    /// Closes a group of `changes`, each of another inode. `None` where nothing has to be written.
    ///
    /// # Errors
    ///
    /// [`NoSlots`] and the changes; nothing has changed then.
    pub(crate) fn close(
        &mut self,
        changes: Vec<InodeChange>,
    ) -> Result<Option<ClosedGroup>, (NoSlots, Vec<InodeChange>)> {
        debug_assert!(
            changes.len() < 2
                || changes.iter().map(InodeChange::ino).collect::<HashSet<_>>().len()
                    == changes.len(),
            "an inode changes once in a group"
        );
        // An inode without a copy on the device cannot reappear.
        let gone = |change: &InodeChange| match change {
            InodeChange::Remove { ino } => self.copies.has_any(*ino).then_some(*ino),
            InodeChange::Write { .. } => None,
        };
        let gone: Vec<u64> = changes.iter().filter_map(gone).collect();
        let written = changes.iter().filter(|change| matches!(change, InodeChange::Write { .. }));
        let count = written.count() + gone.len().div_ceil(REMOVALS);
        if count == 0 {
            return Ok(None);
        }
        let mut blocks = match self.take(count) {
            Ok(blocks) => blocks.into_iter(),
            Err(none) => return Err((none, changes)),
        };
        let number = self.next_group;
        self.next_group += 1;
        let removals_from = self.removals_from();
        let mut group = ClosedGroup { number, writes: SmallVec::with_capacity(count) };
        let written = changes.into_iter().filter_map(|change| match change {
            InodeChange::Write { ino, body } => Some((ino, body)),
            InodeChange::Remove { .. } => None,
        });
        // The searches do not depend on each other, so that the processor waits for several of them
        // at once.
        let mut former: SmallVec<[(u64, u64); 4]> = SmallVec::with_capacity(count);
        for ((ino, body), block) in written.zip(blocks.by_ref()) {
            former.extend(self.copies.set_live(ino, block).map(|old| (ino, old)));
            self.write(&mut group, block, SlotKind::Inode, ino, body);
        }
        former.iter().for_each(|(_, old)| self.slots.release(*old, number));
        former.into_iter().for_each(|(ino, old)| self.copies.add_stale(ino, old));
        for (inos, block) in gone.chunks(REMOVALS).zip(blocks) {
            let stamp = self.next_stamp;
            self.write(&mut group, block, SlotKind::Removals, 0, removals(inos));
            for ino in inos {
                if let Some(old) = self.copies.remove_live(*ino) {
                    self.slots.release(old, number);
                    self.copies.add_stale(*ino, old);
                }
                self.list(*ino, block, stamp);
            }
            if !self.rules.removals_outlive_copies {
                self.slots.release(block, number);
            }
        }
        let count = group.writes.len() as u32;
        for (index, write) in (0..).zip(&mut group.writes) {
            let (group, durable) = (number, self.durable);
            write.identity =
                SlotHeader { group, index, count, durable, removals_from, ..write.identity };
        }
        self.mentions.insert(number, GroupStatements { durable: self.durable, removals_from });
        Ok(Some(group))
    }

    /// Records that the slot of `group` at `block` could not be written. Its content is unknown, so
    /// the slot is not used again. Returns the block of another slot to write instead.
    ///
    /// # Errors
    ///
    /// [`NoSlots`]; nothing has changed then.
    pub(crate) fn move_failed_slot(&mut self, group: u64, block: u64) -> Result<u64, NoSlots> {
        let other = self.take(1)?[0];
        let owner = self.slots.get(block).owner;
        // A copy that lay at `block` may still be there.
        let overwritten = self.overwritten.entry(group).or_default();
        overwritten.retain(|(old, _)| *old != block);
        overwritten.push((other, self.slots.get(other).owner()));
        self.slots.replace(block, other);
        match owner {
            NOBODY => {
                self.removed.values_mut().filter(|at| **at == block).for_each(|at| *at = other);
                if let Some(needed) = self.removal_blocks.remove(&block) {
                    self.removal_blocks.insert(other, needed);
                }
            }
            ino => {
                self.copies.add_stale(ino, block);
                match self.copies.live(ino) == Some(block) {
                    true => drop(self.copies.set_live(ino, other)),
                    // A later group has replaced or removed the inode since.
                    false => self.copies.add_stale(ino, other),
                }
            }
        }
        Ok(other)
    }

    /// Records that all slots of the groups up to `group` survive a power failure.
    pub(crate) fn durable(&mut self, group: u64) {
        debug_assert!(group < self.next_group, "group {group} was never closed");
        self.durable = self.durable.max(group);
        let mut removals_from = 0;
        while let Some(mentioned) = take_up_to(&mut self.mentions, group) {
            self.mentioned = self.mentioned.max(mentioned.durable);
            removals_from = removals_from.max(mentioned.removals_from);
        }
        if !self.obsolete.is_empty() {
            let needed = self.obsolete.split_off(&removals_from);
            let obsolete = std::mem::replace(&mut self.obsolete, needed);
            self.release_all(obsolete);
        }
        for (block, _) in self.overwritten.range(..=group).flat_map(|(_, blocks)| blocks) {
            self.slots.set(*block, InodeSlot { writing: false, ..self.slots.get(*block) });
        }
        while let Some(overwritten) = take_up_to(&mut self.overwritten, group) {
            for (block, owner) in overwritten {
                if let Some(ino) = owner {
                    self.copy_is_gone(ino, block);
                }
            }
        }
    }

    /// Records that a durable superblock states that `group` is durable.
    pub(crate) fn record_durable(&mut self, group: u64) {
        self.mentioned = self.mentioned.max(group);
    }

    /// The newest group whose freed slots may be overwritten now.
    fn newest_reusable(&self) -> u64 {
        match (self.rules.reuse_waits_for_group, self.rules.reuse_waits_for_mention) {
            (true, true) => self.mentioned,
            (true, false) => self.durable,
            (false, _) => u64::MAX,
        }
    }

    fn take(&mut self, count: usize) -> Result<SlotBlocks, NoSlots> {
        if let Some(found) = self.slots.take(count, self.newest_reusable()) {
            return Ok(found);
        }
        // A full device needs their slots, and a false alarm after a power failure is better than a
        // group that fails.
        let obsolete = std::mem::take(&mut self.obsolete);
        self.release_all(obsolete);
        if let Some(found) = self.slots.take(count, self.newest_reusable()) {
            return Ok(found);
        }
        if self.slots.has(count, self.durable) {
            return Err(NoSlots::UntilMentioned);
        }
        // Slots that groups in flight have written and freed become free after these groups.
        let all_durable = self.durable == self.newest_group();
        Err(if all_durable { NoSlots::Full } else { NoSlots::UntilDurable })
    }

    /// Adds a slot to a group that is being closed. The former content of the slot will be
    /// overwritten.
    fn write(
        &mut self,
        group: &mut ClosedGroup,
        block: u64,
        kind: SlotKind,
        ino: u64,
        body: Vec<u8>,
    ) {
        let identity = SlotHeader::new(kind, ino, self.next_stamp);
        self.next_stamp += 1;
        group.writes.push(SlotWrite { block, identity, body });
        let old = self.slots.get(block).owner();
        self.slots.set(block, InodeSlot { owner: ino, live: true, writing: true });
        self.overwritten.entry(group.number).or_default().push((block, old));
    }

    /// Records that the copy of `ino` at `block` is durably overwritten, perhaps by a newer copy of
    /// `ino`.
    fn copy_is_gone(&mut self, ino: u64, block: u64) {
        if self.slots.get(block).owner() != Some(ino) || !self.slot_is_stale(ino, block) {
            self.forget_copy(ino, block);
        }
    }

    /// Records that no copy of `ino` lies at `block`.
    fn forget_copy(&mut self, ino: u64, block: u64) {
        if !self.copies.remove_stale(ino, block) {
            return;
        }
        let Some(list) = self.removed.remove(&ino) else { return };
        let Some(RemovalBlock { needed, stamp }) = self.removal_blocks.get_mut(&list) else {
            return;
        };
        *needed -= 1;
        if *needed == 0 {
            let stamp = *stamp;
            self.removal_blocks.remove(&list);
            if let Some(count) = self.needed_stamps.get_mut(&stamp) {
                *count -= 1;
                if *count == 0 {
                    self.needed_stamps.remove(&stamp);
                }
            }
            self.is_obsolete(list, stamp);
        }
    }

    /// Records that no inode needs a removal block. If the block is torn while its slot is written
    /// anew, recovery must know that it was not needed.
    fn is_obsolete(&mut self, block: u64, stamp: u64) {
        match self.rules.removals_wait_for_mention {
            true => {
                self.slots.set(block, InodeSlot { live: true, ..self.slots.get(block) });
                self.obsolete.entry(stamp).or_default().push(block);
            }
            false => self.slots.release(block, self.durable),
        }
    }

    /// The stamp of the oldest removal block that is needed, or may be needed.
    fn removals_from(&self) -> u64 {
        self.needed_stamps.keys().next().copied().unwrap_or(self.next_stamp)
    }

    fn release_all(&mut self, obsolete: BTreeMap<u64, Vec<u64>>) {
        for block in obsolete.into_values().flatten() {
            self.slots.release(block, self.durable);
        }
    }

    /// True if the slot holds a stale copy of its owner.
    fn slot_is_stale(&self, ino: u64, block: u64) -> bool {
        !self.slots.get(block).live && self.copies.live(ino) != Some(block)
    }
}

/// Takes the first value out if its group is not later than `group`. The memory of the map stays.
fn take_up_to<T>(map: &mut BTreeMap<u64, T>, group: u64) -> Option<T> {
    map.first_entry().filter(|first| *first.key() <= group).map(OccupiedEntry::remove)
}
