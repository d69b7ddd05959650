//! Locks for counting the names of inodes (`removal.rs`).

use std::sync::{Mutex, MutexGuard, PoisonError};

const SHARDS: usize = 16;

/// Locks for counting the names of an inode and releasing its pin. Without them, a thread that has
/// counted a name could release the pin after another thread has removed that name.
#[derive(Default)]
pub(crate) struct RemovalLocks([Mutex<()>; SHARDS]);

impl RemovalLocks {
    /// Locks the inode with this number, and some others.
    pub(crate) fn lock(&self, number: u64) -> MutexGuard<'_, ()> {
        self.0[number as usize % SHARDS].lock().unwrap_or_else(PoisonError::into_inner)
    }
}
