//! The loops that receive requests for a program: by the thread that has called, or by several
//! threads.

use std::collections::HashMap;
use std::ffi::c_int;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{Builder, Scope};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, poll};

use super::dispatch::process;
use super::port::LowPort;
use super::session::LowSession;
use super::wake::{self, SignalMask};
use crate::handle::lock;
use crate::logging::error;
use crate::options::ApiVersion;

/// Most threads of a loop.
const THREADS_MOST: usize = 4096;
/// Bytes of the stack of a thread, as programs have them by default.
const STACK: usize = 8 << 20;
/// Bytes of a WRITE before its data.
const LEAD: usize = 80;
const PAGE: usize = 4096;

/// The threads of a loop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ThreadLimits {
    /// Most threads.
    pub most: usize,
    /// Most threads that wait; further ones end.
    pub idle: usize,
    /// A descriptor of the device for each thread.
    pub clone_fd: bool,
}

/// Memory for messages. The data of a WRITE begins on a page, as direct I/O of programs needs it.
struct MessageRoom {
    bytes: Vec<u8>,
    start: usize,
}

impl MessageRoom {
    fn new(size: usize) -> Self {
        let bytes = vec![0; size + 2 * PAGE];
        let first = bytes.as_ptr().addr();
        let start = (first + LEAD).next_multiple_of(PAGE) - LEAD - first;
        MessageRoom { bytes, start }
    }

    fn room(&mut self) -> &mut [u8] {
        let len = self.bytes.len() - PAGE;
        &mut self.bytes[self.start..len]
    }
}

impl LowSession {
    /// Receives one message. Returns 0 at the end of the session. Fails with an error number.
    pub fn receive(&self, port: &LowPort, room: &mut [u8]) -> Result<usize, c_int> {
        loop {
            match port.receive(room) {
                // The request was interrupted before it was received.
                Err(libc::ENOENT) if !self.has_exited() => {}
                Err(_) if self.has_exited() => return Ok(0),
                Err(libc::ENODEV) => {
                    self.end_mount();
                    return Ok(0);
                }
                Err(errno) => {
                    if errno != libc::EINTR && errno != libc::EAGAIN {
                        let reason = std::io::Error::from_raw_os_error(errno);
                        error(&format!("fuse: reading device: {reason}"));
                    }
                    return Err(errno);
                }
                Ok(0) => {
                    self.exit();
                    return Ok(0);
                }
                Ok(len) if len < size_of::<defuse_fuse::abi::InHeader>() => {
                    error("short read on fuse device");
                    return Err(libc::EIO);
                }
                Ok(len) => return Ok(len),
            }
        }
    }

    /// Receives and handles requests on the calling thread until the session ends. Returns 0, the
    /// number of the signal that has ended it, or a negated error number.
    pub fn run_alone(self: &Arc<Self>) -> c_int {
        let Some(port) = self.port() else { return self.without_port() };
        let mut room = MessageRoom::new(self.largest_message());
        let mut result = 0;
        while !self.has_exited() {
            match self.receive(&port, room.room()) {
                Ok(0) => break,
                Ok(len) => process(self, &room.room()[..len], &port),
                Err(libc::EINTR) => {}
                // The program has made its descriptor one that does not wait.
                Err(libc::EAGAIN) => self.wait_for(&port),
                Err(errno) => {
                    result = -errno;
                    break;
                }
            }
        }
        self.finish(result)
    }

    fn without_port(&self) -> c_int {
        error("fuse: nothing is mounted: call the mount function first");
        -libc::EINVAL
    }

    /// The result of a loop. The session can be used for another one.
    fn finish(&self, result: c_int) -> c_int {
        let reason = self.reason();
        self.reset();
        let mut count = [0; 8];
        let _ = rustix::io::read(&self.wakeup, &mut count);
        match (reason, self.version) {
            (0, _) => result,
            // Programs of libfuse 2 do not learn of signals.
            (1.., ApiVersion::Two) => 0,
            (reason, _) => reason,
        }
    }

    /// Receives and handles requests by several threads until the session ends. Returns the same as
    /// [`run_alone`](Self::run_alone).
    pub fn run_many(self: &Arc<Self>, limits: ThreadLimits) -> c_int {
        let Some(port) = self.port() else { return self.without_port() };
        wake::install();
        let threads = LoopThreads {
            session: self,
            port,
            limits: ThreadLimits { most: limits.most.clamp(1, THREADS_MOST), ..limits },
            threads: AtomicUsize::new(0),
            free: AtomicUsize::new(0),
            places: Mutex::new(HashMap::new()),
            error: Mutex::new(0),
        };
        std::thread::scope(|scope| {
            threads.add(scope);
            while !self.has_exited() && threads.threads.load(Ordering::SeqCst) > 0 {
                self.wait_for_end();
            }
            threads.end();
        });
        let error = *lock(&threads.error);
        self.finish(error)
    }

    /// Waits until there is a message, the loop is to end, or a signal has come.
    fn wait_for(&self, port: &LowPort) {
        let wakeup = PollFd::from_borrowed_fd(self.wakeup.as_fd(), PollFlags::IN);
        if let Some(fd) = port.borrow_device() {
            let _ = poll(&mut [PollFd::from_borrowed_fd(fd, PollFlags::IN), wakeup], None);
        }
    }

