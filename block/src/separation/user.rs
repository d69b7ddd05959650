//! The queue of one user of a separated device.

use std::sync::Arc;
use std::time::Duration;

use super::schedule::Pushed;
use super::shared::Shared;
use crate::{Done, Op, Purpose, Queue, Result, Waker};

pub(super) struct User {
    shared: Arc<Shared>,
    number: usize,
    purpose: Purpose,
    depth: usize,
    in_flight: usize,
}

impl User {
    pub(super) fn new(shared: &Arc<Shared>, purpose: Purpose, depth: usize) -> Result<Self> {
        let number = shared.join()?;
        Ok(User { shared: Arc::clone(shared), number, purpose, depth, in_flight: 0 })
    }
}

impl Queue for User {
    fn push(&mut self, op: Op) -> Result<(), Op> {
        if self.in_flight == self.depth {
            return Err(op);
        }
        self.in_flight += 1;
        let pushed = Pushed { user: self.number, purpose: self.purpose, op };
        self.shared.lock().schedule.push(pushed);
        Ok(())
    }

    fn kick(&mut self) {
        let mut state = self.shared.lock();
        self.shared.advance(&mut state, self.number);
    }

    fn reap(&mut self, done: &mut Vec<Done>) {
        let mut state = self.shared.lock();
        self.shared.advance(&mut state, self.number);
        let mail = state.mail(self.number);
        self.in_flight -= mail.done.len();
        done.append(&mut mail.done);
    }

    fn wait(&mut self, timeout: Option<Duration>) {
        self.shared.wait(self.number, self.in_flight > 0, timeout);
    }

    fn waker(&self) -> Waker {
        let (shared, number) = (Arc::clone(&self.shared), self.number);
        Waker::new(move || shared.wake(number))
    }

    fn in_flight(&self) -> usize {
        self.in_flight
    }

    fn depth(&self) -> usize {
        self.depth
    }
}

impl Drop for User {
    /// Waits for what is in flight.
    fn drop(&mut self) {
        let mut done = Vec::new();
        while self.in_flight > 0 {
            self.wait(None);
            self.reap(&mut done);
        }
        self.shared.lock().leave(self.number);
    }
}
