//! Attributes.

use std::time::Duration;

use defuse_fs::posix::{AccessTimeRule, drop_set_id};
use defuse_fs::{Attr, Errno, FileKind, Result, SetAttr, SetTime, Timestamp};

use super::paths::DirectoryChange;
use super::record::{ChangingRecord, InodeRecord, TimeKind};
use super::{NameStore, list, list_data, settle, touch};
use crate::content::ContentSummary;
use crate::group::GroupReadGuard;

impl NameStore {
    /// Changes attributes. The content has the new size already, and `content` is its new summary.
    /// The answer may be cached for `valid_for`.
    pub(crate) fn setattr(
        &self,
        handle: &GroupReadGuard<'_>,
        ino: u64,
        set: &SetAttr,
        content: Option<ContentSummary>,
        valid_for: Duration,
    ) -> Result<Attr> {
        let now = self.now();
        if let Some(date) = set.ctime {
            self.clock.note(date);
        }
        self.records.change(ino, |mut changing| {
            if let Some(facts) = content {
                settle(&mut changing, facts);
                changing.set_modified(now);
            }
            if !set.is_empty() {
                changing.settle_times();
                let _change = self.change_of_rights(changing.record, set.perm.is_some());
                set_owner_and_mode(&mut changing, set);
                let time = |time| match time {
                    SetTime::Now => now,
                    SetTime::At(time) => time,
                };
                for (which, set) in
                    [(TimeKind::Access, set.atime), (TimeKind::Modification, set.mtime)]
                {
                    if let Some(set) = set {
                        changing.set_time(which, time(set).into());
                    }
                }
                changing.set_time(TimeKind::Change, set.ctime.unwrap_or(now).into());
                match content {
                    Some(facts) if facts.dirty => list(handle, changing.record),
                    _ => touch(handle, changing.record),
                }
            }
            Ok(self.attr_of(changing.record, changing.extra(), valid_for))
        })
    }

    /// Begins a change of the permission to search a directory, if the record is a directory and
    /// `may` allows for such a change.
    pub(super) fn change_of_rights(
        &self,
        record: &InodeRecord,
        may: bool,
    ) -> Option<DirectoryChange<'_>> {
        (may && record.directory().is_some()).then(|| self.paths.change())
    }

    /// Fails with `EISDIR`, and with `EINVAL` for other inodes without data.
    pub(crate) fn check_data(&self, ino: u64) -> Result<()> {
        self.records.with_inode(ino, |record, _| match record.kind() {
            FileKind::Regular => Ok(()),
            FileKind::Directory => Err(Errno::EISDIR),
            _ => Err(Errno::EINVAL),
        })
    }

    /// Fails with `EINVAL` unless the inode is a symbolic link.
    pub(crate) fn check_link(&self, ino: u64) -> Result<()> {
        self.records.with_inode(ino, |record, _| match record.kind() {
            FileKind::Symlink => Ok(()),
            _ => Err(Errno::EINVAL),
        })
    }

    pub(crate) fn check_open(&self, ino: u64, writes: bool) -> Result<()> {
        self.records.with_inode(ino, |record, _| match record.kind() {
            FileKind::Directory if writes => Err(Errno::EISDIR),
            FileKind::Symlink => Err(Errno::ELOOP),
            _ => Ok(()),
        })
    }

    /// Updates the access time by the rule of the mount. The next other change of the inode writes
    /// it to the device. True if the access time has changed.
    pub(crate) fn record_access(&self, ino: u64) -> bool {
        if self.access_times == AccessTimeRule::Never {
            return false;
        }
        let now = self.now();
        let due = self.records.with_inode(ino, |record, extra| {
            let time = |time| Timestamp::from(record.time(time, extra));
            let old = time(TimeKind::Access);
            let newest = time(TimeKind::Modification).max(time(TimeKind::Change));
            Ok(self.access_times.is_due(old, newest, now))
        });
        let update = || {
            self.records.change(ino, |mut changing| {
                changing.set_time(TimeKind::Access, now.into());
                Ok(())
            })
        };
        due == Ok(true) && update().is_ok()
    }

    /// True if `clears` is, for mode and group of a file.
    pub(crate) fn is_marked(&self, ino: u64, clears: impl FnOnce(u32, u32) -> bool) -> bool {
        let found = self.records.with_inode(ino, |record, _| {
            Ok(record.directory().is_none().then(|| (record.perm(), record.gid)))
        });
        found.ok().flatten().is_some_and(|(perm, gid)| clears(perm, gid))
    }

    /// Clears set-group-id, also if the group may not execute the file.
    pub(crate) fn clear_mark(&self, handle: &GroupReadGuard<'_>, ino: u64) -> Result<()> {
        self.records.change(ino, |changing| {
            let perm = drop_set_id(changing.record.perm(), false);
            changing.record.set_perm(perm);
            touch(handle, changing.record);
            Ok(())
        })
    }

    /// Records a write, as [`settle`](NameStore::settle) does for other changes.
    pub(crate) fn record_write(
        &self,
        handle: &GroupReadGuard<'_>,
        ino: u64,
        facts: ContentSummary,
        kill_suidgid: bool,
    ) -> Result<()> {
        let now = self.now();
        self.records.change(ino, |mut changing| {
            settle(&mut changing, facts);
            changing.set_modified(now);
            if kill_suidgid {
                changing.kill_suidgid();
            }
            match facts.dirty {
                true if !kill_suidgid => list_data(handle, changing.record),
                true => list(handle, changing.record),
                false => touch(handle, changing.record),
            }
            Ok(())
        })
    }
}

fn set_owner_and_mode(changing: &mut ChangingRecord<'_>, set: &SetAttr) {
    let record = &mut *changing.record;
    let owner = set.uid.is_some() || set.gid.is_some();
    record.uid = set.uid.unwrap_or(record.uid);
    record.gid = set.gid.unwrap_or(record.gid);
    if record.directory().is_none() && (owner || set.kill_suidgid) {
        changing.kill_suidgid();
    }
    if let Some(perm) = set.perm {
        changing.chmod(perm);
    }
}
