//! One operation at a time, for whoever has nothing else to do: making, checking and dumping images.

use crate::{
    BlockCompletion, BlockDevice, BlockOp, BlockOpKind, DeviceProperties, DeviceQueue, Errno,
    MemorySegments, RawBuf, Result,
};

/// A queue whose operations are waited for.
pub struct BlockingQueue {
    queue: Box<dyn DeviceQueue>,
    block_size: usize,
    largest: usize,
}

impl BlockingQueue {
    /// A line to `device`.
    ///
    /// # Errors
    ///
    /// Those of [`BlockDevice::queue`].
    pub fn new(device: &dyn BlockDevice) -> Result<Self> {
        Ok(BlockingQueue::of(device.queue(1)?, device.facts()))
    }

    /// A line by way of `queue`, which belongs to a device of these facts.
    pub fn of(queue: Box<dyn DeviceQueue>, facts: &DeviceProperties) -> Self {
        let block_size = facts.block_size as usize;
        let largest = (facts.max_transfer as usize / block_size).max(1) * block_size;
        BlockingQueue { queue, block_size, largest }
    }

    /// Reads whole blocks from `block` on.
    ///
    /// # Errors
    ///
    /// `EINVAL` where `out` is not whole blocks or outside of the device; those of the device (`EIO`).
    pub fn read(&mut self, block: u64, out: &mut [u8]) -> Result<()> {
        let mut at = block;
        for part in out.chunks_mut(self.largest) {
            // SAFETY: `run` returns when the operation is reaped, and until then `part` is borrowed here.
            let memory = unsafe { RawBuf::new(part.as_mut_ptr(), part.len()) }.into();
            self.run(BlockOpKind::Read { block: at, memory })?;
            at += (part.len() / self.block_size) as u64;
        }
        Ok(())
    }

    /// Writes whole blocks from `block` on.
    ///
    /// # Errors
    ///
    /// As for [`read`](BlockingQueue::read). An error leaves any part written.
    pub fn write(&mut self, block: u64, data: &[u8]) -> Result<()> {
        let mut at = block;
        for part in data.chunks(self.largest) {
            // SAFETY: as in `read`; a write only reads the memory.
            let memory = unsafe { RawBuf::new(part.as_ptr().cast_mut(), part.len()) }.into();
            self.run(BlockOpKind::Write { block: at, memory, fua: false })?;
            at += (part.len() / self.block_size) as u64;
        }
        Ok(())
    }

    /// Makes durable what was written.
    ///
    /// # Errors
    ///
    /// Those of the device. Nothing is known then about any write since the flush before.
    pub fn flush(&mut self) -> Result<()> {
        self.run(BlockOpKind::Flush)
    }

    /// Carries out an operation.
    ///
    /// # Errors
    ///
    /// Those of the operation.
    pub fn run(&mut self, kind: BlockOpKind) -> Result<()> {
        self.transfer(kind).map(drop)
    }

    /// Carries out `kind` and returns its memory.
    ///
    /// # Errors
    ///
    /// Those of the operation.
    pub fn transfer(&mut self, kind: BlockOpKind) -> Result<MemorySegments> {
        self.queue.push(BlockOp { tag: 0, kind }).map_err(|_| Errno::BUSY)?;
        let mut done: Vec<BlockCompletion> = Vec::new();
        while done.is_empty() {
            self.queue.wait(None);
            self.queue.reap(&mut done);
        }
        let BlockCompletion { result, memory, .. } = done.remove(0);
        result.map(|()| memory)
    }
}
