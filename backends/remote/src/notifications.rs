//! Notifications of a server, and replies that no caller waits for.

use std::cell::Cell;
use std::collections::VecDeque;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, OnceLock, Weak};

use defuse_fs::{Errno, Ino, LockWait, Name, Notify, PollHandle, Result};
use zerocopy::FromBytes;

use super::{RemoteClient, RemoteShared, lock};
use defuse_wire::abi::{self, NotifyCode, Opcode};
use defuse_wire::encode::{self, EncodedRequest};

/// Maximum number of notifications that wait while another one is delivered on the same thread.
const WAITING_MAX: usize = 1024;

/// The listeners, and the notifications not yet delivered.
#[derive(Default)]
pub(super) struct NoticeQueue {
    listeners: Mutex<Vec<Arc<dyn Notify>>>,
    waiting: Mutex<VecDeque<(i32, Vec<u8>)>>,
    client: OnceLock<Weak<RemoteShared>>,
}

thread_local! {
    static DELIVERING: Cell<bool> = const { Cell::new(false) };
}

impl NoticeQueue {
    pub(super) fn add(&self, notify: Arc<dyn Notify>) {
        lock(&self.listeners).push(notify);
    }

    /// Sends replies to RETRIEVE through `client`.
    pub(super) fn reach(&self, client: &Arc<RemoteShared>) {
        let _ = self.client.set(Arc::downgrade(client));
    }

    /// Delivers a notification. A notification that arrives while this thread delivers another is
    /// queued, because a server could otherwise cause an infinite recursion.
    pub(super) fn receive(&self, code: i32, body: &[u8]) {
        if DELIVERING.get() {
            let mut waiting = lock(&self.waiting);
            if waiting.len() >= WAITING_MAX {
                drop(waiting);
                if let Some(client) = self.client() {
                    client.connection.end("too many notifications");
                }
                return;
            }
            waiting.push_back((code, body.to_vec()));
            return;
        }
        DELIVERING.set(true);
        self.deliver(code, body);
        loop {
            let next = lock(&self.waiting).pop_front();
            let Some((code, body)) = next else { break };
            self.deliver(code, &body);
        }
        DELIVERING.set(false);
    }

    fn client(&self) -> Option<Arc<RemoteShared>> {
        self.client.get().and_then(Weak::upgrade)
    }

    fn deliver(&self, code: i32, body: &[u8]) {
        let listeners = lock(&self.listeners).clone();
        let Some(known) = NotifyCode::ALL.iter().find(|&&known| known as i32 == code) else {
            crate::reply_log::LOG.warn(|| format!("a notification with the unknown code {code}"));
            return;
        };
        for listener in &listeners {
            // Other errors mean that the listener does not know the inode, which is harmless.
            let delivered = self.deliver_notice(&**listener, *known, body);
            if delivered == Err(Errno::EIO) {
                crate::reply_log::LOG
                    .warn(|| format!("an invalid notification {known:?} of {} bytes", body.len()));
            }
        }
    }

    fn deliver_notice(&self, listener: &dyn Notify, code: NotifyCode, body: &[u8]) -> Result<()> {
        match code {
            NotifyCode::Poll => {
                let kh = split_fixed::<abi::NotifyPollWakeupOut>(body)?.0.kh;
                listener.poll_wake(PollHandle(kh))
            }
            NotifyCode::InvalInode => {
                let out = split_fixed::<abi::NotifyInvalInodeOut>(body)?.0;
                let range = u64::try_from(out.off).ok().map(|off| (off, out.len.max(0) as u64));
                listener.invalidate_inode(Ino(out.ino), range)
            }
            NotifyCode::InvalEntry => {
                let (out, rest) = split_fixed::<abi::NotifyInvalEntryOut>(body)?;
                let expire_only = out.flags & abi::FUSE_EXPIRE_ONLY != 0;
                listener.invalidate_entry(Ino(out.parent), name(rest, out.namelen)?, expire_only)
            }
            NotifyCode::Delete => {
                let (out, rest) = split_fixed::<abi::NotifyDeleteOut>(body)?;
                listener.notify_delete(Ino(out.parent), Ino(out.child), name(rest, out.namelen)?)
            }
            NotifyCode::Store => {
                let (out, data) = split_fixed::<abi::NotifyStoreOut>(body)?;
                if data.len() != out.size as usize {
                    return Err(Errno::EIO);
                }
                listener.store(Ino(out.nodeid), out.offset, data)
            }
            NotifyCode::Retrieve => {
                let out = split_fixed::<abi::NotifyRetrieveOut>(body)?.0;
                self.retrieve(listener, &out)
            }
            // A request cannot have been lost.
            NotifyCode::Resend => Ok(()),
            NotifyCode::IncEpoch => listener.increment_epoch(),
            NotifyCode::Prune => {
                let (out, rest) = split_fixed::<abi::NotifyPruneOut>(body)?;
                if rest.len() != (out.count as usize).saturating_mul(8) {
                    return Err(Errno::EIO);
                }
                let numbers = rest.chunks_exact(8).flat_map(u64::read_from_bytes);
                let inodes: Vec<_> = numbers.map(Ino).collect();
                listener.prune(&inodes)
            }
        }
    }

