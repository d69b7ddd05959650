//! NUMA nodes, their processors, and the nodes of devices, from sysfs.

use std::collections::HashMap;
use std::fmt;
use std::fs::read_to_string;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

static SYSFS: OnceLock<PathBuf> = OnceLock::new();

/// Uses another directory in place of /sys, before the first device is opened: for containers
/// without sysfs, and for tests of machines with several nodes. Returns false if it is too late.
pub fn use_sysfs(dir: &Path) -> bool {
    SYSFS.get_or_init(|| dir.to_path_buf()) == dir
}

fn sysfs() -> &'static Path {
    SYSFS.get_or_init(|| PathBuf::from("/sys"))
}

/// The NUMA node that a block device is attached to. `None` if sysfs has no node for it, as for
/// devices without hardware.
pub(crate) fn node_of(rdev: u64) -> Option<u32> {
    node_below(sysfs(), rdev)
}

fn node_below(sysfs: &Path, rdev: u64) -> Option<u32> {
    let (major, minor) = (rustix::fs::major(rdev), rustix::fs::minor(rdev));
    let dir = sysfs.join(format!("dev/block/{major}:{minor}")).canonicalize().ok()?;
    let top = sysfs.canonicalize().ok()?;
    // The directory of a partition is in the directory of its disk, which is in the directory of
    // its controller, which has the node. -1 stands for none.
    let above = dir.ancestors().take_while(|dir| *dir != top);
    let mut texts = above.flat_map(|dir| {
        ["device/numa_node", "numa_node"].map(|name| read_to_string(dir.join(name)).ok())
    });
    texts.find_map(|text| text?.trim().parse().ok())
}

/// The first node that the machine has.
#[cfg(test)]
pub(super) fn first_node() -> Option<u32> {
    numbers(&read_to_string("/sys/devices/system/node/online").ok()?).first().copied()
}

/// The place of a thread.
#[derive(Clone, Debug)]
pub struct ThreadPlacement {
    /// The NUMA node, if it is known.
    pub node: Option<u32>,
    /// The processor that the thread is bound to, if any.
    pub processor: Option<u32>,
    /// Counts the thread on its processor.
    _taken: Option<Arc<ReservedProcessor>>,
}

#[derive(Debug)]
struct ReservedProcessor(u32);

/// The number of threads on each processor.
static TAKEN: Mutex<Option<HashMap<u32, u32>>> = Mutex::new(None);

impl ThreadPlacement {
    /// A place near a device on `node`: the processor of the node with the fewest placed threads.
    pub(super) fn take(node: Option<u32>) -> ThreadPlacement {
        let allowed = sched_getaffinity(None).ok();
        let may = |cpu: u32| allowed.as_ref().is_none_or(|set| has(set, cpu));
        ThreadPlacement::choose(sysfs(), node, may)
    }

    fn choose(sysfs: &Path, node: Option<u32>, may: impl Fn(u32) -> bool) -> ThreadPlacement {
        let nodes = sysfs.join("devices/system/node");
        let list = |path: PathBuf| numbers(&read_to_string(path).unwrap_or_default());
        let online = list(nodes.join("online"));
        // With one node, everything is on it.
        let node = node.or(if let [only] = online[..] { Some(only) } else { None });
        let Some(node) = node else {
            return ThreadPlacement { node: None, processor: None, _taken: None };
        };
        let processors = list(nodes.join(format!("node{node}/cpulist")));
        let taken = ReservedProcessor::fewest(processors.into_iter().filter(|cpu| may(*cpu)));
        let processor = taken.as_ref().map(|taken| taken.0);
        ThreadPlacement { node: Some(node), processor, _taken: taken }
    }

    /// Binds the calling thread.
    pub(super) fn bind_thread(&self) {
        let Some(processor) = self.processor else { return };
        let mut set = CpuSet::new();
        set.set(processor as usize);
        if let Err(errno) = sched_setaffinity(None, &set) {
            log::warn!("a thread is not bound to processor {processor}: {errno}");
        }
    }
}

impl fmt::Display for ThreadPlacement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.processor, self.node) {
            (Some(processor), Some(node)) => write!(f, "on processor {processor} of node {node}"),
            (None, Some(node)) => {
                write!(f, "on no processor of node {node}, of which it may use none")
            }
            (_, None) => f.write_str("on any processor: the node of the device is not known"),
        }
    }
}

