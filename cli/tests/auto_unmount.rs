//! `-o auto_unmount`: the mount disappears with its daemon, however that ends.

mod common;

use std::fs;
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::Path;
use std::process::{Child, Command};

use common::{TestPlace, eventually, eventually_or, from_output};
use rustix::process::{Pid, Signal, kill_process};

const NOBODY: u32 = 65534;

fn has_ended(pid: Pid) -> bool {
    rustix::process::test_kill_process(pid).is_err()
}

/// The processes that the daemon has started.
fn children(pid: Pid) -> Vec<Pid> {
    let pid = pid.as_raw_nonzero();
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).unwrap().flatten();
    let children = tasks.map(|task| fs::read_to_string(task.path().join("children")).unwrap());
    let all: String = children.collect();
    all.split_whitespace().map(|child| Pid::from_raw(child.parse().unwrap()).unwrap()).collect()
}

/// Kills the daemon, and waits until nothing is left of its mount.
fn kill_and_wait(place: &TestPlace, pid: Pid, what: &str) {
    let children = children(pid);
    assert!(!children.is_empty(), "{what}: nobody waits for the end");
    kill_process(pid, Signal::KILL).unwrap();
    eventually_or(|| format!("{what}: unmounted"), || !place.is_mounted());
    eventually_or(
        || format!("{what}: {children:?} ended"),
        || children.iter().all(|child| has_ended(*child)),
    );
    assert_eq!(fs::read_dir(place.path("mnt")).unwrap().count(), 0, "{what}");
}

/// The next mount works, and the process that waited for the end of the last one leaves it alone.
fn mount_again(place: &TestPlace, source: &str) {
    place.expect_success(&["mount", source, "mnt"]);
    fs::write(place.path("mnt/next"), "").unwrap();
    assert_eq!(place.list().len(), 1);
    place.expect_success(&["umount", "mnt"]);
}

#[test]
fn with_auto_unmount_a_mount_disappears_with_its_killed_daemon() {
    let Some(place) = TestPlace::new_to_mount() else { return };
    place.expect_success(&["mkfs", "uhs", "img", "--size", "32M"]);
    for source in ["memory:", "passthrough:src", "uhs:img"] {
        for extent in ["sandbox=namespace", "sandbox=privileges", "no_sandbox"] {
            for more in ["allow_other", "writeback,no_syncfs"] {
                let options = format!("auto_unmount,{extent},{more}");
                let what = format!("{source} {options}");
                place.expect_success(&["mount", source, "mnt", "-o", &options]);
                fs::write(place.path("mnt/f"), &what).unwrap();
                // An open file is cut off, and keeps nothing mounted.
                let open = fs::File::open(place.path("mnt/f")).unwrap();
                kill_and_wait(&place, place.pid(), &what);
                assert!(fs::read_dir(place.path("run")).unwrap().next().is_none(), "{what}");
                drop(open);
                mount_again(&place, source);
            }
        }
    }
}

#[test]
fn auto_unmount_works_in_the_foreground_and_by_mount_8() {
    let Some(place) = TestPlace::new_to_mount() else { return };
    let mut daemon = place.foreground(&["mount", "memory:", "mnt", "-f", "-o", "auto_unmount"]);
    let pid = place.pid();
    kill_process(pid, Signal::KILL).unwrap();
    daemon.wait().unwrap();
    eventually("unmounted", || !place.is_mounted());
    let helper = place.path("mount.fuse.defuse");
    std::os::unix::fs::symlink(common::PROGRAM, &helper).unwrap();
    let mountpoint = place.path("mnt");
    let arguments = ["memory:", mountpoint.to_str().unwrap(), "-o", "rw,auto_unmount,noatime"];
    let mounted = from_output(place.command_of(&helper, &arguments).output().unwrap());
    assert_eq!(mounted.code, Some(0), "{}", mounted.err);
    kill_and_wait(&place, place.pid(), "mount(8)");
    mount_again(&place, "memory:");
}

