//! Inodes, names and pages in memory. Pure: nothing here does I/O.

mod attributes;
mod group;
mod names;
mod pages;
mod rename;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::time::Duration;

use defuse_fs::posix::without_set_id;
use defuse_fs::{Attr, Entry, Errno, FileKind, Ino, Result, Timestamp};

use crate::format::BLOCK;
use crate::format::inode::{Data, Inode, Link, Moment};
use crate::space::{Run, Space};

pub(crate) use group::Loaded;
pub use group::Problem;
use pages::Page;

/// The root directory.
pub(crate) const ROOT: u64 = 1;

/// Names of an inode at most.
pub(crate) const LINK_MAX: usize = 65_000;

/// Units that data leaves to inodes.
pub(crate) const KEEP_UNITS: u32 = 2;

/// Only this process changes the file system, so answers hold until it says otherwise.
const VALID_FOR: Duration = Duration::from_secs(24 * 60 * 60);

/// Everything that is known of the file system.
pub(crate) struct Tree {
    nodes: HashMap<u64, Node>,
    pub(crate) space: Space,
    /// Slots of all chunks.
    pub(crate) slots: u64,
    next_ino: u64,
    next_stamp: u64,
    /// Inodes that the next group writes.
    changed: BTreeSet<u64>,
    /// Inodes that the next group removes.
    gone: BTreeSet<u64>,
    /// Inodes with pages that are not on the device.
    written: BTreeSet<u64>,
    /// Blocks that nothing uses once the next group is durable.
    freed: Vec<Run>,
    /// Blocks that pages without one will take.
    promised: u64,
    /// See [`Rules`](crate::commit::Rules).
    pub(crate) tails_move: bool,
    /// How often blocks were given back.
    releases: u64,
    /// Pages in memory.
    cached: usize,
    /// Pages that differ from the device.
    dirty: usize,
    /// Frontends; from the second on nothing that is told stays valid.
    pub(crate) frontends: usize,
}

/// An inode in memory.
#[derive(Default)]
struct Node {
    inode: Inode,
    dir: Option<Dir>,
    pages: BTreeMap<u64, Page>,
    /// Blocks with records of the inode.
    records: Vec<Run>,
    lookups: u64,
    opens: u64,
    /// A file of O_TMPFILE without O_EXCL: its first name may come.
    linkable: bool,
}

/// The entries of a directory.
#[derive(Default)]
struct Dir {
    by_name: HashMap<Vec<u8>, (u64, u64)>,
    /// By stamp, which is the position in listings.
    by_stamp: BTreeMap<u64, (Vec<u8>, u64)>,
    subdirs: u32,
    /// It was removed, and takes no names any more.
    dead: bool,
}

impl Dir {
    fn put(&mut self, name: &[u8], stamp: u64, ino: u64) {
        self.by_name.insert(name.to_vec(), (stamp, ino));
        self.by_stamp.insert(stamp, (name.to_vec(), ino));
    }

    fn remove(&mut self, name: &[u8]) -> Option<(u64, u64)> {
        let (stamp, ino) = self.by_name.remove(name)?;
        self.by_stamp.remove(&stamp);
        Some((stamp, ino))
    }
}

impl Node {
    fn kind(&self) -> FileKind {
        FileKind::from_mode(self.inode.mode).unwrap_or(FileKind::Regular)
    }

    fn perm(&self) -> u32 {
        self.inode.mode & 0o7777
    }

    fn set_perm(&mut self, perm: u32) {
        self.inode.mode = self.inode.mode & !0o7777 | perm & 0o7777;
    }

    /// Clears set-user-id and its kin, as a write without privilege and a change of owner do.
    fn kill_suidgid(&mut self) {
        self.set_perm(without_set_id(self.perm(), true));
    }

    fn nlink(&self, ino: u64) -> u32 {
        match &self.dir {
            Some(dir) if dir.dead => 0,
            Some(dir) => 2 + dir.subdirs,
            None if ino == ROOT => 1,
            None => self.inode.links.len() as u32,
        }
    }

    fn modified(&mut self, now: Timestamp) {
        self.inode.mtime = now.into();
        self.inode.ctime = now.into();
    }
}

impl From<Timestamp> for Moment {
    fn from(time: Timestamp) -> Self {
        Moment { sec: time.secs, nsec: time.nanos }
    }
}

impl From<Moment> for Timestamp {
    fn from(moment: Moment) -> Self {
        Timestamp { secs: moment.sec, nanos: moment.nsec }
    }
}

impl Tree {
    /// The file system with nothing but a root directory.
    pub(crate) fn empty(space: Space, (perm, uid, gid): (u32, u32, u32)) -> Self {
        let now = Timestamp::now().into();
        let inode = Inode {
            mode: FileKind::Directory.mode_bits() | perm & 0o7777,
            uid,
            gid,
            atime: now,
            mtime: now,
            ctime: now,
            btime: now,
            ..Inode::default()
        };
        let mut tree = Tree::new(space);
        let root = Node { inode, dir: Some(Dir::default()), lookups: 1, ..Node::default() };
        tree.nodes.insert(ROOT, root);
        tree.changed.insert(ROOT);
        tree
    }

    fn new(space: Space) -> Self {
        Tree {
            nodes: HashMap::new(),
            space,
            slots: 0,
            next_ino: ROOT + 1,
            // 1 and 2 are the positions of `.` and `..`.
            next_stamp: 3,
            changed: BTreeSet::new(),
            gone: BTreeSet::new(),
            written: BTreeSet::new(),
            freed: Vec::new(),
            promised: 0,
            tails_move: true,
            releases: 0,
            cached: 0,
            dirty: 0,
            frontends: 0,
        }
    }

