//! uhs: images made, checked, mounted, served and used in a run by the program.

mod common;
#[path = "uhs/durability.rs"]
mod durability;
#[path = "uhs/images.rs"]
mod images;

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt, symlink};
use std::path::Path;
use std::process::{Command, Stdio};

use common::{TestPlace, TestTmpfs, eventually, from_output};
use rustix::mount::MountFlags;
use rustix::process::{Pid, Signal, kill_process};

/// A place with an image `img`, if it can be mounted.
fn with_image() -> Option<TestPlace> {
    let place = TestPlace::new_to_mount()?;
    place.expect_success(&["mkfs", "uhs", "img", "--size", "32M"]);
    Some(place)
}

fn clean(place: &TestPlace) {
    let out = place.expect_success(&["fsck", "img"]);
    assert!(out.contains("img: clean: "), "{out}");
}

/// Overwrites a byte of the image.
fn damage(place: &TestPlace, at: u64) {
    let image = OpenOptions::new().read(true).write(true).open(place.path("img")).unwrap();
    let mut byte = [0];
    image.read_exact_at(&mut byte, at).unwrap();
    image.write_all_at(&[byte[0] ^ 0xff], at).unwrap();
}

#[test]
fn an_image_is_made_mounted_and_has_its_files_at_the_next_mount() {
    let Some(place) = with_image() else { return };
    assert_eq!(place.path("img").metadata().unwrap().mode() & 0o7777, 0o600);
    place.expect_success(&["mount", "uhs:img", "mnt"]);
    let at = |name: &str| place.path("mnt").join(name);
    fs::create_dir(at("dir")).unwrap();
    fs::write(at("dir/small"), "text").unwrap();
    let large: Vec<u8> = (0..3_000_000u32).map(|n| (n % 251) as u8).collect();
    fs::write(at("large"), &large).unwrap();
    fs::hard_link(at("dir/small"), at("linked")).unwrap();
    symlink("dir/small", at("link")).unwrap();
    fs::set_permissions(at("large"), fs::Permissions::from_mode(0o640)).unwrap();
    let ino = at("large").metadata().unwrap().ino();
    place.expect_success(&["umount", "mnt"]);
    clean(&place);

    place.expect_success(&["mount", "uhs:img", "mnt", "-o", "cache=2M,commit=0"]);
    assert_eq!(fs::read_to_string(at("link")).unwrap(), "text");
    assert_eq!(at("linked").metadata().unwrap().nlink(), 2);
    assert!(fs::read(at("large")).unwrap() == large);
    let meta = at("large").metadata().unwrap();
    assert_eq!((meta.ino(), meta.mode() & 0o7777), (ino, 0o640));
    fs::remove_dir_all(at("dir")).unwrap();
    place.expect_success(&["umount", "mnt"]);
    clean(&place);
}

#[test]
fn stat_shows_the_figures_of_the_file_system_in_every_format() {
    let Some(place) = with_image() else { return };
    place.expect_success(&["mount", "uhs:img", "mnt"]);
    fs::write(place.path("mnt/file"), vec![7; 1 << 20]).unwrap();
    File::open(place.path("mnt/file")).unwrap().sync_all().unwrap();
    let table = place.expect_success(&["stat", "mnt"]);
    let line = table.lines().find(|line| line.starts_with("device_written ")).unwrap();
    assert!(line.ends_with("iB"), "{line}");
    let json: serde_json::Value =
        serde_json::from_str(&place.expect_success(&["stat", "--json"])).unwrap();
    let figures = json["figures"].as_array().unwrap();
    let value = |name: &str| {
        let figure = figures.iter().find(|figure| figure["name"] == name).unwrap();
        figure["value"].as_u64().unwrap()
    };
    assert!(value("groups") >= 1 && value("device_flushes") >= 1);
    assert!(value("device_written") >= 1 << 20);
    assert_eq!((value("space"), value("dirty")), (32 << 20, 0));
    let text = place.expect_success(&["stat", "mnt", "--prometheus"]);
    assert!(text.contains("# TYPE defuse_fs_groups_total counter"), "{text}");
    assert!(text.contains("# TYPE defuse_fs_dirty_bytes gauge"), "{text}");
    place.expect_success(&["umount", "mnt"]);
}

