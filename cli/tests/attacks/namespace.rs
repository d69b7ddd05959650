//! The mount namespace of a daemon, in case it is compromised: users see none of its contents.

use std::fs::{self, File};
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags};
use rustix::mount::{
    MountFlags, MountPropagationFlags, UnmountFlags, mount_bind_recursive, mount_change, unmount,
};
use rustix::process::{Pid, Signal, kill_process};
use rustix::thread::{CapabilitySet, CapabilitySets, set_capabilities};

use super::common::{DefuseOutput, TestPlace, TestTmpfs, eventually, from_output};
use super::users::as_user;

/// A file of the machine that no daemon here serves.
const FOREIGN: &str = "etc/passwd";

/// A source whose mount is shared, as all mounts are on most machines.
fn mount_shared(place: &TestPlace) -> TestTmpfs {
    let tmpfs = TestTmpfs::mount_on(place.path("src"), MountFlags::empty(), c"");
    mount_change(tmpfs.path(), MountPropagationFlags::SHARED).unwrap();
    fs::write(tmpfs.path().join("file"), "content").unwrap();
    tmpfs
}

fn namespace(process: &Path) -> PathBuf {
    fs::read_link(process.join("ns/mnt")).unwrap()
}

fn has_own_namespace(pid: i32) -> bool {
    namespace(Path::new(&format!("/proc/{pid}"))) != namespace(Path::new("/proc/self"))
}

/// Everything that an attacker in process `pid` could start from: the root, working directory and
/// namespace of each thread, and each descriptor.
fn assert_confined(pid: i32, what: &str) {
    let process = PathBuf::from(format!("/proc/{pid}"));
    assert!(Path::new("/").join(FOREIGN).exists() && has_own_namespace(pid), "{what}");
    let own = namespace(&process);
    let entries = |dir: &str| {
        let entries = fs::read_dir(process.join(dir)).unwrap();
        entries.map(|entry| entry.unwrap().path()).collect::<Vec<_>>()
    };
    let (tasks, mut starts) = (entries("task"), entries("fd"));
    assert!(tasks.len() > 1 && starts.len() > 3, "{what}");
    for task in tasks {
        // The kernel's own workers of a ring have none.
        let Ok(found) = fs::read_link(task.join("ns/mnt")) else { continue };
        assert_eq!(found, own, "{what}: {}", task.display());
        starts.extend([task.join("root"), task.join("cwd")]);
    }
    for start in starts {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        // Others than directories lead nowhere.
        let Ok(mut dir) = rustix::fs::open(&start, flags, Mode::empty()) else { continue };
        for _ in 0..64 {
            assert!(rustix::fs::statat(&dir, FOREIGN, rustix::fs::AtFlags::empty()).is_err());
            dir = rustix::fs::openat(&dir, "..", flags, Mode::empty()).unwrap();
        }
    }
    let mounts = fs::read_to_string(process.join("mountinfo")).unwrap();
    let at: Vec<_> = mounts.lines().filter_map(|line| line.split(' ').nth(4)).collect();
    let of_all = ["/", "/proc/self/fd", "/dev/fuse", "/dev/null", "/dev/urandom"];
    let is_known = |path: &&&str| {
        of_all.contains(*path) || path.starts_with("/sys/devices/") || path.ends_with("/src")
    };
    assert_eq!(at.len(), at.iter().filter(is_known).count(), "{what}: {at:?}");
}

/// The process that stays in the namespace of the user for `daemon`.
fn keeper(daemon: i32) -> i32 {
    let children = fs::read_to_string(format!("/proc/{daemon}/task/{daemon}/children"));
    let children = children.unwrap();
    let pids = children.split_ascii_whitespace().map(|pid| pid.parse().unwrap());
    let is_keeper =
        |pid: &i32| fs::read_to_string(format!("/proc/{pid}/comm")).unwrap() == "defuse-keeper\n";
    let all: Vec<i32> = pids.filter(is_keeper).collect();
    assert_eq!(all.len(), 1);
    all[0]
}

fn is_gone(pid: i32) -> bool {
    !Path::new(&format!("/proc/{pid}")).exists()
}

