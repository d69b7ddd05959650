//! Extended attributes, with the rules of their namespaces, xattr(7).

use defuse_fs::{Errno, FileKind, SetXattrFlags, Xattr, XattrName};
use defuse_probe::Op;

use crate::access::{NeededAccess, owns};
use crate::attributes::keeps_sgid;
use crate::call_target::CallTarget;
use crate::client::DirectClient;
use crate::credentials::{TaskCredentials, cap};
use crate::description::FileDescription;
use crate::stop::Result;
use crate::task::ClientTask;
use crate::walk::WalkStart;

/// `XATTR_SIZE_MAX`.
const VALUE_MAX: usize = 65536;
const ACL: &[u8] = b"system.posix_acl_";

impl DirectClient {
    /// Reads an attribute, getxattr(2) and lgetxattr(2). A `room` of 0 returns its size.
    pub fn getxattr(
        &self,
        task: &ClientTask,
        (at, path, follow): (WalkStart<'_>, &[u8], bool),
        name: &[u8],
        room: usize,
    ) -> Result<Xattr> {
        XattrName::new(name)?;
        let who = task.credentials();
        self.with_subject(task, &who, (at, path), follow, |found| Ok(get(found, &who, name, room)?))
    }

    /// Reads an attribute of an open file, fgetxattr(2).
    pub fn fgetxattr(
        &self,
        task: &ClientTask,
        file: &FileDescription,
        name: &[u8],
        room: usize,
    ) -> Result<Xattr> {
        file.file()?;
        Ok(get(&CallTarget::open(file), &task.credentials(), name, room)?)
    }

    /// Sets an attribute, setxattr(2) and lsetxattr(2).
    pub fn setxattr(
        &self,
        task: &ClientTask,
        (at, path, follow): (WalkStart<'_>, &[u8], bool),
        name: &[u8],
        value: &[u8],
        flags: SetXattrFlags,
    ) -> Result<()> {
        XattrName::new(name)?;
        if value.len() > VALUE_MAX {
            return Err(Errno::E2BIG.into());
        }
        let who = task.credentials();
        self.with_subject(task, &who, (at, path), follow, |found| {
            Ok(set(found, &who, name, value, flags)?)
        })
    }

    /// Sets an attribute of an open file, fsetxattr(2).
    pub fn fsetxattr(
        &self,
        task: &ClientTask,
        file: &FileDescription,
        name: &[u8],
        value: &[u8],
        flags: SetXattrFlags,
    ) -> Result<()> {
        file.file()?;
        Ok(set(&CallTarget::open(file), &task.credentials(), name, value, flags)?)
    }

    /// Lists the names of all attributes, each ending in NUL, listxattr(2) and llistxattr(2).
    pub fn listxattr(
        &self,
        task: &ClientTask,
        at: WalkStart<'_>,
        path: &[u8],
        follow: bool,
        room: usize,
    ) -> Result<Xattr> {
        let who = task.credentials();
        self.with_subject(task, &who, (at, path), follow, |found| Ok(list(found, &who, room)?))
    }

    /// Lists the names of all attributes of an open file, flistxattr(2).
    pub fn flistxattr(
        &self,
        task: &ClientTask,
        file: &FileDescription,
        room: usize,
    ) -> Result<Xattr> {
        file.file()?;
        Ok(list(&CallTarget::open(file), &task.credentials(), room)?)
    }

    /// Removes an attribute, removexattr(2) and lremovexattr(2).
    pub fn removexattr(
        &self,
        task: &ClientTask,
        (at, path, follow): (WalkStart<'_>, &[u8], bool),
        name: &[u8],
    ) -> Result<()> {
        XattrName::new(name)?;
        let who = task.credentials();
        self.with_subject(task, &who, (at, path), follow, |found| Ok(remove(found, &who, name)?))
    }

    /// Removes an attribute of an open file, fremovexattr(2).
    pub fn fremovexattr(
        &self,
        task: &ClientTask,
        file: &FileDescription,
        name: &[u8],
    ) -> Result<()> {
        file.file()?;
        Ok(remove(&CallTarget::open(file), &task.credentials(), name)?)
    }
}

fn get(
    found: &CallTarget<'_>,
    who: &TaskCredentials,
    name: &[u8],
    room: usize,
) -> Result<Xattr, Errno> {
    let checked = XattrName::new(name)?;
    may_read(found, who, name)?;
    let cx = who.context(found.mount.origin);
    let room = room.min(VALUE_MAX);
    let got = found.mount.call(Op::GETXATTR, |fs| fs.getxattr(&cx, found.ino, checked, room));
    got.map_err(crate::data::replace_enosys)
}

fn list(found: &CallTarget<'_>, who: &TaskCredentials, room: usize) -> Result<Xattr, Errno> {
    let cx = who.context(found.mount.origin);
    let room = room.min(VALUE_MAX);
    let listed = found.mount.call(Op::LISTXATTR, |fs| fs.listxattr(&cx, found.ino, room));
    match listed {
        // A file system without extended attributes has an empty list.
        Err(Errno::ENOSYS | Errno::EOPNOTSUPP) if room == 0 => Ok(Xattr::Size(0)),
        Err(Errno::ENOSYS | Errno::EOPNOTSUPP) => Ok(Xattr::Value(Vec::new())),
        listed => listed,
    }
}

fn set(
    found: &CallTarget<'_>,
    who: &TaskCredentials,
    name: &[u8],
    value: &[u8],
    flags: SetXattrFlags,
) -> Result<(), Errno> {
    let checked = XattrName::new(name)?;
    if value.len() > VALUE_MAX {
        return Err(Errno::E2BIG);
    }
    may_write(found, who, name)?;
    let mut flags = flags;
    if name == b"system.posix_acl_access" {
        let attr = found.attr(who)?;
        flags.clear_sgid = !keeps_sgid(who, attr.gid);
    }
    let cx = who.context(found.mount.origin);
    let ino = found.ino;
    let result = found.mount.call(Op::SETXATTR, |fs| fs.setxattr(&cx, ino, checked, value, flags));
    invalidate_for_xattr(found, name);
    result.map_err(crate::data::replace_enosys)
}

/// Invalidates cached data that depends on an attribute.
fn invalidate_for_xattr(found: &CallTarget<'_>, name: &[u8]) {
    found.invalidate();
    if found.is_dir() && name.starts_with(b"system.posix_acl_") {
        found.mount.record_path_change();
    }
}

fn remove(found: &CallTarget<'_>, who: &TaskCredentials, name: &[u8]) -> Result<(), Errno> {
    let checked = XattrName::new(name)?;
    may_write(found, who, name)?;
    let cx = who.context(found.mount.origin);
    let ino = found.ino;
    let result = found.mount.call(Op::REMOVEXATTR, |fs| fs.removexattr(&cx, ino, checked));
    invalidate_for_xattr(found, name);
    result.map_err(crate::data::replace_enosys)
}

fn may_read(found: &CallTarget<'_>, who: &TaskCredentials, name: &[u8]) -> Result<(), Errno> {
    if name.starts_with(b"trusted.") && !who.has(cap::SYS_ADMIN) {
        return Err(Errno::ENODATA);
    }
    if name.starts_with(b"user.") && !carries_user_names(found.kind) {
        return Err(Errno::ENODATA);
    }
    if [b"system.".as_slice(), b"security.", b"trusted."].iter().any(|own| name.starts_with(own)) {
        return Ok(());
    }
    found.check(who, NeededAccess::READ)
}

fn carries_user_names(kind: FileKind) -> bool {
    matches!(kind, FileKind::Regular | FileKind::Directory)
}

fn may_write(found: &CallTarget<'_>, who: &TaskCredentials, name: &[u8]) -> Result<(), Errno> {
    found.writable()?;
    if name.starts_with(ACL) {
        let attr = found.attr(who)?;
        return match attr.kind {
            FileKind::Symlink => Err(Errno::EOPNOTSUPP),
            _ if owns(&attr, who) => Ok(()),
            _ => Err(Errno::EPERM),
        };
    }
    if name.starts_with(b"trusted.") || name.starts_with(b"security.") {
        let needed = if name == b"security.capability" { cap::SETFCAP } else { cap::SYS_ADMIN };
        return if who.has(needed) { Ok(()) } else { Err(Errno::EPERM) };
    }
    if name.starts_with(b"user.") {
        let kind = found.kind;
        if !carries_user_names(kind) {
            return Err(Errno::EPERM);
        }
        if kind == FileKind::Directory {
            let attr = found.attr(who)?;
            if attr.perm & 0o1000 != 0 && !owns(&attr, who) {
                return Err(Errno::EPERM);
            }
        }
    }
    if name.starts_with(b"system.") {
        return Ok(());
    }
    found.check(who, NeededAccess::WRITE)
}
