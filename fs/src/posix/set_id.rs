//! Set-user-id and set-group-id after changes.

use super::{GROUP_EXEC, SGID, SUID};

/// Returns the permission bits after a change of the data or the owner, setattr_should_drop_suidgid
/// of the kernel's `fs/attr.c`. Set-group-id without group execution is kept if the caller is a
/// member of the group, or has CAP_FSETID.
#[must_use]
pub fn without_set_id(perm: u32, is_member: bool) -> u32 {
    let keeps_sgid = perm & GROUP_EXEC == 0 && is_member;
    perm & !SUID & if keeps_sgid { !0 } else { !SGID }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn set_group_id_without_execution_is_kept_only_for_members_of_the_group() {
        for (perm, of_member, of_stranger) in [
            (0o6755, 0o755, 0o755),
            (0o6745, 0o2745, 0o745),
            (0o2766, 0o2766, 0o766),
            (0o2776, 0o776, 0o776),
        ] {
            assert_eq!(without_set_id(perm, true), of_member, "{perm:o}");
            assert_eq!(without_set_id(perm, false), of_stranger, "{perm:o}");
        }
    }
}
