//! The program with real mounts: service, reports, and cleanup.

mod common;

use std::fs;
use std::io::Write;
use std::os::fd::AsFd;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, symlink};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use common::{PROGRAM, TestPlace, eventually, from_output};
use rustix::process::{Signal, kill_process};

/// A user without any rights.
const NOBODY: u32 = 65534;

#[test]
fn files_in_memory_are_served_listed_counted_and_removed() {
    let Some(place) = TestPlace::new_to_mount() else { return };
    place.expect_success(&["mount", "memory:", "mnt", "-o", "size=1M,mode=750", "-osync"]);
    fs::write(place.path("mnt/file"), "hello").unwrap();
    assert_eq!(fs::read(place.path("mnt/file")).unwrap(), b"hello");
    let mode = fs::metadata(place.path("mnt")).unwrap().permissions().mode();
    assert_eq!(mode & 0o7777, 0o750);
    assert!(fs::write(place.path("mnt/large"), vec![0; 2 << 20]).is_err());

    let rows = place.list();
    assert_eq!(rows.len(), 1);
    assert_eq!(rows[0]["state"], "serving");
    assert_eq!(rows[0]["source"], "memory:");
    assert_eq!(rows[0]["mountpoint"], place.path("mnt").to_str().unwrap());
    assert!(place.expect_success(&["list"]).contains("memory:"));

    let json = place.expect_success(&["stat", "--json"]);
    let snapshot: defuse_probe::StatsSnapshot = serde_json::from_str(&json).unwrap();
    assert!(snapshot.get(defuse_probe::Op::CREATE).unwrap().latency.count >= 1);
    assert!(place.expect_success(&["stat", "mnt"]).contains("CREATE"));
    assert!(place.expect_success(&["stat", "--negotiated"]).contains("MAX_PAGES"));
    let json = place.expect_success(&["stat", "mnt", "--negotiated", "--json"]);
    let agreed: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert!(agreed["decisions"].as_array().unwrap().len() > 40);

    place.expect_success(&["umount", "mnt"]);
    assert!(place.list().is_empty() && !place.is_mounted());
    assert_eq!(fs::read_dir(place.path("run")).unwrap().count(), 0);
}

#[test]
fn a_directory_is_served_in_every_profile() {
    let Some(place) = TestPlace::new_to_mount() else { return };
    for profile in ["default", "base", "opt"] {
        place.expect_success(&[
            "mount",
            "passthrough:src",
            "mnt",
            "--profile",
            profile,
            "--workers=2",
        ]);
        fs::write(place.path("mnt").join(profile), profile).unwrap();
        place.expect_success(&["umount", "mnt"]);
        assert_eq!(fs::read_to_string(place.path("src").join(profile)).unwrap(), profile);
    }
}

/// The kernel, and with it the daemon, remembered each file of a large tree until the machine ran
/// out of memory.
#[test]
fn the_kernel_forgets_unused_files_beyond_the_bound_and_keeps_those_in_use() {
    let Some(place) = TestPlace::new_to_mount() else { return };
    let mount = ["mount", "memory:", "mnt", "-o", "max_inodes=100"];
    place.expect_success(&["mount", "memory:", "mnt"]);
    let agreed = place.expect_success(&["stat", "mnt", "--negotiated"]);
    place.expect_success(&["umount", "mnt"]);
    if !agreed.contains("protocol 7.45") {
        place.expect_failure(1, &mount, "max_inodes needs Linux 6.18");
        return println!("not here: this kernel has no NOTIFY_PRUNE (Linux 6.18)");
    }
    place.expect_success(&mount);
    let known = || {
        let json = place.expect_success(&["stat", "mnt", "--json"]);
        let snapshot: defuse_probe::StatsSnapshot = serde_json::from_str(&json).unwrap();
        assert_eq!(snapshot.gauges["inodes_most"], 100);
        snapshot.gauges["inodes_known"]
    };
    fs::write(place.path("mnt/used"), "used").unwrap();
    let used = fs::File::open(place.path("mnt/used")).unwrap();
    for number in 0..40 {
        let dir = place.path(&format!("mnt/{number}"));
        fs::create_dir(&dir).unwrap();
        (0..40).for_each(|file| fs::write(dir.join(file.to_string()), "text").unwrap());
    }
    eventually("the kernel forgets", || known() <= 100);
    let count = |dir: PathBuf| {
        fs::read_dir(dir)
            .unwrap()
            .filter(|entry| entry.as_ref().unwrap().metadata().is_ok())
            .count()
    };
    assert_eq!(
        (0..40).map(|number| count(place.path(&format!("mnt/{number}")))).sum::<usize>(),
        1600
    );
    eventually("the kernel forgets what a listing has shown", || known() <= 100);
    assert_eq!(fs::read(place.path("mnt/39/39")).unwrap(), b"text");
    assert_eq!(std::io::read_to_string(used).unwrap(), "used");
    place.expect_success(&["umount", "mnt"]);
}

#[test]
fn the_threads_of_a_mount_follow_a_policy_and_are_changed_while_it_is_used() {
    let Some(place) = TestPlace::new_to_mount() else { return };
    let gauges = || {
        let snapshot =
            serde_json::from_str(&place.expect_success(&["stat", "mnt", "--json"])).unwrap();
        let snapshot: defuse_probe::StatsSnapshot = snapshot;
        ["workers", "workers_max"].map(|name| snapshot.gauges[name])
    };
    for policy in ["paper", "merged"] {
        place.expect_success(&["mount", "memory:", "mnt", "--workers", &format!("{policy}:3")]);
        for name in ["a", "b", "c"] {
            fs::write(place.path("mnt").join(name), name).unwrap();
        }
        // A RELEASE runs beside the next request.
        let [threads, most] = gauges();
        assert!((2..=3).contains(&threads) && most == 3, "{threads} of {most}");
        let agreed = place.expect_success(&["stat", "mnt", "--negotiated"]);
        assert!(agreed.contains(&format!("max_workers 3 ({policy})")), "{agreed}");
        assert!(
            place
                .expect_success(&["tune", "mnt", "workers=1"])
                .contains("workers                    1")
        );
        eventually("one thread is left", || gauges() == [1, 1]);
        place.expect_success(&["tune", "mnt", "workers=9"]);
        assert_eq!(fs::read(place.path("mnt/a")).unwrap(), b"a");
        eventually("there are two again", || {
            fs::write(place.path("mnt/d"), "d").unwrap();
            let [threads, most] = gauges();
            threads >= 2 && most == 9
        });
        place.expect_success(&["umount", "mnt"]);
    }
    let both = ["mount", "memory:", "mnt", "-oio_uring", "--workers=paper"];
    place.expect_failure(2, &both, "exclude each other");
    place.expect_success(&["mount", "memory:", "mnt"]);
    if place
        .expect_success(&["stat", "mnt", "--negotiated"])
        .contains("OVER_IO_URING          used")
    {
        place.expect_failure(1, &["tune", "mnt", "workers=4"], "mount it again");
    }
    place.expect_success(&["umount", "mnt"]);
}

