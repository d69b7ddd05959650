//! The calls on extended attributes, xattr(7).

mod list;

use defuse_fs::posix::acl::Acl;
use defuse_fs::{Errno, FileKind, Result, SetXattrFlags, Timestamp, Xattr, XattrName};

use super::record::{ChangingRecord, InodeRecord, RecordExtra, TimeKind};
use super::{NameStore, settle, touch};
use crate::content::FileContent;
use crate::group::GroupReadGuard;
pub(super) use list::{ACCESS, DEFAULT, XattrList};

/// Set-group-id.
const SGID: u32 = 0o2000;

/// Checks the name space of an attribute of `record`. Fails with `EOPNOTSUPP` for a name space that
/// is not supported and for an ACL of a symbolic link, and with `EINVAL` for a name without
/// anything after the prefix.
fn check_name(record: &InodeRecord, name: &[u8]) -> Result<()> {
    if name == ACCESS || name == DEFAULT {
        return match record.kind() {
            FileKind::Symlink => Err(Errno::EOPNOTSUPP),
            _ => Ok(()),
        };
    }
    for namespace in [&b"user."[..], b"trusted.", b"security."] {
        match name.strip_prefix(namespace) {
            Some([]) => return Err(Errno::EINVAL),
            Some(_) => return Ok(()),
            None => {}
        }
    }
    Err(Errno::EOPNOTSUPP)
}

impl NameStore {
    /// Sets an attribute of an inode with its content.
    pub(crate) fn setxattr(
        &self,
        handle: &GroupReadGuard<'_>,
        (ino, content): (u64, &mut FileContent),
        (name, value): (XattrName<'_>, &[u8]),
        flags: SetXattrFlags,
    ) -> Result<()> {
        let name = name.as_bytes();
        self.records.change(ino, |mut changing| {
            check_name(changing.record, name)?;
            let kind = changing.record.kind();
            let keeps = matches!(kind, FileKind::Regular | FileKind::Directory);
            if name.starts_with(b"user.") && !keeps {
                return Err(Errno::EPERM);
            }
            let links = changing.extra().map_or(0, RecordExtra::link_bytes);
            let _change = self.change_of_rights(changing.record, name == ACCESS);
            let promise = |bytes| content.promise_others(&self.pool, links + bytes);
            let done = match name {
                ACCESS | DEFAULT => set_acl(&mut changing, (name, value), flags, promise),
                _ => changing.make_extra().xattrs.set(name, value, flags, promise),
            };
            changing.drop_empty_extra();
            done?;
            settle(&mut changing, content.summarize());
            record_change(handle, changing, self.now());
            Ok(())
        })
    }

    pub(crate) fn getxattr(&self, ino: u64, name: XattrName<'_>, room: usize) -> Result<Xattr> {
        self.records.with_inode(ino, |record, extra| {
            check_name(record, name.as_bytes())?;
            let value = extra.and_then(|extra| extra.xattrs.get(name.as_bytes()));
            Xattr::answer(value.ok_or(Errno::ENODATA)?.to_vec(), room)
        })
    }

    /// Lists the names of attributes; names of the name space `trusted` only if `trusted` is set.
    pub(crate) fn listxattr(&self, ino: u64, trusted: bool, room: usize) -> Result<Xattr> {
        self.records.with_inode(ino, |_, extra| {
            let mut names = Vec::new();
            for (name, _) in extra.iter().flat_map(|extra| extra.xattrs.iter()) {
                if trusted || !name.starts_with(b"trusted.") {
                    names.extend_from_slice(name);
                    names.push(0);
                }
            }
            Xattr::answer(names, room)
        })
    }

    /// Removes an attribute of an inode whose content is in memory. Removing an ACL that does not
    /// exist succeeds, as on every file system of Linux.
    pub(crate) fn removexattr(
        &self,
        handle: &GroupReadGuard<'_>,
        ino: u64,
        name: XattrName<'_>,
    ) -> Result<()> {
        let name = name.as_bytes();
        self.records.change(ino, |mut changing| {
            check_name(changing.record, name)?;
            let _change = self.change_of_rights(changing.record, name == ACCESS);
            let there = changing.record.has_extra && changing.make_extra().xattrs.remove(name);
            if !there && name != ACCESS && name != DEFAULT {
                return Err(Errno::ENODATA);
            }
            changing.drop_empty_extra();
            record_change(handle, changing, self.now());
            Ok(())
        })
    }
}

fn set_acl(
    changing: &mut ChangingRecord<'_>,
    (name, value): (&[u8], &[u8]),
    flags: SetXattrFlags,
    promise: impl FnOnce(usize) -> Result<()>,
) -> Result<()> {
    let acl = Acl::parse(value)?;
    let is_dir = changing.record.directory().is_some();
    if name == DEFAULT && !is_dir && acl.is_some() {
        return Err(Errno::EACCES);
    }
    let xattrs = &mut changing.make_extra().xattrs;
    list::check_flags(xattrs.get(name).is_some(), flags)?;
    // An access ACL that is equivalent to the mode is not stored.
    match acl.as_ref().filter(|acl| name == DEFAULT || !acl.is_minimal()) {
        Some(acl) => xattrs.set(name, &acl.to_bytes(), SetXattrFlags::default(), promise)?,
        None => drop(xattrs.remove(name)),
    }
    if let Some(acl) = acl.filter(|_| name == ACCESS) {
        let record = &mut *changing.record;
        let kept = if flags.clear_sgid { !(0o777 | SGID) } else { !0o777 };
        record.set_perm(record.perm() & kept | acl.perm());
    }
    Ok(())
}

/// Updates the change time, and adds the inode to the running group.
fn record_change(handle: &GroupReadGuard<'_>, mut changing: ChangingRecord<'_>, now: Timestamp) {
    changing.settle_times();
    changing.set_time(TimeKind::Change, now.into());
    touch(handle, changing.record);
}

/// The default ACL of a directory.
pub(super) fn default_acl(extra: Option<&RecordExtra>) -> Option<Acl> {
    extra.and_then(|extra| extra.xattrs.acl(DEFAULT))
}
