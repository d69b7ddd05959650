//! The contexts of asynchronous operations, by number.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use defuse_direct::{JobOutcome, JobQueue, QueueOptions};
use defuse_fs::{Errno, Result};

/// A context. Its jobs return a number of bytes, or a negative error number.
pub type AioContext = JobQueue<i64>;

/// All contexts of the process.
#[derive(Default)]
pub struct AioContexts {
    /// Each context with the process that created it: its threads do not exist in a child process.
    all: Mutex<BTreeMap<i32, (Arc<AioContext>, u32)>>,
}

impl AioContexts {
    fn lock_contexts(&self) -> MutexGuard<'_, BTreeMap<i32, (Arc<AioContext>, u32)>> {
        self.all.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Creates a context and returns its number. Fails with `EINVAL` or `EMFILE`.
    pub fn create(&self, capacity: usize, threads: usize) -> Result<i32> {
        let on_start = crate::memory::block_signals;
        let context = AioContext::new(QueueOptions { capacity, threads, on_start })?;
        let mut all = self.lock_contexts();
        let number = (0..).find(|number| !all.contains_key(number)).ok_or(Errno::EMFILE)?;
        all.insert(number, (Arc::new(context), std::process::id()));
        Ok(number)
    }

    /// The context of a number. Fails with `EINVAL` if this process has none.
    pub fn get(&self, number: i32) -> Result<Arc<AioContext>> {
        match self.lock_contexts().get(&number) {
            Some((context, process)) if *process == std::process::id() => Ok(Arc::clone(context)),
            _ => Err(Errno::EINVAL),
        }
    }

    /// Destroys a context. Fails with `EINVAL`, and with `EDEADLK` on one of its own threads.
    pub fn destroy(&self, number: i32) -> Result<()> {
        self.get(number)?.end()?;
        self.lock_contexts().remove(&number).map(drop).ok_or(Errno::EINVAL)
    }
}

/// The result of an event.
pub fn result(outcome: JobOutcome<i64>) -> i64 {
    match outcome {
        JobOutcome::Done(result) => result,
        JobOutcome::Canceled => encode_error(Errno::ECANCELED),
        JobOutcome::Panicked => encode_error(Errno::EIO),
    }
}

/// The result of an event that reports an error.
pub fn encode_error(errno: Errno) -> i64 {
    -i64::from(errno.raw())
}
