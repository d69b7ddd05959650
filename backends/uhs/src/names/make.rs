//! Lookups, and operations that make inodes.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use defuse_fs::posix::acl::Acl;
use defuse_fs::posix::{CreateParent, NewInode, new_inode};
use defuse_fs::{AnswerLifetime, Entry, Errno, FileKind, Name, NewNode, Result, SetXattrFlags};

use super::index::{IndexTable, NameHash};
use super::order::{EntryOrder, RecordId};
use super::record::{
    ChangingRecord, DirectoryState, InodeRecord, LiveContent, RecordBody, RecordExtra, TimeKind,
    UseCount, link_bytes,
};
use super::xattrs::{ACCESS, DEFAULT, default_acl};
use super::{LINK_MAX, NameStore, ROOT, list, settle, touch};
use crate::content::{FileContent, SharedContent};
use crate::format::LAST_NEW;
use crate::format::inode::InodeData;
use crate::group::GroupReadGuard;
use crate::locks::lock;

/// The longest target of a symbolic link, symlink(7).
const TARGET_MAX: usize = 4095;

/// Everything that determines a new inode, except its place.
#[derive(Clone, Copy)]
pub(crate) struct InodeCreation<'a> {
    pub(crate) node: &'a NewNode<'a>,
    /// The target of a symbolic link.
    pub(crate) target: Option<&'a [u8]>,
    /// The caller may keep set-group-id.
    pub(crate) keeps_sgid: bool,
    /// The inode is opened, too.
    pub(crate) opens: bool,
    /// There is a slot for it.
    pub(crate) sure: bool,
    /// The time for which the answer may be cached.
    pub(crate) lifetime: AnswerLifetime,
}

/// A directory that gets a new entry.
pub(super) struct ParentDirectory {
    pub(super) dir: Arc<DirectoryState>,
    perm: u32,
    gid: u32,
    pub(super) default_acl: Option<Acl>,
}

/// A directory with its lock, and the part of the index for a name in it.
pub(super) struct LockedName<'a> {
    pub(super) parent: u64,
    pub(super) name: &'a [u8],
    pub(super) dir: &'a DirectoryState,
    pub(super) entries: &'a mut EntryOrder,
    pub(super) key: NameHash,
}

#[cfg(test)]
thread_local! {
    static COMPARED: std::cell::Cell<u64> = const { std::cell::Cell::new(0) };
}

/// The number of further names of inodes that this thread has compared.
#[cfg(test)]
pub(super) fn compared_names() -> u64 {
    COMPARED.get()
}

/// True where the inode has this name.
pub(super) fn has_link(
    record: &InodeRecord,
    extra: Option<&RecordExtra>,
    parent: u64,
    name: &[u8],
) -> bool {
    let further = || {
        extra.is_some_and(|extra| {
            #[cfg(test)]
            COMPARED.set(COMPARED.get() + extra.links.len() as u64);
            extra.links.iter().any(|link| link.parent == parent && link.name == name)
        })
    };
    record.parent == parent && record.name.as_bytes() == name || further()
}

impl NameStore {
    pub(crate) fn lookup(
        &self,
        lifetime: AnswerLifetime,
        parent: u64,
        name: Name<'_>,
    ) -> Result<Entry> {
        let entry =
            self.with_name(parent, name, |record, extra| self.entry(record, extra, lifetime));
        match entry {
            Some(entry) => Ok(entry),
            None => self.directory(parent).and(Err(Errno::ENOENT)),
        }
    }

    /// Looks at the inode with a name.
    pub(super) fn with_name<T>(
        &self,
        parent: u64,
        name: Name<'_>,
        mut see: impl FnMut(&InodeRecord, Option<&RecordExtra>) -> T,
    ) -> Option<T> {
        let name = name.as_bytes();
        let key = self.index.key(parent, name);
        let mut seen = None;
        self.index.read(key).find(key, |rid| {
            let found = self.records.with_record(rid, |record, extra| {
                let found = has_link(record, extra, parent, name);
                seen = found.then(|| see(record, extra));
                Ok(found)
            });
            found == Ok(true)
        });
        seen
    }

    /// The inode with a name.
    pub(super) fn find(
        &self,
        part: &IndexTable,
        key: NameHash,
        parent: u64,
        name: &[u8],
    ) -> Option<RecordId> {
        part.find(key, |rid| {
            let seen = self
                .records
                .with_record(rid, |record, extra| Ok(has_link(record, extra, parent, name)));
            seen == Ok(true)
        })
    }

    /// The parent of a directory, with one more lookup.
    pub(crate) fn lookup_parent(&self, lifetime: AnswerLifetime, ino: u64) -> Result<Entry> {
        let parent = self.parent_of(ino)?;
        self.records.with_inode(parent, |record, extra| Ok(self.entry(record, extra, lifetime)))
    }

