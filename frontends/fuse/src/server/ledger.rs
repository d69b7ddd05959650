//! What a connection was given: lookups, open files, locks. The kernel keeps these books for a mount;
//! clients in user space may lose theirs at any moment, or lie.
//!
//! A process that forks has a connection for its child, whose books begin as a copy of its own
//! ([`Ledger::copy`]). Both then have what the file system gave once. So all connections that come
//! from one have books in common beside their own: what the file system gave, and how often the
//! connections have it. What nobody has any more goes back.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard};

use defuse_fs::{
    AccessMode, Caller, Context, Errno, Fh, File, FileSystem, Ino, Lock, LockKind, LockOwner,
    LockRequest, LockType, OpenFlags, ReleaseArgs, Result,
};

const SHARDS: usize = 16;

/// The books of one connection.
#[derive(Default)]
pub(crate) struct Ledger {
    own: Shards<Own>,
    family: Arc<Shards<Family>>,
    /// Whose books this one may take over from, while it is made.
    source: Mutex<Option<Arc<Ledger>>>,
}

type Shards<T> = [Mutex<T>; SHARDS];

/// Whose locks may be on an inode.
type LockKey = (Ino, LockKind, LockOwner);

/// What one connection has.
#[derive(Default)]
struct Own {
    lookups: HashMap<Ino, u64>,
    open: HashMap<(Ino, Fh), Held>,
    locks: HashSet<LockKey>,
    /// Mappings of files.
    maps: HashMap<Ino, u64>,
}

/// All opens of one inode by this connection that got the same handle.
#[derive(Clone, Copy, Default)]
struct Held {
    count: u64,
    reads: bool,
    writes: bool,
}

impl Held {
    fn more(&mut self, mode: AccessMode) {
        self.count += 1;
        self.reads |= mode != AccessMode::Write;
        self.writes |= mode != AccessMode::Read;
    }
}

/// What those connections have that come from one.
#[derive(Default)]
struct Family {
    lookups: HashMap<Ino, Count>,
    open: HashMap<(Ino, Fh), Open>,
    /// How many of the connections have the owner's locks.
    locks: HashMap<LockKey, u64>,
}

/// How often the file system gave something that has not gone back, and how often it is had.
#[derive(Clone, Copy, Default)]
struct Count {
    given: u64,
    held: u64,
}

impl Count {
    fn give(&mut self) {
        self.given += 1;
        self.held += 1;
    }

    /// So many less are held; returns how many go back for that.
    fn drop(&mut self, count: u64) -> u64 {
        self.held = self.held.saturating_sub(count);
        let back = self.given.saturating_sub(self.held);
        self.given -= back;
        back
    }
}

/// All opens of one inode that got the same handle.
struct Open {
    count: Count,
    dir: bool,
    flags: OpenFlags,
}

/// What is to be done when a connection closes a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Closed {
    /// The file system's handle is closed; otherwise others have it, too.
    pub(crate) release: bool,
    /// The locks of the open file go; otherwise others have it, too.
    pub(crate) unlock: bool,
}

/// What a connection takes over from the one that it is the heir of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Legacy {
    pub(crate) ino: Ino,
    /// The handle of an open file or directory; without one it is the inode alone.
    pub(crate) fh: Option<Fh>,
    /// What it is open for.
    pub(crate) mode: AccessMode,
    /// The owner of the locks of that open file.
    pub(crate) owner: LockOwner,
    /// The record locks of the process stay.
    pub(crate) process_locks: bool,
}

impl Ledger {
    /// The books of a connection that has nothing yet, and may take over from this one until
    /// [`settle`](Ledger::settle).
    pub(crate) fn heir(self: &Arc<Ledger>) -> Ledger {
        let source = Mutex::new(Some(Arc::clone(self)));
        Ledger { own: Shards::default(), family: Arc::clone(&self.family), source }
    }

    /// Nothing more is taken over.
    pub(crate) fn settle(&self) {
        lock(&self.source).take();
    }

