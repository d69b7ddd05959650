//! Data groups: files of which nothing but much data has changed, in a group of their own.
//!
//! Such data takes long, and nothing else needs it. So a group that closes leaves these files to a
//! second group, which has the same moment. Its data is written while no right is held; then it
//! gets its number and its slots. Groups that close meanwhile overtake it, and have earlier
//! numbers. So they may contain nothing that must be later:
//!
//! - A group with an inode of the data group would be followed by an older state of that inode. It
//!   waits, unless the inode may wait for the next group
//!   ([`ClosePlan::busy`](crate::group::ClosePlan)).
//! - A sync of a file of the data group waits for it, also where the file has not changed since.
//! - There is one data group at a time.
//!
//! After a power failure a file of a data group is as before, or as the data group has it: as with
//! a file whose data waits for the next group.
//!
//! The thread that has closed a data group writes it. A thread that waits for a data group that no
//! thread writes yet does so itself.

use std::collections::HashSet;
use std::sync::atomic::Ordering;
use std::sync::{MutexGuard, PoisonError};

use super::UhsEngine;
use crate::group::CommitBatch;
use crate::locks::lock;
use crate::store::{InodeStore, StoreError};

/// The data group that has no number yet, if there is one.
#[derive(Default)]
pub(super) struct DataGroups {
    open: Option<OpenDataGroup>,
    /// The number of data groups that were closed.
    closed: u64,
}

struct OpenDataGroup {
    inos: HashSet<u64>,
    /// `None` while a thread writes it.
    batch: Option<Box<CommitBatch>>,
}

/// The right to write a group.
pub(super) struct WriteTurn<'a> {
    engine: &'a UhsEngine,
    /// `None` only while it waits.
    groups: Option<MutexGuard<'a, DataGroups>>,
}

/// A data group that this thread writes. Dropped before its end, it has failed.
struct DataGroupWrite<'a> {
    engine: &'a UhsEngine,
    is_written: bool,
}

impl WriteTurn<'_> {
    /// The inodes of the data group that has no number yet.
    pub(super) fn busy(&self) -> Option<&HashSet<u64>> {
        let groups = self.groups.as_ref()?;
        groups.open.as_ref().map(|open| &open.inos)
    }

    /// True where the closing group may be divided.
    pub(super) fn may_divide(&self) -> bool {
        self.busy().is_none()
    }

    /// Keeps a data group to be written. Returns its ordinal.
    pub(super) fn add(&mut self, batch: Box<CommitBatch>) -> u64 {
        let inos = batch.contents.iter().map(|(ino, _)| *ino).collect();
        let Some(groups) = self.groups.as_mut() else { return 0 };
        debug_assert!(groups.open.is_none(), "there is one data group at a time");
        groups.open = Some(OpenDataGroup { inos, batch: Some(batch) });
        groups.closed += 1;
        groups.closed
    }

    /// Waits for the data group, if there is one and `concerns` is true of its ordinal and its
    /// inodes. True if it has waited. The right is given back meanwhile.
    ///
    /// # Errors
    ///
    /// A failure of the device, if this thread has written the data group.
    pub(super) fn wait_for_data_group(
        &mut self,
        store: &InodeStore,
        concerns: impl Fn(u64, &HashSet<u64>) -> bool,
    ) -> Result<bool, StoreError> {
        let mut waited = false;
        while let Some(mut groups) = self.groups.take() {
            let ordinal = groups.closed;
            let open = groups.open.as_mut().filter(|open| concerns(ordinal, &open.inos));
            let Some(open) = open else {
                self.groups = Some(groups);
                break;
            };
            waited = true;
            let engine = self.engine;
            match open.batch.take() {
                Some(batch) => {
                    drop(groups);
                    let written = engine.write_data_group(store, batch);
                    self.groups = Some(lock(&engine.writing));
                    written?;
                }
                None => {
                    let over = &engine.data_group_over;
                    let groups = over.wait(groups).unwrap_or_else(PoisonError::into_inner);
                    self.groups = Some(groups);
                }
            }
        }
        Ok(waited)
    }
}

impl UhsEngine {
    /// Waits for the right to write a group.
    pub(super) fn take_write_turn(&self) -> WriteTurn<'_> {
        WriteTurn { engine: self, groups: Some(lock(&self.writing)) }
    }

    /// Writes the data group of this ordinal, or waits until another thread has.
    pub(super) fn finish_data_group(
        &self,
        store: &InodeStore,
        ordinal: u64,
    ) -> Result<(), StoreError> {
        let mut turn = self.take_write_turn();
        turn.wait_for_data_group(store, |open, _| open == ordinal).map(drop)
    }

    /// Closes a group, writes it, and leaves its data group to a thread that needs it.
    #[cfg(test)]
    pub(crate) fn divide_group(&self) -> defuse_fs::Result<()> {
        let super::EngineSlots::Store(store) = &self.store else { return Ok(()) };
        let mut turn = self.take_write_turn();
        let purpose = defuse_block::QueuePurpose::Behind;
        let written =
            self.write_running(store, &mut turn, &crate::group::SyncedFiles::All, purpose)?;
        drop(turn);
        if let Some(slots) = written.slots {
            store.finish(slots).map_err(|error| self.fail(&error))?;
        }
        Ok(())
    }

    /// Writes a data group up to its slots.
    fn write_data_group(
        &self,
        store: &InodeStore,
        mut batch: Box<CommitBatch>,
    ) -> Result<u64, StoreError> {
        let mut write = DataGroupWrite { engine: self, is_written: false };
        let lost = self.write_data(store, &mut batch)?;
        let turn = self.take_write_turn();
        let begun = self.begin_closed(store, &mut batch, (Some(lost), &mut None))?;
        // Its data may be stuck now.
        self.give_up_stuck();
        drop(turn);
        write.is_written = true;
        drop(write);
        match begun {
            (_, Some(slots)) => store.finish(slots),
            (group, None) => Ok(group),
        }
    }
}

impl Drop for DataGroupWrite<'_> {
    fn drop(&mut self) {
        if !self.is_written {
            // Later groups must not have the state of these files.
            self.engine.read_only.store(true, Ordering::Relaxed);
        }
        lock(&self.engine.writing).open = None;
        self.engine.data_group_over.notify_all();
    }
}
