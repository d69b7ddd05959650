//! Control groups of one cell: the memory limit for application and daemon together, and the CPU
//! time of each.
//!
//! Version 1 (one hierarchy per controller) and version 2 (one for all) are both supported.
//! Sources: the kernel's `Documentation/admin-guide/cgroup-v1/memory.rst`, `cpuacct.rst` and
//! `cgroup-v2.rst`.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context, Result};

use crate::throttle::{DeviceThrottle, ThrottleLimits};

/// Interval at which the limit is adjusted.
const FOLLOW: Duration = Duration::from_millis(5);
/// Reserve for allocations between two adjustments.
const ROOM: u64 = 64 << 20;

/// The role of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProcessRole {
    /// The process that uses the files.
    Application,
    /// The process that serves the files.
    Daemon,
}

impl ProcessRole {
    const ALL: [ProcessRole; 2] = [ProcessRole::Application, ProcessRole::Daemon];

    fn folder(self) -> &'static str {
        match self {
            ProcessRole::Application => "application",
            ProcessRole::Daemon => "daemon",
        }
    }
}

/// The control-group hierarchies of this machine.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CgroupHierarchies {
    /// Version 2, and its controllers.
    unified: Option<(PathBuf, Vec<String>)>,
    memory: Option<PathBuf>,
    cpuacct: Option<PathBuf>,
    blkio: Option<PathBuf>,
}

impl CgroupHierarchies {
    /// Detects the mounted hierarchies.
    pub fn detect() -> Self {
        let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
        let controllers = |root: &Path| {
            let text = fs::read_to_string(root.join("cgroup.controllers")).unwrap_or_default();
            text.split_whitespace().map(str::to_owned).collect()
        };
        Self::parse_mountinfo(&mounts, controllers)
    }

    fn parse_mountinfo(mounts: &str, controllers: impl Fn(&Path) -> Vec<String>) -> Self {
        let mut found = Self::default();
        for line in mounts.lines() {
            let Some((left, right)) = line.split_once(" - ") else { continue };
            let Some(root) = left.split(' ').nth(4).map(PathBuf::from) else { continue };
            let fields: Vec<&str> = right.split(' ').collect();
            match (fields[0], fields.get(2)) {
                ("cgroup2", _) => {
                    let controllers = controllers(&root);
                    found.unified = Some((root, controllers));
                }
                ("cgroup", Some(options)) => {
                    let has = |name| options.split(',').any(|option| option == name);
                    for (name, place) in [
                        ("memory", &mut found.memory),
                        ("cpuacct", &mut found.cpuacct),
                        ("blkio", &mut found.blkio),
                    ] {
                        if has(name) {
                            *place = Some(root.clone());
                        }
                    }
                }
                _ => {}
            }
        }
        found
    }

    fn find_unified(&self, controller: &str) -> Option<&Path> {
        let (root, controllers) = self.unified.as_ref()?;
        controllers.iter().any(|name| name == controller).then_some(root.as_path())
    }

    /// The cgroup version for limiting memory; `None` if that is not possible.
    pub fn memory_version(&self) -> Option<&'static str> {
        if self.memory.is_some() {
            return Some("cgroup v1");
        }
        self.find_unified("memory").map(|_| "cgroup v2")
    }

    /// The cgroup version for throttling a device; `None` if that is not possible.
    pub fn throttle_version(&self) -> Option<&'static str> {
        if self.blkio.is_some() {
            return Some("cgroup v1");
        }
        self.find_unified("io").map(|_| "cgroup v2")
    }
}

/// The groups of one cell, removed when dropped.
#[derive(Debug)]
pub struct CellCgroups {
    folders: Vec<PathBuf>,
    memory: Option<PathBuf>,
    unified: Option<PathBuf>,
    cpuacct: Option<PathBuf>,
    blkio_root: Option<PathBuf>,
    memory_is_v1: bool,
    /// The initial limit in bytes; `None` if memory cannot be limited.
    pub limit_bytes: Option<u64>,
    /// The reason why it cannot.
    pub trouble: Option<String>,
}