/// A command outside took the number in the container for one of its own: it would have waited for,
/// and named, another process.
#[test]
fn a_daemon_in_another_pid_namespace_has_its_number_here() {
    let Some(place) = TestPlace::new_to_mount() else { return };
    let mut unshare = place.command_of(Path::new("unshare"), &["--pid", "--fork", "--kill-child"]);
    let arguments = ["mount", "--foreground", "memory:", "mnt"];
    let mut daemon = unshare.arg(PROGRAM).args(arguments).stderr(Stdio::null()).spawn().unwrap();
    eventually("mounted", || place.list().iter().any(|row| row["state"] == "serving"));
    let pid = place.pid();
    assert_ne!(pid.as_raw_nonzero().get(), 1);
    let children = format!("/proc/{0}/task/{0}/children", daemon.id());
    let child = fs::read_to_string(children).unwrap();
    assert_eq!(child.trim(), pid.as_raw_nonzero().to_string());
    place.expect_success(&["umount", "mnt"]);
    assert!(daemon.wait().unwrap().success());
}

/// With `noatime` the kernel keeps no access times for the mount, but reads still updated the
/// access times of the source. (xfstests 120)
#[test]
fn reading_a_mount_without_access_times_leaves_those_of_the_source() {
    let Some(place) = TestPlace::new_to_mount() else { return };
    let old = std::time::UNIX_EPOCH + std::time::Duration::from_secs(1_000_000);
    let accessed = |name: &str| fs::metadata(place.path(name)).unwrap().accessed().unwrap();
    fs::write(place.path("src/file"), "x").unwrap();
    fs::create_dir(place.path("src/dir")).unwrap();
    for (options, kept) in [("noatime", true), ("noatime,no_passthrough", true), ("atime", false)] {
        for name in ["src/file", "src/dir"] {
            let times = fs::FileTimes::new().set_accessed(old);
            fs::File::open(place.path(name)).unwrap().set_times(times).unwrap();
        }
        place.expect_success(&["mount", "passthrough:src", "mnt", "-o", options]);
        for _ in 0..2 {
            assert_eq!(fs::read(place.path("mnt/file")).unwrap(), b"x");
            assert_eq!(fs::read_dir(place.path("mnt/dir")).unwrap().count(), 0);
        }
        place.expect_success(&["umount", "mnt"]);
        for name in ["src/file", "src/dir"] {
            assert_eq!(accessed(name) == old, kept, "{name} with {options}");
        }
    }
}

#[test]
fn a_read_only_mount_is_not_written() {
    let Some(place) = TestPlace::new_to_mount() else { return };
    place.expect_success(&["mount", "passthrough:src", "mnt", "-o", "ro"]);
    let refused = || {
        let error = fs::write(place.path("mnt/file"), "x").unwrap_err();
        assert_eq!(error.kind(), std::io::ErrorKind::ReadOnlyFilesystem);
    };
    refused();
    // The flag of the kernel can be cleared. The file system still refuses.
    let flags = rustix::mount::MountFlags::empty();
    rustix::mount::mount_remount(place.path("mnt"), flags, "").unwrap();
    refused();
}

// mount(8) failed: mounts of defuse could not be remounted (xfstests 294, 306, 452).
#[test]
fn a_mount_is_remounted_with_other_flags() {
    let Some(place) = TestPlace::new_to_mount() else { return };
    let helper = place.path("mount.fuse.defuse");
    symlink(common::PROGRAM, &helper).unwrap();
    let remount = |options: &str| {
        let arguments = ["passthrough:src", "mnt", "-o", options];
        from_output(place.command_of(&helper, &arguments).output().unwrap())
    };
    let ok = |options: &str| {
        let said = remount(options);
        assert_eq!(said.code, Some(0), "{options}: {}", said.err);
    };
    let file = place.path("mnt/file");
    let is_read_only = || {
        let error = fs::write(&file, "x").err();
        error.is_some_and(|error| error.kind() == std::io::ErrorKind::ReadOnlyFilesystem)
    };
    for first in ["rw", "ro"] {
        place.expect_success(&["mount", "passthrough:src", "mnt", "-o", first, "-o", "workers=3"]);
        assert_eq!(is_read_only(), first == "ro");
        // mount(8) passes the options of mountinfo and of fstab.
        ok("rw,nosuid,nodev,relatime,user_id=0,group_id=0,workers=3,remount,ro");
        assert!(is_read_only());
        ok("remount,rw");
        assert!(!is_read_only(), "mounted {first}");
        ok("remount,ro,noexec");
        assert!(is_read_only());
        place.expect_success(&["umount", "mnt"]);
    }
    place.expect_success(&["mount", "passthrough:src", "mnt"]);
    // Not copied by this process, which another test may fork meanwhile (ETXTBSY).
    let mut install = Command::new("install");
    assert!(install.args(["-m", "755", "/bin/true"]).arg(&file).status().unwrap().success());
    let runs = || Command::new(&file).status().is_ok_and(|status| status.success());
    assert!(runs());
    ok("remount,noexec");
    assert!(!runs());
    ok("remount,exec");
    assert!(runs());
    symlink("file", place.path("src/link")).unwrap();
    let follows = || fs::read(place.path("mnt/link")).is_ok();
    assert!(follows());
    ok("remount,nosymfollow");
    assert!(!follows());
    ok("remount,symfollow");
    assert!(follows());
    let open = fs::OpenOptions::new().append(true).open(&file).unwrap();
    let said = remount("remount,ro");
    assert!(said.code == Some(32) && said.err.contains("open for writing"), "{}", said.err);
    drop(open);
    for (options, says) in [("remount,workers=4", "mount it again"), ("remount,suid", "-o suid")] {
        let said = remount(options);
        assert!(said.code == Some(1) && said.err.contains(says), "{}", said.err);
    }
}