    /// Reads the cache of the listener. The data is sent as NOTIFY_REPLY, if the socket has space.
    fn retrieve(&self, listener: &dyn Notify, out: &abi::NotifyRetrieveOut) -> Result<()> {
        let client = self.client.get().cloned().unwrap_or_default();
        let (unique, ino, offset) = (out.notify_unique, Ino(out.nodeid), out.offset);
        let size = (out.size as usize).min(defuse_wire::vendor::SOCKET_IO_MAX);
        let done = move |found: Result<Vec<u8>>| {
            let Some(client) = client.upgrade() else { return };
            let mut data = found.unwrap_or_default();
            data.truncate(size);
            client.notify_reply(unique, ino, offset, &data);
        };
        listener.retrieve(ino, offset, size as u32, Box::new(done))
    }
}

fn split_fixed<T: FromBytes>(body: &[u8]) -> Result<(T, &[u8])> {
    T::read_from_prefix(body).map_err(|_| Errno::EIO)
}

/// A name of `len` bytes, terminated by a NUL.
fn name(rest: &[u8], len: u32) -> Result<Name<'_>> {
    match rest.split_last() {
        Some((0, name)) if name.len() == len as usize => Name::new(name).map_err(|_| Errno::EIO),
        _ => Err(Errno::EIO),
    }
}

impl RemoteShared {
    fn notify_reply(&self, unique: u64, ino: Ino, offset: u64, data: &[u8]) {
        let args = abi::NotifyRetrieveIn { offset, size: data.len() as u32, ..Default::default() };
        let caller = defuse_fs::Caller::default();
        let mut request = EncodedRequest::for_caller(Opcode::NotifyReply, caller, ino).with(&args);
        let head = request.finish(data.len());
        let at = std::mem::offset_of!(abi::InHeader, unique);
        head[at..at + 8].copy_from_slice(&unique.to_ne_bytes());
        // Waiting for space could wait for the thread that delivers.
        if let Err(errno) = self.connection.try_tell(head, data) {
            log::debug!("the reply to a RETRIEVE is lost: {errno}");
        }
    }
}

impl RemoteClient {
    /// Leaves a wait for a lock to the server.
    pub(super) fn wait_for_lock(&self, wait: LockWait) {
        if self.shared.lacks(Opcode::Setlkw) {
            return wait.finish(Err(Errno::ENOSYS));
        }
        let (file, request, caller) = (wait.file(), wait.request(), wait.caller());
        let interrupt = Arc::clone(wait.interrupt());
        let wait = Arc::new(Mutex::new(Some(wait)));
        let waiting = Arc::clone(&wait);
        let counted = ExpectedReply::new(&self.shared);
        let done = move |result: Result<&[u8]>| {
            let _counted = counted;
            let wait = lock(&waiting).take();
            if let Some(wait) = wait {
                wait.finish(result.and_then(defuse_wire::decode::check_empty));
            }
        };
        let args = encode::lk_in(file, &request);
        let mut head = EncodedRequest::for_caller(Opcode::Setlkw, caller, file.ino).with(&args);
        match self.shared.connection.request_deferred(head.finish(0), &[], Box::new(done)) {
            Ok(unique) => {
                let client = Arc::downgrade(&self.shared);
                interrupt.on_interrupt(move || {
                    if let Some(client) = client.upgrade() {
                        client.connection.interrupt(unique);
                    }
                });
                self.start_listening();
            }
            Err(errno) => {
                let wait = lock(&wait).take();
                if let Some(wait) = wait {
                    wait.finish(Err(errno));
                }
            }
        }
    }

    /// Makes a thread receive notifications, because a caller waits for one.
    pub(super) fn listen(&self) {
        self.shared.expected.fetch_add(1, Ordering::SeqCst);
        self.start_listening();
    }

    /// Starts a thread that receives messages without a waiting caller, while any are expected.
    fn start_listening(&self) {
        if self.shared.listening.swap(true, Ordering::SeqCst) {
            return;
        }
        let client = Arc::downgrade(&self.shared);
        let thread = std::thread::Builder::new().name("defuse-client".to_owned());
        let receive = move || {
            crate::sys::block_signals();
            receive_for_others(&client);
        };
        if let Err(error) = thread.spawn(receive) {
            log::error!("cannot start the thread that receives notifications: {error}");
            self.shared.listening.store(false, Ordering::SeqCst);
        }
    }
}

fn receive_for_others(client: &Weak<RemoteShared>) {
    while let Some(client) = client.upgrade() {
        if client.connection.is_dead() {
            return;
        }
        if client.expected.load(Ordering::SeqCst) == 0 {
            client.listening.store(false, Ordering::SeqCst);
            // A request that came in between has seen this thread.
            let missed = client.expected.load(Ordering::SeqCst) > 0;
            if !missed || client.listening.swap(true, Ordering::SeqCst) {
                return;
            }
        }
        client.connection.wait_readable();
        client.connection.drain();
    }
}

/// Counts one expected reply without a waiting caller.
struct ExpectedReply(Weak<RemoteShared>);

impl ExpectedReply {
    fn new(client: &Arc<RemoteShared>) -> Self {
        client.expected.fetch_add(1, Ordering::SeqCst);
        ExpectedReply(Arc::downgrade(client))
    }
}

impl Drop for ExpectedReply {
    fn drop(&mut self) {
        if let Some(client) = self.0.upgrade() {
            client.expected.fetch_sub(1, Ordering::SeqCst);
        }
    }
}
