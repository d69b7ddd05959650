//! Devices of a manager that applications bind.
//!
//! `DEFUSE_FULL=1` kills an application a thousand times.

#[path = "bound/attacks.rs"]
mod attacks;
mod common;
#[path = "common/load.rs"]
mod load;
#[path = "bound/managed.rs"]
mod managed;

use std::fs::{self, File};
use std::os::unix::fs::{FileExt, OpenOptionsExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use common::{TestPlace, eventually, from_output};
use load::{LoadRandom, MountLoad, data};
use managed::{BoundManager, LIMIT};
use rustix::io::Errno;
use rustix::process::Signal;
use serde_json::Value;

#[test]
fn an_application_has_a_device_in_its_process_and_others_reach_it_at_its_path() {
    let managed = BoundManager::new("", "bind = []");
    assert_eq!(managed.holder()["by"], "manager");
    assert_eq!(managed.shell("echo before >/x/one/a; cat /x/one/a"), "before\n");
    let application = managed.application("cat /y/a; echo own >/y/own; cat; cat /y/others");
    let image = managed.place.path("one");
    let busy = managed.place.run(&["fsck", image.to_str().unwrap()]);
    assert!(busy.err.contains(&format!("process {}", application.pid())), "{}", busy.err);
    eventually("the file of the application", || managed.shell("cat /x/one/own") == "own\n");
    assert_eq!(managed.shell("echo others >/x/one/others; ls /x/one"), "a\nothers\nown\n");
    let shown =
        managed.place.expect_success(&["stat", managed.place.path("socket").to_str().unwrap()]);
    let line = format!("process {} of user 0 has it", application.pid());
    assert!(shown.lines().any(|shown| shown == line), "{shown}");
    let said = application.end();
    assert_eq!((said.out.as_str(), said.code), ("before\nothers\n", Some(0)), "{}", said.err);
    managed.await_holder("manager");
    assert_eq!(managed.shell("cat /x/one/*"), "before\nothers\nown\n");
    assert!(managed.log().contains("has given it back"), "{}", managed.log());
    let mut managed = managed;
    assert_eq!(managed.end(), Some(0));
    managed.place.expect_success(&["fsck", "one"]);
}

/// Only image files had been bound: a block device has another lock, and no directory of its own.
#[test]
fn a_block_device_is_taken_over_after_a_kill_and_given_back_in_order() {
    let place = TestPlace::new();
    let Some(disk) = LoopImage::new(&place.path("disk")) else { return };
    let device = disk.0.to_str().unwrap().to_owned();
    place.expect_success(&["mkfs", "uhs", &device]);
    let mut managed = BoundManager::start_on(place, &disk.0, "", "bind = []");
    assert_eq!(managed.shell("echo before >/x/one/a; cat /x/one/a"), "before\n");
    let script = "cat /y/a; echo own >/y/own; sync /y/own; : >/y/synced; cat";
    let application = managed.application(script);
    let busy = managed.place.run(&["fsck", &device]);
    assert!(busy.err.contains(&format!("process {}", application.pid())), "{}", busy.err);
    eventually("the durable file", || managed.shell("ls /x/one").contains("synced"));
    assert_eq!(managed.shell("cat /x/one/own"), "own\n");
    application.kill();
    managed.await_holder("manager");
    assert_eq!(managed.shell("cat /x/one/*"), "before\nown\n");
    let application = managed.application("echo again >/y/again; cat");
    eventually("the second application", || managed.shell("cat /x/one/again") == "again\n");
    assert_eq!(application.end().code, Some(0));
    managed.await_holder("manager");
    assert!(managed.log().contains("has given it back"), "{}", managed.log());
    assert_eq!(managed.end(), Some(0));
    managed.place.expect_success(&["fsck", &device]);
}

/// A loop device of 64 MiB, until it is dropped.
struct LoopImage(PathBuf);

impl LoopImage {
    /// The device over a new file; `None` where there are none.
    fn new(file: &Path) -> Option<LoopImage> {
        File::create(file).unwrap().set_len(64 << 20).unwrap();
        let out = Command::new("losetup").args(["--find", "--show"]).arg(file).output();
        let Some(out) = out.ok().filter(|out| out.status.success()) else {
            let missing = !Path::new("/dev/loop-control").exists();
            println!("{}: no loop device", if missing { "not here" } else { "skipped" });
            return None;
        };
        Some(LoopImage(String::from_utf8(out.stdout).unwrap().trim().into()))
    }
}

impl Drop for LoopImage {
    fn drop(&mut self) {
        let _ = Command::new("losetup").arg("--detach").arg(&self.0).status();
    }
}

/// Names and attributes that a client knew of a device stayed as they were, whatever its
/// application did.
#[test]
fn each_side_sees_the_changes_of_the_other_at_once_and_other_devices_keep_their_caches() {
    if TestPlace::new_to_mount().is_none() {
        return;
    }
    let managed = BoundManager::new("", "bind = []");
    let mnt = managed.mount();
    // The application is a mount, too, whose daemon has the device.
    let own = managed.place.path("src");
    let source = format!("bound:{}", managed.place.path("socket").display());
    managed.place.expect_success(&["mount", "-o", "device=/one", &source, own.to_str().unwrap()]);
    managed.await_holder("application");
    let (there, here) = (mnt.join("one"), own);
    for round in 0..50_u32 {
        let (from, to) = if round % 2 == 0 { (&there, &here) } else { (&here, &there) };
        let name = format!("file{}", round % 5);
        assert_eq!(to.join(&name).exists(), round >= 5, "{round}");
        fs::write(from.join(&name), vec![b'x'; round as usize + 1]).unwrap();
        assert_eq!(fs::metadata(to.join(&name)).unwrap().len(), u64::from(round) + 1);
        assert_eq!(fs::read(to.join(&name)).unwrap().len(), round as usize + 1);
        fs::rename(from.join(&name), from.join("moved")).unwrap();
        assert!(!to.join(&name).exists() && to.join("moved").exists());
        fs::rename(to.join("moved"), to.join(&name)).unwrap();
        assert!(from.join(&name).exists() && !from.join("moved").exists());
        // Nothing comes with an open that the other side may change before it is read.
        let seen = File::open(to.join(&name)).unwrap();
        fs::write(from.join(&name), vec![b'y'; round as usize + 1]).unwrap();
        let mut byte = [0];
        seen.read_exact_at(&mut byte, round.into()).unwrap();
        assert_eq!(byte, [b'y']);
    }
    // A lock of one side is one for the other side.
    let open = |dir: &PathBuf| File::options().write(true).open(dir.join("file0")).unwrap();
    let (one, other) = (open(&there), open(&here));
    one.lock().unwrap();
    assert!(matches!(other.try_lock(), Err(fs::TryLockError::WouldBlock)));
    one.unlock().unwrap();
    other.try_lock().unwrap();
    assert!(matches!(one.try_lock(), Err(fs::TryLockError::WouldBlock)));
    drop((one, other));
    let device = |stat: &Value, number: usize, name: &str| {
        let figures = stat["devices"][number]["figures"].as_array().unwrap();
        figures.iter().find(|figure| figure["name"] == name).unwrap()["value"].as_u64().unwrap()
    };
    // The other device has pages.
    let file = mnt.join("two/file");
    fs::write(&file, vec![1; 4096]).unwrap();
    let direct = |path: &PathBuf| {
        File::options().read(true).custom_flags(libc::O_DIRECT).open(path).unwrap()
    };
    let file = direct(&file);
    // Past the kernel's cache.
    let read = |file: &File| assert!(file.read_at(&mut [0; 4096], 0).unwrap() > 0);
    (0..40).for_each(|_| read(&file));
    assert_eq!(device(&managed.stat().unwrap(), 1, "pages_files"), 1);
    let file_of_one = direct(&there.join("file0"));
    (0..40).for_each(|_| read(&file_of_one));
    assert_eq!(device(&managed.stat().unwrap(), 0, "pages_files"), 0);
    drop((file, file_of_one));
    managed.place.expect_success(&["umount", here.to_str().unwrap()]);
    managed.await_holder("manager");
    assert_eq!(fs::read_dir(&there).unwrap().count(), 5);
    managed.place.expect_success(&["umount", "mnt"]);
}

#[test]
fn open_files_stay_open_when_a_device_is_bound_and_given_back_and_nothing_is_lost() {
    if TestPlace::new_to_mount().is_none() {
        return;
    }
    let managed = BoundManager::new("", "bind = []\noptions = [\"commit=0\"]");
    let mnt = managed.mount();
    let create = |name: &str| File::create_new(mnt.join("one").join(name));
    let (file, renamed) = (create("file").unwrap(), create("renamed").unwrap());
    let number = |file: &File| std::os::unix::fs::MetadataExt::ino(&file.metadata().unwrap());
    let before = [number(&file), number(&renamed)];
    file.write_all_at(b"1", 0).unwrap();
    let application =
        managed.application("mv /y/renamed /y/now; cat; [ $(cat /y/file) = 12 ] && echo fine");
    eventually("the new name", || mnt.join("one/now").exists());
    file.write_all_at(b"2", 1).unwrap();
    // Changes that were not durable before are not lost.
    file.sync_all().unwrap_or_else(|error| panic!("{error}: {}", managed.log()));
    renamed.write_all_at(b"r", 0).unwrap();
    let said = application.end();
    assert_eq!(said.out, "fine\n", "{}", said.err);
    managed.await_holder("manager");
    file.write_all_at(b"3", 2).unwrap();
    file.sync_all().unwrap();
    // The application has given it another name, so that it is found by its number.
    renamed.write_all_at(b"s", 1).unwrap();
    renamed.sync_all().unwrap();
    assert_eq!([number(&file), number(&renamed)], before);
    assert_eq!(fs::read(mnt.join("one/file")).unwrap(), b"123");
    assert_eq!(fs::read(mnt.join("one/now")).unwrap(), b"rs");
    drop((file, renamed));
    managed.place.expect_success(&["umount", "mnt"]);
}

#[test]
fn locks_of_others_are_lost_when_the_device_goes_and_the_next_call_says_so_once() {
    if TestPlace::new_to_mount().is_none() {
        return;
    }
    let managed = BoundManager::new("", "bind = []");
    let mnt = managed.mount();
    let file = File::create(mnt.join("one/file")).unwrap();
    file.lock().unwrap();
    let application = managed.application("cat");
    let lost = file.write_all_at(b"1", 0).unwrap_err();
    assert_eq!(Errno::from_io_error(&lost), Some(Errno::IO));
    file.write_all_at(b"1", 0).unwrap();
    file.lock().unwrap();
    application.kill();
    let lost = file.try_lock();
    assert!(matches!(&lost, Err(fs::TryLockError::Error(_))), "{lost:?}");
    file.try_lock().unwrap();
    drop(file);
    managed.place.expect_success(&["umount", "mnt"]);
}

/// Ends the loads, also if the test fails meanwhile.
struct LoadStop<'a>(&'a AtomicBool);

