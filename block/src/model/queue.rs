//! The controller, which takes commands from the queues in turn, and the queues.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use super::flash::Ended;
use super::{Model, Parts, State};
use crate::waker::Parker;
use crate::{Done, Op, OpKind, Queue, Result, Waker};

/// A moment at which something happens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    /// A die ends its work.
    Die(usize),
    /// A page of a command, or the command itself, has arrived.
    Part(usize),
}

/// A command that is being worked on.
#[derive(Debug)]
struct Command {
    queue: usize,
    op: Op,
    /// Pages that are to arrive.
    parts: u32,
}

/// The commands of all queues.
#[derive(Debug)]
pub(super) struct Controller {
    parts: Parts,
    now: Duration,
    /// The moment at which it has taken the last command.
    taken_at: Duration,
    submitted: Vec<VecDeque<Op>>,
    completed: Vec<Vec<Done>>,
    /// Commands of each queue at work.
    working: Vec<usize>,
    /// The queue whose turn it is.
    turn: usize,
    /// Writes that wait for room in the buffer, with the number of blocks that are still to come.
    writes: VecDeque<(usize, u64)>,
    /// Flushes that wait for the buffer to be empty.
    flushes: Vec<usize>,
    commands: Vec<Option<Command>>,
    events: BinaryHeap<Reverse<(Duration, Event)>>,
}

impl Controller {
    pub(super) fn new(parts: &Parts) -> Self {
        Controller {
            parts: parts.clone(),
            now: Duration::ZERO,
            taken_at: Duration::ZERO,
            submitted: Vec::new(),
            completed: Vec::new(),
            working: Vec::new(),
            turn: 0,
            writes: VecDeque::new(),
            flushes: Vec::new(),
            commands: Vec::new(),
            events: BinaryHeap::new(),
        }
    }

    pub(super) fn now(&self) -> Duration {
        self.now
    }

    pub(super) fn add_queue(&mut self) -> usize {
        self.submitted.push(VecDeque::new());
        self.completed.push(Vec::new());
        self.working.push(0);
        self.submitted.len() - 1
    }

    /// The next queue, in turn, that has a command and may have one more at work.
    fn next_queue(&self) -> Option<usize> {
        if self.working.iter().sum::<usize>() == self.parts.commands {
            return None;
        }
        let queues = self.submitted.len();
        (self.turn..self.turn + queues).map(|at| at % queues).find(|queue| {
            !self.submitted[*queue].is_empty() && self.working[*queue] < self.parts.queue_commands
        })
    }

    fn add(&mut self, queue: usize, op: Op) -> usize {
        let free = self.commands.iter().position(Option::is_none);
        let command = free.unwrap_or_else(|| {
            self.commands.push(None);
            self.commands.len() - 1
        });
        self.commands[command] = Some(Command { queue, op, parts: 1 });
        command
    }

    fn at(&mut self, moment: Duration, event: Event) {
        self.events.push(Reverse((moment, event)));
    }
}

impl State {
    /// Takes commands while there is room, one from each queue in turn, as NVMe's round robin does.
    fn take_commands(&mut self) {
        while let Some(queue) = self.controller.next_queue() {
            let controller = &mut self.controller;
            let Some(op) = controller.submitted[queue].pop_front() else { return };
            controller.turn = queue + 1;
            controller.working[queue] += 1;
            let taken_at = controller.now.max(controller.taken_at) + controller.parts.command;
            controller.taken_at = taken_at;
            self.begin(queue, op, taken_at);
        }
    }

    fn begin(&mut self, queue: usize, op: Op, at: Duration) {
        let range = op.kind.range(self.content.block_size());
        let (reads, writes) =
            (matches!(op.kind, OpKind::Read { .. }), matches!(op.kind, OpKind::Write { .. }));
        let command = self.controller.add(queue, op);
        match range {
            Some(range) if reads => {
                let parts = self.flash.read(command, range, at);
                self.controller.commands[command].as_mut().expect("it was added").parts = parts;
                self.note_dies();
            }
            Some((_, blocks)) if writes => {
                self.controller.writes.push_back((command, blocks));
                self.fill_buffer(at);
            }
            // Discards and zeroing change tables only.
            Some(_) => self.controller.at(at, Event::Part(command)),
            None => {
                self.controller.flushes.push(command);
                self.end_flushes(at);
            }
        }
    }

