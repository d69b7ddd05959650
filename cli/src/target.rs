//! Which FUSE connection a command is about: any on the machine, by its mount point or its number.

use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use defuse_fuse::mount::{MountEntry, fuse_mounts};
use defuse_trace::{Connection, Mount};

use crate::error::{Failure, Result};
use crate::paths;
use crate::registry::{self, Found};

/// How long after its start a daemon may not be registered yet.
const SETTLING: Duration = Duration::from_secs(2);

/// What a command is about.
#[derive(Debug)]
pub struct Target {
    /// The connection and who serves it.
    pub connection: Connection,
    /// The entry of its daemon, where it is one of defuse that this user may see.
    pub ours: Option<Found>,
}

impl Target {
    /// That with this mount point, or this number. Errors: [`Failure::Failed`] where there is none.
    pub fn find(text: &Path) -> Result<Target> {
        let id = number(text).or_else(|| by_path(text)).ok_or_else(|| {
            let shown = text.display();
            Failure::Failed(format!(
                "{shown} is neither the mount point of a FUSE file system nor the number of a \
                 connection: see `defuse top --once` for what is"
            ))
        })?;
        Target::of(id)
    }

    /// That of an entry.
    pub fn of_found(found: Found) -> Result<Target> {
        Ok(Target { connection: one(found.entry.connection)?, ours: Some(found) })
    }

    fn of(id: u32) -> Result<Target> {
        let registered = || registry::all().into_iter().find(|found| found.entry.connection == id);
        let mut target = Target { connection: one(id)?, ours: registered() };
        // A mount can be seen a moment before its daemon has agreed with the kernel and registered.
        let begun = Instant::now();
        while target.ours.is_none() && begun.elapsed() < SETTLING && target.is_settling() {
            thread::sleep(Duration::from_millis(2));
            target.ours = registered();
        }
        Ok(target)
    }

    /// Whether it is served by this program, which has begun just now.
    fn is_settling(&self) -> bool {
        let is_young = |pid: u32| {
            let age = registry::process_age(pid);
            age.is_some_and(|age| age < SETTLING)
        };
        let processes = &self.connection.processes;
        processes.iter().any(|process| process.comm == "defuse" && is_young(process.pid))
    }

    /// Whether it is still mounted or served.
    pub fn is_there(&self) -> bool {
        let id = self.connection.id;
        mounts().iter().any(|mount| mount.connection == id)
            || self.ours.as_ref().is_some_and(|found| found.entry.is_alive())
    }
}

/// Every FUSE mount that this process can see.
pub fn mounts() -> Vec<Mount> {
    let all = fuse_mounts().unwrap_or_default();
    all.iter().map(mount_of).collect()
}

fn mount_of(entry: &MountEntry) -> Mount {
    Mount {
        connection: id_of(entry),
        mount_point: entry.mount_point.clone(),
        fstype: entry.fstype.clone(),
        source: entry.source.to_string_lossy().into_owned(),
    }
}

/// The number of a connection is the kernel's `dev_t`: that of fuseblk has a major part too.
fn id_of(entry: &MountEntry) -> u32 {
    entry.major << 20 | entry.minor
}

fn one(id: u32) -> Result<Connection> {
    let mut mounts = mounts();
    mounts.retain(|mount| mount.connection == id);
    let found = Connection::all(&mounts).pop();
    // One that is mounted nowhere may still be served, until its last file is closed.
    let detached = || {
        let pids = defuse_trace::processes_of(Some(id)).remove(&id).unwrap_or_default();
        let processes =
            pids.into_iter().filter_map(defuse_trace::Process::read).collect::<Vec<_>>();
        (!processes.is_empty()).then_some(Connection { id, mounts: Vec::new(), processes })
    };
    found.or_else(detached).ok_or_else(|| {
        Failure::Failed(format!(
            "there is no FUSE connection {id}: see `defuse top --once` for what there is"
        ))
    })
}

fn number(text: &Path) -> Option<u32> {
    text.to_str()?.parse().ok()
}

/// The topmost mount there. The file system itself is not asked.
fn by_path(path: &Path) -> Option<u32> {
    let path = paths::mountpoint(path);
    let all = fuse_mounts().unwrap_or_default();
    all.iter().rfind(|entry| entry.mount_point == path).map(id_of)
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
            let Err(Failure::Failed(why)) = Target::find(Path::new(text)) else { panic!("{text}") };
            assert!(why.contains("defuse top --once"), "{why}");
        }
    }
}
