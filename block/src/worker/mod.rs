//! A device whose I/O one thread does, near the device.
//!
//! Any number of threads push to queues of a [`Worker`], and a single thread hands all of their operations to a single
//! queue of the device below. It is bound to a processor of the NUMA node that the device is attached to, and registered
//! memory is moved to that node. So buffers, queue and interrupts stay on one node, wherever the callers run.
//!
//! Every operation passes from one thread to another and back, which costs its callers some microseconds. It pays where
//! the device is far from most processors, or has few queues.

mod memory;
mod topology;

use std::collections::VecDeque;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use crate::{Device, Done, Errno, Facts, Op, Parker, Queue, Region, Result, Waker};
pub(crate) use topology::node_of;
pub use topology::{Seat, use_sysfs};

/// Operations in flight of the device below.
const DEPTH: u32 = 256;

/// A device whose I/O one thread does.
pub struct Worker {
    facts: Facts,
    crew: Arc<Crew>,
}

/// The thread, which ends with the last queue and device.
struct Crew {
    device: Arc<dyn Device>,
    inbox: Arc<Inbox>,
    seat: Seat,
    thread: Option<JoinHandle<()>>,
}

/// The way to the thread.
#[derive(Default)]
struct Inbox(Mutex<Waiting>);

#[derive(Default)]
struct Waiting {
    ops: VecDeque<(Arc<Outbox>, Op)>,
    /// The thread sleeps, and wants to be woken.
    sleeper: Option<Waker>,
    /// There is new registered memory, for which a new queue is needed.
    renew: bool,
    ends: bool,
}

/// The way back to one queue.
#[derive(Default)]
struct Outbox {
    done: Mutex<Vec<Done>>,
    parker: Parker,
}

impl Worker {
    /// Starts the thread for `device`. It takes a seat near the device if sysfs knows where that is.
    ///
    /// # Errors
    ///
    /// Those of [`Device::queue`], and `EAGAIN` where no thread can be started.
    pub fn over(device: Arc<dyn Device>) -> Result<Worker> {
        let facts = Facts { max_queues: u32::MAX, ..device.facts().clone() };
        let seat = Seat::take(facts.numa_node);
        let inbox = Arc::new(Inbox::default());
        let (ready, started) = mpsc::channel();
        let (theirs, below, chair) = (Arc::clone(&inbox), Arc::clone(&device), seat.clone());
        let thread = thread::Builder::new().name("defuse-io".to_owned());
        let thread = thread.spawn(move || {
            // Before the queue, whose memory then comes from this node.
            chair.sit();
            match below.queue(DEPTH) {
                Ok(queue) => {
                    // Nobody else holds the receiver's end.
                    let _ = ready.send(Ok(()));
                    Clerk::new(below, theirs, queue).run();
                }
                Err(errno) => drop(ready.send(Err(errno))),
            }
        });
        let thread = Some(thread.map_err(|_| Errno::AGAIN)?);
        let crew = Arc::new(Crew { device, inbox, seat, thread });
        started.recv().unwrap_or(Err(Errno::IO))?;
        Ok(Worker { facts, crew })
    }

    /// The place of the thread.
    pub fn seat(&self) -> &Seat {
        &self.crew.seat
    }
}

impl Device for Worker {
    fn facts(&self) -> &Facts {
        &self.facts
    }

    fn register(&self, region: &Arc<Region>) -> Result<()> {
        if let Some(node) = self.crew.seat.node
            && let Err(errno) = memory::move_to(region, node)
        {
            // It works from any node.
            log::warn!("{}: no memory of node {node}: {errno}", self.facts.name);
        }
        self.crew.device.register(region)?;
        self.crew.inbox.tell(|waiting| waiting.renew = true);
        Ok(())
    }

    fn queue(&self, depth: u32) -> Result<Box<dyn Queue>> {
        let depth = depth.clamp(1, self.facts.max_depth) as usize;
        let (crew, outbox) = (Arc::clone(&self.crew), Arc::default());
        Ok(Box::new(WorkerQueue { crew, outbox, pushed: Vec::new(), in_flight: 0, depth }))
    }
}

impl Inbox {
    fn lock(&self) -> MutexGuard<'_, Waiting> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes what waits for the thread, and wakes it.
    fn tell(&self, change: impl FnOnce(&mut Waiting)) {
        let mut waiting = self.lock();
        change(&mut waiting);
        let sleeper = waiting.sleeper.take();
        drop(waiting);
        if let Some(sleeper) = sleeper {
            sleeper.wake();
        }
    }
}

