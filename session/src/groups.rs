//! The supplementary groups of processes of this machine.

use std::fs;

use defuse_fs::{Caller, Errno, OwnerCapability, Result, SupplementaryGroups};

/// Reads the groups of a caller in `/proc/PID/status`, proc_pid_status(5): a request of the kernel
/// names one group.
pub struct ProcessGroups;

impl SupplementaryGroups for ProcessGroups {
    fn groups_of(&self, caller: Caller) -> Result<Vec<u32>> {
        // The kernel names no process for requests without a caller, or if the caller is in another
        // PID namespace.
        if caller.pid == 0 {
            return Err(Errno::ESRCH);
        }
        let status = fs::read_to_string(format!("/proc/{}/status", caller.pid));
        let status = status.map_err(|_| Errno::ESRCH)?;
        let line = status.lines().find_map(|line| line.strip_prefix("Groups:"));
        let groups = line.ok_or(Errno::ESRCH)?.split_ascii_whitespace();
        Ok(groups.filter_map(|gid| gid.parse().ok()).collect())
    }

    /// By the rule of `capable_wrt_inode_uidgid()` of `kernel/capability.c`.
    fn has_capability(&self, caller: Caller, number: OwnerCapability, owner: (u32, u32)) -> bool {
        let read = |name| fs::read_to_string(format!("/proc/{}/{name}", caller.pid)).ok();
        let is_mapped = |name, id| read(name).is_some_and(|map| is_mapped(&map, id));
        caller.pid != 0
            && read("status").is_some_and(|status| is_effective(&status, number))
            && is_mapped("uid_map", owner.0)
            && is_mapped("gid_map", owner.1)
    }
}

/// True if `status`, the text of `/proc/PID/status`, has the capability.
fn is_effective(status: &str, number: OwnerCapability) -> bool {
    let line = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let set = line.and_then(|set| u64::from_str_radix(set.trim(), 16).ok());
    set.is_some_and(|set| set & 1 << number as u32 != 0)
}

/// True if the id map `map`, user_namespaces(7), has the id `id` of this process. For a process in
/// the same namespace, which has every id there is, the lines have the ids of the parent: in
/// another namespace than the initial one its ids may be missed.
fn is_mapped(map: &str, id: u32) -> bool {
    map.lines().any(|line| {
        let numbers: Vec<u64> = line.split_whitespace().filter_map(|n| n.parse().ok()).collect();
        let [_, outside, count] = numbers[..] else { return false };
        (outside..outside + count).contains(&id.into())
    })
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

    #[test]
    fn a_capability_reaches_the_users_that_the_namespace_has() {
        let map = "         0     100000      65536\n     70000          7          1\n";
        let found = [0, 7, 8, 99_999, 100_000, 165_535, 165_536].map(|id| is_mapped(map, id));
        assert_eq!(found, [false, true, false, false, true, true, false]);
        let fowner =
            |set: &str| is_effective(&format!("Name:\tx\n{set}\n"), OwnerCapability::Fowner);
        assert!(fowner("CapEff:\t0000000000000008") && !fowner("CapEff:\t0000000000000007"));
        assert!(!fowner("CapPrm:\t0000000000000008"));
        let own = Caller { pid: std::process::id(), ..Caller::default() };
        let has = |caller| ProcessGroups.has_capability(caller, OwnerCapability::Fowner, (0, 0));
        assert_eq!(has(own), is_root_of_all());
        assert!(!has(Caller::default()));
    }

    fn is_root_of_all() -> bool {
        let of = |name| fs::read_to_string(format!("/proc/self/{name}")).unwrap();
        is_effective(&of("status"), OwnerCapability::Fowner)
            && ["uid_map", "gid_map"].iter().all(|name| is_mapped(&of(name), 0))
    }
}