    /// Waits until the loop is to end, or a signal has come.
    fn wait_for_end(&self) {
        let mut fds = [PollFd::from_borrowed_fd(self.wakeup.as_fd(), PollFlags::IN)];
        let _ = poll(&mut fds, None);
    }
}

/// The threads that serve a session.
struct LoopThreads<'a> {
    session: &'a Arc<LowSession>,
    port: Arc<LowPort>,
    limits: ThreadLimits,
    threads: AtomicUsize,
    /// Threads that wait for a request, or will.
    free: AtomicUsize,
    /// The threads, with a mark while they wait.
    places: Mutex<HashMap<i32, Arc<AtomicBool>>>,
    error: Mutex<c_int>,
}

impl<'a> LoopThreads<'a> {
    /// Starts a thread.
    fn add<'scope>(&'scope self, scope: &'scope Scope<'scope, '_>)
    where
        'a: 'scope,
    {
        self.threads.fetch_add(1, Ordering::SeqCst);
        self.free.fetch_add(1, Ordering::SeqCst);
        let _mask = SignalMask::block();
        let thread = Builder::new().name("fuse_worker".to_owned()).stack_size(STACK);
        if let Err(failure) = thread.spawn_scoped(scope, move || self.serve(scope)) {
            self.free.fetch_sub(1, Ordering::SeqCst);
            if self.threads.fetch_sub(1, Ordering::SeqCst) == 1 {
                error(&format!("fuse: error creating thread: {failure}"));
                self.session.end(-libc::EAGAIN);
            }
        }
    }

    /// The work of a thread.
    fn serve<'scope>(&'scope self, scope: &'scope Scope<'scope, '_>)
    where
        'a: 'scope,
    {
        let thread = rustix::thread::gettid().as_raw_nonzero().get();
        let waits = Arc::new(AtomicBool::new(false));
        lock(&self.places).insert(thread, Arc::clone(&waits));
        let own = self.limits.clone_fd.then(|| self.port.clone_device()).flatten();
        let port = own.unwrap_or_else(|| Arc::clone(&self.port));
        let mut room = MessageRoom::new(self.session.largest_message());
        while !self.session.has_exited() {
            waits.store(true, Ordering::SeqCst);
            let received = self.session.receive(&port, room.room());
            waits.store(false, Ordering::SeqCst);
            match received {
                Ok(0) => break,
                Err(libc::EINTR) => {}
                Err(libc::EAGAIN) => self.session.wait_for(&port),
                Err(errno) => {
                    *lock(&self.error) = -errno;
                    self.session.exit();
                    break;
                }
                Ok(len) => {
                    self.handle(scope, &room.room()[..len], &port);
                    if self.is_superfluous() {
                        lock(&self.places).remove(&thread);
                        self.threads.fetch_sub(1, Ordering::SeqCst);
                        return;
                    }
                }
            }
        }
        lock(&self.places).remove(&thread);
        self.threads.fetch_sub(1, Ordering::SeqCst);
        self.free.fetch_sub(1, Ordering::SeqCst);
    }

    /// Handles a message, after another thread was started where none waits.
    fn handle<'scope>(
        &'scope self,
        scope: &'scope Scope<'scope, '_>,
        message: &[u8],
        port: &Arc<LowPort>,
    ) where
        'a: 'scope,
    {
        let left = self.free.fetch_sub(1, Ordering::SeqCst) - 1;
        if left == 0
            && !is_forget(message)
            && self.threads.load(Ordering::SeqCst) < self.limits.most
        {
            self.add(scope);
        }
        process(self.session, message, port);
        self.free.fetch_add(1, Ordering::SeqCst);
    }

    /// True if more threads wait than are wanted: the calling one, which waited, is to end.
    fn is_superfluous(&self) -> bool {
        let is_more = |free: usize| (free > self.limits.idle.max(1)).then(|| free - 1);
        self.free.fetch_update(Ordering::SeqCst, Ordering::SeqCst, is_more).is_ok()
    }

    /// Ends the waits of all threads, again and again: a thread may just begin to wait.
    fn end(&self) {
        self.session.end(0);
        while self.threads.load(Ordering::SeqCst) > 0 {
            for (thread, waits) in lock(&self.places).iter() {
                if waits.load(Ordering::SeqCst) {
                    wake::wake(*thread);
                }
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// True for requests that take no time and have no reply.
fn is_forget(message: &[u8]) -> bool {
    use defuse_fuse::abi::Opcode::{BatchForget, Forget};
    let opcode = defuse_wire::request::peek(message).map_or(0, |header| header.opcode);
    opcode == Forget as u32 || opcode == BatchForget as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_data_of_a_write_begins_on_a_page() {
        for size in [8192, 135_168, 1 << 20] {
            let mut room = MessageRoom::new(size);
            assert_eq!((room.room().as_ptr().addr() + LEAD) % PAGE, 0);
            assert!(room.room().len() >= size);
        }
    }
}