#[test]
fn a_capability_is_switched_off_by_its_name() {
    let Some(place) = TestPlace::new_to_mount() else { return };
    place.expect_success(&["mount", "memory:", "mnt", "-o", "no_handle_killpriv_v2"]);
    let result = place.expect_success(&["stat", "--negotiated"]);
    let line = result.lines().find(|line| line.starts_with("HANDLE_KILLPRIV_V2 ")).unwrap();
    assert!(line.contains("not used") && line.contains("option"), "{line}");
}

#[test]
fn statistics_go_to_the_log_when_asked_and_to_their_file() {
    let Some(place) = TestPlace::new_to_mount() else { return };
    place.expect_success(&["mount", "memory:", "mnt", "--log-file=log", "--stats-file=stats"]);
    let log = || fs::read_to_string(place.path("log")).unwrap();
    fs::create_dir(place.path("mnt/dir")).unwrap();
    eventually("in the log", || {
        // Repeated, because an operation is counted after it is answered.
        place.signal(Signal::USR1);
        log().contains("MKDIR")
    });
    place.expect_success(&["umount", "mnt"]);
    assert!(log().contains("has ended"));
    let text = fs::read_to_string(place.path("stats")).unwrap();
    let snapshot: defuse_probe::StatsSnapshot = serde_json::from_str(&text).unwrap();
    assert!(snapshot.get(defuse_probe::Op::MKDIR).is_some());
}

#[test]
fn watching_ends_with_the_mount() {
    let Some(place) = TestPlace::new_to_mount() else { return };
    place.expect_success(&["mount", "memory:", "mnt"]);
    let mut watch = place.command(&["stat", "--watch", "0.05", "--json"]);
    let watch = watch.stdout(Stdio::piped()).spawn().unwrap();
    std::thread::sleep(std::time::Duration::from_millis(300));
    place.expect_success(&["umount", "mnt"]);
    let watched = from_output(watch.wait_with_output().unwrap());
    assert_eq!(watched.code, Some(0), "{}", watched.err);
    assert!(watched.out.lines().count() >= 1);
    for line in watched.out.lines() {
        serde_json::from_str::<defuse_probe::StatsSnapshot>(line).unwrap();
    }
}

#[test]
fn the_mount_of_a_killed_daemon_is_cleared_away() {
    let Some(place) = TestPlace::new_to_mount() else { return };
    place.expect_success(&["mount", "memory:", "mnt"]);
    let kill = || {
        place.signal(Signal::KILL);
        eventually("dead", || place.list()[0]["state"] == "dead");
        // Over rings the kernel takes a moment to fail the requests that they hold.
        eventually("cut off", || {
            let error = fs::read_dir(place.path("mnt")).unwrap_err();
            error.raw_os_error() == Some(rustix::io::Errno::NOTCONN.raw_os_error())
        });
    };
    kill();
    assert!(place.expect_success(&["list"]).contains("dead"));
    place.expect_success(&["umount", "mnt"]);
    assert!(!place.is_mounted() && place.list().is_empty());

    // Mounting clears it as well, and logs that.
    place.expect_success(&["mount", "memory:", "mnt"]);
    kill();
    place.expect_success(&["mount", "memory:", "mnt", "--log-file=log"]);
    assert!(fs::read_to_string(place.path("log")).unwrap().contains("process has died"));
    fs::write(place.path("mnt/file"), "x").unwrap();
    assert_eq!(place.list().len(), 1);
    place.expect_success(&["umount", "mnt"]);
    assert!(!place.is_mounted());
}

#[test]
fn signals_unmount_cleanly() {
    let Some(place) = TestPlace::new_to_mount() else { return };
    for signal in [Signal::TERM, Signal::INT, Signal::HUP] {
        let mut child = place.foreground(&["mount", "passthrough:src", "mnt", "--foreground"]);
        place.signal(signal);
        assert!(child.wait().unwrap().success());
        assert!(!place.is_mounted() && place.list().is_empty());
    }
}

#[test]
fn a_busy_mount_is_detached_by_one_signal_and_aborted_by_two() {
    let Some(place) = TestPlace::new_to_mount() else { return };
    let mut child = place.foreground(&["mount", "memory:", "mnt", "-f"]);
    fs::write(place.path("mnt/file"), "text").unwrap();
    let file = fs::File::open(place.path("mnt/file")).unwrap();
    place.expect_failure(1, &["umount", "mnt"], "is in use");
    let pid = place.pid();
    place.signal(Signal::TERM);
    eventually("detached", || !place.is_mounted());
    assert_eq!(place.list()[0]["state"], "detached");
    rustix::fs::fsync(file.as_fd()).unwrap();
    kill_process(pid, Signal::TERM).unwrap();
    assert!(child.wait().unwrap().success());
    assert!(rustix::fs::fstat(file.as_fd()).is_err() || rustix::fs::fsync(file.as_fd()).is_err());
    assert!(place.list().is_empty());
}

#[test]
fn a_busy_mount_is_detached_when_asked_and_ends_with_its_last_file() {
    let Some(place) = TestPlace::new_to_mount() else { return };
    place.expect_success(&["mount", "memory:", "mnt"]);
    fs::write(place.path("mnt/file"), "text").unwrap();
    let file = fs::File::open(place.path("mnt/file")).unwrap();
    let detached = place.run(&["umount", "--lazy", "mnt"]);
    assert_eq!(detached.code, Some(0));
    assert!(detached.err.contains("ends when the last file is closed"), "{}", detached.err);
    assert!(!place.is_mounted());
    drop(file);
    eventually("ended", || place.list().is_empty());
}

