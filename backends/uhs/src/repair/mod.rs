//! The repair of a damaged file system.
//!
//! No readable data is deleted. Inodes without a name go to lost+found; of two owners of a block,
//! the owner that was written first loses it; of a damaged inode, all readable parts stay. All
//! changes go through groups, so that a repair survives a power failure at any moment and may be
//! run again.

mod claims;
mod inconsistencies;
mod report;
mod uncertain_groups;

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use defuse_block::{BlockDevice, BlockingQueue};
use defuse_fs::Timestamp;
use defuse_fs::source::{NewestChanges, NoWatch, WorkWatch};

use crate::commit::{CommitRules, InodeChange};
use crate::format::inode::{BlockPointer, DecodedBody, DiskInode, HEAD, InodeData, write_overflow};
use crate::format::slot::{self, BODY, FoundSlot};
use crate::format::superblock::{COPIES, Superblock};
use crate::format::{BLOCK, UNIT_BLOCKS};
use crate::load::{check_space, records};
use crate::space::{BlockRun, BlockSpace};
use crate::store::{
    BadCopies, InodeStore, SlotSurvey, StoreError, UnitUse, device_error, find_bad, snapshot,
    survey_with_slots,
};
use claims::BlockClaims;
use inconsistencies::{InodeRepairer, RepairInode};
pub use report::RepairAction;
pub use uncertain_groups::{DoubtfulGroups, WrittenInode};

/// Changes of one group: so many free slots there nearly always are.
const GROUPED: usize = 128;

/// The number of times that a block with records is read: damaged inodes may point to the blocks of
/// others.
const READ_TIMES: u8 = 4;

/// Repairs the file system on `device`, and returns all changes. `random` generates secrets: its
/// seed must be unpredictable. An image without damage is not written to.
///
/// # Errors
///
/// See [`StoreError`]: no superblock can be used, there is no space for the blocks to be written,
/// the device failed, or the caller must decide by `newest` about groups that may have been
/// complete ([`StoreError::Doubtful`]).
pub fn repair(
    device: &Arc<dyn BlockDevice>,
    newest: Option<NewestChanges>,
    random: fastrand::Rng,
) -> Result<Vec<RepairAction>, StoreError> {
    repair_watched(device, newest, random, &NoWatch)
}

/// Performs [`repair`]; `watch` sees the work, and can end it ([`StoreError::Interrupted`]): the
/// next repair continues.
pub(crate) fn repair_watched(
    device: &Arc<dyn BlockDevice>,
    newest: Option<NewestChanges>,
    random: fastrand::Rng,
    watch: &dyn WorkWatch,
) -> Result<Vec<RepairAction>, StoreError> {
    let survey = survey_with_decision(&**device, newest, watch)?;
    let found = &survey.found;
    let mut line = BlockingQueue::new(&**device).map_err(device_error("open a queue"))?;
    let (broken_inodes, removed) = read_inodes(&**device, &mut line, &survey)?;
    let claims = reserved_blocks(&survey.superblock);
    let mut repairer =
        InodeRepairer::new(broken_inodes, claims, found.next_ino, Timestamp::now().into());
    repairer.repair();
    // A root that was made anew replaces a damaged one.
    let removed: Vec<u64> =
        removed.into_iter().filter(|ino| !repairer.inodes.contains_key(ino)).collect();
    let mut repairs = repairer.repairs;
    repairs.extend(removed.iter().map(|ino| RepairAction::Removed { ino: *ino }));
    let cleared = || survey.unreadable.iter().chain(&found.lost_removals).copied();
    repairs.extend(cleared().map(|block| RepairAction::Slot { block }));
    let slots = found.void.len();
    repairs.extend((slots > 0).then_some(RepairAction::Unfinished { slots }));
    // The store writes all copies when it begins.
    let BadCopies { lost, torn, tables } = find_bad(&**device)?;
    let copies = COPIES.into_iter().filter(|block| lost.contains(block) || torn.contains(block));
    repairs.extend(copies.map(|block| RepairAction::Superblock { block }));
    repairs.extend(tables.into_iter().map(|block| RepairAction::Table { block }));
    // The store makes the snapshot void, too.
    let is_damaged = snapshot::is_damaged(&**device, &survey.superblock);
    repairs.extend(is_damaged.then_some(RepairAction::Snapshot));
    if repairs.is_empty() && repairer.changed.is_empty() {
        return Ok(repairs);
    }
    check_space(&survey.superblock, u64::MAX)?;
    let mut space = BlockSpace::new((survey.superblock.blocks / UNIT_BLOCKS) as u32);
    for (start, end) in repairer.claims.claimed_runs() {
        for block in (start..end).step_by(UNIT_BLOCKS as usize) {
            space.claim(BlockRun { block, count: UNIT_BLOCKS.min(end - block) as u32 });
        }
    }
    let store = InodeStore::begin(Arc::clone(device), &survey, CommitRules::ALL, random)?;
    let removals = removed.into_iter().map(|ino| (ino, None));
    // New inodes come first: nothing is moved to a directory that is not there yet.
    let written = repairer.changed.iter().rev();
    let written = written.map(|ino| (*ino, repairer.inodes.get(ino).map(|found| &found.inode)));
    let changes: Vec<(u64, Option<&DiskInode>)> = written.chain(removals).collect();
    let all = changes.len().div_ceil(GROUPED) as u64;
    for (at, part) in (0..).zip(changes.chunks(GROUPED)) {
        if watch.report_progress("writing repairs", at, all) {
            return Err(StoreError::Interrupted);
        }
        write(&store, &mut space, part)?;
    }
    for block in cleared() {
        // The next check reports a block that still cannot be written.
        if let Err(errno) = line.write(block, &[0; BLOCK]) {
            log::warn!("block {block} cannot be written: {errno}");
        }
    }
    store.flush()?;
    store.record_clean_state()?;
    Ok(repairs)
}

