//! POSIX and flock locks in the lower file system, [`LockPlace::FileSystem`](crate::LockPlace).
//!
//! POSIX locks are taken as open file description locks, fcntl(2), on one descriptor for each pair
//! of inode and owner. Owners thus conflict with each other and with other users of the source, and
//! closing another descriptor of the file releases nothing. flock locks are taken on the descriptor
//! of their open file.
//!
//! A waiting lock occupies no thread. One thread retries all of them: at once after an unlock
//! through this file system, otherwise at growing intervals. Only a blocking call would report an
//! unlock by others, and that cannot be interrupted without a signal. A process that forks has no
//! such thread ([`LockPlace::Inherited`](crate::LockPlace)).

use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use defuse_fs::locks::WaitShares;
use defuse_fs::{
    Errno, Ino, InterruptCheck, Lock, LockKind, LockOwner, LockRequest, LockType, LockWait, Result,
};
use rustix::fs::FlockOperation;

use crate::lower::OrErrno;
use crate::sys;

/// `OFFSET_MAX` of the kernel. A range that ends here or beyond extends to the end of the file.
const OFFSET_MAX: u64 = u64::MAX >> 1;
/// The shortest and the longest interval between two attempts.
const POLL: (Duration, Duration) = (Duration::from_millis(1), Duration::from_millis(50));

/// The descriptors that hold the locks of each owner, and the waiting locks.
pub(crate) struct OwnerLocks {
    owners: Mutex<LockOwners>,
    waiters: Arc<LockWaiters>,
}

/// The descriptors of each owner, and the process that opened them.
struct LockOwners {
    fds: HashMap<Ino, HashMap<LockOwner, Arc<OwnedFd>>>,
    process: u32,
}

#[derive(Default)]
struct LockWaiters {
    queue: Mutex<LockWaitQueue>,
    changed: Condvar,
}

#[derive(Default)]
struct LockWaitQueue {
    waiting: Vec<QueuedWait>,
    /// All waits, also those that are being tried outside of the mutex.
    shares: WaitShares,
    running: bool,
    /// Retry now: a lock was released or a wait interrupted.
    kicked: bool,
    stopped: bool,
}

struct QueuedWait {
    wait: LockWait,
    fd: Arc<OwnedFd>,
}

impl OwnerLocks {
    pub(crate) fn new() -> Self {
        let owners = LockOwners { fds: HashMap::new(), process: std::process::id() };
        OwnerLocks { owners: Mutex::new(owners), waiters: Arc::default() }
    }

    fn owners(&self) -> MutexGuard<'_, LockOwners> {
        self.owners.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The descriptor that has the POSIX locks of `owner`.
    pub(crate) fn find(&self, ino: Ino, owner: LockOwner) -> Option<Arc<OwnedFd>> {
        self.owners().fds.get(&ino)?.get(&owner).cloned()
    }

    /// Gives `owner` the descriptor `fd` for its POSIX locks, unless it has one. Returns the one
    /// that it has.
    pub(crate) fn add_owner(&self, ino: Ino, owner: LockOwner, fd: OwnedFd) -> Arc<OwnedFd> {
        let mut owners = self.owners();
        if owners.fds.is_empty() {
            owners.process = std::process::id();
        }
        let of_inode = owners.fds.entry(ino).or_default();
        Arc::clone(of_inode.entry(owner).or_insert_with(|| Arc::new(fd)))
    }

    /// Lets the waiting locks be tried again, as one was released.
    pub(crate) fn kick(&self) {
        self.waiters.kick();
    }

    /// Answers `wait` when its lock can be had on `fd`.
    pub(crate) fn wait(&self, wait: LockWait, fd: Arc<OwnedFd>) {
        LockWaiters::add(&self.waiters, QueuedWait { wait, fd });
    }

    /// Closes the parent's descriptors in a child process. The locks of the parent must end with
    /// the parent, and would not while a child has these open. The parent keeps its own.
    pub(crate) fn close_of_parent(&self) {
        let mut owners = self.owners();
        if owners.fds.is_empty() || owners.process == std::process::id() {
            return;
        }
        let of_parent = std::mem::take(&mut owners.fds);
        drop(owners);
        drop(of_parent);
    }

    /// Releases the POSIX locks of `owner`.
    pub(crate) fn drop_owner(&self, ino: Ino, owner: LockOwner) {
        let mut owners = self.owners();
        let Some(of_inode) = owners.fds.get_mut(&ino) else { return };
        let fd = of_inode.remove(&owner);
        if of_inode.is_empty() {
            owners.fds.remove(&ino);
        }
        drop(owners);
        if let Some(fd) = fd {
            // Unlock explicitly: a waiting lock may hold the descriptor, too, so that closing is
            // not enough.
            let all = Lock { typ: LockType::Unlock, start: 0, end: OFFSET_MAX, pid: 0 };
            let _ = ofd(fd.as_fd(), libc::F_OFD_SETLK, &all);
            self.waiters.kick();
        }
    }

    /// Releases the locks of an inode that no frontend knows any more.
    pub(crate) fn forget(&self, ino: Ino) {
        if self.owners().fds.remove(&ino).is_some() {
            self.waiters.kick();
        }
    }

    /// Number of descriptors held for lock owners.
    pub(crate) fn len(&self) -> usize {
        self.owners().fds.values().map(HashMap::len).sum()
    }
}

