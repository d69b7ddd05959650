//! A lock manager: POSIX record locks and flock locks on any number of files.
//!
//! It is a pure data structure without threads, clocks and I/O, and independent of the file system.
//! Any backend or frontend can use it behind a mutex of its own, as [`LockQueue`] does. `K`
//! identifies a file. `W` is the data needed to answer a waiter, such as a
//! [`LockWait`](crate::LockWait). Every method returns the waits that have ended, and the caller
//! answers them after it has released its mutex.
//!
//! Source: fcntl(2), flock(2), and fs/locks.c of Linux where they are silent.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::hash::Hash;

mod queue;

pub use queue::LockQueue;

use crate::{Errno, Lock, LockKind, LockOwner, LockRequest, LockType, Result};

/// `OFFSET_MAX`: as the end of a range it means the end of the file, even if the file grows.
pub const OFFSET_MAX: u64 = u64::MAX >> 1;

/// Maximum number of held locks and queued waits together. Further requests fail with `ENOLCK`.
pub const MAX_LOCKS: usize = 1 << 20;

/// Maximum number of queued waits, which use memory of the daemon. Further requests fail with
/// `ENOLCK`.
pub const MAX_WAITS: usize = 1 << 14;

/// Identifies a queued wait, to cancel it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Ticket(u64);

/// The outcome of a request that may wait.
#[derive(Debug)]
pub enum Waiting<W> {
    /// The request has ended: the lock was granted, or refused with `EDEADLK`, `EINVAL` or
    /// `ENOLCK`.
    Done(W, Result<()>),
    /// The request is queued. A later call returns it, or [`LockTable::cancel`].
    Queued(Ticket),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Held {
    kind: LockKind,
    owner: LockOwner,
    lock: Lock,
}

#[derive(Debug)]
struct Waiter<K, W> {
    file: K,
    request: LockRequest,
    payload: W,
}

/// All locks of a file system, and the queued waits.
#[derive(Debug)]
pub struct LockTable<K, W> {
    held: HashMap<K, Vec<Held>>,
    /// In the order of arrival, in which they are granted.
    waiters: BTreeMap<Ticket, Waiter<K, W>>,
    next_ticket: u64,
    count: usize,
}

impl<K, W> Default for LockTable<K, W> {
    fn default() -> Self {
        LockTable { held: HashMap::new(), waiters: BTreeMap::new(), next_ticket: 0, count: 0 }
    }
}

impl<K: Copy + Eq + Hash, W> LockTable<K, W> {
    /// True if there are no locks and no waits.
    pub fn is_empty(&self) -> bool {
        self.count == 0 && self.waiters.is_empty()
    }

    /// Number of held locks. Adjacent ones of the same owner and type count as one.
    pub fn held(&self) -> usize {
        self.count
    }

    /// Returns the first lock that conflicts with `request` (`F_GETLK`), or `None`. Fails with
    /// `EINVAL` for a range that ends before it starts.
    pub fn conflict(&self, file: K, request: &LockRequest) -> Result<Option<Lock>> {
        let request = normal(request)?;
        Ok(self.conflicts(file, &request).min_by_key(|held| held.lock.start).map(|held| held.lock))
    }

    /// Takes, changes or drops a lock without waiting; `request.wait` is ignored. Fails with
    /// `EAGAIN` if another lock conflicts, with `EINVAL` for an invalid range, and with `ENOLCK` if
    /// there are too many locks. Adds the waits that have thereby ended to `granted`.
    ///
    /// As on Linux, changing the type of a flock lock drops the old one first, which is lost if the
    /// new one is not available.
    pub fn set(&mut self, file: K, request: &LockRequest, granted: &mut Vec<W>) -> Result<()> {
        let request = normal(request)?;
        self.apply(file, &request, granted)
    }

