//! The running group: its handles, and how it is closed.

mod group_lock;
mod sync;
mod synced_files;

use std::collections::{BTreeSet, HashSet};

use defuse_block::QueuePurpose;
use defuse_fs::{Errno, Result};
use smallvec::SmallVec;

use crate::commit::InodeChange;
use crate::content::{BlockPool, FileContent, PageFrame, SharedContent};
use crate::format::BLOCK;
use crate::format::inode::{BlockPointer, HEAD, write_overflow};
use crate::format::slot::BODY;
use crate::locks::lock;
use crate::names::{Encoded, EncodedInode, NameStore};
use crate::space::BlockRun;

use group_lock::ChangedInodes;
pub(crate) use group_lock::{GroupLock, GroupReadGuard, GroupWriteGuard};
pub(crate) use sync::number_of_thread;
pub(crate) use synced_files::SyncedFiles;

/// Contents with the numbers of their inodes.
pub(crate) type BatchContents = SmallVec<[(u64, SharedContent); 2]>;

/// Everything that a group writes.
#[derive(Default)]
pub(crate) struct CommitBatch {
    pub(crate) changes: Vec<InodeChange>,
    /// Indices of changes whose data is still in the slot of the current copy, and is to be added.
    pub(crate) stored: Vec<usize>,
    /// Blocks that must be durable before the changes are written.
    pub(crate) data: Vec<(u64, PageFrame)>,
    /// Blocks of records, which become data when the group is complete.
    outside: Vec<(u64, [u8; BLOCK])>,
    /// The number of the group among the groups that write data.
    pub(crate) number: u64,
    /// Something was written before the group closed.
    pub(crate) has_early: bool,
    /// The batches of data that were begun before the group closed, and for which it waits.
    pub(crate) early: BTreeSet<u64>,
    /// Former numbers of the group, if it was closed again.
    pub(crate) former: BTreeSet<u64>,
    /// A sync waits for the group.
    pub(crate) now: bool,
    /// The purpose for which its data is written.
    pub(crate) purpose: QueuePurpose,
    /// Blocks that are free once the changes are durable.
    pub(crate) freed: Vec<BlockRun>,
    /// Units of pages in many runs: inodes and numbers.
    pub(crate) scattered: Vec<(u64, u64)>,
    /// The contents that the changes are about. They stay in memory until the changes are durable.
    pub(crate) contents: BatchContents,
    /// Files whose data waits for the next group.
    pub(crate) waiting: usize,
}

impl CommitBatch {
    /// Adds all later changes, as if the group had been closed only now.
    pub(crate) fn extend(&mut self, mut new: CommitBatch) {
        let changed: HashSet<u64> = new.changes.iter().map(InodeChange::ino).collect();
        self.changes.retain(|change| !changed.contains(&change.ino()));
        // The data of the older changes is complete.
        new.changes.append(&mut self.changes);
        new.freed.append(&mut self.freed);
        new.contents.append(&mut self.contents);
        new.has_early |= self.has_early;
        new.former.append(&mut self.former);
        new.former.insert(self.number);
        new.early.append(&mut self.early);
        new.purpose = self.purpose;
        *self = new;
    }

    /// Adds a group of the same moment, with other inodes. Returns its data, which is still to be
    /// written.
    pub(crate) fn absorb(&mut self, mut other: CommitBatch) -> Vec<(u64, PageFrame)> {
        debug_assert!(other.stored.is_empty(), "a data group has contents only");
        self.changes.append(&mut other.changes);
        self.freed.append(&mut other.freed);
        self.contents.append(&mut other.contents);
        self.scattered.append(&mut other.scattered);
        self.early.append(&mut other.early);
        self.former.append(&mut other.former);
        self.former.insert(other.number);
        other.data
    }

    /// Adds data to be written, unless the group has newer bytes of the same block.
    pub(crate) fn add_older_data(&mut self, data: Vec<(u64, PageFrame)>) {
        if data.is_empty() {
            return;
        }
        let newer: HashSet<u64> = self.data.iter().map(|(block, _)| *block).collect();
        self.data.extend(data.into_iter().filter(|(block, _)| !newer.contains(block)));
    }

