//! Messages for which the client has left no room, sent by a thread of their own.
//!
//! A client that reads nothing may wait for itself, but the threads that bring later answers and
//! notifications serve others: a file system that completes the operations of all clients on one
//! thread would stand still.

use std::collections::VecDeque;
use std::io::IoSlice;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use defuse_fs::{Errno, Result};
use rustix::net::{SendAncillaryBuffer, SendFlags, Shutdown, sendmsg, shutdown};

use crate::line::errno;

/// Bytes kept for a client. With more, its connection ends: it may ask without limit, and reads
/// nothing.
const MOST: usize = 16 << 20;

/// Bytes that a message takes beside its own.
const BESIDE: usize = 64;

/// The unsent messages of one connection.
#[derive(Debug)]
pub(crate) struct Unsent {
    socket: Arc<OwnedFd>,
    queue: Mutex<Queue>,
    /// There is a queue, or a message of it is being sent: later ones follow it.
    waits: AtomicBool,
}

#[derive(Debug, Default)]
struct Queue {
    messages: VecDeque<Vec<u8>>,
    bytes: usize,
}

impl Unsent {
    pub(crate) fn new(socket: Arc<OwnedFd>) -> Arc<Self> {
        Arc::new(Unsent { socket, queue: Mutex::default(), waits: AtomicBool::new(false) })
    }

    /// Sends a message without waiting for the client.
    ///
    /// # Errors
    ///
    /// `ENODEV` if the client reads nothing; its connection ends then. Others are those of
    /// sendmsg(2).
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
        queue.messages.push_back(message);
        if !self.waits.swap(true, Ordering::AcqRel) {
            let unsent = Arc::clone(self);
            let thread = std::thread::Builder::new().name("defuse-unsent".into());
            if thread.spawn(move || unsent.send_all()).is_err() {
                return Err(self.give_up(queue));
            }
        }
        Ok(())
    }

    /// Sends until nothing is left or the connection ends.
    fn send_all(&self) {
        loop {
            let message = {
                let mut queue = self.lock();
                let Some(message) = queue.messages.pop_front() else {
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
    fn give_up(&self, mut queue: MutexGuard<'_, Queue>) -> Errno {
        *queue = Queue::default();
        let _ = shutdown(&self.socket, Shutdown::Both);
        Errno::ENODEV
    }

    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

fn transmit(socket: &OwnedFd, parts: &[IoSlice<'_>], flags: SendFlags) -> Result<()> {
    send_beside(socket, parts, &mut SendAncillaryBuffer::default(), flags)
}

/// Sends a message with what is beside it.
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
