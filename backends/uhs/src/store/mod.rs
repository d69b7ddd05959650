//! Inodes on a device: this module performs the I/O of the commit rule.
//!
//! [`survey`] reads a device and writes nothing. [`InodeStore::begin`] performs the writes of a
//! mount. From then on groups overlap in time: each thread does the I/O of its own groups, and
//! waiting threads share flushes. A group passes through these stages:
//!
//! 1. [`InodeStore::take_turn`] fixes its place among the groups.
//! 2. Blocks to which its inodes will point are written, and [`InodeStore::flush`] makes them
//!    durable.
//! 3. [`InodeStore::commit`] gives it a number and slots, and writes them.
//! 4. [`InodeStore::sync`] returns once it survives a power failure.

mod chunks;
mod copies;
mod error;
mod flushes;
mod inode_bodies;
mod lanes;
mod places;
mod scan;
pub(crate) mod snapshot;
#[cfg(test)]
pub(crate) use copies::downgrade;
#[cfg(test)]
mod tests;
mod turns;
mod writing;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use defuse_block::{BlockDevice, BlockOpKind, BlockingQueue, Errno, FRAME};

use crate::commit::{ClosedGroup, CommitRules, CommitState, InodeChange, NoSlots};
use crate::format::slot::{self, SlotHeader, SlotIdentity, SlotKind};
use crate::format::superblock::Superblock;
use crate::format::{LAST, LAST_OPENED, LAST_WRITTEN, UNIT_BLOCKS, are_neighbours};

pub(crate) use chunks::{chunks_left, slots};
use copies::write_superblock;
pub(crate) use copies::{BadCopies, find_bad, grow, make, read_superblock, superblock, upgrade};
pub use error::StoreError;
pub(crate) use error::device_error;
use flushes::DeviceFlushes;
use lanes::DeviceQueues;
pub(crate) use places::FrozenSlots;
use places::SlotPlaces;
pub(crate) use scan::{SlotSurvey, check_numbers, survey, survey_with_slots};
pub(crate) use turns::GroupTurn;
use turns::GroupTurns;
use writing::FailedSlot;
pub(crate) use writing::GroupWrite;

/// Frames for slots and data that are being written: 8 MiB.
const FRAMES: u32 = 2048;

/// Inode numbers that are taken at a time.
const INO_STEP: u64 = 1 << 20;

/// Slots that are tried for one write before the device counts as failed.
const TRIES: usize = 8;

/// The inodes of a device, each a body under a number.
pub(crate) struct InodeStore {
    device: Arc<dyn BlockDevice>,
    lanes: Arc<DeviceQueues>,
    turns: Arc<GroupTurns>,
    flushes: DeviceFlushes,
    state: Mutex<StoreState>,
    /// A group got further, or the device failed.
    changed: Condvar,
    rules: CommitRules,
    failed: AtomicBool,
    /// A slot could not be written, and lies elsewhere: a part of the write may be in its old
    /// place.
    replaced: AtomicBool,
    slots_written: AtomicU64,
    superblocks: AtomicU64,
    /// The newest group when this mount began.
    begun: u64,
}

/// The progress of a store since its mount.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct StoreProgress {
    /// Groups that were closed.
    pub(crate) groups: u64,
    /// Closed groups that would not survive a power failure.
    pub(crate) not_durable: u64,
    pub(crate) slots_written: u64,
    /// Slots that may be overwritten.
    pub(crate) slots_free: u64,
    /// Versions of the superblock.
    pub(crate) superblocks: u64,
}

struct StoreState {
    superblock: Superblock,
    /// The places of the slots of all chunks of the superblock.
    places: Arc<SlotPlaces>,
    groups: CommitState,
    /// Groups that are not durable.
    stages: BTreeMap<u64, GroupStage>,
    random: fastrand::Rng,
}

