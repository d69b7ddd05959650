//! Names and attributes in memory. Pure: nothing here does I/O.

mod attributes;
mod load;
mod names;
mod rename;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use defuse_fs::posix::without_set_id;
use defuse_fs::{Attr, Entry, Errno, FileKind, Ino, Result, Timestamp};

use crate::content::{Content, Facts, Pool};
use crate::format::BLOCK;
use crate::format::inode::{Inode, Link, Moment};

pub(crate) use load::Loaded;
pub use load::Problem;

/// The root directory.
pub(crate) const ROOT: u64 = 1;

/// Names of an inode at most.
pub(crate) const LINK_MAX: usize = 65_000;

/// Only this process changes the file system, so answers hold until it says otherwise.
const VALID_FOR: Duration = Duration::from_secs(24 * 60 * 60);

/// Everything that is known of the file system.
pub(crate) struct Tree {
    nodes: HashMap<u64, Node>,
    pool: Arc<Pool>,
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
    /// Contents of inodes that are gone. Whoever unlocks the tree ends them.
    ended: Vec<Arc<Mutex<Content>>>,
    /// Frontends; from the second on nothing that is told stays valid.
    pub(crate) frontends: usize,
}

/// An inode in memory.
#[derive(Default)]
struct Node {
    /// Attributes, names and extended attributes; the data is in the content.
    inode: Inode,
    dir: Option<Dir>,
    /// See [`Facts`].
    blocks: u64,
    content: Arc<Mutex<Content>>,
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
    pub(crate) fn empty(pool: Arc<Pool>, (perm, uid, gid): (u32, u32, u32)) -> Self {
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
        let mut tree = Tree::new(pool);
        let root = Node { inode, dir: Some(Dir::default()), lookups: 1, ..Node::default() };
        tree.nodes.insert(ROOT, root);
        tree.changed.insert(ROOT);
        tree
    }

    fn new(pool: Arc<Pool>) -> Self {
        Tree {
            nodes: HashMap::new(),
            pool,
            slots: 0,
            next_ino: ROOT + 1,
            // 1 and 2 are the positions of `.` and `..`.
            next_stamp: 3,
            changed: BTreeSet::new(),
            gone: BTreeSet::new(),
            written: BTreeSet::new(),
            ended: Vec::new(),
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
    pub(crate) fn touch(&mut self, ino: u64) {
        let named = self.nodes.get(&ino).is_some_and(|node| !node.inode.links.is_empty());
        if named || ino == ROOT {
            self.changed.insert(ino);
        }
    }

    pub(crate) fn attr(&self, ino: u64) -> Result<Attr> {
        let node = self.node(ino)?;
        let inode = &node.inode;
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
            blocks: node.blocks * (BLOCK as u64 / 512),
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
        if let Some(node) = self.nodes.remove(&ino) {
            self.ended.push(node.content);
        }
        self.written.remove(&ino);
    }

    /// The contents of inodes that are gone since the last call.
    pub(crate) fn take_ended(&mut self) -> Vec<Arc<Mutex<Content>>> {
        std::mem::take(&mut self.ended)
    }

    /// The content of an inode of any kind.
    pub(crate) fn content(&self, ino: u64) -> Result<Arc<Mutex<Content>>> {
        Ok(Arc::clone(&self.node(ino)?.content))
    }

    /// The content of a regular file.
    ///
    /// # Errors
    ///
    /// `EISDIR`, `EINVAL` for what has no data.
    pub(crate) fn data(&self, ino: u64) -> Result<Arc<Mutex<Content>>> {
        self.check_data(ino)?;
        self.content(ino)
    }

    /// All contents.
    pub(crate) fn contents(&self) -> Vec<Arc<Mutex<Content>>> {
        self.nodes.values().map(|node| Arc::clone(&node.content)).collect()
    }

    /// Takes in what became of a content, which the caller has locked.
    pub(crate) fn settle(&mut self, ino: u64, facts: Facts) -> Result<()> {
        let node = self.node_mut(ino)?;
        (node.inode.size, node.blocks) = (facts.size, facts.blocks);
        if facts.dirty {
            self.written.insert(ino);
        }
        Ok(())
    }

    /// True where the next group has something to write.
    pub(crate) fn is_dirty(&self) -> bool {
        !self.changed.is_empty() || !self.gone.is_empty() || !self.written.is_empty()
    }

    /// The inodes whose pages the closing group writes.
    pub(crate) fn take_written(&mut self) -> BTreeSet<u64> {
        std::mem::take(&mut self.written)
    }

    /// The inodes that the closing group writes, and those that it removes.
    pub(crate) fn take_changed(&mut self) -> (BTreeSet<u64>, BTreeSet<u64>) {
        (std::mem::take(&mut self.changed), std::mem::take(&mut self.gone))
    }

    /// An inode without its data.
    pub(crate) fn inode(&self, ino: u64) -> Result<&Inode> {
        Ok(&self.node(ino)?.inode)
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
