//! The controller, which takes commands from the queues in turn, and the queues.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use super::timing::{Load, Timing};
use super::{Model, Parts, State};
use crate::waker::Parker;
use crate::{Done, Op, OpKind, Queue, Result, Waker};

/// The commands of all queues.
#[derive(Debug)]
pub(super) struct Controller {
    timing: Timing,
    now: Duration,
    submitted: Vec<VecDeque<Op>>,
    completed: Vec<Vec<Done>>,
    /// Operations at work, with their queues, by the numbers of their commands.
    working: Vec<Option<(usize, Op)>>,
    /// The queue whose turn it is.
    turn: usize,
}

impl Controller {
    pub(super) fn new(parts: &Parts) -> Self {
        Controller {
            timing: Timing::new(parts),
            now: Duration::ZERO,
            submitted: Vec::new(),
            completed: Vec::new(),
            working: Vec::new(),
            turn: 0,
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

    /// The next queue, in turn, that has a command and may have one more at work.
    fn next_queue(&self) -> Option<usize> {
        let queues = self.submitted.len();
        let mut all = (self.turn..self.turn + queues).map(|at| at % queues);
        all.find(|queue| !self.submitted[*queue].is_empty() && self.timing.takes(*queue))
    }

    /// Takes commands while there is room, one from each queue in turn, as NVMe's round robin does.
    fn take_commands(&mut self, block_size: u32) {
        while let Some(queue) = self.next_queue() {
            let Some(op) = self.submitted[queue].pop_front() else { return };
            self.turn = queue + 1;
            let command = self.timing.begin(queue, load(&op.kind, block_size), self.now);
            if self.working.len() <= command {
                self.working.resize_with(command + 1, || None);
            }
            self.working[command] = Some((queue, op));
        }
    }
}

/// The work of an operation. Discards and zeroing change tables only.
fn load(kind: &OpKind, block_size: u32) -> Load {
    match (kind, kind.range(block_size)) {
        (OpKind::Read { .. }, Some((block, blocks))) => Load::Read { block, blocks },
        (OpKind::Write { fua, .. }, Some((_, blocks))) => Load::Write { blocks, fua: *fua },
        (OpKind::Flush, _) => Load::Flush,
        _ => Load::Table,
    }
}

impl State {
    /// Goes to the next moment at which something happens. False where nothing will.
    fn advance(&mut self) -> bool {
        let (controller, block_size) = (&mut self.controller, self.content.block_size());
        controller.take_commands(block_size);
        let Some(now) = controller.timing.next() else { return false };
        controller.now = now;
        let done = controller.timing.advance();
        if let Some((queue, mut op)) = done.and_then(|done| controller.working[done].take()) {
            let result = self.content.apply(&mut op.kind);
            let done = Done { tag: op.tag, result, memory: op.kind.into_memory() };
            controller.completed[queue].push(done);
        }
        controller.take_commands(block_size);
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