impl CellCgroups {
    /// Creates groups called `name`, with one limit for all their processes. If memory cannot be
    /// limited, [`CellCgroups::trouble`] contains the reason, and the rest works without a limit.
    pub fn create(
        hierarchies: &CgroupHierarchies,
        name: &str,
        limit_bytes: Option<u64>,
    ) -> CellCgroups {
        let mut groups = CellCgroups {
            folders: Vec::new(),
            memory: None,
            unified: None,
            cpuacct: None,
            blkio_root: hierarchies.blkio.clone(),
            memory_is_v1: hierarchies.memory.is_some(),
            limit_bytes: None,
            trouble: None,
        };
        groups.unified = hierarchies.unified.as_ref().and_then(|(root, controllers)| {
            let wanted =
                ["memory", "io"].into_iter().filter(|c| controllers.iter().any(|has| has == c));
            for controller in wanted {
                // Usually it is enabled already. If it cannot be, setting the limit reports the
                // error.
                let _ = fs::write(root.join("cgroup.subtree_control"), format!("+{controller}"));
            }
            groups.make(root, name).ok()
        });
        groups.cpuacct = hierarchies.cpuacct.as_ref().and_then(|root| groups.make(root, name).ok());
        groups.memory = match &hierarchies.memory {
            Some(root) => groups.make(root, name).ok(),
            None => hierarchies.find_unified("memory").and(groups.unified.clone()),
        };
        if let Some(limit) = limit_bytes {
            match groups.limit(limit) {
                Ok(()) => groups.limit_bytes = Some(limit),
                Err(error) => groups.trouble = Some(format!("memory not limited: {error:#}")),
            }
        }
        groups
    }

    fn make(&mut self, root: &Path, name: &str) -> Result<PathBuf> {
        let folder = root.join(name);
        fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
        if !self.folders.contains(&folder) {
            self.folders.push(folder.clone());
        }
        for role in ProcessRole::ALL {
            fs::create_dir_all(folder.join(role.folder()))?;
        }
        Ok(folder)
    }

    fn limit(&self, bytes: u64) -> Result<()> {
        let folder = self.memory.as_ref().context("no memory control group can be created here")?;
        let file = if self.memory_is_v1 { "memory.limit_in_bytes" } else { "memory.max" };
        let file = folder.join(file);
        fs::write(&file, bytes.to_string())
            .with_context(|| format!("cannot set {}", file.display()))
    }

    /// Anonymous memory of the processes in bytes, without caches.
    fn anonymous_bytes(&self) -> Option<u64> {
        let stat = fs::read_to_string(self.memory.as_ref()?.join("memory.stat")).ok()?;
        let key = if self.memory_is_v1 { "total_rss " } else { "anon " };
        stat.lines().find_map(|line| line.strip_prefix(key)?.trim().parse().ok())
    }

    /// Raises the limit until `ended`, so that it exceeds the processes' anonymous memory by at
    /// least `caches_bytes` and a reserve. It is never lowered: a hundred threads fill their
    /// buffers faster than the limit could follow, and would be killed.
    pub fn follow(&self, caches_bytes: u64, ended: &AtomicBool) {
        let Some(mut limit) = self.limit_bytes else { return };
        while !ended.load(Ordering::Relaxed) {
            let needed =
                self.anonymous_bytes().map_or(0, |own| (caches_bytes + own + ROOM) & !4095);
            if needed > limit && self.limit(needed).is_ok() {
                limit = needed;
            }
            sleep(FOLLOW);
        }
    }

    /// The files to which a process writes its id to join the groups.
    pub fn procs_files(&self, role: ProcessRole) -> Vec<PathBuf> {
        let folders = self.folders.iter();
        folders.map(|folder| folder.join(role.folder()).join("cgroup.procs")).collect()
    }

    /// CPU time in nanoseconds of all processes of this role, including those that have ended.
    pub fn cpu_ns(&self, role: ProcessRole) -> Option<u64> {
        if let Some(folder) = &self.cpuacct {
            let text = fs::read_to_string(folder.join(role.folder()).join("cpuacct.usage")).ok()?;
            return text.trim().parse().ok();
        }
        let folder = self.unified.as_ref()?.join(role.folder());
        usage_ns(&fs::read_to_string(folder.join("cpu.stat")).ok()?)
    }

    /// The peak memory usage in bytes.
    pub fn peak_bytes(&self) -> Option<u64> {
        let file = if self.memory_is_v1 { "memory.max_usage_in_bytes" } else { "memory.peak" };
        fs::read_to_string(self.memory.as_ref()?.join(file)).ok()?.trim().parse().ok()
    }