// A daemon of root could open every file of the machine.
#[test]
fn a_compromised_daemon_reaches_only_what_it_serves() {
    let Some(place) = TestPlace::new_to_mount() else { return };
    let source = mount_shared(&place);
    place.expect_success(&["mkfs", "uhs", "img", "--size", "16M"]);
    for (text, options) in [
        ("memory:", "rw"),
        ("uhs:img", "rw"),
        ("passthrough:src", "allow_other"),
        ("passthrough:src", "dev,noatime"),
    ] {
        place.expect_success(&["mount", text, "mnt", "-o", options]);
        let (pid, file) = (place.pid().as_raw_nonzero().get(), place.path("mnt/new"));
        fs::write(&file, "x").unwrap();
        let (open, list) = (File::open(&file).unwrap(), fs::read_dir(place.path("mnt")).unwrap());
        assert!(list.count() > 0);
        if text.starts_with("passthrough") && options == "allow_other" {
            let inside = format!("/proc/{pid}/root{}/file", source.path().display());
            assert_eq!(fs::read_to_string(inside).unwrap(), "content");
        }
        // The copy without access times is a mount of no namespace; it is checked as a descriptor.
        assert_confined(pid, text);
        drop(open);
        fs::remove_file(&file).unwrap();
        let keeper = keeper(pid);
        place.expect_success(&["umount", "mnt"]);
        eventually("end of the keeper", || is_gone(keeper));
    }
}

#[test]
fn a_compromised_server_reaches_only_what_it_serves() {
    let Some(place) = TestPlace::new_to_mount() else { return };
    let _source = mount_shared(&place);
    place.expect_success(&["mkfs", "uhs", "img", "--size", "16M"]);
    for text in ["memory:", "uhs:img", "passthrough:src"] {
        let socket = place.path("socket");
        place.expect_success(&["serve", text, socket.to_str().unwrap()]);
        let all: Vec<serde_json::Value> =
            serde_json::from_str(&place.expect_success(&["list", "--json"])).unwrap();
        let server = all.iter().find(|row| row["socket"] == socket.to_str().unwrap()).unwrap();
        let pid = server["pid"].as_i64().unwrap() as i32;
        assert_confined(pid, text);
        let keeper = keeper(pid);
        kill_process(Pid::from_raw(pid).unwrap(), Signal::TERM).unwrap();
        eventually("end of the server", || is_gone(pid) && is_gone(keeper));
        assert!(!socket.exists(), "{text}");
        let left = fs::read_dir(place.path("run")).unwrap().count();
        assert_eq!(left, 0, "{text}");
    }
}

/// The capabilities of a daemon; see `cli/src/sandbox.rs`.
const OF_A_DAEMON: CapabilitySet = CapabilitySet::DAC_OVERRIDE
    .union(CapabilitySet::DAC_READ_SEARCH)
    .union(CapabilitySet::SYS_ADMIN)
    .union(CapabilitySet::SETUID)
    .union(CapabilitySet::FOWNER);

#[test]
fn the_keeper_of_a_daemon_has_few_privileges_and_is_no_way_out() {
    let Some(place) = TestPlace::new_to_mount() else { return };
    place.expect_success(&["mount", "memory:", "mnt"]);
    let pid = place.pid().as_raw_nonzero().get();
    let keeper = keeper(pid);
    let process = PathBuf::from(format!("/proc/{keeper}"));
    let status = fs::read_to_string(process.join("status")).unwrap();
    let field = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        line.unwrap().trim().to_owned()
    };
    let held = u64::from_str_radix(&field("CapPrm"), 16).unwrap();
    // CAP_DAC_OVERRIDE and CAP_SYS_ADMIN.
    assert_eq!(held & !(1 << 1 | 1 << 21), 0);
    assert_eq!((field("CapBnd").trim_matches('0'), field("NoNewPrivs").as_str()), ("", "1"));
    assert_eq!(field("Seccomp"), "2");
    let descriptors = |process: &Path| {
        let all = fs::read_dir(process.join("fd")).unwrap();
        all.filter_map(|entry| fs::read_link(entry.unwrap().path()).ok()).collect::<Vec<_>>()
    };
    // The process that starts a test may leave some open, which is its own affair.
    let inherited = descriptors(Path::new("/proc/self"));
    for target in descriptors(&process) {
        let is_needed = target.to_string_lossy().starts_with("socket:")
            || target == Path::new("/dev/null")
            || inherited.contains(&target);
        assert!(is_needed, "{}", target.display());
    }
    // A process of the same user with the capabilities of the daemon, and even in this namespace,
    // cannot enter the keeper's.
    let opens = |path: PathBuf| {
        let open = move || {
            let few = CapabilitySets {
                effective: OF_A_DAEMON,
                permitted: OF_A_DAEMON,
                inheritable: CapabilitySet::empty(),
            };
            set_capabilities(None, few).unwrap();
            fs::metadata(path).is_ok()
        };
        std::thread::spawn(open).join().unwrap()
    };
    let own = PathBuf::from(format!("/proc/{}", std::process::id()));
    assert!(opens(own.join("status")) && opens(process.join("status")));
    for way in ["root", "cwd", "ns/mnt", "fd/0"] {
        assert!(!opens(process.join(way)), "{way}");
    }
    place.expect_success(&["umount", "mnt"]);
}

