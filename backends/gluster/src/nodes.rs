//! The inodes that frontends know, by their numbers: an identity and a count each.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use defuse_fs::{Errno, Fh, Ino, Result};

use crate::volume::Gfid;

/// All known inodes. Numbers are never used again.
#[derive(Debug)]
pub struct Nodes {
    inner: Mutex<Inner>,
}

#[derive(Debug)]
struct Inner {
    by_number: HashMap<u64, Node>,
    by_gfid: HashMap<Gfid, u64>,
    next: u64,
}

#[derive(Debug)]
struct Node {
    gfid: Gfid,
    lookups: u64,
    /// The directory in which a directory was found last.
    parent: Option<Gfid>,
    /// Its open files, by which it is reached after its last name was removed.
    open: Vec<Fh>,
}

impl Nodes {
    /// Only the root is known.
    pub fn new(root: Gfid) -> Nodes {
        let node = Node { gfid: root, lookups: 0, parent: None, open: Vec::new() };
        let by_number = HashMap::from([(Ino::ROOT.0, node)]);
        let by_gfid = HashMap::from([(root, Ino::ROOT.0)]);
        Nodes { inner: Mutex::new(Inner { by_number, by_gfid, next: Ino::ROOT.0 + 1 }) }
    }

    /// Adds a lookup of `gfid`, a directory in `parent` if that is given.
    pub fn look_up(&self, gfid: Gfid, parent: Option<Gfid>) -> Ino {
        let mut inner = self.lock();
        let next = inner.next;
        let number = *inner.by_gfid.entry(gfid).or_insert(next);
        if number == next {
            inner.next += 1;
        }
        let new = Node { gfid, lookups: 0, parent: None, open: Vec::new() };
        let node = inner.by_number.entry(number).or_insert(new);
        if number != Ino::ROOT.0 {
            node.lookups += 1;
            node.parent = parent.or(node.parent);
        }
        Ino(number)
    }

    /// Returns lookups. The inode is unknown after its last one.
    pub fn forget(&self, ino: Ino, lookups: u64) {
        let mut inner = self.lock();
        let Some(node) = inner.by_number.get_mut(&ino.0) else { return };
        node.lookups = node.lookups.saturating_sub(lookups);
        if node.lookups == 0 && ino != Ino::ROOT {
            let gfid = node.gfid;
            inner.by_number.remove(&ino.0);
            inner.by_gfid.remove(&gfid);
        }
    }

    /// The identity of an inode. Fails with `ESTALE` if it is unknown.
    pub fn gfid(&self, ino: Ino) -> Result<Gfid> {
        self.with(ino, |node| node.gfid)
    }

    /// The number of an identity, if it is known.
    pub fn ino(&self, gfid: Gfid) -> Option<Ino> {
        self.lock().by_gfid.get(&gfid).map(|&number| Ino(number))
    }

    /// The directory in which a directory is, as far as it is known.
    pub fn parent(&self, ino: Ino) -> Result<Option<Gfid>> {
        self.with(ino, |node| node.parent)
    }

    /// A directory was moved to `parent`.
    pub fn moved(&self, gfid: Gfid, parent: Gfid) {
        let mut inner = self.lock();
        if let Some(number) = inner.by_gfid.get(&gfid).copied()
            && let Some(node) = inner.by_number.get_mut(&number)
        {
            node.parent = Some(parent);
        }
    }

    /// Notes an open file.
    pub fn opened(&self, ino: Ino, fh: Fh) {
        let _ = self.with(ino, |node| node.open.push(fh));
    }

    /// An open file was released.
    pub fn released(&self, ino: Ino, fh: Fh) {
        let _ = self.with(ino, |node| node.open.retain(|&open| open != fh));
    }

    /// An open file of the inode.
    pub fn any_open(&self, ino: Ino) -> Option<Fh> {
        self.with(ino, |node| node.open.last().copied()).ok().flatten()
    }

    /// Number of known inodes, with the root.
    #[cfg(test)]
    pub fn count(&self) -> usize {
        self.lock().by_number.len()
    }

    fn with<T>(&self, ino: Ino, run: impl FnOnce(&mut Node) -> T) -> Result<T> {
        self.lock().by_number.get_mut(&ino.0).map(run).ok_or(Errno::ESTALE)
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_inode_is_known_until_its_last_lookup_is_returned_and_its_number_never_comes_back() {
        let nodes = Nodes::new([1; 16]);
        let (a, b) = (nodes.look_up([2; 16], None), nodes.look_up([3; 16], Some([1; 16])));
        assert_eq!((nodes.look_up([2; 16], None), nodes.count()), (a, 3));
        nodes.forget(a, 1);
        assert_eq!((nodes.gfid(a), nodes.ino([2; 16])), (Ok([2; 16]), Some(a)));
        nodes.forget(a, 9);
        assert_eq!((nodes.gfid(a), nodes.ino([2; 16])), (Err(Errno::ESTALE), None));
        let again = nodes.look_up([2; 16], None);
        assert!(again != a && again != b);
        assert_eq!(nodes.parent(b), Ok(Some([1; 16])));
    }

    #[test]
    fn lookups_of_the_root_do_not_count() {
        let nodes = Nodes::new([1; 16]);
        assert_eq!(nodes.look_up([1; 16], Some([9; 16])), Ino::ROOT);
        nodes.forget(Ino::ROOT, 5);
        assert_eq!((nodes.gfid(Ino::ROOT), nodes.parent(Ino::ROOT)), (Ok([1; 16]), Ok(None)));
    }
}