impl Outbox {
    fn lock(&self) -> MutexGuard<'_, Vec<Done>> {
        self.done.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Crew {
    fn drop(&mut self) {
        self.inbox.tell(|waiting| waiting.ends = true);
        if let Some(thread) = self.thread.take() {
            // A panic of the thread was reported by its own message.
            let _ = thread.join();
        }
    }
}

impl fmt::Debug for Worker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Worker").field("facts", &self.facts).field("seat", self.seat()).finish()
    }
}

/// The state of the thread.
struct Clerk {
    device: Arc<dyn Device>,
    inbox: Arc<Inbox>,
    queue: Box<dyn Queue>,
    /// Operations that the device has no room for yet.
    waiting: VecDeque<(Arc<Outbox>, Op)>,
    /// The owners of the operations in flight, by their numbers below.
    owners: Vec<Option<(Arc<Outbox>, u64)>>,
    free: Vec<usize>,
}

impl Clerk {
    fn new(device: Arc<dyn Device>, inbox: Arc<Inbox>, queue: Box<dyn Queue>) -> Clerk {
        let depth = queue.depth();
        let owners = std::iter::repeat_with(|| None).take(depth).collect();
        let (waiting, free) = (VecDeque::new(), (0..depth).rev().collect());
        Clerk { device, inbox, queue, waiting, owners, free }
    }

    fn run(mut self) {
        let mut done = Vec::new();
        while self.take_in() {
            self.push();
            self.queue.kick();
            self.queue.reap(&mut done);
            if done.is_empty() {
                self.sleep();
                continue;
            }
            done.drain(..).for_each(|done| self.give_back(done));
        }
    }

    /// Takes what has arrived. Returns false at the end.
    fn take_in(&mut self) -> bool {
        let mut arrived = self.inbox.lock();
        arrived.sleeper = None;
        self.waiting.append(&mut arrived.ops);
        let idle = self.queue.in_flight() == 0;
        if arrived.renew && idle {
            arrived.renew = false;
            drop(arrived);
            self.renew();
            return true;
        }
        !(arrived.ends && idle && self.waiting.is_empty())
    }

    /// Makes a queue that knows all registered memory.
    fn renew(&mut self) {
        match self.device.queue(self.queue.depth() as u32) {
            Ok(queue) if queue.depth() >= self.owners.len() => self.queue = queue,
            // The old one can use all memory, too, at more cost.
            Ok(_) => {}
            Err(errno) => log::debug!("no new queue: {errno}"),
        }
    }

    fn push(&mut self) {
        while let Some(number) = self.free.last().copied() {
            let Some((owner, Op { tag, kind })) = self.waiting.pop_front() else { return };
            match self.queue.push(Op { tag: number as u64, kind }) {
                Ok(()) => {
                    self.free.pop();
                    self.owners[number] = Some((owner, tag));
                }
                Err(Op { kind, .. }) => {
                    self.waiting.push_front((owner, Op { tag, kind }));
                    return;
                }
            }
        }
    }

    fn give_back(&mut self, done: Done) {
        let number = done.tag as usize;
        let owner = self.owners.get_mut(number).and_then(Option::take);
        let Some((owner, tag)) = owner else { return };
        self.free.push(number);
        owner.lock().push(Done { tag, ..done });
        owner.parker.unpark();
    }

    /// Sleeps until an operation is complete or another one arrives.
    fn sleep(&mut self) {
        let mut arrived = self.inbox.lock();
        let renews = arrived.renew && self.queue.in_flight() == 0;
        if !arrived.ops.is_empty() || renews || arrived.ends && self.queue.in_flight() == 0 {
            return;
        }
        arrived.sleeper = Some(self.queue.waker());
        drop(arrived);
        self.queue.wait(None);
    }
}

/// A queue to the thread.
struct WorkerQueue {
    crew: Arc<Crew>,
    outbox: Arc<Outbox>,
    pushed: Vec<Op>,
    in_flight: usize,
    depth: usize,
}

impl Queue for WorkerQueue {
    fn push(&mut self, op: Op) -> Result<(), Op> {
        if self.in_flight == self.depth {
            return Err(op);
        }
        self.in_flight += 1;
        self.pushed.push(op);
        Ok(())
    }

