//! Pages that stand in for memory that the controller does not reach.

use defuse_block::{MemorySegments, Result};

use super::data::BusRange;
use crate::spec::PAGE;
use crate::{ControllerTransport, DmaMemory};

/// The pages of a queue.
pub(super) struct BounceBuffers {
    memory: DmaMemory,
    free: Vec<u32>,
}

impl BounceBuffers {
    pub(super) fn new(transport: &dyn ControllerTransport, pages: u32) -> Result<Self> {
        let memory = transport.allocate(pages as usize * PAGE)?;
        Ok(BounceBuffers { memory, free: (0..pages).rev().collect() })
    }

    /// Takes pages for `bytes` bytes; `None` while other operations have too many.
    pub(super) fn take(&mut self, bytes: usize) -> Option<Vec<u32>> {
        let pages = bytes.div_ceil(PAGE);
        let rest = self.free.len().checked_sub(pages)?;
        Some(self.free.split_off(rest))
    }

    pub(super) fn give(&mut self, pages: &mut Vec<u32>) {
        self.free.append(pages);
    }

    /// The ranges of the pages for the controller.
    pub(super) fn ranges(&self, pages: &[u32], bytes: usize, out: &mut Vec<BusRange>) {
        out.clear();
        let lens = (0..bytes).step_by(PAGE).map(|at| PAGE.min(bytes - at));
        let start = |page: &u32| self.memory.bus() + (*page as usize * PAGE) as u64;
        out.extend(pages.iter().map(start).zip(lens));
    }

    /// Copies the data of a write to the pages.
    pub(super) fn fill(&self, pages: &[u32], memory: &MemorySegments) {
        let mut at = 0;
        for piece in memory.pieces() {
            let mut rest = piece.bytes();
            while !rest.is_empty() {
                let (part, place) = self.part(pages, at, rest.len());
                let (now, later) = rest.split_at(part);
                self.memory.copy_in(place, now);
                (rest, at) = (later, at + part);
            }
        }
    }

    /// Copies the data of a read from the pages.
    pub(super) fn drain(&self, pages: &[u32], memory: &mut MemorySegments) {
        let mut at = 0;
        for piece in memory.pieces_mut() {
            let mut rest = piece.bytes_mut().unwrap_or_default();
            while !rest.is_empty() {
                let (part, place) = self.part(pages, at, rest.len());
                let (now, later) = rest.split_at_mut(part);
                self.memory.copy_out(place, now);
                (rest, at) = (later, at + part);
            }
        }
    }

    /// Bytes from the byte `at` of the data on that lie in one page, up to `len`, and their place.
    fn part(&self, pages: &[u32], at: usize, len: usize) -> (usize, usize) {
        let (page, offset) = (at / PAGE, at % PAGE);
        (len.min(PAGE - offset), pages[page] as usize * PAGE + offset)
    }
}
