//! Reads and writes of data, several at a time. Meanwhile, each caller has a queue of its own.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use defuse_block::{
    BlockCompletion, BlockDevice, BlockOp, BlockOpKind, DeviceQueue, Errno, FrameRun, QueuePurpose,
    Result,
};

use smallvec::SmallVec;

use crate::content::PageFrame;
use crate::format::are_neighbours;
use crate::space::BlockRun;

/// Queues at most, of each purpose.
const QUEUES: usize = 16;

/// Operations in flight of one queue.
const DEPTH: u32 = 32;

/// Large writes in flight: more of them cost more CPU each. Of small ones there are more.
const WRITES: usize = 4;

/// Blocks of one operation at most: 1 MiB. A device may take less.
pub(crate) const GATHERED: usize = 256;

/// The way to the blocks of files.
pub(crate) struct BlockIo {
    device: Arc<dyn BlockDevice>,
    /// Pools by purpose, if the device distinguishes purposes; otherwise the first pool serves all.
    lines: [QueuePool; 3],
    /// The device distinguishes purposes.
    has_purposes: bool,
    gathered: usize,
}

#[derive(Default)]
struct QueuePool {
    queues: Mutex<PooledQueues>,
    free: Condvar,
}

#[derive(Default)]
struct PooledQueues {
    idle: Vec<IdleQueue>,
    open: usize,
    /// The device has no more.
    all: bool,
}

/// A queue with the memory for its completions.
struct IdleQueue {
    queue: Box<dyn DeviceQueue>,
    done: Vec<BlockCompletion>,
}

/// Blocks that could not be written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FailedBlocks {
    /// The first of the data.
    pub(crate) from: usize,
    /// The number of blocks.
    pub(crate) count: usize,
    pub(crate) errno: Errno,
}

impl BlockIo {
    pub(crate) fn new(device: Arc<dyn BlockDevice>, has_purposes: bool) -> Self {
        let gathered = device.properties().blocks_at_once().min(GATHERED);
        BlockIo { device, lines: Default::default(), has_purposes, gathered }
    }

    /// A queue for one user, for as long as the user needs it. `None` if the device has few queues.
    pub(crate) fn queue(&self, purpose: QueuePurpose, depth: u32) -> Option<Box<dyn DeviceQueue>> {
        let many = self.device.properties().max_queues as usize >= QUEUES;
        many.then(|| self.device.queue_for(purpose, depth).ok()).flatten()
    }

    /// Blocks of one operation of this device at most.
    pub(crate) fn gather_limit(&self) -> usize {
        self.gathered
    }

    /// Reads runs of blocks, each into its frames, of [`gather_limit`](BlockIo::gather_limit)
    /// blocks at most. They come back in order.
    ///
    /// # Errors
    ///
    /// The first failure of the device.
    pub(crate) fn read(
        &self,
        purpose: QueuePurpose,
        runs: Vec<(u64, FrameRun)>,
    ) -> Result<Vec<FrameRun>> {
        let mut read: Vec<Option<FrameRun>> = runs.iter().map(|_| None).collect();
        let mut error = None;
        let ops = runs
            .into_iter()
            .map(|(block, frames)| BlockOpKind::Read { block, memory: frames.into() });
        self.run(purpose, (ops, DEPTH as usize), &mut |done| match done.result {
            Ok(()) => read[done.tag as usize] = done.memory.into_frames(),
            Err(errno) => error = Some(errno),
        })?;
        error.map_or(Ok(()), Err)?;
        read.into_iter().map(|frames| frames.ok_or(Errno::IO)).collect()
    }

    /// True if pages are durable sooner by one write with FUA than by a write and a flush.
    pub(crate) fn writes_through(&self, data: &[(u64, PageFrame)]) -> bool {
        let is_run = are_neighbours(data.iter().map(|(block, _)| *block));
        is_run && data.len() <= self.gathered && self.device.properties().fua
    }