    pub(super) fn parent_of(&self, ino: u64) -> Result<u64> {
        self.records.with_inode(ino, |record, _| match record.directory() {
            Some(_) if record.parent == 0 => Ok(ROOT),
            Some(_) => Ok(record.parent),
            None => Err(Errno::ENOTDIR),
        })
    }

    pub(super) fn parent_directory(&self, parent: u64) -> Result<ParentDirectory> {
        self.records.with_inode(parent, |record, extra| {
            let dir = record.directory().cloned().ok_or(Errno::ENOTDIR)?;
            let default_acl = default_acl(extra);
            Ok(ParentDirectory { dir, perm: record.perm(), gid: record.gid, default_acl })
        })
    }

    /// Makes an inode with a name in `parent`, and with one lookup.
    pub(crate) fn make(
        &self,
        handle: &GroupReadGuard<'_>,
        parent: u64,
        name: Name<'_>,
        making: InodeCreation<'_>,
    ) -> Result<Entry> {
        let name = name.as_bytes();
        let above = self.parent_directory(parent)?;
        let mut entries = lock(&above.dir.entries);
        if above.dir.is_dead() {
            return Err(Errno::ENOENT);
        }
        let key = self.index.key(parent, name);
        let mut part = self.index.write(key);
        if self.find(&part, key, parent, name).is_some() {
            return Err(Errno::EEXIST);
        }
        let place = LockedName { parent, name, dir: &above.dir, entries: &mut entries, key };
        let entry = self.make_at(handle, place, &mut part, &above, making)?;
        drop(part);
        self.record_name_change(parent, &above.dir, self.now());
        Ok(entry)
    }

    /// Makes an inode in a place where none is.
    pub(super) fn make_at(
        &self,
        handle: &GroupReadGuard<'_>,
        place: LockedName<'_>,
        part: &mut IndexTable,
        above: &ParentDirectory,
        making: InodeCreation<'_>,
    ) -> Result<Entry> {
        let is_dir = making.node.kind == FileKind::Directory;
        if is_dir && place.dir.subdirs.load(Ordering::Relaxed) as usize >= LINK_MAX {
            return Err(Errno::EMLINK);
        }
        self.check_numbers()?;
        if !making.sure {
            self.check_slots()?;
        }
        let (mut record, extra) = self.new_record(above, making)?;
        (record.parent, record.name) = (place.parent, place.name.into());
        record.stamp = self.take_stamp();
        let stamp = record.stamp;
        touch(handle, &mut record);
        let entry = self.entry(&record, extra.as_deref(), making.lifetime);
        let rid = self.records.insert_with(record, extra);
        part.insert(place.key, rid);
        place.entries.push(stamp, rid);
        place.dir.count.fetch_add(1, Ordering::Relaxed);
        place.dir.subdirs.fetch_add(is_dir.into(), Ordering::Relaxed);
        Ok(entry)
    }

    /// Fails with `ENOSPC` if numbers are used up. Only a forged image comes near: a mount would
    /// refuse an inode with such a number.
    pub(super) fn check_numbers(&self) -> Result<()> {
        let newest = |number: &AtomicU64| number.load(Ordering::Relaxed);
        match newest(&self.next_ino).max(newest(&self.next_stamp)) < LAST_NEW {
            true => Ok(()),
            false => Err(Errno::ENOSPC),
        }
    }

    pub(super) fn take_stamp(&self) -> u64 {
        self.next_stamp.fetch_add(1, Ordering::Relaxed)
    }

    /// Makes a file without a name in the file system of `parent`, with one lookup.
    pub(crate) fn make_nameless(
        &self,
        parent: u64,
        making: InodeCreation<'_>,
        linkable: bool,
    ) -> Result<Entry> {
        let above = self.parent_directory(parent)?;
        if above.dir.is_dead() {
            return Err(Errno::ENOENT);
        }
        self.check_numbers()?;
        self.check_slots()?;
        let (mut record, extra) = self.new_record(&above, making)?;
        record.linkable = linkable;
        let entry = self.entry(&record, extra.as_deref(), making.lifetime);
        self.records.insert_with(record, extra);
        Ok(entry)
    }