/// A killed daemon without the option leaves its mount, for the next command.
#[test]
fn an_orderly_end_and_a_mount_without_the_option_are_as_before() {
    let Some(place) = TestPlace::new_to_mount() else { return };
    for sandbox in ["namespace", "privileges"] {
        let options = format!("auto_unmount,sandbox={sandbox}");
        for _ in 0..3 {
            place.expect_success(&["mount", "memory:", "mnt", "-o", &options]);
            let (pid, children) = (place.pid(), children(place.pid()));
            place.expect_success(&["umount", "mnt"]);
            place.expect_success(&["mount", "memory:", "mnt"]);
            eventually("ended", || has_ended(pid) && children.iter().all(|pid| has_ended(*pid)));
            assert!(place.is_mounted(), "{options}");
            place.expect_success(&["umount", "mnt"]);
        }
        place.expect_success(&["mount", "memory:", "mnt", "-o", &format!("sandbox={sandbox}")]);
        let (pid, children) = (place.pid(), children(place.pid()));
        kill_process(pid, Signal::KILL).unwrap();
        eventually("ended", || has_ended(pid) && children.iter().all(|pid| has_ended(*pid)));
        assert!(place.is_mounted(), "{sandbox}");
        place.expect_success(&["umount", "mnt"]);
    }
}

/// The parent process opened the device, mounted, and unmounts.
#[test]
fn auto_unmount_is_refused_where_another_process_mounts() {
    let Some(place) = TestPlace::new_to_mount() else { return };
    let mount = r#"exec "$0" mount memory: /dev/fd/7 -f -o auto_unmount 7<>/dev/fuse"#;
    let said = from_output(
        place.command_of(Path::new("sh"), &["-c", mount, common::PROGRAM]).output().unwrap(),
    );
    assert_eq!(said.code, Some(1), "{}", said.err);
    assert!(said.err.contains("auto_unmount is not possible for /dev/fd/7"), "{}", said.err);
}

#[test]
fn auto_unmount_works_for_other_users_with_fusermount3() {
    let Some(place) = TestPlace::new_to_mount() else { return };
    if fs::metadata("/dev/fuse").unwrap().permissions().mode() & 0o006 != 0o006 {
        return println!("not here: /dev/fuse is not for all users here");
    }
    if !["/usr/bin/fusermount3", "/bin/fusermount3"].iter().any(|path| Path::new(path).exists()) {
        return println!("skipped: fuse3 is not installed");
    }
    let program = place.install_for_all_users();
    for dir in ["", "mnt"] {
        chown(place.path(dir), Some(NOBODY), Some(NOBODY)).unwrap();
    }
    let command = |arguments: &[&str]| {
        let mut command = place.command_of(&program, arguments);
        as_nobody(&mut command);
        command
    };
    let run = |arguments: &[&str]| from_output(command(arguments).output().unwrap());
    let start = |options: &str| -> (Child, Pid) {
        let child = command(&["mount", "memory:", "mnt", "-f", "-o", options]).spawn().unwrap();
        eventually("mounted", || run(&["list", "--json"]).out.contains("serving"));
        let pid = Pid::from_child(&child);
        (child, pid)
    };
    let (mut daemon, pid) = start("auto_unmount");
    kill_process(pid, Signal::KILL).unwrap();
    daemon.wait().unwrap();
    eventually("unmounted", || !place.is_mounted());
    // fusermount3 would detach the next mount.
    for _ in 0..5 {
        let (mut daemon, pid) = start("auto_unmount");
        let waiting = children(pid);
        let unmounted = run(&["umount", "mnt"]);
        assert_eq!(unmounted.code, Some(0), "{}", unmounted.err);
        let (mut next, _) = start("rw");
        daemon.wait().unwrap();
        eventually("ended", || waiting.iter().all(|pid| has_ended(*pid)));
        assert!(place.is_mounted());
        let unmounted = run(&["umount", "mnt"]);
        assert_eq!(unmounted.code, Some(0), "{}", unmounted.err);
        next.wait().unwrap();
    }
    // The command reports its failures at once.
    let failed = run(&["mount", "memory:", "src", "-o", "auto_unmount"]);
    assert!(failed.code == Some(1) && failed.err.contains("src"), "{}", failed.err);
}

fn as_nobody(command: &mut Command) {
    use std::os::unix::process::CommandExt;
    command.uid(NOBODY).gid(NOBODY);
}