#[test]
fn the_daemon_ends_when_somebody_else_unmounts() {
    let Some(place) = TestPlace::new_to_mount() else { return };
    place.expect_success(&["mount", "memory:", "mnt"]);
    rustix::mount::unmount(place.path("mnt"), rustix::mount::UnmountFlags::empty()).unwrap();
    eventually("ended", || fs::read_dir(place.path("run")).unwrap().count() == 0);
}

#[test]
fn several_mounts_are_distinguished_and_unmounted_together() {
    let Some(place) = TestPlace::new_to_mount() else { return };
    fs::create_dir(place.path("mnt2")).unwrap();
    place.expect_success(&["mount", "memory:", "mnt"]);
    place.expect_success(&["mount", "passthrough:src", "mnt2"]);
    place.expect_failure(2, &["stat"], "name one of");
    assert!(place.expect_success(&["stat", "mnt2"]).contains("measured"));
    place.expect_success(&["umount", "mnt", "mnt2"]);
    assert!(place.list().is_empty());
}

#[test]
fn the_topmost_of_several_mounts_is_used() {
    let Some(place) = TestPlace::new_to_mount() else { return };
    place.expect_success(&["mount", "passthrough:src", "mnt"]);
    let lower = place.pid();
    place.expect_success(&["mount", "memory:", "mnt"]);
    assert_eq!(place.list().len(), 2);
    place.expect_success(&["umount", "mnt"]);
    assert_eq!(place.pid(), lower);
    place.expect_success(&["umount", "mnt"]);
    assert!(place.list().is_empty());
}

#[test]
fn mount_8_calls_the_program_by_another_name() {
    let Some(place) = TestPlace::new_to_mount() else { return };
    let helper = place.path("mount.fuse.defuse");
    symlink(common::PROGRAM, &helper).unwrap();
    let run =
        |arguments: &[&str]| from_output(place.command_of(&helper, arguments).output().unwrap());
    let source = format!("passthrough:{}", place.path("src").display());
    let options = "rw,noauto,nofail,_netdev,x-systemd.requires=/srv,max_write=64K";
    let mounted = run(&[&source, "mnt", "-o", options]);
    assert_eq!((mounted.code, mounted.err.as_str()), (Some(0), ""));
    fs::write(place.path("mnt/file"), "x").unwrap();
    assert!(place.path("src/file").exists());
    place.expect_success(&["umount", "mnt"]);

    assert_eq!(run(&[&source, "mnt", "-f"]).code, Some(0));
    assert!(!place.is_mounted());
    assert_eq!(run(&[&source, "mnt", "-o", "nonsense"]).code, Some(1));
    assert_eq!(run(&[&source, "mnt", "-s", "-f", "-o", "nonsense"]).code, Some(0));
    assert_eq!(run(&[&source, "missing"]).code, Some(32));
}

/// mount(8) drops `dev` and `suid` before it calls a helper: no line of fstab could request them.
#[test]
fn a_mount_by_root_and_mount_8_has_devices_and_set_user_ids_unless_told_otherwise() {
    let Some(place) = TestPlace::new_to_mount() else { return };
    let helper = place.path("mount.fuse.defuse");
    symlink(common::PROGRAM, &helper).unwrap();
    let refuses = |options: &str| {
        let mounted = place.command_of(&helper, &["memory:", "mnt", "-o", options]).output();
        let mounted = from_output(mounted.unwrap());
        assert_eq!((mounted.code, mounted.err.as_str()), (Some(0), ""), "{options}");
        let mountinfo = fs::read_to_string("/proc/self/mountinfo").unwrap();
        let mnt = place.path("mnt");
        let line = mountinfo.lines().find(|line| line.contains(mnt.to_str().unwrap())).unwrap();
        let words: Vec<&str> = line.split([' ', ',']).collect();
        let refused = ["nosuid", "nodev"].map(|flag| words.contains(&flag));
        place.expect_success(&["umount", "mnt"]);
        refused
    };
    assert_eq!(refuses("rw"), [false, false]);
    assert_eq!(refuses("rw,nosuid"), [true, false]);
    assert_eq!(refuses("rw,nodev,suid"), [false, true]);
    assert_eq!(refuses("rw,noexec,nosuid,nodev,user=somebody"), [true, true]);
    // The user of such a line is not trusted, whatever options mount(8) passes.
    assert_eq!(refuses("rw,users"), [true, true]);
}

#[test]
fn mount_fuse3_finds_the_program_before_the_source() {
    let Some(place) = TestPlace::new_to_mount() else { return };
    let helper = Path::new("/usr/sbin/mount.fuse3");
    if !helper.exists() {
        return println!("skipped: fuse3 is not installed");
    }
    symlink(common::PROGRAM, place.path("defuse")).unwrap();
    let path = format!("{}:/usr/bin:/bin", place.path("").display());
    let mountpoint = place.path("mnt");
    let mut command = place.command_of(helper, &["defuse#memory:", mountpoint.to_str().unwrap()]);
    let mounted =
        from_output(command.args(["-o", "rw,size=1M"]).env("PATH", path).output().unwrap());
    assert_eq!(mounted.code, Some(0), "{}", mounted.err);
    fs::write(place.path("mnt/file"), "x").unwrap();
    place.expect_success(&["umount", "mnt"]);
}

