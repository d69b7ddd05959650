//! The tables of a passthrough file system: inodes known to the kernel, and open files and
//! directories.
//!
//! The tables are sharded, so that event loops do not contend for one lock.

use std::cell::RefCell;
use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, RwLock};

const SHARDS: usize = 16;

/// A sharded map from numbers to shared values.
pub struct ShardedMap<T> {
    shards: [RwLock<HashMap<u64, Arc<T>>>; SHARDS],
}

impl<T> ShardedMap<T> {
    /// Creates an empty map.
    pub fn new() -> Self {
        Self { shards: std::array::from_fn(|_| RwLock::new(HashMap::new())) }
    }

    /// The shard of a key, for operations under its lock.
    pub fn shard(&self, key: u64) -> &RwLock<HashMap<u64, Arc<T>>> {
        &self.shards[key as usize % SHARDS]
    }

    /// The value of a key.
    pub fn get(&self, key: u64) -> Option<Arc<T>> {
        self.shard(key).read().unwrap().get(&key).cloned()
    }

    /// Adds a value.
    pub fn insert(&self, key: u64, value: T) {
        self.shard(key).write().unwrap().insert(key, Arc::new(value));
    }

    /// Removes a value. It is dropped when its last user is done.
    pub fn remove(&self, key: u64) {
        let removed = self.shard(key).write().unwrap().remove(&key);
        // Dropping may close a descriptor, a system call, so it happens outside of the lock.
        drop(removed);
    }
}

/// A file known to the kernel. The `O_PATH` descriptor prevents that its inode number is reused.
pub struct PinnedInode {
    /// Descriptor opened with `O_PATH`.
    pub fd: OwnedFd,
    lookups: AtomicU64,
}

impl PinnedInode {
    /// Creates an inode with a lookup count of one.
    pub fn new(fd: OwnedFd) -> Self {
        Self { fd, lookups: AtomicU64::new(1) }
    }
}

/// The inodes by their node number.
pub type PinnedInodes = ShardedMap<PinnedInode>;

impl PinnedInodes {
    /// Counts a lookup of the file of `fd`. Keeps the descriptor if the file was not known.
    pub fn remember(&self, node: u64, fd: OwnedFd) {
        let shard = self.shard(node);
        if let Some(known) = shard.read().unwrap().get(&node) {
            known.lookups.fetch_add(1, Ordering::Relaxed);
            return;
        }
        let mut shard = shard.write().unwrap();
        match shard.get(&node) {
            Some(known) => {
                known.lookups.fetch_add(1, Ordering::Relaxed);
            }
            None => {
                shard.insert(node, Arc::new(PinnedInode::new(fd)));
            }
        }
    }

    /// Decreases the lookup count, and closes the inode when it reaches 0.
    pub fn forget(&self, node: u64, lookups: u64) {
        let mut shard = self.shard(node).write().unwrap();
        let Some(inode) = shard.get(&node) else { return };
        // The root is never forgotten, in spite of the kernel's forget on unmount.
        if inode.lookups.fetch_sub(lookups, Ordering::Relaxed) != lookups || node == 1 {
            return;
        }
        let last = shard.remove(&node);
        drop(shard);
        drop(last);
    }
}

/// An open directory, and the position of its next entry.
pub struct OpenDir {
    /// The stream. It has only one position, so its readers take turns.
    pub stream: Mutex<DirPosition>,
}

/// A directory stream, with the offset of its next entry.
pub struct DirPosition {
    /// The stream.
    pub dir: rustix::fs::Dir,
    /// Offset after the last entry taken, or `None` if an entry was read but did not fit.
    pub at: Option<u64>,
}

/// Generates numbers for open files and directories.
#[derive(Default)]
pub struct HandleCounter(AtomicU64);

impl HandleCounter {
    /// Returns a new number.
    pub fn next(&self) -> u64 {
        self.0.fetch_add(1, Ordering::Relaxed) + 1
    }
}

/// The alignment that `O_DIRECT` requires on all devices of this benchmark.
const ALIGNMENT: usize = 4096;

thread_local! {
    static BUFFER: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

/// Lends the page-aligned buffer of the event loop, so that a reply allocates nothing and direct
/// I/O works.
pub fn with_buffer<R>(size: usize, work: impl FnOnce(&mut [u8]) -> R) -> R {
    BUFFER.with_borrow_mut(|buffer| {
        if buffer.len() < size + ALIGNMENT {
            buffer.resize(size + ALIGNMENT, 0);
        }
        let skip = buffer.as_ptr().align_offset(ALIGNMENT);
        work(&mut buffer[skip..skip + size])
    })
}
