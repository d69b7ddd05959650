//! A pair of I/O queues.

mod active;
mod bounce;
mod data;
mod polling;
mod recovery;
mod serve;

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use defuse_block::{BlockCompletion, BlockOpKind, DeviceQueue, Errno, QueuePriority, Result};

use crate::DmaMemory;
use crate::controller::{ControllerState, NvmeController};
use crate::options::NamespaceParameters;
use crate::ring::{NextCompletion, QueuePair};
use crate::spec::{CommandStatus, CompletionEntry, PAGE};
use active::{ActiveOperation, CommandReadiness, CommandSlot};
use bounce::BounceBuffers;
use data::BusRange;
pub(crate) use data::{LIST, RegionAddresses};
use polling::PollingPolicy;
use recovery::QueuePairState;

/// Bits of a command's number that name its slot.
const SLOT_BITS: u32 = 9;

/// Operations in flight of a queue at most.
pub(crate) const MAX_DEPTH: u32 = 1 << SLOT_BITS;

/// The number of times that a command is sent, if the controller did not refuse it for good.
const TRIES: u8 = 4;

/// The longest sleep while something is in flight: then the controller is examined.
const CHECK: Duration = Duration::from_millis(500);

/// The use of a queue.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct QueueParameters {
    pub(crate) priority: QueuePriority,
    /// Writes of this queue are Compare commands: their data is the expected content of the blocks.
    pub(crate) compares: bool,
}

pub(crate) struct NvmeQueue {
    controller: Arc<NvmeController>,
    use_: QueueParameters,
    space: Arc<NamespaceParameters>,
    ring: QueuePair,
    line: QueuePairState,
    /// The generation of the controller in which the ring was registered.
    generation: u64,
    slots: Vec<CommandSlot>,
    free: Vec<u16>,
    /// Slots whose commands have not been written yet.
    waiting: VecDeque<u16>,
    /// Slots whose commands were written since the last reading of the clock.
    fresh: Vec<u16>,
    done: Vec<BlockCompletion>,
    /// A page for each slot.
    lists: DmaMemory,
    regions: RegionAddresses,
    ranges: Vec<BusRange>,
    bounce: Option<BounceBuffers>,
    bounce_pages: u32,
    zeros: Option<DmaMemory>,
    vector: u16,
    next_check: Duration,
    patience: PollingPolicy,
}

impl NvmeQueue {
    /// Makes queue `number`, for `depth` operations.
    pub(crate) fn new(
        controller: &Arc<NvmeController>,
        space: &Arc<NamespaceParameters>,
        regions: RegionAddresses,
        (number, depth): (u16, u16),
        use_: QueueParameters,
    ) -> Result<Self> {
        let transport = &controller.transport;
        let memory = || {
            let ring = QueuePair::new(transport, controller.capabilities, number, depth + 1)?;
            Ok((ring, transport.allocate(usize::from(depth) * PAGE)?))
        };
        let (ring, lists) = memory().inspect_err(|_| controller.give_number(number))?;
        let pages = space.facts.max_transfer.div_ceil(PAGE as u32);
        let mut queue = NvmeQueue {
            use_,
            ring,
            line: QueuePairState::Lost,
            // The ring is made when the queue notices that the controller is in another generation.
            generation: 0,
            slots: (0..depth).map(|_| CommandSlot::default()).collect(),
            free: (0..depth).rev().collect(),
            waiting: VecDeque::new(),
            fresh: Vec::new(),
            done: Vec::new(),
            lists,
            regions,
            ranges: Vec::new(),
            bounce: None,
            bounce_pages: pages.max(u32::from(depth).min(256)),
            zeros: None,
            vector: number,
            next_check: Duration::ZERO,
            patience: PollingPolicy::new(),
            controller: Arc::clone(controller),
            space: Arc::clone(space),
        };
        while queue.line.is_growing() || queue.line == QueuePairState::Lost {
            queue.recover();
            controller.pause();
        }
        if queue.line == QueuePairState::Live { Ok(queue) } else { Err(Errno::BUSY) }
    }

    /// Writes waiting commands, as many as possible.
    fn send_waiting(&mut self) {
        while self.line == QueuePairState::Live
            && let Some(slot) = self.waiting.pop_front()
        {
            if !self.send(slot) {
                self.waiting.push_front(slot);
                return;
            }
        }
    }

