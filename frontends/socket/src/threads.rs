//! Threads that serve connections. They are reused: each program that a run starts begins one
//! connection and ends another.

use std::collections::VecDeque;
use std::io;
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use crate::server::lock;

/// The work of a thread.
type ThreadJob = Box<dyn FnOnce() + Send>;

/// Threads that are kept without work.
const MOST_FREE: usize = 4;
/// The time for which a thread is kept without work.
const KEPT: Duration = Duration::from_secs(1);
/// Their stacks, in bytes.
const STACK: usize = 256 * 1024;

/// The threads of a server.
#[derive(Default)]
pub(crate) struct ServerThreads {
    state: Mutex<ServerThreadState>,
    changed: Condvar,
}

#[derive(Default)]
struct ServerThreadState {
    /// The number of threads without work, and without a job that is meant for them.
    free: usize,
    /// For threads that are no longer free.
    jobs: VecDeque<ThreadJob>,
    is_over: bool,
}

impl ServerThreads {
    /// Runs `job` on a free thread, or on a new one.
    ///
    /// # Errors
    ///
    /// The errors of pthread_create(3).
    pub(crate) fn run(self: &Arc<Self>, job: ThreadJob) -> io::Result<()> {
        {
            let mut state = lock(&self.state);
            if state.free > 0 {
                state.free -= 1;
                state.jobs.push_back(job);
                self.changed.notify_one();
                return Ok(());
            }
        }
        let threads = Arc::clone(self);
        let work = move || {
            let mut next = Some(job);
            while let Some(job) = next {
                job();
                next = threads.next();
            }
        };
        let thread = std::thread::Builder::new().name("defuse-peer".to_owned());
        thread.stack_size(STACK).spawn(work).map(drop)
    }

    /// The next job of the calling thread. `None` if it is not needed.
    fn next(&self) -> Option<ThreadJob> {
        let until = Instant::now() + KEPT;
        let mut state = lock(&self.state);
        if state.is_over || state.free >= MOST_FREE {
            return None;
        }
        state.free += 1;
        loop {
            if let Some(job) = state.jobs.pop_front() {
                return Some(job);
            }
            let left = until.saturating_duration_since(Instant::now());
            if state.free > 0 && (state.is_over || left.is_zero()) {
                state.free -= 1;
                return None;
            }
            let waited = self.changed.wait_timeout(state, left.max(Duration::from_millis(1)));
            state = waited.unwrap_or_else(|poisoned| poisoned.into_inner()).0;
        }
    }

    /// Ends the threads without work.
    pub(crate) fn end(&self) {
        lock(&self.state).is_over = true;
        self.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;
    use std::sync::mpsc::{Sender, channel};
    use std::thread::ThreadId;

    use super::*;

    fn tell(threads: &Arc<ServerThreads>, of: &Sender<ThreadId>) {
        let of = of.clone();
        threads.run(Box::new(move || of.send(std::thread::current().id()).unwrap())).unwrap();
    }

    #[test]
    fn a_job_after_the_other_has_the_same_thread_and_jobs_at_once_have_others() {
        let threads = Arc::<ServerThreads>::default();
        let (sender, ids) = channel();
        let free = |count| {
            while lock(&threads.state).free != count {
                std::thread::yield_now();
            }
        };
        let mut seen = HashSet::new();
        for _ in 0..20 {
            tell(&threads, &sender);
            seen.insert(ids.recv().unwrap());
            free(1);
        }
        assert_eq!(seen.len(), 1);
        let gate = Arc::new(std::sync::Barrier::new(8));
        for _ in 0..8 {
            let (gate, sender) = (Arc::clone(&gate), sender.clone());
            let job = move || {
                gate.wait();
                sender.send(std::thread::current().id()).unwrap();
            };
            threads.run(Box::new(job)).unwrap();
        }
        assert_eq!(ids.iter().take(8).collect::<HashSet<_>>().len(), 8);
        free(MOST_FREE);
        threads.end();
        free(0);
        tell(&threads, &sender);
        assert!(!seen.contains(&ids.recv().unwrap()));
    }
}
