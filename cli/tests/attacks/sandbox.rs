//! What the daemon of a mount could do if it were taken over.

use std::fs;
use std::path::Path;

use super::common::Place;

/// A field of status of every thread, proc_pid_status(5).
fn fields(pid: i32, name: &str) -> Vec<String> {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).unwrap();
    let status = |task: std::io::Result<fs::DirEntry>| {
        fs::read_to_string(task.unwrap().path().join("status")).unwrap_or_default()
    };
    let value = |text: String| {
        let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
        Some(line.trim().to_owned())
    };
    tasks.map(status).filter_map(value).collect()
}

/// capabilities(7): CAP_NET_ADMIN, CAP_SYS_MODULE, CAP_SYS_RAWIO, CAP_SYS_PTRACE, CAP_SYS_BOOT,
/// CAP_SYS_TIME, CAP_BPF.
const NEVER: [u32; 7] = [12, 16, 17, 19, 22, 25, 39];

// The daemon kept every capability of root, and so did whoever might take it over: to load modules, to
// read the memory of other processes, to change the network, and to execute programs with all of them.
#[test]
fn no_thread_of_a_daemon_has_privileges_that_no_request_needs() {
    let Some(place) = Place::to_mount() else { return };
    for source in ["memory:", "passthrough:src"] {
        for (options, sandboxed) in [("allow_other", true), ("no_sandbox", false)] {
            place.ok(&["mount", source, "mnt", "-o", options]);
            fs::write(place.path("mnt/file"), "x").unwrap();
            let pid = place.pid().as_raw_nonzero().get();
            let held = fields(pid, "CapPrm").into_iter().any(|mask| {
                let mask = u64::from_str_radix(&mask, 16).unwrap();
                NEVER.iter().any(|number| mask & 1 << number != 0)
            });
            let bounds = fields(pid, "CapBnd").iter().all(|mask| !mask.contains(|c| c != '0'));
            let gains = fields(pid, "NoNewPrivs").iter().any(|set| set == "0");
            assert!(Path::new(&format!("/proc/{pid}")).exists() && fields(pid, "CapPrm").len() > 3);
            place.ok(&["umount", "mnt"]);
            assert_eq!(
                (held, bounds, gains),
                (!sandboxed, sandboxed, !sandboxed),
                "{source} {options}"
            );
        }
    }
}