/// The state of a group that is not durable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum GroupStage {
    /// Its slots are in flight.
    Writing,
    /// Its slots are in flight, and survive a power failure once they are complete.
    WritingThrough,
    /// All its slots are on the device.
    Written,
    /// Its slots survive a power failure, but slots of an earlier group do not yet.
    Safe,
}

impl GroupStage {
    /// True while the content of the slots is unknown.
    fn is_in_flight(self) -> bool {
        matches!(self, GroupStage::Writing | GroupStage::WritingThrough)
    }
}

/// The purpose for which a store requests units.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum UnitUse {
    /// There are no slots for a group.
    Slots,
    /// There are some of the units that were requested for slots, and more make further requests
    /// rare.
    MoreSlots,
    /// There are slots, but a write for each few of them would take long.
    Runs,
}

/// The outcome of [`InodeStore::try_commit`].
pub(crate) enum CommitStart {
    /// The writes are in flight.
    Writing(GroupWrite),
    /// There was nothing to write after the group of this number.
    Nothing(u64),
    /// All closed groups must be durable first.
    Later(Vec<InodeChange>),
}

impl InodeStore {
    /// Begins to write to a surveyed device. Changes that a power failure has left unfinished are
    /// undone. `random` generates the keys of new chunks, which must be unpredictable.
    ///
    /// # Errors
    ///
    /// A failure of the device.
    pub(crate) fn begin(
        device: Arc<dyn BlockDevice>,
        survey: &SlotSurvey,
        rules: CommitRules,
        random: fastrand::Rng,
    ) -> Result<InodeStore, StoreError> {
        let found = &survey.found;
        if found.next_stamp.max(found.durable).max(survey.superblock.epoch) >= LAST_OPENED {
            return Err(StoreError::Numbers);
        }
        let mut line = BlockingQueue::new(&*device).map_err(device_error("open a queue"))?;
        if rules.snapshots_are_voided {
            snapshot::void(&mut line, &survey.superblock)?;
        }
        // The writes of a process that was killed may still lie in the cache of the device. The
        // superblock states that they are durable, so they must be.
        if rules.mount_flushes_first {
            line.flush().map_err(device_error("flush"))?;
        }
        let mut superblock = survey.superblock.clone();
        superblock.epoch += 1;
        superblock.next_ino = next_number_after(found.next_ino);
        if rules.snapshots_are_voided {
            superblock.snapshot = None;
        }
        if rules.mount_is_recorded {
            superblock.durable = found.durable;
        }
        chunks::mend_table(&mut line, &superblock)?;
        write_superblock(&mut line, &superblock)?;
        if rules.void_slots_are_zeroed && !found.void.is_empty() {
            for block in &found.void {
                line.write(*block, &empty_slot(survey, *block))
                    .map_err(device_error("clear a slot"))?;
            }
            line.flush().map_err(device_error("flush"))?;
        }
        drop(line);
        let mut groups = CommitState::new(&superblock.chunks, found, rules);
        groups.hold_table(superblock.table_blocks().iter().copied());
        let lanes =
            DeviceQueues::new(Arc::clone(&device), FRAMES).map_err(device_error("open a queue"))?;
        let places = Arc::new(SlotPlaces::from_superblock(&superblock));
        let stages = BTreeMap::new();
        let state = StoreState { superblock, places, groups, stages, random };
        Ok(InodeStore {
            device,
            lanes,
            turns: Arc::default(),
            flushes: DeviceFlushes::default(),
            state: Mutex::new(state),
            changed: Condvar::new(),
            rules,
            failed: AtomicBool::new(false),
            replaced: AtomicBool::new(false),
            slots_written: AtomicU64::new(0),
            superblocks: AtomicU64::new(1),
            begun: found.durable,
        })
    }

    /// Takes the place of a group: groups count in the order of their turns.
    pub(crate) fn take_turn(&self) -> GroupTurn {
        self.turns.take()
    }

