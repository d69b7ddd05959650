//! Images that grow, are shown, and are opened once.

use std::fs::{self, File};
use std::mem::MaybeUninit;
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Command, Stdio};

use rustix::fs::inotify;
use rustix::mount::MountFlags;
use rustix::process::{Pid, Signal, kill_process};

use super::common::{TestPlace, TestTmpfs, eventually, from_output};
use super::{clean, damage, with_image};

fn json(place: &TestPlace, arguments: &[&str]) -> serde_json::Value {
    serde_json::from_str(&place.expect_success(arguments)).unwrap()
}

fn size(place: &TestPlace) -> u64 {
    json(place, &["fsck", "--json", "img"])["figures"]["size_bytes"].as_u64().unwrap()
}

/// How often `run` opens `path`.
fn count_opens(path: &Path, run: impl FnOnce()) -> usize {
    let watch = inotify::init(inotify::CreateFlags::NONBLOCK).unwrap();
    inotify::add_watch(&watch, path, inotify::WatchFlags::OPEN).unwrap();
    run();
    let mut buffer = [MaybeUninit::uninit(); 4096];
    let mut events = inotify::Reader::new(&watch, &mut buffer);
    std::iter::from_fn(|| events.next().ok().map(drop)).count()
}

/// A signal while space is allocated. Nothing is left but what was there before. SIGTERM and SIGHUP
/// left half an image.
#[test]
fn a_signal_ends_mkfs_and_removes_the_new_image() {
    let Some(place) = TestPlace::new_to_mount() else { return };
    let tmpfs = TestTmpfs::mount_on(place.path("tmpfs"), MountFlags::empty(), c"size=3g");
    let image = tmpfs.path().join("img");
    let arguments = ["mkfs", "uhs", "tmpfs/img", "--size", "2G"];
    for signal in [Signal::INT, Signal::TERM, Signal::HUP] {
        let child = place.command(&arguments).stderr(Stdio::piped()).spawn().unwrap();
        eventually("space is allocated", || image.metadata().is_ok_and(|meta| meta.blocks() > 0));
        kill_process(Pid::from_child(&child), signal).unwrap();
        let said = from_output(child.wait_with_output().unwrap());
        assert_eq!(said.code, Some(130), "{signal:?}: {}", said.err);
        assert!(said.err.contains("tmpfs/img: interrupted"), "{signal:?}: {}", said.err);
        assert!(!image.exists(), "{signal:?}");
    }
}

/// `dump` waits in a write to a pipe that no process reads, where it looks for no interrupt.
#[test]
fn a_second_ctrl_c_kills_at_once() {
    let Some(place) = with_image() else { return };
    place.expect_success(&["mount", "uhs:img", "mnt"]);
    // Its names alone fill a pipe.
    let name = |n| place.path("mnt").join(format!("{}{n}", "n".repeat(200)));
    let file = File::create(name(0)).unwrap();
    (1..1000).for_each(|n| fs::hard_link(name(0), name(n)).unwrap());
    let ino = file.metadata().unwrap().ino().to_string();
    drop(file);
    place.expect_success(&["umount", "mnt"]);
    let mut child =
        place.command(&["dump", "img", "--inode", &ino]).stdout(Stdio::piped()).spawn().unwrap();
    let pid = Pid::from_child(&child);
    let waits = || fs::read_to_string(format!("/proc/{}/wchan", child.id())).unwrap();
    eventually("the pipe is full", || waits().contains("pipe_write"));
    let mut ended = None;
    kill_process(pid, Signal::INT).unwrap();
    eventually("the second signal ends it", || {
        let _ = kill_process(pid, Signal::INT);
        ended = child.try_wait().unwrap();
        ended.is_some()
    });
    assert_eq!(ended.unwrap().signal(), Some(Signal::INT.as_raw()));
}

