//! The inodes of open files, by handle.
//!
//! Two open files share no lock and no cache line here, and an operation on an open file changes no
//! reference count. An entry takes 64 bytes. Entries are reused, and freed with the file system.

use std::array;
use std::sync::{Arc, Mutex, OnceLock, RwLock};

use defuse_fs::{Fh, File};

use crate::inode::MemoryInode;
use crate::sync::{lock, write};

/// Entries in the first part. Each further part has twice as many as the one before.
const FIRST: u64 = 64;
/// Parts. All together have entries for about four thousand million open files.
const PARTS: usize = 26;

/// The inode of an open file; `None` for an unused entry.
#[derive(Default)]
#[repr(align(64))]
pub(crate) struct HandleEntry(pub RwLock<Option<Arc<MemoryInode>>>);

/// The entries. Handle 0 has none.
pub(crate) struct HandleTable {
    parts: [OnceLock<Box<[HandleEntry]>>; PARTS],
    unused: Mutex<UnusedHandles>,
}

#[derive(Default)]
struct UnusedHandles {
    /// Handles that were closed.
    closed: Vec<u32>,
    /// The highest handle so far.
    last: u32,
}

impl UnusedHandles {
    fn take(&mut self) -> Option<u32> {
        self.closed.pop().or_else(|| {
            let next =
                self.last.checked_add(1).filter(|&next| shard_and_index(next.into()).is_some())?;
            self.last = next;
            Some(next)
        })
    }
}

/// The part of a handle, and the position in it.
fn shard_and_index(fh: u64) -> Option<(usize, usize)> {
    let number = fh.checked_sub(1)?.checked_add(FIRST)?;
    let part = number.ilog2() - FIRST.ilog2();
    let at = number - (FIRST << part);
    (part < PARTS as u32).then_some((part as usize, at as usize))
}

impl HandleTable {
    pub fn new() -> Self {
        HandleTable { parts: array::from_fn(|_| OnceLock::new()), unused: Mutex::default() }
    }

    /// A handle of a new open file; 0 if there are no more.
    pub fn open(&self, inode: Arc<MemoryInode>) -> Fh {
        let Some(fh) = lock(&self.unused).take() else { return Fh(0) };
        let Some((part, at)) = shard_and_index(fh.into()) else { return Fh(0) };
        let len = FIRST << part;
        let part =
            self.parts[part].get_or_init(|| (0..len).map(|_| HandleEntry::default()).collect());
        *write(&part[at].0) = Some(inode);
        Fh(fh.into())
    }

    /// The entry of a handle.
    pub fn get(&self, fh: Fh) -> Option<&HandleEntry> {
        let (part, at) = shard_and_index(fh.0)?;
        self.parts[part].get()?.get(at)
    }

    /// Empties the entry of `file` and returns its inode, after the operations that use it.
    pub fn close(&self, file: File) -> Option<Arc<MemoryInode>> {
        let handle = self.get(file.fh)?;
        let inode = write(&handle.0).take_if(|inode| inode.ino == file.ino.0)?;
        // Only handles that `open` returned have an inode, and those fit.
        lock(&self.unused).closed.extend(u32::try_from(file.fh.0));
        Some(inode)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_handle_has_a_place_of_its_own() {
        assert_eq!(shard_and_index(0), None);
        assert_eq!(
            (shard_and_index(1), shard_and_index(64), shard_and_index(65)),
            (Some((0, 0)), Some((0, 63)), Some((1, 0)))
        );
        assert_eq!((shard_and_index(192), shard_and_index(193)), (Some((1, 127)), Some((2, 0))));
        assert_eq!(
            shard_and_index((FIRST << PARTS) - FIRST),
            Some((25, (FIRST << 25) as usize - 1))
        );
        assert_eq!(
            (shard_and_index((FIRST << PARTS) - FIRST + 1), shard_and_index(u64::MAX)),
            (None, None)
        );
    }
}
