//! A queue with worker threads. It allows several calls in progress on file systems that answer one
//! call at a time.

use std::cell::Cell;
use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::panic::AssertUnwindSafe;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use defuse_fs::{Errno, Result};
use defuse_process::ProcessOwner;
use rustix::event::{EventfdFlags, eventfd};

use crate::node::lock;

/// Maximum capacity of a queue.
const CAPACITY_MAX: usize = 65_536;
/// Maximum number of threads of a queue.
const THREADS_MAX: usize = 1024;

/// Options of a [`JobQueue`].
#[derive(Clone, Copy, Debug)]
pub struct QueueOptions {
    /// Maximum number of jobs that wait, run, or have ended and are not yet collected: 1 to 65,536.
    pub capacity: usize,
    /// Maximum number of threads, up to 1024, which are started on demand. 0 means twice the number
    /// of processors, but at least 4.
    pub threads: usize,
    /// Called on each thread before its first job.
    pub on_start: fn(),
}

impl Default for QueueOptions {
    fn default() -> Self {
        QueueOptions { capacity: 1024, threads: 0, on_start: || {} }
    }
}

/// The outcome of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum JobOutcome<T> {
    /// The job returned this result.
    Done(T),
    /// The job was canceled before it began.
    Canceled,
    /// The job panicked.
    Panicked,
}

/// Receives the outcome of a job, on a thread of the queue or on the thread that canceled the job.
pub type JobCallback<T> = Box<dyn FnOnce(u64, JobOutcome<T>) + Send>;

/// Runs jobs on its own threads. The caller chooses a number for each job. Dropping the queue
/// cancels the waiting jobs and waits for the running ones.
pub struct JobQueue<T: Send + 'static> {
    shared: Arc<JobQueueShared<T>>,
}

thread_local! {
    /// True on the threads of a queue.
    static WORKS: Cell<bool> = const { Cell::new(false) };
}

struct QueuedJob<T> {
    data: u64,
    then: Option<JobCallback<T>>,
    work: Box<dyn FnOnce() -> T + Send>,
}

struct JobQueueState<T> {
    waiting: VecDeque<QueuedJob<T>>,
    /// The numbers of the running jobs.
    running: Vec<u64>,
    ended: VecDeque<(u64, JobOutcome<T>)>,
    workers: usize,
    idle: usize,
    ending: bool,
}

impl<T> JobQueueState<T> {
    fn len(&self) -> usize {
        self.waiting.len() + self.running.len() + self.ended.len()
    }
}

struct JobQueueShared<T> {
    options: QueueOptions,
    /// The process that has the threads.
    owner: ProcessOwner,
    /// Readable exactly while outcomes are waiting to be collected. Accessed only with `state`
    /// locked.
    eventfd: OwnedFd,
    state: Mutex<JobQueueState<T>>,
    /// Signalled when a job arrives, or when the queue ends.
    work: Condvar,
    /// Signalled when a job has ended, or a worker has exited.
    change: Condvar,
}