    /// Takes over one thing. `EPERM` where this is no heir, or one no more; `ESTALE` and `EBADF` for
    /// what the other connection does not have.
    pub(crate) fn take_over(&self, legacy: &Legacy) -> Result<()> {
        let source = lock(&self.source).clone().ok_or(Errno::EPERM)?;
        let at = place(legacy.ino);
        // Heirs are younger than those they take over from, so that the order is always the same.
        let theirs = lock(&source.own[at]);
        let (mut own, mut family) = self.shard(legacy.ino);
        if legacy.ino != Ino::ROOT && !theirs.lookups.contains_key(&legacy.ino) {
            return Err(Errno::ESTALE);
        }
        if let Some(fh) = legacy.fh {
            let key = (legacy.ino, fh);
            let open = theirs.open.get(&key).and_then(|_| family.open.get_mut(&key));
            open.ok_or(Errno::EBADF)?.count.held += 1;
            own.open.entry(key).or_default().more(legacy.mode);
        }
        if legacy.ino != Ino::ROOT {
            *own.lookups.entry(legacy.ino).or_default() += 1;
            family.lookups.entry(legacy.ino).or_default().held += 1;
        }
        let stays = |key: &&LockKey| {
            let process = key.2.is_process();
            key.0 == legacy.ino
                && (process && legacy.process_locks || !process && key.2 == legacy.owner)
        };
        for &key in theirs.locks.iter().filter(stays) {
            if own.locks.insert(key) {
                *family.locks.entry(key).or_default() += 1;
            }
        }
        Ok(())
    }

    /// The books of a connection that has all that this one has, but the locks of its process.
    pub(crate) fn copy(&self) -> Ledger {
        let family = Arc::clone(&self.family);
        let copy = Ledger { own: Shards::default(), family, source: Mutex::default() };
        for at in 0..SHARDS {
            let (own, mut family) = (lock(&self.own[at]), lock(&self.family[at]));
            let mut new = lock(&copy.own[at]);
            for (ino, &count) in &own.lookups {
                family.lookups.entry(*ino).or_default().held += count;
            }
            for (key, held) in &own.open {
                if let Some(open) = family.open.get_mut(key) {
                    open.count.held += held.count;
                }
            }
            for &key in own.locks.iter().filter(|(.., owner)| !owner.is_process()) {
                *family.locks.entry(key).or_default() += 1;
                new.locks.insert(key);
            }
            (new.lookups, new.open) = (own.lookups.clone(), own.open.clone());
            new.maps = own.maps.clone();
        }
        copy
    }

    /// One lookup of `ino` was given.
    pub(crate) fn looked_up(&self, ino: Ino) {
        if ino != Ino::ROOT {
            let (mut own, mut family) = self.shard(ino);
            *own.lookups.entry(ino).or_default() += 1;
            family.lookups.entry(ino).or_default().give();
        }
    }

    /// `lookups` of `ino` come back. Returns how many of them the file system gets: nobody gives
    /// back what others hold.
    pub(crate) fn forgotten(&self, ino: Ino, lookups: u64) -> u64 {
        let (mut own, mut family) = self.shard(ino);
        let Some(held) = own.lookups.get_mut(&ino) else { return 0 };
        let back = lookups.min(*held);
        *held -= back;
        if *held == 0 {
            own.lookups.remove(&ino);
        }
        family.forget(ino, back)
    }

    /// Whether the connection may name `ino`.
    pub(crate) fn holds(&self, ino: Ino) -> bool {
        ino == Ino::ROOT || lock(&self.own[place(ino)]).lookups.contains_key(&ino)
    }

    /// A file or directory was opened.
    pub(crate) fn opened(&self, file: File, dir: bool, flags: OpenFlags) {
        let (mut own, mut family) = self.shard(file.ino);
        let key = (file.ino, file.fh);
        own.open.entry(key).or_default().more(flags.access());
        let fresh = Open { count: Count::default(), dir, flags };
        family.open.entry(key).or_insert(fresh).count.give();
    }

    /// It is closed, with the locks of `owner`. `None` where it was not open.
    pub(crate) fn closed(&self, file: File, owner: Option<LockOwner>) -> Option<Closed> {
        let (mut own, mut family) = self.shard(file.ino);
        let key = (file.ino, file.fh);
        let held = own.open.get_mut(&key)?;
        held.count -= 1;
        if held.count == 0 {
            own.open.remove(&key);
        }
        let unlock = owner.is_some_and(|owner| {
            let key = (file.ino, LockKind::Flock, owner);
            // Locks that were never taken are dropped at no cost.
            !own.locks.remove(&key) || family.unlock(&key)
        });
        let release = family.close(key).is_some_and(|(back, _)| back > 0);
        Some(Closed { release, unlock })
    }

    /// Whether the connection has it open for reading, and for writing.
    pub(crate) fn modes(&self, file: File) -> Option<(bool, bool)> {
        let own = lock(&self.own[place(file.ino)]);
        own.open.get(&(file.ino, file.fh)).map(|held| (held.reads, held.writes))
    }