#[test]
fn other_users_get_no_answer_and_cannot_unmount() {
    let Some(place) = TestPlace::new_to_mount() else { return };
    place.expect_success(&["mount", "memory:", "mnt"]);
    let files = fs::read_dir(place.path("run")).unwrap().flatten().map(|entry| entry.path());
    let socket = files.into_iter().find(|path| path.extension().unwrap() == "sock").unwrap();
    assert_eq!(fs::metadata(&socket).unwrap().permissions().mode() & 0o777, 0o600);
    assert_eq!(fs::metadata(place.path("run")).unwrap().permissions().mode() & 0o777, 0o700);

    // Even if they can reach the sockets.
    let program = place.install_for_all_users();
    for open in ["run", ""] {
        fs::set_permissions(place.path(open), fs::Permissions::from_mode(0o755)).unwrap();
    }
    fs::set_permissions(&socket, fs::Permissions::from_mode(0o666)).unwrap();
    for (arguments, text) in [
        (["stat", "mnt"], "as its owner or as root"),
        (["umount", "mnt"], "not permitted to unmount"),
    ] {
        let mut command = place.command_of(&program, &arguments);
        let result = from_output(command.uid(NOBODY).gid(NOBODY).output().unwrap());
        assert_eq!(result.code, Some(1));
        assert!(result.err.contains(text), "{}", result.err);
    }
    place.expect_success(&["umount", "mnt"]);
}

#[test]
fn another_user_mounts_with_fusermount3() {
    let Some(place) = TestPlace::new_to_mount() else { return };
    if fs::metadata("/dev/fuse").unwrap().permissions().mode() & 0o006 != 0o006 {
        return println!("not here: /dev/fuse is not for all users here");
    }
    let program = place.install_for_all_users();
    for dir in ["", "mnt"] {
        chown(place.path(dir), Some(NOBODY), Some(NOBODY)).unwrap();
    }
    let run = |arguments: &[&str]| {
        let mut command = place.command_of(&program, arguments);
        from_output(command.uid(NOBODY).gid(NOBODY).output().unwrap())
    };
    let mounted = run(&["mount", "memory:", "mnt"]);
    if !["/usr/bin/fusermount3", "/bin/fusermount3"].iter().any(|path| Path::new(path).exists()) {
        assert!(mounted.err.contains("install fuse3"), "{}", mounted.err);
        return println!("skipped: fuse3 is not installed");
    }
    assert_eq!(mounted.code, Some(0), "{}", mounted.err);
    let listed = run(&["list", "--json"]);
    assert!(listed.out.contains("serving"), "{}", listed.out);
    assert!(run(&["stat"]).out.contains("measured"));
    // The kernel admits only processes with the ids of the mounting user, group included.
    let mut touch = Command::new("touch");
    touch.arg(place.path("mnt/x")).uid(NOBODY).gid(NOBODY);
    assert!(touch.status().unwrap().success());
    assert!(fs::read_dir(place.path("mnt")).is_err(), "root came in");
    let unmounted = run(&["umount", "mnt"]);
    assert_eq!(unmounted.code, Some(0), "{}", unmounted.err);
    assert!(!place.is_mounted());
}

/// A user's daemon has no file handles, and held a descriptor for every file that the kernel knew.
/// At the limit of descriptors the mount was useless.
#[test]
fn a_mount_without_file_handles_serves_more_files_than_it_may_have_descriptors() {
    const FILES: usize = 5000;
    let Some(place) = TestPlace::new_to_mount() else { return };
    for number in 0..FILES {
        let dir = place.path(&format!("src/{}", number % 50));
        if number < 50 {
            fs::create_dir(&dir).unwrap();
        }
        fs::write(dir.join(number.to_string()), number.to_string()).unwrap();
    }
    // Root without the capability that handles need, like every other user.
    let script = "ulimit -n 1024 && exec setpriv --bounding-set -dac_read_search \"$0\" \
                  mount passthrough:src mnt -o timeout=600";
    let mut mount = place.command_of(Path::new("sh"), &["-c", script]);
    let mounted = from_output(mount.arg(PROGRAM).output().unwrap());
    assert_eq!(mounted.code, Some(0), "{}", mounted.err);
    // Twice, so that the first files are looked up again.
    let script = "for i in 1 2; do find . -type f -exec cat {} + | wc -c; done";
    let mut count = Command::new("sh");
    let counted = count.args(["-c", script]).current_dir(place.path("mnt")).output();
    let counted = from_output(counted.unwrap());
    let bytes: usize = (0..FILES).map(|number| number.to_string().len()).sum();
    assert_eq!((counted.err.as_str(), counted.out), ("", format!("{bytes}\n{bytes}\n")));
    let pid = place.pid().as_raw_nonzero();
    let open = fs::read_dir(format!("/proc/{pid}/fd")).unwrap().count();
    assert!(open < 1024, "{open} descriptors");
    place.expect_success(&["umount", "mnt"]);
}

#[test]
fn more_files_can_be_open_than_the_usual_limit() {
    let Some(place) = TestPlace::new_to_mount() else { return };
    place.expect_success(&["mount", "passthrough:src", "mnt", "-o", "no_passthrough"]);
    let limits = fs::read_to_string(format!("/proc/{}/limits", place.pid().as_raw_nonzero()));
    let limits = limits.unwrap();
    let line = limits.lines().find(|line| line.starts_with("Max open files")).unwrap();
    let mut words = line.split_whitespace().skip(3);
    assert_eq!(words.next(), words.next(), "{line}");
    place.expect_success(&["umount", "mnt"]);
}

/// A mount is in /proc/self/mountinfo before its daemon has negotiated with the kernel and
/// registered. A `stat` in between took it for a foreign mount, and observed the kernel instead.
#[test]
fn a_visible_mount_is_recognized_at_once() {
    let Some(place) = TestPlace::new_to_mount() else { return };
    for round in 0..6 {
        let foreground = round % 2 == 0;
        let mut child = match foreground {
            true => {
                let mut command = place.command(&["mount", "-f", "memory:", "mnt"]);
                let child = command.stderr(std::process::Stdio::null()).spawn().unwrap();
                while !place.is_mounted() {
                    std::hint::spin_loop();
                }
                Some(child)
            }
            false => {
                place.expect_success(&["mount", "memory:", "mnt"]);
                assert_eq!(place.list()[0]["state"], "serving");
                None
            }
        };
        let negotiated = place.expect_success(&["stat", "mnt", "--negotiated"]);
        assert!(negotiated.starts_with("protocol 7."), "{negotiated}");
        place.expect_success(&["umount", "mnt"]);
        if let Some(child) = &mut child {
            assert!(child.wait().unwrap().success());
        }
    }
}