    /// Writes `changes`, each of another inode, as the group of `turn`, when all earlier turns are
    /// over. Returns its number; it is durable after [`sync`](InodeStore::sync). With `now`, such a
    /// sync follows at once. If slots run out, or are scattered, `units` takes up to so many
    /// neighbouring free units, and returns the first and their number; nothing is locked
    /// meanwhile.
    ///
    /// # Errors
    ///
    /// [`StoreError::Full`], with nothing changed, or a failure of the device, after which every
    /// call fails.
    pub(crate) fn commit(
        &self,
        turn: GroupTurn,
        changes: Vec<InodeChange>,
        now: bool,
        units: &mut dyn FnMut(u32, UnitUse) -> Option<(u32, u32)>,
    ) -> Result<u64, StoreError> {
        match self.begin_group(turn, changes, now, units)? {
            (_, Some(writing)) => self.finish(writing),
            (group, None) => Ok(group),
        }
    }

    /// Begins the group as [`commit`](InodeStore::commit) does, but does not wait for the writes,
    /// if there are some: the caller must [finish](InodeStore::finish) them.
    ///
    /// # Errors
    ///
    /// Fails with the errors of [`commit`](InodeStore::commit).
    pub(crate) fn begin_group(
        &self,
        turn: GroupTurn,
        mut changes: Vec<InodeChange>,
        now: bool,
        units: &mut dyn FnMut(u32, UnitUse) -> Option<(u32, u32)>,
    ) -> Result<(u64, Option<GroupWrite>), StoreError> {
        turn.wait();
        loop {
            match self.try_commit(changes, now, units)? {
                CommitStart::Writing(writing) => return Ok((writing.group(), Some(writing))),
                CommitStart::Nothing(group) => return Ok((group, None)),
                CommitStart::Later(again) => {
                    changes = again;
                    self.sync(self.newest_group())?;
                }
            }
        }
    }

    /// Waits until the slots of fewer than `many` groups are in flight.
    pub(crate) fn wait_for_room(&self, many: usize) {
        let state = self.lock();
        let newest = state.groups.newest_group();
        drop(self.wait_for_writes(state, newest, many.saturating_sub(1)));
    }

