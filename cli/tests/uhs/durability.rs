//! The promises of durability, each kept against the death of the daemon.

use std::fs::{self, File, OpenOptions};
use std::io::{IoSlice, Write};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt, symlink};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use rustix::fs::OFlags;
use rustix::io::{ReadWriteFlags, pwritev2};
use rustix::process::{Signal, kill_process};

use super::common::{TestPlace, eventually};
use super::with_image;

const TEXT: &[u8; 4096] = &[b'x'; 4096];

/// Writes the file `at` in the mount `mnt`, and waits for an acknowledgement.
type SyncMethod = fn(mnt: &Path, at: &Path);

fn write(at: &Path) -> File {
    let mut file = File::create(at).unwrap();
    file.write_all(TEXT).unwrap();
    file
}

fn write_with_flags(at: &Path, flags: OFlags) {
    let mut open = OpenOptions::new();
    let mut file =
        open.write(true).create(true).custom_flags(flags.bits() as i32).open(at).unwrap();
    file.write_all(TEXT).unwrap();
}

fn pwritev(at: &Path, opened: OFlags, flags: ReadWriteFlags) {
    let mut open = OpenOptions::new();
    let file = open.write(true).create(true).custom_flags(opened.bits() as i32).open(at).unwrap();
    // O_DIRECT needs an aligned page.
    let memory = vec![b'x'; 2 * TEXT.len()];
    let start = memory.as_ptr().align_offset(TEXT.len());
    let page = &memory[start..start + TEXT.len()];
    assert_eq!(pwritev2(&file, &[IoSlice::new(page)], 0, flags), Ok(TEXT.len()));
}

/// The acknowledgements that hold on every mount.
const ALWAYS: [(&str, SyncMethod); 9] = [
    ("fsync", |_, at| write(at).sync_all().unwrap()),
    ("fdatasync", |_, at| write(at).sync_data().unwrap()),
    ("O_SYNC", |_, at| write_with_flags(at, OFlags::SYNC)),
    ("O_DSYNC", |_, at| write_with_flags(at, OFlags::DSYNC)),
    ("RWF_SYNC", |_, at| pwritev(at, OFlags::empty(), ReadWriteFlags::SYNC)),
    ("RWF_DSYNC", |_, at| pwritev(at, OFlags::empty(), ReadWriteFlags::DSYNC)),
    ("RWF_DSYNC and O_DIRECT", |_, at| pwritev(at, OFlags::DIRECT, ReadWriteFlags::DSYNC)),
    ("msync", |_, at| {
        let script = "import mmap, sys\n\
            with open(sys.argv[1], 'w+b') as file:\n    \
                file.truncate(4096); map = mmap.mmap(file.fileno(), 4096)\n    \
                map[:] = b'x' * 4096; map.flush()";
        assert!(Command::new("python3").args(["-c", script]).arg(at).status().unwrap().success());
    }),
    ("fsync of the directory", |mnt, at| {
        write(at).sync_data().unwrap();
        File::open(mnt).unwrap().sync_all().unwrap();
    }),
];

/// The acknowledgements for which the kernel must report sync(2).
const TOLD: [(&str, SyncMethod); 3] = [
    ("sync", |_, at| {
        write(at);
        rustix::fs::sync();
    }),
    ("syncfs", |mnt, at| {
        write(at);
        rustix::fs::syncfs(File::open(mnt).unwrap()).unwrap();
    }),
    ("umount", |mnt, at| {
        write(at);
        rustix::mount::unmount(mnt, rustix::mount::UnmountFlags::empty()).unwrap();
    }),
];

/// sync(2) and syncfs(2) succeeded and made nothing durable, because Linux forwards them on mounts
/// of the type fuseblk alone.
#[test]
fn what_is_acknowledged_as_durable_survives_the_death_of_the_daemon() {
    let Some(place) = with_image() else { return };
    let (mnt, at) = (place.path("mnt"), place.path("mnt/file"));
    let found = |options: &str, way: SyncMethod| {
        // The daemon makes nothing durable by itself.
        place.expect_success(&["mount", "uhs:img", "mnt", "-o", &format!("commit=0{options}")]);
        let daemon = place.pid();
        way(&mnt, &at);
        // After umount(2) it may have ended.
        let _ = kill_process(daemon, Signal::KILL);
        if place.is_mounted() {
            place.expect_success(&["umount", "mnt"]);
        }
        place.expect_success(&["mount", "uhs:img", "mnt"]);
        let found = fs::read(&at).ok();
        let _ = fs::remove_file(&at);
        place.expect_success(&["umount", "mnt"]);
        found.is_some_and(|found| found == TEXT)
    };
    let plain: SyncMethod = |_, at| drop(write(at));
    assert!(!found("", plain), "a write without a request is durable: the test sees nothing");
    assert!(found(",sync", plain), "sync");
    assert!(found(",sync,direct_io", plain), "sync,direct_io");
    for options in ["", ",writeback", ",direct_io", ",dirsync", ",no_syncfs"] {
        for (name, way) in ALWAYS {
            // A shared mapping of a file without a cache is impossible.
            if name != "msync" || options != ",direct_io" {
                assert!(found(options, way), "{name} with commit=0{options}");
            }
        }
    }
    let has_loop_devices = Path::new("/dev/loop-control").exists();
    if !has_loop_devices {
        return eprintln!("not here: no loop devices");
    }
    for options in ["", ",writeback", ",direct_io"] {
        for (name, way) in TOLD {
            assert!(found(options, way), "{name} with commit=0{options}");
        }
    }
}

