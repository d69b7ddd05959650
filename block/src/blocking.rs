//! One operation at a time, for callers without other work: making, checking and dumping images.

use crate::{
    BlockCompletion, BlockDevice, BlockOp, BlockOpKind, DeviceProperties, DeviceQueue, Errno,
    MemorySegments, RawBuf, Result,
};

/// A queue that performs one operation at a time, and waits for it.
pub struct BlockingQueue {
    queue: Box<dyn DeviceQueue>,
    block_size: usize,
    largest: usize,
}

impl BlockingQueue {
    /// Opens a queue of `device`.
    ///
    /// # Errors
    ///
    /// Fails with the errors of [`BlockDevice::queue`].
    pub fn new(device: &dyn BlockDevice) -> Result<Self> {
        Ok(BlockingQueue::wrap(device.queue(1)?, device.properties()))
    }

    /// Wraps `queue`, which belongs to a device of these facts.
    pub fn wrap(queue: Box<dyn DeviceQueue>, facts: &DeviceProperties) -> Self {
        let block_size = facts.block_size as usize;
        let largest = (facts.max_transfer as usize / block_size).max(1) * block_size;
        BlockingQueue { queue, block_size, largest }
    }

    /// Reads whole blocks from `block` on.
    ///
    /// # Errors
    ///
    /// `EINVAL` if `out` is not whole blocks or outside of the device; otherwise the errors of the
    /// device (`EIO`).
    pub fn read(&mut self, block: u64, out: &mut [u8]) -> Result<()> {
        let mut at = block;
        for part in out.chunks_mut(self.largest) {
            // SAFETY: `run` returns when the operation is reaped, and until then `part` is borrowed
            // here.
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
    /// Fails with the errors of [`read`](BlockingQueue::read). An error leaves any part written.
    pub fn write(&mut self, block: u64, data: &[u8]) -> Result<()> {
        let mut at = block;
        for part in data.chunks(self.largest) {
            // SAFETY: `run` returns when the operation is reaped, and until then `part` is borrowed
            // here; a write only reads the memory.
            let memory = unsafe { RawBuf::new(part.as_ptr().cast_mut(), part.len()) }.into();
            self.run(BlockOpKind::Write { block: at, memory, fua: false })?;
            at += (part.len() / self.block_size) as u64;
        }
        Ok(())
    }

    /// Makes all earlier writes durable.
    ///
    /// # Errors
    ///
    /// Fails with the errors of the device. Then it is unknown which writes since the last flush
    /// are durable.
    pub fn flush(&mut self) -> Result<()> {
        self.run(BlockOpKind::Flush)
    }

    /// Performs an operation.
    ///
    /// # Errors
    ///
    /// Fails with the errors of the operation.
    pub fn run(&mut self, kind: BlockOpKind) -> Result<()> {
        self.transfer(kind).map(drop)
    }

    /// Performs `kind` and returns its memory.
    ///
    /// # Errors
    ///
    /// Fails with the errors of the operation.
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
