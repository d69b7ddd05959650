//! The repair of a damaged file system.
//!
//! Nothing that can be read is deleted. Inodes without a name go to lost+found; of two owners of a block,
//! the one that was written first loses it; of a damaged inode everything stays that can be read. All changes
//! go through groups, so that a repair survives a power failure at any moment and may be run again.

mod claims;
mod doubt;
mod mend;
mod report;

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use defuse_block::{Blocking, Device};
use defuse_fs::Timestamp;
use defuse_fs::source::{Newest, Unwatched, Watch};

use crate::commit::{Change, Rules};
use crate::format::inode::{Data, Decoded, HEAD, Inode, Pointer, spill};
use crate::format::slot::{self, BODY, Found};
use crate::format::superblock::{COPIES, Superblock};
use crate::format::{BLOCK, UNIT_BLOCKS};
use crate::load::{check_space, records};
use crate::space::{Run, Space};
use crate::store::{
    BadCopies, Need, Store, StoreError, Survey, bad_copies, failed, snapshot, survey_and_see,
};
use claims::Claims;
pub use doubt::{Doubt, Written};
use mend::{Mender, Patient};
pub use report::Repair;

/// Changes of one group: so many free slots there nearly always are.
const GROUPED: usize = 128;

/// How often a block with records is read: inodes that are damaged may point to those of others.
const READ_TIMES: u8 = 4;

/// Repairs the file system on `device`, and returns all changes. `random` makes secrets: nobody may guess its
/// seed. An image without damage is not written to.
///
/// # Errors
///
/// See [`StoreError`]: no superblock can be used, there is no space for what must be written, the device
/// failed, or somebody has to say by `newest` what becomes of groups that may have been complete
/// ([`StoreError::Doubtful`]).
pub fn repair(
    device: &Arc<dyn Device>,
    newest: Option<Newest>,
    random: fastrand::Rng,
) -> Result<Vec<Repair>, StoreError> {
    repair_watched(device, newest, random, &Unwatched)
}

/// As [`repair`]; `watch` sees the work, and can end it ([`StoreError::Interrupted`]): the next repair goes on.
pub(crate) fn repair_watched(
    device: &Arc<dyn Device>,
    newest: Option<Newest>,
    random: fastrand::Rng,
    watch: &dyn Watch,
) -> Result<Vec<Repair>, StoreError> {
    let survey = decided(&**device, newest, watch)?;
    let found = &survey.found;
    let mut line = Blocking::new(&**device).map_err(failed("open a queue"))?;
    let (patients, removed) = patients(&**device, &mut line, &survey)?;
    let claims = kept_blocks(&survey.superblock);
    let mut mender = Mender::new(patients, claims, found.next_ino, Timestamp::now().into());
    mender.mend();
    // A root that was made anew replaces a damaged one.
    let removed: Vec<u64> =
        removed.into_iter().filter(|ino| !mender.inodes.contains_key(ino)).collect();
    let mut repairs = mender.repairs;
    repairs.extend(removed.iter().map(|ino| Repair::Removed { ino: *ino }));
    let cleared = || survey.unreadable.iter().chain(&found.lost_removals).copied();
    repairs.extend(cleared().map(|block| Repair::Slot { block }));
    let slots = found.void.len();
    repairs.extend((slots > 0).then_some(Repair::Unfinished { slots }));
    // The store writes all copies when it begins.
    let BadCopies { lost, torn } = bad_copies(&**device)?;
    let copies = COPIES.into_iter().filter(|block| lost.contains(block) || torn.contains(block));
    repairs.extend(copies.map(|block| Repair::Superblock { block }));
    // It makes the snapshot void, too.
    let is_damaged = snapshot::is_damaged(&**device, &survey.superblock);
    repairs.extend(is_damaged.then_some(Repair::Snapshot));
    if repairs.is_empty() && mender.changed.is_empty() {
        return Ok(repairs);
    }
    check_space(&survey.superblock, u64::MAX)?;
    let mut space = Space::new((survey.superblock.blocks / UNIT_BLOCKS) as u32);
    for (start, end) in mender.claims.runs() {
        for block in (start..end).step_by(UNIT_BLOCKS as usize) {
            space.claim(Run { block, count: UNIT_BLOCKS.min(end - block) as u32 });
        }
    }
    let store = Store::begin(Arc::clone(device), &survey, Rules::ALL, random)?;
    let removals = removed.into_iter().map(|ino| (ino, None));
    // New inodes come first: nothing is moved to a directory that is not there yet.
    let written = mender.changed.iter().rev();
    let written = written.map(|ino| (*ino, mender.inodes.get(ino).map(|found| &found.inode)));
    let changes: Vec<(u64, Option<&Inode>)> = written.chain(removals).collect();
    let all = changes.len().div_ceil(GROUPED) as u64;
    for (at, part) in (0..).zip(changes.chunks(GROUPED)) {
        if watch.ends("writing repairs", at, all) {
            return Err(StoreError::Interrupted);
        }
        write(&store, &mut space, part)?;
    }
    for block in cleared() {
        // One that still cannot be written is reported by the next check.
        if let Err(errno) = line.write(block, &[0; BLOCK]) {
            log::warn!("block {block} cannot be written: {errno}");
        }
    }
    store.flush()?;
    store.rest()?;
    Ok(repairs)
}

