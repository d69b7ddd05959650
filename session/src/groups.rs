//! The supplementary groups of processes of this machine.

use std::fs;

use defuse_fs::{Caller, Errno, Result, SupplementaryGroups};

/// Reads the groups of a caller in `/proc/PID/status`, proc_pid_status(5): a request of the kernel names one group.
pub struct ProcessGroups;

impl SupplementaryGroups for ProcessGroups {
    fn groups_of(&self, caller: Caller) -> Result<Vec<u32>> {
        // The kernel names no process for requests without a caller, or if the caller is in another PID namespace.
        if caller.pid == 0 {
            return Err(Errno::ESRCH);
        }
        let status = fs::read_to_string(format!("/proc/{}/status", caller.pid));
        let status = status.map_err(|_| Errno::ESRCH)?;
        let line = status.lines().find_map(|line| line.strip_prefix("Groups:"));
        let groups = line.ok_or(Errno::ESRCH)?.split_ascii_whitespace();
        Ok(groups.filter_map(|gid| gid.parse().ok()).collect())
    }
}

/// The groups of the caller of one request, as its client sent them.
pub(crate) struct ClientGroups(pub Vec<u32>);

impl SupplementaryGroups for ClientGroups {
    fn groups_of(&self, _: Caller) -> Result<Vec<u32>> {
        Ok(self.0.clone())
    }

    fn are_known(&self) -> bool {
        true
    }
}

/// Groups that are unknown in this process.
pub(crate) struct UnknownGroups;

impl SupplementaryGroups for UnknownGroups {
    fn groups_of(&self, _: Caller) -> Result<Vec<u32>> {
        Err(Errno::ENOSYS)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_groups_of_a_process_are_read_and_those_of_one_that_is_gone_are_not() {
        let of = |pid| ProcessGroups.groups_of(Caller { pid, ..Caller::default() });
        let own = rustix::process::getgroups().unwrap();
        assert_eq!(of(std::process::id()), Ok(own.into_iter().map(|gid| gid.as_raw()).collect()));
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let gone = child.id();
        child.wait().unwrap();
        assert_eq!((of(gone), of(0)), (Err(Errno::ESRCH), Err(Errno::ESRCH)));
    }
}
