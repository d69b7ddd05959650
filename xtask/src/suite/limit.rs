//! A time limit for steps. It prints the processes of a hanging step and kills them, so that the
//! step fails and the others can run.

use std::collections::HashMap;
use std::fs;
use std::process::Command;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

/// Limits the time of one step until it is dropped.
pub struct StepTimeLimit {
    done: Option<Sender<()>>,
    watcher: Option<JoinHandle<()>>,
}

impl StepTimeLimit {
    /// Kills all descendants of this process after `time`.
    pub fn new(step: &'static str, time: Duration) -> Self {
        StepTimeLimit::from_killed(std::process::id(), step, time)
    }

    /// Kills all descendants of the process `root`.
    fn from_killed(root: u32, step: &'static str, time: Duration) -> Self {
        let (done, end) = channel();
        let watcher = std::thread::spawn(move || {
            if end.recv_timeout(time) == Err(RecvTimeoutError::Timeout) {
                println!("{step}: not finished after {} minutes; killed:", time.as_secs() / 60);
                kill_descendants(root);
            }
        });
        StepTimeLimit { done: Some(done), watcher: Some(watcher) }
    }
}

impl Drop for StepTimeLimit {
    fn drop(&mut self) {
        drop(self.done.take());
        if let Some(watcher) = self.watcher.take() {
            let _ = watcher.join();
        }
    }
}

fn kill_descendants(root: u32) {
    // Kills parents before their children, so that they cannot start more.
    for pid in descendants(root, &parents()) {
        let words = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        let line = String::from_utf8_lossy(&words).replace('\0', " ");
        println!("  {pid} {}", line.trim());
        let _ = Command::new("kill").args(["-KILL", &pid.to_string()]).status();
    }
}

/// The parent of every process.
fn parents() -> HashMap<u32, u32> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    let numbers = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    let parent = |pid: u32| {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        // State and parent follow the name, which may contain any character.
        stat.rsplit_once(')')?.1.split_whitespace().nth(1)?.parse().ok()
    };
    numbers.filter_map(|pid| Some((pid, parent(pid)?))).collect()
}

fn descendants(root: u32, parents: &HashMap<u32, u32>) -> Vec<u32> {
    let mut found = vec![root];
    let mut next = 0;
    while let Some(&parent) = found.get(next) {
        found.extend(parents.iter().filter(|&(_, of)| *of == parent).map(|(&pid, _)| pid));
        next += 1;
    }
    found.split_off(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn descendants_include_grandchildren() {
        let parents = HashMap::from([(2, 1), (3, 2), (4, 3), (5, 1), (6, 9)]);
        let mut found = descendants(2, &parents);
        found.sort_unstable();
        assert_eq!(found, [3, 4]);
        assert!(parents_of_this_process());
    }

    fn parents_of_this_process() -> bool {
        parents().contains_key(&std::process::id())
    }

    /// The step is a shell of this test, because other tests have processes, too.
    #[test]
    fn a_hanging_step_is_killed_and_a_finished_one_is_not() {
        let mut step = Command::new("sh").args(["-c", "sleep 600 & wait $!"]).spawn().unwrap();
        while descendants(step.id(), &parents()).is_empty() {
            std::thread::sleep(Duration::from_millis(5));
        }
        let limit = StepTimeLimit::from_killed(step.id(), "a test", Duration::from_millis(50));
        assert!(!step.wait().unwrap().success());
        drop(limit);
        let limit = StepTimeLimit::new("a test", Duration::from_secs(600));
        assert!(Command::new("true").status().unwrap().success());
        drop(limit);
    }
}
