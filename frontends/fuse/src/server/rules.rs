//! The rules of the kernel for users other than root, as functions of attributes and credentials:
//! inode_permission, may_delete and may_linkat of `fs/namei.c`, setattr_prepare of `fs/attr.c`,
//! vfs_utimes of `fs/utimes.c`, and xattr_permission of `fs/xattr.c`.
//!
//! A file system has no user namespaces and no capabilities of users: who is not the owner has none.

use defuse_fs::{AccessMode, Attr, Errno, FileKind, OpenFlags, Result, posix};

use super::peer::Credentials;
use defuse_wire::abi;

pub(super) use posix::{EXEC, READ, WRITE};

const SGID: u32 = 0o2000;
const STICKY: u32 = 0o1000;

impl posix::User for Credentials {
    fn uid(&self) -> u32 {
        self.uid
    }

    fn in_group(&self, gid: u32) -> bool {
        self.groups.contains(&gid)
    }
}

pub(super) fn owns(who: &Credentials, attr: &Attr) -> bool {
    posix::owns(who, attr)
}

pub(super) fn in_group(who: &Credentials, gid: u32) -> bool {
    who.groups.contains(&gid)
}

/// `EACCES` where neither the bits nor, where there is one, the access list grant `mask`.
pub(super) fn permit(who: &Credentials, attr: &Attr, list: Option<&[u8]>, mask: u32) -> Result<()> {
    if posix::permits(who, attr, list, mask) { Ok(()) } else { Err(Errno::EACCES) }
}

/// What has to be permitted to open with `flags`.
pub(super) fn open_mask(flags: OpenFlags) -> u32 {
    let mask = match flags.access() {
        AccessMode::Read => READ,
        AccessMode::Write => WRITE,
        AccessMode::ReadWrite => READ | WRITE,
    };
    mask | if flags.has(OpenFlags::TRUNC) { WRITE } else { 0 }
}

/// Refuses what no request of the kernel opens: `ENXIO` for devices, fifos and sockets, which the
/// kernel opens by itself, `EISDIR` and `ELOOP`; and `EPERM` for `O_NOATIME` on what is another's.
pub(super) fn may_open(who: &Credentials, attr: &Attr, flags: OpenFlags) -> Result<()> {
    match attr.kind {
        FileKind::Regular => {}
        FileKind::Directory if open_mask(flags) & WRITE != 0 => return Err(Errno::EISDIR),
        FileKind::Directory => {}
        FileKind::Symlink => return Err(Errno::ELOOP),
        _ => return Err(Errno::ENXIO),
    }
    if flags.has(OpenFlags::NOATIME) && !owns(who, attr) { Err(Errno::EPERM) } else { Ok(()) }
}

/// Whether a change of attributes also takes permission to write, beside what this refuses.
pub(super) fn may_set(who: &Credentials, attr: &Attr, args: &abi::SetattrIn) -> Result<bool> {
    let has = |bits: u32| args.valid & bits != 0;
    let owner = owns(who, attr);
    if has(abi::FATTR_MODE | abi::FATTR_UID | abi::FATTR_GID | abi::FATTR_CTIME) && !owner {
        return Err(Errno::EPERM);
    }
    let gid = if has(abi::FATTR_GID) { args.gid } else { attr.gid };
    if gid != attr.gid && !in_group(who, gid) {
        return Err(Errno::EPERM);
    }
    // The kernel takes the bit away before it asks.
    if has(abi::FATTR_MODE) && args.mode & SGID != 0 && !in_group(who, gid) {
        return Err(Errno::EPERM);
    }
    let (atime, mtime) = (abi::FATTR_ATIME_NOW, abi::FATTR_MTIME_NOW);
    let set = has(abi::FATTR_ATIME) && !has(atime) || has(abi::FATTR_MTIME) && !has(mtime);
    if set && !owner {
        return Err(Errno::EPERM);
    }
    // A change of the length moves the times, too, and is permitted as such.
    Ok(has(atime | mtime) && !owner && !has(abi::FATTR_SIZE))
}

/// `EPERM` where `fs.protected_hardlinks` would refuse a new name for the inode.
pub(super) fn may_link(
    who: &Credentials,
    attr: &Attr,
    is_accessible: impl FnOnce() -> bool,
) -> Result<()> {
    if posix::may_link(who, attr, is_accessible) { Ok(()) } else { Err(Errno::EPERM) }
}

/// `EPERM` where the name of `victim` must stay in the sticky directory `dir`.
pub(super) fn may_remove(who: &Credentials, dir: &Attr, victim: &Attr) -> Result<()> {
    if posix::may_remove(who, dir, victim) { Ok(()) } else { Err(Errno::EPERM) }
}

