//! Writing groups: by the thread that fills a group, by a sync, and by the committing thread.

use std::collections::BTreeMap;
use std::collections::btree_map::OccupiedEntry;
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use defuse_block::QueuePurpose;
use defuse_fs::{Errno, Result};

use super::data_groups::WriteTurn;
use super::sync_rounds::SyncRound;
use super::{EngineSlots, UhsEngine};
use crate::commit::{CommitState, InodeChange};
use crate::format::inode::{DiskInode, RecordWriter};
use crate::format::snapshot::SnapshotEntry;
use crate::group::{BatchContents, ClosePlan, ClosedChanges, CommitBatch, SyncedFiles};
use crate::locks::lock;
use crate::names::SnapshotWriter;
use crate::space::BlockRun;
use crate::store::{GroupWrite, InodeStore, StoreError, UnitUse, device_error};

/// Places that are tried for data, before its pages are stuck, and for records.
const DATA_TRIES: usize = 4;

/// Groups whose slots are in flight at a time. With more of them each group would be smaller.
const IN_FLIGHT: usize = 3;

/// The extent of a sync.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SyncScope {
    /// The data of this file, and all changes but the data of other files and times as below.
    File(u64),
    /// Everything but times of directories that come from their entries after a crash.
    Changes,
    /// As `Changes`, or what others write meanwhile: the caller needs memory.
    Memory,
    Everything,
}

/// All that waits until groups are durable.
#[derive(Default)]
pub(super) struct PendingGroups(BTreeMap<u64, PendingGroup>);

/// A group whose slots are in flight, or were written.
pub(super) struct WrittenGroups {
    group: u64,
    pub(super) slots: Option<GroupWrite>,
    /// The ordinal of the data group that was divided from it.
    data_group: Option<u64>,
}

#[derive(Default)]
struct PendingGroup {
    /// Blocks that are free then.
    freed: Vec<BlockRun>,
    /// The newest of the batches of data.
    batch: u64,
    /// Contents that may leave memory then.
    contents: BatchContents,
    /// Inodes that are in slots alone, as they are in the slots before.
    stored: Vec<(u64, DiskInode)>,
}

impl UhsEngine {
    /// Makes everything durable that operations did until now. `EIO` where the device failed, now
    /// or before.
    pub(crate) fn commit(&self, extent: SyncScope) -> Result<()> {
        self.commit_for(QueuePurpose::Caller, extent)
    }

    /// Makes everything durable for a purpose: data of the group is written by queues of that
    /// purpose.
    ///
    /// # Errors
    ///
    /// Fails with the errors of [`commit`](UhsEngine::commit).
    pub(super) fn commit_for(&self, purpose: QueuePurpose, extent: SyncScope) -> Result<()> {
        let EngineSlots::Store(store) = &self.store else { return Ok(()) };
        let mut round = None;
        let of_round = match extent {
            SyncScope::File(ino) => Some(Some(ino)),
            SyncScope::Changes => Some(None),
            SyncScope::Everything | SyncScope::Memory => None,
        };
        if let Some(ino) = of_round {
            round = self.rounds.join(ino)?;
            if round.is_none() {
                return Ok(());
            }
        }
        let mut turn = self.take_write_turn();
        store.wait_for_room(IN_FLIGHT);
        // Only one caller has received the error of an earlier failure, but the changes of all may
        // be lost.
        if self.is_read_only() {
            return Err(Errno::EIO);
        }
        let wanted = round.as_mut().map_or(SyncedFiles::All, SyncRound::close);
        let waits = self.rules.syncs_wait_for_data_groups;
        let waited = turn.wait_for_data_group(store, |_, inos| waits && wanted.meets(inos));
        let waited = waited.map_err(|error| self.fail(&error))?;
        if self.is_read_only() {
            return Err(Errno::EIO);
        }
        if waited && extent == SyncScope::Memory {
            return Ok(());
        }
        if extent == SyncScope::Everything {
            self.write_times(store, &mut turn, purpose)?;
        }
        let written = self.write_running(store, &mut turn, &wanted, purpose)?;
        drop(turn);
        let mut group = written.group;
        if let Some(slots) = written.slots {
            store.finish(slots).map_err(|error| self.fail(&error))?;
        }
        if let Some(ordinal) = written.data_group {
            self.finish_data_group(store, ordinal).map_err(|error| self.fail(&error))?;
            group = store.newest_group();
        }
        store.sync(group).map_err(|error| self.fail(&error))?;
        self.release(group);
        if let Some(round) = round {
            round.end();
        }
        Ok(())
    }

