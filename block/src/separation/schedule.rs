//! The schedule of operations that were pushed and are not complete: it decides which may begin,
//! and in which queue.

use std::collections::VecDeque;
use std::time::Duration;

use super::caps::ClassCaps;
use super::class::{CLASSES, OperationClass};
use super::costs::CostMatrix;
use super::overlaps::BlockRanges;
use super::{SeparationMode, SeparationOptions};
use crate::{BlockCompletion, BlockOp, BlockOpKind, QueuePurpose};

/// The index of the flushes among the waiting operations.
const FLUSHES: usize = CLASSES;

/// A schedule without I/O and without a clock: its caller passes the time.
#[derive(Debug)]
pub(super) struct OperationSchedule {
    mode: SeparationMode,
    large: usize,
    block_size: u32,
    costs: CostMatrix,
    caps: ClassCaps,
    overlaps: BlockRanges,
    /// Operations that wait for a queue, in order; by class, or all in the first where classes do
    /// not count.
    ready: [VecDeque<WaitingOperation>; CLASSES + 1],
    /// Operations that wait for others, in order.
    held: VecDeque<WaitingOperation>,
    /// By the tag that the queues see.
    slots: Vec<Option<ScheduleSlot>>,
    free: Vec<usize>,
    /// The number of operations that each queue has, and can have.
    loads: Vec<(usize, usize)>,
    /// The queue that has the turn.
    turn: usize,
    next_number: u64,
    /// The number of operations that change something and are not complete, by the number of
    /// flushes that were pushed before them. The first entry counts operations after `settled`
    /// flushes.
    epochs: VecDeque<usize>,
    settled: u64,
}

/// An operation, and the user that receives its completion.
#[derive(Debug)]
pub(super) struct PushedOperation {
    pub(super) user: usize,
    pub(super) purpose: QueuePurpose,
    pub(super) op: BlockOp,
}

#[derive(Debug)]
struct WaitingOperation {
    slot: usize,
    kind: BlockOpKind,
}

/// An operation that was pushed.
#[derive(Debug)]
struct ScheduleSlot {
    user: usize,
    tag: u64,
    number: u64,
    class: Option<OperationClass>,
    range: Option<(u64, u64)>,
    changes: bool,
    /// Flushes that were pushed before.
    epoch: u64,
    queue: usize,
    begun: Duration,
}

impl OperationSchedule {
    pub(super) fn new(separation: &SeparationOptions, depths: &[usize], block_size: u32) -> Self {
        let depth: usize = depths.iter().sum();
        OperationSchedule {
            mode: separation.mode,
            large: separation.large,
            block_size,
            costs: CostMatrix::new(&separation.queues),
            caps: ClassCaps::new(depth, separation.caps),
            overlaps: BlockRanges::default(),
            ready: Default::default(),
            held: VecDeque::new(),
            slots: Vec::new(),
            free: Vec::new(),
            loads: depths.iter().map(|depth| (0, *depth)).collect(),
            turn: 0,
            next_number: 0,
            epochs: VecDeque::from([0]),
            settled: 0,
        }
    }

    /// Takes an operation. The users ensure that there are not too many.
    pub(super) fn push(
        &mut self,
        PushedOperation { user, purpose, op: BlockOp { tag, kind } }: PushedOperation,
    ) {
        let is_flush = matches!(kind, BlockOpKind::Flush);
        if is_flush {
            self.epochs.push_back(0);
        }
        let epoch = self.settled + self.epochs.len() as u64 - 1;
        let class = OperationClass::classify(&kind, purpose, self.large);
        let range = kind.range(self.block_size);
        let changes = !matches!(kind, BlockOpKind::Read { .. } | BlockOpKind::Flush);
        let number = self.next_number;
        self.next_number += 1;
        let (queue, begun) = (0, Duration::ZERO);
        let made = ScheduleSlot { user, tag, number, class, range, changes, epoch, queue, begun };
        if changes {
            *self.epochs.back_mut().expect("there is always an epoch") += 1;
        }
        let free = !is_flush && self.may_begin(&made, self.held.iter());
        let slot = self.free.pop().unwrap_or_else(|| {
            self.slots.push(None);
            self.slots.len() - 1
        });
        self.slots[slot] = Some(made);
        match free {
            true => self.make_ready(WaitingOperation { slot, kind }),
            false => self.held.push_back(WaitingOperation { slot, kind }),
        }
        // The flush begins at once if no change is before it.
        if is_flush {
            self.release();
        }
    }