    /// Throttles a device (`MAJOR:MINOR`) until the result is dropped.
    ///
    /// In version 1 the limit applies to the root group, because write-back is done by kernel
    /// threads outside of our groups. In version 2 write-back belongs to the group whose memory it
    /// cleans, so the limit applies to our group.
    pub fn throttle(&self, device: &str, limits: &ThrottleLimits) -> Result<DeviceThrottle> {
        if let Some(root) = &self.blkio_root {
            return DeviceThrottle::v1(root, device, limits);
        }
        let folder =
            self.unified.as_ref().context("no control group for throttling can be created here")?;
        DeviceThrottle::v2(folder, device, limits)
    }
}

impl Drop for CellCgroups {
    fn drop(&mut self) {
        for folder in &self.folders {
            remove(folder);
        }
    }
}

/// Removes a group and its two subgroups. It retries while processes are still exiting.
pub fn remove(folder: &Path) {
    for _ in 0..100 {
        for role in ProcessRole::ALL {
            let _ = fs::remove_dir(folder.join(role.folder()));
        }
        if fs::remove_dir(folder).is_ok() || !folder.exists() {
            return;
        }
        sleep(Duration::from_millis(10));
    }
    eprintln!("{}: still in use and not removed; remove it with rmdir", folder.display());
}

/// `usage_usec` of a `cpu.stat`, in nanoseconds.
fn usage_ns(text: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix("usage_usec "))?;
    line.trim().parse::<u64>().ok().map(|us| us * 1000)
}

