//! The thread, its users, and its end.

use std::collections::HashSet;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::ThreadId;

use super::*;
use crate::{Blocking, OpKind, Ram};

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

/// A device whose queues panic at one of their methods, after some operations.
struct Broken {
    inner: Ram,
    at: Method,
    /// Calls until the panic.
    left: Arc<AtomicUsize>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Method {
    Push,
    Kick,
    Reap,
    Waker,
}

struct BrokenQueue {
    inner: Box<dyn Queue>,
    at: Method,
    left: Arc<AtomicUsize>,
}

impl BrokenQueue {
    fn call(&self, method: Method) {
        if method == self.at {
            let fewer = |left: usize| left.checked_sub(1);
            let left = self.left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fewer);
            assert!(left.is_ok(), "the queue is broken");
        }
    }
}

impl Device for Broken {
    fn facts(&self) -> &Facts {
        self.inner.facts()
    }
    fn register(&self, region: &Arc<Region>) -> Result<()> {
        self.inner.register(region)
    }
    fn queue(&self, depth: u32) -> Result<Box<dyn Queue>> {
        let inner = self.inner.queue(depth)?;
        Ok(Box::new(BrokenQueue { inner, at: self.at, left: Arc::clone(&self.left) }))
    }
}

impl Queue for BrokenQueue {
    fn push(&mut self, op: Op) -> Result<(), Op> {
        self.call(Method::Push);
        self.inner.push(op)
    }
    fn kick(&mut self) {
        self.call(Method::Kick);
        self.inner.kick();
    }
    fn reap(&mut self, done: &mut Vec<Done>) {
        self.call(Method::Reap);
        self.inner.reap(done);
    }
    fn wait(&mut self, timeout: Option<Duration>) {
        self.inner.wait(timeout);
    }
    fn waker(&self) -> Waker {
        self.call(Method::Waker);
        self.inner.waker()
    }
    fn in_flight(&self) -> usize {
        self.inner.in_flight()
    }
    fn depth(&self) -> usize {
        self.inner.depth()
    }
}

/// Reads with eight operations in flight until one fails, and then once more. Each is answered once.
fn read_until_failure(worker: &Worker) {
    const EIGHT: u64 = 8;
    let region = Region::new(64).unwrap();
    // The others may have met the panic already.
    let Ok(mut queue) = worker.queue(EIGHT as u32) else { return };
    let (mut tags, mut failures) = (0_u64, 0);
    while failures < 2 {
        let first = tags;
        for _ in 0..EIGHT {
            let memory = region.take(1).expect("few frames are lost").into();
            let kind = OpKind::Read { block: tags % 1024, memory };
            queue.push(Op { tag: tags, kind }).unwrap();
            tags += 1;
        }
        let mut done = Vec::new();
        while queue.in_flight() > 0 {
            queue.wait(None);
            queue.reap(&mut done);
        }
        let mut answered: Vec<u64> = done.iter().map(|done| done.tag).collect();
        answered.sort_unstable();
        assert_eq!(answered, (first..tags).collect::<Vec<_>>(), "each is answered once");
        let errors: Vec<Errno> = done.iter().filter_map(|done| done.result.err()).collect();
        assert!(errors.iter().all(|errno| *errno == Errno::IO), "{errors:?}");
        if failures == 1 {
            assert_eq!(errors.len() as u64, EIGHT, "nothing succeeds after a failure");
            assert!(done.iter().all(|done| done.memory.count() == 1), "no device has seen it");
        }
        failures += i32::from(!errors.is_empty());
    }
    drop(queue);
    // Frames that the queue below had are not free: its device might write to them.
    assert!(region.free_frames() >= region.frames() - EIGHT as u32);
}

/// Reads into memory of this thread until that fails, and then once more.
fn read_own_memory_until_failure(worker: &Worker) {
    let Ok(mut line) = Blocking::new(worker) else { return };
    let mut bytes = [0; 4096];
    let failed = std::iter::repeat_with(|| line.read(0, &mut bytes)).find(Result::is_err);
    assert_eq!(failed, Some(Err(Errno::IO)));
    assert_eq!(line.read(0, &mut bytes), Err(Errno::IO));
}

/// A panic of the thread ended it, and all of its users waited for ever.
#[test]
fn a_panic_of_a_queue_fails_every_operation_once() {
    for at in [Method::Push, Method::Kick, Method::Reap, Method::Waker] {
        for (calls, raw) in [(0, false), (0, true), (40, false), (41, true)] {
            // The thread asks for a waker before each sleep only.
            let calls = if at == Method::Waker { calls / 40 } else { calls };
            let left = Arc::new(AtomicUsize::new(calls));
            let broken = Broken { inner: Ram::new(4096, 1024), at, left };
            let worker = Arc::new(Worker::over(Arc::new(broken)).unwrap());
            let (tell, ended) = mpsc::channel();
            for _ in 0..4 {
                let (worker, tell) = (Arc::clone(&worker), tell.clone());
                thread::spawn(move || {
                    match raw {
                        true => read_own_memory_until_failure(&worker),
                        false => read_until_failure(&worker),
                    }
                    drop(worker);
                    tell.send(()).unwrap();
                });
            }
            for _ in 0..4 {
                let ended = ended.recv_timeout(Duration::from_secs(60));
                ended.unwrap_or_else(|_| panic!("a user waits for ever: {at:?}, {calls}, {raw}"));
            }
            assert_eq!(worker.queue(4).map(drop), Err(Errno::IO), "{at:?}");
            assert!(!worker.crew.inbox.0.is_poisoned(), "{at:?}");
        }
    }
}
