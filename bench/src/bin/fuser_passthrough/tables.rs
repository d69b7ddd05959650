//! The tables of a passthrough file system: inodes the kernel knows, files and directories it has open.
//!
//! Both are sharded, so that event loops do not meet on one lock.

use std::cell::RefCell;
use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, RwLock};

const SHARDS: usize = 16;

/// A map from numbers to shared values, in shards.
pub struct Sharded<T> {
    shards: [RwLock<HashMap<u64, Arc<T>>>; SHARDS],
}

impl<T> Sharded<T> {
    /// An empty map.
    pub fn new() -> Self {
        Self { shards: std::array::from_fn(|_| RwLock::new(HashMap::new())) }
    }

    /// The shard that holds a key, for what must happen under its lock.
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

    /// Removes a value; it lives on until its last user is done.
    pub fn remove(&self, key: u64) {
        let removed = self.shard(key).write().unwrap().remove(&key);
        // Closing a descriptor is a system call: not under the lock.
        drop(removed);
    }
}

/// A file that the kernel knows, held by an `O_PATH` descriptor so that its number cannot be reused meanwhile.
pub struct Inode {
    /// Descriptor opened with `O_PATH`.
    pub fd: OwnedFd,
    lookups: AtomicU64,
}

impl Inode {
    /// An inode that has been looked up once.
    pub fn new(fd: OwnedFd) -> Self {
        Self { fd, lookups: AtomicU64::new(1) }
    }
}

/// The inodes by their node number.
pub type Inodes = Sharded<Inode>;

impl Inodes {
    /// Counts a lookup of the file behind `fd`; the descriptor is kept if the file was not known.
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
                shard.insert(node, Arc::new(Inode::new(fd)));
            }
        }
    }

    /// Takes lookups back, and closes the inode when none is left.
    pub fn forget(&self, node: u64, lookups: u64) {
        let mut shard = self.shard(node).write().unwrap();
        let Some(inode) = shard.get(&node) else { return };
        // The root is never forgotten, whatever the kernel says on unmount.
        if inode.lookups.fetch_sub(lookups, Ordering::Relaxed) != lookups || node == 1 {
            return;
        }
        let last = shard.remove(&node);
        drop(shard);
        drop(last);
    }
}

/// An open directory, and where its next entry comes from.
pub struct OpenDir {
    /// Reading position; a directory stream is one position, so its readers take turns.
    pub stream: Mutex<Stream>,
}

/// A directory stream with the offset that its next read will deliver.
pub struct Stream {
    /// The stream.
    pub dir: rustix::fs::Dir,
    /// Offset after the last entry taken, or `None` if an entry was read but did not fit.
    pub at: Option<u64>,
}

/// Numbers for open files and directories.
#[derive(Default)]
pub struct Handles(AtomicU64);

impl Handles {
    /// A number never given before.
    pub fn next(&self) -> u64 {
        self.0.fetch_add(1, Ordering::Relaxed) + 1
    }
}

/// What `O_DIRECT` asks of memory, on any device this benchmark meets.
const ALIGNMENT: usize = 4096;

thread_local! {
    static BUFFER: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

/// Lends a page-aligned buffer of the event loop, so that a reply allocates nothing and direct I/O works.
pub fn with_buffer<R>(size: usize, work: impl FnOnce(&mut [u8]) -> R) -> R {
    BUFFER.with_borrow_mut(|buffer| {
        if buffer.len() < size + ALIGNMENT {
            buffer.resize(size + ALIGNMENT, 0);
        }
        let skip = buffer.as_ptr().align_offset(ALIGNMENT);
        work(&mut buffer[skip..skip + size])
    })
}
