//! The way from a file system to the kernel's caches: every notification of the protocol.

use std::collections::HashMap;
use std::io::IoSlice;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use defuse_fs::{Errno, Ino, Name, Notify, PollHandle, RecallCallback, Result};

use crate::recall::RecallCount;
use crate::transport::ReplyPort;
use defuse_wire::abi;
use defuse_wire::reply::Notification;

type RetrieveCallback = Box<dyn FnOnce(Result<Vec<u8>>) + Send>;

/// Most RETRIEVE notifications without an answer; the kernel answers each, so more are a mistake.
const RETRIEVES_MAX: usize = 1024;

/// The number of the first RETRIEVE. Its reply has the same number, and arrives among requests,
/// which the kernel counts from 2 upwards in steps of two: a ring finds requests and replies by
/// their number.
const FIRST_RETRIEVE: u64 = 1 << 62;

/// Sends notifications and receives the answers to RETRIEVE.
pub(crate) struct KernelNotify {
    /// Weak: a file system keeps its notifier for ever, and must not keep the device open, or the
    /// mount would outlive its session.
    port: Weak<dyn ReplyPort>,
    minor: u32,
    next: AtomicU64,
    retrieves: Mutex<HashMap<u64, RetrieveCallback>>,
    /// `None` where a notification is not acknowledged.
    recalls: Option<RecallCount>,
}

impl KernelNotify {
    /// Sends over `port`. With `acknowledges`, as on /dev/fuse, a notification has taken effect
    /// when its system call returns.
    pub(crate) fn new(port: &Arc<dyn ReplyPort>, minor: u32, acknowledges: bool) -> Self {
        KernelNotify {
            port: Arc::downgrade(port),
            minor,
            next: AtomicU64::new(FIRST_RETRIEVE),
            retrieves: Mutex::default(),
            recalls: acknowledges.then(RecallCount::default),
        }
    }

    fn send(&self, notification: &Notification<'_>, data: &[u8]) -> Result<()> {
        let port = self.port.upgrade().ok_or(Errno::ENOTCONN)?;
        let head = notification.encode();
        port.send(&[IoSlice::new(&head), IoSlice::new(data)])
    }

    /// Makes the kernel send a request without effect, an empty NOTIFY_REPLY, to the queue of the
    /// processor that runs the caller. `file` is a regular file that the kernel knows.
    pub(crate) fn nudge(&self, file: Ino) -> Result<()> {
        let notify_unique = self.next.fetch_add(2, Ordering::Relaxed);
        self.send(
            &Notification::Retrieve { notify_unique, nodeid: file.0, offset: 0, size: 0 },
            &[],
        )
    }

    /// The answer to the RETRIEVE that was sent as `unique`.
    pub(crate) fn deliver_retrieved(&self, unique: u64, data: Vec<u8>) {
        if let Some(done) = self.lock().remove(&unique) {
            done(Ok(data));
        }
    }

    /// Ends the requests that will never be answered.
    pub(crate) fn close(&self) {
        let retrieves = std::mem::take(&mut *self.lock());
        for done in retrieves.into_values() {
            done(Err(Errno::ENOTCONN));
        }
    }

    fn check_minor(&self, minor: u32) -> Result<()> {
        if self.minor >= minor { Ok(()) } else { Err(Errno::ENOSYS) }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<u64, RetrieveCallback>> {
        self.retrieves.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

impl Notify for KernelNotify {
    fn invalidate_inode(&self, ino: Ino, range: Option<(u64, u64)>) -> Result<()> {
        let signed = |value: u64| i64::try_from(value).unwrap_or(i64::MAX);
        let (off, len) = range.map_or((-1, 0), |(off, len)| (signed(off), signed(len)));
        self.send(&Notification::InvalInode { ino: ino.0, off, len }, &[])
    }

    fn invalidate_entry(&self, parent: Ino, name: Name<'_>, expire_only: bool) -> Result<()> {
        // Before 7.38 the flag was padding: the kernel would drop the name, which is more than
        // requested.
        if expire_only {
            self.check_minor(38)?;
        }
        let (parent, name) = (parent.0, name.as_bytes());
        self.send(&Notification::InvalEntry { parent, name, expire_only }, &[])
    }

    fn notify_delete(&self, parent: Ino, child: Ino, name: Name<'_>) -> Result<()> {
        let name = name.as_bytes();
        self.send(&Notification::Delete { parent: parent.0, child: child.0, name }, &[])
    }

    fn store(&self, ino: Ino, offset: u64, data: &[u8]) -> Result<()> {
        let size = u32::try_from(data.len()).map_err(|_| Errno::E2BIG)?;
        self.send(&Notification::Store { nodeid: ino.0, offset, size }, data)
    }

    fn retrieve(&self, ino: Ino, offset: u64, len: u32, done: RetrieveCallback) -> Result<()> {
        let notify_unique = self.next.fetch_add(2, Ordering::Relaxed);
        {
            let mut retrieves = self.lock();
            if retrieves.len() >= RETRIEVES_MAX {
                return Err(Errno::EAGAIN);
            }
            retrieves.insert(notify_unique, done);
        }
        let ask = Notification::Retrieve { notify_unique, nodeid: ino.0, offset, size: len };
        self.send(&ask, &[]).inspect_err(|_| {
            self.lock().remove(&notify_unique);
        })
    }

    fn poll_wake(&self, handle: PollHandle) -> Result<()> {
        self.send(&Notification::Poll { kh: handle.0 }, &[])
    }

    fn increment_epoch(&self) -> Result<()> {
        self.check_minor(44)?;
        self.send(&Notification::IncEpoch, &[])
    }

    /// fuse_notify_inc_epoch of the kernel's `fs/fuse/inode.c` increments a number, and
    /// fuse_reverse_inval_inode another one; both have happened when write(2) returns.
    fn drops_at_once(&self) -> bool {
        self.recalls.is_some() && self.check_minor(44).is_ok()
    }

    fn reads_own_pages(&self) -> bool {
        self.recalls.is_some()
    }

    fn prune(&self, inodes: &[Ino]) -> Result<()> {
        self.check_minor(45)?;
        let nodeids: Vec<u64> = inodes.iter().map(|ino| ino.0).collect();
        self.send(&Notification::Prune { nodeids: &nodeids }, &[])
    }

    /// fuse_reverse_inval_inode of the kernel's `fs/fuse/inode.c` writes dirty pages back and waits
    /// for that before write(2) returns.
    fn recall(&self, ino: Ino, limit: Duration, done: RecallCallback) {
        let (Some(recalls), Some(port)) = (&self.recalls, self.port.upgrade()) else {
            let gone = self.recalls.is_some();
            return done(Err(if gone { Errno::ENOTCONN } else { Errno::ENOSYS }));
        };
        let head = Notification::InvalInode { ino: ino.0, off: 0, len: 0 }.encode();
        recalls.start(limit, move || port.send(&[IoSlice::new(&head)]), done);
    }
}

const _: () = assert!(abi::FUSE_KERNEL_MINOR_VERSION >= 45, "prune is of 7.45");
