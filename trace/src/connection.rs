//! The FUSE connections of the machine, and their daemons.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use procfs::process;
use serde::Serialize;

/// A mount of a FUSE file system, from `/proc/self/mountinfo`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct FuseMount {
    /// The number of the connection, as in `/sys/fs/fuse/connections`.
    pub connection: u32,
    /// The mount point.
    pub mount_point: PathBuf,
    /// The type, such as `fuse.sshfs`.
    pub fstype: String,
    /// The source, such as `host:dir`.
    pub source: String,
}

/// A process that has the device of a connection open.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct DaemonProcess {
    /// Process id.
    pub pid: u32,
    /// Process name.
    pub comm: String,
    /// Number of threads.
    pub threads: u32,
    /// Processor time since the process started, in nanoseconds.
    pub cpu_ns: u64,
}

/// A connection, its mounts, and its daemon.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct FuseConnection {
    /// The number of the connection.
    pub id: u32,
    /// Its mounts. Empty if there are none in this mount namespace.
    pub mounts: Vec<FuseMount>,
    /// The processes that have its device open; empty if unknown.
    pub processes: Vec<DaemonProcess>,
}

impl FuseConnection {
    /// The connections of these mounts, by number, with the processes that serve them.
    pub fn list(mounts: &[FuseMount]) -> Vec<FuseConnection> {
        let mut servers = processes_of(None);
        let mut by_id: BTreeMap<u32, Vec<FuseMount>> = BTreeMap::new();
        for mount in mounts {
            by_id.entry(mount.connection).or_default().push(mount.clone());
        }
        let connections = by_id.into_iter().map(|(id, mounts)| {
            let pids = servers.remove(&id).unwrap_or_default();
            let processes = pids.into_iter().filter_map(DaemonProcess::read).collect();
            FuseConnection { id, mounts, processes }
        });
        connections.collect()
    }

    /// A name for display: the first mount point, or the number.
    pub fn name(&self) -> String {
        match self.mounts.first() {
            Some(mount) => mount.mount_point.display().to_string(),
            None => format!("connection {}", self.id),
        }
    }
}

impl DaemonProcess {
    /// Reads a process from /proc; `None` if it has ended.
    pub fn read(pid: u32) -> Option<DaemonProcess> {
        let process = process::Process::new(i32::try_from(pid).ok()?).ok()?;
        let stat = process.stat().ok()?;
        // A program started as /proc/self/exe has this name.
        let program = || process.exe().ok()?.file_name()?.to_str().map(str::to_owned);
        let own_name = (stat.comm == "exe").then(program).flatten();
        let tick_ns = 1_000_000_000 / procfs::ticks_per_second().max(1);
        Some(DaemonProcess {
            pid,
            comm: own_name.unwrap_or(stat.comm),
            threads: u32::try_from(stat.num_threads).unwrap_or(0),
            cpu_ns: (stat.utime + stat.stime) * tick_ns,
        })
    }
}

/// The processes that have a connection's device open, by connection, or for one connection only.
/// Processes that this user may not inspect are missing.
pub fn processes_of(connection: Option<u32>) -> BTreeMap<u32, Vec<u32>> {
    let mut found: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
    let Ok(dir) = fs::read_dir("/proc") else { return found };
    let pids = dir.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    for pid in pids {
        for id in connections_of(pid) {
            let pids = found.entry(id).or_default();
            if connection.is_none_or(|wanted| wanted == id) && !pids.contains(&pid) {
                pids.push(pid);
            }
        }
    }
    found
}

/// The connections whose device a process has open.
fn connections_of(pid: u32) -> Vec<u32> {
    let Ok(dir) = fs::read_dir(format!("/proc/{pid}/fd")) else { return Vec::new() };
    let device = Path::new("/dev/fuse");
    let mut found: Vec<u32> = dir
        .flatten()
        .filter(|entry| fs::read_link(entry.path()).is_ok_and(|target| target == device))
        .filter_map(|entry| connection_of(pid, entry.file_name().to_str()?))
        .collect();
    found.sort_unstable();
    found.dedup();
    found
}

/// The connection of a device file (`fuse_connection` in its fdinfo).
fn connection_of(pid: u32, fd: &str) -> Option<u32> {
    let text = fs::read_to_string(format!("/proc/{pid}/fdinfo/{fd}")).ok()?;
    text.lines().find_map(|line| line.strip_prefix("fuse_connection:")?.trim().parse().ok())
}
