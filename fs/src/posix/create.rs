//! Group, mode and ACLs of a new inode.

use super::acl::Acl;
use super::{GROUP_EXEC, SGID};
use crate::{FileKind, NewNode};

/// The parent directory of a new inode.
#[derive(Clone, Copy, Debug)]
pub struct CreateParent<'a> {
    /// Its permission bits.
    pub perm: u32,
    /// Its group.
    pub gid: u32,
    /// Its default ACL.
    pub default_acl: Option<&'a Acl>,
}

/// The attributes of a new inode that depend on its directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewInode {
    /// Permission bits, 0 to 0o7777.
    pub perm: u32,
    /// Group.
    pub gid: u32,
    /// Access ACL, unless it is equivalent to the permission bits.
    pub access_acl: Option<Acl>,
    /// Default ACL of a directory.
    pub default_acl: Option<Acl>,
}

/// Computes the attributes of an inode that a user creates in the directory `dir`: inode_init_owner
/// of `fs/inode.c`, and posix_acl_create. A directory with set-group-id passes its group to new
/// inodes, and the bit to new directories. An executable file keeps set-group-id only if its
/// creator is a member of the group or, by `keeps_sgid`, has `CAP_FSETID`. A default ACL replaces
/// the umask.
#[must_use]
pub fn new_inode(dir: CreateParent<'_>, node: &NewNode<'_>, keeps_sgid: bool) -> NewInode {
    let is_dir = node.kind == FileKind::Directory;
    let mut perm = node.perm & 0o7777;
    let mut gid = node.gid;
    if dir.perm & SGID != 0 {
        gid = dir.gid;
        let member = node.gid == dir.gid || node.supplementary_gid == Some(dir.gid);
        let executes = perm & (SGID | GROUP_EXEC) == SGID | GROUP_EXEC;
        if is_dir {
            perm |= SGID;
        } else if executes && !member && !keeps_sgid {
            perm &= !SGID;
        }
    }
    let mut access_acl = None;
    match dir.default_acl {
        _ if node.kind == FileKind::Symlink => {}
        Some(default) => {
            let mut acl = default.clone();
            perm = acl.inherit(perm);
            access_acl = Some(acl).filter(|acl| !acl.is_minimal());
        }
        None => perm &= !(node.umask & 0o777),
    }
    let default_acl = dir.default_acl.filter(|_| is_dir).cloned();
    NewInode { perm, gid, access_acl, default_acl }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Caller;

    fn node(kind: FileKind, perm: u32) -> NewNode<'static> {
        let caller = Caller { uid: 5, gid: 5, pid: 1 };
        NewNode { umask: 0o022, ..NewNode::new(kind, perm, caller) }
    }

    fn compute_rights(dir: CreateParent<'_>, node: &NewNode<'_>, keeps_sgid: bool) -> (u32, u32) {
        let made = new_inode(dir, node, keeps_sgid);
        (made.perm, made.gid)
    }

    #[test]
    fn a_directory_with_set_group_id_passes_its_group_on() {
        let plain = CreateParent { perm: 0o777, gid: 20, default_acl: None };
        let handing = CreateParent { perm: 0o2777, ..plain };
        let (file, dir) = (node(FileKind::Regular, 0o2775), node(FileKind::Directory, 0o777));
        assert_eq!(compute_rights(plain, &file, false), (0o2755, 5));
        assert_eq!(compute_rights(plain, &dir, false), (0o755, 5));
        assert_eq!(compute_rights(handing, &dir, false), (0o2755, 20));
        // A user outside the group cannot create a set-group-id program.
        assert_eq!(compute_rights(handing, &file, false), (0o755, 20));
        assert_eq!(compute_rights(handing, &file, true), (0o2755, 20));
        let member = NewNode { supplementary_gid: Some(20), ..file };
        assert_eq!(compute_rights(handing, &member, false), (0o2755, 20));
    }

    #[test]
    fn a_default_list_takes_the_place_of_the_umask() {
        let bytes = [
            &2u32.to_le_bytes()[..],
            &[1, 0, 7, 0, 255, 255, 255, 255],
            &[2, 0, 6, 0, 7, 0, 0, 0],
            &[4, 0, 5, 0, 255, 255, 255, 255],
            &[16, 0, 7, 0, 255, 255, 255, 255],
            &[32, 0, 4, 0, 255, 255, 255, 255],
        ]
        .concat();
        let list = Acl::parse(&bytes).unwrap().unwrap();
        let dir = CreateParent { perm: 0o777, gid: 0, default_acl: Some(&list) };
        let file = new_inode(dir, &node(FileKind::Regular, 0o666), false);
        assert_eq!(file.perm, 0o664);
        assert!(file.access_acl.is_some() && file.default_acl.is_none());
        let child = new_inode(dir, &node(FileKind::Directory, 0o777), false);
        assert_eq!((child.perm, child.default_acl.as_ref()), (0o774, Some(&list)));
        let link = new_inode(dir, &node(FileKind::Symlink, 0o777), false);
        assert_eq!((link.perm, link.access_acl, link.default_acl), (0o777, None, None));
    }
}
