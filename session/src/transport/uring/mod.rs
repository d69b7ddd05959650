//! The transport over io_uring (Documentation/filesystems/fuse/fuse-io-uring.rst): one system call
//! a request, which hands over an answer and waits for the next request.
//!
//! A worker has a ring of its own with one entry, so the kernel assigns a request only to a worker
//! that waits: a worker that sleeps in a handler holds up no other request. The kernel has a queue
//! for each processor and takes the entry that became available last, so that idle workers are left
//! alone.
//!
//! A deferred reply keeps its entry, and its worker goes on with a new one. A thread of their own
//! hands finished replies to the kernel ([`FinishedAnswers`]): an entry belongs to the ring that
//! hands over its reply, and two entries that are available on one worker's ring could leave a
//! request behind a handler that sleeps.

mod answers;
mod entry;
mod reply;
mod ring;
mod support;

use std::os::fd::OwnedFd;
use std::sync::Arc;

use defuse_fs::{Errno, Result};

use super::{ReceiveOutcome, RequestMessage, RequestReply, WorkerChannel};
pub(crate) use answers::FinishedAnswers;
pub(crate) use entry::UringEntry;
pub(crate) use reply::UringExchange;
pub(crate) use ring::ThreadRing;
pub(crate) use support::{RingPlan, plan, refusal};

/// Makes the kernel send something to a queue. The kernel assigns requests that wait in a queue to
/// an entry whose reply it takes, and never to a new entry.
pub(crate) type QueueNudge = Box<dyn Fn() + Send>;

/// One worker's ring.
pub(crate) struct UringChannel {
    ring: ThreadRing,
    /// Bytes of payload that the kernel requires of an entry.
    capacity: usize,
    qid: u16,
    /// The number of the entry that the kernel has; earlier ones are gone.
    key: u64,
    /// The entry while the kernel holds it.
    away: Option<UringEntry>,
    exchange: UringExchange,
    nudge: QueueNudge,
}

impl UringChannel {
    /// A ring with an entry on the queue `qid`, for the calling thread.
    ///
    /// # Errors
    ///
    /// The errors of [`ThreadRing::new`], and the error with which the kernel refuses the entry:
    /// EOPNOTSUPP if the module's parameter is off.
    pub(crate) fn new(
        device: &Arc<OwnedFd>,
        qid: u16,
        capacity: usize,
        answers: Arc<FinishedAnswers>,
        nudge: QueueNudge,
    ) -> Result<Self> {
        let ring = ThreadRing::new(device, 4)?;
        let exchange = UringExchange::new(answers);
        let mut channel = UringChannel { ring, qid, key: 0, away: None, exchange, nudge, capacity };
        channel.register()?;
        // A refusal is there at once; otherwise the entry waits for a request.
        match channel.ring.next_completion() {
            Some(refused) if refused.result < 0 => Err(Errno::from_raw(-refused.result)),
            _ => Ok(channel),
        }
    }

    /// Gives the kernel a new entry.
    fn register(&mut self) -> Result<()> {
        self.key += 1;
        let mut entry = UringEntry::new(self.qid, self.capacity);
        self.ring.register(&mut entry, self.key)?;
        self.away = Some(entry);
        (self.nudge)();
        Ok(())
    }

    /// Queues the answer to the last request, if there was one.
    fn settle(&mut self) -> Result<()> {
        if self.away.is_some() {
            return Ok(());
        }
        let Some(entry) = self.exchange.finish() else {
            // It is answered later, and the entry with it.
            return self.register();
        };
        self.ring.commit(&entry, self.key)?;
        self.away = Some(entry);
        Ok(())
    }

    /// Processes the completion of the entry.
    fn take(&mut self) -> Result<ReceiveOutcome> {
        while let Some(completed) = self.ring.next_completion() {
            if completed.key != self.key {
                continue;
            }
            if completed.result >= 0 {
                let Some(entry) = self.away.take() else { return Ok(ReceiveOutcome::Nothing) };
                self.exchange.begin(entry);
                return Ok(ReceiveOutcome::Request);
            }
            match Errno::from_raw(-completed.result) {
                // The kernel did not find the request that was answered, and has dropped the entry.
                errno @ (Errno::ENOENT | Errno::EINVAL | Errno::EIO) => {
                    log::error!("io_uring: an answer was refused: {errno}");
                    self.register()?;
                }
                _ => return Ok(ReceiveOutcome::Unmounted),
            }
        }
        Ok(ReceiveOutcome::Nothing)
    }
}

impl WorkerChannel for UringChannel {
    fn receive(&mut self, _spin: bool) -> Result<ReceiveOutcome> {
        self.settle()?;
        match self.ring.submit_and_wait() {
            Ok(()) | Err(Errno::EINTR | Errno::EAGAIN) => self.take(),
            Err(errno) => Err(errno),
        }
    }

    fn exchange(&mut self) -> (RequestMessage<'_>, &mut dyn RequestReply) {
        self.exchange.parts()
    }

    fn payload_in_pipe(&self) -> bool {
        false
    }
}
