//! The lookups, open files and locks of a connection. For a mount the kernel keeps this account; a
//! client in user space may end at any moment, or send wrong requests.
//!
//! A process that forks makes a connection for its child, whose ledger begins as a copy of its own
//! ([`ConnectionLedger::copy`]). Both connections then hold what the file system gave once. So the
//! connections of such a *family* share a second account: what the file system gave, and how often
//! the connections hold it. The file system gets back what no connection holds any more.
//!
//! A client names an open file by a number of its own ([`ConnectionLedger::record_open`]), not by
//! the handle of the file system, which may be the same for every open of an inode. Thus the ledger
//! distinguishes two opens of one file, and knows which connections share an open file description.
//! The locks of an open file description end when the last of those connections has closed it or
//! has ended, flock(2).
//!
//! *Invariants*, which are asserted: no connection gives back more than it holds; the family holds
//! at least what each of its connections holds, and the file system has given no more than the
//! family holds.

mod holders;
#[cfg(test)]
mod tests;

use std::collections::hash_map::{Entry, RandomState};
use std::collections::{HashMap, HashSet};
use std::hash::{BuildHasher, Hasher};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};

use defuse_fs::{
    AccessMode, Caller, Context, Errno, Fh, File, FileSystem, Ino, Lock, LockKind, LockOwner,
    LockRequest, LockType, Name, OpenFlags, ReleaseArgs, Result,
};

pub(crate) use holders::LockHolder;

use crate::maps::MappingAnswer;
use crate::pages::NameSource;
use crate::paths::ConnectionPaths;
use crate::quotas::UserAccount;
use crate::usage::{ConnectionLimits, ConnectionUsage, LockKey};

const SHARDS: usize = 16;

/// The account of one connection.
pub(crate) struct ConnectionLedger {
    own: LedgerShards<ConnectionHoldings>,
    family: Arc<FamilyLedger>,
    /// The ledger from which the next program's connection may take over, until it is settled.
    source: Mutex<Option<Arc<ConnectionLedger>>>,
    pub(super) usage: ConnectionUsage,
    /// True if the client may name every inode.
    may_name_any: AtomicBool,
    /// The name memory of the client, whose inodes it may name.
    names: OnceLock<Arc<dyn NameSource>>,
    /// Kept only if messages may name files.
    pub(super) paths: Option<ConnectionPaths>,
}

type LedgerShards<T> = [Mutex<T>; SHARDS];

/// The account that the connections of a family share.
struct FamilyLedger {
    shards: LedgerShards<FamilyHoldings>,
    /// The number of the next open file.
    next: AtomicU64,
    /// Makes the lock owners of the family distinct from all others, [`ConnectionLedger::owner`].
    secret: u64,
}

/// The mappings of one file.
#[derive(Clone, Copy, Default)]
struct FileMappings {
    count: u64,
    /// The requested bytes of the file, and the charged bytes.
    requested: u64,
    charged: u64,
}

/// Inodes that were reported to the client lately, without lookups. The older half is forgotten
/// when there are too many.
#[derive(Default)]
struct ListedInodes {
    new: HashSet<Ino>,
    old: HashSet<Ino>,
}

/// The maximum number of inodes in each half of [`ListedInodes`], in one shard.
const MOST_LISTED: usize = 2048;

impl ListedInodes {
    fn add(&mut self, ino: Ino) {
        if self.new.len() >= MOST_LISTED && !self.new.contains(&ino) {
            self.old = std::mem::take(&mut self.new);
        }
        self.new.insert(ino);
        assert!(self.new.len() <= MOST_LISTED && self.old.len() <= MOST_LISTED);
    }

    fn has(&self, ino: Ino) -> bool {
        self.new.contains(&ino) || self.old.contains(&ino)
    }
}

/// The objects that one connection holds.
#[derive(Default)]
struct ConnectionHoldings {
    lookups: HashMap<Ino, u64>,
    listed: ListedInodes,
    /// The number of open files of each inode.
    opens: HashMap<Ino, u64>,
    open: HashMap<(Ino, Fh), OwnOpenFile>,
    /// The record locks of its process.
    locks: HashSet<LockKey>,
    /// Mappings of files.
    maps: HashMap<Ino, FileMappings>,
}

