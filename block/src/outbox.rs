//! Completions on their way from the thread that performed an operation to the queue that it was
//! pushed to.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use rustix::event::{EventfdFlags, eventfd};

use crate::{BlockCompletion, BlockOp, Errno, QueueParker};

/// The completions of one queue.
#[derive(Debug, Default)]
pub(crate) struct CompletionOutbox {
    done: Mutex<Vec<BlockCompletion>>,
    parker: QueueParker,
    /// An eventfd that is readable while there are completions. It is made at the first request.
    event_fd: OnceLock<Option<OwnedFd>>,
}

impl CompletionOutbox {
    /// Adds a completion, and wakes the user of the queue.
    pub(crate) fn answer(&self, done: BlockCompletion) {
        let mut all = self.lock();
        all.push(done);
        if let Some(event_fd) = self.event_fd() {
            // The counter is full only after 2^64 - 2 completions that were not taken.
            let _ = rustix::io::write(event_fd, &1_u64.to_ne_bytes());
        }
        drop(all);
        self.parker.unpark();
    }

    /// Answers an operation that no device has seen.
    pub(crate) fn refuse(&self, BlockOp { tag, kind }: BlockOp) {
        self.answer(BlockCompletion { tag, result: Err(Errno::IO), memory: kind.into_memory() });
    }

    /// Moves all completions to `done`, and returns their number.
    pub(crate) fn take(&self, done: &mut Vec<BlockCompletion>) -> usize {
        let mut all = self.lock();
        let count = all.len();
        if let (1.., Some(event_fd)) = (count, self.event_fd()) {
            let _ = rustix::io::read(event_fd, &mut [0; 8]);
        }
        done.append(&mut all);
        count
    }

    /// Sleeps until there is a completion, [`wake`](CompletionOutbox::wake) is called, or `timeout`
    /// is over. Returns early now and then.
    pub(crate) fn wait(&self, timeout: Option<Duration>) {
        if self.lock().is_empty() {
            self.parker.park(timeout);
        }
    }

    /// Ends the present or the next wait.
    pub(crate) fn wake(&self) {
        self.parker.unpark();
    }

    /// A descriptor that is readable while there are completions; `None` where the process can have
    /// no more descriptors.
    pub(crate) fn completion_fd(&self) -> Option<BorrowedFd<'_>> {
        let all = self.lock();
        let event_fd = self.event_fd.get_or_init(|| {
            let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
            let event_fd = eventfd(u32::from(!all.is_empty()), flags);
            event_fd.inspect_err(|errno| log::debug!("no eventfd: {errno}")).ok()
        });
        event_fd.as_ref().map(AsFd::as_fd)
    }

    fn event_fd(&self) -> Option<&OwnedFd> {
        self.event_fd.get()?.as_ref()
    }

    fn lock(&self) -> MutexGuard<'_, Vec<BlockCompletion>> {
        self.done.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