/// The slots of the device, with the groups that count. A mount voids groups that are not whole, because a power
/// failure has interrupted them. A slot that cannot be read may be the one that is missing; then such a group may
/// have been acknowledged.
fn decided(
    device: &dyn Device,
    newest: Option<Newest>,
    watch: &dyn Watch,
) -> Result<Survey, StoreError> {
    let mut scan = Vec::new();
    let survey = survey_and_see(device, Rules::ALL, |slots| scan = slots.to_vec(), watch)?;
    let doubt = Doubt::of(&scan, survey.found.durable, &survey.unreadable);
    match (doubt, newest) {
        (None, _) | (_, Some(Newest::Undo)) => Ok(survey),
        (Some(doubt), Some(Newest::Keep)) => Ok(survey.count_up_to(&scan, doubt.groups.1)),
        (Some(mut doubt), None) => {
            let mut line = Blocking::new(device).map_err(failed("open a queue"))?;
            doubt.name(&scan, |block| survey.read(&mut line, block));
            Err(StoreError::Doubtful(doubt))
        }
    }
}

/// Writes inodes, and removal records for those that are `None`, as one durable group.
fn write(
    store: &Store,
    space: &mut Space,
    part: &[(u64, Option<&Inode>)],
) -> Result<(), StoreError> {
    let (mut data, mut changes) = (Vec::new(), Vec::new());
    for (ino, inode) in part {
        let Some(inode) = inode else {
            changes.push(Change::Remove { ino: *ino });
            continue;
        };
        let mut body = inode.body();
        if body.len() > BODY {
            let records = &body[HEAD..];
            let spilled = spill(records, |bytes| -> Result<Pointer, StoreError> {
                let run = space.take(1, None, 0).ok_or(StoreError::Full)?;
                let crc = crc32c::crc32c(&bytes);
                data.push((run.block, bytes));
                Ok(Pointer { block: run.block, crc })
            })?;
            let (levels, pointers) = spilled.ok_or(StoreError::Full)?;
            body = inode.body_outside(levels, records.len() as u64, &pointers);
        }
        changes.push(Change::Write { ino: *ino, body });
    }
    store.write_blocks(&data)?;
    let units = &mut |wanted, need| {
        if need == Need::Runs {
            return None;
        }
        let (first, count) = space.find_units(wanted)?;
        space.reserve(first, count);
        Some((first, count))
    };
    let group = store.commit(store.turn(), changes, true, units)?;
    store.sync(group)
}

