//! All inodes by number, in shards, so that reads and writes share no global lock.

use std::array;
use std::collections::HashMap;
use std::hash::BuildHasherDefault;
use std::sync::{Arc, RwLock};

use defuse_fs::{Errno, Ino, NumberHasher, Result};

use crate::inode::{InodeContent, MemoryInode};
use crate::sync::{read, write};

const SHARDS: usize = 64;

type MemoryInodeShard = HashMap<u64, Arc<MemoryInode>, BuildHasherDefault<NumberHasher>>;

pub(crate) struct MemoryInodeTable {
    shards: [RwLock<MemoryInodeShard>; SHARDS],
}

impl MemoryInodeTable {
    pub fn new() -> Self {
        MemoryInodeTable { shards: array::from_fn(|_| RwLock::default()) }
    }

    /// The inode of this number. Fails with `ESTALE` if there is none, or none any more.
    pub fn get(&self, ino: u64) -> Result<Arc<MemoryInode>> {
        read(self.shard(ino)).get(&ino).map(Arc::clone).ok_or(Errno::ESTALE)
    }

    pub fn insert(&self, inode: Arc<MemoryInode>) {
        write(self.shard(inode.ino)).insert(inode.ino, inode);
    }

    pub fn remove(&self, ino: u64) {
        let gone = write(self.shard(ino)).remove(&ino);
        // Drop the inode outside of the shard's lock, because freeing the pages of a large file
        // takes long.
        drop(gone);
    }

    /// The inodes that some frontend knows.
    pub fn list_known(&self) -> Vec<Ino> {
        let mut known = Vec::new();
        for shard in &self.shards {
            let shard = read(shard);
            let looked_up = shard.values().filter(|inode| inode.is_looked_up());
            known.extend(looked_up.map(|inode| Ino(inode.ino)));
        }
        known
    }

    fn shard(&self, ino: u64) -> &RwLock<MemoryInodeShard> {
        &self.shards[ino as usize % SHARDS]
    }
}

impl Drop for MemoryInodeTable {
    /// Empties the directories while the table still holds every inode. Dropping a deep tree from
    /// its root would recurse once per level.
    fn drop(&mut self) {
        for shard in &self.shards {
            for inode in read(shard).values() {
                if let InodeContent::Dir(dir) = &inode.body {
                    write(&dir.names).clear();
                }
            }
        }
    }
}