    /// Writes all changes made so far, but of data only that of `wanted` files.
    pub(super) fn write_running(
        &self,
        store: &InodeStore,
        turn: &mut WriteTurn<'_>,
        wanted: &SyncedFiles,
        purpose: QueuePurpose,
    ) -> Result<WrittenGroups> {
        self.pending.store(false, Ordering::Relaxed);
        self.list_stuck();
        let group = match self.gate.has_changes() {
            true => self.begin_group(store, turn, wanted, (true, purpose)),
            // Threads that wrote before this one have closed their groups, so that these have
            // numbers.
            false => {
                Ok(WrittenGroups { group: store.newest_group(), slots: None, data_group: None })
            }
        };
        // A failure must be known before the next one writes.
        let group = group.map_err(|error| self.fail(&error))?;
        self.give_up_stuck();
        Ok(group)
    }

    /// Adds all directories whose times wait to groups, none of which is larger than other groups.
    fn write_times(
        &self,
        store: &InodeStore,
        turn: &mut WriteTurn<'_>,
        purpose: QueuePurpose,
    ) -> Result<()> {
        let dirs = self.names.take_waiting();
        let mut parts = dirs.chunks(self.gate.full()).peekable();
        while let Some(part) = parts.next() {
            self.names.write_times(&self.gate.enter(), part);
            if parts.peek().is_some() {
                let written = self.write_group(store, turn, purpose);
                written.map_err(|error| self.fail(&error))?;
            }
        }
        Ok(())
    }

    /// Frees everything that waited until all groups up to `group` are durable.
    pub(super) fn release(&self, group: u64) {
        let next = || {
            let mut waiting = lock(&self.waiting);
            waiting.0.first_entry().filter(|first| *first.key() <= group).map(OccupiedEntry::remove)
        };
        while let Some(PendingGroup { freed, batch, contents, .. }) = next() {
            self.pool.durable(batch);
            if self.options.discard {
                self.io.discard(&freed);
            }
            self.pool.release(&freed);
            for (ino, content) in contents {
                drop(content);
                self.is_idle(ino);
            }
        }
    }

    /// Commits for the last time.
    pub(crate) fn commit_last(&self) {
        let EngineSlots::Store(store) = &self.store else { return };
        if self.commit(SyncScope::Everything).is_err() {
            return;
        }
        // The file system has no users any more.
        let save = |groups: &CommitState| {
            // After refused writes, the next mount must read the device itself: a scan uses nothing
            // else.
            if self.refused.load(Ordering::Relaxed) {
                return None;
            }
            let mut saving = SnapshotWriter::default();
            self.names.save(|ino| groups.live(ino), &mut saving);
            let (stale, removals) = groups.stale_and_removal_slots()?;
            stale.iter().for_each(|(ino, slot)| {
                saving.add(&SnapshotEntry::Stale { ino: *ino, slot: *slot });
            });
            for (slot, inos) in removals {
                saving.add(&SnapshotEntry::Removals { slot, inos });
            }
            saving.finish()
        };
        // Promised blocks will not be taken any more.
        let unit = || {
            let mut space = self.pool.space();
            space.give_back_all_ahead();
            let (unit, _) = space.find_units(1)?;
            space.reserve(unit, 1);
            Some(unit)
        };
        if let Err(error) = store.end(save, unit) {
            log::warn!("uhs: {error}");
        }
    }

    /// Loads the data of inodes of failed groups into memory: the content of their slots is
    /// unknown.
    fn reload_failed_inodes(&self) {
        let mut waiting = lock(&self.waiting);
        let stored: Vec<(u64, DiskInode)> =
            waiting.0.values_mut().flat_map(|group| std::mem::take(&mut group.stored)).collect();
        drop(waiting);
        for (ino, inode) in stored {
            let _ = self.names.load_content(ino, || Ok(inode.data));
        }
    }

