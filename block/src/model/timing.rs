//! The times of commands on an SSD, independently of queues.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::ops::Range;
use std::time::Duration;

use super::SsdParameters;
use super::flash::{DieCompletion, FlashModel};

/// The work of a command for the SSD. Blocks have 4 KiB.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SsdWork {
    /// Reads blocks from their dies.
    Read {
        /// The first block.
        block: u64,
        /// The number of blocks.
        blocks: u64,
    },
    /// Moves blocks into the write buffer.
    Write {
        /// The number of blocks.
        blocks: u64,
        /// The write is complete when its pages are programmed.
        fua: bool,
    },
    /// Waits until all pages that are in the write buffer at its beginning are programmed.
    Flush,
    /// Takes the time of the controller alone, as a change of its tables.
    Table,
}

/// An event of the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum TimingEvent {
    /// A die ends its work.
    Die(usize),
    /// A page of a command, or the command itself, has arrived.
    Part(usize),
}

/// A command that is being worked on.
#[derive(Debug)]
struct ActiveCommand {
    /// `None` where it was forgotten.
    queue: Option<usize>,
    /// Pages that are to arrive.
    parts: u32,
}

/// A write that is not in the buffer as a whole.
#[derive(Debug)]
struct UnbufferedWrite {
    command: usize,
    /// Blocks that are still to come.
    left: u64,
    fua: bool,
    /// The page of its first block, once that is in the buffer.
    first: Option<u64>,
}

/// The commands at work on an SSD, and the times at which they end. It has no data and no queues of
/// commands: its user takes commands from queues in an order of its own, and calls
/// [`takes`](CommandTiming::takes) before.
///
/// All times count from the same beginning. [`advance`](CommandTiming::advance) goes from one event
/// to the next, and each `now` must lie between the last event and the
/// [`next`](CommandTiming::next).
#[derive(Debug)]
pub struct CommandTiming {
    parts: SsdParameters,
    flash: FlashModel,
    /// The time at which the controller took the last command.
    taken_at: Duration,
    commands: Vec<Option<ActiveCommand>>,
    /// Commands of each queue at work.
    working: Vec<usize>,
    /// Writes that wait for room in the buffer.
    writes: VecDeque<UnbufferedWrite>,
    /// Commands that wait until these pages are programmed.
    flushes: Vec<(usize, Range<u64>)>,
    events: BinaryHeap<Reverse<(Duration, TimingEvent)>>,
}

impl CommandTiming {
    /// An SSD of these parts, without work.
    ///
    /// # Panics
    ///
    /// Without dies, channels, pages, commands or a buffer.
    pub fn new(parts: &SsdParameters) -> Self {
        CommandTiming {
            parts: parts.clone(),
            flash: FlashModel::new(parts),
            taken_at: Duration::ZERO,
            commands: Vec::new(),
            working: Vec::new(),
            writes: VecDeque::new(),
            flushes: Vec::new(),
            events: BinaryHeap::new(),
        }
    }

    /// True if one more command, of this queue, can begin. Queues have numbers from 0 on.
    pub fn takes(&self, queue: usize) -> bool {
        let of_queue = self.working.get(queue).copied().unwrap_or(0);
        of_queue < self.parts.queue_commands
            && self.working.iter().sum::<usize>() < self.parts.commands
    }

    /// Begins a command. Returns its number, which is unique until the command is complete.
    pub fn begin(&mut self, queue: usize, load: SsdWork, now: Duration) -> usize {
        let at = now.max(self.taken_at) + self.parts.command;
        self.taken_at = at;
        let command = self.add(queue);
        match load {
            SsdWork::Table | SsdWork::Read { blocks: 0, .. } | SsdWork::Write { blocks: 0, .. } => {
                self.schedule(at, TimingEvent::Part(command));
            }
            SsdWork::Read { block, blocks } => {
                let parts = self.flash.read(command, (block, blocks), at);
                self.commands[command].as_mut().expect("it was added").parts = parts;
            }
            SsdWork::Write { blocks, fua } => {
                self.writes.push_back(UnbufferedWrite { command, left: blocks, fua, first: None });
                self.fill_buffer(at);
            }
            SsdWork::Flush => {
                self.flash.pad(at);
                self.flushes.push((command, 0..self.flash.pages()));
                self.end_flushes(at);
            }
        }
        self.note_dies();
        command
    }

