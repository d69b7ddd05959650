//! Memory whose pages are aligned, so that direct I/O can use it.

use std::sync::{Mutex, PoisonError};

/// The alignment that direct I/O needs on every device with blocks of up to 4 KiB.
const ALIGN: usize = 4096;

/// Buffers of at least so many bytes are reused: new ones have to be zeroed.
const AGAIN_MIN: usize = 128 * 1024;
/// The maximum number of buffers that wait for reuse.
const SPARES: usize = 8;

/// Buffers that are free for reuse.
static SPARE: Mutex<Vec<AlignedBuf>> = Mutex::new(Vec::new());

/// A buffer in which the byte at `lead` is aligned to a page: a message header goes before it and
/// data from there on, and the whole message is contiguous.
pub(crate) struct AlignedBuf {
    memory: Vec<u8>,
    start: usize,
    lead: usize,
}

impl AlignedBuf {
    /// `lead` bytes (at most a page) and then `len` aligned bytes, all zero. Pages are touched only
    /// when used.
    pub(crate) fn new(lead: usize, len: usize) -> Self {
        assert!(lead <= ALIGN, "a header is larger than a page");
        let memory = vec![0; lead + len + 2 * ALIGN];
        let aligned = memory.as_ptr().align_offset(ALIGN);
        // The first aligned byte that has room for the lead before it.
        let data = if aligned >= lead { aligned } else { aligned + ALIGN };
        let buf = AlignedBuf { memory, start: data - lead, lead };
        debug_assert_eq!(buf.data_ptr() % ALIGN, 0);
        buf
    }

    /// Like [`new`](AlignedBuf::new), with any content: perhaps a reused buffer.
    pub(crate) fn new_dirty(lead: usize, len: usize) -> Self {
        let fits = |spare: &AlignedBuf| spare.lead == lead && spare.room() >= len;
        if len >= AGAIN_MIN {
            let mut spares = SPARE.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some(at) = spares.iter().rposition(fits) {
                return spares.swap_remove(at);
            }
        }
        AlignedBuf::new(lead, len)
    }

    /// Leaves the memory for reuse, unless it is small or enough is kept. This buffer is empty
    /// afterwards.
    pub(crate) fn recycle(&mut self) {
        let used = std::mem::replace(self, AlignedBuf::new_unaligned(0, 0));
        if used.room() >= AGAIN_MIN {
            let mut spares = SPARE.lock().unwrap_or_else(PoisonError::into_inner);
            if spares.len() < SPARES {
                spares.push(used);
            }
        }
    }

    /// Bytes of data at most.
    fn room(&self) -> usize {
        self.memory.len() - self.start - self.lead
    }

    /// Like [`new`](AlignedBuf::new), but no bytes are aligned, so that no memory is lost to
    /// alignment.
    pub(crate) fn new_unaligned(lead: usize, len: usize) -> Self {
        AlignedBuf { memory: vec![0; lead + len], start: 0, lead }
    }

    /// Returns lead and data together, `len` bytes from the start.
    pub(crate) fn message(&self, len: usize) -> &[u8] {
        &self.memory[self.start..self.start + len]
    }

    /// Returns lead and data together, `len` bytes from the start.
    pub(crate) fn message_mut(&mut self, len: usize) -> &mut [u8] {
        &mut self.memory[self.start..self.start + len]
    }

    /// The data after the lead, `len` bytes.
    pub(crate) fn data_mut(&mut self, len: usize) -> &mut [u8] {
        let from = self.start + self.lead;
        &mut self.memory[from..from + len]
    }

    /// Returns the lead and the first `len` bytes of the data separately.
    pub(crate) fn split_mut(&mut self, len: usize) -> (&mut [u8], &mut [u8]) {
        let from = self.start;
        self.memory[from..from + self.lead + len].split_at_mut(self.lead)
    }

    /// Returns the lead and the first `len` bytes of the data separately.
    pub(crate) fn split(&self, len: usize) -> (&[u8], &[u8]) {
        let from = self.start;
        self.memory[from..from + self.lead + len].split_at(self.lead)
    }

    fn data_ptr(&self) -> usize {
        self.memory[self.start + self.lead..].as_ptr() as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn large_buffers_are_used_again_and_few_are_kept() {
        let mut first = AlignedBuf::new_dirty(16, 1 << 20);
        let at = first.data_ptr();
        first.recycle();
        assert_eq!(AlignedBuf::new_dirty(16, 1 << 19).data_ptr(), at);
        AlignedBuf::new(16, 4096).recycle();
        (0..2 * SPARES).for_each(|_| AlignedBuf::new(16, 1 << 20).recycle());
        assert_eq!(SPARE.lock().unwrap().len(), SPARES);
    }

    #[test]
    fn data_is_aligned_whatever_comes_before_it() {
        for lead in [0, 16, 80, 4095, 4096] {
            let mut buf = AlignedBuf::new(lead, 8192);
            assert_eq!(buf.data_mut(1).as_ptr() as usize % ALIGN, 0);
            buf.message_mut(lead + 8192).fill(7);
            assert!(buf.message(lead + 8192).iter().all(|&byte| byte == 7));
        }
    }
}