    fn new_record(
        &self,
        above: &ParentDirectory,
        making: InodeCreation<'_>,
    ) -> Result<(InodeRecord, Option<Box<RecordExtra>>)> {
        let node = making.node;
        let from = CreateParent {
            perm: above.perm,
            gid: above.gid,
            default_acl: above.default_acl.as_ref(),
        };
        let made = new_inode(from, node, making.keeps_sgid);
        let extra = self.inherit_attributes(&made, node)?;
        let size = making.target.map_or(0, |target| target.len() as u64);
        let others = extra.as_ref().map_or(0, |extra| extra.bytes());
        let content = |data| -> Result<SharedContent> {
            let content = FileContent::new(data, size);
            lock(&content).promise_others(&self.pool, others)?;
            Ok(content)
        };
        let body = match (node.kind, making.target) {
            (FileKind::Symlink, Some([])) => return Err(Errno::ENOENT),
            (FileKind::Symlink, Some(target)) if target.len() > TARGET_MAX => {
                return Err(Errno::ENAMETOOLONG);
            }
            (FileKind::Symlink, Some(target)) => {
                let content = content(InodeData::Target(target.to_vec()))?;
                RecordBody::Live(Arc::new(LiveContent::new(content, 0, 0)))
            }
            (FileKind::Symlink, None) => return Err(Errno::EINVAL),
            (FileKind::Directory, _) => {
                let content = content(InodeData::Nothing)?;
                RecordBody::Directory(Arc::new(DirectoryState {
                    content,
                    ..DirectoryState::default()
                }))
            }
            // A live content must record where the overflow records lie.
            (kind, _) if extra.is_some() => {
                let is_file = kind == FileKind::Regular;
                let data = if is_file { InodeData::Inline(Vec::new()) } else { InodeData::Nothing };
                let content = content(data)?;
                RecordBody::Live(Arc::new(LiveContent::new(content, 0, node.rdev)))
            }
            _ if node.rdev != 0 => RecordBody::Device(node.rdev),
            _ => RecordBody::Stored,
        };
        let ino = self.next_ino.fetch_add(1, Ordering::Relaxed);
        let mode = node.kind.mode_bits() | made.perm;
        let mut record = InodeRecord::new(ino, mode, (node.uid, made.gid), body);
        record.size = size;
        record.opens = if making.opens { UseCount::new_single() } else { UseCount::default() };
        // The present time fits into a record without an extra.
        let changing =
            &mut ChangingRecord { record: &mut record, extras: &mut Default::default(), at: 0 };
        let now = self.now().into();
        for time in [TimeKind::Access, TimeKind::Modification, TimeKind::Change, TimeKind::Birth] {
            changing.set_time(time, now);
        }
        record.has_extra = extra.is_some();
        Ok((record, extra))
    }

    /// The attributes that a new inode has from its directory and from its creator.
    fn inherit_attributes(
        &self,
        made: &NewInode,
        node: &NewNode<'_>,
    ) -> Result<Option<Box<RecordExtra>>> {
        let mut extra: Option<Box<RecordExtra>> = None;
        let mut set = |name: &[u8], value: &[u8]| {
            let xattrs = &mut extra.get_or_insert_default().xattrs;
            xattrs.set(name, value, SetXattrFlags::default(), |_| Ok(()))
        };
        for (name, acl) in [(ACCESS, &made.access_acl), (DEFAULT, &made.default_acl)] {
            if let Some(acl) = acl {
                set(name, &acl.to_bytes())?;
            }
        }
        if let Some((name, value)) = node.security {
            set(name.as_bytes(), value)?;
        }
        Ok(extra)
    }

    /// Gives an inode another name.
    pub(crate) fn link(
        &self,
        handle: &GroupReadGuard<'_>,
        (ino, content): (u64, &Mutex<FileContent>),
        (parent, name): (u64, Name<'_>),
        lifetime: AnswerLifetime,
    ) -> Result<Entry> {
        let name = name.as_bytes();
        let check = |record: &InodeRecord| match record.directory() {
            Some(_) => Err(Errno::EPERM),
            None if !record.is_named() && !record.linkable => Err(Errno::ENOENT),
            None => Ok(()),
        };
        // A name that is taken comes before a file that cannot be linked, as in the kernel.
        self.records.with_inode(ino, |record, _| match record.directory() {
            Some(_) => Err(Errno::EPERM),
            None => Ok(()),
        })?;
        let dir = self.directory(parent)?;
        let mut entries = lock(&dir.entries);
        if dir.is_dead() {
            return Err(Errno::ENOENT);
        }
        let mut held = lock(content);
        let key = self.index.key(parent, name);
        let mut part = self.index.write(key);
        if self.find(&part, key, parent, name).is_some() {
            return Err(Errno::EEXIST);
        }
        let now = self.now();
        let rid = self.records.find(ino)?;
        self.check_numbers()?;
        let stamp = self.take_stamp();
        let ((), _) = self.records.change_at(rid, |mut changing| {
            check(changing.record)?;
            if changing.links() >= LINK_MAX {
                return Err(Errno::EMLINK);
            }
            if changing.record.is_named() {
                let others = held.bytes_of_other_records() + link_bytes(name);
                held.promise_others(&self.pool, others)?;
                settle(&mut changing, held.summarize());
            }
            changing.add_link(parent, stamp, name);
            changing.record.linkable = false;
            changing.set_time(TimeKind::Change, now.into());
            list(handle, changing.record);
            Ok(())
        })?;
        part.insert(key, rid);
        drop(part);
        entries.push(stamp, rid);
        dir.count.fetch_add(1, Ordering::Relaxed);
        self.record_name_change(parent, &dir, now);
        self.records.with_record(rid, |record, extra| Ok(self.entry(record, extra, lifetime)))
    }
}