    pub(super) fn fail(&self, error: &StoreError) -> Errno {
        self.read_only.store(true, Ordering::Relaxed);
        self.reload_failed_inodes();
        log::error!("uhs: {error}: nothing is written any more");
        Errno::EIO
    }

    /// Writes the running group because it has as many inodes as a group may have.
    pub(super) fn write_full_group(&self) {
        let EngineSlots::Store(store) = &self.store else { return };
        let mut turn = self.take_write_turn();
        // Another thread may have written the group meanwhile.
        if self.gate.is_full()
            && !self.is_read_only()
            && let Err(error) = self.write_group(store, &mut turn, QueuePurpose::Caller)
        {
            self.fail(&error);
        }
    }

    /// Closes the running group and writes it, but for data that may wait.
    fn write_group(
        &self,
        store: &InodeStore,
        turn: &mut WriteTurn<'_>,
        purpose: QueuePurpose,
    ) -> Result<u64, StoreError> {
        let written = self.begin_group(store, turn, &SyncedFiles::default(), (false, purpose))?;
        written.slots.map_or(Ok(written.group), |slots| store.finish(slots))
    }

    /// Closes the running group, writes its data, and begins to write its slots. Data of a group of
    /// its own is left for [`finish_data_group`](UhsEngine::finish_data_group). With `now`, a sync
    /// follows: data that is one run is then written through. That is one operation of the device
    /// where write and flush are two, and syncs that begin meanwhile share the next one.
    fn begin_group(
        &self,
        store: &InodeStore,
        turn: &mut WriteTurn<'_>,
        wanted: &SyncedFiles,
        (now, purpose): (bool, QueuePurpose),
    ) -> Result<WrittenGroups, StoreError> {
        let (mut batch, mut data_group) = loop {
            if !self.rules.blocks_wait_for_group {
                self.pool.release(&self.pool.take_abandoned());
            }
            if self.pool.needs_durable() {
                // The blocks that the data group gives up may be needed, too.
                turn.wait_for_data_group(store, |_, _| true)?;
                let newest = store.newest_group();
                store.sync(newest)?;
                self.release(newest);
            }
            let (busy, divides) = (turn.busy(), turn.may_divide());
            let plan = ClosePlan { wanted, busy, divides, skips_stuck: !now };
            match self.close_group(plan)? {
                ClosedChanges::Batches(batch, data_group) => break (batch, data_group),
                ClosedChanges::Overtakes => turn.wait_for_data_group(store, |_, _| true)?,
            };
            if self.is_read_only() {
                return Err(StoreError::Failed);
            }
        };
        if batch.waiting > 0 {
            self.has_changes();
        }
        (batch.purpose, batch.now) = (purpose, now);
        let (group, slots) = self.begin_closed(store, &mut batch, (None, &mut data_group))?;
        let data_group = data_group.map(|mut data_group| {
            (data_group.purpose, data_group.now) = (purpose, true);
            turn.add(data_group)
        });
        Ok(WrittenGroups { group, slots, data_group })
    }

    /// Writes the data of a closed group, and begins to write its slots. `lost` are the blocks that
    /// could not be written, if the data has been written. The data group that was divided from it
    /// becomes a part of it if data is lost. Returns its number, and its slots if they are in
    /// flight.
    pub(super) fn begin_closed(
        &self,
        store: &InodeStore,
        batch: &mut CommitBatch,
        (lost, data_group): (Option<Vec<u64>>, &mut Option<Box<CommitBatch>>),
    ) -> Result<(u64, Option<GroupWrite>), StoreError> {
        self.scattered.add(&batch.scattered);
        let mut stored = Vec::new();
        let units = &mut |wanted, need| match need {
            UnitUse::Slots => self.pool.take_units(wanted),
            UnitUse::MoreSlots => self.pool.take_more_units(wanted),
            UnitUse::Runs => self.pool.take_spare_units(wanted),
        };
        let now = batch.now;
        let data = (lost, data_group);
        let written = self.write_before(store, batch, &mut stored, data).and_then(|()| {
            store.begin_group(store.take_turn(), std::mem::take(&mut batch.changes), now, units)
        });
        let (slots, chunks) = store.slots();
        self.pool.set_slots(slots, chunks);
        self.gate.set_full(self.rules.full_group.min(self.names.max_changes_per_thread()));
        // Blocks and contents of a group that failed are never released.
        let group = written.as_ref().map_or(u64::MAX, |(group, _)| *group);
        let mut waiting = lock(&self.waiting);
        let of_group = waiting.0.entry(group).or_default();
        of_group.freed.append(&mut batch.freed);
        of_group.batch = of_group.batch.max(batch.number);
        of_group.contents.append(&mut batch.contents);
        of_group.stored.extend(stored);
        drop(waiting);
        written
    }