    /// Writes the next command of an operation, or answers it with an error. False where it must
    /// wait.
    #[inline]
    fn send(&mut self, slot: u16) -> bool {
        match self.command(usize::from(slot)) {
            Ok(CommandReadiness::Yes(command)) => {
                let place = &mut self.slots[usize::from(slot)];
                place.sequence = place.sequence.wrapping_add(1) & (u16::MAX >> SLOT_BITS);
                (place.sent, place.late) = (true, false);
                // The deadline begins when the doorbell rings.
                place.deadline = Duration::MAX;
                self.ring.write_command(&command.id(slot | place.sequence << SLOT_BITS));
                self.fresh.push(slot);
                true
            }
            Ok(CommandReadiness::Later) => false,
            Err(errno) => {
                self.answer(slot, Err(errno));
                true
            }
        }
    }

    /// Moves completed operations to `done`, and continues the others.
    fn gather(&mut self) {
        let (life, generation) = (self.controller.state(), self.controller.generation());
        let mut broken = false;
        let mut some = false;
        if self.line == QueuePairState::Live {
            for _ in 0..self.ring.entries() {
                match self.ring.next() {
                    NextCompletion::Empty => break,
                    NextCompletion::Done(completion) => broken |= !self.complete(completion),
                    NextCompletion::Invalid => broken = true,
                }
                some = true;
            }
            if some && life == ControllerState::Running && generation == self.generation {
                self.ring.release();
            }
        }
        if broken {
            self.controller.reset(self.generation, "a queue has a completion of no command");
        }
        if life != ControllerState::Running
            || generation != self.generation
            || self.line != QueuePairState::Live
        {
            self.recover();
        } else if !some && self.in_flight() > 0 {
            self.check_late_commands();
        }
        if some && !self.waiting.is_empty() {
            self.send_waiting();
            self.ring_doorbell();
        }
    }

    /// Takes a completion. False if it belongs to no command in flight.
    #[inline]
    fn complete(&mut self, completion: CompletionEntry) -> bool {
        let number = completion.id & ((1 << SLOT_BITS) - 1);
        let Some(slot) = self.slots.get_mut(usize::from(number)) else { return false };
        if !slot.sent || slot.sequence != completion.id >> SLOT_BITS {
            return false;
        }
        slot.sent = false;
        let Some(flight) = &mut slot.flight else { return false };
        if completion.status.is_ok() {
            slot.tries = 0;
            match flight.advance() {
                true => self.answer(number, Ok(())),
                false => self.waiting.push_back(number),
            }
            return true;
        }
        slot.tries += 1;
        let errno = match (completion.status.code(), slot.late) {
            (code, true) if code == CommandStatus::ABORTED.code() => Errno::TIMEDOUT,
            _ if completion.status.is_retryable() && slot.tries < TRIES => {
                self.waiting.push_back(number);
                return true;
            }
            _ => completion.status.errno(),
        };
        if completion.status.code() != CommandStatus::DIFFERENT.code() {
            let name = &self.space.facts.name;
            log::warn!("{name}: {:?} failed: {}", flight.kind, completion.status);
        }
        self.answer(number, Err(errno));
        true
    }

    /// Ends the operation of a slot. The controller does not use its memory any more.
    fn answer(&mut self, number: u16, result: Result<()>) {
        let slot = &mut self.slots[usize::from(number)];
        (slot.sent, slot.late, slot.tries) = (false, false, 0);
        let Some(ActiveOperation { tag, mut kind, mut pages, .. }) = slot.flight.take() else {
            return;
        };
        if let Some(bounce) = &mut self.bounce
            && !pages.is_empty()
        {
            if let (BlockOpKind::Read { memory, .. }, Ok(())) = (&mut kind, result) {
                bounce.drain(&pages, memory);
            }
            bounce.give(&mut pages);
        }
        self.free.push(number);
        self.done.push(BlockCompletion { tag, result, memory: kind.into_memory() });
    }

    /// Rings the doorbell for written commands. Their deadlines begin now.
    fn ring_doorbell(&mut self) {
        if self.fresh.is_empty() {
            return;
        }
        let now = self.controller.transport.now();
        let deadline = now + self.space.timeout;
        for slot in self.fresh.drain(..) {
            self.slots[usize::from(slot)].deadline = deadline;
        }
        self.next_check = self.next_check.min(deadline).max(now);
        self.ring.ring();
    }
}
