//! The kernel's permission rules for users other than root, as functions of attributes and
//! credentials: inode_permission, may_delete and may_linkat of `fs/namei.c`, setattr_prepare of
//! `fs/attr.c`, vfs_utimes of `fs/utimes.c`, and xattr_permission of `fs/xattr.c`.
//!
//! There are no user namespaces, and users have no capabilities.

use defuse_fs::{AccessMode, Attr, Errno, FileKind, OpenFlags, Result, SetAttr, SetTime, posix};

use crate::credentials::PeerCredentials;

pub(super) use posix::{EXEC, READ, WRITE};

const SGID: u32 = 0o2000;
const STICKY: u32 = 0o1000;

impl posix::PosixUser for PeerCredentials {
    fn uid(&self) -> u32 {
        self.uid
    }

    fn in_group(&self, gid: u32) -> bool {
        self.groups.contains(&gid)
    }
}

pub(super) fn owns(who: &PeerCredentials, attr: &Attr) -> bool {
    posix::owns(who, attr)
}

pub(super) fn is_in_group(who: &PeerCredentials, gid: u32) -> bool {
    who.groups.contains(&gid)
}

/// Fails with `EACCES` if neither the bits nor, if there is one, the access list grant `mask`.
pub(super) fn permit(
    who: &PeerCredentials,
    attr: &Attr,
    list: Option<&[u8]>,
    mask: u32,
) -> Result<()> {
    if posix::permits(who, attr, list, mask) { Ok(()) } else { Err(Errno::EACCES) }
}

/// The permissions that opening with `flags` needs.
pub(super) fn open_mask(flags: OpenFlags) -> u32 {
    let mask = match flags.access() {
        AccessMode::Read => READ,
        AccessMode::Write => WRITE,
        AccessMode::ReadWrite => READ | WRITE,
    };
    mask | if flags.has(OpenFlags::TRUNC) { WRITE } else { 0 }
}

/// Refuses inodes that the kernel never opens through a file system: `ENXIO` for devices, fifos and
/// sockets, which the kernel opens itself, `EISDIR` and `ELOOP`. `EPERM` for `O_NOATIME` by another
/// user than the owner.
pub(super) fn may_open(who: &PeerCredentials, attr: &Attr, flags: OpenFlags) -> Result<()> {
    match attr.kind {
        FileKind::Regular => {}
        FileKind::Directory if open_mask(flags) & WRITE != 0 => return Err(Errno::EISDIR),
        FileKind::Directory => {}
        FileKind::Symlink => return Err(Errno::ELOOP),
        _ => return Err(Errno::ENXIO),
    }
    if flags.has(OpenFlags::NOATIME) && !owns(who, attr) { Err(Errno::EPERM) } else { Ok(()) }
}

/// Refuses changes of attributes that the user may not make: `EPERM`. True if the other changes
/// need permission to write.
pub(super) fn may_set(who: &PeerCredentials, attr: &Attr, set: &SetAttr) -> Result<bool> {
    let owner = owns(who, attr);
    let is_owners =
        set.perm.is_some() || set.uid.is_some() || set.gid.is_some() || set.ctime.is_some();
    if is_owners && !owner {
        return Err(Errno::EPERM);
    }
    // Only root may give files to other users, chown(2).
    if set.uid.is_some_and(|uid| uid != who.uid) {
        return Err(Errno::EPERM);
    }
    let gid = set.gid.unwrap_or(attr.gid);
    if gid != attr.gid && !is_in_group(who, gid) {
        return Err(Errno::EPERM);
    }
    // The kernel clears the bit before it sends the request.
    if set.perm.is_some_and(|perm| perm & SGID != 0) && !is_in_group(who, gid) {
        return Err(Errno::EPERM);
    }
    let times = [set.atime, set.mtime];
    if times.iter().any(|time| matches!(time, Some(SetTime::At(_)))) && !owner {
        return Err(Errno::EPERM);
    }
    // A change of the length has a check of its own, and moves the times, too.
    let writes = times.contains(&Some(SetTime::Now)) || set.kill_suidgid;
    Ok(writes && !owner && set.size.is_none())
}

/// Fails with `EPERM` if `fs.protected_hardlinks` would refuse a new name for the inode.
pub(super) fn may_link(
    who: &PeerCredentials,
    attr: &Attr,
    is_accessible: impl FnOnce() -> bool,
) -> Result<()> {
    if posix::may_link(who, attr, is_accessible) { Ok(()) } else { Err(Errno::EPERM) }
}

/// Fails with `EPERM` if the name of `victim` must stay in the sticky directory `dir`.
pub(super) fn may_remove(who: &PeerCredentials, dir: &Attr, victim: &Attr) -> Result<()> {
    if posix::may_remove(who, dir, victim) { Ok(()) } else { Err(Errno::EPERM) }
}

