//! Limits of one connection.
//!
//! A client that takes without end would use up what all others need: memory of the server,
//! descriptors of lower files, room for locks. The objects of a connection are counted, and one
//! more than the limit is refused with the error of the kernel.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use defuse_fs::locks::LockTable;
use defuse_fs::{Errno, Ino, LockKind, LockOwner, LockRequest, LockType, Result};

use crate::ledger::ConnectionLedger;
use crate::quotas::{ReservedBytes, UserAccount};

const PAGE: u64 = 4096;

/// Upper limits for one connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConnectionLimits {
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

impl Default for ConnectionLimits {
    fn default() -> Self {
        ConnectionLimits {
            lookups: 1 << 22,
            opens: 1 << 16,
            locks: 1 << 16,
            lock_waits: 1 << 10,
            mapped_bytes: 1 << 30,
        }
    }
}

/// The objects that a client holds now, and the number of locks that it lost.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ClientHoldings {
    /// Lookups of inodes that were not given back.
    pub inodes: u64,
    /// Open files and directories.
    pub open_files: u64,
    /// Locked ranges.
    pub locks: u64,
    /// Locks that it waits for.
    pub lock_waits: u64,
    /// Memory for mapped files, in bytes.
    pub mapped_bytes: u64,
    /// Locks that were released because all its processes were stopped, since the beginning.
    pub locks_lost: u64,
}

/// An inode, and an owner of locks on it.
pub(super) type LockKey = (Ino, LockKind, LockOwner);

/// A count.
#[derive(Default)]
pub(super) struct UsageNumber(AtomicU64);

impl UsageNumber {
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

    /// Adds up to `count`, but not beyond `most`. Returns the number that was added.
    pub(super) fn take_up_to(&self, count: u64, most: u64) -> u64 {
        let room = |now: u64| count.min(most.saturating_sub(now));
        let taken =
            self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |now| Some(now + room(now)));
        let taken = taken.map_or(0, room);
        assert!(taken <= count, "{taken} of {count} were taken");
        taken
    }
}

/// Counts of the objects of one connection.
pub(super) struct ConnectionUsage {
    limits: ConnectionLimits,
    /// The account of the user, which counts the same objects of all its connections.
    account: Arc<UserAccount>,
    lookups: UsageNumber,
    opens: UsageNumber,
    mapped: UsageNumber,
    waits: UsageNumber,
    /// The locked ranges by owner, merged as the file system merges them.
    ranges: Mutex<LockTable<LockKey, ()>>,
    /// Held while a mapping is made.
    pub(super) mapping: Mutex<()>,
}

impl ConnectionUsage {
    pub(super) fn new(limits: ConnectionLimits, account: Arc<UserAccount>) -> ConnectionUsage {
        ConnectionUsage {
            limits,
            account,
            lookups: UsageNumber::default(),
            opens: UsageNumber::default(),
            mapped: UsageNumber::default(),
            waits: UsageNumber::default(),
            ranges: Mutex::default(),
            mapping: Mutex::default(),
        }
    }

    /// The present counts, but for the locks that were lost.
    pub(super) fn holdings(&self) -> ClientHoldings {
        ClientHoldings {
            inodes: self.lookups.get(),
            open_files: self.opens.get(),
            locks: self.ranges().held_count() as u64,
            lock_waits: self.waits.get(),
            mapped_bytes: self.mapped.get(),
            locks_lost: 0,
        }
    }

    fn ranges(&self) -> MutexGuard<'_, LockTable<LockKey, ()>> {
        self.ranges.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The counts of another connection with the same user.
    pub(super) fn sibling(&self) -> ConnectionUsage {
        ConnectionUsage::new(self.limits, Arc::clone(&self.account))
    }

    /// The counts of a connection with the same limits and the user of `account`.
    pub(super) fn with_account(&self, account: Arc<UserAccount>) -> ConnectionUsage {
        ConnectionUsage::new(self.limits, account)
    }

