//! The model of a directory that several clients change: two directories in it with a few names
//! each.

use std::time::Instant;

use defuse_testkit::agent::{content, sum};

use super::history::FactHistory;

pub const DIRS: [&str; 2] = ["a", "b"];
pub const NAMES: usize = 5;

const PAGE: u64 = 4096;

/// A name, by its number.
pub type NameNumber = usize;

/// All names.
pub fn names() -> std::ops::Range<NameNumber> {
    0..DIRS.len() * NAMES
}

/// A file, directory or symbolic link.
#[derive(Debug)]
pub struct WorldNode {
    /// Its number, on all clients; 0 until it is known.
    pub ino: u64,
    /// `f`, `d` or `l`.
    pub kind: char,
    /// The target of a symbolic link.
    text: String,
    pub mode: FactHistory<u32>,
    pub size: FactHistory<u64>,
    pub links: FactHistory<u64>,
    /// The sums of the contents.
    pub data: FactHistory<u64>,
    bytes: Vec<u8>,
    /// Number of open files.
    held: usize,
    /// Names of the file that a renaming has replaced. The servers refuse to link the file there
    /// again.
    replaced: Vec<NameNumber>,
}

/// A change.
#[derive(Clone, Debug)]
pub enum WorldChange {
    Create { at: NameNumber, len: usize, seed: u64 },
    Symlink { at: NameNumber, text: String },
    Mkdir { at: NameNumber },
    Overwrite { at: NameNumber, len: usize, seed: u64 },
    Write { at: NameNumber, offset: usize, len: usize, seed: u64 },
    Append { at: NameNumber, len: usize, seed: u64 },
    Truncate { at: NameNumber, size: usize },
    Chmod { at: NameNumber, mode: u32 },
    Remove { at: NameNumber },
    Rename { from: NameNumber, to: NameNumber },
    Link { from: NameNumber, to: NameNumber },
}

/// The model.
#[derive(Debug)]
pub struct ClientWorld {
    /// The directory, for [`Client::call`](super::client::Client::call).
    pub place: String,
    pub names: Vec<FactHistory<Option<usize>>>,
    pub nodes: Vec<WorldNode>,
    /// Names that were replaced without a message of the servers: the former file is open.
    silent: Vec<bool>,
    /// A change that runs.
    pub running: bool,
    pub last_change: Instant,
}

impl ClientWorld {
    pub fn new(place: String) -> ClientWorld {
        let now = Instant::now();
        let names: Vec<_> = names().map(|_| FactHistory::new(None, now)).collect();
        let silent = vec![false; names.len()];
        ClientWorld { place, silent, names, nodes: Vec::new(), running: false, last_change: now }
    }

    pub fn path(&self, at: NameNumber) -> String {
        format!("{}/{}/n{}", self.place, DIRS[at / NAMES], at % NAMES)
    }

    /// The kind of what has a name.
    pub fn kind(&self, at: NameNumber) -> Option<char> {
        self.names[at].latest_value().map(|node| self.nodes[node].kind)
    }

    pub fn node(&self, at: NameNumber) -> Option<usize> {
        *self.names[at].latest_value()
    }

    pub fn text(&self, at: NameNumber) -> Option<&str> {
        self.node(at).map(|node| &*self.nodes[node].text)
    }

