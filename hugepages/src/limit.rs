//! The memory that this process may use.

use std::fs;
use std::path::Path;

/// Bytes of memory that this process may use: the memory of the machine, sysinfo(2), or the lowest
/// limit of its control groups, if that is less (`memory.max` of cgroups(7) version 2,
/// `memory.limit_in_bytes` of version 1). Beyond the limit of a control group the kernel kills the
/// process.
pub fn memory_limit() -> u64 {
    let machine = rustix::system::sysinfo();
    let machine = (machine.totalram as u64).saturating_mul(machine.mem_unit.into());
    let machine = if machine == 0 { u64::MAX } else { machine };
    let groups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    machine.min(limit_of_groups(&groups, Path::new("/sys/fs/cgroup")).unwrap_or(u64::MAX))
}

/// The lowest limit of the groups in `groups`, the text of /proc/PID/cgroup, and of those above
/// them.
fn limit_of_groups(groups: &str, mount: &Path) -> Option<u64> {
    groups.lines().filter_map(|line| limit_of_group(line, mount)).min()
}

fn limit_of_group(line: &str, mount: &Path) -> Option<u64> {
    let mut fields = line.splitn(3, ':');
    let (_, controllers, path) = (fields.next()?, fields.next()?, fields.next()?);
    let (mount, file) = match controllers {
        "" => (mount.to_path_buf(), "memory.max"),
        _ if controllers.split(',').any(|name| name == "memory") => {
            (mount.join("memory"), "memory.limit_in_bytes")
        }
        _ => return None,
    };
    // In a namespace of control groups, the path may lead out of the mounted hierarchy.
    let path = path.trim_start_matches('/');
    let path =
        if path.split('/').any(|name| name == "..") { Path::new("") } else { Path::new(path) };
    let limits = path.ancestors().filter_map(|group| {
        let text = fs::read_to_string(mount.join(group).join(file)).ok()?;
        // "max" is no limit.
        text.trim().parse().ok()
    });
    limits.min()
}

#[cfg(test)]
mod tests {
    use super::*;

    struct CgroupTree(std::path::PathBuf);

    impl CgroupTree {
        fn new(name: &str) -> Self {
            let dir = std::env::temp_dir().join(format!("defuse-{name}-{}", std::process::id()));
            fs::create_dir_all(&dir).unwrap();
            CgroupTree(dir)
        }

        fn set(&self, path: &str, limit: &str) {
            let path = self.0.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, limit).unwrap();
        }
    }

    impl Drop for CgroupTree {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn the_lowest_limit_on_the_way_to_the_root_counts() {
        let groups = CgroupTree::new("groups-2");
        let of = |text| limit_of_groups(text, &groups.0);
        assert_eq!(of("0::/a/b\n"), None, "no file");
        groups.set("a/b/memory.max", "max\n");
        assert_eq!(of("0::/a/b\n"), None);
        groups.set("a/memory.max", "200000\n");
        assert_eq!(of("0::/a/b\n"), Some(200_000));
        groups.set("a/b/memory.max", "100000\n");
        assert_eq!(of("0::/a/b\n"), Some(100_000));
        groups.set("memory.max", "50000\n");
        assert_eq!(of("0::/\n"), Some(50_000), "in a name space of groups");
        assert_eq!(of("0::/../../elsewhere\n"), Some(50_000));
    }

    #[test]
    fn groups_of_version_1_count_too() {
        let groups = CgroupTree::new("groups-1");
        groups.set("memory/docker/one/memory.limit_in_bytes", "300000\n");
        groups.set("cpu/docker/one/memory.limit_in_bytes", "1\n");
        let text = "5:cpu,cpuacct:/docker/one\n4:memory:/docker/one\n0::/docker/one\n";
        assert_eq!(limit_of_groups(text, &groups.0), Some(300_000));
    }

    #[test]
    fn this_process_may_use_some_memory() {
        let machine = rustix::system::sysinfo();
        let machine = machine.totalram as u64 * u64::from(machine.mem_unit);
        assert!((1..=machine).contains(&memory_limit()));
    }
}
