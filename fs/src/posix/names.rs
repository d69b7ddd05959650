//! Permission to remove and to link names, in addition to write permission on the directory.

use super::{GROUP_EXEC, PosixUser, SGID, STICKY, SUID, owns};
use crate::{Attr, FileKind};

/// True if `user` may remove the name of `victim` in the directory `dir`. In a sticky directory,
/// one of the two must belong to `user`: may_delete (`check_sticky`). Otherwise the caller fails
/// with `EPERM`.
pub fn may_remove<U: PosixUser + ?Sized>(user: &U, dir: &Attr, victim: &Attr) -> bool {
    dir.perm & STICKY == 0 || owns(user, dir) || owns(user, victim)
}

/// True if executing the file changes the user or group.
#[must_use]
pub fn gives_privilege(attr: &Attr) -> bool {
    attr.perm & SUID != 0 || attr.perm & (SGID | GROUP_EXEC) == SGID | GROUP_EXEC
}

/// True if `user` may link the inode under `fs.protected_hardlinks`, proc(5): it is the user's own,
/// or a regular file that gives no privilege and that the user may read and write, as
/// `is_accessible` reports. Otherwise the caller fails with `EPERM`.
pub fn may_link<U: PosixUser + ?Sized>(
    user: &U,
    attr: &Attr,
    is_accessible: impl FnOnce() -> bool,
) -> bool {
    let is_safe = attr.kind == FileKind::Regular && !gives_privilege(attr);
    owns(user, attr) || is_safe && is_accessible()
}

#[cfg(test)]
mod tests {
    use super::super::tests::{PlainUser, PrivilegedUser, attr, file};
    use super::*;

    #[test]
    fn names_of_other_users_cannot_be_removed_from_a_sticky_directory() {
        let sticky = |uid| attr(FileKind::Directory, 0o1777, (uid, uid));
        assert!(!may_remove(&PlainUser(5), &sticky(0), &file(0o666, 0)));
        assert!(may_remove(&PlainUser(5), &sticky(0), &file(0o666, 5)));
        assert!(may_remove(&PlainUser(5), &sticky(5), &file(0o666, 0)));
        assert!(may_remove(&PrivilegedUser, &sticky(0), &file(0o666, 0)));
        let open = attr(FileKind::Directory, 0o777, (0, 0));
        assert!(may_remove(&PlainUser(5), &open, &file(0o666, 0)));
    }

    #[test]
    fn files_of_other_users_are_linked_only_if_safe_and_accessible() {
        assert!(may_link(&PlainUser(5), &file(0o666, 0), || true));
        assert!(!may_link(&PlainUser(5), &file(0o644, 0), || false));
        for perm in [0o4666, 0o2676] {
            assert!(!may_link(&PlainUser(5), &file(perm, 0), || true), "{perm:o}");
            assert!(may_link(&PlainUser(5), &file(perm, 5), || false), "{perm:o}");
            assert!(may_link(&PrivilegedUser, &file(perm, 5), || false), "{perm:o}");
        }
        assert!(
            may_link(&PlainUser(5), &file(0o2666, 0), || true),
            "without execution by the group"
        );
        assert!(!may_link(&PlainUser(5), &attr(FileKind::Fifo, 0o666, (0, 0)), || true));
    }
}
