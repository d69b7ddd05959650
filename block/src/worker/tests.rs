//! The thread, its users, and its end.

use std::collections::HashSet;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::ThreadId;

use super::*;
use crate::{BlockOpKind, BlockingQueue, RamDevice};

/// A device that remembers the threads that use its queues.
struct WatchedDevice {
    inner: RamDevice,
    threads: Arc<Mutex<HashSet<ThreadId>>>,
}

struct WatchedQueue {
    inner: Box<dyn DeviceQueue>,
    threads: Arc<Mutex<HashSet<ThreadId>>>,
}

impl BlockDevice for WatchedDevice {
    fn properties(&self) -> &DeviceProperties {
        self.inner.properties()
    }
    fn register(&self, region: &Arc<MemoryRegion>) -> Result<()> {
        self.inner.register(region)
    }
    fn queue(&self, depth: u32) -> Result<Box<dyn DeviceQueue>> {
        let (inner, threads) = (self.inner.queue(depth)?, Arc::clone(&self.threads));
        Ok(Box::new(WatchedQueue { inner, threads }))
    }
}

impl DeviceQueue for WatchedQueue {
    fn push(&mut self, op: BlockOp) -> Result<(), BlockOp> {
        self.threads.lock().unwrap().insert(thread::current().id());
        self.inner.push(op)
    }
    fn kick(&mut self) {
        self.inner.kick();
    }
    fn reap(&mut self, done: &mut Vec<BlockCompletion>) {
        self.threads.lock().unwrap().insert(thread::current().id());
        self.inner.reap(done);
    }
    fn wait(&mut self, timeout: Option<Duration>) {
        self.inner.wait(timeout);
    }
    fn waker(&self) -> QueueWaker {
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
    let watched =
        WatchedDevice { inner: RamDevice::new(4096, 1024), threads: Arc::clone(&threads) };
    let worker = Arc::new(WorkerDevice::start_for(Arc::new(watched)).unwrap());
    let users: Vec<_> = (0..8u8)
        .map(|user| {
            let worker = Arc::clone(&worker);
            thread::spawn(move || {
                let region = MemoryRegion::new(8).unwrap();
                worker.register(&region).unwrap();
                let mut line = BlockingQueue::new(&*worker).unwrap();
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

/// A device whose queues panic in one of their methods, after some operations.
struct PanicDevice {
    inner: RamDevice,
    at: QueueMethod,
    /// Calls until the panic.
    left: Arc<AtomicUsize>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum QueueMethod {
    Push,
    Kick,
    Reap,
    Waker,
}

struct PanicQueue {
    inner: Box<dyn DeviceQueue>,
    at: QueueMethod,
    left: Arc<AtomicUsize>,
}

impl PanicQueue {
    fn call(&self, method: QueueMethod) {
        if method == self.at {
            let fewer = |left: usize| left.checked_sub(1);
            let left = self.left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fewer);
            assert!(left.is_ok(), "the queue is broken");
        }
    }
}

impl BlockDevice for PanicDevice {
    fn properties(&self) -> &DeviceProperties {
        self.inner.properties()
    }
    fn register(&self, region: &Arc<MemoryRegion>) -> Result<()> {
        self.inner.register(region)
    }
    fn queue(&self, depth: u32) -> Result<Box<dyn DeviceQueue>> {
        let inner = self.inner.queue(depth)?;
        Ok(Box::new(PanicQueue { inner, at: self.at, left: Arc::clone(&self.left) }))
    }
}

impl DeviceQueue for PanicQueue {
    fn push(&mut self, op: BlockOp) -> Result<(), BlockOp> {
        self.call(QueueMethod::Push);
        self.inner.push(op)
    }
    fn kick(&mut self) {
        self.call(QueueMethod::Kick);
        self.inner.kick();
    }
    fn reap(&mut self, done: &mut Vec<BlockCompletion>) {
        self.call(QueueMethod::Reap);
        self.inner.reap(done);
    }
    fn wait(&mut self, timeout: Option<Duration>) {
        self.inner.wait(timeout);
    }
    fn waker(&self) -> QueueWaker {
        self.call(QueueMethod::Waker);
        self.inner.waker()
    }
    fn in_flight(&self) -> usize {
        self.inner.in_flight()
    }
    fn depth(&self) -> usize {
        self.inner.depth()
    }
}

/// Reads with eight operations in flight until one fails, and then once more. Each is answered
/// once.
fn read_until_failure(worker: &WorkerDevice) {
    const EIGHT: u64 = 8;
    let region = MemoryRegion::new(64).unwrap();
    // The others may have met the panic already.
    let Ok(mut queue) = worker.queue(EIGHT as u32) else { return };
    let (mut tags, mut failures) = (0_u64, 0);
    while failures < 2 {
        let first = tags;
        for _ in 0..EIGHT {
            let memory = region.take(1).expect("few frames are lost").into();
            let kind = BlockOpKind::Read { block: tags % 1024, memory };
            queue.push(BlockOp { tag: tags, kind }).unwrap();
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
    // Frames of the queue below are not free: its device might write to them.
    assert!(region.free_frames() >= region.frames() - EIGHT as u32);
}

/// Reads into memory of this thread until a read fails, and then once more.
fn read_own_memory_until_failure(worker: &WorkerDevice) {
    let Ok(mut line) = BlockingQueue::new(worker) else { return };
    let mut bytes = [0; 4096];
    let failed = std::iter::repeat_with(|| line.read(0, &mut bytes)).find(Result::is_err);
    assert_eq!(failed, Some(Err(Errno::IO)));
    assert_eq!(line.read(0, &mut bytes), Err(Errno::IO));
}

/// A panic of the thread ended it, and all of its users waited for ever.
#[test]
fn a_panic_of_a_queue_fails_every_operation_once() {
    for at in [QueueMethod::Push, QueueMethod::Kick, QueueMethod::Reap, QueueMethod::Waker] {
        for (calls, raw) in [(0, false), (0, true), (40, false), (41, true)] {
            // The thread calls this method only before each sleep.
            let calls = if at == QueueMethod::Waker { calls / 40 } else { calls };
            let left = Arc::new(AtomicUsize::new(calls));
            let broken = PanicDevice { inner: RamDevice::new(4096, 1024), at, left };
            let worker = Arc::new(WorkerDevice::start_for(Arc::new(broken)).unwrap());
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
