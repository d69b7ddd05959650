//! Frames that stand in for memory that direct I/O cannot use.

use super::state::FileDeviceState;
use crate::memory::OperationMemory;
use crate::{BlockOpKind, Errno, FRAME, FrameRun, MemoryRegion, MemorySegments, Result};

impl FileDeviceState {
    /// Frames for an operation whose memory direct I/O cannot use, with the data of a write.
    /// `ENOMEM` if there are none.
    pub(super) fn bounce(&self, kind: &BlockOpKind) -> Result<Option<FrameRun>> {
        let (BlockOpKind::Read { memory, .. } | BlockOpKind::Write { memory, .. }) = kind else {
            return Ok(None);
        };
        let usable = |piece: &OperationMemory| {
            (piece.start() as usize).is_multiple_of(self.alignment)
                && piece.len().is_multiple_of(self.alignment)
        };
        if !self.locked.direct || memory.pieces().iter().all(usable) {
            return Ok(None);
        }
        let frames = memory.bytes().div_ceil(FRAME) as u32;
        // A region takes runs from blocks whose size is a power of two.
        let region = MemoryRegion::new(frames.next_power_of_two())?;
        let mut bounce = region.take(frames).ok_or(Errno::NOMEM)?;
        if let BlockOpKind::Write { .. } = kind {
            let mut at = 0;
            for piece in memory.pieces() {
                bounce[at..][..piece.len()].copy_from_slice(piece.bytes());
                at += piece.len();
            }
        }
        Ok(Some(bounce))
    }
}

/// Copies the data of a read into the memory of the operation.
pub(super) fn copy_out(bounce: &FrameRun, memory: &mut MemorySegments) -> Result<()> {
    let mut at = 0;
    for piece in memory.pieces_mut() {
        let out = piece.bytes_mut().ok_or(Errno::INVAL)?;
        out.copy_from_slice(&bounce[at..][..out.len()]);
        at += out.len();
    }
    Ok(())
}
