//! Syncs of data that is overwritten in place, without a group: fdatasync(2) of a file whose inode
//! is as a group wrote it, but for its times.
//!
//! The data goes to blocks that the inode has, as the data of a group does, and a flush makes it
//! durable. The inode stays in the running group, which writes the times later. The groups that
//! wrote the inode are durable when the call returns.
//!
//! A sync begins while it holds the right to write groups, and gives the right back before it
//! writes. So syncs of several files write at the same time, and these rules keep the order of
//! writes:
//!
//! - A group closes when no data in place is on its way. It may have newer bytes of the same
//!   blocks, and it may free these blocks for others.
//! - Syncs of one file write one after the other.
//! - Until its flush is over, the data may be lost. A group that closes before, and another sync of
//!   the file, flush as well: they may be acknowledged first.
//!
//! A thread that waits for data that no thread writes yet writes it itself.

use std::sync::atomic::Ordering;
use std::sync::{Condvar, Mutex, PoisonError};

use defuse_block::QueuePurpose;
use defuse_fs::{Errno, Result};

use super::{EngineSlots, UhsEngine};
use crate::content::{PageFrame, SharedContent};
use crate::group::{self, ClosePlan, ClosedChanges};
use crate::locks::lock;
use crate::store::{InodeStore, StoreError, device_error};

/// The syncs in place that have begun and are not over.
#[derive(Default)]
pub(super) struct InPlaceSyncs {
    begun: Mutex<Vec<InPlaceSync>>,
    /// Data has been written.
    written: Condvar,
}

struct InPlaceSync {
    /// The number of its batch.
    number: u64,
    ino: u64,
    stage: InPlaceStage,
    /// The data is durable when it is written.
    through: bool,
}

enum InPlaceStage {
    /// No thread writes the data yet.
    Begun(SharedContent, Vec<(u64, PageFrame)>),
    Writing,
    Over(InPlaceOutcome),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum InPlaceOutcome {
    Written,
    /// The device does not take a part of the data: a group finds other blocks.
    Refused,
    Failed,
}

/// The rest of a sync that has begun.
pub(crate) struct InPlaceRest {
    /// The number of its batch, if there is data.
    number: Option<u64>,
    flushes: bool,
    /// The group that must be durable, too.
    group: u64,
}

/// The duty to write the data of a sync. Dropped before its end, it has failed.
struct InPlaceWrite<'a> {
    engine: &'a UhsEngine,
    number: u64,
    outcome: InPlaceOutcome,
}

impl InPlaceSync {
    fn is_on_its_way(&self) -> bool {
        !matches!(self.stage, InPlaceStage::Over(_))
    }
}

impl InPlaceSyncs {
    /// True if a power failure may take data of a sync that has begun: of one file, or of all.
    fn may_lose(&self, ino: Option<u64>) -> bool {
        let concerns = |sync: &InPlaceSync| ino.is_none_or(|ino| sync.ino == ino);
        lock(&self.begun).iter().any(|sync| concerns(sync) && !sync.through)
    }

    fn is_on_its_way(&self, ino: u64) -> bool {
        lock(&self.begun).iter().any(|sync| sync.ino == ino && sync.is_on_its_way())
    }

    fn end_write(&self, number: u64, outcome: InPlaceOutcome) {
        let mut begun = lock(&self.begun);
        if let Some(sync) = begun.iter_mut().find(|sync| sync.number == number) {
            sync.stage = InPlaceStage::Over(outcome);
            sync.through &= outcome == InPlaceOutcome::Written;
        }
        drop(begun);
        self.written.notify_all();
    }

    /// Waits until the data of a sync is written.
    fn wait_for(&self, number: u64) -> InPlaceOutcome {
        let mut begun = lock(&self.begun);
        loop {
            match begun.iter().find(|sync| sync.number == number).map(|sync| &sync.stage) {
                Some(InPlaceStage::Over(outcome)) => return *outcome,
                Some(_) => {
                    begun = self.written.wait(begun).unwrap_or_else(PoisonError::into_inner);
                }
                None => return InPlaceOutcome::Failed,
            }
        }
    }