/// The kernel leaves names to the file system: with dirsync and with sync, they were not durable.
#[test]
fn names_and_attributes_are_durable_on_a_mount_that_is_synchronous() {
    let Some(place) = with_image() else { return };
    let at = |name: &str| place.path("mnt").join(name);
    for (options, modes_too) in [("dirsync", false), ("sync", true)] {
        place.expect_success(&["mount", "uhs:img", "mnt", "-o", &format!("commit=0,{options}")]);
        fs::set_permissions(place.path("mnt"), fs::Permissions::from_mode(0o711)).unwrap();
        for name in ["moved", "removed", "linked"] {
            fs::write(at(name), TEXT).unwrap();
        }
        fs::create_dir(at("dir")).unwrap();
        symlink("dir", at("link")).unwrap();
        fs::rename(at("moved"), at("dir/moved")).unwrap();
        fs::hard_link(at("linked"), at("dir/linked")).unwrap();
        fs::remove_file(at("removed")).unwrap();
        if modes_too {
            fs::set_permissions(at("dir"), fs::Permissions::from_mode(0o701)).unwrap();
        }
        place.signal(Signal::KILL);
        place.expect_success(&["umount", "mnt"]);
        place.expect_success(&["mount", "uhs:img", "mnt"]);
        for name in ["dir/moved", "dir/linked", "linked"] {
            assert!(at(name).exists(), "{name} with {options}");
        }
        assert!(!at("removed").exists() && at("link").is_symlink(), "{options}");
        let mode = fs::metadata(at("dir")).unwrap().permissions().mode() & 0o777;
        assert_eq!(mode, if modes_too { 0o701 } else { 0o755 }, "{options}");
        fs::remove_dir_all(at("dir")).unwrap();
        for name in ["linked", "link"] {
            fs::remove_file(at(name)).unwrap();
        }
        place.expect_success(&["umount", "mnt"]);
    }
}

#[test]
fn a_mount_that_sync_does_not_reach_says_so() {
    let Some(place) = with_image() else { return };
    let kind = || {
        let text = fs::read_to_string("/proc/self/mountinfo").unwrap();
        let mnt = place.path("mnt");
        let line = text.lines().rfind(|line| line.split(' ').nth(4) == mnt.to_str()).unwrap();
        line.split(" - ").nth(1).and_then(|rest| rest.split(' ').next()).unwrap().to_owned()
    };
    let said = place.run(&["mount", "uhs:img", "mnt"]);
    if kind() == "fuseblk.defuse" {
        assert_eq!(said.err, "");
    } else {
        assert!(said.err.contains("sync(1) and syncfs(2) make nothing durable"), "{}", said.err);
    }
    place.expect_success(&["umount", "mnt"]);
    for (source, options, wanted) in [
        ("uhs:img", "no_syncfs", "fuse.defuse"),
        ("uhs:img", "ro", "fuse.defuse"),
        ("memory:", "rw", "fuse.defuse"),
    ] {
        let said = place.run(&["mount", source, "mnt", "-o", options]);
        assert_eq!((said.err.as_str(), kind().as_str()), ("", wanted), "{source} {options}");
        place.expect_success(&["umount", "mnt"]);
    }
}