impl<T: Send + 'static> JobQueue<T> {
    /// Creates an empty queue. Fails with `EINVAL` for options out of range, and with the errors of
    /// eventfd(2).
    pub fn new(mut options: QueueOptions) -> Result<Self> {
        if !(1..=CAPACITY_MAX).contains(&options.capacity) || options.threads > THREADS_MAX {
            return Err(Errno::EINVAL);
        }
        if options.threads == 0 {
            options.threads = (defuse_probe::processors() * 2).clamp(4, THREADS_MAX);
        }
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let eventfd = eventfd(0, flags).map_err(|error| Errno::from_raw(error.raw_os_error()))?;
        let state = JobQueueState {
            waiting: VecDeque::new(),
            running: Vec::new(),
            ended: VecDeque::new(),
            workers: 0,
            idle: 0,
            ending: false,
        };
        let (work, change) = (Condvar::new(), Condvar::new());
        let state = Mutex::new(state);
        let owner = ProcessOwner::current();
        Ok(JobQueue {
            shared: Arc::new(JobQueueShared { options, owner, eventfd, state, work, change }),
        })
    }

    /// Adds a job. Its outcome goes to `then`, or to [`collect`](JobQueue::collect) if `then` is
    /// `None`. Fails with `EAGAIN` if the queue is full or no thread can be started, and with
    /// `EINVAL` after [`end`](JobQueue::end), and in a child of fork(2), which has none of the
    /// threads.
    pub fn submit(
        &self,
        data: u64,
        work: Box<dyn FnOnce() -> T + Send>,
        then: Option<JobCallback<T>>,
    ) -> Result<()> {
        self.shared.check_process()?;
        let mut state = lock(&self.shared.state);
        if state.ending {
            return Err(Errno::EINVAL);
        }
        if state.len() >= self.shared.options.capacity {
            return Err(Errno::EAGAIN);
        }
        if state.idle <= state.waiting.len() && state.workers < self.shared.options.threads {
            let shared = Arc::clone(&self.shared);
            let thread = std::thread::Builder::new().name("defuse-queue".to_owned());
            match thread.spawn(move || shared.serve()) {
                Ok(_) => state.workers += 1,
                Err(_) if state.workers == 0 => return Err(Errno::EAGAIN),
                Err(_) => {}
            }
        }
        state.waiting.push_back(QueuedJob { data, then, work });
        self.shared.work.notify_one();
        Ok(())
    }

    /// Takes up to `max` outcomes. Waits until there are `min`, but no longer than `limit`. Fails
    /// with `EDEADLK` on a thread of a queue, which could wait for itself, and with `EINVAL` in a
    /// child of fork(2).
    pub fn collect(
        &self,
        min: usize,
        max: usize,
        limit: Option<Duration>,
    ) -> Result<Vec<(u64, JobOutcome<T>)>> {
        if WORKS.get() && min > 0 {
            return Err(Errno::EDEADLK);
        }
        self.shared.check_process()?;
        // A time beyond the range of the clock means no limit.
        let until = limit.and_then(|limit| Instant::now().checked_add(limit));
        let mut state = lock(&self.shared.state);
        while state.ended.len() < min && !state.ending {
            let Some(until) = until else {
                state = wait(&self.shared.change, state);
                continue;
            };
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            let waited = self.shared.change.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        let count = state.ended.len().min(max);
        let found: Vec<_> = state.ended.drain(..count).collect();
        if state.ended.is_empty() && !found.is_empty() {
            let _ = rustix::io::read(&self.shared.eventfd, &mut [0; 8]);
        }
        Ok(found)
    }

    /// Cancels a waiting job; its outcome is [`JobOutcome::Canceled`]. Fails with `EINPROGRESS` if
    /// it has begun, and with `ENOENT` if there is no job of this number.
    pub fn cancel(&self, data: u64) -> Result<()> {
        self.shared.check_process()?;
        let mut state = lock(&self.shared.state);
        let place = state.waiting.iter().position(|job| job.data == data);
        let Some(job) = place.and_then(|place| state.waiting.remove(place)) else {
            let begun = state.running.contains(&data);
            return Err(if begun { Errno::EINPROGRESS } else { Errno::ENOENT });
        };
        drop(state);
        self.shared.cancel_job(job);
        Ok(())
    }

    /// A descriptor for poll(2) and select(2): readable while outcomes can be collected. Callers
    /// must not read from it.
    pub fn eventfd(&self) -> BorrowedFd<'_> {
        self.shared.eventfd.as_fd()
    }

    /// Cancels the waiting jobs, waits for the running ones, and refuses new ones. Fails with
    /// `EDEADLK` on a thread of a queue, which could wait for itself, and with `EINVAL` in a child
    /// of fork(2).
    pub fn end(&self) -> Result<()> {
        if WORKS.get() {
            return Err(Errno::EDEADLK);
        }
        self.shared.check_process()?;
        let mut state = lock(&self.shared.state);
        state.ending = true;
        let waiting = std::mem::take(&mut state.waiting);
        drop(state);
        self.shared.work.notify_all();
        self.shared.change.notify_all();
        waiting.into_iter().for_each(|job| self.shared.cancel_job(job));
        let mut state = lock(&self.shared.state);
        while state.workers > 0 {
            state = wait(&self.shared.change, state);
        }
        Ok(())
    }
}

impl<T: Send + 'static> Drop for JobQueue<T> {
    fn drop(&mut self) {
        if self.shared.check_process().is_ok() && self.end().is_err() {
            // A worker cannot wait for itself. The threads then exit without anyone waiting for
            // them.
            lock(&self.shared.state).ending = true;
            self.shared.work.notify_all();
        }
    }
}

impl<T: Send + 'static> std::fmt::Debug for JobQueue<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Queue").field("options", &self.shared.options).finish_non_exhaustive()
    }
}

fn wait<'a, T>(condition: &Condvar, guard: MutexGuard<'a, T>) -> MutexGuard<'a, T> {
    condition.wait(guard).unwrap_or_else(PoisonError::into_inner)
}

impl<T> JobQueueShared<T> {
    /// Fails with `EINVAL` in a child of the process that has the threads.
    fn check_process(&self) -> Result<()> {
        if self.owner.is_here() { Ok(()) } else { Err(Errno::EINVAL) }
    }

    /// The loop of a worker.
    fn serve(&self) {
        (self.options.on_start)();
        WORKS.set(true);
        let mut state = lock(&self.state);
        loop {
            let Some(QueuedJob { data, then, work }) = state.waiting.pop_front() else {
                if state.ending {
                    break;
                }
                state.idle += 1;
                state = wait(&self.work, state);
                state.idle -= 1;
                continue;
            };
            state.running.push(data);
            drop(state);
            // The job drops its captures before its outcome is reported.
            let result = std::panic::catch_unwind(AssertUnwindSafe(work));
            state = self.complete_job(
                data,
                result.map_or(JobOutcome::Panicked, JobOutcome::Done),
                then,
            );
            if let Some(place) = state.running.iter().position(|&running| running == data) {
                state.running.swap_remove(place);
            }
        }
        state.workers -= 1;
        self.change.notify_all();
    }

