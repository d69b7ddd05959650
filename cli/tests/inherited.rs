//! Limits, masks and descriptors that processes have from the process that started them.

mod common;

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use common::{DefuseOutput, PROGRAM, TestPlace, eventually, from_output};
use rustix::process::{Pid, Signal, kill_process};

/// Runs its arguments under limits (the file sizes are 512 * 20 bytes), with SIGTERM and SIGCHLD
/// blocked, SIGXFSZ ignored, the file `held` open as descriptor 9, and in the directory of the
/// place.
const STARTER: &str = "ulimit -Sf 20; ulimit -St 3600; exec 9>held; exec env --block-signal=TERM,CHLD --ignore-signal=XFSZ \"$@\"";

/// The program with these arguments, started so.
fn start_with_limits(place: &TestPlace, arguments: &[&str]) -> DefuseOutput {
    let mut command = place.command_of(Path::new("sh"), &["-c", STARTER, "sh", PROGRAM]);
    from_output(command.args(arguments).output().unwrap())
}

/// True if env(1) has the options. Otherwise prints the reason.
fn can_start() -> bool {
    let done =
        Command::new("env").args(["--block-signal=TERM", "true"]).stderr(Stdio::null()).status();
    let can = done.is_ok_and(|status| status.success());
    if !can {
        println!("skipped: env(1) has no --block-signal");
    }
    can
}

/// A field of /proc/PID/status.
fn status(pid: u32, field: &str) -> String {
    let text = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    text.lines().find_map(|line| line.strip_prefix(field)).unwrap().trim().to_owned()
}

/// The soft limit of this name in /proc/PID/limits.
fn limit(pid: u32, name: &str) -> String {
    let text = fs::read_to_string(format!("/proc/{pid}/limits")).unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix(name)).unwrap();
    line.split_whitespace().next().unwrap().to_owned()
}

/// The daemon and its keeper, if it has one.
fn processes_of(pid: u32) -> Vec<u32> {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).unwrap().flatten();
    let children = tasks.filter_map(|task| fs::read_to_string(task.path().join("children")).ok());
    let children: Vec<String> = children.collect();
    let children = children.iter().flat_map(|text| text.split_whitespace());
    std::iter::once(pid).chain(children.map(|pid| pid.parse().unwrap())).collect()
}

/// Asserts that a daemon has nothing of its starter, and ends by a signal that the starter had
/// blocked.
fn is_free(place: &TestPlace, pid: u32, what: &str) {
    let held = place.path("held");
    for process in processes_of(pid) {
        let blocked = u64::from_str_radix(&status(process, "SigBlk:"), 16).unwrap();
        let term_and_child = 1 << 14 | 1 << 16;
        assert_eq!(blocked & term_and_child, 0, "{what}: {blocked:x}");
        for name in ["Max file size", "Max cpu time"] {
            assert_eq!(limit(process, name), "unlimited", "{what}: {name}");
        }
        assert_eq!(limit(process, "Max open files"), read_hard_limit_of_files(process), "{what}");
        let ignored = u64::from_str_radix(&status(process, "SigIgn:"), 16).unwrap();
        assert_eq!(ignored & 1 << 24, 0, "{what}: SIGXFSZ has no handler");
        let descriptors = fs::read_dir(format!("/proc/{process}/fd")).unwrap().flatten();
        for descriptor in descriptors {
            let file = fs::read_link(descriptor.path()).unwrap_or_default();
            assert_ne!(file, held, "{what}: the descriptor of the starter");
        }
        let directory = fs::read_link(format!("/proc/{process}/cwd")).unwrap();
        assert_eq!(directory, Path::new("/"), "{what}");
    }
    let pid = Pid::from_raw(pid as i32).unwrap();
    kill_process(pid, Signal::TERM).unwrap();
    eventually(what, || rustix::process::test_kill_process(pid).is_err());
}