/// Whether an extended attribute also takes permission to read or write (`mask`) the inode, beside
/// what this refuses.
pub(super) fn may_xattr(who: &Credentials, attr: &Attr, name: &[u8], mask: u32) -> Result<bool> {
    let writes = mask & WRITE != 0;
    let owner = owns(who, attr);
    if name.starts_with(b"user.") {
        // On other kinds of inode they would be a store that no permission protects, xattr(7).
        return match attr.kind {
            FileKind::Regular => Ok(true),
            FileKind::Directory if !writes || attr.perm & STICKY == 0 || owner => Ok(true),
            _ => Err(if writes { Errno::EPERM } else { Errno::ENODATA }),
        };
    }
    if name.starts_with(b"trusted.") {
        return Err(if writes { Errno::EPERM } else { Errno::ENODATA });
    }
    let list = name.starts_with(b"system.posix_acl_");
    if !writes || list && owner { Ok(false) } else { Err(Errno::EPERM) }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use defuse_fs::Timestamp;

    use super::*;

    fn who(uid: u32) -> Credentials {
        Credentials { pid: 1, uid, groups: vec![uid, 20] }
    }

    fn attr(kind: FileKind, perm: u32, uid: u32, gid: u32) -> Attr {
        let zero = Timestamp::default();
        Attr {
            st_ino: 1,
            kind,
            perm,
            nlink: 1,
            uid,
            gid,
            rdev: 0,
            size: 0,
            blocks: 0,
            blksize: 4096,
            atime: zero,
            mtime: zero,
            ctime: zero,
            btime: None,
            valid_for: Duration::ZERO,
        }
    }

    fn file(perm: u32, uid: u32) -> Attr {
        attr(FileKind::Regular, perm, uid, uid)
    }

    #[test]
    fn the_bits_of_the_class_that_a_user_is_in_decide() {
        let denied = Err(Errno::EACCES);
        let (own, group) = (file(0o047, 5), attr(FileKind::Regular, 0o470, 0, 20));
        assert_eq!(permit(&who(5), &own, None, READ), denied);
        assert_eq!(permit(&who(5), &group, None, READ | WRITE | EXEC), Ok(()));
        assert_eq!(permit(&who(5), &file(0o604, 0), None, READ), Ok(()));
        assert_eq!(permit(&who(5), &file(0o604, 0), None, WRITE), denied);
        assert_eq!(open_mask(OpenFlags(OpenFlags::TRUNC)), READ | WRITE);
    }

    #[test]
    fn only_the_owner_changes_what_an_inode_is() {
        let set = |valid| abi::SetattrIn { valid, mode: 0o644, gid: 20, ..Default::default() };
        let (foreign, own) = (file(0o666, 0), file(0o666, 5));
        for valid in [abi::FATTR_MODE, abi::FATTR_GID, abi::FATTR_ATIME, abi::FATTR_CTIME] {
            assert_eq!(may_set(&who(5), &foreign, &set(valid)), Err(Errno::EPERM), "{valid:#x}");
            assert_eq!(may_set(&who(5), &own, &set(valid)), Ok(false), "{valid:#x}");
        }
        let now = set(abi::FATTR_MTIME | abi::FATTR_MTIME_NOW);
        assert_eq!(may_set(&who(5), &foreign, &now), Ok(true));
        let give = abi::SetattrIn { valid: abi::FATTR_GID, gid: 7, ..Default::default() };
        assert_eq!(may_set(&who(5), &own, &give), Err(Errno::EPERM));
        let sgid = abi::SetattrIn { valid: abi::FATTR_MODE, mode: 0o2755, ..Default::default() };
        let of_seven = attr(FileKind::Regular, 0o644, 5, 7);
        assert_eq!(may_set(&who(5), &of_seven, &sgid), Err(Errno::EPERM));
        assert_eq!(may_set(&who(5), &own, &sgid), Ok(false));
    }

    #[test]
    fn names_of_others_stay_in_a_sticky_directory_and_get_no_second_one() {
        let sticky = attr(FileKind::Directory, 0o1777, 0, 0);
        assert_eq!(may_remove(&who(5), &sticky, &file(0o666, 0)), Err(Errno::EPERM));
        assert_eq!(may_remove(&who(5), &sticky, &file(0o666, 5)), Ok(()));
        assert_eq!(may_link(&who(5), &file(0o666, 0), || true), Ok(()));
        assert_eq!(may_link(&who(5), &file(0o4666, 0), || true), Err(Errno::EPERM));
        assert_eq!(may_link(&who(5), &file(0o644, 0), || false), Err(Errno::EPERM));
    }

    #[test]
    fn privileged_attributes_are_not_set_by_owners() {
        for name in [&b"security.capability"[..], b"trusted.x", b"system.other"] {
            assert_eq!(may_xattr(&who(5), &file(0o666, 5), name, WRITE), Err(Errno::EPERM));
        }
        let list = b"system.posix_acl_access";
        assert_eq!(may_xattr(&who(5), &file(0o666, 5), list, WRITE), Ok(false));
        assert_eq!(may_xattr(&who(5), &file(0o666, 0), list, WRITE), Err(Errno::EPERM));
        assert_eq!(may_xattr(&who(5), &file(0o666, 0), b"user.x", WRITE), Ok(true));
    }

    #[test]
    fn what_the_kernel_opens_by_itself_is_opened_by_nobody() {
        let device = attr(FileKind::CharDevice, 0o666, 5, 5);
        assert_eq!(may_open(&who(5), &device, OpenFlags(0)), Err(Errno::ENXIO));
        let no_atime = OpenFlags(OpenFlags::NOATIME);
        assert_eq!(may_open(&who(5), &file(0o666, 0), no_atime), Err(Errno::EPERM));
        assert_eq!(may_open(&who(5), &file(0o666, 5), no_atime), Ok(()));
    }
}