    /// Like [`LockTable::set`], but queues the request if another lock conflicts. Fails with
    /// `EDEADLK` if a POSIX lock would deadlock, because its owner holds a lock for which the
    /// holders wait.
    pub fn wait(
        &mut self,
        file: K,
        request: &LockRequest,
        payload: W,
        granted: &mut Vec<W>,
    ) -> Waiting<W> {
        let request = match normal(request) {
            Ok(request) => request,
            Err(errno) => return Waiting::Done(payload, Err(errno)),
        };
        match self.apply(file, &request, granted) {
            Err(Errno::EAGAIN) if !self.has_room_to_wait() => {
                Waiting::Done(payload, Err(Errno::ENOLCK))
            }
            Err(Errno::EAGAIN) if self.would_deadlock(file, &request) => {
                Waiting::Done(payload, Err(Errno::EDEADLK))
            }
            Err(Errno::EAGAIN) => Waiting::Queued(self.enqueue(file, request, payload)),
            other => Waiting::Done(payload, other),
        }
    }

    /// Removes a wait from the queue. Returns `None` if it has ended already.
    pub fn cancel(&mut self, ticket: Ticket) -> Option<W> {
        self.waiters.remove(&ticket).map(|waiter| waiter.payload)
    }

    /// Drops all locks of one kind that `owner` holds on `file` (close(2)).
    pub fn drop_owner(&mut self, file: K, kind: LockKind, owner: LockOwner, granted: &mut Vec<W>) {
        let Some(held) = self.held.get_mut(&file) else { return };
        let before = held.len();
        held.retain(|held| held.kind != kind || held.owner != owner);
        let dropped = before - held.len();
        self.count -= dropped;
        if held.is_empty() {
            self.held.remove(&file);
        }
        if dropped > 0 {
            self.grant(granted);
        }
    }

    /// Removes a file that no longer exists. Returns the waits for its locks.
    pub fn forget_file(&mut self, file: K) -> Vec<W> {
        self.count -= self.held.remove(&file).map_or(0, |held| held.len());
        let on_file =
            |(ticket, waiter): (&Ticket, &Waiter<K, W>)| (waiter.file == file).then_some(*ticket);
        let tickets: Vec<_> = self.waiters.iter().filter_map(on_file).collect();
        tickets.into_iter().filter_map(|ticket| self.cancel(ticket)).collect()
    }

    fn has_room_to_wait(&self) -> bool {
        let waits = self.waiters.len();
        waits < MAX_WAITS && self.count + waits < MAX_LOCKS
    }

    fn enqueue(&mut self, file: K, request: LockRequest, payload: W) -> Ticket {
        let ticket = Ticket(self.next_ticket);
        self.next_ticket += 1;
        self.waiters.insert(ticket, Waiter { file, request, payload });
        ticket
    }