    fn remove(&self, number: u64) {
        lock(&self.begun).retain(|sync| sync.number != number);
    }
}

impl UhsEngine {
    /// Makes the data of a file durable, if it was overwritten in place and nothing else has
    /// changed. False if that needs a group.
    pub(super) fn sync_in_place(&self, ino: u64) -> Result<bool> {
        match self.begin_in_place(ino)? {
            Some(rest) => self.finish_in_place(rest),
            None => Ok(false),
        }
    }

    /// Begins a sync of a file. `None` if that needs a group.
    pub(crate) fn begin_in_place(&self, ino: u64) -> Result<Option<InPlaceRest>> {
        let EngineSlots::Store(store) = &self.store else { return Ok(None) };
        let Some(content) = self.names.changed_in_data(ino) else { return Ok(None) };
        // Most other files need no turn to find out.
        if !lock(&content).is_as_recorded(&self.pool) {
            return Ok(None);
        }
        let turn = loop {
            // Others have the turn meanwhile.
            self.wait_in_place(Some(ino));
            let mut turn = self.take_write_turn();
            let waited = turn.wait_for_data_group(store, |_, inos| inos.contains(&ino));
            waited.map_err(|error| self.fail(&error))?;
            if !(self.rules.syncs_in_place_take_turns && self.in_place.is_on_its_way(ino)) {
                break turn;
            }
        };
        if self.is_read_only() {
            return Err(Errno::EIO);
        }
        let handle = self.gate.enter();
        let mut held = lock(&content);
        if self.names.changed_in_data(ino).is_none() || !held.is_as_recorded(&self.pool) {
            return Ok(None);
        }
        let (number, has_early) = self.pool.next_batch_in_place();
        let data = held.take_in_place(&self.pool, number);
        drop(held);
        drop(handle);
        let data = data.inspect_err(|_| self.pool.record_group_write([number]))?;
        let may_lose = self.rules.syncs_in_place_are_flushed && self.in_place.may_lose(Some(ino));
        let has_early = has_early || may_lose;
        let mut rest =
            InPlaceRest { number: None, flushes: has_early, group: store.newest_group() };
        if data.is_empty() {
            self.pool.record_group_write([number]);
            return Ok(Some(rest));
        }
        let through = self.rules.data_is_first && !has_early && self.io.writes_through(&data);
        rest.number = Some(number);
        rest.flushes = !through;
        let stage = InPlaceStage::Begun(content, data);
        lock(&self.in_place.begun).push(InPlaceSync { number, ino, stage, through });
        drop(turn);
        Ok(Some(rest))
    }

    /// Writes the data of a sync that has begun, and makes it durable. False if a group must do so.
    pub(crate) fn finish_in_place(&self, rest: InPlaceRest) -> Result<bool> {
        let EngineSlots::Store(store) = &self.store else { return Ok(false) };
        let Some(number) = rest.number else {
            self.flush_in_place(store, &rest).map_err(|error| self.fail(&error))?;
            return Ok(true);
        };
        self.write_begun(number);
        let outcome = self.in_place.wait_for(number);
        let flushed = match outcome {
            InPlaceOutcome::Written => self.flush_in_place(store, &rest),
            InPlaceOutcome::Refused | InPlaceOutcome::Failed => Ok(()),
        };
        if outcome == InPlaceOutcome::Refused {
            // The group that finds other blocks flushes the rest of the data.
            self.pool.record_direct_write();
        }
        self.in_place.remove(number);
        flushed.map_err(|error| self.fail(&error))?;
        match outcome {
            InPlaceOutcome::Written => Ok(true),
            InPlaceOutcome::Refused => Ok(false),
            InPlaceOutcome::Failed => Err(Errno::EIO),
        }
    }

