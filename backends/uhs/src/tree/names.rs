//! Lookups, and operations that make and remove names.

use std::sync::{Arc, Mutex};

use defuse_fs::posix::{Parent, new_inode};
use defuse_fs::{DirBuf, DirItem, Entry, Errno, FileKind, Name, NewNode, Push, Result, Timestamp};

use super::{Dir, LINK_MAX, Node, ROOT, Tree};
use crate::content::Content;
use crate::content::pool::KEEP_UNITS;
use crate::format::UNIT_BLOCKS;
use crate::format::inode::{Data, Inode};

/// The longest target of a symbolic link, symlink(7).
const TARGET_MAX: usize = 4095;

/// Slots that new inodes leave to changes and removals.
const KEEP_SLOTS: u64 = 1024;

impl Tree {
    pub(crate) fn lookup(&mut self, parent: u64, name: Name<'_>) -> Result<Entry> {
        let found = self.dir(parent)?.by_name.get(name.as_bytes());
        let (_, ino) = *found.ok_or(Errno::ENOENT)?;
        self.looked_up(ino)
    }

    pub(crate) fn parent_of(&self, ino: u64) -> Result<u64> {
        self.dir(ino)?;
        Ok(self.node(ino)?.inode.links.first().map_or(ROOT, |link| link.parent))
    }

    /// Makes an inode with a name in `parent`, one lookup of it.
    pub(crate) fn make(
        &mut self,
        parent: u64,
        name: Name<'_>,
        node: &NewNode<'_>,
        target: Option<&[u8]>,
        keeps_sgid: bool,
    ) -> Result<Entry> {
        let name = name.as_bytes();
        let dir = self.living_dir(parent)?;
        if dir.by_name.contains_key(name) {
            return Err(Errno::EEXIST);
        }
        if node.kind == FileKind::Directory && dir.subdirs as usize >= LINK_MAX {
            return Err(Errno::EMLINK);
        }
        let ino = self.new_node(parent, node, target, keeps_sgid)?;
        self.add_link(ino, parent, name)?;
        self.names_changed(parent, Timestamp::now())?;
        self.looked_up(ino)
    }

    /// Makes a file without a name in the file system of `parent`, one lookup of it.
    pub(crate) fn make_nameless(
        &mut self,
        parent: u64,
        node: &NewNode<'_>,
        linkable: bool,
        keeps_sgid: bool,
    ) -> Result<Entry> {
        self.living_dir(parent)?;
        let ino = self.new_node(parent, node, None, keeps_sgid)?;
        self.node_mut(ino)?.linkable = linkable;
        self.looked_up(ino)
    }

    fn new_node(
        &mut self,
        parent: u64,
        node: &NewNode<'_>,
        target: Option<&[u8]>,
        keeps_sgid: bool,
    ) -> Result<u64> {
        if self.free_slots() < KEEP_SLOTS {
            return Err(Errno::ENOSPC);
        }
        let dir = self.node(parent)?;
        let from = Parent { perm: dir.perm(), gid: dir.inode.gid, default_acl: None };
        let made = new_inode(from, node, keeps_sgid);
        let data = match (node.kind, target) {
            (FileKind::Symlink, Some([])) => return Err(Errno::ENOENT),
            (FileKind::Symlink, Some(target)) if target.len() > TARGET_MAX => {
                return Err(Errno::ENAMETOOLONG);
            }
            (FileKind::Symlink, Some(target)) => Data::Target(target.to_vec()),
            (FileKind::Symlink, None) => return Err(Errno::EINVAL),
            (FileKind::Regular, _) => Data::Inline(Vec::new()),
            _ => Data::Nothing,
        };
        let now = Timestamp::now().into();
        let inode = Inode {
            mode: node.kind.mode_bits() | made.perm,
            uid: node.uid,
            gid: made.gid,
            rdev: node.rdev,
            size: target.map_or(0, |target| target.len() as u64),
            atime: now,
            mtime: now,
            ctime: now,
            btime: now,
            links: Vec::new(),
            xattrs: Vec::new(),
            data: Data::Nothing,
        };
        let ino = self.next_ino;
        self.next_ino += 1;
        let dir = (node.kind == FileKind::Directory).then(Dir::default);
        let content = Arc::new(Mutex::new(Content::new(data, inode.size, Vec::new())));
        self.nodes.insert(ino, Node { inode, dir, content, ..Node::default() });
        Ok(ino)
    }

