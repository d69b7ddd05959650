//! renameat2(2).

use std::sync::Arc;
use std::sync::atomic::Ordering;

use defuse_fs::posix::rename::{DirectoryRelation, check_flags, check_kinds, child_towards};
use defuse_fs::{Context, Errno, FileKind, Ino, Name, NewNode, RenameFlags, Result};

use crate::MemoryFileSystem;
use crate::dir::DirEntries;
use crate::inode::{InodeRefs, LINK_MAX, MemoryInode};
use crate::names::record_name_change;
use crate::sync::{lock, write};

/// Source or target of a rename.
struct RenameSide<'a> {
    dir: &'a MemoryInode,
    name: Name<'a>,
}

impl MemoryFileSystem {
    /// Returns the moved inode, and the inode that had the new name; the moved inode twice if there
    /// was none.
    pub(crate) fn rename(
        &self,
        cx: &Context<'_>,
        from: (Ino, Name<'_>),
        to: (Ino, Name<'_>),
        flags: RenameFlags,
    ) -> Result<(Ino, Ino)> {
        check_flags(flags)?;
        let (from_dir, to_dir) = (self.table.get(from.0.0)?, self.table.get(to.0.0)?);
        let (from_body, to_body) = (from_dir.dir()?, to_dir.dir()?);
        let from = RenameSide { dir: &from_dir, name: from.1 };
        let to = RenameSide { dir: &to_dir, name: to.1 };
        if from_dir.ino == to_dir.ino {
            let mut names = write(&from_body.names);
            let none = DirectoryRelation::default();
            return self.rename_locked(
                cx,
                &from,
                &to,
                &mut RenameEntries::One(&mut names),
                &none,
                flags,
            );
        }
        // While this lock is held, no directory changes its parent. The relation therefore stays
        // valid until the names have changed.
        let _topology = lock(&self.rename);
        let (from_ino, to_ino) = (Ino(from_dir.ino), Ino(to_dir.ino));
        let lineage = DirectoryRelation {
            to_is_below: child_towards(from_ino, to_ino, |dir| Ok(self.parent(dir)))?,
            from_is_below: child_towards(to_ino, from_ino, |dir| Ok(self.parent(dir)))?,
        };
        let (mut from_names, mut to_names);
        if lineage.locks_from_first(from_ino, to_ino) {
            from_names = write(&from_body.names);
            to_names = write(&to_body.names);
        } else {
            to_names = write(&to_body.names);
            from_names = write(&from_body.names);
        }
        let mut names = RenameEntries::Two(&mut from_names, &mut to_names);
        self.rename_locked(cx, &from, &to, &mut names, &lineage, flags)
    }

    /// The parent of a directory. A removed directory may have one that is gone.
    fn parent(&self, dir: Ino) -> Option<Ino> {
        let dir = self.table.get(dir.0).ok()?;
        Some(Ino(dir.dir().ok()?.parent.load(Ordering::Relaxed)))
    }

    fn rename_locked(
        &self,
        cx: &Context<'_>,
        from: &RenameSide<'_>,
        to: &RenameSide<'_>,
        names: &mut RenameEntries<'_>,
        lineage: &DirectoryRelation,
        flags: RenameFlags,
    ) -> Result<(Ino, Ino)> {
        names.from().check_alive()?;
        names.target_mut().check_alive()?;
        let source = names.from().find(from.name)?;
        let target = names.target_mut().get(to.name).map(Arc::clone);
        let exchange = flags.has(RenameFlags::EXCHANGE);
        if flags.has(RenameFlags::NOREPLACE) && target.is_some() {
            return Err(Errno::EEXIST);
        }
        if exchange && target.is_none() {
            return Err(Errno::ENOENT);
        }
        let target_ino = target.as_ref().map(|target| Ino(target.ino));
        lineage.check(Ino(source.ino), target_ino, flags)?;
        if target.as_ref().is_some_and(|target| target.ino == source.ino) {
            return Ok((Ino(source.ino), Ino(source.ino)));
        }
        match target {
            Some(target) if exchange => self.exchange(from, to, names, &source, &target)?,
            target => self.replace(cx, from, to, names, &source, target, flags)?,
        }
        Ok((Ino(source.ino), target_ino.unwrap_or(Ino(source.ino))))
    }

    #[allow(clippy::too_many_arguments)]
    fn replace(
        &self,
        cx: &Context<'_>,
        from: &RenameSide<'_>,
        to: &RenameSide<'_>,
        names: &mut RenameEntries<'_>,
        source: &Arc<MemoryInode>,
        target: Option<Arc<MemoryInode>>,
        flags: RenameFlags,
    ) -> Result<()> {
        if let Some(target) = &target {
            check_kinds(source.is_dir(), target.is_dir())?;
        }
        let across = from.dir.ino != to.dir.ino;
        let replaces_dir = target.as_ref().is_some_and(|target| target.is_dir());
        if source.is_dir() && across && !replaces_dir && to.dir.meta().nlink >= LINK_MAX {
            return Err(Errno::EMLINK);
        }
        if target.is_none() {
            names.target_mut().reserve(to.name)?;
        }
        let whiteout = flags.has(RenameFlags::WHITEOUT);
        let whiteout = match whiteout.then(|| self.create_whiteout(cx, from.dir)).transpose() {
            Err(errno) if target.is_none() => {
                names.target_mut().unreserve(to.name);
                return Err(errno);
            }
            whiteout => whiteout?,
        };
        // This is the last step that can fail. The changes begin after it.
        if let Some(target) = target.as_ref().filter(|target| target.is_dir())
            && let Err(errno) = write(&target.dir()?.names).kill()
        {
            return Err(errno);
        }
        let now = self.clock.exact();
        names.target_mut().insert(to.name, Arc::clone(source));
        match whiteout {
            Some(node) => {
                self.table.insert(Arc::clone(&node));
                names.from().insert(from.name, node);
            }
            None => {
                names.from().remove(from.name);
            }
        }
        let moved = i32::from(source.is_dir());
        if across {
            record_name_change(from.dir, names.from(), -moved, now);
            record_name_change(to.dir, names.target_mut(), moved - i32::from(replaces_dir), now);
            set_parent(source, to.dir);
        } else {
            record_name_change(to.dir, names.target_mut(), -i32::from(replaces_dir), now);
        }
        source.change_meta().ctime = now;
        if let Some(target) = target {
            self.drop_link(&target, now);
        }
        Ok(())
    }

    fn exchange(
        &self,
        from: &RenameSide<'_>,
        to: &RenameSide<'_>,
        names: &mut RenameEntries<'_>,
        source: &Arc<MemoryInode>,
        target: &Arc<MemoryInode>,
    ) -> Result<()> {
        let now = self.clock.exact();
        names.target_mut().insert(to.name, Arc::clone(source));
        names.from().insert(from.name, Arc::clone(target));
        let across = from.dir.ino != to.dir.ino;
        let moved =
            if across { i32::from(source.is_dir()) - i32::from(target.is_dir()) } else { 0 };
        record_name_change(from.dir, names.from(), -moved, now);
        record_name_change(to.dir, names.target_mut(), moved, now);
        set_parent(source, to.dir);
        set_parent(target, from.dir);
        source.change_meta().ctime = now;
        target.change_meta().ctime = now;
        Ok(())
    }

    /// Creates a whiteout, the mark of overlayfs for a deleted name: the character device 0/0.
    fn create_whiteout(&self, cx: &Context<'_>, dir: &MemoryInode) -> Result<Arc<MemoryInode>> {
        let node = NewNode::new(FileKind::CharDevice, 0, cx.caller);
        self.new_inode(cx, dir, &node, None, InodeRefs { lookups: 0, opens: 0, names: 1 })
    }
}

/// The entries of two directories, which may be the same directory.
enum RenameEntries<'a> {
    One(&'a mut DirEntries),
    Two(&'a mut DirEntries, &'a mut DirEntries),
}

impl RenameEntries<'_> {
    fn from(&mut self) -> &mut DirEntries {
        match self {
            RenameEntries::One(names) | RenameEntries::Two(names, _) => names,
        }
    }

    fn target_mut(&mut self) -> &mut DirEntries {
        match self {
            RenameEntries::One(names) | RenameEntries::Two(_, names) => names,
        }
    }
}

fn set_parent(inode: &MemoryInode, dir: &MemoryInode) {
    if let Ok(body) = inode.dir() {
        body.parent.store(dir.ino, Ordering::Relaxed);
    }
}