    /// All numbers of batches that are on the device when the data of the group is.
    pub(crate) fn numbers(&self) -> impl Iterator<Item = u64> {
        let numbers = self.former.iter().chain(&self.early).copied();
        numbers.chain([self.number])
    }

    /// Adds an inode whose content is in memory.
    fn add_content(
        &mut self,
        names: &NameStore,
        pool: &BlockPool,
        (ino, content): (u64, SharedContent),
        skip_stuck: bool,
    ) -> Result<()> {
        let mut held = lock(&content);
        held.allocate_blocks(pool, self.number, &mut self.data, skip_stuck)?;
        self.early.append(&mut held.take_early_batches());
        self.scattered.extend(held.list_scattered().into_iter().map(|unit| (ino, unit)));
        match names.encode(ino, &held)? {
            Some(encoded) => {
                let body = fit(encoded, &mut held, pool, &mut self.outside)?;
                self.changes.push(InodeChange::Write { ino, body });
            }
            // The inode may get a name again.
            None => {
                let others = held.bytes_of_other_records();
                held.replace_records(pool, Vec::new(), others);
            }
        }
        drop(held);
        self.contents.push((ino, content));
        Ok(())
    }

    /// Adds the records of all inodes to the data.
    fn finish(&mut self, pool: &BlockPool) -> Result<()> {
        let outside = std::mem::take(&mut self.outside);
        let frames = pool.frames_of_records(&outside).map_err(|_| Errno::ENOMEM)?;
        self.data.extend(outside.iter().map(|(block, _)| *block).zip(frames));
        Ok(())
    }
}

/// The files that a closing group writes.
#[derive(Clone, Copy)]
pub(crate) struct ClosePlan<'a> {
    /// The data of others waits for the next group, if it is much and nothing else of the file has
    /// changed.
    pub(crate) wanted: &'a SyncedFiles,
    /// The inodes of a data group that is not written yet.
    pub(crate) busy: Option<&'a HashSet<u64>>,
    /// Wanted files of which nothing but much data has changed become a data group.
    pub(crate) divides: bool,
    /// Stuck pages wait.
    pub(crate) skips_stuck: bool,
}

impl ClosePlan<'_> {
    /// Writes all changes as one group.
    pub(crate) const WHOLE: ClosePlan<'static> =
        ClosePlan { wanted: &SyncedFiles::All, busy: None, divides: false, skips_stuck: false };

    fn is_busy(&self, ino: u64) -> bool {
        self.busy.is_some_and(|busy| busy.contains(&ino))
    }

    /// The pages from which on the data of a file waits for the next group. `None` if the group
    /// writes it in any case.
    fn least_that_waits(&self, ino: u64, pool: &BlockPool) -> Option<usize> {
        // The data group has the rest of the data.
        if self.is_busy(ino) {
            return Some(0);
        }
        (!self.wanted.contains(ino)).then(|| pool.commit_rules().waiting_pages)
    }

    /// True if the group would write an inode of the data group, whose older state would follow.
    fn overtakes(&self, names: &NameStore, changes: &ChangedInodes) -> bool {
        let must = |ino: &&u64| self.is_busy(**ino) && names.data_may_wait(**ino, 0).is_none();
        self.busy.is_some()
            && (changes.gone.iter().any(|ino| self.is_busy(*ino))
                || changes.changed.iter().find(must).is_some())
    }
}

/// A running group that was closed.
pub(crate) enum ClosedChanges {
    /// The changes, and the data group that was divided from them.
    Batches(Box<CommitBatch>, Option<Box<CommitBatch>>),
    /// Nothing was closed: a data group must be written before, because an inode of it has changed
    /// again.
    Overtakes,
}

