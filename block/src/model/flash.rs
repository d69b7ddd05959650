//! Dies, channels and the write buffer.

use std::collections::{BTreeSet, VecDeque};
use std::ops::Range;
use std::time::Duration;

use super::SsdParameters;

/// Work of a die: one page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum DieWork {
    /// A read of so many blocks for a command.
    Read { command: usize, blocks: u32 },
    /// A page of the buffer.
    Program(BufferedPage),
}

/// A page of the buffer: its number, and its blocks, fewer than fit where it was padded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct BufferedPage {
    number: u64,
    blocks: u64,
}

/// The completed work of a die.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum DieCompletion {
    /// A page of a command is read, and has left its channel at this moment.
    Read { command: usize, at: Duration },
    /// A page has left the buffer.
    Program,
}

#[derive(Clone, Debug, Default)]
struct FlashDie {
    reads: VecDeque<DieWork>,
    /// Pages of the buffer that this die is to program.
    programs: VecDeque<BufferedPage>,
    now: Option<DieWork>,
    /// The last work was a program.
    programmed: bool,
}

/// The flash. A die reads before it programs: only the page that it programs already delays a read.
#[derive(Debug)]
pub(super) struct FlashModel {
    parts: SsdParameters,
    dies: Vec<FlashDie>,
    /// The time at which each channel is free.
    channels: Vec<Duration>,
    /// The die that programs the next page.
    next_die: usize,
    /// Blocks in the buffer that do not fill a page yet.
    partial: u64,
    /// The number of the page that is being filled, which is the number of pages that dies have
    /// received before.
    pages: u64,
    /// Pages that dies have received and not programmed yet.
    unprogrammed: BTreeSet<u64>,
    /// Free blocks of the buffer.
    room: u64,
    /// Dies that have begun work, with its end. The caller takes them.
    begun: Vec<(Duration, usize)>,
}

impl FlashModel {
    pub(super) fn new(parts: &SsdParameters) -> Self {
        let counts = [parts.dies, parts.channels, parts.commands, parts.queue_commands];
        assert!(counts.iter().all(|count| *count > 0), "an SSD has dies, channels and commands");
        assert!(parts.page_blocks > 0 && parts.buffer_blocks >= parts.page_blocks);
        FlashModel {
            dies: vec![FlashDie::default(); parts.dies],
            channels: vec![Duration::ZERO; parts.channels],
            next_die: 0,
            partial: 0,
            pages: 0,
            unprogrammed: BTreeSet::new(),
            room: parts.buffer_blocks,
            begun: Vec::new(),
            parts: parts.clone(),
        }
    }

    /// Begins to read blocks for a command. Returns the number of pages.
    pub(super) fn read(
        &mut self,
        command: usize,
        (block, blocks): (u64, u64),
        now: Duration,
    ) -> u32 {
        let page_blocks = self.parts.page_blocks;
        let pages = block / page_blocks..(block + blocks).div_ceil(page_blocks);
        let count = (pages.end - pages.start) as u32;
        for page in pages {
            let first = (page * page_blocks).max(block);
            let blocks = ((page + 1) * page_blocks).min(block + blocks) - first;
            // Neighbouring pages lie on neighbouring dies, as they were written.
            let die = (page % self.dies.len() as u64) as usize;
            let work = DieWork::Read { command, blocks: blocks as u32 };
            self.dies[die].reads.push_back(work);
            self.begin(die, now);
        }
        count
    }

    /// Takes as many of `blocks` blocks into the buffer as there is room for. Returns their number.
    pub(super) fn write(&mut self, blocks: u64, now: Duration) -> u64 {
        let taken = blocks.min(self.room);
        self.room -= taken;
        self.partial += taken;
        while self.partial >= self.parts.page_blocks {
            self.program(self.parts.page_blocks, now);
        }
        taken
    }

    /// Programs the blocks that do not fill a page.
    pub(super) fn pad(&mut self, now: Duration) {
        if self.partial > 0 {
            self.program(self.partial, now);
        }
    }

    /// Gives the next die a page of so many blocks of the buffer.
    fn program(&mut self, blocks: u64, now: Duration) {
        self.partial -= blocks;
        let page = BufferedPage { number: self.pages, blocks };
        self.pages += 1;
        self.unprogrammed.insert(page.number);
        let die = self.next_die;
        self.next_die = (die + 1) % self.dies.len();
        self.dies[die].programs.push_back(page);
        self.begin(die, now);
    }

    /// The number of the page that the next block of a write belongs to.
    pub(super) fn pages(&self) -> u64 {
        self.pages
    }

    /// True if all of these pages are programmed.
    pub(super) fn is_programmed(&self, pages: &Range<u64>) -> bool {
        self.unprogrammed.range(pages.clone()).next().is_none()
    }

    /// Lets an idle die begin its next work.
    fn begin(&mut self, number: usize, now: Duration) {
        let die = &mut self.dies[number];
        if die.now.is_some() {
            return;
        }
        let work = die.reads.pop_front();
        let work = work.or_else(|| die.programs.pop_front().map(DieWork::Program));
        let Some(work) = work else { return };
        die.now = Some(work);
        let programs = matches!(work, DieWork::Program(_));
        let turns = die.programmed != programs;
        die.programmed = programs;
        let turn = if turns { self.parts.turn } else { Duration::ZERO };
        let mut start = now;
        let time = match work {
            DieWork::Read { .. } => self.parts.read,
            DieWork::Program(page) => {
                start = self.transfer(number, page.blocks as u32, now);
                self.parts.program
            }
        };
        self.begun.push((start + turn + time, number));
    }

    /// Moves blocks over the channel of a die. Returns the end.
    fn transfer(&mut self, die: usize, blocks: u32, now: Duration) -> Duration {
        let count = self.channels.len();
        let channel = &mut self.channels[die % count];
        *channel = now.max(*channel) + self.parts.transfer * blocks;
        *channel
    }

    /// The dies that have begun work since the last call, with the time at which each ends it.
    pub(super) fn take_begun(&mut self) -> Vec<(Duration, usize)> {
        std::mem::take(&mut self.begun)
    }

    /// Ends the work of a die, which continues with its next work.
    pub(super) fn end(&mut self, die: usize, now: Duration) -> DieCompletion {
        let work = self.dies[die].now.take().expect("a die ends what it began");
        let ended = match work {
            DieWork::Read { command, blocks } => {
                DieCompletion::Read { command, at: self.transfer(die, blocks, now) }
            }
            DieWork::Program(page) => {
                self.room += page.blocks;
                self.unprogrammed.remove(&page.number);
                DieCompletion::Program
            }
        };
        self.begin(die, now);
        ended
    }
}