/// The slots of the device, with the groups that count. A mount voids groups that are not whole,
/// because a power failure has interrupted them. But if a slot cannot be read, it may be the
/// missing slot of such a group, and the group may have been acknowledged.
fn survey_with_decision(
    device: &dyn BlockDevice,
    newest: Option<NewestChanges>,
    watch: &dyn WorkWatch,
) -> Result<SlotSurvey, StoreError> {
    let mut scan = Vec::new();
    let survey = survey_with_slots(device, CommitRules::ALL, |slots| scan = slots.to_vec(), watch)?;
    let doubt = DoubtfulGroups::find(&scan, survey.found.durable, &survey.unreadable);
    match (doubt, newest) {
        (None, _) | (_, Some(NewestChanges::Undo)) => Ok(survey),
        (Some(doubt), Some(NewestChanges::Keep)) => Ok(survey.count_up_to(&scan, doubt.groups.1)),
        (Some(mut doubt), None) => {
            let mut line = BlockingQueue::new(device).map_err(device_error("open a queue"))?;
            doubt.name(&scan, |block| survey.read(&mut line, block));
            Err(StoreError::Doubtful(doubt))
        }
    }
}

/// Writes inodes, and removal records for inodes that are `None`, as one durable group.
fn write(
    store: &InodeStore,
    space: &mut BlockSpace,
    part: &[(u64, Option<&DiskInode>)],
) -> Result<(), StoreError> {
    let (mut data, mut changes) = (Vec::new(), Vec::new());
    for (ino, inode) in part {
        let Some(inode) = inode else {
            changes.push(InodeChange::Remove { ino: *ino });
            continue;
        };
        let mut body = inode.body();
        if body.len() > BODY {
            let records = &body[HEAD..];
            let spilled = write_overflow(records, |bytes| -> Result<BlockPointer, StoreError> {
                let run = space.take(1, None, 0).ok_or(StoreError::Full)?;
                let crc = crc32c::crc32c(&bytes);
                data.push((run.block, bytes));
                Ok(BlockPointer { block: run.block, crc })
            })?;
            let (levels, pointers) = spilled.ok_or(StoreError::Full)?;
            body = inode.body_outside(levels, records.len() as u64, &pointers);
        }
        changes.push(InodeChange::Write { ino: *ino, body });
    }
    store.write_blocks(&data)?;
    let units = &mut |wanted, need| {
        if need == UnitUse::Runs {
            return None;
        }
        let (first, count) = space.find_units(wanted)?;
        space.reserve(first, count);
        Some((first, count))
    };
    let group = store.commit(store.take_turn(), changes, true, units)?;
    store.sync(group)
}