impl Drop for LoadStop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[test]
fn kills_of_an_application_lose_nothing_durable_and_nobody_waits_longer() {
    let Some(_) = TestPlace::new_to_mount() else { return };
    let kills = if std::env::var_os("DEFUSE_FULL").is_some() { 1000 } else { 20 };
    let seed = u64::from(std::process::id()) << 20 | kills;
    println!("seed {seed}");
    let mut managed = BoundManager::new("", "bind = []");
    let mnt = managed.mount();
    let (ends, count) = (AtomicBool::new(false), AtomicU64::new(0));
    let loads = std::thread::scope(|scope| {
        let (ends, count) = (&ends, &count);
        let programs: Vec<_> = ["one", "one", "two"]
            .iter()
            .enumerate()
            .map(|(number, device)| {
                let dir = mnt.join(device).join(format!("program {number}"));
                MountLoad::start(scope, (dir, seed + number as u64), ends, count)
            })
            .collect();
        let until_the_end = LoadStop(ends);
        let mut random = LoadRandom(seed);
        for _ in 0..kills {
            // It changes the device, too, in its own process.
            let script = "while :; do echo own >/y/own; mv /y/own /y/moved; done";
            let application = managed.application(script);
            std::thread::sleep(Duration::from_micros(random.next() % 200_000));
            application.kill();
            std::thread::sleep(Duration::from_micros(random.next() % 100_000));
            assert!(programs.iter().all(|program| !program.is_finished()));
        }
        drop(until_the_end);
        programs.into_iter().map(|program| program.join().unwrap()).collect::<Vec<_>>()
    });
    for load in &loads {
        assert!(load.longest < 10 * LIMIT, "a call took {:?}", load.longest);
        assert!(!load.durable.is_empty());
        for (seed, len) in &load.durable {
            assert!(fs::read(load.path(*seed)).unwrap() == data(*seed, *len), "{seed:x}");
        }
    }
    println!("{kills} kills, {} durable files", count.load(Ordering::Relaxed));
    managed.await_holder("manager");
    managed.place.expect_success(&["umount", "mnt"]);
    assert_eq!(managed.end(), Some(0));
    for image in ["one", "two"] {
        managed.place.expect_success(&["fsck", image]);
    }
}

