//! Access checks by mode bits and ACL.

use super::{PosixUser, acl};
use crate::{Attr, FileKind};

/// True if `user` may perform operations reserved to the owner.
pub fn owns<U: PosixUser + ?Sized>(user: &U, attr: &Attr) -> bool {
    attr.uid == user.uid() || user.is_owner_of_all()
}

/// True if the ACL of an inode, if it has one, affects the access of `user`. The owner is checked
/// by the mode bits only. The group bits are the mask of the ACL, so that the ACL grants nothing if
/// all are clear. Symbolic links have no ACL.
pub fn consults_acl<U: PosixUser + ?Sized>(user: &U, attr: &Attr) -> bool {
    attr.uid != user.uid() && attr.perm & 0o070 != 0 && attr.kind != FileKind::Symlink
}

/// True if the mode bits, or the ACL `list` if there is one, grant `mask` (4 read, 2 write, 1
/// execute or search) to `user`. Ignores capabilities. An invalid ACL grants nothing.
#[inline]
pub fn permits<U: PosixUser + ?Sized>(
    user: &U,
    attr: &Attr,
    list: Option<&[u8]>,
    mask: u32,
) -> bool {
    let grants = |bits: u32| bits & mask == mask;
    if attr.uid == user.uid() {
        return grants(attr.perm >> 6);
    }
    match list {
        Some(list) => acl::permits(list, user, (attr.uid, attr.gid), mask).unwrap_or(false),
        None => grants(if user.in_group(attr.gid) { attr.perm >> 3 } else { attr.perm }),
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{PlainUser, PrivilegedUser, attr, file};
    use super::super::{EXEC, READ, WRITE};
    use super::*;

    #[test]
    fn the_mode_bits_of_the_users_class_decide() {
        let group = attr(FileKind::Regular, 0o470, (0, 20));
        assert!(
            !permits(&PlainUser(5), &file(0o047, 5), None, READ),
            "the owner has the owner's bits"
        );
        assert!(permits(&PlainUser(5), &group, None, READ | WRITE | EXEC));
        assert!(permits(&PlainUser(5), &file(0o604, 0), None, READ));
        assert!(!permits(&PlainUser(5), &file(0o604, 0), None, WRITE));
    }

    #[test]
    fn an_acl_replaces_the_mode_bits_except_for_the_owner() {
        let nothing = b"no list";
        assert!(!permits(&PlainUser(5), &file(0o777, 0), Some(nothing), READ));
        assert!(permits(&PlainUser(5), &file(0o700, 5), Some(nothing), READ));
        assert!(consults_acl(&PlainUser(5), &file(0o670, 0)));
        assert!(
            !consults_acl(&PlainUser(5), &file(0o670, 5))
                && !consults_acl(&PlainUser(5), &file(0o607, 0))
        );
        assert!(!consults_acl(&PlainUser(5), &attr(FileKind::Symlink, 0o777, (0, 0))));
    }

    #[test]
    fn cap_fowner_gives_ownership_but_not_the_owners_mode_bits() {
        assert!(owns(&PrivilegedUser, &file(0, 7)) && !owns(&PlainUser(5), &file(0, 7)));
        assert!(!permits(&PrivilegedUser, &file(0o700, 7), None, READ));
    }
}
