//! The names in one directory.

use std::collections::{BTreeMap, HashMap};
use std::ops::Bound;
use std::sync::Arc;

use defuse_fs::{Errno, Name, Result};

use crate::inode::Inode;
use crate::space::{Charge, Small};

/// Positions of `.` and `..` in a listing; all others come after them.
pub(crate) const DOT: u64 = 1;
pub(crate) const DOT_DOT: u64 = 2;

/// Names by hash for lookups, and by position for listings. A name gets the next position when it
/// is added and keeps it while it stays, so that a listing that goes on from a position never
/// repeats or misses a name that was there all along. Positions are never used twice.
pub(crate) struct Dir {
    names: HashMap<Arc<[u8]>, (u64, Arc<Inode>)>,
    order: BTreeMap<u64, (Arc<[u8]>, Arc<Inode>)>,
    next: u64,
    charge: Charge,
    /// Removed: nothing can be added any more.
    dead: bool,
}

impl Dir {
    pub fn new(small: &Arc<Small>) -> Self {
        let charge = Charge::new(small);
        let (names, order) = (HashMap::new(), BTreeMap::new());
        Dir { names, order, next: DOT_DOT + 1, charge, dead: false }
    }

    /// Takes the space for one name more, which [`Dir::put`] is then to add. `ENOSPC`.
    pub fn reserve(&mut self, name: Name<'_>) -> Result<()> {
        self.charge.set(self.charge.bytes() + cost(name))
    }

    /// Gives back what was reserved for a name that is not added, or is removed.
    pub fn unreserve(&mut self, name: Name<'_>) {
        let _ = self.charge.set(self.charge.bytes().saturating_sub(cost(name)));
    }

    pub fn len(&self) -> usize {
        self.names.len()
    }

    pub fn get(&self, name: Name<'_>) -> Option<&Arc<Inode>> {
        self.names.get(name.as_bytes()).map(|(_, inode)| inode)
    }

    /// The inode of `name`; `ENOENT`.
    pub fn find(&self, name: Name<'_>) -> Result<Arc<Inode>> {
        self.get(name).map(Arc::clone).ok_or(Errno::ENOENT)
    }

    /// `ENOENT` for a directory that was removed, `EEXIST` where the name is taken.
    pub fn check_free(&self, name: Name<'_>) -> Result<()> {
        self.check_alive()?;
        if self.get(name).is_some() { Err(Errno::EEXIST) } else { Ok(()) }
    }

    /// `ENOENT` for a directory that was removed.
    pub fn check_alive(&self) -> Result<()> {
        if self.dead { Err(Errno::ENOENT) } else { Ok(()) }
    }

    /// Marks the directory as removed. `ENOTEMPTY`.
    pub fn kill(&mut self) -> Result<()> {
        if self.len() > 0 {
            return Err(Errno::ENOTEMPTY);
        }
        self.dead = true;
        Ok(())
    }

    /// Makes `name` lead to `inode`; a name that exists keeps its position, and one that does not was
    /// [reserved](Dir::reserve). Returns what it led to.
    pub fn put(&mut self, name: Name<'_>, inode: Arc<Inode>) -> Option<Arc<Inode>> {
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

    pub fn remove(&mut self, name: Name<'_>) -> Option<Arc<Inode>> {
        let (position, inode) = self.names.remove(name.as_bytes())?;
        self.order.remove(&position);
        self.unreserve(name);
        Some(inode)
    }

    /// The position that the next name will get.
    pub fn next_position(&self) -> u64 {
        self.next
    }

    /// The names after `position`, in order, each with its own.
    pub fn after(&self, position: u64) -> impl Iterator<Item = (u64, &[u8], &Arc<Inode>)> {
        let range = (Bound::Excluded(position.max(DOT_DOT)), Bound::Unbounded);
        self.order.range(range).map(|(&at, (name, inode))| (at, &**name, inode))
    }

    /// Lets go of all inodes, for the end of the file system.
    pub fn clear(&mut self) {
        self.names.clear();
        self.order.clear();
    }
}

/// The bytes of memory that a name takes: its own, and its places in the two maps.
fn cost(name: Name<'_>) -> usize {
    const PLACES: usize = 96;
    PLACES + name.as_bytes().len()
}
