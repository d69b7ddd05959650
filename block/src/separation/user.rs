//! The queue of one user of a separated device.

use std::sync::Arc;
use std::time::Duration;

use super::schedule::PushedOperation;
use super::shared::SeparationShared;
use crate::{BlockCompletion, BlockOp, DeviceQueue, QueuePurpose, QueueWaker, Result};

pub(super) struct SeparatedQueue {
    shared: Arc<SeparationShared>,
    number: usize,
    purpose: QueuePurpose,
    depth: usize,
    in_flight: usize,
}

impl SeparatedQueue {
    pub(super) fn new(
        shared: &Arc<SeparationShared>,
        purpose: QueuePurpose,
        depth: usize,
    ) -> Result<Self> {
        let number = shared.join()?;
        Ok(SeparatedQueue { shared: Arc::clone(shared), number, purpose, depth, in_flight: 0 })
    }
}

impl DeviceQueue for SeparatedQueue {
    fn push(&mut self, op: BlockOp) -> Result<(), BlockOp> {
        if self.in_flight == self.depth {
            return Err(op);
        }
        self.in_flight += 1;
        let pushed = PushedOperation { user: self.number, purpose: self.purpose, op };
        self.shared.lock().schedule.push(pushed);
        Ok(())
    }

    fn kick(&mut self) {
        let mut state = self.shared.lock();
        self.shared.advance(&mut state, self.number);
    }

    fn reap(&mut self, done: &mut Vec<BlockCompletion>) {
        let mut state = self.shared.lock();
        self.shared.advance(&mut state, self.number);
        let mail = state.mailbox(self.number);
        self.in_flight -= mail.done.len();
        done.append(&mut mail.done);
    }

    fn wait(&mut self, timeout: Option<Duration>) {
        self.shared.wait(self.number, self.in_flight > 0, timeout);
    }

    fn waker(&self) -> QueueWaker {
        let (shared, number) = (Arc::clone(&self.shared), self.number);
        QueueWaker::new(move || shared.wake(number))
    }

    fn in_flight(&self) -> usize {
        self.in_flight
    }

    fn depth(&self) -> usize {
        self.depth
    }
}

impl Drop for SeparatedQueue {
    /// Waits for operations in flight.
    fn drop(&mut self) {
        let mut done = Vec::new();
        while self.in_flight > 0 {
            self.wait(None);
            self.reap(&mut done);
        }
        self.shared.lock().remove_user(self.number);
    }
}
