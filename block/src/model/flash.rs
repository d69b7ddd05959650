//! Dies, channels and the write buffer.

use std::time::Duration;

use super::Parts;

/// The last work of a die.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Work {
    Read,
    Program,
}

#[derive(Clone, Debug)]
struct Die {
    /// The moment at which all work that it was given is done.
    free_at: Duration,
    last: Work,
}

/// Dies work in the order in which they get work.
#[derive(Debug)]
pub(super) struct Flash {
    parts: Parts,
    dies: Vec<Die>,
    /// For each channel the moment at which it is free.
    channels: Vec<Duration>,
    /// The die that programs the next page.
    next_die: usize,
    /// Blocks in the buffer that do not fill a page yet.
    partial: u64,
    /// Free blocks of the buffer.
    room: u64,
}

impl Flash {
    pub(super) fn new(parts: &Parts) -> Self {
        let counts = [parts.dies, parts.channels, parts.commands];
        assert!(counts.iter().all(|count| *count > 0), "an SSD has dies, channels and commands");
        assert!(parts.page_blocks > 0 && parts.buffer_blocks >= parts.page_blocks);
        Flash {
            dies: vec![Die { free_at: Duration::ZERO, last: Work::Read }; parts.dies],
            channels: vec![Duration::ZERO; parts.channels],
            next_die: 0,
            partial: 0,
            room: parts.buffer_blocks,
            parts: parts.clone(),
        }
    }

    fn work(&mut self, die: usize, work: Work, now: Duration) -> Duration {
        let Die { free_at, last } = &mut self.dies[die];
        let turn = if *last == work { Duration::ZERO } else { self.parts.turn };
        let time = match work {
            Work::Read => self.parts.read,
            Work::Program => self.parts.program,
        };
        *free_at = now.max(*free_at) + turn + time;
        *last = work;
        *free_at
    }

    /// Reads blocks. Returns the moment at which the last is there.
    pub(super) fn read(&mut self, block: u64, blocks: u64, now: Duration) -> Duration {
        let page_blocks = self.parts.page_blocks;
        let mut end = now;
        for page in block / page_blocks..(block + blocks).div_ceil(page_blocks) {
            let first = (page * page_blocks).max(block);
            let count = ((page + 1) * page_blocks).min(block + blocks) - first;
            // Neighbouring pages lie on neighbouring dies, as they were written.
            let die = (page % self.dies.len() as u64) as usize;
            let sensed = self.work(die, Work::Read, now);
            let channels = self.channels.len();
            let channel = &mut self.channels[die % channels];
            *channel = sensed.max(*channel) + self.parts.transfer * count as u32;
            end = end.max(*channel);
        }
        end
    }

    /// Takes as many of `blocks` blocks into the buffer as there is room for. Returns their number, and the
    /// moments at which pages have left the buffer.
    pub(super) fn write(&mut self, blocks: u64, now: Duration) -> (u64, Vec<Duration>) {
        let taken = blocks.min(self.room);
        self.room -= taken;
        self.partial += taken;
        let mut ends = Vec::new();
        while self.partial >= self.parts.page_blocks {
            self.partial -= self.parts.page_blocks;
            let die = self.next_die;
            self.next_die = (die + 1) % self.dies.len();
            let channels = self.channels.len();
            let channel = &mut self.channels[die % channels];
            *channel = now.max(*channel) + self.parts.transfer * self.parts.page_blocks as u32;
            let moved = *channel;
            ends.push(self.work(die, Work::Program, moved));
        }
        (taken, ends)
    }

    /// A page has left the buffer.
    pub(super) fn programmed(&mut self) {
        self.room += self.parts.page_blocks;
    }

    /// The moment at which all that is in full pages is programmed.
    pub(super) fn idle_at(&self) -> Duration {
        self.dies.iter().map(|die| die.free_at).max().unwrap_or_default()
    }
}
