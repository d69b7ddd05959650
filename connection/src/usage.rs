//! Limits of one connection.
//!
//! A client that takes without end would use up what all others need: memory of the server, descriptors
//! below, room for locks. The things that a connection has are counted, and one more than the limit is
//! refused with the error of the kernel.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use defuse_fs::locks::LockTable;
use defuse_fs::{Errno, Ino, LockKind, LockOwner, LockRequest, LockType, Result};

use crate::ledger::Ledger;

/// Upper limits for one connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Inodes that were looked up and not given back. One more is `ENFILE`.
    pub lookups: u64,
    /// Open files and directories. One more is `EMFILE`.
    pub opens: u64,
    /// Ranges that are locked. One more is `ENOLCK`.
    pub locks: u64,
    /// Locks that are waited for. One more is `ENOLCK`.
    pub lock_waits: u64,
    /// Memory for mapped files, in bytes. More is `ENOMEM`. Holes of a file take none.
    pub mapped_bytes: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Limits {
            lookups: 1 << 22,
            opens: 1 << 16,
            locks: 1 << 16,
            lock_waits: 1 << 10,
            mapped_bytes: 1 << 30,
        }
    }
}

/// An inode, and an owner of locks on it.
pub(super) type LockKey = (Ino, LockKind, LockOwner);

/// A count.
#[derive(Default)]
pub(super) struct Number(AtomicU64);

impl Number {
    pub(super) fn add(&self, count: u64) {
        self.0.fetch_add(count, Ordering::Relaxed);
    }

    pub(super) fn sub(&self, count: u64) {
        let before = self.0.fetch_sub(count, Ordering::Relaxed);
        debug_assert!(before >= count, "{count} of {before} are given back");
    }

    pub(super) fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// Counts of the things that one connection has.
pub(super) struct Usage {
    pub(super) limits: Limits,
    pub(super) lookups: Number,
    pub(super) opens: Number,
    pub(super) mapped: Number,
    waits: Number,
    /// The locked ranges by owner, merged as the file system merges them.
    ranges: Mutex<LockTable<LockKey, ()>>,
    /// Held while a mapping is made.
    pub(super) mapping: Mutex<()>,
}

impl Usage {
    pub(super) fn new(limits: Limits) -> Usage {
        Usage {
            limits,
            lookups: Number::default(),
            opens: Number::default(),
            mapped: Number::default(),
            waits: Number::default(),
            ranges: Mutex::default(),
            mapping: Mutex::default(),
        }
    }

    fn ranges(&self) -> MutexGuard<'_, LockTable<LockKey, ()>> {
        self.ranges.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// All locks of an owner are gone.
    pub(super) fn unlocked(&self, key: LockKey) {
        self.ranges().drop_owner(key, key.1, key.2, &mut Vec::new());
    }
}

/// A wait for a lock, counted until it is dropped.
pub(crate) struct Wait(Arc<Ledger>);

impl Drop for Wait {
    fn drop(&mut self) {
        self.0.usage.waits.sub(1);
    }
}

impl Ledger {
    /// Checks the limit before a call that gives a lookup: `ENFILE`. Calls at the same time may all be
    /// the last one.
    pub(crate) fn admit_lookup(&self) -> Result<()> {
        if self.may_look_up() { Ok(()) } else { Err(Errno::ENFILE) }
    }

    /// Checks the limit before an open: `EMFILE`.
    pub(crate) fn admit_open(&self) -> Result<()> {
        let full = self.usage.opens.get() >= self.usage.limits.opens;
        if full { Err(Errno::EMFILE) } else { Ok(()) }
    }

    /// Checks the limit before a lock is taken: `ENOLCK`.
    pub(crate) fn admit_lock(&self, request: &LockRequest) -> Result<()> {
        let takes = request.lock.typ != LockType::Unlock;
        let full = takes && self.usage.ranges().held() as u64 >= self.usage.limits.locks;
        if full { Err(Errno::ENOLCK) } else { Ok(()) }
    }

    /// True where one more inode may be given.
    pub(crate) fn may_look_up(&self) -> bool {
        self.usage.lookups.get() < self.usage.limits.lookups
    }

    /// The file system has set or dropped a lock. The owner is named as the client names it.
    pub(crate) fn locked(&self, ino: Ino, request: &LockRequest) {
        let key = (ino, request.kind, request.owner);
        // A key has one owner, so there is no conflict.
        let _ = self.usage.ranges().set(key, request, &mut Vec::new());
    }

    /// Counts one more wait for a lock: `ENOLCK`.
    pub(crate) fn begin_wait(self: &Arc<Ledger>) -> Result<Wait> {
        self.usage.waits.add(1);
        let wait = Wait(Arc::clone(self));
        if self.usage.waits.get() > self.usage.limits.lock_waits {
            return Err(Errno::ENOLCK);
        }
        Ok(wait)
    }
}

#[cfg(test)]
mod tests {
    use defuse_fs::{Fh, File, Lock, OpenFlags};

    use super::*;

    #[test]
    fn one_more_than_the_limit_is_refused_until_something_goes_back() {
        let limits = Limits { lookups: 1, opens: 1, locks: 2, lock_waits: 1, mapped_bytes: 0 };
        let ledger = Arc::new(Ledger::new(limits));
        assert_eq!((ledger.admit_lookup(), ledger.admit_open()), (Ok(()), Ok(())));
        ledger.looked_up(Ino(5));
        ledger.looked_up(Ino(5));
        let file = File { ino: Ino(5), fh: Fh(0) };
        let file = File { fh: ledger.opened(file, false, OpenFlags(0)), ..file };
        assert_eq!(ledger.admit_lookup(), Err(Errno::ENFILE));
        assert_eq!(ledger.admit_open(), Err(Errno::EMFILE));
        assert!(ledger.closed(file).is_some() && ledger.admit_open() == Ok(()));
        assert_eq!((ledger.forgotten(Ino(5), 2), ledger.admit_lookup()), (2, Ok(())));
        let wait = ledger.begin_wait();
        assert!(wait.is_ok() && ledger.begin_wait().is_err());
        drop(wait);
        assert!(ledger.begin_wait().is_ok());
    }

    #[test]
    fn ranges_are_counted_as_they_are_held() {
        let ledger = Ledger::new(Limits { locks: 2, ..Limits::default() });
        let lock = |typ, start, end| LockRequest {
            kind: LockKind::Posix,
            owner: LockOwner(7),
            lock: Lock { typ, start, end, pid: 1 },
            wait: false,
        };
        let ask = lock(LockType::Read, 0, 0);
        ledger.locked(Ino(5), &lock(LockType::Write, 0, 9));
        ledger.locked(Ino(5), &lock(LockType::Write, 10, 19));
        assert_eq!(ledger.admit_lock(&ask), Ok(()));
        ledger.locked(Ino(5), &lock(LockType::Unlock, 5, 6));
        assert_eq!(ledger.admit_lock(&ask), Err(Errno::ENOLCK));
        ledger.locked(Ino(5), &lock(LockType::Unlock, 0, u64::MAX));
        assert_eq!(ledger.admit_lock(&ask), Ok(()));
    }
}
