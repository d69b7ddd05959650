//! Locks that keep a check and the change that it permits together.
//!
//! A guarded client may remove a name, or change attributes, if the present attributes permit it.
//! Between the check and the change no other client may put another inode under the name, or change
//! the owner of the inode. The kernel holds the lock of the directory, and of the inode, for the
//! same reason (`may_delete` of `fs/namei.c`, `notify_change` of `fs/attr.c`). Here the call of a
//! guarded client holds the lock of the inode exclusively, and calls of other clients that change
//! the same object share it. Changes outside of connections are not held up.

use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use defuse_fs::{Ino, SetAttr};

const SHARDS: usize = 64;

/// The locks of one served file system. Inodes share them by their numbers.
pub(crate) struct InodeLocks([RwLock<()>; SHARDS]);

impl Default for InodeLocks {
    fn default() -> Self {
        InodeLocks(std::array::from_fn(|_| RwLock::default()))
    }
}

/// One or two locks, until they are dropped.
#[derive(Default)]
#[must_use]
pub(crate) struct InodeLockGuard<'a> {
    _first: Option<LockShardGuard<'a>>,
    _second: Option<LockShardGuard<'a>>,
}

enum LockShardGuard<'a> {
    Exclusive(#[expect(dead_code, reason = "dropped at the end")] RwLockWriteGuard<'a, ()>),
    Shared(#[expect(dead_code, reason = "dropped at the end")] RwLockReadGuard<'a, ()>),
}

impl InodeLocks {
    /// Returns the locks for the removal of names from two directories, which may be one: exclusive
    /// for a guarded client.
    pub(crate) fn removal(&self, dirs: [Ino; 2], is_guarded: bool) -> InodeLockGuard<'_> {
        self.lock_pair(dirs, is_guarded)
    }

    /// Returns the lock for a new name in `dir`.
    pub(crate) fn creation(&self, dir: Ino) -> InodeLockGuard<'_> {
        self.lock_pair([dir, dir], false)
    }

    /// Returns the lock for a change of the attributes of `ino`.
    pub(crate) fn setattr(&self, ino: Ino, set: &SetAttr, is_guarded: bool) -> InodeLockGuard<'_> {
        let changes_owner = set.uid.is_some() || set.gid.is_some() || set.perm.is_some();
        match is_guarded || changes_owner {
            true => self.lock_pair([ino, ino], is_guarded),
            false => InodeLockGuard::default(),
        }
    }

    /// Returns the lock for a change of an extended attribute of `ino`.
    pub(crate) fn xattr(&self, ino: Ino, is_guarded: bool) -> InodeLockGuard<'_> {
        if is_guarded { self.lock_pair([ino, ino], true) } else { InodeLockGuard::default() }
    }

    /// Takes locks in the order of the shards, so that two calls never wait for each other.
    fn lock_pair(&self, inodes: [Ino; 2], exclusive: bool) -> InodeLockGuard<'_> {
        let [one, other] = inodes.map(|ino| ino.0 as usize % SHARDS);
        let (first, second) = (one.min(other), one.max(other));
        let first = self.take(first, exclusive);
        InodeLockGuard {
            _first: Some(first),
            _second: (one != other).then(|| self.take(second, exclusive)),
        }
    }

    fn take(&self, shard: usize, exclusive: bool) -> LockShardGuard<'_> {
        let lock = &self.0[shard];
        match exclusive {
            true => LockShardGuard::Exclusive(lock.write().unwrap_or_else(PoisonError::into_inner)),
            false => LockShardGuard::Shared(lock.read().unwrap_or_else(PoisonError::into_inner)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guarded_removal_holds_its_directory_alone_and_others_share_theirs() {
        let holds = InodeLocks::default();
        let held = holds.removal([Ino(2), Ino(2)], true);
        assert!(holds.0[2].try_read().is_err() && holds.0[3].try_write().is_ok());
        drop(held);
        let _shared = holds.removal([Ino(2), Ino(2)], false);
        let _renames = holds.removal([Ino(66), Ino(2)], false);
        let _made = holds.creation(Ino(2));
        assert!(holds.0[2].try_read().is_ok() && holds.0[2].try_write().is_err());
        let times = SetAttr { size: Some(0), ..SetAttr::default() };
        let _free = holds.setattr(Ino(3), &times, false);
        assert!(holds.0[3].try_write().is_ok());
    }
}
