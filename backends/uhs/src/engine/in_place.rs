//! Syncs of data that is overwritten in place, without a group: fdatasync(2) of a file whose inode is as a group wrote
//! it, but for its times.
//!
//! The data goes to blocks that the inode has, as the data of a group does, and a flush makes it durable. The inode
//! stays in the running group, which writes the times later. The right to write groups is held while the data is
//! written, so that no group writes other bytes to the same block. The groups that wrote the inode are durable when the
//! call returns.

use std::collections::BTreeSet;

use defuse_block::QueuePurpose;
use defuse_fs::{Errno, Result};

use super::{EngineSlots, UhsEngine};
use crate::content::PageFrame;
use crate::locks::lock;
use crate::store::{InodeStore, StoreError, device_error};

impl UhsEngine {
    /// Makes the data of a file durable, if it was overwritten in place and nothing else has changed. False if that
    /// needs a group.
    pub(super) fn sync_in_place(&self, ino: u64) -> Result<bool> {
        let EngineSlots::Store(store) = &self.store else { return Ok(false) };
        let Some(content) = self.names.changed_in_data(ino) else { return Ok(false) };
        // Most other files need no turn to find out.
        if !lock(&content).is_as_recorded(&self.pool) {
            return Ok(false);
        }
        let mut turn = self.take_write_turn();
        let waited = turn.wait_for_data_group(store, |_, inos| inos.contains(&ino));
        waited.map_err(|error| self.fail(&error))?;
        if self.is_read_only() {
            return Err(Errno::EIO);
        }
        let handle = self.gate.enter();
        let mut held = lock(&content);
        if self.names.changed_in_data(ino).is_none() || !held.is_as_recorded(&self.pool) {
            return Ok(false);
        }
        let (number, has_early) = self.pool.next_batch_in_place();
        let data = held.take_in_place(&self.pool, number);
        drop(held);
        drop(handle);
        let mut data =
            data.inspect_err(|_| self.pool.record_group_write(&BTreeSet::from([number])))?;
        let through = self.rules.data_is_first && !has_early && self.io.writes_through(&data);
        let lost = match data.is_empty() {
            true => Vec::new(),
            false => self.write_in_place(&mut data, through).map_err(|error| self.fail(&error))?,
        };
        self.pool.record_group_write(&BTreeSet::from([number]));
        if !lost.is_empty() {
            // The next group finds other blocks.
            self.lose(&[(ino, content)], &lost, false);
            return Ok(false);
        }
        let group = store.newest_group();
        drop(turn);
        let flushes = !through && (has_early || !data.is_empty());
        self.flush_in_place(store, flushes, group).map_err(|error| self.fail(&error))?;
        Ok(true)
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
        flushes: bool,
        group: u64,
    ) -> std::result::Result<(), StoreError> {
        if flushes && self.rules.data_is_first {
            store.flush()?;
        }
        store.sync(group)?;
        self.release(group);
        Ok(())
    }
}