impl Drop for OwnerLocks {
    fn drop(&mut self) {
        let mut queue = self.waiters.lock();
        queue.stopped = true;
        let waiting = std::mem::take(&mut queue.waiting);
        drop(queue);
        // Dropped, and thereby answered, outside of the mutex.
        drop(waiting);
        self.waiters.kick();
    }
}

impl LockWaiters {
    fn lock(&self) -> MutexGuard<'_, LockWaitQueue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn kick(&self) {
        let mut queue = self.lock();
        if queue.running {
            queue.kicked = true;
            self.changed.notify_one();
        }
    }

    fn add(this: &Arc<Self>, waiting: QueuedWait) {
        let shared = Arc::clone(this);
        // Before it is in the queue, so that an interrupt is either seen there or kicks.
        waiting.wait.interrupt().on_interrupt(move || shared.kick());
        let mut queue = this.lock();
        if queue.stopped || !queue.shares.take(waiting.wait.caller().uid) {
            drop(queue);
            return waiting.wait.finish(Err(Errno::ENOLCK));
        }
        queue.waiting.push(waiting);
        queue.kicked = true;
        this.changed.notify_one();
        if queue.running {
            return;
        }
        let shared = Arc::clone(this);
        let name = std::thread::Builder::new().name("defuse-locks".into());
        let run = move || {
            crate::sys::take_no_signals();
            shared.run();
        };
        match name.spawn(run) {
            Ok(_) => queue.running = true,
            Err(error) => {
                let waiting = std::mem::take(&mut queue.waiting);
                queue.shares = WaitShares::default();
                drop(queue);
                log::error!("no thread to wait for locks: {error}");
                waiting.into_iter().for_each(|waiting| waiting.wait.finish(Err(Errno::ENOLCK)));
            }
        }
    }

    /// Retries until no lock is waiting.
    fn run(&self) {
        let mut interval = POLL.0;
        let mut queue = self.lock();
        loop {
            if queue.waiting.is_empty() || queue.stopped {
                queue.running = false;
                return;
            }
            if std::mem::take(&mut queue.kicked) {
                interval = POLL.0;
            }
            let batch = std::mem::take(&mut queue.waiting);
            drop(queue);
            let mut ended = Vec::new();
            let mut go_on = |waiting: QueuedWait| {
                let uid = waiting.wait.caller().uid;
                let left = waiting.go_on();
                ended.extend(left.is_none().then_some(uid));
                left
            };
            let left: Vec<QueuedWait> = batch.into_iter().filter_map(&mut go_on).collect();
            queue = self.lock();
            ended.into_iter().for_each(|uid| queue.shares.give_back(uid));
            queue.waiting.extend(left);
            if !queue.kicked && !queue.waiting.is_empty() {
                let waited = self.changed.wait_timeout(queue, interval);
                queue = waited.unwrap_or_else(PoisonError::into_inner).0;
                interval = (interval * 2).min(POLL.1);
            }
        }
    }
}

impl QueuedWait {
    /// Tries once. Returns `None` if the request was answered.
    fn go_on(self) -> Option<Self> {
        let result = if self.wait.interrupt().is_interrupted() {
            Err(Errno::EINTR)
        } else {
            attempt(self.fd.as_fd(), &self.wait.request())
        };
        match result {
            Err(Errno::EAGAIN) => Some(self),
            other => {
                self.wait.finish(other);
                None
            }
        }
    }
}

/// Sets, changes or releases a lock without waiting. Fails with `EAGAIN` if another lock conflicts.
pub(crate) fn attempt(fd: BorrowedFd<'_>, request: &LockRequest) -> Result<()> {
    match request.kind {
        LockKind::Posix => match ofd(fd, libc::F_OFD_SETLK, &request.lock) {
            Err(Errno::EACCES) => Err(Errno::EAGAIN),
            other => other.map(drop),
        },
        LockKind::Flock => {
            let operation = match request.lock.typ {
                LockType::Read => FlockOperation::NonBlockingLockShared,
                LockType::Write => FlockOperation::NonBlockingLockExclusive,
                LockType::Unlock => FlockOperation::Unlock,
            };
            rustix::fs::flock(fd, operation).or_errno()
        }
    }
}

/// Calls fcntl(2) with an `F_OFD_*` command. Returns the lock that the kernel left in the
/// structure, or `None` for `F_UNLCK`.
pub(crate) fn ofd(fd: BorrowedFd<'_>, cmd: i32, lock: &Lock) -> Result<Option<Lock>> {
    let typ = match lock.typ {
        LockType::Read => libc::F_RDLCK,
        LockType::Write => libc::F_WRLCK,
        LockType::Unlock => libc::F_UNLCK,
    };
    if lock.start > OFFSET_MAX || lock.end < lock.start {
        return Err(Errno::EINVAL);
    }
    // A length of 0 extends to the end of the file.
    let len = if lock.end >= OFFSET_MAX { 0 } else { lock.end - lock.start + 1 };
    let found = sys::ofd_lock(fd, cmd, (typ, lock.start as i64, len as i64))?;
    let typ = match found.typ {
        libc::F_RDLCK => LockType::Read,
        libc::F_WRLCK => LockType::Write,
        _ => return Ok(None),
    };
    let start = found.start as u64;
    let end = if found.len == 0 { OFFSET_MAX } else { start + found.len as u64 - 1 };
    // A lock of an open file description belongs to no process and reports -1.
    let pid = u32::try_from(found.pid).unwrap_or(0);
    Ok(Some(Lock { typ, start, end, pid }))
}
