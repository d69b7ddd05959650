//! The queue of a simulated device.

use std::sync::Arc;
use std::time::Duration;

use super::{CandidateOperation, SimDevice, SimDeviceState, SimEvent};
use crate::waker::QueueParker;
use crate::{BlockCompletion, BlockOp, BlockOpKind, DeviceQueue, QueueWaker, Result};

/// Bytes of the unit that survives a power failure whole or not at all.
const SECTOR: usize = 512;

pub(super) struct SimQueue {
    sim: SimDevice,
    depth: usize,
    pushed: Vec<BlockOp>,
    begun: Vec<SimOperation>,
    done: Vec<(BlockCompletion, Option<usize>)>,
    parker: Arc<QueueParker>,
}

/// An operation in flight.
struct SimOperation {
    op: BlockOp,
    /// The event of the operation, if it changes something or flushes.
    submitted: Option<usize>,
    result: Result<()>,
}

impl SimQueue {
    pub(super) fn new(sim: SimDevice, depth: usize) -> Self {
        let (pushed, begun, done) = (Vec::new(), Vec::new(), Vec::new());
        SimQueue { sim, depth, pushed, begun, done, parker: Arc::default() }
    }

    /// Completes at least one operation in flight, and each of the others with even odds.
    fn complete_some(&mut self) {
        let mut state = self.sim.lock();
        let mut left = Vec::new();
        state.random.shuffle(&mut self.begun);
        for (at, begun) in self.begun.drain(..).enumerate() {
            if at > 0 && state.random.bool() {
                left.push(begun);
                continue;
            }
            let SimOperation { op: BlockOp { tag, mut kind }, submitted, mut result } = begun;
            if result.is_ok() {
                result = state.now.apply(&mut kind);
            } else if let BlockOpKind::Write { .. } = kind {
                state.tear(&kind);
            }
            state.steps += 1;
            let memory = kind.into_memory();
            self.done.push((BlockCompletion { tag, result, memory }, submitted));
        }
        self.begun = left;
    }

    fn deliver(&mut self, done: &mut Vec<BlockCompletion>) {
        let mut state = self.sim.lock();
        for (one, submitted) in self.done.drain(..) {
            if let Some(submitted) = submitted {
                let durable = one.result.is_ok() && !state.lies;
                state.events.push(SimEvent::Done { submitted, durable });
            }
            done.push(one);
        }
    }
}

impl SimDeviceState {
    /// Records an operation that begins, and lets a fault strike it.
    fn begin(&mut self, kind: &BlockOpKind, block_size: u32) -> (Option<usize>, Result<()>) {
        let (block, blocks) = kind.range(block_size).unwrap_or_default();
        let victim = CandidateOperation { number: self.began, call: kind.call(), block, blocks };
        self.began += 1;
        self.steps += 1;
        let fault = self.fault.as_mut().and_then(|fault| fault(&victim));
        let event = match kind {
            BlockOpKind::Read { .. } => None,
            BlockOpKind::Flush => Some(SimEvent::Flush),
            BlockOpKind::Write { fua, .. } => {
                let content = Some(contents(kind, block_size as usize));
                Some(SimEvent::Write { block, blocks, content, fua: *fua })
            }
            BlockOpKind::Zero { .. } => {
                let content = Some(vec![None; blocks as usize]);
                Some(SimEvent::Write { block, blocks, content, fua: false })
            }
            BlockOpKind::Discard { .. } => {
                Some(SimEvent::Write { block, blocks, content: None, fua: false })
            }
        };
        let submitted = event.map(|event| {
            self.events.push(event);
            self.events.len() - 1
        });
        (submitted, fault.map_or(Ok(()), Err))
    }

    /// Leaves each sector of a write that failed old or new.
    fn tear(&mut self, kind: &BlockOpKind) {
        let size = self.now.block_size() as usize;
        let Some((block, _)) = kind.range(size as u32) else { return };
        for (at, new) in (block..).zip(contents(kind, size)) {
            let torn = tear_block(self.now.get(at), new.as_ref(), size, &mut self.random);
            self.now.set(at, Some(torn));
        }
    }
}

/// The blocks that a write contains.
fn contents(kind: &BlockOpKind, block_size: usize) -> Vec<Option<Arc<[u8]>>> {
    let BlockOpKind::Write { memory, .. } = kind else { return Vec::new() };
    let pieces = memory.pieces().iter();
    pieces.flat_map(|piece| piece.bytes().chunks(block_size)).map(|b| Some(Arc::from(b))).collect()
}

/// A block whose sectors come from `old` or `new`.
pub(super) fn tear_block(
    old: Option<&Arc<[u8]>>,
    new: Option<&Arc<[u8]>>,
    block_size: usize,
    random: &mut fastrand::Rng,
) -> Arc<[u8]> {
    let mut bytes = old.map_or_else(|| vec![0; block_size], |old| old.to_vec());
    for (at, sector) in bytes.chunks_mut(SECTOR).enumerate() {
        if random.bool() {
            match new {
                Some(new) => sector.copy_from_slice(&new[at * SECTOR..][..sector.len()]),
                None => sector.fill(0),
            }
        }
    }
    Arc::from(bytes)
}

impl DeviceQueue for SimQueue {
    fn push(&mut self, op: BlockOp) -> Result<(), BlockOp> {
        if self.in_flight() == self.depth {
            return Err(op);
        }
        self.pushed.push(op);
        Ok(())
    }

    fn kick(&mut self) {
        let facts = &self.sim.facts;
        let mut state = self.sim.lock();
        for op in self.pushed.drain(..) {
            if let Err(errno) = op.kind.check(facts) {
                let done = BlockCompletion {
                    tag: op.tag,
                    result: Err(errno),
                    memory: op.kind.into_memory(),
                };
                self.done.push((done, None));
                continue;
            }
            let (submitted, result) = state.begin(&op.kind, facts.block_size);
            self.begun.push(SimOperation { op, submitted, result });
        }
    }

    fn reap(&mut self, done: &mut Vec<BlockCompletion>) {
        // A user that polls and never waits gets completions, too, after a while.
        if self.done.is_empty() && !self.begun.is_empty() && self.sim.lock().random.bool() {
            self.complete_some();
        }
        self.deliver(done);
    }

    fn wait(&mut self, timeout: Option<Duration>) {
        self.kick();
        if self.done.is_empty() && !self.begun.is_empty() {
            self.complete_some();
        }
        if self.done.is_empty() {
            self.parker.park(timeout);
        }
    }

    fn waker(&self) -> QueueWaker {
        let parker = Arc::clone(&self.parker);
        QueueWaker::new(move || parker.unpark())
    }

    fn in_flight(&self) -> usize {
        self.pushed.len() + self.begun.len() + self.done.len()
    }

    fn depth(&self) -> usize {
        self.depth
    }
}

impl Drop for SimQueue {
    fn drop(&mut self) {
        self.kick();
        while !self.begun.is_empty() {
            self.complete_some();
        }
        // Flushes of other queues cover it from now on.
        self.deliver(&mut Vec::new());
    }
}
