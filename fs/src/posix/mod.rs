//! Rules of POSIX and Linux as pure functions, for backends and frontends that check permissions.
//! They follow inode_permission, may_delete and may_linkat of the kernel's `fs/namei.c`,
//! `fs/attr.c`, `fs/inode.c` and `fs/posix_acl.c`.

mod access;
mod access_time;
pub mod acl;
mod create;
mod names;
mod ownership;
pub mod rename;
mod set_id;

pub use access::{consults_acl, owns, permits};
pub use access_time::{AccessTimeRule, access_time_is_due};
pub use create::{CreateParent, NewInode, new_inode};
pub use names::{gives_privilege, may_link, may_remove};
pub use ownership::{
    are_times_free, check_new_owner, check_owner_change, check_owner_xattr, is_mode_free,
    is_only_clearing,
};
pub use set_id::{clears_mark, drop_set_id};

/// Permission to execute a file or search a directory, `MAY_EXEC` of `linux/fs.h`.
pub const EXEC: u32 = 1;
/// Permission to write.
pub const WRITE: u32 = 2;
/// Permission to read.
pub const READ: u32 = 4;

pub(crate) const SUID: u32 = 0o4000;
pub(crate) const SGID: u32 = 0o2000;
pub(crate) const STICKY: u32 = 0o1000;
pub(crate) const GROUP_EXEC: u32 = 0o010;

/// A user as seen by permission checks, credentials(7).
pub trait PosixUser {
    /// File-system user id.
    fn uid(&self) -> u32;

    /// True if `gid` is the group of the user or one of the supplementary groups.
    fn in_group(&self, gid: u32) -> bool;

    /// True for a user with `CAP_FOWNER`, who may perform operations reserved to the owner.
    fn is_owner_of_all(&self) -> bool {
        false
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::PosixUser;
    use crate::{Attr, FileKind, Timestamp};

    /// A user in the group of the same number, and in the group 20.
    pub struct PlainUser(pub u32);

    impl PosixUser for PlainUser {
        fn uid(&self) -> u32 {
            self.0
        }
        fn in_group(&self, gid: u32) -> bool {
            gid == self.0 || gid == 20
        }
    }

    /// A user with `CAP_FOWNER`.
    pub struct PrivilegedUser;

    impl PosixUser for PrivilegedUser {
        fn uid(&self) -> u32 {
            1
        }
        fn in_group(&self, _: u32) -> bool {
            false
        }
        fn is_owner_of_all(&self) -> bool {
            true
        }
    }

    pub fn attr(kind: FileKind, perm: u32, (uid, gid): (u32, u32)) -> Attr {
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
            valid_for: std::time::Duration::ZERO,
        }
    }

    pub fn file(perm: u32, uid: u32) -> Attr {
        attr(FileKind::Regular, perm, (uid, uid))
    }
}
