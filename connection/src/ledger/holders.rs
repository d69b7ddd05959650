//! Locks that conflict with a request, and their loss.

use std::sync::Arc;

use defuse_fs::{Fh, File, FileSystem, Ino, LockKind, LockRequest, LockType};

use super::{ConnectionLedger, drop_locks, lock, shard_index};
use crate::usage::LockKey;

/// A lock of this connection, or of an open file that it shares.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LockHolder {
    key: LockKey,
    /// The process that took it, by the number that the client used; 0 if that is not known any
    /// more.
    pub(crate) pid: u32,
    /// The open file that owns the lock; `None` for a record lock of a process.
    open: Option<Fh>,
}

impl LockHolder {
    /// True for a record lock, which belongs to one process.
    pub(crate) fn is_of_process(&self) -> bool {
        self.open.is_none()
    }

    /// True if the other connection has the lock, too.
    pub(crate) fn is_shared_with(&self, own: &ConnectionLedger, other: &ConnectionLedger) -> bool {
        if !Arc::ptr_eq(&own.family, &other.family) {
            return false;
        }
        let theirs = lock(&other.own[shard_index(self.key.0)]);
        match self.open {
            Some(fh) => theirs.open.contains_key(&(self.key.0, fh)),
            None => theirs.locks.contains(&self.key),
        }
    }
}

impl ConnectionLedger {
    /// The locks on `ino` that stand against `request`, whose owner is named as the file system
    /// knows it.
    ///
    /// A child or the next program can have an open file with a lock that another connection, which
    /// has ended, took. The range and type of such a lock are not known then. Only an flock(2) lock
    /// is known, against an exclusive request.
    pub(crate) fn holders(&self, ino: Ino, request: &LockRequest) -> Vec<LockHolder> {
        let own = self.owner(request.owner);
        let requested = LockRequest { owner: own, ..*request };
        let known = self.usage.holders(ino, &requested);
        let exclusive = request.kind == LockKind::Flock && request.lock.typ == LockType::Write;
        let (mine, family) = self.shard(ino);
        let mut holders = Vec::new();
        for &key in mine.locks.iter().filter(|key| key.0 == ino) {
            let range = known.iter().find(|(other, _)| *other == key);
            holders.extend(range.map(|(key, pid)| LockHolder { key: *key, pid: *pid, open: None }));
        }
        for &(_, fh) in mine.open.keys().filter(|(other, _)| *other == ino) {
            let locks = family.open.get(&(ino, fh)).into_iter().flat_map(|open| &open.locks);
            for &(kind, owner) in locks.filter(|(kind, _)| *kind == request.kind) {
                let key = (ino, kind, owner);
                let pid = known.iter().find(|(other, _)| *other == key).map(|(_, pid)| *pid);
                let counts = pid.is_some() || exclusive && owner != own;
                if counts {
                    holders.push(LockHolder { key, pid: pid.unwrap_or(0), open: Some(fh) });
                }
            }
        }
        holders
    }

    /// Releases the lock, in all connections that share it. False if it has been released
    /// meanwhile.
    pub(crate) fn lose(&self, fs: &dyn FileSystem, holder: &LockHolder) -> bool {
        let (ino, kind, owner) = holder.key;
        let (mut mine, mut family) = self.shard(ino);
        // Any open file of the inode suffices to drop a lock.
        let any = |own: &super::ConnectionHoldings| {
            own.open.iter().find(|(key, _)| key.0 == ino).map(|open| open.1.handle)
        };
        let had = match holder.open {
            Some(fh) => {
                let open = family.open.get_mut(&(ino, fh));
                open.is_some_and(|open| open.locks.remove(&(kind, owner)))
            }
            None => mine.locks.remove(&holder.key) && family.unlock(&holder.key),
        };
        let handle = match holder.open {
            Some(fh) => mine.open.get(&(ino, fh)).map(|open| open.handle),
            None => any(&mine),
        };
        drop((mine, family));
        self.usage.record_unlock(holder.key);
        let Some(fh) = handle.filter(|_| had) else { return false };
        drop_locks(fs, File { ino, fh }, kind, self.owner(owner));
        true
    }
}