#[test]
fn the_daemon_has_the_name_of_the_program() {
    let Some(place) = TestPlace::new_to_mount() else { return };
    place.expect_success(&["mount", "memory:", "mnt"]);
    let pid = place.pid().as_raw_nonzero();
    let read = |name: &str| std::fs::read_to_string(format!("/proc/{pid}/{name}")).unwrap();
    assert_eq!(read("comm").trim(), "defuse");
    assert!(read("cmdline").starts_with("defuse\0mount\0"), "{}", read("cmdline"));
}

/// Stores through a mapping, then prints whether the modification time has changed, with the file
/// still open and after it is closed.
const STORES: &str = "
import mmap, os, sys, time
path = sys.argv[1]
def changed(seen):
    time.sleep(0.05)
    return os.stat(path).st_mtime_ns != seen
seen = os.stat(path).st_mtime_ns
time.sleep(0.05)
with open(path, 'r+b') as file, mmap.mmap(file.fileno(), 0) as memory:
    memory[0:1] = b'x'
    memory.flush()
    print(changed(seen))
    seen = os.stat(path).st_mtime_ns
    time.sleep(0.05)
    memory[0:1] = b'y'
    memory.flush()
print(changed(seen))
";

// The kernel kept the times that it had received. A store through a mapping changes only the
// backing file, so that a program that rebuilds changed files saw no change.
#[test]
fn the_time_of_a_change_is_seen_after_stores_through_a_mapping() {
    let Some(place) = TestPlace::new_to_mount() else { return };
    for options in ["sync", "timeout=60", "no_passthrough", "exclusive"] {
        fs::write(place.path("src/file"), [0; 4096]).unwrap();
        place.expect_success(&["mount", "passthrough:src", "mnt", "-o", options]);
        let mut python = Command::new("python3");
        let result = python.args(["-c", STORES]).arg(place.path("mnt/file")).output().unwrap();
        let result = from_output(result);
        assert_eq!(result.out, "True\nTrue\n", "{options}: {}", result.err);
        place.expect_success(&["umount", "mnt"]);
    }
}

/// Makes asynchronous direct writes of one page, and reads each back through the page cache while
/// other threads read the page all the time. Prints the number of reads that returned old data.
const WRITES: &str = include_str!("mounts/async_writes.c");

/// Changes a range in every way, and reads it in every way after each change. Prints the pairs that
/// do not agree.
const MIXED: &str = include_str!("mounts/mixed_access.c");

/// Compiles a program in C, and returns its path.
fn compile_program(place: &TestPlace, name: &str, text: &str) -> PathBuf {
    let (source, program) = (place.path(&format!("{name}.c")), place.path(name));
    fs::write(&source, text).unwrap();
    let mut compiler = Command::new("cc");
    compiler.args(["-O2", "-pthread", "-o"]).args([&program, &source]);
    assert!(compiler.status().unwrap().success());
    program
}

/// A buffered read filled the page during an asynchronous direct write to it. The kernel drops
/// pages only before such a write, so that all later readers got the old data: 1562 of 10,000 times
/// on uhs, where the mount of files in memory alone had been mended.
#[test]
fn buffered_reads_see_what_asynchronous_direct_writes_have_written() {
    let Some(place) = TestPlace::new_to_mount() else { return };
    let program = compile_program(&place, "writes", WRITES);
    place.expect_success(&["mkfs", "uhs", "img", "--size", "64M"]);
    for (source, options) in [
        ("memory:", "rw"),
        ("uhs:img", "rw"),
        ("uhs:img", "writeback"),
        ("passthrough:src", "no_passthrough"),
    ] {
        place.expect_success(&["mount", source, "mnt", "-o", options]);
        let result =
            from_output(Command::new(&program).arg(place.path("mnt/file")).output().unwrap());
        let found = (result.code, result.out.as_str());
        assert_eq!(found, (Some(0), "0\n"), "{source} {options}: {}", result.err);
        place.expect_success(&["umount", "mnt"]);
    }
}

/// Asynchronous direct writes into a file that other jobs allocate and punch holes in, on a full
/// file system.
const FULL: &str = "[global]
filename=file
filesize=128M
size=999G
continue_on_error=write
ignore_error=,ENOSPC
error_dump=0
create_on_open=1
fallocate=none
time_based
runtime=4
[writes]
ioengine=libaio
iodepth=128
bs=128k
direct=1
numjobs=4
rw=randwrite
[allocates]
ioengine=falloc
bssplit=128k/80:512k/10:32k/10
rw=randwrite
[punches]
ioengine=falloc
bs=4k
rw=randtrim
numjobs=2
";

/// An asynchronous direct write that found room for a part of its bytes failed with EIO, which
/// programs take for a failed device: Linux makes that of a short count (xfstests 300).
#[test]
fn an_asynchronous_direct_write_that_finds_no_space_says_so() {
    let Some(place) = TestPlace::new_to_mount() else { return };
    place.expect_success(&["mkfs", "uhs", "img", "--size", "128M"]);
    fs::write(place.path("jobs"), FULL).unwrap();
    for (source, options) in [("uhs:img", "rw"), ("memory:", "size=100M")] {
        place.expect_success(&["mount", source, "mnt", "-o", options]);
        let mut fio = Command::new("fio");
        fio.arg(place.path("jobs")).current_dir(place.path("mnt"));
        let printed = match fio.output() {
            Ok(output) => from_output(output),
            Err(error) => {
                println!("skipped: fio: {error}");
                return;
            }
        };
        assert_eq!(printed.code, Some(0), "{source}: {}", printed.err);
        let failed =
            printed.err.lines().chain(printed.out.lines()).find(|line| line.contains("io_u error"));
        assert_eq!(failed, None, "{source}");
        place.expect_success(&["umount", "mnt"]);
    }
}