fn read_hard_limit_of_files(pid: u32) -> String {
    let text = fs::read_to_string(format!("/proc/{pid}/limits")).unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix("Max open files")).unwrap();
    line.split_whitespace().nth(1).unwrap().to_owned()
}

/// A limit of file sizes killed the daemon at the first larger write of any user, one of processor
/// time after its seconds. SIGTERM could not end it, and a lock of its starter was held until then.
#[test]
fn a_mount_has_no_limits_masks_and_descriptors_of_its_starter() {
    let Some(place) = TestPlace::new_to_mount().filter(|_| can_start()) else { return };
    for options in ["rw", "sandbox=privileges", "no_sandbox"] {
        let mounted = start_with_limits(
            &place,
            &["mount", "passthrough:src", "mnt", "-o", "no_passthrough", "-o", options],
        );
        assert_eq!((mounted.code, mounted.err.as_str()), (Some(0), ""));
        fs::write(place.path("mnt/large"), vec![7; 1 << 20]).unwrap();
        assert_eq!(fs::metadata(place.path("src/large")).unwrap().len(), 1 << 20);
        is_free(&place, place.pid().as_raw_nonzero().get() as u32, options);
    }
}

#[test]
fn a_server_and_a_manager_have_no_limits_masks_and_descriptors_of_their_starter() {
    if !can_start() {
        return;
    }
    let place = TestPlace::new();
    let config = format!(
        "socket = \"{}\"\n[[device]]\npath = \"/m\"\nsource = \"memory:\"\n",
        place.path("socket").display()
    );
    fs::write(place.path("config"), config).unwrap();
    for arguments in [&["serve", "memory:", "socket"][..], &["manager", "config"]] {
        let result = start_with_limits(&place, arguments);
        assert_eq!((result.code, result.err.as_str()), (Some(0), ""), "{arguments:?}");
        let answer = place.expect_success(&["stat", "socket", "--json"]);
        let answer: serde_json::Value = serde_json::from_str(&answer).unwrap();
        is_free(&place, answer["pid"].as_u64().unwrap() as u32, arguments[0]);
        eventually("the end of the socket", || !place.path("socket").exists());
    }
}

/// The text without the signals 32 and 33 among those that are ignored, which the C library uses
/// for itself.
fn strip_internal(text: &str) -> String {
    let line = |line: &str| match line.strip_prefix("SigIgn:\t") {
        Some(bits) => format!("{:x}", u64::from_str_radix(bits, 16).unwrap() & !(3 << 31)),
        None => line.to_owned(),
    };
    text.lines().map(line).collect::<Vec<_>>().join("\n")
}

/// The mask of the starter could keep a run from hearing of the end of its program: it waited for
/// ever.
#[test]
fn a_program_of_a_run_has_the_limits_the_mask_and_the_descriptors_of_its_starter() {
    if !can_start() {
        return;
    }
    let place = TestPlace::new();
    let limits = "ulimit -Sf; ulimit -Hf; ulimit -St; umask; pwd; readlink /proc/self/fd/9";
    // Some shells change the mask.
    let signals = ["grep", "-E", "Sig(Blk|Ign)", "/proc/self/status"];
    for program in [&["sh", "-c", limits][..], &signals] {
        let native = {
            let mut command = place.command_of(Path::new("sh"), &["-c", STARTER, "sh"]);
            from_output(command.args(program).output().unwrap())
        };
        let arguments = [&["run", "--mount", "m:=memory:", "--"][..], program].concat();
        let run = start_with_limits(&place, &arguments);
        assert_eq!((run.code, run.err.as_str()), (Some(0), ""));
        assert_eq!(strip_internal(&run.out), strip_internal(&native.out));
        let expected = if program == signals { "SigBlk:\t0000000000014000" } else { "/held" };
        assert!(run.out.contains(expected), "{}", run.out);
    }
}

