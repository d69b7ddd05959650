//! Messages for which the client has left no room, sent by a thread of their own.
//!
//! A client that reads nothing may delay itself, but the threads that send deferred replies and
//! notifications serve other clients, too: a file system that completes the operations of all
//! clients on one thread would stop.

use std::collections::VecDeque;
use std::io::IoSlice;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use defuse_fs::{Errno, Result};
use defuse_session::{CountGuard, LimitedCount, UserShare};
use rustix::net::{SendAncillaryBuffer, SendFlags, Shutdown, sendmsg, shutdown};

use crate::messages::errno;
use crate::peer;

/// Bytes kept for a client. With more, its connection ends: it may make requests without limit, and
/// reads nothing.
const MOST: usize = 16 << 20;

/// Bytes that a message takes in addition to its own.
const BESIDE: usize = 64;

/// The stack of a thread that sends, in bytes.
const STACK: usize = 64 * 1024;

/// The unsent messages of one connection.
#[derive(Debug)]
pub(crate) struct UnsentMessages {
    socket: Arc<OwnedFd>,
    /// The counters that all connections of the user share, if they have limits.
    share: Option<Arc<UserShare>>,
    /// Descriptors that were sent since the client had received everything.
    passed: Mutex<Vec<CountGuard>>,
    queue: Mutex<UnsentQueue>,
    /// True if there is a queue, or if one of its messages is being sent: later messages go to its
    /// end.
    waits: AtomicBool,
}

#[derive(Debug, Default)]
struct UnsentQueue {
    messages: VecDeque<(Vec<u8>, Option<CountGuard>)>,
    bytes: usize,
}

impl UnsentMessages {
    pub(crate) fn new(socket: Arc<OwnedFd>, share: Option<Arc<UserShare>>) -> Arc<Self> {
        let (queue, waits) = (Mutex::default(), AtomicBool::new(false));
        Arc::new(UnsentMessages { socket, share, passed: Mutex::default(), queue, waits })
    }

    /// Sends a message without waiting for the client.
    ///
    /// # Errors
    ///
    /// `ENODEV` if the client reads nothing; its connection ends then. Other errors are the errors
    /// of sendmsg(2).
    pub(crate) fn send(self: &Arc<Self>, parts: &[IoSlice<'_>]) -> Result<()> {
        if !self.waits.load(Ordering::Acquire) {
            match transmit(&self.socket, parts, SendFlags::DONTWAIT) {
                Err(Errno::EAGAIN) => {}
                other => return other,
            }
        }
        let message: Vec<u8> = parts.iter().flat_map(|part| part.iter().copied()).collect();
        let mut queue = self.lock();
        queue.bytes += message.len() + BESIDE;
        if queue.bytes > MOST {
            log::debug!("a client is disconnected: it reads none of {} bytes", queue.bytes);
            return Err(self.give_up(queue));
        }
        let share = self.share.as_deref();
        let Some(taken) = reserve(share.map(|share| &share.unsent_bytes), message.len() + BESIDE)
        else {
            log::debug!("a client is disconnected: its user reads too few answers");
            return Err(self.give_up(queue));
        };
        queue.messages.push_back((message, taken));
        if !self.waits.swap(true, Ordering::AcqRel) && !self.start(share) {
            return Err(self.give_up(queue));
        }
        Ok(())
    }

    /// Starts the thread that sends. False if the user has too many such threads, or if it cannot
    /// be started.
    fn start(self: &Arc<Self>, share: Option<&UserShare>) -> bool {
        let Some(taken) = reserve(share.map(|share| &share.senders), 1) else { return false };
        let unsent = Arc::clone(self);
        let thread = std::thread::Builder::new().name("defuse-unsent".into()).stack_size(STACK);
        let run = move || {
            let _taken = taken;
            unsent.send_all();
        };
        thread.spawn(run).is_ok()
    }

    /// Counts a descriptor that is sent now. The connection of a client that receives none of many
    /// ends.
    ///
    /// # Errors
    ///
    /// `ENODEV` if its user has too many.
    pub(crate) fn pass(&self) -> Result<()> {
        let Some(share) = &self.share else { return Ok(()) };
        let mut passed = self.passed.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        if peer::count_unreceived(&self.socket) == Some(0) {
            passed.clear();
        }
        match share.descriptors.take(1) {
            Some(taken) => passed.push(taken),
            None => {
                log::debug!("a client is disconnected: its user receives too few descriptors");
                return Err(self.give_up(self.lock()));
            }
        }
        Ok(())
    }

    /// Sends until nothing is left or the connection ends.
    fn send_all(&self) {
        loop {
            let message = {
                let mut queue = self.lock();
                let Some((message, _taken)) = queue.messages.pop_front() else {
                    self.waits.store(false, Ordering::Release);
                    return;
                };
                message
            };
            let sent = transmit(&self.socket, &[IoSlice::new(&message)], SendFlags::empty());
            let mut queue = self.lock();
            queue.bytes = queue.bytes.saturating_sub(message.len() + BESIDE);
            if sent.is_err() {
                self.give_up(queue);
            }
        }
    }

    /// Ends the connection, which no message reaches any more.
    fn give_up(&self, mut queue: MutexGuard<'_, UnsentQueue>) -> Errno {
        *queue = UnsentQueue::default();
        let _ = shutdown(&self.socket, Shutdown::Both);
        Errno::ENODEV
    }

    fn lock(&self) -> MutexGuard<'_, UnsentQueue> {
        self.queue.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

/// Counts `count` for a user. `None` beyond its limit.
fn reserve(of: Option<&Arc<LimitedCount>>, count: usize) -> Option<Option<CountGuard>> {
    match of {
        Some(of) => of.take(count).map(Some),
        None => Some(None),
    }
}

fn transmit(socket: &OwnedFd, parts: &[IoSlice<'_>], flags: SendFlags) -> Result<()> {
    send_beside(socket, parts, &mut SendAncillaryBuffer::default(), flags)
}

/// Sends a message with its ancillary data.
pub(crate) fn send_beside(
    socket: &OwnedFd,
    parts: &[IoSlice<'_>],
    beside: &mut SendAncillaryBuffer<'_, '_, '_>,
    flags: SendFlags,
) -> Result<()> {
    loop {
        // If the client has ended, that is an error and no signal.
        match sendmsg(socket, parts, beside, flags | SendFlags::NOSIGNAL) {
            // An answer must not be lost to the signal that interrupts its request.
            Err(rustix::io::Errno::INTR) => {}
            other => return other.map(drop).map_err(errno),
        }
    }
}
