//! The entries of one directory.

use std::collections::{BTreeMap, HashMap};
use std::ops::Bound;
use std::sync::Arc;

use defuse_fs::{Errno, Name, Result};

use crate::inode::MemoryInode;
use crate::space::{SmallObjects, SpaceCharge};

/// Positions of `.` and `..` in a listing. All other entries come after them.
pub(crate) const DOT: u64 = 1;
pub(crate) const DOT_DOT: u64 = 2;

/// Directory entries by name for lookups, and by position for listings. A new name gets the next
/// position and keeps it, and no position is reused. A listing that continues from a position
/// therefore neither repeats nor misses a name that existed throughout.
pub(crate) struct DirEntries {
    names: HashMap<Arc<[u8]>, (u64, Arc<MemoryInode>)>,
    order: BTreeMap<u64, (Arc<[u8]>, Arc<MemoryInode>)>,
    next: u64,
    charge: SpaceCharge,
    /// The directory was removed and accepts no new names.
    dead: bool,
}

impl DirEntries {
    pub fn new(small: &Arc<SmallObjects>) -> Self {
        let charge = SpaceCharge::new(small);
        let (names, order) = (HashMap::new(), BTreeMap::new());
        DirEntries { names, order, next: DOT_DOT + 1, charge, dead: false }
    }

    /// Reserves space for one more name, which [`DirEntries::insert`] then adds. Fails with
    /// `ENOSPC`.
    pub fn reserve(&mut self, name: Name<'_>) -> Result<()> {
        self.charge.set(self.charge.bytes() + cost(name))
    }

    /// Returns the space of a name that is not added after all, or was removed.
    pub fn unreserve(&mut self, name: Name<'_>) {
        let _ = self.charge.set(self.charge.bytes().saturating_sub(cost(name)));
    }

    pub fn len(&self) -> usize {
        self.names.len()
    }

    pub fn get(&self, name: Name<'_>) -> Option<&Arc<MemoryInode>> {
        self.names.get(name.as_bytes()).map(|(_, inode)| inode)
    }

    /// The inode of `name`. Fails with `ENOENT`.
    pub fn find(&self, name: Name<'_>) -> Result<Arc<MemoryInode>> {
        self.get(name).map(Arc::clone).ok_or(Errno::ENOENT)
    }

    /// Fails with `ENOENT` if the directory was removed, and with `EEXIST` if the name exists.
    pub fn check_free(&self, name: Name<'_>) -> Result<()> {
        self.check_alive()?;
        if self.get(name).is_some() { Err(Errno::EEXIST) } else { Ok(()) }
    }

    /// Fails with `ENOENT` if the directory was removed.
    pub fn check_alive(&self) -> Result<()> {
        if self.dead { Err(Errno::ENOENT) } else { Ok(()) }
    }

    /// Marks the directory as removed. Fails with `ENOTEMPTY`.
    pub fn kill(&mut self) -> Result<()> {
        if self.len() > 0 {
            return Err(Errno::ENOTEMPTY);
        }
        self.dead = true;
        Ok(())
    }

    /// Sets the inode of `name`, and returns the previous one. An existing name keeps its position;
    /// a new one must be [reserved](DirEntries::reserve) first.
    pub fn insert(&mut self, name: Name<'_>, inode: Arc<MemoryInode>) -> Option<Arc<MemoryInode>> {
        if let Some((position, old)) = self.names.get_mut(name.as_bytes()) {
            if let Some((_, listed)) = self.order.get_mut(position) {
                *listed = Arc::clone(&inode);
            }
            return Some(std::mem::replace(old, inode));
        }
        let position = self.next;
        self.next += 1;
        let name: Arc<[u8]> = name.as_bytes().into();
        self.order.insert(position, (Arc::clone(&name), Arc::clone(&inode)));
        self.names.insert(name, (position, inode));
        None
    }

    pub fn remove(&mut self, name: Name<'_>) -> Option<Arc<MemoryInode>> {
        let (position, inode) = self.names.remove(name.as_bytes())?;
        self.order.remove(&position);
        self.unreserve(name);
        Some(inode)
    }

    /// The position of the next new name.
    pub fn next_position(&self) -> u64 {
        self.next
    }

    /// The names after `position`, in order, with their positions.
    pub fn entries_after(
        &self,
        position: u64,
    ) -> impl Iterator<Item = (u64, &[u8], &Arc<MemoryInode>)> {
        let range = (Bound::Excluded(position.max(DOT_DOT)), Bound::Unbounded);
        self.order.range(range).map(|(&at, (name, inode))| (at, &**name, inode))
    }

    /// Drops all inodes, at the end of the file system.
    pub fn clear(&mut self) {
        self.names.clear();
        self.order.clear();
    }
}

/// The memory that a name uses: its bytes, and its entries in the two maps.
fn cost(name: Name<'_>) -> usize {
    const PLACES: usize = 96;
    PLACES + name.as_bytes().len()
}
