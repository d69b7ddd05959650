//! The frontends that were given the attributes of an inode.

use std::array;
use std::collections::HashMap;
use std::hash::BuildHasherDefault;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::{Ino, NumberHasher};

const SHARDS: usize = 64;

/// One bit for each frontend.
pub(super) type FrontendMask = u64;

#[derive(Default)]
struct CacheGrant {
    /// Attributes were given since the last time that they had been dropped for sure.
    held: FrontendMask,
    /// Attributes were given since the last call of [`CacheGrants::begin`] for the frontend.
    fresh: FrontendMask,
    /// Calls of [`CacheGrants::begin`] without their [`CacheGrants::end`].
    dropping: u32,
}

type GrantShard = HashMap<u64, CacheGrant, BuildHasherDefault<NumberHasher>>;

pub(super) struct CacheGrants {
    shards: [Mutex<GrantShard>; SHARDS],
}

impl CacheGrants {
    pub(super) fn new() -> Self {
        CacheGrants { shards: array::from_fn(|_| Mutex::default()) }
    }

    /// Marks that attributes are given. Called before they are read.
    pub(super) fn give(&self, ino: Ino, mask: FrontendMask) {
        let mut shard = self.shard(ino);
        let grant = shard.entry(ino.0).or_default();
        grant.held |= mask;
        grant.fresh |= mask;
    }

    /// Returns the frontends of `mask` that may have the attributes. If there are any, the caller
    /// notifies them, and then calls [`end`](CacheGrants::end). Until then they count as frontends
    /// that have the attributes, so that another change notifies them again: it must not be
    /// answered before they have dropped the attributes.
    pub(super) fn begin(&self, ino: Ino, mask: FrontendMask) -> FrontendMask {
        let mut shard = self.shard(ino);
        let Some(grant) = shard.get_mut(&ino.0) else { return 0 };
        let held = grant.held & mask;
        if held != 0 {
            grant.fresh &= !held;
            grant.dropping += 1;
        }
        held
    }

    pub(super) fn end(&self, ino: Ino) {
        let mut shard = self.shard(ino);
        let Some(grant) = shard.get_mut(&ino.0) else { return };
        grant.dropping = grant.dropping.saturating_sub(1);
        if grant.dropping == 0 {
            grant.held &= grant.fresh;
            if grant.held == 0 {
                shard.remove(&ino.0);
            }
        }
    }

    /// Removes frontends that have ended, or that are notified of every change from now on.
    pub(super) fn remove(&self, mask: FrontendMask) {
        for shard in &self.shards {
            lock(shard).retain(|_, grant| {
                grant.held &= !mask;
                grant.fresh &= !mask;
                grant.held != 0 || grant.dropping != 0
            });
        }
    }

    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.shards.iter().map(|shard| lock(shard).len()).sum()
    }

    fn shard(&self, ino: Ino) -> MutexGuard<'_, GrantShard> {
        lock(&self.shards[ino.0 as usize % SHARDS])
    }
}

fn lock(shard: &Mutex<GrantShard>) -> MutexGuard<'_, GrantShard> {
    shard.lock().unwrap_or_else(PoisonError::into_inner)
}