    fn conflicts<'a>(
        &'a self,
        file: K,
        request: &'a LockRequest,
    ) -> impl Iterator<Item = &'a Held> {
        let held = self.held.get(&file).into_iter().flatten();
        held.filter(move |held| stands_against(held, request))
    }

    fn apply(&mut self, file: K, request: &LockRequest, granted: &mut Vec<W>) -> Result<()> {
        if request.kind == LockKind::Flock && self.drop_flock_of_other_type(file, request) {
            // Earlier waits have priority for the released range.
            self.grant(granted);
        }
        let result = self.try_set(file, request);
        // A refused lock releases nothing.
        if result.is_ok() {
            self.grant(granted);
        }
        result
    }

    fn try_set(&mut self, file: K, request: &LockRequest) -> Result<()> {
        if request.lock.typ != LockType::Unlock {
            if self.conflicts(file, request).next().is_some() {
                return Err(Errno::EAGAIN);
            }
            // One request can split a lock in two and add one.
            if self.count + 2 > MAX_LOCKS {
                return Err(Errno::ENOLCK);
            }
        }
        let held = self.held.entry(file).or_default();
        let before = held.len();
        replace_range(held, request);
        self.count = self.count - before + held.len();
        if held.is_empty() {
            self.held.remove(&file);
        }
        Ok(())
    }

    /// Returns true if there was one.
    fn drop_flock_of_other_type(&mut self, file: K, request: &LockRequest) -> bool {
        let Some(held) = self.held.get_mut(&file) else { return false };
        let before = held.len();
        held.retain(|held| {
            held.kind != LockKind::Flock
                || held.owner != request.owner
                || held.lock.typ == request.lock.typ
        });
        let dropped = before - held.len();
        self.count -= dropped;
        dropped > 0
    }

    /// Grants waits in the order of arrival until no more can be granted: a granted lock may weaken
    /// another lock of its owner.
    fn grant(&mut self, granted: &mut Vec<W>) {
        loop {
            let ready = self.waiters.iter().find_map(|(&ticket, waiter)| {
                let free = self.conflicts(waiter.file, &waiter.request).next().is_none();
                free.then_some(ticket)
            });
            let Some(waiter) = ready.and_then(|ticket| self.waiters.remove(&ticket)) else {
                return;
            };
            let room = self.try_set(waiter.file, &waiter.request);
            debug_assert!(room.is_ok(), "a wait counts as a lock, so there is room for it");
            granted.push(waiter.payload);
        }
    }

    /// True if `request` would wait for an owner who waits, directly or indirectly, for the
    /// requesting one. Not for flock locks, as on Linux: their owner is an open file, which never
    /// waits.
    fn would_deadlock(&self, file: K, request: &LockRequest) -> bool {
        if request.kind != LockKind::Posix {
            return false;
        }
        let mut seen = HashSet::new();
        let mut next: Vec<LockOwner> =
            self.conflicts(file, request).map(|held| held.owner).collect();
        while let Some(owner) = next.pop() {
            if owner == request.owner {
                return true;
            }
            if !seen.insert(owner) {
                continue;
            }
            let waits = self.waiters.values().filter(|waiter| {
                waiter.request.owner == owner && waiter.request.kind == LockKind::Posix
            });
            for waiter in waits {
                let holders = self.conflicts(waiter.file, &waiter.request);
                next.extend(holders.map(|held| held.owner));
            }
        }
        false
    }
}

/// Normalizes the range: flock locks cover the whole file, and no end exceeds [`OFFSET_MAX`]. Fails
/// with `EINVAL` if the range is empty.
fn normal(request: &LockRequest) -> Result<LockRequest> {
    let mut request = *request;
    if request.kind == LockKind::Flock {
        (request.lock.start, request.lock.end) = (0, OFFSET_MAX);
    }
    request.lock.end = request.lock.end.min(OFFSET_MAX);
    if request.lock.start > request.lock.end { Err(Errno::EINVAL) } else { Ok(request) }
}

fn stands_against(held: &Held, request: &LockRequest) -> bool {
    let exclusive = held.lock.typ == LockType::Write || request.lock.typ == LockType::Write;
    held.kind == request.kind
        && held.owner != request.owner
        && exclusive
        && request.lock.typ != LockType::Unlock
        && held.lock.start <= request.lock.end
        && request.lock.start <= held.lock.end
}