#[test]
fn a_stopped_application_holds_up_nobody_else_and_its_own_device_for_the_limit() {
    if TestPlace::new_to_mount().is_none() {
        return;
    }
    let managed = BoundManager::new("", "bind = []");
    let mnt = managed.mount();
    fs::write(mnt.join("two/file"), "two").unwrap();
    let application = managed.application("cat");
    fs::write(mnt.join("one/file"), "one").unwrap();
    // It stops, with the programs of its run.
    application.stop();
    std::thread::scope(|scope| {
        let waiting: Vec<_> = (0..30)
            .map(|_| {
                scope.spawn(|| {
                    let begun = Instant::now();
                    (fs::read(mnt.join("one/file")), begun.elapsed())
                })
            })
            .collect();
        while !waiting.iter().all(|one| one.is_finished()) {
            let begun = Instant::now();
            assert_eq!(fs::read(mnt.join("two/file")).unwrap(), b"two");
            fs::write(mnt.join("two/new"), "new").unwrap();
            assert!(begun.elapsed() < LIMIT, "another device waited for {:?}", begun.elapsed());
            std::thread::sleep(Duration::from_millis(20));
        }
        for one in waiting {
            let (outcome, time) = one.join().unwrap();
            let errno = Errno::from_io_error(&outcome.unwrap_err());
            assert!(errno == Some(Errno::IO), "{errno:?}");
            assert!(time < 5 * LIMIT, "{time:?}");
        }
    });
    // From now on no call waits, and the reason is shown.
    let begun = Instant::now();
    assert!(fs::read(mnt.join("one/file")).is_err() && begun.elapsed() < LIMIT);
    assert_eq!(managed.holder()["by"], "nobody");
    let why = managed.holder()["why"].to_string();
    assert!(why.contains(&format!("process {}", application.pid())), "{why}");
    // It goes on with its device, and others reach it again.
    application.signal(Signal::CONT);
    managed.await_holder("application");
    assert_eq!(fs::read(mnt.join("one/file")).unwrap(), b"one");
    let said = application.end();
    assert_eq!(said.code, Some(0), "{}", said.err);
    managed.await_holder("manager");
    assert_eq!(fs::read(mnt.join("one/file")).unwrap(), b"one");
    managed.place.expect_success(&["umount", "mnt"]);
}