    /// The time of the next event. `None` if nothing happens until a command begins.
    pub fn next(&self) -> Option<Duration> {
        self.events.peek().map(|Reverse((at, _))| *at)
    }

    /// Advances to the next event. Returns the command that completes then, if there is one.
    pub fn advance(&mut self) -> Option<usize> {
        let Reverse((now, event)) = self.events.pop()?;
        let done = match event {
            TimingEvent::Die(die) => {
                match self.flash.end(die, now) {
                    DieCompletion::Read { command, at } => {
                        self.schedule(at, TimingEvent::Part(command))
                    }
                    DieCompletion::Program => {
                        self.fill_buffer(now);
                        self.end_flushes(now);
                    }
                }
                None
            }
            TimingEvent::Part(command) => self.record_arrival(command),
        };
        self.note_dies();
        done
    }

    /// Forgets all commands, as a reset of the controller does: none of them completes any more.
    /// Dies continue with pages that they read for them, and program the pages in the buffer.
    pub fn forget(&mut self) {
        let writes = self.writes.drain(..).map(|write| write.command);
        for command in writes.chain(self.flushes.drain(..).map(|(command, _)| command)) {
            self.commands[command] = None;
        }
        // Parts of the other commands are still to arrive, so that their numbers stay in use.
        self.commands.iter_mut().flatten().for_each(|command| command.queue = None);
        self.working.clear();
    }

    fn add(&mut self, queue: usize) -> usize {
        if self.working.len() <= queue {
            self.working.resize(queue + 1, 0);
        }
        self.working[queue] += 1;
        let free = self.commands.iter().position(Option::is_none);
        let command = free.unwrap_or_else(|| {
            self.commands.push(None);
            self.commands.len() - 1
        });
        self.commands[command] = Some(ActiveCommand { queue: Some(queue), parts: 1 });
        command
    }

    fn schedule(&mut self, moment: Duration, event: TimingEvent) {
        self.events.push(Reverse((moment, event)));
    }

    /// Adds events for the ends of work that dies have begun.
    fn note_dies(&mut self) {
        for (end, die) in self.flash.take_begun() {
            self.schedule(end, TimingEvent::Die(die));
        }
    }

    /// Moves blocks of writes into the buffer, in order.
    fn fill_buffer(&mut self, now: Duration) {
        while let Some(mut write) = self.writes.pop_front() {
            let page = self.flash.pages();
            let taken = self.flash.write(write.left, now);
            write.left -= taken;
            if taken > 0 {
                write.first = write.first.or(Some(page));
            }
            if write.left > 0 {
                self.writes.push_front(write);
                break;
            }
            match write.first {
                Some(first) if write.fua => {
                    self.flash.pad(now);
                    self.flushes.push((write.command, first..self.flash.pages()));
                }
                _ => self.schedule(now, TimingEvent::Part(write.command)),
            }
        }
    }

    /// Ends the commands whose pages are all programmed now.
    fn end_flushes(&mut self, now: Duration) {
        let flash = &self.flash;
        let ended = self.flushes.extract_if(.., |(_, pages)| flash.is_programmed(pages));
        let ended = ended.map(|(command, _)| Reverse((now, TimingEvent::Part(command))));
        self.events.extend(ended);
    }

    /// A part of a command is there; after the last one the command is complete.
    fn record_arrival(&mut self, at: usize) -> Option<usize> {
        let command = self.commands[at].as_mut().expect("a command ends once");
        command.parts -= 1;
        if command.parts > 0 {
            return None;
        }
        let queue = self.commands[at].take()?.queue?;
        self.working[queue] -= 1;
        Some(at)
    }
}