    /// Allows one copy at a time of the connections of the user.
    pub(super) fn lock_copying(&self) -> MutexGuard<'_, ()> {
        self.account.copying.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Checks whether the user may have all that this connection has once more: `ENFILE`, `EMFILE`,
    /// `ENOMEM`.
    pub(super) fn admit_copy(&self) -> Result<()> {
        let (account, limits) = (&self.account, &self.account.limits);
        let fits = |all: &UsageNumber, own: &UsageNumber, most| {
            all.get().saturating_add(own.get()) <= most
        };
        if !fits(&account.lookups, &self.lookups, limits.lookups) {
            return Err(Errno::ENFILE);
        }
        if !fits(&account.opens, &self.opens, limits.opens) {
            return Err(Errno::EMFILE);
        }
        let reserved = account.reserve_mapped(self.mapped.get());
        if reserved.bytes < self.mapped.get() { Err(Errno::ENOMEM) } else { Ok(()) }
    }

    pub(super) fn add_lookups(&self, count: u64) {
        self.lookups.add(count);
        self.account.lookups.add(count);
    }

    pub(super) fn sub_lookups(&self, count: u64) {
        self.lookups.sub(count);
        self.account.lookups.sub(count);
    }

    pub(super) fn add_opens(&self, count: u64) {
        self.opens.add(count);
        self.account.opens.add(count);
    }

    pub(super) fn sub_opens(&self, count: u64) {
        self.opens.sub(count);
        self.account.opens.sub(count);
    }

    /// True while connection and user each have less than half of the open files that their limits
    /// allow.
    pub(super) fn has_room_ahead(&self) -> bool {
        let (account, limits) = (&self.account, &self.account.limits);
        self.opens.get() < self.limits.opens / 2 && account.opens.get() < limits.opens / 2
    }

    pub(super) fn charge_mapped(&self, bytes: u64) {
        self.mapped.add(bytes);
        self.account.charge_mapped(bytes);
    }

    pub(super) fn refund_mapped(&self, bytes: u64) {
        self.mapped.sub(bytes);
        self.account.refund_mapped(bytes);
    }

    /// Reserves memory for a mapping of `len` bytes, as far as the limits allow.
    pub(super) fn reserve_mapped(&self, len: u64) -> ReservedBytes {
        // The memory has whole pages, and the range may begin and end within one.
        let pages = len.saturating_add(2 * PAGE);
        let own = self.limits.mapped_bytes.saturating_sub(self.mapped.get());
        self.account.reserve_mapped(pages.min(own))
    }

    /// The connection has ended. Waits for locks are subtracted when they end.
    pub(super) fn end(&self) {
        self.sub_lookups(self.lookups.get());
        self.sub_opens(self.opens.get());
        self.refund_mapped(self.mapped.get());
        self.change_ranges(|ranges| *ranges = LockTable::default());
    }

    /// Records that all locks of an owner are released.
    pub(super) fn record_unlock(&self, key: LockKey) {
        self.change_ranges(|ranges| ranges.drop_owner(key, key.1, key.2, &mut Vec::new()));
    }

    /// Returns the locks on `ino` that conflict with `request`, with the processes that took them.
    /// Owners have the numbers that the client chose.
    pub(super) fn holders(&self, ino: Ino, request: &LockRequest) -> Vec<(LockKey, u32)> {
        let holders = self.ranges().holders(|key| key.0 == ino, request);
        holders.into_iter().map(|(key, lock)| (key, lock.pid)).collect()
    }

    fn change_ranges<T>(&self, change: impl FnOnce(&mut LockTable<LockKey, ()>) -> T) -> T {
        let mut ranges = self.ranges();
        let before = ranges.held_count() as u64;
        let changed = change(&mut ranges);
        let after = ranges.held_count() as u64;
        match after >= before {
            true => self.account.locks.add(after - before),
            false => self.account.locks.sub(before - after),
        }
        changed
    }
}