    /// Whether the connection has it open.
    pub(crate) fn is_open(&self, file: File) -> bool {
        lock(&self.own[place(file.ino)]).open.contains_key(&(file.ino, file.fh))
    }

    /// A lock is asked for.
    pub(crate) fn locks(&self, file: File, request: &LockRequest) {
        let (mut own, mut family) = self.shard(file.ino);
        let key = (file.ino, request.kind, request.owner);
        let takes = request.lock.typ != LockType::Unlock;
        if takes && own.open.contains_key(&(file.ino, file.fh)) && own.locks.insert(key) {
            *family.locks.entry(key).or_default() += 1;
        }
    }

    /// A file is mapped once more.
    pub(crate) fn mapped(&self, ino: Ino) {
        *lock(&self.own[place(ino)]).maps.entry(ino).or_default() += 1;
    }

    /// A mapping of it is gone; false where there was none.
    pub(crate) fn unmapped(&self, ino: Ino) -> bool {
        let mut own = lock(&self.own[place(ino)]);
        let Some(count) = own.maps.get_mut(&ino) else { return false };
        *count -= 1;
        if *count == 0 {
            own.maps.remove(&ino);
        }
        true
    }

    /// Keeps the mappings for which `keep` says so.
    pub(crate) fn keep_maps(&self, mut keep: impl FnMut(Ino, u64) -> bool) {
        self.own.iter().for_each(|own| lock(own).maps.retain(|&ino, &mut count| keep(ino, count)));
    }

    /// All mappings, which the connection then has no more.
    pub(crate) fn take_maps(&self) -> Vec<(Ino, u64)> {
        self.own.iter().flat_map(|own| std::mem::take(&mut lock(own).maps)).collect()
    }

    /// The record locks of `owner` are given up. False where another connection has them, too, as
    /// those of an open file that a child has inherited.
    pub(crate) fn flushed(&self, file: File, owner: LockOwner) -> bool {
        let (mut own, mut family) = self.shard(file.ino);
        let key = (file.ino, LockKind::Posix, owner);
        !own.locks.remove(&key) || family.unlock(&key)
    }

    /// Gives everything back to `fs` that nobody else has: the connection is over.
    pub(crate) fn take_back(&self, fs: &dyn FileSystem) {
        for (at, own) in self.own.iter().enumerate() {
            let own = std::mem::take(&mut *lock(own));
            let mut family = lock(&self.family[at]);
            let gone: Vec<_> = own.locks.iter().filter(|key| family.unlock(key)).collect();
            let closed = own.open.iter().flat_map(|(&(ino, fh), held)| {
                let closed = (0..held.count).filter_map(|_| family.close((ino, fh)));
                let (back, dir, flags) = closed
                    .fold((0, false, OpenFlags(0)), |all, (n, open)| (all.0 + n, open.0, open.1));
                (0..back).map(move |_| (File { ino, fh }, dir, flags))
            });
            let closed: Vec<_> = closed.collect();
            let forgotten: Vec<_> =
                own.lookups.iter().map(|(&ino, &count)| (ino, family.forget(ino, count))).collect();
            drop(family);
            for &(ino, kind, owner) in gone {
                let fh = own.open.keys().find(|key| key.0 == ino).map(|key| key.1);
                if let Some(fh) = fh {
                    drop_locks(fs, File { ino, fh }, kind, owner);
                }
            }
            // As the kernel does for a process that was killed. Nobody hears of an error.
            let cx = Context::new(Caller::default());
            for (file, dir, flags) in closed {
                if dir {
                    let _ = fs.releasedir(&cx, file);
                } else {
                    let _ = fs.release(&cx, file, ReleaseArgs { flags, flock_owner: None });
                }
            }
            for (ino, count) in forgotten.into_iter().filter(|(_, count)| *count > 0) {
                fs.forget(ino, count);
            }
        }
    }

    fn shard(&self, ino: Ino) -> (MutexGuard<'_, Own>, MutexGuard<'_, Family>) {
        (lock(&self.own[place(ino)]), lock(&self.family[place(ino)]))
    }
}

impl Family {
    fn forget(&mut self, ino: Ino, lookups: u64) -> u64 {
        let Some(count) = self.lookups.get_mut(&ino) else { return 0 };
        let back = count.drop(lookups);
        if count.held == 0 {
            self.lookups.remove(&ino);
        }
        back
    }

