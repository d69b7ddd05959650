//! The user of a client.

use defuse_fs::{Caller, Errno, Result, SupplementaryGroups};

/// The process and user of a client, from a source that the client cannot forge, such as
/// `SO_PEERCRED` of unix(7).
#[derive(Clone, Debug)]
pub struct PeerCredentials {
    /// The process; 0 where it is in another PID namespace.
    pub pid: i32,
    /// The user.
    pub uid: u32,
    /// All groups, the effective one first.
    pub groups: Vec<u32>,
}

impl SupplementaryGroups for PeerCredentials {
    /// Returns the groups of the user that connected. Root acts for other users, whose groups are
    /// unknown.
    fn groups_of(&self, caller: Caller) -> Result<Vec<u32>> {
        match self.groups.split_first() {
            Some((_, supplementary)) if !self.is_root() && caller.uid == self.uid => {
                Ok(supplementary.to_vec())
            }
            _ => Err(Errno::ENOSYS),
        }
    }
}

impl PeerCredentials {
    /// True for root, which acts for all users, like a kernel that has mounted the file system.
    pub(crate) fn is_root(&self) -> bool {
        self.uid == 0
    }

    /// True where the client may act for `caller`. A user other than root acts for itself.
    pub(crate) fn may_act_as(&self, caller: Caller) -> bool {
        self.is_root() || caller.uid == self.uid && self.groups.contains(&caller.gid)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_root_acts_for_others() {
        let of = |uid| PeerCredentials { pid: 1, uid, groups: vec![uid, 20] };
        let caller = |uid, gid| Caller { uid, gid, pid: 1 };
        assert!(of(0).may_act_as(caller(1000, 1000)));
        assert!(of(1000).may_act_as(caller(1000, 1000)) && of(1000).may_act_as(caller(1000, 20)));
        assert!(!of(1000).may_act_as(caller(0, 1000)) && !of(1000).may_act_as(caller(1000, 0)));
    }
}
