//! The running group: its handles, and how it is closed.

mod group_lock;
mod sync;
mod synced_files;

use std::collections::HashSet;
use std::sync::{Arc, Mutex};

use defuse_block::QueuePurpose;
use defuse_fs::{Errno, Result};

use crate::commit::InodeChange;
use crate::content::{BlockPool, FileContent, PageFrame};
use crate::format::BLOCK;
use crate::format::inode::{BlockPointer, HEAD, write_overflow};
use crate::format::slot::BODY;
use crate::locks::lock;
use crate::names::{Encoded, EncodedInode, NameStore};
use crate::space::BlockRun;

pub(crate) use group_lock::{GroupLock, GroupReadGuard, GroupWriteGuard};
pub(crate) use sync::number_of_thread;
pub(crate) use synced_files::SyncedFiles;

/// Everything that a group writes.
#[derive(Default)]
pub(crate) struct CommitBatch {
    pub(crate) changes: Vec<InodeChange>,
    /// Indices of changes whose data is still in the slot of the current copy, and is to be added.
    pub(crate) stored: Vec<usize>,
    /// Blocks that must be durable before the changes are written.
    pub(crate) data: Vec<(u64, PageFrame)>,
    /// The number of the group among the groups that write data.
    pub(crate) number: u64,
    /// Some data of the group was written before the group closed.
    pub(crate) has_early: bool,
    /// A sync waits for the group.
    pub(crate) now: bool,
    /// The purpose for which its data is written.
    pub(crate) purpose: QueuePurpose,
    /// Blocks that are free once the changes are durable.
    pub(crate) freed: Vec<BlockRun>,
    /// Units of pages in many runs: inodes and numbers.
    pub(crate) scattered: Vec<(u64, u64)>,
    /// The contents that the changes are about. They stay in memory until the changes are durable.
    pub(crate) contents: Vec<(u64, Arc<Mutex<FileContent>>)>,
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
        new.purpose = self.purpose;
        *self = new;
    }
}

/// Closes the running group. Returns all changes since the last group, but those of files that are not `wanted` and of
/// which nothing but much data has changed: they wait for the next group. With `skip_stuck`, stuck pages wait. The
/// promised blocks are taken now.
///
/// # Errors
///
/// `EIO` if there is no space for a promise.
pub(crate) fn close(
    closed: &GroupWriteGuard<'_>,
    names: &NameStore,
    pool: &BlockPool,
    wanted: &SyncedFiles,
    skip_stuck: bool,
) -> Result<CommitBatch> {
    let changes = closed.take();
    let (number, has_early) = pool.next_batch();
    let mut batch = CommitBatch { number, has_early, ..CommitBatch::default() };
    let mut outside = Vec::new();
    batch.changes.reserve(changes.changed.len() + changes.gone.len());
    for ino in changes.changed {
        // Most groups want all files, and then no inode is examined.
        if !wanted.contains(ino)
            && let Some(weight) = names.data_may_wait(ino)
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
            Some(Encoded::Content(content)) => {
                let mut held = lock(&content);
                held.allocate_blocks(pool, batch.number, &mut batch.data, skip_stuck)?;
                batch.scattered.extend(held.list_scattered().into_iter().map(|unit| (ino, unit)));
                match names.encode(ino, &held)? {
                    Some(encoded) => {
                        let body = fit(encoded, &mut held, pool, &mut outside)?;
                        batch.changes.push(InodeChange::Write { ino, body });
                    }
                    // The inode may get a name again.
                    None => {
                        let others = held.bytes_of_other_records();
                        held.replace_records(pool, Vec::new(), others);
                    }
                }
                drop(held);
                batch.contents.push((ino, content));
            }
        }
    }
    batch.changes.extend(changes.gone.into_iter().map(|ino| InodeChange::Remove { ino }));
    let frames = PageFrame::copies(outside.iter().map(|(_, bytes)| &bytes[..]));
    let frames = frames.map_err(|_| Errno::ENOMEM)?;
    batch.data.extend(outside.iter().map(|(block, _)| *block).zip(frames));
    batch.freed = pool.take_abandoned();
    Ok(batch)
}

/// The body that fits into a slot. Records that do not fit go to new blocks; of many extents only the changed records
/// do.
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
