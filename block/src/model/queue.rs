//! The queues, and the controller, which takes commands from them in turn.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use super::timing::{CommandTiming, SsdWork};
use super::{SsdModel, SsdModelState, SsdParameters};
use crate::waker::QueueParker;
use crate::{BlockCompletion, BlockOp, BlockOpKind, DeviceQueue, QueueWaker, Result};

/// The commands of all queues.
#[derive(Debug)]
pub(super) struct SsdController {
    timing: CommandTiming,
    now: Duration,
    submitted: Vec<VecDeque<BlockOp>>,
    completed: Vec<Vec<BlockCompletion>>,
    /// Operations at work, with their queues, by the numbers of their commands.
    working: Vec<Option<(usize, BlockOp)>>,
    /// The queue that has the turn.
    turn: usize,
}

impl SsdController {
    pub(super) fn new(parts: &SsdParameters) -> Self {
        SsdController {
            timing: CommandTiming::new(parts),
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

    /// The next queue, in turn, with a command and room for one more at work.
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
fn load(kind: &BlockOpKind, block_size: u32) -> SsdWork {
    match (kind, kind.range(block_size)) {
        (BlockOpKind::Read { .. }, Some((block, blocks))) => SsdWork::Read { block, blocks },
        (BlockOpKind::Write { fua, .. }, Some((_, blocks))) => SsdWork::Write { blocks, fua: *fua },
        (BlockOpKind::Flush, _) => SsdWork::Flush,
        _ => SsdWork::Table,
    }
}

impl SsdModelState {
    /// Advances to the time of the next event. False if there is none.
    fn advance(&mut self) -> bool {
        let (controller, block_size) = (&mut self.controller, self.content.block_size());
        controller.take_commands(block_size);
        let Some(now) = controller.timing.next() else { return false };
        controller.now = now;
        let done = controller.timing.advance();
        if let Some((queue, mut op)) = done.and_then(|done| controller.working[done].take()) {
            let result = self.content.apply(&mut op.kind);
            let done = BlockCompletion { tag: op.tag, result, memory: op.kind.into_memory() };
            controller.completed[queue].push(done);
        }
        controller.take_commands(block_size);
        true
    }
}

pub(super) struct SsdModelQueue {
    model: SsdModel,
    number: usize,
    depth: usize,
    in_flight: usize,
    pushed: Vec<BlockOp>,
    refused: Vec<BlockCompletion>,
    parker: Arc<QueueParker>,
}

impl SsdModelQueue {
    pub(super) fn new(model: SsdModel, number: usize, depth: usize) -> Self {
        let (pushed, refused, parker) = (Vec::new(), Vec::new(), Arc::default());
        SsdModelQueue { model, number, depth, in_flight: 0, pushed, refused, parker }
    }
}

impl DeviceQueue for SsdModelQueue {
    fn push(&mut self, op: BlockOp) -> Result<(), BlockOp> {
        if self.in_flight == self.depth {
            return Err(op);
        }
        self.in_flight += 1;
        match op.kind.check(&self.model.facts) {
            Ok(()) => self.pushed.push(op),
            Err(errno) => {
                let memory = op.kind.into_memory();
                self.refused.push(BlockCompletion { tag: op.tag, result: Err(errno), memory });
            }
        }
        Ok(())
    }

    fn kick(&mut self) {
        self.model.lock().controller.submitted[self.number].extend(self.pushed.drain(..));
    }

    fn reap(&mut self, done: &mut Vec<BlockCompletion>) {
        let before = done.len();
        done.append(&mut self.refused);
        done.append(&mut self.model.lock().controller.completed[self.number]);
        self.in_flight -= done.len() - before;
    }

    /// Advances to the time of the next event of the device, which may concern another queue.
    fn wait(&mut self, timeout: Option<Duration>) {
        self.kick();
        let mut state = self.model.lock();
        let ready = !self.refused.is_empty() || !state.controller.completed[self.number].is_empty();
        if !ready && !state.advance() {
            drop(state);
            self.parker.park(timeout);
        }
    }

    fn waker(&self) -> QueueWaker {
        let parker = Arc::clone(&self.parker);
        QueueWaker::new(move || parker.unpark())
    }

    fn in_flight(&self) -> usize {
        self.in_flight
    }

    fn depth(&self) -> usize {
        self.depth
    }
}

impl Drop for SsdModelQueue {
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