    /// Puts the ends of the works that dies have begun among the events.
    fn note_dies(&mut self) {
        for (end, die) in self.flash.take_begun() {
            self.controller.at(end, Event::Die(die));
        }
    }

    /// Moves blocks of writes into the buffer, in order.
    fn fill_buffer(&mut self, now: Duration) {
        while let Some((command, left)) = self.controller.writes.pop_front() {
            let taken = self.flash.write(left, now);
            if taken < left {
                self.controller.writes.push_front((command, left - taken));
                break;
            }
            self.controller.at(now, Event::Part(command));
        }
        self.note_dies();
    }

    fn end_flushes(&mut self, now: Duration) {
        if self.flash.is_clean() {
            for command in std::mem::take(&mut self.controller.flushes) {
                self.controller.at(now, Event::Part(command));
            }
        }
    }

    /// Goes to the next moment at which something happens. False where nothing will.
    fn advance(&mut self) -> bool {
        self.take_commands();
        let Some(Reverse((at, event))) = self.controller.events.pop() else { return false };
        let now = self.controller.now.max(at);
        self.controller.now = now;
        match event {
            Event::Die(die) => match self.flash.end(die, now) {
                Ended::Read { command, at } => self.controller.at(at, Event::Part(command)),
                Ended::Program => {
                    self.fill_buffer(now);
                    self.end_flushes(now);
                }
            },
            Event::Part(command) => self.arrived(command),
        }
        self.note_dies();
        self.take_commands();
        true
    }

    /// A part of a command is there; after the last one the command is complete.
    fn arrived(&mut self, at: usize) {
        let command = self.controller.commands[at].as_mut().expect("a command ends once");
        command.parts -= 1;
        if command.parts > 0 {
            return;
        }
        let Some(Command { queue, mut op, .. }) = self.controller.commands[at].take() else {
            return;
        };
        let result = self.content.apply(&mut op.kind);
        let done = Done { tag: op.tag, result, memory: op.kind.into_memory() };
        self.controller.completed[queue].push(done);
        self.controller.working[queue] -= 1;
    }
}

pub(super) struct ModelQueue {
    model: Model,
    number: usize,
    depth: usize,
    in_flight: usize,
    pushed: Vec<Op>,
    refused: Vec<Done>,
    parker: Arc<Parker>,
}

impl ModelQueue {
    pub(super) fn new(model: Model, number: usize, depth: usize) -> Self {
        let (pushed, refused, parker) = (Vec::new(), Vec::new(), Arc::default());
        ModelQueue { model, number, depth, in_flight: 0, pushed, refused, parker }
    }
}

impl Queue for ModelQueue {
    fn push(&mut self, op: Op) -> Result<(), Op> {
        if self.in_flight == self.depth {
            return Err(op);
        }
        self.in_flight += 1;
        match op.kind.check(&self.model.facts) {
            Ok(()) => self.pushed.push(op),
            Err(errno) => {
                let memory = op.kind.into_memory();
                self.refused.push(Done { tag: op.tag, result: Err(errno), memory });
            }
        }
        Ok(())
    }

    fn kick(&mut self) {
        self.model.lock().controller.submitted[self.number].extend(self.pushed.drain(..));
    }

    fn reap(&mut self, done: &mut Vec<Done>) {
        let before = done.len();
        done.append(&mut self.refused);
        done.append(&mut self.model.lock().controller.completed[self.number]);
        self.in_flight -= done.len() - before;
    }

    /// Goes on to the next moment at which anything happens on the device, perhaps to another queue.
    fn wait(&mut self, timeout: Option<Duration>) {
        self.kick();
        let mut state = self.model.lock();
        let ready = !self.refused.is_empty() || !state.controller.completed[self.number].is_empty();
        if !ready && !state.advance() {
            drop(state);
            self.parker.park(timeout);
        }
    }

    fn waker(&self) -> Waker {
        let parker = Arc::clone(&self.parker);
        Waker::new(move || parker.unpark())
    }

    fn in_flight(&self) -> usize {
        self.in_flight
    }

    fn depth(&self) -> usize {
        self.depth
    }
}

impl Drop for ModelQueue {
    fn drop(&mut self) {
        self.kick();
        let mut state = self.model.lock();
        let rest = self.in_flight - self.refused.len();
        while state.controller.completed[self.number].len() < rest {
            assert!(state.advance(), "commands in flight end");
        }
        state.controller.completed[self.number].clear();
    }
}
