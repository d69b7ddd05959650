//! Operations and their completions.

use crate::{DeviceProperties, Errno, MemorySegments, OperationMemory, Result};

/// An operation for a [`DeviceQueue`](crate::DeviceQueue).
#[derive(Debug)]
pub struct BlockOp {
    /// A number chosen by the caller, which is also in the completion.
    pub tag: u64,
    /// The operation itself.
    pub kind: BlockOpKind,
}

/// The kinds of operations. Blocks are counted in [`DeviceProperties::block_size`].
#[derive(Debug)]
pub enum BlockOpKind {
    /// Reads from `block` on into `memory`.
    Read {
        /// The first block.
        block: u64,
        /// Memory of whole blocks.
        memory: MemorySegments,
    },
    /// Writes `memory` from `block` on.
    Write {
        /// The first block.
        block: u64,
        /// Memory of whole blocks.
        memory: MemorySegments,
        /// The data is durable when the write completes ("force unit access").
        fua: bool,
    },
    /// Makes every write durable that was reaped before this was pushed, on any queue.
    Flush,
    /// Marks the blocks as unused. They hold anything from now on.
    Discard {
        /// The first block.
        block: u64,
        /// The number of blocks.
        blocks: u64,
    },
    /// Fills the blocks with zeros.
    Zero {
        /// The first block.
        block: u64,
        /// The number of blocks.
        blocks: u64,
    },
}

/// A completed operation.
#[derive(Debug)]
pub struct BlockCompletion {
    /// The tag of the operation.
    pub tag: u64,
    /// Whole success or an error. After a failed read the memory holds anything.
    pub result: Result<()>,
    /// The memory of a read or write; of others, nothing. A device that failed in the middle of an
    /// operation keeps the memory that it may still use: there is none with such an error.
    pub memory: MemorySegments,
}

impl BlockOpKind {
    /// First block and number of blocks; `None` for a flush.
    pub fn range(&self, block_size: u32) -> Option<(u64, u64)> {
        match self {
            BlockOpKind::Read { block, memory } | BlockOpKind::Write { block, memory, .. } => {
                Some((*block, memory.bytes() as u64 / u64::from(block_size)))
            }
            BlockOpKind::Discard { block, blocks } | BlockOpKind::Zero { block, blocks } => {
                Some((*block, *blocks))
            }
            BlockOpKind::Flush => None,
        }
    }

    /// Checks the operation against the facts of its device.
    ///
    /// # Errors
    ///
    /// `EINVAL` for an operation that is outside of the device, empty, too large, not of whole
    /// blocks, or a read into shared memory; `EOPNOTSUPP` for an operation that the device lacks.
    pub fn check(&self, facts: &DeviceProperties) -> Result<()> {
        let Some((block, blocks)) = self.range(facts.block_size) else { return Ok(()) };
        if blocks == 0 || !facts.holds(block, blocks) {
            return Err(Errno::INVAL);
        }
        match self {
            BlockOpKind::Read { memory, .. } | BlockOpKind::Write { memory, .. } => {
                let bytes = memory.bytes();
                let whole = bytes.is_multiple_of(facts.block_size as usize);
                let shared = |piece: &OperationMemory| {
                    matches!(piece, OperationMemory::Shared(..) | OperationMemory::Bytes(..))
                };
                if matches!(self, BlockOpKind::Read { .. }) && memory.pieces().iter().any(shared) {
                    return Err(Errno::INVAL);
                }
                let fits = bytes <= facts.max_transfer as usize;
                if whole && fits && memory.count() <= facts.max_segments {
                    Ok(())
                } else {
                    Err(Errno::INVAL)
                }
            }
            BlockOpKind::Discard { .. } if !facts.discard => Err(Errno::OPNOTSUPP),
            _ => Ok(()),
        }
    }

    /// The memory, for the completion.
    pub fn into_memory(self) -> MemorySegments {
        match self {
            BlockOpKind::Read { memory, .. } | BlockOpKind::Write { memory, .. } => memory,
            _ => MemorySegments::default(),
        }
    }
}
