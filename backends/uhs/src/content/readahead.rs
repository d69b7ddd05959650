//! Pages that a sequential reader is going to read.

use super::FileContent;
use crate::format::BLOCK;

/// Bytes that are read ahead at first, and at most.
const FIRST: u64 = 32 << 10;
const MOST: u64 = 2 << 20;

/// The number of sequential readers of a file that are distinguished.
const READERS: usize = 4;

/// The readers of a file, the latest first.
#[derive(Default)]
pub(super) struct ReadaheadState([SequentialReader; READERS]);

#[derive(Clone, Copy, Default)]
struct SequentialReader {
    /// The end of its last read.
    end: u64,
    /// Bytes that were read ahead with the reader's last read that needed the device.
    window: u64,
}

impl ReadaheadState {
    /// The reader whose last read ended at one of the offsets, and true if it is known. A new
    /// reader replaces the reader that has been idle longest.
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
    /// Records a read of pages that are in memory.
    pub(crate) fn has_read(&mut self, offset: u64, len: u64) {
        let end = offset.saturating_add(len).min(self.size);
        // Readers of the same bytes at the same time count as one reader.
        self.ahead.reader([offset, end]).0.end = end;
    }

    /// The number of bytes to read ahead after a range with missing pages: 0 unless the range
    /// follows an earlier read. The number doubles each time. The cache has `cache` pages.
    pub(crate) fn bytes_to_read_ahead(&mut self, offset: u64, len: u64, cache: usize) -> u64 {
        // One page that was read in two parts counts as well.
        let (reader, is_known) = self.ahead.reader([offset; 2]);
        let window = match is_known && offset > 0 {
            true => (2 * reader.window).max(2 * len).clamp(FIRST, MOST),
            false => 0,
        };
        // Readahead must not drop the pages that were read before.
        reader.window = window.min((cache / 8 * BLOCK) as u64);
        reader.window
    }
}
