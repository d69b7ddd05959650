//! Attributes.

use defuse_fs::{Attr, Errno, FileKind, Result, SetAttr, SetTime, Timestamp};

use super::Tree;
use crate::content::Facts;

/// Seconds after which an access time is updated in any case, mount(8) about `relatime`.
const DAY: i64 = 24 * 60 * 60;

impl Tree {
    /// Changes attributes. The content has the new size already.
    pub(crate) fn setattr(&mut self, ino: u64, set: &SetAttr) -> Result<Attr> {
        let now = Timestamp::now();
        if set.size.is_some() {
            self.node_mut(ino)?.modified(now);
        }
        let node = self.node_mut(ino)?;
        let is_dir = node.dir.is_some();
        if set.uid.is_some() || set.gid.is_some() {
            node.inode.uid = set.uid.unwrap_or(node.inode.uid);
            node.inode.gid = set.gid.unwrap_or(node.inode.gid);
        }
        if !is_dir && (set.uid.is_some() || set.gid.is_some() || set.kill_suidgid) {
            node.kill_suidgid();
        }
        if let Some(perm) = set.perm {
            node.set_perm(perm);
        }
        let time = |time| match time {
            SetTime::Now => now.into(),
            SetTime::At(time) => time.into(),
        };
        node.inode.atime = set.atime.map_or(node.inode.atime, time);
        node.inode.mtime = set.mtime.map_or(node.inode.mtime, time);
        if *set != SetAttr::default() {
            node.inode.ctime = set.ctime.unwrap_or(now).into();
            self.touch(ino);
        }
        self.attr(ino)
    }

    /// `EISDIR`, `EINVAL` for what has no data.
    pub(super) fn check_data(&self, ino: u64) -> Result<()> {
        match self.node(ino)?.kind() {
            FileKind::Regular => Ok(()),
            FileKind::Directory => Err(Errno::EISDIR),
            _ => Err(Errno::EINVAL),
        }
    }

    pub(crate) fn check_open(&self, ino: u64, writes: bool) -> Result<()> {
        match self.node(ino)?.kind() {
            FileKind::Directory if writes => Err(Errno::EISDIR),
            FileKind::Symlink => Err(Errno::ELOOP),
            _ => Ok(()),
        }
    }

    /// Updates the access time by the rule of `relatime`. It reaches the device with the next other
    /// change of the inode.
    pub(crate) fn accessed(&mut self, ino: u64) {
        let now = Timestamp::now();
        if let Ok(node) = self.node_mut(ino) {
            let inode = &mut node.inode;
            let due = inode.atime <= inode.mtime.max(inode.ctime);
            if due || inode.atime.sec + DAY <= now.secs {
                inode.atime = now.into();
            }
        }
    }

    /// Takes in a write: see [`settle`](Tree::settle).
    pub(crate) fn wrote(&mut self, ino: u64, facts: Facts, kill_suidgid: bool) -> Result<()> {
        self.settle(ino, facts)?;
        let node = self.node_mut(ino)?;
        node.modified(Timestamp::now());
        if kill_suidgid {
            node.kill_suidgid();
        }
        self.touch(ino);
        Ok(())
    }
}