/// Every metric in an expression of the dashboard is printed for a mount of uhs, or for a server.
#[test]
fn the_dashboard_asks_for_metrics_that_exist() {
    let Some(place) = with_image() else { return };
    place.expect_success(&["mount", "uhs:img", "mnt"]);
    fs::write(place.path("mnt/file"), "text").unwrap();
    let mut printed = place.expect_success(&["stat", "mnt", "--prometheus"]);
    place.expect_success(&["umount", "mnt"]);
    let mut server = place.command(&["serve", "memory:", "sock"]).spawn().unwrap();
    eventually("the socket of the server", || place.path("sock").exists());
    place.expect_success(&["mount", "socket:sock", "mnt"]);
    printed += &place.expect_success(&["stat", "sock", "--prometheus"]);
    place.expect_success(&["umount", "mnt"]);
    kill_process(Pid::from_child(&server), Signal::TERM).unwrap();
    server.wait().unwrap();
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/grafana-dashboard.json");
    let dashboard: serde_json::Value = serde_json::from_slice(&fs::read(file).unwrap()).unwrap();
    let panels = dashboard["panels"].as_array().unwrap();
    let targets = panels.iter().filter_map(|panel| panel["targets"].as_array()).flatten();
    let mut count = 0;
    for target in targets {
        let expression = target["expr"].as_str().unwrap();
        for (at, _) in expression.match_indices("defuse_") {
            let rest = &expression[at..];
            let end = rest.find(|c: char| !c.is_ascii_lowercase() && c != '_').unwrap();
            let name = &rest[..end];
            let is_sample = |line: &str| line.starts_with(&format!("{name}{{"));
            assert!(printed.lines().any(is_sample), "{name} of {expression} in {printed}");
            count += 1;
        }
    }
    assert!(count > 30, "{count}");
}

#[test]
fn mkfs_makes_a_file_of_the_size_and_allocates_it_unless_it_is_to_be_sparse() {
    let place = TestPlace::new();
    place.expect_success(&["mkfs", "uhs", "full", "--size", "16M"]);
    place.expect_success(&["mkfs", "uhs", "sparse", "--size", "1G", "--sparse"]);
    let of = |name: &str| place.path(name).metadata().unwrap();
    assert_eq!((of("full").len(), of("sparse").len()), (16 << 20, 1 << 30));
    assert!(of("full").blocks() * 512 >= 16 << 20 && of("sparse").blocks() * 512 < 1 << 20);
    let json = place.expect_success(&["fsck", "--json", "sparse"]);
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert_eq!((&json["clean"], &json["figures"]["size_bytes"]), (&true.into(), &(1 << 30).into()));
    assert_eq!(json["problems"].as_array().unwrap().len(), 0);

    place.expect_failure(2, &["mkfs", "uhs", "new"], "give its size, such as --size 1G");
    place.expect_failure(
        2,
        &["mkfs", "uhs", "new", "--size", "15M"],
        "the smallest file system has 16M",
    );
    place.expect_failure(2, &["mkfs", "ext4", "new", "--size", "16M"], "known are uhs");
    place.expect_failure(1, &["mkfs", "uhs", "none/new", "--size", "16M"], "cannot create");
    place.expect_failure(1, &["mkfs", "uhs", "src", "--size", "16M"], "Is a directory");
    place.expect_failure(
        1,
        &["mkfs", "uhs", "/dev/null"],
        "neither a regular file nor a block device",
    );
    assert!(!place.path("new").exists());
    let odd = place.run(&["mkfs", "uhs", "new", "--size", "1Q"]);
    assert!(odd.code == Some(2) && odd.err.contains("a number with K, M, G or T"), "{}", odd.err);
}

