//! The process that serves a mount, and the other places where its file system is mounted, from
//! /proc alone: they are found without a registry, which a user may not have, and which root does
//! not read in directories of others.

use std::collections::BTreeSet;
use std::fmt;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use defuse_fuse::mount::{MountEntry, parse_mountinfo};
use defuse_trace::DaemonProcess;

use crate::registry::process_start;

/// A process, which another one with its number later is not taken for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DaemonIdentity {
    /// Its number.
    pub pid: u32,
    /// Its start, in clock ticks since boot.
    pub start: u64,
}

impl DaemonIdentity {
    /// The processes of this program that have the device of a connection open, as far as this user
    /// may see them, by their start. The last one has the mount: an earlier one is about to end,
    /// and its connection had the same number. No other process can be among them than one that was
    /// given the device by the process that mounted.
    pub fn find_daemons(connection: u32) -> Vec<DaemonIdentity> {
        let holders = defuse_trace::processes_of(Some(connection)).remove(&connection);
        let is_ours =
            |pid: &u32| DaemonProcess::read(*pid).is_some_and(|it| it.comm.starts_with("defuse"));
        let holders = holders.unwrap_or_default().into_iter().filter(is_ours);
        let mut all: Vec<DaemonIdentity> = holders
            .filter_map(|pid| Some(DaemonIdentity { pid, start: process_start(pid)? }))
            .collect();
        all.sort_by_key(|daemon| daemon.start);
        all
    }

    /// True while it runs.
    pub fn is_alive(&self) -> bool {
        process_start(self.pid) == Some(self.start)
    }
}

/// A mount in some mount namespace.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct MountLocation {
    namespace: u64,
    mount_id: u32,
    path: PathBuf,
    /// A process in its namespace, if that is not the namespace of this process.
    inside: Option<u32>,
}

impl fmt::Display for MountLocation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.path.display())?;
        match self.inside {
            None => Ok(()),
            Some(pid) => write!(f, " (in the mount namespace of process {pid})"),
        }
    }
}

impl MountLocation {
    /// The command that unmounts it.
    pub fn command(&self) -> String {
        let path = self.path.display();
        match self.inside {
            None => format!("defuse umount {path}"),
            Some(pid) => format!("nsenter --target {pid} --mount umount {path}"),
        }
    }

    /// True for a mount in the namespace of this process.
    pub fn is_here(&self) -> bool {
        self.inside.is_none()
    }

    fn is(&self, other: &MountLocation) -> bool {
        (self.namespace, self.mount_id) == (other.namespace, other.mount_id)
    }
}

/// All mounts of a connection, in the namespaces that this user may see.
pub fn places(connection: u32) -> Vec<MountLocation> {
    let is_it = |mount: &MountEntry| mount.connection() == connection && mount.is_fuse();
    let own = namespace(Path::new("/proc/thread-self"));
    let mut seen = BTreeSet::new();
    let mut found = Vec::new();
    let mut look = |process: &Path, pid: Option<u32>| {
        let Some(namespace) = namespace(process).filter(|namespace| seen.insert(*namespace)) else {
            return;
        };
        let Ok(text) = fs::read(process.join("mountinfo")) else {
            // Another process of the namespace may be of this user.
            seen.remove(&namespace);
            return;
        };
        let inside = pid.filter(|_| Some(namespace) != own);
        let here = parse_mountinfo(&text).into_iter().filter(is_it);
        found.extend(here.map(|mount| MountLocation {
            namespace,
            mount_id: mount.mount_id,
            path: mount.mount_point,
            inside,
        }));
    };
    look(Path::new("/proc/thread-self"), None);
    for entry in fs::read_dir("/proc").into_iter().flatten().flatten() {
        if let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse().ok()) {
            look(&entry.path(), Some(pid));
        }
    }
    found
}

/// Returns the places of `before` that are still there: a later mount can have the same number.
pub fn find_remaining(connection: u32, before: &[MountLocation]) -> Vec<MountLocation> {
    let now = if before.is_empty() { Vec::new() } else { places(connection) };
    now.into_iter().filter(|place| before.iter().any(|earlier| earlier.is(place))).collect()
}

/// The mount namespace of a process.
fn namespace(process: &Path) -> Option<u64> {
    fs::metadata(process.join("ns/mnt")).ok().map(|meta| meta.ino())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_is_shown_with_the_command_that_unmounts_it() {
        let here = MountLocation { namespace: 1, mount_id: 2, path: "/m".into(), inside: None };
        assert_eq!((here.to_string(), here.command()), ("/m".into(), "defuse umount /m".into()));
        let there = MountLocation { inside: Some(7), ..here.clone() };
        assert_eq!(there.to_string(), "/m (in the mount namespace of process 7)");
        assert_eq!(there.command(), "nsenter --target 7 --mount umount /m");
        assert!(here.is(&there) && !here.is(&MountLocation { mount_id: 3, ..here.clone() }));
    }

    #[test]
    fn a_number_without_a_connection_has_neither_a_daemon_nor_places() {
        assert_eq!(
            (DaemonIdentity::find_daemons(u32::MAX), places(u32::MAX)),
            (Vec::new(), Vec::new())
        );
        assert_eq!(find_remaining(u32::MAX, &[]), []);
    }
}
