//! Permission to remove names and to give further ones, beside that to write to the directory.

use super::{GROUP_EXEC, SGID, STICKY, SUID, User, owns};
use crate::{Attr, FileKind};

/// True where the name of `victim` in the directory `dir` may go. In a sticky directory it must belong to
/// `user`, or the directory must: may_delete (`check_sticky`). A caller that gets false answers `EPERM`.
pub fn may_remove<U: User + ?Sized>(user: &U, dir: &Attr, victim: &Attr) -> bool {
    dir.perm & STICKY == 0 || owns(user, dir) || owns(user, victim)
}

/// True where the bits of a file give whoever executes it another user or group.
#[must_use]
pub fn gives_privilege(attr: &Attr) -> bool {
    attr.perm & SUID != 0 || attr.perm & (SGID | GROUP_EXEC) == SGID | GROUP_EXEC
}

/// True where `user` may give the inode another name under `fs.protected_hardlinks`, proc(5): it is the
/// user's own, or a regular file that gives no privilege and that the user may read and write, which
/// `is_accessible` says. A caller that gets false answers `EPERM`.
pub fn may_link<U: User + ?Sized>(
    user: &U,
    attr: &Attr,
    is_accessible: impl FnOnce() -> bool,
) -> bool {
    let is_safe = attr.kind == FileKind::Regular && !gives_privilege(attr);
    owns(user, attr) || is_safe && is_accessible()
}

#[cfg(test)]
mod tests {
    use super::super::tests::{Plain, Privileged, attr, file};
    use super::*;

    #[test]
    fn names_of_others_stay_in_a_sticky_directory() {
        let sticky = |uid| attr(FileKind::Directory, 0o1777, (uid, uid));
        assert!(!may_remove(&Plain(5), &sticky(0), &file(0o666, 0)));
        assert!(may_remove(&Plain(5), &sticky(0), &file(0o666, 5)));
        assert!(may_remove(&Plain(5), &sticky(5), &file(0o666, 0)));
        assert!(may_remove(&Privileged, &sticky(0), &file(0o666, 0)));
        let open = attr(FileKind::Directory, 0o777, (0, 0));
        assert!(may_remove(&Plain(5), &open, &file(0o666, 0)));
    }

    #[test]
    fn files_of_others_are_linked_only_where_they_are_safe_and_accessible() {
        assert!(may_link(&Plain(5), &file(0o666, 0), || true));
        assert!(!may_link(&Plain(5), &file(0o644, 0), || false));
        for perm in [0o4666, 0o2676] {
            assert!(!may_link(&Plain(5), &file(perm, 0), || true), "{perm:o}");
            assert!(may_link(&Plain(5), &file(perm, 5), || false), "{perm:o}");
            assert!(may_link(&Privileged, &file(perm, 5), || false), "{perm:o}");
        }
        assert!(may_link(&Plain(5), &file(0o2666, 0), || true), "without execution by the group");
        assert!(!may_link(&Plain(5), &attr(FileKind::Fifo, 0o666, (0, 0)), || true));
    }
}