/// A wrong name must not cost a file system.
#[test]
fn mkfs_destroys_data_only_by_force() {
    let place = TestPlace::new();
    let mkfs = ["mkfs", "uhs", "img", "--size", "16M"];
    place.expect_success(&mkfs);
    place.expect_failure(1, &mkfs, "img has a uhs file system: nothing was changed");
    let before = fs::read(place.path("img")).unwrap();
    place.expect_failure(1, &["mkfs", "uhs", "img", "--size", "32M"], "--force");
    assert!(fs::read(place.path("img")).unwrap() == before);
    place.expect_success(&["mkfs", "uhs", "img", "--force"]);
    assert!(fs::read(place.path("img")).unwrap() != before);
    place.expect_success(&["mkfs", "uhs", "img", "--force", "--size", "20M"]);
    assert_eq!(place.path("img").metadata().unwrap().len(), 20 << 20);

    // Shorter than a block, which was taken for an empty file.
    fs::write(place.path("note"), "remember").unwrap();
    place.expect_failure(
        1,
        &["mkfs", "uhs", "note", "--size", "16M"],
        "note has data: nothing was changed",
    );
    assert_eq!(fs::read_to_string(place.path("note")).unwrap(), "remember");

    let ext4 = vec![0; 1080].into_iter().chain([0x53, 0xef]).chain(vec![0; 16 << 20]);
    for (bytes, name) in [
        (ext4.collect::<Vec<u8>>(), "an ext2, ext3 or ext4 file system"),
        (vec![b'x'; 16 << 20], "data"),
    ] {
        fs::write(place.path("other"), &bytes).unwrap();
        place.expect_failure(
            1,
            &["mkfs", "uhs", "other"],
            &format!("other has {name}: nothing was changed"),
        );
        let how = format!("other is no uhs image: it has {name}");
        place.expect_failure(1, &["mount", "uhs:other", "mnt"], &how);
        assert!(fs::read(place.path("other")).unwrap() == bytes);
    }
    fs::write(place.path("zeros"), vec![0; 16 << 20]).unwrap();
    place.expect_success(&["mkfs", "uhs", "zeros"]);
}

#[test]
fn what_cannot_be_mounted_is_named_with_the_next_step() {
    let Some(place) = with_image() else { return };
    place.expect_failure(2, &["mount", "uhs:", "mnt"], "names no path: uhs:IMAGE");
    place.expect_failure(1, &["mount", "uhs:none", "mnt"], "none --size 1G`");
    place.expect_failure(
        1,
        &["mount", "uhs:src", "mnt"],
        "name an image, which `defuse mkfs` makes",
    );
    fs::write(place.path("empty"), "").unwrap();
    place.expect_failure(1, &["mount", "uhs:empty", "mnt"], "less than one block");
    fs::write(place.path("zeros"), vec![0; 16 << 20]).unwrap();
    place.expect_failure(
        1,
        &["mount", "uhs:zeros", "mnt"],
        "zeros is empty: make a file system with",
    );

    let whole = fs::read(place.path("img")).unwrap();
    File::options().write(true).open(place.path("img")).unwrap().set_len(20 << 20).unwrap();
    place.expect_failure(
        1,
        &["mount", "uhs:img", "mnt"],
        "its file system 33554432: it was cut short",
    );
    fs::write(place.path("img"), &whole).unwrap();
    // Format 2, with its checksum.
    for at in [0, 3 << 21, 7 << 21] {
        let mut block = whole[at..at + 4096].to_vec();
        block[8] = 2;
        let crc = crc32c::crc32c(&block[..4092]).to_le_bytes();
        block[4092..].copy_from_slice(&crc);
        let image = OpenOptions::new().write(true).open(place.path("img")).unwrap();
        image.write_all_at(&block, at as u64).unwrap();
    }
    place.expect_failure(1, &["mount", "uhs:img", "mnt"], "use the version of defuse that made it");
    for at in [100, (3 << 21) + 100, (7 << 21) + 100] {
        damage(&place, at);
    }
    place.expect_failure(
        1,
        &["mount", "uhs:img", "mnt"],
        "the superblock is damaged, in all copies",
    );
    place.expect_failure(8, &["fsck", "img"], "the superblock is damaged, in all copies");
    place.expect_failure(8, &["fsck", "zeros"], "has no file system of the type uhs");
    place.expect_failure(8, &["fsck", "none"], "No such file or directory");
    assert_eq!(place.run(&["fsck"]).code, Some(16));
    assert_eq!(place.run(&["fsck", "img", "--what"]).code, Some(16));
}

