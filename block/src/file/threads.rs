//! A queue without io_uring(7): operations are system calls of a few threads, or of the thread that
//! waits for them.

use std::io::{IoSlice, IoSliceMut};
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Duration;

use rustix::fs::FallocateFlags;
use rustix::io::ReadWriteFlags;

use super::bounce;
use super::pool::PoolJob;
use super::state::FileDeviceState;
use crate::outbox::CompletionOutbox;
use crate::{
    BlockCompletion, BlockOp, BlockOpKind, DeviceQueue, Errno, MemorySegments, QueueWaker, Result,
};

pub(super) struct ThreadQueue {
    open: Arc<FileDeviceState>,
    outbox: Arc<CompletionOutbox>,
    pushed: Vec<BlockOp>,
    in_flight: usize,
    depth: usize,
}

impl ThreadQueue {
    pub(super) fn new(open: &Arc<FileDeviceState>, depth: u32) -> Self {
        let (open, outbox) = (Arc::clone(open), Arc::default());
        ThreadQueue { open, outbox, pushed: Vec::new(), in_flight: 0, depth: depth as usize }
    }

    fn job(&self, op: BlockOp) -> PoolJob {
        PoolJob { open: Arc::clone(&self.open), outbox: Arc::clone(&self.outbox), op }
    }
}

impl DeviceQueue for ThreadQueue {
    fn push(&mut self, op: BlockOp) -> Result<(), BlockOp> {
        if self.in_flight == self.depth {
            return Err(op);
        }
        self.in_flight += 1;
        self.pushed.push(op);
        Ok(())
    }

    fn kick(&mut self) {
        for op in std::mem::take(&mut self.pushed) {
            if let Some(job) = self.open.pool.give(self.job(op)) {
                // There is no thread for it, and none can be started.
                job.perform();
            }
        }
    }

    fn reap(&mut self, done: &mut Vec<BlockCompletion>) {
        self.in_flight -= self.outbox.take(done);
    }

    fn wait(&mut self, timeout: Option<Duration>) {
        // For a single operation another thread would only cost two switches.
        if self.in_flight == 1
            && timeout.is_none()
            && let Some(op) = self.pushed.pop()
        {
            return self.job(op).perform();
        }
        self.kick();
        self.outbox.wait(timeout);
    }

    fn waker(&self) -> QueueWaker {
        let outbox = Arc::clone(&self.outbox);
        QueueWaker::new(move || outbox.wake())
    }

    fn completion_fd(&self) -> Option<BorrowedFd<'_>> {
        self.outbox.completion_fd()
    }

    fn in_flight(&self) -> usize {
        self.in_flight
    }

    fn depth(&self) -> usize {
        self.depth
    }
}

impl Drop for ThreadQueue {
    /// Waits for the queue's operations, as [`DeviceQueue`] promises.
    fn drop(&mut self) {
        let mut done = Vec::new();
        while self.in_flight > 0 {
            self.wait(None);
            self.reap(&mut done);
        }
    }
}

impl FileDeviceState {
    /// Performs an operation. Sleeps until it is complete.
    pub(super) fn perform(&self, kind: &mut BlockOpKind) -> Result<()> {
        kind.check(&self.facts)?;
        self.refuse(kind)?;
        let bounced = self.bounce(kind)?;
        let bytes = |blocks: u64| blocks * u64::from(self.facts.block_size);
        let syncs_after = self.syncs_after(kind);
        match kind {
            BlockOpKind::Read { block, memory } => match bounced {
                Some(mut frames) => {
                    let len = memory.bytes();
                    self.read(bytes(*block), &mut [IoSliceMut::new(&mut frames[..len])])?;
                    bounce::copy_out(&frames, memory)
                }
                None => self.read(bytes(*block), &mut vectors_mut(memory)?),
            },
            BlockOpKind::Write { block, memory, fua } => {
                let flags = match *fua && self.facts.fua {
                    true => ReadWriteFlags::DSYNC,
                    false => ReadWriteFlags::empty(),
                };
                match bounced {
                    Some(frames) => {
                        let data = &frames[..memory.bytes()];
                        self.write(bytes(*block), &mut [IoSlice::new(data)], flags)?;
                    }
                    None => {
                        let pieces = memory.pieces().iter();
                        let mut data: Vec<_> =
                            pieces.map(|piece| IoSlice::new(piece.bytes())).collect();
                        self.write(bytes(*block), &mut data, flags)?;
                    }
                }
                if syncs_after { self.sync() } else { Ok(()) }
            }
            BlockOpKind::Flush => self.sync(),
            BlockOpKind::Discard { block, blocks } => {
                self.fallocate(FallocateFlags::PUNCH_HOLE, bytes(*block), bytes(*blocks))
            }
            BlockOpKind::Zero { block, blocks } => {
                let (start, len) = (bytes(*block), bytes(*blocks));
                match self.fallocate(FallocateFlags::ZERO_RANGE, start, len) {
                    // The file system below can zero by freeing only.
                    Err(Errno::OPNOTSUPP) if self.locked.is_regular() => {
                        self.fallocate(FallocateFlags::PUNCH_HOLE, start, len)
                    }
                    result => result,
                }
            }
        }
    }

    fn read(&self, offset: u64, mut into: &mut [IoSliceMut<'_>]) -> Result<()> {
        let (mut offset, none) = (offset, ReadWriteFlags::empty());
        while !into.is_empty() {
            match retry_interrupted(|| rustix::io::preadv2(&self.locked.fd, into, offset, none))? {
                // The device ended early.
                0 => return Err(Errno::IO),
                moved => {
                    offset += moved as u64;
                    IoSliceMut::advance_slices(&mut into, moved);
                }
            }
        }
        Ok(())
    }

    fn write(
        &self,
        offset: u64,
        mut data: &mut [IoSlice<'_>],
        flags: ReadWriteFlags,
    ) -> Result<()> {
        let mut offset = offset;
        while !data.is_empty() {
            match retry_interrupted(|| rustix::io::pwritev2(&self.locked.fd, data, offset, flags))?
            {
                0 => return Err(Errno::IO),
                moved => {
                    offset += moved as u64;
                    IoSlice::advance_slices(&mut data, moved);
                }
            }
        }
        Ok(())
    }

    fn sync(&self) -> Result<()> {
        #[cfg(test)]
        super::queue::count_sync();
        retry_interrupted(|| rustix::fs::fdatasync(&self.locked.fd))
    }

    fn fallocate(&self, mode: FallocateFlags, offset: u64, len: u64) -> Result<()> {
        let mode = mode | FallocateFlags::KEEP_SIZE;
        retry_interrupted(|| rustix::fs::fallocate(&self.locked.fd, mode, offset, len))
    }
}

fn vectors_mut(memory: &mut MemorySegments) -> Result<Vec<IoSliceMut<'_>>> {
    let pieces = memory.pieces_mut().iter_mut();
    pieces.map(|piece| piece.bytes_mut().map(IoSliceMut::new).ok_or(Errno::INVAL)).collect()
}

/// Repeats a call that was interrupted by a signal (`EINTR`), or that fails because the file does
/// not block (`EAGAIN`).
fn retry_interrupted<T>(mut call: impl FnMut() -> Result<T>) -> Result<T> {
    loop {
        match call() {
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => std::thread::yield_now(),
            result => return result,
        }
    }
}