    /// Waits until the slots of at most `left` groups up to `newest` are in flight.
    fn wait_for_writes<'a>(
        &'a self,
        mut state: MutexGuard<'a, StoreState>,
        newest: u64,
        left: usize,
    ) -> MutexGuard<'a, StoreState> {
        let in_flight = |state: &StoreState| {
            let stages = state.stages.range(..=newest);
            stages.filter(|(_, stage)| stage.is_in_flight()).count()
        };
        while in_flight(&state) > left && self.check().is_ok() {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state
    }

    /// Begins to write `changes` as the next group; the caller has the turn. Never waits for
    /// another group.
    ///
    /// # Errors
    ///
    /// Fails with the errors of [`commit`](InodeStore::commit).
    pub(crate) fn try_commit(
        &self,
        mut changes: Vec<InodeChange>,
        now: bool,
        units: &mut dyn FnMut(u32, UnitUse) -> Option<(u32, u32)>,
    ) -> Result<CommitStart, StoreError> {
        self.avoid_scattering(changes.len(), units)?;
        loop {
            let mut state = self.lock();
            self.check()?;
            // Only a forged image comes near: a slot with such a number would be none.
            let largest = changes.iter().map(InodeChange::ino).max().unwrap_or(0);
            if largest.max(state.groups.largest()) >= LAST_WRITTEN {
                return Err(StoreError::Full);
            }
            self.raise_next_ino(&mut state, largest)?;
            let none = match state.groups.close(changes) {
                Ok(Some(group)) => {
                    // A flush would cover earlier groups, too.
                    let flushes = |stage: &GroupStage| {
                        matches!(stage, GroupStage::Writing | GroupStage::Written)
                    };
                    let alone = !state.stages.values().any(flushes);
                    let fua = now
                        && alone
                        && is_one_run(&group, self.lanes.gather_limit())
                        && self.device.properties().fua;
                    let stage = if fua { GroupStage::WritingThrough } else { GroupStage::Writing };
                    state.stages.insert(group.number, stage);
                    self.slots_written.fetch_add(group.writes.len() as u64, Ordering::Relaxed);
                    let places = Arc::clone(&state.places);
                    drop(state);
                    let lane = self.record_failure(self.lanes.take(), "open a queue")?;
                    return Ok(CommitStart::Writing(GroupWrite::begin(
                        lane,
                        group,
                        fua,
                        |block| places.identity_at(block),
                    )));
                }
                Ok(None) => return Ok(CommitStart::Nothing(state.groups.newest_group())),
                Err((none, again)) => {
                    changes = again;
                    none
                }
            };
            match none {
                NoSlots::UntilDurable => return Ok(CommitStart::Later(changes)),
                NoSlots::UntilMentioned => self.mention(&mut state)?,
                NoSlots::Full => {
                    drop(state);
                    self.add_slots(units)?;
                }
            }
        }
    }

    /// Waits for the writes of a group. Slots that cannot be written are replaced by others.
    ///
    /// # Errors
    ///
    /// A failure of the device, after which every call fails.
    pub(crate) fn finish(&self, writing: GroupWrite) -> Result<u64, StoreError> {
        let (group, fua) = (writing.group(), writing.fua);
        let (bad, mut lane) = writing.wait();
        let Some(mut bad) = bad else { return self.record_failure(Err(Errno::IO), "write") };
        let mut replaced = false;
        for _ in 0..TRIES {
            if bad.is_empty() {
                break;
            }
            replaced = true;
            self.replaced.store(true, Ordering::Relaxed);
            let mut again = Vec::new();
            for FailedSlot { block, identity, body } in bad {
                let (block, place) = self.replace_failed_slot(group, block)?;
                let mut frames = lane.frames(1, &mut Vec::new());
                crate::format::slot::encode(identity, &body, &place, &mut frames);
                let kind = BlockOpKind::Write { block, memory: frames.into(), fua: false };
                if let Err(errno) = lane.run(kind) {
                    log::warn!("the slot at block {block} cannot be written: {errno}");
                    again.push(FailedSlot { block, identity, body });
                }
            }
            bad = again;
        }
        if !bad.is_empty() {
            return self.record_failure(Err(Errno::IO), "write");
        }
        let mut state = self.lock();
        let stage = if fua && !replaced { GroupStage::Safe } else { GroupStage::Written };
        state.stages.insert(group, stage);
        self.advance(&mut state);
        Ok(group)
    }

    /// Another slot for a write of `group` to `block` that failed.
    fn replace_failed_slot(
        &self,
        group: u64,
        block: u64,
    ) -> Result<(u64, SlotIdentity), StoreError> {
        let mut state = self.lock();
        let mut other = state.groups.move_failed_slot(group, block);
        if other == Err(NoSlots::UntilMentioned) {
            self.mention(&mut state)?;
            other = state.groups.move_failed_slot(group, block);
        }
        if let Ok(block) = other {
            return Ok((block, state.places.identity_at(block)));
        }
        drop(state);
        self.record_failure(Err(Errno::IO), "write, and no other slot is left")
    }

    /// Makes all groups up to `group`, which must have been committed, durable.
    ///
    /// # Errors
    ///
    /// A failure of the device: then it is unknown which groups since the last sync are durable.
    pub(crate) fn sync(&self, group: u64) -> Result<(), StoreError> {
        let mut state = self.lock();
        loop {
            self.check()?;
            if state.groups.newest_durable() >= group {
                return Ok(());
            }
            if !state.stages.range(..=group).any(|(_, stage)| stage.is_in_flight()) {
                break;
            }
            state = self.wait_for_writes(state, group, 0);
        }
        drop(state);
        self.flush()
    }

    /// Makes everything durable that was written before the call, on any thread.
    ///
    /// # Errors
    ///
    /// A failure of the device, after which every call fails.
    pub(crate) fn flush(&self) -> Result<(), StoreError> {
        self.check()?;
        let mut outcome = Ok(());
        self.flushes.join(|| outcome = self.flush_now());
        outcome?;
        self.check()
    }

    fn flush_now(&self) -> Result<(), StoreError> {
        let written = |stages: &BTreeMap<u64, GroupStage>| -> Vec<u64> {
            let written = stages.iter().filter(|(_, stage)| **stage == GroupStage::Written);
            written.map(|(group, _)| *group).collect()
        };
        let covered = written(&self.lock().stages);
        let flushed = self.lanes.take().and_then(|mut lane| lane.run(BlockOpKind::Flush));
        self.record_failure(flushed, "flush")?;
        let mut state = self.lock();
        for group in covered {
            state.stages.insert(group, GroupStage::Safe);
        }
        self.advance(&mut state);
        Ok(())
    }

    /// Records which groups are durable: the safe groups, up to the first group that is not safe.
    fn advance(&self, state: &mut StoreState) {
        while let Some(first) = state.stages.first_entry()
            && *first.get() == GroupStage::Safe
        {
            let (group, _) = first.remove_entry();
            state.groups.durable(group);
        }
        self.changed.notify_all();
    }

    /// Writes blocks of records and makes them durable.
    ///
    /// # Errors
    ///
    /// A failure of the device. If a write fails, only these blocks are affected.
    pub(crate) fn write_blocks(&self, data: &[(u64, [u8; FRAME])]) -> Result<(), StoreError> {
        self.check()?;
        if data.is_empty() {
            return Ok(());
        }
        let mut lane = self.lanes.take().map_err(device_error("open a queue"))?;
        let mut order: Vec<&(u64, [u8; FRAME])> = data.iter().collect();
        order.sort_unstable_by_key(|(block, _)| *block);
        let mut done = Vec::new();
        let gathered = lane.gather_limit();
        for run in order.chunk_by(|a, b| a.0 + 1 == b.0).flat_map(|run| run.chunks(gathered)) {
            let mut frames = lane.frames(run.len() as u32, &mut done);
            for ((_, bytes), out) in run.iter().zip(frames.chunks_mut(FRAME)) {
                out.copy_from_slice(&bytes[..]);
            }
            let kind = BlockOpKind::Write { block: run[0].0, memory: frames.into(), fua: false };
            lane.push(0, kind, &mut done);
        }
        while lane.in_flight() > 0 {
            lane.wait(&mut done);
        }
        drop(lane);
        done.into_iter().try_for_each(|done| done.result).map_err(device_error("write"))?;
        if self.rules.data_is_first { self.flush() } else { Ok(()) }
    }

    /// Records on the device that all groups are durable, which they must be. After that a slot
    /// that is damaged at rest is recognised as damaged, and not taken for a slot that was never
    /// whole.
    ///
    /// # Errors
    ///
    /// A failure of the device.
    pub(crate) fn record_clean_state(&self) -> Result<(), StoreError> {
        self.check()?;
        let mut state = self.lock();
        match state.groups.is_mentioned() {
            true => Ok(()),
            false => self.mention(&mut state),
        }
    }

    /// The newest group that was closed.
    pub(crate) fn newest_group(&self) -> u64 {
        self.lock().groups.newest_group()
    }

    /// The newest group that survives a power failure.
    #[cfg(test)]
    pub(crate) fn durable(&self) -> u64 {
        self.lock().groups.newest_durable()
    }

    /// The progress of the store.
    pub(crate) fn progress(&self) -> StoreProgress {
        let state = self.lock();
        let newest = state.groups.newest_group();
        StoreProgress {
            groups: newest - self.begun,
            not_durable: newest - state.groups.newest_durable(),
            slots_written: self.slots_written.load(Ordering::Relaxed),
            slots_free: state.groups.free_slots() as u64,
            superblocks: self.superblocks.load(Ordering::Relaxed),
        }
    }

    /// The number of slots of all chunks without closed units, and of the chunks that can still be
    /// added.
    pub(crate) fn slots(&self) -> (u64, u64) {
        let state = self.lock();
        let closed = state.groups.count_closed_units() as u64 * UNIT_BLOCKS;
        (slots(&state.superblock) - closed, chunks_left(&state.superblock))
    }

    /// Closes up to `few.0` units that have no more than `few.1` inodes: slots there are not taken.
    /// Returns the units, and the inodes that have to be written again before the units are empty.
    /// The caller must reopen the units.
    pub(crate) fn close_units(&self, few: (usize, usize)) -> (Vec<u32>, Vec<u64>) {
        let mut state = self.lock();
        let many = state.superblock.chunks.len() > state.superblock.most_chunks() / 2;
        state.groups.close_units(few, many)
    }

    /// Reopens these units: their slots may be taken again.
    pub(crate) fn reopen(&self, units: &[u32]) {
        self.lock().groups.reopen(units);
    }

    fn lock(&self) -> MutexGuard<'_, StoreState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn check(&self) -> Result<(), StoreError> {
        if self.failed.load(Ordering::Relaxed) { Err(StoreError::Failed) } else { Ok(()) }
    }

    /// Records a failure after which the content of the device is unknown. The state must not be
    /// locked.
    fn record_failure<T>(
        &self,
        result: Result<T, Errno>,
        action: &'static str,
    ) -> Result<T, StoreError> {
        result.map_err(|errno| {
            self.give_up(&self.lock());
            StoreError::Device { action, errno }
        })
    }

    /// Makes everything fail from now on. A waiting thread holds the lock of the state until it
    /// sleeps, so that it is woken.
    fn give_up(&self, _: &StoreState) {
        self.failed.store(true, Ordering::Relaxed);
        self.changed.notify_all();
    }

    /// Records on the device the newest durable group, so that more slots may be used again.
    fn mention(&self, state: &mut StoreState) -> Result<(), StoreError> {
        let durable = state.groups.newest_durable();
        self.update(state, |superblock| superblock.durable = durable)?;
        state.groups.record_durable(durable);
        Ok(())
    }

    /// Records on the device that inode numbers up to `newest` are taken, in large steps: the slots
    /// of removed inodes do not keep this information.
    fn raise_next_ino(&self, state: &mut StoreState, newest: u64) -> Result<(), StoreError> {
        match newest >= state.superblock.next_ino {
            true => {
                self.update(state, |superblock| superblock.next_ino = next_number_after(newest))
            }
            false => Ok(()),
        }
    }
}