#[test]
fn a_second_opener_learns_which_process_has_the_image() {
    let Some(place) = with_image() else { return };
    fs::create_dir(place.path("two")).unwrap();
    place.expect_success(&["mount", "uhs:img", "mnt"]);
    let pid = place.list()[0]["pid"].as_i64().unwrap();
    let says = format!("img is in use by process {pid} (EBUSY)");
    place.expect_failure(1, &["mount", "uhs:img", "two"], &says);
    place.expect_failure(1, &["mount", "uhs:img", "two", "-o", "ro"], &says);
    place.expect_failure(8, &["fsck", "img"], &says);
    place.expect_failure(1, &["mkfs", "uhs", "img", "--force"], &says);
    // Killed, the daemon holds nothing.
    place.signal(Signal::KILL);
    place.expect_success(&["umount", "mnt"]);
    place.expect_success(&["mount", "uhs:img", "two"]);
    place.expect_success(&["umount", "two"]);
}

/// The lock of the first version of a file would be seen, too; the data must be the data of the
/// last sync.
#[test]
fn what_was_synced_survives_a_kill_of_the_daemon() {
    let Some(place) = with_image() else { return };
    place.expect_success(&["mount", "uhs:img", "mnt", "-o", "commit=0"]);
    let at = |name: String| place.path("mnt").join(name);
    for round in 0..3 {
        for n in 0..20 {
            let file = File::create(at(format!("synced-{round}-{n}"))).unwrap();
            file.write_all_at(&vec![n; 10_000], 0).unwrap();
            file.sync_all().unwrap();
            fs::write(at(format!("lost-{round}-{n}")), "x").unwrap();
        }
        place.signal(Signal::KILL);
        place.expect_success(&["umount", "mnt"]);
        clean(&place);
        place.expect_success(&["mount", "uhs:img", "mnt", "-o", "commit=0"]);
        for n in 0..20 {
            assert!(fs::read(at(format!("synced-{round}-{n}"))).unwrap() == vec![n; 10_000]);
        }
        // It came after the last sync.
        assert!(!at(format!("lost-{round}-19")).exists());
    }
    place.expect_success(&["umount", "mnt"]);
    clean(&place);
}

/// No program syncs: the changes become durable by themselves.
#[test]
fn changes_are_durable_after_the_time_of_the_option_commit() {
    let Some(place) = with_image() else { return };
    place.expect_success(&["mount", "uhs:img", "mnt", "-o", "commit=0.1"]);
    fs::write(place.path("mnt/file"), "text").unwrap();
    // Two intervals, and time for a slow machine.
    std::thread::sleep(std::time::Duration::from_secs(2));
    place.signal(Signal::KILL);
    place.expect_success(&["umount", "mnt"]);
    place.expect_success(&["mount", "uhs:img", "mnt"]);
    assert_eq!(fs::read_to_string(place.path("mnt/file")).unwrap(), "text");
    place.expect_success(&["umount", "mnt"]);
}

#[test]
fn an_image_is_used_in_a_run_and_over_a_socket_and_keeps_its_files() {
    let place = TestPlace::new();
    place.expect_success(&["mkfs", "uhs", "img", "--size", "16M"]);
    for (fork, word) in [("auto", "one"), ("deny", "two"), ("share", "three")] {
        let script = format!("echo {word} > /x/{word} && (ls /x | wc -l)");
        let run = ["run", "--fork", fork, "--mount", "/x=uhs:img", "--", "bash", "-c", &script];
        place.expect_success(&run);
    }
    let run = ["run", "--mount", "/x=uhs:img,ro", "--"];
    let out = place.expect_success(&[&run[..], &["cat", "/x/one", "/x/two", "/x/three"]].concat());
    assert_eq!(out, "one\ntwo\nthree\n");
    let said = place.run(&[&run[..], &["rm", "/x/one"]].concat());
    assert!(said.code != Some(0) && said.err.contains("Read-only file system"), "{}", said.err);
    clean(&place);

    let server = place.command(&["serve", "--foreground", "uhs:img", "socket"]).spawn();
    let mut server = server.unwrap();
    eventually("served", || place.path("socket").exists());
    let run = ["run", "--mount", "/x=socket:socket", "--"];
    place.expect_success(&[&run[..], &["mv", "/x/one", "/x/four"]].concat());
    let pid = rustix::process::Pid::from_child(&server);
    rustix::process::kill_process(pid, Signal::TERM).unwrap();
    assert!(server.wait().unwrap().success());
    clean(&place);
    let out = place.expect_success(&["run", "--mount", "/x=uhs:img", "--", "ls", "/x"]);
    assert_eq!(out, "four\nthree\ntwo\n");
}