/// A stranger who may rename the image could else show one file to the checks, and another one to
/// what follows.
#[test]
fn the_path_of_an_image_is_followed_once() {
    let Some(place) = with_image() else { return };
    let path = place.path("img");
    for command in [
        &["fsck", "img"][..],
        &["fsck", "--repair", "img"],
        &["dump", "img"],
        &["grow", "img", "--size", "40M"],
        &["mkfs", "uhs", "img", "--size", "32M", "--force"],
    ] {
        assert_eq!(count_opens(&path, || drop(place.expect_success(command))), 1, "{command:?}");
    }
    assert_eq!(count_opens(&path, || drop(place.expect_success(&["mount", "uhs:img", "mnt"]))), 1);
    place.expect_success(&["umount", "mnt"]);
    // A link to nothing is no place for a new image.
    std::os::unix::fs::symlink("elsewhere", place.path("link")).unwrap();
    place.expect_failure(1, &["mkfs", "uhs", "link", "--size", "16M"], "cannot create");
    assert!(!place.path("elsewhere").exists() && place.path("link").is_symlink());
}

#[test]
fn an_image_grows_and_keeps_its_files() {
    let Some(place) = with_image() else { return };
    let at = |name: &str| place.path("mnt").join(name);
    place.expect_success(&["mount", "uhs:img", "mnt"]);
    fs::write(at("old"), vec![7; 3_000_000]).unwrap();
    let pid = place.list()[0]["pid"].as_i64().unwrap();
    let says = format!("img is in use by process {pid} (EBUSY)");
    place.expect_failure(1, &["grow", "img", "--size", "64M"], &says);
    place.expect_failure(1, &["dump", "img"], &says);
    place.expect_success(&["umount", "mnt"]);

    place.expect_failure(2, &["grow", "img", "--size", "16M"], "cannot shrink to 16777216");
    place.expect_failure(2, &["grow", "img"], "give a size, such as --size 2G");
    place.expect_failure(1, &["grow", "src", "--size", "1G"], "Is a directory");
    assert_eq!((size(&place), place.path("img").metadata().unwrap().len()), (32 << 20, 32 << 20));
    let out = place.expect_success(&["grow", "img", "--size", "32M"]);
    assert!(out.contains("has 33554432 bytes already"), "{out}");
    let out = place.expect_success(&["grow", "img", "--size", "64M"]);
    assert!(out.contains("67108864 bytes, before 33554432"), "{out}");
    clean(&place);
    assert_eq!(size(&place), 64 << 20);
    // A file that is longer already is not cut.
    File::options().write(true).open(place.path("img")).unwrap().set_len(100 << 20).unwrap();
    place.expect_success(&["grow", "img", "--size", "80M"]);
    assert_eq!((size(&place), place.path("img").metadata().unwrap().len()), (80 << 20, 100 << 20));
    place.expect_success(&["grow", "img"]);
    assert_eq!(size(&place), 100 << 20);

    place.expect_success(&["mount", "uhs:img", "mnt"]);
    assert!(fs::read(at("old")).unwrap() == vec![7; 3_000_000]);
    fs::write(at("new"), vec![8; 60 << 20]).unwrap();
    place.expect_success(&["umount", "mnt"]);
    clean(&place);
}