    /// Writes pages, each to its block, neighbours together. Sorts `data` by block. With `durable`,
    /// the written pages survive a power failure. Returns the blocks that could not be written.
    ///
    /// # Errors
    ///
    /// Without a queue nothing is written.
    pub(crate) fn write(
        &self,
        purpose: QueuePurpose,
        data: &mut [(u64, PageFrame)],
        durable: bool,
    ) -> Result<Vec<FailedBlocks>> {
        data.sort_unstable_by_key(|(block, _)| *block);
        let runs = data.chunk_by(|a, b| a.0 + 1 == b.0).flat_map(|run| run.chunks(self.gathered));
        let runs: SmallVec<[&[(u64, PageFrame)]; 4]> = runs.collect();
        let ops = runs.iter().map(|run| {
            let memory = PageFrame::segments(run.iter().map(|(_, frame)| frame));
            BlockOpKind::Write { block: run[0].0, memory, fua: durable }
        });
        let mut failed = Vec::new();
        let depth = (WRITES * self.gathered * runs.len() / data.len().max(1)).max(WRITES);
        self.run(purpose, (ops, depth), &mut |done| {
            if let Err(errno) = done.result {
                let before = runs[..done.tag as usize].iter();
                let from = before.map(|run| run.len()).sum();
                failed.push(FailedBlocks { from, count: runs[done.tag as usize].len(), errno });
            }
        })?;
        Ok(failed)
    }

    /// Discards these blocks, if the device supports it. Nothing depends on it.
    pub(crate) fn discard(&self, runs: &[BlockRun]) {
        if !self.device.properties().discard {
            return;
        }
        let mut runs: Vec<BlockRun> = runs.to_vec();
        runs.sort_unstable_by_key(|run| run.block);
        let mut whole: Vec<(u64, u64)> = Vec::new();
        for run in runs {
            let count = u64::from(run.count);
            match whole.last_mut() {
                Some((block, blocks)) if *block + *blocks == run.block => *blocks += count,
                _ => whole.push((run.block, count)),
            }
        }
        let ops = whole.into_iter().map(|(block, blocks)| BlockOpKind::Discard { block, blocks });
        let mut failed = None;
        let see = &mut |done: BlockCompletion| failed = done.result.err().or(failed);
        let run = self.run(QueuePurpose::Reclaim, (ops, WRITES), see);
        if let Some(errno) = run.err().or(failed) {
            log::debug!("uhs: blocks cannot be discarded: {errno}");
        }
    }

    /// Performs operations, up to `depth` at a time. Their tags are their numbers.
    fn run(
        &self,
        purpose: QueuePurpose,
        (ops, depth): (impl Iterator<Item = BlockOpKind>, usize),
        see: &mut dyn FnMut(BlockCompletion),
    ) -> Result<()> {
        let line = self.line(purpose);
        let IdleQueue { mut queue, mut done } = self.take(line, purpose)?;
        let mut waiting: Option<BlockOp> = None;
        let mut ops = ops.enumerate().map(|(nth, kind)| BlockOp { tag: nth as u64, kind });
        loop {
            while queue.in_flight() < depth.min(queue.depth()) {
                let Some(op) = waiting.take().or_else(|| ops.next()) else { break };
                if let Err(again) = queue.push(op) {
                    waiting = Some(again);
                    break;
                }
            }
            if queue.in_flight() == 0 {
                break;
            }
            queue.wait(None);
            queue.reap(&mut done);
            done.drain(..).for_each(&mut *see);
        }
        line.lock().idle.push(IdleQueue { queue, done });
        line.free.notify_one();
        Ok(())
    }

    fn line(&self, purpose: QueuePurpose) -> &QueuePool {
        match purpose {
            QueuePurpose::Behind if self.has_purposes => &self.lines[1],
            QueuePurpose::Reclaim if self.has_purposes => &self.lines[2],
            _ => &self.lines[0],
        }
    }

    /// An idle queue, or a new one, or the next one that is given back.
    fn take(&self, line: &QueuePool, purpose: QueuePurpose) -> Result<IdleQueue> {
        let mut queues = line.lock();
        loop {
            if let Some(queue) = queues.idle.pop() {
                return Ok(queue);
            }
            if !queues.all && queues.open < QUEUES {
                match self.device.queue_for(purpose, DEPTH) {
                    Ok(queue) => {
                        queues.open += 1;
                        return Ok(IdleQueue { queue, done: Vec::new() });
                    }
                    Err(errno) if queues.open == 0 => return Err(errno),
                    Err(_) => queues.all = true,
                }
            }
            queues = line.free.wait(queues).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl QueuePool {
    fn lock(&self) -> MutexGuard<'_, PooledQueues> {
        self.queues.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
