//! The queue of a simulated device.

use std::sync::Arc;
use std::time::Duration;

use super::{Event, Sim, State, Victim};
use crate::waker::Parker;
use crate::{Done, Op, OpKind, Queue, Result, Waker};

/// Bytes of the unit that survives a power failure whole or not at all.
const SECTOR: usize = 512;

pub(super) struct SimQueue {
    sim: Sim,
    depth: usize,
    pushed: Vec<Op>,
    begun: Vec<Begun>,
    done: Vec<(Done, Option<usize>)>,
    parker: Arc<Parker>,
}

/// An operation in flight.
struct Begun {
    op: Op,
    /// Its event, where it changes something or flushes.
    submitted: Option<usize>,
    result: Result<()>,
}

impl SimQueue {
    pub(super) fn new(sim: Sim, depth: usize) -> Self {
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
            let Begun { op: Op { tag, mut kind }, submitted, mut result } = begun;
            if result.is_ok() {
                result = state.now.apply(&mut kind);
            } else if let OpKind::Write { .. } = kind {
                state.tear(&kind);
            }
            state.steps += 1;
            let memory = kind.into_memory();
            self.done.push((Done { tag, result, memory }, submitted));
        }
        self.begun = left;
    }

    fn hand_out(&mut self, done: &mut Vec<Done>) {
        let mut state = self.sim.lock();
        for (one, submitted) in self.done.drain(..) {
            if let Some(submitted) = submitted {
                let durable = one.result.is_ok() && !state.lies;
                state.events.push(Event::Done { submitted, durable });
            }
            done.push(one);
        }
    }
}

impl State {
    /// Notes an operation that begins, and lets a fault strike it.
    fn begin(&mut self, kind: &OpKind, block_size: u32) -> (Option<usize>, Result<()>) {
        let (block, blocks) = kind.range(block_size).unwrap_or_default();
        let victim = Victim { number: self.began, call: kind.call(), block, blocks };
        self.began += 1;
        self.steps += 1;
        let fault = self.fault.as_mut().and_then(|fault| fault(&victim));
        let event = match kind {
            OpKind::Read { .. } => None,
            OpKind::Flush => Some(Event::Flush),
            OpKind::Write { fua, .. } => {
                let content = Some(contents(kind, block_size as usize));
                Some(Event::Write { block, blocks, content, fua: *fua })
            }
            OpKind::Zero { .. } => {
                let content = Some(vec![None; blocks as usize]);
                Some(Event::Write { block, blocks, content, fua: false })
            }
            OpKind::Discard { .. } => {
                Some(Event::Write { block, blocks, content: None, fua: false })
            }
        };
        let submitted = event.map(|event| {
            self.events.push(event);
            self.events.len() - 1
        });
        (submitted, fault.map_or(Ok(()), Err))
    }

    /// Leaves each sector of a write that failed old or new.
    fn tear(&mut self, kind: &OpKind) {
        let size = self.now.block_size() as usize;
        let Some((block, _)) = kind.range(size as u32) else { return };
        for (at, new) in (block..).zip(contents(kind, size)) {
            let torn = torn(self.now.get(at), new.as_ref(), size, &mut self.random);
            self.now.set(at, Some(torn));
        }
    }
}

/// The blocks that a write brings.
fn contents(kind: &OpKind, block_size: usize) -> Vec<Option<Arc<[u8]>>> {
    let OpKind::Write { memory, .. } = kind else { return Vec::new() };
    let pieces = memory.pieces().iter();
    pieces.flat_map(|piece| piece.bytes().chunks(block_size)).map(|b| Some(Arc::from(b))).collect()
}

/// A block of which each sector is that of `old` or that of `new`.
pub(super) fn torn(
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

impl Queue for SimQueue {
    fn push(&mut self, op: Op) -> Result<(), Op> {
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
                let done = Done { tag: op.tag, result: Err(errno), memory: op.kind.into_memory() };
                self.done.push((done, None));
                continue;
            }
            let (submitted, result) = state.begin(&op.kind, facts.block_size);
            self.begun.push(Begun { op, submitted, result });
        }
    }

    fn reap(&mut self, done: &mut Vec<Done>) {
        // Who polls and never waits is served, too, after a while.
        if self.done.is_empty() && !self.begun.is_empty() && self.sim.lock().random.bool() {
            self.complete_some();
        }
        self.hand_out(done);
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

    fn waker(&self) -> Waker {
        let parker = Arc::clone(&self.parker);
        Waker::new(move || parker.unpark())
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
        self.hand_out(&mut Vec::new());
    }
}