/// Blocks that no inode may have.
fn reserved_blocks(superblock: &Superblock) -> BlockClaims {
    let mut claims = BlockClaims::new(superblock.blocks / UNIT_BLOCKS * UNIT_BLOCKS);
    for block in COPIES {
        claims.claim(block, 1);
    }
    for chunk in &superblock.chunks {
        let first = u64::from(chunk.first_unit) * UNIT_BLOCKS;
        claims.claim(first, u64::from(chunk.units) * UNIT_BLOCKS);
    }
    claims
}

/// All inodes as far as they can be read, and the numbers of inodes without any readable part.
///
/// # Errors
///
/// Fails if a slot that could be read before cannot be read again.
fn read_inodes(
    device: &dyn BlockDevice,
    line: &mut BlockingQueue,
    survey: &SlotSurvey,
) -> Result<(BTreeMap<u64, RepairInode>, Vec<u64>), StoreError> {
    let found = &survey.found;
    let mut read: HashMap<u64, u8> = HashMap::new();
    let blocks = survey.superblock.blocks;
    // A forged image cannot make this read forever.
    let claim = &mut |run: BlockRun| {
        let times = read.entry(run.block).or_default();
        *times = times.saturating_add(1);
        run.block < blocks && *times <= READ_TIMES
    };
    let (mut inodes, mut removed) = (BTreeMap::new(), Vec::new());
    survey.for_each_body(device, true, |ino, body| {
        let stamp = found.live.get(&ino).map_or(0, |version| version.stamp);
        let is_sound = DiskInode::decode(body).is_some();
        match read_inode(line, claim, body, stamp, is_sound) {
            Some(broken) => drop(inodes.insert(ino, broken)),
            None => removed.push(ino),
        }
        Ok(())
    })?;
    for (ino, version) in &found.damaged {
        let mut bytes = [0; BLOCK];
        let identity =
            line.read(version.block, &mut bytes).ok().and_then(|()| {
                match slot::decode(&bytes, &survey.identity_at(version.block)?) {
                    FoundSlot::Broken(one, other) => [Some(one), other]
                        .into_iter()
                        .flatten()
                        .find(|identity| (identity.ino, identity.stamp) == (*ino, version.stamp)),
                    _ => None,
                }
            });
        let body = identity.map(|identity| slot::damaged_body(&bytes, &identity));
        // The claims of a damaged inode yield to the claims of whole inodes.
        match body.and_then(|body| read_inode(line, claim, body, 0, false)) {
            Some(broken) => drop(inodes.insert(*ino, broken)),
            None => removed.push(*ino),
        }
    }
    Ok((inodes, removed))
}

/// An inode as far as its body can be read. If the body is damaged, its records are searched for in
/// all possible places.
fn read_inode(
    line: &mut BlockingQueue,
    claim: &mut dyn FnMut(BlockRun) -> bool,
    body: &[u8],
    stamp: u64,
    is_sound: bool,
) -> Option<RepairInode> {
    let sound = is_sound.then(|| DiskInode::decode(body)).flatten();
    let readable = (0..=2).filter_map(|levels| DiskInode::decode_readable(body, levels));
    let mut best: Option<RepairInode> = None;
    for (nth, decoded) in sound.into_iter().chain(readable).enumerate() {
        let found = match decoded {
            DecodedBody::Whole(inode) => {
                RepairInode { inode, stamp, records: Vec::new(), whole: is_sound && nth == 0 }
            }
            DecodedBody::Outside { inode, levels, bytes, pointers } => {
                let spilled = records(line, claim, (levels, bytes), pointers);
                let complete = inode.clone().with_records(&spilled.bytes).is_some();
                let whole = is_sound && nth == 0 && spilled.whole && complete;
                let inode = inode.with_readable_records(&spilled.bytes);
                RepairInode { inode, stamp, records: spilled.blocks, whole }
            }
        };
        if found.whole {
            return Some(found);
        }
        let worth = |broken: &RepairInode| {
            (!broken.inode.links.is_empty(), broken.inode.data != InodeData::Nothing)
        };
        if best.as_ref().is_none_or(|best| worth(&found) > worth(best)) {
            best = Some(found);
        }
    }
    best
}