#[test]
fn a_range_reads_the_same_in_every_way_after_each_way_to_change_it() {
    let Some(place) = TestPlace::new_to_mount() else { return };
    let program = compile_program(&place, "mixed", MIXED);
    place.expect_success(&["mkfs", "uhs", "img", "--size", "64M"]);
    for (source, options) in [
        ("memory:", "rw"),
        ("memory:", "writeback"),
        ("uhs:img", "rw"),
        ("uhs:img", "writeback"),
        ("uhs:img", "direct_io"),
        ("passthrough:src", "rw"),
        ("passthrough:src", "no_passthrough"),
        ("passthrough:src", "no_passthrough,writeback"),
    ] {
        place.expect_success(&["mount", source, "mnt", "-o", options]);
        let result =
            from_output(Command::new(&program).arg(place.path("mnt/file")).output().unwrap());
        let found = (result.code, result.out.as_str());
        assert_eq!(found, (Some(0), "done\n"), "{source} {options}: {}", result.err);
        place.expect_success(&["umount", "mnt"]);
    }
}

/// The kernel queries holes before it writes pages back, and the file system answered from its own
/// data: copies of a live file were zeros.
#[test]
fn a_copy_of_a_file_with_dirty_pages_has_its_bytes() {
    let Some(place) = TestPlace::new_to_mount() else { return };
    place.expect_success(&["mkfs", "uhs", "img", "--size", "64M"]);
    // Stores and writes into holes, copies by SEEK_DATA and by the number of blocks, and a look at
    // the file while it is open and after.
    let script = r#"
import mmap, os, subprocess, sys
for how in ("stored", "written", "written at the end", "unmapped", "closed and mapped"):
    f = os.open("file", os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    os.ftruncate(f, 1 << 20)
    m = None
    if how.startswith("written"):
        os.pwrite(f, b"hello", (1 << 20) + 70000 if how.endswith("end") else 300000)
    else:
        m = mmap.mmap(f, 1 << 20)
        m[300000:300005] = b"hello"
    if how == "unmapped":
        m = None
    if how == "closed and mapped":
        os.close(f)
    for copy in ("cp --sparse=auto file copy", "cp --sparse=always file copy", "tar -S -cf - file | tar -xO > copy"):
        subprocess.run(copy, shell=True, check=True)
        if subprocess.run(["cmp", "-s", "file", "copy"]).returncode:
            sys.exit(f"{how}: {copy}")
    os.remove("file")
"#;
    for (source, options) in [
        ("memory:", "rw"),
        ("memory:", "writeback"),
        ("uhs:img", "rw"),
        ("uhs:img", "writeback"),
        ("passthrough:src", "rw"),
        ("passthrough:src", "no_passthrough"),
        ("passthrough:src", "writeback,no_passthrough"),
    ] {
        place.expect_success(&["mount", source, "mnt", "-o", options]);
        let mut python = Command::new("python3");
        let copied = python.args(["-c", script]).current_dir(place.path("mnt")).output().unwrap();
        let said = String::from_utf8_lossy(&copied.stderr);
        assert!(copied.status.success(), "{source} {options}: {said}");
        place.expect_success(&["umount", "mnt"]);
    }
}

/// Files whose size the kernel does not know were empty: all of /proc, also below a served root.
#[test]
fn files_that_have_data_in_spite_of_their_size_are_read() {
    let Some(place) = TestPlace::new_to_mount() else { return };
    let below = place.path("src/proc");
    fs::create_dir(&below).unwrap();
    let flags = rustix::mount::MountFlags::empty();
    rustix::mount::mount("proc", &below, "proc", flags, None).unwrap();
    for (source, prefix) in
        [("passthrough:/proc", ""), ("passthrough:src", "proc/"), ("passthrough:/sys", "")]
    {
        for options in ["rw", "no_passthrough", "writeback", "cache=keep"] {
            place.expect_success(&["mount", source, "mnt", "-o", options]);
            let lines: &[&str] = match source {
                "passthrough:/sys" => {
                    &["kernel/mm/transparent_hugepage/enabled", "devices/system/cpu/possible"]
                }
                _ => &["version", "filesystems", "sys/kernel/ostype", "1/comm"],
            };
            for name in lines {
                let root = if source == "passthrough:/sys" { "/sys" } else { "/proc" };
                let native = fs::read(Path::new(root).join(name)).unwrap();
                let read = fs::read(place.path("mnt").join(prefix).join(name)).unwrap();
                assert!(
                    !native.is_empty() && read == native,
                    "{source} {options}: {name}: {read:?}"
                );
            }
            place.expect_success(&["umount", "mnt"]);
        }
    }
    rustix::mount::unmount(&below, rustix::mount::UnmountFlags::DETACH).unwrap();
}

/// With a write-back cache the kernel dates writes by the last tick of its clock, and new files had
/// exact times: each file was older than its birth, and make(1) took what was built for older than
/// its source.
#[test]
fn files_are_dated_in_the_order_of_their_changes() {
    let Some(place) = TestPlace::new_to_mount() else { return };
    place.expect_success(&["mkfs", "uhs", "img", "--size", "64M"]);
    for source in ["memory:", "uhs:img", "passthrough:src"] {
        for options in ["rw", "writeback", "writeback,no_passthrough"] {
            place.expect_success(&["mount", source, "mnt", "-o", options]);
            let dir = place.path("mnt");
            let changed = |name: &str| fs::metadata(dir.join(name)).unwrap().modified().unwrap();
            for round in 0..300 {
                let (source, target) = (format!("source{round}"), format!("target{round}"));
                let mut file = fs::File::create(dir.join(&source)).unwrap();
                fs::write(dir.join("between"), "").unwrap();
                file.write_all(b"text").unwrap();
                drop(file);
                let times = fs::metadata(dir.join(&source)).unwrap();
                let born = times.created().unwrap();
                assert!(times.modified().unwrap() >= born, "{source}, {options}");
                assert!(changed(&source) >= changed("between"), "{source}, {options}");
                match round % 3 {
                    0 => fs::write(dir.join(&target), "text").unwrap(),
                    1 => drop(fs::File::create(dir.join(&target)).unwrap()),
                    _ => symlink("text", dir.join(&target)).unwrap(),
                }
                let made = fs::symlink_metadata(dir.join(&target)).unwrap().modified().unwrap();
                assert!(made >= changed(&source), "{source}, {options}");
                fs::remove_file(dir.join("between")).unwrap();
            }
            for entry in fs::read_dir(&dir).unwrap() {
                fs::remove_file(entry.unwrap().path()).unwrap();
            }
            place.expect_success(&["umount", "mnt"]);
        }
    }
}

/// chattr(1) moves the change time, which the kernel went on to answer from its attributes
/// (xfstests 277).
#[test]
fn the_change_time_is_new_after_a_change_of_flags() {
    use rustix::fs::{IFlags, ioctl_getflags, ioctl_setflags};
    let Some(place) = TestPlace::new_to_mount() else { return };
    let native = fs::File::create(place.path("src/file")).unwrap();
    if ioctl_setflags(&native, IFlags::NODUMP).is_err() {
        println!("not here: the file system below has no flags of files");
        return;
    }
    for options in ["rw", "writeback", "timeout=60"] {
        place.expect_success(&["mount", "passthrough:src", "mnt", "-o", options]);
        // With `writeback` the kernel dates files by itself, and does not see that the flags
        // change.
        let names: &[&str] = if options == "writeback" { &["."] } else { &["file", "."] };
        for name in names {
            let path = place.path("mnt").join(name);
            let changed = || {
                let stat = fs::metadata(&path).unwrap();
                (stat.ctime(), stat.ctime_nsec())
            };
            let before = changed();
            std::thread::sleep(std::time::Duration::from_millis(20));
            let file = fs::File::open(&path).unwrap();
            let flags = ioctl_getflags(&file).unwrap();
            ioctl_setflags(&file, flags ^ IFlags::NODUMP).unwrap();
            assert!(changed() > before, "{name}, {options}");
        }
        place.expect_success(&["umount", "mnt"]);
    }
}

/// Reading a mount with `ro` moved access times: of the files of a passthrough, and in the memory
/// of a daemon of uhs (xfstests 003).
#[test]
fn reading_a_read_only_mount_leaves_access_times() {
    let Some(place) = TestPlace::new_to_mount() else { return };
    place.expect_success(&["mkfs", "uhs", "img", "--size", "64M"]);
    for source in ["uhs:img", "passthrough:src"] {
        place.expect_success(&["mount", source, "mnt"]);
        fs::write(place.path("mnt/file"), "text").unwrap();
        place.expect_success(&["umount", "mnt"]);
        for options in ["ro", "ro,strictatime", "ro,direct_io"] {
            place.expect_success(&["mount", source, "mnt", "-o", options]);
            let file = place.path("mnt/file");
            let accessed = || fs::metadata(&file).unwrap().accessed().unwrap();
            let before = accessed();
            std::thread::sleep(std::time::Duration::from_millis(20));
            assert_eq!(fs::read(&file).unwrap(), b"text");
            assert_eq!(accessed(), before, "{source}, {options}");
            place.expect_success(&["umount", "mnt"]);
        }
    }
}

/// With `strictatime` the rule of `relatime` still applied, on every source.
#[test]
fn with_strictatime_each_reading_moves_the_access_time() {
    let Some(place) = TestPlace::new_to_mount() else { return };
    place.expect_success(&["mkfs", "uhs", "img", "--size", "64M"]);
    for source in ["memory:", "uhs:img", "passthrough:src"] {
        for options in ["", ",writeback", ",direct_io", ",no_passthrough"] {
            let what = format!("{source}{options}");
            let options = format!("strictatime{options}");
            place.expect_success(&["mount", source, "mnt", "-o", &options]);
            let file = place.path("mnt/file");
            let accessed = || fs::metadata(&file).unwrap().accessed().unwrap();
            fs::write(&file, "text").unwrap();
            for _ in 0..3 {
                let before = accessed();
                std::thread::sleep(std::time::Duration::from_millis(20));
                assert_eq!(fs::read(&file).unwrap(), b"text");
                assert!(accessed() > before, "{what}");
            }
            fs::remove_file(&file).unwrap();
            place.expect_success(&["umount", "mnt"]);
        }
    }
}

/// The kernel answers reads from its cache without a request: programs that check whether a file
/// was read since it changed, such as those that wait for mail, never saw it.
#[test]
fn reading_a_changed_file_moves_its_access_time_although_the_kernel_has_its_data() {
    let Some(place) = TestPlace::new_to_mount() else { return };
    place.expect_success(&["mkfs", "uhs", "img", "--size", "64M"]);
    let tick = || std::thread::sleep(std::time::Duration::from_millis(20));
    for source in ["memory:", "uhs:img", "passthrough:src"] {
        for options in ["rw", "writeback", "direct_io", "noatime"] {
            let what = format!("{source}, {options}");
            place.expect_success(&["mount", source, "mnt", "-o", options]);
            let (file, link) = (place.path("mnt/file"), place.path("mnt/link"));
            let accessed = |path: &Path| fs::symlink_metadata(path).unwrap().accessed().unwrap();
            fs::write(&file, "one").unwrap();
            symlink("file", &link).unwrap();
            for round in ["first", "after a change"] {
                let before = accessed(&file);
                tick();
                assert!(fs::read(&file).unwrap().starts_with(b"one"));
                assert_eq!(accessed(&file) > before, options != "noatime", "{what}: {round}");
                let after = accessed(&file);
                tick();
                fs::read(&file).unwrap();
                assert_eq!(accessed(&file), after, "{what}: unchanged since it was read");
                fs::OpenOptions::new()
                    .append(true)
                    .open(&file)
                    .unwrap()
                    .write_all(b"more")
                    .unwrap();
            }
            let before = accessed(&link);
            tick();
            fs::read_link(&link).unwrap();
            if !source.starts_with("passthrough") {
                assert_eq!(accessed(&link) > before, options != "noatime", "{what}: link");
            }
            fs::remove_file(&file).unwrap();
            fs::remove_file(&link).unwrap();
            place.expect_success(&["umount", "mnt"]);
        }
    }
}