/// sync(2) within a run was the kernel's, which knows nothing of its mounts.
#[test]
fn what_sync_acknowledges_in_a_run_survives_the_death_of_its_server() {
    let Some(place) = with_image() else { return };
    for (sync, stays) in
        [("sync", true), ("sync -f /x", true), ("sync /x/file /x", true), ("true", false)]
    {
        let script = format!("echo text > /x/file && {sync} && kill -9 $PPID");
        let run = ["run", "--mount", "/x=uhs:img,commit=0", "--", "sh", "-c", &script];
        assert_eq!(place.run(&run).code, None, "{sync}: the run is killed");
        let kept = place.run(&["run", "--mount", "/x=uhs:img", "--", "cat", "/x/file"]);
        assert_eq!(kept.out == "text\n", stays, "{sync}: {}", kept.err);
        place.run(&["run", "--mount", "/x=uhs:img", "--", "rm", "-f", "/x/file"]);
    }
}

#[test]
fn sync_reaches_a_server_by_a_mount_with_syncfs() {
    let Some(place) = with_image() else { return };
    if !Path::new("/dev/loop-control").exists() {
        return println!("not here: no loop devices");
    }
    for (name, way) in &TOLD[..2] {
        for (source, options, stays) in
            [("shared", "syncfs", true), ("socket", "syncfs", true), ("shared", "rw", false)]
        {
            let args = ["serve", "uhs:img", "socket", "--shared", "-f", "-o", "commit=0"];
            let mut server = place.command(&args).stderr(Stdio::null()).spawn().unwrap();
            eventually("the server listens", || place.path("socket").exists());
            place.expect_success(&["mount", &format!("{source}:socket"), "mnt", "-o", options]);
            way(&place.path("mnt"), &place.path("mnt/file"));
            server.kill().unwrap();
            server.wait().unwrap();
            place.expect_success(&["umount", "mnt"]);
            fs::remove_file(place.path("socket")).unwrap();
            let kept = place.run(&["run", "--mount", "/x=uhs:img", "--", "rm", "/x/file"]);
            assert_eq!(
                kept.code == Some(0),
                stays,
                "{name} by {source} with {options}: {}",
                kept.err
            );
        }
    }
}

/// Changes a file in a directory, which is opened with a flag.
const CHANGE: &str = "
import os, sys
os.chdir(sys.argv[1])
flag = getattr(os, sys.argv[3])
source = os.open('source', os.O_RDWR | os.O_CREAT)
os.write(source, b'x' * 8192)
file = os.open('file', os.O_RDWR | os.O_CREAT | flag)
if sys.argv[2] == 'copy': os.copy_file_range(source, file, 8192, 0)
else: os.posix_fallocate(file, 0, 8192)
";

/// The kernel syncs what write(2) has changed in a file with O_SYNC or O_DSYNC. It leaves copies
/// and allocations to the file system, of which nothing was durable.
#[test]
fn copies_to_and_allocations_of_a_file_with_o_sync_are_durable() {
    let Some(place) = with_image() else { return };
    let mnt = place.path("mnt");
    let file = || {
        // A killed process may have it for a moment.
        eventually("the image is free", || {
            place.run(&["run", "--mount", "/x=uhs:img", "--", "true"]).code == Some(0)
        });
        let size =
            place.run(&["run", "--mount", "/x=uhs:img", "--", "stat", "-c", "%s", "/x/file"]);
        place.run(&["run", "--mount", "/x=uhs:img", "--", "rm", "-f", "/x/file"]);
        size.out
    };
    let cases = ["copy", "allocation"]
        .map(|what| ["O_SYNC", "O_DSYNC", "O_APPEND"].map(|flag| (what, flag)));
    for (what, flag) in cases.into_iter().flatten().filter(|case| *case != ("copy", "O_APPEND")) {
        let wanted = if flag == "O_APPEND" { "" } else { "8192\n" };
        for options in ["commit=0", "commit=0,no_syncfs,direct_io"] {
            place.expect_success(&["mount", "uhs:img", "mnt", "-o", options]);
            let daemon = place.pid();
            let done =
                Command::new("python3").args(["-c", CHANGE]).arg(&mnt).args([what, flag]).status();
            assert!(done.unwrap().success(), "{what} {flag} {options}");
            let _ = kill_process(daemon, Signal::KILL);
            place.expect_success(&["umount", "mnt"]);
            assert_eq!(file(), wanted, "{what} {flag} {options}");
        }
        let script = "python3 -c \"$@\" && kill -9 $PPID";
        let run = ["run", "--mount", "/x=uhs:img,commit=0", "--", "sh", "-c", script, "sh"];
        assert_eq!(place.run(&[&run[..], &[CHANGE, "/x", what, flag]].concat()).code, None);
        assert_eq!(file(), wanted, "{what} {flag} in a run");
    }
}

/// A way to end what has the image.
type End = fn(&TestPlace, &mut Child);

