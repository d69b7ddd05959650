//! A device whose I/O is performed by one thread, near the device.
//!
//! Any number of threads push to queues of a [`WorkerDevice`], and a single thread hands all of
//! their operations to a single queue of the device below. It is bound to a processor of the NUMA
//! node that the device is attached to, and registered memory is moved to that node. So buffers,
//! queue and interrupts stay on one node, wherever the callers run.
//!
//! Every operation passes from one thread to another and back, which costs its callers some
//! microseconds. This is worth its cost if the device is far from most processors, or has few
//! queues.
//!
//! If the thread panics, which is a bug of the queue below, all operations fail with `EIO`: each
//! operation in progress once, and all later ones. The memory of operations in the queue below is
//! not given back, because the device may still use it: frames stay taken for ever. An operation in
//! memory of a caller ([`RawBuf`](crate::RawBuf)) is answered when the queue below has ended, which
//! waits for the device.

mod io_worker;
mod memory;
mod topology;

use std::collections::VecDeque;
use std::fmt;
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use crate::outbox::CompletionOutbox;
use crate::{
    BlockCompletion, BlockDevice, BlockOp, DeviceProperties, DeviceQueue, Errno, MemoryRegion,
    QueueWaker, Result, signals,
};
use io_worker::IoWorker;
pub(crate) use topology::node_of;
pub use topology::{ThreadPlacement, use_sysfs};

/// Operations in flight of the device below.
const DEPTH: u32 = 256;

/// A device whose I/O is performed by one thread.
pub struct WorkerDevice {
    facts: DeviceProperties,
    crew: Arc<WorkerHandle>,
}

/// The I/O worker, which ends with the last queue and device.
struct WorkerHandle {
    device: Arc<dyn BlockDevice>,
    inbox: Arc<WorkerInbox>,
    thread_placement: ThreadPlacement,
    thread: Option<JoinHandle<()>>,
}

/// The way to the thread.
#[derive(Default)]
struct WorkerInbox(Mutex<WorkerInboxState>);

#[derive(Default)]
struct WorkerInboxState {
    ops: VecDeque<(Arc<CompletionOutbox>, BlockOp)>,
    /// The waker of the thread, while it sleeps.
    sleeper: Option<QueueWaker>,
    /// New memory was registered, for which a new queue is needed.
    renew: bool,
    ends: bool,
    /// The thread has failed, and takes no operations any more.
    failed: bool,
}

impl WorkerDevice {
    /// Starts the thread for `device`. The thread is placed near the device if sysfs knows its
    /// node.
    ///
    /// # Errors
    ///
    /// Fails with the errors of [`BlockDevice::queue`], and with `EAGAIN` if no thread can be
    /// started.
    pub fn start_for(device: Arc<dyn BlockDevice>) -> Result<WorkerDevice> {
        let facts = DeviceProperties { max_queues: u32::MAX, ..device.properties().clone() };
        let thread_placement = ThreadPlacement::take(facts.numa_node);
        let inbox = Arc::new(WorkerInbox::default());
        let (ready, started) = mpsc::channel();
        let (theirs, below, chair) =
            (Arc::clone(&inbox), Arc::clone(&device), thread_placement.clone());
        let thread = thread::Builder::new().name("defuse-io".to_owned());
        let thread = thread.spawn(move || {
            signals::take_none();
            // The thread is placed before it makes the queue, whose memory then comes from this
            // node.
            chair.bind_thread();
            match below.queue(DEPTH) {
                Ok(queue) => {
                    // The receiver waits for this message.
                    let _ = ready.send(Ok(()));
                    io_worker::serve(IoWorker::new(below, theirs, queue));
                }
                Err(errno) => drop(ready.send(Err(errno))),
            }
        });
        let thread = Some(thread.map_err(|_| Errno::AGAIN)?);
        let crew = Arc::new(WorkerHandle { device, inbox, thread_placement, thread });
        started.recv().unwrap_or(Err(Errno::IO))?;
        Ok(WorkerDevice { facts, crew })
    }

