//! Set-user-id and set-group-id after changes.

use super::{GROUP_EXEC, SGID, SUID};
use crate::Context;

/// Returns the permission bits after a change of the data or the owner, setattr_should_drop_suidgid
/// of the kernel's `fs/attr.c`. Set-group-id without group execution is kept if the caller is a
/// member of the group, or has CAP_FSETID.
#[must_use]
pub fn drop_set_id(perm: u32, is_member: bool) -> u32 {
    let keeps_sgid = perm & GROUP_EXEC == 0 && is_member;
    perm & !SUID & if keeps_sgid { !0 } else { !SGID }
}

/// Returns true if a change of the data or the owner by the caller clears set-group-id of a file
/// that its group may not execute: the caller is no member of the group. A caller whose groups are
/// not known keeps it. All other bits are cleared for every caller ([`drop_set_id`]).
#[must_use]
pub fn clears_mark(cx: &Context<'_>, perm: u32, gid: u32) -> bool {
    perm & (SGID | GROUP_EXEC) == SGID
        && cx.caller.uid != 0
        && cx.caller.gid != gid
        && cx.supplementary_groups().is_ok_and(|groups| !groups.contains(&gid))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Caller, Errno, Result, SupplementaryGroups};

    /// The groups of the caller; `None` if they are unknown.
    struct GroupList(Option<Vec<u32>>);

    impl SupplementaryGroups for GroupList {
        fn groups_of(&self, _: Caller) -> Result<Vec<u32>> {
            self.0.clone().ok_or(Errno::ENOSYS)
        }
    }

    #[test]
    fn only_a_caller_that_is_known_to_be_a_stranger_clears_a_mark() {
        let clears = |uid, groups: Option<Vec<u32>>, perm| {
            let known = GroupList(groups);
            let caller = Caller { uid, gid: 5, pid: 1 };
            clears_mark(&Context::new(caller).with_groups(&known), perm, 7)
        };
        assert!(clears(5, Some(vec![6]), 0o2666) && clears(5, Some(vec![]), 0o6644));
        for (uid, groups, perm) in
            [(0, Some(vec![]), 0o2666), (5, Some(vec![7]), 0o2666), (5, None, 0o2666)]
        {
            assert!(!clears(uid, groups, perm), "{uid} {perm:o}");
        }
        assert!(!clears(5, Some(vec![]), 0o2676) && !clears(5, Some(vec![]), 0o666));
    }

    #[test]
    fn set_group_id_without_execution_is_kept_only_for_members_of_the_group() {
        for (perm, of_member, of_stranger) in [
            (0o6755, 0o755, 0o755),
            (0o6745, 0o2745, 0o745),
            (0o2766, 0o2766, 0o766),
            (0o2776, 0o776, 0o776),
        ] {
            assert_eq!(drop_set_id(perm, true), of_member, "{perm:o}");
            assert_eq!(drop_set_id(perm, false), of_stranger, "{perm:o}");
        }
    }
}
