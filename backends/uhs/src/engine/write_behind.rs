//! Data on its way to the device before its group closes, so that a long write and the device work
//! at the same time.
//!
//! A write that completes a run of new pages gives them blocks and begins to write them, without
//! waiting. Only the inode in memory has these blocks. The next group with the inode records them,
//! and is written after all runs of its files that were begun before
//! ([`UhsEngine::finish_behind`]). So data is first, as with everything that the group writes
//! itself. A group that frees blocks of a file waits for the runs of that file, too.
//!
//! Pages that the device refuses become a part of the group, which tries again and finds other
//! blocks.
//!
//! The line is a lock of its own. A thread that holds it may wait for the device, and takes no
//! other lock but the locks of the pool.

use std::collections::{BTreeSet, HashMap};
use std::sync::{Condvar, Mutex, PoisonError};

use defuse_block::{BlockCompletion, BlockOp, BlockOpKind, DeviceQueue, QueuePurpose};

use super::UhsEngine;
use crate::content::{PageFrame, SharedContent};
use crate::format::BLOCK;
use crate::locks::lock;

/// Operations in flight.
const DEPTH: u32 = 32;

/// The number of pages in flight from which on writers wait: 8 MiB.
const MOST: usize = 2048;

/// A page with its block.
type BlockPage = (u64, PageFrame);

/// The way of such runs to the device.
pub(super) struct WriteBehind {
    line: Mutex<WriteBehindQueue>,
    /// Runs that were begun are in the line.
    pushed: Condvar,
}

struct WriteBehindQueue {
    queue: Box<dyn DeviceQueue>,
    /// By the tag of their operation.
    flights: HashMap<u64, WriteInFlight>,
    /// Operations in flight of each batch.
    left: HashMap<u64, usize>,
    /// Pages in flight.
    pages: usize,
    next: u64,
    done: Vec<BlockCompletion>,
    /// Pages that the device did not take, each of its batch.
    refused: Vec<(u64, BlockPage)>,
}

struct WriteInFlight {
    batch: u64,
    pages: Vec<BlockPage>,
}

impl WriteBehind {
    fn new(queue: Box<dyn DeviceQueue>) -> Self {
        let line = WriteBehindQueue {
            queue,
            flights: HashMap::new(),
            left: HashMap::new(),
            pages: 0,
            next: 0,
            done: Vec::new(),
            refused: Vec::new(),
        };
        WriteBehind { line: Mutex::new(line), pushed: Condvar::new() }
    }
}

impl WriteBehindQueue {
    /// Adds an operation. It waits for others where the queue is full.
    fn push(&mut self, engine: &UhsEngine, batch: u64, pages: Vec<BlockPage>) {
        let memory = PageFrame::segments(pages.iter().map(|(_, frame)| frame));
        let kind = BlockOpKind::Write { block: pages[0].0, memory, fua: false };
        let mut op = BlockOp { tag: self.next, kind };
        self.next += 1;
        self.pages += pages.len();
        self.flights.insert(op.tag, WriteInFlight { batch, pages });
        while let Err(again) = self.queue.push(op) {
            op = again;
            self.wait(engine);
        }
    }

    fn wait(&mut self, engine: &UhsEngine) {
        self.queue.wait(None);
        self.reap(engine);
    }

    /// Takes in completed operations.
    fn reap(&mut self, engine: &UhsEngine) {
        let mut done = std::mem::take(&mut self.done);
        self.queue.reap(&mut done);
        for BlockCompletion { tag, result, .. } in done.drain(..) {
            let Some(WriteInFlight { batch, pages }) = self.flights.remove(&tag) else { continue };
            self.pages -= pages.len();
            if let Err(errno) = result {
                log::warn!("uhs: blocks from {} on cannot be written: {errno}", pages[0].0);
                self.refused.extend(pages.into_iter().map(|page| (batch, page)));
            }
            let left = self.left.get_mut(&batch).map_or(0, |left| {
                *left -= 1;
                *left
            });
            if left == 0 {
                self.left.remove(&batch);
                match self.refused.iter().any(|(refused, _)| *refused == batch) {
                    true => engine.pool.defer_to_group(batch),
                    false => engine.pool.record_early_write(batch),
                }
            }
        }
        self.done = done;
    }
}

impl UhsEngine {
    fn new_behind(&self) -> Option<WriteBehind> {
        self.io.queue(QueuePurpose::Behind, DEPTH).map(WriteBehind::new)
    }

    /// Begins to write the runs that a write of `len` bytes at `offset` has completed. Waits only
    /// while much is in flight.
    pub(super) fn write_behind(&self, content: &SharedContent, offset: u64, len: u64) {
        let run = self.rules.early_run;
        let bytes = run * BLOCK as u64;
        if offset / bytes == (offset + len) / bytes {
            return;
        }
        let behind = self.behind.get_or_init(|| self.new_behind());
        let Some(behind) = behind else { return };
        // The group must take the refused pages before more pages are written early.
        if !lock(&behind.line).refused.is_empty() {
            return;
        }
        let begun = {
            let Ok(_handle) = self.enter() else { return };
            let mut held = lock(content);
            let ready = held.take_ready(&self.pool, offset, len, run);
            // If there is no space after all, the group reports the error.
            ready.and_then(|pages| held.allocate_early(&self.pool, pages).ok())
        };
        let Some((batch, pages)) = begun else { return };
        let follows = |a: &BlockPage, b: &BlockPage| a.0 + 1 == b.0;
        let runs = pages.chunk_by(follows).flat_map(|run| run.chunks(self.io.gather_limit()));
        let runs: Vec<Vec<BlockPage>> = runs.map(<[BlockPage]>::to_vec).collect();
        let mut line = lock(&behind.line);
        line.left.insert(batch, runs.len());
        runs.into_iter().for_each(|pages| line.push(self, batch, pages));
        line.queue.kick();
        line.reap(self);
        while line.pages > MOST {
            line.wait(self);
        }
        drop(line);
        behind.pushed.notify_all();
    }

    /// Waits for the runs of these batches. Returns the pages that the device did not take.
    pub(super) fn finish_behind(&self, batches: &BTreeSet<u64>) -> Vec<BlockPage> {
        let Some(Some(behind)) = self.behind.get() else { return Vec::new() };
        let mut line = lock(&behind.line);
        while self.pool.has_early(batches) {
            if line.left.keys().any(|early| batches.contains(early)) {
                line.wait(self);
            } else {
                // Another thread is about to push the run.
                line = behind.pushed.wait(line).unwrap_or_else(PoisonError::into_inner);
            }
        }
        let refused = std::mem::take(&mut line.refused).into_iter();
        let (mine, later) = refused.partition(|(early, _)| batches.contains(early));
        line.refused = later;
        let mine: Vec<(u64, BlockPage)> = mine;
        mine.into_iter().map(|(_, page)| page).collect()
    }
}