fn has(set: &CpuSet, cpu: u32) -> bool {
    (cpu as usize) < CpuSet::MAX_CPU && set.is_set(cpu as usize)
}

impl ReservedProcessor {
    fn fewest(processors: impl Iterator<Item = u32>) -> Option<Arc<ReservedProcessor>> {
        let mut all = TAKEN.lock().unwrap_or_else(PoisonError::into_inner);
        let all = all.get_or_insert_default();
        let processor = processors.min_by_key(|cpu| all.get(cpu).copied().unwrap_or(0))?;
        *all.entry(processor).or_default() += 1;
        Some(Arc::new(ReservedProcessor(processor)))
    }
}

impl Drop for ReservedProcessor {
    fn drop(&mut self) {
        let mut all = TAKEN.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(count) = all.get_or_insert_default().get_mut(&self.0) {
            *count = count.saturating_sub(1);
        }
    }
}

/// The numbers of a list such as `0-3,8`. Lists longer than the lists of real machines are cut off.
fn numbers(list: &str) -> Vec<u32> {
    let range = |part: &str| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        Some(first.parse::<u32>().ok()?..=last.parse::<u32>().ok()?)
    };
    list.trim().split(',').filter_map(range).flatten().take(CpuSet::MAX_CPU).collect()
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    /// Two nodes with two processors each; a disk with a partition on the second.
    fn machine() -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = dir.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        write("devices/system/node/online", "0-1\n");
        write("devices/system/node/node0/cpulist", "0,2\n");
        write("devices/system/node/node1/cpulist", "901-902\n");
        write("devices/pci0/nvme/numa_node", "1\n");
        write("devices/pci0/nvme/block/nvme0n1/nvme0n1p1/partition", "1\n");
        write("devices/virtual/loop0/size", "1\n");
        write("devices/pci1/numa_node", "-1\n");
        fs::create_dir_all(dir.path().join("dev/block")).unwrap();
        for (number, path) in [
            ("259:0", "pci0/nvme/block/nvme0n1"),
            ("259:1", "pci0/nvme/block/nvme0n1/nvme0n1p1"),
            ("7:0", "virtual/loop0"),
            ("8:0", "pci1"),
        ] {
            let target = format!("../../devices/{path}");
            std::os::unix::fs::symlink(target, dir.path().join("dev/block").join(number)).unwrap();
        }
        dir
    }

    #[test]
    fn a_disk_and_its_partition_are_on_the_node_of_their_controller() {
        let machine = machine();
        let node = |major, minor| node_below(machine.path(), rustix::fs::makedev(major, minor));
        assert_eq!([node(259, 0), node(259, 1)], [Some(1), Some(1)]);
        assert_eq!([node(7, 0), node(8, 0), node(8, 1)], [None; 3]);
    }

    #[test]
    fn threads_of_one_node_take_different_processors_of_it_that_they_may_use() {
        let machine = machine();
        let thread_placement = |node| ThreadPlacement::choose(machine.path(), node, |_| true);
        let (one, other) = (thread_placement(Some(1)), thread_placement(Some(1)));
        let mut processors = [one.processor.unwrap(), other.processor.unwrap()];
        processors.sort_unstable();
        assert_eq!((processors, one.node), ([901, 902], Some(1)));
        let freed = one.processor;
        drop(one);
        assert_eq!(thread_placement(Some(1)).processor, freed);
        assert_eq!(
            ThreadPlacement::choose(machine.path(), Some(1), |cpu| cpu == 902).processor,
            Some(902)
        );
        // The node is unknown, or none of its processors may be used.
        assert_eq!(thread_placement(None).processor, None);
        let none = ThreadPlacement::choose(machine.path(), Some(1), |_| false);
        assert_eq!((none.node, none.processor), (Some(1), None));
        assert_eq!(thread_placement(Some(9)).processor, None);
    }

    #[test]
    fn lists_of_numbers_have_ranges() {
        assert_eq!(numbers("0-3,8\n"), [0, 1, 2, 3, 8]);
        assert_eq!(numbers(""), [0; 0]);
        assert_eq!(numbers("x,5-4,7"), [7]);
        assert_eq!(numbers("0-4294967295").len(), CpuSet::MAX_CPU);
    }
}