impl Drop for ConnectionUsage {
    fn drop(&mut self) {
        self.end();
    }
}

/// A wait for a lock, counted until it is dropped.
pub(crate) struct CountedWait(Arc<ConnectionLedger>);

impl Drop for CountedWait {
    fn drop(&mut self) {
        self.0.usage.waits.sub(1);
        self.0.usage.account.waits.sub(1);
    }
}

impl ConnectionLedger {
    /// Checks the limit before a call that gives a lookup: `ENFILE`. Concurrent calls may each get
    /// the last one.
    pub(crate) fn admit_lookup(&self) -> Result<()> {
        if self.may_look_up() { Ok(()) } else { Err(Errno::ENFILE) }
    }

    /// Checks the limit before an open: `EMFILE`.
    pub(crate) fn admit_open(&self) -> Result<()> {
        let (usage, account) = (&self.usage, &self.usage.account);
        let full =
            usage.opens.get() >= usage.limits.opens || account.opens.get() >= account.limits.opens;
        if full { Err(Errno::EMFILE) } else { Ok(()) }
    }

    /// Checks the limit before a lock is taken: `ENOLCK`.
    pub(crate) fn admit_lock(&self, request: &LockRequest) -> Result<()> {
        let takes = request.lock.typ != LockType::Unlock;
        let (usage, account) = (&self.usage, &self.usage.account);
        let full = || {
            usage.ranges().held_count() as u64 >= usage.limits.locks
                || account.locks.get() >= account.limits.locks
        };
        if takes && full() { Err(Errno::ENOLCK) } else { Ok(()) }
    }

    /// True where one more inode may be given.
    pub(crate) fn may_look_up(&self) -> bool {
        let (usage, account) = (&self.usage, &self.usage.account);
        usage.lookups.get() < usage.limits.lookups && account.lookups.get() < account.limits.lookups
    }

    /// Records that the file system has set or dropped a lock. The owner has the number that the
    /// client chose.
    pub(crate) fn record_lock(&self, ino: Ino, request: &LockRequest) {
        let key = (ino, request.kind, request.owner);
        // A key has one owner, so there is no conflict.
        let _ = self.usage.change_ranges(|ranges| ranges.set(key, request, &mut Vec::new()));
    }

    /// Counts one more wait for a lock: `ENOLCK`.
    pub(crate) fn begin_wait(self: &Arc<ConnectionLedger>) -> Result<CountedWait> {
        let (usage, account) = (&self.usage, &self.usage.account);
        usage.waits.add(1);
        account.waits.add(1);
        let wait = CountedWait(Arc::clone(self));
        let full = usage.waits.get() > usage.limits.lock_waits
            || account.waits.get() > account.limits.lock_waits;
        if full { Err(Errno::ENOLCK) } else { Ok(wait) }
    }
}

#[cfg(test)]
mod tests {
    use defuse_fs::{Fh, File, Lock, OpenFlags};

    use super::*;
    use crate::quotas::{ServiceQuotas, UserAccounts};

    fn make_ledger(limits: ConnectionLimits) -> ConnectionLedger {
        ConnectionLedger::new(
            limits,
            UserAccounts::new(ServiceQuotas::default()).account_of(5),
            false,
        )
    }

    /// The limits of a connection are high, and the limits of a user are low.
    fn make_users(user: ConnectionLimits) -> UserAccounts {
        UserAccounts::new(ServiceQuotas { user, ..ServiceQuotas::default() })
    }

