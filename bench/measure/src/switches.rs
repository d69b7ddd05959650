//! Context switches, from the kernel's counters of each thread.

use std::fs;

use serde::{Deserialize, Serialize};

/// Number of context switches.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ContextSwitches {
    /// Switches because the thread waited.
    pub voluntary: u64,
    /// Switches because the thread was preempted.
    pub involuntary: u64,
}

impl ContextSwitches {
    /// Sums the living threads of a process; 0 if it has exited. `self` names this process.
    pub fn read(process: &str) -> ContextSwitches {
        let mut sum = ContextSwitches::default();
        for entry in fs::read_dir(format!("/proc/{process}/task")).into_iter().flatten().flatten() {
            let text = fs::read_to_string(entry.path().join("status")).unwrap_or_default();
            let thread = ContextSwitches::parse(&text).unwrap_or_default();
            sum.voluntary += thread.voluntary;
            sum.involuntary += thread.involuntary;
        }
        sum
    }

    /// The switches since `earlier`. The switches of threads that exited meanwhile are missing.
    pub fn count_since(&self, earlier: &ContextSwitches) -> ContextSwitches {
        ContextSwitches {
            voluntary: self.voluntary.saturating_sub(earlier.voluntary),
            involuntary: self.involuntary.saturating_sub(earlier.involuntary),
        }
    }

    /// Parses the contents of a `/proc/PID/task/TID/status`.
    fn parse(text: &str) -> Option<ContextSwitches> {
        let field =
            |name| text.lines().find_map(|line| line.strip_prefix(name))?.trim().parse().ok();
        Some(ContextSwitches {
            voluntary: field("voluntary_ctxt_switches:")?,
            involuntary: field("nonvoluntary_ctxt_switches:")?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn voluntary_and_involuntary_switches_are_distinguished() {
        let text = "Name:\tx\nvoluntary_ctxt_switches:\t12\nnonvoluntary_ctxt_switches:\t3\n";
        let switches = ContextSwitches::parse(text).unwrap();
        assert_eq!(switches, ContextSwitches { voluntary: 12, involuntary: 3 });
        assert_eq!(ContextSwitches::parse("Name:\tx\n"), None);
    }

    #[test]
    fn sleeping_is_a_voluntary_switch() {
        let before = ContextSwitches::read("self");
        std::thread::sleep(std::time::Duration::from_millis(2));
        assert!(ContextSwitches::read("self").count_since(&before).voluntary > 0);
        assert_eq!(ContextSwitches::read("no-such-process"), ContextSwitches::default());
    }
}