/// Replaces the locks of the owner in the range of `request`, and merges it with neighbours of the
/// same type.
fn replace_range(locks: &mut Vec<Held>, request: &LockRequest) {
    let mut new = request.lock;
    let mut kept = Vec::new();
    locks.retain(|held| {
        if held.kind != request.kind || held.owner != request.owner {
            return true;
        }
        let old = held.lock;
        // Adjacent ranges are merged. `end + 1` cannot overflow, because no end exceeds OFFSET_MAX.
        let touches = old.start <= new.end + 1 && new.start <= old.end + 1;
        if old.typ == new.typ && touches {
            new.start = new.start.min(old.start);
            new.end = new.end.max(old.end);
            return false;
        }
        if old.start > new.end || new.start > old.end {
            return true;
        }
        if old.start < new.start {
            kept.push(Held { lock: Lock { end: new.start - 1, ..old }, ..*held });
        }
        if old.end > new.end {
            kept.push(Held { lock: Lock { start: new.end + 1, ..old }, ..*held });
        }
        false
    });
    locks.append(&mut kept);
    if new.typ != LockType::Unlock {
        locks.push(Held { kind: request.kind, owner: request.owner, lock: new });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: u32 = 1;
    type Table = LockTable<u32, &'static str>;

    fn posix(owner: u64, typ: LockType, start: u64, end: u64) -> LockRequest {
        let lock = Lock { typ, start, end, pid: owner as u32 };
        LockRequest { kind: LockKind::Posix, owner: LockOwner(owner), lock, wait: false }
    }

    fn flock(owner: u64, typ: LockType) -> LockRequest {
        LockRequest { kind: LockKind::Flock, ..posix(owner, typ, 5, 3) }
    }

    fn set(table: &mut Table, request: LockRequest) -> (Result<()>, Vec<&'static str>) {
        let mut granted = Vec::new();
        (table.set(FILE, &request, &mut granted), granted)
    }

    fn wait(table: &mut Table, request: LockRequest, name: &'static str) -> Waiting<&'static str> {
        table.wait(FILE, &request, name, &mut Vec::new())
    }

    fn ranges(table: &Table, owner: u64) -> Vec<(LockType, u64, u64)> {
        let held = table.held.get(&FILE).into_iter().flatten();
        let mine = held.filter(|held| held.owner == LockOwner(owner));
        let mut ranges: Vec<_> =
            mine.map(|held| (held.lock.typ, held.lock.start, held.lock.end)).collect();
        ranges.sort_by_key(|range| range.1);
        ranges
    }

    use LockType::{Read, Unlock, Write};

    #[test]
    fn ranges_split_and_merge() {
        let mut table = Table::default();
        set(&mut table, posix(1, Write, 0, 99)).0.unwrap();
        set(&mut table, posix(1, Unlock, 40, 59)).0.unwrap();
        assert_eq!(ranges(&table, 1), [(Write, 0, 39), (Write, 60, 99)]);
        set(&mut table, posix(1, Read, 30, 69)).0.unwrap();
        assert_eq!(ranges(&table, 1), [(Write, 0, 29), (Read, 30, 69), (Write, 70, 99)]);
        set(&mut table, posix(1, Write, 30, 69)).0.unwrap();
        assert_eq!(ranges(&table, 1), [(Write, 0, 99)]);
        set(&mut table, posix(1, Write, 100, u64::MAX)).0.unwrap();
        assert_eq!(ranges(&table, 1), [(Write, 0, OFFSET_MAX)]);
        set(&mut table, posix(1, Unlock, 0, u64::MAX)).0.unwrap();
        assert!(table.is_empty() && table.held() == 0);
    }

    #[test]
    fn readers_share_and_writers_do_not() {
        let mut table = Table::default();
        set(&mut table, posix(1, Read, 0, 9)).0.unwrap();
        set(&mut table, posix(2, Read, 5, 14)).0.unwrap();
        assert_eq!(set(&mut table, posix(3, Write, 9, 9)).0, Err(Errno::EAGAIN));
        set(&mut table, posix(3, Write, 15, 20)).0.unwrap();
        let conflict = table.conflict(FILE, &posix(4, Write, 0, 100)).unwrap().unwrap();
        assert_eq!((conflict.pid, conflict.start), (1, 0));
        assert_eq!(table.conflict(FILE, &posix(4, Read, 0, 14)), Ok(None));
        assert_eq!(table.conflict(2, &posix(4, Write, 0, 14)), Ok(None));
        assert_eq!(set(&mut table, posix(1, Read, 9, 8)).0, Err(Errno::EINVAL));
    }

    #[test]
    fn the_two_families_ignore_each_other() {
        let mut table = Table::default();
        set(&mut table, posix(1, Write, 0, 9)).0.unwrap();
        set(&mut table, flock(2, Write)).0.unwrap();
        assert_eq!(set(&mut table, flock(3, Read)).0, Err(Errno::EAGAIN));
        let mut granted = Vec::new();
        table.drop_owner(FILE, LockKind::Flock, LockOwner(1), &mut granted);
        assert_eq!(table.held(), 2);
        table.drop_owner(FILE, LockKind::Posix, LockOwner(1), &mut granted);
        assert_eq!(table.held(), 1);
    }

    #[test]
    fn waits_are_granted_in_order_and_can_be_cancelled() {
        let mut table = Table::default();
        set(&mut table, posix(1, Write, 0, 9)).0.unwrap();
        assert!(matches!(wait(&mut table, posix(2, Read, 0, 0), "a"), Waiting::Queued(_)));
        let Waiting::Queued(ticket) = wait(&mut table, posix(3, Write, 0, 0), "b") else {
            panic!("the lock is held")
        };
        assert!(matches!(wait(&mut table, posix(4, Read, 1, 1), "c"), Waiting::Queued(_)));
        assert_eq!(set(&mut table, posix(1, Unlock, 0, 0)).1, ["a"]);
        assert_eq!(table.cancel(ticket), Some("b"));
        assert_eq!(table.cancel(ticket), None);
        // Downgrading the lock admits readers.
        assert_eq!(set(&mut table, posix(1, Read, 0, 9)).1, ["c"]);
    }

    #[test]
    fn a_deadlock_over_any_number_of_owners_is_refused() {
        let mut table = Table::default();
        for owner in 0..3 {
            set(&mut table, posix(owner, Write, owner, owner)).0.unwrap();
        }
        assert!(matches!(wait(&mut table, posix(0, Write, 1, 1), "0"), Waiting::Queued(_)));
        assert!(matches!(wait(&mut table, posix(1, Write, 2, 2), "1"), Waiting::Queued(_)));
        let circle = wait(&mut table, posix(2, Write, 0, 0), "2");
        assert!(matches!(circle, Waiting::Done("2", Err(Errno::EDEADLK))));
        assert_eq!(set(&mut table, posix(2, Unlock, 2, 2)).1, ["1"]);
        assert!(matches!(wait(&mut table, posix(2, Write, 0, 0), "2"), Waiting::Queued(_)));
    }

    #[test]
    fn two_upgrades_of_a_flock_lock_do_not_deadlock() {
        let mut table = Table::default();
        set(&mut table, flock(1, Read)).0.unwrap();
        set(&mut table, flock(2, Read)).0.unwrap();
        assert!(matches!(wait(&mut table, flock(1, Write), "1"), Waiting::Queued(_)));
        let mut granted = Vec::new();
        let second = table.wait(FILE, &flock(2, Write), "2", &mut granted);
        assert!(matches!(second, Waiting::Queued(_)));
        assert_eq!(granted, ["1"]);
        assert_eq!(set(&mut table, flock(1, Unlock)).1, ["2"]);
    }

    /// One user waited for 18,280 locks, which used 298 MB of the daemon's memory.
    #[test]
    fn the_number_of_waits_is_limited() {
        let mut table = Table::default();
        set(&mut table, flock(1, Write)).0.unwrap();
        for owner in 0..MAX_WAITS as u64 {
            let waiting = wait(&mut table, flock(owner + 2, Write), "");
            assert!(matches!(waiting, Waiting::Queued(_)), "{owner}");
        }
        let refused = wait(&mut table, flock(1 << 20, Write), "one more");
        assert!(matches!(refused, Waiting::Done("one more", Err(Errno::ENOLCK))));
        assert_eq!(table.forget_file(FILE).len(), MAX_WAITS);
        set(&mut table, flock(1, Write)).0.unwrap();
        let waiting = wait(&mut table, flock(2, Write), "room again");
        assert!(matches!(waiting, Waiting::Queued(_)));
    }

    #[test]
    fn removing_a_file_returns_its_waits() {
        let mut table = Table::default();
        set(&mut table, flock(1, Write)).0.unwrap();
        wait(&mut table, flock(2, Write), "2");
        assert_eq!(table.forget_file(FILE), ["2"]);
        assert!(table.is_empty());
    }
}
