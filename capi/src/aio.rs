//! The contexts of operations that finish later, by their numbers.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use defuse_direct::{Outcome, Queue, QueueOptions};
use defuse_fs::{Errno, Result};

/// What an operation gives: bytes, or a negative number of an error.
pub type Context = Queue<i64>;

/// All contexts of the process.
#[derive(Default)]
pub struct Contexts {
    /// Each with the process that made it: its threads are not in a child.
    all: Mutex<BTreeMap<i32, (Arc<Context>, u32)>>,
}

impl Contexts {
    fn all(&self) -> MutexGuard<'_, BTreeMap<i32, (Arc<Context>, u32)>> {
        self.all.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A new context; its number. `EINVAL`, `EMFILE`.
    pub fn create(&self, capacity: usize, threads: usize) -> Result<i32> {
        let on_start = crate::memory::block_signals;
        let context = Context::new(QueueOptions { capacity, threads, on_start })?;
        let mut all = self.all();
        let number = (0..).find(|number| !all.contains_key(number)).ok_or(Errno::EMFILE)?;
        all.insert(number, (Arc::new(context), std::process::id()));
        Ok(number)
    }

    /// A context; `EINVAL` where there is none of this number in this process.
    pub fn get(&self, number: i32) -> Result<Arc<Context>> {
        match self.all().get(&number) {
            Some((context, process)) if *process == std::process::id() => Ok(Arc::clone(context)),
            _ => Err(Errno::EINVAL),
        }
    }

    /// Ends a context. `EINVAL`, `EDEADLK` on one of its own threads.
    pub fn destroy(&self, number: i32) -> Result<()> {
        self.get(number)?.end()?;
        self.all().remove(&number).map(drop).ok_or(Errno::EINVAL)
    }
}

/// The result of an event.
pub fn result(outcome: Outcome<i64>) -> i64 {
    match outcome {
        Outcome::Done(result) => result,
        Outcome::Canceled => failed(Errno::ECANCELED),
        Outcome::Panicked => failed(Errno::EIO),
    }
}

/// An error as the result of an event.
pub fn failed(errno: Errno) -> i64 {
    -i64::from(errno.raw())
}
