//! The program in containers: each command works there, or reports what it lacks and what to do.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use defuse_testkit::container::ContainerSpec;
use defuse_testkit::mounted::program;

/// The containers of these tests, by name.
fn containers() -> Vec<(&'static str, ContainerSpec)> {
    let usual = || ContainerSpec::USUAL;
    vec![
        ("usual", usual()),
        ("without /dev/shm", ContainerSpec { shm: None, ..usual() }),
        ("without /tmp", ContainerSpec { has_tmp: false, ..usual() }),
        ("without both", ContainerSpec { shm: None, has_tmp: false, ..usual() }),
        ("rootless", ContainerSpec { is_rootless: true, ..usual() }),
        ("little", ContainerSpec { memory: Some(64 << 20), pids: Some(32), ..usual() }),
    ]
}

/// Runs `line` by sh(1), with `defuse` as the program, in an empty directory with an image `img`
/// and a directory `src`. `None` without root, or where there are no control groups.
fn run(container: &ContainerSpec, line: &str) -> Option<Output> {
    if !rustix::process::geteuid().is_root() {
        println!("skipped: only root makes containers");
        return None;
    }
    let dir = tempfile::tempdir().unwrap();
    let work = dir.path().canonicalize().unwrap();
    for name in ["src", "mnt"] {
        fs::create_dir(work.join(name)).unwrap();
    }
    let program = program().unwrap();
    let mut mkfs = Command::new(program);
    let made = mkfs.args(["mkfs", "uhs", "img", "--size", "32M"]).current_dir(&work).status();
    assert!(made.unwrap().success());
    let line = format!("defuse() {{ timeout 120 {} \"$@\"; }}; {line}", program.display());
    let contained = Path::new(env!("CARGO_BIN_EXE_contained"));
    match container.command(contained, &work, &line) {
        Ok((mut command, _groups)) => Some(command.output().unwrap()),
        Err(error) => {
            println!("not here: {error:#}");
            None
        }
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Runs a line in each container. It must succeed and print `expected`, which is the last line of
/// its output.
fn run_everywhere(line: &str, expected: &str) {
    for (name, container) in containers() {
        let Some(output) = run(&container, line) else { continue };
        let (out, err) = (text(&output.stdout), text(&output.stderr));
        assert_eq!(output.status.code(), Some(0), "{name}: {line}: {out}{err}");
        assert_eq!(out.lines().last(), Some(expected), "{name}: {line}: {out}{err}");
    }
}

/// Runs a line in a container. It must fail with one error of the program, which has `expected` in
/// it.
fn expect_error(container: &ContainerSpec, line: &str, expected: &str) {
    let Some(output) = run(container, line) else { return };
    let err = text(&output.stderr);
    assert!(matches!(output.status.code(), Some(1..=125)), "{line}: {:?}: {err}", output.status);
    let errors: Vec<&str> = err.lines().filter(|line| line.contains(expected)).collect();
    assert_eq!(errors.len(), 1, "{line}: {err}");
    assert!(!err.contains("panicked") && !err.contains("internal error"), "{line}: {err}");
}

/// The test bed itself: it is as strict as its description.
#[test]
fn a_container_is_one() {
    let line = "touch /file 2>/dev/null && echo written; unshare -m true 2>/dev/null && echo left; \
                grep -c . /proc/keys; grep NoNewPrivs /proc/self/status; grep Seccomp: /proc/self/status; echo done";
    for (name, container) in containers() {
        let Some(output) = run(&container, line) else { continue };
        let out = text(&output.stdout);
        let words: Vec<&str> = out.split_whitespace().collect();
        assert_eq!(words, ["0", "NoNewPrivs:", "1", "Seccomp:", "2", "done"], "{name}: {out}");
    }
}

/// Nothing worked on images where io_uring is refused, not even fsck.
#[test]
fn images_are_made_checked_enlarged_and_shown_in_containers() {
    let line = "defuse mkfs uhs new --size 20M && defuse fsck new && defuse grow new --size 24M && \
                defuse fsck --repair new && defuse dump new > dump && echo done";
    run_everywhere(line, "done");
}

#[test]
fn programs_run_on_an_image_in_containers_and_a_line_says_that_there_is_no_ring() {
    let line = "defuse run --mount /x=uhs:img -- sh -c 'echo text > /x/f; cp /x/f /x/g; sync; cat /x/g' && \
                defuse fsck img > checked && defuse run --mount /x=uhs:img -- cat /x/f";
    run_everywhere(line, "text");
    let Some(output) = run(&ContainerSpec::USUAL, line) else { return };
    let err = text(&output.stderr);
    let notes = err.lines().filter(|line| line.contains("img: io_uring is refused here"));
    assert!(notes.count() == 2 && err.lines().count() == 2, "{err}");
}

#[test]
fn programs_run_on_other_file_systems_in_containers() {
    for source in ["memory:", "passthrough:src", "passthrough:src,backing=off"] {
        let line = format!(
            "defuse run --mount /x={source} -- sh -c 'echo text > /x/f; mv /x/f /x/g; tr e a < /x/g'"
        );
        run_everywhere(&line, "taxt");
    }
    let line = "defuse run --dispatch --mount /x=memory: -- sh -c 'echo text > /x/f; cat /x/f'";
    run_everywhere(line, "text");
}

#[test]
fn servers_serve_in_containers_and_say_if_they_are_not_registered() {
    for (source, way) in [("uhs:img", "socket"), ("memory:", "shared"), ("uhs:img", "shared")] {
        let shared = if way == "shared" { "--shared" } else { "" };
        let line = format!(
            "defuse serve {shared} {source} sock && \
             defuse run --mount /x={way}:sock -- sh -c 'echo text > /x/f; cat /x/f'"
        );
        run_everywhere(&line, "text");
        let Some(output) = run(&ContainerSpec::USUAL, &line) else { return };
        let err = text(&output.stderr);
        assert!(err.contains("the server is not registered") && err.contains("kill "), "{err}");
    }
    let line = "export DEFUSE_RUNTIME_DIR=$PWD/run; defuse serve memory: sock && defuse list | grep -c sock";
    run_everywhere(line, "1");
}

#[test]
fn commands_that_need_nothing_work_in_containers() {
    for line in [
        "defuse list > out && echo done",
        "defuse check /bin/sh > out && echo done",
        "defuse nvme list > out && echo done",
        "defuse man . && ls defuse.1",
        "defuse completions bash > out && echo done",
        "defuse help mount > out && echo done",
    ] {
        let expected = if line.contains("man") { "defuse.1" } else { "done" };
        run_everywhere(line, expected);
    }
}

#[test]
fn commands_that_need_more_say_what_a_container_lacks() {
    let usual = ContainerSpec::USUAL;
    for source in ["uhs:img", "passthrough:src", "memory:"] {
        let line = format!("defuse mount {source} mnt");
        expect_error(&usual, &line, "pass the device into this container (--device /dev/fuse)");
        let device = ContainerSpec { devices: "fuse", ..usual.clone() };
        expect_error(&device, &line, "--cap-add SYS_ADMIN");
        expect_error(&ContainerSpec { is_rootless: true, ..device }, &line, "--cap-add SYS_ADMIN");
    }
    expect_error(&usual, "defuse top --once", "run it as root with CAP_BPF and CAP_PERFMON");
    expect_error(&usual, "defuse umount mnt", "is not mounted: `defuse list` shows the mounts");
    expect_error(&usual, "defuse tune mnt", "see `defuse top --once` for what is");
    expect_error(&usual, "defuse study --rows 1", "");
}

/// The error was "Resource temporarily unavailable", and a run reported that the server may have
/// refused the user.
#[test]
fn a_limit_of_processes_is_named() {
    for line in ["defuse serve uhs:img sock", "defuse run --mount /x=uhs:img -- touch /x/f"] {
        let mut named = 0;
        for pids in 4..16 {
            let few = ContainerSpec { pids: Some(pids), ..ContainerSpec::USUAL };
            let Some(output) = run(&few, line) else { return };
            let err = text(&output.stderr);
            // The shell or timeout(1) did not come so far.
            if output.status.success() || err.contains("fork") {
                continue;
            }
            let names = ["raise the limit of processes", "Resource temporarily unavailable"];
            assert!(names.iter().any(|name| err.contains(name)), "{pids}: {line}: {err}");
            named += usize::from(err.contains(names[0]));
        }
        assert!(named > 0, "{line}: the limit was never met");
    }
}

/// Programs of people who have no FUSE, each with a line. The test of the image for containers has
/// the same ones.
fn programs() -> impl Iterator<Item = (&'static str, &'static str)> {
    let lines = include_str!("../src/container/programs.txt").lines();
    lines.filter_map(|line| line.split_once('\t'))
}

#[test]
fn programs_of_people_without_fuse_work_in_containers() {
    assert_eq!(programs().count(), 10);
    for (name, line) in programs() {
        if !Path::new("/usr/bin").join(name).exists() {
            println!("skipped: {name} in a container: it is not installed");
            continue;
        }
        let quoted = line.replace('\'', "'\\''");
        let on = |source: &str| {
            format!("export HOME=/x; defuse run --mount /x={source} -- sh -c '{quoted}'")
        };
        run_everywhere(&on("memory:"), "done");
        let Some(output) = run(&ContainerSpec::USUAL, &on("uhs:img")) else { return };
        let (out, err) = (text(&output.stdout), text(&output.stderr));
        assert_eq!(out.lines().last(), Some("done"), "{name} on an image: {out}{err}");
    }
}