/// The ends of a mount.
const ENDS: [(&str, End); 5] = [
    ("defuse umount", |place, _| drop(place.expect_success(&["umount", "mnt"]))),
    ("umount(8)", |place, _| {
        assert!(Command::new("umount").arg(place.path("mnt")).status().unwrap().success());
    }),
    ("SIGTERM", |place, _| place.signal(Signal::TERM)),
    ("SIGINT", |place, _| place.signal(Signal::INT)),
    ("while somebody asks for statistics", |place, _| {
        let asks: Vec<_> = (0..8)
            .map(|_| place.command(&["stat", "mnt"]).stdout(Stdio::null()).spawn().unwrap())
            .collect();
        place.expect_success(&["umount", "mnt"]);
        asks.into_iter().for_each(|mut ask| drop(ask.wait()));
    }),
];

/// The block of the snapshot of the image, 0 for none. Waits for a daemon that has the image.
fn snapshot(place: &TestPlace) -> u64 {
    let shown = std::cell::OnceCell::new();
    eventually("the image is free", || {
        let said = place.run(&["dump", "--json", "img"]);
        said.code == Some(0) && shown.set(said.out).is_ok()
    });
    let shown: serde_json::Value = serde_json::from_str(&shown.into_inner().unwrap()).unwrap();
    shown["superblocks"][0]["snapshot"].as_u64().unwrap()
}

// Threads of signals and of the control socket kept the file system until the process was gone: a
// mount that was ended properly was read as after a power failure.
#[test]
fn every_clean_end_leaves_a_snapshot_from_which_the_next_mount_reads_less() {
    let Some(place) = with_image() else { return };
    place.expect_success(&["mount", "uhs:img", "mnt"]);
    (0..1500).for_each(|n| drop(File::create(place.path("mnt").join(n.to_string())).unwrap()));
    place.expect_success(&["umount", "mnt"]);
    let read = || {
        let shown = place.expect_success(&["stat", "mnt", "--json"]);
        let shown: defuse_probe::StatsSnapshot = serde_json::from_str(&shown).unwrap();
        assert_eq!(fs::read_dir(place.path("mnt")).unwrap().count(), 1500);
        shown.figure("device_read").unwrap().value
    };
    for (name, end) in ENDS {
        for options in ["rw", "sync,workers=1"] {
            assert_ne!(snapshot(&place), 0, "before {name} with {options}");
            let mut child = place.foreground(&["mount", "uhs:img", "mnt", "-f", "-o", options]);
            let by_snapshot = read();
            end(&place, &mut child);
            assert!(child.wait().unwrap().success(), "{name}");
            assert_ne!(snapshot(&place), 0, "after {name} with {options}");
            // A killed daemon leaves none.
            place.expect_success(&["mount", "uhs:img", "mnt", "-o", options]);
            place.signal(Signal::KILL);
            place.expect_success(&["umount", "mnt"]);
            assert_eq!(snapshot(&place), 0);
            place.expect_success(&["mount", "uhs:img", "mnt"]);
            let by_scan = read();
            assert!(4 * by_snapshot < by_scan, "{name}: {by_snapshot} of {by_scan} bytes");
            end(&place, &mut child);
        }
    }
    for arguments in [
        &["run", "--mount", "/x=uhs:img", "--", "touch", "/x/0"][..],
        &[
            "run",
            "--fork",
            "server",
            "--mount",
            "/x=uhs:img",
            "--",
            "sh",
            "-c",
            "ls /x & ls /x; wait",
        ],
    ] {
        place.expect_success(arguments);
        assert_ne!(snapshot(&place), 0, "{arguments:?}");
    }
    for program in ["serve", "manager"] {
        let (socket, source) =
            (place.path("socket"), format!("uhs:{}", place.path("img").display()));
        let device = format!("[[device]]\npath = \"/disk\"\nsource = {source:?}\n");
        fs::write(place.path("config"), format!("socket = {socket:?}\n{device}")).unwrap();
        let mut child = match program {
            "serve" => place.command(&["serve", "--foreground", "uhs:img", "socket"]),
            _ => place.command(&["manager", "--foreground", "config"]),
        };
        let mut child = child.stderr(Stdio::null()).spawn().unwrap();
        eventually("served", || socket.exists());
        let dir = if program == "serve" { "/x" } else { "/x/disk" };
        let out = place.expect_success(&["run", "--mount", "/x=socket:socket", "--", "ls", dir]);
        assert_eq!(out.lines().count(), 1500);
        kill_process(rustix::process::Pid::from_child(&child), Signal::TERM).unwrap();
        assert!(child.wait().unwrap().success(), "{program}");
        assert_ne!(snapshot(&place), 0, "{program}");
    }
}