/// With few descriptors the server of a run accepted no connection of its own program, which waited
/// for ever.
#[test]
fn a_run_with_few_descriptors_works_or_names_the_limit() {
    let place = TestPlace::new();
    place.expect_success(&["mkfs", "uhs", "img", "--size", "16M", "--sparse"]);
    for source in ["m:=memory:", "m:=uhs:img"] {
        for limit in [8, 14, 20, 31, 32, 40] {
            // A process with CAP_SYS_RESOURCE could raise the limit, which a run does not do.
            let script = format!("ulimit -n {limit}; exec timeout 60 \"$@\"");
            let mut command = place.command_of(Path::new("sh"), &["-c", &script, "sh", PROGRAM]);
            command.args(["run", "--mount", source, "--", "sh", "-c", "echo x > m:/f; cat m:/f"]);
            let said = from_output(command.output().unwrap());
            if limit < 32 {
                assert_eq!(said.code, Some(1), "{source} {limit}: {}", said.err);
                assert!(said.err.contains("ulimit -Hn"), "{}", said.err);
            } else {
                assert_eq!((said.code, said.out.as_str()), (Some(0), "x\n"), "{}", said.err);
            }
        }
    }
}

/// SIGXFSZ ended a run without a word, although the files of its program are small.
#[test]
fn a_run_under_a_limit_of_file_sizes_works_or_names_the_limit() {
    let place = TestPlace::new();
    fs::write(place.path("image"), "").unwrap();
    let limited = |limit: &str, source: &str| {
        let script = format!("ulimit {limit} 8000; exec \"$@\"");
        let mut command = place.command_of(Path::new("sh"), &["-c", &script, "sh", PROGRAM]);
        command.args([
            "run",
            "--mount",
            source,
            "--",
            "sh",
            "-c",
            "echo x > m:/f; cat m:/f; ulimit -Sf",
        ]);
        from_output(command.output().unwrap())
    };
    for source in ["m:=memory:", "m:=memory:,size=1G"] {
        let soft = limited("-Sf", source);
        assert_eq!((soft.code, soft.out.as_str()), (Some(0), "x\n8000\n"), "{}", soft.err);
        let hard = limited("-f", source);
        // A process with CAP_SYS_RESOURCE lifts the limit for itself.
        if hard.code != Some(0) {
            assert_eq!(hard.code, Some(1), "{}", hard.err);
            assert!(hard.err.contains("ulimit -f"), "{}", hard.err);
        }
    }
    // Not killed by the signal, either.
    let script = "ulimit -f 8000; exec \"$@\"";
    let mut mkfs = place.command_of(Path::new("sh"), &["-c", script, "sh", PROGRAM]);
    let result =
        from_output(mkfs.args(["mkfs", "uhs", "large", "--size", "64M"]).output().unwrap());
    assert!(
        result.code == Some(1) && result.err.contains("ulimit -f"),
        "{:?} {}",
        result.code,
        result.err
    );
}

/// Such a run ended by an allocation that failed, or its programs lost their server, without a word
/// about the limit.
#[test]
fn a_run_under_a_limit_of_address_space_works_or_names_the_limit() {
    let place = TestPlace::new();
    let limited = |limit: &str| {
        let script = format!("ulimit {limit} 300000; exec \"$@\"");
        let mut command = place.command_of(Path::new("sh"), &["-c", &script, "sh", PROGRAM]);
        let look = "echo x > m:/f; cat m:/f; ulimit -Sv";
        command.args(["run", "--mount", "m:=memory:", "--", "sh", "-c", look]);
        from_output(command.output().unwrap())
    };
    let soft = limited("-Sv");
    assert_eq!((soft.code, soft.out.as_str()), (Some(0), "x\n300000\n"), "{}", soft.err);
    let hard = limited("-v");
    // A process with CAP_SYS_RESOURCE lifts the limit for itself.
    assert!(hard.out.starts_with("x\n") || hard.err.contains("ulimit -v"), "{}", hard.err);
}