/// Refuses extended attributes that the user may not read or write (`mask`): `EPERM`, `ENODATA`.
/// True where the others need permission `mask` on the inode.
pub(super) fn may_xattr(
    who: &PeerCredentials,
    attr: &Attr,
    name: &[u8],
    mask: u32,
) -> Result<bool> {
    let writes = mask & WRITE != 0;
    let owner = owns(who, attr);
    if name.starts_with(b"user.") {
        // On other kinds of inodes no permission would protect the attributes, xattr(7).
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

    fn make_user(uid: u32) -> PeerCredentials {
        PeerCredentials { pid: 1, uid, groups: vec![uid, 20] }
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
    fn the_mode_bits_of_the_users_class_decide() {
        let denied = Err(Errno::EACCES);
        let (own, group) = (file(0o047, 5), attr(FileKind::Regular, 0o470, 0, 20));
        assert_eq!(permit(&make_user(5), &own, None, READ), denied);
        assert_eq!(permit(&make_user(5), &group, None, READ | WRITE | EXEC), Ok(()));
        assert_eq!(permit(&make_user(5), &file(0o604, 0), None, READ), Ok(()));
        assert_eq!(permit(&make_user(5), &file(0o604, 0), None, WRITE), denied);
        assert_eq!(open_mask(OpenFlags(OpenFlags::TRUNC)), READ | WRITE);
    }

    #[test]
    fn only_the_owner_changes_what_an_inode_is() {
        let (foreign, own) = (file(0o666, 0), file(0o666, 5));
        let time = Timestamp::default();
        let nothing = SetAttr::default();
        for set in [
            SetAttr { perm: Some(0o644), ..nothing },
            SetAttr { gid: Some(20), ..nothing },
            SetAttr { atime: Some(SetTime::At(time)), ..nothing },
            SetAttr { ctime: Some(time), ..nothing },
        ] {
            assert_eq!(may_set(&make_user(5), &foreign, &set), Err(Errno::EPERM), "{set:?}");
            assert_eq!(may_set(&make_user(5), &own, &set), Ok(false), "{set:?}");
        }
        let now = SetAttr { mtime: Some(SetTime::Now), ..nothing };
        assert_eq!(may_set(&make_user(5), &foreign, &now), Ok(true));
        for gives in [SetAttr { gid: Some(7), ..nothing }, SetAttr { uid: Some(7), ..nothing }] {
            assert_eq!(may_set(&make_user(5), &own, &gives), Err(Errno::EPERM), "{gives:?}");
        }
        let sgid = SetAttr { perm: Some(0o2755), ..nothing };
        let of_seven = attr(FileKind::Regular, 0o644, 5, 7);
        assert_eq!(may_set(&make_user(5), &of_seven, &sgid), Err(Errno::EPERM));
        assert_eq!(may_set(&make_user(5), &own, &sgid), Ok(false));
    }

    /// A SETATTR that clears set-user-id and sets nothing passed without a check.
    #[test]
    fn clearing_set_user_id_needs_permission_to_write() {
        let kill = SetAttr { kill_suidgid: true, ..SetAttr::default() };
        assert_eq!(may_set(&make_user(5), &file(0o4755, 0), &kill), Ok(true));
        assert_eq!(may_set(&make_user(5), &file(0o4755, 5), &kill), Ok(false));
    }

    #[test]
    fn names_of_others_stay_in_a_sticky_directory_and_get_no_second_one() {
        let sticky = attr(FileKind::Directory, 0o1777, 0, 0);
        assert_eq!(may_remove(&make_user(5), &sticky, &file(0o666, 0)), Err(Errno::EPERM));
        assert_eq!(may_remove(&make_user(5), &sticky, &file(0o666, 5)), Ok(()));
        assert_eq!(may_link(&make_user(5), &file(0o666, 0), || true), Ok(()));
        assert_eq!(may_link(&make_user(5), &file(0o4666, 0), || true), Err(Errno::EPERM));
        assert_eq!(may_link(&make_user(5), &file(0o644, 0), || false), Err(Errno::EPERM));
    }

    #[test]
    fn privileged_attributes_are_not_set_by_owners() {
        for name in [&b"security.capability"[..], b"trusted.x", b"system.other"] {
            assert_eq!(may_xattr(&make_user(5), &file(0o666, 5), name, WRITE), Err(Errno::EPERM));
        }
        let list = b"system.posix_acl_access";
        assert_eq!(may_xattr(&make_user(5), &file(0o666, 5), list, WRITE), Ok(false));
        assert_eq!(may_xattr(&make_user(5), &file(0o666, 0), list, WRITE), Err(Errno::EPERM));
        assert_eq!(may_xattr(&make_user(5), &file(0o666, 0), b"user.x", WRITE), Ok(true));
    }

    #[test]
    fn what_the_kernel_opens_by_itself_is_opened_by_nobody() {
        let device = attr(FileKind::CharDevice, 0o666, 5, 5);
        assert_eq!(may_open(&make_user(5), &device, OpenFlags(0)), Err(Errno::ENXIO));
        let no_atime = OpenFlags(OpenFlags::NOATIME);
        assert_eq!(may_open(&make_user(5), &file(0o666, 0), no_atime), Err(Errno::EPERM));
        assert_eq!(may_open(&make_user(5), &file(0o666, 5), no_atime), Ok(()));
    }
}