    /// The place of the thread.
    pub fn placement(&self) -> &ThreadPlacement {
        &self.crew.thread_placement
    }
}

impl BlockDevice for WorkerDevice {
    fn properties(&self) -> &DeviceProperties {
        &self.facts
    }

    fn register(&self, region: &Arc<MemoryRegion>) -> Result<()> {
        if let Some(node) = self.crew.thread_placement.node
            && let Err(errno) = memory::move_to(region, node)
        {
            // The memory works from any node.
            log::warn!("{}: no memory of node {node}: {errno}", self.facts.name);
        }
        self.crew.device.register(region)?;
        self.crew.inbox.update(|waiting| waiting.renew = true);
        Ok(())
    }

    fn queue(&self, depth: u32) -> Result<Box<dyn DeviceQueue>> {
        if self.crew.inbox.lock().failed {
            return Err(Errno::IO);
        }
        let depth = depth.clamp(1, self.facts.max_depth) as usize;
        let (crew, outbox) = (Arc::clone(&self.crew), Arc::default());
        Ok(Box::new(WorkerQueue { crew, outbox, pushed: Vec::new(), in_flight: 0, depth }))
    }

    fn shortage(&self) -> Option<String> {
        self.crew.device.shortage()
    }

    fn note(&self) -> Option<String> {
        self.crew.device.note()
    }
}

impl WorkerInbox {
    fn lock(&self) -> MutexGuard<'_, WorkerInboxState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Hands operations to the thread, or refuses them if the thread has failed.
    fn send(&self, outbox: &Arc<CompletionOutbox>, pushed: &mut Vec<BlockOp>) {
        let ops = pushed.drain(..);
        let mut refused = None;
        self.update(|waiting| match waiting.failed {
            false => waiting.ops.extend(ops.map(|op| (Arc::clone(outbox), op))),
            true => refused = Some(ops),
        });
        refused.into_iter().flatten().for_each(|op| outbox.refuse(op));
    }

    /// Changes the inbox of the thread, and wakes it.
    fn update(&self, change: impl FnOnce(&mut WorkerInboxState)) {
        let mut waiting = self.lock();
        change(&mut waiting);
        let sleeper = waiting.sleeper.take();
        drop(waiting);
        if let Some(sleeper) = sleeper {
            sleeper.wake();
        }
    }
}

impl Drop for WorkerHandle {
    fn drop(&mut self) {
        self.inbox.update(|waiting| waiting.ends = true);
        if let Some(thread) = self.thread.take() {
            // A panic of the thread was logged.
            let _ = thread.join();
        }
    }
}

impl fmt::Debug for WorkerDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Worker")
            .field("facts", &self.facts)
            .field("seat", self.placement())
            .finish()
    }
}

/// A queue to the thread.
struct WorkerQueue {
    crew: Arc<WorkerHandle>,
    outbox: Arc<CompletionOutbox>,
    pushed: Vec<BlockOp>,
    in_flight: usize,
    depth: usize,
}

impl DeviceQueue for WorkerQueue {
    fn push(&mut self, op: BlockOp) -> Result<(), BlockOp> {
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
        self.crew.inbox.send(&self.outbox, &mut self.pushed);
    }

    fn reap(&mut self, done: &mut Vec<BlockCompletion>) {
        self.in_flight -= self.outbox.take(done);
    }

    fn wait(&mut self, timeout: Option<Duration>) {
        self.kick();
        self.outbox.wait(timeout);
    }

    fn waker(&self) -> QueueWaker {
        let outbox = Arc::clone(&self.outbox);
        QueueWaker::new(move || outbox.wake())
    }

    fn completion_fd(&self) -> Option<BorrowedFd<'_>> {
        self.outbox.completion_fd()
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
mod tests;