#[test]
fn a_block_device_grows_to_the_size_that_it_has() {
    let place = TestPlace::new();
    let image = place.path("img");
    File::create(&image).unwrap().set_len(16 << 20).unwrap();
    let losetup = |arguments: &[&str]| {
        let out = Command::new("losetup").args(arguments).output();
        out.ok().filter(|out| out.status.success()).map(|out| out.stdout)
    };
    let Some(device) = losetup(&["--find", "--show", image.to_str().unwrap()]) else {
        let missing = !Path::new("/dev/loop-control").exists();
        return println!("{}: no loop device", if missing { "not here" } else { "skipped" });
    };
    let device = String::from_utf8(device).unwrap().trim().to_owned();
    place.expect_success(&["mkfs", "uhs", &device]);
    // There would be two writers.
    let says = format!("is the backing file of {device} (EBUSY): use uhs:{device}, or detach it");
    for command in
        [&["fsck"][..], &["fsck", "--repair"], &["dump"], &["grow"], &["mkfs", "uhs", "--force"]]
    {
        let said = place.run(&[command, &[image.to_str().unwrap()]].concat());
        assert!(said.code != Some(0) && said.err.contains(&says), "{command:?}: {}", said.err);
    }
    let said = place.run(&["run", "--mount", "/x=uhs:img", "--", "ls", "/x"]);
    assert!(said.code != Some(0) && said.err.contains(&says), "{}", said.err);
    let out = place.expect_success(&["grow", &device]);
    assert!(out.contains("has 16777216 bytes already"), "{out}");
    File::options().write(true).open(&image).unwrap().set_len(24 << 20).unwrap();
    losetup(&["--set-capacity", &device]).unwrap();
    place.expect_failure(2, &["grow", &device, "--size", "24M"], "leave out --size");
    let out = place.expect_success(&["grow", &device]);
    losetup(&["--detach", &device]).unwrap();
    assert!(out.contains("25165824 bytes, before 16777216"), "{out}");
    clean(&place);
}

#[test]
fn dump_shows_an_image_and_an_inode_also_if_they_are_damaged() {
    let Some(place) = with_image() else { return };
    place.expect_success(&["mount", "uhs:img", "mnt"]);
    fs::write(place.path("mnt/a\nb"), vec![7; 20_000]).unwrap();
    let ino = std::os::unix::fs::MetadataExt::ino(&fs::metadata(place.path("mnt/a\nb")).unwrap());
    place.expect_success(&["umount", "mnt"]);
    let before = fs::read(place.path("img")).unwrap();
    let shown = json(&place, &["dump", "--json", "img"]);
    assert_eq!(shown["superblocks"].as_array().unwrap().len(), 3);
    assert_eq!(shown["superblocks"][0]["state"], "newest");
    assert_eq!(
        shown["units"][1],
        serde_json::json!({"class": "slots", "units": 1, "free_blocks": 0})
    );
    assert_eq!(shown["slots"][0], serde_json::json!({"state": "counts", "slots": 2}));
    assert_eq!(shown["problems"], serde_json::json!([]));
    let number = ino.to_string();
    let shown = json(&place, &["dump", "--json", "img", "--inode", &number]);
    assert_eq!(shown["names"][0]["name"], "a\\nb");
    assert_eq!(shown["data"][0]["blocks"], 5);
    let block = shown["slots"][0]["block"].as_u64().unwrap();
    let text = place.expect_success(&["dump", "img", "--inode", &number]);
    assert!(text.contains("a\\nb") && text.contains("directory  stamp  name"), "{text}");
    place.expect_failure(1, &["dump", "img", "--inode", "77"], "has no slot of inode 77");
    assert!(fs::read(place.path("img")).unwrap() == before);

    damage(&place, block * 4096 + 200);
    damage(&place, 100);
    let shown = json(&place, &["dump", "--json", "img"]);
    assert_eq!(
        (&shown["superblocks"][0]["state"], &shown["slots"][0]["slots"]),
        (&"damaged".into(), &1.into())
    );
    let shown = json(&place, &["dump", "--json", "img", "--inode", &number]);
    assert_ne!(shown["slots"][0]["state"], "counts");
    for at in [(3 << 21) + 100, (7 << 21) + 100] {
        damage(&place, at);
    }
    let shown = json(&place, &["dump", "--json", "img"]);
    assert_eq!(shown["superblocks"][2]["state"], "damaged");
    place.expect_failure(
        1,
        &["grow", "img", "--size", "64M"],
        "the superblock is damaged, in all copies",
    );
    assert_eq!(place.path("img").metadata().unwrap().len(), 32 << 20);
}
