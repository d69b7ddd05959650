//! renameat2(2).

use std::sync::atomic::Ordering;
use std::sync::{Arc, MutexGuard};

use defuse_fs::posix::rename::{DirectoryRelation, check_flags, check_kinds, child_towards};
use defuse_fs::{
    AnswerLifetime, Errno, FileKind, Ino, Name, NewNode, RenameFlags, Result, Timestamp,
};

use super::index::{IndexTablePair, NameHash};
use super::make::{InodeCreation, LockedName};
use super::order::{EntryOrder, RecordId};
use super::record::{DirectoryState, InodeRecord, TimeKind, link_bytes};
use super::{ContentState, LINK_MAX, NameStore, list};
use crate::content::SharedContent;
use crate::group::GroupReadGuard;
use crate::locks::lock;

/// A name of the rename.
struct RenameEnd<'a> {
    parent: u64,
    name: &'a [u8],
    dir: Arc<DirectoryState>,
    key: NameHash,
}

/// The inode with one of the names.
#[derive(Clone)]
struct RenamedInode {
    rid: RecordId,
    ino: u64,
    dir: Option<Arc<DirectoryState>>,
}

/// Directories with locked entries, by inode number.
struct LockedDirectories<'a>(Vec<(u64, MutexGuard<'a, EntryOrder>)>);

