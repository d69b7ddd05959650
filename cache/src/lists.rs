//! Extents in linked lists, found by their key. Links are numbers in one table, so that each step
//! is O(1).

use std::collections::HashMap;

use crate::ExtentKey;

const NONE: u32 = u32::MAX;

/// Extents in `N` lists, each with a value of type `V`.
#[derive(Debug)]
pub struct ExtentLists<V, const N: usize> {
    places: HashMap<ExtentKey, u32>,
    nodes: Vec<ExtentNode<V>>,
    free: Vec<u32>,
    ends: [ListEnds; N],
}

#[derive(Debug)]
struct ExtentNode<V> {
    key: ExtentKey,
    size: u64,
    list: usize,
    /// Towards the front.
    newer: u32,
    older: u32,
    value: V,
}

#[derive(Clone, Copy, Debug)]
struct ListEnds {
    front: u32,
    back: u32,
    len: usize,
    bytes: u64,
}

/// The place of an extent, until it is removed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ListPosition(u32);

impl<V, const N: usize> ExtentLists<V, N> {
    pub fn new() -> ExtentLists<V, N> {
        let none = ListEnds { front: NONE, back: NONE, len: 0, bytes: 0 };
        ExtentLists { places: HashMap::new(), nodes: Vec::new(), free: Vec::new(), ends: [none; N] }
    }

    pub fn find(&self, key: ExtentKey) -> Option<ListPosition> {
        self.places.get(&key).map(|&at| ListPosition(at))
    }

    pub fn list(&self, at: ListPosition) -> usize {
        self.node(at).list
    }

    pub fn key(&self, at: ListPosition) -> ExtentKey {
        self.node(at).key
    }

    pub fn size(&self, at: ListPosition) -> u64 {
        self.node(at).size
    }

    pub fn value(&mut self, at: ListPosition) -> &mut V {
        &mut self.nodes[at.0 as usize].value
    }

    pub fn peek(&self, at: ListPosition) -> &V {
        &self.node(at).value
    }

    pub fn len(&self, list: usize) -> usize {
        self.ends[list].len
    }

    pub fn bytes(&self, list: usize) -> u64 {
        self.ends[list].bytes
    }

    /// Extents in all lists.
    pub fn total(&self) -> usize {
        self.places.len()
    }

    /// The oldest extent of a list.
    pub fn back(&self, list: usize) -> Option<ListPosition> {
        Some(ListPosition(self.ends[list].back)).filter(|at| at.0 != NONE)
    }

    /// The extents of a list, the oldest first.
    pub fn oldest(&self, list: usize) -> impl Iterator<Item = ListPosition> {
        let newer =
            |at: &ListPosition| Some(ListPosition(self.node(*at).newer)).filter(|at| at.0 != NONE);
        std::iter::successors(self.back(list), newer)
    }

    /// Adds an extent that is in no list, in front.
    pub fn push(&mut self, list: usize, key: ExtentKey, size: u64, value: V) -> ListPosition {
        let node = ExtentNode { key, size, list, newer: NONE, older: NONE, value };
        let at = match self.free.pop() {
            Some(at) => {
                self.nodes[at as usize] = node;
                at
            }
            None => {
                self.nodes.push(node);
                u32::try_from(self.nodes.len() - 1).expect("fewer than 2^32 extents")
            }
        };
        let before = self.places.insert(key, at);
        assert!(before.is_none(), "an extent is in one list");
        self.link(at, list);
        ListPosition(at)
    }

    /// Moves an extent to the front of a list.
    pub fn move_to(&mut self, at: ListPosition, list: usize) {
        self.unlink(at.0);
        self.link(at.0, list);
    }

    /// Removes an extent.
    pub fn remove(&mut self, at: ListPosition) {
        self.unlink(at.0);
        self.places.remove(&self.nodes[at.0 as usize].key);
        self.free.push(at.0);
        if self.places.is_empty() {
            self.nodes = Vec::new();
            self.free = Vec::new();
        }
    }

    fn node(&self, at: ListPosition) -> &ExtentNode<V> {
        &self.nodes[at.0 as usize]
    }

    fn link(&mut self, at: u32, list: usize) {
        let ends = &mut self.ends[list];
        let old = ends.front;
        ends.front = at;
        ends.len += 1;
        ends.bytes += self.nodes[at as usize].size;
        match old {
            NONE => ends.back = at,
            old => self.nodes[old as usize].newer = at,
        }
        let node = &mut self.nodes[at as usize];
        (node.list, node.newer, node.older) = (list, NONE, old);
    }

    fn unlink(&mut self, at: u32) {
        let node = &self.nodes[at as usize];
        let (list, newer, older, size) = (node.list, node.newer, node.older, node.size);
        let ends = &mut self.ends[list];
        ends.len -= 1;
        ends.bytes -= size;
        match newer {
            NONE => ends.front = older,
            newer => self.nodes[newer as usize].older = older,
        }
        match older {
            NONE => self.ends[list].back = newer,
            older => self.nodes[older as usize].newer = newer,
        }
    }
}