/// The directories of all groups of this kind whose process is gone.
pub fn find_left_groups(
    hierarchies: &CgroupHierarchies,
    prefix: &str,
    alive: impl Fn(u32) -> bool,
) -> Vec<PathBuf> {
    let unified = hierarchies.unified.as_ref().map(|(root, _)| root);
    let roots = [&hierarchies.memory, &hierarchies.cpuacct].into_iter().flatten().chain(unified);
    let mut found = Vec::new();
    for entry in roots.flat_map(fs::read_dir).flatten().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let pid = name.strip_prefix(prefix).and_then(|rest| rest.split('-').next()?.parse().ok());
        if pid.is_some_and(|pid| !alive(pid)) {
            found.push(entry.path());
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    const V1: &str = "\
30 25 0:26 / /sys/fs/cgroup/cpuacct rw - cgroup cgroup rw,cpuacct
31 25 0:27 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory
36 25 0:32 / /sys/fs/cgroup/blkio rw - cgroup cgroup rw,blkio
39 25 0:35 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw
";
    const V2: &str = "30 25 0:26 / /sys/fs/cgroup rw shared:4 - cgroup2 cgroup2 rw,nsdelegate\n";

    #[test]
    fn both_cgroup_versions_are_detected() {
        let v1 = CgroupHierarchies::parse_mountinfo(V1, |_| Vec::new());
        assert_eq!(
            (v1.memory_version(), v1.throttle_version()),
            (Some("cgroup v1"), Some("cgroup v1"))
        );
        let all = |_: &Path| ["cpu", "io", "memory"].map(str::to_owned).to_vec();
        let v2 = CgroupHierarchies::parse_mountinfo(V2, all);
        assert_eq!(
            (v2.memory_version(), v2.throttle_version()),
            (Some("cgroup v2"), Some("cgroup v2"))
        );
        let bare = CgroupHierarchies::parse_mountinfo(V2, |_| vec!["cpu".into()]);
        assert_eq!((bare.memory_version(), bare.throttle_version()), (None, None));
        assert_eq!(CgroupHierarchies::parse_mountinfo("", all).memory_version(), None);
    }

    /// A directory in place of the kernel's: this program only decides which file gets which value.
    #[test]
    fn version_2_limits_the_common_group() {
        let root = tempfile::tempdir().unwrap();
        let mounts = format!("30 25 0:26 / {} rw - cgroup2 cgroup2 rw\n", root.path().display());
        let all = |_: &Path| ["io", "memory"].map(str::to_owned).to_vec();
        let hierarchies = CgroupHierarchies::parse_mountinfo(&mounts, all);
        let groups = CellCgroups::create(&hierarchies, "cell", Some(1 << 25));
        assert_eq!((groups.limit_bytes, &groups.trouble), (Some(1 << 25), &None));
        let folder = root.path().join("cell");
        assert_eq!(fs::read_to_string(folder.join("memory.max")).unwrap(), "33554432");
        assert_eq!(groups.procs_files(ProcessRole::Daemon), [folder.join("daemon/cgroup.procs")]);
        fs::write(folder.join("memory.stat"), "anon 8192\nfile 7\n").unwrap();
        assert_eq!(groups.anonymous_bytes(), Some(8192));
        let ended = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| groups.follow(1 << 25, &ended));
            while fs::read_to_string(folder.join("memory.max")).unwrap() != "100671488" {
                sleep(Duration::from_millis(1));
            }
            ended.store(true, Ordering::Relaxed);
        });
        fs::write(folder.join("daemon/cpu.stat"), "usage_usec 12\nuser_usec 5\n").unwrap();
        assert_eq!(groups.cpu_ns(ProcessRole::Daemon), Some(12_000));
        let limits = ThrottleLimits { read_bps: 1, write_bps: 2, read_iops: 3, write_iops: 4 };
        let throttle = groups.throttle("7:1", &limits).unwrap();
        let text = fs::read_to_string(folder.join("io.max")).unwrap();
        assert_eq!(text, "7:1 rbps=1 wbps=2 riops=3 wiops=4");
        drop(throttle);
        let text = fs::read_to_string(folder.join("io.max")).unwrap();
        assert_eq!(text, "7:1 rbps=max wbps=max riops=max wiops=max");
        std::mem::forget(groups);
    }

    #[test]
    fn without_control_groups_there_is_a_reason() {
        let groups = CellCgroups::create(&CgroupHierarchies::default(), "cell", Some(1));
        assert_eq!(groups.limit_bytes, None);
        assert!(groups.trouble.as_ref().unwrap().starts_with("memory not limited"));
        assert!(groups.throttle("7:1", &ThrottleLimits::default()).is_err());
    }

    /// The machine's version 2 alone, as if there were no version 1. CPU time is counted without a
    /// controller. Memory and devices are tested with plain files only if version 1 has their
    /// controllers.
    #[test]
    fn version_2_counts_the_cpu_time_of_ended_processes_of_the_group() {
        let unified = CgroupHierarchies {
            memory: None,
            cpuacct: None,
            blkio: None,
            ..CgroupHierarchies::detect()
        };
        let name = format!("defuse-study-test-{}", std::process::id());
        let groups = CellCgroups::create(&unified, &name, Some(64 << 20));
        let Some(folder) = groups.unified.clone() else {
            println!("not here: no group of version 2 can be created here");
            return;
        };
        assert_eq!(
            groups.procs_files(ProcessRole::Application),
            [folder.join("application/cgroup.procs")]
        );
        let spin = "i=0; while [ $i -lt 200000 ]; do i=$((i+1)); done";
        let procs = &groups.procs_files(ProcessRole::Application)[0];
        let script = format!("echo $$ > {} && {spin} && times", procs.display());
        let ran = std::process::Command::new("sh").args(["-c", &script]).output().unwrap();
        if !ran.status.success() {
            println!("not here: {}", String::from_utf8_lossy(&ran.stderr));
            return;
        }
        // times(1): "0m0.420s 0m0.000s" of the shell itself, which has ended now.
        let value = String::from_utf8(ran.stdout).unwrap();
        let seconds = |text: &str| {
            let (minutes, seconds) = text.trim_end_matches('s').split_once('m').unwrap();
            60.0 * minutes.parse::<f64>().unwrap() + seconds.parse::<f64>().unwrap()
        };
        let own: f64 = value.lines().next().unwrap().split(' ').map(seconds).sum();
        let counted = groups.cpu_ns(ProcessRole::Application).unwrap() as f64 / 1e9;
        assert!(counted > 0.5 * own && counted < 1.5 * own + 0.1, "{counted} of {own}");
        assert_eq!(groups.cpu_ns(ProcessRole::Daemon), Some(0));
        match unified.memory_version() {
            Some(_) => assert_eq!((groups.limit_bytes, &groups.trouble), (Some(64 << 20), &None)),
            None => assert!(groups.trouble.as_ref().unwrap().contains("memory"), "{groups:?}"),
        }
        drop(groups);
        assert!(!folder.exists(), "the group is removed");
    }
}
