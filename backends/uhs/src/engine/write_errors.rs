//! Data that the device does not take: the callers that receive the error, and the fate of the
//! data.

use std::sync::atomic::Ordering;

use defuse_fs::{Errno, Result};

use super::UhsEngine;
use crate::content::SharedContent;
use crate::locks::lock;
use crate::names::ContentState;

impl UhsEngine {
    /// Makes a file durable, and all names; with `datasync` only what its data needs. `EIO` also
    /// where that failed for bytes of this inode.
    pub(crate) fn sync_file(&self, ino: u64, datasync: bool) -> Result<()> {
        if !(datasync && self.sync_in_place(ino)?) {
            self.commit(super::SyncScope::File(ino))?;
        }
        match self.names.content(ino) {
            Ok(ContentState::Here(content)) if lock(&content).has_failed() => Err(Errno::EIO),
            _ => Ok(()),
        }
    }

    /// Makes all names durable, and the times of a directory unless only data matters.
    pub(crate) fn sync_directory(&self, ino: u64, datasync: bool) -> Result<()> {
        if !datasync && let Ok(handle) = self.enter() {
            match self.names.write_times_of(&handle, ino) {
                true => self.end_change(handle),
                false => drop(handle),
            }
        }
        self.commit(super::SyncScope::File(ino))
    }

    /// Makes everything durable. `EIO` also where that failed for bytes of any file.
    pub(crate) fn sync_all(&self) -> Result<()> {
        self.commit(super::SyncScope::Everything)?;
        if lock(&self.stuck).is_empty() { Ok(()) } else { Err(Errno::EIO) }
    }

    /// Makes the next group write stuck pages.
    pub(super) fn list_stuck(&self) {
        let stuck = lock(&self.stuck).clone();
        for (ino, content) in stuck {
            let handle = self.gate.enter();
            let held = lock(&content);
            if self.names.settle(&handle, ino, held.summarize()).is_err() {
                // The inode is gone, with its data.
                lock(&self.stuck).remove(&ino);
            }
        }
    }

    /// Finds other places for data that could not be written. With `stuck`, it waits for the next
    /// sync.
    pub(super) fn lose(&self, contents: &[(u64, SharedContent)], lost: &[u64], stuck: bool) {
        self.refused.store(true, Ordering::Relaxed);
        for (ino, content) in contents {
            let handle = self.gate.enter();
            let mut held = lock(content);
            if held.lose_blocks(&self.pool, lost, stuck) {
                let _ = self.names.write_again(&handle, *ino, held.summarize());
                if held.is_stuck() {
                    log::error!("uhs: the device does not take data of inode {ino}");
                    lock(&self.stuck).insert(*ino, SharedContent::clone(content));
                }
            }
        }
    }

    /// Records that the data of a group is on the device.
    pub(super) fn has_written(&self, contents: &[(u64, SharedContent)], after_loss: bool) {
        if after_loss {
            contents.iter().for_each(|(_, content)| lock(content).end_loss(&self.pool));
        }
        let mut stuck = lock(&self.stuck).clone();
        if stuck.is_empty() {
            return;
        }
        stuck.retain(|ino, _| contents.iter().any(|(written, _)| written == ino));
        let done = stuck.into_iter().filter(|(_, content)| !lock(content).is_stuck());
        for (ino, _) in done {
            lock(&self.stuck).remove(&ino);
        }
    }

    /// Gives up data that the device does not take, if it occupies half of the memory for dirty
    /// data.
    pub(super) fn give_up_stuck(&self) {
        if self.pool.dirty() <= self.options.dirty_pages / 2 {
            return;
        }
        let stuck = std::mem::take(&mut *lock(&self.stuck));
        for (ino, content) in stuck {
            let handle = self.gate.enter();
            let mut held = lock(&content);
            held.give_up_stuck(&self.pool);
            let _ = self.names.settle(&handle, ino, held.summarize());
            log::error!("uhs: data of inode {ino} is lost: the device does not take it");
        }
    }
}