    fn cancel_job(&self, job: QueuedJob<T>) {
        drop(job.work);
        drop(self.complete_job(job.data, JobOutcome::Canceled, job.then));
    }

    fn complete_job(
        &self,
        data: u64,
        outcome: JobOutcome<T>,
        then: Option<JobCallback<T>>,
    ) -> MutexGuard<'_, JobQueueState<T>> {
        if let Some(then) = then {
            // A panic of the callback must not end the thread.
            let _ = std::panic::catch_unwind(AssertUnwindSafe(|| then(data, outcome)));
            return lock(&self.state);
        }
        let mut state = lock(&self.state);
        if state.ended.is_empty() {
            // The counter cannot overflow: it is read before it is written again.
            let _ = rustix::io::write(&self.eventfd, &1u64.to_ne_bytes());
        }
        state.ended.push_back((data, outcome));
        self.change.notify_all();
        state
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use super::*;

    fn queue(capacity: usize, threads: usize) -> JobQueue<u64> {
        JobQueue::new(QueueOptions { capacity, threads, ..Default::default() }).unwrap()
    }

    #[test]
    fn several_pieces_of_work_are_under_way_at_once() {
        let queue = queue(2, 2);
        let (one, other) = (channel(), channel());
        // Each job waits for the other one.
        queue
            .submit(
                1,
                Box::new(move || one.1.recv().map(|()| other.0.send(()).is_ok().into()).unwrap()),
                None,
            )
            .unwrap();
        queue
            .submit(
                2,
                Box::new(move || {
                    one.0.send(()).unwrap();
                    other.1.recv().map(|()| 1).unwrap()
                }),
                None,
            )
            .unwrap();
        let mut ends = queue.collect(2, 2, None).unwrap();
        ends.sort_by_key(|(data, _)| *data);
        assert_eq!(ends, [(1, JobOutcome::Done(1)), (2, JobOutcome::Done(1))]);
    }

    #[test]
    fn a_queue_is_bounded_and_its_work_can_be_taken_back() {
        let queue = queue(2, 1);
        let (started, start) = channel();
        let (go, gate) = channel::<()>();
        let held = move || {
            started.send(()).unwrap();
            gate.recv().map_or(0, |()| 7)
        };
        queue.submit(1, Box::new(held), None).unwrap();
        start.recv().unwrap();
        queue.submit(2, Box::new(|| 8), None).unwrap();
        assert_eq!(queue.submit(3, Box::new(|| 9), None), Err(Errno::EAGAIN));
        assert_eq!(queue.cancel(1), Err(Errno::EINPROGRESS));
        assert_eq!(queue.cancel(3), Err(Errno::ENOENT));
        assert_eq!(queue.cancel(2), Ok(()));
        assert_eq!(queue.collect(1, 5, None).unwrap(), [(2, JobOutcome::Canceled)]);
        assert_eq!(queue.collect(1, 5, Some(Duration::ZERO)).unwrap(), []);
        go.send(()).unwrap();
        assert_eq!(queue.collect(1, 5, None).unwrap(), [(1, JobOutcome::Done(7))]);
    }

    #[test]
    fn panics_are_outcomes_and_no_thread_waits_for_itself() {
        let queue = Arc::new(queue(8, 1));
        queue.submit(1, Box::new(|| panic!("on purpose")), None).unwrap();
        queue.submit(2, Box::new(|| 0), Some(Box::new(|_, _| panic!("on purpose")))).unwrap();
        let inner = Arc::clone(&queue);
        let waits = move || match (inner.collect(1, 1, None), inner.end()) {
            (Err(Errno::EDEADLK), Err(Errno::EDEADLK)) => 1,
            _ => 0,
        };
        queue.submit(3, Box::new(waits), None).unwrap();
        let ends = queue.collect(2, 8, None).unwrap();
        assert_eq!(ends, [(1, JobOutcome::Panicked), (3, JobOutcome::Done(1))]);
        queue.end().unwrap();
        assert_eq!(queue.submit(4, Box::new(|| 0), None), Err(Errno::EINVAL));
    }

    #[test]
    fn options_out_of_range_are_refused() {
        for (capacity, threads) in [(0, 1), (CAPACITY_MAX + 1, 1), (1, THREADS_MAX + 1)] {
            let options = QueueOptions { capacity, threads, ..Default::default() };
            assert_eq!(JobQueue::<()>::new(options).err(), Some(Errno::EINVAL));
        }
    }
}
