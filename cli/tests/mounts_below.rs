//! File systems that are mounted below the source of a mount, its own mount among them.

mod common;

use std::fs;
use std::path::Path;
use std::process::Command;

use common::{TestPlace, eventually_or};
use rustix::io::Errno;
use rustix::mount::{MountFlags, UnmountFlags, mount, mount_bind, unmount};

/// The options of the served mount. Each keeps other descriptors.
const OPTIONS: [&str; 6] =
    ["rw", "no_passthrough", "writeback", "handles=off", "workers=1", "cache=keep,no_xattr"];

fn sh(script: &str, dir: &Path) {
    let status = Command::new("sh").args(["-e", "-c", script]).current_dir(dir).status().unwrap();
    assert!(status.success(), "{script}");
}

/// Mounts a file system of one kind on `below` with the file `f`, or a file on a file.
fn mount_kind(place: &TestPlace, kind: &str, below: &Path) {
    let none = MountFlags::empty();
    match kind {
        "tmpfs" => mount("tmpfs", below, "tmpfs", none, None).unwrap(),
        "ext4" => sh(
            "truncate -s 16M ext4.img; mkfs.ext4 -q ext4.img; mount -o loop ext4.img src/ext4",
            &place.path(""),
        ),
        "overlay" => sh(
            "mount -t tmpfs layers layers; mkdir -p layers/upper layers/work; \
             mount -t overlay overlay -o lowerdir=lower,upperdir=layers/upper,workdir=layers/work src/overlay; \
             umount -l layers",
            &place.path(""),
        ),
        "fuse" => {
            place.expect_success(&["mount", "memory:", "src/fuse", "-o", "nonempty"]);
        }
        "proc" => return mount("proc", below, "proc", none, None).unwrap(),
        kind => panic!("{kind}"),
    }
    fs::write(below.join("f"), kind).unwrap();
    fs::create_dir_all(below.join("d/e")).unwrap();
    fs::write(below.join("d/e/g"), kind).unwrap();
}

/// Unmounts as soon as the daemon has no descriptor there.
fn unmount_soon(below: &Path, what: &str) {
    eventually_or(
        || format!("{what}: unmounted"),
        || {
            let failed = unmount(below, UnmountFlags::empty()).err();
            assert!(matches!(failed, None | Some(Errno::BUSY)), "{what}: {failed:?}");
            failed.is_none()
        },
    );
}

/// A daemon kept a descriptor of each mount that it had seen, so that umount(8) failed with "target
/// is busy" until the daemon ended.
#[test]
fn a_file_system_below_the_source_is_unmounted_while_it_is_served() {
    const KINDS: [&str; 5] = ["tmpfs", "ext4", "overlay", "fuse", "proc"];
    let Some(place) = TestPlace::new_to_mount() else { return };
    for dir in KINDS
        .map(|kind| format!("src/{kind}"))
        .iter()
        .map(String::as_str)
        .chain(["layers", "lower"])
    {
        fs::create_dir(place.path(dir)).unwrap();
    }
    for kind in KINDS {
        fs::write(place.path("src").join(kind).join("beneath"), "").unwrap();
    }
    for options in OPTIONS {
        place.expect_success(&["mount", "passthrough:src", "mnt", "-o", options]);
        let served = |kind: &str| place.path("mnt").join(kind);
        let shows = |kind: &str, name: &str| fs::symlink_metadata(served(kind).join(name)).is_ok();
        for kind in KINDS {
            mount_kind(&place, kind, &place.path("src").join(kind));
        }
        for kind in KINDS {
            let what = format!("{kind}, {options}");
            // Names of the covered directory are valid for a second.
            let first = if kind == "proc" { "version" } else { "f" };
            eventually_or(|| format!("{what}: shown"), || shows(kind, first));
            use_kind(kind, &served(kind));
            // An open file keeps the mount busy, as everywhere.
            let open = fs::File::open(served(kind).join(first)).unwrap();
            let below = place.path("src").join(kind);
            assert_eq!(unmount(&below, UnmountFlags::empty()), Err(Errno::BUSY), "{what}");
            drop(open);
        }
        for kind in KINDS {
            unmount_soon(&place.path("src").join(kind), &format!("{kind}, {options}"));
        }
        for kind in KINDS {
            eventually_or(|| format!("{kind}, {options}: uncovered"), || shows(kind, "beneath"));
            assert!(!shows(kind, "f") && !shows(kind, "version"), "{kind}, {options}");
        }
        place.expect_success(&["umount", "mnt"]);
    }
}

/// Leaves all kinds of descriptors and names behind.
fn use_kind(kind: &str, served: &Path) {
    if kind == "proc" {
        assert!(!fs::read(served.join("version")).unwrap().is_empty());
        return;
    }
    sh("ls -lR . >/dev/null", served);
    assert_eq!(fs::read_to_string(served.join("f")).unwrap(), kind);
    fs::write(served.join("d/new"), "new").unwrap();
    fs::rename(served.join("f"), served.join("d/f")).unwrap();
    fs::rename(served.join("d/f"), served.join("f")).unwrap();
    fs::remove_file(served.join("d/e/g")).unwrap();
    fs::remove_dir(served.join("d/e")).unwrap();
    assert!(fs::metadata(served.join("d/none")).is_err());
}

