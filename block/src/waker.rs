//! Ends a wait on a queue from another thread.

use std::fmt;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

/// Ends the present or the next [`DeviceQueue::wait`](crate::DeviceQueue::wait) of one queue.
#[derive(Clone)]
pub struct QueueWaker(Arc<dyn Fn() + Send + Sync>);

impl QueueWaker {
    /// A waker that calls `wake`.
    pub fn new(wake: impl Fn() + Send + Sync + 'static) -> Self {
        QueueWaker(Arc::new(wake))
    }

    /// Ends the wait.
    pub fn wake(&self) {
        (self.0)();
    }
}

impl fmt::Debug for QueueWaker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Waker")
    }
}

/// A place to sleep for users of queues without a kernel object.
#[derive(Debug, Default)]
pub struct QueueParker {
    woken: Mutex<bool>,
    changed: Condvar,
}

impl QueueParker {
    /// Sleeps until [`unpark`](QueueParker::unpark) was called since the last time, or `timeout` is
    /// over. True if it was called.
    pub fn park(&self, timeout: Option<Duration>) -> bool {
        let woken = self.woken.lock().unwrap_or_else(PoisonError::into_inner);
        let mut woken = match timeout {
            Some(timeout) => {
                let slept = self.changed.wait_timeout_while(woken, timeout, |woken| !*woken);
                slept.unwrap_or_else(PoisonError::into_inner).0
            }
            None => {
                let slept = self.changed.wait_while(woken, |woken| !*woken);
                slept.unwrap_or_else(PoisonError::into_inner)
            }
        };
        std::mem::take(&mut *woken)
    }

    /// Ends the present or the next sleep.
    pub fn unpark(&self) {
        *self.woken.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.changed.notify_all();
    }
}