    /// Completes a group, and makes its data durable. Blocks that cannot be written are replaced by
    /// others; then the group also gets the changes made meanwhile.
    fn write_before(
        &self,
        store: &InodeStore,
        batch: &mut CommitBatch,
        stored: &mut Vec<(u64, DiskInode)>,
        (mut lost, data_group): (Option<Vec<u64>>, &mut Option<Box<CommitBatch>>),
    ) -> Result<(), StoreError> {
        for round in 0..DATA_TRIES {
            stored.extend(self.add_stored(batch)?);
            let lost = lost.take().map_or_else(|| self.write_data(store, batch), Ok)?;
            if lost.is_empty() {
                self.has_written(&batch.contents, round > 0);
                return Ok(());
            }
            self.lose(&batch.contents, &lost, round > 0);
            let data = data_group.take().map_or_else(Vec::new, |group| batch.absorb(*group));
            let plan = ClosePlan { skips_stuck: true, ..ClosePlan::WHOLE };
            match self.close_group(plan)? {
                ClosedChanges::Batches(since, _) => batch.extend(*since),
                ClosedChanges::Overtakes => return Err(StoreError::Failed),
            }
            batch.add_older_data(data);
        }
        Err(device_error("write data")(defuse_block::Errno::IO))
    }

    /// Completes the bodies of inodes whose data is not in memory. The data is in the slots on the
    /// device, which are not overwritten before a newer copy is durable. Returns these inodes.
    fn add_stored(&self, batch: &mut CommitBatch) -> Result<Vec<(u64, DiskInode)>, StoreError> {
        let inos: Vec<u64> = batch.stored.iter().map(|at| batch.changes[*at].ino()).collect();
        let found = self.read_slots(&inos)?;
        for (at, inode) in batch.stored.iter().zip(&found) {
            if let InodeChange::Write { body, .. } = &mut batch.changes[*at] {
                let mut record = RecordWriter::default();
                record.data(&inode.data);
                body.extend(record.finish());
            }
        }
        Ok(inos.into_iter().zip(found).collect())
    }

    /// Starts the thread that commits changes without a sync.
    pub(crate) fn start(self: &Arc<Self>, interval: Duration) -> std::io::Result<JoinHandle<()>> {
        let engine = Arc::clone(self);
        let thread = std::thread::Builder::new().name("uhs-commit".to_owned());
        thread.spawn(move || {
            defuse_block::signals::take_none();
            engine.keep_committing(interval);
        })
    }

    fn keep_committing(&self, interval: Duration) {
        let mut ended = lock(&self.ended);
        while !*ended {
            // A thread that changes something wakes this thread only while `sleeps` is set.
            self.sleeps.store(true, Ordering::SeqCst);
            if !self.pending.load(Ordering::SeqCst) {
                ended = self.wake.wait(ended).unwrap_or_else(PoisonError::into_inner);
                continue;
            }
            self.sleeps.store(false, Ordering::SeqCst);
            let idle = |ended: &mut bool| !*ended && !self.hurried.load(Ordering::Relaxed);
            let waited = self.wake.wait_timeout_while(ended, interval, idle);
            drop(waited.unwrap_or_else(PoisonError::into_inner));
            self.hurried.store(false, Ordering::Relaxed);
            // Failures have been logged.
            let _ = self.commit_for(QueuePurpose::Behind, SyncScope::Everything);
            self.compact_before_need();
            self.merge_scattered();
            ended = lock(&self.ended);
        }
    }

    /// Ends the committing thread.
    pub(crate) fn end(&self) {
        *lock(&self.ended) = true;
        self.wake.notify_all();
    }
}
