//! Set-user-id and set-group-id before a change of data.
//!
//! With `HANDLE_KILLPRIV_V2` the file system clears these bits during WRITE, FALLOCATE or
//! COPY_FILE_RANGE. The kernel continues with its cached mode, the only one that execve(2) reads.
//! Before the change, however, `file_remove_privs` (`fs/inode.c`) sends a SETATTR without any valid
//! field (`fuse_setattr` in `fs/fuse/dir.c` removes the mode), and the kernel caches the mode of
//! the reply. This module clears the bits at that request. The kernel thus never has new data with
//! the old mode.
//!
//! chown(2) without a change of owner or group sends the same request, and only the owner may do
//! that. If the file is not open for writing, the request is a chown ([`WriterCounts`]). Otherwise
//! the bits are cleared for the owner, for root, and for users with write permission, who could
//! clear them anyway. For other users only the reply has no bits; the write itself, through a
//! descriptor that was passed to them, clears them.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use defuse_fs::posix::{self, PosixUser, drop_set_id};
use defuse_fs::{Attr, Context, Errno, FileSystem, Ino, Result, SetAttr, Xattr, XattrName};

use defuse_wire::abi;
use defuse_wire::convert::has_set_id;

const SGID: u32 = 0o2000;
const GROUP_EXEC: u32 = 0o010;

/// True for a SETATTR that requests [`clear`]: it has no valid field, except for the open file.
pub(super) fn is_clear_request(args: &abi::SetattrIn) -> bool {
    args.valid & !(abi::FATTR_FH | abi::FATTR_LOCKOWNER) == 0 || is_chown(args)
}

/// True for a SETATTR that is certainly a chown(2). With write-back the kernel keeps the times, and
/// sends only the change time.
pub(super) fn is_chown(args: &abi::SetattrIn) -> bool {
    args.valid & !abi::FATTR_FH == abi::FATTR_CTIME
}

/// Checks if the kernel may remove the file capabilities of `ino` for a caller, which it does
/// before a change of data and at a chown(2). Fails with `EPERM` for a chown(2) by a user without
/// write permission, and with the errors of getattr.
pub(super) fn may_lose_capabilities(
    fs: &dyn FileSystem,
    cx: &Context<'_>,
    ino: Ino,
    is_written: bool,
) -> Result<()> {
    let attr = fs.getattr(cx, ino, None)?;
    let user = CallerGroups::from_context(cx);
    let refused = has_set_id(&attr)
        && drop_set_id(attr.perm, user.in_group(attr.gid)) != attr.perm
        && !is_written
        && !may_clear(fs, cx, (ino, &attr), &user)?;
    if refused { Err(Errno::EPERM) } else { Ok(()) }
}

/// Clears the bits of `ino` if the caller has the right to, and returns the attributes for the
/// kernel's cache, always without the bits. `is_written`: the file is open for writing. Fails with
/// `EPERM` for a chown(2) by another user than the owner, and with the errors of getattr and
/// setattr.
pub(super) fn clear(
    fs: &dyn FileSystem,
    cx: &Context<'_>,
    ino: Ino,
    is_written: bool,
) -> Result<Attr> {
    let attr = fs.getattr(cx, ino, None)?;
    if !has_set_id(&attr) {
        return Ok(attr);
    }
    let user = CallerGroups::from_context(cx);
    let perm = drop_set_id(attr.perm, user.in_group(attr.gid));
    let uid = cx.caller.uid;
    if perm != attr.perm && !is_written && uid != 0 && uid != attr.uid {
        return Err(Errno::EPERM);
    }
    if !may_clear(fs, cx, (ino, &attr), &user)? {
        return Ok(Attr { perm, ..attr });
    }
    // Set-group-id without execution by the group depends on the groups of the caller, which the
    // file system does not know. In all other cases it clears the bits at a change of owner,
    // atomically.
    let by_group = attr.perm & (SGID | GROUP_EXEC) == SGID;
    let set = match by_group {
        true => SetAttr { perm: Some(perm), ..SetAttr::default() },
        false => SetAttr { uid: Some(attr.uid), kill_suidgid: true, ..SetAttr::default() },
    };
    fs.setattr(cx, ino, None, &set)
}

fn may_clear(
    fs: &dyn FileSystem,
    cx: &Context<'_>,
    (ino, attr): (Ino, &Attr),
    user: &CallerGroups,
) -> Result<bool> {
    let uid = cx.caller.uid;
    if uid == 0 || uid == attr.uid {
        return Ok(true);
    }
    let mut list = None;
    if fs.caps().posix_acl && posix::consults_acl(user, attr) {
        let name = XattrName::new(b"system.posix_acl_access")?;
        list = match fs.getxattr(cx, ino, name, 1 << 16) {
            Ok(Xattr::Value(list)) => Some(list),
            Ok(Xattr::Size(_)) => return Err(Errno::EIO),
            Err(Errno::ENODATA | Errno::EOPNOTSUPP | Errno::ENOSYS) => None,
            Err(errno) => return Err(errno),
        };
    }
    Ok(posix::permits(user, attr, list.as_deref(), posix::WRITE))
}

/// The caller of a request, with its known groups.
struct CallerGroups {
    uid: u32,
    groups: Vec<u32>,
}

impl CallerGroups {
    fn from_context(cx: &Context<'_>) -> CallerGroups {
        let mut groups = cx.supplementary_groups().unwrap_or_default();
        groups.push(cx.caller.gid);
        CallerGroups { uid: cx.caller.uid, groups }
    }
}

impl posix::PosixUser for CallerGroups {
    fn uid(&self) -> u32 {
        self.uid
    }

    fn in_group(&self, gid: u32) -> bool {
        self.groups.contains(&gid)
    }
}

/// The number of open files for writing of each inode.
#[derive(Default)]
pub(super) struct WriterCounts {
    /// The sum of all counts. While it is 0, no shard is locked.
    total: AtomicUsize,
    shards: [Mutex<HashMap<Ino, u32>>; SHARDS],
}

const SHARDS: usize = 16;

impl WriterCounts {
    pub(super) fn record_open(&self, ino: Ino) {
        self.total.fetch_add(1, Ordering::Relaxed);
        *self.shard(ino).entry(ino).or_default() += 1;
    }

    pub(super) fn record_close(&self, ino: Ino) {
        let mut shard = self.shard(ino);
        if let Some(count) = shard.get_mut(&ino) {
            *count -= 1;
            self.total.fetch_sub(1, Ordering::Relaxed);
            if *count == 0 {
                shard.remove(&ino);
            }
        }
    }

    pub(super) fn has_any(&self, ino: Ino) -> bool {
        self.total.load(Ordering::Relaxed) > 0 && self.shard(ino).contains_key(&ino)
    }

    fn shard(&self, ino: Ino) -> MutexGuard<'_, HashMap<Ino, u32>> {
        let shard = &self.shards[ino.0 as usize % SHARDS];
        shard.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_change_of_anything_is_no_request_to_clear() {
        let with = |valid| abi::SetattrIn { valid, ..abi::SetattrIn::default() };
        assert!(is_clear_request(&with(abi::FATTR_CTIME)));
        assert!(is_clear_request(&with(0)) && is_clear_request(&with(abi::FATTR_FH)));
        for valid in [abi::FATTR_MODE, abi::FATTR_SIZE | abi::FATTR_FH, abi::FATTR_MTIME] {
            assert!(!is_clear_request(&with(valid)), "{valid}");
        }
    }
}