impl<'a> LockedDirectories<'a> {
    fn new(mut dirs: Vec<(u64, &'a DirectoryState)>) -> Self {
        dirs.sort_unstable_by_key(|(ino, _)| *ino);
        dirs.dedup_by_key(|(ino, _)| *ino);
        LockedDirectories(dirs.into_iter().map(|(ino, dir)| (ino, lock(&dir.entries))).collect())
    }

    fn entries(&mut self, ino: u64) -> &mut EntryOrder {
        let found = self.0.iter_mut().find(|(other, _)| *other == ino);
        found.map_or_else(|| unreachable!("directory {ino} is not locked"), |(_, order)| order)
    }
}

impl NameStore {
    /// Moves a name. `whiteout` is the node that takes the place of the old name, if the flags
    /// request one. Returns the moved inode, and the inode that had the new name. If there was
    /// none, the moved inode is returned twice.
    pub(crate) fn rename(
        &self,
        handle: &GroupReadGuard<'_>,
        from: (u64, Name<'_>),
        to: (u64, Name<'_>),
        flags: RenameFlags,
        whiteout: &NewNode<'_>,
    ) -> Result<[Ino; 2]> {
        check_flags(flags)?;
        self.check_numbers()?;
        let side = |(parent, name): (u64, Name<'_>)| -> Result<(Arc<DirectoryState>, NameHash)> {
            let (dir, key) = (self.directory(parent)?, self.index.key(parent, name.as_bytes()));
            Ok((dir, key))
        };
        let (from_dir, from_key) = side(from)?;
        let (to_dir, to_key) = side(to)?;
        let (from_name, to_name) = (from.1.as_bytes(), to.1.as_bytes());
        let from = RenameEnd { parent: from.0, name: from_name, dir: from_dir, key: from_key };
        let to = RenameEnd { parent: to.0, name: to_name, dir: to_dir, key: to_key };
        loop {
            if let Some((gone, inodes)) = self.try_rename(handle, (&from, &to), flags, whiteout)? {
                gone.into_iter().for_each(|record| self.end(Some(record)));
                return Ok(inodes);
            }
        }
    }

    fn find_named(&self, side: &RenameEnd<'_>) -> Option<RenamedInode> {
        let part = self.index.read(side.key);
        let rid = self.find(&part, side.key, side.parent, side.name)?;
        let seen = self.records.with_record(rid, |record, _| {
            Ok(RenamedInode { rid, ino: record.ino, dir: record.directory().cloned() })
        });
        seen.ok()
    }

    /// Returns the inodes that the rename removed, and the inodes that it concerns, or `None` if
    /// names changed while it took locks.
    fn try_rename(
        &self,
        handle: &GroupReadGuard<'_>,
        (from, to): (&RenameEnd<'_>, &RenameEnd<'_>),
        flags: RenameFlags,
        whiteout: &NewNode<'_>,
    ) -> Result<Option<(Vec<InodeRecord>, [Ino; 2])>> {
        let (source, target) = (self.find_named(from), self.find_named(to));
        let moves_dir = [&source, &target].into_iter().flatten().any(|named| named.dir.is_some());
        let _renames = (moves_dir && from.parent != to.parent).then(|| lock(&self.renames));
        let exchange = flags.has(RenameFlags::EXCHANGE);
        let mut dirs = vec![(from.parent, &*from.dir), (to.parent, &*to.dir)];
        if let Some(RenamedInode { ino, dir: Some(dir), .. }) =
            target.as_ref().filter(|_| !exchange)
        {
            dirs.push((*ino, dir));
        }
        let mut locked = LockedDirectories::new(dirs);
        let same = |before: &Option<RenamedInode>, now: &Option<RenamedInode>| {
            before.as_ref().map(|named| named.ino) == now.as_ref().map(|named| named.ino)
        };
        // Names of a directory change under its lock only.
        if !same(&source, &self.find_named(from)) || !same(&target, &self.find_named(to)) {
            return Ok(None);
        }
        let source = self.check(from, to, (source, target.as_ref()), flags)?;
        let inodes = [source.ino, target.as_ref().map_or(source.ino, |target| target.ino)].map(Ino);
        if inodes[0] == inodes[1] && target.is_some() {
            return Ok(Some((Vec::new(), inodes)));
        }
        let moved =
            [Some((&source, to)), target.as_ref().filter(|_| exchange).map(|to| (to, from))];
        let contents = self.contents_of_linked(moved.into_iter().flatten());
        let mut held: Vec<_> =
            contents.iter().map(|(content, name)| (lock(content), *name)).collect();
        for (content, name) in &mut held {
            let others = content.bytes_of_other_records() + link_bytes(name);
            content.promise_others(&self.pool, others)?;
        }
        let _change = moves_dir.then(|| self.paths.change());
        let (now, mut gone) = (self.now(), Vec::new());
        let mut parts = self.index.write_two(from.key, to.key);
        match &target {
            Some(target) if exchange => {
                self.relink(handle, &mut locked, &mut parts, (&source, from, to), now)?;
                self.relink(handle, &mut locked, &mut parts, (target, to, from), now)?;
            }
            target => {
                if let Some(target) = target {
                    if let Some(dir) = &target.dir {
                        dir.dead.store(true, Ordering::Release);
                    }
                    let entries = locked.entries(to.parent);
                    let (parent, name, dir, key) = (to.parent, to.name, &*to.dir, to.key);
                    let place = LockedName { parent, name, dir, entries, key };
                    let of_dir = target.dir.is_some();
                    let part = parts.part(to.key);
                    let drop = (target.rid, now);
                    gone.extend(self.drop_name(handle, place, part, drop, of_dir)?.1);
                }
                self.relink(handle, &mut locked, &mut parts, (&source, from, to), now)?;
                if flags.has(RenameFlags::WHITEOUT) {
                    self.make_whiteout(handle, from, &mut locked, &mut parts, whiteout)?;
                }
            }
        }
        drop(parts);
        self.record_name_change(from.parent, &from.dir, now);
        self.record_name_change(to.parent, &to.dir, now);
        Ok(Some((gone, inodes)))
    }

    /// The contents of the inodes that have several names, each with the new name, in the order in
    /// which they are locked. The records of such an inode may grow.
    fn contents_of_linked<'a>(
        &self,
        moved: impl Iterator<Item = (&'a RenamedInode, &'a RenameEnd<'a>)>,
    ) -> Vec<(SharedContent, &'a [u8])> {
        let mut linked: Vec<(u64, SharedContent, &[u8])> = Vec::new();
        for (named, side) in moved {
            let several = self.records.with_record(named.rid, |_, extra| {
                Ok(extra.is_some_and(|extra| !extra.links.is_empty()))
            });
            if several == Ok(true)
                && let Ok(ContentState::Here(content)) = self.content(named.ino)
            {
                linked.push((named.ino, content, side.name));
            }
        }
        linked.sort_unstable_by_key(|(ino, ..)| *ino);
        linked.into_iter().map(|(_, content, name)| (content, name)).collect()
    }

    /// Everything that can fail, before anything changes. Returns the source.
    fn check(
        &self,
        from: &RenameEnd<'_>,
        to: &RenameEnd<'_>,
        (source, target): (Option<RenamedInode>, Option<&RenamedInode>),
        flags: RenameFlags,
    ) -> Result<RenamedInode> {
        let source = source.filter(|_| !from.dir.is_dead()).ok_or(Errno::ENOENT)?;
        if to.dir.is_dead() {
            return Err(Errno::ENOENT);
        }
        let exchange = flags.has(RenameFlags::EXCHANGE);
        if flags.has(RenameFlags::NOREPLACE) && target.is_some() {
            return Err(Errno::EEXIST);
        }
        if exchange && target.is_none() {
            return Err(Errno::ENOENT);
        }
        let is_dir = source.dir.is_some();
        if is_dir || target.is_some_and(|target| target.dir.is_some()) {
            let lineage = self.relate(from.parent, to.parent)?;
            lineage.check(Ino(source.ino), target.map(|target| Ino(target.ino)), flags)?;
        }
        match target {
            Some(target) if exchange || target.ino == source.ino => {}
            Some(target) => {
                check_kinds(is_dir, target.dir.is_some())?;
                let full = |dir: &Arc<DirectoryState>| dir.count.load(Ordering::Relaxed) != 0;
                if target.dir.as_ref().is_some_and(full) {
                    return Err(Errno::ENOTEMPTY);
                }
            }
            None => {
                let subdirs = to.dir.subdirs.load(Ordering::Relaxed) as usize;
                if is_dir && from.parent != to.parent && subdirs >= LINK_MAX {
                    return Err(Errno::EMLINK);
                }
            }
        }
        if flags.has(RenameFlags::WHITEOUT) {
            self.check_slots()?;
        }
        Ok(source)
    }

    /// The relation of two directories. Directories keep their parents meanwhile: the caller holds
    /// `renames` if the two differ.
    fn relate(&self, from: u64, to: u64) -> Result<DirectoryRelation> {
        if from == to {
            return Ok(DirectoryRelation::default());
        }
        let parent = |ino: Ino| -> Result<Option<Ino>> {
            self.records.with_inode(ino.0, |record, _| {
                Ok((record.parent != 0).then_some(Ino(record.parent)))
            })
        };
        Ok(DirectoryRelation {
            to_is_below: child_towards(Ino(from), Ino(to), parent)?,
            from_is_below: child_towards(Ino(to), Ino(from), parent)?,
        })
    }

    /// Gives an inode one name in the place of another.
    fn relink(
        &self,
        handle: &GroupReadGuard<'_>,
        locked: &mut LockedDirectories<'_>,
        parts: &mut IndexTablePair<'_>,
        (named, old, new): (&RenamedInode, &RenameEnd<'_>, &RenameEnd<'_>),
        now: Timestamp,
    ) -> Result<()> {
        let stamp = self.take_stamp();
        let (before, _) = self.records.change_at(named.rid, |mut changing| {
            let before = changing.remove_link(old.parent, old.name).ok_or(Errno::EIO)?;
            changing.add_link(new.parent, stamp, new.name);
            changing.settle_times();
            changing.set_time(TimeKind::Change, now.into());
            list(handle, changing.record);
            Ok(before)
        })?;
        parts.part(old.key).remove(old.key, named.rid);
        parts.part(new.key).insert(new.key, named.rid);
        locked.entries(old.parent).remove(before);
        locked.entries(new.parent).push(stamp, named.rid);
        let is_dir = u32::from(named.dir.is_some());
        old.dir.count.fetch_sub(1, Ordering::Relaxed);
        old.dir.subdirs.fetch_sub(is_dir, Ordering::Relaxed);
        new.dir.count.fetch_add(1, Ordering::Relaxed);
        new.dir.subdirs.fetch_add(is_dir, Ordering::Relaxed);
        Ok(())
    }

    fn make_whiteout(
        &self,
        handle: &GroupReadGuard<'_>,
        from: &RenameEnd<'_>,
        locked: &mut LockedDirectories<'_>,
        parts: &mut IndexTablePair<'_>,
        whiteout: &NewNode<'_>,
    ) -> Result<()> {
        let node = &NewNode { kind: FileKind::CharDevice, rdev: 0, ..*whiteout };
        let lifetime = AnswerLifetime::default();
        let making = InodeCreation {
            node,
            target: None,
            keeps_sgid: true,
            opens: false,
            sure: true,
            lifetime,
        };
        let entries = locked.entries(from.parent);
        let (parent, name, dir, key) = (from.parent, from.name, &*from.dir, from.key);
        let place = LockedName { parent, name, dir, entries, key };
        // A whiteout is never opened. Without attributes it needs only a slot.
        let mut above = self.parent_directory(parent)?;
        above.default_acl = None;
        let made = self.make_at(handle, place, parts.part(key), &above, making)?;
        self.forget(made.ino.0, 1);
        Ok(())
    }
}