// The run ended while its last program's connection did, and what that program had written was
// lost.
#[test]
fn what_a_program_of_a_run_has_written_is_durable_when_the_run_ends() {
    let place = TestPlace::new();
    place.expect_success(&["mkfs", "uhs", "img", "--size", "16M"]);
    for round in 0..5 {
        let script = format!("echo {round} > /x/file");
        place.expect_success(&["run", "--mount", "/x=uhs:img", "--", "bash", "-c", &script]);
        let read = ["run", "--mount", "/x=uhs:img,ro", "--", "cat", "/x/file"];
        assert_eq!(place.expect_success(&read), format!("{round}\n"));
    }
}

/// An image can be looked at without leaving a trace, by several at once.
#[test]
fn a_read_only_mount_writes_nothing_and_stays_read_only() {
    let Some(place) = with_image() else { return };
    place.expect_success(&["mount", "uhs:img", "mnt", "-o", "commit=0"]);
    let file = File::create(place.path("mnt/file")).unwrap();
    file.write_all_at(b"synced", 0).unwrap();
    file.sync_all().unwrap();
    fs::write(place.path("mnt/lost"), "x").unwrap();
    place.signal(Signal::KILL);
    drop(file);
    place.expect_success(&["umount", "mnt"]);
    let before = fs::read(place.path("img")).unwrap();
    place.expect_success(&["mount", "uhs:img", "mnt", "-o", "ro"]);
    let out = place.expect_success(&["run", "--mount", "/x=uhs:img,ro", "--", "cat", "/x/file"]);
    assert_eq!(
        (out.as_str(), &*fs::read(place.path("mnt/file")).unwrap()),
        ("synced", &b"synced"[..])
    );
    let mnt = place.path("mnt");
    let remount = |options: &str| {
        let helper = place.path("mount.fuse.defuse");
        let _ = symlink(common::PROGRAM, &helper);
        let mut mount = place.command_of(&helper, &["uhs:img", mnt.to_str().unwrap()]);
        from_output(mount.args(["-o", options]).output().unwrap())
    };
    let refused = remount("remount,rw");
    assert!(refused.code != Some(0) && refused.err.contains("without ro"), "{}", refused.err);
    assert_eq!(remount("remount,ro").code, Some(0));
    assert!(fs::write(place.path("mnt/file"), "x").is_err());
    place.expect_success(&["umount", "mnt"]);
    assert!(fs::read(place.path("img")).unwrap() == before);
}

/// A damaged image must not be written, but its readable parts are there.
#[test]
fn a_damaged_image_is_mounted_read_only_with_a_warning_until_it_is_repaired() {
    let Some(place) = with_image() else { return };
    place.expect_success(&["mount", "uhs:img", "mnt"]);
    for name in ["one", "two"] {
        fs::write(place.path("mnt").join(name), name).unwrap();
    }
    let ino = fs::metadata(place.path("mnt/two")).unwrap().ino();
    place.expect_success(&["umount", "mnt"]);
    // Without a snapshot, which a clean end leaves, the next mount reads all inodes.
    place.expect_success(&["mount", "uhs:img", "mnt"]);
    place.signal(Signal::KILL);
    place.expect_success(&["umount", "mnt"]);
    let image = fs::read(place.path("img")).unwrap();
    // Slots of the inode, by the number in their identity.
    let is_slot = |slot: &[u8]| {
        slot.starts_with(b"UHSS") && slot[4] == 1 && slot[40..48] == ino.to_le_bytes()
    };
    let slots = image.chunks(4096).enumerate().filter(|(_, slot)| is_slot(slot));
    let slots: Vec<u64> = slots.map(|(block, _)| block as u64).collect();
    assert!(!slots.is_empty());
    for block in slots {
        damage(&place, block * 4096 + 200);
    }
    let said = place.run(&["fsck", "img"]);
    assert_eq!(said.code, Some(4), "{}", said.err);
    assert!(said.out.contains(&format!("inode {ino}: damaged")), "{}", said.out);
    let json = place.run(&["fsck", "--json", "img"]);
    let json: serde_json::Value = serde_json::from_str(&json.out).unwrap();
    assert_eq!(json["clean"], false);

    let said = place.run(&["mount", "uhs:img", "mnt"]);
    assert_eq!(said.code, Some(0), "{}", said.err);
    assert!(said.err.contains("can only be read"), "{}", said.err);
    assert_eq!(fs::read_to_string(place.path("mnt/one")).unwrap(), "one");
    let refused = fs::write(place.path("mnt/one"), "x").unwrap_err();
    assert_eq!(refused.raw_os_error(), Some(rustix::io::Errno::ROFS.raw_os_error()));
    place.expect_success(&["umount", "mnt"]);

    let said = place.run(&["fsck", "--repair", "img"]);
    assert_eq!(said.code, Some(1), "{}{}", said.out, said.err);
    assert!(said.out.contains("repaired: "), "{}", said.out);
    clean(&place);
    let json: serde_json::Value =
        serde_json::from_str(&place.expect_success(&["fsck", "--repair", "--json", "img"]))
            .unwrap();
    assert_eq!(json["repairs"], serde_json::json!([]));
    place.expect_success(&["mount", "uhs:img", "mnt"]);
    assert_eq!(fs::read_to_string(place.path("mnt/one")).unwrap(), "one");
    fs::write(place.path("mnt/new"), "new").unwrap();
    place.expect_success(&["umount", "mnt"]);
}

