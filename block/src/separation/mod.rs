//! Elastic separation of queues: one [`Queue`] in front of several queues of a device.
//!
//! A device that works on a long write keeps the reads behind it waiting. So operations have classes, small
//! or large reads or writes, and each goes to the queue that ends it soonest: equation (1) of UHSFS, with
//! the work that waits in each queue and the mean cost of each class there. A queue that is closed to a
//! class has an infinite cost. Caps bound how much of a class is in flight.
//!
//! Operations on the same blocks of which one changes them wait for one another, since queues have no order
//! between them. A flush begins when all operations before it are complete.
//!
//! The room uses the traits of the crate and a [`Clock`], and knows no kind of device.

mod caps;
mod class;
mod costs;
mod overlaps;
mod schedule;
#[cfg(test)]
mod tests;

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

use crate::{Clock, Device, Done, Errno, Op, Queue, Result, Waker};
pub use class::{Class, Classes};
use schedule::Schedule;

/// How operations find their queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// The queues take turns, whatever the class.
    Off,
    /// By the number of operations that wait in each queue that is open to the class.
    Static,
    /// By the costs that are measured.
    Learned,
}

/// Settings of a [`Separated`] queue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Separation {
    /// How operations find their queue.
    pub mode: Mode,
    /// For each queue the classes that it takes.
    pub queues: Vec<Classes>,
    /// Operations of so many bytes or more are large.
    pub large: usize,
    /// Operations in flight of each queue at most.
    pub depth: u32,
    /// While small reads are slow, fewer operations of other classes are in flight.
    pub caps: bool,
}

impl Separation {
    /// `count` queues of `depth` operations that take every class.
    pub fn open(mode: Mode, count: usize, depth: u32) -> Self {
        let queues = vec![Classes::ALL; count];
        Separation { mode, queues, large: 32 << 10, depth, caps: false }
    }
}

/// A queue in front of several, see the [module](self).
pub struct Separated {
    lanes: Vec<Box<dyn Queue>>,
    schedule: Schedule,
    done: Vec<Done>,
    clock: Arc<dyn Clock>,
    wake: Arc<OwnedFd>,
}

impl Separated {
    /// Opens queues of `device`.
    ///
    /// # Errors
    ///
    /// `EINVAL` without queues, or where a class has no queue that takes it; those of [`Device::queue`].
    pub fn new(
        device: &dyn Device,
        separation: &Separation,
        clock: Arc<dyn Clock>,
    ) -> Result<Self> {
        let takes = |class| separation.queues.iter().any(|classes| classes.has(class));
        if separation.queues.is_empty() || !Class::ALL.into_iter().all(takes) {
            return Err(Errno::INVAL);
        }
        let lane = |_: &Classes| device.queue(separation.depth);
        let lanes = separation.queues.iter().map(lane).collect::<Result<Vec<_>>>()?;
        let depths: Vec<usize> = lanes.iter().map(|lane| lane.depth()).collect();
        let block_size = device.facts().block_size;
        let schedule = Schedule::new(separation, &depths, block_size);
        let wake = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        Ok(Separated { lanes, schedule, done: Vec::new(), clock, wake })
    }

    /// The mean cost of `class` in a queue; `None` where none was measured.
    pub fn mean(&self, queue: usize, class: Class) -> Option<Duration> {
        self.schedule.mean(queue, class)
    }

    /// Operations of `class` in flight at most.
    pub fn cap(&self, class: Class) -> usize {
        self.schedule.cap(class)
    }

    /// Hands operations to the queues, as far as there is room.
    fn distribute(&mut self) {
        let now = self.clock.now();
        while let Some((lane, op)) = self.schedule.next(now) {
            let taken = self.lanes[lane].push(op);
            assert!(taken.is_ok(), "a queue takes as many operations as it says");
        }
    }

    /// Takes in what is complete.
    fn collect(&mut self) {
        let mut done = Vec::new();
        self.lanes.iter_mut().for_each(|lane| lane.reap(&mut done));
        let now = self.clock.now();
        for one in done {
            self.done.push(self.schedule.completed(one, now));
        }
    }

    /// Sleeps until a descriptor of a queue is readable. False where a queue has none.
    fn poll(&self, timeout: Option<Duration>) -> bool {
        let ready: Option<Vec<_>> = self.lanes.iter().map(|lane| lane.ready()).collect();
        let Some(ready) = ready else { return false };
        let all = ready.into_iter().chain([self.wake.as_fd()]);
        let mut fds: Vec<_> = all.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)).collect();
        let timeout = timeout.and_then(|timeout| Timespec::try_from(timeout).ok());
        // A signal is one of the reasons to return early.
        let _ = poll(&mut fds, timeout.as_ref());
        // Not readable where nobody woke this queue.
        let _ = rustix::io::read(&self.wake, &mut [0; 8]);
        true
    }
}

impl Queue for Separated {
    fn push(&mut self, op: Op) -> Result<(), Op> {
        self.schedule.push(op)
    }

    fn kick(&mut self) {
        self.distribute();
        self.lanes.iter_mut().filter(|lane| lane.in_flight() > 0).for_each(|lane| lane.kick());
    }

    fn reap(&mut self, done: &mut Vec<Done>) {
        self.collect();
        done.append(&mut self.done);
        // What waited for these begins.
        if self.schedule.waits() {
            self.kick();
        }
    }

    fn wait(&mut self, timeout: Option<Duration>) {
        self.kick();
        self.collect();
        if !self.done.is_empty() || self.poll(timeout) {
            return;
        }
        let busy = self.lanes.iter().position(|lane| lane.in_flight() > 0).unwrap_or(0);
        self.lanes[busy].wait(timeout);
    }

    fn waker(&self) -> Waker {
        let wake = Arc::clone(&self.wake);
        let lanes: Vec<Waker> = match self.lanes.iter().all(|lane| lane.ready().is_some()) {
            true => Vec::new(),
            false => self.lanes.iter().map(|lane| lane.waker()).collect(),
        };
        Waker::new(move || {
            // Full only where nobody has read a great many wake-ups, and then it is readable.
            let _ = rustix::io::write(&wake, &1_u64.to_ne_bytes());
            lanes.iter().for_each(Waker::wake);
        })
    }

    fn in_flight(&self) -> usize {
        self.schedule.outstanding() + self.done.len()
    }

    fn depth(&self) -> usize {
        self.schedule.depth()
    }
}