    /// A change that is possible now.
    pub fn choose(&self, random: &mut fastrand::Rng) -> WorldChange {
        let len = |random: &mut fastrand::Rng| match random.u32(..10) {
            0 => 0,
            1 => random.usize(..200_000),
            _ => random.usize(..5000),
        };
        loop {
            let (at, to, seed) =
                (random.usize(names()), random.usize(names()), u64::from(random.u32(..)));
            let node = self.node(at).map(|node| &self.nodes[node]);
            let other = self.node(to).map(|node| &self.nodes[node]);
            let size = node.map_or(0, |node| node.bytes.len());
            let was_replaced = node.is_some_and(|node| node.replaced.contains(&to));
            return match (random.u32(..12), node.map(|node| node.kind)) {
                (0..6, None) => WorldChange::Create { at, len: len(random), seed },
                (6, None) => WorldChange::Symlink { at, text: format!("text-{seed}") },
                (7, None) => WorldChange::Mkdir { at },
                (0, Some('f')) => WorldChange::Overwrite { at, len: len(random), seed },
                (1, Some('f')) => {
                    let offset = random.usize(..size + 3000);
                    WorldChange::Write { at, offset, len: 1 + random.usize(..3000), seed }
                }
                (2, Some('f')) => WorldChange::Append { at, len: 1 + random.usize(..3000), seed },
                (3, Some('f')) => WorldChange::Truncate { at, size: random.usize(..size + 3000) },
                (4, Some('f' | 'd')) => {
                    WorldChange::Chmod { at, mode: random.choice([0o600, 0o640, 0o755]).unwrap() }
                }
                (5 | 6, Some(_)) => WorldChange::Remove { at },
                (7..10, Some(kind)) if at != to => match other {
                    // Two names of one file stay.
                    Some(_) if self.node(at) == self.node(to) => continue,
                    Some(other) if (kind == 'd') != (other.kind == 'd') => continue,
                    _ => WorldChange::Rename { from: at, to },
                },
                (10 | 11, Some('f')) if other.is_none() && !was_replaced => {
                    WorldChange::Link { from: at, to }
                }
                _ => continue,
            };
        }
    }

    /// The names that a change concerns.
    pub fn concerned_names(change: &WorldChange) -> Vec<NameNumber> {
        match *change {
            WorldChange::Rename { from, to } | WorldChange::Link { from, to } => vec![from, to],
            WorldChange::Create { at, .. }
            | WorldChange::Symlink { at, .. }
            | WorldChange::Mkdir { at }
            | WorldChange::Overwrite { at, .. }
            | WorldChange::Write { at, .. }
            | WorldChange::Append { at, .. }
            | WorldChange::Truncate { at, .. }
            | WorldChange::Chmod { at, .. }
            | WorldChange::Remove { at } => vec![at],
        }
    }

    /// The words for the change.
    pub fn words(&self, change: &WorldChange) -> String {
        let path = |at: &NameNumber| self.path(*at);
        match change {
            WorldChange::Create { at, len, seed } => format!("create {} {len} {seed}", path(at)),
            WorldChange::Symlink { at, text } => format!("symlink {text} {}", path(at)),
            WorldChange::Mkdir { at } => format!("mkdir {}", path(at)),
            WorldChange::Overwrite { at, len, seed } => {
                format!("overwrite {} {len} {seed}", path(at))
            }
            WorldChange::Write { at, offset, len, seed } => {
                format!("write {} {offset} {len} {seed}", path(at))
            }
            WorldChange::Append { at, len, seed } => format!("append {} {len} {seed}", path(at)),
            WorldChange::Truncate { at, size } => format!("truncate {} {size}", path(at)),
            WorldChange::Chmod { at, mode } => format!("chmod {} {mode:o}", path(at)),
            WorldChange::Remove { at } if self.kind(*at) == Some('d') => {
                format!("rmdir {}", path(at))
            }
            WorldChange::Remove { at } => format!("unlink {}", path(at)),
            WorldChange::Rename { from, to } => format!("rename {} {}", path(from), path(to)),
            WorldChange::Link { from, to } => format!("link {} {}", path(from), path(to)),
        }
    }

