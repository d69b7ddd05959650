//! The thread that does the I/O, and the end of its operations if it fails.

use std::any::Any;
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use super::Inbox;
use crate::outbox::Outbox;
use crate::{Device, Done, Errno, Memory, Op, OpKind, Queue, Segments};

/// The state of the thread.
pub(super) struct Clerk {
    device: Arc<dyn Device>,
    inbox: Arc<Inbox>,
    queue: Box<dyn Queue>,
    /// Operations that the device has no room for yet.
    waiting: VecDeque<(Arc<Outbox>, Op)>,
    /// The operations in flight, by their numbers below.
    flights: Vec<Option<Flight>>,
    free: Vec<usize>,
    /// Operations that were reaped, and whose owners do not know it yet.
    done: Vec<Done>,
}

/// An operation that the queue below has.
struct Flight {
    owner: Arc<Outbox>,
    tag: u64,
    uses: Uses,
}

/// The memory that a device may use for an operation.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Uses {
    Nothing,
    /// Frames, which belong to the operation.
    Frames,
    /// Memory of a caller, who has it again with the answer.
    Callers,
}

/// Does the I/O until the last user has gone. A panic below ends it, and all operations fail.
pub(super) fn serve(mut clerk: Clerk) {
    // After a panic nothing is used of the queue but its end.
    match catch_unwind(AssertUnwindSafe(|| clerk.run())) {
        Ok(()) => {}
        Err(panic) => clerk.fail(&*panic),
    }
}

impl Clerk {
    pub(super) fn new(device: Arc<dyn Device>, inbox: Arc<Inbox>, queue: Box<dyn Queue>) -> Clerk {
        let depth = queue.depth();
        let flights = std::iter::repeat_with(|| None).take(depth).collect();
        let (waiting, free) = (VecDeque::new(), (0..depth).rev().collect());
        Clerk { device, inbox, queue, waiting, flights, free, done: Vec::new() }
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

    /// Takes what has arrived. Returns false at the end.
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
            let Some((owner, Op { tag, kind })) = self.waiting.pop_front() else {
                self.free.push(number);
                return;
            };
            // Before the queue has it: if that panics, the device may have it already.
            self.flights[number] = Some(Flight { owner, tag, uses: Uses::of(&kind) });
            if let Err(Op { kind, .. }) = self.queue.push(Op { tag: number as u64, kind }) {
                self.free.push(number);
                let Some(Flight { owner, tag, .. }) = self.flights[number].take() else { return };
                self.waiting.push_front((owner, Op { tag, kind }));
                return;
            }
        }
    }

    fn give_all_back(&mut self) {
        for done in std::mem::take(&mut self.done) {
            let number = done.tag as usize;
            let flight = self.flights.get_mut(number).and_then(Option::take);
            let Some(Flight { owner, tag, .. }) = flight else { continue };
            self.free.push(number);
            owner.answer(Done { tag, ..done });
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
        let name = &self.device.facts().name;
        log::error!("{name}: the thread for its I/O has failed, and all I/O does: {}", text(panic));
        let mut arrived = self.inbox.lock();
        arrived.failed = true;
        // Its queue is about to end.
        arrived.sleeper = None;
        let refused = std::mem::take(&mut arrived.ops);
        drop(arrived);
        self.give_all_back();
        for (owner, op) in self.waiting.drain(..).chain(refused) {
            owner.refuse(op);
        }
        let flights: Vec<Flight> = self.flights.drain(..).flatten().collect();
        let uses = flights.iter().map(|flight| flight.uses).max().unwrap_or(Uses::Nothing);
        let (borrowed, own): (Vec<Flight>, Vec<Flight>) =
            flights.into_iter().partition(|flight| flight.uses == Uses::Callers);
        own.into_iter().for_each(Flight::fail);
        end(self.queue, uses);
        borrowed.into_iter().for_each(Flight::fail);
    }
}

impl Flight {
    /// Answers it. The device may use its memory: that does not come back.
    fn fail(self) {
        let Flight { owner, tag, .. } = self;
        owner.answer(Done { tag, result: Err(Errno::IO), memory: Segments::None });
    }
}

impl Uses {
    fn of(kind: &OpKind) -> Uses {
        let (OpKind::Read { memory, .. } | OpKind::Write { memory, .. }) = kind else {
            return Uses::Nothing;
        };
        match memory.pieces().iter().any(|piece| matches!(piece, Memory::Raw(_))) {
            true => Uses::Callers,
            false => Uses::Frames,
        }
    }
}

/// Ends a queue that has panicked, so that the device uses no memory of callers any more. A queue that has only frames is kept for
/// ever, and they with it: nobody knows if it would wait for the device.
fn end(queue: Box<dyn Queue>, uses: Uses) {
    if uses == Uses::Frames {
        std::mem::forget(queue);
        return;
    }
    let ended = catch_unwind(AssertUnwindSafe(|| drop(queue)));
    if ended.is_err() && uses == Uses::Callers {
        // The device may write to memory that its callers get back or wait for in vain.
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