    fn kick(&mut self) {
        if self.pushed.is_empty() {
            return;
        }
        let ops = self.pushed.drain(..).map(|op| (Arc::clone(&self.outbox), op));
        self.crew.inbox.tell(|waiting| waiting.ops.extend(ops));
    }

    fn reap(&mut self, done: &mut Vec<Done>) {
        let mut arrived = self.outbox.lock();
        self.in_flight -= arrived.len();
        done.append(&mut arrived);
    }

    fn wait(&mut self, timeout: Option<Duration>) {
        self.kick();
        if self.outbox.lock().is_empty() {
            self.outbox.parker.park(timeout);
        }
    }

    fn waker(&self) -> Waker {
        let outbox = Arc::clone(&self.outbox);
        Waker::new(move || outbox.parker.unpark())
    }

    fn in_flight(&self) -> usize {
        self.in_flight
    }

    fn depth(&self) -> usize {
        self.depth
    }
}

impl Drop for WorkerQueue {
    fn drop(&mut self) {
        let mut done = Vec::new();
        loop {
            self.reap(&mut done);
            if self.in_flight == 0 {
                return;
            }
            self.wait(None);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;
    use std::thread::ThreadId;

    use super::*;
    use crate::{Blocking, Ram};

    /// A device that remembers the threads that use its queues.
    struct Watched {
        inner: Ram,
        threads: Arc<Mutex<HashSet<ThreadId>>>,
    }

    struct WatchedQueue {
        inner: Box<dyn Queue>,
        threads: Arc<Mutex<HashSet<ThreadId>>>,
    }

    impl Device for Watched {
        fn facts(&self) -> &Facts {
            self.inner.facts()
        }
        fn register(&self, region: &Arc<Region>) -> Result<()> {
            self.inner.register(region)
        }
        fn queue(&self, depth: u32) -> Result<Box<dyn Queue>> {
            let (inner, threads) = (self.inner.queue(depth)?, Arc::clone(&self.threads));
            Ok(Box::new(WatchedQueue { inner, threads }))
        }
    }

    impl Queue for WatchedQueue {
        fn push(&mut self, op: Op) -> Result<(), Op> {
            self.threads.lock().unwrap().insert(thread::current().id());
            self.inner.push(op)
        }
        fn kick(&mut self) {
            self.inner.kick();
        }
        fn reap(&mut self, done: &mut Vec<Done>) {
            self.threads.lock().unwrap().insert(thread::current().id());
            self.inner.reap(done);
        }
        fn wait(&mut self, timeout: Option<Duration>) {
            self.inner.wait(timeout);
        }
        fn waker(&self) -> Waker {
            self.inner.waker()
        }
        fn in_flight(&self) -> usize {
            self.inner.in_flight()
        }
        fn depth(&self) -> usize {
            self.inner.depth()
        }
    }

    #[test]
    fn one_thread_does_the_io_of_all_and_ends_with_the_last_queue() {
        let threads = Arc::new(Mutex::new(HashSet::new()));
        let watched = Watched { inner: Ram::new(4096, 1024), threads: Arc::clone(&threads) };
        let worker = Arc::new(Worker::over(Arc::new(watched)).unwrap());
        let users: Vec<_> = (0..8u8)
            .map(|user| {
                let worker = Arc::clone(&worker);
                thread::spawn(move || {
                    let region = Region::new(8).unwrap();
                    worker.register(&region).unwrap();
                    let mut line = Blocking::new(&*worker).unwrap();
                    for round in 0..100 {
                        let block = u64::from(user) * 100 + round;
                        line.write(block, &[user + 1; 4096]).unwrap();
                        let mut back = [0; 4096];
                        line.read(block, &mut back).unwrap();
                        assert_eq!(back, [user + 1; 4096]);
                    }
                    line.flush().unwrap();
                })
            })
            .collect();
        users.into_iter().for_each(|user| user.join().unwrap());
        let used = threads.lock().unwrap().clone();
        assert_eq!(used.len(), 1);
        assert!(!used.contains(&thread::current().id()));
        let queue = worker.queue(4).unwrap();
        let crew = Arc::downgrade(&worker.crew);
        drop(worker);
        assert!(crew.upgrade().is_some(), "a queue works without its device");
        drop(queue);
        assert!(crew.upgrade().is_none());
    }
}
