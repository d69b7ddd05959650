//! Frames that are registered with a ring: the kernel need not look up and pin their pages for each
//! operation.
//!
//! Frames are registered when an operation uses them, in pieces of 2 MiB, which is the longest run.
//! Registration pins pages, and so takes their memory: each of many rings would do that for all
//! frames, and most rings use few.

use std::collections::HashMap;
use std::sync::Arc;

use io_uring::IoUring;

use crate::MemoryRegion;

/// Bytes of one registered buffer.
const PIECE: usize = 2 << 20;

/// Registered buffers of a ring at most (`IORING_MAX_REG_BUFFERS` of the kernel): 32 GiB.
const MOST: usize = 1 << 14;

/// The pieces of all regions.
pub(super) struct RegisteredBuffers {
    /// The first piece of each region, by its number.
    first: HashMap<u64, usize>,
    pieces: Vec<BufferPiece>,
    /// The kernel has refused a registration, so that no further one is tried.
    refused: bool,
    /// The regions, kept for as long as the ring has their addresses.
    regions: Vec<Arc<MemoryRegion>>,
}

struct BufferPiece {
    start: usize,
    len: usize,
    registered: bool,
}

impl RegisteredBuffers {
    /// Room for the frames of `regions` in the table of a ring.
    pub(super) fn new(ring: &IoUring, regions: Vec<Arc<MemoryRegion>>) -> Self {
        let (mut first, mut pieces) = (HashMap::new(), Vec::new());
        for region in &regions {
            first.insert(region.id(), pieces.len());
            for at in (0..region.bytes()).step_by(PIECE).take(MOST - pieces.len()) {
                let len = PIECE.min(region.bytes() - at);
                let start = region.start() as usize + at;
                pieces.push(BufferPiece { start, len, registered: false });
            }
        }
        let mut buffers = RegisteredBuffers { first, pieces, refused: false, regions };
        if !buffers.pieces.is_empty() {
            let made = ring.submitter().register_buffers_sparse(buffers.pieces.len() as u32);
            buffers.note(made.err());
        }
        buffers
    }

    /// The registered buffer with the whole of these bytes of a region. `None` if there is none:
    /// the bytes lie in two pieces, or the kernel refuses (RLIMIT_MEMLOCK, which rings and their
    /// buffers share). The operation then uses addresses instead, which costs a little more.
    pub(super) fn get(
        &mut self,
        ring: &IoUring,
        region: Option<u64>,
        start: *mut u8,
        len: u32,
    ) -> Option<u16> {
        let first = *self.first.get(&region?)?;
        let base = self.pieces.get(first)?.start;
        let offset = (start as usize).checked_sub(base)?;
        let (index, last) = (offset / PIECE, (offset + (len as usize).max(1) - 1) / PIECE);
        if index != last {
            return None;
        }
        let index = first + index;
        if !self.pieces.get(index)?.registered && !self.register(ring, index) {
            return None;
        }
        u16::try_from(index).ok()
    }

    fn register(&mut self, ring: &IoUring, index: usize) -> bool {
        if self.refused {
            return false;
        }
        let BufferPiece { start, len, .. } = self.pieces[index];
        let has = |region: &&Arc<MemoryRegion>| {
            let from = region.start() as usize;
            (from..from + region.bytes()).contains(&start)
        };
        let Some(region) = self.regions.iter().find(has) else { return false };
        region.give_memory_to(start - region.start() as usize, len);
        let vector = libc::iovec { iov_base: start as *mut _, iov_len: len };
        // SAFETY: the vector is a part of the mapping of a region, which lives as long as the ring.
        let known =
            unsafe { ring.submitter().register_buffers_update(index as u32, &[vector], None) };
        // If this was the last memory that the limit allows, a further ring could not be made: then
        // the buffer is not registered.
        let known = known.and_then(|()| IoUring::new(1).map(drop));
        if known.is_err() {
            let none = libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };
            // SAFETY: an empty vector takes the buffer out of the table.
            let _ =
                unsafe { ring.submitter().register_buffers_update(index as u32, &[none], None) };
        }
        self.pieces[index].registered = known.is_ok();
        self.note(known.err());
        self.pieces[index].registered
    }

    fn note(&mut self, error: Option<std::io::Error>) {
        if let Some(error) = error {
            log::info!("frames are not registered with the ring: {error}");
            self.refused = true;
        }
    }
}