/// The access modes of an open file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct AccessModes {
    pub(crate) reads: bool,
    pub(crate) writes: bool,
}

impl AccessModes {
    fn from_mode(mode: AccessMode) -> AccessModes {
        AccessModes { reads: mode != AccessMode::Write, writes: mode != AccessMode::Read }
    }

    fn intersect(self, other: AccessModes) -> AccessModes {
        AccessModes { reads: self.reads && other.reads, writes: self.writes && other.writes }
    }
}

/// An open file of one connection.
#[derive(Clone, Copy)]
struct OwnOpenFile {
    /// The handle of the file system.
    handle: Fh,
    modes: AccessModes,
    /// True if the client has announced that it closes the file.
    flushed: bool,
}

/// The objects that the connections of a family hold.
#[derive(Default)]
struct FamilyHoldings {
    lookups: HashMap<Ino, LookupCount>,
    open: HashMap<(Ino, Fh), FamilyOpenFile>,
    /// The number of connections that have the record locks of a process.
    locks: HashMap<LockKey, u64>,
}

/// Lookups of one inode: the lookups that the file system gave and has not got back, and the
/// lookups that the connections of a family hold.
#[derive(Clone, Copy, Default)]
struct LookupCount {
    granted: u64,
    held: u64,
}

impl LookupCount {
    fn give(&mut self) {
        self.granted += 1;
        self.held += 1;
        self.check();
    }

    fn check(&self) {
        let LookupCount { granted, held } = self;
        assert!(granted <= held, "{granted} were given and {held} are held");
    }

    /// Removes `count` that a connection held. Returns how many the file system gets back.
    fn drop(&mut self, count: u64) -> u64 {
        self.check();
        take(&mut self.held, count);
        let back = self.granted - self.granted.min(self.held);
        self.granted -= back;
        self.check();
        back
    }
}

/// An open file.
struct FamilyOpenFile {
    /// The number of connections that have it.
    held: u64,
    /// The number of connections that have not flushed it. Its locks stay for these.
    unflushed: u64,
    dir: bool,
    flags: OpenFlags,
    /// The locks of the open file itself: flock(2), and `F_OFD_SETLK` of fcntl(2).
    locks: HashSet<(LockKind, LockOwner)>,
}

/// The consequences of closing a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct CloseOutcome {
    /// The handle of the file system.
    pub(crate) handle: Fh,
    /// True if the handle has to be closed: no other connection has the open file.
    pub(crate) release: bool,
    /// The locks of the open file that end.
    pub(crate) locks: Vec<(LockKind, LockOwner)>,
}

/// An inode that the connection of the next program takes over, with an open file if there is one:
/// see [`PeerConnection::prepare_exec`](crate::PeerConnection::prepare_exec).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InheritedInode {
    /// The inode.
    pub ino: Ino,
    /// The number of an open file or directory of the inode.
    pub fh: Option<Fh>,
    /// The access mode of the new connection, which is limited to the access mode of the other
    /// connection.
    pub mode: AccessMode,
    /// The new connection also takes over the record locks of its process.
    pub process_locks: bool,
}

#[cfg(test)]
impl Default for ConnectionLedger {
    fn default() -> Self {
        let accounts = crate::quotas::UserAccounts::new(crate::ServiceQuotas::default());
        ConnectionLedger::new(ConnectionLimits::default(), accounts.account_of(0), false)
    }
}

impl ConnectionLedger {
    /// The ledger of a new connection, whose user has `account`. It may keep the paths of open
    /// files.
    pub(crate) fn new(
        limits: ConnectionLimits,
        account: Arc<UserAccount>,
        keeps_paths: bool,
    ) -> ConnectionLedger {
        let common = FamilyLedger {
            shards: LedgerShards::default(),
            next: AtomicU64::new(1),
            secret: secret() & !LockOwner::for_process(0).0,
        };
        let paths = keeps_paths.then(ConnectionPaths::default);
        ConnectionLedger::for_family(
            Arc::new(common),
            None,
            ConnectionUsage::new(limits, account),
            paths,
        )
    }