    fn node(&self, ino: u64) -> Result<&Node> {
        self.nodes.get(&ino).ok_or(Errno::ESTALE)
    }

    fn node_mut(&mut self, ino: u64) -> Result<&mut Node> {
        self.nodes.get_mut(&ino).ok_or(Errno::ESTALE)
    }

    fn dir(&self, ino: u64) -> Result<&Dir> {
        self.node(ino)?.dir.as_ref().ok_or(Errno::ENOTDIR)
    }

    /// A directory that takes names.
    fn living_dir(&self, ino: u64) -> Result<&Dir> {
        let dir = self.dir(ino)?;
        if dir.dead { Err(Errno::ENOENT) } else { Ok(dir) }
    }

    fn dir_mut(&mut self, ino: u64) -> Result<&mut Dir> {
        self.node_mut(ino)?.dir.as_mut().ok_or(Errno::ENOTDIR)
    }

    /// The next group writes the inode. One without a name owns no slot.
    fn touch(&mut self, ino: u64) {
        let named = self.nodes.get(&ino).is_some_and(|node| !node.inode.links.is_empty());
        if named || ino == ROOT {
            self.changed.insert(ino);
        }
    }

    pub(crate) fn attr(&self, ino: u64) -> Result<Attr> {
        let node = self.node(ino)?;
        let inode = &node.inode;
        let kept = match &inode.data {
            Data::Extents(extents) => extents.iter().map(|extent| u64::from(extent.count)).sum(),
            _ => 0,
        };
        let promised = node.pages.values().filter(|page| page.promised).count() as u64;
        Ok(Attr {
            st_ino: ino,
            kind: node.kind(),
            perm: node.perm(),
            nlink: node.nlink(ino),
            uid: inode.uid,
            gid: inode.gid,
            rdev: inode.rdev,
            size: match &node.dir {
                Some(dir) => dir.by_name.len() as u64 * 32,
                None => inode.size,
            },
            blocks: (kept + promised) * 8,
            blksize: BLOCK as u32,
            atime: inode.atime.into(),
            mtime: inode.mtime.into(),
            ctime: inode.ctime.into(),
            btime: Some(inode.btime.into()),
            valid_for: self.valid_for(),
        })
    }

    pub(crate) fn entry(&self, ino: u64) -> Result<Entry> {
        let attr = self.attr(ino)?;
        Ok(Entry { ino: Ino(ino), generation: 0, attr, valid_for: self.valid_for() })
    }

    fn valid_for(&self) -> Duration {
        if self.frontends > 1 { Duration::ZERO } else { VALID_FOR }
    }

    pub(crate) fn looked_up(&mut self, ino: u64) -> Result<Entry> {
        self.node_mut(ino)?.lookups += 1;
        self.entry(ino)
    }

    pub(crate) fn forget(&mut self, ino: u64, lookups: u64) {
        if let Ok(node) = self.node_mut(ino) {
            node.lookups = node.lookups.saturating_sub(lookups);
            self.drop_if_unused(ino);
        }
    }

    pub(crate) fn opened(&mut self, ino: u64) -> Result<()> {
        self.node_mut(ino)?.opens += 1;
        Ok(())
    }

    pub(crate) fn closed(&mut self, ino: u64) {
        if let Ok(node) = self.node_mut(ino) {
            node.opens = node.opens.saturating_sub(1);
            self.drop_if_unused(ino);
        }
    }

    /// Ends an inode without names that nobody uses. Its blocks are free once the next group is durable.
    fn drop_if_unused(&mut self, ino: u64) {
        let unused = |node: &Node| {
            node.lookups == 0 && node.opens == 0 && node.inode.links.is_empty() && ino != ROOT
        };
        if !self.nodes.get(&ino).is_some_and(unused) {
            return;
        }
        let Some(mut node) = self.nodes.remove(&ino) else { return };
        if let Data::Extents(extents) = &node.inode.data {
            self.freed.extend(extents.iter().map(|extent| Run::from(*extent)));
        }
        self.freed.append(&mut node.records);
        for page in node.pages.values() {
            self.forget_page(page);
        }
        self.written.remove(&ino);
    }

    fn add_link(&mut self, ino: u64, parent: u64, name: &[u8]) -> Result<()> {
        let stamp = self.next_stamp;
        self.next_stamp += 1;
        self.dir_mut(parent)?.put(name, stamp, ino);
        let node = self.node_mut(ino)?;
        node.inode.links.push(Link { parent, stamp, name: name.to_vec() });
        if node.dir.is_some() {
            self.dir_mut(parent)?.subdirs += 1;
        }
        self.gone.remove(&ino);
        self.changed.insert(ino);
        Ok(())
    }

    /// Takes a name away. The inode stays, perhaps without any.
    fn remove_link(&mut self, ino: u64, parent: u64, name: &[u8]) -> Result<()> {
        self.dir_mut(parent)?.remove(name);
        let node = self.node_mut(ino)?;
        node.inode.links.retain(|link| link.parent != parent || link.name != name);
        let unnamed = node.inode.links.is_empty();
        if node.dir.is_some() {
            self.dir_mut(parent)?.subdirs -= 1;
        }
        match unnamed {
            true => {
                self.changed.remove(&ino);
                self.gone.insert(ino);
            }
            false => drop(self.changed.insert(ino)),
        }
        Ok(())
    }

    fn names_changed(&mut self, dir: u64, now: Timestamp) -> Result<()> {
        self.node_mut(dir)?.modified(now);
        self.touch(dir);
        Ok(())
    }
}
