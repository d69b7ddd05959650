//! CPU time of the threads of a process, by their names.

use std::collections::BTreeMap;
use std::fs;

use serde::{Deserialize, Serialize};

use crate::cpu::parse_schedstat;

/// The threads of one name and their CPU time.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ThreadUse {
    /// Their name, without a number at its end.
    pub name: String,
    /// Number of threads that used CPU time.
    pub count: u32,
    /// CPU time of all of them, in nanoseconds.
    pub ns: u64,
    /// CPU time of the busiest one, in nanoseconds.
    pub busiest_ns: u64,
}

/// The CPU clocks of the threads of a process at one moment.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ThreadClocks(BTreeMap<u32, (String, u64)>);

impl ThreadClocks {
    /// Reads the clocks of all living threads. A process that has exited has none.
    pub fn read(pid: u32) -> Self {
        let mut clocks = BTreeMap::new();
        for entry in fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten() {
            let Some(thread) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else {
                continue;
            };
            let read = |file: &str| fs::read_to_string(entry.path().join(file)).unwrap_or_default();
            if let Some(ns) = parse_schedstat(&read("schedstat")) {
                clocks.insert(thread, (plain(read("comm").trim()), ns));
            }
        }
        Self(clocks)
    }

    /// CPU time used since `before`, the most first. The time of threads that exited meanwhile is
    /// lost.
    pub fn usage_since(&self, before: &Self) -> Vec<ThreadUse> {
        let mut uses: Vec<ThreadUse> = Vec::new();
        for (thread, (name, now)) in &self.0 {
            let used = now.saturating_sub(before.0.get(thread).map_or(0, |(_, ns)| *ns));
            if used == 0 {
                continue;
            }
            match uses.iter_mut().find(|known| known.name == *name) {
                Some(known) => {
                    known.count += 1;
                    known.ns += used;
                    known.busiest_ns = known.busiest_ns.max(used);
                }
                None => uses.push(ThreadUse {
                    name: name.clone(),
                    count: 1,
                    ns: used,
                    busiest_ns: used,
                }),
            }
        }
        uses.sort_by_key(|known| std::cmp::Reverse(known.ns));
        uses
    }
}

/// A name without the number of its thread.
fn plain(name: &str) -> String {
    let short = name.trim_end_matches(|c: char| c.is_ascii_digit());
    let short = short.trim_end_matches(['-', '_', '/', ':']);
    if short.is_empty() { name.to_owned() } else { short.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_of_one_name_are_added() {
        let clocks = |list: &[(u32, &str, u64)]| {
            ThreadClocks(list.iter().map(|&(id, name, ns)| (id, (plain(name), ns))).collect())
        };
        let before = clocks(&[(1, "main", 5), (2, "epoll000", 10)]);
        let after =
            clocks(&[(1, "main", 5), (2, "epoll000", 30), (3, "epoll001", 50), (4, "iot-7", 1)]);
        let used = |name: &str, count, ns, busiest_ns| ThreadUse {
            name: name.into(),
            count,
            ns,
            busiest_ns,
        };
        assert_eq!(after.usage_since(&before), [used("epoll", 2, 70, 50), used("iot", 1, 1, 1)]);
        assert_eq!(plain("123"), "123");
    }

    #[test]
    fn the_threads_of_this_process_have_names() {
        let before = ThreadClocks::default();
        let worked = std::thread::Builder::new().name("worker-12".into()).spawn(|| {
            let begun = std::time::Instant::now();
            while begun.elapsed() < std::time::Duration::from_millis(5) {}
            ThreadClocks::read(std::process::id())
        });
        let after = worked.unwrap().join().unwrap();
        assert!(after.usage_since(&before).iter().any(|used| used.name == "worker" && used.ns > 0));
    }
}
