//! The privileges of a mount's daemon, in case it is compromised.

use std::fs;
use std::path::Path;

use super::common::{TestPlace, eventually};

/// A field of the status of every thread, proc_pid_status(5). The kernel's own workers of a ring
/// are left out: they run no code of the process, and act with the credentials of the thread that
/// submits.
fn fields(pid: i32, name: &str) -> Vec<String> {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).unwrap();
    let status = |task: std::io::Result<fs::DirEntry>| {
        fs::read_to_string(task.unwrap().path().join("status")).unwrap_or_default()
    };
    let value = |text: String| {
        let of_the_kernel = text.starts_with("Name:\tiou-wrk-");
        let text = (!of_the_kernel).then_some(text)?;
        let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
        Some(line.trim().to_owned())
    };
    tasks.map(status).filter_map(value).collect()
}

/// capabilities(7): CAP_NET_ADMIN, CAP_SYS_MODULE, CAP_SYS_RAWIO, CAP_SYS_PTRACE, CAP_SYS_BOOT,
/// CAP_SYS_TIME, CAP_BPF.
const NEVER: [u32; 7] = [12, 16, 17, 19, 22, 25, 39];

// The daemon kept every capability of root. An attacker in the daemon could load modules, read the
// memory of other processes, change the network, and execute programs with all capabilities.
#[test]
fn no_thread_of_a_daemon_has_privileges_that_no_request_needs() {
    let Some(place) = TestPlace::new_to_mount() else { return };
    place.expect_success(&["mkfs", "uhs", "img", "--size", "16M"]);
    for source in ["memory:", "passthrough:src", "uhs:img"] {
        for (options, sandboxed) in [("allow_other", true), ("no_sandbox", false)] {
            place.expect_success(&["mount", source, "mnt", "-o", options]);
            fs::write(place.path("mnt/file"), "x").unwrap();
            let pid = place.pid().as_raw_nonzero().get();
            let held = fields(pid, "CapPrm").into_iter().any(|mask| {
                let mask = u64::from_str_radix(&mask, 16).unwrap();
                NEVER.iter().any(|number| mask & 1 << number != 0)
            });
            let bounds = fields(pid, "CapBnd").iter().all(|mask| !mask.contains(|c| c != '0'));
            let may_gain = fields(pid, "NoNewPrivs").iter().any(|set| set == "0");
            assert_eq!(is_filtered(pid), sandboxed, "{source} {options}");
            assert!(Path::new(&format!("/proc/{pid}")).exists() && fields(pid, "CapPrm").len() > 3);
            place.expect_success(&["umount", "mnt"]);
            assert_eq!(
                (held, bounds, may_gain),
                (!sandboxed, sandboxed, !sandboxed),
                "{source} {options}"
            );
        }
    }
}

/// True if every thread has more system call filters than this process.
fn is_filtered(pid: i32) -> bool {
    let filters = |pid| {
        let count = |text: String| text.parse::<u32>().unwrap();
        fields(pid, "Seccomp_filters").into_iter().map(count).collect::<Vec<_>>()
    };
    let own = filters(std::process::id() as i32).into_iter().max().unwrap();
    let filtered: Vec<_> = filters(pid).into_iter().map(|count| count > own).collect();
    assert!(filtered.iter().all(|thread| *thread == filtered[0]), "{filtered:?}");
    assert!(!filtered[0] || fields(pid, "Seccomp").iter().all(|mode| mode == "2"));
    filtered[0]
}

// A daemon could execute programs and create sockets of every kind, regardless of its source.
#[test]
fn every_thread_of_a_server_has_a_filter_of_system_calls() {
    let place = TestPlace::new();
    place.expect_success(&["mkfs", "uhs", "img", "--size", "16M"]);
    for source in ["memory:", "passthrough:src", "uhs:img"] {
        for (options, sandboxed) in [("sandbox", true), ("no_sandbox", false)] {
            let (socket, log) = (place.path("socket"), place.path("log"));
            let (socket, log) = (socket.to_str().unwrap(), log.to_str().unwrap());
            place.expect_success(&["serve", source, socket, "-o", options, "--log-file", log]);
            let all: Vec<serde_json::Value> =
                serde_json::from_str(&place.expect_success(&["list", "--json"])).unwrap();
            let server = all.iter().find(|row| row["socket"] == socket).unwrap();
            let pid = server["pid"].as_i64().unwrap() as i32;
            let filtered = is_filtered(pid);
            let program = format!("/proc/{pid}/exe");
            let pid = rustix::process::Pid::from_raw(pid).unwrap();
            rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
            // Only then is an image free again: the socket goes before.
            eventually("the end of the server", || fs::read_link(&program).is_err());
            assert!(!Path::new(socket).exists());
            assert_eq!(filtered, sandboxed, "{source} {options}");
            assert!(!fs::read_to_string(log).unwrap().contains("seccomp"));
        }
    }
}
