//! CPU time of the application, of all threads of a daemon, and of the whole system.

use std::collections::BTreeMap;
use std::fs;

use rustix::time::{ClockId, clock_gettime};

/// Nanoseconds per clock tick in /proc; `USER_HZ` is 100 on all supported Linux systems.
const TICK_NS: u64 = 10_000_000;

/// CPU time used between two [`CpuSample`]s, in nanoseconds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CpuTimes {
    /// Used by this process: the application.
    pub app_ns: u64,
    /// Used by the daemon.
    pub daemon_ns: u64,
    /// Used by the whole system, including unrelated programs; in steps of 10 ms.
    pub system_ns: u64,
}

/// CPU clocks at one moment.
#[derive(Debug, Clone)]
pub struct CpuSample {
    app_ns: u64,
    daemon: Option<(u32, ProcessCpuTime)>,
    system_ns: u64,
}

impl CpuSample {
    /// Reads the clocks. `daemon` is the process that serves the target, if there is one.
    pub fn take(daemon: Option<u32>) -> Self {
        let now = clock_gettime(ClockId::ProcessCPUTime);
        let stat = fs::read_to_string("/proc/stat").unwrap_or_default();
        Self {
            app_ns: now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64,
            daemon: daemon.map(|pid| (pid, ProcessCpuTime::read(pid))),
            system_ns: parse_system(&stat).unwrap_or(0) * TICK_NS,
        }
    }

    /// The CPU time used between `self` and `later`.
    pub fn usage_until(&self, later: &Self) -> CpuTimes {
        let daemon_ns = match (&self.daemon, &later.daemon) {
            (Some((_, before)), Some((_, after))) => after.usage_since(before),
            _ => 0,
        };
        CpuTimes {
            app_ns: later.app_ns.saturating_sub(self.app_ns),
            daemon_ns,
            system_ns: later.system_ns.saturating_sub(self.system_ns),
        }
    }
}

/// CPU time of a process: exact for each living thread, and in ticks for all threads it ever had.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ProcessCpuTime {
    by_thread_ns: BTreeMap<u32, u64>,
    process_ticks: u64,
}

impl ProcessCpuTime {
    /// Reads the clocks of a process. A process that has exited has used nothing.
    pub fn read(pid: u32) -> Self {
        let mut by_thread_ns = BTreeMap::new();
        for entry in fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten() {
            let thread = entry.file_name().to_str().and_then(|name| name.parse().ok());
            let text = fs::read_to_string(entry.path().join("schedstat")).unwrap_or_default();
            if let (Some(thread), Some(ns)) = (thread, parse_schedstat(&text)) {
                by_thread_ns.insert(thread, ns);
            }
        }
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        Self { by_thread_ns, process_ticks: parse_process(&stat).unwrap_or(0) }
    }

    /// Sum over the living threads.
    pub fn total_ns(&self) -> u64 {
        self.by_thread_ns.values().sum()
    }

    /// CPU time used since `before`. If a thread has exited, its exact time is lost and the ticks
    /// are used instead.
    pub fn usage_since(&self, before: &Self) -> u64 {
        let complete = before.by_thread_ns.keys().all(|tid| self.by_thread_ns.contains_key(tid));
        if !complete || self.by_thread_ns.is_empty() {
            return self.process_ticks.saturating_sub(before.process_ticks) * TICK_NS;
        }
        let used = |(tid, now): (&u32, &u64)| {
            now.saturating_sub(before.by_thread_ns.get(tid).copied().unwrap_or(0))
        };
        self.by_thread_ns.iter().map(used).sum()
    }
}

/// Nanoseconds on a CPU, from the contents of a `schedstat`.
pub(crate) fn parse_schedstat(text: &str) -> Option<u64> {
    text.split_whitespace().next()?.parse().ok()
}

/// utime + stime in ticks, from the contents of a `/proc/PID/stat`. The process name may contain
/// any character, even parentheses, so the fields are counted from the last one.
fn parse_process(text: &str) -> Option<u64> {
    let (_, fields) = text.rsplit_once(')')?;
    let mut fields = fields.split_whitespace().skip(11);
    let utime: u64 = fields.next()?.parse().ok()?;
    let stime: u64 = fields.next()?.parse().ok()?;
    Some(utime + stime)
}

/// Non-idle ticks, from the contents of `/proc/stat`: user, nice, system, irq and softirq.
fn parse_system(text: &str) -> Option<u64> {
    let line = text.lines().find(|line| line.starts_with("cpu "))?;
    let ticks: Vec<u64> = line.split_whitespace().skip(1).flat_map(str::parse).collect();
    let at = |field: usize| ticks.get(field).copied();
    Some(at(0)? + at(1)? + at(2)? + at(5)? + at(6)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn system_leaves_idle_iowait_and_steal_out() {
        let text = "cpu  1 2 3 1000 500 4 5 700 0 0\ncpu0 9 9 9 9 9 9 9 9 9 9\n";
        assert_eq!(parse_system(text), Some(15));
        assert_eq!(parse_system("intr 1\n"), None);
    }

    #[test]
    fn a_process_name_with_parentheses_does_not_shift_the_fields() {
        let text = "42 (a) b) S 1 1 1 0 -1 0 0 0 0 0 70 30 0 0 20 0 1 0";
        assert_eq!(parse_process(text), Some(100));
    }

    #[test]
    fn schedstat_is_its_first_field() {
        assert_eq!(parse_schedstat("618090 52959 2\n"), Some(618_090));
    }

    #[test]
    fn a_thread_that_ended_makes_ticks_the_measure() {
        let threads = |list: &[(u32, u64)], process_ticks| ProcessCpuTime {
            by_thread_ns: list.iter().copied().collect(),
            process_ticks,
        };
        let before = threads(&[(1, 100), (2, 100)], 5);
        assert_eq!(threads(&[(1, 150), (2, 100), (3, 7)], 9).usage_since(&before), 57);
        assert_eq!(threads(&[(1, 150)], 9).usage_since(&before), 4 * TICK_NS);
    }
}