/// Any user may have made the image.
#[test]
fn set_user_id_and_devices_of_an_image_have_no_effect_unless_requested() {
    let Some(place) = with_image() else { return };
    for (options, flags) in [("rw", "rw,nosuid,nodev"), ("suid,dev", "rw,")] {
        place.expect_success(&["mount", "uhs:img", "mnt", "-o", options]);
        let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
        let path = place.path("mnt");
        let line = mounts.lines().find(|line| line.contains(path.to_str().unwrap())).unwrap();
        let denied = line.contains("nosuid") && line.contains("nodev");
        assert_eq!((denied, line.contains(flags)), (options == "rw", true), "{line}");
        place.expect_success(&["umount", "mnt"]);
    }
}

/// An image is opened with the rights of the caller.
#[test]
fn a_user_opens_only_images_that_the_user_may_open() {
    let Some(place) = with_image() else { return };
    let program = place.install_for_all_users();
    fs::set_permissions(place.path(""), fs::Permissions::from_mode(0o755)).unwrap();
    let mut fsck = Command::new("setpriv");
    fsck.args(["--reuid", "12345", "--clear-groups", "--regid", "12345"]).arg(program);
    let said = from_output(fsck.arg("fsck").arg(place.path("img")).output().unwrap());
    assert_eq!(said.code, Some(8), "{}", said.err);
    assert!(said.err.contains("with the rights of the user who mounts it"), "{}", said.err);
}

/// The end of a server did not report that its file system could not keep the data that clients had
/// written.
#[test]
fn a_server_whose_data_the_device_does_not_take_fails_at_its_end() {
    let Some(place) = TestPlace::new_to_mount() else { return };
    for takes in [true, false] {
        let disk = TestTmpfs::mount_on(place.path("disk"), MountFlags::empty(), c"size=40m");
        place.expect_success(&["mkfs", "uhs", "disk/img", "--size", "32M"]);
        if !takes {
            // The image loses the room that it was given, and another file takes it.
            let (img, sparse) = (disk.path().join("img"), disk.path().join("sparse"));
            let copied = Command::new("cp").arg("--sparse=always").args([&img, &sparse]).status();
            assert!(copied.unwrap().success());
            fs::rename(&sparse, &img).unwrap();
            let mut rest = File::create(disk.path().join("rest")).unwrap();
            std::io::copy(&mut std::io::repeat(1), &mut rest).unwrap_err();
        }
        let mut server = place.command(&["serve", "-f", "uhs:disk/img", "socket"]);
        let server = server.stderr(Stdio::piped()).spawn().unwrap();
        eventually("the socket", || place.path("socket").exists());
        let script = "head -c 8388608 /dev/urandom > /x/file || true";
        place.expect_success(&["run", "--mount", "/x=socket:socket", "--", "sh", "-c", script]);
        kill_process(Pid::from_child(&server), Signal::TERM).unwrap();
        let end = from_output(server.wait_with_output().unwrap());
        assert_eq!(end.code, Some(if takes { 0 } else { 1 }), "{}", end.err);
        let said = "disk/img: not all changes could be made durable";
        assert_eq!(end.err.contains(said), !takes, "{}", end.err);
    }
}