/// Blocks that no inode may have.
fn kept_blocks(superblock: &Superblock) -> Claims {
    let mut claims = Claims::new(superblock.blocks / UNIT_BLOCKS * UNIT_BLOCKS);
    for block in COPIES {
        claims.claim(block, 1);
    }
    for chunk in &superblock.chunks {
        let first = u64::from(chunk.first_unit) * UNIT_BLOCKS;
        claims.claim(first, u64::from(chunk.units) * UNIT_BLOCKS);
    }
    claims
}

/// All inodes as far as they can be read, and the numbers of those of which nothing can be.
///
/// # Errors
///
/// A slot that could be read cannot be read again.
fn patients(
    device: &dyn Device,
    line: &mut Blocking,
    survey: &Survey,
) -> Result<(BTreeMap<u64, Patient>, Vec<u64>), StoreError> {
    let found = &survey.found;
    let mut read: HashMap<u64, u8> = HashMap::new();
    let blocks = survey.superblock.blocks;
    // A forged image cannot make this read forever.
    let claim = &mut |run: Run| {
        let times = read.entry(run.block).or_default();
        *times = times.saturating_add(1);
        run.block < blocks && *times <= READ_TIMES
    };
    let (mut inodes, mut removed) = (BTreeMap::new(), Vec::new());
    survey.each(device, true, |ino, body| {
        let stamp = found.live.get(&ino).map_or(0, |version| version.stamp);
        let is_sound = Inode::decode(body).is_some();
        match patient(line, claim, body, stamp, is_sound) {
            Some(patient) => drop(inodes.insert(ino, patient)),
            None => removed.push(ino),
        }
        Ok(())
    })?;
    for (ino, version) in &found.damaged {
        let mut bytes = [0; BLOCK];
        let identity =
            line.read(version.block, &mut bytes).ok().and_then(|()| {
                match slot::decode(&bytes, &survey.place(version.block)?) {
                    Found::Broken(one, other) => [Some(one), other]
                        .into_iter()
                        .flatten()
                        .find(|identity| (identity.ino, identity.stamp) == (*ino, version.stamp)),
                    _ => None,
                }
            });
        let body = identity.map(|identity| slot::damaged_body(&bytes, &identity));
        // What is damaged gives way to whatever is whole.
        match body.and_then(|body| patient(line, claim, body, 0, false)) {
            Some(patient) => drop(inodes.insert(*ino, patient)),
            None => removed.push(*ino),
        }
    }
    Ok((inodes, removed))
}

/// An inode as far as its body can be read. Where the body is damaged, its records are searched for in all
/// places in which they may lie.
fn patient(
    line: &mut Blocking,
    claim: &mut dyn FnMut(Run) -> bool,
    body: &[u8],
    stamp: u64,
    is_sound: bool,
) -> Option<Patient> {
    let sound = is_sound.then(|| Inode::decode(body)).flatten();
    let readable = (0..=2).filter_map(|levels| Inode::decode_readable(body, levels));
    let mut best: Option<Patient> = None;
    for (nth, decoded) in sound.into_iter().chain(readable).enumerate() {
        let found = match decoded {
            Decoded::Whole(inode) => {
                Patient { inode, stamp, records: Vec::new(), whole: is_sound && nth == 0 }
            }
            Decoded::Outside { inode, levels, bytes, pointers } => {
                let spilled = records(line, claim, (levels, bytes), pointers);
                let complete = inode.clone().with_records(&spilled.bytes).is_some();
                let whole = is_sound && nth == 0 && spilled.whole && complete;
                let inode = inode.with_readable_records(&spilled.bytes);
                Patient { inode, stamp, records: spilled.blocks, whole }
            }
        };
        if found.whole {
            return Some(found);
        }
        let worth = |patient: &Patient| {
            (!patient.inode.links.is_empty(), patient.inode.data != Data::Nothing)
        };
        if best.as_ref().is_none_or(|best| worth(&found) > worth(best)) {
            best = Some(found);
        }
    }
    best
}
