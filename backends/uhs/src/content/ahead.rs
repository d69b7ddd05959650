//! Pages that a sequential reader is going to read.

use super::Content;
use crate::format::BLOCK;

/// Bytes that are read ahead at first, and at most.
const FIRST: u64 = 32 << 10;
const MOST: u64 = 2 << 20;

/// The last read of a file.
#[derive(Default)]
pub(super) struct Ahead {
    /// The end of it.
    end: u64,
    /// Bytes that were read ahead with the last one that needed the device.
    window: u64,
}

impl Content {
    /// Takes in a read of pages that are in memory.
    pub(crate) fn has_read(&mut self, offset: u64, len: u64) {
        self.ahead.end = offset.saturating_add(len).min(self.size);
    }

    /// Bytes to read after a range of which pages are missing: none, unless the range follows that of the read
    /// before. Each time they double. The cache has `cache` pages.
    pub(crate) fn ahead(&mut self, offset: u64, len: u64, cache: usize) -> u64 {
        // One page that was read in two parts counts as well.
        let follows = offset > 0 && offset == self.ahead.end;
        self.ahead.window = match follows {
            true => (2 * self.ahead.window).max(2 * len).clamp(FIRST, MOST),
            false => 0,
        };
        // What is read must not drop what was read before.
        self.ahead.window = self.ahead.window.min((cache / 8 * BLOCK) as u64);
        self.ahead.window
    }
}
