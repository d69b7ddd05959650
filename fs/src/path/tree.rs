//! The tree of names that the frontend knows. Pure bookkeeping: no backend is called from here.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

use crate::{Errno, Fh, FileKind, Ino, Result};

/// A name in a directory.
type Name<'a> = (Ino, &'a [u8]);

/// Nodes by number. The adapter hands the numbers out itself, one after the other, so nobody can
/// choose them to collide and a multiplication spreads them well enough; with the default hasher
/// most of the time of an operation went into hashing. Names keep that one: anybody chooses names.
type Nodes = HashMap<Ino, Node, BuildHasherDefault<InoHasher>>;

#[derive(Debug, Default)]
struct InoHasher(u64);

impl Hasher for InoHasher {
    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.write_u64(u64::from(byte));
        }
    }

    fn write_u64(&mut self, number: u64) {
        // 2^64 by the golden ratio; turned, because the table looks at both ends of the hash.
        self.0 = (self.0 ^ number).wrapping_mul(0x9e3779b97f4a7c15).rotate_left(32);
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

/// All nodes. Numbers are never used twice, so a generation is not needed to tell them apart.
#[derive(Debug)]
pub(super) struct Tree {
    nodes: Nodes,
    by_st_ino: HashMap<u64, Ino>,
    next: u64,
}

/// An inode that the frontend knows, or a directory on the way to one.
#[derive(Debug)]
pub(super) struct Node {
    /// Its places: parent and name. One for a directory, any number for hard links, none once
    /// the last name is gone.
    pub names: Vec<(Ino, Box<[u8]>)>,
    /// Names in this directory that are known or in use.
    children: HashMap<Box<[u8]>, Edge>,
    pub kind: FileKind,
    lookups: u64,
    pub handles: Vec<Handle>,
    /// The number by which the backend knows it, where that is stable.
    pub st_ino: Option<u64>,
    /// The name that the adapter gave it, to be removed with the last handle.
    pub hidden: Option<(Ino, Box<[u8]>)>,
}

/// An open handle, and how many operations have borrowed it that were not given it by the
/// frontend.
#[derive(Debug)]
pub(super) struct Handle {
    pub fh: Fh,
    pub writable: bool,
    pub borrowed: u32,
    /// It is being released: nobody may borrow it any more.
    pub closing: bool,
}

/// A name in a directory, with those who use it now.
#[derive(Debug, Default)]
pub(super) struct Edge {
    child: Option<Ino>,
    /// Operations with this name on their path.
    pub shared: u32,
    /// An operation changes this name.
    pub exclusive: bool,
    /// Operations that wait to change this name; new ones let them pass.
    pub wanted: u32,
}

impl Edge {
    fn idle(&self) -> bool {
        self.child.is_none() && self.shared == 0 && !self.exclusive && self.wanted == 0
    }
}

impl Node {
    fn new(kind: FileKind, st_ino: Option<u64>) -> Self {
        Node {
            names: Vec::new(),
            children: HashMap::new(),
            kind,
            lookups: 0,
            handles: Vec::new(),
            st_ino,
            hidden: None,
        }
    }

    fn unused(&self) -> bool {
        self.lookups == 0 && self.handles.is_empty() && self.children.is_empty()
    }
}

/// The facts about the file at a name, for [`Tree::bind`].
#[derive(Clone, Copy, Debug)]
pub(super) struct Found {
    pub kind: FileKind,
    /// The inode number of the backend, if its numbers are stable.
    pub st_ino: Option<u64>,
    /// It was made just now, so whatever had the name before is gone.
    pub fresh: bool,
}

impl Tree {
    pub fn new() -> Self {
        let root = Node::new(FileKind::Directory, None);
        let nodes = Nodes::from_iter([(Ino::ROOT, root)]);
        Tree { nodes, by_st_ino: HashMap::new(), next: 2 }
    }

    /// The node `ino`; `ESTALE` where it is not known.
    pub fn node(&self, ino: Ino) -> Result<&Node> {
        self.nodes.get(&ino).ok_or(Errno::ESTALE)
    }

    /// As [`node`](Tree::node), to be changed.
    pub fn node_mut(&mut self, ino: Ino) -> Result<&mut Node> {
        self.nodes.get_mut(&ino).ok_or(Errno::ESTALE)
    }

    /// The number of nodes, with the root.
    #[cfg(test)]
    pub fn len(&self) -> usize {
        self.nodes.len()
    }

    /// The known inode of `name` in `parent`.
    pub fn child(&self, parent: Ino, name: &[u8]) -> Option<Ino> {
        self.edge(parent, name)?.child
    }

    pub fn edge(&self, parent: Ino, name: &[u8]) -> Option<&Edge> {
        self.nodes.get(&parent)?.children.get(name)
    }

    /// Changes who uses a name, and drops it from the tree where nobody does.
    pub fn with_edge(&mut self, parent: Ino, name: &[u8], change: impl FnOnce(&mut Edge)) {
        let Some(dir) = self.nodes.get_mut(&parent) else { return };
        if let Some(edge) = dir.children.get_mut(name) {
            change(edge);
            if edge.idle() {
                dir.children.remove(name);
                self.collect(parent);
            }
        } else {
            let mut edge = Edge::default();
            change(&mut edge);
            if !edge.idle() {
                dir.children.insert(name.into(), edge);
            }
        }
    }

    /// The steps from `ino` up to the root: parent and name of each. `None` where a name is gone.
    /// Errors: `ESTALE` where `ino` is not known.
    pub fn chain(&self, ino: Ino) -> Result<Option<Vec<Name<'_>>>> {
        let (mut at, mut steps) = (ino, Vec::new());
        while at != Ino::ROOT {
            let Some((parent, name)) = self.node(at)?.names.first() else { return Ok(None) };
            steps.push((*parent, &**name));
            at = *parent;
        }
        Ok(Some(steps))
    }

    /// Says that `name` in `parent` leads to what `found` tells; returns its node, with one lookup
    /// more. `ESTALE` where the parent is not known.
    pub fn bind(&mut self, parent: Ino, name: &[u8], found: Found) -> Result<Ino> {
        self.node(parent)?;
        let current = self.child(parent, name);
        let same = self.known(current, found);
        let ino = same.unwrap_or_else(|| self.add(found));
        // Counted before names move, so that the node is in use while they do.
        self.node_mut(ino)?.lookups += 1;
        if current != Some(ino) {
            self.attach(parent, name, ino);
        }
        Ok(ino)
    }

    /// The node that `found` is, where there is one already.
    fn known(&mut self, current: Option<Ino>, found: Found) -> Option<Ino> {
        let candidate = match found.st_ino {
            Some(st_ino) => self.by_st_ino.get(&st_ino).copied(),
            None if found.fresh => None,
            None => current,
        }?;
        let same_kind = self.nodes.get(&candidate).is_some_and(|node| node.kind == found.kind);
        if same_kind && !found.fresh {
            return Some(candidate);
        }
        // The backend has used the number again for something else.
        self.forget_st_ino(candidate);
        None
    }

    fn add(&mut self, found: Found) -> Ino {
        let ino = Ino(self.next);
        self.next += 1;
        self.nodes.insert(ino, Node::new(found.kind, found.st_ino));
        if let Some(st_ino) = found.st_ino {
            self.by_st_ino.insert(st_ino, ino);
        }
        ino
    }

    /// Makes `name` in `parent` lead to `ino`, whatever it led to before.
    pub fn attach(&mut self, parent: Ino, name: &[u8], ino: Ino) {
        self.detach(parent, name);
        // A directory has one name: under a new one, it was moved behind our back.
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

    /// Makes `name` in `parent` lead nowhere; returns where it led.
    pub fn detach(&mut self, parent: Ino, name: &[u8]) -> Option<Ino> {
        let ino = self.child(parent, name)?;
        if let Some(node) = self.nodes.get_mut(&ino) {
            node.names.retain(|(at, known)| (*at, &**known) != (parent, name));
        }
        self.with_edge(parent, name, |edge| edge.child = None);
        self.collect(ino);
        Some(ino)
    }

    /// Moves what `from` leads to, with everything below it, to the name `to`.
    pub fn rename(&mut self, from: (Ino, &[u8]), to: (Ino, &[u8])) {
        let Some(ino) = self.child(from.0, from.1) else {
            self.detach(to.0, to.1);
            return;
        };
        // rename(2) of one name of a file to another of the same file changes nothing.
        if self.child(to.0, to.1) != Some(ino) {
            self.keep(ino, |tree| {
                tree.detach(from.0, from.1);
                tree.attach(to.0, to.1, ino);
            });
        }
    }

    /// Lets two names change places.
    pub fn exchange(&mut self, first: (Ino, &[u8]), second: (Ino, &[u8])) {
        let (one, other) = (self.child(first.0, first.1), self.child(second.0, second.1));
        let kept = |tree: &mut Tree| {
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

    /// Runs `change` while `ino` counts as looked up, so that losing its name does not end it.
    fn keep(&mut self, ino: Ino, change: impl FnOnce(&mut Tree)) {
        if let Some(node) = self.nodes.get_mut(&ino) {
            node.lookups += 1;
        }
        change(self);
        self.forget(ino, 1);
    }

    /// One lookup more of a node that is known.
    pub fn look_up_again(&mut self, ino: Ino) -> Result<()> {
        self.node_mut(ino)?.lookups += 1;
        Ok(())
    }

    /// Gives back lookups.
    pub fn forget(&mut self, ino: Ino, lookups: u64) {
        if let Some(node) = self.nodes.get_mut(&ino) {
            node.lookups = node.lookups.saturating_sub(lookups);
            self.collect(ino);
        }
    }

    /// Says that the backend's number of `ino` may name another file from now on.
    pub fn forget_st_ino(&mut self, ino: Ino) {
        if let Some(st_ino) = self.nodes.get_mut(&ino).and_then(|node| node.st_ino.take())
            && self.by_st_ino.get(&st_ino) == Some(&ino)
        {
            self.by_st_ino.remove(&st_ino);
        }
    }

    /// Drops `ino` where nobody needs it, and then directories that were only on the way to it.
    pub fn collect(&mut self, ino: Ino) {
        let mut candidates = vec![ino];
        while let Some(ino) = candidates.pop() {
            let unused = self.nodes.get(&ino).is_some_and(Node::unused);
            if ino == Ino::ROOT || !unused {
                continue;
            }
            self.forget_st_ino(ino);
            let Some(node) = self.nodes.remove(&ino) else { continue };
            for (parent, name) in node.names {
                let Some(dir) = self.nodes.get_mut(&parent) else { continue };
                if let Some(edge) = dir.children.get_mut(&name) {
                    edge.child = None;
                    if edge.idle() {
                        dir.children.remove(&name);
                        candidates.push(parent);
                    }
                }
            }
        }
    }
}