    fn for_family(
        family: Arc<FamilyLedger>,
        source: Option<Arc<ConnectionLedger>>,
        usage: ConnectionUsage,
        paths: Option<ConnectionPaths>,
    ) -> ConnectionLedger {
        let (own, may_name_any) = (LedgerShards::default(), AtomicBool::new(false));
        let (source, names) = (Mutex::new(source), OnceLock::new());
        ConnectionLedger { own, family, source, usage, may_name_any, names, paths }
    }

    /// Returns the ledger of a connection that holds nothing yet, and may take over from this one
    /// until [`settle`](ConnectionLedger::settle).
    pub(crate) fn prepare_exec(
        self: &Arc<ConnectionLedger>,
        account: Arc<UserAccount>,
    ) -> ConnectionLedger {
        let paths = self.paths.as_ref().map(|_| ConnectionPaths::default());
        let usage = self.usage.with_account(account);
        ConnectionLedger::for_family(Arc::clone(&self.family), Some(Arc::clone(self)), usage, paths)
    }

    /// Ends the right to take over.
    pub(crate) fn settle(&self) {
        lock(&self.source).take();
    }

    /// Takes over one object. `EPERM` if this ledger takes over from no other, or was settled;
    /// `ESTALE` and `EBADF` for objects that the other connection does not have; `ENFILE` and
    /// `EMFILE` beyond the limits.
    pub(crate) fn take_over(&self, inherited: &InheritedInode) -> Result<()> {
        let source = lock(&self.source).clone().ok_or(Errno::EPERM)?;
        assert!(!std::ptr::eq(&raw const *source, self), "a ledger takes over from itself");
        assert!(Arc::ptr_eq(&source.family, &self.family), "the ledgers are of two families");
        self.admit_lookup()?;
        if inherited.fh.is_some() {
            self.admit_open()?;
        }
        let at = shard_index(inherited.ino);
        if !source.holds(inherited.ino) {
            return Err(Errno::ESTALE);
        }
        // The connection that takes over is younger than the other one, so that the order of locks
        // is always the same.
        let theirs = lock(&source.own[at]);
        let (mut own, mut family) = self.shard(inherited.ino);
        if let Some(fh) = inherited.fh {
            let key = (inherited.ino, fh);
            // The new connection gets no more access than the other one, regardless of its request.
            let before = *theirs.open.get(&key).ok_or(Errno::EBADF)?;
            let open = family.open.get_mut(&key).ok_or(Errno::EBADF)?;
            let modes = before.modes.intersect(AccessModes::from_mode(inherited.mode));
            if own.open.insert(key, OwnOpenFile { modes, ..before }).is_none() {
                open.held += 1;
                open.unflushed += u64::from(!before.flushed);
                *own.opens.entry(inherited.ino).or_default() += 1;
                self.usage.add_opens(1);
                if let (Some(paths), Some(before)) = (&self.paths, &source.paths) {
                    paths.take_over(before, inherited.ino);
                }
            }
        }
        if inherited.ino != Ino::ROOT {
            own.add_lookup(inherited.ino, &self.usage);
            family.lookups.entry(inherited.ino).or_default().held += 1;
        }
        let stays = |key: &&LockKey| key.0 == inherited.ino && inherited.process_locks;
        for &key in theirs.locks.iter().filter(stays) {
            if own.locks.insert(key) {
                *family.locks.entry(key).or_default() += 1;
            }
        }
        Ok(())
    }

    /// Returns the ledger of a connection that holds everything that this one holds, except the
    /// locks of its process. `ENFILE`, `EMFILE` and `ENOMEM` if the user may not hold all that
    /// twice.
    pub(crate) fn copy(&self) -> Result<ConnectionLedger> {
        let _one = self.usage.lock_copying();
        self.usage.admit_copy()?;
        let (usage, paths) = (self.usage.sibling(), self.paths.clone());
        let copy = ConnectionLedger::for_family(Arc::clone(&self.family), None, usage, paths);
        if let Some(names) = self.names() {
            copy.share(Arc::clone(names));
        }
        for at in 0..SHARDS {
            let (own, mut family) = (lock(&self.own[at]), lock(&self.family.shards[at]));
            let mut new = lock(&copy.own[at]);
            for (ino, &count) in &own.lookups {
                family.lookups.entry(*ino).or_default().held += count;
            }
            for (key, mine) in &own.open {
                if let Some(open) = family.open.get_mut(key) {
                    open.held += 1;
                    open.unflushed += u64::from(!mine.flushed);
                }
            }
            (new.lookups, new.open) = (own.lookups.clone(), own.open.clone());
            new.opens = own.opens.clone();
            new.maps = own.maps.clone();
            copy.usage.add_lookups(new.lookups.len() as u64);
            copy.usage.add_opens(new.open.len() as u64);
            copy.usage.charge_mapped(new.maps.values().map(|mapping| mapping.charged).sum());
        }
        Ok(copy)
    }