#[test]
fn a_daemon_in_its_own_namespace_ends_as_one_without() {
    let Some(place) = TestPlace::new_to_mount() else { return };
    let source = mount_shared(&place);
    for text in ["memory:", "passthrough:src"] {
        let begin = || {
            place.expect_success(&["mount", text, "mnt", "--stats-file", "stats.json"]);
            let pid = place.pid().as_raw_nonzero().get();
            assert!(has_own_namespace(pid), "{text}");
            (pid, keeper(pid))
        };
        let registered = || fs::read_dir(place.path("run")).unwrap().count();
        let (pid, keeper) = begin();
        place.signal(Signal::TERM);
        eventually("end after SIGTERM", || is_gone(pid) && is_gone(keeper));
        assert!(!place.is_mounted() && registered() == 0, "{text}");
        assert!(fs::read_to_string(place.path("stats.json")).unwrap().contains("ops"));
        // In use: detached by the first signal, and aborted by the second.
        let (pid, _) = begin();
        let open = File::create(place.path("mnt/open")).unwrap();
        place.signal(Signal::TERM);
        eventually("detached", || !place.is_mounted());
        assert!(!is_gone(pid));
        kill_process(Pid::from_raw(pid).unwrap(), Signal::TERM).unwrap();
        eventually("end after the second SIGTERM", || is_gone(pid) && registered() == 0);
        drop(open);
        // Killed: the mount stays, and is cleared away by the next command.
        let (pid, keeper) = begin();
        place.signal(Signal::KILL);
        eventually("end after SIGKILL", || is_gone(pid) && is_gone(keeper));
        assert!(place.is_mounted() && registered() > 0, "{text}");
        place.expect_success(&["umount", "mnt"]);
        assert!(!place.is_mounted() && registered() == 0, "{text}");
        // Without its keeper, a mount is served and unmounted by others.
        let (pid, keeper) = begin();
        kill_process(Pid::from_raw(keeper).unwrap(), Signal::KILL).unwrap();
        fs::write(place.path("mnt/after"), "x").unwrap();
        place.expect_success(&["umount", "mnt"]);
        eventually("end without a keeper", || is_gone(pid));
    }
    // Its file system is busy while it is served, and not longer.
    place.expect_success(&["mount", "passthrough:src", "mnt"]);
    let busy = unmount(source.path(), UnmountFlags::empty());
    assert_eq!(busy, Err(rustix::io::Errno::BUSY));
    place.expect_success(&["umount", "mnt"]);
    unmount(source.path(), UnmountFlags::empty()).unwrap();
}

/// Set-group-id without execution by the group stays if a member of the group writes. The daemon
/// sees no processes, so that only its keeper can know the supplementary groups of one.
#[test]
fn a_daemon_in_its_own_namespace_learns_the_groups_of_processes_from_its_keeper() {
    const GROUP: u32 = 54_321;
    const USER: u32 = 54_322;
    let Some(place) = TestPlace::new_to_mount() else { return };
    fs::set_permissions(place.path(""), fs::Permissions::from_mode(0o755)).unwrap();
    place.expect_success(&["mount", "memory:", "mnt", "-o", "allow_other"]);
    assert!(has_own_namespace(place.pid().as_raw_nonzero().get()));
    for (groups, mode) in [(&[7, GROUP][..], 0o2666), (&[7][..], 0o666)] {
        let file = place.path("mnt/file");
        fs::write(&file, "old").unwrap();
        std::os::unix::fs::chown(&file, Some(0), Some(GROUP)).unwrap();
        fs::set_permissions(&file, fs::Permissions::from_mode(0o2666)).unwrap();
        as_user(USER, groups, || fs::write(&file, "new").unwrap());
        assert_eq!(fs::metadata(&file).unwrap().mode() & 0o7777, mode, "{groups:?}");
        fs::remove_file(&file).unwrap();
    }
    place.expect_success(&["umount", "mnt"]);
}

/// The directories of the machine that a program needs, where they are no links.
const BOUND: &[&str] = &["usr", "lib", "lib64", "proc", "dev", "sys"];

