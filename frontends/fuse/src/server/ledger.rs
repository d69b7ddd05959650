//! What a family of connections was given: lookups, open files, locks. The kernel keeps these books
//! for a mount; clients in user space may lose theirs at any moment, or lie.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard};

use defuse_fs::{
    Caller, Context, Fh, File, FileSystem, Ino, Lock, LockKind, LockOwner, LockRequest, LockType,
    OpenFlags, ReleaseArgs,
};

const SHARDS: usize = 16;

/// The books of one family.
#[derive(Default)]
pub(crate) struct Ledger {
    shards: [Mutex<Shard>; SHARDS],
}

#[derive(Default)]
struct Shard {
    lookups: HashMap<Ino, u64>,
    open: HashMap<(Ino, Fh), Open>,
}

/// All opens of one inode that got the same handle.
struct Open {
    count: u64,
    dir: bool,
    flags: OpenFlags,
    /// Whose locks may be on it.
    owners: Vec<(LockKind, LockOwner)>,
}

impl Ledger {
    /// One lookup of `ino` was given.
    pub(crate) fn looked_up(&self, ino: Ino) {
        if ino != Ino::ROOT {
            *self.shard(ino).lookups.entry(ino).or_default() += 1;
        }
    }

    /// `lookups` of `ino` come back. Returns how many of them there were: nobody gives back what
    /// others hold.
    pub(crate) fn forgotten(&self, ino: Ino, lookups: u64) -> u64 {
        let mut shard = self.shard(ino);
        let Some(held) = shard.lookups.get_mut(&ino) else { return 0 };
        let back = lookups.min(*held);
        *held -= back;
        if *held == 0 {
            shard.lookups.remove(&ino);
        }
        back
    }

    /// Whether the family may name `ino`.
    pub(crate) fn holds(&self, ino: Ino) -> bool {
        ino == Ino::ROOT || self.shard(ino).lookups.contains_key(&ino)
    }

    /// A file or directory was opened.
    pub(crate) fn opened(&self, file: File, dir: bool, flags: OpenFlags) {
        let mut shard = self.shard(file.ino);
        let fresh = Open { count: 0, dir, flags, owners: Vec::new() };
        shard.open.entry((file.ino, file.fh)).or_insert(fresh).count += 1;
    }

    /// It is closed. False where it was not open.
    pub(crate) fn closed(&self, file: File) -> bool {
        let mut shard = self.shard(file.ino);
        let Some(open) = shard.open.get_mut(&(file.ino, file.fh)) else { return false };
        open.count -= 1;
        if open.count == 0 {
            shard.open.remove(&(file.ino, file.fh));
        }
        true
    }

    /// Whether the family has it open.
    pub(crate) fn is_open(&self, file: File) -> bool {
        self.shard(file.ino).open.contains_key(&(file.ino, file.fh))
    }

    /// A lock is asked for.
    pub(crate) fn locks(&self, file: File, request: &LockRequest) {
        let mut shard = self.shard(file.ino);
        let who = (request.kind, request.owner);
        if let Some(open) = shard.open.get_mut(&(file.ino, file.fh))
            && request.lock.typ != LockType::Unlock
            && !open.owners.contains(&who)
        {
            open.owners.push(who);
        }
    }

    /// Gives everything back to `fs`: nobody is left to use it.
    pub(crate) fn take_back(&self, fs: &dyn FileSystem) {
        for shard in &self.shards {
            let Shard { lookups, open } = std::mem::take(&mut *lock(shard));
            for ((ino, fh), open) in open {
                open.close(fs, File { ino, fh });
            }
            for (ino, count) in lookups {
                fs.forget(ino, count);
            }
        }
    }

    fn shard(&self, ino: Ino) -> MutexGuard<'_, Shard> {
        lock(&self.shards[ino.0 as usize % SHARDS])
    }
}

impl Open {
    /// Closes as the kernel does for a process that was killed. Nobody hears of an error.
    fn close(self, fs: &dyn FileSystem, file: File) {
        let cx = Context::new(Caller::default());
        let (posix, flock): (Vec<_>, Vec<_>) =
            self.owners.into_iter().partition(|(kind, _)| *kind == LockKind::Posix);
        for (kind, owner) in posix {
            let lock = Lock { typ: LockType::Unlock, start: 0, end: i64::MAX as u64, pid: 0 };
            let _ = fs.setlk(&cx, file, &LockRequest { kind, owner, lock, wait: false });
            let _ = fs.flush(&cx, file, owner);
        }
        let mut flock = flock.into_iter().map(|(_, owner)| owner);
        for _ in 0..self.count {
            if self.dir {
                let _ = fs.releasedir(&cx, file);
            } else {
                let args = ReleaseArgs { flags: self.flags, flock_owner: flock.next() };
                let _ = fs.release(&cx, file, args);
            }
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

#[cfg(test)]
mod tests {
    use super::*;

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
        let file = File { ino: Ino(5), fh: Fh(0) };
        ledger.opened(file, false, OpenFlags(0));
        ledger.opened(file, false, OpenFlags(0));
        assert!(ledger.closed(file) && ledger.is_open(file));
        assert!(ledger.closed(file) && !ledger.is_open(file) && !ledger.closed(file));
    }
}