    /// Records a lookup of `ino` that the client gets.
    pub(crate) fn count_lookup(&self, ino: Ino) {
        if ino != Ino::ROOT {
            let (mut own, mut family) = self.shard(ino);
            own.add_lookup(ino, &self.usage);
            family.lookups.entry(ino).or_default().give();
        }
    }

    /// Removes `lookups` of `ino`, or as many as the client holds. Returns how many the file system
    /// gets back.
    pub(crate) fn remove_lookups(&self, ino: Ino, lookups: u64) -> u64 {
        let (mut own, mut family) = self.shard(ino);
        let Some(held) = own.lookups.get_mut(&ino) else { return 0 };
        assert!(*held > 0, "an inode without lookups is known");
        let back = lookups.min(*held);
        *held -= back;
        if *held == 0 {
            own.lookups.remove(&ino);
            self.usage.sub_lookups(1);
        }
        family.forget(ino, back)
    }

    /// True where the client may name `ino`.
    pub(crate) fn holds(&self, ino: Ino) -> bool {
        ino == Ino::ROOT
            || self.may_name_any.load(Ordering::Relaxed)
            || lock(&self.own[shard_index(ino)]).may_name(ino)
            || self.shares(ino)
    }

    /// Gives the client the name memory from now on.
    pub(crate) fn share(&self, names: Arc<dyn NameSource>) {
        // The first ones stay: the rights of a client never change.
        let _ = self.names.set(names);
    }

    /// Returns the name memory of the client.
    pub(crate) fn names(&self) -> Option<&Arc<dyn NameSource>> {
        self.names.get()
    }

    /// True if a published name leads to `ino`, and the client could find it now. Must not be
    /// called with a shard locked.
    fn shares(&self, ino: Ino) -> bool {
        let holds = |dir| lock(&self.own[shard_index(dir)]).may_name(dir);
        self.names().is_some_and(|names| names.lead_to(ino, &holds))
    }

    /// From now on the client may name every inode.
    pub(crate) fn allow_any_inode(&self) {
        self.may_name_any.store(true, Ordering::Relaxed);
    }

    /// Records that the client finds `ino` by `name` in `parent`.
    pub(crate) fn record_lookup(&self, parent: Ino, name: Name<'_>, ino: Ino) {
        if let Some(paths) = &self.paths {
            paths.record_lookup(parent, name, ino);
        }
    }

    /// Records that `ino` was reported to the client, which may name it for some time.
    pub(crate) fn record_report(&self, ino: Ino) {
        if ino != Ino::ROOT {
            lock(&self.own[shard_index(ino)]).listed.add(ino);
        }
    }

    /// Records an open file or directory that the client gets, and that has the handle of `file` in
    /// the file system. Returns the number by which the client names it.
    pub(crate) fn record_open(&self, file: File, dir: bool, flags: OpenFlags) -> Fh {
        let number = Fh(self.family.next.fetch_add(1, Ordering::Relaxed));
        self.usage.add_opens(1);
        let (mut own, mut family) = self.shard(file.ino);
        let key = (file.ino, number);
        let modes = AccessModes::from_mode(flags.access());
        let before = own.open.insert(key, OwnOpenFile { handle: file.fh, modes, flushed: false });
        assert!(before.is_none(), "two open files have the number {number:?}");
        *own.opens.entry(file.ino).or_default() += 1;
        let locks = HashSet::new();
        family.open.insert(key, FamilyOpenFile { held: 1, unflushed: 1, dir, flags, locks });
        if let Some(paths) = &self.paths {
            paths.record_open(file.ino);
        }
        number
    }