    /// One connection has closed it once; returns how many closes the file system gets for that,
    /// whether it is a directory, and its flags.
    fn close(&mut self, key: (Ino, Fh)) -> Option<(u64, (bool, OpenFlags))> {
        let open = self.open.get_mut(&key)?;
        let (back, what) = (open.count.drop(1), (open.dir, open.flags));
        if open.count.held == 0 {
            self.open.remove(&key);
        }
        Some((back, what))
    }

    /// One connection less has the locks. True where that was the last one.
    fn unlock(&mut self, key: &LockKey) -> bool {
        let Some(count) = self.locks.get_mut(key) else { return true };
        *count -= 1;
        let last = *count == 0;
        if last {
            self.locks.remove(key);
        }
        last
    }
}

/// Drops all locks of `owner`.
pub(crate) fn drop_locks(fs: &dyn FileSystem, file: File, kind: LockKind, owner: LockOwner) {
    let cx = Context::new(Caller::default());
    let lock = Lock { typ: LockType::Unlock, start: 0, end: i64::MAX as u64, pid: 0 };
    let _ = fs.setlk(&cx, file, &LockRequest { kind, owner, lock, wait: false });
    if kind == LockKind::Posix {
        let _ = fs.flush(&cx, file, owner);
    }
}

fn place(ino: Ino) -> usize {
    ino.0 as usize % SHARDS
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

#[cfg(test)]
mod tests {
    use defuse_fs::{Attr, DirBuf, Entry, Name};

    use super::*;

    const FILE: File = File { ino: Ino(5), fh: Fh(0) };
    const KEPT: Closed = Closed { release: false, unlock: false };
    const GONE: Closed = Closed { release: true, unlock: false };

    #[test]
    fn nobody_gives_back_what_they_do_not_hold() {
        let ledger = Ledger::default();
        ledger.looked_up(Ino(5));
        ledger.looked_up(Ino(5));
        assert!(ledger.holds(Ino(5)) && ledger.holds(Ino::ROOT) && !ledger.holds(Ino(6)));
        assert_eq!((ledger.forgotten(Ino(6), 9), ledger.forgotten(Ino(5), 9)), (0, 2));
        assert!(!ledger.holds(Ino(5)));
    }

    #[test]
    fn a_handle_that_was_given_twice_is_closed_twice() {
        let ledger = Ledger::default();
        ledger.opened(FILE, false, OpenFlags(0));
        ledger.opened(FILE, false, OpenFlags(0));
        assert!(ledger.closed(FILE, None) == Some(GONE) && ledger.is_open(FILE));
        assert!(ledger.closed(FILE, None) == Some(GONE) && !ledger.is_open(FILE));
        assert_eq!(ledger.closed(FILE, None), None);
    }

    #[test]
    fn what_a_copy_has_too_goes_back_with_the_last_who_has_it() {
        let parent = Ledger::default();
        parent.looked_up(Ino(5));
        parent.opened(FILE, false, OpenFlags(0));
        let child = parent.copy();
        // What comes later is of one of them alone.
        parent.looked_up(Ino(5));
        parent.opened(FILE, false, OpenFlags(0));
        child.looked_up(Ino(6));
        assert!(!parent.holds(Ino(6)));
        assert_eq!((child.forgotten(Ino(6), 1), child.forgotten(Ino(5), 1)), (1, 0));
        assert!(!child.holds(Ino(5)) && parent.holds(Ino(5)));
        assert_eq!(child.closed(FILE, None), Some(KEPT));
        assert_eq!(child.closed(FILE, None), None);
        assert_eq!(parent.closed(FILE, None), Some(GONE));
        assert_eq!(parent.closed(FILE, None), Some(GONE));
        assert_eq!(parent.forgotten(Ino(5), 9), 2);
    }

    #[test]
    fn locks_of_an_open_file_stay_while_a_copy_has_it_and_those_of_a_process_go_with_it() {
        let parent = Ledger::default();
        parent.opened(FILE, false, OpenFlags(0));
        let taken = |kind, owner| LockRequest {
            kind,
            owner,
            lock: Lock { typ: LockType::Write, start: 0, end: 9, pid: 1 },
            wait: false,
        };
        let (open_file, process) = (LockOwner(7), LockOwner::of_process(1));
        parent.locks(FILE, &taken(LockKind::Flock, open_file));
        parent.locks(FILE, &taken(LockKind::Posix, open_file));
        parent.locks(FILE, &taken(LockKind::Posix, process));
        let child = parent.copy();
        assert!(parent.flushed(FILE, process));
        assert!(!parent.flushed(FILE, open_file) && child.flushed(FILE, open_file));
        assert_eq!(parent.closed(FILE, Some(open_file)), Some(KEPT));
        let last = Closed { release: true, unlock: true };
        assert_eq!(child.closed(FILE, Some(open_file)), Some(last));
    }

    #[test]
    fn an_heir_has_what_it_takes_over_and_nothing_after_it_is_settled() {
        let before = Arc::new(Ledger::default());
        for ino in [5, 6] {
            before.looked_up(Ino(ino));
        }
        before.opened(FILE, false, OpenFlags(0));
        let request = |kind, owner| LockRequest {
            kind,
            owner,
            lock: Lock { typ: LockType::Write, start: 0, end: 9, pid: 1 },
            wait: false,
        };
        let (open_file, other, process) = (LockOwner(7), LockOwner(8), LockOwner::of_process(1));
        for owner in [open_file, other] {
            before.locks(FILE, &request(LockKind::Flock, owner));
        }
        before.locks(FILE, &request(LockKind::Posix, process));
        let heir = before.heir();
        let legacy = Legacy {
            ino: FILE.ino,
            fh: Some(FILE.fh),
            mode: AccessMode::Read,
            owner: open_file,
            process_locks: true,
        };
        assert!(!heir.holds(FILE.ino) && !heir.is_open(FILE));
        assert_eq!(heir.take_over(&legacy), Ok(()));
        assert_eq!(heir.take_over(&Legacy { ino: Ino(9), ..legacy }), Err(Errno::ESTALE));
        assert_eq!(heir.take_over(&Legacy { ino: Ino(6), ..legacy }), Err(Errno::EBADF));
        heir.settle();
        assert_eq!(heir.take_over(&Legacy { ino: Ino(6), fh: None, ..legacy }), Err(Errno::EPERM));
        assert!(heir.holds(FILE.ino) && heir.is_open(FILE) && !heir.holds(Ino(6)));
        // The program before ends: what the next one has stays, with its locks.
        assert_eq!(before.closed(FILE, Some(open_file)), Some(KEPT));
        assert!(!before.flushed(FILE, process));
        assert_eq!((before.forgotten(FILE.ino, 1), before.forgotten(Ino(6), 1)), (0, 1));
        assert!(heir.flushed(FILE, process));
        let last = Closed { release: true, unlock: true };
        assert_eq!(heir.closed(FILE, Some(open_file)), Some(last));
        assert_eq!(heir.forgotten(FILE.ino, 1), 1);
    }

    struct Nothing;
    impl FileSystem for Nothing {
        fn lookup(&self, _: &Context<'_>, _: Ino, _: Name<'_>) -> Result<Entry> {
            Err(Errno::ENOENT)
        }
        fn getattr(&self, _: &Context<'_>, _: Ino, _: Option<Fh>) -> Result<Attr> {
            Err(Errno::ENOENT)
        }
        fn readdir(&self, _: &Context<'_>, _: File, _: u64, _: &mut DirBuf<'_>) -> Result<()> {
            Err(Errno::ENOENT)
        }
    }

    /// A program that executes itself over and over, and hands over one of the files that it has.
    #[test]
    fn many_programs_one_after_the_other_leave_nothing_behind() {
        let mut now = Arc::new(Ledger::default());
        now.looked_up(FILE.ino);
        now.opened(FILE, false, OpenFlags(0));
        let legacy = Legacy {
            ino: FILE.ino,
            fh: Some(FILE.fh),
            mode: AccessMode::Read,
            owner: LockOwner(7),
            process_locks: false,
        };
        for round in 0..1000 {
            let other = File { ino: Ino(16 + round), fh: Fh(1) };
            now.looked_up(other.ino);
            now.opened(other, false, OpenFlags(0));
            let heir = now.heir();
            heir.take_over(&legacy).unwrap();
            heir.settle();
            now.take_back(&Nothing);
            now = Arc::new(heir);
        }
        let count = |of: fn(&Family) -> usize| -> usize {
            now.family.iter().map(|shard| of(&lock(shard))).sum()
        };
        assert_eq!((count(|f| f.lookups.len()), count(|f| f.open.len())), (1, 1));
        let lookups = lock(&now.family[place(FILE.ino)]).lookups[&FILE.ino];
        assert_eq!((lookups.given, lookups.held), (1, 1));
    }
}
