//! The I/O worker, and the end of its operations if it fails.

use std::any::Any;
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use super::WorkerInbox;
use crate::outbox::CompletionOutbox;
use crate::{
    BlockCompletion, BlockDevice, BlockOp, BlockOpKind, DeviceQueue, Errno, MemorySegments,
    OperationMemory,
};

/// The state of the thread.
pub(super) struct IoWorker {
    device: Arc<dyn BlockDevice>,
    inbox: Arc<WorkerInbox>,
    queue: Box<dyn DeviceQueue>,
    /// Operations that the device has no room for yet.
    waiting: VecDeque<(Arc<CompletionOutbox>, BlockOp)>,
    /// The operations in flight, by their numbers below.
    flights: Vec<Option<ForwardedOperation>>,
    free: Vec<usize>,
    /// Completions that were reaped, and not passed to their owners yet.
    done: Vec<BlockCompletion>,
}

/// An operation that the queue below has.
struct ForwardedOperation {
    owner: Arc<CompletionOutbox>,
    tag: u64,
    uses: MemoryUse,
}

/// The memory that a device may use for an operation.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum MemoryUse {
    Nothing,
    /// Frames, which the operation owns.
    Frames,
    /// Memory of a caller, which the caller uses again after the answer.
    Callers,
}

/// Performs the I/O until the last user has gone. A panic below ends the worker, and all operations
/// fail.
pub(super) fn serve(mut worker: IoWorker) {
    // After a panic, the queue is only dropped, and not used.
    match catch_unwind(AssertUnwindSafe(|| worker.run())) {
        Ok(()) => {}
        Err(panic) => worker.fail(&*panic),
    }
}

impl IoWorker {
    pub(super) fn new(
        device: Arc<dyn BlockDevice>,
        inbox: Arc<WorkerInbox>,
        queue: Box<dyn DeviceQueue>,
    ) -> IoWorker {
        let depth = queue.depth();
        let flights = std::iter::repeat_with(|| None).take(depth).collect();
        let (waiting, free) = (VecDeque::new(), (0..depth).rev().collect());
        IoWorker { device, inbox, queue, waiting, flights, free, done: Vec::new() }
    }

    fn run(&mut self) {
        while self.take_in() {
            self.push();
            self.queue.kick();
            self.queue.reap(&mut self.done);
            if self.done.is_empty() {
                self.sleep();
                continue;
            }
            self.give_all_back();
        }
    }

    /// Takes new operations from the inbox. Returns false at the end.
    fn take_in(&mut self) -> bool {
        // The queue is not called while the inbox is locked: it may panic.
        let idle = self.queue.in_flight() == 0;
        let mut arrived = self.inbox.lock();
        arrived.sleeper = None;
        self.waiting.append(&mut arrived.ops);
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
            Ok(queue) if queue.depth() >= self.flights.len() => self.queue = queue,
            // The old one can use all memory, too, at more cost.
            Ok(_) => {}
            Err(errno) => log::debug!("no new queue: {errno}"),
        }
    }

    fn push(&mut self) {
        while let Some(number) = self.free.pop() {
            let Some((owner, BlockOp { tag, kind })) = self.waiting.pop_front() else {
                self.free.push(number);
                return;
            };
            // The operation is recorded before the push: if the push panics, the device may already
            // use its memory.
            self.flights[number] =
                Some(ForwardedOperation { owner, tag, uses: MemoryUse::classify(&kind) });
            if let Err(BlockOp { kind, .. }) = self.queue.push(BlockOp { tag: number as u64, kind })
            {
                self.free.push(number);
                let Some(ForwardedOperation { owner, tag, .. }) = self.flights[number].take()
                else {
                    return;
                };
                self.waiting.push_front((owner, BlockOp { tag, kind }));
                return;
            }
        }
    }

    fn give_all_back(&mut self) {
        for done in std::mem::take(&mut self.done) {
            let number = done.tag as usize;
            let flight = self.flights.get_mut(number).and_then(Option::take);
            let Some(ForwardedOperation { owner, tag, .. }) = flight else { continue };
            self.free.push(number);
            owner.answer(BlockCompletion { tag, ..done });
        }
    }

    /// Sleeps until an operation is complete or another one arrives.
    fn sleep(&mut self) {
        let (idle, waker) = (self.queue.in_flight() == 0, self.queue.waker());
        let mut arrived = self.inbox.lock();
        if !arrived.ops.is_empty() || idle && (arrived.renew || arrived.ends) {
            return;
        }
        arrived.sleeper = Some(waker);
        drop(arrived);
        self.queue.wait(None);
    }

    /// Answers each operation once, and lets all later ones fail.
    fn fail(mut self, panic: &(dyn Any + Send)) {
        let name = &self.device.properties().name;
        log::error!("{name}: the thread for its I/O has failed, and all I/O does: {}", text(panic));
        let mut arrived = self.inbox.lock();
        arrived.failed = true;
        // The queue of the waker is about to end.
        arrived.sleeper = None;
        let refused = std::mem::take(&mut arrived.ops);
        drop(arrived);
        self.give_all_back();
        for (owner, op) in self.waiting.drain(..).chain(refused) {
            owner.refuse(op);
        }
        let flights: Vec<ForwardedOperation> = self.flights.drain(..).flatten().collect();
        let uses = flights.iter().map(|flight| flight.uses).max().unwrap_or(MemoryUse::Nothing);
        let (borrowed, own): (Vec<ForwardedOperation>, Vec<ForwardedOperation>) =
            flights.into_iter().partition(|flight| flight.uses == MemoryUse::Callers);
        own.into_iter().for_each(ForwardedOperation::fail);
        end(self.queue, uses);
        borrowed.into_iter().for_each(ForwardedOperation::fail);
    }
}

impl ForwardedOperation {
    /// Answers the operation with an error. The device may still use its memory, which is therefore
    /// not given back.
    fn fail(self) {
        let ForwardedOperation { owner, tag, .. } = self;
        owner.answer(BlockCompletion { tag, result: Err(Errno::IO), memory: MemorySegments::None });
    }
}

impl MemoryUse {
    fn classify(kind: &BlockOpKind) -> MemoryUse {
        let (BlockOpKind::Read { memory, .. } | BlockOpKind::Write { memory, .. }) = kind else {
            return MemoryUse::Nothing;
        };
        match memory.pieces().iter().any(|piece| matches!(piece, OperationMemory::Raw(_))) {
            true => MemoryUse::Callers,
            false => MemoryUse::Frames,
        }
    }
}

/// Ends a queue that has panicked, so that the device uses no memory of callers any more. A queue
/// that uses only frames is kept for ever, and the frames with it: dropping it might wait for the
/// device for ever.
fn end(queue: Box<dyn DeviceQueue>, uses: MemoryUse) {
    if uses == MemoryUse::Frames {
        std::mem::forget(queue);
        return;
    }
    let ended = catch_unwind(AssertUnwindSafe(|| drop(queue)));
    if ended.is_err() && uses == MemoryUse::Callers {
        // The device may write to memory that callers get back, or for which they wait in vain.
        log::error!("a queue of a device cannot be ended: the process ends, to protect its memory");
        std::process::abort();
    }
}

/// The message of a panic, in one line.
fn text(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().copied();
    let text = text.or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    text.unwrap_or("a panic without a message").replace('\n', " ")
}