/// A root directory of chroot(1) that is no mount, with [`BOUND`] in it.
struct ChrootJail(PathBuf);

impl ChrootJail {
    fn new(place: &TestPlace) -> ChrootJail {
        let jail = ChrootJail(place.path("jail"));
        fs::create_dir(&jail.0).unwrap();
        for entry in fs::read_dir("/").unwrap().map(Result::unwrap) {
            let (from, to) = (entry.path(), jail.0.join(entry.file_name()));
            if let Ok(target) = fs::read_link(&from) {
                symlink(target, to).unwrap();
            } else if BOUND.iter().any(|name| entry.file_name() == *name) {
                fs::create_dir(&to).unwrap();
                mount_bind_recursive(&from, &to).unwrap();
                // An unmount in the jail is none of the machine.
                let private = MountPropagationFlags::PRIVATE | MountPropagationFlags::REC;
                mount_change(&to, private).unwrap();
            }
        }
        fs::create_dir(jail.0.join("mnt")).unwrap();
        fs::create_dir(jail.0.join("src")).unwrap();
        fs::rename(place.install_for_all_users(), jail.0.join("defuse")).unwrap();
        jail
    }

    /// Runs the program in the jail.
    fn defuse(&self, place: &TestPlace, arguments: &[&str]) -> DefuseOutput {
        let mut chroot = place.command_of(Path::new("chroot"), &[]);
        chroot.arg(&self.0).arg("/defuse").args(arguments).env("DEFUSE_RUNTIME_DIR", "/run");
        from_output(chroot.output().unwrap())
    }

    fn expect_success(&self, place: &TestPlace, arguments: &[&str]) -> String {
        let said = self.defuse(place, arguments);
        assert_eq!(said.code, Some(0), "{arguments:?}: {}", said.err);
        said.out
    }
}

impl Drop for ChrootJail {
    fn drop(&mut self) {
        // A test that fails may have left it a mount of its own.
        let _ = unmount(&self.0, UnmountFlags::DETACH);
        for entry in fs::read_dir(&self.0).unwrap().flatten() {
            let _ = unmount(entry.path(), UnmountFlags::DETACH);
        }
    }
}

/// pivot_root(2) needs a root directory that is a mount.
#[test]
fn a_daemon_in_a_root_directory_that_is_no_mount_stays_and_says_so() {
    let Some(place) = TestPlace::new_to_mount() else { return };
    let jail = ChrootJail::new(&place);
    jail.expect_success(&place, &["mount", "memory:", "/mnt", "--log-file", "/log"]);
    let log = fs::read_to_string(jail.0.join("log")).unwrap();
    fs::write(jail.0.join("mnt/file"), "x").unwrap();
    jail.expect_success(&place, &["umount", "/mnt"]);
    let why = "the root directory is no mount of its own";
    assert!(log.contains("stays in the mount namespace") && log.contains(why), "{log}");
    let refused = jail.defuse(&place, &["mount", "memory:", "/mnt", "-o", "sandbox=namespace"]);
    assert_eq!(refused.code, Some(1));
    assert!(refused.err.contains(why), "{}", refused.err);
}

// The root of the machine lay above the daemon's root.
#[test]
fn a_compromised_daemon_in_a_root_directory_of_chroot_reaches_nothing_outside() {
    let Some(place) = TestPlace::new_to_mount() else { return };
    let jail = ChrootJail::new(&place);
    mount_bind_recursive(&jail.0, &jail.0).unwrap();
    mount_change(&jail.0, MountPropagationFlags::PRIVATE | MountPropagationFlags::REC).unwrap();
    for text in ["memory:", "passthrough:/src"] {
        jail.expect_success(&place, &["mount", text, "/mnt", "-o", "sandbox=namespace"]);
        fs::write(jail.0.join("mnt/file"), "x").unwrap();
        let all: Vec<serde_json::Value> =
            serde_json::from_str(&jail.expect_success(&place, &["list", "--json"])).unwrap();
        let pid = all[0]["pid"].as_i64().unwrap() as i32;
        assert_confined(pid, text);
        jail.expect_success(&place, &["umount", "/mnt"]);
        eventually("end of the daemon", || is_gone(pid));
    }
    unmount(&jail.0, UnmountFlags::DETACH).unwrap();
}

