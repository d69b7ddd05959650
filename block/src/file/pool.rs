//! The threads that perform the operations of one device.
//!
//! Threads are started when there is work for them, up to a bound, and end with the device. A
//! process that may start no thread performs its operations itself.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;

use super::state::FileDeviceState;
use crate::outbox::CompletionOutbox;
use crate::{BlockCompletion, BlockOp, signals};

/// Threads at most: operations of one device that are under way at the same time.
const MOST: usize = 16;

/// Bytes of the stack of a thread. It makes system calls.
const STACK: usize = 256 << 10;

/// An operation for a thread.
pub(super) struct PoolJob {
    pub(super) open: Arc<FileDeviceState>,
    pub(super) outbox: Arc<CompletionOutbox>,
    pub(super) op: BlockOp,
}

impl PoolJob {
    /// Performs the operation, and reports its end.
    pub(super) fn perform(self) {
        let PoolJob { open, outbox, op: BlockOp { tag, mut kind } } = self;
        let result = open.perform(&mut kind);
        // The reader of the completion may be the last user of the device, whose lock must then end
        // at once.
        drop(open);
        outbox.answer(BlockCompletion { tag, result, memory: kind.into_memory() });
    }
}

#[derive(Default)]
pub(super) struct IoThreadPool(Arc<IoThreadPoolShared>);

#[derive(Default)]
struct IoThreadPoolShared {
    state: Mutex<IoThreadPoolState>,
    /// There is a job, or the end.
    changed: Condvar,
}

#[derive(Default)]
struct IoThreadPoolState {
    jobs: VecDeque<PoolJob>,
    threads: usize,
    /// Threads that sleep, or were woken and have not taken their job yet.
    idle: usize,
    ends: bool,
}

impl IoThreadPool {
    /// Hands a job to a thread. Returns it where there is no thread, and none can be started.
    pub(super) fn give(&self, job: PoolJob) -> Option<PoolJob> {
        let mut state = self.0.lock();
        if state.jobs.len() >= state.idle && state.threads < MOST {
            state.threads += usize::from(self.start());
        }
        if state.threads == 0 {
            return Some(job);
        }
        state.jobs.push_back(job);
        drop(state);
        self.0.changed.notify_one();
        None
    }

    fn start(&self) -> bool {
        let shared = Arc::clone(&self.0);
        let thread = thread::Builder::new().name("defuse-io".to_owned()).stack_size(STACK);
        let started = thread.spawn(move || {
            signals::take_none();
            shared.serve();
        });
        if let Err(error) = &started {
            log::debug!("no further thread for I/O: {error}");
        }
        started.is_ok()
    }
}

impl IoThreadPoolShared {
    fn lock(&self) -> MutexGuard<'_, IoThreadPoolState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn serve(&self) {
        let mut state = self.lock();
        loop {
            if let Some(job) = state.jobs.pop_front() {
                drop(state);
                job.perform();
                state = self.lock();
                continue;
            }
            if state.ends {
                return;
            }
            state.idle += 1;
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
            state.idle -= 1;
        }
    }
}

impl Drop for IoThreadPool {
    /// Ends the pool. The last queue has gone, and with it the last job. The threads end by
    /// themselves.
    fn drop(&mut self) {
        self.0.lock().ends = true;
        self.0.changed.notify_all();
    }
}
