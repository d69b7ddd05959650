//! What one connection may have at once.
//!
//! A client that takes without end would use up what all others need: memory of the server, descriptors
//! below, room for locks. Every kind of thing is counted for each connection, and one more than the
//! limit is refused with the error that the kernel has for that.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use defuse_fs::locks::LockTable;
use defuse_fs::{Errno, Ino, LockKind, LockOwner, LockRequest, Result};

use super::ledger::Ledger;
use defuse_wire::convert;
use defuse_wire::request::Body;

/// Most that one connection may have at once.
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
    /// Memory for files that are mapped, in bytes. More is `ENOMEM`. Holes of a file take none.
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

/// Whose locks may be on an inode.
pub(super) type LockKey = (Ino, LockKind, LockOwner);

/// How many there are of something.
#[derive(Default)]
pub(super) struct Number(AtomicU64);

impl Number {
    pub(super) fn add(&self, count: u64) {
        self.0.fetch_add(count, Ordering::Relaxed);
    }

    pub(super) fn sub(&self, count: u64) {
        self.0.fetch_sub(count, Ordering::Relaxed);
    }

    pub(super) fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// What one connection has.
pub(super) struct Usage {
    pub(super) limits: Limits,
    pub(super) lookups: Number,
    pub(super) opens: Number,
    pub(super) mapped: Number,
    waits: Number,
    /// The ranges that it has locked, by owner, so that they are counted as the file system does.
    ranges: Mutex<LockTable<LockKey, ()>>,
    /// Held while something is mapped.
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

    /// An owner has no locks any more.
    pub(super) fn unlocked(&self, key: LockKey) {
        self.ranges().drop_owner(key, key.1, key.2, &mut Vec::new());
    }
}

/// Counted as a wait for a lock until it is dropped.
pub(crate) struct Wait(Arc<Ledger>);

impl Drop for Wait {
    fn drop(&mut self) {
        self.0.usage.waits.sub(1);
    }
}

impl Ledger {
    /// `ENFILE`, `EMFILE` or `ENOLCK` where the request would give more than the connection may have.
    /// Requests that are answered at the same time may all be the last one.
    pub(crate) fn admit(&self, body: &Body<'_>) -> Result<()> {
        let usage = &self.usage;
        let is_lock = |typ| typ != convert::F_UNLCK;
        match body {
            Body::Create { .. } | Body::Tmpfile { .. } | Body::Open(_) | Body::Opendir(_)
                if usage.opens.get() >= usage.limits.opens =>
            {
                Err(Errno::EMFILE)
            }
            Body::Lookup { .. }
            | Body::Create { .. }
            | Body::Tmpfile { .. }
            | Body::Mknod { .. }
            | Body::Mkdir { .. }
            | Body::Symlink { .. }
            | Body::Link { .. }
                if !self.may_look_up() =>
            {
                Err(Errno::ENFILE)
            }
            Body::Setlk(args) | Body::Setlkw(args) if is_lock(args.lk.type_) => {
                let full = usage.ranges().held() as u64 >= usage.limits.locks;
                if full { Err(Errno::ENOLCK) } else { Ok(()) }
            }
            _ => Ok(()),
        }
    }

    /// Whether one more inode may be given.
    pub(crate) fn may_look_up(&self) -> bool {
        self.usage.lookups.get() < self.usage.limits.lookups
    }

    /// The file system has given or taken a lock. The owner is the client's.
    pub(crate) fn locked(&self, ino: Ino, request: &LockRequest) {
        let key = (ino, request.kind, request.owner);
        // A key has one owner, so that nothing stands against it.
        let _ = self.usage.ranges().set(key, request, &mut Vec::new());
    }

    /// One wait for a lock more. `ENOLCK`.
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
    use defuse_fs::{Fh, File, Lock, LockType, OpenFlags};

    use super::*;
    use defuse_wire::abi;

    #[test]
    fn one_more_than_the_limit_is_refused_until_something_goes_back() {
        let limits = Limits { lookups: 1, opens: 1, locks: 2, lock_waits: 1, mapped_bytes: 0 };
        let ledger = Arc::new(Ledger::new(limits));
        let (lookup, open) = (Body::Lookup { name: b"x" }, Body::Open(abi::OpenIn::default()));
        assert_eq!((ledger.admit(&lookup), ledger.admit(&open)), (Ok(()), Ok(())));
        ledger.looked_up(Ino(5));
        ledger.looked_up(Ino(5));
        let file = File { ino: Ino(5), fh: Fh(0) };
        let file = File { fh: ledger.opened(file, false, OpenFlags(0)), ..file };
        assert_eq!(ledger.admit(&lookup), Err(Errno::ENFILE));
        assert_eq!(ledger.admit(&open), Err(Errno::EMFILE));
        assert!(ledger.closed(file).is_some() && ledger.admit(&open) == Ok(()));
        assert_eq!((ledger.forgotten(Ino(5), 2), ledger.admit(&lookup)), (2, Ok(())));
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
        let ask = Body::Setlk(abi::LkIn::default());
        ledger.locked(Ino(5), &lock(LockType::Write, 0, 9));
        ledger.locked(Ino(5), &lock(LockType::Write, 10, 19));
        assert_eq!(ledger.admit(&ask), Ok(()));
        ledger.locked(Ino(5), &lock(LockType::Unlock, 5, 6));
        assert_eq!(ledger.admit(&ask), Err(Errno::ENOLCK));
        ledger.locked(Ino(5), &lock(LockType::Unlock, 0, u64::MAX));
        assert_eq!(ledger.admit(&ask), Ok(()));
    }
}