    /// True if no operation that has begun, or that waits `ahead`, uses the blocks of `slot`.
    fn may_begin<'a>(
        &self,
        slot: &ScheduleSlot,
        ahead: impl Iterator<Item = &'a WaitingOperation>,
    ) -> bool {
        let Some(range) = slot.range else { return self.epoch_is_over(slot.epoch) };
        let meets = |other: &ScheduleSlot| {
            let Some(theirs) = other.range else { return false };
            let ends = |range: (u64, u64)| range.0.saturating_add(range.1);
            (slot.changes || other.changes) && range.0 < ends(theirs) && theirs.0 < ends(range)
        };
        let mut ahead = ahead.filter_map(|waiting| self.slots[waiting.slot].as_ref());
        !self.overlaps.conflict_with(range, slot.changes) && !ahead.any(meets)
    }

    /// True if all changes that were pushed before the flush with which `epoch` begins are
    /// complete.
    fn epoch_is_over(&self, epoch: u64) -> bool {
        let before = epoch.saturating_sub(self.settled) as usize;
        self.epochs.iter().take(before).all(|count| *count == 0)
    }

    fn make_ready(&mut self, waiting: WaitingOperation) {
        let Some(slot) = &self.slots[waiting.slot] else { return };
        if let Some(range) = slot.range {
            self.overlaps.add(slot.number, range, slot.changes);
        }
        let line = match (self.mode, slot.class) {
            (_, None) => FLUSHES,
            (SeparationMode::Off, _) => 0,
            (_, Some(class)) => class.index(),
        };
        self.ready[line].push_back(waiting);
    }

    /// The next operation that begins, and its queue.
    pub(super) fn next(&mut self, now: Duration) -> Option<(usize, BlockOp)> {
        let (_, line, queue) = (0..self.ready.len())
            .filter_map(|line| {
                let first = self.slots[self.ready[line].front()?.slot].as_ref()?;
                Some((first.number, line, self.queue_for(first)?))
            })
            .min()?;
        let WaitingOperation { slot: tag, kind } = self.ready[line].pop_front()?;
        let slot = self.slots[tag].as_mut()?;
        (slot.queue, slot.begun) = (queue, now);
        self.loads[queue].0 += 1;
        if let Some(class) = slot.class {
            self.caps.record_begin(class);
            self.costs.record_begin(queue, class);
        }
        if self.mode == SeparationMode::Off {
            self.turn = queue + 1;
        }
        Some((queue, BlockOp { tag: tag as u64, kind }))
    }

    /// The queue that an operation goes to now, if any.
    fn queue_for(&self, slot: &ScheduleSlot) -> Option<usize> {
        let count = self.loads.len();
        let has_room = |queue: &usize| self.loads[*queue].0 < self.loads[*queue].1;
        match slot.class {
            Some(class) if self.mode != SeparationMode::Off => {
                let usable = (0..count).filter(has_room);
                self.caps.allow(class).then(|| self.costs.choose(class, usable)).flatten()
            }
            _ => (self.turn..self.turn + count).map(|queue| queue % count).find(has_room),
        }
    }

    /// Records a completion, and restores its original tag. Also returns its user.
    pub(super) fn record_completion(
        &mut self,
        mut done: BlockCompletion,
        now: Duration,
    ) -> (usize, BlockCompletion) {
        let at = done.tag as usize;
        let slot = self.slots[at].take().expect("a queue completes an operation once");
        done.tag = slot.tag;
        self.free.push(at);
        self.loads[slot.queue].0 -= 1;
        if let Some(class) = slot.class {
            self.caps.record_completion(class, now.saturating_sub(slot.begun));
            let learns = self.mode == SeparationMode::Learned;
            self.costs.record_completion(slot.queue, class, (slot.begun, now), learns);
        }
        if let Some((block, _)) = slot.range {
            self.overlaps.remove(slot.number, block);
        }
        if slot.changes {
            self.epochs[(slot.epoch - self.settled) as usize] -= 1;
        }
        while self.epochs.len() > 1 && self.epochs[0] == 0 {
            self.epochs.pop_front();
            self.settled += 1;
        }
        self.release();
        (slot.user, done)
    }

    /// Makes held operations ready that need not wait any more.
    fn release(&mut self) {
        let mut at = 0;
        while at < self.held.len() {
            let slot = self.slots[self.held[at].slot].as_ref();
            let free = slot.is_some_and(|slot| self.may_begin(slot, self.held.iter().take(at)));
            match free.then(|| self.held.remove(at)).flatten() {
                Some(waiting) => self.make_ready(waiting),
                None => at += 1,
            }
        }
    }

    /// Operations that are not complete.
    pub(super) fn outstanding(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// Operations that a queue has, and can have.
    pub(super) fn load(&self, queue: usize) -> (usize, usize) {
        self.loads[queue]
    }

    /// Operations of a class that wait for a queue or for other operations; flushes without a
    /// class.
    pub(super) fn count_waiting(&self, class: Option<OperationClass>) -> usize {
        let lines = self.ready.iter().chain([&self.held]).flatten();
        let slots = lines.filter_map(|waiting| self.slots[waiting.slot].as_ref());
        slots.filter(|slot| slot.class == class).count()
    }

    pub(super) fn mean(&self, queue: usize, class: OperationClass) -> Option<Duration> {
        self.costs.mean(queue, class)
    }

    pub(super) fn cap(&self, class: OperationClass) -> usize {
        self.caps.cap_of(class)
    }
}
