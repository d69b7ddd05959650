//! Queues that threads use in turn, and frames for gathered writes.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use defuse_block::{
    BlockCompletion, BlockDevice, BlockOp, BlockOpKind, DeviceQueue, Errno, FrameRun, MemoryRegion,
};

/// Blocks of one write at most: 1 MiB. A device may take less.
const GATHERED: usize = 256;

/// Operations in flight of a lane.
const DEPTH: u32 = 32;

/// Idle queues that are kept.
const KEPT: usize = 8;

/// The wait of a thread for frames that other threads hold, before it looks again.
const LOOK_AGAIN: Duration = Duration::from_millis(2);

/// The number of attempts to get frames, for about a second: after that they do not come back. A
/// device that has failed as a whole keeps the frames that it had.
const LOOKS: u32 = 500;

/// The queues to a device that are not in use, and the frames of writes.
pub(super) struct DeviceQueues {
    device: Arc<dyn BlockDevice>,
    region: Arc<MemoryRegion>,
    idle: Mutex<Vec<IdleLane>>,
    /// A queue or frames were returned.
    returned: Condvar,
}

/// A queue with the memory for its completions.
struct IdleLane {
    queue: Box<dyn DeviceQueue>,
    reaped: Vec<BlockCompletion>,
}

/// A queue that one thread uses.
pub(super) struct BorrowedQueue {
    lanes: Arc<DeviceQueues>,
    /// `None` only while it is dropped.
    queue: Option<Box<dyn DeviceQueue>>,
    /// Memory for completions.
    reaped: Vec<BlockCompletion>,
}

impl DeviceQueues {
    pub(super) fn new(
        device: Arc<dyn BlockDevice>,
        frames: u32,
    ) -> Result<Arc<DeviceQueues>, Errno> {
        let region = MemoryRegion::new(frames)?;
        device.register(&region)?;
        let first = device.queue(DEPTH)?;
        let first = IdleLane { queue: first, reaped: Vec::new() };
        let (idle, returned) = (Mutex::new(vec![first]), Condvar::new());
        Ok(Arc::new(DeviceQueues { device, region, idle, returned }))
    }

    /// Blocks of one write at most.
    pub(super) fn gather_limit(&self) -> usize {
        self.device.properties().blocks_at_once().min(GATHERED)
    }

    /// Takes a queue: an idle one, a new one, or, if the device has no further queue, the next one
    /// that is returned.
    pub(super) fn take(self: &Arc<Self>) -> Result<BorrowedQueue, Errno> {
        let mut idle = self.lock();
        loop {
            let IdleLane { queue, reaped } = match idle.pop() {
                Some(lane) => lane,
                None => match self.device.queue(DEPTH) {
                    Ok(queue) => IdleLane { queue, reaped: Vec::new() },
                    Err(Errno::BUSY | Errno::NOMEM) => {
                        let waited = self.returned.wait_timeout(idle, LOOK_AGAIN);
                        idle = waited.unwrap_or_else(PoisonError::into_inner).0;
                        continue;
                    }
                    Err(errno) => return Err(errno),
                },
            };
            return Ok(BorrowedQueue { lanes: Arc::clone(self), queue: Some(queue), reaped });
        }
    }

    fn lock(&self) -> MutexGuard<'_, Vec<IdleLane>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl BorrowedQueue {
    fn queue(&mut self) -> &mut dyn DeviceQueue {
        match &mut self.queue {
            Some(queue) => &mut **queue,
            None => unreachable!("a lane has its queue until it is dropped"),
        }
    }

    /// Blocks of one write at most.
    pub(super) fn gather_limit(&self) -> usize {
        self.lanes.gather_limit()
    }

    /// Takes frames. If there are none, it waits for writes of this queue, whose completions go to
    /// `reaped`, or for writes of other queues.
    pub(super) fn frames(&mut self, count: u32, reaped: &mut Vec<BlockCompletion>) -> FrameRun {
        let mut looks = 0;
        loop {
            if let Some(frames) = self.lanes.region.take(count) {
                return frames;
            }
            if looks >= LOOKS
                && let Ok(region) = MemoryRegion::new(count.next_power_of_two())
                && let Some(frames) = region.take(count)
            {
                return frames;
            }
            if self.in_flight() > 0 {
                self.wait(reaped);
                // The frames of writes that succeeded come back; a caller needs the others.
                reaped.iter_mut().filter(|done| done.result.is_ok()).for_each(|done| {
                    drop(std::mem::take(&mut done.memory));
                });
                continue;
            }
            looks = (looks + 1).min(LOOKS);
            let idle = self.lanes.lock();
            drop(self.lanes.returned.wait_timeout(idle, LOOK_AGAIN));
        }
    }

    /// Adds an operation. It begins with [`kick`](BorrowedQueue::kick) at the latest.
    pub(super) fn push(&mut self, tag: u64, kind: BlockOpKind, reaped: &mut Vec<BlockCompletion>) {
        let mut op = BlockOp { tag, kind };
        while let Err(again) = self.queue().push(op) {
            op = again;
            self.wait(reaped);
        }
    }

    pub(super) fn kick(&mut self) {
        self.queue().kick();
    }

    /// Operations that are not complete.
    pub(super) fn in_flight(&mut self) -> usize {
        self.queue().in_flight()
    }

    /// Waits until one more operation at least is complete.
    pub(super) fn wait(&mut self, reaped: &mut Vec<BlockCompletion>) {
        let before = reaped.len();
        while self.in_flight() > 0 && reaped.len() == before {
            self.queue().wait(None);
            self.queue().reap(reaped);
        }
    }

    /// Takes in completed operations.
    #[cfg(test)]
    pub(super) fn poll(&mut self, reaped: &mut Vec<BlockCompletion>) {
        self.queue().reap(reaped);
    }

    /// Performs one operation. No other may be in flight.
    pub(super) fn run(&mut self, kind: BlockOpKind) -> Result<(), Errno> {
        let mut reaped = self.take_memory();
        self.push(0, kind, &mut reaped);
        while reaped.is_empty() {
            self.wait(&mut reaped);
        }
        let result = reaped.drain(..).try_for_each(|done| done.result);
        self.keep_memory(reaped);
        result
    }

    /// Memory for completions, which may be given back.
    pub(super) fn take_memory(&mut self) -> Vec<BlockCompletion> {
        std::mem::take(&mut self.reaped)
    }

    /// Keeps memory for completions.
    pub(super) fn keep_memory(&mut self, mut reaped: Vec<BlockCompletion>) {
        reaped.clear();
        self.reaped = reaped;
    }
}

impl Drop for BorrowedQueue {
    fn drop(&mut self) {
        let Some(queue) = self.queue.take() else { return };
        let mut idle = self.lanes.lock();
        // Dropping a queue waits for its operations in flight.
        if queue.in_flight() == 0 && idle.len() < KEPT {
            idle.push(IdleLane { queue, reaped: std::mem::take(&mut self.reaped) });
        }
        drop(idle);
        self.lanes.returned.notify_all();
    }
}
