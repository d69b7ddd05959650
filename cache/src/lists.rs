//! Extents in linked lists, found by their key. Links are numbers in one table, so that each step is O(1).

use std::collections::HashMap;

use crate::Key;

const NONE: u32 = u32::MAX;

/// Extents in `N` lists, each with a value of type `V`.
#[derive(Debug)]
pub struct Lists<V, const N: usize> {
    places: HashMap<Key, u32>,
    nodes: Vec<Node<V>>,
    free: Vec<u32>,
    ends: [Ends; N],
}

#[derive(Debug)]
struct Node<V> {
    key: Key,
    size: u64,
    list: usize,
    /// Towards the front.
    newer: u32,
    older: u32,
    value: V,
}

#[derive(Clone, Copy, Debug)]
struct Ends {
    front: u32,
    back: u32,
    len: usize,
    bytes: u64,
}

/// The place of an extent, until it is removed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct At(u32);

impl<V, const N: usize> Lists<V, N> {
    pub fn new() -> Lists<V, N> {
        let none = Ends { front: NONE, back: NONE, len: 0, bytes: 0 };
        Lists { places: HashMap::new(), nodes: Vec::new(), free: Vec::new(), ends: [none; N] }
    }

    pub fn find(&self, key: Key) -> Option<At> {
        self.places.get(&key).map(|&at| At(at))
    }

    pub fn list(&self, at: At) -> usize {
        self.node(at).list
    }

    pub fn key(&self, at: At) -> Key {
        self.node(at).key
    }

    pub fn size(&self, at: At) -> u64 {
        self.node(at).size
    }

    pub fn value(&mut self, at: At) -> &mut V {
        &mut self.nodes[at.0 as usize].value
    }

    pub fn peek(&self, at: At) -> &V {
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
    pub fn back(&self, list: usize) -> Option<At> {
        Some(At(self.ends[list].back)).filter(|at| at.0 != NONE)
    }

    /// The extents of a list, the oldest first.
    pub fn oldest(&self, list: usize) -> impl Iterator<Item = At> {
        let newer = |at: &At| Some(At(self.node(*at).newer)).filter(|at| at.0 != NONE);
        std::iter::successors(self.back(list), newer)
    }

    /// Adds an extent that is in no list, in front.
    pub fn push(&mut self, list: usize, key: Key, size: u64, value: V) -> At {
        let node = Node { key, size, list, newer: NONE, older: NONE, value };
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
        At(at)
    }

    /// Moves an extent to the front of a list.
    pub fn move_to(&mut self, at: At, list: usize) {
        self.unlink(at.0);
        self.link(at.0, list);
    }

    /// Removes an extent.
    pub fn remove(&mut self, at: At) {
        self.unlink(at.0);
        self.places.remove(&self.nodes[at.0 as usize].key);
        self.free.push(at.0);
        if self.places.is_empty() {
            self.nodes = Vec::new();
            self.free = Vec::new();
        }
    }

    fn node(&self, at: At) -> &Node<V> {
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
