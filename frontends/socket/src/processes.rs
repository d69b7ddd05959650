//! Processes that were stopped, from proc(5).

use std::fs::{self, read_to_string};
use std::os::unix::fs::MetadataExt;

use defuse_connection::ProcessStatus;

/// The process `pid`; `None` if there is none.
pub(crate) fn read_status(pid: u32) -> Option<ProcessStatus> {
    let dir = format!("/proc/{pid}");
    let uid = fs::metadata(&dir).ok()?.uid();
    let (_, start) = state_and_start(&read_to_string(format!("{dir}/stat")).ok()?)?;
    let tasks = fs::read_dir(format!("{dir}/task")).ok()?;
    let states = tasks.filter_map(|task| {
        let stat = read_to_string(task.ok()?.path().join("stat")).ok()?;
        state_and_start(&stat).map(|(state, _)| state)
    });
    let name = read_to_string(format!("{dir}/comm")).unwrap_or_default().trim_end().to_owned();
    let is_stopped = are_all_stopped(states) || is_frozen(pid);
    Some(ProcessStatus { uid, start, name, is_stopped })
}

/// True if no thread can run until the process is continued: `T` by a signal, `t` by a debugger.
fn are_all_stopped(states: impl Iterator<Item = char>) -> bool {
    let mut living = states.filter(|state| !matches!(state, 'Z' | 'X')).peekable();
    living.peek().is_some() && living.all(|state| matches!(state, 'T' | 't'))
}

/// State and start of a process or thread, proc_pid_stat(5). The name before them may hold
/// anything.
fn state_and_start(stat: &str) -> Option<(char, u64)> {
    let mut rest = stat.rsplit(')').next()?.split_whitespace();
    let state = rest.next()?.chars().next()?;
    Some((state, rest.nth(18)?.parse().ok()?))
}

/// True if the process is in a control group that is frozen, cgroups(7).
fn is_frozen(pid: u32) -> bool {
    let groups = read_to_string(format!("/proc/{pid}/cgroup")).unwrap_or_default();
    let Some(group) = groups.lines().find_map(|line| line.strip_prefix("0::/")) else {
        return false;
    };
    let events = read_to_string(format!("/sys/fs/cgroup/{group}/cgroup.events"));
    events.unwrap_or_default().lines().any(|line| line == "frozen 1")
}

#[cfg(test)]
mod tests {
    use std::process::Command;
    use std::time::{Duration, Instant};

    use rustix::process::{Pid, Signal, kill_process};

    use super::*;

    #[test]
    fn a_process_is_stopped_from_the_signal_on_until_it_is_continued() {
        let mut child = Command::new("sleep").arg("600").spawn().unwrap();
        let (id, pid) = (child.id(), Pid::from_child(&child));
        let until = |stopped| {
            let begun = Instant::now();
            while read_status(id).unwrap().is_stopped != stopped {
                assert!(begun.elapsed() < Duration::from_secs(20), "{:?}", read_status(id));
                std::thread::sleep(Duration::from_millis(5));
            }
        };
        let start = read_status(id).unwrap().start;
        until(false);
        kill_process(pid, Signal::STOP).unwrap();
        until(true);
        kill_process(pid, Signal::CONT).unwrap();
        until(false);
        let seen = read_status(id).unwrap();
        assert_eq!((seen.start, seen.uid), (start, rustix::process::geteuid().as_raw()));
        kill_process(pid, Signal::KILL).unwrap();
        child.wait().unwrap();
        assert_eq!(read_status(id).map(|process| process.start), None);
    }

    #[test]
    fn a_thread_that_runs_keeps_its_process_from_being_stopped() {
        assert!(are_all_stopped("TtZ".chars()) && are_all_stopped("T".chars()));
        for states in ["", "Z", "TS", "TR", "D", "S"] {
            assert!(!are_all_stopped(states.chars()), "{states}");
        }
        let stat = "7 (a) T 1) S 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 99 20";
        assert_eq!(state_and_start(stat), Some(('S', 99)));
        assert_eq!(state_and_start("7 (a) S 1"), None);
    }
}
