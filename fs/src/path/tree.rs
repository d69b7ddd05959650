//! The tree of names that the frontend knows. It only does bookkeeping, and never calls a backend.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

use crate::{Errno, Fh, FileKind, Ino, Result};

/// A name in a directory.
type PathName<'a> = (Ino, &'a [u8]);

/// Nodes by number. The adapter assigns the numbers in sequence, so that clients cannot provoke
/// collisions, and a multiplication spreads them well. With the default hasher, hashing took most
/// of the time of an operation. Names use the default hasher, because any client chooses names.
type PathNodes = HashMap<Ino, PathNode, BuildHasherDefault<InoHasher>>;

#[derive(Debug, Default)]
struct InoHasher(u64);

impl Hasher for InoHasher {
    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.write_u64(u64::from(byte));
        }
    }

    fn write_u64(&mut self, number: u64) {
        // 2^64 divided by the golden ratio. Rotated, because the table uses both ends of the hash.
        self.0 = (self.0 ^ number).wrapping_mul(0x9e3779b97f4a7c15).rotate_left(32);
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

/// All nodes. Numbers are never reused, so that no generation is needed.
#[derive(Debug)]
pub(super) struct PathTree {
    nodes: PathNodes,
    by_st_ino: HashMap<u64, Ino>,
    next: u64,
}

/// An inode that the frontend knows, or an ancestor of one.
#[derive(Debug)]
pub(super) struct PathNode {
    /// Its names, each with the parent. One for a directory, any number for hard links, none after
    /// the last name was removed.
    pub names: Vec<(Ino, Box<[u8]>)>,
    /// Names in this directory that are known or in use.
    children: HashMap<Box<[u8]>, NameEdge>,
    pub kind: FileKind,
    lookups: u64,
    pub handles: Vec<PathHandle>,
    /// The backend's inode number, if it is stable.
    pub st_ino: Option<u64>,
    /// The hidden name, to be removed with the last handle.
    pub hidden: Option<(Ino, Box<[u8]>)>,
}

/// An open handle, with the number of operations that have borrowed it.
#[derive(Debug)]
pub(super) struct PathHandle {
    pub fh: Fh,
    pub writable: bool,
    pub borrowed: u32,
    /// It is being released, and must not be borrowed.
    pub closing: bool,
}

/// A name in a directory, with its present users.
#[derive(Debug, Default)]
pub(super) struct NameEdge {
    child: Option<Ino>,
    /// Operations with this name on their path.
    pub shared: u32,
    /// An operation changes this name.
    pub exclusive: bool,
    /// Operations that wait to change this name. New ones wait for them.
    pub wanted: u32,
}

impl NameEdge {
    fn is_idle(&self) -> bool {
        self.child.is_none() && self.shared == 0 && !self.exclusive && self.wanted == 0
    }
}

impl PathNode {
    fn new(kind: FileKind, st_ino: Option<u64>) -> Self {
        PathNode {
            names: Vec::new(),
            children: HashMap::new(),
            kind,
            lookups: 0,
            handles: Vec::new(),
            st_ino,
            hidden: None,
        }
    }

    fn is_unused(&self) -> bool {
        self.lookups == 0 && self.handles.is_empty() && self.children.is_empty()
    }
}

/// The properties of the file at a name, for [`PathTree::bind`].
#[derive(Clone, Copy, Debug)]
pub(super) struct NamedFile {
    pub kind: FileKind,
    /// The inode number of the backend, if its numbers are stable.
    pub st_ino: Option<u64>,
    /// The file was just created, so that the previous file of this name is gone.
    pub fresh: bool,
}

impl PathTree {
    pub fn new() -> Self {
        let root = PathNode::new(FileKind::Directory, None);
        let nodes = PathNodes::from_iter([(Ino::ROOT, root)]);
        PathTree { nodes, by_st_ino: HashMap::new(), next: 2 }
    }

    /// Returns the node `ino`. Fails with `ESTALE` if it is unknown.
    pub fn node(&self, ino: Ino) -> Result<&PathNode> {
        self.nodes.get(&ino).ok_or(Errno::ESTALE)
    }

    /// Returns the node of [`node`](PathTree::node), mutable.
    pub fn node_mut(&mut self, ino: Ino) -> Result<&mut PathNode> {
        self.nodes.get_mut(&ino).ok_or(Errno::ESTALE)
    }

    /// The number of nodes, including the root.
    #[cfg(test)]
    pub fn len(&self) -> usize {
        self.nodes.len()
    }

    /// The known inode of `name` in `parent`.
    pub fn child(&self, parent: Ino, name: &[u8]) -> Option<Ino> {
        self.edge(parent, name)?.child
    }

    pub fn edge(&self, parent: Ino, name: &[u8]) -> Option<&NameEdge> {
        self.nodes.get(&parent)?.children.get(name)
    }

    /// Changes the users of a name. Removes the name from the tree if it has none.
    pub fn with_edge(&mut self, parent: Ino, name: &[u8], change: impl FnOnce(&mut NameEdge)) {
        let Some(dir) = self.nodes.get_mut(&parent) else { return };
        if let Some(edge) = dir.children.get_mut(name) {
            change(edge);
            if edge.is_idle() {
                dir.children.remove(name);
                self.collect(parent);
            }
        } else {
            let mut edge = NameEdge::default();
            change(&mut edge);
            if !edge.is_idle() {
                dir.children.insert(name.into(), edge);
            }
        }
    }

    /// The steps from `ino` up to the root: parent and name of each. `None` if a name was removed.
    /// Fails with `ESTALE` if `ino` is unknown.
    pub fn chain(&self, ino: Ino) -> Result<Option<Vec<PathName<'_>>>> {
        let (mut at, mut steps) = (ino, Vec::new());
        while at != Ino::ROOT {
            let Some((parent, name)) = self.node(at)?.names.first() else { return Ok(None) };
            steps.push((*parent, &**name));
            at = *parent;
        }
        Ok(Some(steps))
    }

    /// Records that `name` in `parent` leads to the file `found`. Returns its node, with one lookup
    /// added. Fails with `ESTALE` if the parent is unknown.
    pub fn bind(&mut self, parent: Ino, name: &[u8], found: NamedFile) -> Result<Ino> {
        self.node(parent)?;
        let current = self.child(parent, name);
        let same = self.find_known(current, found);
        let ino = same.unwrap_or_else(|| self.add(found));
        // Added before names move, so that the node is kept meanwhile.
        self.node_mut(ino)?.lookups += 1;
        if current != Some(ino) {
            self.attach(parent, name, ino);
        }
        Ok(ino)
    }

    /// Returns the existing node of `found`, if any.
    fn find_known(&mut self, current: Option<Ino>, found: NamedFile) -> Option<Ino> {
        let candidate = match found.st_ino {
            Some(st_ino) => self.by_st_ino.get(&st_ino).copied(),
            None if found.fresh => None,
            None => current,
        }?;
        let same_kind = self.nodes.get(&candidate).is_some_and(|node| node.kind == found.kind);
        if same_kind && !found.fresh {
            return Some(candidate);
        }
        // The backend has reused the number.
        self.forget_st_ino(candidate);
        None
    }

    fn add(&mut self, found: NamedFile) -> Ino {
        let ino = Ino(self.next);
        self.next += 1;
        self.nodes.insert(ino, PathNode::new(found.kind, found.st_ino));
        if let Some(st_ino) = found.st_ino {
            self.by_st_ino.insert(st_ino, ino);
        }
        ino
    }

    /// Makes `name` in `parent` lead to `ino`, and replaces an earlier inode.
    pub fn attach(&mut self, parent: Ino, name: &[u8], ino: Ino) {
        self.detach(parent, name);
        // A directory has one name: another client has moved it to the new one.
        if let Some(node) = self.nodes.get(&ino)
            && node.kind == FileKind::Directory
        {
            for (old_parent, old_name) in node.names.clone() {
                self.detach(old_parent, &old_name);
            }
        }
        if let Some(node) = self.nodes.get_mut(&ino) {
            node.names.push((parent, name.into()));
            self.with_edge(parent, name, |edge| edge.child = Some(ino));
        }
    }

    /// Removes `name` in `parent`. Returns the inode that it led to.
    pub fn detach(&mut self, parent: Ino, name: &[u8]) -> Option<Ino> {
        let ino = self.child(parent, name)?;
        if let Some(node) = self.nodes.get_mut(&ino) {
            node.names.retain(|(at, known)| (*at, &**known) != (parent, name));
        }
        self.with_edge(parent, name, |edge| edge.child = None);
        self.collect(ino);
        Some(ino)
    }

    /// Moves the inode at `from`, with everything below it, to the name `to`.
    pub fn rename(&mut self, from: (Ino, &[u8]), to: (Ino, &[u8])) {
        let Some(ino) = self.child(from.0, from.1) else {
            self.detach(to.0, to.1);
            return;
        };
        // rename(2) of a file to another of its names changes nothing.
        if self.child(to.0, to.1) != Some(ino) {
            self.keep(ino, |tree| {
                tree.detach(from.0, from.1);
                tree.attach(to.0, to.1, ino);
            });
        }
    }

    /// Exchanges two names.
    pub fn exchange(&mut self, first: (Ino, &[u8]), second: (Ino, &[u8])) {
        let (one, other) = (self.child(first.0, first.1), self.child(second.0, second.1));
        let kept = |tree: &mut PathTree| {
            tree.detach(first.0, first.1);
            tree.detach(second.0, second.1);
            if let Some(ino) = one {
                tree.attach(second.0, second.1, ino);
            }
            if let Some(ino) = other {
                tree.attach(first.0, first.1, ino);
            }
        };
        self.keep(one.unwrap_or(Ino::ROOT), |tree| tree.keep(other.unwrap_or(Ino::ROOT), kept));
    }

    /// Runs `change` while `ino` has an additional lookup, so that losing its name does not remove
    /// it.
    fn keep(&mut self, ino: Ino, change: impl FnOnce(&mut PathTree)) {
        if let Some(node) = self.nodes.get_mut(&ino) {
            node.lookups += 1;
        }
        change(self);
        self.forget(ino, 1);
    }

    /// Adds a lookup of a known node.
    pub fn look_up_again(&mut self, ino: Ino) -> Result<()> {
        self.node_mut(ino)?.lookups += 1;
        Ok(())
    }

    /// Returns lookups.
    pub fn forget(&mut self, ino: Ino, lookups: u64) {
        if let Some(node) = self.nodes.get_mut(&ino) {
            node.lookups = node.lookups.saturating_sub(lookups);
            self.collect(ino);
        }
    }

    /// Forgets the backend's number of `ino`, which may identify another file from now on.
    pub fn forget_st_ino(&mut self, ino: Ino) {
        if let Some(st_ino) = self.nodes.get_mut(&ino).and_then(|node| node.st_ino.take())
            && self.by_st_ino.get(&st_ino) == Some(&ino)
        {
            self.by_st_ino.remove(&st_ino);
        }
    }

    /// Removes `ino` if it is unused, and then its ancestors that were kept only for it.
    pub fn collect(&mut self, ino: Ino) {
        let mut candidates = vec![ino];
        while let Some(ino) = candidates.pop() {
            let unused = self.nodes.get(&ino).is_some_and(PathNode::is_unused);
            if ino == Ino::ROOT || !unused {
                continue;
            }
            self.forget_st_ino(ino);
            let Some(node) = self.nodes.remove(&ino) else { continue };
            for (parent, name) in node.names {
                let Some(dir) = self.nodes.get_mut(&parent) else { continue };
                if let Some(edge) = dir.children.get_mut(&name) {
                    edge.child = None;
                    if edge.is_idle() {
                        dir.children.remove(&name);
                        candidates.push(parent);
                    }
                }
            }
        }
    }
}