/// Names that were looked up in vain are forgotten when the file system is unused. By a name that
/// was made meanwhile, the kernel would detach what is mounted there, and a working directory would
/// have no path.
#[test]
fn mounts_and_working_directories_on_a_file_system_below_the_source_stay() {
    let Some(place) = TestPlace::new_to_mount() else { return };
    for dir in ["src/overlay", "layers", "lower"] {
        fs::create_dir(place.path(dir)).unwrap();
    }
    let below = place.path("src/overlay");
    mount_kind(&place, "overlay", &below);
    place.expect_success(&["mount", "passthrough:src", "mnt"]);
    let made = place.path("mnt/overlay/made");
    for name in ["made", "other", "dir"] {
        assert!(fs::metadata(made.with_file_name(name)).is_err());
    }
    fs::create_dir(&made).unwrap();
    mount("tmpfs", &made, "tmpfs", MountFlags::empty(), None).unwrap();
    fs::write(made.join("file"), "text").unwrap();
    let dir = made.with_file_name("dir");
    fs::create_dir(&dir).unwrap();
    let script = "sleep 6; pwd -P; cd ..; pwd -P";
    let shell = Command::new("sh").args(["-c", script]).current_dir(&dir).output().unwrap();
    let shown = String::from_utf8(shell.stdout).unwrap();
    assert_eq!(shown, format!("{}\n{}\n", dir.display(), dir.parent().unwrap().display()));
    assert_eq!(fs::read_to_string(made.join("file")).unwrap(), "text");
    unmount(&made, UnmountFlags::empty()).unwrap();
    unmount_soon(&below, "after both");
    place.expect_success(&["umount", "mnt"]);
}

/// After a pause, files of a mount are reached by the name of its mount point again.
#[test]
fn a_mount_below_the_source_is_reached_again_after_a_pause() {
    let Some(place) = TestPlace::new_to_mount() else { return };
    let none = MountFlags::empty();
    let (outer, inner) = (place.path("src/outer"), place.path("src/outer/dir/inner"));
    fs::create_dir(&outer).unwrap();
    for options in OPTIONS {
        mount("outer", &outer, "tmpfs", none, None).unwrap();
        fs::create_dir_all(&inner).unwrap();
        mount("inner", &inner, "tmpfs", none, None).unwrap();
        fs::create_dir(inner.join("deep")).unwrap();
        fs::write(inner.join("deep/file"), "text").unwrap();
        fs::write(outer.join("single"), "single").unwrap();
        fs::write(place.path("src/file"), "").unwrap();
        mount_bind(outer.join("single"), place.path("src/file")).unwrap();
        place.expect_success(&["mount", "passthrough:src", "mnt", "-o", options]);
        let served = place.path("mnt/outer/dir/inner/deep");
        let dir = fs::File::open(&served).unwrap();
        let read = || fs::read_to_string(served.join("file"));
        for _ in 0..2 {
            assert_eq!(read().unwrap(), "text", "{options}");
            assert_eq!(fs::read_to_string(place.path("mnt/file")).unwrap(), "single");
            // Longer than descriptors are kept.
            std::thread::sleep(std::time::Duration::from_millis(2500));
        }
        drop(dir);
        // The mounts of directories of other mounts go in any order.
        unmount_soon(&place.path("src/file"), options);
        unmount_soon(&inner, options);
        unmount_soon(&outer, options);
        eventually_or(|| format!("{options}: gone"), || read().is_err());
        place.expect_success(&["umount", "mnt"]);
    }
}

/// A daemon that entered its own mount held it, and one with a single thread waited for itself.
#[test]
fn a_mount_inside_its_own_source_shows_what_it_covers() {
    let Some(place) = TestPlace::new_to_mount() else { return };
    for (at, foreign) in [("src/own", false), ("src/a/b/own", false), ("src/below/own", true)] {
        for options in OPTIONS {
            let what = format!("{at}, {options}");
            let below = place.path("src/below");
            fs::create_dir_all(&below).unwrap();
            if foreign {
                mount("below", &below, "tmpfs", MountFlags::empty(), None).unwrap();
            }
            let own = place.path(at);
            fs::create_dir_all(own.join("dir")).unwrap();
            fs::write(own.join("beneath"), "beneath").unwrap();
            let options = format!("nonempty,{options}");
            place.expect_success(&["mount", "passthrough:src", at, "-o", &options]);
            // The mount, and itself in it.
            let again = own.join(at.strip_prefix("src/").unwrap());
            assert_eq!(fs::read_to_string(again.join("beneath")).unwrap(), "beneath", "{what}");
            let mut names: Vec<_> =
                fs::read_dir(&again).unwrap().map(|entry| entry.unwrap().file_name()).collect();
            names.sort_unstable();
            assert_eq!(names, ["beneath", "dir"], "{what}");
            sh(&format!("ls -lR {at} >/dev/null; find {at} -xdev >/dev/null"), &place.path(""));
            fs::write(again.join("dir/new"), "new").unwrap();
            assert_eq!(fs::read_to_string(again.join("dir/new")).unwrap(), "new", "{what}");
            let busy = |done: std::io::Result<()>| {
                done.unwrap_err().kind() == std::io::ErrorKind::ResourceBusy
            };
            assert!(busy(fs::remove_dir(&again)), "{what}");
            assert!(busy(fs::rename(&again, again.with_file_name("elsewhere"))), "{what}");
            let other = again.with_file_name("other");
            fs::create_dir(&other).unwrap();
            assert!(busy(fs::rename(&other, &again)), "{what}");
            fs::remove_dir(&other).unwrap();
            place.expect_success(&["umount", at]);
            assert_eq!(fs::read_to_string(own.join("dir/new")).unwrap(), "new", "{what}");
            fs::remove_dir_all(&own).unwrap();
            if foreign {
                unmount(&below, UnmountFlags::empty()).unwrap();
            }
        }
    }
}
