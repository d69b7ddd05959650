//! Time-outs, resets and the end of a controller, from the side of a queue.

use std::time::Duration;

use defuse_block::Errno;

use super::{CHECK, NvmeQueue, TRIES};
use crate::controller::{CommandTicket, ControllerState};

/// The state of a pair of queues.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum QueuePairState {
    /// The controller forgot the pair, and is not ready.
    Lost,
    /// The pair is to be made: first the completion queue.
    New,
    /// The completion queue is being made.
    Completions(CommandTicket),
    /// The completion queue is there.
    Half,
    /// The submission queue is being made.
    Submissions(CommandTicket),
    Live,
    /// The pair never works again.
    Dead,
}

impl QueuePairState {
    pub(super) fn is_growing(self) -> bool {
        !matches!(self, QueuePairState::Lost | QueuePairState::Live | QueuePairState::Dead)
    }
}

impl NvmeQueue {
    /// Continues a reset, the making of the queue after it, or its end.
    pub(super) fn recover(&mut self) {
        if self.controller.state() == ControllerState::Resetting {
            self.controller.step();
        }
        match self.controller.state() {
            ControllerState::Running => {}
            ControllerState::Resetting => return,
            ControllerState::Dead => {
                self.end();
                return;
            }
        }
        let generation = self.controller.generation();
        if generation != self.generation && self.line != QueuePairState::Dead {
            self.generation = generation;
            self.begin_again();
        }
        self.grow();
    }

    /// Begins again after a reset. The controller was stopped, so it uses no memory of commands:
    /// they are answered, or sent again.
    fn begin_again(&mut self) {
        self.ring.clear();
        self.fresh.clear();
        self.line = QueuePairState::New;
        for at in 0..self.slots.len() {
            let slot = &mut self.slots[at];
            if !slot.sent {
                continue;
            }
            slot.sent = false;
            slot.tries += 1;
            let late = slot.late;
            if late || slot.tries >= TRIES {
                self.answer(at as u16, Err(if late { Errno::TIMEDOUT } else { Errno::IO }));
            } else {
                self.waiting.push_back(at as u16);
            }
        }
    }

    /// Makes the pair of queues, step by step.
    fn grow(&mut self) {
        let vector = (self.controller.transport.vectors() > 0).then_some(self.vector);
        let commands = self.controller.creation(&self.ring, vector, self.use_.priority);
        match self.line {
            QueuePairState::New => {
                if let Some(ticket) = self.controller.send(commands[0]) {
                    self.line = QueuePairState::Completions(ticket);
                }
            }
            QueuePairState::Half => {
                if let Some(ticket) = self.controller.send(commands[1]) {
                    self.line = QueuePairState::Submissions(ticket);
                }
            }
            QueuePairState::Completions(ticket) => self.record_growth(ticket, QueuePairState::Half),
            QueuePairState::Submissions(ticket) => {
                self.record_growth(ticket, QueuePairState::Live);
                if self.line == QueuePairState::Live {
                    self.send_waiting();
                    self.ring_doorbell();
                }
            }
            QueuePairState::Lost | QueuePairState::Live | QueuePairState::Dead => {}
        }
    }

    fn record_growth(&mut self, ticket: CommandTicket, next: QueuePairState) {
        match self.controller.take(ticket) {
            None => {}
            Some(Ok(completion)) if completion.status.is_ok() => self.line = next,
            Some(Ok(completion)) => {
                let (name, number) = (&self.space.facts.name, self.ring.number());
                log::error!("{name}: it makes no queue {number}: {}", completion.status);
                self.end();
            }
            // A reset happened meanwhile; the next call begins anew.
            Some(Err(_)) => self.line = QueuePairState::Lost,
        }
    }

    /// Answers everything: the controller has been cut off, or has no queue for this driver.
    fn end(&mut self) {
        self.line = QueuePairState::Dead;
        self.waiting.clear();
        self.fresh.clear();
        for at in 0..self.slots.len() {
            let late = self.slots[at].late;
            self.answer(at as u16, Err(if late { Errno::TIMEDOUT } else { Errno::IO }));
        }
    }

    /// Searches for late commands, and examines the controller now and then.
    pub(super) fn check_late_commands(&mut self) {
        let now = self.controller.transport.now();
        if now < self.next_check {
            return;
        }
        let mut next = now + CHECK;
        for at in 0..self.slots.len() {
            let slot = &mut self.slots[at];
            if !slot.sent {
                continue;
            }
            if now <= slot.deadline {
                next = next.min(slot.deadline + Duration::from_micros(1));
                continue;
            }
            let id = at as u16 | slot.sequence << super::SLOT_BITS;
            if slot.late {
                self.controller.reset(self.generation, "a command cannot be aborted");
                break;
            }
            slot.late = true;
            slot.deadline = now + self.space.timeout / 4;
            next = next.min(slot.deadline + Duration::from_micros(1));
            log::warn!("{}: command {id:#x} has no answer: it is aborted", self.space.facts.name);
            self.controller.abort(self.ring.number(), id);
        }
        self.next_check = next;
        self.controller.examine(self.generation);
    }
}