/// Closes the running group. Returns all changes since the last group, but for files that the plan
/// leaves for later. The promised blocks are taken now.
///
/// # Errors
///
/// `EIO` if there is no space for a promise.
pub(crate) fn close(
    closed: &GroupWriteGuard<'_>,
    names: &NameStore,
    pool: &BlockPool,
    plan: ClosePlan<'_>,
) -> Result<ClosedChanges> {
    let changes = closed.take();
    if pool.commit_rules().data_groups_keep_order && plan.overtakes(names, &changes) {
        closed.put_all_back(changes);
        return Ok(ClosedChanges::Overtakes);
    }
    let (number, has_early) = pool.next_batch();
    let mut batch = CommitBatch { number, has_early, ..CommitBatch::default() };
    let mut data_group: Option<Box<CommitBatch>> = None;
    batch.changes.reserve(changes.changed.len() + changes.gone.len());
    for ino in changes.changed.iter().copied() {
        // Most groups want all files, and then no inode is examined.
        if let Some(least) = plan.least_that_waits(ino, pool)
            && let Some(weight) = names.data_may_wait(ino, least)
        {
            closed.put_back(ino, weight);
            batch.waiting += 1;
            continue;
        }
        match names.take_changed(ino) {
            None => {}
            Some(Encoded::Whole { body, data_is_stored }) => {
                batch.stored.extend(data_is_stored.then_some(batch.changes.len()));
                batch.changes.push(InodeChange::Write { ino, body });
            }
            Some(Encoded::Content { content, only_data }) => {
                let least = pool.commit_rules().waiting_pages;
                let may_wait = plan.divides
                    && only_data
                    && lock(&content).may_wait(pool.commit_rules(), least);
                if !may_wait {
                    batch.add_content(names, pool, (ino, content), plan.skips_stuck)?;
                    continue;
                }
                // What the data group gives up is free when the data group is durable.
                batch.freed.append(&mut pool.take_abandoned());
                let data_group = data_group.get_or_insert_with(|| {
                    let (number, _) = pool.next_batch();
                    Box::new(CommitBatch { number, has_early, ..CommitBatch::default() })
                });
                data_group.add_content(names, pool, (ino, content), plan.skips_stuck)?;
                data_group.freed.append(&mut pool.take_abandoned());
            }
        }
    }
    batch.changes.extend(changes.gone.iter().map(|ino| InodeChange::Remove { ino: *ino }));
    closed.keep(changes);
    batch.freed.append(&mut pool.take_abandoned());
    batch.early.append(&mut pool.take_awaited());
    batch.finish(pool)?;
    data_group.as_mut().map_or(Ok(()), |data_group| data_group.finish(pool))?;
    Ok(ClosedChanges::Batches(Box::new(batch), data_group))
}

/// The body that fits into a slot. Records that do not fit go to new blocks; of many extents only
/// the changed records do.
fn fit(
    EncodedInode { inode, body, others, has_tree }: EncodedInode,
    content: &mut FileContent,
    pool: &BlockPool,
    outside: &mut Vec<(u64, [u8; BLOCK])>,
) -> Result<Vec<u8>> {
    if has_tree {
        let way = content.write_tree(pool, (&body[HEAD..], others), outside)?;
        return Ok(inode.body_outside(way.levels, way.bytes, &way.pointers));
    }
    if body.len() <= BODY {
        content.replace_records(pool, Vec::new(), others);
        return Ok(body);
    }
    let records = &body[HEAD..];
    let mut blocks = Vec::new();
    let spilled = write_overflow(records, |bytes| -> Result<BlockPointer> {
        let near = blocks.last().map(|run: &BlockRun| run.block);
        let run = pool.space().take(1, near, 0).ok_or(Errno::EIO)?;
        blocks.push(run);
        let crc = crc32c::crc32c(&bytes);
        outside.push((run.block, bytes));
        Ok(BlockPointer { block: run.block, crc })
    });
    content.replace_records(pool, blocks, others);
    let (levels, pointers) = spilled?.ok_or(Errno::EIO)?;
    Ok(inode.body_outside(levels, records.len() as u64, &pointers))
}
