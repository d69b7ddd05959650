//! The FUSE connection that a command acts on: any on the machine, by its mount point or its
//! number.

use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use defuse_fuse::mount::{MountEntry, fuse_mounts};
use defuse_trace::{FuseConnection, FuseMount};

use crate::error::{CommandFailure, Result};
use crate::paths;
use crate::registry::{self, RegisteredMount};

/// Time limit for a daemon to register after its start.
const SETTLING: Duration = Duration::from_secs(2);

/// The connection that a command acts on.
#[derive(Debug)]
pub struct CommandTarget {
    /// The connection and its daemon.
    pub connection: FuseConnection,
    /// The entry of the daemon, if it is one of defuse that is visible to this user.
    pub ours: Option<RegisteredMount>,
}

impl CommandTarget {
    /// The connection with this mount point or number.
    ///
    /// # Errors
    ///
    /// [`CommandFailure::Failed`] if there is none.
    pub fn find(text: &Path) -> Result<CommandTarget> {
        let id = number(text).or_else(|| find_by_path(text)).ok_or_else(|| {
            let shown = text.display();
            CommandFailure::Failed(format!(
                "{shown} is neither the mount point of a FUSE file system nor the number of a \
                 connection: see `defuse top --once` for what is"
            ))
        })?;
        CommandTarget::from_id(id)
    }

    /// The connection of an entry.
    pub fn from_found(found: RegisteredMount) -> Result<CommandTarget> {
        Ok(CommandTarget { connection: find_one(found.entry.connection)?, ours: Some(found) })
    }

    /// The daemon, which is one of defuse.
    ///
    /// # Errors
    ///
    /// [`CommandFailure::Failed`] if it is not.
    pub fn daemon(&self) -> Result<&RegisteredMount> {
        self.ours.as_ref().ok_or_else(|| {
            let name = self.connection.name();
            CommandFailure::Failed(format!(
                "{name} is no mount of defuse: `defuse list` shows them"
            ))
        })
    }

    fn from_id(id: u32) -> Result<CommandTarget> {
        let registered =
            || registry::list_all().into_iter().find(|found| found.entry.connection == id);
        let mut target = CommandTarget { connection: find_one(id)?, ours: registered() };
        // A mount is visible a moment before its daemon completes INIT and registers.
        let begun = Instant::now();
        while target.ours.is_none() && begun.elapsed() < SETTLING && target.is_settling() {
            thread::sleep(Duration::from_millis(2));
            target.ours = registered();
        }
        Ok(target)
    }

    /// True for a daemon of this program that started a moment ago.
    fn is_settling(&self) -> bool {
        let is_young = |pid: u32| {
            let age = registry::process_age(pid);
            age.is_some_and(|age| age < SETTLING)
        };
        let processes = &self.connection.processes;
        processes.iter().any(|process| process.comm == "defuse" && is_young(process.pid))
    }

    /// True while it is mounted or served.
    pub fn is_there(&self) -> bool {
        let id = self.connection.id;
        mounts().iter().any(|mount| mount.connection == id)
            || self.ours.as_ref().is_some_and(|found| found.entry.is_alive())
    }
}

/// All FUSE mounts in the namespace of this process.
pub fn mounts() -> Vec<FuseMount> {
    let all = fuse_mounts().unwrap_or_default();
    all.iter().map(mount_of).collect()
}

fn mount_of(entry: &MountEntry) -> FuseMount {
    FuseMount {
        connection: entry.connection(),
        mount_point: entry.mount_point.clone(),
        fstype: entry.fstype.clone(),
        source: entry.source.to_string_lossy().into_owned(),
    }
}

fn find_one(id: u32) -> Result<FuseConnection> {
    let mut mounts = mounts();
    mounts.retain(|mount| mount.connection == id);
    let found = FuseConnection::list(&mounts).pop();
    // A detached mount is served until its last file is closed.
    let detached = || {
        let pids = defuse_trace::processes_of(Some(id)).remove(&id).unwrap_or_default();
        let processes =
            pids.into_iter().filter_map(defuse_trace::DaemonProcess::read).collect::<Vec<_>>();
        (!processes.is_empty()).then_some(FuseConnection { id, mounts: Vec::new(), processes })
    };
    found.or_else(detached).ok_or_else(|| {
        CommandFailure::Failed(format!(
            "there is no FUSE connection {id}: `defuse top --once` lists them"
        ))
    })
}

fn number(text: &Path) -> Option<u32> {
    text.to_str()?.parse().ok()
}

/// The topmost mount at this path. Does not access the file system.
fn find_by_path(path: &Path) -> Option<u32> {
    let path = paths::mountpoint(path);
    let all = fuse_mounts().unwrap_or_default();
    all.iter().rfind(|entry| entry.mount_point == path).map(MountEntry::connection)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_number_of_a_block_device_has_both_parts() {
        let line =
            b"64 25 8:1 / /mnt/blk ro - fuseblk /dev/sda1 rw\n1 2 0:57 / /m rw - fuse x rw\n";
        let entries = defuse_fuse::mount::parse_mountinfo(line);
        assert_eq!(mount_of(&entries[0]).connection, 8 << 20 | 1);
        assert_eq!(mount_of(&entries[1]).connection, 57);
    }

    #[test]
    fn a_missing_connection_is_reported_with_the_next_step() {
        for text in ["/no/such/mount", "4294967295", "word"] {
            let Err(CommandFailure::Failed(why)) = CommandTarget::find(Path::new(text)) else {
                panic!("{text}")
            };
            assert!(why.contains("defuse top --once"), "{why}");
        }
    }
}