#[test]
fn of_two_applications_that_ask_at_once_one_has_the_device_and_the_other_learns_which() {
    let managed = BoundManager::new("", "bind = []");
    for round in 0..5 {
        let bound = managed.bound("/one");
        let script =
            format!("echo $$ >>/y/winners; while [ ! -e end{round} ]; do sleep 0.02; done");
        let arguments = ["run", "--mount", &bound, "--", "sh", "-c", &script];
        let start = || {
            let mut command = managed.place.command(&arguments);
            command.stderr(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap()
        };
        let mut both = [start(), start()];
        let mut lost = None;
        eventually("a loser", || {
            lost = both.iter_mut().position(|one| one.try_wait().unwrap().is_some());
            lost.is_some()
        });
        let [one, other] = both;
        let (loser, winner) = if lost == Some(0) { (one, other) } else { (other, one) };
        let refused = from_output(loser.wait_with_output().unwrap());
        let pid = winner.id();
        assert_eq!(refused.code, Some(1), "{}", refused.err);
        assert!(
            refused.err.contains(&format!("process {pid} of user 0 has it")),
            "{}",
            refused.err
        );
        assert!(refused.err.contains("/one of the manager at"), "{}", refused.err);
        fs::write(managed.place.path(&format!("end{round}")), "").unwrap();
        assert_eq!(from_output(winner.wait_with_output().unwrap()).code, Some(0));
        managed.await_holder("manager");
        let winners = managed.shell("cat /x/one/winners");
        assert_eq!(winners.lines().count(), round + 1, "{winners}");
    }
}

#[test]
fn only_users_in_the_configuration_bind_and_only_devices_that_may_be() {
    let managed = BoundManager::new("admit = [65533, 65534]", "bind = [65534]");
    if !rustix::process::geteuid().is_root() {
        println!("skipped: only root becomes other users");
        return;
    }
    let (place, open) = (&managed.place, PermissionsExt::from_mode(0o1777));
    fs::set_permissions(place.path(""), open).unwrap();
    let program = place.install_for_all_users();
    let library = place.library_for_all_users().unwrap_or_else(common::find_built_library);
    let run = |uid: u32, device: &str| {
        let bound = managed.bound(device);
        let arguments =
            ["run", "--mount", &bound, "--", "sh", "-c", "echo mine >/y/mine && cat /y/mine"];
        let mut command = place.command_of(&program, &arguments);
        command.env("DEFUSE_PRELOAD_LIBRARY", &library);
        from_output(command.uid(uid).gid(uid).output().unwrap())
    };
    let refused = run(65533, "/one");
    assert!(
        refused.err.contains("user 65533 may not have it: add it to `bind`"),
        "{}",
        refused.err
    );
    for device in ["/two", "/three"] {
        let refused = run(65534, device);
        assert!(refused.err.contains("no application may have it"), "{}", refused.err);
    }
    // The device is given, and opened by the rights of the user, who has none: then the manager
    // holds the device again.
    let refused = run(65534, "/one");
    assert!(refused.err.contains("Permission denied"), "{}", refused.err);
    managed.await_holder("manager");
    assert_eq!(managed.shell("echo a >/x/one/a; cat /x/one/a; chmod 777 /x/one"), "a\n");
    fs::set_permissions(place.path("one"), PermissionsExt::from_mode(0o666)).unwrap();
    let had = run(65534, "/one");
    assert_eq!((had.out.as_str(), had.code), ("mine\n", Some(0)), "{}", had.err);
    managed.await_holder("manager");
    assert_eq!(managed.shell("stat -c %u /x/one/mine"), "65534\n");
}

#[test]
fn a_manager_that_ends_leaves_the_device_and_the_next_one_reaches_it_there() {
    let mut managed = BoundManager::new("", "bind = []");
    let application = managed.application("echo 1 >/y/a; cat; cat /y/b");
    eventually("a file", || managed.shell("cat /x/one/a") == "1\n");
    // One is killed, and one ends.
    managed.manager.as_mut().unwrap().kill().unwrap();
    managed.manager.take().unwrap().wait().unwrap();
    managed.start();
    managed.await_holder("application");
    assert_eq!(managed.shell("cat /x/one/a; echo 2 >/x/one/b"), "1\n");
    assert_eq!(managed.end(), Some(0), "{}", managed.log());
    managed.start();
    managed.await_holder("application");
    assert_eq!(managed.shell("cat /x/one/a"), "1\n");
    let said = application.end();
    assert_eq!((said.out.as_str(), said.code), ("2\n", Some(0)), "{}", said.err);
    managed.await_holder("manager");
    assert_eq!(managed.shell("cat /x/one/b"), "2\n");
}

/// The user of an image could have made the manager open another one, with the rights of root.
#[test]
fn another_image_at_the_path_of_the_device_is_not_opened() {
    let managed = BoundManager::new("", "bind = []");
    assert_eq!(managed.shell("echo right >/x/one/a; cat /x/one/a"), "right\n");
    managed.place.expect_success(&["mkfs", "uhs", "other", "--size", "64M"]);
    let application = managed.application("cat");
    let path = |name: &str| managed.place.path(name);
    fs::rename(path("one"), path("moved")).unwrap();
    fs::rename(path("other"), path("one")).unwrap();
    application.kill();
    managed.await_holder("manager");
    assert_eq!(managed.shell("cat /x/one/a"), "right\n");
    managed.place.expect_success(&["fsck", "one"]);
    let busy = managed.place.run(&["fsck", "moved"]);
    assert!(busy.err.contains("EBUSY"), "{}", busy.err);
}
