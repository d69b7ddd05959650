//! Deferred replies that are finished, on their way to the kernel.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use defuse_fs::{Errno, Result};
use rustix::event::{EventfdFlags, eventfd};

use super::{ThreadRing, UringEntry};
use crate::transport::errno;

/// Submissions at a time.
const BATCH: usize = 64;
/// The number of the wait for the event; entries count from 1.
const EVENT: u64 = 0;

/// Entries with a finished answer that no worker's ring can take: see [`crate::transport::uring`].
pub(crate) struct FinishedAnswers {
    finished: Mutex<Vec<UringEntry>>,
    /// Wakes the thread in [`run`](FinishedAnswers::run).
    event: Arc<OwnedFd>,
    keeps_entries: bool,
    closed: AtomicBool,
}

impl FinishedAnswers {
    /// Creates the queue. With `keeps_entries`, the data of a WRITE may be needed after its handler
    /// has returned.
    pub(crate) fn new(keeps_entries: bool) -> Result<Self> {
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(errno)?;
        Ok(FinishedAnswers {
            finished: Mutex::default(),
            event: Arc::new(event),
            keeps_entries,
            closed: AtomicBool::new(false),
        })
    }

    pub(super) fn keeps_entries(&self) -> bool {
        self.keeps_entries
    }

    /// Hands the answer in `entry` to the kernel. From any thread, at any time.
    ///
    /// # Errors
    ///
    /// ENOTCONN after the session's end.
    pub(crate) fn hand_over(&self, entry: UringEntry) -> Result<()> {
        if self.closed.load(Ordering::Acquire) {
            return Err(Errno::ENOTCONN);
        }
        self.lock().push(entry);
        self.wake();
        Ok(())
    }

    /// Ends [`run`](FinishedAnswers::run).
    pub(crate) fn close(&self) {
        self.closed.store(true, Ordering::Release);
        self.wake();
        self.lock().clear();
    }

    fn wake(&self) {
        // The write fails only if the count is near its maximum, and then the thread has already
        // been woken.
        let _ = rustix::io::write(&*self.event, &1_u64.to_ne_bytes());
    }

    /// Hands answers over until the session ends. The entries then have to take requests on this
    /// thread's ring, which `received` gets: it must not sleep.
    pub(crate) fn run(&self, device: &Arc<OwnedFd>, received: impl Fn(UringEntry)) -> Result<()> {
        let mut ring = ThreadRing::new(device, BATCH as u32)?;
        let mut away = HashMap::new();
        let mut next = EVENT + 1;
        ring.watch(&self.event, EVENT)?;
        while !self.closed.load(Ordering::Acquire) {
            match ring.submit_and_wait() {
                Ok(()) | Err(Errno::EINTR | Errno::EAGAIN) => {}
                Err(errno) => return Err(errno),
            }
            while let Some(completed) = ring.next_completion() {
                if completed.key == EVENT {
                    let _ = rustix::io::read(&*self.event, &mut [0; 8][..]);
                    ring.watch(&self.event, EVENT)?;
                } else if let Some(entry) = away.remove(&completed.key)
                    && completed.result >= 0
                {
                    received(entry);
                }
            }
            for entry in std::mem::take(&mut *self.lock()) {
                while ring.commit(&entry, next).is_err() {
                    ring.submit()?;
                }
                away.insert(next, entry);
                next += 1;
            }
        }
        Ok(())
    }

    fn lock(&self) -> MutexGuard<'_, Vec<UringEntry>> {
        self.finished.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}