/// Containers may lack the capability by which a thread enters a mount namespace.
#[test]
fn a_daemon_without_the_capability_for_chroot_has_a_namespace_of_its_own() {
    let Some(place) = TestPlace::new_to_mount() else { return };
    let few = ["--bounding-set", "-sys_chroot", "--inh-caps", "-sys_chroot"];
    let mut setpriv = place.command_of(Path::new("setpriv"), &few);
    setpriv.arg(place.install_for_all_users()).args(["mount", "memory:", "mnt"]);
    let mounted = from_output(setpriv.output().unwrap());
    assert_eq!(mounted.code, Some(0), "{}", mounted.err);
    assert_confined(place.pid().as_raw_nonzero().get(), "memory:");
    place.expect_success(&["umount", "mnt"]);
}

// A namespace has a copy of each mount, and a copy of a FUSE mount keeps its connection.
#[test]
fn a_daemon_keeps_no_mounts_of_others() {
    let Some(place) = TestPlace::new_to_mount() else { return };
    let source = mount_shared(&place);
    for name in ["src/before", "src/after", "other"] {
        fs::create_dir(place.path(name)).unwrap();
    }
    place.expect_success(&["mount", "memory:", "src/before"]);
    place.expect_success(&["mount", "memory:", "other"]);
    place.expect_success(&["mount", "passthrough:src", "mnt"]);
    place.expect_success(&["mount", "memory:", "src/after"]);
    // Each returns only when the connection has ended.
    for name in ["other", "src/before", "src/after"] {
        place.expect_success(&["umount", name]);
    }
    place.expect_success(&["umount", "mnt"]);
    drop(source);
}

#[test]
fn a_mount_made_later_below_a_shared_source_is_served_until_it_is_unmounted() {
    let Some(place) = TestPlace::new_to_mount() else { return };
    let source = mount_shared(&place);
    fs::create_dir(source.path().join("later")).unwrap();
    place.expect_success(&["mount", "passthrough:src", "mnt"]);
    assert!(has_own_namespace(place.pid().as_raw_nonzero().get()));
    let later = TestTmpfs::mount_on(source.path().join("later"), MountFlags::empty(), c"");
    fs::write(later.path().join("file"), "later").unwrap();
    let seen = place.path("mnt/later/file");
    eventually("visible", || fs::read_to_string(&seen).is_ok_and(|text| text == "later"));
    drop(later);
    eventually("invisible", || !seen.exists());
    place.expect_success(&["umount", "mnt"]);
}

#[test]
fn a_daemon_of_a_private_source_stays_and_says_so() {
    let Some(place) = TestPlace::new_to_mount() else { return };
    let _private = TestTmpfs::mount_on(place.path("src"), MountFlags::empty(), c"");
    mount_change(place.path("src"), MountPropagationFlags::PRIVATE).unwrap();
    let cases = [("sandbox", false), ("sandbox=privileges", false), ("sandbox=namespace", true)];
    for (option, leaves) in cases {
        let log = place.path(option);
        place.expect_success(&[
            "mount",
            "passthrough:src",
            "mnt",
            "-o",
            option,
            "--log-file",
            log.to_str().unwrap(),
        ]);
        assert_eq!(has_own_namespace(place.pid().as_raw_nonzero().get()), leaves, "{option}");
        fs::write(place.path("mnt/file"), "x").unwrap();
        place.expect_success(&["umount", "mnt"]);
        let said = fs::read_to_string(log).unwrap();
        assert_eq!(said.contains("is not shared"), option == "sandbox", "{option}: {said}");
    }
    place.expect_failure(
        1,
        &["mount", "fuse:true", "mnt", "-o", "sandbox=namespace"],
        "open files later",
    );
}

/// An attacker creates a node for a disk in the source, and opens it.
#[test]
fn a_daemon_opens_no_device_nodes_of_its_source() {
    let Some(place) = TestPlace::new_to_mount() else { return };
    let source = mount_shared(&place);
    let node = source.path().join("null");
    let (kind, mode) = (rustix::fs::FileType::CharacterDevice, Mode::from_raw_mode(0o666));
    rustix::fs::mknodat(rustix::fs::CWD, &node, kind, mode, rustix::fs::makedev(1, 3)).unwrap();
    File::open(&node).unwrap();
    place.expect_success(&["mount", "passthrough:src", "mnt"]);
    let inside = format!("/proc/{}/root{}", place.pid().as_raw_nonzero(), node.display());
    let denied = File::open(inside).map(drop).unwrap_err().raw_os_error();
    assert_eq!(denied, Some(rustix::io::Errno::ACCESS.raw_os_error()));
    place.expect_success(&["umount", "mnt"]);
}