    /// Records that the client closes an open file. `None` if it does not have the file.
    pub(crate) fn record_close(&self, file: File) -> Option<CloseOutcome> {
        let (mut own, mut family) = self.shard(file.ino);
        let key = (file.ino, file.fh);
        let mine = own.open.remove(&key)?;
        if let Entry::Occupied(mut opens) = own.opens.entry(file.ino) {
            assert!(*opens.get() > 0, "an inode without open files is open");
            *opens.get_mut() -= 1;
            if *opens.get() == 0 {
                opens.remove();
                if let Some(paths) = &self.paths {
                    paths.record_close(file.ino);
                }
            }
        }
        self.usage.sub_opens(1);
        for &(kind, owner) in family.open.get(&key).iter().flat_map(|open| &open.locks) {
            self.usage.record_unlock((file.ino, kind, owner));
        }
        let (locks, last) = family.close(key, &mine);
        Some(CloseOutcome { handle: mine.handle, release: last.is_some(), locks })
    }

    /// Returns the file system's handle of an open file. `EBADF` if the client does not have the
    /// file.
    pub(crate) fn handle(&self, file: File) -> Result<Fh> {
        let own = lock(&self.own[shard_index(file.ino)]);
        own.open.get(&(file.ino, file.fh)).map(|open| open.handle).ok_or(Errno::EBADF)
    }

    /// The access modes of an open file. `None` where the client does not have it.
    pub(crate) fn modes(&self, file: File) -> Option<AccessModes> {
        let own = lock(&self.own[shard_index(file.ino)]);
        own.open.get(&(file.ino, file.fh)).map(|open| open.modes)
    }

    /// Returns the owner of locks by its number in the file system. A client chooses the numbers of
    /// its owners, and must not be able to name the owner of another client's locks.
    pub(crate) fn owner(&self, owner: LockOwner) -> LockOwner {
        LockOwner(owner.0 ^ self.family.secret)
    }

    /// Records that the client requests a lock on an open file.
    pub(crate) fn record_lock_request(&self, file: File, request: &LockRequest) {
        if request.lock.typ == LockType::Unlock {
            return;
        }
        let (mut own, mut family) = self.shard(file.ino);
        let open_key = (file.ino, file.fh);
        if !own.open.contains_key(&open_key) {
            return;
        }
        let is_process = request.kind == LockKind::Posix && request.owner.is_process();
        if is_process {
            let key = (file.ino, request.kind, request.owner);
            if own.locks.insert(key) {
                *family.locks.entry(key).or_default() += 1;
            }
        } else if let Some(open) = family.open.get_mut(&open_key) {
            open.locks.insert((request.kind, request.owner));
        }
    }

    /// Runs `map`, one call at a time, with the number of bytes that the client may still map.
    /// Where it succeeds, `len` bytes of the file have one more mapping.
    pub(crate) fn map(
        &self,
        ino: Ino,
        len: u64,
        map: impl FnOnce(u64) -> Result<MappingAnswer>,
    ) -> Result<MappingAnswer> {
        let _one = lock(&self.usage.mapping);
        let reserved = self.usage.reserve_mapped(len);
        let memory = map(reserved.bytes)?;
        let mut own = lock(&self.own[shard_index(ino)]);
        let mapping = own.maps.entry(ino).or_default();
        mapping.count += 1;
        mapping.requested = mapping.requested.saturating_add(len);
        // Other clients may have mapped far more of the file.
        let charged = mapping.requested.min(memory.taken).max(mapping.charged);
        assert!(mapping.count > 0 && charged >= mapping.charged, "a mapping gives bytes back");
        self.usage.charge_mapped(charged - mapping.charged);
        mapping.charged = charged;
        Ok(memory)
    }

    /// Records that a mapping has ended; false if there was none.
    pub(crate) fn record_unmap(&self, ino: Ino) -> bool {
        let mut own = lock(&self.own[shard_index(ino)]);
        let Some(mapping) = own.maps.get_mut(&ino) else { return false };
        take(&mut mapping.count, 1);
        if mapping.count == 0 {
            self.usage.refund_mapped(mapping.charged);
            own.maps.remove(&ino);
        }
        true
    }