    /// Limits held for each connection alone, so that a user got every resource by many
    /// connections.
    #[test]
    fn a_user_has_one_limit_for_all_its_connections() {
        let limits =
            ConnectionLimits { lookups: 2, opens: 2, locks: 2, lock_waits: 1, mapped_bytes: 0 };
        let users = make_users(limits);
        let ledger = |uid| {
            Arc::new(ConnectionLedger::new(
                ConnectionLimits::default(),
                users.account_of(uid),
                false,
            ))
        };
        let (one, two, other) = (ledger(5), ledger(5), ledger(6));
        let lock = |owner| {
            let lock = Lock { typ: LockType::Write, start: 0, end: 9, pid: 1 };
            LockRequest { kind: LockKind::Posix, owner: LockOwner(owner), lock, wait: false }
        };
        for (number, ledger) in [(7, &one), (8, &two)] {
            assert_eq!(ledger.admit_lookup(), Ok(()));
            ledger.count_lookup(Ino(number));
            ledger.record_open(File { ino: Ino(number), fh: Fh(0) }, false, OpenFlags(0));
            ledger.record_lock(Ino(number), &lock(number));
        }
        let wait = one.begin_wait();
        assert!(wait.is_ok() && two.begin_wait().is_err() && other.begin_wait().is_ok());
        let all = |ledger: &ConnectionLedger| {
            [ledger.admit_lookup(), ledger.admit_open(), ledger.admit_lock(&lock(9))]
        };
        let full = [Err(Errno::ENFILE), Err(Errno::EMFILE), Err(Errno::ENOLCK)];
        assert_eq!((all(&one), all(&two), all(&other)), (full, full, [Ok(()); 3]));
        assert_eq!(one.copy().err(), Some(Errno::ENFILE));
        // A connection that ends gives everything back, also if its ledger stays for the next
        // program's connection.
        let successor = one.prepare_exec(users.account_of(6));
        one.usage.end();
        assert_eq!(all(&two), [Ok(()); 3]);
        drop((successor, wait, one));
        assert!(two.begin_wait().is_ok());
    }

    #[test]
    fn one_more_than_the_limit_is_refused_until_something_goes_back() {
        let limits =
            ConnectionLimits { lookups: 1, opens: 1, locks: 2, lock_waits: 1, mapped_bytes: 0 };
        let ledger = Arc::new(make_ledger(limits));
        assert_eq!((ledger.admit_lookup(), ledger.admit_open()), (Ok(()), Ok(())));
        ledger.count_lookup(Ino(5));
        ledger.count_lookup(Ino(5));
        let file = File { ino: Ino(5), fh: Fh(0) };
        let file = File { fh: ledger.record_open(file, false, OpenFlags(0)), ..file };
        assert_eq!(ledger.admit_lookup(), Err(Errno::ENFILE));
        assert_eq!(ledger.admit_open(), Err(Errno::EMFILE));
        assert!(ledger.record_close(file).is_some() && ledger.admit_open() == Ok(()));
        assert_eq!((ledger.remove_lookups(Ino(5), 2), ledger.admit_lookup()), (2, Ok(())));
        let wait = ledger.begin_wait();
        assert!(wait.is_ok() && ledger.begin_wait().is_err());
        drop(wait);
        assert!(ledger.begin_wait().is_ok());
    }

    #[test]
    fn ranges_are_counted_as_they_are_held() {
        let ledger = make_ledger(ConnectionLimits { locks: 2, ..ConnectionLimits::default() });
        let lock = |typ, start, end| LockRequest {
            kind: LockKind::Posix,
            owner: LockOwner(7),
            lock: Lock { typ, start, end, pid: 1 },
            wait: false,
        };
        let ask = lock(LockType::Read, 0, 0);
        ledger.record_lock(Ino(5), &lock(LockType::Write, 0, 9));
        ledger.record_lock(Ino(5), &lock(LockType::Write, 10, 19));
        assert_eq!(ledger.admit_lock(&ask), Ok(()));
        ledger.record_lock(Ino(5), &lock(LockType::Unlock, 5, 6));
        assert_eq!(ledger.admit_lock(&ask), Err(Errno::ENOLCK));
        ledger.record_lock(Ino(5), &lock(LockType::Unlock, 0, u64::MAX));
        assert_eq!(ledger.admit_lock(&ask), Ok(()));
    }
}
