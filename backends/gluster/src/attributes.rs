//! Attributes: from and to `struct stat`.

use std::time::Duration;

use defuse_fs::{Attr, Errno, FileKind, Result, SetAttr, SetTime, StatFs, Timestamp};

use crate::volume::{set, zeroed_stat};

/// The size of an efficient request, as in GlusterFS's own client. Servers do not agree on a size:
/// the size in their answers about one file differs.
const BLOCK: u32 = 128 << 10;

/// The attributes in `stat`. They may be cached for `valid_for`. Fails with `EIO` for an unknown
/// kind.
pub fn attr(stat: &libc::stat, valid_for: Duration) -> Result<Attr> {
    let time =
        |secs: i64, nanos: i64| Timestamp { secs, nanos: nanos.clamp(0, 999_999_999) as u32 };
    let kind = FileKind::from_mode(stat.st_mode).ok_or(Errno::EIO)?;
    let is_device = matches!(kind, FileKind::CharDevice | FileKind::BlockDevice);
    Ok(Attr {
        st_ino: stat.st_ino,
        kind,
        perm: stat.st_mode & 0o7777,
        nlink: u32::try_from(stat.st_nlink).unwrap_or(u32::MAX),
        uid: stat.st_uid,
        gid: stat.st_gid,
        rdev: if is_device { stat.st_rdev } else { 0 },
        size: stat.st_size.max(0) as u64,
        blocks: stat.st_blocks.max(0) as u64,
        blksize: BLOCK,
        atime: time(stat.st_atime, stat.st_atime_nsec),
        mtime: time(stat.st_mtime, stat.st_mtime_nsec),
        ctime: time(stat.st_ctime, stat.st_ctime_nsec),
        btime: None,
        valid_for,
    })
}

/// The new values in `change`, except the size, and a bit for each value that is set.
pub fn changes(change: &SetAttr) -> (libc::stat, i32) {
    let (mut stat, mut valid) = (zeroed_stat(), 0);
    if let Some(perm) = change.perm {
        stat.st_mode = perm & 0o7777;
        valid |= set::MODE;
    }
    if let Some(uid) = change.uid {
        stat.st_uid = uid;
        valid |= set::UID;
    }
    if let Some(gid) = change.gid {
        stat.st_gid = gid;
        valid |= set::GID;
    }
    if let Some(time) = change.atime {
        (stat.st_atime, stat.st_atime_nsec) = timespec(time);
        valid |= set::ATIME;
    }
    if let Some(time) = change.mtime {
        (stat.st_mtime, stat.st_mtime_nsec) = timespec(time);
        valid |= set::MTIME;
    }
    (stat, valid)
}

/// Attributes after a change of the values that are set, for a frontend that has those before.
/// `None` if the servers may make another change at the same time: they drop set-user-id and
/// set-group-id. The time of the change is unknown, so that the frontend may not keep the
/// attributes.
pub fn with_changes(
    before: Attr,
    size: Option<u64>,
    (stat, valid): (&libc::stat, i32),
) -> Option<Attr> {
    const SET_ID: u32 = 0o6000;
    let has = |bit| valid & bit != 0;
    let perm = if has(set::MODE) { stat.st_mode } else { before.perm };
    let time = |secs, nanos: i64| Timestamp { secs, nanos: nanos as u32 };
    let now = Timestamp::now();
    let mtime = if size.is_some() { now } else { before.mtime };
    ((before.perm | perm) & SET_ID == 0).then_some(Attr {
        perm,
        uid: if has(set::UID) { stat.st_uid } else { before.uid },
        gid: if has(set::GID) { stat.st_gid } else { before.gid },
        atime: if has(set::ATIME) { time(stat.st_atime, stat.st_atime_nsec) } else { before.atime },
        mtime: if has(set::MTIME) { time(stat.st_mtime, stat.st_mtime_nsec) } else { mtime },
        ctime: now,
        size: size.unwrap_or(before.size),
        valid_for: Duration::ZERO,
        ..before
    })
}

fn timespec(time: SetTime) -> (i64, i64) {
    let time = match time {
        SetTime::Now => Timestamp::now(),
        SetTime::At(time) => time,
    };
    (time.secs, i64::from(time.nanos))
}

/// Space and inodes.
pub fn space(found: &libc::statvfs) -> StatFs {
    let small = |value: u64| u32::try_from(value).unwrap_or(u32::MAX);
    StatFs {
        blocks: found.f_blocks,
        blocks_free: found.f_bfree,
        blocks_available: found.f_bavail,
        files: found.f_files,
        files_free: found.f_ffree,
        bsize: small(found.f_bsize),
        frsize: small(found.f_frsize),
        name_max: small(found.f_namemax).min(255),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_changes_that_are_set_are_made() {
        assert_eq!(changes(&SetAttr::default()).1, 0);
        let time = SetTime::At(Timestamp { secs: -5, nanos: 7 });
        let change = SetAttr { perm: Some(0o4711), mtime: Some(time), ..SetAttr::default() };
        let (stat, valid) = changes(&change);
        assert_eq!(valid, set::MODE | set::MTIME);
        assert_eq!((stat.st_mode, stat.st_mtime, stat.st_mtime_nsec), (0o4711, -5, 7));
    }

    #[test]
    fn a_change_without_set_id_bits_has_a_known_result() {
        let mut stat = zeroed_stat();
        (stat.st_mode, stat.st_size) = (libc::S_IFREG | 0o640, 9);
        let before = attr(&stat, Duration::from_secs(7)).unwrap();
        let change = SetAttr { perm: Some(0o600), uid: Some(5), ..SetAttr::default() };
        let (stat, valid) = changes(&change);
        let after = with_changes(before, None, (&stat, valid)).unwrap();
        assert_eq!((after.perm, after.uid, after.gid, after.size), (0o600, 5, 0, 9));
        assert_eq!((after.valid_for, after.mtime), (Duration::ZERO, before.mtime));
        assert_eq!(with_changes(Attr { perm: 0o4711, ..before }, None, (&stat, valid)), None);
        let (stat, valid) = changes(&SetAttr { perm: Some(0o2711), ..SetAttr::default() });
        assert_eq!(with_changes(before, None, (&stat, valid)), None);
        let (stat, valid) = changes(&SetAttr::default());
        let after = with_changes(before, Some(3), (&stat, valid)).unwrap();
        assert_eq!((after.size, after.perm, after.mtime), (3, 0o640, after.ctime));
    }

    #[test]
    fn attributes_of_an_unknown_kind_are_an_error() {
        let mut stat = zeroed_stat();
        assert_eq!(attr(&stat, Duration::ZERO), Err(Errno::EIO));
        (stat.st_mode, stat.st_size, stat.st_blksize) = (libc::S_IFREG | 0o4755, 9, 4096);
        let read = attr(&stat, Duration::ZERO).unwrap();
        assert_eq!((read.kind, read.perm, read.size), (FileKind::Regular, 0o4755, 9));
        assert_eq!(read.blksize, BLOCK);
    }
}