    /// Keeps the mappings for which `keep` returns true.
    pub(crate) fn keep_maps(&self, mut keep: impl FnMut(Ino, u64) -> bool) {
        for own in &self.own {
            lock(own).maps.retain(|&ino, mapping| {
                let keeps = keep(ino, mapping.count);
                if !keeps {
                    self.usage.refund_mapped(mapping.charged);
                }
                keeps
            });
        }
    }

    /// Removes all mappings, and returns them.
    pub(crate) fn take_maps(&self) -> Vec<(Ino, u64)> {
        let taken = self.own.iter().flat_map(|own| std::mem::take(&mut lock(own).maps));
        taken.map(|(ino, mapping)| (ino, mapping.count)).collect()
    }

    /// Releases the locks of `owner`: the record locks of a process, or the locks of an open file
    /// that the client closes. False if the locks stay, because another connection has them, too.
    pub(crate) fn release_flushed(&self, file: File, owner: LockOwner) -> bool {
        let (mut own, mut family) = self.shard(file.ino);
        self.usage.record_unlock((file.ino, LockKind::Posix, owner));
        if owner.is_process() {
            let key = (file.ino, LockKind::Posix, owner);
            return !own.locks.remove(&key) || family.unlock(&key);
        }
        let key = (file.ino, file.fh);
        let (Some(mine), Some(open)) = (own.open.get_mut(&key), family.open.get_mut(&key)) else {
            return true;
        };
        take(&mut open.unflushed, u64::from(!std::mem::replace(&mut mine.flushed, true)));
        let last = open.unflushed == 0;
        if last {
            open.locks.remove(&(LockKind::Posix, owner));
        }
        last
    }

    /// Removes the flock(2) lock of `owner` on the open file; false where there is none.
    pub(crate) fn remove_flock(&self, file: File, owner: LockOwner) -> bool {
        let mut family = lock(&self.family.shards[shard_index(file.ino)]);
        let open = family.open.get_mut(&(file.ino, file.fh));
        self.usage.record_unlock((file.ino, LockKind::Flock, owner));
        open.is_some_and(|open| open.locks.remove(&(LockKind::Flock, owner)))
    }

    /// Returns everything to `fs` that no other connection holds: the connection is over.
    pub(crate) fn take_back(&self, fs: &dyn FileSystem) {
        if cfg!(debug_assertions) {
            self.audit();
        }
        for (at, own) in self.own.iter().enumerate() {
            let own = std::mem::take(&mut *lock(own));
            let mut family = lock(&self.family.shards[at]);
            // Any open file of the inode suffices to drop a lock.
            let any = |ino| own.open.iter().find(|(key, _)| key.0 == ino).map(|open| open.1.handle);
            let locked = own.locks.iter().filter(|key| family.unlock(key));
            let dropped: Vec<_> = locked
                .filter_map(|&(ino, kind, owner)| Some((File { ino, fh: any(ino)? }, kind, owner)))
                .collect();
            let closed: Vec<_> = own
                .open
                .iter()
                .map(|(&key, mine)| (key.0, *mine, family.close(key, mine)))
                .collect();
            let forgotten: Vec<_> =
                own.lookups.iter().map(|(&ino, &count)| (ino, family.forget(ino, count))).collect();
            drop(family);
            for (file, kind, owner) in dropped {
                drop_locks(fs, file, kind, self.owner(owner));
            }
            for (ino, mine, (locks, last)) in closed {
                let file = File { ino, fh: mine.handle };
                for (kind, owner) in locks {
                    drop_locks(fs, file, kind, self.owner(owner));
                }
                if let Some(open) = last {
                    release(fs, file, &open);
                }
            }
            for (ino, count) in forgotten.into_iter().filter(|(_, count)| *count > 0) {
                fs.forget(ino, count);
            }
        }
        self.usage.end();
    }

