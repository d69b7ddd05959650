//! With `HANDLE_KILLPRIV_V2` the file system clears the bits while it handles WRITE, FALLOCATE or
//! COPY_FILE_RANGE, and the kernel goes on with the mode that it knew: execve(2) looks at nothing
//! else. But first, as file_remove_privs of `fs/inode.c` makes it, the kernel sends a SETATTR in
//! which nothing is valid (fuse_setattr of `fs/fuse/dir.c` strikes the change of the mode out), and
//! takes the mode of the answer for its own. The bits are cleared then, so that no moment is left
//! in which the data is new and the mode that the kernel believes is old.
//!
//! chown(2) that changes neither owner nor group looks the same, and is refused to others than the
//! owner. Where nobody has the file open for writing it can be nothing else ([`Writers`]). Otherwise the
//! bits are cleared for the owner, root, and whoever may write to the file and could clear them anyway;
//! for others the answer alone has no bits, and a write through a descriptor from elsewhere clears them
//! itself.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use defuse_fs::posix::{self, User, without_set_id};
use defuse_fs::{Attr, Context, Errno, FileSystem, Ino, Result, SetAttr, Xattr, XattrName};

use defuse_wire::abi;
use defuse_wire::convert::has_set_id;

const SGID: u32 = 0o2000;
const GROUP_EXEC: u32 = 0o010;

/// True for a SETATTR that asks for [`clear`]: nothing in it is valid but the open file.
pub(super) fn asks_to_clear(args: &abi::SetattrIn) -> bool {
    args.valid & !(abi::FATTR_FH | abi::FATTR_LOCKOWNER) == 0 || is_chown(args)
}

/// True for a SETATTR that is certainly a chown(2): a kernel that keeps the times, with a write cache,
/// sends the change time with it, and nothing else.
pub(super) fn is_chown(args: &abi::SetattrIn) -> bool {
    args.valid & !abi::FATTR_FH == abi::FATTR_CTIME
}

/// Decides if the kernel may remove the file capabilities of `ino` for a caller. It does so before a
/// change of data, and at a chown(2).
///
/// # Errors
///
/// `EPERM` for a chown(2) by somebody who could not change the data either; what the file system answers
/// to getattr.
pub(super) fn may_lose_capabilities(
    fs: &dyn FileSystem,
    cx: &Context<'_>,
    ino: Ino,
    is_written: bool,
) -> Result<()> {
    let attr = fs.getattr(cx, ino, None)?;
    let user = Asking::of(cx);
    let refused = has_set_id(&attr)
        && without_set_id(attr.perm, user.in_group(attr.gid)) != attr.perm
        && !is_written
        && !may_clear(fs, cx, (ino, &attr), &user)?;
    if refused { Err(Errno::EPERM) } else { Ok(()) }
}

/// Clears the bits of `ino` as far as the caller may, and returns the attributes that the kernel
/// is to believe: without the bits in any case. `is_written` says that somebody has the file open for
/// writing.
///
/// # Errors
///
/// `EPERM` for a chown(2) by somebody else than the owner, and what the file system answers to getattr
/// and setattr.
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
    let user = Asking::of(cx);
    let perm = without_set_id(attr.perm, user.in_group(attr.gid));
    let uid = cx.caller.uid;
    if perm != attr.perm && !is_written && uid != 0 && uid != attr.uid {
        return Err(Errno::EPERM);
    }
    if !may_clear(fs, cx, (ino, &attr), &user)? {
        return Ok(Attr { perm, ..attr });
    }
    // Set-group-id without execution by the group goes or stays by the groups of the caller, which
    // the file system does not know. All else is what it does at a change of owner, at once.
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
    user: &Asking,
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

/// The caller of a request, with the groups that can be found out.
struct Asking {
    uid: u32,
    groups: Vec<u32>,
}

impl Asking {
    fn of(cx: &Context<'_>) -> Asking {
        let mut groups = cx.supplementary_groups().unwrap_or_default();
        groups.push(cx.caller.gid);
        Asking { uid: cx.caller.uid, groups }
    }
}

impl posix::User for Asking {
    fn uid(&self) -> u32 {
        self.uid
    }

    fn in_group(&self, gid: u32) -> bool {
        self.groups.contains(&gid)
    }
}

/// How often each inode is open for writing.
#[derive(Default)]
pub(super) struct Writers {
    /// All counts together: while nothing is open for writing, no shard is locked.
    total: AtomicUsize,
    shards: [Mutex<HashMap<Ino, u32>>; SHARDS],
}

const SHARDS: usize = 16;

impl Writers {
    pub(super) fn opened(&self, ino: Ino) {
        self.total.fetch_add(1, Ordering::Relaxed);
        *self.shard(ino).entry(ino).or_default() += 1;
    }

    pub(super) fn closed(&self, ino: Ino) {
        let mut shard = self.shard(ino);
        if let Some(count) = shard.get_mut(&ino) {
            *count -= 1;
            self.total.fetch_sub(1, Ordering::Relaxed);
            if *count == 0 {
                shard.remove(&ino);
            }
        }
    }

    pub(super) fn any(&self, ino: Ino) -> bool {
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
        assert!(asks_to_clear(&with(abi::FATTR_CTIME)));
        assert!(asks_to_clear(&with(0)) && asks_to_clear(&with(abi::FATTR_FH)));
        for valid in [abi::FATTR_MODE, abi::FATTR_SIZE | abi::FATTR_FH, abi::FATTR_MTIME] {
            assert!(!asks_to_clear(&with(valid)), "{valid}");
        }
    }
}
