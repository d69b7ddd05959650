//! Pages that a sequential reader is going to read.

use super::FileContent;
use crate::format::BLOCK;

/// Bytes that are read ahead at first, and at most.
const FIRST: u64 = 32 << 10;
const MOST: u64 = 2 << 20;

/// Readers of a file that are told apart.
const READERS: usize = 4;

/// The readers of a file, the latest first.
#[derive(Default)]
pub(super) struct ReadaheadState([SequentialReader; READERS]);

#[derive(Clone, Copy, Default)]
struct SequentialReader {
    /// The end of its last read.
    end: u64,
    /// Bytes that were read ahead with the last one that needed the device.
    window: u64,
}

impl ReadaheadState {
    /// The reader whose last read ended at one of the offsets, and false if it is a new one. Then the reader that has
    /// read nothing for longest is forgotten.
    fn reader(&mut self, ends: [u64; 2]) -> (&mut SequentialReader, bool) {
        let known = self.0.iter().position(|reader| ends.contains(&reader.end));
        self.0[..=known.unwrap_or(READERS - 1)].rotate_right(1);
        let latest = &mut self.0[0];
        if known.is_none() {
            *latest = SequentialReader { end: ends[0], window: 0 };
        }
        (latest, known.is_some())
    }
}

impl FileContent {
    /// Takes in a read of pages that are in memory.
    pub(crate) fn has_read(&mut self, offset: u64, len: u64) {
        let end = offset.saturating_add(len).min(self.size);
        // Those who read the same at the same time are as one.
        self.ahead.reader([offset, end]).0.end = end;
    }

    /// Bytes to read after a range of which pages are missing: none, unless the range follows that of a read
    /// before. Each time they double. The cache has `cache` pages.
    pub(crate) fn ahead(&mut self, offset: u64, len: u64, cache: usize) -> u64 {
        // One page that was read in two parts counts as well.
        let (reader, is_known) = self.ahead.reader([offset; 2]);
        let window = match is_known && offset > 0 {
            true => (2 * reader.window).max(2 * len).clamp(FIRST, MOST),
            false => 0,
        };
        // What is read must not drop what was read before.
        reader.window = window.min((cache / 8 * BLOCK) as u64);
        reader.window
    }
}