    /// Asserts that the family holds at least what this connection holds.
    pub(crate) fn audit(&self) {
        for (own, family) in self.own.iter().zip(&self.family.shards) {
            let (own, family) = (lock(own), lock(family));
            for (ino, &count) in &own.lookups {
                let all = family.lookups.get(ino).expect("the family holds the inode");
                assert!(0 < count && count <= all.held && all.granted <= all.held, "{ino:?}");
            }
            for (key, mine) in &own.open {
                let all = family.open.get(key).expect("the family has the open file");
                assert!(
                    all.unflushed <= all.held && (mine.flushed || 0 < all.unflushed),
                    "{key:?}"
                );
            }
            assert!(own.locks.iter().all(|key| family.locks.contains_key(key)));
        }
    }

    fn shard(
        &self,
        ino: Ino,
    ) -> (MutexGuard<'_, ConnectionHoldings>, MutexGuard<'_, FamilyHoldings>) {
        (lock(&self.own[shard_index(ino)]), lock(&self.family.shards[shard_index(ino)]))
    }
}

impl ConnectionHoldings {
    /// True if the client may name `ino`: it has a lookup or an open file of the inode, or the
    /// inode was reported to it.
    fn may_name(&self, ino: Ino) -> bool {
        self.lookups.contains_key(&ino) || self.listed.has(ino) || self.opens.contains_key(&ino)
    }

    fn add_lookup(&mut self, ino: Ino, usage: &ConnectionUsage) {
        let count = self.lookups.entry(ino).or_default();
        *count += 1;
        if *count == 1 {
            usage.add_lookups(1);
        }
    }
}

impl FamilyHoldings {
    fn forget(&mut self, ino: Ino, lookups: u64) -> u64 {
        let Some(count) = self.lookups.get_mut(&ino) else { return 0 };
        let back = count.drop(lookups);
        if count.held == 0 {
            self.lookups.remove(&ino);
        }
        back
    }

    /// Closes the open file for one connection. Returns the locks that end, and the open file if no
    /// other connection holds it.
    fn close(
        &mut self,
        key: (Ino, Fh),
        mine: &OwnOpenFile,
    ) -> (Vec<(LockKind, LockOwner)>, Option<FamilyOpenFile>) {
        let Some(open) = self.open.get_mut(&key) else { return (Vec::new(), None) };
        take(&mut open.held, 1);
        take(&mut open.unflushed, u64::from(!mine.flushed));
        assert!(open.unflushed <= open.held, "connections that lack the file keep its locks");
        let locks = if open.unflushed == 0 { open.locks.drain().collect() } else { Vec::new() };
        (locks, if open.held == 0 { self.open.remove(&key) } else { None })
    }

    /// Removes the locks of one connection. True if no other connection has them.
    fn unlock(&mut self, key: &LockKey) -> bool {
        let Some(count) = self.locks.get_mut(key) else { return true };
        take(count, 1);
        let last = *count == 0;
        if last {
            self.locks.remove(key);
        }
        last
    }
}

/// Closes an open file, as the kernel does for a process that was killed. Errors are ignored.
fn release(fs: &dyn FileSystem, file: File, open: &FamilyOpenFile) {
    let cx = Context::new(Caller::default());
    if open.dir {
        let _ = fs.releasedir(&cx, file);
    } else {
        let _ = fs.release(&cx, file, ReleaseArgs::from_flags(open.flags));
    }
}

/// Drops all locks of `owner`, by its number in the file system.
pub(crate) fn drop_locks(fs: &dyn FileSystem, file: File, kind: LockKind, owner: LockOwner) {
    let cx = Context::new(Caller::default());
    let lock = Lock { typ: LockType::Unlock, start: 0, end: i64::MAX as u64, pid: 0 };
    let _ = fs.setlk(&cx, file, &LockRequest { kind, owner, lock, wait: false });
    if kind == LockKind::Posix {
        let _ = fs.flush(&cx, file, owner);
    }
}

/// Subtracts `count` from a number. A miscount would free what another connection still uses.
fn take(number: &mut u64, count: u64) {
    *number = number.checked_sub(count).expect("nobody gives back more than they hold");
}

/// A random number, from the keys of the standard library's hash.
fn secret() -> u64 {
    RandomState::new().build_hasher().finish()
}

fn shard_index(ino: Ino) -> usize {
    ino.0 as usize % SHARDS
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}
