//! The controller, which takes commands from the queues in turn, and the queues.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use super::{Model, Parts, State};
use crate::waker::Parker;
use crate::{Done, Kind, Op, Queue, Result, Waker};

/// The commands of all queues.
#[derive(Debug)]
pub(super) struct Controller {
    command: Duration,
    /// Commands that it can still take.
    room: usize,
    now: Duration,
    /// The moment at which it has taken the last command.
    taken_at: Duration,
    submitted: Vec<VecDeque<Op>>,
    completed: Vec<Vec<Done>>,
    /// The queue whose turn it is.
    turn: usize,
    /// Writes that wait for room in the buffer, with the number of blocks that are still to come.
    writes: VecDeque<(usize, Op, u64)>,
    commands: Vec<Option<(usize, Op)>>,
    /// Moments with the command that ends then; `None` where a page leaves the buffer.
    events: BinaryHeap<Reverse<(Duration, Option<usize>)>>,
}

impl Controller {
    pub(super) fn new(parts: &Parts) -> Self {
        Controller {
            command: parts.command,
            room: parts.commands,
            now: Duration::ZERO,
            taken_at: Duration::ZERO,
            submitted: Vec::new(),
            completed: Vec::new(),
            turn: 0,
            writes: VecDeque::new(),
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
        self.submitted.len() - 1
    }

    fn end(&mut self, at: Duration, queue: usize, op: Op) {
        let free = self.commands.iter().position(Option::is_none);
        let command = free.unwrap_or_else(|| {
            self.commands.push(None);
            self.commands.len() - 1
        });
        self.commands[command] = Some((queue, op));
        self.events.push(Reverse((at, Some(command))));
    }
}

impl State {
    /// Takes commands while there is room, one from each queue in turn, as NVMe's round robin does.
    fn take_commands(&mut self) {
        while self.controller.room > 0 {
            let controller = &mut self.controller;
            let queues = controller.submitted.len();
            let mut turns = (controller.turn..controller.turn + queues).map(|at| at % queues);
            let Some(queue) = turns.find(|queue| !controller.submitted[*queue].is_empty()) else {
                return;
            };
            let Some(op) = controller.submitted[queue].pop_front() else { return };
            controller.turn = queue + 1;
            controller.room -= 1;
            controller.taken_at = controller.now.max(controller.taken_at) + controller.command;
            self.begin(queue, op);
        }
    }

    fn begin(&mut self, queue: usize, op: Op) {
        let at = self.controller.taken_at;
        match op.kind.range(self.content.block_size()) {
            Some((block, blocks)) if matches!(op.kind, Kind::Read { .. }) => {
                let end = self.flash.read(block, blocks, at);
                self.controller.end(end, queue, op);
            }
            Some((_, blocks)) if matches!(op.kind, Kind::Write { .. }) => {
                self.controller.writes.push_back((queue, op, blocks));
                self.fill_buffer();
            }
            // Discards and zeroing change tables only.
            Some(_) => self.controller.end(at, queue, op),
            None => self.controller.end(at.max(self.flash.idle_at()), queue, op),
        }
    }

    /// Moves blocks of writes into the buffer, in order.
    fn fill_buffer(&mut self) {
        let now = self.controller.now.max(self.controller.taken_at);
        while let Some((queue, op, left)) = self.controller.writes.pop_front() {
            let (taken, ends) = self.flash.write(left, now);
            let pages = ends.into_iter().map(|end| Reverse((end, None)));
            self.controller.events.extend(pages);
            if taken < left {
                self.controller.writes.push_front((queue, op, left - taken));
                return;
            }
            self.controller.end(now, queue, op);
        }
    }

    /// Goes to the next moment at which something happens. False where nothing will.
    fn advance(&mut self) -> bool {
        self.take_commands();
        let Some(Reverse((at, event))) = self.controller.events.pop() else { return false };
        self.controller.now = self.controller.now.max(at);
        match event {
            None => {
                self.flash.programmed();
                self.fill_buffer();
            }
            Some(command) => {
                let ended = self.controller.commands[command].take();
                let (queue, mut op) = ended.expect("a command ends once");
                let result = self.content.apply(&mut op.kind);
                let done = Done { tag: op.tag, result, memory: op.kind.into_memory() };
                self.controller.completed[queue].push(done);
                self.controller.room += 1;
            }
        }
        self.take_commands();
        true
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