/// An image of an earlier version of the format, which the tests of the crate keep as a list of the
/// bytes that are no zeros: offset (8 bytes), length (4 bytes), bytes.
fn write_earlier_image(path: &Path) {
    let kept = concat!(env!("CARGO_MANIFEST_DIR"), "/../backends/uhs/images/v1-ended.sparse");
    let kept = fs::read(kept).unwrap();
    let image = fs::File::create(path).unwrap();
    image.set_len(16 << 20).unwrap();
    let mut rest = &kept[..];
    while let Some((head, after)) = rest.split_at_checked(12) {
        let offset = u64::from_le_bytes(head[..8].try_into().unwrap());
        let len = u32::from_le_bytes(head[8..].try_into().unwrap()) as usize;
        image.write_all_at(&after[..len], offset).unwrap();
        rest = &after[len..];
    }
}

#[test]
fn an_image_of_an_earlier_version_is_upgraded_and_keeps_its_files() {
    let Some(place) = with_image() else { return };
    write_earlier_image(&place.path("earlier"));
    let said = place.run(&["fsck", "--upgrade", "earlier"]);
    assert_eq!(said.code, Some(0), "{}", said.err);
    for feature in ["padded records", "table of chunks"] {
        assert!(said.out.contains(&format!("upgraded: {feature}\n")), "{}", said.out);
    }
    let json = place.run(&["fsck", "--upgrade", "--json", "earlier"]);
    let json: serde_json::Value = serde_json::from_str(&json.out).unwrap();
    assert_eq!((&json["clean"], &json["upgrades"]), (&true.into(), &serde_json::json!([])));
    place.expect_success(&["mount", "uhs:earlier", "mnt"]);
    assert_eq!(fs::read(place.path("mnt/dir/below/small")).unwrap(), b"a few bytes");
    fs::write(place.path("mnt/new"), "new").unwrap();
    place.expect_success(&["umount", "mnt"]);
    place.expect_success(&["fsck", "earlier"]);
    // A damaged image is repaired first.
    damage(&place, 0);
    let said = place.run(&["fsck", "--upgrade", "img"]);
    assert_eq!((said.code, said.out.contains("upgraded")), (Some(4), false), "{}", said.out);
}

/// Without a root no path leads to a file: such a mount succeeded, and everything in it was
/// `ESTALE`.
#[test]
fn an_image_without_a_root_is_refused_with_the_next_step() {
    let Some(place) = with_image() else { return };
    place.expect_success(&["mount", "uhs:img", "mnt"]);
    fs::write(place.path("mnt/file"), "file").unwrap();
    place.expect_success(&["umount", "mnt"]);
    // Without a snapshot, which a clean end leaves, the next mount reads all inodes.
    place.expect_success(&["mount", "uhs:img", "mnt"]);
    place.signal(Signal::KILL);
    place.expect_success(&["umount", "mnt"]);
    let image = fs::read(place.path("img")).unwrap();
    let is_root = |slot: &[u8]| slot.starts_with(b"UHSS") && slot[40..48] == 1_u64.to_le_bytes();
    let slots = image.chunks(4096).enumerate().filter(|(_, slot)| is_root(slot));
    let slots: Vec<u64> = slots.map(|(block, _)| block as u64).collect();
    assert!(!slots.is_empty());
    slots.iter().for_each(|block| damage(&place, block * 4096 + 200));
    for command in
        [&["mount", "uhs:img", "mnt"][..], &["run", "--mount", "/x=uhs:img", "--", "true"]]
    {
        let said = place.run(command);
        assert!(said.code != Some(0), "{command:?}");
        assert!(said.err.contains("no root directory"), "{}", said.err);
        assert!(said.err.contains("defuse fsck --repair"), "{}", said.err);
    }
    assert_eq!(place.run(&["fsck", "--repair", "img"]).code, Some(1));
    place.expect_success(&["mount", "uhs:img", "mnt"]);
    // The file keeps its name if the names in the root can be read.
    let lost = fs::read_dir(place.path("mnt/lost+found")).ok().and_then(|mut found| found.next());
    let found = lost.map_or_else(|| place.path("mnt/file"), |found| found.unwrap().path());
    assert_eq!(fs::read(found).unwrap(), b"file");
    place.expect_success(&["umount", "mnt"]);
}
