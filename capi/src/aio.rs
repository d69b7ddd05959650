//! The contexts of operations that finish later: bounded queues, and the threads that empty them.

use std::cell::Cell;
use std::collections::{BTreeMap, VecDeque};
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use defuse_direct::Stop;
use defuse_fs::{Errno, Result};
use rustix::event::{EventfdFlags, eventfd};

use crate::calls::{defuse_aio_callback, defuse_aio_event};

/// Most operations of a context.
const CAPACITY_MAX: usize = 65_536;
/// Most threads of a context.
const THREADS_MAX: usize = 1024;

/// What an operation does; how many bytes it moved.
pub type Work = Box<dyn FnOnce() -> defuse_direct::Result<usize, Stop> + Send>;

/// An operation that is to be done.
pub struct Job {
    data: u64,
    callback: defuse_aio_callback,
    work: Work,
}

impl Job {
    /// An operation, and who is told of its end.
    pub fn new(data: u64, callback: defuse_aio_callback, work: Work) -> Self {
        Job { data, callback, work }
    }
}

thread_local! {
    /// This thread belongs to a context.
    static WORKS: Cell<bool> = const { Cell::new(false) };
}

/// All contexts of the process, by their numbers.
#[derive(Default)]
pub struct Contexts {
    all: Mutex<BTreeMap<i32, Arc<Context>>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Contexts {
    /// A new context; its number. `EINVAL`, `EMFILE`.
    pub fn create(&self, capacity: usize, threads: usize) -> Result<i32> {
        if !(1..=CAPACITY_MAX).contains(&capacity) || threads > THREADS_MAX {
            return Err(Errno::EINVAL);
        }
        let threads = match threads {
            0 => std::thread::available_parallelism().map_or(4, |count| count.get() * 2).max(4),
            threads => threads,
        };
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let eventfd = eventfd(0, flags).map_err(|error| Errno::from_raw(error.raw_os_error()))?;
        let context = Context {
            capacity,
            threads,
            eventfd,
            process: std::process::id(),
            queue: Mutex::default(),
            work: Condvar::new(),
            ended: Condvar::new(),
        };
        let mut all = lock(&self.all);
        let number = (0..).find(|number| !all.contains_key(number)).ok_or(Errno::EMFILE)?;
        all.insert(number, Arc::new(context));
        Ok(number)
    }

    /// A context; `EINVAL` where there is none of this number in this process.
    pub fn get(&self, number: i32) -> Result<Arc<Context>> {
        let context = lock(&self.all).get(&number).cloned().ok_or(Errno::EINVAL)?;
        if context.process != std::process::id() { Err(Errno::EINVAL) } else { Ok(context) }
    }

    /// Ends a context. `EINVAL`, `EDEADLK` on one of its own threads.
    pub fn destroy(&self, number: i32) -> Result<()> {
        if WORKS.get() {
            return Err(Errno::EDEADLK);
        }
        let context = self.get(number)?;
        lock(&self.all).remove(&number).ok_or(Errno::EINVAL)?;
        context.end();
        Ok(())
    }
}

#[derive(Default)]
struct Queue {
    waiting: VecDeque<Job>,
    /// The data of those that have begun.
    running: Vec<u64>,
    events: VecDeque<defuse_aio_event>,
    workers: usize,
    idle: usize,
    ending: bool,
}

impl Queue {
    fn len(&self) -> usize {
        self.waiting.len() + self.running.len() + self.events.len()
    }
}

/// Operations under way, and what has become of others.
pub struct Context {
    capacity: usize,
    threads: usize,
    /// Readable exactly while there are events; written and read with the queue held.
    eventfd: OwnedFd,
    process: u32,
    queue: Mutex<Queue>,
    /// There is an operation to be done, or all is to end.
    work: Condvar,
    /// There is an event, or a worker has gone.
    ended: Condvar,
}

impl Context {
    /// Takes an operation. `EAGAIN` where there is no room, or no thread can be started.
    pub fn submit(self: &Arc<Self>, job: Job) -> Result<()> {
        let mut queue = lock(&self.queue);
        if queue.ending {
            return Err(Errno::EINVAL);
        }
        if queue.len() >= self.capacity {
            return Err(Errno::EAGAIN);
        }
        if queue.idle <= queue.waiting.len() && queue.workers < self.threads {
            let context = Arc::clone(self);
            let thread = std::thread::Builder::new().name("defuse-aio".to_owned());
            match thread.spawn(move || context.serve()) {
                Ok(_) => queue.workers += 1,
                Err(_) if queue.workers == 0 => return Err(Errno::EAGAIN),
                Err(_) => {}
            }
        }
        queue.waiting.push_back(job);
        self.work.notify_one();
        Ok(())
    }

