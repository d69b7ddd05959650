//! The interface of the queue to its user.

use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Duration;

use defuse_block::{BlockCompletion, BlockOp, DeviceQueue, Errno, QueueWaker, Result};

use super::active::ActiveOperation;
use super::recovery::QueuePairState;
use super::{CHECK, NvmeQueue};
use crate::controller::ControllerState;

impl NvmeQueue {
    /// Polls until `end`. True if an answer came.
    fn poll_until(&mut self, end: Duration) -> bool {
        while self.controller.transport.now() < end {
            self.gather();
            if !self.done.is_empty() {
                return true;
            }
            std::hint::spin_loop();
        }
        false
    }
}

impl DeviceQueue for NvmeQueue {
    #[inline]
    fn push(&mut self, op: BlockOp) -> Result<(), BlockOp> {
        if self.in_flight() == self.slots.len() {
            return Err(op);
        }
        let facts = &self.space.facts;
        let dead = self.line == QueuePairState::Dead;
        let checked = op.kind.check(facts).and(if dead { Err(Errno::IO) } else { Ok(()) });
        if let Err(errno) = checked {
            self.done.push(BlockCompletion {
                tag: op.tag,
                result: Err(errno),
                memory: op.kind.into_memory(),
            });
            return Ok(());
        }
        let Some(slot) = self.free.pop() else { return Err(op) };
        self.slots[usize::from(slot)].flight = Some(ActiveOperation::new(op, facts.block_size));
        let is_next = self.line == QueuePairState::Live && self.waiting.is_empty();
        if !is_next || !self.send(slot) {
            self.waiting.push_back(slot);
        }
        Ok(())
    }

    fn kick(&mut self) {
        if self.controller.state() == ControllerState::Running
            && self.controller.generation() == self.generation
        {
            self.ring_doorbell();
        }
    }

    fn reap(&mut self, done: &mut Vec<BlockCompletion>) {
        self.gather();
        done.append(&mut self.done);
    }

    fn wait(&mut self, timeout: Option<Duration>) {
        self.kick();
        self.gather();
        if !self.done.is_empty() {
            return;
        }
        let transport = Arc::clone(&self.controller.transport);
        let begin = transport.now();
        let busy = self.in_flight() > 0;
        if busy {
            let look = match transport.wakes_at_once() {
                true => Duration::ZERO,
                false => self.patience.polling_time().min(timeout.unwrap_or(Duration::MAX)),
            };
            if !look.is_zero() && self.poll_until(begin + look) {
                self.patience.record_polled(transport.now().saturating_sub(begin));
                return;
            }
            self.patience.record_wait();
        }
        let limit = match (busy, self.line == QueuePairState::Live) {
            (true, true) if transport.vectors() > 0 => {
                let soon = self.next_check.saturating_sub(begin).max(Duration::from_micros(1));
                Some(soon.min(CHECK))
            }
            (true, _) => Some(Duration::from_micros(100)),
            (false, _) => None,
        };
        let limit = limit.map_or(timeout, |limit| Some(timeout.map_or(limit, |t| t.min(limit))));
        transport.sleep(self.vector, limit);
        self.gather();
        if !self.done.is_empty() {
            self.patience.record_sleep(transport.now().saturating_sub(begin));
        }
    }

    fn waker(&self) -> QueueWaker {
        self.controller.transport.waker(self.vector)
    }

    fn completion_fd(&self) -> Option<BorrowedFd<'_>> {
        self.controller.transport.interrupt_fd(self.vector)
    }

    fn in_flight(&self) -> usize {
        self.slots.len() - self.free.len() + self.done.len()
    }

    fn depth(&self) -> usize {
        self.slots.len()
    }
}

impl Drop for NvmeQueue {
    /// Waits for operations in flight. In the worst case a time-out ends the wait.
    fn drop(&mut self) {
        while self.free.len() < self.slots.len() {
            self.wait(None);
            self.done.clear();
        }
        let number = self.ring.number();
        if self.controller.generation() == self.generation && self.line == QueuePairState::Live {
            self.controller.delete(number);
        }
        self.controller.give_number(number);
    }
}