    /// Waits until no data in place is on its way: of one file, or of all. Data that no thread
    /// writes yet is written.
    fn wait_in_place(&self, ino: Option<u64>) {
        let waits = match ino {
            Some(_) => self.rules.syncs_in_place_take_turns,
            None => self.rules.groups_wait_for_data_in_place,
        };
        if !waits {
            return;
        }
        // The first of these syncs, and true if no thread writes its data.
        let next = |begun: &[InPlaceSync]| {
            let concerns =
                |sync: &&InPlaceSync| ino.is_none_or(|ino| sync.ino == ino) && sync.is_on_its_way();
            let sync = begun.iter().find(concerns)?;
            Some((sync.number, matches!(sync.stage, InPlaceStage::Begun(..))))
        };
        let mut begun = lock(&self.in_place.begun);
        while let Some((number, is_begun)) = next(&begun) {
            if is_begun {
                drop(begun);
                self.write_begun(number);
                begun = lock(&self.in_place.begun);
            } else {
                let written = &self.in_place.written;
                begun = written.wait(begun).unwrap_or_else(PoisonError::into_inner);
            }
        }
    }

    /// Writes the data of a sync, unless a thread does so already.
    fn write_begun(&self, number: u64) {
        let mut begun = lock(&self.in_place.begun);
        let Some(sync) = begun.iter_mut().find(|sync| sync.number == number) else { return };
        if !matches!(sync.stage, InPlaceStage::Begun(..)) {
            return;
        }
        let (ino, through) = (sync.ino, sync.through);
        let stage = std::mem::replace(&mut sync.stage, InPlaceStage::Writing);
        drop(begun);
        let mut write = InPlaceWrite { engine: self, number, outcome: InPlaceOutcome::Failed };
        let InPlaceStage::Begun(content, mut data) = stage else { return };
        match self.write_in_place(&mut data, through) {
            Ok(lost) if lost.is_empty() => write.outcome = InPlaceOutcome::Written,
            Ok(lost) => {
                // The next group finds other blocks.
                self.lose(&[(ino, content)], &lost, false);
                write.outcome = InPlaceOutcome::Refused;
            }
            Err(error) => drop(self.fail(&error)),
        }
    }

    /// Writes data. Returns the blocks that the device does not take, in order.
    fn write_in_place(
        &self,
        data: &mut [(u64, PageFrame)],
        through: bool,
    ) -> std::result::Result<Vec<u64>, StoreError> {
        let failures = self.io.write(QueuePurpose::Caller, data, through);
        let failures = failures.map_err(device_error("write data"))?;
        let runs = failures.iter().map(|failed| &data[failed.from..failed.from + failed.count]);
        let mut lost: Vec<u64> = runs.flatten().map(|(block, _)| *block).collect();
        lost.sort_unstable();
        Ok(lost)
    }

    fn flush_in_place(
        &self,
        store: &InodeStore,
        rest: &InPlaceRest,
    ) -> std::result::Result<(), StoreError> {
        if rest.flushes && self.rules.data_is_first {
            store.flush()?;
        }
        store.sync(rest.group)?;
        self.release(rest.group);
        Ok(())
    }

    /// Closes the running group. The caller has the right to write groups.
    pub(super) fn close_group(
        &self,
        plan: ClosePlan<'_>,
    ) -> std::result::Result<ClosedChanges, StoreError> {
        self.wait_in_place(None);
        let closed = group::close(&self.gate.close(), &self.names, &self.pool, plan);
        let mut closed = closed.map_err(|_| StoreError::Full)?;
        let may_lose = self.rules.syncs_in_place_are_flushed && self.in_place.may_lose(None);
        if let ClosedChanges::Batches(batch, data_group) = &mut closed {
            batch.has_early |= may_lose;
            data_group.iter_mut().for_each(|data_group| data_group.has_early |= may_lose);
        }
        Ok(closed)
    }

    /// Writes the data of all syncs that have begun.
    #[cfg(test)]
    pub(crate) fn write_in_place_now(&self) {
        let numbers: Vec<u64> = lock(&self.in_place.begun).iter().map(|sync| sync.number).collect();
        numbers.into_iter().for_each(|number| self.write_begun(number));
    }
}

impl Drop for InPlaceWrite<'_> {
    fn drop(&mut self) {
        if self.outcome == InPlaceOutcome::Failed {
            // Pages of the file count as written.
            self.engine.read_only.store(true, Ordering::Relaxed);
        }
        self.engine.pool.record_group_write([self.number]);
        self.engine.in_place.end_write(self.number, self.outcome);
    }
}