    /// What a worker does until the end.
    fn serve(&self) {
        crate::memory::block_signals();
        WORKS.set(true);
        let mut queue = lock(&self.queue);
        loop {
            let Some(job) = queue.waiting.pop_front() else {
                if queue.ending {
                    break;
                }
                queue.idle += 1;
                queue = self.work.wait(queue).unwrap_or_else(PoisonError::into_inner);
                queue.idle -= 1;
                continue;
            };
            queue.running.push(job.data);
            drop(queue);
            let work = std::panic::AssertUnwindSafe(job.work);
            // The file is let go with the work, before anybody hears of the end.
            let result =
                std::panic::catch_unwind(|| { work }.0()).unwrap_or(Err(Errno::EIO.into()));
            let result = match result {
                Ok(count) => count as i64,
                Err(stop) => -i64::from(stop.errno().raw()),
            };
            queue = self.told(defuse_aio_event { data: job.data, result }, job.callback, true);
        }
        queue.workers -= 1;
        self.ended.notify_all();
    }

    /// Tells of an end, and takes what had `begun` off the list.
    fn told(
        &self,
        event: defuse_aio_event,
        callback: defuse_aio_callback,
        begun: bool,
    ) -> MutexGuard<'_, Queue> {
        if let Some(callback) = callback {
            callback(&event);
        }
        let mut queue = lock(&self.queue);
        if begun && let Some(place) = queue.running.iter().position(|&data| data == event.data) {
            queue.running.swap_remove(place);
        }
        if callback.is_none() {
            if queue.events.is_empty() {
                // It cannot be full: it is read before it is written again.
                let _ = rustix::io::write(&self.eventfd, &1u64.to_ne_bytes());
            }
            queue.events.push_back(event);
            self.ended.notify_all();
        }
        queue
    }

    /// Takes up to `max` events, waiting for at least `min`, but no longer than `limit`. `EDEADLK` on
    /// a thread of a context, which would wait for itself.
    pub fn collect(
        &self,
        min: usize,
        max: usize,
        limit: Option<Duration>,
    ) -> Result<Vec<defuse_aio_event>> {
        if WORKS.get() && min > 0 {
            return Err(Errno::EDEADLK);
        }
        // A time that no clock reaches is for ever.
        let end = limit.and_then(|limit| Instant::now().checked_add(limit));
        let mut queue = lock(&self.queue);
        while queue.events.len() < min && !queue.ending {
            let Some(end) = end else {
                queue = self.ended.wait(queue).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            let waited = self.ended.wait_timeout(queue, left);
            queue = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        let count = queue.events.len().min(max);
        let found: Vec<_> = queue.events.drain(..count).collect();
        if queue.events.is_empty() && !found.is_empty() {
            let _ = rustix::io::read(&self.eventfd, &mut [0; 8]);
        }
        Ok(found)
    }

    /// Takes an operation back. `EINPROGRESS`, `ENOENT`.
    pub fn cancel(&self, data: u64) -> Result<()> {
        let mut queue = lock(&self.queue);
        let Some(place) = queue.waiting.iter().position(|job| job.data == data) else {
            let begun = queue.running.contains(&data);
            return Err(if begun { Errno::EINPROGRESS } else { Errno::ENOENT });
        };
        let job = queue.waiting.remove(place);
        drop(queue);
        if let Some(job) = job {
            self.canceled(job);
        }
        Ok(())
    }

    fn canceled(&self, job: Job) {
        let event = defuse_aio_event { data: job.data, result: -i64::from(Errno::ECANCELED.raw()) };
        drop(job.work);
        drop(self.told(event, job.callback, false));
    }

    /// The descriptor that is readable while there are events.
    pub fn eventfd(&self) -> i32 {
        self.eventfd.as_raw_fd()
    }

    fn end(&self) {
        let mut queue = lock(&self.queue);
        queue.ending = true;
        let waiting = std::mem::take(&mut queue.waiting);
        drop(queue);
        self.work.notify_all();
        self.ended.notify_all();
        waiting.into_iter().for_each(|job| self.canceled(job));
        let mut queue = lock(&self.queue);
        while queue.workers > 0 {
            queue = self.ended.wait(queue).unwrap_or_else(PoisonError::into_inner);
        }
    }
}
