//! Operations that remove names.

use std::sync::atomic::Ordering;

use defuse_fs::{Errno, Ino, Name, Result, Timestamp};

use super::index::IndexTable;
use super::make::LockedName;
use super::order::RecordId;
use super::record::{InodeRecord, TimeKind};
use super::{NameStore, list};
use crate::group::GroupReadGuard;
use crate::locks::lock;

impl NameStore {
    /// Removes a name. Returns the inode that had it.
    pub(crate) fn unlink(
        &self,
        handle: &GroupReadGuard<'_>,
        parent: u64,
        name: Name<'_>,
    ) -> Result<Ino> {
        let name = name.as_bytes();
        let dir = self.directory(parent)?;
        let mut entries = lock(&dir.entries);
        let key = self.index.key(parent, name);
        let mut part = self.index.write(key);
        let rid = self.find(&part, key, parent, name).ok_or(Errno::ENOENT)?;
        let now = self.now();
        let place = LockedName { parent, name, dir: &dir, entries: &mut entries, key };
        let (ino, gone) = self.drop_name(handle, place, &mut part, (rid, now), false)?;
        drop(part);
        self.record_name_change(parent, &dir, now);
        drop(entries);
        self.end(gone);
        Ok(Ino(ino))
    }

    /// Removes a directory. Returns its inode.
    pub(crate) fn rmdir(
        &self,
        handle: &GroupReadGuard<'_>,
        parent: u64,
        name: Name<'_>,
    ) -> Result<Ino> {
        let name = name.as_bytes();
        let dir = self.directory(parent)?;
        let key = self.index.key(parent, name);
        loop {
            let rid = self.find(&self.index.read(key), key, parent, name).ok_or(Errno::ENOENT)?;
            let seen = self
                .records
                .with_record(rid, |record, _| Ok((record.ino, record.directory().cloned())));
            let Ok((ino, child)) = seen else { continue };
            let child = child.ok_or(Errno::ENOTDIR)?;
            // The locks are taken in the order of inode numbers.
            let (mut entries, children) = match parent < ino {
                true => {
                    let entries = lock(&dir.entries);
                    (entries, lock(&child.entries))
                }
                false => {
                    let children = lock(&child.entries);
                    (lock(&dir.entries), children)
                }
            };
            let mut part = self.index.write(key);
            if self.find(&part, key, parent, name) != Some(rid)
                || self.records.with_record(rid, |record, _| Ok(record.ino)) != Ok(ino)
            {
                continue;
            }
            if child.count.load(Ordering::Relaxed) != 0 {
                return Err(Errno::ENOTEMPTY);
            }
            let _change = self.paths.change();
            child.dead.store(true, Ordering::Release);
            let now = self.now();
            let place = LockedName { parent, name, dir: &dir, entries: &mut entries, key };
            let (_, gone) = self.drop_name(handle, place, &mut part, (rid, now), true)?;
            drop(part);
            self.record_name_change(parent, &dir, now);
            drop((entries, children));
            self.end(gone);
            return Ok(Ino(ino));
        }
    }

    /// Removes a name, and returns the inode, with its record if it is removed with the name.
    /// `EISDIR` for a directory, unless `of_dir` is set.
    pub(super) fn drop_name(
        &self,
        handle: &GroupReadGuard<'_>,
        place: LockedName<'_>,
        part: &mut IndexTable,
        (rid, now): (RecordId, Timestamp),
        of_dir: bool,
    ) -> Result<(u64, Option<InodeRecord>)> {
        let ((ino, stamp, is_dir), gone) = self.records.change_at(rid, |mut changing| {
            let is_dir = changing.record.directory().is_some();
            if is_dir && !of_dir {
                return Err(Errno::EISDIR);
            }
            let stamp = changing.remove_link(place.parent, place.name).ok_or(Errno::EIO)?;
            changing.settle_times();
            changing.set_time(TimeKind::Change, now.into());
            match changing.record.is_named() {
                true => list(handle, changing.record),
                false => handle.add_removed(changing.record.ino),
            }
            Ok((changing.record.ino, stamp, is_dir))
        })?;
        part.remove(place.key, rid);
        place.entries.remove(stamp);
        place.dir.count.fetch_sub(1, Ordering::Relaxed);
        place.dir.subdirs.fetch_sub(is_dir.into(), Ordering::Relaxed);
        Ok((ino, gone))
    }
}