    /// A change begins: both states are true until its end.
    pub fn begin(&mut self, change: &WorldChange) {
        let now = Instant::now();
        self.running = true;
        match change {
            WorldChange::Create { at, len, seed } => {
                self.make(*at, 'f', String::new(), now);
                self.fill(*at, content(*seed, *len), now);
            }
            WorldChange::Symlink { at, text } => self.make(*at, 'l', text.clone(), now),
            WorldChange::Mkdir { at } => self.make(*at, 'd', String::new(), now),
            WorldChange::Overwrite { at, len, seed } => {
                // In two steps.
                self.fill(*at, Vec::new(), now);
                self.fill(*at, content(*seed, *len), now);
            }
            WorldChange::Write { at, offset, len, seed } => {
                let mut bytes = self.bytes(*at);
                bytes.resize(bytes.len().max(offset + len), 0);
                bytes[*offset..offset + len].copy_from_slice(&content(*seed, *len));
                self.fill(*at, bytes, now);
            }
            WorldChange::Append { at, len, seed } => {
                self.fill(*at, [self.bytes(*at), content(*seed, *len)].concat(), now);
            }
            WorldChange::Truncate { at, size } => {
                let mut bytes = self.bytes(*at);
                bytes.resize(*size, 0);
                self.fill(*at, bytes, now);
            }
            WorldChange::Chmod { at, mode } => {
                let node = self.node(*at).unwrap();
                self.nodes[node].mode.begin(*mode, now);
            }
            WorldChange::Remove { at } => {
                self.leave(*at, now);
                self.names[*at].begin(None, now);
            }
            WorldChange::Rename { from, to } => {
                if let Some(replaced) = self.node(*to) {
                    self.silent[*to] = self.nodes[replaced].held > 0;
                    self.nodes[replaced].replaced.push(*to);
                    self.leave(*to, now);
                }
                let node = self.node(*from).unwrap();
                // GlusterFS makes another link for a moment if another brick has to find the file
                // by the new name.
                let links = *self.nodes[node].links.latest_value();
                self.nodes[node].links.begin(links + 1, now);
                self.nodes[node].links.begin(links, now);
                self.names[*from].begin(None, now);
                self.names[*to].begin(Some(node), now);
            }
            WorldChange::Link { from, to } => {
                let node = self.node(*from).unwrap();
                let links = self.nodes[node].links.latest_value() + 1;
                self.nodes[node].links.begin(links, now);
                self.names[*to].begin(Some(node), now);
            }
        }
    }

    /// The change by a client has ended. `ino` is the number of a new inode.
    pub fn end(&mut self, by: usize, ino: Option<u64>) {
        let now = Instant::now();
        self.running = false;
        self.last_change = now;
        self.names.iter_mut().for_each(|name| name.end(by, now));
        for node in &mut self.nodes {
            node.mode.end(by, now);
            node.size.end(by, now);
            node.links.end(by, now);
            node.data.end(by, now);
        }
        if let Some(ino) = ino {
            self.nodes.last_mut().unwrap().ino = ino;
        }
    }

    /// A client opens a file, or has closed one.
    pub fn hold(&mut self, node: usize, is_open: bool) {
        let held = &mut self.nodes[node].held;
        *held = if is_open { *held + 1 } else { *held - 1 };
    }

    pub fn is_silent(&self, at: NameNumber) -> bool {
        self.silent[at]
    }

    fn make(&mut self, at: NameNumber, kind: char, text: String, now: Instant) {
        let mode = if kind == 'd' { 0o700 } else { 0o600 };
        let node = WorldNode {
            ino: 0,
            kind,
            text,
            mode: FactHistory::new(mode, now),
            size: FactHistory::new(0, now),
            links: FactHistory::new(1, now),
            data: FactHistory::new(sum(&[]), now),
            bytes: Vec::new(),
            held: 0,
            replaced: Vec::new(),
        };
        self.names[at].begin(Some(self.nodes.len()), now);
        self.nodes.push(node);
    }

    fn fill(&mut self, at: NameNumber, bytes: Vec<u8>, now: Instant) {
        let node = self.node(at).unwrap();
        let node = &mut self.nodes[node];
        // The kernel may send a write page by page.
        let (old, new) = (node.bytes.len() as u64, bytes.len() as u64);
        let pages = (old / PAGE + 1..).map(|page| page * PAGE).take_while(|&size| size < new);
        pages.for_each(|size| node.size.begin(size, now));
        node.size.begin(new, now);
        node.data.begin(sum(&bytes), now);
        node.bytes = bytes;
    }

    fn bytes(&self, at: NameNumber) -> Vec<u8> {
        self.nodes[self.node(at).unwrap()].bytes.clone()
    }

    fn leave(&mut self, at: NameNumber, now: Instant) {
        let node = self.node(at).unwrap();
        let links = self.nodes[node].links.latest_value() - 1;
        self.nodes[node].links.begin(links, now);
    }
}
