//! Changes that only the owner may make, for file systems whose frontends may know an owner that
//! has changed since.

use crate::{Attr, Context, Errno, Fh, OwnerCapability, Result, SetAttr, SetTime, XattrName};

/// Fails with `EPERM` if only another user may make the change `set` to a file with the attributes
/// `attr`: its owner, root, or a user with the capability over it.
///
/// The kernel checks changes by an open file with the owner that it has cached, however old that
/// is: such a call looks nothing up. The frontend has checked everything else.
pub fn check_owner_change(
    cx: &Context<'_>,
    attr: &Attr,
    fh: Option<Fh>,
    set: &SetAttr,
) -> Result<()> {
    if is_owner_or_root(cx, attr) {
        return Ok(());
    }
    check_new_owner(cx, attr, set)?;
    let is_free = is_mode_free(attr, set) && are_times_free(fh, set);
    if is_free || cx.has_capability(OwnerCapability::Fowner, (attr.uid, attr.gid)) {
        return Ok(());
    }
    Err(Errno::EPERM)
}

/// Fails with `EPERM` if only another user may set the owner and group in `set`.
pub fn check_new_owner(cx: &Context<'_>, attr: &Attr, set: &SetAttr) -> Result<()> {
    let is_free = set.gid.is_none() && set.uid.is_none() || is_only_clearing(attr, set);
    let owner = (attr.uid, attr.gid);
    if is_free || is_owner_or_root(cx, attr) || cx.has_capability(OwnerCapability::Chown, owner) {
        return Ok(());
    }
    Err(Errno::EPERM)
}

/// True if `set` changes no owner, and clears set-user-id and set-group-id: a change of data by any
/// user does so. A frontend may set the present owner for that.
pub fn is_only_clearing(attr: &Attr, set: &SetAttr) -> bool {
    set.kill_suidgid && set.gid.is_none() && set.uid.is_none_or(|uid| uid == attr.uid)
}

/// Fails with `EPERM` if only another user may set the attribute `name`, which is so for access
/// lists.
pub fn check_owner_xattr(cx: &Context<'_>, attr: &Attr, name: XattrName<'_>) -> Result<()> {
    let owner = (attr.uid, attr.gid);
    let is_free = !name.is_acl() || is_owner_or_root(cx, attr);
    if is_free || cx.has_capability(OwnerCapability::Fowner, owner) {
        return Ok(());
    }
    Err(Errno::EPERM)
}

fn is_owner_or_root(cx: &Context<'_>, attr: &Attr) -> bool {
    cx.caller.uid == 0 || cx.caller.uid == attr.uid
}

/// True if the mode in `set` requires no ownership. A change of data by any user removes
/// set-user-id and set-group-id, which some frontends do by the mode.
pub fn is_mode_free(attr: &Attr, set: &SetAttr) -> bool {
    set.perm.is_none_or(|perm| perm & !attr.perm == 0 && attr.perm & !perm & !0o6000 == 0)
}

/// True if the times in `set` require no ownership: the present time for both, which needs the
/// permission to write alone, and times that belong to a change of data. The kernel names the open
/// file only for ftruncate(2) and for times of its write cache, and the change time only with that
/// cache.
pub fn are_times_free(fh: Option<Fh>, set: &SetAttr) -> bool {
    let times = [set.atime, set.mtime];
    let is_touch = times == [Some(SetTime::Now); 2];
    let of_data = fh.is_some() || set.size.is_some() || set.ctime.is_some();
    times == [None; 2] || is_touch || of_data
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::posix::tests::attr;
    use crate::{Caller, FileKind, SupplementaryGroups, Timestamp};

    struct CapabilityHolder;

    impl SupplementaryGroups for CapabilityHolder {
        fn groups_of(&self, _: Caller) -> Result<Vec<u32>> {
            Ok(Vec::new())
        }

        fn has_capability(&self, _: Caller, _: OwnerCapability, owner: (u32, u32)) -> bool {
            owner.0 >= 1000
        }
    }

    #[test]
    fn a_user_who_is_no_longer_the_owner_changes_nothing_that_only_the_owner_may() {
        let allowed = |uid, owner, fh: Option<u64>, set: &SetAttr| {
            let attr = attr(FileKind::Regular, 0o4755, (owner, 0));
            let cx =
                Context::new(Caller { uid, ..Caller::default() }).with_groups(&CapabilityHolder);
            check_owner_change(&cx, &attr, fh.map(Fh), set).is_ok()
        };
        let none = SetAttr::default();
        let at = Some(SetTime::At(Timestamp::default()));
        let refused = [
            SetAttr { perm: Some(0o777), ..none },
            SetAttr { perm: Some(0o755 & !0o100), ..none },
            SetAttr { gid: Some(7), ..none },
            SetAttr { uid: Some(0), ..none },
            SetAttr { uid: Some(5), kill_suidgid: true, ..none },
            SetAttr { mtime: at, ..none },
            SetAttr { mtime: Some(SetTime::Now), ..none },
            SetAttr { atime: Some(SetTime::Now), mtime: at, ..none },
        ];
        for set in refused {
            let found = [(5, 0), (5, 5), (0, 5), (5, 1000)]
                .map(|(uid, owner)| allowed(uid, owner, None, &set));
            assert_eq!(found, [false, true, true, true], "{set:?}");
        }
        let free = [
            SetAttr { perm: Some(0o755), ..none },
            SetAttr { uid: Some(0), kill_suidgid: true, ..none },
            SetAttr { size: Some(0), mtime: Some(SetTime::Now), ..none },
            SetAttr { atime: Some(SetTime::Now), mtime: Some(SetTime::Now), ..none },
            SetAttr { mtime: at, ctime: Some(Timestamp::default()), ..none },
        ];
        for set in free {
            assert!(allowed(5, 0, None, &set), "{set:?}");
        }
        assert!(allowed(5, 0, Some(1), &SetAttr { mtime: at, ..none }));
    }

    #[test]
    fn a_user_who_is_no_longer_the_owner_sets_no_access_list() {
        let cx = Context::new(Caller { uid: 5, ..Caller::default() });
        let set = |owner, name: &[u8]| {
            let attr = attr(FileKind::Directory, 0o755, (owner, 0));
            check_owner_xattr(&cx, &attr, XattrName::new(name).unwrap())
        };
        assert_eq!(set(0, b"system.posix_acl_access"), Err(Errno::EPERM));
        assert_eq!(set(0, b"system.posix_acl_default"), Err(Errno::EPERM));
        assert_eq!((set(5, b"system.posix_acl_access"), set(0, b"user.x")), (Ok(()), Ok(())));
    }
}