/// A number of inodes some way behind `ino`, but small enough for an image.
fn next_number_after(ino: u64) -> u64 {
    (ino + INO_STEP).min(LAST - 1).max(ino)
}

/// True if one operation of the device, of `gathered` blocks at most, writes all slots of a group.
fn is_one_run(group: &ClosedGroup, gathered: usize) -> bool {
    group.writes.len() <= gathered && are_neighbours(group.writes.iter().map(|write| write.block))
}

/// A slot of kind `Nothing` in the newest group, which the superblock already states to be durable.
/// It replaces a slot that does not count. Zeros would not do: a torn slot shows its former
/// content, and if the power fails while it is zeroed, that content may be all that is left. A
/// removal slot that is not needed would then pass for a damaged one.
fn empty_slot(survey: &SlotSurvey, block: u64) -> [u8; FRAME] {
    let (mut bytes, durable) = ([0; FRAME], survey.found.durable);
    // Before the first group there was nothing.
    if let Some(place) = survey.identity_at(block).filter(|_| durable > 0) {
        let (group, before, count) = (durable, durable - 1, 1);
        let new = SlotHeader::new(SlotKind::Nothing, 0, survey.found.next_stamp);
        let identity = SlotHeader { group, count, durable: before, ..new };
        slot::encode(identity, &[], &place, &mut bytes);
    }
    bytes
}