    pub(crate) fn link(&mut self, ino: u64, parent: u64, name: Name<'_>) -> Result<Entry> {
        let node = self.node(ino)?;
        if node.dir.is_some() {
            return Err(Errno::EPERM);
        }
        let names = node.inode.links.len();
        if names == 0 && !node.linkable {
            return Err(Errno::ENOENT);
        }
        if self.living_dir(parent)?.by_name.contains_key(name.as_bytes()) {
            return Err(Errno::EEXIST);
        }
        if names >= LINK_MAX {
            return Err(Errno::EMLINK);
        }
        let now = Timestamp::now();
        self.add_link(ino, parent, name.as_bytes())?;
        let node = self.node_mut(ino)?;
        node.linkable = false;
        node.inode.ctime = now.into();
        self.names_changed(parent, now)?;
        self.looked_up(ino)
    }

    pub(crate) fn unlink(&mut self, parent: u64, name: Name<'_>) -> Result<()> {
        let found = self.dir(parent)?.by_name.get(name.as_bytes());
        let (_, ino) = *found.ok_or(Errno::ENOENT)?;
        if self.node(ino)?.dir.is_some() {
            return Err(Errno::EISDIR);
        }
        self.drop_name(ino, parent, name.as_bytes(), Timestamp::now())
    }

    pub(crate) fn rmdir(&mut self, parent: u64, name: Name<'_>) -> Result<()> {
        let found = self.dir(parent)?.by_name.get(name.as_bytes());
        let (_, ino) = *found.ok_or(Errno::ENOENT)?;
        self.kill_dir(ino)?;
        self.drop_name(ino, parent, name.as_bytes(), Timestamp::now())
    }

    pub(super) fn drop_name(
        &mut self,
        ino: u64,
        parent: u64,
        name: &[u8],
        now: Timestamp,
    ) -> Result<()> {
        self.remove_link(ino, parent, name)?;
        self.node_mut(ino)?.inode.ctime = now.into();
        self.names_changed(parent, now)?;
        self.drop_if_unused(ino);
        Ok(())
    }

    /// Makes sure that an empty directory gets no names any more.
    pub(super) fn kill_dir(&mut self, ino: u64) -> Result<()> {
        let dir = self.dir_mut(ino)?;
        if !dir.by_name.is_empty() {
            return Err(Errno::ENOTEMPTY);
        }
        dir.dead = true;
        Ok(())
    }

    /// The position of the next new name in any directory.
    pub(crate) fn next_stamp(&self) -> u64 {
        self.next_stamp
    }

    /// Lists the entries after the position `from` and before `end`.
    pub(crate) fn list(
        &mut self,
        dir: u64,
        (from, end): (u64, u64),
        out: &mut DirBuf<'_>,
    ) -> Result<()> {
        let parent = self.parent_of(dir)?;
        for (next, name, ino) in [(1, &b"."[..], dir), (2, b"..", parent)] {
            let item = DirItem { ino, next, kind: FileKind::Directory, name };
            if from < next && out.push(item) == Push::Full {
                return Ok(());
            }
        }
        let mut at = from.max(2) + 1;
        while at < end {
            let after = self.dir(dir)?.by_stamp.range(at..end).next();
            let Some((stamp, (name, ino))) = after.map(|(at, entry)| (*at, entry.clone())) else {
                return Ok(());
            };
            let kind = self.node(ino)?.kind();
            let item = DirItem { ino, next: stamp, kind, name: &name };
            if out.push_with(item, || self.looked_up(ino).ok()) == Push::Full {
                return Ok(());
            }
            at = stamp + 1;
        }
        Ok(())
    }

    /// Slots that inodes do not need, as far as slots and free units go.
    fn free_slots(&self) -> u64 {
        let units = self.pool.space().free_units().saturating_sub(KEEP_UNITS);
        let all = self.slots + u64::from(units) * UNIT_BLOCKS;
        all.saturating_sub(self.nodes.len() as u64 + self.gone.len() as u64)
    }

    /// Inodes, and how many more there can be.
    pub(crate) fn count(&self) -> (u64, u64) {
        (self.nodes.len() as u64, self.free_slots().saturating_sub(KEEP_SLOTS))
    }
}
